// cairn _copy: copies a run's checkpoints to one of its second places, as they come. Started by the agent, never by a
// person. A process of its own, at low priority: whatever happens in it, training and local saves go on.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "ckpt/mirror/mirror.h"
#include "ckpt/persist/priority.h"
#include "ckpt/store/uring_backend.h"
#include "dsl/dsl.h"
#include "runtime/agent/event_pipe.h"
#include "runtime/core/log.h"
#include "runtime/json/json.h"
#include "tools/commands.h"
#include "tools/run/agent/copies.h"
#include "tools/run/agent/helper.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kFirstWaitS = 1, kLongestWaitS = 300, kLongestWaitAtTheEndS = 10, kLookEveryS = 30;
constexpr int kNice = 10;  // of the one thread, and of those that it starts

struct CopierArgs {
  std::string run;
  int64_t place = 0;
  int control_fd = -1;
};

Result<int> copy(const CopierArgs& args, agent::EventWriter& events) {
  const fs::path run = args.run;
  RT_TRY_SET(const std::string text, read_text_file(run / "recipe.resolved.json"));
  RT_TRY_SET(const Recipe recipe, dsl::decode_recipe(text));
  const std::vector<CopyTo>& places = recipe.checkpoint.copy_to;
  if (args.place < 0 || args.place >= static_cast<int64_t>(places.size())) {
    return Error{ErrorCode::kInternal, fmt::format("place {} of {}", args.place, places.size())};
  }
  const CopyTo& to = places[static_cast<size_t>(args.place)];
  RT_TRY_SET(const std::string identity, read_text_file(run / "run.json"));
  const json run_json = json_or_nothing(identity);
  if (!run_json.is_object()) return Error{ErrorCode::kCorrupt, (run / "run.json").string() + ": not JSON"};
  RT_TRY_SET(const std::unique_ptr<ckpt::Place> place, ckpt::open_place(place_options(to, run)));
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend({.direct = recipe.checkpoint.direct_io});
  ckpt::CopyOptions options{.read_back = to.read_back};
  options.traffic.max_bytes_per_s = static_cast<int64_t>(std::ceil(to.max_mb_per_s * 1e6));  // 0 means no limit
  ckpt::Mirror mirror(*place, *io, run / "checkpoints", run / "copying" / std::to_string(args.place),
                      {.every_steps = to.every_steps, .keep_last = to.keep_last, .keep_every = to.keep_every}, options);

  RT_TRY_SET(HelperControl control, HelperControl::take(args.control_fd));
  bool claimed = false;
  int64_t failures = 0;
  double wait_s = kFirstWaitS;
  for (;;) {
    control.wait(0, false);
    const auto once = [&]() -> Result<std::optional<ckpt::MirrorReport>> {
      if (!claimed) {
        RT_TRY(
            claim_place(*place, claim_of(run, args.place), json_string(run_json, "id"), json_string(run_json, "name")));
        claimed = true;
      }
      return mirror.copy_next(control.finishing());
    };
    Result<std::optional<ckpt::MirrorReport>> done = once();
    for (const std::string& notice : mirror.take_notices()) {
      RT_TRY(events.send({{"event", "notice"}, {"message", notice}}));
    }
    if (!done.ok()) {
      const Error& error = done.error();
      spdlog::warn("step {}: {}", mirror.step(), error.message);
      if (failures++ == 0) {
        RT_TRY(events.send({{"event", "copy_failed"},
                            {"step", mirror.step()},
                            {"place", place->describe()},
                            {"message", error.message}}));
      }
      control.wait(std::min(wait_s, control.finishing() ? kLongestWaitAtTheEndS : kLongestWaitS), true);
      wait_s = std::min(kLongestWaitS, 2 * wait_s);
      continue;
    }
    if (done.value()) {
      const ckpt::MirrorReport& report = *done.value();
      for (const std::string& problem : report.problems) spdlog::warn("{}", problem);
      RT_TRY(events.send({{"event", "copied"},
                          {"step", report.copy.step},
                          {"place", place->describe()},
                          {"seconds", report.copy.seconds},
                          {"verify_seconds", report.copy.verify_seconds},
                          {"bytes", report.copy.bytes},
                          {"sent_bytes", report.copy.sent_bytes},
                          {"kept_bytes", report.copy.reused_bytes},
                          {"failures", failures},
                          {"removed", report.removed}}));
      failures = 0;
      wait_s = kFirstWaitS;
      continue;
    }
    failures = 0;
    wait_s = kFirstWaitS;
    if (control.finishing()) return 0;
    control.wait(kLookEveryS, false);
  }
}

}  // namespace

void add_copy(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("_copy", "copies checkpoints on; started by `cairn train`")->group("");
  const auto args = std::make_shared<CopierArgs>();
  command->add_option("--run", args->run)->required();
  command->add_option("--place", args->place)->required();
  command->add_option("--control-fd", args->control_fd)->required();
  command->callback([args, &session] {
    session.action = [args]() -> Result<int> {
      init_logging("copy " + std::to_string(args->place));
      ckpt::lower_thread_priority(kNice);
      RT_TRY_SET(agent::EventWriter events, agent::EventWriter::from_environment());
      return copy(*args, events);
    };
  });
}

}  // namespace cairn::tools
