// Policy, copies to a directory and back, and what interrupts and damages them. (S3: tests/tools/copy_test.py.)
#include "ckpt/mirror/mirror.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>

#include "ckpt/format/names.h"
#include "ckpt/mirror/placed_step.h"
#include "ckpt/persist/read.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

using Steps = std::vector<int64_t>;

std::unique_ptr<Place> directory(const fs::path& path) {
  Result<std::unique_ptr<Place>> place = open_place({.path = path.string()});
  REQUIRE(place.ok());
  return std::move(place).value();
}

bool whole(const fs::path& dir) {
  PosixBackend io;
  const Result<VerifyReport> report = verify_checkpoint(io, dir);
  return report.ok() && report.value().whole();
}

std::string bytes_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void put_bytes(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

void flip_middle(const fs::path& path) {
  std::string bytes = bytes_of(path);
  bytes[bytes.size() / 2] ^= 1;
  put_bytes(path, bytes);
}

void check_same(const fs::path& a, const fs::path& b) {
  for (const auto& entry : fs::directory_iterator(a)) {
    CAPTURE(entry.path().string());
    CHECK(bytes_of(entry.path()) == bytes_of(b / entry.path().filename()));
  }
}

/// An incremental save: its weights are those of `base`.
Manifest save_on(IoBackend& io, const fs::path& dir, int64_t step, const Manifest& base) {
  SaveOptions options = small_options();
  options.base = &base;
  const Result<SaveReport> saved = save(io, dir, cold_state(step), options);
  REQUIRE(saved.ok());
  REQUIRE(saved.value().referenced_bytes > 0);
  return saved.value().manifest;
}

/// Steps 10 and 40, which refers to it, are at the place; here are 10, archived since, and 50.
void copy_then_archive(PosixBackend& io, const fs::path& here, Place& place) {
  const Manifest ten = save(io, here, cold_state(10)).value().manifest;
  save_on(io, here, 40, ten);
  for (const int64_t step : {10, 40}) REQUIRE(copy_checkpoint(place, io, here / step_dir_name(step)).ok());
  for (const int64_t step : {40, 10}) REQUIRE(remove_checkpoint(io, here, step, this_writer()).ok());
  SaveOptions archived = small_options();
  archived.codec = Codec::kShuffleZstd;
  save(io, here, cold_state(10), archived).value();
  save(io, here, cold_state(50)).value();
}

/// A process that has ended: its number and start time name a dead writer on this host.
WriterId dead_writer() {
  WriterId writer = this_writer();
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(0);
  ::waitpid(pid, nullptr, 0);
  writer.pid = pid;
  writer.start = 1;
  return writer;
}

/// A place that damages what is read back, as a disk or a store can that says all is well.
class LyingPlace final : public Place {
 public:
  LyingPlace(Place& inner, int64_t lies) : inner_(inner), lies_(lies) {}
  std::string describe() const override { return inner_.describe(); }
  Result<std::vector<PlacedStep>> list() override { return inner_.list(); }
  Status begin(int64_t step) override { return inner_.begin(step); }
  Result<PutReport> put(int64_t step, SourceFile& source, const Traffic& traffic) override {
    ++puts;
    return inner_.put(step, source, traffic);
  }
  Status discard(int64_t step, const std::string& name) override {
    ++discards;
    return inner_.discard(step, name);
  }
  Status commit(int64_t step, SourceFile& manifest, const Traffic& traffic) override {
    ++commits;
    return inner_.commit(step, manifest, traffic);
  }
  Status read(Of of, int64_t step, const std::string& name, int64_t offset, const ByteSink& sink,
              const Traffic& traffic) override {
    names_read.insert(name);
    if (away) return Error{ErrorCode::kUnavailable, "the place is away"};
    if (no_manifest && of == Of::kComplete && name == kManifestName) return Error{ErrorCode::kIo, "the disk fails"};
    bool lie = lies_ > 0 && name != kManifestName;
    if (lie) --lies_;
    return inner_.read(
        of, step, name, offset,
        [&](std::span<const std::byte> bytes) -> Status {
          if (!lie) return sink(bytes);
          lie = false;
          std::vector<std::byte> other(bytes.begin(), bytes.end());
          other[other.size() / 2] ^= std::byte{1};
          return sink(other);
        },
        traffic);
  }
  Status remove(int64_t step) override { return inner_.remove(step); }
  Result<std::vector<std::string>> tidy(std::optional<int64_t> keep) override { return inner_.tidy(keep); }
  Result<std::optional<std::string>> read_note(const std::string& name) override { return inner_.read_note(name); }
  Status write_note(const std::string& name, const std::string& text) override { return inner_.write_note(name, text); }

  int64_t puts = 0, discards = 0, commits = 0;
  bool no_manifest = false;  // of complete steps
  bool away = false;
  std::set<std::string> names_read;

 private:
  Place& inner_;
  int64_t lies_;
};

}  // namespace

TEST_SUITE("ckpt/mirror/mirror") {
  TEST_CASE("retention at a place: the newest n, and the oldest of each window for ever") {
    CHECK(steps_to_remove({10, 20, 30}, {}).empty());
    CHECK(steps_to_remove({10, 20, 30}, {.keep_last = 2}) == Steps{10});
    CHECK(steps_to_remove({10, 20, 30}, {.keep_last = 5}).empty());
    CHECK(steps_to_remove({10, 20, 100, 110, 200, 210, 220}, {.keep_last = 2, .keep_every = 100}) == Steps{20, 110});
  }

  TEST_CASE("the mirror's next step: the newest that is missing, one a window, and nothing that would not stay") {
    CHECK(next_due({10, 20, 30}, {}, {}, false) == 30);
    CHECK(next_due({10, 20, 30}, {30}, {}, false) == 20);  // older ones follow while they are there
    CHECK(next_due({10, 20, 30}, {10, 20, 30}, {}, false) == std::nullopt);
    CHECK(next_due({10, 20, 30}, {30}, {.keep_last = 1}, false) == std::nullopt);
    CHECK(next_due({}, {30}, {}, true) == std::nullopt);
    const MirrorPolicy windows{.every_steps = 100};
    CHECK(next_due({110, 120}, {90}, windows, false) == 120);
    CHECK(next_due({110, 120, 130}, {90, 120}, windows, false) == std::nullopt);
    CHECK(next_due({110, 120, 130}, {90, 120}, windows, true) == 130);  // the last of the run goes in any case
    CHECK(next_due({110, 120, 130}, {90, 130}, windows, true) == std::nullopt);
  }

  TEST_CASE("a run that went back is copied on: what the place has from before does not count") {
    CHECK(next_due({10, 20, 28}, {30}, {.keep_last = 1}, true) == 28);
    CHECK(next_due({10, 20, 28}, {30}, {.keep_last = 1}, false) == 28);
    CHECK(next_due({20, 25}, {20, 30, 40}, {.keep_last = 2}, false) == 25);
    CHECK(next_due({110, 120}, {90, 130}, {.every_steps = 100}, false) == 120);
    CHECK(next_due({20, 40}, {20, 30, 40}, {.keep_last = 1}, true) == std::nullopt);
    cairn::testing::TempDir temp("mirror-back");
    PosixBackend io;
    const fs::path here = temp.path / "run", there = temp.path / "place";
    const auto place = directory(there);
    for (const int64_t step : {24, 30}) save(io, there, make_state(step, 1)).value();
    save(io, here, make_state(28, 2)).value();
    Mirror mirror(*place, io, here, temp.path / "pins", {.keep_last = 1}, {});
    const MirrorReport report = mirror.copy_next(true).value().value();
    CHECK(report.copy.step == 28);
    CHECK(report.removed == Steps{24});
    const std::vector<std::string> notices = mirror.take_notices();
    REQUIRE(notices.size() == 1);
    CHECK(notices[0].find("has step 30, from before this run went back; here the newest is 28") != std::string::npos);
    CHECK(!mirror.copy_next(true).value());
    CHECK(mirror.take_notices().empty());
    save(io, here, make_state(32, 2)).value();  // past it
    CHECK(mirror.copy_next(true).value()->removed == Steps{30, 28});
    CHECK(mirror.take_notices().empty());
  }

  TEST_CASE("a copy in a directory is a checkpoint like the first, and comes back as it was") {
    cairn::testing::TempDir temp("mirror-copy");
    PosixBackend io;
    const fs::path here = temp.path / "run", there = temp.path / "far" / "place", back = temp.path / "back";
    save(io, here, make_state(12, 1)).value();
    const auto place = directory(there);
    CHECK(place->list().value().empty());
    const CopyReport copied = copy_checkpoint(*place, io, here / step_dir_name(12)).value();
    CHECK(copied.sent_bytes == copied.bytes);
    CHECK(whole(there / step_dir_name(12)));
    check_same(here / step_dir_name(12), there / step_dir_name(12));
    CHECK(copy_checkpoint(*place, io, here / step_dir_name(12)).value().was_there);

    const std::vector<PlacedStep> steps = place->list().value();
    REQUIRE(steps.size() == 1);
    CHECK(steps[0].bytes == copied.bytes);
    const CopyReport fetched = fetch_checkpoint(*place, io, steps[0], back).value();
    CHECK(fetched.dir == back / step_dir_name(12));
    CHECK(whole(fetched.dir));
    CHECK(fetch_checkpoint(*place, io, steps[0], back).value().was_there);
    // Another checkpoint of that number is not overwritten.
    save(io, temp.path / "other", make_state(12, 2)).value();
    CHECK(fetch_checkpoint(*place, io, steps[0], temp.path / "other").error().code == ErrorCode::kInvalidInput);
    // A run that went back and did step 12 anew: the copy is replaced.
    CHECK(!copy_checkpoint(*place, io, temp.path / "other" / step_dir_name(12)).value().was_there);
    check_same(temp.path / "other" / step_dir_name(12), there / step_dir_name(12));
    CHECK(place->tidy(std::nullopt).value().empty());
  }

  TEST_CASE("a step at a place is looked at by its manifest and sizes, and no payload is read") {
    cairn::testing::TempDir temp("mirror-look");
    PosixBackend io;
    const fs::path there = temp.path / "place";
    const Manifest ten = save(io, there, cold_state(10)).value().manifest;
    save_on(io, there, 40, ten);
    const auto inner = directory(there);
    LyingPlace place(*inner, 0);
    const std::vector<PlacedStep> steps = inner->list().value();
    REQUIRE(steps.size() == 2);
    const auto problem = [&](const std::vector<PlacedStep>& all, size_t k) {
      const Result<PlacedLook> look = look_at_placed(place, all, all[k]);
      REQUIRE_OK(look);
      return look.value().problem;
    };
    const auto has = [](const std::string& text, const std::string& part) { return text.find(part) != text.npos; };
    for (size_t k = 0; k < 2; ++k) {
      const PlacedLook look = look_at_placed(place, steps, steps[k]).value();
      CHECK(look.problem.empty());
      CHECK(look.manifest.value() == read_manifest(io, there / step_dir_name(steps[k].step)).value());
    }
    // Files that are short or missing, its own and those that it refers to.
    for (const PlacedFile& file : steps[0].files) {
      if (!file.name.ends_with(".h5")) continue;
      CAPTURE(file.name);
      std::vector<PlacedStep> other = steps;
      const auto at = [&] { return std::ranges::find(other[0].files, file.name, &PlacedFile::name); };
      --at()->bytes;
      CHECK(has(problem(other, 0), fmt::format("/step-00000010/{}: {} bytes, the manifest has {}", file.name,
                                               file.bytes - 1, file.bytes)));
      other[0].files.erase(at());
      CHECK(has(problem(other, 0), "/step-00000010/" + file.name + " is not there"));
    }
    const std::vector<PlacedStep> alone = {steps[1]};
    CHECK(has(problem(alone, 0), "/step-00000010/"));
    CHECK(has(problem(alone, 0), " is not there"));
    // Without its manifest, with another step's, with one that does not hold, and with a place that is away.
    std::vector<PlacedStep> bare = steps;
    std::erase_if(bare[1].files, [](const PlacedFile& file) { return file.name == kManifestName; });
    CHECK(has(problem(bare, 1), "manifest.json is not there: a copy at work, or the rest of one"));
    for (const std::string_view name : {kManifestName, kTableName})
      fs::copy_file(there / step_dir_name(10) / name, there / step_dir_name(40) / name,
                    fs::copy_options::overwrite_existing);
    CHECK(has(problem(steps, 1), "is of step 10"));
    flip_middle(there / step_dir_name(40) / kManifestName);
    CHECK(has(problem(steps, 1), "manifest.json"));
    CHECK(place.names_read == std::set<std::string>{std::string(kManifestName), std::string(kTableName)});
    place.away = true;
    CHECK(look_at_placed(place, steps, steps[0]).error().code == ErrorCode::kUnavailable);
  }

  TEST_CASE("parts that an S3 store does not take are refused before it is asked for anything") {
    for (const int64_t bytes : {int64_t{0}, kMinPartBytes - 1, kMaxPartBytes + 1}) {
      const Result<std::unique_ptr<Place>> place = open_place({.path = "s3://bucket/prefix", .part_bytes = bytes});
      REQUIRE(!place.ok());
      CHECK(place.error().code == ErrorCode::kInvalidInput);
      CHECK(place.error().message.find(fmt::format("parts of {} bytes (--part-size): an S3 store takes 5MiB to 5GiB",
                                                   bytes)) != std::string::npos);
      CHECK(open_place({.path = "/anywhere", .part_bytes = bytes}).ok());
    }
    CHECK(is_store_address("s3://b/p"));
    CHECK(is_store_address("s3:/b"));
    CHECK(is_store_address("gs://b"));
    CHECK(!is_store_address("./s3:b"));
    CHECK(!is_store_address("runs/mine"));
  }

  TEST_CASE("a copy resumes from what a dead one left, wherever it was cut, and sends only the rest") {
    cairn::testing::TempDir temp("mirror-resume");
    PosixBackend io;
    const fs::path here = temp.path / "run", there = temp.path / "place";
    // Larger than one piece of the comparison, so that a cut leaves something to keep.
    TestState state = make_state(12, 1, 2);
    save(io, here, state).value();
    const fs::path source = here / step_dir_name(12);
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(source)) files.push_back(entry.path());
    const auto place = directory(there);
    for (uint64_t round = 0; round < 40; ++round) {
      CAPTURE(round);
      fs::remove_all(there);
      const fs::path work = there / work_dir_name(kTmpPrefix, 12, dead_writer());
      fs::create_directories(work);
      int64_t complete = 0;
      for (size_t f = 0; f < files.size(); ++f) {
        const uint64_t draw = mix64(round * 16 + f);
        std::string bytes = bytes_of(files[f]);
        const bool all = draw % 3 == 0;
        if (!all) bytes.resize(draw / 3 % bytes.size());
        if (draw % 5 == 0 && !bytes.empty())
          bytes[draw / 5 % bytes.size()] ^= 4;  // what a power cut makes of it
        else if (all && files[f].filename() != kManifestName)
          complete += static_cast<int64_t>(bytes.size());
        put_bytes(work / files[f].filename(), bytes);
      }
      put_bytes(work / "stranger.h5", "of a checkpoint that was there before");
      const CopyReport copied = copy_checkpoint(*place, io, source).value();
      CHECK(copied.reused_bytes >= complete);
      CHECK(copied.reused_bytes + copied.sent_bytes >= copied.bytes);
      CHECK(whole(there / step_dir_name(12)));
      check_same(there / step_dir_name(12), source);
      CHECK(std::distance(fs::directory_iterator(there), fs::directory_iterator()) == 1);
    }
  }

  TEST_CASE("a fetch goes on where a killed one ended, and damage is found whatever was kept") {
    cairn::testing::TempDir temp("mirror-fetch");
    PosixBackend io;
    const fs::path there = temp.path / "place", back = temp.path / "back";
    save(io, there, make_state(12, 1)).value();
    const auto place = directory(there);
    const PlacedStep step = place->list().value().at(0);
    for (uint64_t round = 0; round < 20; ++round) {
      CAPTURE(round);
      fs::remove_all(back);
      const fs::path work = back / work_dir_name(kTmpPrefix, 12, dead_writer());
      fs::create_directories(work);
      bool damaged = false;
      for (size_t f = 0; f < step.files.size(); ++f) {
        const uint64_t draw = mix64(round * 16 + f);
        if (draw % 4 == 0) continue;
        std::string bytes = bytes_of(there / step_dir_name(12) / step.files[f].name);
        if (draw % 4 != 1) bytes.resize(draw / 4 % bytes.size());
        if (round % 2 == 1 && !bytes.empty()) {
          bytes[draw / 8 % bytes.size()] ^= 1;
          damaged = true;
        }
        put_bytes(work / (step.files[f].name + (draw % 4 == 1 ? "" : ".part")), bytes);
      }
      const Result<CopyReport> fetched = fetch_checkpoint(*place, io, step, back);
      if (damaged) {
        REQUIRE(!fetched.ok());
        CHECK(fetched.error().code == ErrorCode::kCorrupt);
        CHECK(fs::is_empty(back));  // the next try begins anew
        CHECK(fetch_checkpoint(*place, io, step, back).ok());
      } else {
        CHECK_OK(fetched);
      }
      CHECK(whole(back / step_dir_name(12)));
    }
  }

  TEST_CASE("a fetch that another one overtakes ends well, and one that fails leaves nothing") {
    cairn::testing::TempDir temp("mirror-race");
    PosixBackend io;
    const fs::path there = temp.path / "place", back = temp.path / "back";
    save(io, there, make_state(12, 1)).value();
    const auto place = directory(there);
    PlacedStep step = place->list().value().at(0);
    for (const bool same : {true, false}) {
      CAPTURE(same);
      fs::remove_all(back);
      CopyOptions options;
      bool overtaken = false;
      options.progress = [&](CopyPhase phase, int64_t, int64_t) {
        if (phase != CopyPhase::kVerifyFetched || overtaken) return;
        overtaken = true;
        if (same)
          REQUIRE(fetch_checkpoint(*place, io, step, back).ok());
        else
          save(io, back, make_state(12, 2)).value();
      };
      const Result<CopyReport> fetched = fetch_checkpoint(*place, io, step, back, options);
      CHECK(overtaken);
      CHECK(fetched.ok() == same);
      if (same && fetched.ok()) CHECK(fetched.value().was_there);
      CHECK(whole(back / step_dir_name(12)));
      CHECK(std::distance(fs::directory_iterator(back), fs::directory_iterator()) == 1);
    }
    fs::remove_all(back);
    step.files.push_back({"gone.h5", 5});
    CHECK(!fetch_checkpoint(*place, io, step, back).ok());
    CHECK(fs::is_empty(back));
  }

  TEST_CASE("a repair keeps what it has replaced until the new name is durable") {
    cairn::testing::TempDir temp("mirror-sync");
    PosixBackend disk;
    const fs::path there = temp.path / "place", back = temp.path / "back", here = back / step_dir_name(12);
    save(disk, there, make_state(12, 1)).value();
    const auto place = directory(there);
    const PlacedStep step = place->list().value().at(0);
    int64_t exchanged = 0;
    bool fired = true;
    for (int64_t n = 0; fired; ++n) {
      CAPTURE(n);
      fs::remove_all(back);
      REQUIRE(fetch_checkpoint(*place, disk, step, back).ok());
      flip_middle(here / "shard-00000-of-00002.h5");
      FaultPlan plan = FaultPlan::fail_call(n, EIO);
      plan.only = IoOp::kSyncDir;
      FaultBackend io(disk, plan);
      const Result<CopyReport> fetched = fetch_checkpoint(*place, io, step, back, {.check_there = true});
      fired = io.fired();
      CHECK(fetched.ok() == !fired);
      if (!fired || !whole(here)) continue;
      ++exchanged;
      CHECK(std::distance(fs::directory_iterator(back), fs::directory_iterator()) == 2);
    }
    CHECK(exchanged == 1);
  }

  TEST_CASE("a place that cannot exchange keeps the old copy when the new one cannot take its name") {
    cairn::testing::TempDir temp("mirror-rename");
    PosixBackend io;
    const fs::path there = temp.path / "place";
    save(io, there, make_state(12, 1)).value();
    save(io, temp.path / "run", make_state(12, 2)).value();
    const pid_t pid = ::fork();
    if (pid == 0) {  // 1: committed, 2: not, 64: this process may not mount
      if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) ::_exit(64);
      const auto place = directory(there);
      bool fixed = false;
      CopyOptions options;
      options.progress = [&](CopyPhase phase, int64_t, int64_t) {
        if (phase != CopyPhase::kReadBack || fixed) return;
        for (const auto& entry : fs::directory_iterator(there)) {  // a mount point has its name for good
          if (!entry.path().filename().string().starts_with(kTmpPrefix)) continue;
          fixed = ::mount(entry.path().c_str(), entry.path().c_str(), nullptr, MS_BIND, nullptr) == 0;
        }
        if (!fixed) ::_exit(64);
      };
      ::_exit(copy_checkpoint(*place, io, temp.path / "run" / step_dir_name(12), options).ok() ? 1 : 2);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    REQUIRE(WIFEXITED(status));
    if (WEXITSTATUS(status) == 64) {
      MESSAGE("skipped: this process may not mount");
      return;
    }
    CHECK(WEXITSTATUS(status) == 2);
    CHECK(whole(there / step_dir_name(12)));
  }

  TEST_CASE("a checkpoint that is replaced while it is copied never ends as a mixture") {
    cairn::testing::TempDir temp("mirror-swap");
    PosixBackend io;
    const fs::path here = temp.path / "run", other = temp.path / "other", there = temp.path / "place";
    save(io, here, make_state(12, 1)).value();
    save(io, other, make_state(12, 2)).value();
    const auto place = directory(there);
    CopyOptions options;
    bool swapped = false;
    options.progress = [&](CopyPhase phase, int64_t done, int64_t total) {
      if (swapped || phase != CopyPhase::kVerifySource || done != total) return;
      swapped = true;
      REQUIRE(io.exchange(here / step_dir_name(12), other / step_dir_name(12)).ok());
    };
    const Result<CopyReport> copied = copy_checkpoint(*place, io, here / step_dir_name(12), options);
    CHECK(swapped);
    REQUIRE(!copied.ok());
    CHECK(copied.error().code == ErrorCode::kUnavailable);
    CHECK(place->list().value().empty());
    CHECK(copy_checkpoint(*place, io, here / step_dir_name(12), options).ok());
    CHECK(whole(there / step_dir_name(12)));
  }

  TEST_CASE("a mirror restores a step that a dead removal took although others need it") {
    cairn::testing::TempDir temp("mirror-trash");
    PosixBackend io;
    const fs::path there = temp.path / "place";
    const auto place = directory(there);
    const Manifest ten = save(io, there, cold_state(10)).value().manifest;
    save(io, there, cold_state(20)).value();
    save_on(io, there, 40, ten);
    for (const int64_t step : {10, 20})
      fs::rename(there / step_dir_name(step), there / work_dir_name(kTrashPrefix, step, dead_writer()));
    CHECK(place->tidy(std::nullopt).value().size() == 2);
    CHECK(whole(there / step_dir_name(40)));
    CHECK(std::distance(fs::directory_iterator(there), fs::directory_iterator()) == 2);
  }

  TEST_CASE("a replacement that was cut off between two renames is ended, in a place and where it is fetched to") {
    cairn::testing::TempDir temp("mirror-cut-off");
    PosixBackend io;
    const fs::path there = temp.path / "place", here = temp.path / "run";
    const auto place = directory(there);
    const WriterId dead = dead_writer();
    for (const fs::path& dir : {there, here}) {
      save(io, dir, make_state(10, 1)).value();
      save(io, dir, make_state(12, 1)).value();
      fs::rename(dir / step_dir_name(12), dir / work_dir_name(kTrashPrefix, 12, dead));
      save(io, dir, make_state(12, 2)).value();
      fs::rename(dir / step_dir_name(12), dir / work_dir_name(kTmpPrefix, 12, dead));
    }
    const std::vector<PlacedStep> listed = place->list().value();
    REQUIRE(listed.size() == 2);
    CHECK(listed[1].complete);
    CHECK(compare(io, there / step_dir_name(12), make_state(12, 2)) == "");
    const CopyReport fetched = fetch_checkpoint(*place, io, listed[1], here).value();
    CHECK(fetched.was_there);
    CHECK(compare(io, here / step_dir_name(12), make_state(12, 2)) == "");
  }

  TEST_CASE("a damaged checkpoint is not copied, a damaged copy is found by reading back and does not count") {
    cairn::testing::TempDir temp("mirror-damage");
    PosixBackend io;
    const fs::path here = temp.path / "run", there = temp.path / "place";
    save(io, here, make_state(12, 1)).value();
    const fs::path source = here / step_dir_name(12);
    const auto inner = directory(there);
    {
      LyingPlace place(*inner, 1);  // once: sent again, and then it is right
      const CopyReport copied = copy_checkpoint(place, io, source).value();
      CHECK(place.discards == 1);
      CHECK(copied.sent_bytes > copied.bytes);
      CHECK(whole(there / step_dir_name(12)));
    }
    {
      LyingPlace place(*inner, 0);  // what its disk does not give now may be whole, and another run's
      place.no_manifest = true;
      CHECK(copy_checkpoint(place, io, source, {.replace = Replace::kSameRun}).error().code == ErrorCode::kIo);
      CHECK(place.puts == 0);
    }
    REQUIRE(inner->remove(12).ok());
    {
      LyingPlace place(*inner, 1000);
      const Result<CopyReport> copied = copy_checkpoint(place, io, source);
      REQUIRE(!copied.ok());
      CHECK(copied.error().code == ErrorCode::kIo);
      CHECK(copied.error().message.find("shard-00000-of-00002.h5") != std::string::npos);
      CHECK(copied.error().message.find("read back differs") != std::string::npos);
      CHECK(place.commits == 0);
      CHECK(inner->list().value().empty());
    }
    const fs::path victim = source / "shard-00001-of-00002.h5";
    std::string bytes = bytes_of(victim);
    bytes[5000] ^= 1;
    put_bytes(victim, bytes);
    const Result<CopyReport> copied = copy_checkpoint(*inner, io, source);
    REQUIRE(!copied.ok());
    CHECK(copied.error().code == ErrorCode::kCorrupt);
    CHECK(copied.error().message.find("shard-00001-of-00002.h5") != std::string::npos);
    CHECK(inner->list().value().empty());
  }

  TEST_CASE("a mirror follows a folder, holds what it copies, and applies its own retention") {
    cairn::testing::TempDir temp("mirror-follow");
    PosixBackend io;
    const fs::path here = temp.path / "run", there = temp.path / "place", pins = temp.path / "pins";
    const auto place = directory(there);
    const auto placed = [&] {
      Steps out;
      for (const PlacedStep& step : place->list().value()) out.push_back(step.step);
      return out;
    };
    for (const int64_t step : {10, 20, 30}) save(io, here, make_state(step, 1)).value();
    Mirror mirror(*place, io, here, pins, {.keep_last = 2}, {});
    CHECK(mirror.copy_next(false).value()->copy.step == 30);
    CHECK(mirror.copy_next(false).value()->copy.step == 20);
    CHECK(!mirror.copy_next(false).value());
    save(io, here, make_state(40, 1)).value();
    const MirrorReport fourth = mirror.copy_next(false).value().value();
    CHECK(fourth.copy.step == 40);
    CHECK(fourth.removed == Steps{20});
    CHECK(placed() == Steps{30, 40});
    CHECK(fs::is_empty(pins));

    // Local retention takes the checkpoint away while it is being copied.
    save(io, here, make_state(50, 1)).value();
    CopyOptions options;
    bool removed = false;
    options.progress = [&](CopyPhase, int64_t, int64_t) {
      if (!removed) REQUIRE(remove_checkpoint(io, here, 50, this_writer()).ok());
      removed = true;
    };
    Mirror slow(*place, io, here, pins, {.keep_last = 2}, options);
    CHECK(slow.copy_next(false).value()->copy.step == 50);
    CHECK(removed);
    CHECK(whole(there / step_dir_name(50)));
    CHECK(!fs::exists(here / step_dir_name(50)));

    // Killed while copying: the pin is there, the local checkpoint is gone, a newer one has come.
    save(io, here, make_state(60, 1)).value();
    fs::create_directories(pins / step_dir_name(60));
    for (const auto& entry : fs::directory_iterator(here / step_dir_name(60)))
      fs::create_hard_link(entry.path(), pins / step_dir_name(60) / entry.path().filename());
    fs::create_directories(pins / ".step-00000061");  // and one that was only being made
    REQUIRE(remove_checkpoint(io, here, 60, this_writer()).ok());
    save(io, here, make_state(70, 1)).value();
    Mirror again(*place, io, here, pins, {.keep_last = 2}, {});
    CHECK(again.copy_next(false).value()->copy.step == 60);
    CHECK(again.copy_next(false).value()->copy.step == 70);
    CHECK(!again.copy_next(true).value());
    CHECK(placed() == Steps{60, 70});
    CHECK(fs::is_empty(pins));

    // A step done anew after going back: its copy is replaced.
    const fs::path copy = there / step_dir_name(70);
    REQUIRE(remove_checkpoint(io, here, 70, this_writer()).ok());
    TestState anew = make_state(70, 2);
    anew.skeleton.created_unix_ms += 1;
    save(io, here, anew).value();
    CHECK(again.copy_next(false).value()->copy.step == 70);
    check_same(here / step_dir_name(70), copy);
    CHECK(!again.copy_next(false).value());
  }

  TEST_CASE("damaged labels here hold up no copy, and retention removes nothing at the place") {
    cairn::testing::TempDir temp("mirror-labels");
    PosixBackend io;
    const fs::path here = temp.path / "run", there = temp.path / "place";
    const auto place = directory(there);
    for (const int64_t step : {10, 20, 30}) save(io, here, make_state(step, 1)).value();
    Mirror mirror(*place, io, here, temp.path / "pins", {.keep_last = 1}, {});
    CHECK(mirror.copy_next(false).value()->copy.step == 30);
    REQUIRE(mirror.take_notices().empty());
    REQUIRE(write_file(io, here / kLabelsName, "damaged").ok());
    for (const int64_t step : {40, 50}) {
      save(io, here, make_state(step, 1)).value();
      const MirrorReport report = mirror.copy_next(false).value().value();
      CHECK(report.copy.step == step);
      CHECK(report.removed.empty());
      REQUIRE(report.problems.size() == 1);
      CHECK(report.problems[0].find("labels.json: ") != std::string::npos);
    }
    CHECK(mirror.take_notices().size() == 1);
    CHECK(place->list().value().size() == 3);
  }

  TEST_CASE("a checkpoint that needs earlier ones takes them along, there and back, and keeps them there") {
    cairn::testing::TempDir temp("mirror-needs");
    PosixBackend io;
    const fs::path here = temp.path / "run", there = temp.path / "place";
    const auto place = directory(there);
    const Manifest ten = save(io, here, cold_state(10)).value().manifest;
    const Manifest twenty = save(io, here, cold_state(20)).value().manifest;
    save(io, here, cold_state(30)).value();
    save_on(io, here, 40, ten);
    save_on(io, here, 50, twenty);
    CHECK(needed_steps(read_manifest(io, here / step_dir_name(40)).value().files) == Steps{10});
    // It is the manifest that counts: the note has no checksum, and here it is gone.
    const std::string note = bytes_of(here / step_dir_name(40) / kReferencesName);
    CHECK(note == "step-00000010\n");
    fs::remove(here / step_dir_name(40) / kReferencesName);
    CHECK(copy_checkpoint(*place, io, here / step_dir_name(40)).ok());
    Steps placed;
    for (const PlacedStep& step : place->list().value()) placed.push_back(step.step);
    CHECK(placed == Steps{10, 40});
    CHECK(whole(there / step_dir_name(40)));
    CHECK(bytes_of(there / step_dir_name(40) / kReferencesName) == note);
    put_bytes(there / step_dir_name(40) / kReferencesName, "nonsense\n");
    const CopyReport fetched = fetch_checkpoint(*place, io, place->list().value().back(), temp.path / "back").value();
    CHECK(fetched.dir == temp.path / "back" / step_dir_name(40));
    for (const int64_t step : {10, 40}) CHECK(whole(temp.path / "back" / step_dir_name(step)));
    CHECK(bytes_of(fetched.dir / kReferencesName) == note);
    put_bytes(there / step_dir_name(40) / kReferencesName, note);

    // Held together while under way, and the needed ones are no victims of retention there.
    fs::remove(here / step_dir_name(50) / kReferencesName);
    CopyOptions options;
    bool seen = false, removed = false;
    options.progress = [&](CopyPhase, int64_t, int64_t) {
      seen = seen ||
             (fs::exists(temp.path / "pins" / step_dir_name(20)) && fs::exists(temp.path / "pins" / step_dir_name(50)));
      if (!removed)
        for (const int64_t step : {50, 40, 30, 20}) REQUIRE(remove_checkpoint(io, here, step, this_writer()).ok());
      removed = true;
    };
    Mirror mirror(*place, io, here, temp.path / "pins", {.keep_last = 1}, options);
    const MirrorReport report = mirror.copy_next(false).value().value();
    CHECK(seen);
    CHECK(report.copy.step == 50);
    CHECK(report.removed == Steps{40, 10});
    CHECK(whole(there / step_dir_name(20)));
    CHECK(fs::is_empty(temp.path / "pins"));
  }

  TEST_CASE("a run that went back replaces a step, and what referred to the old one goes with it") {
    cairn::testing::TempDir temp("mirror-line");
    PosixBackend io;
    const fs::path there = temp.path / "place", anew = temp.path / "anew";
    const auto place = directory(there);
    const Manifest ten = save(io, there, cold_state(10)).value().manifest;
    save_on(io, there, 40, ten);
    save(io, there, cold_state(20)).value();
    TestState other = cold_state(10);
    other.skeleton.created_unix_ms += 1;
    save(io, anew, other).value();
    for (const Replace replace : {Replace::kSameRun, Replace::kAnyRun}) {
      const Result<CopyReport> refused = copy_checkpoint(*place, io, anew / step_dir_name(10), {.replace = replace});
      REQUIRE(!refused.ok());
      CHECK(refused.error().code == ErrorCode::kUnavailable);
      CHECK(refused.error().message.find("step 40 there refers") != std::string::npos);
      CHECK(whole(there / step_dir_name(40)));
    }
    Mirror mirror(*place, io, anew, temp.path / "pins", {}, {});
    const MirrorReport report = mirror.copy_next(false).value().value();
    CHECK(report.copy.step == 10);
    CHECK(report.copy.replaced == Steps{10});
    CHECK(report.removed == Steps{40});
    Steps placed;
    for (const PlacedStep& step : place->list().value()) placed.push_back(step.step);
    CHECK(placed == Steps{10, 20});
    check_same(anew / step_dir_name(10), there / step_dir_name(10));
  }

  TEST_CASE("a step that refers to a replaced step and to one that is needed goes once") {
    cairn::testing::TempDir temp("mirror-both");
    PosixBackend io;
    const fs::path there = temp.path / "place", anew = temp.path / "anew";
    const auto place = directory(there);
    const Manifest forty = save_on(io, there, 40, save(io, there, cold_state(10)).value().manifest);
    TestState same_moments = cold_state(40);
    same_moments.skeleton.step = 50;
    SaveOptions options = small_options();
    options.base = &forty;
    REQUIRE(save(io, there, same_moments, options).ok());
    REQUIRE(needed_steps(read_manifest(io, there / step_dir_name(50)).value().files) == Steps{10, 40});
    TestState other = cold_state(10), later = cold_state(40);
    for (TestState* state : {&other, &later}) state->skeleton.created_unix_ms += 1;
    const Manifest ten = save(io, anew, other).value().manifest;
    options.base = &ten;
    REQUIRE(save(io, anew, later, options).value().referenced_bytes > 0);
    const Result<CopyReport> copied = copy_checkpoint(*place, io, anew / step_dir_name(40));
    REQUIRE_MESSAGE(copied.ok(), copied.error().message);
    CHECK(copied.value().removed == Steps{50, 40});
    for (const int64_t step : {10, 40}) check_same(anew / step_dir_name(step), there / step_dir_name(step));
  }

  TEST_CASE("a damaged step replaces nothing, nor does what it needs") {
    cairn::testing::TempDir temp("mirror-damaged-late");
    PosixBackend io;
    const fs::path here = temp.path / "run", there = temp.path / "place";
    save(io, there, cold_state(10)).value();
    TestState other = cold_state(10);
    other.skeleton.created_unix_ms += 1;
    const Manifest forty = save_on(io, here, 40, save(io, here, other).value().manifest);
    flip_middle(here / step_dir_name(40) / forty.files[0].name);
    const std::string before = bytes_of(there / step_dir_name(10) / kManifestName);
    for (const Replace replace : {Replace::kOwnLine, Replace::kSameRun, Replace::kAnyRun}) {
      const auto place = directory(there);
      const Result<CopyReport> refused = copy_checkpoint(*place, io, here / step_dir_name(40), {.replace = replace});
      REQUIRE(!refused.ok());
      CHECK(refused.error().code == ErrorCode::kCorrupt);
      CHECK(bytes_of(there / step_dir_name(10) / kManifestName) == before);
    }
  }

  TEST_CASE("a step whose manifest alone is damaged stays while whole ones need files that only it has") {
    cairn::testing::TempDir temp("mirror-needed");
    PosixBackend io;
    const fs::path there = temp.path / "there", other = temp.path / "other";
    const Manifest twelve = save(io, there, cold_state(12)).value().manifest;
    fs::copy(there, temp.path / "same", fs::copy_options::recursive);
    save_on(io, there, 13, twelve);
    save(io, other, make_state(12, 2)).value();
    flip_middle(there / step_dir_name(12) / kManifestName);
    const std::string damaged = bytes_of(there / step_dir_name(12) / kManifestName);
    REQUIRE(whole(there / step_dir_name(13)));
    const auto place = directory(there);
    const auto push = [&](const fs::path& from, Replace replace) {
      return copy_checkpoint(*place, io, from / step_dir_name(12), {.replace = replace});
    };
    const auto fetch = [&](const fs::path& from) {
      const auto source = directory(from);
      return fetch_checkpoint(*source, io, source->list().value().at(0), there);
    };
    for (const Result<CopyReport>& refused :
         {push(other, Replace::kSameRun), push(other, Replace::kAnyRun), fetch(other)}) {
      REQUIRE(!refused.ok());
      CHECK(refused.error().code == ErrorCode::kUnavailable);
      CHECK(refused.error().message.find("step 13 ") != std::string::npos);
    }
    CHECK(bytes_of(there / step_dir_name(12) / kManifestName) == damaged);
    CHECK(whole(there / step_dir_name(13)));
    // What has the very files repairs it.
    for (const bool by_fetch : {false, true}) {
      put_bytes(there / step_dir_name(12) / kManifestName, damaged);
      CHECK((by_fetch ? fetch(temp.path / "same") : push(temp.path / "same", Replace::kSameRun)).ok());
      for (const int64_t step : {12, 13}) CHECK(whole(there / step_dir_name(step)));
    }
  }

  TEST_CASE("a hold that a kill cut off while it was let go holds nothing, and the next step is copied") {
    for (const bool placed : {true, false}) {
      cairn::testing::TempDir temp("mirror-let-go");
      PosixBackend io;
      const fs::path here = temp.path / "run", there = temp.path / "place", pins = temp.path / "pins";
      const auto place = directory(there);
      save(io, here, make_state(12, 1)).value();
      if (placed) REQUIRE(Mirror(*place, io, here, pins, {}, {}).copy_next(false).ok());
      const std::vector<DirEntry> files = io.list(here / step_dir_name(12)).value();
      for (size_t removed = 1; removed <= files.size(); ++removed) {  // as remove_tree() goes on
        fs::create_directories(pins / step_dir_name(12));
        for (size_t k = removed; k < files.size(); ++k)
          fs::create_hard_link(here / step_dir_name(12) / files[k].name, pins / step_dir_name(12) / files[k].name);
        const auto step = static_cast<int64_t>(12 + removed);
        save(io, here, make_state(step, 2)).value();
        Mirror mirror(*place, io, here, pins, {}, {});
        const auto copied = mirror.copy_next(false);
        REQUIRE_OK(copied);
        CHECK(copied.value()->copy.step == step);
        CHECK(fs::is_empty(pins));
      }
    }
  }

  TEST_CASE("a held step that may not be read does not stand before all that come after it") {
    struct Refusing : PosixBackend {
      Result<std::unique_ptr<IoFile>> open(const fs::path& path) override {
        if (path.string().find("step-00000012/shard-00000") != std::string::npos)
          return Error{ErrorCode::kIo, path.string() + ": open: Permission denied", EACCES};
        return PosixBackend::open(path);
      }
    } io;
    cairn::testing::TempDir temp("mirror-refused");
    const fs::path here = temp.path / "run", there = temp.path / "place";
    const auto place = directory(there);
    save(io, here, make_state(12, 1)).value();
    Mirror mirror(*place, io, here, temp.path / "pins", {}, {});
    const auto refused = mirror.copy_next(false);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().os_errno == EACCES);
    save(io, here, make_state(13, 2)).value();
    REQUIRE(mirror.copy_next(false).ok());
    CHECK(whole(there / step_dir_name(13)));
    CHECK_FALSE(mirror.copy_next(false).ok());  // and it is still told
  }

  TEST_CASE("a step that was archived here is the same save: its copy stays, with all that refers to it") {
    cairn::testing::TempDir temp("mirror-archived");
    PosixBackend io;
    const fs::path here = temp.path / "run", there = temp.path / "place";
    const auto place = directory(there);
    copy_then_archive(io, here, *place);
    Mirror mirror(*place, io, here, temp.path / "pins", {}, {});
    const MirrorReport report = mirror.copy_next(true).value().value();
    CHECK(report.copy.step == 50);
    CHECK(report.removed.empty());
    CHECK(!mirror.copy_next(true).value());
    for (const int64_t step : {10, 40, 50}) CHECK(whole(there / step_dir_name(step)));
  }

  TEST_CASE("a step that was archived here does not replace a damaged one that others there need") {
    cairn::testing::TempDir temp("mirror-archived-bad");
    PosixBackend io;
    const fs::path here = temp.path / "run", there = temp.path / "place";
    const auto place = directory(there);
    copy_then_archive(io, here, *place);
    flip_middle(there / step_dir_name(10) / kManifestName);
    Mirror mirror(*place, io, here, temp.path / "pins", {}, {});
    CHECK(mirror.copy_next(true).value()->copy.step == 50);
    const auto kept = mirror.copy_next(true);
    REQUIRE_FALSE(kept.ok());
    CHECK(kept.error().message.find("step 40 there refers to its files") != std::string::npos);
    CHECK(!mirror.copy_next(true).value());  // told once, and in nobody's way
    for (const int64_t step : {40, 50}) CHECK(whole(there / step_dir_name(step)));
    // A save of that step after step 40 is of another line, which the run goes on with.
    TestState anew = make_state(10, 2);
    anew.skeleton.created_unix_ms += 1000;
    SaveOptions replacing = small_options();
    replacing.replace_existing = true;
    save(io, here, anew, replacing).value();
    const MirrorReport report = mirror.copy_next(true).value().value();
    CHECK(report.copy.step == 10);
    CHECK(report.removed == Steps{40});
    for (const int64_t step : {10, 50}) CHECK(whole(there / step_dir_name(step)));
  }

  TEST_CASE("a held step of a newer build does not stand before all that come after it") {
    cairn::testing::TempDir temp("mirror-newer");
    PosixBackend io;
    const fs::path here = temp.path / "run", pins = temp.path / "pins";
    const auto place = directory(temp.path / "place");
    save(io, pins, make_state(12, 1)).value();  // as a killed one held it
    const fs::path manifest = pins / step_dir_name(12) / kManifestName;
    std::string text = bytes_of(manifest);
    text[text.find("\"version\":1") + 10] = '2';
    put_bytes(manifest, text);
    save(io, here, make_state(13, 2)).value();
    Mirror mirror(*place, io, here, pins, {}, {});
    CHECK(mirror.copy_next(false).error().code == ErrorCode::kUnsupported);
    CHECK(mirror.copy_next(false).value()->copy.step == 13);
  }

  TEST_CASE("nothing is copied in the stead of a mirror that is gone or no longer mounted") {
    cairn::testing::TempDir temp("mirror-gone");
    PosixBackend io;
    const fs::path here = temp.path / "run", there = temp.path / "place", away = temp.path / "elsewhere";
    const auto place = directory(there);
    Mirror mirror(*place, io, here, temp.path / "pins", {}, {});
    save(io, here, make_state(10, 1)).value();
    CHECK(mirror.copy_next(false).value()->copy.step == 10);
    fs::rename(there, away);
    save(io, here, make_state(20, 1)).value();
    const Result<std::optional<MirrorReport>> refused = mirror.copy_next(false);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message.find("the folder is gone") != std::string::npos);
    CHECK_FALSE(fs::exists(there));
    fs::rename(away, there);
    CHECK(mirror.copy_next(false).value()->copy.step == 20);
    CHECK(whole(there / step_dir_name(20)));
    // Its own folder is a mount point: what is below does not say whose it is, as the place did.
    REQUIRE(place->write_note("run.json", "{}").ok());
    fs::rename(there, away);
    fs::create_directory(there);
    save(io, here, make_state(30, 1)).value();
    const Result<std::optional<MirrorReport>> below = mirror.copy_next(false);
    REQUIRE_FALSE(below.ok());
    CHECK(below.error().message.find("the folder is gone") != std::string::npos);
    CHECK(fs::is_empty(there));
    fs::remove(there);
    fs::rename(away, there);
    CHECK(mirror.copy_next(false).value()->copy.step == 30);
  }

  TEST_CASE("a local checkpoint that is damaged is told once and passed over") {
    cairn::testing::TempDir temp("mirror-bad");
    PosixBackend io;
    const fs::path here = temp.path / "run";
    const auto place = directory(temp.path / "place");
    for (const int64_t step : {10, 20}) save(io, here, make_state(step, 1)).value();
    const fs::path victim = here / step_dir_name(20) / "shard-00000-of-00002.h5";
    std::string bytes = bytes_of(victim);
    bytes[6000] ^= 1;
    put_bytes(victim, bytes);
    Mirror mirror(*place, io, here, temp.path / "pins", {}, {});
    CHECK(mirror.copy_next(false).error().code == ErrorCode::kCorrupt);
    CHECK(mirror.copy_next(false).value()->copy.step == 10);
    CHECK(!mirror.copy_next(false).value());
  }

  TEST_CASE("a held step that is damaged does not keep the save that has taken its place here from being copied") {
    cairn::testing::TempDir temp("mirror-held-bad");
    PosixBackend io;
    const fs::path here = temp.path / "run", pins = temp.path / "pins", there = temp.path / "place";
    const auto place = directory(there);
    save(io, pins, make_state(12, 1)).value();  // as a killed one held it
    flip_middle(pins / step_dir_name(12) / "shard-00000-of-00002.h5");
    save(io, here, make_state(12, 2)).value();
    Mirror mirror(*place, io, here, pins, {}, {});
    CHECK(mirror.copy_next(false).error().code == ErrorCode::kCorrupt);
    const Result<std::optional<MirrorReport>> copied = mirror.copy_next(false);
    REQUIRE(copied.value().has_value());
    CHECK(copied.value()->copy.step == 12);
    CHECK(whole(there / step_dir_name(12)));
  }

  TEST_CASE("places that make no sense are refused with what is accepted") {
    for (const char* path :
         {"", "ftp://host/x", "s3://", "s3://ab", "s3://bucket//x", "s3://bucket/a b", "s3://UPPER!/x", "s3:///x"}) {
      CAPTURE(path);
      const Result<std::unique_ptr<Place>> place = open_place({.path = path});
      REQUIRE(!place.ok());
      CHECK(place.error().code == ErrorCode::kInvalidInput);
    }
    for (const char* name : {"", ".", "..", ".hidden", "a/b", "../x", "a b", "a\nb"}) CHECK(!valid_file_name(name));
    CHECK(valid_file_name("shard-00000-of-00002.h5"));
  }
}
