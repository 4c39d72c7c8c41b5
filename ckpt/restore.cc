#include "ckpt/restore.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>

#include "ckpt/format/manifest.h"
#include "ckpt/persist/read.h"
#include "ckpt/plan/load_plan.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/restore_slot.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/replace.h"
#include "ckpt/snapshot/snapshot.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/read_again.h"
#include "ckpt/verify/verify.h"
#include "runtime/trainer/initial.h"

namespace cairn::ckpt {
namespace {

using trainer::Restored;
using trainer::StateKind;
using trainer::StateTensor;
using trainer::TrainPosition;

/// check_tensors on weights and, unless they begin at zero, moments; files that an import kept are none of the
/// trainer's business, and averages are taken where they are there and wanted.
Status check_state(const Manifest& manifest, const Plan& plan, const std::filesystem::path& dir) {
  if (!has_moments(manifest)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("weights only, without the optimizer state that training resumes from; a new run can "
                             "begin with them: {}",
                             how_to_begin_from(dir))};
  }
  const bool weights_alone = moments_begin(plan, manifest);
  Manifest state;
  std::copy_if(manifest.tensors.begin(), manifest.tensors.end(), std::back_inserter(state.tensors),
               [&](const TensorEntry& entry) {
                 return entry.kind == kWeightKind || (is_moment_kind(entry.kind) && !weights_alone);
               });
  const StateKinds kinds = weights_alone ? StateKinds::weights_alone() : plan.state_kinds().without(StateKind::kEma);
  RT_TRY(check_moments(kinds_in(state), kinds));
  return check_tensors(state, state_tensors(plan.tensors, kinds));
}

Result<std::vector<WantedBox>> wanted_boxes(const Plan& plan, const LoadPlanner& planner,
                                            std::span<const StateTensor> state) {
  std::vector<WantedBox> out;
  out.reserve(state.size());
  for (const StateTensor& item : state) {
    if (item.tensor < 0 || item.tensor >= static_cast<int64_t>(plan.tensors.size()) ||
        item.bytes != item.box.count_elems() * 4) {
      return Error{ErrorCode::kInternal,
                   fmt::format("state of tensor {}, box {}, {} bytes", item.tensor, to_string(item.box), item.bytes)};
    }
    const std::string_view kind = kStateKinds[static_cast<size_t>(item.kind)], name = plan.tensors[item.tensor].name;
    out.push_back({planner.kind_to_read(kind, name), name, item.box});
  }
  return out;
}

Result<std::unique_ptr<ForeignWeights>> open_if_foreign(const OpenForeign& open, const std::filesystem::path& dir) {
  return open ? open(dir) : Result<std::unique_ptr<ForeignWeights>>(std::unique_ptr<ForeignWeights>());
}

/// Fills `state` from weights that are no checkpoint: what they lack starts anew, moments are zero, and the run is at
/// its beginning.
Result<TrainPosition> load_from_foreign(const Plan& plan, const ForeignWeights& source,
                                        std::span<const StateTensor> state, DeviceLink& link, const InitConfig& how) {
  RT_TRY_SET(const LoadMatch match, match_tensors(source.manifest(), plan.tensors, plan.state_kinds(), how));
  for (const StateTensor& item : state) {
    const TensorMatch& of = match.tensors[static_cast<size_t>(item.tensor)];
    const DeviceBytes run{item.data, item.bytes};
    RT_TRY(link.fill({&run, 1}, [&](std::span<const std::span<std::byte>> areas) -> Status {
      auto* const data = reinterpret_cast<float*>(areas[0].data());
      const bool weight = !is_moment(item.kind);  // or its average
      if (weight ? of.weight : of.moments) return source.read(plan.tensors[item.tensor].name, item.box, data);
      if (weight) {
        trainer::initial_weights(plan, item.tensor, item.box, data);
      } else {
        std::memset(data, 0, areas[0].size());
      }
      return {};
    }));
  }
  return TrainPosition{.seed = plan.recipe.seed};
}

}  // namespace

Status check_resumable(IoBackend& io, const Plan& plan, const std::filesystem::path& dir) {
  RT_TRY_SET(const Manifest manifest, read_manifest(io, dir));
  RT_TRY(check_state(manifest, plan, dir).with(dir.string()));
  RT_TRY(position_of(manifest).with(dir.string()));
  return {};
}

Result<InitMatch> match_init(IoBackend& io, const Plan& plan, const std::filesystem::path& from,
                             const OpenForeign& open_foreign) {
  const InitConfig& how = plan.recipe.init;
  RT_TRY_SET(const std::unique_ptr<ForeignWeights> foreign, open_if_foreign(open_foreign, from));
  Manifest manifest;
  if (foreign != nullptr) {
    manifest = foreign->manifest();
  } else {
    RT_TRY_SET(manifest, read_manifest(io, from));
    RT_TRY_SET(const Labels labels, labels_for_start(io, from.parent_path()));
    const LabelEntry* const label = entry_of(labels, manifest.step, manifest.created_unix_ms);
    if (label != nullptr && label->label == Label::kBad) {
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("{}: is bad ({}), and nothing is to begin with it; take another step, or say `cairn ckpt "
                      "label` what it is",
                      from.string(), label->why)};
    }
  }
  InitMatch out{.match = {},
                .foreign = foreign != nullptr,
                .step = how.weights_only ? 0 : manifest.step,
                .saved_step = manifest.step};
  RT_TRY_SET(out.match, match_tensors(manifest, plan.tensors, plan.state_kinds(), how).with(from.string()));
  if (!out.foreign && !how.weights_only) RT_TRY(position_of(manifest).with(from.string()));
  return out;
}

Result<std::vector<PeerCopy>> peer_copies_in(const Plan& plan, const Arena& arena, std::span<const StateTensor> state) {
  std::vector<PeerCopy> out;
  if (state.empty()) return out;
  RT_TRY_SET(const Manifest manifest, decode_manifest(arena.directory()));
  RT_TRY(check_tensors(manifest, state_tensors(plan)));
  const LoadPlanner planner(manifest);
  RT_TRY_SET(const std::vector<WantedBox> wanted, wanted_boxes(plan, planner, state));
  RT_TRY_SET(const std::vector<LoadRead> reads, planner.plan_reads(wanted));
  const std::vector<int64_t> rank_of_file = arena.rank_of_file();
  for (const LoadRead& read : reads) {
    const int64_t rank = read.file < std::ssize(rank_of_file) ? rank_of_file[read.file] : -1;
    const int64_t end = read.offset + (read.rows - 1) * read.source_stride + read.bytes;
    if (rank >= 0 && !arena.ranks().contains(rank)) {
      const StateTensor& item = state[static_cast<size_t>(read.wanted)];
      return Error{ErrorCode::kUnsupported,
                   fmt::format("{} of {} {} is in the memory of rank {} alone, on another host",
                               kStateKinds[static_cast<size_t>(item.kind)], plan.tensors[item.tensor].name,
                               to_string(item.box), rank)};
    }
    if (rank < 0 || read.offset < 0 || end > std::ssize(arena.payload(rank, 0))) {
      return Error{ErrorCode::kCorrupt, "the snapshot's directory does not fit its slots"};
    }
    for (int64_t row = 0; row < read.rows; ++row) {
      PeerCopy& found = out.emplace_back(read.wanted, read.target_offset + row * read.target_stride, read.bytes);
      for (int64_t slot = 0; slot < arena.slots(); ++slot) {
        found.banks.push_back(arena.payload(rank, slot).data() + read.offset + row * read.source_stride);
      }
    }
  }
  return out;
}

Result<bool> copies_cross_hosts(const Plan& plan, const Arena& arena) {
  const int64_t per_host = arena.ranks().size();
  RT_TRY_SET(const Manifest manifest, decode_manifest(arena.directory()));
  const LoadPlanner planner(manifest);
  const std::vector<int64_t> rank_of_file = arena.rank_of_file();
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
    const RankPlan& of = plan.rank(rank);
    if (of.private_bytes() == 0) continue;
    std::vector<StateTensor> copies;
    const auto add = [&](StateKind kind, const auto& piece, int64_t count) {
      if (!piece.primary) copies.push_back({kind, piece.tensor, piece.box, nullptr, count * 4, false});
    };
    for (const StateKind kind : plan.state_kinds().arrays()) {
      if (kind == StateKind::kEma) continue;
      for (const StatePiece& piece : of.pieces) add(kind, piece, piece.count_elems());
    }
    for (const SumPiece& piece : of.sums) add(piece.kind, piece, piece.count());
    RT_TRY_SET(const std::vector<WantedBox> wanted, wanted_boxes(plan, planner, copies));
    RT_TRY_SET(const std::vector<LoadRead> reads, planner.plan_reads(wanted));
    for (const LoadRead& read : reads) {
      if (rank_of_file.at(static_cast<size_t>(read.file)) / per_host != rank / per_host) return true;
    }
  }
  return false;
}

/// On a host that does not have all banks: what of `state` other ranks save.
static Status fill_copies(const Plan& plan, const Arena& arena, const std::string& read_from, int64_t slot,
                          std::span<const StateTensor> state, DeviceLink& link) {
  std::vector<StateTensor> copies;
  std::ranges::copy_if(state, std::back_inserter(copies), [](const StateTensor& item) { return !item.primary; });
  if (copies.empty()) return {};
  if (!read_from.empty()) {
    PosixBackend io;
    const bool named = read_from == plan.recipe.init.path;
    return load_state(plan, io, read_from, named ? plan.recipe.init : InitConfig{}, copies, link);
  }
  RT_TRY_SET(const std::vector<PeerCopy> peer_copies, peer_copies_in(plan, arena, copies));
  for (const PeerCopy& part : peer_copies) {
    RT_TRY(link.store({part.banks[slot], static_cast<size_t>(part.bytes)}, copies[part.copy].data + part.offset));
  }
  return link.settle();
}

Result<std::optional<Restored>> carry_out_decision(const Plan& plan, const Arena& arena,
                                                   std::span<const StateTensor> state, DeviceLink& link,
                                                   const OpenForeign& open_foreign) {
  const arena::Control& control = arena.control();
  const arena::Decision& decision = control.decision;
  const uint64_t incarnation = control.incarnation.load(std::memory_order_acquire);
  if (decision.incarnation.load(std::memory_order_acquire) != incarnation || incarnation == 0) {
    return Error{ErrorCode::kInternal, "the agent has not decided where this run continues from"};
  }
  if (decision.source == arena::Source::kFresh) return std::optional<Restored>();
  const std::string dir(decision.place, strnlen(decision.place, sizeof(decision.place)));
  const auto loaded = [&]() -> Result<Restored> {
    if (decision.source == arena::Source::kDisk) {
      RT_TRY_SET(const std::unique_ptr<ForeignWeights> foreign, open_if_foreign(open_foreign, dir));
      if (foreign == nullptr) return Error{ErrorCode::kInternal, "a checkpoint that the agent has not read"};
      Result<TrainPosition> begun = load_from_foreign(plan, *foreign, state, link, plan.recipe.init);
      if (!begun.ok()) return std::move(begun).error().with(dir);
      return Restored{.position = std::move(begun).value()};
    }
    if (decision.source != arena::Source::kMemory || decision.slot >= arena.slots() || decision.position_bytes < 0 ||
        decision.position_bytes > static_cast<int64_t>(sizeof(decision.position))) {
      return Error{ErrorCode::kInternal, "the agent's decision makes no sense"};
    }
    RT_TRY_SET(TrainPosition position,
               decode_position({decision.position, static_cast<size_t>(decision.position_bytes)}));
    if (!arena.has_world()) RT_TRY(fill_copies(plan, arena, dir, decision.slot, state, link));
    return Restored{.position = std::move(position),
                    .bank = static_cast<int64_t>(decision.slot),
                    .weights_ready = decision.weights_ready != 0};
  }();
  if (loaded.ok()) return std::optional<Restored>(loaded.value());
  return Error(loaded.error()).with("restoring");
}

static bool disk_failed(const CheckpointInfo& info) { return info.unread && disk_fails(info.os_errno); }

/// Whether an older checkpoint may be taken instead: this one is damaged, or its disk is failing. A limit of the
/// system, a missing right or an old build say nothing about it.
static bool may_pass_over(const Error& error) {
  return error.code == ErrorCode::kCorrupt ||
         (error.code == ErrorCode::kIo && (error.os_errno == 0 || disk_fails(error.os_errno)));
}

/// What this host has of later steps than all have in common is of a line that is left.
static bool is_left_behind(const Arena& arena, const SlotView& view, const WholeSlot& chosen) {
  return !arena.has_world() && view.whole &&
         std::pair(view.incarnation, view.step) > std::pair(chosen.incarnation, chosen.step);
}

static void leave_behind(Arena& arena, const WholeSlot& chosen) {
  const std::vector<SlotView> views = arena.views();
  for (int64_t slot = 0; slot < arena.slots(); ++slot) {
    if (slot != chosen.slot && is_left_behind(arena, views[slot], chosen)) arena.invalidate_slot(slot);
  }
}

std::set<int64_t> promised_after(const Arena& arena, const RestoreChoice& choice) {
  if (choice.source != arena::Source::kMemory) return {};
  std::set<int64_t> out = arena.promised();
  const std::vector<SlotView> views = arena.views();
  for (int64_t slot = 0; slot < arena.slots(); ++slot) {
    const int64_t step = arena.control().reserved[slot].load(std::memory_order_acquire);  // > 0: not being written
    if (step > 0 && slot != choice.slot &&
        is_left_behind(arena, views[slot], {choice.slot, choice.slot_incarnation, choice.step}))
      out.erase(step);
  }
  return out;
}

std::vector<uint64_t> starts_after(const Arena& arena, const RestoreChoice& choice) {
  const std::span<const uint64_t> starts = arena.starts();
  std::vector<uint64_t> out(starts.begin(), starts.end());
  if (choice.source == arena::Source::kMemory || out.empty()) return out;
  out.resize(1);
  out.insert(out.end(), choice.starts.begin(), choice.starts.end());
  return out;
}

template <typename Read>
auto RestoreDecider::until_it_stays(const Read& read) {
  return read_again(read, request_.read_again, request_.stop);
}

Error unreadable_now(Error error, const std::filesystem::path& dir) {
  if (error.os_errno != 0) error.code = ErrorCode::kIo;
  error.message = fmt::format(
      "{}: the newest checkpoint cannot be read, which is no reason to resume from an older one; make "
      "it readable, or move it away: {}",
      dir.string(), error.message);
  return error;
}

Error unreadable_now(const CheckpointInfo& info) {
  return unreadable_now({info.os_errno != 0 ? ErrorCode::kIo : ErrorCode::kUnsupported, info.problem, info.os_errno},
                        info.dir);
}

Error none_usable(const std::filesystem::path& checkpoints_dir, std::span<const std::string> why, bool all_bad) {
  std::string text =
      fmt::format("{}: none of its checkpoints can be used; not starting anew over them", checkpoints_dir.string());
  for (const std::string& line : why) text += "\n  " + line;
  if (all_bad) text += "\n  begin anew in another folder (--run), or take one all the same (--from-step N)";
  return Error{all_bad ? ErrorCode::kInvalidInput : ErrorCode::kCorrupt, std::move(text)};
}

RestoreDecider::RestoreDecider(const Plan& plan, Arena& arena, IoBackend& io, RestoreRequest request)
    : plan_(plan), arena_(arena), io_(io), request_(std::move(request)) {}

Result<std::optional<RestoreChoice>> RestoreDecider::newest_on_disk(std::vector<std::string>& warnings, int64_t above) {
  if (request_.check_folder) RT_TRY(request_.check_folder());
  RT_TRY_SET(Names names, list_names(io_, request_.checkpoints_dir));
  if (!names.cut_off.empty()) {  // by a save of this agent that could not end it
    RT_TRY_SET(const std::vector<std::string> ended, finish_replacements(io_, request_.checkpoints_dir, names));
    warnings.insert(warnings.end(), ended.begin(), ended.end());
    RT_TRY_SET(names, list_names(io_, request_.checkpoints_dir));
  }
  RT_TRY_SET(const Labels labels, labels_for_start(io_, request_.checkpoints_dir));
  bool any = false, all_bad = true;
  for (auto step = names.steps.rbegin(); step != names.steps.rend(); ++step) {  // the older ones are not even opened
    if (*step <= above) break;
    const CheckpointInfo info =
        until_it_stays([&] { return look_at_checkpoint(io_, request_.checkpoints_dir, *step); });
    any = true;
    if (const auto refused = refused_.find({info.step, info.created_unix_ms}); refused != refused_.end()) {
      warnings.push_back(refused->second);
      all_bad = false;
      continue;
    }
    const LabelEntry* const label = entry_of(labels, info.step, info.created_unix_ms);
    if (info.complete && label != nullptr && label->label == Label::kBad) {
      warnings.push_back(fmt::format("step {} is passed over, it is bad: {}", info.step, label->why));
      continue;
    }
    all_bad = false;
    if (info.unread && !disk_fails(info.os_errno)) {
      return unreadable_now(info);
    }
    if (!info.complete) {
      warnings.push_back(fmt::format("{}: {}", info.dir.string(), info.problem));
      continue;
    }
    const Status checked = until_it_stays([&] { return check_resumable(io_, plan_, info.dir); });
    if (checked.ok()) {
      return std::optional<RestoreChoice>(RestoreChoice{.source = arena::Source::kDisk,
                                                        .step = info.step,
                                                        .dir = info.dir,
                                                        .created_unix_ms = info.created_unix_ms,
                                                        .starts = info.starts});
    }
    if (checked.error().code == ErrorCode::kInvalidInput)
      return Error(checked.error());  // another model: ask the person
    if (!may_pass_over(checked.error())) return unreadable_now(checked.error(), info.dir);
    warnings.push_back(checked.error().message);
  }
  if (!any) return std::optional<RestoreChoice>();
  return none_usable(request_.checkpoints_dir, warnings, all_bad);
}

bool RestoreDecider::pass_over(const RestoreChoice& choice, std::string_view why) {
  const std::string name = choice.dir.string();
  if (why.starts_with(name + "/")) why.remove_prefix(name.size() + 1);  // said once
  return refused_.emplace(std::pair(choice.step, choice.created_unix_ms), fmt::format("{}: {}", name, why)).second;
}

Result<RestoreChoice> RestoreDecider::named_step(int64_t step) {
  if (request_.check_folder) RT_TRY(request_.check_folder());
  RT_TRY_SET(const CheckpointInfo info, find_step(io_, request_.checkpoints_dir, step));
  RT_TRY_SET(const Manifest manifest, read_manifest(io_, info.dir));
  RT_TRY(check_state(manifest, plan_, info.dir).with(info.dir.string()));
  RT_TRY(position_of(manifest).with(info.dir.string()));
  RestoreChoice choice{.source = arena::Source::kDisk,
                       .step = step,
                       .dir = info.dir,
                       .created_unix_ms = info.created_unix_ms,
                       .starts = info.starts};
  RT_TRY_SET(const Labels labels, labels_for_start(io_, request_.checkpoints_dir));
  const LabelEntry* const label = entry_of(labels, step, info.created_unix_ms);
  if (label != nullptr && label->label == Label::kBad)
    choice.warnings.push_back(
        fmt::format("step {} is bad: {}; taken all the same, as --from-step says", step, label->why));
  const std::vector<SlotView> views = arena_.views();
  if (const auto newest = newest_whole(views); newest && views[*newest].step > step)
    choice.warnings.push_back(
        fmt::format("step {} in shared memory is given up, as --from-step says", views[*newest].step));
  return choice;
}

/// The newest snapshot that can be resumed from: where it cannot, as ranks keep state that other hosts save, it is
/// saved first, and none is.
Result<std::optional<CommonSnapshot>> RestoreDecider::newest_in_memory(const HostMemory* others, RestoreChoice& choice,
                                                                       std::vector<int64_t>& damaged) {
  const bool distrusted = arena_.control().distrusted.load(std::memory_order_acquire) != 0;
  std::optional<CommonSnapshot> memory =
      newest_verified(arena_, distrusted ? Check::kEveryByte : Check::kHeaders, &choice.warnings, &damaged,
                      others != nullptr ? &others->whole : nullptr);
  for (const int64_t slot : damaged) arena_.invalidate_slot(slot);  // or the next look would find it again
  if (!memory || others == nullptr) return memory;
  if (!copies_cross_hosts_) {
    RT_TRY_SET(copies_cross_hosts_, copies_cross_hosts(plan_, arena_));
  }
  if (!*copies_cross_hosts_ || memory->step == 0) return memory;
  const Result<CheckpointInfo> newest = newest_complete(io_, request_.checkpoints_dir);
  if (newest.ok() && newest.value().step >= memory->step) return std::optional<CommonSnapshot>();
  choice.save_first = {memory->slot, memory->incarnation, memory->step};
  return std::optional<CommonSnapshot>();
}

Result<RestoreChoice> RestoreDecider::choose(const HostMemory* others) {
  if (first_ && request_.from_step) return named_step(*request_.from_step);
  RestoreChoice choice;
  const bool distrusted = arena_.control().distrusted.load(std::memory_order_acquire) != 0;
  std::vector<int64_t> damaged;
  RT_TRY_SET(const std::optional<CommonSnapshot> memory, newest_in_memory(others, choice, damaged));
  if (choice.save_first) return choice;
  std::vector<std::string> disk_warnings;
  Result<std::optional<RestoreChoice>> disk = std::optional<RestoreChoice>();
  bool disk_is_newer = true;
  if (memory && !first_ && damaged.empty() && others == nullptr) {
    disk_is_newer = false;  // between restarts of one agent nothing on disk is newer than what is whole in memory
  } else if (memory) {
    if (request_.check_folder) RT_TRY(request_.check_folder());
    RT_TRY_SET(const Names names, list_names(io_, request_.checkpoints_dir));
    disk_is_newer = !names.steps.empty() && names.steps.back() > memory->step;
  }
  while (disk_is_newer) {
    disk_warnings.clear();
    disk = newest_on_disk(disk_warnings, memory ? memory->step : -1);
    // What cannot be read now is no reason to go on from older memory either.
    if (memory && !disk.ok() && (disk.error().code == ErrorCode::kIo || disk.error().code == ErrorCode::kUnsupported)) {
      return std::move(disk).error();
    }
    if (!memory || !disk.ok() || !disk.value()) break;
    // Memory is given up for it: be sure, however large it is.
    const Result<VerifyReport> checked =
        verify_checkpoint(io_, disk.value()->dir, {.max_damages = 1, .structure = false});
    if (!checked.ok() && !may_pass_over(checked.error())) return unreadable_now(checked.error(), disk.value()->dir);
    if (checked.ok() && checked.value().whole()) break;
    pass_over(*disk.value(), checked.ok() ? checked.value().damages[0].message : checked.error().message);
  }
  choice.warnings.insert(choice.warnings.end(), disk_warnings.begin(), disk_warnings.end());
  if (memory && (!disk.ok() || !disk.value())) {
    choice.source = arena::Source::kMemory;
    choice.step = memory->step;
    choice.slot = memory->slot;
    choice.slot_incarnation = memory->incarnation;
    // All ranks of the world have to agree whether they make their weights again, and one host knows of its own alone.
    choice.weights_ready =
        arena_.has_world() && !distrusted && arena_.weights_are_of(memory->incarnation, memory->step);
    RT_TRY_SET(const TrainPosition position, decode_position(memory->position));
    choice.metrics = arena_.news_until(memory->step - 1);
    choice.metrics.push_back(position.metrics);
    return choice;
  }
  if (!disk.ok()) return std::move(disk).error();
  if (disk.value()) {
    choice.source = arena::Source::kDisk;
    choice.step = disk.value()->step;
    choice.dir = disk.value()->dir;
    choice.created_unix_ms = disk.value()->created_unix_ms;
    choice.starts = disk.value()->starts;
    return choice;
  }
  if (!request_.from) return choice;
  RT_TRY_SET(InitMatch init, match_init(io_, plan_, *request_.from, request_.open_foreign));
  choice.match = std::move(init.match);
  choice.foreign = init.foreign;
  choice.source = arena::Source::kDisk;
  choice.step = init.step;
  choice.dir = *request_.from;
  return choice;
}

Result<RestoreChoice> RestoreDecider::look(const HostMemory* others) {
  if (since_ == std::chrono::steady_clock::time_point()) since_ = std::chrono::steady_clock::now();
  RT_TRY_SET(RestoreChoice choice, choose(others));
  const uint64_t elsewhere = others != nullptr ? others->incarnation : 0;
  choice.incarnation = std::max(arena_.control().incarnation.load(std::memory_order_acquire), elsewhere) + 1;
  return choice;
}

Result<RestoreChoice> RestoreDecider::next_incarnation() {
  for (;;) {
    RT_TRY_SET(RestoreChoice choice, look());
    if (const Status carried = carry_out(choice); carried.ok()) {
      begin(choice);
      return choice;
    } else {
      RT_TRY(give_up(choice, carried.error()));
    }
  }
}

Status RestoreDecider::give_up(const RestoreChoice& choice, const Error& why) {
  if (choice.source == arena::Source::kMemory && why.code == ErrorCode::kCorrupt) return {};  // it is invalid now
  if (choice.source != arena::Source::kDisk) return why;
  const bool named = (request_.from && choice.dir == *request_.from) || (first_ && request_.from_step);
  if (named) return why;
  // Nothing was read yet.
  if (why.code == ErrorCode::kStopped || why.code == ErrorCode::kTimeout) return why;
  if (!may_pass_over(why)) return unreadable_now(why, choice.dir);
  return pass_over(choice, why.message) ? Status() : Status(why);
}

void RestoreDecider::begin(RestoreChoice& choice) {
  first_ = false;
  arena_.control().distrusted.store(0, std::memory_order_release);
  publish(choice, in_memory_);
  const auto since = std::exchange(since_, {});
  choice.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

Status RestoreDecider::carry_out(RestoreChoice& choice) {
  in_memory_ = choice.source == arena::Source::kMemory;
  if (in_memory_) {
    leave_behind(arena_, {choice.slot, choice.slot_incarnation, choice.step});
    return {};
  }
  RT_TRY(arena_.invalidate_slots(request_.stop));  // another line of training, or damaged
  arena_.go_on_from(choice.starts);
  if (choice.source == arena::Source::kDisk) {
    RT_TRY_SET(in_memory_, until_it_stays([&] { return fill_slot(choice); }));
  }
  return {};
}

Status RestoreDecider::follow(RestoreChoice choice, std::span<const uint64_t> starts) {
  if (choice.source == arena::Source::kMemory) {
    const bool distrusted = arena_.control().distrusted.load(std::memory_order_acquire) != 0;
    const Result<CommonSnapshot> found =
        read_common(arena_, choice.slot, distrusted ? Check::kEveryByte : Check::kHeaders);
    if (!found.ok()) {
      arena_.invalidate_slot(choice.slot);
      return Error{ErrorCode::kCorrupt, found.error().message};
    }
    const WholeSlot chosen{choice.slot, choice.slot_incarnation, choice.step};
    if (WholeSlot{choice.slot, found.value().incarnation, found.value().step} != chosen) {
      return Error{ErrorCode::kCorrupt, fmt::format("slot {} holds step {}, step {} was to be resumed from",
                                                    choice.slot, found.value().step, choice.step)};
    }
  }
  RT_TRY(carry_out(choice));
  arena_.follow_starts(starts);
  begin(choice);
  return {};
}

/// Reads the chosen checkpoint into slot 0, for all ranks at once. False: the ranks must read it themselves.
Result<bool> RestoreDecider::fill_slot(RestoreChoice& choice) {
  if (choice.foreign) return false;
  const InitConfig how = choice.match ? plan_.recipe.init : InitConfig{};
  RT_TRY_SET(const SlotLoad loaded,
             load_slot(plan_, arena_, 0, choice.incarnation, io_, choice.dir, how, request_.buffers));
  choice.read = loaded.stats;
  return true;
}

void RestoreDecider::publish(const RestoreChoice& choice, bool in_memory) {
  arena::Control& control = arena_.control();
  arena::Decision& decision = control.decision;
  decision.incarnation.store(0, std::memory_order_release);
  decision.source = in_memory ? arena::Source::kMemory : choice.source;
  decision.slot = static_cast<uint32_t>(choice.slot);
  decision.weights_ready = choice.weights_ready ? 1 : 0;
  if (!choice.weights_ready) arena_.forget_weights();
  decision.step = choice.step;
  decision.position_bytes = 0;
  const std::string place = choice.dir.string();
  RT_CHECK(place.size() < sizeof(decision.place), "path of {} bytes", place.size());
  std::memset(decision.place, 0, sizeof(decision.place));
  std::memcpy(decision.place, place.data(), place.size());
  if (in_memory) {
    const auto snapshot = read_slot(arena_, arena_.ranks().first, choice.slot, Check::kHeaders);
    RT_CHECK(snapshot.ok(), "slot {} was just verified", choice.slot);
    const std::string& position = snapshot.value().position;
    decision.position_bytes = static_cast<int64_t>(position.size());
    std::memcpy(decision.position, position.data(), position.size());
  }
  // What was just read from the run's own folder is there, so that nobody takes the memory for its only copy.
  const bool own = choice.source == arena::Source::kDisk && choice.dir.parent_path() == request_.checkpoints_dir;
  control.persisted_step.store(own ? choice.step : 0, std::memory_order_relaxed);
  control.failed_step.store(0, std::memory_order_relaxed);
  control.incarnation.store(choice.incarnation, std::memory_order_release);
  decision.incarnation.store(choice.incarnation, std::memory_order_release);
}

}  // namespace cairn::ckpt
