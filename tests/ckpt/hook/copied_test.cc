// Snapshots that are copied beside training (checkpoint.snapshot_by = "copy"): the same bits as with banks, whatever
// the layout, and after deaths no more than one step lost.

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "runtime/plan/activations.h"
#include "runtime/trainer/state.h"
#include "tests/ckpt/hook/mortal_run.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

Recipe copied(Recipe recipe) {
  recipe.checkpoint.snapshot_by = SnapshotBy::kCopy;
  return recipe;
}

/// Layouts, number formats, optimizers and what else touches the saved state.
struct Variant {
  std::string name;
  int64_t world;
  std::function<void(Recipe&)> change;
};
std::vector<Variant> variants() {
  const auto layout = [](int64_t tp, int64_t pp, int zero, int64_t shard = 0) {
    return [=](Recipe& r) {
      r.mesh.tp = tp;
      r.mesh.pp = pp;
      r.mesh.shard = shard;
      r.optimizer.zero = zero;
      if (zero == 3) r.model.tied_embeddings = false;
    };
  };
  return {{"one rank", 1, layout(1, 1, 0)},
          {"dp", 2, layout(1, 1, 0)},
          {"ZeRO-1", 2, layout(1, 1, 1)},
          {"ZeRO-2", 2, layout(1, 1, 2)},
          {"ZeRO-3", 2, layout(1, 1, 3)},
          {"tp, pp, dp", 8, layout(2, 2, 1)},
          {"groups", 4, layout(1, 1, 2, 2)},
          {"bf16", 2, [](Recipe& r) { r.precision = Precision::kBf16; }},
          {"average", 2, [](Recipe& r) { r.optimizer.ema = 0.9; }},
          {"clip", 2, [](Recipe& r) { r.optimizer.qk_clip = 0.01; }},
          {"LAMB", 2, [](Recipe& r) { r.optimizer.kind = OptimizerKind::kLamb; }},
          {"Adafactor", 2, [](Recipe& r) { r.optimizer.kind = OptimizerKind::kAdafactor; }},
          {"Adafactor, ZeRO-1", 2,
           [](Recipe& r) {
             r.optimizer.kind = OptimizerKind::kAdafactor;
             r.optimizer.zero = 1;
           }},
          {"one rank, average", 1, [](Recipe& r) { r.optimizer.ema = 0.9; }},
          {"one rank, LAMB", 1, [](Recipe& r) { r.optimizer.kind = OptimizerKind::kLamb; }},
          {"one rank, skips", 1,
           [](Recipe& r) {
             r.precision = Precision::kF16;
             r.loss_scale = {.initial = 0x1p24, .hysteresis = 1};
           }},
          {"one rank, experts", 1, [](Recipe& r) { r.model.moe = {.experts = 4, .top_k = 2, .bias_rate = 0.001}; }},
          {"experts", 2, [](Recipe& r) { r.model.moe = {.experts = 4, .top_k = 2, .bias_rate = 0.001}; }},
          {"now and then", 2, [](Recipe& r) { r.checkpoint.snapshot_steps = 2; }},
          {"fp16", 2, [](Recipe& r) { r.precision = Precision::kF16; }},
          {"skips", 2,
           [](Recipe& r) {
             r.precision = Precision::kF16;
             r.loss_scale = {.initial = 0x1p24, .hysteresis = 1};
           }},
          {"no overlap", 2, [](Recipe& r) { r.optimizer.overlap = false; }}};
}

Plan plan_for(const Recipe& recipe, int64_t world) {
  const auto planned = make_plan(recipe, world);
  REQUIRE_OK(planned);
  return planned.value();
}

struct Overtaken {
  std::atomic<int64_t> by_update{0}, pieces{0};
};

/// A device that takes its time: of what was fetched one comes each time that the copier looks, and is what is there
/// then. Counts those that come when the update has already changed some that came before. `held`: none comes.
/// `beside_updates`: none comes before an update begins, and then one in 0.3 ms until that has changed one.
class LateLink : public DeviceLink {
 public:
  explicit LateLink(Overtaken& seen, const std::atomic<bool>* held = nullptr, bool beside_updates = false)
      : seen_(seen), held_(held), beside_updates_(beside_updates) {}
  Status use_host(std::span<std::byte>) override { return {}; }
  Status follow_work() override {
    arrived_.clear();
    changed_ = false;
    begun_ = updates_begun;
    return {};
  }
  bool at_once() const override { return false; }
  int64_t depth() const override { return 16; }
  int64_t piece_bytes(int64_t) const override { return 4000; }
  Result<std::optional<uint64_t>> fetch(DeviceBytes device, std::byte* host) override {
    coming_.push_back({{address_of(device.first), static_cast<size_t>(device.size)}, host});
    ++fetched_;
    return std::optional<uint64_t>();
  }
  Result<std::shared_ptr<const Event>> mark() override {
    return std::shared_ptr<const Event>(std::make_shared<Mark>(fetched_));
  }
  Result<bool> has_arrived(const Event& mark) override {
    const int64_t wanted = static_cast<const Mark&>(mark).fetches;
    if (come_ >= wanted || (held_ != nullptr && *held_)) return come_ >= wanted;
    changed_ = changed_ || std::ranges::any_of(arrived_, [](const auto& piece) {
                 return std::memcmp(piece.first.data(), piece.second.data(), piece.second.size()) != 0;
               });
    if (beside_updates_ && !changed_) {
      const auto now = std::chrono::steady_clock::now();
      if (updates_begun == begun_ || now < next_) return false;
      next_ = now + std::chrono::microseconds(300);
    }
    const auto [device, host] = coming_.front();
    coming_.pop_front();
    std::memcpy(host, device.data(), device.size());
    ++seen_.pieces;
    seen_.by_update += changed_ ? 1 : 0;
    arrived_.emplace_back(device, std::vector<std::byte>(device.begin(), device.end()));
    return ++come_ >= wanted;
  }
  Status store(std::span<const std::byte> host, DevicePtr<std::byte> device) override {
    std::memcpy(address_of(device), host.data(), host.size());
    return {};
  }
  Status settle() override { return {}; }

 private:
  struct Mark final : Event {
    explicit Mark(int64_t fetches) : fetches(fetches) {}
    const int64_t fetches;  // before it
  };
  Overtaken& seen_;
  const std::atomic<bool>* held_;
  const bool beside_updates_;
  bool changed_ = false;  // by the update, of what has come
  int64_t begun_ = 0;     // updates before this copy
  std::chrono::steady_clock::time_point next_;
  int64_t fetched_ = 0, come_ = 0;
  std::deque<std::pair<std::span<const std::byte>, std::byte*>> coming_;
  std::vector<std::pair<std::span<const std::byte>, std::vector<std::byte>>> arrived_;
};

/// A run that a link has been asked for, and the piece that it is of.
struct Asked {
  DeviceBytes run;
  int64_t piece = 0;
};

/// Also lists what is asked of it, in order.
class ListingLink final : public LateLink {
 public:
  ListingLink(Overtaken& seen, std::vector<Asked>& asked) : LateLink(seen), asked_(asked) {}
  Result<std::optional<uint64_t>> fetch(DeviceBytes device, std::byte* host) override {
    asked_.push_back({device, piece_});
    return LateLink::fetch(device, host);
  }
  Result<std::shared_ptr<const Event>> mark() override {
    ++piece_;
    return LateLink::mark();
  }

 private:
  std::vector<Asked>& asked_;
  int64_t piece_ = 0;
};

}  // namespace

TEST_SUITE("ckpt/hook/copied") {
  TEST_CASE("training is the same to the bit, and so is what the last snapshot holds") {
    for (const Variant& variant : variants()) {
      CAPTURE(variant.name);
      Recipe recipe = short_recipe(true, true);
      variant.change(recipe);
      const Told banks = train(plan_for(recipe, variant.world), {});
      const Told copies = train(plan_for(copied(recipe), variant.world), {});
      CHECK(copies.steps == banks.steps);
      CHECK(copies.banks == banks.banks);
    }
  }

  TEST_CASE("copied snapshots change no bit on a slow device, where the next update begins before a copy ends") {
    for (const Variant& variant : variants()) {
      if (variant.world > 2) continue;
      CAPTURE(variant.name);
      Recipe recipe = short_recipe(true, true);
      variant.change(recipe);
      const Told banks = train(plan_for(recipe, variant.world), {});
      Overtaken seen;
      // Lives that end right before or in an update begin with a copy that an update went on beside.
      const std::vector<Death> deaths = {{Moment::kForward, 4, 0}, {Moment::kBegun, 6, variant.world - 1}};
      const Told copies = train(plan_for(copied(recipe), variant.world), deaths, nullptr,
                                [&] { return std::make_unique<LateLink>(seen, nullptr, true); });
      CHECK(copies.steps == banks.steps);
      CHECK(copies.banks == banks.banks);
      CHECK(seen.by_update > 0);
      CHECK(seen.by_update < seen.pieces);
    }
  }

  TEST_CASE("killed at each moment of a step: the run goes on from the newest complete copy, with the same bits") {
    for (const Variant& variant : variants()) {
      CAPTURE(variant.name);
      Recipe recipe = copied(short_recipe(true, true));
      variant.change(recipe);
      const Plan plan = plan_for(recipe, variant.world);
      const int64_t last = variant.world - 1;
      const Told untouched = train(plan, {});
      std::vector<std::pair<int64_t, bool>> from;
      const std::vector<Death> deaths = {{Moment::kForward, 3, 0},    {Moment::kForward, 3, last},
                                         {Moment::kBegun, 3, last},   {Moment::kUpdated, 4, 0},
                                         {Moment::kForward, 5, last}, {Moment::kBegun, 6, 0}};
      const Told killed = train(plan, deaths, &from);
      CHECK(killed.steps == untouched.steps);
      CHECK(killed.banks == untouched.banks);
      const int64_t every = recipe.checkpoint.snapshot_steps;
      for (size_t life = 0; life < from.size(); ++life) {
        CAPTURE(life);
        CHECK_FALSE(from[life].second);
        const int64_t completed = (deaths[life].step - 1) / every * every;
        // A life that begins at the step before has nothing older to lose.
        CHECK(from[life].first <= completed);
        CHECK(from[life].first >= completed - every);
      }
    }
  }

  TEST_CASE("with one slot a run has the same bits, whether a death leaves the copy before or cuts one") {
    Recipe recipe = copied(short_recipe(true, true));
    recipe.optimizer.zero = 1;  // first updates read what the other rank saves
    const Told untouched = train(plan_for(recipe, 2), {});
    recipe.checkpoint.in_flight = 0;
    const Plan plan = plan_for(recipe, 2);
    const std::vector<Death> deaths = {{Moment::kForward, 3, 0},
                                       {Moment::kUpdated, 4, 1},
                                       {Moment::kForward, 5, 1},
                                       {Moment::kBegun, 6, 0},
                                       {Moment::kNever}};
    for (const bool late : {false, true}) {
      CAPTURE(late);
      Overtaken seen;
      const auto link = [&] { return std::make_unique<LateLink>(seen); };
      const TempDir dir;
      Agent agent(plan, fresh_run_id(), dir.path);
      REQUIRE(agent.arena->slots() == 1);
      Told told;
      for (const Death& death : deaths) {
        const RestoreChoice choice = agent.begin().value();
        CHECK((choice.source == arena::Source::kMemory || choice.source == arena::Source::kFresh));
        CHECK(live_once(plan, agent, death, &told, late ? MakeLink(link) : MakeLink()) == (death.step == 0));
      }
      CHECK(told.steps == untouched.steps);
      CHECK(told.banks == untouched.banks);
    }
  }

  TEST_CASE("a due snapshot is left out while any rank of the host still copies, and one that must be waits") {
    constexpr int64_t kRanks = 3;
    Recipe recipe = copied(short_recipe(true, true));
    recipe.batch = {.samples = 6, .micro = 1};
    const Plan plan = plan_for(recipe, kRanks);
    const TempDir dir;
    Agent agent(plan, fresh_run_id(), dir.path);
    REQUIRE(agent.begin().ok());
    const SystemClock clock;
    Overtaken seen;
    std::atomic<bool> held[kRanks] = {};
    std::vector<std::unique_ptr<SharedMemoryHook>> hooks;
    std::vector<trainer::TrainState> states;
    std::vector<std::vector<trainer::StateTensor>> own;
    for (int64_t r = 0; r < kRanks; ++r) {
      const RankPlan rank = plan.rank(r);
      hooks.push_back(
          SharedMemoryHook::make(plan, r, *agent.arena, clock,
                                 {.make_link = [&seen, of = &held[r]] { return std::make_unique<LateLink>(seen, of); }})
              .value());
      const trainer::StateMemory memory = hooks[r]
                                              ->memory(trainer::kept_tensors(plan, rank, true),
                                                       trainer::kept_tensors(plan, rank, false), rank.weight_bytes)
                                              .value();
      states.push_back(trainer::TrainState::allocate(plan, rank, memory, Device{}).value());
      states[r].initialize(*make_cpu_stream(), plan, rank);
      own.push_back(states[r].tensors(plan, rank, 0));
      REQUIRE(hooks[r]->restore(own[r]).ok());
    }
    const auto decide = [&](int64_t step, bool last = false) {
      for (const auto& hook : hooks) REQUIRE(hook->begin_update(0, step).ok());
      return hooks[0]->decide(position_at(step), last).value();
    };
    const auto snapshot = [&](const trainer::StepOrder& order, int64_t step, int64_t r) {
      REQUIRE(order.snapshot);
      REQUIRE(hooks[r]->snapshot(order, position_at(step), 0, own[r], {}).ok());
    };
    const auto snapshots = [&](int64_t step) {
      const trainer::StepOrder order = decide(step);
      for (int64_t r = 0; r < kRanks; ++r) snapshot(order, step, r);
      return order.slot;
    };
    const auto wait_for = [&](int64_t slot, int64_t step) {
      for (;;) {
        const SlotView view = agent.arena->views()[static_cast<size_t>(slot)];
        if (view.whole && view.step == step) return;
        std::this_thread::yield();
      }
    };
    const auto newest = [&] {
      const std::vector<SlotView> views = agent.arena->views();
      return views[static_cast<size_t>(newest_whole(views).value())].step;
    };

    wait_for(snapshots(1), 1);
    int64_t step = 2, left_out = 0;
    for (const int64_t slow : {2, 0}) {  // another rank, and the one that decides
      CAPTURE(slow);
      const int64_t whole = newest();
      held[slow] = true;
      const int64_t slot = snapshots(step++);
      for (int again = 0; again < 2; ++again) {
        const trainer::StepOrder order = decide(step++);
        CHECK_FALSE(order.snapshot);
        CHECK(order.left_out);
        CHECK(hooks[0]->stats().left_out == ++left_out);
        CHECK(newest() == whole);
      }
      held[slow] = false;
      wait_for(slot, step - 3);
    }

    held[0] = held[2] = true;
    snapshots(step++);
    std::atomic<int> passed = 0;
    std::thread deciding([&] {
      const trainer::StepOrder order = decide(step, true);
      ++passed;
      CHECK(order.persist);
      std::thread others([&] {
        for (const int64_t r : {1, 2}) snapshot(order, step, r);
        ++passed;
      });
      snapshot(order, step, 0);
      held[2] = false;
      others.join();
    });
    CHECK(passed == 0);
    held[0] = false;
    deciding.join();
    CHECK(passed == 2);
    for (const auto& hook : hooks) hook->release();
    CHECK(newest() == step);
    CHECK(hooks[0]->stats().left_out == left_out);
  }

  TEST_CASE("state is copied in the order in which an update overwrites it") {
    Recipe recipe = copied(short_recipe(true, true));
    recipe.optimizer.kind = OptimizerKind::kAdafactor;
    recipe.model.moe = {.experts = 4, .top_k = 2, .bias_rate = 0.001};
    const Plan plan = plan_for(recipe, 1);
    const RankPlan rank = plan.rank(0);
    const TempDir dir;
    Agent agent(plan, fresh_run_id(), dir.path);
    REQUIRE(agent.begin().ok());
    const SystemClock clock;
    Overtaken seen;
    std::vector<Asked> asked;
    const auto hook = SharedMemoryHook::make(plan, 0, *agent.arena, clock,
                                             {.make_link = [&] { return std::make_unique<ListingLink>(seen, asked); }})
                          .value();
    const trainer::StateMemory memory =
        hook->memory(trainer::kept_tensors(plan, rank, true), {}, rank.weight_bytes).value();
    trainer::TrainState state = trainer::TrainState::allocate(plan, rank, memory, Device{}).value();
    state.initialize(*make_cpu_stream(), plan, rank);
    const std::vector<trainer::StateTensor> own = state.tensors(plan, rank, 0);
    REQUIRE(hook->restore(own).ok());
    REQUIRE(hook->begin_update(0, 1).ok());
    const trainer::StepOrder order = hook->decide(position_at(1), false).value();
    REQUIRE(order.snapshot);
    REQUIRE(hook->snapshot(order, position_at(1), 0, own, {}).ok());
    hook->release();

    std::map<int64_t, std::pair<int64_t, int64_t>> of_turns;  // first and last piece
    std::map<int64_t, int64_t> tensors;                       // by turn
    for (const trainer::StateTensor& item : own) {
      int64_t covered = 0;
      for (const Asked& one : asked) {
        const DevicePtr<std::byte> begin = std::max(one.run.first, item.data);
        const DevicePtr<std::byte> end = std::min(one.run.first + one.run.size, item.data + item.bytes);
        if (begin >= end) continue;
        covered += end - begin;
        auto& [first, last] = of_turns.try_emplace(item.turn, one.piece, one.piece).first->second;
        first = std::min(first, one.piece);
        last = std::max(last, one.piece);
      }
      REQUIRE(covered == item.bytes);
      tensors[item.turn] = item.tensor;
    }
    int64_t reached = 0;
    for (const auto& [turn, pieces] : of_turns) {
      CHECK(pieces.first >= reached);
      reached = pieces.second;
    }
    CHECK(reached > 20);
    CHECK(of_turns.size() > 20);
    CHECK(plan.tensors[tensors.begin()->second].balances);  // which an update begins with
    CHECK_FALSE(plan.tensors[tensors.rbegin()->second].balances);
  }

  TEST_CASE("a start from memory copies nothing: the first update reads the snapshot where it lies") {
    const Plan plan = plan_for(copied(short_recipe(true, true)), 2);
    const TempDir dir;
    Agent agent(plan, fresh_run_id(), dir.path);
    Told told;
    REQUIRE(agent.begin().ok());
    REQUIRE_FALSE(live_once(plan, agent, {Moment::kForward, 4, 0}, &told));
    const RestoreChoice choice = agent.begin().value();
    REQUIRE(choice.source == arena::Source::kMemory);
    const RankPlan rank = plan.rank(1);
    const std::vector<trainer::StateTensor> saved = trainer::kept_tensors(plan, rank, true);
    const std::vector<trainer::StateTensor> replicas = trainer::kept_tensors(plan, rank, false);
    REQUIRE_FALSE(replicas.empty());
    const SystemClock clock;
    const auto begin = [&](const MakeLink& make_link) {
      const auto hook = SharedMemoryHook::make(plan, 1, *agent.arena, clock, {.make_link = make_link}).value();
      trainer::StateMemory memory = hook->memory(saved, replicas, rank.weight_bytes).value();
      const trainer::TrainState state = trainer::TrainState::allocate(plan, rank, memory, Device{}).value();
      const std::vector<trainer::StateTensor> own = state.tensors(plan, rank, 0);
      const int64_t bank = hook->restore(own).value()->bank;
      const bool filled = std::any_of(own.begin(), own.end(), [](const trainer::StateTensor& item) {
        const std::span<const std::byte> bytes(address_of(item.data), static_cast<size_t>(item.bytes));
        return std::ranges::any_of(bytes, [](std::byte b) { return b != std::byte{0}; });
      });
      return std::tuple(std::move(memory), bank, filled);
    };

    const auto [memory, bank, filled] = begin({});
    CHECK(bank == 1);  // after the trainer's own
    CHECK_FALSE(filled);
    REQUIRE(memory.banks.size() == 1);
    REQUIRE(memory.banks[0].size() == saved.size());
    const std::span<std::byte> slot = agent.arena->payload(1, choice.slot);
    CHECK(address_of(memory.banks[0][0]) == slot.data() + agent.arena->shards(1)[0].offset);
    REQUIRE(memory.peer_copies.has_value());
    const std::span<std::byte> of_saver = agent.arena->payload(0, choice.slot);
    for (const PeerCopy& part : *memory.peer_copies) {
      CHECK(part.banks[1] >= of_saver.data());
      CHECK(part.banks[1] + part.bytes <= of_saver.data() + of_saver.size());
    }

    trainer::StateMemory wrong = memory;
    for (const auto& [spoil, found] : std::vector<std::pair<std::function<void(PeerCopy&)>, std::string>>{
             {[](PeerCopy& part) { part.bytes += 4; }, "this one has"},
             {[](PeerCopy& part) { part.copy = 1000; }, "of copy 1000 in 2 banks"},
             {[](PeerCopy& part) { part.bytes -= 2; }, "of floats"},
             {[](PeerCopy& part) {
                part.offset = 2;
                part.bytes -= 4;
              },
              "bytes 2 to"},
             {[](PeerCopy& part) { part.banks.pop_back(); }, "in 1 banks"}}) {
      wrong.peer_copies = {{.copy = 0, .offset = 0, .bytes = replicas[0].bytes, .banks = {nullptr, nullptr}}};
      REQUIRE(trainer::TrainState::allocate(plan, rank, wrong, Device{}).ok());
      spoil(wrong.peer_copies->front());
      const auto refused = trainer::TrainState::allocate(plan, rank, wrong, Device{});
      REQUIRE(!refused.ok());
      CHECK(refused.error().code == ErrorCode::kInternal);
      CHECK(refused.error().message.find(found) != std::string::npos);
    }

    // What only a link can reach is copied back.
    Overtaken seen;
    const auto [by_link, own_bank, by_copy] = begin([&] { return std::make_unique<LateLink>(seen); });
    CHECK(by_link.banks.empty());
    CHECK_FALSE(by_link.peer_copies.has_value());
    CHECK(own_bank == 0);
    CHECK(by_copy);
  }

  TEST_CASE("with copied snapshots a rank allocates what the plan says, and the arena has no weights") {
    for (const Variant& variant : variants()) {
      CAPTURE(variant.name);
      Recipe recipe = copied(short_recipe(true, true));
      variant.change(recipe);
      const Plan plan = plan_for(recipe, variant.world);
      const ArenaSpec spec = arena_spec(plan, {.run_id = "r"}).value();
      CHECK(spec.weight_bytes.empty());
      CHECK(spec.slots == 3);
      const TempDir dir;
      Agent agent(plan, fresh_run_id(), dir.path);
      REQUIRE(agent.begin().ok());
      Told told;
      CHECK(live_once(plan, agent, {}, &told));
      for (int64_t r = 0; r < variant.world; ++r) {
        const RankPlan rank = plan.rank(r);
        CHECK(told.allocated.at(r) == rank.weight_bytes + rank.gathered_bytes + rank.grad_bytes + rank.optimizer_bytes +
                                          largest_stage_buffers_bytes(plan, r) + plan.boundary_buffers_bytes());
      }
    }
  }
}
