#include "tools/run/folder/troubles.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "runtime/agent/failure_class.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/terminal.h"
#include "tools/run/folder/text.h"

namespace cairn::tools {
namespace {

using agent::FailureClass;
using nlohmann::json;

constexpr size_t kMostNamed = 8;  // in one line

std::string text_of(const json& event, const char* key) {
  const auto at = event.find(key);
  return at != event.end() && at->is_string() ? at->get<std::string>() : std::string();
}

double number_of(const json& event, const char* key, double otherwise) {
  const auto at = event.find(key);
  return at != event.end() && at->is_number() ? at->get<double>() : otherwise;
}

/// "out of memory", or the name where it is another build's.
std::string words_of(const std::string& name) {
  const std::optional<FailureClass> which = agent::class_named(name);
  if (which) return std::string(agent::rule_of(*which).words);
  return name.empty() ? "not classified" : printable(name);
}

}  // namespace

Troubles troubles_of(const std::filesystem::path& run) {
  Troubles out;
  std::map<std::string, double> slow_since;  // by host
  double heard = 0;
  const auto straggler = [&](const std::string& host) -> Troubles::Straggler& {
    const auto known = std::ranges::find(out.stragglers, host, &Troubles::Straggler::host);
    return known != out.stragglers.end() ? *known
                                         : out.stragglers.emplace_back(Troubles::Straggler{.host = host, .why = {}});
  };
  const auto is_over = [&](const std::string& host, double time) {
    const auto since = slow_since.find(host);
    if (since == slow_since.end()) return;
    straggler(host).seconds += std::max(0.0, time - since->second);
    slow_since.erase(since);
  };
  std::ifstream in(run / "events.jsonl", std::ios::binary);
  for (std::string line; std::getline(in, line);) {
    const json event = json_or_nothing(line);
    if (!event.is_object()) continue;
    const std::string kind = text_of(event, "event"), host = text_of(event, "host");
    const double time = number_of(event, "time", heard);
    if (kind == "failure") {
      const std::string which = text_of(event, "class");
      const auto same = std::ranges::find_if(
          out.failures, [&](const Troubles::Failures& one) { return one.which == which && one.host == host; });
      if (same != out.failures.end()) {
        ++same->times;
      } else {
        out.failures.push_back({which, host, 1});
      }
    } else if (kind == "straggler") {
      Troubles::Straggler& one = straggler(host);
      one.ratio = std::max(one.ratio, number_of(event, "ratio", 1));
      one.why = text_of(event, "why");
      ++one.times;
      slow_since.try_emplace(host, time);
    } else if (kind == "straggler_over") {
      is_over(host, time);
    } else if (kind == "start" || kind == "end") {  // of other ranks it is not known yet
      while (!slow_since.empty()) is_over(std::string(slow_since.begin()->first), kind == "end" ? time : heard);
    } else if (kind == "excluded") {
      out.excluded.push_back({host, text_of(event, "reason")});
    }
    heard = std::max(heard, time);
  }
  while (!slow_since.empty()) is_over(std::string(slow_since.begin()->first), heard);
  std::ranges::stable_sort(out.failures, std::greater<>(), &Troubles::Failures::times);
  std::ranges::stable_sort(out.stragglers, std::greater<>(), &Troubles::Straggler::seconds);
  return out;
}

std::vector<std::pair<std::string, std::string>> trouble_lines(const Troubles& troubles) {
  std::vector<std::pair<std::string, std::string>> out;
  int64_t times = 0;
  std::string list;
  for (size_t k = 0; k < troubles.failures.size(); ++k) {
    const Troubles::Failures& one = troubles.failures[k];
    times += one.times;
    if (k == kMostNamed) list += ", ...";
    if (k >= kMostNamed) continue;
    list += fmt::format("{}{}{}", k == 0 ? "" : ", ", words_of(one.which),
                        one.host.empty() ? "" : " on " + printable(one.host));
    if (one.times > 1) list += fmt::format(" ({})", one.times);
  }
  if (times > 0) out.emplace_back("failures", fmt::format("{}: {}", times, list));
  for (const Troubles::Straggler& one : troubles.stragglers) {
    out.emplace_back("straggler",
                     fmt::format("{}: up to {:.1f} x the time of the others, for {}: {}", printable(one.host),
                                 one.ratio, telemetry::format_duration(one.seconds), printable(one.why)));
  }
  for (const Troubles::Excluded& one : troubles.excluded) {
    out.emplace_back("excluded", fmt::format("{}: {}", printable(one.host), printable(one.reason)));
  }
  return out;
}

std::vector<std::string> trouble_advice(const Troubles& troubles) {
  std::vector<std::string> out;
  std::map<FailureClass, std::vector<std::string>> hosts;
  for (const Troubles::Failures& one : troubles.failures) {
    if (const std::optional<FailureClass> which = agent::class_named(one.which))
      hosts[*which].push_back(one.host.empty() ? "the host" : printable(one.host));
  }
  const auto add = [&](FailureClass which, const char* text) {
    const auto at = hosts.find(which);
    if (at == hosts.end()) return;
    std::string names;
    for (const std::string& name : at->second) names += (names.empty() ? "" : ", ") + name;
    out.push_back(fmt::format(fmt::runtime(text), names));
  };
  add(FailureClass::kOutOfMemory,
      "memory ran out on {}: raise its limit, or lower batch.micro; `cairn plan` shows what a rank needs");
  add(FailureClass::kShmFull, "/dev/shm ran full on {}: give it more room, and see who else fills it");
  add(FailureClass::kDevice, "a device of {} is broken: have it looked at before it joins again");
  add(FailureClass::kHostSetup,
      "ranks could not be started on {}: compare its image, driver and mounts with the others'");
  add(FailureClass::kHostLost,
      "{} was lost: spares and checkpoint.replicate make that cost a step (docs/operations/hosts.md)");
  return out;
}

json to_json(const Troubles& troubles) {
  json failures = json::array(), stragglers = json::array(), excluded = json::array();
  for (const Troubles::Failures& one : troubles.failures)
    failures.push_back({{"class", one.which}, {"host", one.host}, {"times", one.times}});
  for (const Troubles::Straggler& one : troubles.stragglers) {
    stragglers.push_back(
        {{"host", one.host}, {"ratio", one.ratio}, {"seconds", one.seconds}, {"times", one.times}, {"why", one.why}});
  }
  for (const Troubles::Excluded& one : troubles.excluded)
    excluded.push_back({{"host", one.host}, {"reason", one.reason}});
  return {{"failures", std::move(failures)}, {"stragglers", std::move(stragglers)}, {"excluded", std::move(excluded)}};
}

}  // namespace cairn::tools
