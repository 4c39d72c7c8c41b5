// cairn _rank: one rank process. Started by the agent, never by a person; what it needs it inherits.
#include <omp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "ckpt/hook.h"
#include "ckpt/position.h"
#include "dsl/dsl.h"
#include "runtime/agent/event_pipe.h"
#include "runtime/comm/hybrid_engine.h"
#include "runtime/comm/linked_engine.h"
#include "runtime/comm/shm_world.h"
#include "runtime/comm/side_sums.h"
#include "runtime/comm/traced_engine.h"
#include "runtime/core/log.h"
#include "runtime/core/process.h"
#include "runtime/core/units.h"
#include "runtime/cuda/machine/module.h"
#include "runtime/cuda/nccl/nccl_engine.h"
#include "runtime/cuda/staged/staged_engine.h"
#include "runtime/device/guard.h"
#include "runtime/host/bind.h"
#include "runtime/json/json.h"
#include "runtime/plan/communication.h"
#include "runtime/plan/device_choice.h"
#include "runtime/plan/message_order.h"
#include "runtime/telemetry/kernel_times.h"
#include "runtime/trainer/kept_norms.h"
#include "runtime/trainer/staging_rooms.h"
#include "runtime/trainer/sum_rooms.h"
#include "runtime/trainer/trainer.h"
#include "tools/commands.h"
#include "tools/hf_start.h"
#include "tools/init_options.h"
#include "tools/isa_option.h"
#include "tools/recipe_tasks.h"
#include "tools/run/folder/folder.h"
#include "tools/tuning_option.h"
#include "tools/version.h"

namespace cairn::tools {
namespace {

struct RankArgs {
  std::string recipe, init;
  std::string past;              // of the position that training goes on from
  int64_t end_step = 0;          // where this recipe ends
  std::string trace, trace_dir;  // "5..8", and where the file goes
  std::string kernel_times_dir;  // where the times of ops go; empty: they are not timed
  int64_t token_losses_of = 0;   // a step; 0: none
  std::string token_losses_dir;
  int64_t rank = 0, world = 0;
  int64_t hosts = 1;
  std::string address;  // of this host among several
  kernels::GemmIsa isa = kernels::GemmIsa::kBaseline;
  std::string device = "cpu";
  std::string comm = "staged", attention = "own";          // of ranks on CUDA
  std::string tuning = "kept", tuning_file, tuning_given;  // tuning_files(); without the first file: no choices
  int device_index = 0;
  int64_t device_ranks = 1;  // of the run on that device
  std::string cpus;          // host::ranges_text() of the cores that it is bound to; empty: it is not
  int64_t numa = -1;         // bind_process()
  int64_t decides = 0;       // a rank: trainer::Environment
  int meet_fd = -1;          // where its ranks meet those of the others
  uint64_t incarnation = 0;
  int arena_fd = -1, comm_fd = -1;
  int ward_fd = -1;  // HookOptions::ward; -1: none
};

/// Since exec, by the kernel's clock: to 10 ms (field 22 of /proc/self/stat counts ticks).
double ms_since_process_start() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  const double now_ms = static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
  return now_ms - static_cast<double>(this_process().start) * 1e3 / static_cast<double>(sysconf(_SC_CLK_TCK));
}

pid_t agent_pid = 0;

/// The limit of processor time (`ulimit -S -t`, queues of schedulers) counts for each process, and ranks are those that
/// use it up: the agent is told, which stops the run.
void pass_on_cpu_limit() {
  agent_pid = ::getppid();
  struct sigaction action {};
  action.sa_flags = SA_RESTART;
  action.sa_handler = [](int signal) {
    if (::getppid() == agent_pid) ::kill(agent_pid, signal);
  };
  sigaction(SIGXCPU, &action, nullptr);
}

Result<std::unique_ptr<comm::Engine>> make_engine(const RankArgs& args, const comm::Options& options) {
  if (args.hosts == 1) return comm::attach_shm_engine(args.comm_fd, args.rank, options);
  comm::HybridConfig config{.gloo = {.rank = args.rank,
                                     .world_size = args.world,
                                     .interface_address = args.address,
                                     .rendezvous = comm::open_agent_rendezvous(Fd(args.meet_fd)),
                                     .options = options},
                            .host_of_rank = {},
                            .shm_fd = args.comm_fd};
  const int64_t ranks = args.world / args.hosts;
  for (int64_t rank = 0; rank < args.world; ++rank) config.host_of_rank.push_back(rank / ranks);
  return comm::make_hybrid_engine(config);
}

/// Opened once.
const Result<cuda::LoadedNccl>& nccl() {
  static const Result<cuda::LoadedNccl> out = cuda::load_nccl(cuda::library_candidates("libnccl.so.2"));
  return out;
}

/// Blocks that NCCL may take of a device's 100 and more while products run. The number was measured on no device.
constexpr int kBlocksBesideCompute = 16;

/// `of_host`: the engine beneath, by which ranks of this host are seen; `engine`: that or what is around it.
Result<std::unique_ptr<comm::Engine>> make_device_engine(const RankArgs& args, const Plan& plan,
                                                         const comm::Options& options, comm::Engine& of_host,
                                                         comm::Engine& engine, cuda::CudaMachine& machine,
                                                         agent::EventWriter& events) {
  const auto on_device = [&machine](const void* at) { return machine.holds(at); };
  if (args.comm == "staged") {
    RT_TRY_SET(std::unique_ptr<comm::Engine> out,
               cuda::make_staged_engine(engine, machine.cuda_stream(), on_device,
                                        trainer::staging_rooms(plan, args.rank), comm::kLeastSumChunk));
    return out;
  }
  cuda::NcclOptions how{
      .deadline_ms = options.deadline_ms,
      .rooms =
          [&machine] {
            return cuda::NcclRooms{machine.room_for_sums(), machine.room_for_sums_beside()};
          },
      .registered = {},
      .nccl_sums = plan.recipe.sums == Sums::kNccl,
      .max_ctas = [](std::string_view axis) { return runs_beside_compute(axis) ? kBlocksBesideCompute : 0; },
      .ways = message_ways(plan),
      .least_chunk_bytes = comm::kLeastSumChunk,
      .on_device = on_device,
      .peers =
          [](std::string_view axis) {
            const bool messages = axis == kForwardGroup || axis == kBackwardGroup;
            return messages ? cuda::NcclPeers::kNeighbours : cuda::NcclPeers::kNone;
          },
      .whole_axes = true,
      .local = dynamic_cast<comm::LinkedEngine*>(&of_host),
      // The agent ends the rank where an abort of NCCL's does not.
      .on_failure = [&events](const Error& error) { events.send_error(error); }};
  if (args.comm == "registered") how.registered = [&machine] { return machine.memory(); };
  return cuda::make_nccl_engine(engine, nccl().value().api, machine.rank_sums(), machine.cuda_stream(), how);
}

Result<int> train_rank(const RankArgs& args, agent::EventWriter& events) {
  if (std::getenv("CAIRN_GUARD_DEVICE_MEMORY") != nullptr) guard_device_memory();  // tests (CONTRIBUTING.md)
  RT_TRY_SET(const std::string text, read_text_file(args.recipe));
  RT_TRY_SET(Recipe recipe, dsl::decode_recipe(text));
  RT_TRY_SET(recipe.init, init_from_json(args.init));  // as the agent has resolved it
  RT_TRY_SET(const RunPast past, ckpt::decode_past(args.past));
  settle_device(recipe, args.device == "cuda" ? DeviceChoice::kCuda : DeviceChoice::kCpu);
  RT_TRY_SET(Plan plan, make_plan(recipe, args.world, past));
  plan.end_step = args.end_step;
  const comm::Options options{.deadline_ms = static_cast<int64_t>(recipe.restart.deadline_s * 1000)};
  RT_TRY_SET(std::unique_ptr<comm::Engine> engine, make_engine(args, options));
  telemetry::TraceWindow window;
  std::unique_ptr<comm::Engine> traced;
  if (!args.trace.empty()) {
    RT_TRY_SET(window, telemetry::parse_trace_window(args.trace));
    traced = comm::make_traced_engine(*engine);
  }
  comm::Engine* communicates = traced ? traced.get() : engine.get();
  std::unique_ptr<cuda::CudaMachine> machine;  // before the hook, whose link follows its stream
  std::unique_ptr<DeviceLink> link;
  std::unique_ptr<comm::Engine> on_device;
  if (recipe.device == DeviceChoice::kCuda) {
    // Its waits have other ranks' in them, which have the deadline for themselves and say more.
    cuda::MachineOptions how{.index = args.device_index,
                             .deadline_ms = 2 * options.deadline_ms,
                             .sums = {},
                             .cudnn = args.attention == "cudnn",
                             .warpgroups = args.attention == "warpgroup",
                             .tunes = true,
                             .times_attention = args.attention == "auto" && args.tuning != "off"};
    if (args.comm != "staged") {
      if (!nccl().ok()) return nccl().error();
      how.sums = trainer::sum_rooms(plan);
      if (args.comm == "registered") how.nccl = &nccl().value().api;
    }
    RT_TRY_SET(machine, cuda::open_machine(tree_version(), how));
    plan.keeps_norms = trainer::norms_fit(plan, args.rank, *machine, args.device_ranks);
    spdlog::info("norms' outputs are {}: the device has {}", plan.keeps_norms ? "kept" : "computed again",
                 machine->memory_bytes() > 0 ? format_bytes(machine->memory_bytes()) : "memory of unknown size");
    RT_TRY_SET(link, machine->make_link());
    if (args.world > 1) {
      RT_TRY_SET(on_device, make_device_engine(args, plan, options, *engine, *communicates, *machine, events));
      communicates = on_device.get();
    }
  }
  RT_TRY_SET(ckpt::Arena arena, ckpt::Arena::attach_fd(args.arena_fd));
  const ckpt::arena::Control& control = arena.control();  // the mapping stays where it is when the arena moves
  ckpt::HookOptions hook_options{
      .decides = args.decides,
      .on_snapshot =
          [&](int64_t step) {
            ignore(events.send({{"event", "snapshot"}, {"step", step}}), "the agent looks by itself too");
          },
      .open_foreign = open_hf_for(recipe.model)};
  if (args.ward_fd >= 0) {
    RT_TRY_SET(ckpt::Arena ward, ckpt::Arena::attach_fd(args.ward_fd));
    hook_options.ward = std::make_shared<const ckpt::Arena>(std::move(ward));
  }
  if (link) hook_options.make_link = [&link] { return std::move(link); };
  ckpt::SharedMemoryHook hook(plan, args.rank, std::move(arena), args.incarnation, std::move(hook_options));
  trainer::Environment env{.plan = plan,
                           .rank = args.rank,
                           .engine = *communicates,
                           .hook = hook,
                           .machine = machine.get(),
                           .decides = args.decides,
                           .try_end = true,
                           .trace = window};
  env.on_trace = [&](const std::string& text) {
    const std::string path = fmt::format("{}/rank-{}.json", args.trace_dir, args.rank);
    if (Status written = write_text_file(path, text); !written.ok()) {
      spdlog::warn("{}", written.error().message);
    } else {
      ignore(events.send({{"event", "traced"}, {"path", path}}), "for people only");
    }
  };
  if (!args.kernel_times_dir.empty()) {
    env.on_op_times = [&](const OpTimes& times) {
      const Device device = machine ? machine->device() : Device{};
      const telemetry::KernelTimes of{.rank = args.rank, .device = device_name(device), .times = times};
      const std::string path = fmt::format("{}/rank-{}.json", args.kernel_times_dir, args.rank);
      if (Status written = write_text_file(path, json_text(telemetry::to_json(of), 1)); !written.ok()) {
        spdlog::warn("{}", written.error().message);
      } else {
        ignore(events.send({{"event", "kernels_timed"}}), "for people only");
      }
    };
  }
  RT_TRY_SET(const std::optional<evaluation::RunTasks> tasks, recipe_tasks(plan));
  if (tasks) {
    env.texts = tasks->texts();
    env.tasks_of = [&](std::span<const data::TextScore> scores) { return tasks->told_by(scores); };
  }
  env.token_losses_of = args.token_losses_of;
  if (args.token_losses_of > 0) {
    env.on_token_losses = [&](const std::vector<trainer::TokenLoss>& losses) {
      const std::string path = fmt::format("{}/rank-{}.bin", args.token_losses_dir, args.rank);
      const Status written =
          write_text_file(path, {reinterpret_cast<const char*>(losses.data()), losses.size() * sizeof(losses[0])});
      if (!written.ok()) spdlog::error("{}", written.error().message);
    };
  }
  trainer::TuningFiles tuning;
  if (args.rank == args.decides && !args.tuning_file.empty()) {
    tuning = tuning_files(tuning_wish(args.tuning), args.tuning_file, args.tuning_given,
                          fmt::format("{} {} x{}", tree_version(), dsl::recipe_hash(text), args.world));
    tuning.on_result = [&](const std::string& line, bool changes) {
      spdlog::info("{}", line);
      if (changes) ignore(events.send({{"event", "tuned"}, {"text", line}}), "for people only");
    };
    env.tuning = &tuning;
  }
  if (args.rank == args.decides) {
    env.on_step = [&](const telemetry::StepMetrics& metrics) {
      nlohmann::json event = telemetry::to_json(metrics);
      event["event"] = "step";
      ignore(events.send(event), "without an agent the next collective fails");
    };
  }
  env.on_pace = [&](const telemetry::Pace& pace) {
    const nlohmann::json block = {pace.step, pace.ms};
    ignore(events.send({{"event", "pace"}, {"blocks", nlohmann::json::array({block})}}), "for people only");
  };
  bool ready = false;
  env.on_phase = [&](int64_t, const char*) {
    if (std::exchange(ready, true)) return;
    const char* const from = control.decision.source == ckpt::arena::Source::kMemory ? "memory"
                             : control.decision.source == ckpt::arena::Source::kDisk ? "disk"
                                                                                     : "nothing";
    ignore(events.send({{"event", "ready"}, {"ms", ms_since_process_start()}, {"from", from}}), "for people only");
  };
  // Lets the agent's children read this process's stacks where only descendants may be traced (Yama).
  ::prctl(PR_SET_PTRACER, static_cast<unsigned long>(::getppid()), 0, 0, 0);
  spdlog::info("rank {} of {} starts, incarnation {}", args.rank, args.world, args.incarnation);
  Result<trainer::Outcome> outcome = trainer::run(env);
  if (!outcome.ok()) {
    spdlog::error("{}", outcome.error().message);
    // Tell the agent first, then the peers: the agent blames whom it hears of first.
    events.send_error(outcome.error());
    engine->abort(outcome.error().message);
    return outcome.error();
  }
  spdlog::info("rank {} leaves after step {}", args.rank, outcome.value().position.step);
  return 0;
}

}  // namespace

void add_rank(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("_rank", "one rank process; started by `cairn train`")->group("");
  const auto args = std::make_shared<RankArgs>();
  command->add_option("--recipe", args->recipe)->required();
  command->add_option("--arena-fd", args->arena_fd)->required();
  command->add_option("--rank", args->rank)->required();
  command->add_option("--world", args->world)->required();
  command->add_option("--incarnation", args->incarnation)->required();
  command->add_option("--comm-fd", args->comm_fd)->required();
  command->add_option("--init", args->init)->required();
  command->add_option("--past", args->past)->required();
  command->add_option("--end-step", args->end_step)->required();
  command->add_option("--token-losses", args->token_losses_of);
  command->add_option("--token-losses-dir", args->token_losses_dir);
  command->add_option("--hosts", args->hosts);
  command->add_option("--address", args->address);
  command->add_option("--meet-fd", args->meet_fd);
  command->add_option("--decides", args->decides);
  command->add_option("--ward-fd", args->ward_fd);
  command->add_option("--device", args->device)->check(CLI::IsMember({"cpu", "cuda"}));
  command->add_option("--comm", args->comm)->check(CLI::IsMember({"nccl", "registered", "staged"}));
  command->add_option("--attention", args->attention)->check(CLI::IsMember({"auto", "own", "warpgroup", "cudnn"}));
  command->add_option("--tuning", args->tuning)->check(CLI::IsMember({"kept", "on", "off"}));
  command->add_option("--tuning-file", args->tuning_file);
  command->add_option("--tuning-given", args->tuning_given);
  command->add_option("--device-index", args->device_index);
  command->add_option("--device-ranks", args->device_ranks)->check(CLI::PositiveNumber);
  command->add_option("--cpus", args->cpus);
  command->add_option("--numa", args->numa);
  add_isa_option(*command, args->isa)->required();
  command->add_option("--trace", args->trace);
  command->add_option("--trace-dir", args->trace_dir);
  command->add_option("--time-kernels", args->kernel_times_dir);
  command->callback([args, &session] {
    session.action = [args]() -> Result<int> {
      RT_TRY_SET(const std::vector<int64_t> cpus, host::numbers_in(args->cpus).with("--cpus"));
      host::bind_process(cpus, args->numa);  // before there are other threads
      init_logging("rank " + std::to_string(args->rank));
      pass_on_cpu_limit();
      kernels::use_gemm_isa(args->isa);
      RT_TRY_SET(agent::EventWriter events, agent::EventWriter::from_environment());
      Result<int> done = train_rank(*args, events);
      if (!done.ok()) events.send_error(done.error());
      return done;
    };
  });
}

}  // namespace cairn::tools
