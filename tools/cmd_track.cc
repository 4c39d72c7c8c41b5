// cairn track: sends the steps of a run to trackers, each once; also the process that does so beside a training.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ckpt/persist/priority.h"
#include "dsl/dsl.h"
#include "runtime/agent/event_pipe.h"
#include "runtime/core/log.h"
#include "runtime/json/json.h"
#include "tools/commands.h"
#include "tools/run/agent/helper.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/text.h"
#include "tools/track/tracker.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

constexpr double kPatienceS = 60;
constexpr int kNice = 10;

struct Args {
  std::string run, mlflow, otlp, prometheus, project, entity;
  std::optional<std::string> wandb;
  bool follow = false;
  int64_t tracker = 0;  // of the recipe, from 1
  int control_fd = -1;
};

/// The trackers of the command line, else the recipe's.
Result<std::vector<Tracker>> wanted(const Args& args) {
  using Kind = Tracker::Kind;
  std::vector<Tracker> out;
  if (args.wandb)
    out.push_back({.kind = Kind::kWandb, .to = *args.wandb, .project = args.project, .entity = args.entity});
  if (!args.mlflow.empty()) out.push_back({.kind = Kind::kMlflow, .to = args.mlflow, .project = args.project});
  if (!args.otlp.empty()) out.push_back({.kind = Kind::kOtlp, .to = args.otlp});
  if (!args.prometheus.empty()) out.push_back({.kind = Kind::kPrometheus, .to = args.prometheus});
  if (!out.empty()) return out;
  RT_TRY_SET(const std::string text, recipe_of_run(args.run));
  RT_TRY_SET(const Recipe recipe, dsl::decode_recipe(text));
  if (!recipe.log.trackers.empty()) return recipe.log.trackers;
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: its recipe has no log.trackers; name one: --wandb DIR, --mlflow URL, --otlp URL or "
                           "--prometheus FILE",
                           args.run)};
}

/// Beside a training: the agent says when the run has ended.
Result<int> track_for_agent(const Args& args) {
  init_logging(fmt::format("track {}", args.tracker));
  ckpt::lower_thread_priority(kNice);
  RT_TRY_SET(HelperControl control, HelperControl::take(args.control_fd));
  RT_TRY_SET(agent::EventWriter events, agent::EventWriter::from_environment());
  RT_TRY_SET(const std::vector<Tracker> all, wanted(args));
  if (args.tracker > std::ssize(all))
    return Error{ErrorCode::kInternal, fmt::format("tracker {} of {}", args.tracker, all.size())};
  const TrackLoop loop{
      .finishing =
          [&] {
            control.wait(0, false);
            return control.finishing();
          },
      .wait = [&](double seconds) { control.wait(seconds, true); },
      .failed =
          [&](const Error& error) {
            spdlog::warn("{}", error.message);
            ignore(events.send({{"event", "track_failed"}, {"message", error.message}}), "the agent is gone");
          },
      .warned =
          [&](const std::string& text) {
            spdlog::warn("{}", text);
            ignore(events.send({{"event", "track_warned"}, {"message", text}}), "the agent is gone");
          },
      .sent =
          [&](int64_t step) {
            ignore(events.send({{"event", "sent"}, {"step", step}}), "the agent is gone");
          },
      .patience_s = std::numeric_limits<double>::infinity()};
  RT_TRY(track(all[static_cast<size_t>(args.tracker - 1)], args.run, loop));
  return 0;
}

Result<int> track_all(const Args& args) {
  RT_TRY_SET(const std::vector<Tracker> all, wanted(args));
  std::mutex mutex;  // of what is printed, and of `first`
  Status first;
  std::vector<std::thread> threads;
  for (const Tracker& tracker : all) {
    threads.emplace_back([&, tracker] {
      const std::string name = tracker_kind(tracker);
      int64_t last = 0;
      const TrackLoop loop{.finishing = [&] { return !args.follow || !holder_of_run(args.run).has_value(); },
                           .wait =
                               [](double seconds) {
                                 std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, 1.0)));
                               },
                           .failed =
                               [&](const Error& error) {
                                 const std::scoped_lock lock(mutex);
                                 fmt::print(stderr, "{}: {}; it is tried again\n", name, printable(error.message));
                               },
                           .warned =
                               [&](const std::string& text) {
                                 const std::scoped_lock lock(mutex);
                                 fmt::print(stderr, "{}: warning: {}\n", name, printable(text));
                               },
                           .sent = [&](int64_t step) { last = step; },
                           .patience_s = kPatienceS};
      const Status done = track(tracker, args.run, loop);
      const std::scoped_lock lock(mutex);
      if (done.ok()) fmt::print("{}: {}\n", name, last > 0 ? fmt::format("sent up to step {}", last) : "nothing new");
      if (!done.ok() && first.ok()) first = Error(done.error()).with(name);
    });
  }
  for (std::thread& thread : threads) thread.join();
  RT_TRY(first);
  return 0;
}

}  // namespace

void add_track(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("track", "send a run's steps to W&B, MLflow, OpenTelemetry or Prometheus");
  const auto args = std::make_shared<Args>();
  command->add_option("RUN", args->run, "the run folder")->required();
  command->add_option("--wandb", args->wandb, "write the files of an offline run of W&B here, for `wandb sync`")
      ->type_name("DIR");
  command->add_option("--mlflow", args->mlflow, "an MLflow server, http:// or https://; MLFLOW_TRACKING_TOKEN counts")
      ->type_name("URL");
  command->add_option("--otlp", args->otlp, "an OpenTelemetry collector; OTEL_EXPORTER_OTLP_HEADERS counts")
      ->type_name("URL");
  command->add_option("--prometheus", args->prometheus, "a .prom file for the node exporter's textfile collector")
      ->type_name("FILE");
  command->add_option("--project", args->project, "W&B's project, MLflow's experiment (default: the run folder's name)")
      ->type_name("NAME");
  command->add_option("--entity", args->entity, "W&B's user or team")->type_name("NAME");
  command->add_flag("--follow", args->follow, "continue until the run ends");
  command->add_option("--tracker", args->tracker)->group("");
  command->add_option("--control-fd", args->control_fd)->group("");
  command->footer(
      "Without a service it takes those of the run's recipe (log.trackers). RUN/tracking remembers what each has: no\n"
      "step is sent twice. A service that is away is tried again for a minute, with --follow while the run trains.\n"
      "Exit codes: 0 all is sent, 2 no run or no such service, 69 a service is away, 73 another process sends this.\n"
      "Examples:\n"
      "  cairn track runs/mine --wandb wandb\n"
      "  cairn track runs/mine --mlflow http://localhost:5000 --project llm --follow");
  command->callback([args, &session] {
    session.action = [args] { return args->tracker > 0 ? track_for_agent(*args) : track_all(*args); };
  });
}

}  // namespace cairn::tools
