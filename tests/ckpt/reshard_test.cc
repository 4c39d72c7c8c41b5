// Every layout into every other, damage and kills on the way, and the memory it takes.
#include "ckpt/reshard.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <malloc.h>

#include <cerrno>
#include <fstream>
#include <memory>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/tensors/box_stream.h"
#include "ckpt/verify/verify.h"
#include "runtime/core/random.h"
#include "tests/ckpt/plan/layouts.h"
#include "tests/support/ok.h"
#include "tests/support/status_kib.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using cairn::ckpt::testing::box_values;
using cairn::ckpt::testing::Layout;
using cairn::ckpt::testing::plan_of;
using cairn::testing::status_kib;
namespace fs = std::filesystem;

namespace {

const fs::path kSource = "/source/checkpoints", kTarget = "/target/checkpoints";
constexpr int64_t kStep = 7;

fs::path step_dir(const fs::path& checkpoints) { return checkpoints / step_dir_name(kStep); }

/// What the ranks of `plan` would save; `kinds` 1: weights alone, with a file that an import kept.
Result<SaveReport> save_state(IoBackend& io, const fs::path& dir, const Plan& plan, size_t kinds = 3) {
  Manifest skeleton = manifest_skeleton(plan, {"name", "run-b", {"run-a"}, R"({"mesh":1})", "hash-1"});
  skeleton.step = kStep;
  skeleton.samples = 7 * 24;
  skeleton.tokens = 7 * 24 * 8;
  skeleton.state = R"({"loss":2.5,"sampler":{"position":168}})";
  if (kinds == 1) skeleton.tensors.resize(plan.tensors.size());
  const StateIndex index(plan);
  std::vector<SlotLayout> layouts = slot_layouts(plan);
  std::vector<std::vector<std::byte>> slots;
  std::vector<WriterPart> parts;
  const std::string kept = "kept by an import";
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
    slots.push_back(ckpt::testing::slot_bytes(plan, layouts[rank]));
    WriterPart part{shard_file_name(rank, plan.mesh.world()), {}};
    for (const SlotShard& shard : layouts[rank].shards) {
      if (shard.kind >= static_cast<int64_t>(kinds)) continue;
      part.shards.push_back({.tensor = index.at(shard.kind, shard.tensor),
                             .lo = shard.box.lo,
                             .hi = shard.box.hi,
                             .data = slots.back().data() + shard.offset,
                             .bytes = shard.bytes});
    }
    if (rank == 0 && kinds == 1) {
      skeleton.tensors.push_back({"tokenizer.model", "file", DType::kBf16, {4}});
      part.shards.push_back({.tensor = static_cast<int64_t>(skeleton.tensors.size()) - 1,
                             .lo = {0},
                             .hi = {4},
                             .data = reinterpret_cast<const std::byte*>(kept.data()),
                             .bytes = 8});
    }
    if (!part.shards.empty()) parts.push_back(std::move(part));
  }
  return save_checkpoint(io, dir, std::move(skeleton), parts);
}

RunText new_run() { return {"name", "run-c", {}, R"({"mesh":2})", "hash-2"}; }

Result<ReshardReport> reshard(IoBackend& io, const Plan& target, const ReshardOptions& options = {}) {
  return reshard_checkpoint(io, step_dir(kSource), kTarget, target, new_run(), options);
}

/// Empty when the step is laid out as `plan` does it and every number is where its value says, else what differs.
std::string compare(IoBackend& io, const fs::path& dir, const Plan& plan, size_t kinds = 3) {
  Result<CheckpointReader> reader = CheckpointReader::open(io, dir);
  if (!reader.ok()) return reader.error().message;
  const Manifest& m = reader.value().manifest();
  size_t next = 0;
  const StateIndex index(plan);
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
    for (const SlotShard& slot : slot_layout(plan, rank).shards) {
      if (slot.kind >= static_cast<int64_t>(kinds)) continue;
      while (next < m.shards.size() && m.tensors[m.shards[next].tensor].kind == "file") ++next;
      if (next == m.shards.size()) return "shards are missing";
      const ShardEntry& shard = m.shards[next];
      if (shard.tensor != index.at(slot.kind, slot.tensor) || shard.box != slot.box ||
          m.files[shard.file].name != shard_file_name(rank, plan.mesh.world()))
        return "laid out otherwise: " + describe_shard(m, shard);
      std::vector<std::byte> bytes(shard.bytes);
      if (Status read = reader.value().read_shard(static_cast<int64_t>(next), bytes); !read.ok())
        return read.error().message;
      const std::vector<float> expected = box_values(plan, slot.kind, slot.tensor, slot.box);
      if (std::memcmp(bytes.data(), expected.data(), bytes.size()) != 0) return describe_shard(m, shard) + " differs";
      ++next;
    }
  }
  return {};
}

std::vector<Layout> eight_layouts() {
  return {{1, 1, 1, 0},
          {2, 1, 1},
          {4, 1, 1},
          {1, 4, 1},
          {1, 1, 3},
          {2, 2, 2},
          {2, 2, 2, 0, {MeshAxis::kPp, MeshAxis::kDp, MeshAxis::kTp}},
          {2, 2, 1, 1, {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp}, {1, 3}}};
}

// A state of some hundred MiB that is made on its way to the disk: each number is a function of where it is.
struct LargeState {
  Plan plan;
  fs::path dir;
  int64_t payload_bytes = 0;

  static Plan plan_for(int64_t tp, int64_t pp, int64_t dp, int64_t width, int64_t ffn, int64_t vocab) {
    Recipe r;
    r.name = "large";
    r.stop = {Span::Unit::kSteps, 10};
    r.model = {.layers = 2, .width = width, .heads = 4, .kv_heads = 4, .head_dim = width / 4, .ffn = ffn, .context = 8};
    r.model.vocab = vocab;
    r.batch = {.samples = 24, .micro = 1};
    r.mesh = {.tp = tp, .pp = pp};
    return make_plan(r, tp * pp * dp).value();
  }
  static uint32_t value(int64_t tensor, int64_t flat) {
    return static_cast<uint32_t>(mix64(static_cast<uint64_t>(tensor << 40 | flat)));
  }

  LargeState(IoBackend& io, const fs::path& folder, Plan of) : plan(std::move(of)) {
    Manifest skeleton = manifest_skeleton(plan, new_run());
    skeleton.step = kStep;
    std::vector<WriterPart> parts;
    for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
      WriterPart part{shard_file_name(rank, plan.mesh.world()), {}};
      for (const SlotShard& slot : slot_layout(plan, rank).shards) {
        const int64_t tensor = StateIndex(plan).at(slot.kind, slot.tensor);
        ShardData shard{.tensor = tensor, .lo = slot.box.lo, .hi = slot.box.hi, .bytes = slot.bytes};
        shard.fill = [this, slot, tensor](int64_t offset, std::span<std::byte> out) -> Status {
          const Shape& shape = plan.tensors[slot.tensor].shape;
          auto* words = reinterpret_cast<uint32_t*>(out.data());
          for (Box& box : boxes_of_flat_range(slot.box.extents(), offset / 4, (offset + std::ssize(out)) / 4)) {
            for (size_t d = 0; d < box.lo.size(); ++d) {
              box.lo[d] += slot.box.lo[d];
              box.hi[d] += slot.box.lo[d];
            }
            ckpt::testing::walk(box, shape, [&](int64_t, int64_t flat) { *words++ = value(tensor, flat); });
          }
          return {};
        };
        part.shards.push_back(std::move(shard));
      }
      parts.push_back(std::move(part));
    }
    const Result<SaveReport> saved = save_checkpoint(io, folder, skeleton, parts);
    REQUIRE_OK(saved);
    dir = saved.value().dir;
    payload_bytes = saved.value().payload_bytes;
  }
  LargeState(const LargeState&) = delete;

  /// Numbers of a checkpoint that are not what they should be.
  static int64_t wrong_in(IoBackend& io, const fs::path& step) {
    Result<CheckpointReader> reader = CheckpointReader::open(io, step);
    REQUIRE(reader.ok());
    int64_t wrong = 0;
    for (size_t s = 0; s < reader.value().manifest().shards.size(); ++s) {
      const ShardEntry& shard = reader.value().manifest().shards[s];
      std::vector<uint32_t> words(shard.bytes / 4);
      REQUIRE(reader.value().read_shard(static_cast<int64_t>(s), std::as_writable_bytes(std::span(words))).ok());
      ckpt::testing::walk(shard.box, reader.value().manifest().tensors[shard.tensor].shape,
                          [&](int64_t k, int64_t flat) { wrong += words[k] != value(shard.tensor, flat); });
    }
    return wrong;
  }
};

}  // namespace

TEST_SUITE("ckpt/reshard") {
  TEST_CASE("Adafactor's rows and columns go into any other layout too, and into no other optimizer's run") {
    const auto plan_for = [](const Layout& layout, OptimizerKind kind) {
      Recipe recipe = plan_of(layout, true).recipe;
      recipe.optimizer.kind = kind;
      recipe.optimizer.beta1 = 0;
      return make_plan(recipe, layout.tp * layout.pp * layout.dp).value();
    };
    for (const Layout& from : eight_layouts()) {
      for (const Layout& to : eight_layouts()) {
        MemoryBackend disk;
        const Plan source = plan_for(from, OptimizerKind::kAdafactor), target = plan_for(to, OptimizerKind::kAdafactor);
        const auto saved = save_state(disk, kSource, source, kStateKindCount);
        REQUIRE_OK(saved);
        CHECK(payload_bytes(saved.value().manifest) == source.checkpoint_bytes);
        CHECK(source.checkpoint_bytes < source.parameters * 6);
        const auto done = reshard(disk, target);
        REQUIRE_OK(done);
        CHECK(compare(disk, done.value().dir, target, kStateKindCount) == "");
        const auto refused = reshard(disk, plan_for(to, OptimizerKind::kAdamW));
        REQUIRE(!refused.ok());
        CHECK(refused.error().message.find("the optimizer state of Adafactor") != std::string::npos);
      }
    }
  }

  TEST_CASE("any layout becomes any other, element for element, and back again bit for bit") {
    for (const bool tied : {true, false}) {
      for (const Layout& from_layout : eight_layouts()) {
        if (!tied && from_layout.pp == 1) continue;  // where tying matters
        const Plan from = plan_of(from_layout, tied);
        MemoryBackend start;
        const Result<SaveReport> saved = save_state(start, kSource, from);
        REQUIRE(saved.ok());
        for (const Layout& to_layout : eight_layouts()) {
          CAPTURE(from.mesh.describe());
          const Plan to = plan_of(to_layout, tied);
          CAPTURE(to.mesh.describe());
          const auto disk = start.clone();
          const Result<ReshardReport> report = reshard(*disk, to);
          REQUIRE_OK(report);
          REQUIRE(compare(*disk, report.value().dir, to) == "");
          const Manifest& m = report.value().manifest;
          REQUIRE((m.step == kStep && m.samples == 7 * 24 && m.tokens == 7 * 24 * 8));
          REQUIRE(m.state == saved.value().manifest.state);
          REQUIRE(m.run.id == "run-c");
          REQUIRE(m.run.parents == std::vector<std::string>{"run-a", "run-b"});
          REQUIRE((m.recipe == R"({"mesh":2})" && m.recipe_hash == "hash-2"));
          REQUIRE((m.mesh.tp == to_layout.tp && m.mesh.pp == to_layout.pp && m.mesh.dp == to_layout.dp &&
                   m.mesh.zero == to_layout.zero));
          REQUIRE(report.value().payload_bytes == payload_bytes(saved.value().manifest));

          const Result<ReshardReport> back =
              reshard_checkpoint(*disk, report.value().dir, "/back/checkpoints", from, new_run());
          REQUIRE_OK(back);
          REQUIRE(back.value().manifest.shards == saved.value().manifest.shards);  // offsets, sizes, hashes
          REQUIRE(back.value().manifest.files == saved.value().manifest.files);
        }
      }
    }
  }

  TEST_CASE("weights alone stay weights alone, and what is no state of the model comes along") {
    const Plan from = plan_of({2, 2, 1}, true), to = plan_of({1, 1, 3}, true);
    MemoryBackend disk;
    REQUIRE(save_state(disk, kSource, from, 1).ok());
    const Result<ReshardReport> report = reshard(disk, to);
    REQUIRE_OK(report);
    CHECK(compare(disk, report.value().dir, to, 1) == "");
    CHECK(report.value().manifest.tensors.size() == to.tensors.size() + 1);
    Result<CheckpointReader> reader = CheckpointReader::open(disk, report.value().dir);
    REQUIRE(reader.ok());
    for (size_t s = 0; s < reader.value().manifest().shards.size(); ++s) {
      const ShardEntry& shard = reader.value().manifest().shards[s];
      if (reader.value().manifest().tensors[shard.tensor].kind != "file") continue;
      std::vector<std::byte> bytes(shard.bytes);
      REQUIRE(reader.value().read_shard(static_cast<int64_t>(s), bytes).ok());
      CHECK(std::memcmp(bytes.data(), "kept by ", 8) == 0);
    }
  }

  TEST_CASE("weights only leaves moments and the average behind, and is another reshard than one of all") {
    Recipe recipe = plan_of({2, 1, 1}, true).recipe;
    recipe.optimizer.ema = 0.9;
    const Plan from = make_plan(recipe, 2).value();
    recipe.mesh = {.tp = 1, .pp = 2};
    const Plan to = make_plan(recipe, 4).value();
    MemoryBackend start;
    const Result<SaveReport> saved = save_state(start, kSource, from, kStateKindCount);
    REQUIRE_OK(saved);
    ReshardOptions options{.weights_only = true, .commit_bytes = 1};
    options.alive = [](const WriterId&) { return false; };
    std::atomic<bool> cancel = false;
    options.cancel = &cancel;
    int64_t total_bytes = 0;
    options.progress = [&](int64_t done, int64_t total) {
      cancel = done > total / 2;
      total_bytes = total;
    };
    REQUIRE(reshard(start, to, options).error().code == ErrorCode::kStopped);
    CHECK(total_bytes == payload_bytes(saved.value().manifest) / 4);
    options.cancel = nullptr;
    for (const bool weights_only : {true, false}) {
      CAPTURE(weights_only);
      const auto disk = start.clone();
      options.weights_only = weights_only;
      const Result<ReshardReport> report = reshard(*disk, to, options);
      REQUIRE_OK(report);
      CHECK((report.value().taken_files > 0) == weights_only);
      CHECK(report.value().cleaned.empty() == weights_only);
      const size_t kinds = weights_only ? 1 : kStateKindCount;
      CHECK(compare(*disk, report.value().dir, to, kinds) == "");
      const Manifest& m = report.value().manifest;
      CHECK(m.tensors.size() == to.tensors.size() * (weights_only ? 1 : 4));
      CHECK((m.step == kStep && m.state == saved.value().manifest.state));
      CHECK(m.origin == (weights_only ? "reshard of run-b step 7, weights only" : "reshard of run-b step 7"));
    }
  }

  TEST_CASE("reshard refuses before it writes anything") {
    const Plan from = plan_of({2, 1, 1}, true), to = plan_of({1, 2, 1}, true);
    MemoryBackend disk;
    REQUIRE(save_state(disk, kSource, from).ok());
    const auto refused = [&](const Result<ReshardReport>& report, const char* words) {
      REQUIRE_FALSE(report.ok());
      CHECK(report.error().code == ErrorCode::kInvalidInput);
      CHECK_MESSAGE(report.error().message.find(words) != std::string::npos, report.error().message);
    };
    refused(reshard(disk, plan_of({1, 2, 1}, false)), "missing: weight head.weight");
    refused(reshard(disk, to, {.memory_bytes = 1 << 20}), "at least");
    refused(reshard_checkpoint(disk, step_dir(kSource), kSource, to, new_run()), "the source would be replaced");
    refused(reshard_checkpoint(disk, step_dir(kSource) / "", kSource / ".", to, new_run()), "would be replaced");
    CHECK(list_checkpoints(disk, kTarget).value().checkpoints.empty());
    REQUIRE(reshard(disk, to).ok());
    refused(reshard(disk, from), "is there already");
    CHECK(compare(disk, step_dir(kTarget), to) == "");
    REQUIRE(reshard(disk, from, {.replace_existing = true}).ok());
    CHECK(compare(disk, step_dir(kTarget), from) == "");
  }

  TEST_CASE("damage in the source is named, and nothing is committed") {
    const Plan from = plan_of({2, 1, 1}, true), to = plan_of({1, 2, 1}, true);
    MemoryBackend disk;
    const Result<SaveReport> saved = save_state(disk, kSource, from);
    REQUIRE(saved.ok());
    for (size_t s = 0; s < saved.value().manifest.shards.size(); s += 17) {
      const ShardEntry& shard = saved.value().manifest.shards[s];
      std::byte& victim = disk.bytes_of(step_dir(kSource) /
                                        saved.value().manifest.files[shard.file].name)[shard.offset + shard.bytes / 2];
      victim ^= std::byte{4};
      const Result<ReshardReport> report = reshard(disk, to);
      victim ^= std::byte{4};
      REQUIRE_FALSE(report.ok());
      CHECK(report.error().code == ErrorCode::kCorrupt);
      CHECK_MESSAGE(report.error().message.find(describe_chunk(saved.value().manifest, shard, 0)) != std::string::npos,
                    report.error().message);
      const Catalog after = list_checkpoints(disk, kTarget).value();
      CHECK((after.checkpoints.empty() && after.leftovers.empty()));
    }
    const std::atomic<bool> cancel{true};
    const Result<ReshardReport> stopped = reshard(disk, to, {.cancel = &cancel});
    REQUIRE_FALSE(stopped.ok());
    CHECK(stopped.error().code == ErrorCode::kStopped);
    CHECK(list_checkpoints(disk, kTarget).value().leftovers.empty());
  }

  TEST_CASE("cut off or failing at any I/O call: the source is untouched, the target has the old step or the new one") {
    const Plan from = plan_of({2, 1, 1}, true), old_plan = plan_of({1, 1, 2}, true), to = plan_of({1, 2, 1}, true);
    MemoryBackend start;
    REQUIRE(save_state(start, kSource, from).ok());
    REQUIRE(reshard(start, old_plan).ok());
    int64_t kept_old = 0, got_new = 0, failed = 0;
    enum class How { kKill, kFail, kFailFrom, kShort };
    for (const How how : {How::kKill, How::kFail, How::kFailFrom, How::kShort}) {
      const bool killed = how == How::kKill;
      bool fired = true;
      for (int64_t n = 0; fired; ++n) {
        CAPTURE(static_cast<int>(how));
        CAPTURE(n);
        const int os_errno = n % 2 == 0 ? EIO : ENOSPC;
        const auto disk = start.clone();
        FaultBackend io(*disk, killed                  ? FaultPlan::stop_at_call(n, static_cast<uint64_t>(n))
                               : how == How::kFail     ? FaultPlan::fail_call(n, os_errno)
                               : how == How::kFailFrom ? FaultPlan::fail_from(n, os_errno)
                                                       : FaultPlan::short_write(n, os_errno));
        const Result<ReshardReport> report = reshard(io, to, {.replace_existing = true});
        fired = io.fired();
        failed += report.ok() ? 0 : 1;
        if (!killed && fired && report.ok()) CHECK(compare(*disk, step_dir(kTarget), to) == "");
        for (uint64_t seed = 0; seed < (killed ? 12 : 1); ++seed) {
          const auto after = disk->clone();
          if (killed) after->power_cycle(seed);
          REQUIRE(compare(*after, step_dir(kSource), from) == "");
          const Result<CheckpointInfo> found = newest_complete(*after, kTarget);
          REQUIRE_OK(found);
          if (compare(*after, found.value().dir, to).empty()) {
            ++got_new;
          } else {
            REQUIRE_FALSE(report.ok());
            REQUIRE(compare(*after, found.value().dir, old_plan) == "");
            ++kept_old;
          }
        }
      }
    }
    MESSAGE(failed << " interrupted; " << kept_old << " times the old step, " << got_new << " the new one");
    CHECK(failed > 40);
    CHECK(kept_old > 100);
    CHECK(got_new >= 5);
  }

  TEST_CASE("killed at any I/O call, the next reshard goes on from the files that were done") {
    // One file after the other, and four files in two groups, each written side by side.
    for (const bool shared : {false, true}) {
      CAPTURE(shared);
      const Plan from = shared ? plan_of({1, 1, 1}, true, 400) : plan_of({2, 1, 1}, true);
      const Plan to = shared ? plan_of({2, 2, 1}, true, 400) : plan_of({1, 2, 2}, true);
      MemoryBackend start;
      const Result<SaveReport> saved = save_state(start, kSource, from);
      REQUIRE(saved.ok());
      const int64_t commit_bytes = shared ? saved.value().payload_bytes * 2 / 5 : 1;
      ReshardOptions options{.replace_existing = true, .commit_bytes = commit_bytes};
      if (shared) options.memory_bytes = kMinStreamBytes;     // a group is some bands
      options.alive = [](const WriterId&) { return false; };  // the "killed" one is this process
      int64_t went_on = 0, anew = 0, most = 0;
      bool fired = true;
      for (int64_t n = 0; fired; ++n) {
        CAPTURE(n);
        const auto disk = start.clone();
        FaultBackend io(*disk, FaultPlan::stop_at_call(n, static_cast<uint64_t>(n)));
        const Result<ReshardReport> report = reshard(io, to, options);
        fired = io.fired();
        for (int64_t seed = -1; seed < 2; ++seed) {  // -1: the machine lives; else the power went too
          CAPTURE(seed);
          const auto after = disk->clone();
          if (seed >= 0) after->power_cycle(static_cast<uint64_t>(seed));
          const Result<ReshardReport> again = reshard(*after, to, options);
          REQUIRE_OK(again);
          REQUIRE(compare(*after, step_dir(kTarget), to) == "");
          REQUIRE(verify_checkpoint(*after, step_dir(kTarget)).value().whole());
          const Catalog catalog = list_checkpoints(*after, kTarget).value();
          REQUIRE(catalog.leftovers.empty());
          REQUIRE(after->list(step_dir(kTarget)).value().size() == again.value().manifest.files.size() + 2);
          ++(again.value().taken_files > 0 ? went_on : anew);
          most = std::max(most, again.value().taken_files);
        }
      }
      MESSAGE(went_on << " went on, " << anew << " began anew; at most " << most << " files taken over");
      CHECK(went_on > 20);
      CHECK(most == (shared ? 2 : 3));  // of four: after the last ones comes the commit
    }
  }

  TEST_CASE("reshard takes over what a dead one left only when it is of the same kind and every byte of it holds") {
    const Plan from = plan_of({2, 1, 1}, true), to = plan_of({1, 2, 2}, true);
    MemoryBackend start;
    REQUIRE(save_state(start, kSource, from).ok());
    ReshardOptions options{.commit_bytes = 1};
    options.alive = [](const WriterId&) { return false; };
    std::atomic<bool> cancel = false;
    options.cancel = &cancel;
    options.progress = [&](int64_t done, int64_t total) { cancel = done > total / 2; };
    const Result<ReshardReport> stopped = reshard(start, to, options);
    REQUIRE_FALSE(stopped.ok());
    REQUIRE(stopped.error().code == ErrorCode::kStopped);
    CHECK(stopped.error().message.find("resumes") != std::string::npos);
    const Catalog left = list_checkpoints(start, kTarget).value();
    REQUIRE(left.checkpoints.empty());  // never looks whole
    REQUIRE(left.leftovers.size() == 1);
    options.cancel = nullptr;
    options.progress = {};
    {
      const auto disk = start.clone();
      const Result<ReshardReport> again = reshard(*disk, to, options);
      REQUIRE(again.ok());
      CHECK(again.value().taken_files >= 1);
      CHECK(again.value().taken_bytes > 0);
      CHECK(again.value().payload_bytes == payload_bytes(again.value().manifest));
    }
    const fs::path work = kTarget / left.leftovers[0];
    int64_t tried = 0;
    for (const DirEntry& entry : start.list(work).value()) {
      if (!entry.name.ends_with(".h5")) continue;
      const int64_t size = start.stat(work / entry.name).value().size_bytes;
      for (const int64_t at : {int64_t{5}, size / 2, size - 1}) {
        CAPTURE(entry.name);
        CAPTURE(at);
        const auto disk = start.clone();
        disk->bytes_of(work / entry.name)[static_cast<size_t>(at)] ^= std::byte{1};
        const Result<ReshardReport> again = reshard(*disk, to, options);
        REQUIRE(again.ok());
        REQUIRE(compare(*disk, step_dir(kTarget), to) == "");
        ++tried;
      }
    }
    CHECK(tried >= 3);
    const auto disk = start.clone();
    options.memory_bytes = kMinStreamBytes;  // other chunks, other bytes
    const Result<ReshardReport> other = reshard(*disk, to, options);
    REQUIRE(other.ok());
    CHECK(other.value().taken_files == 0);
    CHECK(other.value().cleaned == left.leftovers);
  }

  TEST_CASE("a state several times the memory budget stays within it") {
    const cairn::testing::TempDir temp("reshard");
    const fs::path& folder = temp.path;
    const std::unique_ptr<IoBackend> io = make_best_backend();
    const LargeState source(*io, folder / "source", LargeState::plan_for(4, 1, 1, 256, 1024, 30'000));
    const Plan to = LargeState::plan_for(1, 2, 3, 256, 1024, 30'000);
    const int64_t state_kib = source.payload_bytes >> 10;

    const auto peak_kib = [&](int64_t memory_bytes, const char* name) -> int64_t {
      mallopt(M_MMAP_THRESHOLD, 256 << 10);  // as the program does
      malloc_trim(0);
      std::ofstream("/proc/self/clear_refs") << 5;  // the peak begins anew
      const int64_t before = status_kib("VmRSS:");
      const std::unique_ptr<IoBackend> source_io = make_best_backend();
      const Result<ReshardReport> report = reshard_checkpoint(
          *io, source.dir, folder / name, to, new_run(), {.memory_bytes = memory_bytes, .source_io = source_io.get()});
      REQUIRE_OK(report);
      if (memory_bytes < source.payload_bytes) CHECK(report.value().windows > 3);
      return status_kib("VmHWM:") - before;
    };
    constexpr int64_t kBudget = int64_t{32} << 20;
    const int64_t narrow = peak_kib(kBudget, "narrow");
    const int64_t wide = peak_kib(int64_t{256} << 20, "wide");
    MESSAGE("state " << state_kib << " KiB; budget " << (kBudget >> 10) << " KiB: peak " << narrow
                     << " KiB; budget 262144 KiB: peak " << wide << " KiB");
    CHECK(state_kib > 3 * (kBudget >> 10));
#ifndef CAIRN_SANITIZED
    CHECK(narrow < kBudget >> 10);
    CHECK(wide > state_kib * 9 / 10);  // the measure sees what it should
#endif

    CHECK(LargeState::wrong_in(*io, folder / "narrow" / step_dir_name(kStep)) == 0);
  }

  TEST_CASE(
      "ranks of more tp than the source has are written side by side: a chunk that all of them want is read once") {
    const cairn::testing::TempDir temp("reshard-shared");
    const std::unique_ptr<IoBackend> io = make_best_backend();
    const LargeState source(*io, temp.path / "source", LargeState::plan_for(1, 1, 1, 512, 4096, 512));
    const auto reshard_to = [&](const Plan& to, const char* name, int64_t memory_mib, int64_t commit_bytes) {
      const std::unique_ptr<IoBackend> source_io = make_best_backend();
      int64_t before = 0;
      const auto progress = [&](int64_t done, int64_t total) {
        CHECK(done > before);
        CHECK(total == source.payload_bytes);
        before = done;
      };
      const Result<ReshardReport> report = reshard_checkpoint(*io, source.dir, temp.path / name, to, new_run(),
                                                              {.memory_bytes = memory_mib << 20,
                                                               .progress = progress,
                                                               .source_io = source_io.get(),
                                                               .commit_bytes = commit_bytes});
      REQUIRE_OK(report);
      CHECK(before == source.payload_bytes);
      CHECK(LargeState::wrong_in(*io, temp.path / name / step_dir_name(kStep)) == 0);
      return static_cast<double>(report.value().read_bytes) / static_cast<double>(source.payload_bytes);
    };
    const Plan tp4 = LargeState::plan_for(4, 1, 1, 512, 4096, 512),
               mixed = LargeState::plan_for(4, 2, 2, 512, 4096, 512);
    const double apart = reshard_to(tp4, "apart", 64, 1), together = reshard_to(tp4, "together", 64, 0);
    const double of_16 = reshard_to(mixed, "16", 64, 0), groups = reshard_to(mixed, "groups", 64, int64_t{64} << 20);
    MESSAGE("read per byte of the state: " << apart << " one by one, " << together << " side by side; 16 files "
                                           << of_16 << ", in groups of 64 MiB " << groups);
    CHECK(apart > 2);
    CHECK(together < 1.5);
    CHECK(of_16 < 1.5);
    CHECK(groups < apart);
    const Manifest a = read_manifest(*io, temp.path / "apart" / step_dir_name(kStep)).value();
    const Manifest b = read_manifest(*io, temp.path / "together" / step_dir_name(kStep)).value();
    CHECK((a.shards == b.shards));  // offsets and hashes: the order leaves no trace in the files
    CHECK((a.files == b.files));
  }
}
