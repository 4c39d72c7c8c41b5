#include "tools/run/agent/narrator.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "ckpt/persist/save.h"
#include "ckpt/plan/partial.h"
#include "runtime/config/metric_name.h"
#include "runtime/core/count_text.h"
#include "runtime/core/log.h"
#include "runtime/core/units.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/kernel_times.h"
#include "tools/run/folder/failure_record.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/text.h"

namespace cairn::tools {

namespace fs = std::filesystem;
using ckpt::arena::Source;
using nlohmann::json;

namespace {

/// Between two lines of steps in a log: in the first seconds of a start, and after its first minute.
constexpr int64_t kFirstLineNs = 2'000'000'000, kLineNs = 60'000'000'000;

}  // namespace

const Clock& Narrator::system_clock() {
  static const SystemClock clock;
  return clock;
}

Narrator::Narrator(const Plan& plan, fs::path run, NarratorOptions options, const Clock& clock)
    : plan_(plan), run_(std::move(run)), options_(std::move(options)), clock_(clock), console_(options.console) {
  began_unix_s_ = clock_.unix_s();
  if (options_.run_end.step == 0) options_.run_end = RunClock(plan_.recipe, plan_.past).at(plan_.steps);
  if (options_.before) progress_ = *options_.before;
  if (!options_.before) progress_.started_unix_s = began_unix_s_;
  started_ns_ = lined_ns_ = clock_.now_ns();
}

Status Narrator::open_metrics(const std::string& run_id) {
  RT_TRY_SET(metrics_, telemetry::MetricsWriter::open(run_ / "metrics.jsonl", run_id));
  return {};
}

Status Narrator::open_events() {
  RT_TRY_SET(events_, telemetry::LineFile::open(run_ / "events.jsonl"));
  events_opened_ = true;
  return {};
}

RunCallbacks Narrator::callbacks() {
  return {.say = [this](const std::string& text) { say(text); },
          .record = [this](const json& event) { record(event); }};
}

void Narrator::record(json event) {
  if (!events_opened_ || !may_write()) return;
  event["time"] = clock_.unix_s();
  const Status written = events_.append(json_text(event));
  if (!written.ok()) spdlog::warn("{}", written.error().message);
  if (options_.heard) options_.heard(event, progress_.last_step);
}

void Narrator::complete(int64_t step, std::span<const std::string> news) {
  if (!may_write()) return;  // the save finds it out as well
  const Status complete = metrics_->complete(step, news);
  if (!complete.ok()) spdlog::warn("metrics.jsonl: {}", complete.error().message);
}

Status Narrator::begins(int64_t generation, const ckpt::RestoreChoice& choice, kernels::GemmIsa isa) {
  std::string from = "a fresh start";
  if (choice.source == Source::kMemory) from = fmt::format("step {} in shared memory", choice.step);
  if (choice.source == Source::kDisk) from = fmt::format("{}", choice.dir.string());
  if (generation > 0 || choice.source != Source::kFresh) say("from " + from);
  if (generation == 0 && choice.source == Source::kMemory && options_.init_on_command_line) {
    say("--init-from is for a new run; this one resumes from its memory (another --run begins anew)");
  }
  if (choice.source == Source::kDisk && !choice.match) loaded_ = choice.dir;
  json start{{"event", "start"},
             {"generation", generation},
             {"step", choice.step},
             {"from", from},
             {"source", choice.source == Source::kMemory ? "memory"
                        : choice.source == Source::kDisk ? "disk"
                                                         : "fresh"},
             {"world", plan_.mesh.world()},
             {"mesh", plan_.mesh.describe()},
             {"steps", run_steps()},
             {"isa", kernels::gemm_isa_name(isa)},
             {"host", ckpt::this_writer().host},
             {"pid", static_cast<int64_t>(::getpid())}};
  if (!options_.communication.is_null()) start["communication"] = options_.communication;
  if (!options_.attention.is_null()) start["attention"] = options_.attention;
  if (choice.read.wanted_bytes > 0) {
    start["needed_bytes"] = choice.read.wanted_bytes;
    start["read_bytes"] = choice.read.read_bytes;
    if (static_cast<double>(choice.read.read_bytes) > 1.02 * static_cast<double>(choice.read.wanted_bytes)) {
      say(
          fmt::format("{} read of the checkpoint for {} that were needed: what lies between small tensors is "
                      "read along, which is faster than leaving it out",
                      format_bytes(choice.read.read_bytes), format_bytes(choice.read.wanted_bytes)));
    }
  }
  record(std::move(start));
  if (choice.match) tell_match(*choice.match, choice);

  if (!began_) {
    began_ = RunClock(plan_.recipe, plan_.past).at(choice.step);
    progress_.last_step = choice.step;
    if (progress_.first_step < 0) progress_.first_step = choice.step;
  }
  const auto tell = [&](const Status& written, bool& failed) -> Status {
    if (generation == 0) return written;
    tell_written(written, failed);
    return {};
  };
  // A kill may have come between these steps and the news of them.
  RT_TRY(tell(metrics_->catch_up(choice.metrics), metrics_failed_));
  RT_TRY(tell(metrics_->resumed(choice.step), metrics_failed_));
  if (!plan_.recipe.log.tensorboard) return {};
  tensorboard_.reset();
  Result<telemetry::TensorBoardWriter> opened =
      telemetry::TensorBoardWriter::open(run_ / "tensorboard", clock_.unix_s(), choice.step + 1);
  if (!opened.ok()) return tell(opened.error(), tensorboard_failed_);
  tensorboard_ = std::move(opened).value();
  return {};
}

/// What of somebody else's checkpoint this run begins with.
void Narrator::tell_match(const ckpt::LoadMatch& match, const ckpt::RestoreChoice& choice) {
  for (const std::string& line : ckpt::report_lines(match, plan_.tensors, choice.step)) say(line);
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

void Narrator::respawned(const agent::Recovery& recovery) {
  respawned_ = true;
  record({{"event", "respawned"},
          {"ms_to_kill", static_cast<double>(recovery.killed_ns - recovery.detected_ns) / 1e6},
          {"ms_to_reap", static_cast<double>(recovery.reaped_ns - recovery.detected_ns) / 1e6},
          {"ms_to_spawn", static_cast<double>(recovery.spawned_ns - recovery.detected_ns) / 1e6}});
}

/// Told once until it goes again: a disk may stay full for many steps.
void Narrator::tell_written(const Status& written, bool& failed) {
  if (!written.ok() && !failed) warn(written.error().message);
  failed = !written.ok();
}

telemetry::StepMetrics Narrator::step(const telemetry::StepMetrics& reported) {
  telemetry::StepMetrics metrics = reported;
  metrics.time = clock_.unix_s();
  const StepStage& phase = plan_.step_stages[stage_of_step(plan_.step_stages, metrics.step)];
  metrics.tflops = plan_.flops_per_token(phase.tokens) * metrics.tokens_per_s / 1e12;
  if (options_.peak_tflops > 0) metrics.mfu = *metrics.tflops / options_.peak_tflops;
  if (!may_write()) return metrics;
  tell_written(metrics_->write(metrics), metrics_failed_);
  if (tensorboard_) tell_written(tensorboard_->write(metrics), tensorboard_failed_);
  progress_.lost_ms += metrics.checkpoint_lost_ms;
  progress_.last = metrics;
  constexpr size_t kRemembered = 64;
  if (!metrics.outliers.empty()) outlier_steps_.push_back(metrics.step);
  if (outlier_steps_.size() > kRemembered) outlier_steps_.pop_front();
  if (metrics.valid_loss) progress_.valid_loss = metrics.valid_loss;
  tell_recovered(metrics);
  progress_.last_step = metrics.step;
  show(metrics);
  if ((metrics.valid_loss || !metrics.tasks.empty()) && options_.heard) {
    json event = telemetry::to_json(metrics);
    event["event"] = "evaluated";
    options_.heard(event, metrics.step);
  }
  return metrics;
}

void Narrator::ended_early(int64_t step, const telemetry::EarlyEnd& end) {
  record({{"event", "early_stop"},
          {"step", step},
          {"metric", end.metric},
          {"best", end.best},
          {"best_step", end.best_step},
          {"evaluations", end.evaluations}});
  say(fmt::format("step {}: the run ends early: {} has not become better in {}; its best is {:.4g}, of step {}", step,
                  end.metric, count_text(end.evaluations, "evaluation"), end.best, end.best_step));
}

void Narrator::tell_recovered(const telemetry::StepMetrics& metrics) {
  // Steps that the lost generation finished may still be on their way: only those of a new one count.
  if (failed_at_ns_ == 0 || !respawned_ || metrics.step <= failed_at_step_) return;
  const double seconds = static_cast<double>(clock_.now_ns() - failed_at_ns_) / 1e9;
  say(fmt::format("recovered: {} from the failure to the first new step ({} of it the step)",
                  telemetry::format_duration(seconds), telemetry::format_duration(metrics.step_ms / 1000)));
  record(
      {{"event", "recovered"}, {"seconds", seconds}, {"step", metrics.step}, {"step_seconds", metrics.step_ms / 1000}});
  failed_at_ns_ = 0;
  respawned_ = false;
}

/// Whether a log gets a line of this step: at the steps of log.at (0: each), or once a minute (1: it is not written).
/// Before the first minute is over there are some more, each after twice the time.
bool Narrator::is_due(int64_t step) const {
  if (const int64_t every = plan_.recipe.log.every_steps; every != 1) return every == 0 || step % every == 0;
  const int64_t so_far_ns = lined_ns_ - started_ns_;
  return clock_.now_ns() - lined_ns_ >= std::clamp(so_far_ns, kFirstLineNs, kLineNs);
}

void Narrator::show(const telemetry::StepMetrics& metrics) {
  const int64_t steps = run_steps();
  // By samples: a step of a later stage or phase may have more of them.
  const double eta = static_cast<double>(options_.run_end.samples - metrics.samples) *
                     (clock_.unix_s() - began_unix_s_) /
                     std::max<double>(1, static_cast<double>(metrics.samples - began_->samples));
  std::vector<telemetry::LinePart> line = {
      {fmt::format("step {:>{}}/{}", metrics.step, std::to_string(steps).size(), steps), 0},
      {fmt::format("loss {:.4f}", metrics.loss), 1},
      {fmt::format("lr {:.2e}", metrics.lr), 7},
      {fmt::format("grad {:.3f}", metrics.grad_norm), 6},
      {fmt::format("{} tok/s", format_count(metrics.tokens_per_s)), 3},
      {fmt::format("{:.1f} ms", metrics.step_ms), 5},
      {fmt::format("ckpt {:.2f} ms", metrics.checkpoint_lost_ms), 8}};
  if (metrics.mfu) line.push_back({fmt::format("mfu {:.1f}%", 100 * *metrics.mfu), 4});
  if (metrics.valid_loss) line.push_back({fmt::format("valid {:.4f}", *metrics.valid_loss), 4});
  line.push_back({fmt::format("eta {}", telemetry::format_duration(eta)), 2});
  const bool due = is_due(metrics.step) || metrics.step == steps || metrics.step == began_->step + 1;
  if (due) lined_ns_ = clock_.now_ns();
  console_.show(line, time_text(static_cast<int64_t>(clock_.unix_s() * 1000)), due);
  if (metrics.tasks_left_out) say(fmt::format("step {}: eval.budget leaves no time for the tasks", metrics.step));
  if (!metrics.tasks.empty()) {
    std::vector<std::string> numbers;
    for (const telemetry::TaskNumbers& task : metrics.tasks) {
      const auto first =
          std::ranges::min_element(task.numbers, {}, [](const auto& number) { return number_rank(number.first); });
      if (first != task.numbers.end())
        numbers.push_back(fmt::format("{} {} {:.4f}", printable(task.task), first->first, first->second));
    }
    say(fmt::format("step {}: {}", metrics.step, fmt::join(numbers, ", ")));
  }
  if (!metrics.valid_loss) return;
  std::string sources;
  for (const auto& [name, loss] : metrics.valid_source_loss)
    sources += fmt::format("{}{} {:.4f}", sources.empty() ? " (" : ", ", printable(name), loss);
  if (plan_.recipe.data.sources.size() < 2) sources.clear();
  say(fmt::format("step {}: validation loss {:.4f}{}{}", metrics.step, *metrics.valid_loss, sources,
                  sources.empty() ? "" : ")"));
}

void Narrator::alarm(const ckpt::StepAlarm& alarm) {
  using Kind = ckpt::StepAlarm::Kind;
  record({{"event", ckpt::to_text(alarm.kind)}, {"step", alarm.step}, {"onset", alarm.onset}, {"why", alarm.why}});
  const bool suspects =
      std::ranges::any_of(outlier_steps_, [&](int64_t step) { return step >= alarm.onset && step <= alarm.step; });
  const std::string look = fmt::format(
      "\"cairn data samples {} --step {}{} --text\" shows ", run_.string(),
      alarm.onset == alarm.step ? fmt::format("{}", alarm.step) : fmt::format("{}..{}", alarm.onset, alarm.step),
      suspects ? " --suspects" : "");
  switch (alarm.kind) {
    case Kind::kOutlier:
      return warn(fmt::format("step {}: {}; {}its samples", alarm.step, alarm.why, look));
    case Kind::kDivergence:
      return warn(fmt::format("the run diverges since step {}: step {}: {}; {}what it trained on since", alarm.onset,
                              alarm.step, alarm.why, look));
    case Kind::kDrop:
      return warn(
          fmt::format("the loss drops since step {}, as on data that repeat: step {}: {}; {}what it trained on "
                      "since",
                      alarm.onset, alarm.step, alarm.why, look));
    case Kind::kLevelShift:
      return warn(
          fmt::format("step {}: {}, and so were the outliers before it: this counts as the level now, and saves "
                      "can be good again",
                      alarm.step, alarm.why));
  }
}

void Narrator::computed_again(const telemetry::StepMetrics& metrics) {
  using Found = telemetry::ComputedAgain::Found;
  const telemetry::ComputedAgain& again = *metrics.again;
  if (again.audit) return;
  if (again.found == Found::kSame) return record({{"event", "recomputed"}, {"step", metrics.step}});
  record({{"event", "transient"},
          {"step", metrics.step},
          {"kind", telemetry::to_text(again.found)},
          {"ranks", again.ranks}});
  warn(fmt::format("step {}: {} {} got other numbers when the step was computed again: an error of the machine{}",
                   metrics.step, plural(std::ssize(again.ranks), "rank"), fmt::join(again.ranks, ", "),
                   again.found == Found::kTransient ? ", and the result that came twice is used"
                                                    : " that stays: no result came twice"));
}

void Narrator::machine_erred(int64_t step, const telemetry::MachineError& error,
                             const std::vector<std::string>& hosts) {
  json event{{"event", "sdc"}, {"step", step}, {"kind", error.kind}, {"ranks", error.ranks}, {"since", error.since}};
  if (!hosts.empty()) event["hosts"] = hosts;
  if (error.tied) event["tied"] = true;
  record(std::move(event));
  std::vector<std::string> named;
  for (size_t k = 0; k < error.ranks.size(); ++k)
    named.push_back(hosts.empty() ? fmt::format("{}", error.ranks[k])
                                  : fmt::format("{} ({})", error.ranks[k], hosts[k]));
  const std::string what =
      error.tied                   ? "hold different weights, and no majority says whose are right"
      : error.kind == "replica"    ? "hold other weights than the majority of those that should be equal"
      : error.kind == "persistent" ? "got other numbers when the step was computed again, and no result came twice"
                                   : "got other numbers when the step was computed again; the result that came twice "
                                     "is used";
  warn(fmt::format("step {}: an error of the machine: {} {} {}. Saves since step {} are suspect", step,
                   plural(std::ssize(error.ranks), "rank"), fmt::join(named, ", "), what, error.since));
}

void Narrator::skipped(const telemetry::StepMetrics& metrics) {
  record({{"event", "skipped"}, {"step", metrics.step}, {"why", metrics.skip_why}});
  warn(fmt::format("step {}: {}: its update is left out", metrics.step, metrics.skip_why));
}

void Narrator::saved(const ckpt::PersistEvent& event) {
  record({{"event", "saved"},
          {"step", event.step},
          {"seconds", event.seconds},
          {"bytes", event.bytes},
          {"reused_files", event.reused_files},
          {"pause_ms", event.snapshot_ms},
          {"dir", event.dir.string()},
          {"asked", event.asked != 0},
          {"removed", event.removed}});
  if (event.asked != 0) say(fmt::format("saved step {}, as asked: {}", event.step, event.dir.string()));
  if (!options_.traced) return;
  const int64_t saved_ns = clock_.now_ns();
  saves_.push_back({fmt::format("save step {}", event.step), saved_ns - static_cast<int64_t>(event.seconds * 1e9),
                    saved_ns, event.bytes});
}

void Narrator::kills(int64_t rank, int64_t pid, int64_t step) {
  say(fmt::format("--kill: SIGKILL to rank {}{} after step {}", rank,
                  pid > 0 ? fmt::format(" (pid {})", pid) : " of another host", step));
  record({{"event", "kill"}, {"rank", rank}, {"step", step}});
  failed_at_ns_ = clock_.now_ns();
  failed_at_step_ = step;
}

double Narrator::first_seen_of(const agent::Failure& failure) const {
  if (failure.seen_ns == 0) return clock_.unix_s();
  return clock_.unix_s() - static_cast<double>(clock_.now_ns() - failure.seen_ns) / 1e9;
}

void Narrator::failed(const agent::RestartInfo& info, bool restarting, double backoff_s, const fs::path& report) {
  if (failed_at_ns_ == 0) failed_at_ns_ = clock_.now_ns();
  failed_at_step_ = progress_.last_step;
  respawned_ = false;
  last_failure_ = info.failure.message;
  say(info.failure.message);
  failure_ = failure_record(info.failure, first_seen_of(info.failure));
  if (failure_["host"].get<std::string>().empty()) failure_["host"] = ckpt::this_writer().host;
  failure_["restarting"] = restarting;
  failure_["step"] = progress_.last_step;
  failure_["report"] = report.string();
  if (events_opened_ && may_write()) {  // else the leader tells of it; before the event, whose readers look for it
    if (const Status written = write_failure(run_, failure_); !written.ok()) warn(written.error().message);
  }
  record({{"event", "failure"},
          {"rank", info.failure.rank},
          {"host", failure_["host"]},
          {"class", failure_["class"]},
          {"message", info.failure.message},
          {"restarting", restarting},
          {"report", report.string()}});
  if (!report.empty()) say(fmt::format("where each rank was: {}", report.string()));
  if (!restarting) return;
  if (!events_opened_) return say("this host's ranks stopped; the leader says whether they start again");
  say(backoff_s > 0 ? fmt::format("all ranks stopped; starting again in {}", telemetry::format_duration(backoff_s))
                    : "all ranks stopped; starting again");
}

void Narrator::lost_leader(const agent::RestartInfo& info) {
  failed(info, true, 0, {});
  failed_at_ns_ = 0;
}

Status Narrator::begin_trace() {
  drew_.clear();
  std::error_code problem;
  fs::create_directories(trace_dir(), problem);
  return problem ? Status(os_error(problem.value(), trace_dir().string())) : Status();
}

void Narrator::drew(telemetry::TracePart part) {
  drew_.push_back(std::move(part));
  if (std::ssize(drew_) == plan_.mesh.world()) finish_trace();
}

void Narrator::finish_trace() {
  if (drew_.empty()) return;
  std::ranges::sort(drew_, {}, &telemetry::TracePart::path);
  const fs::path path = trace_dir() / "trace.json";
  const Status merged = telemetry::merge_traces(drew_, saves_, path);
  if (merged.ok()) {
    say(fmt::format("trace of {}: {} (open it in ui.perfetto.dev)", count_text(drew_.size(), "rank"), path.string()));
    record({{"event", "trace"}, {"path", path.string()}, {"ranks", drew_.size()}});
  } else {
    warn(merged.error().message);
  }
  drew_.clear();
}

Status Narrator::begin_kernel_times() {
  kernel_times_.clear();
  std::error_code problem;
  fs::create_directories(kernel_times_dir(), problem);
  // Earlier there may have been more ranks.
  for (auto at = fs::directory_iterator(kernel_times_dir(), problem); !problem && at != fs::directory_iterator();
       at.increment(problem)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with("rank-") || !name.ends_with(".json")) continue;
    if (fs::remove(at->path(), problem); problem) break;
  }
  return problem ? Status(os_error(problem.value(), kernel_times_dir().string())) : Status();
}

void Narrator::timed_kernels(int64_t rank) {
  if (rank == 0) kernel_times_ = kernel_times_dir() / "rank-0.json";
}

void Narrator::tuned(const std::string& text) {
  say(text);
  record({{"event", "tuned"}, {"text", text}, {"path", tuning_file().string()}});
}

void Narrator::tell_kernel_times() {
  if (kernel_times_.empty()) return;
  const auto read = [&]() -> Result<telemetry::KernelTimes> {
    RT_TRY_SET(const std::string text, read_text_file(kernel_times_));
    RT_TRY_SET(const json parsed, parse_json(text));
    return telemetry::kernel_times_from_json(parsed);
  };
  const Result<telemetry::KernelTimes> times = read();
  if (!times.ok()) return warn(fmt::format("{}: {}", kernel_times_.string(), times.error().message));
  for (const std::string& line : telemetry::table_of(times.value())) say(line);
  say(fmt::format("kernel times of all ranks: {}", kernel_times_dir().string()));
  record({{"event", "kernel_times"}, {"path", kernel_times_.string()}, {"steps", times.value().times.steps}});
}

void Narrator::done(const fs::path& newest_checkpoint) {
  const double seconds = clock_.unix_s() - progress_.started_unix_s;
  const int64_t done = progress_.last_step - progress_.first_step;
  const std::string resumed =
      progress_.first_step > 0 ? fmt::format(", {} of them by this start", done) : std::string();
  say(fmt::format("done: {}{} in {}, loss {:.4f}, {:.1f} steps/s, {:.0f} ms lost to checkpoints; {}",
                  count_text(progress_.last_step, "step"), resumed, telemetry::format_duration(seconds),
                  progress_.last.loss, static_cast<double>(done) / seconds, progress_.lost_ms,
                  newest_checkpoint.string()));
}

json Narrator::summary(const Result<int>& code, bool stop_asked, const fs::path& newest_checkpoint) const {
  const auto number = [](const std::optional<double>& value) { return value ? json(*value) : json(); };
  const bool stepped = progress_.last.step > 0;
  const int64_t done = stepped ? progress_.last.step : std::max<int64_t>(progress_.first_step, 0);
  const bool stopped = done < run_steps() && stop_asked;
  const std::string why = !code.ok()            ? std::string(error_code_name(code.error().code))
                          : code.value() >= 128 ? "signal"
                          : stopped             ? "stopped"
                          : code.value() != 0   ? "failed"
                          : !stepped            ? "nothing_to_do"
                                                : "done";
  const std::string message = !code.ok() ? code.error().message : why == "failed" ? last_failure_ : std::string();
  const fs::path& checkpoint = newest_checkpoint.empty() ? loaded_ : newest_checkpoint;
  json out{{"run", run_.string()},
           {"why", why},
           {"class", why == "failed" && failure_.is_object() ? failure_["class"] : json()},
           {"message", message},
           {"first_step", std::max<int64_t>(progress_.first_step, 0)},
           {"step", done},
           {"of", run_steps()},
           {"samples", stepped ? json(progress_.last.samples) : json()},
           {"tokens", stepped ? json(progress_.last.tokens) : json()},
           {"loss", stepped ? json(progress_.last.loss) : json()},
           {"valid_loss", number(progress_.valid_loss)},
           {"checkpoint", checkpoint.empty() ? json() : json(checkpoint.string())},
           {"seconds", clock_.unix_s() - progress_.started_unix_s}};
  if (options_.time_kernels) out["kernel_times"] = kernel_times_.empty() ? json() : json(kernel_times_.string());
  return out;
}

}  // namespace cairn::tools
