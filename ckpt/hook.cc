#include "ckpt/hook.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <tuple>
#include <utility>

#include "ckpt/copy/host_link.h"
#include "ckpt/position.h"
#include "ckpt/restore.h"
#include "ckpt/run_memory.h"
#include "ckpt/snapshot/snapshot.h"
#include "runtime/core/log.h"
#include "runtime/core/process.h"

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
  if (arena.world() != plan.mesh.world() || !arena.ranks().contains(rank)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("snapshot memory is for ranks {} to {} of {}, this is rank {} of {}", arena.ranks().first,
                             arena.ranks().end - 1, arena.world(), rank, plan.mesh.world())};
  }
  std::unique_ptr<SharedMemoryHook> hook(
      new SharedMemoryHook(plan, rank, std::nullopt, &arena,
                           arena.control().incarnation.load(std::memory_order_acquire), clock, std::move(options)));
  RT_TRY(hook->check_layout());
  return hook;
}

SharedMemoryHook::SharedMemoryHook(const Plan& plan, int64_t rank, Arena arena, uint64_t incarnation,
                                   HookOptions options)
    : SharedMemoryHook(plan, rank, std::move(arena), nullptr, incarnation, system_clock(), std::move(options)) {}

SharedMemoryHook::SharedMemoryHook(const Plan& plan, int64_t rank, std::optional<Arena> owned, const Arena* borrowed,
                                   uint64_t incarnation, const Clock& clock, HookOptions options)
    : plan_(plan),
      rank_(rank),
      owned_(std::move(owned)),
      arena_(owned_ ? *owned_ : *borrowed),
      clock_(clock),
      options_(std::move(options)),
      incarnation_(incarnation),
      layout_(slot_layout(plan, rank)) {
  // Saves by time: the clock runs on through restarts, and starts with the run.
  int64_t never = 0;
  if (rank_ == options_.decides) arena_.control().saved_ns.compare_exchange_strong(never, clock_.now_ns());
}

Status SharedMemoryHook::check_layout() const {
  bool same = arena_.world() == plan_.mesh.world() && arena_.ranks().contains(rank_);
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

Result<trainer::StateMemory> SharedMemoryHook::memory(std::span<const StateTensor> saved,
                                                      std::span<const StateTensor> kept_for_others,
                                                      int64_t weight_bytes) {
  RT_TRY(check_layout());
  bool same =
      saved.size() == layout_.shards.size() && std::ssize(arena_.weights(rank_)) == (copies() ? 0 : weight_bytes);
  for (size_t k = 0; same && k < saved.size(); ++k) {
    const SlotShard& shard = layout_.shards[k];
    same = shard.kind == static_cast<int64_t>(saved[k].kind) && shard.tensor == saved[k].tensor &&
           shard.box == saved[k].box && shard.bytes == saved[k].bytes;
  }
  if (!same) {
    return Error{ErrorCode::kInternal, fmt::format("rank {}: the trainer's state is not the arena's", rank_)};
  }
  trainer::StateMemory out;
  const auto bank_in = [this](int64_t slot) {
    std::byte* const payload = arena_.payload(rank_, slot).data();
    std::vector<DevicePtr<std::byte>> bank;
    for (const SlotShard& shard : layout_.shards) bank.emplace_back(payload + shard.offset);
    return bank;
  };
  const arena::Decision& decision = arena_.control().decision;
  const bool in_memory = decision.source == arena::Source::kMemory && decision.slot < arena_.slots();
  if (copies()) {
    std::unique_ptr<DeviceLink> link = options_.make_link ? options_.make_link() : make_host_link();
    for (int64_t slot = 0; slot < arena_.slots(); ++slot) RT_TRY(link->use_host(arena_.payload(rank_, slot)));
    copier_ = std::make_unique<StateCopier>(std::move(link), kCopyNice);
    out.gate = copier_.get();
    // A copy into the only slot may begin on one rank while another still reads its peer's state there.
    starts_in_slot_ = in_memory && !options_.make_link && arena_.slots() > 1;
    if (starts_in_slot_) {
      out.banks.push_back(bank_in(decision.slot));
      RT_TRY_SET(out.peer_copies, peer_copies(kept_for_others));
      if (out.peer_copies) {
        for (PeerCopy& part : *out.peer_copies) part.banks = {nullptr, part.banks[decision.slot]};
      }
    }
  } else {
    for (int64_t slot = 0; slot < arena_.slots(); ++slot) out.banks.push_back(bank_in(slot));
    out.weights = DevicePtr(arena_.weights(rank_).data());
    RT_TRY_SET(out.peer_copies, peer_copies(kept_for_others));
  }
  if (arena_.on_disk()) {
    pager_ = std::make_unique<DiskPager>(arena_.fd(), arena_.base());
    out.pager = pager_.get();
  }
  // A start from memory is to take no time: there the first steps find their pages one by one.
  if (!in_memory) arena_.populate(rank_);
  if (!copies()) {
    const auto guard = [this](std::span<std::byte> area) {
      const size_t bytes = (area.size() + kPageBytes - 1) / kPageBytes * kPageBytes;
      guarded_.emplace_back(std::span(area.data(), area.empty() ? 0 : bytes));
    };
    for (int64_t slot = 0; slot < arena_.slots(); ++slot) guard(arena_.payload(rank_, slot));
    guard(arena_.weights(rank_));
  }
  attached_ = true;
  return out;
}

Result<std::optional<std::vector<PeerCopy>>> SharedMemoryHook::peer_copies(
    std::span<const StateTensor> kept_for_others) const {
  if (!arena_.has_world()) return std::optional<std::vector<PeerCopy>>();
  RT_TRY_SET(std::vector<PeerCopy> found, peer_copies_in(plan_, arena_, kept_for_others));
  return std::optional(std::move(found));
}

Result<std::optional<trainer::Restored>> SharedMemoryHook::restore(std::span<const StateTensor> state) {
  RT_TRY(check_layout());
  if (const uint64_t now = arena_.control().incarnation.load(std::memory_order_acquire); now != incarnation_) {
    return Error{ErrorCode::kInternal,
                 fmt::format("rank {} is of incarnation {}, the agent is at {}", rank_, incarnation_, now)};
  }
  if (!attached_) return Error{ErrorCode::kInternal, fmt::format("rank {} restores into no memory", rank_)};
  const std::unique_ptr<DeviceLink> own = copies() ? nullptr : make_host_link();
  DeviceLink& link = copies() ? copier_->link() : *own;
  RT_TRY_SET(std::optional<trainer::Restored> found,
             carry_out_decision(plan_, arena_, state, link, options_.open_foreign));
  if (found && arena_.control().decision.source == arena::Source::kMemory) published_bank_ = found->bank;
  if (!copies()) return found;
  if (published_bank_ >= 0) {
    if (!starts_in_slot_) RT_TRY(load(published_bank_, state).with("restoring"));
    found->bank = starts_in_slot_ ? 1 : 0;
  }
  RT_TRY(copier_->cover(arrays_to_copy(state), std::ssize(layout_.shards)));
  return found;
}

Status SharedMemoryHook::load(int64_t slot, std::span<const StateTensor> state) {
  DeviceLink& link = copier_->link();
  std::vector<StateTensor> of_others;
  size_t saved = 0;
  for (const StateTensor& item : state) {
    if (!item.primary) {
      if (arena_.has_world()) of_others.push_back(item);  // else carry_out_decision() has filled them
      continue;
    }
    const SlotShard& shard = layout_.shards[saved++];
    RT_TRY(link.store(arena_.payload(rank_, slot).subspan(shard.offset, shard.bytes), item.data));
  }
  RT_TRY_SET(const std::vector<PeerCopy> peer_copies, peer_copies_in(plan_, arena_, of_others));
  for (const PeerCopy& part : peer_copies) {
    const std::span<const std::byte> there(part.banks[slot], static_cast<size_t>(part.bytes));
    RT_TRY(link.store(there, of_others[part.copy].data + part.offset));
  }
  return link.settle();
}

std::vector<std::vector<CopyArray>> SharedMemoryHook::arrays_to_copy(std::span<const StateTensor> state) const {
  std::map<int64_t, std::vector<CopyArray>> turns;
  int64_t shard = 0;
  for (const StateTensor& item : state) {
    if (!item.primary) continue;
    turns[item.turn].push_back({item.data, layout_.shards[shard].offset, item.bytes, shard});
    ++shard;
  }
  std::vector<std::vector<CopyArray>> groups;
  for (auto& [turn, arrays] : turns) groups.push_back(std::move(arrays));
  return groups;
}

double SharedMemoryHook::longest_wait_s() const { return std::min(kLongestWaitS, plan_.recipe.restart.deadline_s / 2); }

Result<int64_t> SharedMemoryHook::next_bank(int64_t current) {
  RT_CHECK(rank_ == options_.decides, "next_bank() on rank {}", rank_);
  pause_ns_ = 0;
  if (copies()) return 0;
  if (current != published_bank_) return current;
  const int64_t begin_ns = clock_.now_ns();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(longest_wait_s());
  for (bool waited = false;; waited = true) {
    const std::vector<SlotView> views = arena_.views();
    const std::optional<int64_t> slot = choose_slot(views, current);
    if (slot || (std::chrono::steady_clock::now() > deadline && !views[current].reserved)) {
      if (waited) pause_ns_ = clock_.now_ns() - begin_ns;
      if (slot) return *slot;
      spdlog::warn(
          "no bank was free for {} s: the disk is slower than the saves; until it has caught up, a killed rank "
          "goes back to the step that is being saved",
          longest_wait_s());
      ++stats_.in_place;
      published_bank_ = -1;
      return current;
    }
    RT_TRY(agent_lives());
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Status SharedMemoryHook::agent_lives() const {
  if (is_alive({arena_.control().agent_pid, arena_.control().agent_start})) return {};
  return Error{ErrorCode::kUnavailable, "the agent that writes the checkpoints is gone"};
}

Result<std::optional<int64_t>> SharedMemoryHook::slot_for_copy(bool must, bool waits) {
  const std::vector<SlotView> now = arena_.views();
  if (!waits && published_bank_ >= 0 && !now[published_bank_].whole) {
    RT_TRY(copier_->status());
    return std::optional<int64_t>();
  }
  RT_TRY(copier_->finish());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(longest_wait_s());
  const int64_t last = published_bank_;
  for (;;) {
    const std::vector<SlotView> views = arena_.views();
    if (const std::optional<int64_t> slot = choose_slot_for_copy(views, last)) return slot;
    // Other ranks may still be at the last copy; only the end waits for the disk.
    const bool late = std::chrono::steady_clock::now() > deadline;
    if (!must && (late || last < 0 || views[last].whole)) return std::optional<int64_t>();
    if (late && last >= 0 && !views[last].reserved) {
      spdlog::warn("no bank was free for {} s: until the step before is on disk, a killed rank goes back to that",
                   longest_wait_s());
      return std::optional(last);
    }
    RT_TRY(agent_lives());
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Status SharedMemoryHook::begin_update(int64_t bank, int64_t step) {
  if (copies()) {
    RT_TRY(copier_->status());
    pause_ns_ = 0;
    return {};
  }
  const int64_t begin_ns = clock_.now_ns();
  if (rank_ != 0) pause_ns_ = 0;
  if (bank < 0 || bank >= arena_.slots() || !attached_) {
    return Error{ErrorCode::kInternal, fmt::format("an update into bank {}", bank)};
  }
  if (pager_ != nullptr) RT_TRY(pager_->status());  // the bank that it reads, and what it is written to
  SnapshotWriter(arena_, rank_).begin(bank, incarnation_, step);
  begun_bank_ = bank;
  pause_ns_ += clock_.now_ns() - begin_ns;
  return {};
}

Status SharedMemoryHook::weights_whole(int64_t step) {
  if (copies()) return {};
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

/// One at a time: what is asked while such a save is being written is one more save, however often it is asked.
bool SharedMemoryHook::save_is_asked() const {
  const arena::Control& control = arena_.control();
  if (control.saves_asked.load(std::memory_order_acquire) == control.saves_answered.load(std::memory_order_relaxed)) {
    return false;
  }
  for (int64_t slot = 0; slot < arena_.slots(); ++slot) {
    if (control.reserved[slot].load(std::memory_order_acquire) != 0 && control.asked[slot] != 0) return false;
  }
  return true;
}

bool SharedMemoryHook::may_reserve() const {
  int64_t reserved = 0;
  for (int64_t slot = 0; slot < arena_.slots(); ++slot) {
    reserved += arena_.control().reserved[slot].load(std::memory_order_acquire) != 0 ? 1 : 0;
  }
  // Two for the updates: one to read, one to write.
  return reserved < std::max<int64_t>(1, arena_.slots() - 2 - (replicates() ? kReplicaBanks : 0));
}

bool SharedMemoryHook::replicates() const {
  return plan_.recipe.checkpoint.replicate_steps > 0 && !arena_.has_world() && options_.ward == nullptr &&
         arena_.slots() >= banks_of(plan_.recipe.checkpoint, true);
}

/// One copy at a time: all hosts have made the one before.
bool SharedMemoryHook::may_replicate() const {
  return std::ranges::none_of(std::span(arena_.control().replica), [](const std::atomic<int64_t>& mark) {
    return mark.load(std::memory_order_acquire) > 0;
  });
}

void SharedMemoryHook::say_what_copies_cost(int64_t step) {
  if (cost_said_) return;
  const int64_t now_ns = clock_.now_ns();
  const int64_t copied = std::exchange(copied_step_, step), begun_ns = std::exchange(copied_ns_, now_ns);
  if (copied == 0) return;
  cost_said_ = true;
  const int64_t steps = step - copied;
  const std::string each = fmt::format(
      "a snapshot copies {} MiB of a rank's state beside training, in {:.3g} s, where a step takes {:.3g} s",
      layout_.bytes >> 20, static_cast<double>(copy_ns_.load()) * 1e-9,
      static_cast<double>(now_ns - begun_ns) * 1e-9 / static_cast<double>(steps));
  if (stats_.left_out == 0) {
    spdlog::info("{}", each);
  } else {
    spdlog::info("snapshots are taken each {} steps, and those that are due in between are left out: {}", steps, each);
  }
}

Result<StepOrder> SharedMemoryHook::decide(const TrainPosition& position, bool last) {
  RT_CHECK(rank_ == options_.decides, "decide() on rank {}", rank_);
  arena_.keep_news(position.step, position.metrics);
  StepOrder order;
  const CheckpointConfig& config = plan_.recipe.checkpoint;
  arena::Control& control = arena_.control();
  const uint64_t asked = control.saves_asked.load(std::memory_order_acquire);
  const int64_t stop_at = control.stop_at_step.load(std::memory_order_acquire);
  const bool wanted = save_pending_ || save_is_due(position.step) || save_is_asked();
  order.stop = control.stop.load(std::memory_order_acquire) != 0 || (stop_at > 0 && position.step >= stop_at) ||
               (wanted && control.stop_at_save.load(std::memory_order_acquire) != 0);
  const bool must = order.stop || last;  // no update follows that would need a bank
  const bool due = must || wanted;
  order.persist = due && (must || may_reserve());
  replica_pending_ = replicates() && (replica_pending_ || position.step % config.replicate_steps == 0);
  order.replicate = replica_pending_ && may_replicate();
  order.snapshot =
      order.persist || order.replicate || (config.snapshot_steps > 0 && position.step % config.snapshot_steps == 0);
  if (order.snapshot && copies()) {
    const int64_t begin_ns = clock_.now_ns();
    const bool needed = order.persist || order.replicate;
    RT_TRY_SET(const std::optional<int64_t> slot, slot_for_copy(must, needed || copier_->link().at_once()));
    order.snapshot = slot.has_value();
    order.left_out = !order.snapshot;
    stats_.left_out += order.left_out ? 1 : 0;
    if (order.snapshot && !copier_->link().at_once()) say_what_copies_cost(position.step);
    order.persist = order.persist && order.snapshot;
    order.replicate = order.replicate && order.snapshot;
    if (slot) {
      begun_bank_ = order.slot = *slot;
      SnapshotWriter(arena_, rank_).begin(*slot, incarnation_, position.step);  // before it is reserved
    }
    pause_ns_ += clock_.now_ns() - begin_ns;
  }
  if (due && !order.persist) {
    if (!save_pending_) {
      spdlog::info(
          "step {}: {} being written; this save waits", position.step,
          arena_.slots() > 3 ? fmt::format("{} saves are still", arena_.slots() - 2) : "the save before is still");
    }
    save_pending_ = true;
    ++stats_.put_off;
  }
  if (order.replicate) {
    replica_pending_ = false;
    control.replica[begun_bank_].store(position.step, std::memory_order_release);
  }
  if (order.persist) {
    save_pending_ = false;
    control.saved_ns.store(clock_.now_ns(), std::memory_order_relaxed);
    control.asked[begun_bank_] = asked != control.saves_answered.load(std::memory_order_relaxed) ? asked : 0;
    control.saves_answered.store(asked, std::memory_order_relaxed);
    control.reserved[begun_bank_].store(position.step, std::memory_order_release);
  }
  return order;
}

Status SharedMemoryHook::snapshot(const StepOrder& order, const TrainPosition& position, int64_t bank,
                                  std::span<const StateTensor> state, std::span<const uint64_t> sums) {
  const int64_t begin_ns = clock_.now_ns();
  const int64_t slot = copies() ? order.slot : bank;
  if (copies() && slot >= 0 && slot < arena_.slots() && attached_) {
    RT_TRY(copier_->finish());
    if (rank_ != options_.decides) SnapshotWriter(arena_, rank_).begin(slot, incarnation_, position.step);
    begun_bank_ = slot;
  }
  if (slot != begun_bank_ || !attached_) {
    return Error{ErrorCode::kInternal, fmt::format("a snapshot of bank {}, the update wrote {}", slot, begun_bank_)};
  }
  const std::string text = encode_position(position, kPositionCapacity);
  published_bank_ = slot;
  // Before it is whole, as on the host that decides, where decide() has done it.
  if (order.persist && rank_ != options_.decides && rank_ == arena_.ranks().first)
    arena_.control().reserved[slot].store(position.step, std::memory_order_release);
  if (order.replicate && rank_ != options_.decides && rank_ == arena_.ranks().first)
    arena_.control().replica[slot].store(position.step, std::memory_order_release);
  if (copies()) {
    const int64_t stood_ns = pause_ns_ + clock_.now_ns() - begin_ns - copier_->waited_ns();
    const auto publish = [this, slot, order, step = position.step, text, stood_ns,
                          begun_ns = clock_.now_ns()](std::span<const uint64_t> copied) -> Status {
      copy_ns_.store(clock_.now_ns() - begun_ns);
      const int64_t lost_ns = stood_ns + copier_->waited_ns();
      RT_TRY(SnapshotWriter(arena_, rank_).publish(slot, incarnation_, step, text, copied, lost_ns));
      tell(order, step);
      return {};
    };
    RT_TRY(copier_->start(arena_.payload(rank_, slot).data(), publish));
  } else {
    const int64_t told_ns = pause_ns_ + clock_.now_ns() - begin_ns;
    RT_TRY(SnapshotWriter(arena_, rank_).publish(slot, incarnation_, position.step, text, sums, told_ns));
    if (options_.ward != nullptr) RT_TRY(keep_copy(slot, position.step, text, state));
  }
  pause_ns_ += clock_.now_ns() - begin_ns;
  stats_.last_ms = static_cast<double>(pause_ns_) * 1e-6;
  ++stats_.snapshots;
  if (order.persist) {
    ++stats_.persists;
    promised_step_ = position.step;
  }
  if (!copies()) tell(order, position.step);
  return {};
}

/// The state of this rank that the rank in its place on the ward's host saves.
Status SharedMemoryHook::find_kept(std::span<const StateTensor> state) {
  using Key = std::tuple<int64_t, int64_t, std::vector<int64_t>, std::vector<int64_t>>;
  const auto key = [](int64_t kind, int64_t tensor, const Box& box) { return Key(kind, tensor, box.lo, box.hi); };
  std::map<Key, int64_t> places;
  for (int64_t k = 0; k < std::ssize(state); ++k) {
    const StateTensor& item = state[static_cast<size_t>(k)];
    if (!item.primary) places.emplace(key(static_cast<int64_t>(item.kind), item.tensor, item.box), k);
  }
  const int64_t rank = options_.ward->ranks().first + (rank_ - arena_.ranks().first);
  const SlotLayout layout = slot_layout(plan_, rank);
  if (!options_.ward->ranks().contains(rank) || options_.ward->shards(rank).size() != layout.shards.size())
    return Error{ErrorCode::kInternal, fmt::format("memory for copies is not that of rank {}", rank)};
  for (const SlotShard& shard : layout.shards) {
    const auto at = places.find(key(shard.kind, shard.tensor, shard.box));
    if (at == places.end()) {
      return Error{ErrorCode::kInternal, fmt::format("rank {} does not keep {} of {} {}, which rank {} saves", rank_,
                                                     kStateKinds[static_cast<size_t>(shard.kind)],
                                                     plan_.tensors[shard.tensor].name, to_string(shard.box), rank)};
    }
    kept_.push_back(at->second);
  }
  return {};
}

Status SharedMemoryHook::keep_copy(int64_t slot, int64_t step, std::string_view position,
                                   std::span<const StateTensor> state) {
  const Arena& ward = *options_.ward;
  if (slot >= ward.slots()) return {};  // this host had room for fewer banks
  const int64_t rank = ward.ranks().first + (rank_ - arena_.ranks().first);
  if (kept_.empty()) RT_TRY(find_kept(state));
  SnapshotWriter writer(ward, rank);
  writer.begin(slot, incarnation_, step);
  const std::unique_ptr<DeviceLink> link = make_host_link();
  std::vector<uint64_t> sums;
  for (size_t k = 0; k < kept_.size(); ++k) {
    const StateTensor& item = state[static_cast<size_t>(kept_[k])];
    std::byte* const to = ward.payload(rank, slot).data() + ward.shards(rank)[k].offset;
    RT_TRY_SET(const std::optional<uint64_t> sum, link->fetch({item.data, item.bytes}, to));
    sums.push_back(*sum);
  }
  return writer.publish(slot, incarnation_, step, position, sums, 0);
}

void SharedMemoryHook::tell(const StepOrder& order, int64_t step) const {
  if (order.persist && options_.on_snapshot) options_.on_snapshot(step);
}

void SharedMemoryHook::condemn(int64_t step) { arena_.control().ruined_step.store(step, std::memory_order_release); }

void SharedMemoryHook::release() {
  if (copier_ != nullptr) ignore(copier_->finish(), "whoever ordered a copy was told, or leaves with another error");
}

Status SharedMemoryHook::finish() {
  if (copies()) RT_TRY(copier_->finish());
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
