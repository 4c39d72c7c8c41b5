#include "tools/run/agent.h"

#include <signal.h>

#include <algorithm>
#include <thread>

#include "ckpt/position.h"
#include "runtime/trainer/trainer.h"

namespace cairn::tools {

using nlohmann::json;

Agent::Agent(const Plan& plan, const std::filesystem::path& run, Coordinator& coordinator, Narrator& narrator,
             AgentOptions options)
    : plan_(plan),
      coordinator_(coordinator),
      narrator_(narrator),
      options_(std::move(options)),
      waits_(run, plan.recipe.name, plan.recipe.restart.deadline_s, narrator.callbacks()) {}

comm::RankView Agent::view_of(int64_t rank) const {
  const std::vector<comm::RankView> views = world_ ? world_->ranks() : std::vector<comm::RankView>{};
  return rank < static_cast<int64_t>(views.size()) ? views[rank] : comm::RankView{};
}

Result<std::vector<agent::ChildSpec>> Agent::prepare_generation(int64_t generation) {
  RT_TRY_SET(const ckpt::RestoreChoice choice, coordinator_.next_generation(generation));
  RT_TRY_SET(world_, comm::ShmWorld::create(trainer::world_config(plan_)));
  RT_TRY_SET(memory_, coordinator_.memory().descriptor());

  const ckpt::RankRange here = coordinator_.memory().ranks();
  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  const std::string threads =
      std::to_string(options_.threads > 0 ? options_.threads : std::max<int64_t>(1, cores / here.size()));
  std::vector<agent::ChildSpec> specs;
  for (int64_t rank = here.first; rank < here.end; ++rank) specs.push_back(spec_of(rank, choice.incarnation, threads));
  if (!options_.trace.empty()) RT_TRY(narrator_.begin_trace());
  return specs;
}

agent::ChildSpec Agent::spec_of(int64_t rank, uint64_t generation_of_ranks, const std::string& threads) const {
  agent::ChildSpec spec{
      .argv = {options_.program, "_rank",
               "--recipe",       options_.recipe.string(),
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
  if (!options_.trace.empty()) {
    for (const std::string& word :
         {std::string("--trace"), options_.trace, std::string("--trace-dir"), narrator_.trace_dir().string()})
      spec.argv.push_back(word);
  }
  return spec;
}

void Agent::on_generation_started(int64_t, const agent::Recovery* recovery) {
  if (recovery != nullptr) narrator_.respawned(*recovery);
}

void Agent::on_event(int64_t rank, const json& event) {
  const std::string kind = event.value("event", "");
  if (kind == "snapshot") {
    coordinator_.part_complete();
  } else if (kind == "ready") {
    narrator_.record(
        {{"event", "ready"}, {"rank", rank}, {"ms", event.value("ms", 0.0)}, {"from", event.value("from", "")}});
  } else if (kind == "step") {
    const Result<telemetry::StepMetrics> metrics = telemetry::step_metrics_from_json(event);
    if (!metrics.ok()) return;
    coordinator_.on_step(narrator_.step(metrics.value()));
    kill_as_asked(metrics.value().step);
  } else if (kind == "traced") {
    narrator_.drew(event.value("path", ""));
  }
}

void Agent::on_signal(int signal) {
  if (signal == SIGQUIT) return waits_.ask(world_ ? &*world_ : nullptr, signal_name(signal));
  coordinator_.ask_save(signal_name(signal));
}

void Agent::kill_as_asked(int64_t step) {
  for (Kill& kill : options_.kills) {
    if (kill.step != step) continue;
    kill.step = -1;
    const int64_t pid = view_of(kill.rank).pid;
    if (pid <= 0) continue;  // kill(0) would be this whole process group
    narrator_.kills(kill.rank, pid, step);
    ::kill(static_cast<pid_t>(pid), SIGKILL);
  }
}

}  // namespace cairn::tools
