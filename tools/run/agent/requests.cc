#include "tools/run/agent/requests.h"

#include <fmt/format.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "dsl/schema.h"
#include "runtime/core/clock.h"
#include "runtime/core/process.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/terminal.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using agent::StopWish;
using nlohmann::json;

constexpr double kSlowDiskBytesPerS = 100e6;  // of a hard disk
constexpr const char* kStop = "RUN/stop";
constexpr const char* kSave = "RUN/save";

double unix_now() { return SystemClock().unix_s(); }
double clock_s() { return static_cast<double>(SystemClock().now_ns()) * 1e-9; }

/// Of this process, to 10 ms.
double started_unix_s() {
  timespec since_boot{};
  clock_gettime(CLOCK_BOOTTIME, &since_boot);
  const double age_s = static_cast<double>(since_boot.tv_sec) + static_cast<double>(since_boot.tv_nsec) * 1e-9 -
                       static_cast<double>(this_process().start) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return unix_now() - age_s;
}

/// Seconds of the saves of earlier starts of this run: until one of this start is over, the best guess there is.
void read_saves(const fs::path& run, agent::Pace& pace) {
  std::ifstream events(run / "events.jsonl", std::ios::binary);
  for (std::string line; std::getline(events, line);) {
    if (line.find(R"("saved")") == std::string::npos) continue;
    const json event = json_or_nothing(line);
    if (!event.is_object() || !event.contains("seconds") || !event["seconds"].is_number()) continue;
    if (json_field(event, "event") == "saved") pace.save(event["seconds"].get<double>());
  }
}

}  // namespace

Result<RequestOptions> request_options(const RequestArgs& args) {
  RequestOptions out{
      .stop_on_usr = args.on_usr == "stop", .exit_when_unfinished = args.exit_when_unfinished, .stop_at = args.stop_at};
  if (args.time_limit == "none") {
    out.any_limit = false;
  } else if (!args.time_limit.empty()) {
    const std::optional<double> limit_s = dsl::parse_quantity(args.time_limit, dsl::Unit::kSeconds);
    if (!limit_s || !std::isfinite(*limit_s) || *limit_s <= 0 || *limit_s > 1e10) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("--time-limit {}: expected a time above 0, such as 11h30min or 90s (ms, s, min, h, d; a "
                               "plain number is seconds), or none",
                               args.time_limit)};
    }
    out.time_limit_s = limit_s;
  }
  return out;
}

std::vector<int> RequestOptions::stop_signals() const {
  std::vector<int> out = {SIGTERM, SIGINT, SIGXCPU};
  struct sigaction hangup {};
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) out.push_back(SIGHUP);
  if (stop_on_usr) out.insert(out.end(), {SIGUSR1, SIGUSR2});
  return out;
}

std::vector<int> RequestOptions::told_signals() const {
  return stop_on_usr ? std::vector<int>{SIGQUIT} : std::vector<int>{SIGQUIT, SIGUSR1, SIGUSR2};
}

void hold_requests(int argc, char** argv) {
  if (argc < 2 || (std::string_view(argv[1]) != "train" && std::string_view(argv[1]) != "resume")) return;
  sigset_t held;
  sigemptyset(&held);
  for (const int signal : {SIGUSR1, SIGUSR2, SIGQUIT}) sigaddset(&held, signal);
  pthread_sigmask(SIG_BLOCK, &held, nullptr);
}

std::string signal_name(int signal) {
  const char* const name = sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

RunRequests::RunRequests(fs::path run, RequestOptions options, RunCallbacks callbacks)
    : run_(std::move(run)),
      options_(std::move(options)),
      callbacks_(std::move(callbacks)),
      files_(run_, started_unix_s()) {}

void RunRequests::set_limit(int64_t checkpoint_bytes) {
  const std::lock_guard lock(mutex_);
  pace_.guess_save(static_cast<double>(checkpoint_bytes) / kSlowDiskBytesPerS);
  read_saves(run_, pace_);
  if (options_.any_limit) {
    std::string notice;
    limit_ = agent::time_limit(options_.time_limit_s, std::getenv("SLURM_JOB_END_TIME"), started_unix_s(), unix_now(),
                               &notice);
    if (!notice.empty()) callbacks_.say(notice);
  }
  if (limit_) {
    callbacks_.say(
        fmt::format("time limit: {}, in {}, by {}; the run saves and stops before", agent::utc_text(limit_->at_unix_s),
                    telemetry::format_duration(std::max(0.0, limit_->at_unix_s - unix_now())), limit_->from));
  }
}

void RunRequests::open() {
  const std::lock_guard lock(mutex_);
  opened_ = true;
  if (limit_) callbacks_.record({{"event", "time_limit"}, {"at", limit_->at_unix_s}, {"by", limit_->from}});
  look();
}

void RunRequests::look() {
  agent::RequestFiles::News news = opened_ ? files_.look(clock_s()) : agent::RequestFiles::News{};
  if (news.stop && news.stop->when == StopWish::When::kNow && stop_by_.empty()) {
    stop_by_ = kStop;
    if (const Status removed = files_.stop_obeyed(); !removed.ok())
      news.notices.push_back("warning: " + removed.error().message);
    news.stop.reset();
  }
  if (news.stop || news.stop_taken_back || news.save || !news.notices.empty()) news_.push_back(std::move(news));
  if (!limit_ || !stop_by_.empty()) return;
  const double now = unix_now();
  if (now + pace_.needed_s() <= limit_->at_unix_s) return;
  stop_by_ = limit_->from;
  stop_text_ = fmt::format("{} left until {}, and a step may take {}, a save {}",
                           telemetry::format_duration(std::max(0.0, limit_->at_unix_s - now)),
                           agent::utc_text(limit_->at_unix_s), telemetry::format_duration(pace_.longest_step_s()),
                           telemetry::format_duration(pace_.longest_save_s()));
}

bool RunRequests::stop_now() {
  const std::lock_guard lock(mutex_);
  if (stop_by_.empty()) look();
  return !stop_by_.empty();
}

std::string RunRequests::stop_by(std::string* why) {
  const std::lock_guard lock(mutex_);
  *why = stop_text_;
  return stop_by_;
}

void RunRequests::pass_on(ckpt::CheckpointNode& node, int64_t last_step) {
  std::vector<agent::RequestFiles::News> news;
  {
    const std::lock_guard lock(mutex_);
    look();
    news.swap(news_);
  }
  for (const agent::RequestFiles::News& one : news) {
    for (const std::string& notice : one.notices) callbacks_.say(notice);
    if (one.stop_taken_back && std::exchange(planned_, false)) {
      node.take_back_stop();
      callbacks_.say(fmt::format("{} is gone or says nothing any more: the run continues", kStop));
      callbacks_.record({{"event", "stop_taken_back"}, {"by", kStop}});
      option_planned_ = options_.stop_at <= last_step;  // what has passed asks for no stop now
    }
    if (one.stop && one.stop->when == StopWish::When::kAtStep) {
      plan_stop(node, one.stop->step, kStop, last_step);
    } else if (one.stop) {
      planned_ = true;
      planned_step_ = 0;
      node.stop_at_save();
      callbacks_.say(fmt::format("{}: stopping at the next save", kStop));
      callbacks_.record({{"event", "stop_planned"}, {"by", kStop}, {"at", "after-save"}});
    }
    if (one.save) {
      ask_save(node, kSave);
      save_number_ = asked_;
    }
  }
  if (options_.stop_at > 0 && !planned_ && !std::exchange(option_planned_, true))
    plan_stop(node, options_.stop_at, "--stop-at", last_step);
}

void RunRequests::plan_stop(ckpt::CheckpointNode& node, int64_t step, const std::string& by, int64_t last_step) {
  planned_ = true;
  planned_step_ = step;
  node.stop_at_step(step);
  callbacks_.say(step <= last_step ? fmt::format("{}: step {} has passed; stopping at the next step boundary", by, step)
                                   : fmt::format("{}: stopping at step {}", by, step));
  callbacks_.record({{"event", "stop_planned"}, {"by", by}, {"at", step}});
}

void RunRequests::ask_save(ckpt::CheckpointNode& node, const std::string& by) {
  asked_ = node.ask_save();
  callbacks_.say(fmt::format("{}: saving at the next step boundary; training continues", by));
  callbacks_.record({{"event", "save_requested"}, {"by", by}});
}

void RunRequests::step_took(double seconds) {
  const std::lock_guard lock(mutex_);
  pace_.step(seconds);
}

void RunRequests::save_ended(const ckpt::PersistEvent& event) {
  Status removed;
  {
    const std::lock_guard lock(mutex_);
    if (event.status.ok()) pace_.save(event.seconds);
    if (save_number_ == 0 || event.asked < save_number_) return;
    save_number_ = 0;
    if (!event.status.ok()) return files_.save_failed(clock_s());
    removed = files_.saved();
  }
  if (!removed.ok()) callbacks_.say("warning: " + removed.error().message);
}

void RunRequests::ended(bool left, bool on_disk) {
  const std::lock_guard lock(mutex_);
  for (const Status& removed :
       {left && planned_ ? files_.stop_obeyed() : Status(), on_disk ? files_.saved() : Status()}) {
    if (!removed.ok()) callbacks_.say("warning: " + removed.error().message);
  }
}

bool RunRequests::out_of_time() const { return limit_ && unix_now() >= limit_->at_unix_s; }

}  // namespace cairn::tools
