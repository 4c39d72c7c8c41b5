#include "ckpt/run_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "ckpt/format/manifest.h"
#include "ckpt/plan/free_copies.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"
#include "ckpt/run_labels.h"
#include "ckpt/store/read_again.h"
#include "ckpt/store/stoppable_backend.h"
#include "ckpt/verify/verify.h"
#include "runtime/core/units.h"

namespace cairn::ckpt {
namespace {

using Say = std::function<void(std::string)>;

/// "removed FILE of a dead run", or of several "removed 3 segments in FOLDER of dead runs".
void say_of_files(const std::vector<std::string>& files, const std::string& folder, std::string_view verb,
                  std::string_view whose, const Say& say) {
  if (files.size() == 1) say(fmt::format("{} {}{}", verb, files.front(), whose));
  if (files.size() > 1) say(fmt::format("{} {} segments in {}{}", verb, files.size(), folder, whose));
}

/// Removes what dead runs left that nobody misses: all but steps that no checkpoint has. What this run itself left
/// stays until it has `begun` with the best of it. Returns what stays of others; the first is the first to go for want
/// of room. With `ranks`, those of this host, memory of the run's other ranks is their agent's.
std::vector<StaleArena> clean_memory(const std::string& folder, std::string_view run_id,
                                     const std::optional<RankRange>& ranks, bool begun, const Say& say) {
  std::vector<StaleArena> left;
  std::vector<std::string> removed, elsewhere;
  for (StaleArena& stale : stale_arenas(folder)) {
    const bool mine = stale.run_id == run_id;
    if (mine && ranks && !stale.has_world && stale.ranks != *ranks) continue;
    if (mine ? begun : stale.unsaved_step == 0 && stale.unread.empty()) {
      if (remove_stale_arena(stale)) removed.push_back(stale.name);
    } else if (stale.elsewhere) {
      if (!begun) elsewhere.push_back(stale.name);
    } else if (!mine) {
      left.push_back(std::move(stale));
    }
  }
  say_of_files(removed, folder, "removed", " of a dead run", say);
  say_of_files(elsewhere, folder, "kept:", ", another machine's", say);
  return left;
}

/// -1: none is whole.
int64_t newest_step(const Arena& arena) {
  const std::vector<SlotView> views = arena.views();
  const auto newest = newest_whole(views);
  return newest ? views[*newest].step : -1;
}

/// The newest checkpoint, of which what a disk fails is read again. Nullopt: there is none, or none that can be read.
Result<std::optional<CheckpointInfo>> newest_on_disk(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                                     const std::function<bool()>& stop) {
  Result<CheckpointInfo> newest = read_again([&] { return newest_complete(io, checkpoints_dir); }, kReadAgain, stop);
  if (newest.ok()) return std::optional(std::move(newest).value());
  if (stop && stop()) return Error{ErrorCode::kStopped, "asked to stop at the start"};
  return std::optional<CheckpointInfo>();
}

/// Whether the run has gone on without this memory, as at another machine: then it is not gone on with, for what was
/// saved there would be given up. Errors: those of reading that, kStopped.
Result<bool> is_left_behind(IoBackend& io, const Arena& memory, const std::optional<CheckpointInfo>& newest,
                            const std::function<bool()>& stop) {
  if (!newest || newest_step(memory) < 0 || leads_to(*newest, memory)) return false;
  const auto holds = [&]() -> Result<bool> {
    RT_TRY_SET(const VerifyReport report, verify_checkpoint(io, newest->dir, {.max_damages = 1, .structure = false}));
    return report.whole();
  };
  RT_TRY_SET(const bool whole, read_again(holds, kReadAgain, stop));  // memory is given up for it: be sure
  return whole ? Result<bool>(true) : holds();                        // what a disk fails counts as damage there
}

/// That a checkpoint makes memory of some ranks superfluous: a step is not saved from a part of it.
Status check_saved(const Arena& memory, const std::optional<CheckpointInfo>& newest) {
  const int64_t step = newest_step(memory);
  if (step <= 0 || (newest && newest->step >= step)) return {};
  return Error{ErrorCode::kUnavailable,
               fmt::format("it has step {} of ranks {} to {} of {}, which this host alone cannot save; resume on the "
                           "hosts that trained it, or remove the file to go on without that step",
                           step, memory.ranks().first, memory.ranks().end - 1, memory.world())};
}

/// Memory of other runs, in one line for any number of them.
std::string dead_runs_text(const std::vector<StaleArena>& dead) {
  int64_t bytes = 0;
  for (const StaleArena& stale : dead) bytes += stale.bytes;
  if (dead.size() > 1) {
    return fmt::format(
        "{} segments of dead runs hold {} of memory, and steps that no checkpoint has: `cairn doctor` lists them",
        dead.size(), format_bytes(bytes));
  }
  const StaleArena& stale = dead.front();
  const std::string held =
      stale.unread.empty()
          ? fmt::format("{}, still holds step {}, which no checkpoint has: resume that run", stale.run_id,
                        stale.unsaved_step)
          : fmt::format("cannot be read ({}): resume that run with the build that left it", stale.unread);
  return fmt::format("{} of a dead run, {}, or remove the file to have its {}", stale.name, held, format_bytes(bytes));
}

/// That a run can start is worth more than steps that a dead run may never ask for; nothing else is.
void make_room(const ArenaSpec& least, std::vector<StaleArena>& dead, const Say& say) {
  int64_t bytes = 0;
  for (const StaleArena& stale : dead) bytes += stale.bytes;
  if (!Arena::has_room(least, bytes).ok()) return;  // would not help
  while (!dead.empty() && !Arena::has_room(least).ok()) {
    const StaleArena stale = std::move(dead.front());
    dead.erase(dead.begin());
    if (!remove_stale_arena(stale)) continue;
    const std::string held = stale.unread.empty() ? fmt::format("{}, with its step {}, which no checkpoint has",
                                                                stale.run_id, stale.unsaved_step)
                                                  : "which cannot be read (" + stale.unread + ")";
    say(fmt::format("warning: removed {} of a dead run, {}: this run has no room beside it", stale.name, held));
  }
}

/// With as many of the banks as fit into memory, at least two of several.
Result<Arena> create_what_fits(ArenaSpec spec, const Say& say) {
  const int64_t wanted = spec.slots;
  Result<Arena> made = Arena::create(spec);
  if (made.ok()) return made;
  const Error first = made.error();
  while (!made.ok() && made.error().code == ErrorCode::kNoSpace && spec.slots > 2) {
    --spec.slots;
    made = Arena::create(spec);
  }
  if (!made.ok()) return made;  // says what is missing for the least that will do
  say(spec.slots == 2 ? fmt::format("only two banks of the training state fit into memory ({}): while a checkpoint is "
                                    "being written, a step may have to wait for it",
                                    first.message)
                      : fmt::format("only {} of {} banks of the training state fit into memory ({}): at most {} saves "
                                    "will be in flight",
                                    spec.slots, wanted, first.message, spec.slots - 2));
  return made;
}

}  // namespace

std::vector<std::string> remove_memory_gone_on_without(
    const std::string& folder, std::string_view run_id,
    const std::function<bool(const RankRange& ranks, int64_t world)>& without) {
  std::vector<std::string> out;
  for (const StaleArena& stale : stale_arenas(folder)) {
    if (stale.run_id != run_id || stale.has_world || !without(stale.ranks, stale.world)) continue;
    if (!remove_stale_arena(stale)) continue;
    const std::string held = stale.unsaved_step > 0 ? fmt::format(", with its step {}", stale.unsaved_step) : "";
    out.push_back(
        fmt::format("removed {} of this run's dead agent{}: the run has gone on without it", stale.name, held));
  }
  return out;
}

bool leads_to(const CheckpointInfo& saved, const Arena& memory) {
  return saved.starts.empty() || saved.run_id != memory.run_id() ||
         std::ranges::count(memory.starts(), saved.starts.front()) > 0;
}

int64_t banks_of(const CheckpointConfig& config, bool sends) {
  return banks_for(config.in_flight) + (sends && config.replicate_steps > 0 ? kReplicaBanks : 0);
}

Result<ArenaSpec> arena_spec(const Plan& plan, const RunText& run, const std::optional<RankRange>& ranks) {
  ArenaSpec spec{.run_id = run.run_id, .recipe_hash = run.recipe_hash};
  spec.here = ranks;
  spec.ranks = slot_layouts(plan);
  const CheckpointConfig& config = plan.recipe.checkpoint;
  const bool may_send = config.replicate_steps > 0 && ranks && ranks->size() < plan.mesh.world();
  spec.slots = banks_of(config, may_send && free_holders(plan, plan.mesh.world() / ranks->size()).empty());
  if (!plan.recipe.optimizer.offload.empty()) {
    spec.folder = std::filesystem::absolute(plan.recipe.optimizer.offload).lexically_normal();
    if (spec.folder.ends_with('/')) spec.folder.pop_back();
  }
  spec.layout_hash = layout_hash(plan, spec.ranks);
  // Where state is copied the weights are not: they die with the process, and are made from the masters again.
  const bool shared_weights = plan.recipe.checkpoint.snapshot_by != SnapshotBy::kCopy;
  for (int64_t rank = 0; shared_weights && rank < plan.mesh.world(); ++rank)
    spec.weight_bytes.push_back(plan.rank(rank).weight_bytes);
  RT_TRY_SET(spec.directory, encode_manifest(slot_manifest(plan, spec.ranks, run, spec.chunk_bytes)));
  return spec;
}

Result<Arena> open_run_memory(const Plan& plan, const RunText& run, const std::filesystem::path& checkpoints_dir,
                              const MakeIo& make_io, std::vector<std::string>* report, const BeforeSave& before_save,
                              const std::function<bool()>& stop, const std::optional<RankRange>& ranks,
                              std::shared_ptr<PreparedMemory> prepared) {
  const auto say = [&](std::string line) {
    if (report != nullptr) report->push_back(std::move(line));
  };
  const std::unique_ptr<IoBackend> io = make_stoppable(make_io(), stop);
  {
    RT_TRY(make_dirs(*io, checkpoints_dir));
    RT_TRY_SET(const CleanReport cleaned, clean_leftovers(*io, checkpoints_dir));
    for (const std::string& line : cleaned.put_back) say(line);
    for (const std::string& name : cleaned.removed) say(fmt::format("removed {}, left by a writer that died", name));
    for (const std::string& line : cleaned.left) say(fmt::format("left alone: {}", line));
  }
  RT_TRY_SET(const ArenaSpec spec, arena_spec(plan, run, ranks));
  const RankRange here = ranks.value_or(RankRange{0, plan.mesh.world()});
  std::vector<std::string> folders = {spec.folder};  // the run may have had no offload before
  if (spec.folder != kSharedMemory) folders.emplace_back(kSharedMemory);
  const auto clean = [&](bool begun) {
    std::vector<StaleArena> dead = clean_memory(spec.folder, run.run_id, ranks, begun, say);
    if (folders.size() > 1) clean_memory(folders[1], run.run_id, ranks, begun, say);
    return dead;
  };
  const auto tell = [&](const std::vector<StaleArena>& dead) {
    if (!dead.empty()) say(dead_runs_text(dead));
  };
  clean(false);
  RT_TRY_SET(const std::optional<CheckpointInfo> newest, newest_on_disk(*io, checkpoints_dir, stop));
  std::optional<Arena> left;
  for (const std::string& folder : folders) {
    for (;;) {  // those that agents have left, the newest first
      RT_TRY_SET(std::optional<Arena> found, Arena::adopt(run.run_id, folder, ranks));
      if (!found) break;
      RT_TRY_SET(const int64_t ruined, drop_ruined(*found, *io, checkpoints_dir));
      if (ruined != 0) say(fmt::format("step {} in {} has ruined weights: dropped", ruined, found->name()));
      RT_TRY_SET(const bool behind, is_left_behind(*io, *found, newest, stop));
      if (behind) {
        say(
            fmt::format("warning: removed {}, which held step {} of this run: the run has continued without it, as on "
                        "another machine, and saved step {} ({})",
                        found->name(), newest_step(*found), newest->step, newest->dir.string()));
        RT_TRY(found->remove());
        continue;
      }
      if (left) {  // the run had an offload folder, and once none
        const bool later = newest_step(*found) > newest_step(*left);
        Arena& older = later ? *left : *found;
        say(fmt::format("removed {}, which held step {} of this run: {} has step {}", older.name(), newest_step(older),
                        (later ? *found : *left).name(), newest_step(later ? *found : *left)));
        RT_TRY(older.remove());
        if (!later) break;
      }
      left = std::move(found);
      break;
    }
  }
  if (left) {
    if (left->layout_hash() == spec.layout_hash && left->recipe_hash() == spec.recipe_hash &&
        left->directory() == spec.directory && left->ranks() == here) {
      say("took over the snapshot memory of this run's dead agent");
      tell(clean(true));
      left->begin_start(newest && !newest->starts.empty() ? newest->starts.front() : 0);
      return std::move(*left);
    }
    Status flushed;
    if (!left->has_world()) {
      flushed = check_saved(*left, newest);
    } else {
      NodePersister persister(
          *left, make_io, checkpoints_dir,
          {.low_priority = false, .before_save = before_save, .on_event = [&](const PersistEvent& event) {
             say(event.status.ok() ? fmt::format("wrote step {} from the snapshot memory of this "
                                                 "run's dead agent, which had another layout or "
                                                 "recipe, to {}",
                                                 event.step, event.dir.string())
                                   : event.status.error().message);
           }});
      flushed = persister.flush();
    }
    // Not removed unless its state is safe: the person can free the disk and try again.
    if (!flushed.ok()) {
      return std::move(flushed)
          .with(fmt::format("writing the snapshot that this run's dead agent left ({})", left->name()))
          .error();
    }
    RT_TRY(left->remove());
    left.reset();  // unlinked is not freed: the mapping holds the pages that the new memory needs
  }
  std::vector<StaleArena> dead = clean(true);
  ArenaSpec wanted = spec;
  wanted.prepared = std::move(prepared);
  ArenaSpec least = wanted;
  least.slots = std::min<int64_t>(2, wanted.slots);
  make_room(least, dead, say);
  tell(dead);
  RT_TRY_SET(Arena made, create_what_fits(std::move(wanted), say));
  made.begin_start(0);
  return made;
}

}  // namespace cairn::ckpt
