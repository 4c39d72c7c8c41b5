#include "ckpt/hook.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <tuple>

#include "ckpt/position.h"
#include "ckpt/restore.h"
#include "ckpt/snapshot/snapshot.h"
#include "runtime/core/log.h"

namespace cairn::ckpt {
namespace {

const Clock& system_clock() {
  static const SystemClock clock;
  return clock;
}

}  // namespace

using trainer::StateTensor;
using trainer::StepOrder;
using trainer::TrainPosition;

Result<std::unique_ptr<SharedMemoryHook>> SharedMemoryHook::make(const Plan& plan, int64_t rank, const Arena& arena,
                                                                 IoBackend& io, const Clock& clock,
                                                                 HookOptions options) {
  if (arena.world() != plan.mesh.world() || rank < 0 || rank >= arena.world()) {
    return Error{ErrorCode::kInvalidInput, fmt::format("snapshot memory is for {} ranks, this is rank {} of {}",
                                                       arena.world(), rank, plan.mesh.world())};
  }
  std::unique_ptr<SharedMemoryHook> hook(new SharedMemoryHook(plan, rank, arena, io, clock, std::move(options)));
  RT_TRY(hook->check_layout());
  arena.populate(rank);
  return hook;
}

SharedMemoryHook::SharedMemoryHook(const Plan& plan, int64_t rank, Arena arena, uint64_t incarnation, IoBackend& io,
                                   std::function<void(int64_t step)> on_snapshot)
    : plan_(plan),
      rank_(rank),
      owned_(std::move(arena)),
      arena_(*owned_),
      io_(io),
      clock_(system_clock()),
      incarnation_(incarnation),
      layout_(slot_layout(plan, rank)),
      saved_ns_(clock_.now_ns()) {
  if (on_snapshot) {
    options_.notify = [tell = std::move(on_snapshot)](const SnapshotNotice& notice) {
      if (notice.persist) tell(notice.step);
      return Status();
    };
  }
  if (rank >= 0 && rank < arena_.world()) arena_.populate(rank);
}

Status SharedMemoryHook::check_layout() const {
  bool same = arena_.world() == plan_.mesh.world() && rank_ >= 0 && rank_ < arena_.world();
  if (same) {
    const auto shards = arena_.shards(rank_);
    same = shards.size() == layout_.shards.size();
    for (size_t k = 0; same && k < shards.size(); ++k) {
      same = shards[k].offset == layout_.shards[k].offset && shards[k].bytes == layout_.shards[k].bytes;
    }
  }
  if (same) return {};
  return Error{ErrorCode::kInvalidInput, "snapshot memory was made for another layout of this model"};
}

SharedMemoryHook::SharedMemoryHook(const Plan& plan, int64_t rank, const Arena& arena, IoBackend& io,
                                   const Clock& clock, HookOptions options)
    : plan_(plan),
      rank_(rank),
      arena_(arena),
      io_(io),
      clock_(clock),
      options_(std::move(options)),
      incarnation_(arena.control().incarnation.load(std::memory_order_acquire)),
      layout_(slot_layout(plan, rank)),
      saved_ns_(clock.now_ns()) {}

Result<std::optional<TrainPosition>> SharedMemoryHook::restore(std::span<const StateTensor> state) {
  RT_TRY(check_layout());
  if (const uint64_t now = arena_.control().incarnation.load(std::memory_order_acquire); now != incarnation_) {
    return Error{ErrorCode::kInternal,
                 fmt::format("rank {} is of incarnation {}, the agent is at {}", rank_, incarnation_, now)};
  }
  return carry_out_decision(plan_, arena_, io_, state);
}

bool SharedMemoryHook::save_is_due(int64_t step) const {
  for (const Every& every : plan_.recipe.checkpoint.save) {
    if (every.steps > 0 && step % every.steps == 0) return true;
    if (every.seconds > 0 && static_cast<double>(clock_.now_ns() - saved_ns_) * 1e-9 >= every.seconds) return true;
  }
  return false;
}

std::optional<int64_t> SharedMemoryHook::free_slot(bool take_back) {
  for (;;) {
    std::vector<SlotView> views = arena_.views();
    if (const auto slot = choose_slot(views); slot || !take_back) return slot;
    bool changed = false;
    for (int64_t k = 0; k < arena_.slots() && !changed; ++k) {
      int64_t reserved = arena_.control().reserved[k].load(std::memory_order_acquire);
      if (reserved <= 0) continue;
      std::vector<SlotView> without = views;
      without[k].reserved = false;
      if (choose_slot(without) != k) continue;
      arena_.control().reserved[k].compare_exchange_strong(reserved, 0);  // or the agent has just begun, or finished
      changed = true;
    }
    // The slot rule leaves one: of two slots the agent writes at most one, which is whole, and the other is free or can
    // be taken back. Nothing changed therefore means a mark in motion, or the agent between two states.
    if (!changed) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!is_alive({arena_.control().agent_pid, arena_.control().agent_start})) return std::nullopt;
  }
}

Result<StepOrder> SharedMemoryHook::decide(const TrainPosition& position, bool last) {
  RT_CHECK(rank_ == 0, "decide() on rank {}", rank_);
  StepOrder order;
  const CheckpointConfig& config = plan_.recipe.checkpoint;
  order.stop = arena_.control().stop.load(std::memory_order_acquire) != 0;
  const bool must = order.stop || last;
  order.persist = must || save_pending_ || save_is_due(position.step);
  order.snapshot = order.persist || (config.snapshot_steps > 0 && position.step % config.snapshot_steps == 0);
  if (!order.snapshot) return order;

  const std::optional<int64_t> slot = free_slot(must);
  if (!slot) {
    if (must) return Error{ErrorCode::kUnavailable, "the agent that would persist the last checkpoint is gone"};
    if (order.persist && !save_pending_) {
      spdlog::info("step {}: both snapshot slots are still being written; the save waits for one", position.step);
    }
    save_pending_ = order.persist;
    order.snapshot = order.persist = false;
    ++stats_.put_off;
    return order;
  }
  order.slot = *slot;
  if (order.persist) {
    save_pending_ = false;
    saved_ns_ = clock_.now_ns();
    arena_.control().reserved[*slot].store(position.step, std::memory_order_release);
  }
  return order;
}

Status SharedMemoryHook::match(std::span<const StateTensor> state) {
  if (matched_ == state.data() && matched_size_ == static_cast<int64_t>(state.size())) return {};
  std::map<std::tuple<int64_t, int64_t, std::vector<int64_t>, std::vector<int64_t>>, int64_t> by_box;
  int64_t primary = 0;
  for (size_t k = 0; k < state.size(); ++k) {
    if (!state[k].primary) continue;
    ++primary;
    by_box[{static_cast<int64_t>(state[k].kind), state[k].tensor, state[k].box.lo, state[k].box.hi}] =
        static_cast<int64_t>(k);
  }
  source_.clear();
  for (const SlotShard& shard : layout_.shards) {
    const auto it = by_box.find({shard.kind, shard.tensor, shard.box.lo, shard.box.hi});
    if (it == by_box.end()) {
      return Error{ErrorCode::kInternal,
                   fmt::format("rank {} has no memory for {} {} {}", rank_, kStateKinds[shard.kind],
                               plan_.tensors[shard.tensor].name, to_string(shard.box))};
    }
    source_.push_back(it->second);
  }
  if (primary != static_cast<int64_t>(layout_.shards.size())) {
    return Error{ErrorCode::kInternal, fmt::format("rank {} holds {} boxes to save, its layout has {}", rank_, primary,
                                                   layout_.shards.size())};
  }
  matched_ = state.data();
  matched_size_ = static_cast<int64_t>(state.size());
  return {};
}

Status SharedMemoryHook::snapshot(const StepOrder& order, const TrainPosition& position,
                                  std::span<const StateTensor> state) {
  const int64_t begin_ns = clock_.now_ns();
  if (order.slot < 0 || order.slot >= arena_.slots()) {
    return Error{ErrorCode::kInternal, fmt::format("an order for snapshot slot {}", order.slot)};
  }
  RT_TRY(match(state));
  std::vector<std::span<const std::byte>> sources;
  sources.reserve(source_.size());
  for (const int64_t k : source_) sources.emplace_back(state[k].data, static_cast<size_t>(state[k].bytes));
  std::string text = encode_position(position);
  if (static_cast<int64_t>(text.size()) > kPositionCapacity) {  // many sources: a report may be lost, a state not
    trainer::TrainPosition bare = position;
    bare.metrics.clear();
    text = encode_position(bare);
  }
  RT_TRY(SnapshotWriter(arena_, rank_).write(order.slot, incarnation_, position.step, text, sources));
  stats_.last_ms = static_cast<double>(clock_.now_ns() - begin_ns) * 1e-6;
  stats_.total_ms += stats_.last_ms;
  ++stats_.snapshots;
  if (order.persist) {
    ++stats_.persists;
    promised_step_ = position.step;
  }
  if (!options_.notify) return {};
  return options_.notify({rank_, position.step, order.slot, order.persist, stats_.last_ms});
}

Status SharedMemoryHook::finish() {
  if (promised_step_ == 0) return {};
  const arena::Control& control = arena_.control();
  const auto what = [&] { return fmt::format("waiting for the checkpoint of step {}", promised_step_); };
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(options_.finish_deadline_s);
  for (;;) {
    if (control.persisted_step.load(std::memory_order_acquire) == promised_step_) return {};
    if (control.failed_step.load(std::memory_order_acquire) == promised_step_) {
      return Error{static_cast<ErrorCode>(control.failed_code.load(std::memory_order_relaxed)),
                   fmt::format("the checkpoint of step {} could not be written: {}", promised_step_,
                               std::string_view(control.failure, strnlen(control.failure, arena::kMessageBytes)))};
    }
    if (!is_alive({control.agent_pid, control.agent_start})) {
      return Error{ErrorCode::kPeerLost, what() + ": the agent is gone"};
    }
    if (std::chrono::steady_clock::now() > deadline) {
      return Error{ErrorCode::kTimeout, fmt::format("{}: not on disk after {} s", what(), options_.finish_deadline_s)};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace cairn::ckpt
