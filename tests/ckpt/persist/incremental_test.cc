// Shards that have not changed are references to an earlier step, which then is not removed.
#include "ckpt/persist/incremental.h"

#include <doctest/doctest.h>

#include <functional>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

const fs::path kDir = "/run/checkpoints";
const WriterId kWriter{"test", 1, 1, 2};

/// The tensors of seed 1, those of which `changes` says so with other contents.
TestState state_at(int64_t step, const std::function<bool(const TensorSpec&)>& changes) {
  TestState state = make_state(step, 1);
  const TestState other = make_state(step, static_cast<uint64_t>(1000 + step));
  const std::vector<TensorSpec> specs = small_specs();
  size_t box = 0;
  for (size_t t = 0; t < specs.size(); ++t) {
    if (changes(specs[t])) state.tensors[t] = other.tensors[t];
    for (int64_t c = 0; c < specs[t].cuts; ++c, ++box) {
      if (changes(specs[t])) std::copy(other.boxes[box].begin(), other.boxes[box].end(), state.boxes[box].begin());
    }
  }
  return state;
}

bool moments(const TensorSpec& spec) { return spec.kind != "weight"; }
bool all(const TensorSpec&) { return true; }

SaveOptions on(const Manifest& base, SaveOptions options = small_options()) {
  options.base = &base;
  return options;
}

/// Waits for the n-th call of an I/O backend and does something else then: a second process.
class Meanwhile final : public IoBackend {
 public:
  Meanwhile(IoBackend& io, int64_t call, std::function<void()> what) : io_(io), call_(call), what_(std::move(what)) {}
  bool happened() const { return count_ > call_; }
  std::string_view name() const override { return io_.name(); }
  Result<std::unique_ptr<IoFile>> create(const fs::path& p, int64_t n) override { return next().create(p, n); }
  Result<std::unique_ptr<IoFile>> open(const fs::path& p) override { return next().open(p); }
  Status make_dir(const fs::path& p) override { return next().make_dir(p); }
  Status rename(const fs::path& a, const fs::path& b) override { return next().rename(a, b); }
  Status exchange(const fs::path& a, const fs::path& b) override { return next().exchange(a, b); }
  Status sync_dir(const fs::path& p) override { return next().sync_dir(p); }
  Status remove_file(const fs::path& p) override { return next().remove_file(p); }
  Status remove_dir(const fs::path& p) override { return next().remove_dir(p); }
  Result<std::vector<DirEntry>> list(const fs::path& p) override { return next().list(p); }
  Result<FileStat> stat(const fs::path& p) override { return next().stat(p); }
  Result<int64_t> free_bytes(const fs::path& p) override { return next().free_bytes(p); }

 private:
  IoBackend& next() {
    if (count_++ == call_) what_();
    return io_;
  }
  IoBackend& io_;
  int64_t call_, count_ = 0;
  std::function<void()> what_;
};

}  // namespace

TEST_SUITE("ckpt/persist/incremental") {
  TEST_CASE("an incremental save writes no unchanged shard again, over any number of steps, and all of it reads") {
    for (const Codec codec : {Codec::kRaw, Codec::kShuffleZstd}) {
      MemoryBackend disk;
      SaveOptions options = small_options();
      options.codec = codec;
      const TestState first = state_at(1, moments), second = state_at(2, moments), third = state_at(3, moments);
      const Result<SaveReport> a = save(disk, kDir, first, options);
      REQUIRE(a.ok());
      CHECK(a.value().referenced_bytes == 0);
      const Result<SaveReport> b = save(disk, kDir, second, on(a.value().manifest, options));
      REQUIRE_OK(b);
      const Result<SaveReport> c = save(disk, kDir, third, on(b.value().manifest, options));
      REQUIRE(c.ok());
      for (const auto* saved : {&b, &c}) {
        const SaveReport& report = saved->value();
        CHECK(report.referenced_bytes > 0);
        CHECK(report.referenced_bytes + report.payload_bytes == a.value().payload_bytes);
        for (const FileEntry& file : report.manifest.files) CHECK((file.step == -1 || file.step == 1));  // never 2
        CHECK(verify_checkpoint(disk, report.dir).value().whole());
      }
      CHECK(compare(disk, a.value().dir, first) == "");
      CHECK(compare(disk, b.value().dir, second) == "");
      CHECK(compare(disk, c.value().dir, third) == "");
      CHECK(announced_references(disk, kDir).value() == std::set<int64_t>{1});
    }
  }

  TEST_CASE("coded and raw saves can refer to each other") {
    for (const bool coded_first : {false, true}) {
      MemoryBackend disk;
      const std::vector<TensorSpec> specs = {{"a", "weight", DType::kF32, {300, 71}, 2},
                                             {"b", "exp_avg", DType::kF32, {300, 71}, 1}};
      TestState first = make_state(1, 1, 2, specs), second = make_state(2, 1, 2, specs);
      second.boxes[2][7] ^= std::byte{1};
      second.tensors[1].assign(second.boxes[2].begin(), second.boxes[2].end());
      SaveOptions raw = small_options(), coded = small_options();
      coded.codec = Codec::kShuffleZstd;
      const Result<SaveReport> a = save(disk, kDir, first, coded_first ? coded : raw);
      REQUIRE(a.ok());
      const Result<SaveReport> b = save(disk, kDir, second, on(a.value().manifest, coded_first ? raw : coded));
      REQUIRE(b.ok());
      CHECK(b.value().referenced_bytes == 300 * 71 * 4);
      CHECK(compare(disk, b.value().dir, second) == "");
    }
  }

  TEST_CASE("a later step, little that is unchanged, other boxes: all is written") {
    MemoryBackend disk;
    const TestState first = state_at(5, moments);
    const Result<SaveReport> a = save(disk, kDir, first);
    REQUIRE(a.ok());
    CHECK(save(disk, kDir, state_at(4, moments), on(a.value().manifest)).value().referenced_bytes == 0);
    CHECK(save(disk, kDir, state_at(6, all), on(a.value().manifest)).value().referenced_bytes == 0);
    SaveOptions much = on(a.value().manifest);
    much.base_min_share = 0.9;
    CHECK(save(disk, kDir, state_at(7, moments), much).value().referenced_bytes == 0);
    std::vector<TensorSpec> specs = small_specs();
    for (TensorSpec& spec : specs) spec.cuts = 1;
    const TestState whole = make_state(8, 1, 2, specs);
    const Result<SaveReport> b = save(disk, kDir, whole, on(a.value().manifest));
    REQUIRE(b.ok());
    CHECK(compare(disk, b.value().dir, whole) == "");
    CHECK(announced_references(disk, kDir).value().size() <= 1);
  }

  TEST_CASE("a step that others refer to is not removed until they are") {
    MemoryBackend disk;
    const TestState first = state_at(1, moments), second = state_at(2, moments);
    const Result<SaveReport> a = save(disk, kDir, first);
    REQUIRE(save(disk, kDir, second, on(a.value().manifest)).ok());
    const Status removed = remove_checkpoint(disk, kDir, 1, kWriter);
    REQUIRE(!removed.ok());
    CHECK(removed.error().code == ErrorCode::kUnavailable);
    CHECK(removed.error().message.find("step-00000001") != std::string::npos);
    const Result<RetentionReport> kept = apply_retention(disk, kDir, {.keep_last = 1}, kWriter);
    REQUIRE(kept.ok());
    CHECK(kept.value().removed.empty());
    CHECK(kept.value().problems.empty());
    CHECK(compare(disk, kDir / "step-00000002", second) == "");
    CHECK(kept.value().needed.empty());  // the rules themselves keep it
    // What is announced and nothing more is known of keeps it too, and is told.
    REQUIRE(save(disk, kDir, state_at(3, all)).ok());
    std::vector<std::byte>& manifest = disk.bytes_of(kDir / "step-00000002" / kManifestName);
    const std::vector<std::byte> whole = manifest;
    const std::string_view text(reinterpret_cast<const char*>(manifest.data()), manifest.size());
    manifest[text.find("\"version\":1") + 10] = std::byte{'2'};
    const RetentionReport newer = apply_retention(disk, kDir, {.keep_last = 1}, kWriter).value();
    CHECK(newer.removed.empty());
    CHECK(newer.needed == std::vector<int64_t>{1});
    // The full one frees both at once, the one that refers first.
    disk.bytes_of(kDir / "step-00000002" / kManifestName) = whole;
    CHECK(apply_retention(disk, kDir, {.keep_last = 1}, kWriter).value().removed == std::vector<int64_t>{1, 2});
    CHECK(list_checkpoints(disk, kDir).value().checkpoints.size() == 1);
  }

  TEST_CASE("a step that others refer to is not replaced, unless those are damaged") {
    MemoryBackend disk;
    const TestState first = state_at(1, moments), second = state_at(2, moments);
    const Result<SaveReport> a = save(disk, kDir, first);
    REQUIRE(save(disk, kDir, second, on(a.value().manifest)).ok());
    SaveOptions replacing = small_options();
    replacing.replace_existing = true;
    const Result<SaveReport> refused = save(disk, kDir, state_at(1, all), replacing);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kInvalidInput);
    CHECK_MESSAGE(refused.error().message.find("step 2 refers to its files") != std::string::npos,
                  refused.error().message);
    CHECK(compare(disk, kDir / "step-00000001", first) == "");
    CHECK(compare(disk, kDir / "step-00000002", second) == "");
    disk.bytes_of(kDir / "step-00000002" / kManifestName)[200] ^= std::byte{1};
    CHECK(save(disk, kDir, state_at(1, all), replacing).ok());
  }

  TEST_CASE("a base that is gone or hurt makes the checkpoint damaged, by name") {
    MemoryBackend disk;
    const Result<SaveReport> a = save(disk, kDir, state_at(1, moments));
    const Result<SaveReport> b = save(disk, kDir, state_at(2, moments), on(a.value().manifest));
    REQUIRE(b.ok());
    const ShardEntry* referenced = nullptr;
    for (const ShardEntry& shard : b.value().manifest.shards) {
      if (b.value().manifest.files[static_cast<size_t>(shard.file)].step == 1) referenced = &shard;
    }
    REQUIRE(referenced != nullptr);
    const FileEntry& file = b.value().manifest.files[static_cast<size_t>(referenced->file)];
    disk.bytes_of(kDir / "step-00000001" / file.name)[static_cast<size_t>(referenced->offset)] ^= std::byte{1};
    const VerifyReport checked = verify_checkpoint(disk, b.value().dir).value();
    REQUIRE(checked.damages.size() == 1);
    CHECK(checked.damages[0].message.find("../step-00000001/" + file.name) != std::string::npos);
    CHECK(compare(disk, b.value().dir, state_at(2, moments)).find("../step-00000001/") != std::string::npos);
    REQUIRE(remove_tree(disk, kDir / "step-00000001").ok());
    const Catalog catalog = list_checkpoints(disk, kDir).value();
    REQUIRE(catalog.checkpoints.size() == 1);
    CHECK(!catalog.checkpoints[0].complete);
    CHECK(catalog.checkpoints[0].problem.find("step-00000001") != std::string::npos);
  }

  TEST_CASE("a base that goes before or while a save refers to it: the save writes all") {
    MemoryBackend start;
    const TestState second = state_at(2, moments);
    const Result<SaveReport> a = save(start, kDir, state_at(1, moments));
    REQUIRE(a.ok());
    bool happened = true;
    int64_t full = 0, refers = 0;
    for (int64_t call = 0; happened; ++call) {  // any call of the save: another process removes the base just before
      CAPTURE(call);
      const auto disk = start.clone();
      Meanwhile io(*disk, call, [&] { ignore(remove_checkpoint(*disk, kDir, 1, kWriter), "refused or not"); });
      const Result<SaveReport> b = save(io, kDir, second, on(a.value().manifest));
      happened = io.happened();
      REQUIRE_OK(b);
      CHECK(compare(*disk, b.value().dir, second) == "");
      (b.value().referenced_bytes > 0 ? refers : full) += 1;
      CHECK(disk->list(kDir).value().size() == (b.value().referenced_bytes > 0 || !happened ? 2 : 1));
    }
    CHECK(full > 0);
    CHECK(refers > 1);
  }

  TEST_CASE("a save at any call of a removal: the base stays, or the save writes all") {
    MemoryBackend start;
    const TestState second = state_at(2, moments);
    const Result<SaveReport> a = save(start, kDir, state_at(1, moments));
    REQUIRE(a.ok());
    bool happened = true;
    int64_t full = 0, refers = 0;
    for (int64_t call = 0; happened; ++call) {
      CAPTURE(call);
      const auto disk = start.clone();
      std::optional<Result<SaveReport>> b;
      Meanwhile io(*disk, call, [&] { b = save(*disk, kDir, second, on(a.value().manifest)); });
      ignore(remove_checkpoint(io, kDir, 1, kWriter), "refused or not");
      happened = io.happened();
      if (!happened) break;
      REQUIRE(b->ok());
      CHECK(compare(*disk, b->value().dir, second) == "");
      (b->value().referenced_bytes > 0 ? refers : full) += 1;
    }
    CHECK(full > 0);
    CHECK(refers > 0);
  }

  TEST_CASE("a removal killed at any call while a checkpoint refers to the step leaves it, or it is put back") {
    MemoryBackend start;
    const TestState first = state_at(1, moments), second = state_at(2, moments);
    const Result<SaveReport> a = save(start, kDir, first);
    REQUIRE(a.ok());
    bool fired = true;
    for (int64_t n = 0; fired; ++n) {
      CAPTURE(n);
      const auto disk = start.clone();
      FaultBackend io(*disk, FaultPlan::stop_at_call(n));
      bool saved = false;
      // The save commits between the removal's first look and its rename: the only moment where both go on.
      Meanwhile late(io, 4, [&] { saved = save(*disk, kDir, second, on(a.value().manifest)).ok(); });
      ignore(remove_checkpoint(late, kDir, 1, kWriter), "killed");
      fired = io.fired();
      if (!saved) continue;
      disk->power_cycle(1);
      REQUIRE(clean_leftovers(*disk, kDir, [](const WriterId&) { return false; }).ok());
      CHECK(compare(*disk, kDir / "step-00000002", second) == "");
    }
  }

  TEST_CASE("an incremental save cut off at any I/O call leaves the old checkpoint or the new one") {
    MemoryBackend start;
    const TestState first = state_at(1, moments), second = state_at(2, moments);
    const Result<SaveReport> a = save(start, kDir, first);
    REQUIRE(a.ok());
    bool fired = true;
    int64_t kept_old = 0, got_new = 0;
    for (int64_t n = 0; fired; ++n) {
      const auto disk = start.clone();
      FaultBackend io(*disk, FaultPlan::stop_at_call(n, static_cast<uint64_t>(n)));
      const Result<SaveReport> saved = save(io, kDir, second, on(a.value().manifest));
      fired = io.fired();
      for (uint64_t seed = 0; seed < 6; ++seed) {
        CAPTURE(n);
        CAPTURE(seed);
        const auto after = disk->clone();
        after->power_cycle(seed);
        REQUIRE(clean_leftovers(*after, kDir, [](const WriterId&) { return false; }).ok());
        const Result<CheckpointInfo> found = newest_complete(*after, kDir);
        REQUIRE(found.ok());
        CHECK(compare(*after, kDir / "step-00000001", first) == "");
        if (found.value().step == 2) {
          ++got_new;
          CHECK(compare(*after, found.value().dir, second) == "");
        } else {
          ++kept_old;
          CHECK(!saved.ok());
        }
      }
    }
    CHECK(kept_old > 50);
    CHECK(got_new >= 6);
  }
}
