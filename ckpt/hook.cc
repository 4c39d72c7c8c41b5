#include "ckpt/hook.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

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
                                                                 const Clock& clock, HookOptions options) {
  if (arena.world() != plan.mesh.world() || rank < 0 || rank >= arena.world()) {
    return Error{ErrorCode::kInvalidInput, fmt::format("snapshot memory is for {} ranks, this is rank {} of {}",
                                                       arena.world(), rank, plan.mesh.world())};
  }
  std::unique_ptr<SharedMemoryHook> hook(new SharedMemoryHook(plan, rank, arena, clock, std::move(options)));
  RT_TRY(hook->check_layout());
  return hook;
}

SharedMemoryHook::SharedMemoryHook(const Plan& plan, int64_t rank, Arena arena, uint64_t incarnation,
                                   std::function<void(int64_t step)> on_snapshot)
    : plan_(plan),
      rank_(rank),
      owned_(std::move(arena)),
      arena_(*owned_),
      clock_(system_clock()),
      incarnation_(incarnation),
      layout_(slot_layout(plan, rank)) {
  if (on_snapshot) {
    options_.notify = [tell = std::move(on_snapshot)](const SnapshotNotice& notice) {
      if (notice.persist) tell(notice.step);
      return Status();
    };
  }
  start_clock();
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

SharedMemoryHook::SharedMemoryHook(const Plan& plan, int64_t rank, const Arena& arena, const Clock& clock,
                                   HookOptions options)
    : plan_(plan),
      rank_(rank),
      arena_(arena),
      clock_(clock),
      options_(std::move(options)),
      incarnation_(arena.control().incarnation.load(std::memory_order_acquire)),
      layout_(slot_layout(plan, rank)) {
  start_clock();
}

void SharedMemoryHook::start_clock() {
  // Saves by time: the clock runs on through restarts, and starts with the run.
  int64_t never = 0;
  if (rank_ == 0) arena_.control().saved_ns.compare_exchange_strong(never, clock_.now_ns());
}

Result<trainer::StateMemory> SharedMemoryHook::memory(std::span<const StateTensor> saved,
                                                      std::span<const StateTensor> copies, int64_t weight_bytes) {
  RT_TRY(check_layout());
  bool same = saved.size() == layout_.shards.size() && std::ssize(arena_.weights(rank_)) == weight_bytes;
  for (size_t k = 0; same && k < saved.size(); ++k) {
    const SlotShard& shard = layout_.shards[k];
    same = shard.kind == static_cast<int64_t>(saved[k].kind) && shard.tensor == saved[k].tensor &&
           shard.box == saved[k].box && shard.bytes == saved[k].bytes;
  }
  if (!same) {
    return Error{ErrorCode::kInternal, fmt::format("rank {}: the trainer's state is not the arena's", rank_)};
  }
  trainer::StateMemory out;
  for (int64_t slot = 0; slot < arena_.slots(); ++slot) {
    std::byte* const payload = arena_.payload(rank_, slot).data();
    std::vector<std::byte*>& bank = out.banks.emplace_back();
    for (const SlotShard& shard : layout_.shards) bank.push_back(payload + shard.offset);
  }
  out.weights = arena_.weights(rank_).data();
  RT_TRY_SET(out.originals, originals_in(plan_, arena_, copies));
  if (arena_.on_disk()) {
    pager_ = std::make_unique<DiskPager>(arena_.fd(), arena_.base());
    out.pager = pager_.get();
  }
  // A start from memory is to take no time: there the first steps find their pages one by one.
  if (arena_.control().decision.source != arena::Source::kMemory) arena_.populate(rank_);
  attached_ = true;
  return out;
}

Result<std::optional<trainer::Restored>> SharedMemoryHook::restore(std::span<const StateTensor> state) {
  RT_TRY(check_layout());
  if (const uint64_t now = arena_.control().incarnation.load(std::memory_order_acquire); now != incarnation_) {
    return Error{ErrorCode::kInternal,
                 fmt::format("rank {} is of incarnation {}, the agent is at {}", rank_, incarnation_, now)};
  }
  if (!attached_) return Error{ErrorCode::kInternal, fmt::format("rank {} restores into no memory", rank_)};
  RT_TRY_SET(std::optional<trainer::Restored> found, carry_out_decision(plan_, arena_, state, open_foreign_));
  if (found && arena_.control().decision.source == arena::Source::kMemory) published_bank_ = found->bank;
  return found;
}

Result<int64_t> SharedMemoryHook::next_bank(int64_t current) {
  RT_CHECK(rank_ == 0, "next_bank() on rank {}", rank_);
  pause_ns_ = 0;
  if (current != published_bank_) return current;
  const int64_t begin_ns = clock_.now_ns();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(options_.longest_wait_s);
  for (bool waited = false;; waited = true) {
    const std::vector<SlotView> views = arena_.views();
    const std::optional<int64_t> slot = choose_slot(views, current);
    if (slot || (std::chrono::steady_clock::now() > deadline && !views[current].reserved)) {
      if (waited) pause_ns_ = clock_.now_ns() - begin_ns;
      if (slot) return *slot;
      spdlog::warn(
          "no bank was free for {} s: the disk is slower than the saves; until it has caught up, a killed rank "
          "goes back to the step that is being saved",
          options_.longest_wait_s);
      ++stats_.in_place;
      published_bank_ = -1;
      return current;
    }
    if (!is_alive({arena_.control().agent_pid, arena_.control().agent_start})) {
      return Error{ErrorCode::kUnavailable, "the agent that writes the checkpoints is gone"};
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Status SharedMemoryHook::begin_update(int64_t bank, int64_t step) {
  const int64_t begin_ns = clock_.now_ns();
  if (rank_ != 0) pause_ns_ = 0;
  if (bank < 0 || bank >= arena_.slots() || !attached_) {
    return Error{ErrorCode::kInternal, fmt::format("an update into bank {}", bank)};
  }
  SnapshotWriter(arena_, rank_).begin(bank, incarnation_, step);
  begun_bank_ = bank;
  pause_ns_ += clock_.now_ns() - begin_ns;
  return {};
}

Status SharedMemoryHook::weights_whole(int64_t step) {
  SnapshotWriter(arena_, rank_).weights_whole(incarnation_, step);
  return {};
}

bool SharedMemoryHook::save_is_due(int64_t step) const {
  const int64_t saved_ns = arena_.control().saved_ns.load(std::memory_order_relaxed);
  for (const Every& every : plan_.recipe.checkpoint.save) {
    if (every.steps > 0 && step % every.steps == 0) return true;
    if (every.seconds > 0 && static_cast<double>(clock_.now_ns() - saved_ns) * 1e-9 >= every.seconds) return true;
  }
  return false;
}

bool SharedMemoryHook::may_reserve() const {
  int64_t reserved = 0;
  for (int64_t slot = 0; slot < arena_.slots(); ++slot) {
    reserved += arena_.control().reserved[slot].load(std::memory_order_acquire) != 0 ? 1 : 0;
  }
  return reserved < std::max<int64_t>(1, arena_.slots() - 2);  // two for the updates: one to read, one to write
}

Result<StepOrder> SharedMemoryHook::decide(const TrainPosition& position, bool last) {
  RT_CHECK(rank_ == 0, "decide() on rank {}", rank_);
  arena_.keep_news(position.step, position.metrics);
  StepOrder order;
  const CheckpointConfig& config = plan_.recipe.checkpoint;
  order.stop = arena_.control().stop.load(std::memory_order_acquire) != 0;
  const bool must = order.stop || last;  // no update follows that would need a bank
  const bool due = must || save_pending_ || save_is_due(position.step);
  order.persist = due && (must || may_reserve());
  order.snapshot = order.persist || (config.snapshot_steps > 0 && position.step % config.snapshot_steps == 0);
  if (due && !order.persist) {
    if (!save_pending_) {
      spdlog::info(
          "step {}: {} being written; this save waits", position.step,
          arena_.slots() > 3 ? fmt::format("{} saves are still", arena_.slots() - 2) : "the save before is still");
    }
    save_pending_ = true;
    ++stats_.put_off;
  }
  if (order.persist) {
    save_pending_ = false;
    arena_.control().saved_ns.store(clock_.now_ns(), std::memory_order_relaxed);
    arena_.control().reserved[begun_bank_].store(position.step, std::memory_order_release);
  }
  return order;
}

Status SharedMemoryHook::snapshot(const StepOrder& order, const TrainPosition& position, int64_t bank,
                                  std::span<const StateTensor> /*state*/, std::span<const uint64_t> sums) {
  const int64_t begin_ns = clock_.now_ns();
  if (bank != begun_bank_ || !attached_) {
    return Error{ErrorCode::kInternal, fmt::format("a snapshot of bank {}, the update wrote {}", bank, begun_bank_)};
  }
  std::string text = encode_position(position);
  if (static_cast<int64_t>(text.size()) > kPositionCapacity) {  // many sources: a report may be lost, a state not
    trainer::TrainPosition bare = position;
    bare.metrics.clear();
    text = encode_position(bare);
  }
  const int64_t told_ns = pause_ns_ + clock_.now_ns() - begin_ns;
  RT_TRY(SnapshotWriter(arena_, rank_).publish(bank, incarnation_, position.step, text, sums, told_ns));
  published_bank_ = bank;
  pause_ns_ += clock_.now_ns() - begin_ns;
  stats_.last_ms = static_cast<double>(pause_ns_) * 1e-6;
  stats_.total_ms += stats_.last_ms;
  stats_.longest_ms = std::max(stats_.longest_ms, stats_.last_ms);
  ++stats_.snapshots;
  if (order.persist) {
    ++stats_.persists;
    promised_step_ = position.step;
  }
  if (!options_.notify) return {};
  return options_.notify({rank_, position.step, bank, order.persist, stats_.last_ms});
}

Status SharedMemoryHook::finish() {
  if (promised_step_ == 0) return {};
  const arena::Control& control = arena_.control();
  const auto what = [&] { return fmt::format("waiting for the checkpoint of step {}", promised_step_); };
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(options_.finish_deadline_s);
  for (;;) {
    if (control.persisted_step.load(std::memory_order_acquire) >= promised_step_) return {};
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
