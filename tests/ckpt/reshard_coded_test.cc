// Resharding into coded files, killed at any I/O call: it goes on from the files that were done.
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/reshard.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/verify/verify.h"
#include "runtime/core/random.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
namespace fs = std::filesystem;

namespace {

const fs::path kSource = "/source/checkpoints", kTarget = "/target/checkpoints";
constexpr int64_t kStep = 7;

/// With tensors that are large enough to be coded, and others that stay raw.
Plan plan_for(int64_t tp, int64_t pp, int64_t dp) {
  Recipe r;
  r.name = "coded";
  r.stop = {Span::Unit::kSteps, 10};
  r.model = {.layers = 2, .width = 64, .heads = 4, .kv_heads = 4, .head_dim = 16, .ffn = 128, .context = 8};
  r.model.vocab = 300;
  r.batch = {.samples = 12, .micro = 1};
  r.mesh = {.tp = tp, .pp = pp};
  return make_plan(r, tp * pp * dp).value();
}

RunText run_text() { return {"name", "run", {}, "{}", "hash"}; }

Result<SaveReport> save_state(IoBackend& io, const Plan& plan) {
  Manifest skeleton = manifest_skeleton(plan, run_text());
  skeleton.step = kStep;
  const StateIndex index(plan);
  std::vector<WriterPart> parts;
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
    WriterPart part{shard_file_name(rank, plan.mesh.world()), {}};
    for (const SlotShard& slot : slot_layout(plan, rank).shards) {
      const int64_t tensor = index.at(slot.kind, slot.tensor);
      ShardData shard{.tensor = tensor, .lo = slot.box.lo, .hi = slot.box.hi, .bytes = slot.bytes};
      shard.fill = [tensor](int64_t offset, std::span<std::byte> out) -> Status {
        for (size_t at = 0; at < out.size(); at += 4) {  // few exponents, as in trained tensors
          const uint64_t word = mix64(static_cast<uint64_t>(tensor) << 32 | (static_cast<uint64_t>(offset) + at));
          const auto value = static_cast<float>(static_cast<double>(word % 1000003) * 1e-8);
          std::memcpy(out.data() + at, &value, 4);
        }
        return {};
      };
      part.shards.push_back(std::move(shard));
    }
    parts.push_back(std::move(part));
  }
  return save_checkpoint(io, kSource, std::move(skeleton), parts);
}

ReshardOptions coded() {
  ReshardOptions options{.codec = Codec::kShuffleZstd, .replace_existing = true, .commit_bytes = 1};
  options.alive = [](const WriterId&) { return false; };  // the "killed" one is this process
  return options;
}

Result<ReshardReport> reshard(IoBackend& io, const Plan& target, const ReshardOptions& options) {
  return reshard_checkpoint(io, kSource / step_dir_name(kStep), kTarget, target, run_text(), options);
}

}  // namespace

TEST_SUITE("ckpt/reshard_coded") {
  TEST_CASE("killed at any I/O call, the next coded reshard goes on from the files that were done, to the same bytes") {
    const Plan from = plan_for(2, 1, 1), to = plan_for(1, 1, 3);
    MemoryBackend start;
    REQUIRE(save_state(start, from).ok());
    const auto undisturbed = start.clone();
    const Result<ReshardReport> whole = reshard(*undisturbed, to, coded());
    REQUIRE_OK(whole);
    int64_t coded_shards = 0, raw_shards = 0;
    for (const ShardEntry& shard : whole.value().manifest.shards)
      ++(shard.codec == Codec::kRaw ? raw_shards : coded_shards);
    REQUIRE(coded_shards > 10);
    REQUIRE(raw_shards > 10);
    int64_t went_on = 0, anew = 0, most = 0;
    bool fired = true;
    for (int64_t n = 0; fired; n += 2) {
      CAPTURE(n);
      const auto disk = start.clone();
      FaultBackend io(*disk, FaultPlan::stop_at_call(n, static_cast<uint64_t>(n)));
      const Result<ReshardReport> report = reshard(io, to, coded());
      fired = io.fired();
      if (n % 4 == 2) disk->power_cycle(static_cast<uint64_t>(n));  // else the machine lives
      const Result<ReshardReport> again = reshard(*disk, to, coded());
      REQUIRE_OK(again);
      REQUIRE(again.value().manifest.shards == whole.value().manifest.shards);  // offsets, sizes, hashes, as stored
      REQUIRE(again.value().manifest.files == whole.value().manifest.files);
      REQUIRE(verify_checkpoint(*disk, kTarget / step_dir_name(kStep)).value().whole());
      REQUIRE(list_checkpoints(*disk, kTarget).value().leftovers.empty());
      ++(again.value().taken_files > 0 ? went_on : anew);
      most = std::max(most, again.value().taken_files);
    }
    MESSAGE(went_on << " went on, " << anew << " began anew; at most " << most << " files taken over");
    CHECK(went_on > 10);
    CHECK(most == 2);  // of three: after the last one comes the commit
  }

  TEST_CASE(
      "coded files that a dead reshard left are taken over only when every byte holds, and only by the same codec") {
    const Plan from = plan_for(2, 1, 1), to = plan_for(1, 1, 3);
    MemoryBackend start;
    REQUIRE(save_state(start, from).ok());
    std::atomic<bool> cancel = false;
    ReshardOptions options = coded();
    options.cancel = &cancel;
    options.progress = [&](int64_t done, int64_t total) { cancel = done > total * 3 / 4; };
    const Result<ReshardReport> stopped = reshard(start, to, options);
    REQUIRE_FALSE(stopped.ok());
    REQUIRE(stopped.error().code == ErrorCode::kStopped);
    const Catalog left = list_checkpoints(start, kTarget).value();
    REQUIRE(left.leftovers.size() == 1);
    const auto untouched = start.clone();
    REQUIRE(reshard(*untouched, to, coded()).value().taken_files == 2);

    const fs::path work = kTarget / left.leftovers[0];
    int64_t tried = 0;
    for (const DirEntry& entry : start.list(work).value()) {
      if (!entry.name.ends_with(".h5") || start.bytes_of(work / entry.name).size() < 100) continue;
      const auto size = static_cast<int64_t>(start.bytes_of(work / entry.name).size());
      for (int64_t at = 5; at < size; at += size / 7) {
        CAPTURE(entry.name);
        CAPTURE(at);
        const auto disk = start.clone();
        disk->bytes_of(work / entry.name)[static_cast<size_t>(at)] ^= std::byte{1};
        const Result<ReshardReport> again = reshard(*disk, to, coded());
        REQUIRE(again.ok());
        REQUIRE(again.value().taken_files <= 2);
        REQUIRE(verify_checkpoint(*disk, kTarget / step_dir_name(kStep)).value().whole());
        ++tried;
      }
    }
    CHECK(tried >= 14);
    ReshardOptions raw = coded();
    raw.codec = Codec::kRaw;
    const Result<ReshardReport> other = reshard(*start.clone(), to, raw);
    REQUIRE(other.ok());
    CHECK(other.value().taken_files == 0);
    CHECK(other.value().cleaned == left.leftovers);
  }
}
