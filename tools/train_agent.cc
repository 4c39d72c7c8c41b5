#include "tools/train_agent.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "ckpt/persist/save.h"
#include "ckpt/position.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/start_state.h"
#include "ckpt/store/posix_backend.h"
#include "dsl/dsl.h"
#include "runtime/core/log.h"
#include "runtime/trainer/trainer.h"
#include "tools/planner/calibration.h"
#include "tools/commands.h"
#include "tools/hf_start.h"
#include "tools/init_options.h"
#include "tools/start_check.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kBoundaryPatienceNs = 5'000'000'000;  // a sixth of Kubernetes' default grace

double unix_now() { return SystemClock().unix_s(); }
int64_t clock_ns() { return SystemClock().now_ns(); }

/// "step 30 was not saved: why"
std::string not_saved(const ckpt::PersistEvent& event) {
  const std::string& why = event.status.error().message;
  const std::string what = fmt::format("step {} was not saved: ", event.step);
  return why.starts_with(what) ? why : what + why;
}

}  // namespace

TrainAgent::TrainAgent(const Plan& plan, RunFolder& folder, RunCopies& copies, RunStart& start,
                       TrainAgentOptions options)
    : plan_(plan),
      folder_(folder),
      start_(start),
      options_(std::move(options)),
      progress_(STDOUT_FILENO),
      copies_(copies),
      waits_(folder.path(), plan.recipe.name, plan.recipe.restart.deadline_s, callbacks()),
      requests_(folder.path(), options_.requests, callbacks()) {}

RunCallbacks TrainAgent::callbacks() {
  return {.say = [this](const std::string& text) { progress_.say(text); },
          .record = [this](const json& event) { record(event); }};
}

Status TrainAgent::open() {
  const dsl::LoadedRecipe& loaded = start_.remaining;
  RT_TRY_SET(metrics_, telemetry::MetricsWriter::open(folder_.path() / "metrics.jsonl", folder_.id()));
  ckpt::NodeOptions options{.checkpoints_dir = folder_.checkpoints(),
                            .run = {.run_name = loaded.recipe.name,
                                    .run_id = folder_.id(),
                                    .recipe_json = loaded.canonical_json,
                                    .recipe_hash = loaded.hash_hex,
                                    .lineage = start_.lineage_head()},
                            .from_step = options_.from_step,
                            .resume = !options_.fresh,
                            .check_owner = [this] { return check_owner(); },
                            .stop = [this] { return stop_asked(); },
                            .leave = [this] { return supervisor_->leave_signal() != 0; },
                            .before_save =
                                [this](int64_t step, std::span<const std::string> news) {
                                  const Status complete = metrics_->complete(step, news);
                                  if (!complete.ok()) spdlog::warn("metrics.jsonl: {}", complete.error().message);
                                },
                            .on_persisted =
                                [this] {
                                  if (supervisor_ != nullptr) supervisor_->wake();
                                }};
  if (options_.peak_tflops > 0) {
    peak_tflops_ = options_.peak_tflops * static_cast<double>(plan_.mesh.world());
  } else if (const auto calibration = load_calibration(); calibration.ok() && calibration.value()) {
    peak_tflops_ = calibration.value()->peak_tflops(plan_.recipe.precision);  // all ranks share this machine
  }
  if (!plan_.recipe.init.path.empty()) {
    options.init_from = plan_.recipe.init.path;
    options.open_foreign = open_hf_for(plan_.recipe.model);
  }
  if (!options_.fresh && start_.verdict.segment.index == 0) RT_TRY(check_nothing_lost(folder_.path()));
  requests_.set_limit(plan_.checkpoint_bytes);
  std::vector<std::string> notices;
  RT_TRY_SET(node_, ckpt::CheckpointNode::open(plan_, std::move(options), &notices));
  for (const std::string& notice : notices) progress_.say(notice);
  RT_TRY_SET(events_, telemetry::LineFile::open(folder_.path() / "events.jsonl"));
  copies_.report_to(callbacks());
  requests_.open();
  requests_.pass_on(*node_, 0);
  return {};
}

void TrainAgent::record(json event) {
  event["time"] = unix_now();
  const Status written = events_.append(event.dump(-1, ' ', false, json::error_handler_t::replace));
  if (!written.ok()) spdlog::warn("{}", written.error().message);
}

/// That the run is this agent's. If not, it ends: by the supervisor, whichever thread finds it out.
Status TrainAgent::check_owner() {
  Status mine = folder_.check_held();
  if (!mine.ok() && mine.error().code == ErrorCode::kUnavailable) supervisor_->abandon(mine.error());
  return mine;
}

Result<std::vector<agent::ChildSpec>> TrainAgent::prepare_generation(int64_t generation) {
  const int64_t world = plan_.mesh.world();
  if (is_gone(folder_.path())) {
    return Error{ErrorCode::kIo, fmt::format("{}: {}", folder_.path().string(), ckpt::kFolderGone), ENOENT};
  }
  ignore(check_owner(), "what cannot be told now does not end a run that memory holds");
  if (const std::optional<Error> lost = supervisor_->abandoned()) return *lost;
  const Result<ckpt::RestoreChoice> chosen = node_->begin_incarnation();
  if (!chosen.ok() && stop_asked()) {
    return Error{ErrorCode::kStopped, "asked to stop while a checkpoint was being loaded; the same command resumes"};
  }
  if (!chosen.ok()) return chosen.error();
  const ckpt::RestoreChoice& choice = chosen.value();
  RT_TRY(check_place(choice));
  if (generation == 0) {
    RT_TRY(write_start());
    copies_.start();  // they read the recipe
  }
  for (const std::string& warning : choice.warnings) progress_.say("warning: " + warning);
  if (std::exchange(options_.from_step, std::nullopt)) {
    const std::vector<int64_t>& abandoned = node_->abandoned();
    record({{"event", "back_to"}, {"step", choice.step}, {"abandoned", abandoned}});
    if (!abandoned.empty())
      progress_.say(fmt::format("back to step {}: {} later step{} moved to {}", choice.step, abandoned.size(),
                                abandoned.size() == 1 ? "" : "s", (folder_.path() / "abandoned").string()));
  }
  take_persist_events();           // of saves that have ended meanwhile
  if (choice.step < told_step_) {  // the line that those were of is left
    told_step_ = choice.step;
    last_persist_ = {};
  }
  saved_step_ = std::min(saved_step_, choice.step);
  std::string from = "a fresh start";
  if (choice.source == ckpt::arena::Source::kMemory) from = fmt::format("step {} in shared memory", choice.step);
  if (choice.source == ckpt::arena::Source::kDisk) from = fmt::format("{}", choice.dir.string());
  if (generation > 0 || choice.source != ckpt::arena::Source::kFresh) progress_.say("from " + from);
  if (generation == 0 && choice.source == ckpt::arena::Source::kMemory && options_.init_on_command_line) {
    progress_.say("--init-from is for a new run; this one resumes from its memory (another --run begins anew)");
  }
  if (choice.source == ckpt::arena::Source::kDisk && !choice.match) loaded_ = choice.dir;
  json start{{"event", "start"},
             {"generation", generation},
             {"step", choice.step},
             {"from", from},
             {"source", choice.source == ckpt::arena::Source::kMemory ? "memory"
                        : choice.source == ckpt::arena::Source::kDisk ? "disk"
                                                                      : "fresh"},
             {"world", world},
             {"mesh", plan_.mesh.describe()},
             {"steps", plan_.steps},
             {"host", ckpt::this_writer().host},
             {"pid", static_cast<int64_t>(::getpid())}};
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
  // A full disk is no reason to end a run that memory holds.
  const auto tell = [&](const Status& written, bool& failed) -> Status {
    if (generation == 0) return written;
    tell_written(written, failed);
    return {};
  };
  // A kill may have come between these steps and the news of them.
  RT_TRY(tell(metrics_->catch_up(choice.metrics), metrics_failed_));
  RT_TRY(tell(metrics_->resumed(choice.step), metrics_failed_));
  if (plan_.recipe.log.tensorboard) {
    tensorboard_.reset();
    Result<telemetry::TensorBoardWriter> opened =
        telemetry::TensorBoardWriter::open(folder_.path() / "tensorboard", unix_now(), choice.step + 1);
    if (opened.ok()) {
      tensorboard_ = std::move(opened).value();
    } else {
      RT_TRY(tell(opened.error(), tensorboard_failed_));
    }
  }

  RT_TRY_SET(world_, comm::ShmWorld::create(trainer::world_config(plan_)));
  RT_TRY_SET(memory_, node_->arena().descriptor());

  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  const std::string threads =
      std::to_string(options_.threads > 0 ? options_.threads : std::max<int64_t>(1, cores / world));
  std::vector<agent::ChildSpec> specs;
  for (int64_t rank = 0; rank < world; ++rank) {
    specs.push_back({.argv = {"/proc/self/exe", "_rank",
                              "--recipe",       segment_recipe(folder_, start_).string(),
                              "--past",         ckpt::encode_past(plan_.past),
                              "--end-step",     std::to_string(plan_.end_step),
                              "--arena-fd",     std::to_string(memory_.get()),
                              "--rank",         std::to_string(rank),
                              "--world",        std::to_string(world),
                              "--incarnation",  std::to_string(choice.incarnation),
                              "--comm-fd",      std::to_string(world_->fd()),
                              "--init",         init_to_json(plan_.recipe.init)},
                     // Passive: a thread that waits must not take the core of a rank that works.
                     .env = {{"OMP_NUM_THREADS", threads}, {"OMP_WAIT_POLICY", "passive"}, {"OMP_PROC_BIND", "false"}},
                     .inherit_fds = {world_->fd(), memory_.get()},
                     .log_path = folder_.log_of(rank).string()});
    if (!options_.trace.empty()) {
      for (const std::string& word :
           {std::string("--trace"), options_.trace, std::string("--trace-dir"), trace_dir().string()}) {
        specs.back().argv.push_back(word);
      }
    }
  }
  if (!options_.trace.empty()) {
    traced_.clear();
    std::error_code problem;
    fs::create_directories(trace_dir(), problem);
    if (problem) return os_error(problem.value(), trace_dir().string());
  }
  return specs;
}

/// Whether the plan is of the position that ranks go on from. The start's own, and any that this segment led to, is.
Status TrainAgent::check_place(const ckpt::RestoreChoice& choice) {
  RT_TRY_SET(const trainer::TrainPosition position, node_->decided_position());
  const trainer::TrainPosition& judged = start_.verdict.state.position;
  if (position.step == judged.step && position.samples == judged.samples && position.past == judged.past) return {};
  if (choice.source == ckpt::arena::Source::kMemory && position.past == plan_.past) return {};  // trained by this agent
  ckpt::StartState state{.position = position, .recipe = start_.remaining.canonical_json};
  if (choice.source == ckpt::arena::Source::kDisk && !choice.foreign) {
    ckpt::PosixBackend io;
    RT_TRY_SET(state, ckpt::state_in(io, choice.dir).with(choice.dir.string()));
  } else if (choice.source == ckpt::arena::Source::kMemory) {
    state.source = ckpt::StartState::Source::kMemory;
    state.mesh = start_.verdict.state.mesh;
    state.place = node_->arena().name();
  }
  RT_TRY_SET(const Recipe before, dsl::decode_recipe(state.recipe));
  RT_TRY_SET(const Segment segment, segment_at(start_.request.recipe, position, &before));
  if (segment.past == plan_.past && segment.end_step == plan_.end_step &&
      segment.index == start_.verdict.segment.index) {
    return {};
  }
  elsewhere_ = std::move(state);
  return Error{ErrorCode::kUnavailable,
               fmt::format("resumes from step {}, which is in another segment", position.step)};
}

/// What this start is, once the state that it goes on from has been read: until then it may still be refused.
Status TrainAgent::write_start() {
  const StartVerdict& verdict = start_.verdict;
  RT_TRY(begin_segment(folder_, start_));
  if (verdict.finished) return {};  // the folder keeps the recipe that trained it
  RT_TRY(folder_.write_recipe(start_.whole));
  for (const FieldVerdict& one : verdict.changes) {
    // Other stages ahead begin no segment.
    if (one.change == dsl::ChangeClass::kExact || (!start_.begins && one.field != "stages")) continue;
    progress_.say(one.text());
    record({{"event", "recipe_changed"},
            {"step", verdict.state.step()},
            {"field", one.field},
            {"old", one.before},
            {"new", one.after},
            {"rule", one.says},
            {"accepted", one.change == dsl::ChangeClass::kAccept}});
  }
  return {};
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

void TrainAgent::watch_memory() {
  if (told_nameless_ || !node_->arena().is_nameless()) return;
  told_nameless_ = true;
  progress_.say(
      fmt::format("warning: {} was removed, by hand or by systemd as its user logged out (RemoveIPC): training "
                  "continues, but after a kill of this process the run resumes from its last checkpoint on disk",
                  node_->arena().name()));
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

/// Told once until it goes again: a disk may stay full for many steps.
void TrainAgent::tell_written(const Status& written, bool& failed) {
  if (!written.ok() && !failed) progress_.say("warning: " + written.error().message);
  failed = !written.ok();
}

void TrainAgent::on_step(const telemetry::StepMetrics& reported) {
  telemetry::StepMetrics metrics = reported;
  metrics.time = unix_now();
  const StepStage& phase = plan_.step_stages[stage_of_step(plan_.step_stages, metrics.step)];
  metrics.tflops = plan_.flops_per_token(phase.tokens) * metrics.tokens_per_s / 1e12;
  if (peak_tflops_ > 0) metrics.mfu = *metrics.tflops / peak_tflops_;
  tell_written(metrics_->write(metrics), metrics_failed_);
  if (tensorboard_) tell_written(tensorboard_->write(metrics), tensorboard_failed_);
  requests_.step_took(metrics.step_ms / 1000);
  lost_ms_ += metrics.checkpoint_lost_ms;
  last_loss_ = metrics.loss;
  last_metrics_ = metrics;
  if (metrics.valid_loss) last_valid_loss_ = metrics.valid_loss;
  node_->note_step(metrics);

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
  if (metrics.valid_loss) {
    std::string sources;
    for (const auto& [name, loss] : metrics.valid_source_loss)
      sources += fmt::format("{}{} {:.4f}", sources.empty() ? " (" : ", ", printable(name), loss);
    if (plan_.recipe.data.sources.size() < 2) sources.clear();
    progress_.say(fmt::format("step {}: validation loss {:.4f}{}{}", metrics.step, *metrics.valid_loss, sources,
                              sources.empty() ? "" : ")"));
  }

  for (Kill& kill : options_.kills) {
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

/// Saves may end in any order (checkpoint.in_flight): what counts, for the end too, is what came of the newest step.
void TrainAgent::tell_persisted(const ckpt::PersistEvent& event) {
  requests_.save_ended(event);
  const bool overtaken = event.step <= saved_step_;
  const bool newest = event.step >= told_step_;
  if (newest) told_step_ = event.step;
  if (!event.status.ok()) {
    if (event.step == failed_step_) return;  // told already
    failed_step_ = event.step;
    const bool stop = plan_.recipe.checkpoint.on_failure == OnSaveFailure::kStop && !overtaken;
    progress_.say(fmt::format("warning: {}; {}", not_saved(event),
                              overtaken ? fmt::format("step {} is on disk", saved_step_)
                              : stop    ? "the run stops, as checkpoint.on_failure says"
                                        : "the next save tries again"));
    record({{"event", "save_failed"}, {"step", event.step}, {"message", event.status.error().message}});
    if (newest && !overtaken) last_persist_ = event.status;
    if (stop && stopped_by_.ok()) {
      Error error = event.status.error();
      if (error.code != ErrorCode::kNoSpace) error.code = ErrorCode::kIo;  // 74, whatever was in the way
      stopped_by_ = std::move(error).with(fmt::format("stopped because step {} was not saved", event.step));
      node_->request_stop();
    }
    return;
  }
  if (newest) last_persist_ = {};
  if (event.problems.size() > problems_) {  // each save meets the old ones again
    for (const std::string& problem : event.problems) progress_.say("warning: retention: " + problem);
  }
  problems_ = event.problems.size();
  if (!overtaken) {
    newest_checkpoint_ = event.dir;
    saved_step_ = event.step;
  }
  record({{"event", "saved"},
          {"step", event.step},
          {"seconds", event.seconds},
          {"bytes", event.bytes},
          {"reused_files", event.reused_files},
          {"pause_ms", event.snapshot_ms},
          {"dir", event.dir.string()},
          {"asked", event.asked != 0},
          {"removed", event.removed}});
  if (event.asked != 0) progress_.say(fmt::format("saved step {}, as asked: {}", event.step, event.dir.string()));
  const int64_t saved_ns = clock_ns();
  if (!options_.trace.empty()) {
    saves_.push_back({fmt::format("save step {}", event.step), saved_ns - static_cast<int64_t>(event.seconds * 1e9),
                      saved_ns, event.bytes});
  }
  copies_.saved();
  supervisor_->note_progress();
}

void TrainAgent::take_persist_events() {
  if (supervisor_->abandoned()) return;  // events.jsonl is another one's
  for (const ckpt::PersistEvent& event : node_->take_events()) tell_persisted(event);
}

void TrainAgent::on_failure(const agent::RestartInfo& info, bool restarting, double backoff_s) {
  if (failed_at_ns_ == 0) failed_at_ns_ = clock_ns();
  failed_at_step_ = last_step_;
  respawned_ = false;
  last_failure_ = info.failure.message;
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
  std::string why, by = requests_.stop_by(&why);
  if (by.empty()) by = signal_name(signal);
  if (!why.empty()) by += ": " + why;
  progress_.say(
      fmt::format("{} ({}): saving at the next step boundary, then leaving; Ctrl-C (SIGINT) from a second on leaves at "
                  "once",
                  signal == SIGINT ? "interrupted" : "asked to stop", by));
  record({{"event", "stop_requested"}, {"signal", signal}, {"by", by}});
  node_->request_stop();
  stop_asked_ns_ = clock_ns();
}

void TrainAgent::on_signal(int signal) {
  if (signal == SIGQUIT) return waits_.ask(world_ ? &*world_ : nullptr, signal_name(signal));
  requests_.ask_save(*node_, signal_name(signal));
}

/// From any thread: a checkpoint that is being loaded keeps the supervisor's.
bool TrainAgent::stop_asked() {
  if (requests_.stop_now()) supervisor_->ask_stop();
  return supervisor_->stop_asked();
}

void TrainAgent::watch_requests() {
  if (supervisor_->abandoned()) return;  // the folder is another one's
  if (requests_.stop_now()) supervisor_->ask_stop();
  requests_.pass_on(*node_, last_step_);
}

/// A step or a validation may take longer than whoever asked for the stop grants, and a rank may hang.
void TrainAgent::watch_stop() {
  if (stop_asked_ns_ == 0 || clock_ns() - stop_asked_ns_ < kBoundaryPatienceNs) return;
  stop_asked_ns_ = 0;
  if (const std::optional<int64_t> step = node_->promise_newest()) {
    progress_.say(fmt::format("no step boundary in {} s: saving step {}, the newest in memory, meanwhile",
                              kBoundaryPatienceNs / 1'000'000'000, *step));
  }
}

json TrainAgent::summary(const Result<int>& code) {
  const auto number = [](const std::optional<double>& value) { return value ? json(*value) : json(); };
  const bool stepped = last_metrics_.step > 0;
  const int64_t done = stepped ? last_metrics_.step : std::max<int64_t>(first_step_, 0);
  const bool stopped = done < plan_.steps && supervisor_->stop_asked();
  const std::string why = !code.ok()            ? std::string(error_code_name(code.error().code))
                          : code.value() >= 128 ? "signal"
                          : stopped             ? "stopped"
                          : code.value() != 0   ? "failed"
                          : !stepped            ? "nothing_to_do"
                                                : "done";
  const std::string message = !code.ok() ? code.error().message : why == "failed" ? last_failure_ : std::string();
  const fs::path& checkpoint = newest_checkpoint_.empty() ? loaded_ : newest_checkpoint_;
  return {{"run", folder_.path().string()},
          {"why", why},
          {"message", message},
          {"first_step", std::max<int64_t>(first_step_, 0)},
          {"step", done},
          {"of", plan_.steps},
          {"samples", stepped ? json(last_metrics_.samples) : json()},
          {"tokens", stepped ? json(last_metrics_.tokens) : json()},
          {"loss", stepped ? json(last_metrics_.loss) : json()},
          {"valid_loss", number(last_valid_loss_)},
          {"checkpoint", checkpoint.empty() ? json() : json(checkpoint.string())},
          {"seconds", unix_now() - started_s_}};
}

void TrainAgent::close() {
  if (!node_) return;
  if (!concluded_) flush();
  if (supervisor_->abandoned()) node_->keep_memory();
  node_.reset();
}

void TrainAgent::flush() {
  if (supervisor_->abandoned()) return;
  const std::optional<ckpt::PersistEvent> saved = node_->flush();
  if (supervisor_->abandoned()) return;
  if (supervisor_->leave_signal() != 0) return leave();
  const bool done = saved && saved->status.ok();
  if (done) tell_flushed(*saved);  // first: the others are older, and judged by it
  take_persist_events();
  if (saved && !done) tell_flushed(*saved);
}

void TrainAgent::leave() {
  node_->keep_memory();
  progress_.say(
      "left at once; what is not on disk yet stays in shared memory, from where the next start of this run takes it "
      "up");
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

std::string TrainAgent::way_back() const {
  ckpt::PosixBackend io;
  const Result<ckpt::Catalog> catalog = ckpt::list_checkpoints(io, folder_.checkpoints());
  if (!catalog.ok()) return "which checkpoints are good is not known: " + catalog.error().message;
  int64_t good = -1, usable = -1;
  for (const ckpt::CheckpointInfo& info : catalog.value().checkpoints) {
    if (!info.complete || info.bad()) continue;
    usable = info.step;
    if (info.label == ckpt::Label::kGood) good = info.step;
  }
  if (usable < 0)
    return "No checkpoint is left that is not bad: begin anew in another folder (--run), with a lower rate";
  const int64_t step = good >= 0 ? good : usable;
  return fmt::format(
      "{}: step {}. \"cairn train ... --run {} --from-step {} --set optimizer.peak_lr=...\" goes back to it "
      "with another rate",
      good >= 0 ? "Newest good" : "None is proved good; the newest that is not bad", step, folder_.path().string(),
      step);
}

Result<int> TrainAgent::conclude(const agent::Outcome& outcome) {
  concluded_ = true;
  finish_trace();
  if (outcome.kind == agent::EndKind::kLeftBySignal) {
    leave();
    return outcome.exit_code;
  }
  flush();
  if (const std::optional<Error> lost = supervisor_->abandoned()) return *lost;
  if (const int signal = supervisor_->leave_signal(); signal != 0) return 128 + signal;
  if (!stopped_by_.ok()) {
    const Error& error = stopped_by_.error();
    if (!newest_checkpoint_.empty()) progress_.say(fmt::format("newest checkpoint: {}", newest_checkpoint_.string()));
    record({{"event", "end"}, {"exit_code", error.exit_code()}, {"message", error.message}});
    return error;
  }
  const bool at_stage = start_.verdict.segment.stage_follows && last_step_ == plan_.end_step;
  if (at_stage && outcome.kind == agent::EndKind::kFinished && outcome.stop_signal == 0 && last_persist_.ok() &&
      !requests_.stop_due(last_step_)) {
    stage_follows_ = true;
    progress_.say(fmt::format("step {}: stage {} of the recipe begins", last_step_, start_.verdict.segment.index + 1));
    record({{"event", "stage"}, {"step", last_step_}, {"stage", start_.verdict.segment.index + 1}});
    return 0;
  }
  requests_.ended(outcome.kind == agent::EndKind::kFinished, last_persist_.ok());
  copies_.finish(options_.requests.stop_signals(), [this] { return requests_.out_of_time(); });
  if (outcome.kind == agent::EndKind::kFailed) {
    progress_.say(fmt::format("failed: {}", outcome.message));
    const bool guard = outcome.exit_code == Error{ErrorCode::kGuard, ""}.exit_code();
    if (guard) {
      if (const Status labelled = node_->condemn_from_onset(); !labelled.ok())
        progress_.say("warning: " + labelled.error().message);
    }
    if (!newest_checkpoint_.empty() && !guard)
      progress_.say(fmt::format("newest checkpoint: {}", newest_checkpoint_.string()));
    json end{{"event", "end"}, {"exit_code", outcome.exit_code}, {"message", outcome.message}};
    if (guard) end["way_back"] = way_back();
    record(end);
    if (guard) progress_.say(end["way_back"].get<std::string>());
    return outcome.exit_code;
  }
  if (!last_persist_.ok()) return last_persist_.error();
  const double seconds = unix_now() - started_s_;
  const int64_t done = last_step_ - first_step_;
  const bool stopped = (last_step_ < plan_.steps || at_stage) && (outcome.stop_signal != 0 || requests_.stop_planned());
  const int code = stopped ? options_.requests.exit_when_unfinished : 0;
  if (stopped) {
    progress_.say(fmt::format("stopped after step {} of {}; checkpoint {}; the same command resumes from there",
                              last_step_, plan_.steps, newest_checkpoint_.string()));
  } else if (done == 0) {
    progress_.say(fmt::format("nothing to do: {} is already at step {} of {}", folder_.path().string(), first_step_,
                              plan_.steps));
  } else {
    progress_.say(fmt::format("done: {} steps in {}, loss {:.4f}, {:.1f} steps/s, {:.0f} ms lost to checkpoints; {}",
                              done, telemetry::format_duration(seconds), last_loss_,
                              static_cast<double>(done) / seconds, lost_ms_, newest_checkpoint_.string()));
  }
  record({{"event", "end"}, {"exit_code", code}, {"step", last_step_}});
  return code;
}

}  // namespace cairn::tools
