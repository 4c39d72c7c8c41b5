#pragma once
// Which snapshot memory a run gets at its start: what its own dead agent left, what other dead runs left, and what room
// there is.

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/persister.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/snapshot/arena.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"

namespace cairn::ckpt {

/// The snapshot memory of a run: what a dead agent of this run left, if layout and recipe are these, else a new one.
/// Removes stale memory: the run has continued on another machine and saved there since. (The newest checkpoint, whose
/// bytes are verified for that, names a start (Manifest::extra) that the memory does not know.) Memory of another
/// layout or recipe is first written to `checkpoints_dir` if it is newer than what is there. Of other dead runs of this
/// user, removes memory whose steps are on disk; other memory only when this run would not fit beside it with two
/// banks. `report` gets a line for each such event.
///
/// On one of several hosts `ranks` are those of this host: the memory has their slots, and what lies here of other
/// ranks is their agent's. Memory of some ranks alone stands in for no step: where all or others are to run, it goes
/// when the newest checkpoint is as new; else it is an error, for this host alone cannot save it. New memory is made of
/// what is `prepared`.
Result<Arena> open_run_memory(const Plan& plan, const RunText& run, const std::filesystem::path& checkpoints_dir,
                              const MakeIo& make_io, std::vector<std::string>* report = nullptr,
                              const BeforeSave& before_save = {}, const std::function<bool()>& stop = {},
                              const std::optional<RankRange>& ranks = {},
                              std::shared_ptr<PreparedMemory> prepared = nullptr);

/// On one of several hosts: removes memory of this run's ranks that agents which died have left in this folder and the
/// run goes on without, as `without` says. None that an agent holds. Returns a line for each.
std::vector<std::string> remove_memory_gone_on_without(
    const std::string& folder, std::string_view run_id,
    const std::function<bool(const RankRange& ranks, int64_t world)>& without);

/// Whether a start has saved this checkpoint that leads to this memory. Of what no run has saved nobody can tell: true.
bool leads_to(const CheckpointInfo& saved, const Arena& memory);

/// Banks of the ranks of a host. `sends`: its bank is copied to another host, over the network.
int64_t banks_of(const CheckpointConfig& config, bool sends);

/// The arena of a plan: what open_run_memory creates. Errors: kInvalidInput from encoding the directory.
Result<ArenaSpec> arena_spec(const Plan& plan, const RunText& run, const std::optional<RankRange>& ranks = {});

}  // namespace cairn::ckpt
