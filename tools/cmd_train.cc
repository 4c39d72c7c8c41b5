// cairn train, cairn resume: the agent of a run on this machine. It owns the shared memory, spawns the ranks, restarts
// them after a failure, persists checkpoints, and writes what people read: progress, metrics.jsonl, TensorBoard.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "ckpt/format/names.h"
#include "ckpt/node.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/posix_backend.h"
#include "dsl/dsl.h"
#include "runtime/agent/supervisor.h"
#include "runtime/agent/wait_report.h"
#include "runtime/comm/shm_world.h"
#include "runtime/core/log.h"
#include "runtime/plan/plan.h"
#include "runtime/telemetry/metrics.h"
#include "runtime/telemetry/tensorboard.h"
#include "runtime/telemetry/terminal.h"
#include "runtime/telemetry/trace.h"
#include "runtime/trainer/trainer.h"
#include "tools/calibration.h"
#include "tools/commands.h"
#include "tools/hf_start.h"
#include "tools/init_options.h"
#include "tools/run_copies.h"
#include "tools/run_folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct TrainArgs {
  RecipeArgs recipe;
  std::string run;
  InitConfig init;  // what the command line says of it; it wins over the recipe
  int64_t nproc = 0, threads = 0;
  std::vector<std::string> kills;  // RANK@STEP
  std::string trace;               // steps=A..B
  double peak_tflops = 0;          // of a rank's device; 0: the calibration of this machine, if there is one
  bool fresh = false, dry_run = false;
};

constexpr int64_t kStackPatienceMs = 10'000;  // for the stacks of all ranks

double unix_now() { return SystemClock().unix_s(); }
int64_t clock_ns() { return SystemClock().now_ns(); }

/// RANK@STEP of --kill.
struct Kill {
  int64_t rank = 0, step = 0;
};

Result<Kill> parse_kill(const std::string& text, int64_t world) {
  Kill kill;
  char end = 0;
  if (std::sscanf(text.c_str(), "%ld@%ld%c", &kill.rank, &kill.step, &end) != 2 || kill.rank < 0 ||
      kill.rank >= world || kill.step < 1) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--kill {}: expected RANK@STEP with a rank below {} and a step from 1", text, world)};
  }
  return kill;
}

class TrainAgent final : public agent::SupervisorClient {
 public:
  TrainAgent(const Plan& plan, RunFolder& folder, const TrainArgs& args, std::vector<Kill> kills)
      : plan_(plan),
        folder_(folder),
        args_(args),
        kills_(std::move(kills)),
        progress_(STDOUT_FILENO),
        copies_(plan.recipe.checkpoint.copy_to, folder,
                {.say = [this](const std::string& text) { progress_.say(text); },
                 .record = [this](const json& event) { record(event); }}) {}

  Status open(const dsl::LoadedRecipe& loaded, const std::string& name);
  void use(agent::Supervisor& supervisor) { supervisor_ = &supervisor; }
  /// Before open(): a checkpoint may have to come from a second place first.
  Status prepare_copies() { return copies_.prepare(args_.fresh); }
  Result<int> conclude(const agent::Outcome& outcome);
  /// After the run, in any way it ended: saves what only memory holds, and stops the persist thread, which wakes the
  /// supervisor and so must not outlive it.
  void close();

  Result<std::vector<agent::ChildSpec>> prepare_generation(int64_t generation) override;
  void on_generation_started(int64_t generation, const agent::Recovery* recovery) override;
  void on_event(int64_t rank, const json& event) override;
  void on_child_exit(int64_t rank, const agent::ExitStatus& status, bool killed) override;
  void on_failure(const agent::RestartInfo& info, bool restarting, double backoff_s) override;
  void on_stop_requested(int signal) override;
  void on_tick() override {
    take_persist_events();
    watch_memory();
    watch_waits();
    copies_.poll();
  }
  /// Ranks that have trained to their end stand still until the last checkpoint is on disk, within the hook's own
  /// deadline.
  bool on_hang(const std::vector<agent::Silence>&) override { return !save_under_way(); }
  std::optional<std::pair<int64_t, std::string>> suspect() override;
  void on_failing(const agent::Failure& failure) override;
  void on_notice(const std::string& text) override { progress_.say(text); }
  uint64_t heartbeat(int64_t rank) override { return static_cast<uint64_t>(view_of(rank).finished_operations()); }
  std::string place(int64_t rank) override { return view_of(rank).description; }

 private:
  comm::RankView view_of(int64_t rank) const {
    const std::vector<comm::RankView> views = world_ ? world_->ranks() : std::vector<comm::RankView>{};
    return rank < static_cast<int64_t>(views.size()) ? views[rank] : comm::RankView{};
  }
  bool save_under_way() const {
    // Only what the persister has or can take: a promise that a hung rank has not completed is no save.
    const std::vector<ckpt::SlotView> views = node_->arena().views();
    return std::any_of(views.begin(), views.end(),
                       [](const ckpt::SlotView& slot) { return slot.reserved && slot.whole; });
  }
  void on_step(const telemetry::StepMetrics& metrics);
  void on_traced(const std::string& path);
  void finish_trace();
  std::vector<agent::RankState> rank_states() const;
  Status check_nothing_saved() const;
  void watch_memory();
  void watch_waits();
  void probe_stacks();
  void take_stacks(int64_t limit_ms);
  void tell_wait();
  void write_report();
  fs::path trace_dir() const { return folder_.path() / "trace"; }
  void take_persist_events();
  void record(json event);
  void tell_match(const ckpt::LoadMatch& match, const ckpt::RestoreChoice& choice);
  void tell_persisted(const ckpt::PersistEvent& event);
  void tell_flushed(const ckpt::PersistEvent& event);

  const Plan& plan_;
  RunFolder& folder_;
  const TrainArgs& args_;
  std::vector<Kill> kills_;
  telemetry::ProgressLine progress_;
  RunCopies copies_;
  agent::Supervisor* supervisor_ = nullptr;
  std::unique_ptr<telemetry::MetricsWriter> metrics_;  // used by threads of node_
  std::unique_ptr<ckpt::CheckpointNode> node_;
  std::optional<comm::ShmWorld> world_;
  Fd memory_;  // of the arena, for ranks
  bool told_nameless_ = false;
  std::optional<telemetry::TensorBoardWriter> tensorboard_;
  Fd events_;  // events.jsonl

  int64_t first_step_ = -1;  // before the first generation
  int64_t last_step_ = 0, last_progress_step_ = 0;
  double last_loss_ = 0, lost_ms_ = 0;
  int64_t failed_at_ns_ = 0;  // of the failure that is being recovered from
  int64_t failed_at_step_ = 0;
  bool respawned_ = false;  // since then
  double started_s_ = unix_now();
  double peak_tflops_ = 0;  // of the whole world; 0: not known
  fs::path newest_checkpoint_;
  /// A wait that has taken most of its deadline, until the run goes on or fails.
  struct LongWait {
    int64_t rank = 0, operation = 0;  // who has waited longest, and in which of its operations
    bool beside = false;              // of the thread beside its own
    bool over = false;                // only its stacks are still being read
    agent::WaitReport report;
    fs::path path;         // of the report, also when it could not be written
    bool written = false;  // the file is there
    bool told = false;     // that it could not be written
    std::string file() const { return written ? path.string() : std::string(); }
  };
  std::optional<LongWait> wait_;
  std::optional<agent::StackProbe> probe_;
  int64_t probe_until_ns_ = 0;
  int64_t reports_ = 0;
  fs::path report_path_;                     // of the last failure
  std::vector<fs::path> traced_;             // files of ranks, until they are merged
  std::vector<telemetry::TraceSpan> saves_;  // for the trace
  Status last_persist_;
  int64_t failed_step_ = -1;  // of the last save that failed
  size_t problems_ = 0;       // of retention after the last save
  Status stopped_by_;         // the first save that failed, with checkpoint.on_failure = "stop"
  bool concluded_ = false;
};

Status TrainAgent::open(const dsl::LoadedRecipe& loaded, const std::string& name) {
  RT_TRY_SET(metrics_, telemetry::MetricsWriter::open(folder_.path() / "metrics.jsonl", folder_.id()));
  ckpt::NodeOptions options{.checkpoints_dir = folder_.checkpoints(),
                            .run = {.run_name = name,
                                    .run_id = folder_.id(),
                                    .recipe_json = loaded.canonical_json,
                                    .recipe_hash = loaded.hash_hex},
                            .resume = !args_.fresh,
                            .before_save =
                                [this](int64_t step, std::span<const std::string> news) {
                                  const Status complete = metrics_->complete(step, news);
                                  if (!complete.ok()) spdlog::warn("metrics.jsonl: {}", complete.error().message);
                                },
                            .on_persisted =
                                [this] {
                                  if (supervisor_ != nullptr) supervisor_->wake();
                                }};
  if (args_.peak_tflops > 0) {
    peak_tflops_ = args_.peak_tflops * static_cast<double>(plan_.mesh.world());
  } else if (const auto calibration = load_calibration(); calibration.ok() && calibration.value()) {
    peak_tflops_ = calibration.value()->peak_tflops(plan_.recipe.precision);  // all ranks share this machine
  }
  if (!plan_.recipe.init.path.empty()) {
    options.init_from = plan_.recipe.init.path;
    options.open_foreign = open_hf_for(plan_.recipe.model);
  }
  std::vector<std::string> notices;
  RT_TRY_SET(node_, ckpt::CheckpointNode::open(plan_, std::move(options), &notices));
  for (const std::string& notice : notices) progress_.say(notice);
  const fs::path path = folder_.path() / "events.jsonl";
  events_.reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!events_) return os_error(errno, path.string());
  copies_.start();
  return {};
}

void TrainAgent::record(json event) {
  event["time"] = unix_now();
  const std::string line = event.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
  if (::write(events_.get(), line.data(), line.size()) < 0) spdlog::warn("events.jsonl: {}", std::strerror(errno));
}

/// Of a run that has no checkpoint: one that had some is not begun anew where their disk is not mounted.
Status TrainAgent::check_nothing_saved() const {
  std::ifstream events(folder_.path() / "events.jsonl", std::ios::binary);
  int64_t saved = 0;
  for (std::string line; std::getline(events, line);) {
    if (line.find(R"("saved")") == std::string::npos) continue;
    const json event = json::parse(line, nullptr, false);
    if (!event.is_object() || !event.contains("step") || !event["step"].is_number_integer()) continue;
    if (event.value("event", json()) == "saved") saved = event["step"].get<int64_t>();
  }
  if (saved == 0) return {};
  return Error{
      ErrorCode::kInvalidInput,
      fmt::format("{}: step {} was saved there, and no checkpoint is there any more; mount it, or move them back "
                  "(--fresh begins anew)",
                  folder_.checkpoints().string(), saved)};
}

Result<std::vector<agent::ChildSpec>> TrainAgent::prepare_generation(int64_t generation) {
  const int64_t world = plan_.mesh.world();
  if (is_gone(folder_.path())) {
    return Error{ErrorCode::kIo, fmt::format("{}: {}", folder_.path().string(), ckpt::kFolderGone), ENOENT};
  }
  RT_TRY_SET(const ckpt::RestoreChoice choice, node_->begin_incarnation());
  for (const std::string& warning : choice.warnings) progress_.say("warning: " + warning);
  const bool anew = choice.source == ckpt::arena::Source::kFresh || choice.match;
  if (generation == 0 && anew && !args_.fresh) RT_TRY(check_nothing_saved());
  std::string from = "a fresh start";
  if (choice.source == ckpt::arena::Source::kMemory) from = fmt::format("step {} in shared memory", choice.step);
  if (choice.source == ckpt::arena::Source::kDisk) from = fmt::format("{}", choice.dir.string());
  if (generation > 0 || choice.source != ckpt::arena::Source::kFresh) progress_.say("from " + from);
  if (generation == 0 && choice.source == ckpt::arena::Source::kMemory && !args_.init.path.empty()) {
    progress_.say("--init-from is for a new run; this one goes on from its memory (another --run begins anew)");
  }
  json start{{"event", "start"}, {"generation", generation}, {"step", choice.step}, {"from", from}};
  if (choice.read.wanted_bytes > 0) {
    start["needed_bytes"] = choice.read.wanted_bytes;
    start["read_bytes"] = choice.read.read_bytes;
    if (static_cast<double>(choice.read.read_bytes) > 1.02 * static_cast<double>(choice.read.wanted_bytes)) {
      progress_.say(
          fmt::format("{} read of the checkpoint for {} that were needed: what lies between small tensors is "
                      "read along, which is faster than leaving it out",
                      format_bytes(choice.read.read_bytes), format_bytes(choice.read.wanted_bytes)));
    }
  }
  record(std::move(start));
  if (choice.match) tell_match(*choice.match, choice);

  if (first_step_ < 0) first_step_ = last_step_ = choice.step;
  RT_TRY(metrics_->catch_up(choice.metrics));  // a kill may have come between these steps and the news of them
  RT_TRY(metrics_->resumed(choice.step));
  if (plan_.recipe.log.tensorboard) {
    RT_TRY_SET(tensorboard_,
               telemetry::TensorBoardWriter::open(folder_.path() / "tensorboard", unix_now(), choice.step + 1));
  }

  RT_TRY_SET(world_, comm::ShmWorld::create(trainer::world_config(plan_)));
  RT_TRY_SET(memory_, node_->arena().descriptor());

  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  const std::string threads = std::to_string(args_.threads > 0 ? args_.threads : std::max<int64_t>(1, cores / world));
  std::vector<agent::ChildSpec> specs;
  for (int64_t rank = 0; rank < world; ++rank) {
    specs.push_back({.argv = {"/proc/self/exe", "_rank", "--recipe", folder_.recipe().string(), "--arena-fd",
                              std::to_string(memory_.get()), "--rank", std::to_string(rank), "--world",
                              std::to_string(world), "--incarnation", std::to_string(choice.incarnation), "--comm-fd",
                              std::to_string(world_->fd()), "--init", init_to_json(plan_.recipe.init)},
                     // Passive: a thread that waits must not take the core of a rank that works.
                     .env = {{"OMP_NUM_THREADS", threads}, {"OMP_WAIT_POLICY", "passive"}, {"OMP_PROC_BIND", "false"}},
                     .inherit_fds = {world_->fd(), memory_.get()},
                     .log_path = folder_.log_of(rank).string()});
    if (!args_.trace.empty()) {
      for (const std::string& word :
           {std::string("--trace"), args_.trace, std::string("--trace-dir"), trace_dir().string()}) {
        specs.back().argv.push_back(word);
      }
    }
  }
  if (!args_.trace.empty()) {
    traced_.clear();
    std::error_code problem;
    fs::create_directories(trace_dir(), problem);
    if (problem) return os_error(problem.value(), trace_dir().string());
  }
  return specs;
}

void TrainAgent::on_generation_started(int64_t, const agent::Recovery* recovery) {
  if (recovery == nullptr) return;
  respawned_ = true;
  record({{"event", "respawned"},
          {"ms_to_kill", static_cast<double>(recovery->killed_ns - recovery->detected_ns) / 1e6},
          {"ms_to_reap", static_cast<double>(recovery->reaped_ns - recovery->detected_ns) / 1e6},
          {"ms_to_spawn", static_cast<double>(recovery->spawned_ns - recovery->detected_ns) / 1e6}});
}

void TrainAgent::on_child_exit(int64_t, const agent::ExitStatus& status, bool) {
  // A wild write may lie behind these: what the rank could reach in shared memory is checked before it is used.
  for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE}) {
    if (status.signal == signal) node_->distrust_memory();
  }
}

void TrainAgent::on_event(int64_t rank, const json& event) {
  const std::string kind = event.value("event", "");
  if (kind == "snapshot") {
    node_->notify();
  } else if (kind == "ready") {
    record({{"event", "ready"}, {"rank", rank}, {"ms", event.value("ms", 0.0)}, {"from", event.value("from", "")}});
  } else if (kind == "step") {
    Result<telemetry::StepMetrics> metrics = telemetry::step_metrics_from_json(event);
    if (metrics.ok()) on_step(metrics.value());
  } else if (kind == "traced") {
    on_traced(event.value("path", ""));
  }
}

std::vector<agent::RankState> TrainAgent::rank_states() const {
  std::vector<agent::RankState> out;
  if (!world_) return out;
  for (const comm::RankView& view : world_->ranks()) {
    const char state = view.pid > 0 ? agent::process_state(static_cast<pid_t>(view.pid)) : '?';
    out.push_back({static_cast<int64_t>(out.size()), view, state});
  }
  return out;
}

void TrainAgent::watch_memory() {
  if (told_nameless_ || !node_->arena().is_nameless()) return;
  told_nameless_ = true;
  progress_.say(
      fmt::format("warning: {} was removed, by hand or by systemd as its user logged out (RemoveIPC): training goes "
                  "on, but after a kill of this process the run goes on from its last checkpoint on disk",
                  node_->arena().name()));
}

/// A rank in a wait for half of its deadline: who keeps it waiting is found out, and all stacks are read,
/// while everybody still stands where it is. At the deadline the ranks give up and leave.
void TrainAgent::watch_waits() {
  if (probe_ && (probe_->take() || clock_ns() >= probe_until_ns_)) {
    take_stacks(0);
    write_report();
  }
  if (!world_ || world_->aborted()) return;
  const auto limit_ms = static_cast<int64_t>(500 * plan_.recipe.restart.deadline_s);
  const std::vector<comm::RankView> views = world_->ranks();
  const comm::OperationView* longest = nullptr;
  int64_t rank = 0;
  const auto view_at = [&](size_t r, bool beside) -> const comm::OperationView& {
    return beside ? views[r].beside : static_cast<const comm::OperationView&>(views[r]);
  };
  bool longest_beside = false;
  for (size_t r = 0; r < views.size(); ++r) {
    for (const bool beside : {false, true}) {
      const comm::OperationView& view = view_at(r, beside);
      if (!view.inside || view.since_ms < limit_ms) continue;
      if (longest == nullptr || view.since_ms > longest->since_ms)
        longest = &view, rank = static_cast<int64_t>(r), longest_beside = beside;
    }
  }
  if (wait_) {  // the same wait, or over?
    const comm::OperationView& before = view_at(static_cast<size_t>(wait_->rank), wait_->beside);
    if (!wait_->over) {
      if (before.inside && before.operations == wait_->operation) return;
      progress_.say(fmt::format("rank {} goes on", wait_->rank));
      record({{"event", "wait_over"}, {"rank", wait_->rank}});
      wait_->over = true;  // whoever hangs from now on is another
    }
    if (probe_) return;  // its stacks are still being read
    wait_.reset();
  }
  if (longest == nullptr) return;
  wait_ = LongWait{.rank = rank, .operation = longest->operations, .beside = longest_beside};
  wait_->report.ranks = rank_states();
  wait_->report.finding = agent::find_culprit(wait_->report.ranks);
  tell_wait();
  probe_stacks();
}

/// Reads the stacks of all ranks of wait_ in a process of its own.
void TrainAgent::probe_stacks() {
  std::vector<pid_t> pids;
  const auto add = [&](const agent::RankState& rank) {
    const auto pid = static_cast<pid_t>(rank.view.pid);
    if (pid > 0 && std::find(pids.begin(), pids.end(), pid) == pids.end()) pids.push_back(pid);
  };
  for (const int64_t rank : wait_->report.finding.culprits) add(wait_->report.ranks[static_cast<size_t>(rank)]);
  for (const agent::RankState& rank : wait_->report.ranks) add(rank);
  Result<agent::StackProbe> probe = agent::StackProbe::start("/proc/self/exe", pids);
  if (probe.ok()) {
    probe_ = std::move(probe).value();
    probe_until_ns_ = clock_ns() + kStackPatienceMs * 1'000'000;
  } else {
    progress_.say("warning: no stacks: " + probe.error().message);
  }
}

void TrainAgent::take_stacks(int64_t limit_ms) {
  if (!probe_) return;
  wait_->report.stacks = probe_->finish(limit_ms);
  probe_.reset();
}

/// Not fsynced: a restart waits for it.
void TrainAgent::write_report() {
  agent::WaitReport& report = wait_->report;
  const fs::path reports = folder_.path() / "reports";
  std::error_code problem;
  fs::create_directory(reports, problem);  // not the run's folder anew, which may have been moved
  if (wait_->path.empty()) {
    int64_t step = 0;
    for (const agent::RankState& rank : report.ranks) step = std::max(step, rank.view.step);
    std::error_code unknown;
    do {
      wait_->path = reports / fmt::format("step-{:08}-{}.txt", step, ++reports_);
    } while (fs::exists(wait_->path, unknown));
  }
  const std::time_t now = std::time(nullptr);
  char time[32] = {};
  std::tm parts{};
  std::strftime(time, sizeof time, "%Y-%m-%d %H:%M:%S UTC", ::gmtime_r(&now, &parts));
  report.time = time;
  const Status written = problem ? Status(os_error(problem.value(), reports.string()))
                                 : write_unsynced_text_file(wait_->path, agent::to_text(report));
  wait_->written = wait_->written || written.ok();  // without stacks it is there already
  if (written.ok() || wait_->told) return;
  wait_->told = true;
  progress_.say(fmt::format("warning: the report could not be written{}: {}",
                            wait_->written ? " anew, with the stacks" : "", written.error().message));
}

void TrainAgent::tell_wait() {
  const agent::WaitFinding& finding = wait_->report.finding;
  wait_->report.title = fmt::format("{}: ranks have waited for {:.1f} s of the {:g} s they may", plan_.recipe.name,
                                    static_cast<double>(finding.waited_ms) / 1e3, plan_.recipe.restart.deadline_s);
  write_report();
  progress_.say(agent::summary_text(finding, wait_->report.ranks) +
                (wait_->written ? "  stacks of all ranks: " + wait_->file() : ""));
  record({{"event", "wait"},
          {"culprits", finding.culprits},
          {"reason", finding.reason},
          {"waited_ms", finding.waited_ms},
          {"report", wait_->file()}});
}

std::optional<std::pair<int64_t, std::string>> TrainAgent::suspect() {
  if (!wait_ || wait_->over) return std::nullopt;
  if (wait_->report.finding.culprits.empty() || wait_->report.finding.deadlock) return std::nullopt;
  const agent::RankState& rank = wait_->report.ranks[static_cast<size_t>(wait_->report.finding.culprits.front())];
  return std::pair(rank.rank, fmt::format("keeps the others waiting: it {}; {}", wait_->report.finding.reason,
                                          rank.view.description));
}

/// Nobody has been killed yet: the last chance to see where everybody is.
void TrainAgent::on_failing(const agent::Failure& failure) {
  report_path_.clear();  // that of an earlier one
  if (!world_) return;
  if (wait_ && wait_->over) {
    take_stacks(0);
    write_report();
    wait_.reset();
  }
  if (!wait_) {
    wait_ = LongWait{.rank = std::max<int64_t>(0, failure.rank)};
    wait_->report.ranks = rank_states();
    wait_->report.finding = agent::find_culprit(wait_->report.ranks);
    if (failure.rank >= 0) {
      wait_->report.finding.culprits = {failure.rank};
      wait_->report.finding.reason = failure.hang ? "hangs" : "failed";
      wait_->report.finding.deadlock = false;
      wait_->report.finding.chain.clear();
    }
    if (failure.hang) probe_stacks();  // of others it would only delay the restart
  }
  take_stacks(kStackPatienceMs);
  wait_->report.title = fmt::format("{}: generation {} has failed", plan_.recipe.name, failure.generation);
  wait_->report.failure = failure.message;
  write_report();
  report_path_ = wait_->file();
  wait_.reset();
}

void TrainAgent::on_traced(const std::string& path) {
  traced_.emplace_back(path);
  if (static_cast<int64_t>(traced_.size()) == plan_.mesh.world()) finish_trace();
}

/// One file of what the ranks have drawn; of fewer ranks when some died before they could write theirs.
void TrainAgent::finish_trace() {
  if (traced_.empty()) return;
  std::sort(traced_.begin(), traced_.end());
  const fs::path path = trace_dir() / "trace.json";
  const Status merged = telemetry::merge_traces(traced_, saves_, path);
  if (merged.ok()) {
    progress_.say(fmt::format("trace of {} ranks: {} (open it in ui.perfetto.dev)", traced_.size(), path.string()));
    record({{"event", "trace"}, {"path", path.string()}, {"ranks", traced_.size()}});
  } else {
    progress_.say("warning: " + merged.error().message);
  }
  traced_.clear();
}

void TrainAgent::on_step(const telemetry::StepMetrics& reported) {
  telemetry::StepMetrics metrics = reported;
  metrics.time = unix_now();
  metrics.tflops = plan_.flops_per_token() * metrics.tokens_per_s / 1e12;
  if (peak_tflops_ > 0) metrics.mfu = *metrics.tflops / peak_tflops_;
  if (Status written = metrics_->write(metrics); !written.ok()) progress_.say("warning: " + written.error().message);
  if (tensorboard_) {
    if (Status written = tensorboard_->write(metrics); !written.ok())
      progress_.say("warning: " + written.error().message);
  }
  lost_ms_ += metrics.checkpoint_lost_ms;
  last_loss_ = metrics.loss;

  // Steps that the lost generation finished may still be on their way: only those of a new one count.
  if (failed_at_ns_ != 0 && respawned_ && metrics.step > failed_at_step_) {
    const double seconds = static_cast<double>(clock_ns() - failed_at_ns_) / 1e9;
    progress_.say(fmt::format("recovered: {} from the failure to the first new step ({} of it the step)",
                              telemetry::format_duration(seconds), telemetry::format_duration(metrics.step_ms / 1000)));
    record({{"event", "recovered"},
            {"seconds", seconds},
            {"step", metrics.step},
            {"step_seconds", metrics.step_ms / 1000}});
    failed_at_ns_ = 0;
    respawned_ = false;
  }
  if (metrics.step >= last_progress_step_ + 100) {  // far enough from the last failure
    supervisor_->note_progress();
    last_progress_step_ = metrics.step;
  }
  last_step_ = metrics.step;

  const int64_t steps = plan_.steps;
  const double eta = static_cast<double>(steps - metrics.step) * (unix_now() - started_s_) /
                     std::max<double>(1, static_cast<double>(metrics.step - first_step_));
  std::string line =
      fmt::format("step {:>{}}/{}  loss {:.4f}  lr {:.2e}  grad {:.3f}  {} tok/s  {:.1f} ms  ckpt {:.2f} ms",
                  metrics.step, std::to_string(steps).size(), steps, metrics.loss, metrics.lr, metrics.grad_norm,
                  format_count(metrics.tokens_per_s), metrics.step_ms, metrics.checkpoint_lost_ms);
  if (metrics.mfu) line += fmt::format("  mfu {:.1f}%", 100 * *metrics.mfu);
  if (metrics.valid_loss) line += fmt::format("  valid {:.4f}", *metrics.valid_loss);
  if (progress_.terminal()) line += fmt::format("  eta {}", telemetry::format_duration(eta));
  const int64_t every = std::max<int64_t>({1, plan_.recipe.log.every_steps, steps / 40});
  progress_.show(line, metrics.step % every == 0 || metrics.step == steps || metrics.step == first_step_ + 1);
  if (metrics.valid_loss)
    progress_.say(fmt::format("step {}: validation loss {:.4f}", metrics.step, *metrics.valid_loss));

  for (Kill& kill : kills_) {
    if (kill.step != metrics.step) continue;
    kill.step = -1;
    const int64_t pid = view_of(kill.rank).pid;
    if (pid <= 0) continue;  // kill(0) would be this whole process group
    progress_.say(fmt::format("--kill: SIGKILL to rank {} (pid {}) after step {}", kill.rank, pid, metrics.step));
    record({{"event", "kill"}, {"rank", kill.rank}, {"step", metrics.step}});
    failed_at_ns_ = clock_ns();
    failed_at_step_ = metrics.step;
    ::kill(static_cast<pid_t>(pid), SIGKILL);
  }
}

/// "step 30 was not saved: why"
std::string not_saved(const ckpt::PersistEvent& event) {
  const std::string& why = event.status.error().message;
  const std::string what = fmt::format("step {} was not saved: ", event.step);
  return why.starts_with(what) ? why : what + why;
}

/// What of somebody else's checkpoint this run begins with.
void TrainAgent::tell_match(const ckpt::LoadMatch& match, const ckpt::RestoreChoice& choice) {
  for (const std::string& line : ckpt::report_lines(match, plan_.tensors, choice.step)) progress_.say(line);
  json taken = json::array(), anew = json::array(), zero = json::array();
  for (size_t t = 0; t < match.tensors.size(); ++t) {
    const ckpt::TensorMatch& tensor = match.tensors[t];
    const std::string& name = plan_.tensors[t].name;
    if (!tensor.weight) {
      anew.push_back({{"tensor", name}, {"why", tensor.why}});
    } else {
      taken.push_back(name);
      if (!tensor.moments) zero.push_back(name);
    }
  }
  record({{"event", "initialized"},
          {"from", choice.dir.string()},
          {"step", choice.step},
          {"weights_only", match.weights_only},
          {"taken", std::move(taken)},
          {"moments_at_zero", std::move(zero)},
          {"anew", std::move(anew)},
          {"left", match.left}});
}

void TrainAgent::tell_persisted(const ckpt::PersistEvent& event) {
  if (!event.status.ok()) {
    if (event.step == failed_step_) return;  // told already
    failed_step_ = event.step;
    const bool stop = plan_.recipe.checkpoint.on_failure == OnSaveFailure::kStop;
    progress_.say(fmt::format("warning: {}; {}", not_saved(event),
                              stop ? "the run stops, as checkpoint.on_failure says" : "the next save tries again"));
    record({{"event", "save_failed"}, {"step", event.step}, {"message", event.status.error().message}});
    last_persist_ = event.status;
    if (stop && stopped_by_.ok()) {
      Error error = event.status.error();
      if (error.code != ErrorCode::kNoSpace) error.code = ErrorCode::kIo;  // 74, whatever was in the way
      stopped_by_ = std::move(error).with(fmt::format("stopped because step {} was not saved", event.step));
      node_->request_stop();
    }
    return;
  }
  last_persist_ = {};
  if (event.problems.size() > problems_) {  // each save meets the old ones again
    for (const std::string& problem : event.problems) progress_.say("warning: retention: " + problem);
  }
  problems_ = event.problems.size();
  newest_checkpoint_ = event.dir;
  record({{"event", "saved"},
          {"step", event.step},
          {"seconds", event.seconds},
          {"bytes", event.bytes},
          {"pause_ms", event.snapshot_ms},
          {"dir", event.dir.string()},
          {"removed", event.removed}});
  const int64_t saved_ns = clock_ns();
  if (!args_.trace.empty()) {
    saves_.push_back({fmt::format("save step {}", event.step), saved_ns - static_cast<int64_t>(event.seconds * 1e9),
                      saved_ns, event.bytes});
  }
  copies_.saved();
  supervisor_->note_progress();
}

void TrainAgent::take_persist_events() {
  for (const ckpt::PersistEvent& event : node_->take_events()) tell_persisted(event);
}

void TrainAgent::on_failure(const agent::RestartInfo& info, bool restarting, double backoff_s) {
  if (failed_at_ns_ == 0) failed_at_ns_ = clock_ns();
  failed_at_step_ = last_step_;
  respawned_ = false;
  progress_.say(info.failure.message);
  record({{"event", "failure"},
          {"rank", info.failure.rank},
          {"message", info.failure.message},
          {"restarting", restarting},
          {"report", report_path_.string()}});
  if (!report_path_.empty()) progress_.say(fmt::format("where each rank was: {}", report_path_.string()));
  if (restarting) {
    progress_.say(backoff_s > 0
                      ? fmt::format("all ranks stopped; starting again in {}", telemetry::format_duration(backoff_s))
                      : "all ranks stopped; starting again");
  }
}

void TrainAgent::on_stop_requested(int signal) {
  progress_.say(fmt::format("{}: saving at the next step boundary, then leaving; once more leaves at once",
                            signal == SIGINT ? "interrupted" : "asked to stop"));
  record({{"event", "stop_requested"}, {"signal", signal}});
  node_->request_stop();
}

void TrainAgent::close() {
  if (!node_) return;
  if (!concluded_) {
    if (const std::optional<ckpt::PersistEvent> saved = node_->flush()) tell_flushed(*saved);
  }
  node_.reset();
}

void TrainAgent::tell_flushed(const ckpt::PersistEvent& event) {
  if (event.status.ok()) {
    progress_.say(fmt::format("saved step {} from shared memory", event.step));
    tell_persisted(event);
    return;
  }
  node_->keep_memory();
  if (event.step == failed_step_) {  // tried again, and told already
    progress_.say(fmt::format("step {} stays in shared memory, and the next start of this run saves it", event.step));
  } else {
    progress_.say(fmt::format("warning: {}; it stays in shared memory, and the next start of this run saves it",
                              not_saved(event)));
    record({{"event", "save_failed"}, {"step", event.step}, {"message", event.status.error().message}});
  }
  last_persist_ = event.status;
}

Result<int> TrainAgent::conclude(const agent::Outcome& outcome) {
  concluded_ = true;
  finish_trace();
  if (outcome.kind == agent::EndKind::kLeftBySignal) {
    node_->keep_memory();
    progress_.say(
        "left at once; what is not on disk yet stays in shared memory, from where the next start of this run takes it "
        "up");
    return outcome.exit_code;
  }
  const std::optional<ckpt::PersistEvent> saved = node_->flush();
  take_persist_events();  // older than what flush saved
  if (saved) tell_flushed(*saved);
  if (!stopped_by_.ok()) {
    const Error& error = stopped_by_.error();
    if (!newest_checkpoint_.empty()) progress_.say(fmt::format("newest checkpoint: {}", newest_checkpoint_.string()));
    record({{"event", "end"}, {"exit_code", error.exit_code()}, {"message", error.message}});
    return error;
  }
  copies_.finish();
  if (outcome.kind == agent::EndKind::kFailed) {
    progress_.say(fmt::format("failed: {}", outcome.message));
    if (!newest_checkpoint_.empty()) progress_.say(fmt::format("newest checkpoint: {}", newest_checkpoint_.string()));
    record({{"event", "end"}, {"exit_code", outcome.exit_code}, {"message", outcome.message}});
    return outcome.exit_code;
  }
  if (!last_persist_.ok()) return last_persist_.error();
  const double seconds = unix_now() - started_s_;
  const int64_t done = last_step_ - first_step_;
  if (last_step_ < plan_.steps && outcome.stop_signal != 0) {
    progress_.say(fmt::format("stopped after step {} of {}; checkpoint {}; the same command goes on from there",
                              last_step_, plan_.steps, newest_checkpoint_.string()));
  } else if (done == 0) {
    progress_.say(fmt::format("nothing to do: {} is already at step {} of {}", folder_.path().string(), first_step_,
                              plan_.steps));
  } else {
    progress_.say(fmt::format("done: {} steps in {}, loss {:.4f}, {:.1f} steps/s, {:.0f} ms lost to checkpoints; {}",
                              done, telemetry::format_duration(seconds), last_loss_,
                              static_cast<double>(done) / seconds, lost_ms_, newest_checkpoint_.string()));
  }
  record({{"event", "end"}, {"exit_code", 0}, {"step", last_step_}});
  return 0;
}

/// Runs a resolved recipe to its end in `run`.
Result<int> run_agent(const dsl::LoadedRecipe& loaded, const fs::path& run, int64_t world, const TrainArgs& args) {
  ::signal(SIGPIPE, SIG_IGN);  // a dead reader of this output, or a dead copying process, ends no training
  ::signal(SIGXFSZ, SIG_IGN);  // past `ulimit -f` a write fails, and is told with its file; ranks inherit it
  Recipe recipe = loaded.recipe;
  RT_TRY_SET(recipe.init, effective_init(loaded.recipe.init, args.init, run));
  RT_TRY_SET(const Plan plan, make_plan(recipe, world));
  if (!args.trace.empty()) RT_TRY(telemetry::parse_trace_window(args.trace));
  std::vector<Kill> kills;
  for (const std::string& text : args.kills) {
    RT_TRY_SET(const Kill kill, parse_kill(text, world));
    kills.push_back(kill);
  }
  fmt::print("{}: {} parameters on {} ranks ({}), {} steps of {} tokens, checkpoint {} each; run folder {}\n",
             loaded.recipe.name, format_count(static_cast<double>(plan.parameters)), world, plan.mesh.describe(),
             plan.steps, format_count(static_cast<double>(plan.tokens_per_step)), format_bytes(plan.checkpoint_bytes),
             run.string());
  if (args.dry_run) {
    fmt::print("--dry-run: nothing was started; `cairn plan` tells the rest\n");
    return 0;
  }
  std::fflush(stdout);
  init_logging("agent");
  if (args.fresh && fs::exists(run / "checkpoints") && !fs::is_empty(run / "checkpoints")) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--fresh: {} already holds checkpoints; choose another run folder, "
                             "or leave --fresh out to go on from them",
                             run.string())};
  }
  // `ckpt fetch` into a folder that was not there, or a copy by hand: not to be begun anew beside.
  if (recipe.init.path.empty() && !fs::exists(run / "world")) {
    ckpt::PosixBackend io;
    RT_TRY_SET(const ckpt::Names here, ckpt::list_names(io, run));
    RT_TRY_SET(const ckpt::Names below, ckpt::list_names(io, run / "checkpoints"));
    if (below.steps.empty() && !here.steps.empty()) {
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("{} holds {}, and a run keeps its checkpoints in {}: move them there to go on from them, "
                      "or choose another run folder",
                      run.string(), ckpt::step_dir_name(here.steps.back()), (run / "checkpoints").string())};
    }
  }
  RT_TRY_SET(RunFolder folder, RunFolder::open(run, loaded.recipe.name));
  if (!folder.copied_from().empty()) {
    fmt::print("a copy of {}: a run of its own from here on, which goes on from the checkpoints in it\n",
               folder.copied_from());
  }
  RT_TRY(write_text_file(run / "world", std::to_string(world)));  // first: a recipe without it is no training's
  RT_TRY_SET(const bool changed, folder.write_recipe(loaded));
  if (changed) fmt::print("the recipe differs from the one this run had; it goes on with the new one\n");
  std::fflush(stdout);

  TrainAgent agent(plan, folder, args, std::move(kills));
  RT_TRY(agent.prepare_copies());  // may take long, and a signal just ends it: the next start goes on
  RT_TRY(folder.settle());
  const SystemClock clock;
  const RestartConfig& restart = loaded.recipe.restart;
  // Blocks the stop signals before the persist thread starts.
  RT_TRY_SET(const std::unique_ptr<agent::Supervisor> supervisor,
             agent::Supervisor::make({.restart = {restart.max_restarts, restart.backoff_s},
                                      .tick_ms = 200,
                                      // Twice the ranks' own deadline: they know more and speak first.
                                      .hang_deadline_ms = static_cast<int64_t>(2000 * restart.deadline_s)},
                                     agent, clock));
  agent.use(*supervisor);
  if (Status opened = agent.open(loaded, loaded.recipe.name); !opened.ok()) {
    agent.close();  // saves what adopted memory holds, and ends the thread that wakes the supervisor
    return std::move(opened).error();
  }
  const Result<agent::Outcome> outcome = supervisor->run();
  Result<int> code = outcome.ok() ? agent.conclude(outcome.value()) : Result<int>(outcome.error());
  agent.close();
  return code;
}

Result<int> train(TrainArgs args, bool json_errors) {
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(const int refused, load_or_tell(args.recipe, args.nproc, json_errors, &loaded));
  if (refused != 0) return refused;
  const MeshConfig& mesh = loaded.recipe.mesh;
  const int64_t world = args.nproc > 0 ? args.nproc : wanted_world(mesh);
  return run_agent(loaded, args.run.empty() ? fs::path("runs") / loaded.recipe.name : fs::path(args.run), world, args);
}

/// The recipe stored with the run, its newest complete checkpoint, any world size.
Result<int> resume(const TrainArgs& args) {
  RT_TRY_SET(dsl::LoadedRecipe loaded, [&]() -> Result<dsl::LoadedRecipe> {
    dsl::LoadedRecipe out;
    RT_TRY_SET(out.canonical_json, recipe_of_run(args.run));
    Result<Recipe> decoded = dsl::decode_recipe(out.canonical_json);
    if (!decoded.ok()) return std::move(decoded).error().with(args.run + "/recipe.resolved.json");
    out.recipe = std::move(decoded).value();
    return out;
  }());
  MeshConfig& mesh = loaded.recipe.mesh;
  const int64_t before = wanted_world(mesh);
  // A mesh without dp takes what remains of the world; the run folder knows how many ranks that last were.
  const Result<std::string> stored = read_text_file(fs::path(args.run) / "world");
  if (!stored.ok()) {  // every training writes `world` before it starts; reshard and average do not
    ckpt::PosixBackend io;
    RT_TRY_SET(const ckpt::Names names, ckpt::list_names(io, fs::path(args.run) / "checkpoints"));
    if (names.steps.empty()) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}: nothing was trained there and it has no checkpoint; a `cairn ckpt reshard` or "
                               "`average` into it was cut off: give that command again",
                               args.run)};
    }
  }
  const int64_t last = mesh.dp == 0 && stored.ok() ? std::atoll(stored.value().c_str()) : before;
  const int64_t world = args.nproc > 0 ? args.nproc : std::max(before, last);
  if (world != before) mesh.dp = 0;
  const std::vector<dsl::Diagnostic> problems = dsl::check_recipe(loaded.recipe, world);
  if (!problems.empty()) {
    std::fputs(dsl::to_text(problems).c_str(), stderr);
    return kRefused;
  }
  loaded.canonical_json = dsl::encode_recipe(loaded.recipe);
  loaded.hash_hex = dsl::recipe_hash(loaded.canonical_json);
  return run_agent(loaded, args.run, world, args);
}

void add_run_options(CLI::App& command, TrainArgs& args) {
  command
      .add_option("--nproc", args.nproc, "rank processes on this machine (default: what the recipe's mesh asks for)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  command.add_option("--threads", args.threads, "compute threads a rank (default: cores / ranks, at least 1)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, int64_t{1024}));
  command
      .add_option("--kill", args.kills,
                  "RANK@STEP: SIGKILL that rank after that step, to see the run recover; repeatable")
      ->type_name("RANK@STEP")
      ->expected(1)
      ->take_all();
  command
      .add_option("--trace", args.trace,
                  "steps=A..B: draw these steps as a timeline, RUN/trace/trace.json, for ui.perfetto.dev")
      ->type_name("steps=A..B");
  command
      .add_option("--peak-tflops", args.peak_tflops,
                  "peak of a rank's device, for the model FLOP utilisation (default: this machine's of `cairn plan "
                  "--calibrate`)")
      ->check(CLI::PositiveNumber);
  command.add_flag("--dry-run", args.dry_run, "check and plan; start nothing");
}

}  // namespace

void add_train(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("train", "train a recipe; goes on where the run folder's newest checkpoint stands");
  const auto args = std::make_shared<TrainArgs>();
  add_recipe_options(*command, args->recipe);
  command->add_option("--run", args->run, "the run folder (default: runs/NAME)")->type_name("DIR");
  add_init_options(*command, args->init);
  command->add_flag("--fresh", args->fresh, "refuse a run folder that already holds checkpoints");
  add_run_options(*command, *args);
  add_json_flag(*command, session);
  command->callback([args, &session] { session.action = [args, &session] { return train(*args, session.json); }; });
}

void add_resume(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("resume", "go on with a run: its stored recipe, its newest checkpoint, any world size");
  const auto args = std::make_shared<TrainArgs>();
  command->add_option("RUN", args->run, "the run folder")->required();
  add_run_options(*command, *args);
  command->callback([args, &session] { session.action = [args] { return resume(*args); }; });
}

}  // namespace cairn::tools
