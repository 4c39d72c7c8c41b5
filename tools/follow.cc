#include "tools/follow.h"

#include <fmt/format.h>
#include <signal.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ckpt/position.h"
#include "dsl/dsl.h"
#include "runtime/agent/supervisor.h"
#include "runtime/core/clock.h"
#include "runtime/core/log.h"
#include "runtime/json/json.h"
#include "runtime/plan/device_choice.h"
#include "tools/hf_start.h"
#include "tools/hub_source.h"
#include "tools/init_options.h"
#include "tools/run/agent/agent.h"
#include "tools/run/agent/follower.h"
#include "tools/run/agent/narrator.h"
#include "tools/run/folder/failure_record.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/text.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

void say(const std::string& text) {
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

/// One segment of the run; nullopt: another one follows.
Result<std::optional<int>> follow_segment(const FollowArgs& args, Follower& follower, const HostSegment& segment) {
  RT_TRY_SET(Recipe recipe, dsl::decode_recipe(segment.recipe));
  RT_TRY_SET(recipe.init, init_from_json(segment.init));
  const Result<fs::path> init = hub_folder_here(recipe.init.path);
  if (!init.ok()) return follower.refuse(init.error(), [] { return false; }).error();
  recipe.init.path = init.value().string();
  settle_device(recipe, args.hosts.device);  // the leader's too
  RT_TRY_SET(const RunPast past, ckpt::decode_past(segment.past));
  RT_TRY_SET(Plan plan, make_plan(recipe, follower.world(), past));
  plan.end_step = segment.end_step;
  const SystemClock clock;
  Narrator narrator(plan, args.run, {.traced = false}, clock);
  AgentOptions options{.recipe_text = segment.recipe,
                       .init = init_to_json(recipe.init),
                       .log_of = [&](int64_t rank) { return log_of_rank(args.run, rank); },
                       .threads = args.threads,
                       .trace = segment.trace,
                       .time_kernels = segment.time_kernels};
  if (!args.comm.text.empty()) options.comm = args.comm.word();
  options.attention = args.attention.word();
  options.tuning = tuning_word(args.tuning.wish);
  options.tuning_given = args.tuning.given;
  options.environment = args.comm.environment;
  Agent agent(plan, args.run, follower, narrator, std::move(options));
  RT_TRY_SET(const std::unique_ptr<agent::Supervisor> supervisor,
             agent::Supervisor::make({.restart = {},
                                      .stop_signals = args.requests.stop_signals(),
                                      .told_signals = args.requests.told_signals(),
                                      .tick_ms = 200,
                                      .hang_deadline_ms = static_cast<int64_t>(2000 * plan.recipe.restart.deadline_s),
                                      .client_decides = true},
                                     agent, clock));
  const auto stopped = [&] { return supervisor->leave_signal() != 0; };
  const Status opened = follower.open(
      {.plan = plan, .narrator = narrator, .control = *supervisor, .open_foreign = open_hf_for(plan.recipe.model)});
  if (!opened.ok()) return follower.refuse(opened.error(), stopped).error();
  RT_TRY(agent.use(*supervisor));
  const Result<agent::Outcome> outcome = supervisor->run();
  const Result<int> code = outcome.ok() ? follower.conclude(outcome.value()) : Result<int>(outcome.error());
  follower.close();
  if (follower.ended()) return follower.ended();
  if (outcome.ok() && outcome.value().kind == agent::EndKind::kLeftBySignal) return std::optional(code.value());
  if (follower.goes_on()) return std::optional<int>();
  RT_TRY(code);
  return std::optional(code.value());
}

Followed left(const Follower& follower, int code) {
  if (code != 0 && follower.end_failure().is_object()) {
    if (!follower.end_told()) say("failed: " + printable(json_string(follower.end_failure(), "message"), true));
    tell_launcher(follower.end_failure(), code);
  }
  return Followed{.code = code};
}

}  // namespace

void block_stop_signals(const RequestOptions& requests) {
  sigset_t stop;
  sigemptyset(&stop);
  for (const int signal : requests.stop_signals()) sigaddset(&stop, signal);
  ::pthread_sigmask(SIG_BLOCK, &stop, nullptr);
}

bool stop_signal_waits(const RequestOptions& requests) {
  sigset_t pending;
  if (::sigpending(&pending) != 0) return false;
  for (const int signal : requests.stop_signals()) {
    if (sigismember(&pending, signal) == 1) return true;
  }
  return false;
}

Result<Followed> follow(const FollowArgs& args) {
  init_logging("agent");
  block_stop_signals(args.requests);
  Follower follower(args.hosts, args.run, say);
  for (;;) {
    RT_TRY_SET(const std::optional<HostSegment> segment,
               follower.next_segment([&] { return stop_signal_waits(args.requests); }));
    if (!segment) {
      std::optional<Lead> lead = follower.take_lead();
      if (lead) return Followed{.lead = std::move(lead)};
      return left(follower, *follower.ended());
    }
    RT_TRY_SET(const std::optional<int> code, follow_segment(args, follower, *segment));
    if (code) return left(follower, *code);
  }
}

}  // namespace cairn::tools
