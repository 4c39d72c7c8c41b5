// A pinned step stays, by whichever way it would go and whenever the pin comes.
#include "ckpt/retention/pin.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "ckpt/persist/save.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/label_store.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/posix_backend.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
using cairn::testing::TempDir;
namespace fs = std::filesystem;

namespace {

/// A disk on which something happens before a call of which names change or are listed.
class EventfulDisk final : public PosixBackend {
 public:
  std::function<void()> before;
  int64_t calls = 0, at = -1;

  Status rename(const fs::path& from, const fs::path& to) override {
    count();
    return PosixBackend::rename(from, to);
  }
  Result<std::vector<DirEntry>> list(const fs::path& path) override {
    count();
    return PosixBackend::list(path);
  }
  Status remove_file(const fs::path& path) override {
    count();
    return PosixBackend::remove_file(path);
  }

 private:
  void count() {
    if (calls++ == at) std::exchange(before, {})();
  }
};

void add_steps(IoBackend& io, const fs::path& dir) {
  const std::vector<TensorSpec> tensors = {{"a", "weight", DType::kF32, {30}, 1}};
  for (const int64_t step : {10, 20})
    REQUIRE(save(io, dir, make_state(step, static_cast<uint64_t>(step), 1, tensors)).ok());
}

bool is_whole(IoBackend& io, const fs::path& dir, int64_t step) { return look_at_checkpoint(io, dir, step).complete; }

}  // namespace

TEST_SUITE("ckpt/retention/pin") {
  TEST_CASE("a pinned step stays under retention and removal, and goes once the pin has gone") {
    const TempDir temp;
    PosixBackend disk;
    add_steps(disk, temp.path);
    auto pin = Pin::make(disk, temp.path, 10, this_writer());
    REQUIRE_OK(pin);
    const auto kept = apply_retention(disk, temp.path, {.keep_last = 1}, this_writer());
    REQUIRE_OK(kept);
    CHECK(kept.value().removed.empty());
    CHECK(kept.value().needed == std::vector<int64_t>{10});
    const Status refused = remove_checkpoint(disk, temp.path, 10, this_writer());
    CHECK(refused.error().code == ErrorCode::kUnavailable);
    std::vector<Fate> fates = {{10, false, "no rule keeps it"}};
    spare_referenced(disk, temp.path, fates);
    CHECK(fates[0].stays);
    CHECK(fates[0].why.find("reads it") != std::string::npos);
    const auto cleaned = clean_leftovers(disk, temp.path);  // of a living process
    REQUIRE_OK(cleaned);
    CHECK(cleaned.value().removed.empty());
    CHECK(is_whole(disk, temp.path, 10));
    pin.value().reset();
    CHECK(apply_retention(disk, temp.path, {.keep_last = 1}, this_writer()).value().removed ==
          std::vector<int64_t>{10});
    CHECK(list_names(disk, temp.path).value().leftovers.empty());
  }

  TEST_CASE("a pin of a dead process counts for nothing, and the next start removes it") {
    const TempDir temp;
    PosixBackend disk;
    add_steps(disk, temp.path);
    WriterId dead = this_writer();
    dead.start += 1;  // another process had this number
    auto pin = Pin::make(disk, temp.path, 10, dead);
    REQUIRE_OK(pin);
    CHECK(apply_retention(disk, temp.path, {.keep_last = 1}, this_writer()).value().removed ==
          std::vector<int64_t>{10});
    CHECK(clean_leftovers(disk, temp.path).value().removed.size() == 1);
    CHECK(list_names(disk, temp.path).value().leftovers.empty());
  }

  TEST_CASE("a way back moves a pinned step away") {
    const TempDir temp, abandoned;
    PosixBackend disk;
    add_steps(disk, temp.path);
    auto pin = Pin::make(disk, temp.path, 10, this_writer());
    REQUIRE_OK(pin);
    const auto moved = abandon_steps(disk, temp.path, abandoned.path, 0, this_writer());
    REQUIRE_OK(moved);
    CHECK(!is_whole(disk, temp.path, 10));
    CHECK(std::filesystem::exists(abandoned.path / (step_dir_name(10) + "-1")));
  }

  TEST_CASE("a pin that comes at any moment of a removal either keeps the step or finds it gone") {
    int64_t kept = 0, gone = 0;
    for (int64_t at = 0;; ++at) {
      CAPTURE(at);
      const TempDir temp;
      EventfulDisk disk;
      add_steps(disk, temp.path);
      std::unique_ptr<Pin> pin;
      bool seen = false;
      disk.calls = 0;
      disk.at = at;
      disk.before = [&] {
        auto made = Pin::make(disk, temp.path, 10, this_writer());
        REQUIRE_OK(made);
        pin = std::move(made).value();
        seen = is_whole(disk, temp.path, 10);
      };
      const Status removed = remove_checkpoint(disk, temp.path, 10, this_writer());
      if (!pin) break;
      CHECK((removed.ok() || removed.error().code == ErrorCode::kUnavailable));
      CHECK(is_whole(disk, temp.path, 10) == !removed.ok());
      if (seen) CHECK(is_whole(disk, temp.path, 10));
      (seen ? kept : gone) += 1;
    }
    CHECK(kept > 0);
    CHECK(gone > 0);
  }
}
