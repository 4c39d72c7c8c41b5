#include "tools/run/agent/trackers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "runtime/json/json.h"
#include "tools/run/agent/helper.h"

namespace cairn::tools {

using nlohmann::json;

struct RunTrackers::Child {
  size_t number = 0;  // from 1
  double finish_s = 0;
  std::optional<Helper> process;

  std::string name() const { return fmt::format("log.trackers[{}]", number); }
};

RunTrackers::RunTrackers(std::vector<Tracker> trackers, std::filesystem::path run)
    : trackers_(std::move(trackers)), run_(std::move(run)) {}

RunTrackers::~RunTrackers() = default;

void RunTrackers::start() {
  if (!children_.empty()) return;
  for (size_t i = 0; i < trackers_.size(); ++i) {
    children_.push_back(std::make_unique<Child>());
    Child& child = *children_.back();
    child.number = i + 1;
    child.finish_s = trackers_[i].finish_s;
    const auto warn = [this, &child](const std::string& why, const std::string& more) {
      callbacks_.say(fmt::format("warning: {}: {}{}", child.name(), why, more));
      callbacks_.record({{"event", "track_failed"}, {"tracker", child.number}, {"message", why}});
    };
    const auto failed = [warn](const std::string& why, const std::string& more) {
      warn(why, "; nothing is lost, it is tried again" + more);
    };
    child.process.emplace(Helper::Options{.words = {"track", run_.string(), "--tracker", std::to_string(child.number)},
                                          .log = run_ / "logs" / fmt::format("track-{}.log", child.number),
                                          .take =
                                              [&child, warn, failed](const json& event) {
                                                if (json_string(event, "event") == "sent") child.process->worked();
                                                if (json_string(event, "event") == "track_failed")
                                                  failed(json_string(event, "message"), "");
                                                if (json_string(event, "event") == "track_warned")
                                                  warn(json_string(event, "message"), "");
                                              },
                                          .not_started = [failed](const std::string& why) { failed(why, ""); },
                                          .died =
                                              [failed](const std::string& how, const std::vector<std::string>& last) {
                                                failed(how, fmt::format("\n  {}", fmt::join(last, "\n  ")));
                                              }});
    child.process->start();
  }
}

void RunTrackers::poll() {
  for (const auto& child : children_) child->process->poll();
}

void RunTrackers::finish(std::span<const int> stop_signals, const std::function<Hurry()>& hurry) {
  if (children_.empty()) return;
  for (const auto& child : children_) child->process->finish();
  const EndWait waited = wait_at_end(
      stop_signals, hurry,
      [this](double seconds) {
        poll();
        std::vector<std::string> out;
        for (const auto& child : children_) {
          if (!child->process->finished() && seconds < child->finish_s) out.push_back(child->name());
        }
        return fmt::format("{}", fmt::join(out, ", "));
      },
      callbacks_.say);
  for (const auto& child : children_) {
    if (child->process->finished()) continue;
    callbacks_.say(
        fmt::format("not everything is sent to {} ({}); the next start of this run, or `cairn track {}`, sends "
                    "the rest",
                    child->name(), waited.text(), run_.string()));
  }
}

}  // namespace cairn::tools
