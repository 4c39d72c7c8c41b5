// A run over several hosts, as far as no network is needed: each host has an arena of its ranks, an agent's persister
// and its decider; ranks are threads, and what agents tell each other goes through one object in memory.
//
// The trap: state that a rank keeps for others (ZeRO-0's replicas, tied ends over a pipeline, shard groups) lies in the
// bank of the rank that saves it. On another host that bank is empty or not there, and who reads it trains on, wrong.

#include <condition_variable>
#include <fstream>
#include <iterator>

#include "ckpt/format/names.h"
#include "ckpt/persist/commit.h"
#include "ckpt/persist/read.h"
#include "ckpt/plan/free_copies.h"
#include "ckpt/position.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/snapshot/snapshot.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/hook/mortal_run.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

const Clock& system_clock() {
  static const SystemClock clock;
  return clock;
}

std::unique_ptr<IoBackend> plain_io() { return std::make_unique<PosixBackend>(); }

/// A step's save by all hosts: each writes its part, the last one commits, and none returns before.
class Commits {
 public:
  explicit Commits(int64_t hosts) : hosts_(hosts) {}

  Result<SaveReport> save(int64_t host, IoBackend& io, const fs::path& dir, Manifest skeleton,
                          std::span<const WriterPart> parts, const SaveOptions& options) {
    const int64_t step = skeleton.step;
    const WriterId leader{"leader", 1, 1, step};
    const fs::path work = dir / work_dir_name(kTmpPrefix, step, leader);
    std::unique_lock lock(mutex_);
    Save& save = saves_[step];
    if (!std::exchange(save.begun, true)) RT_TRY(make_dirs(io, work));
    lock.unlock();
    RT_TRY_SET(PartSet mine, write_parts(io, work, skeleton, parts, options));
    SaveReport report{.dir = dir / step_dir_name(step), .manifest = skeleton};
    report.manifest.files = mine.files;  // so the next save's part is planned faster
    report.manifest.shards = mine.shards;
    lock.lock();
    save.sets.emplace(host, std::move(mine));
    if (std::ssize(save.sets) == hosts_) {
      std::vector<PartSet> sets;
      for (auto& [from, set] : save.sets) sets.push_back(std::move(set));
      WorkFolder folder(io, work, step);
      Result<CommitReport> committed = commit_step(io, folder, std::move(skeleton), sets, false);
      save.status = committed.ok() ? Status() : Status(std::move(committed).error());
      save.done = true;
      changed_.notify_all();
    }
    if (!changed_.wait_for(lock, std::chrono::seconds(30), [&] { return save.done; }))
      return Error{ErrorCode::kTimeout, "another host has not written its part"};
    if (!save.status.ok()) return save.status.error();
    return report;
  }

 private:
  struct Save {
    bool begun = false, done = false;
    std::map<int64_t, PartSet> sets;
    Status status;
  };
  int64_t hosts_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, Save> saves_;
};

struct Host {
  RankRange ranks;
  std::unique_ptr<Arena> arena;
  std::shared_ptr<Arena> ward;
  std::unique_ptr<NodePersister> persister;
  std::unique_ptr<RestoreDecider> decider;
};

/// The agents of a run whose world is spread over hosts in equal parts. Of each its own memory, on one machine.
class Hosts {
 public:
  /// `led`: the first host decides for all.
  Hosts(const Plan& plan, const fs::path& dir, int64_t count, bool led = false,
        std::optional<int64_t> from_step = std::nullopt)
      : plan_(plan), commits_(count), led_(led), followers_(*this) {
    const int64_t each = plan.mesh.world() / count;
    for (int64_t k = 0; k < count; ++k) {
      Host& host = hosts_.emplace_back();
      host.ranks = {k * each, (k + 1) * each};
      const RunText run{.run_name = "hosts", .run_id = fresh_run_id(), .recipe_json = "{}", .recipe_hash = "r1"};
      auto opened = open_run_memory(plan, run, dir, plain_io, nullptr, {}, {}, host.ranks);
      REQUIRE_OK(opened);
      host.arena = std::make_unique<Arena>(std::move(opened).value());
      host.persister = std::make_unique<NodePersister>(
          *host.arena, plain_io, dir,
          PersistOptions{.save_step = [this, k](IoBackend& io, const fs::path& into, Manifest skeleton,
                                                std::span<const WriterPart> parts, const SaveOptions& options) {
            return commits_.save(k, io, into, std::move(skeleton), parts, options);
          }});
      RestoreRequest request{dir};
      if (led && k == 0) request.from_step = from_step;
      host.decider = std::make_unique<RestoreDecider>(plan, *host.arena, io_, std::move(request));
    }
  }
  ~Hosts() {
    for (Host& host : hosts_) {
      host.persister.reset();
      ignore(host.arena->remove(), "end of the test");
    }
  }
  /// The leader's choice, which all have carried out.
  RestoreChoice begin_led() {
    const auto choice = decide();
    REQUIRE_OK(choice);
    for (Host& host : hosts_) {
      const arena::Control& control = host.arena->control();
      CHECK(control.incarnation.load() == choice.value().incarnation);
      CHECK(control.decision.step == choice.value().step);
      CHECK(std::ranges::equal(host.arena->starts(), hosts_.front().arena->starts()));
      for (const SlotView& view : host.arena->views()) CHECK((!view.whole || view.step <= choice.value().step));
    }
    return choice.value();
  }
  /// The leader's agent does the same (tools/run/agent/coordinator.cc).
  Result<RestoreChoice> decide() {
    for (Host& host : hosts_) host.persister->ranks_gone();
    Host& leader = hosts_.front();
    for (;;) {
      const HostMemory others = followers_.memory();
      RT_TRY_SET(RestoreChoice choice, leader.decider->look(&others));
      if (choice.save_first) {
        RT_TRY(save_on_all(*choice.save_first));
        continue;
      }
      followers_.carry_out(choice, *leader.arena);
      Status carried = leader.decider->carry_out(choice);
      const Status there = followers_.carried_out();
      if (!there.ok() && there.error().code == ErrorCode::kPeerLost) continue;
      if (carried.ok()) carried = there;
      if (carried.ok()) {
        leader.decider->begin(choice);
        return choice;
      }
      RT_TRY(leader.decider->give_up(choice, carried.error()));
    }
  }
  /// What the leader asks of the second host and those after it; a host may fail once.
  struct Followers {
    explicit Followers(Hosts& all) : all_(all) {}
    std::optional<Error> fails_once;
    int64_t asked = 0;  // for their memory

    HostMemory memory() {
      ++asked;
      std::optional<HostMemory> common;
      for (size_t k = 1; k < all_.hosts_.size(); ++k) {
        const Arena& arena = *all_.hosts_[k].arena;
        const HostMemory here{.incarnation = arena.control().incarnation.load(),
                              .whole = all_verified(arena, Check::kHeaders, nullptr, nullptr)};
        common = common ? common_memory(*common, here) : here;
      }
      return *common;
    }
    void carry_out(const RestoreChoice& choice, const Arena& memory) {
      done_ = Status();
      const std::vector<uint64_t> starts = starts_after(memory, choice);
      for (size_t k = 1; k < all_.hosts_.size() && done_.ok(); ++k) {
        Host& host = all_.hosts_[k];
        if (k == 1 && fails_once) {
          done_ = *std::exchange(fails_once, std::nullopt);
          if (choice.source == arena::Source::kMemory) host.arena->invalidate_slot(choice.slot);
        } else {
          done_ = host.decider->follow(choice, starts);
        }
      }
    }
    Status carried_out() { return done_; }
    void save(const WholeSlot& slot) {
      for (size_t k = 1; k < all_.hosts_.size(); ++k) all_.promise(all_.hosts_[k], slot);
    }

   private:
    Hosts& all_;
    Status done_;
  };
  Followers& followers() { return followers_; }

  /// The choices of all hosts, which no leader makes the same here.
  std::vector<RestoreChoice> begin() {
    REQUIRE_FALSE(led_);
    std::vector<RestoreChoice> out;
    for (Host& host : hosts_) {
      host.persister->ranks_gone();
      out.push_back(host.decider->next_incarnation().value());
    }
    return out;
  }
  bool live(const Death& death, Told* told) {
    return live_on(
        plan_, [this](int64_t rank) -> Arena& { return *of(rank).arena; },
        [this](int64_t rank) { of(rank).persister->notify(); }, death, told, {}, {},
        [this](int64_t rank) { return of(rank).ward; });
  }
  /// Each host has memory for what another one's ranks save, where its ranks keep that (free_holders()).
  void make_wards() {
    const auto hosts = std::ssize(hosts_);
    const std::vector<int64_t> holders = free_holders(plan_, hosts);
    REQUIRE(std::ssize(holders) == hosts);
    for (int64_t place = 0; place < hosts; ++place) {
      ArenaSpec spec = arena_spec(plan_, {.run_id = fresh_run_id(), .recipe_json = "{}"}, hosts_[place].ranks).value();
      spec.weight_bytes.clear();
      spec.backing = ArenaBacking::kMemfd;
      hosts_[holders[place]].ward = std::make_shared<Arena>(Arena::create(spec).value());
    }
  }
  Host& of(int64_t rank) {
    return *std::ranges::find_if(hosts_, [rank](const Host& host) { return host.ranks.contains(rank); });
  }
  std::vector<Host>& all() { return hosts_; }

 private:
  static void promise(Host& host, const WholeSlot& slot) {
    host.arena->control().reserved[slot.slot] = slot.step;
    host.persister->notify();
  }
  Status save_on_all(const WholeSlot& slot) {
    followers_.save(slot);
    promise(hosts_.front(), slot);
    return hosts_.front().persister->flush({}, true);
  }

  const Plan& plan_;
  PosixBackend io_;
  Commits commits_;
  bool led_;
  Followers followers_;
  std::vector<Host> hosts_;
};

std::string bytes_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

const std::vector<Case> kKeepForOthers = {Case{"dp", 1, 1, 2, 0},
                                          Case{"dp on each host", 1, 1, 4, 0},
                                          Case{"tp, dp", 2, 1, 2, 0},

                                          Case{"pp, tied", 1, 2, 2, 0},
                                          Case{"pp, tied, ZeRO-1", 1, 2, 1, 1},
                                          Case{"groups", 1, 1, 4, 1, 2},
                                          Case{"groups, ZeRO-3", 1, 1, 4, 3, 2, false},
                                          Case{"no overlap", 1, 1, 2, 0, 0, true, false}};
const std::vector<Case> kKeepNothing = {Case{"dp", 1, 1, 2, 1, 0, false}, Case{"ZeRO-3", 1, 1, 4, 3, 0, false},
                                        Case{"pp", 1, 2, 1, 1, 0, false}};

/// Ranks keep state for others of their own host alone.
const Case kKeepInside = {"tp inside, pp across", 2, 2, 1, 1, 0, false};

std::vector<Case> all_cases() {
  std::vector<Case> out = kKeepForOthers;
  out.insert(out.end(), kKeepNothing.begin(), kKeepNothing.end());
  out.push_back(kKeepInside);
  return out;
}

int64_t kept_for_others(const Plan& plan) {
  int64_t bytes = 0;
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) bytes += plan.rank(rank).private_bytes();
  return bytes;
}

}  // namespace

TEST_SUITE("ckpt/hook/hosts") {
  TEST_CASE("two hosts train what one does to the bit, whatever state their ranks keep for each other") {
    for (const Case& c : all_cases()) {
      CAPTURE(std::string(c.name));
      const Plan plan = make_plan(c.recipe(), c.world()).value();
      const Told one = train(plan, {});
      const TempDir dir;
      Hosts hosts(plan, dir.path, 2);
      for (const RestoreChoice& choice : hosts.begin()) CHECK(choice.source == arena::Source::kFresh);
      Told two;
      REQUIRE(hosts.live({}, &two));
      CHECK(two.steps == one.steps);
      CHECK(two.banks == one.banks);
    }
  }

  TEST_CASE("a step that two hosts save has the files of one host's, and both resume from it with the same bits") {
    for (const Case& c : all_cases()) {
      CAPTURE(std::string(c.name));
      Recipe recipe = c.recipe();
      recipe.checkpoint.save = {Every{.steps = 3}};
      const Plan plan = make_plan(recipe, c.world()).value();
      const TempDir one_dir, two_dir;
      Told one, two;
      {
        Agent agent(plan, fresh_run_id(), one_dir.path);
        REQUIRE(agent.begin().value().source == arena::Source::kFresh);
        REQUIRE(live_once(plan, agent, {}, &one));
      }
      {
        Hosts hosts(plan, two_dir.path, 2);
        hosts.begin();
        REQUIRE(hosts.live({}, &two));
        REQUIRE(two.steps == one.steps);
        for (Host& host : hosts.all()) CHECK(host.arena->control().persisted_step.load() == 7);
      }
      PosixBackend io;
      for (const int64_t step : {3, 7}) {  // that of step 6 may have been put off
        CAPTURE(step);
        const fs::path theirs = one_dir.path / step_dir_name(step), ours = two_dir.path / step_dir_name(step);
        CHECK(verify_checkpoint(io, ours, {}).value().whole());
        const Manifest manifest = read_manifest(io, ours).value();
        CHECK(manifest.files == read_manifest(io, theirs).value().files);
        CHECK(bytes_of(ours / kTableName) == bytes_of(theirs / kTableName));
        for (const FileEntry& file : manifest.files) CHECK(bytes_of(ours / file.name) == bytes_of(theirs / file.name));
      }
      fs::remove_all(two_dir.path / step_dir_name(6));
      fs::remove_all(two_dir.path / step_dir_name(7));
      Hosts again(plan, two_dir.path, 2);
      for (const RestoreChoice& choice : again.begin()) {
        CHECK(choice.source == arena::Source::kDisk);
        CHECK(choice.step == 3);
      }
      Told resumed;
      REQUIRE(again.live({}, &resumed));
      CHECK(resumed.banks == one.banks);
      for (const auto& [step, told] : resumed.steps) CHECK(one.steps.at(step) == told);
    }
  }

  TEST_CASE("two hosts resume from memory with the same bits where no rank keeps state for those of another host") {
    std::vector<Case> cases = kKeepNothing;
    cases.push_back(kKeepInside);
    for (const Case& c : cases) {
      CAPTURE(std::string(c.name));
      const Plan plan = make_plan(c.recipe(), c.world()).value();
      REQUIRE((kept_for_others(plan) > 0) == (c.name == kKeepInside.name));
      const Told one = train(plan, {});
      const TempDir dir;
      Hosts hosts(plan, dir.path, 2);
      Told two;
      // At each of these all hosts have published the same step. Else the leader would have to say which one all have.
      for (const Death& death : {Death{Moment::kForward, 3, 0}, Death{Moment::kForward, 5, c.world() - 1}, Death{}}) {
        for (const RestoreChoice& choice : hosts.begin()) CHECK_FALSE(choice.weights_ready);
        for (Host& host : hosts.all()) {
          if (!two.steps.empty()) poison_weights(plan, *host.arena);
        }
        CHECK(hosts.live(death, &two) == (death.moment == Moment::kNever));
      }
      CHECK(two.steps == one.steps);
      CHECK(two.banks == one.banks);
    }
  }

  TEST_CASE("whenever a rank dies, all hosts resume from the newest step that all have, and train the same bits") {
    for (const Case& c : all_cases()) {
      CAPTURE(std::string(c.name));
      const Plan plan = make_plan(c.recipe(), c.world()).value();
      const Told one = train(plan, {});
      const TempDir dir;
      Hosts hosts(plan, dir.path, 2, true);
      const bool crosses = copies_cross_hosts(plan, *hosts.all()[0].arena).value();
      Told two;
      const int64_t last = c.world() - 1;
      for (const Death& death : {Death{Moment::kUpdated, 2, last}, Death{Moment::kBegun, 3, 0},
                                 Death{Moment::kGathering, 4, last}, Death{Moment::kForward, 6, 0}, Death{}}) {
        const RestoreChoice choice = hosts.begin_led();
        if (!two.steps.empty()) {
          // What ranks keep for those of other hosts comes by way of the disk, and no step is lost for that.
          CHECK(choice.source == (crosses ? arena::Source::kDisk : arena::Source::kMemory));
          CHECK(choice.step >= two.steps.rbegin()->first - 1);
        }
        for (Host& host : hosts.all()) {
          if (!two.steps.empty()) poison_weights(plan, *host.arena);
        }
        CHECK(hosts.live(death, &two) == (death.moment == Moment::kNever));
      }
      CHECK(two.steps == one.steps);
      CHECK(two.banks == one.banks);
    }
  }

  TEST_CASE("whenever a rank dies, the newest step of all hosts is whole in free copies of each, to the bit") {
    int64_t cases = 0;
    for (const Case& c : all_cases()) {
      for (const int64_t count : {2, 4}) {
        CAPTURE(std::string(c.name));
        CAPTURE(count);
        if (c.world() % count != 0) continue;
        Recipe recipe = c.recipe();
        recipe.checkpoint.replicate_steps = 1;
        const Plan plan = make_plan(recipe, c.world()).value();
        const std::vector<int64_t> holders = free_holders(plan, count);
        if (holders.empty()) continue;
        ++cases;
        const Told one = train(plan, {});
        const TempDir dir;
        Hosts hosts(plan, dir.path, count, true);
        hosts.make_wards();
        CHECK(hosts.all()[0].arena->slots() == banks_for(recipe.checkpoint.in_flight));  // none for what is sent
        Told two;
        const int64_t last = c.world() - 1;
        for (const Death& death : {Death{Moment::kUpdated, 2, last}, Death{Moment::kUpdated, 3, 0},
                                   Death{Moment::kBegun, 4, 0}, Death{Moment::kGathering, 5, last}, Death{}}) {
          hosts.begin_led();
          for (Host& host : hosts.all()) {
            if (!two.steps.empty()) poison_weights(plan, *host.arena);
          }
          const bool ended = hosts.live(death, &two);
          CHECK(ended == (death.moment == Moment::kNever));
          std::optional<HostMemory> common;
          const auto memory_of = [](const Arena& arena) {
            return HostMemory{.incarnation = 0, .whole = all_verified(arena, Check::kEveryByte, nullptr, nullptr)};
          };
          for (const Host& host : hosts.all())
            common = common ? common_memory(*common, memory_of(*host.arena)) : memory_of(*host.arena);
          REQUIRE_FALSE(common->whole.empty());
          const WholeSlot newest = *std::ranges::max_element(
              common->whole, {}, [](const WholeSlot& slot) { return std::pair(slot.incarnation, slot.step); });
          for (int64_t place = 0; place < count; ++place) {
            const Host& host = hosts.all()[place];
            const Arena& ward = *hosts.all()[holders[place]].ward;
            CHECK(std::ranges::count(memory_of(ward).whole, newest) == 1);
            for (int64_t rank = host.ranks.first; rank < host.ranks.end; ++rank)
              CHECK(std::ranges::equal(host.arena->payload(rank, newest.slot), ward.payload(rank, newest.slot)));
          }
        }
        CHECK(two.steps == one.steps);
        CHECK(two.banks == one.banks);
      }
    }
    CHECK(cases >= 6);
  }

  TEST_CASE("where a host cannot take the step that was chosen, all take the one before, or the next try") {
    const Plan plan = make_plan(kKeepNothing[0].recipe(), kKeepNothing[0].world()).value();
    const Told one = train(plan, {});
    for (const Error& error : {Error{ErrorCode::kCorrupt, "h1: rank 1, slot 2: its sums do not hold"},
                               Error{ErrorCode::kPeerLost, "h1 was lost"}}) {
      const TempDir dir;
      Hosts hosts(plan, dir.path, 2, true);
      Told two;
      hosts.begin_led();
      CHECK_FALSE(hosts.live({Moment::kForward, 5, 1}, &two));
      hosts.followers().fails_once = error;
      CHECK(hosts.begin_led().step == 3);  // step 4's slot is not whole on all any more
      CHECK(hosts.live({}, &two));
      CHECK(two.banks == one.banks);
    }
  }

  TEST_CASE("hosts are asked for their memory, and waited for, where a person says which step counts, too") {
    const Plan plan = make_plan(kKeepNothing[0].recipe(), kKeepNothing[0].world()).value();
    const TempDir dir;
    {
      Hosts hosts(plan, dir.path, 2, true);
      Told told;
      hosts.begin_led();
      CHECK(hosts.live({}, &told));
    }
    PosixBackend io;
    const int64_t step = list_names(io, dir.path).value().steps.front();
    Hosts hosts(plan, dir.path, 2, true, step);
    hosts.all().back().arena->control().incarnation = 7;  // it was in lives that the leader's memory knows nothing of
    hosts.followers().fails_once = Error{ErrorCode::kPeerLost, "h1 was lost"};
    const RestoreChoice choice = hosts.begin_led();
    CHECK(choice.step == step);
    CHECK(choice.incarnation == 8);
    CHECK(hosts.followers().asked == 2);
  }

  TEST_CASE("what ends the carrying out on one host ends it for all") {
    const Plan plan = make_plan(kKeepNothing[0].recipe(), kKeepNothing[0].world()).value();
    const TempDir dir;
    Hosts hosts(plan, dir.path, 2, true);
    hosts.followers().fails_once = Error{ErrorCode::kNoSpace, "h1: /dev/shm is full"};
    const auto choice = hosts.decide();
    REQUIRE_FALSE(choice.ok());
    CHECK(choice.error().message == "h1: /dev/shm is full");
  }

  TEST_CASE("state that lies in the memory of another host alone is refused by name, and never read elsewhere") {
    for (const Case& c : kKeepForOthers) {
      CAPTURE(std::string(c.name));
      const Plan plan = make_plan(c.recipe(), c.world()).value();
      REQUIRE(kept_for_others(plan) > 0);
      const TempDir dir;
      Hosts hosts(plan, dir.path, 2);
      hosts.begin();
      Told told;
      CHECK_FALSE(hosts.live({Moment::kForward, 3, 0}, &told));
      hosts.begin();
      int64_t refused = 0;
      for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
        const Arena& arena = *hosts.of(rank).arena;
        const auto hook = SharedMemoryHook::make(plan, rank, arena, system_clock()).value();
        const auto memory = FakeState::memory_of(*hook, plan, rank);
        REQUIRE_OK(memory);
        CHECK_FALSE(memory.value().peer_copies.has_value());
        FakeState state(plan, rank, memory.value());
        const auto found = hook->restore(state.tensors());
        if (found.ok()) continue;
        ++refused;
        CHECK(found.error().code == ErrorCode::kUnsupported);
        CHECK_MESSAGE(found.error().message.find("alone, on another host") != std::string::npos, found.error().message);
      }
      CHECK(refused > 0);
    }
  }

  TEST_CASE(
      "on each host the lowest rank reserves the bank of a save, and its agent frees it when all have committed") {
    Recipe recipe = kKeepNothing[1].recipe();
    const Plan plan = make_plan(recipe, 4).value();
    const TempDir dir;
    const RunText run{.run_id = fresh_run_id(), .recipe_json = "{}"};
    Arena arena = Arena::create(arena_spec(plan, run, RankRange{2, 4}).value()).value();
    arena.control().incarnation = 1;
    arena.control().decision.incarnation = 1;
    arena.control().decision.source = arena::Source::kFresh;
    for (const int64_t rank : {3, 2}) {
      const auto hook = SharedMemoryHook::make(plan, rank, arena, system_clock()).value();
      const auto memory = FakeState::memory_of(*hook, plan, rank);
      REQUIRE_OK(memory);
      FakeState state(plan, rank, memory.value());
      REQUIRE_OK(hook->restore(state.tensors()));
      REQUIRE_OK(hook->begin_update(1, 5));
      state.advance_to(5, 1);
      CHECK(arena.control().reserved[1].load() == 0);
      REQUIRE_OK(
          hook->snapshot({.snapshot = true, .persist = true}, position_at(5), 1, state.tensors(1), state.sums(1)));
      CHECK(arena.control().reserved[1].load() == (rank == 2 ? 5 : 0));
    }
    CHECK(arena.views()[1].whole);
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("memory of some ranks is taken over by their agent alone, and never stands in for the run's") {
    const Plan plan = make_plan(kKeepNothing[1].recipe(), 4).value();
    const TempDir dir;
    const RunText run{.run_id = fresh_run_id(), .recipe_json = "{}", .recipe_hash = "r1"};
    const auto leave = [&](const RankRange& ranks, int64_t step, int64_t pid) {
      Arena arena = Arena::create(arena_spec(plan, run, ranks).value()).value();
      for (int64_t rank = ranks.first; rank < ranks.end; ++rank) {
        SnapshotWriter writer(arena, rank);
        REQUIRE_OK(writer.seal(0, 1, step, encode_position(position_at(step), kPositionCapacity)));
      }
      // As of a process that is gone.
      const std::string name = arena.name(), mine = "-" + std::to_string(getpid()) + "-";
      const std::string dead = name.substr(0, name.find(mine)) + "-" + std::to_string(pid) + "-1";
      fs::rename(name, dead);
      return dead;
    };
    const std::string first = leave({0, 2}, 9, 999'999'991), second = leave({2, 4}, 8, 999'999'992);
    const auto open = [&](const std::optional<RankRange>& ranks) {
      return open_run_memory(plan, run, dir.path, plain_io, nullptr, {}, {}, ranks);
    };
    const auto refused = open({});
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnavailable);
    CHECK_MESSAGE(refused.error().message.find("step 9 of ranks 0 to 1 of 4") != std::string::npos,
                  refused.error().message);
    fs::path taken;  // by this process, which is no agent of the run any more
    for (const auto& entry : fs::directory_iterator(kSharedMemory)) {
      if (entry.path().string().find("-" + std::to_string(getpid()) + "-") != std::string::npos) taken = entry.path();
    }
    REQUIRE_FALSE(taken.empty());
    fs::rename(taken, first);

    Result<Arena> same = open(RankRange{2, 4});
    REQUIRE_OK(same);
    CHECK(same.value().ranks() == RankRange{2, 4});
    CHECK(same.value().views()[0].step == 8);
    CHECK(fs::exists(first));
    CHECK_FALSE(fs::exists(second));
    CHECK(same.value().remove().ok());
    Result<Arena> other = open(RankRange{0, 2});
    REQUIRE_OK(other);
    CHECK(other.value().views()[0].step == 9);
    CHECK(other.value().remove().ok());
  }

  TEST_CASE("memory of a dead agent that the run has gone on without is removed, and no other") {
    const TempDir dir;  // of its own: nobody misses memory without steps, so any run that starts beside removes it
    const Plan plan = make_plan(kKeepNothing[1].recipe(), 4).value();
    const RunText run{.run_id = fresh_run_id(), .recipe_json = "{}", .recipe_hash = "r1"};
    int64_t pid = 999'999'980;
    const auto create = [&](const std::optional<RankRange>& ranks, const RunText& of) {
      ArenaSpec spec = arena_spec(plan, of, ranks).value();
      spec.folder = dir.path.string();
      return Arena::create(spec).value();
    };
    const auto leave = [&](const std::optional<RankRange>& ranks, const RunText& of) {
      const Arena arena = create(ranks, of);
      const std::string name = arena.name(), mine = "-" + std::to_string(getpid()) + "-";
      std::string dead = name.substr(0, name.find(mine)) + "-" + std::to_string(++pid) + "-1";
      fs::rename(name, dead);
      return dead;
    };
    const std::string gone = leave(RankRange{0, 2}, run), kept = leave(RankRange{2, 4}, run), all = leave({}, run);
    RunText of_another = run;
    of_another.run_id = fresh_run_id();
    const std::string others = leave(RankRange{0, 2}, of_another);
    const Arena held = create(RankRange{0, 2}, run);
    const auto removed = remove_memory_gone_on_without(
        dir.path, run.run_id, [](const RankRange& ranks, int64_t world) { return world == 4 && ranks.first == 0; });
    REQUIRE(removed.size() == 1);
    CHECK_MESSAGE(removed[0].find(gone) != std::string::npos, removed[0]);
    CHECK_FALSE(fs::exists(gone));
    for (const std::string& name : {kept, all, others, held.name()}) CHECK_MESSAGE(fs::exists(name), name);
  }
}
