#pragma once
// Which snapshot memory a run gets at its start: what its own dead agent left, what other dead runs left, and what room
// there is.

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ckpt/persister.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/snapshot/arena.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"

namespace cairn::ckpt {

/// The snapshot memory of a run: the one that a dead agent of this run left when it has this layout and recipe, else a
/// new one. Memory without which the run has gone on and saved, at another machine, is removed: the newest checkpoint,
/// whose bytes are verified for that, names a start (Manifest::extra) that the memory does not know. What a left one of
/// another layout or recipe holds is first written to `checkpoints_dir` if it is newer than what is there. Of other
/// dead runs of this user, memory whose steps are on disk is removed, other memory only when this run would not fit
/// beside it with two banks. `report` gets a line for each such event.
Result<Arena> open_run_memory(const Plan& plan, const RunText& run, const std::filesystem::path& checkpoints_dir,
                              const MakeIo& make_io, std::vector<std::string>* report = nullptr,
                              const BeforeSave& before_save = {}, const std::function<bool()>& stop = {});

/// Whether a start has saved this checkpoint that leads to this memory. Of what no run has saved nobody can tell: true.
bool leads_to(const CheckpointInfo& saved, const Arena& memory);

/// The arena of a plan: what open_run_memory creates. Errors: kInvalidInput from encoding the directory.
Result<ArenaSpec> arena_spec(const Plan& plan, const RunText& run);

}  // namespace cairn::ckpt
