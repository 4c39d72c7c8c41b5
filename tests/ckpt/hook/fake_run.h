#pragma once
// An agent and a trainer reduced to what checkpoints see: ranks as threads, whose state at step s is a function of s,
// kind, tensor and element, so that any rank of any layout can tell whether what it restored is right.

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ckpt/hook.h"
#include "ckpt/persister.h"
#include "ckpt/restore.h"
#include "ckpt/run_memory.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/core/random.h"
#include "runtime/core/word_sums.h"
#include "tests/ckpt/plan/layouts.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

namespace cairn::ckpt::testing {

using cairn::testing::TempDir;

inline std::string fresh_run_id() {
  static int count = 0;
  return "hook-test-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

inline uint32_t bits_at(int64_t step, int64_t kind, int64_t tensor, int64_t flat) {
  // Finite as a float: what is not is no state that may be saved.
  return static_cast<uint32_t>(mix64(mix64(mix64(step * 3 + kind) + tensor) + flat)) & 0xbfffffffu;
}

/// Fills `state` from one slot of an arena of any layout.
inline Status load_from_memory(const Plan& plan, const Arena& arena, int64_t slot,
                               std::span<const trainer::StateTensor> state) {
  RT_TRY_SET(const std::vector<PeerCopy> peer_copies, peer_copies_in(plan, arena, state));
  for (const PeerCopy& part : peer_copies) {
    std::memcpy(address_of(state[part.copy].data) + part.offset, part.banks[slot], part.bytes);
  }
  return {};
}

/// One rank's state, as the trainer lays it out: saved tensors in the hook's banks, all other in memory of its own.
/// Without banks (a hook that has none, or no hook) all of it is its own.
class FakeState {
 public:
  FakeState(const Plan& plan, int64_t rank, const trainer::StateMemory& memory = {}) : plan_(plan) {
    const RankPlan mine = plan.rank(rank);
    for (int64_t kind = 0; kind < 3; ++kind) memory_.emplace_back(mine.flat_elems, 0);
    for (size_t bank = 0; bank < std::max<size_t>(1, memory.banks.size()); ++bank) {
      auto& tensors = banks_.emplace_back();
      size_t saved = 0;
      for (int64_t kind = 0; kind < 3; ++kind) {
        for (const StatePiece& piece : mine.pieces) {
          std::byte* data = reinterpret_cast<std::byte*>(memory_[kind].data() + piece.flat_offset);
          if (piece.primary && !memory.banks.empty()) data = address_of(memory.banks[bank].at(saved++));
          tensors.push_back({static_cast<trainer::StateKind>(kind), piece.tensor, piece.box, DevicePtr(data),
                             piece.count_elems() * 4, piece.primary});
        }
      }
    }
  }
  static std::vector<trainer::StateTensor> kept(const Plan& plan, int64_t rank, bool primary) {
    std::vector<trainer::StateTensor> out;
    FakeState any(plan, rank);
    for (const trainer::StateTensor& item : any.tensors()) {
      if (item.primary == primary) out.push_back(item);
    }
    return out;
  }
  static Result<trainer::StateMemory> memory_of(trainer::CheckpointHook& hook, const Plan& plan, int64_t rank) {
    return hook.memory(kept(plan, rank, true), kept(plan, rank, false), plan.rank(rank).weight_bytes);
  }
  /// As a first update does: what others save, from a bank of theirs.
  void copy(std::span<const PeerCopy> peer_copies, int64_t bank) {
    std::vector<std::byte*> copies;
    for (const trainer::StateTensor& item : tensors()) {
      if (!item.primary) copies.push_back(address_of(item.data));
    }
    for (const PeerCopy& part : peer_copies) {
      std::memcpy(copies.at(part.copy) + part.offset, part.banks.at(bank), part.bytes);
    }
  }
  std::span<const trainer::StateTensor> tensors(int64_t bank = 0) const { return banks_.at(bank); }

  /// An update: writes the bank and the private state.
  void advance_to(int64_t step, int64_t bank = 0) {
    each(bank,
         [&](uint32_t& bits, int64_t kind, int64_t tensor, int64_t flat) { bits = bits_at(step, kind, tensor, flat); });
  }
  int64_t wrong_elements(int64_t step, int64_t bank = 0) {
    int64_t wrong = 0;
    each(bank, [&](uint32_t& bits, int64_t kind, int64_t tensor, int64_t flat) {
      wrong += bits == bits_at(step, kind, tensor, flat) ? 0 : 1;
    });
    return wrong;
  }
  std::vector<uint64_t> sums(int64_t bank) const {
    std::vector<uint64_t> out;
    for (const trainer::StateTensor& item : banks_.at(bank)) {
      if (item.primary) out.push_back(word_sums(address_of(item.data), item.bytes / 4));
    }
    return out;
  }

 private:
  template <typename Visit>
  void each(int64_t bank, Visit&& visit) {
    for (const trainer::StateTensor& item : banks_.at(bank)) {
      auto* bits = address_of(item.data.as<uint32_t>());
      walk(item.box, plan_.tensors[item.tensor].shape,
           [&](int64_t k, int64_t flat) { visit(bits[k], static_cast<int64_t>(item.kind), item.tensor, flat); });
    }
  }
  const Plan& plan_;
  std::vector<std::vector<uint32_t>> memory_;
  std::vector<std::vector<trainer::StateTensor>> banks_;
};

/// What the weights of a rank hold at a step.
inline std::byte weight_byte(int64_t rank, int64_t step) { return static_cast<std::byte>(rank * 31 + step * 7 + 1); }

inline trainer::TrainPosition position_at(int64_t step) {
  return {.step = step,
          .samples = step * 24,
          .tokens = step * 24 * 8,
          .lr = 1e-3 / static_cast<double>(step),
          .loss = 4.2,
          .seed = 0xfedcba9876543210ull,
          .sampler = R"({"epoch":0,"next":)" + std::to_string(step * 24) + "}",
          .metrics = R"({"step":)" + std::to_string(step) + "}"};
}

/// The ranks of one incarnation. They die in step `die_at`: all but the first `snapshots_at_death` of them before they
/// published the snapshot of that step, if one was ordered; with `torn`, these in the middle of their update.
struct Life {
  int64_t steps = 0;
  int64_t die_at = 0;
  int64_t snapshots_at_death = 0;
  bool torn = false;
  bool weights_late = false;  // all died before the weights of the last step had come from the other ranks
};

struct LifeReport {
  std::optional<trainer::TrainPosition> restored;  // the same on all ranks, or the test has failed
  int64_t last_step = 0;
  std::vector<Status> finished;  // by rank
  SnapshotStats stats;           // of rank 0
  bool weights_ready = false;    // the weights that the ranks found were those of the step
};

inline Status live(const Plan& plan, const Arena& arena, const Life& life, NodePersister* persister,
                   LifeReport& report) {
  const int64_t world = plan.mesh.world();
  std::barrier sync(world);
  std::mutex mutex;
  std::vector<std::optional<trainer::Restored>> restored(world);
  std::vector<Status> restore_status(world);
  report.finished.assign(world, {});
  trainer::StepOrder order;
  int64_t next = 0;
  const SystemClock clock;
  int64_t wrong = 0;
  Status decided;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      HookOptions options{.finish_deadline_s = 20};
      if (persister != nullptr) {
        options.on_snapshot = [&](int64_t) { persister->notify(); };
      }
      auto made = SharedMemoryHook::make(plan, rank, arena, clock, options);
      RT_CHECK(made.ok(), "{}", made.error().message);
      SharedMemoryHook& hook = *made.value();
      const int64_t weight_bytes = plan.rank(rank).weight_bytes;
      const auto memory = FakeState::memory_of(hook, plan, rank);
      RT_CHECK(memory.ok(), "{}", memory.error().message);
      const std::span<std::byte> weights(address_of(memory.value().weights), static_cast<size_t>(weight_bytes));
      FakeState state(plan, rank, memory.value());
      auto found = hook.restore(state.tensors());
      if (found.ok()) {
        restored[rank] = found.value();
        if (found.value()) state.copy(*memory.value().peer_copies, found.value()->bank);
      } else {
        restore_status[rank] = found.error();
      }
      sync.arrive_and_wait();
      for (const Status& status : restore_status) {
        if (!status.ok()) return;
      }
      int64_t step = restored[rank] ? restored[rank]->position.step : 0;
      int64_t bank = restored[rank] ? restored[rank]->bank : 0;
      if (step > 0) {
        const bool good =
            !restored[rank]->weights_ready ||
            std::all_of(weights.begin(), weights.end(), [&](std::byte b) { return b == weight_byte(rank, step); });
        const std::lock_guard lock(mutex);
        wrong += state.wrong_elements(step, bank) + (good ? 0 : 1);
      }
      bool stop = false;
      while (step < life.steps && !stop) {
        ++step;
        if (rank == 0) {
          const auto asked = hook.next_bank(bank);
          RT_CHECK(asked.ok(), "{}", asked.error().message);
          next = asked.value();
        }
        sync.arrive_and_wait();
        bank = next;
        RT_CHECK(hook.begin_update(bank, step).ok());
        const bool dies = step == life.die_at;
        const bool cut = dies && rank >= life.snapshots_at_death;
        std::fill(weights.begin(), weights.end(), weight_byte(rank, step));
        state.advance_to(cut && life.torn ? step + 1000 : step, bank);
        if (rank == 0) {
          auto asked = hook.decide(position_at(step), step == life.steps);
          if (asked.ok()) {
            order = asked.value();
          } else {
            decided = asked.error();
            order = {.stop = true};
          }
        }
        sync.arrive_and_wait();
        if (!cut && !(dies && life.weights_late)) RT_CHECK(hook.weights_whole(step).ok());
        if (order.snapshot && !cut) {
          const Status published = hook.snapshot(order, position_at(step), bank, state.tensors(bank), state.sums(bank));
          RT_CHECK(published.ok(), "{}", published.error().message);
        }
        stop = order.stop;
        if (dies) return;
        sync.arrive_and_wait();
      }
      report.finished[rank] = hook.finish();
      if (rank == 0) {
        report.last_step = step;
        report.stats = hook.stats();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : restore_status) RT_TRY(status);
  RT_TRY(decided);
  CHECK(wrong == 0);
  for (int64_t rank = 1; rank < world; ++rank) {
    REQUIRE(restored[rank].has_value() == restored[0].has_value());
    if (!restored[0]) continue;
    REQUIRE(restored[rank]->position.step == restored[0]->position.step);
    REQUIRE(restored[rank]->bank == restored[0]->bank);
    REQUIRE(restored[rank]->weights_ready == restored[0]->weights_ready);
  }
  if (restored[0]) {
    report.restored = restored[0]->position;
    report.weights_ready = restored[0]->weights_ready;
  }
  return {};
}

/// Agent side of one run, as `cairn train` wires it.
struct Agent {
  Agent(const Plan& plan, const std::string& run_id, const std::filesystem::path& dir,
        std::optional<std::filesystem::path> from = {}, int64_t keep_last = 0, int64_t slots = kDefaultSlots)
      : plan(plan) {
    const RunText run{.run_name = "fake", .run_id = run_id, .recipe_json = "{}", .recipe_hash = "r1"};
    const auto open = [&]() -> Result<Arena> {
      if (slots == kDefaultSlots)
        return open_run_memory(
            plan, run, dir, [] { return std::make_unique<PosixBackend>(); }, &report);
      RT_TRY_SET(ArenaSpec spec, arena_spec(plan, run));
      spec.slots = slots;
      std::filesystem::create_directories(dir);
      return Arena::create(spec);
    };
    auto opened = open();
    REQUIRE_OK(opened);
    arena = std::make_unique<Arena>(std::move(opened).value());
    persister = std::make_unique<NodePersister>(
        *arena, [] { return std::make_unique<PosixBackend>(); }, dir,
        PersistOptions{.retention = keep_last == 0 ? std::nullopt : std::optional(RetentionPolicy{keep_last}),
                       .on_event = [this](const PersistEvent& event) {
                         const std::lock_guard lock(mutex);
                         events.push_back(event);
                       }});
    decider = std::make_unique<RestoreDecider>(plan, *arena, io, RestoreRequest{dir, std::move(from)});
  }
  ~Agent() {
    persister.reset();
    ignore(arena->remove(), "end of the test");
  }
  Result<RestoreChoice> begin() {
    persister->ranks_gone();
    return decider->next_incarnation();
  }
  LifeReport run(const Life& life) {
    LifeReport out;
    const Status lived = live(plan, *arena, life, persister.get(), out);
    REQUIRE_OK(lived);
    return out;
  }

  const Plan& plan;
  PosixBackend io;
  std::vector<std::string> report;
  std::unique_ptr<Arena> arena;
  std::mutex mutex;
  std::vector<PersistEvent> events;
  std::unique_ptr<NodePersister> persister;
  std::unique_ptr<RestoreDecider> decider;
};

}  // namespace cairn::ckpt::testing
