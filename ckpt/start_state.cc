#include "ckpt/start_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "ckpt/persist/read.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/restore.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/labels.h"
#include "ckpt/retention/replace.h"
#include "ckpt/run_memory.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/snapshot.h"
#include "ckpt/store/read_again.h"
#include "ckpt/verify/verify.h"

namespace cairn::ckpt {
namespace {

Result<StartState> state_of(const Manifest& manifest, std::string place) {
  StartState out{.source = StartState::Source::kDisk,
                 .recipe = manifest.recipe,
                 .mesh = manifest.mesh,
                 .run_id = manifest.run.id,
                 .lineage = lineage_of(manifest),
                 .place = std::move(place)};
  RT_TRY_SET(out.position, position_of(manifest));
  out.bare = !has_moments(manifest) || out.position.sampler.empty();
  return out;
}

struct MemoryState {
  StartState state;
  Arena arena;
};

/// The newest whole state in memory that dead agents of the run left.
std::optional<MemoryState> newest_in_memory(const StartLook& look) {
  std::optional<MemoryState> best;
  for (const std::string& folder : look.folders) {
    if (look.run_id.empty()) break;
    for (const StaleArena& stale : stale_arenas(folder)) {
      if (stale.run_id != look.run_id || stale.elsewhere) continue;
      Result<Arena> arena = Arena::attach(stale.name);
      if (!arena.ok()) continue;
      const bool distrusted = arena.value().control().distrusted.load(std::memory_order_acquire) != 0;
      const std::optional<CommonSnapshot> newest =
          newest_verified(arena.value(), distrusted ? Check::kEveryByte : Check::kHeaders);
      const bool ruined = newest && arena.value().control().ruined_step.load(std::memory_order_acquire) == newest->step;
      if (!newest || ruined || (best && best->state.step() >= newest->step)) continue;
      Result<trainer::TrainPosition> position = decode_position(newest->position);
      const Result<Manifest> directory = decode_manifest(arena.value().directory());
      if (!position.ok() || !directory.ok()) continue;
      best.emplace(MemoryState{StartState{.source = StartState::Source::kMemory,
                                          .position = std::move(position).value(),
                                          .recipe = directory.value().recipe,
                                          .mesh = directory.value().mesh,
                                          .run_id = look.run_id,
                                          .place = stale.name},
                               std::move(arena).value()});
    }
  }
  return best;
}

}  // namespace

Result<StartState> state_in(IoBackend& io, const std::filesystem::path& checkpoint) {
  RT_TRY_SET(const Manifest manifest, read_manifest(io, checkpoint));
  return state_of(manifest, checkpoint.string());
}

Result<StartState> look_at_start(IoBackend& io, const StartLook& look) {
  std::optional<MemoryState> memory = newest_in_memory(look);
  StartState disk;
  std::vector<std::string> passed_over;
  bool all_bad = true;
  RT_TRY_SET(const Names names, list_names(io, look.checkpoints_dir));
  RT_TRY_SET(const Labels labels, labels_for_start(io, look.checkpoints_dir));
  for (auto step = names.steps.rbegin(); step != names.steps.rend() && !disk.any(); ++step) {
    CheckpointInfo info = look_at_checkpoint(io, look.checkpoints_dir, *step);
    const auto cut = std::ranges::find(names.cut_off, *step, &CutOff::step);
    if (!info.complete && cut != names.cut_off.end()) info = look_at_cut_off(io, look.checkpoints_dir, *cut);
    if (memory && memory->state.step() > *step) {  // unless the run has gone on without that memory
      if (!info.complete || leads_to(info, memory->arena)) break;
      memory.reset();
    }
    if (info.unread && !disk_fails(info.os_errno)) return unreadable_now(info);
    const LabelEntry* const label = entry_of(labels, info.step, info.created_unix_ms);
    const bool bad = info.complete && label != nullptr && label->label == Label::kBad;
    all_bad = all_bad && bad;
    std::string problem = bad ? "it is bad: " + label->why : info.problem;
    if (info.complete && problem.empty() && look.verify) {
      RT_TRY_SET(const VerifyReport report, verify_checkpoint(io, info.dir, {.max_damages = 1}));
      if (!report.whole()) problem = report.damages.front().message;
    }
    if (!problem.empty()) {
      passed_over.push_back(fmt::format("{}: {}", info.dir.string(), problem));
      continue;
    }
    Result<StartState> state = state_in(io, info.dir);
    if (!state.ok() && state.error().code == ErrorCode::kCorrupt) {
      passed_over.push_back(std::move(state).error().with(info.dir.string()).message);
      continue;
    }
    RT_TRY_SET(disk, std::move(state).with(info.dir.string()));
    if (memory && !leads_to(info, memory->arena)) memory.reset();
  }
  if (memory && memory->state.step() >= disk.step()) {
    // Memory of the same step may have been read from that checkpoint, by a start that was killed before its first
    // step: its recipe did not train the step.
    if (disk.any() && memory->state.step() == disk.step()) {
      memory->state.recipe = std::move(disk.recipe);
      memory->state.position.past = std::move(disk.position.past);
    }
    disk = std::move(memory->state);
  }
  if (!disk.any() && !passed_over.empty()) return none_usable(look.checkpoints_dir, passed_over, all_bad);
  disk.passed_over = std::move(passed_over);
  return disk;
}

}  // namespace cairn::ckpt
