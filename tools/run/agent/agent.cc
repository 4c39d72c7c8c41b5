#include "tools/run/agent/agent.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "ckpt/position.h"
#include "runtime/cluster/placement.h"
#include "runtime/core/cgroup.h"
#include "runtime/host/bind.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/trace.h"
#include "runtime/trainer/trainer.h"
#include "tools/run/hosts/fleet.h"

namespace cairn::tools {

using nlohmann::json;

namespace {

constexpr int64_t kLoadEveryNs = 1'000'000'000;

/// A file without a name that holds `text`.
Result<Fd> memory_file(const std::string& text) {
  Fd fd(::memfd_create("cairn-recipe", MFD_CLOEXEC));
  if (!fd) return os_error(errno, "memfd_create");
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = ::write(fd.get(), text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return os_error(errno, "memfd");
    at += static_cast<size_t>(n);
  }
  return fd;
}

}  // namespace

Agent::Agent(const Plan& plan, const std::filesystem::path& run, Coordinator& coordinator, Narrator& narrator,
             AgentOptions options)
    : plan_(plan),
      run_(run),
      coordinator_(coordinator),
      narrator_(narrator),
      options_(std::move(options)),
      waits_(run, plan.recipe.name, plan.recipe.restart.deadline_s, narrator.callbacks(),
             {.ask = [this] { coordinator_.ask_where_ranks_are(); },
              .put_in = [this](std::vector<agent::RankState>& ranks) { coordinator_.put_in(ranks); },
              .ask_stacks = [this](const std::vector<int64_t>& first) { coordinator_.ask_stacks(first); }},
             coordinator_.watches_waits() ? "" : own_host_name()),
      load_meter_(host_.cgroup()) {}

comm::RankView Agent::view_of(int64_t rank) const {
  const std::vector<comm::RankView> views = world_ ? world_->ranks() : std::vector<comm::RankView>{};
  return rank < static_cast<int64_t>(views.size()) ? views[rank] : comm::RankView{};
}

Result<std::vector<agent::ChildSpec>> Agent::prepare_generation(int64_t generation) {
  RT_TRY_SET(const ckpt::RestoreChoice choice, coordinator_.next_generation(generation));
  host_.begin();
  load_meter_.clear();
  loads_.clear();
  const ckpt::RankRange here = coordinator_.memory().ranks();
  comm::ShmWorldConfig config = trainer::world_config(plan_);
  if (here.size() < plan_.mesh.world()) config.local_ranks = here.size();
  RT_TRY_SET(world_, comm::ShmWorld::create(config));
  RT_TRY_SET(memory_, coordinator_.memory().descriptor());
  RT_TRY_SET(ward_, coordinator_.ward());
  if (!options_.recipe_text.empty() && !recipe_) {
    RT_TRY_SET(recipe_, memory_file(options_.recipe_text));
  }
  if (plan_.recipe.device == DeviceChoice::kCuda) RT_TRY(place_ranks());
  if (hub_) hub_->clear();
  sockets_.clear();
  std::vector<agent::ChildSpec> specs;
  for (int64_t rank = here.first; rank < here.end; ++rank) {
    RT_TRY_SET(agent::ChildSpec spec, spec_of(rank, choice.incarnation));
    specs.push_back(std::move(spec));
  }
  if (here.contains(coordinator_.place().decides)) {
    if (!options_.trace.empty()) RT_TRY(narrator_.begin_trace());
    if (options_.time_kernels) RT_TRY(narrator_.begin_kernel_times());
    if (options_.token_losses > 0 && generation == 0) {
      std::error_code failed;
      std::filesystem::remove_all(run_ / "token_losses", failed);
      if (!failed) std::filesystem::create_directories(run_ / "token_losses", failed);
      if (failed) return os_error(failed.value(), (run_ / "token_losses").string());
    }
  }
  return specs;
}

/// Of ranks on GPUs: which each gets, and the cores next to it. On CPUs ranks are not bound.
Status Agent::place_ranks() {
  RT_TRY_SET(gpus_, host::visible_gpus(host::gpus_of_machine(), cluster::process_environment()));
  cores_.clear();
  const Result<host::Topology> topology = host::Topology::of_host();
  if (!topology.ok()) {  // they run all the same
    narrator_.say(fmt::format("ranks are not bound to cores: {}", topology.error().message));
    return {};
  }
  std::vector<std::string> gpu_of_rank;
  for (int64_t k = 0; k < coordinator_.memory().ranks().size(); ++k) gpu_of_rank.push_back(host::pci_of_rank(gpus_, k));
  cores_ = host::cores_of_ranks(topology.value(), gpu_of_rank);
  return {};
}

Result<agent::ChildSpec> Agent::spec_of(int64_t rank, uint64_t generation_of_ranks) {
  const ckpt::RankRange here = coordinator_.memory().ranks();
  const host::RankCores bound = cores_.empty() ? host::RankCores{} : cores_[static_cast<size_t>(rank - here.first)];
  int64_t cores = usable_cpus() / here.size();
  if (!bound.cpus.empty()) cores = std::min(cores, std::ssize(bound.cpus) / std::ranges::count(cores_, bound));
  const std::string threads = std::to_string(options_.threads > 0 ? options_.threads : std::max<int64_t>(1, cores));
  const std::string recipe = recipe_ ? fmt::format("/proc/self/fd/{}", recipe_.get()) : options_.recipe.string();
  agent::ChildSpec spec{
      .rank = rank,
      .argv = {options_.program, "_rank",
               "--recipe",       recipe,
               "--past",         ckpt::encode_past(plan_.past),
               "--end-step",     std::to_string(plan_.end_step),
               "--arena-fd",     std::to_string(memory_.get()),
               "--rank",         std::to_string(rank),
               "--world",        std::to_string(plan_.mesh.world()),
               "--incarnation",  std::to_string(generation_of_ranks),
               "--comm-fd",      std::to_string(world_->fd()),
               "--init",         options_.init},
      // Passive: a thread that waits must not take the core of a rank that works.
      .env = {{"OMP_NUM_THREADS", threads}, {"OMP_WAIT_POLICY", "passive"}, {"OMP_PROC_BIND", "false"}},
      .inherit_fds = {world_->fd(), memory_.get()},
      .log_path = options_.log_of(rank).string()};
  if (recipe_) spec.inherit_fds.push_back(recipe_.get());
  if (ward_) {
    for (const std::string& word : {std::string("--ward-fd"), std::to_string(ward_.get())}) spec.argv.push_back(word);
    spec.inherit_fds.push_back(ward_.get());
  }
  const HostPlace place = coordinator_.place();
  for (const std::string& word : {std::string("--isa"), std::string(kernels::gemm_isa_name(place.isa))})
    spec.argv.push_back(word);
  if (plan_.recipe.device == DeviceChoice::kCuda) {
    const host::RankGpu gpu = host::gpu_of_rank(gpus_, rank - here.first);
    const int64_t gpus = std::max<int64_t>(1, gpus_.size()), sharing = (here.size() + gpus - 1) / gpus;
    for (const std::string& word : {std::string("--device"), std::string("cuda"), std::string("--device-index"),
                                    std::to_string(gpu.index), std::string("--device-ranks"), std::to_string(sharing)})
      spec.argv.push_back(word);
    if (!bound.cpus.empty()) {
      for (const std::string& word :
           {std::string("--cpus"), host::ranges_text(bound.cpus), std::string("--numa"), std::to_string(bound.numa)})
        spec.argv.push_back(word);
    }
    if (!options_.comm.empty()) {
      for (const std::string& word : {std::string("--comm"), options_.comm}) spec.argv.push_back(word);
    }
    for (const std::string& word : {std::string("--attention"), options_.attention}) spec.argv.push_back(word);
    for (const std::string& word :
         {std::string("--tuning"), options_.tuning, std::string("--tuning-file"), narrator_.tuning_file().string()})
      spec.argv.push_back(word);
    if (!options_.tuning_given.empty()) {
      for (const std::string& word : {std::string("--tuning-given"), options_.tuning_given}) spec.argv.push_back(word);
    }
    if (gpu.visible) spec.env.emplace_back("CUDA_VISIBLE_DEVICES", *gpu.visible);
  }
  spec.env.insert(spec.env.end(), options_.environment.begin(), options_.environment.end());
  if (place.hosts > 1) {
    RT_TRY_SET(Fd socket, hub_->add(rank));
    for (const std::string& word : {std::string("--hosts"), std::to_string(place.hosts), std::string("--address"),
                                    place.address, std::string("--meet-fd"), std::to_string(socket.get()),
                                    std::string("--decides"), std::to_string(place.decides)})
      spec.argv.push_back(word);
    spec.inherit_fds.push_back(socket.get());
    sockets_.push_back(std::move(socket));
  }
  if (!options_.trace.empty()) {
    for (const std::string& word :
         {std::string("--trace"), options_.trace, std::string("--trace-dir"), narrator_.trace_dir().string()})
      spec.argv.push_back(word);
  }
  if (options_.time_kernels) {
    for (const std::string& word : {std::string("--time-kernels"), narrator_.kernel_times_dir().string()})
      spec.argv.push_back(word);
  }
  if (options_.token_losses > 0) {
    for (const std::string& word : {std::string("--token-losses"), std::to_string(options_.token_losses),
                                    std::string("--token-losses-dir"), (run_ / "token_losses").string()})
      spec.argv.push_back(word);
  }
  return spec;
}

void Agent::on_generation_started(int64_t, const agent::Recovery* recovery) {
  sockets_.clear();  // the ranks have theirs
  if (recovery != nullptr) narrator_.respawned(*recovery);
  if (coordinator_.news_fd() >= 0) coordinator_.on_readable();  // what came right behind the order to start
}

Status Agent::use(agent::RunControl& control) {
  if (coordinator_.news_fd() < 0) return {};
  RT_TRY(control.watch(coordinator_.news_fd()));
  RT_TRY_SET(hub_, comm::RendezvousHub::make(
                       [this](const std::string& key, const std::string& value) { coordinator_.publish(key, value); }));
  coordinator_.use({.put = [this](const std::string& key, const std::string& value) { hub_->put(key, value); },
                    .states = [this] { return world_ ? states_of(*world_) : std::vector<agent::RankState>(); },
                    .kill = [this](int64_t rank) { kill(rank); },
                    .read_stacks =
                        [this](std::function<void(std::vector<agent::RankStacks>)> to) {
                          waits_.send_stacks(world_ ? &*world_ : nullptr, std::move(to));
                        },
                    .take_stacks = [this](std::vector<agent::RankStacks> stacks) { waits_.take(std::move(stacks)); }});
  return control.watch(hub_->fd());
}

void Agent::on_readable(int fd) {
  if (hub_ && fd == hub_->fd()) {
    hub_->poll();
  } else {
    coordinator_.on_readable();
  }
}

void Agent::on_event(int64_t rank, const json& event) {
  const std::string kind = json_string(event, "event");
  if (kind == "snapshot") {
    coordinator_.part_complete();
    return;
  }
  if (kind == "pace") {
    json with_load = event;
    with_load["load"] = to_json(load_of(rank));
    return coordinator_.on_rank_event(rank, with_load);
  }
  if (kind == "ready") load_of(rank);  // what comes is measured from here on
  coordinator_.on_rank_event(rank, event);
  const Result<telemetry::StepMetrics> metrics = telemetry::step_metrics_from_json(event);
  if (kind == "step" && metrics.ok()) kill_as_asked(metrics.value().step);
}

void Agent::on_signal(int signal) {
  if (signal == SIGQUIT) return waits_.ask(world_ ? &*world_ : nullptr, signal_name(signal));
  coordinator_.ask_save(signal_name(signal));
}

void Agent::kill_as_asked(int64_t step) {
  for (Kill& kill : options_.kills) {
    if (kill.step != step) continue;
    kill.step = -1;
    const bool is_here = coordinator_.memory().ranks().contains(kill.rank);
    const int64_t pid = is_here ? view_of(kill.rank).pid : 0;
    if (is_here && pid <= 0) continue;
    narrator_.kills(kill.rank, pid, step);
    if (is_here) {
      this->kill(kill.rank);
    } else {
      coordinator_.kill(kill.rank);
    }
  }
}

/// Measured anew once a second: fast steps make many blocks.
const agent::HostLoad& Agent::load_of(int64_t rank) {
  Measured& measured = loads_[rank];
  const int64_t now_ns = telemetry::trace_clock_ns();
  if (now_ns - measured.at_ns < kLoadEveryNs) return measured.load;
  measured = {load_meter_.measure(view_of(rank).pid, now_ns), now_ns};
  return measured.load;
}

agent::Failure Agent::here(agent::Failure error) {
  error.host_name = own_host_name();
  return error;
}

void Agent::kill(int64_t rank) {
  const int64_t pid = view_of(rank).pid;
  if (pid > 0) ::kill(static_cast<pid_t>(pid), SIGKILL);  // kill(0) would be this whole process group
}

}  // namespace cairn::tools
