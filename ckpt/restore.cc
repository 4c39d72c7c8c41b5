#include "ckpt/restore.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

#include "ckpt/format/manifest.h"
#include "ckpt/persist/read.h"
#include "ckpt/plan/load_plan.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/snapshot/snapshot.h"
#include "ckpt/verify/verify.h"

namespace cairn::ckpt {
namespace {

using trainer::Restored;
using trainer::StateKind;
using trainer::StateTensor;
using trainer::TrainPosition;

static_assert(static_cast<int>(StateKind::kWeight) == 0 && static_cast<int>(StateKind::kExpAvg) == 1 &&
              static_cast<int>(StateKind::kExpAvgSq) == 2);

bool is_state(const TensorEntry& entry) {
  return std::find(kStateKinds.begin(), kStateKinds.end(), entry.kind) != kStateKinds.end();
}

/// Imported: weights, perhaps with files kept beside them (of another kind), no moments.
bool only_weights(const Manifest& manifest) {
  return std::all_of(manifest.tensors.begin(), manifest.tensors.end(),
                     [](const TensorEntry& entry) { return !is_state(entry) || entry.kind == kStateKinds[0]; });
}

/// check_tensors on what is training state; files that an import kept are none of the trainer's business.
Status check_state(const Manifest& manifest, std::span<const TensorEntry> expected) {
  Manifest state;
  std::copy_if(manifest.tensors.begin(), manifest.tensors.end(), std::back_inserter(state.tensors), is_state);
  return check_tensors(state, expected);
}

std::vector<TensorEntry> expected_tensors(const Plan& plan, bool weights_only) {
  std::vector<TensorEntry> out = state_tensors(plan.tensors);
  if (weights_only) out.resize(plan.tensors.size());  // kinds are outermost
  return out;
}

Result<std::vector<WantedBox>> wanted_boxes(const Plan& plan, std::span<const StateTensor> state) {
  std::vector<WantedBox> out;
  out.reserve(state.size());
  for (const StateTensor& item : state) {
    if (item.tensor < 0 || item.tensor >= static_cast<int64_t>(plan.tensors.size()) ||
        item.bytes != item.box.count_elems() * 4) {
      return Error{ErrorCode::kInternal,
                   fmt::format("state of tensor {}, box {}, {} bytes", item.tensor, to_string(item.box), item.bytes)};
    }
    out.push_back({kStateKinds[static_cast<size_t>(item.kind)], plan.tensors[item.tensor].name, item.box});
  }
  return out;
}

}  // namespace

Status load_from_memory(const Plan& plan, const Arena& arena, int64_t slot, std::span<const StateTensor> state) {
  RT_TRY_SET(const Manifest manifest, decode_manifest(arena.directory()));
  RT_TRY(check_tensors(manifest, expected_tensors(plan, false)));
  RT_TRY_SET(const std::vector<WantedBox> wanted, wanted_boxes(plan, state));
  RT_TRY_SET(const std::vector<LoadRead> reads, LoadPlanner(manifest).plan_reads(wanted));
  std::vector<int64_t> rank_of_file;  // slot_manifest: ranks that save nothing have no file
  for (int64_t rank = 0; rank < arena.world(); ++rank) {
    if (!arena.shards(rank).empty()) rank_of_file.push_back(rank);
  }
  for (const LoadRead& read : reads) {
    const auto source = read.file < static_cast<int64_t>(rank_of_file.size())
                            ? arena.payload(rank_of_file[read.file], slot)
                            : std::span<std::byte>();
    if (read.offset < 0 || read.offset + read.bytes > static_cast<int64_t>(source.size())) {
      return Error{ErrorCode::kCorrupt, "the snapshot's directory does not fit its slots"};
    }
    std::memcpy(state[read.wanted].data + read.target_offset, source.data() + read.offset, read.bytes);
  }
  return {};
}

Result<TrainPosition> load_from_disk(const Plan& plan, IoBackend& io, const std::filesystem::path& dir,
                                     std::span<const StateTensor> state) {
  RT_TRY_SET(CheckpointReader reader, CheckpointReader::open(io, dir));
  const Manifest& manifest = reader.manifest();
  const bool weights = only_weights(manifest);
  RT_TRY(check_state(manifest, expected_tensors(plan, weights)).with(dir.string()));
  RT_TRY_SET(const TrainPosition position, position_of(manifest).with(dir.string()));
  std::vector<StateTensor> saved;
  for (const StateTensor& item : state) {
    if (weights && item.kind != StateKind::kWeight) {
      std::memset(item.data, 0, item.bytes);
    } else {
      saved.push_back(item);
    }
  }
  RT_TRY_SET(const std::vector<WantedBox> wanted, wanted_boxes(plan, saved));
  RT_TRY_SET(const std::vector<LoadRead> reads, LoadPlanner(manifest).plan_reads(wanted).with(dir.string()));
  std::vector<ReadRange> ranges;
  ranges.reserve(reads.size());
  for (const LoadRead& read : reads) {
    ranges.push_back({read.file, read.offset, read.bytes, saved[read.wanted].data + read.target_offset});
  }
  RT_TRY(reader.read_ranges(ranges));
  return position;
}

Result<std::optional<Restored>> carry_out_decision(const Plan& plan, const Arena& arena, IoBackend& io,
                                                   std::span<const StateTensor> state, bool attached) {
  const arena::Control& control = arena.control();
  const arena::Decision& decision = control.decision;
  const uint64_t incarnation = control.incarnation.load(std::memory_order_acquire);
  if (decision.incarnation.load(std::memory_order_acquire) != incarnation || incarnation == 0) {
    return Error{ErrorCode::kInternal, "the agent has not decided where this run continues from"};
  }
  if (decision.source == arena::Source::kFresh) return std::optional<Restored>();
  const auto loaded = [&]() -> Result<Restored> {
    if (decision.source == arena::Source::kDisk) {
      const std::string dir(decision.place, strnlen(decision.place, sizeof(decision.place)));
      RT_TRY_SET(TrainPosition position, load_from_disk(plan, io, dir, state));
      return Restored{.position = std::move(position)};
    }
    if (decision.source != arena::Source::kMemory || decision.slot >= arena.slots() || decision.position_bytes < 0 ||
        decision.position_bytes > static_cast<int64_t>(sizeof(decision.position))) {
      return Error{ErrorCode::kInternal, "the agent's decision makes no sense"};
    }
    std::vector<StateTensor> missing;
    for (const StateTensor& item : state) {
      if (!attached || !item.primary) missing.push_back(item);
    }
    if (!missing.empty()) RT_TRY(load_from_memory(plan, arena, decision.slot, missing));
    RT_TRY_SET(TrainPosition position,
               decode_position({decision.position, static_cast<size_t>(decision.position_bytes)}));
    return Restored{.position = std::move(position),
                    .bank = attached ? static_cast<int64_t>(decision.slot) : 0,
                    .weights_ready = attached && decision.weights_ready != 0};
  }();
  if (loaded.ok()) return std::optional<Restored>(loaded.value());
  Error error = loaded.error();
  if (error.code == ErrorCode::kCorrupt || error.code == ErrorCode::kIo) {
    arena.control().refused.store(incarnation, std::memory_order_release);
    error.code = ErrorCode::kUnavailable;  // restarted: the agent then takes the next older one
  }
  return std::move(error).with("restoring");
}

RestoreDecider::RestoreDecider(const Plan& plan, Arena& arena, IoBackend& io, RestoreRequest request)
    : plan_(plan), arena_(arena), io_(io), request_(std::move(request)) {}

Status RestoreDecider::usable(const std::filesystem::path& dir, bool weights_only_allowed) {
  RT_TRY_SET(const Manifest manifest, read_manifest(io_, dir));
  const bool weights = weights_only_allowed && only_weights(manifest);
  RT_TRY(check_state(manifest, expected_tensors(plan_, weights)).with(dir.string()));
  RT_TRY(position_of(manifest).with(dir.string()));
  if (payload_bytes(manifest) > request_.verify_up_to_bytes) return {};
  RT_TRY_SET(const VerifyReport report, verify_checkpoint(io_, dir, {.max_damages = 3, .structure = false}));
  if (report.whole()) return {};
  return Error{ErrorCode::kCorrupt, fmt::format("{}: {}", dir.string(), report.damages[0].message)};
}

Result<std::optional<RestoreChoice>> RestoreDecider::newest_on_disk(std::vector<std::string>& warnings) {
  RT_TRY_SET(const Catalog catalog, list_checkpoints(io_, request_.checkpoints_dir));
  bool any = false;
  for (auto it = catalog.checkpoints.rbegin(); it != catalog.checkpoints.rend(); ++it) {
    const auto old = before_.find(it->step);
    if (old != before_.end() && old->second == it->created_unix_ms) continue;
    any = true;
    if (refused_.contains(it->dir.string())) {
      warnings.push_back(fmt::format("{}: a rank could not read it", it->dir.string()));
      continue;
    }
    if (!it->complete) {
      warnings.push_back(fmt::format("{}: {}", it->dir.string(), it->problem));
      continue;
    }
    const Status checked = usable(it->dir, false);
    if (checked.ok()) {
      return std::optional<RestoreChoice>(
          RestoreChoice{.source = arena::Source::kDisk, .step = it->step, .dir = it->dir});
    }
    if (checked.error().code == ErrorCode::kInvalidInput)
      return Error(checked.error());  // another model: ask the person
    warnings.push_back(checked.error().message);
  }
  if (!any) return std::optional<RestoreChoice>();
  std::string text = fmt::format("{}: none of its checkpoints can be used; not starting anew over them",
                                 request_.checkpoints_dir.string());
  for (const std::string& warning : warnings) text += "\n  " + warning;
  return Error{ErrorCode::kCorrupt, std::move(text)};
}

Result<RestoreChoice> RestoreDecider::choose() {
  RestoreChoice choice;
  const auto from = [&]() -> Result<RestoreChoice> {
    RT_TRY(usable(*request_.from, true));
    RT_TRY_SET(const Manifest manifest, read_manifest(io_, *request_.from));
    choice.source = arena::Source::kDisk;
    choice.step = manifest.step;
    choice.dir = *request_.from;
    return choice;
  };
  if (request_.from && first_ && request_.from_first) {
    RT_TRY_SET(const Catalog catalog, list_checkpoints(io_, request_.checkpoints_dir));
    for (const CheckpointInfo& info : catalog.checkpoints) before_[info.step] = info.created_unix_ms;
    return from();
  }
  const bool distrusted = arena_.control().distrusted.load(std::memory_order_acquire) != 0;
  std::vector<int64_t> damaged;
  const std::optional<CommonSnapshot> memory =
      newest_verified(arena_, distrusted ? Check::kEveryByte : Check::kHeaders, &choice.warnings, &damaged);
  for (const int64_t slot : damaged) arena_.invalidate_slot(slot);  // or the next look would find it again
  std::vector<std::string> disk_warnings;
  Result<std::optional<RestoreChoice>> disk = std::optional<RestoreChoice>();
  bool disk_is_newer = true;
  if (memory && !first_) {
    disk_is_newer = false;  // between restarts of one agent nothing on disk is newer than what is in memory
  } else if (memory) {
    RT_TRY_SET(const Catalog catalog, list_checkpoints(io_, request_.checkpoints_dir));
    disk_is_newer = !catalog.checkpoints.empty() && catalog.checkpoints.back().step > memory->step;
  }
  if (disk_is_newer) {
    disk = newest_on_disk(disk_warnings);
    if (memory && disk.ok() && disk.value() && disk.value()->step > memory->step) {
      // Memory is given up for it: be sure, however large it is.
      const Result<VerifyReport> checked =
          verify_checkpoint(io_, disk.value()->dir, {.max_damages = 1, .structure = false});
      if (!checked.ok() || !checked.value().whole()) disk.value().reset();
    }
  }
  if (memory && (!disk.ok() || !disk.value() || disk.value()->step <= memory->step)) {
    choice.source = arena::Source::kMemory;
    choice.step = memory->step;
    choice.slot = memory->slot;
    choice.weights_ready = !distrusted && arena_.weights_are_of(memory->incarnation, memory->step);
    RT_TRY_SET(const TrainPosition position, decode_position(memory->position));
    choice.metrics = arena_.news_until(memory->step - 1);
    choice.metrics.push_back(position.metrics);
    return choice;
  }
  choice.warnings.insert(choice.warnings.end(), disk_warnings.begin(), disk_warnings.end());
  if (!disk.ok()) return std::move(disk).error();
  if (disk.value()) {
    choice.source = arena::Source::kDisk;
    choice.step = disk.value()->step;
    choice.dir = disk.value()->dir;
    return choice;
  }
  if (request_.from) return from();
  return choice;
}

Result<RestoreChoice> RestoreDecider::next_incarnation() {
  const auto begin = std::chrono::steady_clock::now();
  arena::Control& control = arena_.control();
  const uint64_t last = control.incarnation.load(std::memory_order_acquire);
  const arena::Decision& decided = control.decision;
  if (last > 0 && control.refused.load(std::memory_order_acquire) == last && decided.source == arena::Source::kDisk) {
    refused_.insert(std::string(decided.place, strnlen(decided.place, sizeof(decided.place))));
  }
  RT_TRY_SET(RestoreChoice choice, choose());
  first_ = false;
  arena_.control().distrusted.store(0, std::memory_order_release);
  if (choice.source != arena::Source::kMemory)
    RT_TRY(arena_.invalidate_slots());  // another line of training, or damaged
  publish(choice);
  choice.incarnation = last + 1;
  choice.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return choice;
}

void RestoreDecider::publish(const RestoreChoice& choice) {
  arena::Control& control = arena_.control();
  arena::Decision& decision = control.decision;
  const uint64_t incarnation = control.incarnation.load(std::memory_order_acquire) + 1;
  decision.incarnation.store(0, std::memory_order_release);
  decision.source = choice.source;
  decision.slot = static_cast<uint32_t>(choice.slot);
  decision.weights_ready = choice.weights_ready ? 1 : 0;
  decision.step = choice.step;
  decision.position_bytes = 0;
  const std::string place = choice.dir.string();
  RT_CHECK(place.size() < sizeof(decision.place), "path of {} bytes", place.size());
  std::memset(decision.place, 0, sizeof(decision.place));
  std::memcpy(decision.place, place.data(), place.size());
  if (choice.source == arena::Source::kMemory) {
    const auto snapshot = read_slot(arena_, 0, choice.slot, Check::kHeaders);
    RT_CHECK(snapshot.ok(), "slot {} was just verified", choice.slot);
    const std::string& position = snapshot.value().position;
    decision.position_bytes = static_cast<int64_t>(position.size());
    std::memcpy(decision.position, position.data(), position.size());
  }
  control.persisted_step.store(0, std::memory_order_relaxed);
  control.failed_step.store(0, std::memory_order_relaxed);
  control.incarnation.store(incarnation, std::memory_order_release);
  decision.incarnation.store(incarnation, std::memory_order_release);
}

}  // namespace cairn::ckpt
