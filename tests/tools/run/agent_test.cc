#include "tools/run/agent/agent.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "ckpt/run_memory.h"
#include "tests/tools/run/run_fixture.h"

using namespace cairn;
using namespace cairn::tools;
using namespace cairn::tools::testing;

namespace {

/// Writes down what an agent tells it.
class RecordingCoordinator final : public Coordinator {
 public:
  explicit RecordingCoordinator(ckpt::Arena arena) : arena_(std::move(arena)) {}
  ~RecordingCoordinator() override { ignore(arena_.remove(), "end of the test"); }

  Result<ckpt::RestoreChoice> next_generation(int64_t generation) override {
    told.push_back("generation " + std::to_string(generation));
    if (refuses) return *refuses;
    return ckpt::RestoreChoice{.incarnation = static_cast<uint64_t>(generation) + 5};
  }
  ckpt::Arena& memory() override { return arena_; }
  void part_complete() override { told.emplace_back("part"); }
  bool save_under_way() override { return saving; }
  void stop(int signal) override { told.push_back("stop " + std::to_string(signal)); }
  void ask_save(const std::string& by) override { told.push_back("save " + by); }
  Result<int> conclude(const agent::Outcome&) override { return 0; }
  void close() override {}
  void on_rank_event(int64_t rank, const nlohmann::json& event) override {
    told.push_back(event.value("event", "") + " of " + std::to_string(rank));
  }
  void on_failing(const agent::Failure& failure) override { told.push_back("failing " + failure.message); }
  void on_readable() override { told.emplace_back("readable"); }
  bool all_finished() override { return finished; }
  void kill(int64_t rank) override { told.push_back("kill " + std::to_string(rank)); }
  void on_rank_exit(const agent::ExitStatus& status) override {
    told.push_back("exit " + std::to_string(status.signal));
  }
  void on_tick() override { told.emplace_back("tick"); }

  std::vector<std::string> told;
  std::optional<Error> refuses;
  bool saving = false, finished = true;

 private:
  ckpt::Arena arena_;
};

struct Watched {
  explicit Watched(std::optional<ckpt::RankRange> here = {}, AgentOptions options = {})
      : plan(small_plan(4)),
        dir("agent"),
        coordinator(
            ckpt::Arena::create(ckpt::arena_spec(plan, {.run_id = fresh_name(), .recipe_json = "{}"}, here).value())
                .value()) {
    narrator.emplace(plan, dir.path, NarratorOptions{.console = console.fd()}, clock);
    REQUIRE_OK(narrator->open_metrics("run-1"));
    REQUIRE_OK(narrator->open_events());
    REQUIRE_OK(narrator->begins(0, {.source = ckpt::arena::Source::kFresh}));
    options.recipe = "/run/recipe.json";
    options.init = "{}";
    options.log_of = [](int64_t rank) { return "/run/logs/rank-" + std::to_string(rank) + ".log"; };
    agent.emplace(plan, dir.path, coordinator, *narrator, std::move(options));
  }
  Plan plan;
  HandClock clock;
  cairn::testing::TempDir dir;
  Console console;
  RecordingCoordinator coordinator;
  std::optional<Narrator> narrator;
  std::optional<Agent> agent;
};

std::string option(const agent::ChildSpec& spec, const std::string& name) {
  const auto at = std::ranges::find(spec.argv, name);
  return at == spec.argv.end() || at + 1 == spec.argv.end() ? "" : *(at + 1);
}

}  // namespace

TEST_SUITE("tools/run/agent") {
  TEST_CASE("an agent starts the ranks of its host, with the generation that was agreed on") {
    for (const std::optional<ckpt::RankRange> here : {std::optional<ckpt::RankRange>(), {ckpt::RankRange{2, 4}}}) {
      Watched watched(here, {.threads = 3, .trace = "steps=1..2", .time_kernels = true});
      const auto specs = watched.agent->prepare_generation(7);
      REQUIRE_OK(specs);
      CHECK(watched.coordinator.told == std::vector<std::string>{"generation 7"});
      const int64_t first = here ? 2 : 0;
      REQUIRE(std::ssize(specs.value()) == 4 - first);
      for (int64_t k = 0; k < std::ssize(specs.value()); ++k) {
        const agent::ChildSpec& spec = specs.value()[static_cast<size_t>(k)];
        CHECK(spec.argv[0] == "/proc/self/exe");
        CHECK(spec.argv[1] == "_rank");
        CHECK(option(spec, "--rank") == std::to_string(first + k));
        CHECK(option(spec, "--world") == "4");
        CHECK(option(spec, "--incarnation") == "12");
        CHECK(option(spec, "--recipe") == "/run/recipe.json");
        CHECK(option(spec, "--trace") == "steps=1..2");
        CHECK(option(spec, "--time-kernels") == watched.narrator->kernel_times_dir().string());
        CHECK(spec.inherit_fds.size() == 2);
        CHECK(option(spec, "--arena-fd") == std::to_string(spec.inherit_fds[1]));
        CHECK(spec.log_path == "/run/logs/rank-" + std::to_string(first + k) + ".log");
        CHECK(std::ranges::find(spec.env, std::pair<std::string, std::string>("OMP_NUM_THREADS", "3")) !=
              spec.env.end());
      }
    }
  }

  TEST_CASE("ranks on CUDA get the GPUs of the host in turn") {
    Watched watched(ckpt::RankRange{1, 4});
    const auto specs = [&]() -> std::vector<agent::ChildSpec> {
      auto made = watched.agent->prepare_generation(0);
      REQUIRE_OK(made);
      return std::move(made).value();
    };
    const agent::ChildSpec on_cpu = specs().front();
    CHECK(option(on_cpu, "--device").empty());
    CHECK(option(on_cpu, "--cpus").empty());
    for (const char* const bus : {"0000:fe:00.0", "0000:ff:00.0"}) {  // where no machine has anything
      const auto gpu = watched.dir.path / "machine/proc/driver/nvidia/gpus" / bus;
      std::filesystem::create_directories(gpu);
      std::ofstream(gpu / "information") << "Model: \t a GPU\nGPU UUID: \t GPU-" << bus << "\n";
    }
    ::setenv("CAIRN_NVIDIA_ROOT", (watched.dir.path / "machine").c_str(), 1);
    watched.plan.recipe.device = DeviceChoice::kCuda;
    const auto given = [&] {
      std::vector<std::string> out;
      for (const agent::ChildSpec& spec : specs()) {
        CHECK(option(spec, "--device") == "cuda");
        CHECK(option(spec, "--cpus").empty());  // nothing says what lies next to them
        const auto visible =
            std::ranges::find(spec.env, "CUDA_VISIBLE_DEVICES", &std::pair<std::string, std::string>::first);
        out.push_back(option(spec, "--device-index") + (visible == spec.env.end() ? "" : " of " + visible->second));
      }
      return out;
    };
    ::unsetenv("CUDA_VISIBLE_DEVICES");
    CHECK(given() == std::vector<std::string>{"0", "1", "0"});
    ::setenv("CUDA_VISIBLE_DEVICES", "MIG-7,MIG-8", 1);
    CHECK(given() == std::vector<std::string>{"0 of MIG-7", "0 of MIG-8", "0 of MIG-7"});
    ::setenv("CUDA_VISIBLE_DEVICES", "3", 1);
    const auto refused = watched.agent->prepare_generation(1);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message.find("'3' is no GPU that this process sees") != std::string::npos);
    ::unsetenv("CUDA_VISIBLE_DEVICES");
    ::unsetenv("CAIRN_NVIDIA_ROOT");
  }

  TEST_CASE("where nothing is agreed on no rank starts") {
    Watched watched;
    watched.coordinator.refuses = Error{ErrorCode::kCorrupt, "no checkpoint can be used"};
    const auto specs = watched.agent->prepare_generation(0);
    REQUIRE_FALSE(specs.ok());
    CHECK(specs.error().code == ErrorCode::kCorrupt);
  }

  TEST_CASE("what ranks report goes to whom it concerns") {
    Watched watched;
    watched.agent->on_event(1, {{"event", "ready"}, {"ms", 3.5}, {"from", "memory"}});
    watched.agent->on_event(0, {{"event", "snapshot"}});
    nlohmann::json step = telemetry::to_json(metrics_at(1));
    step["event"] = "step";
    watched.agent->on_event(0, step);
    watched.agent->on_child_exit(2, {.exit_code = 0, .signal = SIGSEGV}, false);
    watched.agent->on_stop_requested(SIGTERM);
    watched.agent->on_signal(SIGUSR1);
    watched.agent->on_tick();
    CHECK(watched.coordinator.told ==
          std::vector<std::string>{"ready of 1", "part", "step of 0", "exit 11", "stop 15", "save SIGUSR1", "tick"});
    CHECK(watched.agent->on_hang({}));
    watched.coordinator.saving = true;
    CHECK_FALSE(watched.agent->on_hang({}));
  }

  TEST_CASE("on one of several hosts ranks have the world's numbers, and what happens elsewhere counts") {
    Watched watched(ckpt::RankRange{2, 4}, {.recipe_text = "{}", .kills = {{0, 1}, {3, 2}}});
    const auto specs = watched.agent->prepare_generation(0);
    REQUIRE_OK(specs);
    REQUIRE(specs.value().size() == 2);
    CHECK(specs.value()[0].rank == 2);
    const std::vector<std::string>& argv = specs.value()[1].argv;
    const auto recipe = std::ranges::find(argv, std::string("--recipe"));
    REQUIRE(recipe + 1 < argv.end());
    CHECK(read_text_file(*(recipe + 1)).value() == "{}");  // a file without a name, which ranks inherit
    nlohmann::json step = telemetry::to_json(metrics_at(1));
    step["event"] = "step";
    watched.agent->on_event(0, step);
    watched.agent->on_readable(7);
    watched.coordinator.finished = false;
    CHECK_FALSE(watched.agent->all_finished());
    watched.agent->on_failing({.rank = 0, .host = true, .message = "h1 was lost"});
    CHECK(watched.coordinator.told ==
          std::vector<std::string>{"generation 0", "step of 0", "kill 0", "readable", "failing h1 was lost"});
  }
}
