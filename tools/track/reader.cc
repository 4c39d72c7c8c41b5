#include "tools/track/reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

#include "runtime/json/json.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Seeks, and reads the next complete line; false: there is none yet.
bool read_line(std::ifstream& in, int64_t at, std::string& line) {
  in.clear();
  in.seekg(at);
  return static_cast<bool>(std::getline(in, line)) && !in.eof();
}

/// The numbers of a line of metrics.jsonl by name; those of an object as "object/name".
void add_values(const json& line, const std::string& prefix, std::vector<std::pair<std::string, double>>& out) {
  for (const auto& [name, value] : line.items()) {
    if (prefix.empty() && (name == "step" || name == "time")) continue;
    if (value.is_object() && (prefix.empty() || prefix == "eval/")) add_values(value, prefix + name + "/", out);
    if (value.is_number() && std::isfinite(value.get<double>())) out.emplace_back(prefix + name, value.get<double>());
  }
}

}  // namespace

json to_json(const TrackPosition& position) {
  return {{"metrics_bytes", position.metrics_bytes},
          {"events_bytes", position.events_bytes},
          {"step", position.step},
          {"counts", position.counts}};
}

Result<TrackPosition> position_from_json(const json& from) {
  TrackPosition out;
  for (const auto& [name, into] : {std::pair("metrics_bytes", &out.metrics_bytes),
                                   std::pair("events_bytes", &out.events_bytes), std::pair("step", &out.step)}) {
    const std::optional<int64_t> value = json_integer(json_field(from, name), 0, INT64_MAX);
    if (!value) return Error{ErrorCode::kCorrupt, fmt::format("expected a number \"{}\"", name)};
    *into = *value;
  }
  const json& counts = json_field(from, "counts");
  if (!counts.is_object()) return Error{ErrorCode::kCorrupt, "expected an object \"counts\""};
  for (const auto& [kind, count] : counts.items()) {
    if (const auto value = json_integer(count, 0, INT64_MAX)) out.counts[kind] = *value;
  }
  return out;
}

TrackReader::TrackReader(fs::path run, TrackPosition from)
    : run_(std::move(run)), at_(std::move(from)), looked_bytes_(at_.metrics_bytes) {}

/// Marks behind the position, up to the end of the file.
Status TrackReader::look_for_marks(std::ifstream& in) {
  constexpr std::string_view kBegin = "{\"resumed_at\":";
  std::string line;
  in.clear();
  in.seekg(looked_bytes_);
  while (std::getline(in, line) && !in.eof()) {
    if (std::string_view(line).starts_with(kBegin)) {
      if (const auto step = json_integer(json_field(json_or_nothing(line), "resumed_at"), 0, INT64_MAX))
        marks_.emplace_back(looked_bytes_, *step);
    }
    looked_bytes_ += std::ssize(line) + 1;
  }
  if (in.bad()) return Error{ErrorCode::kIo, (run_ / "metrics.jsonl").string() + ": cannot be read"};
  return {};
}

bool TrackReader::superseded(int64_t offset, int64_t step) const {
  return std::ranges::any_of(marks_, [&](const auto& mark) { return mark.first > offset && mark.second < step; });
}

Result<TrackBatch> TrackReader::next(int64_t most) {
  const fs::path path = run_ / "metrics.jsonl";
  std::ifstream metrics(path, std::ios::binary), events(run_ / "events.jsonl", std::ios::binary);
  if (!metrics) return Error{ErrorCode::kInvalidInput, path.string() + ": no metrics; is this a run folder?"};
  std::error_code problem;
  if (const auto bytes = fs::file_size(path, problem); !problem && static_cast<int64_t>(bytes) < at_.metrics_bytes) {
    at_.metrics_bytes = at_.events_bytes = looked_bytes_ = 0;  // another file than before: steps given stay given
    at_.counts.clear();
    marks_.clear();
  }
  std::erase_if(marks_, [&](const auto& mark) { return mark.first < at_.metrics_bytes; });
  RT_TRY(look_for_marks(metrics));
  TrackBatch out{.steps = {}, .behind = at_};
  TrackPosition& at = out.behind;
  std::string line, event_line;
  while (std::ssize(out.steps) < most && at.metrics_bytes < looked_bytes_ &&
         read_line(metrics, at.metrics_bytes, line)) {
    const int64_t begin = at.metrics_bytes;
    at.metrics_bytes += std::ssize(line) + 1;
    const json record = json_or_nothing(line);
    const std::optional<int64_t> step = json_integer(json_field(record, "step"), 1, INT64_MAX);
    if (!step || *step <= at.step || superseded(begin, *step)) continue;
    TrackedStep one{.step = *step, .time = json_number(record, "time")};
    add_values(record, "", one.values);
    std::map<std::string, int64_t> changed;
    while (read_line(events, at.events_bytes, event_line)) {
      const json event = json_or_nothing(event_line);
      if (json_number(event, "time") > one.time) break;
      at.events_bytes += std::ssize(event_line) + 1;
      if (const std::string kind = json_string(event, "event"); !kind.empty()) changed[kind] = ++at.counts[kind];
    }
    for (const auto& [kind, count] : changed) one.values.emplace_back("events/" + kind, static_cast<double>(count));
    at.step = *step;
    out.steps.push_back(std::move(one));
  }
  return out;
}

TrackedStep TrackReader::late_events() const {
  TrackedStep out{.step = at_.step + 1};
  std::ifstream events(run_ / "events.jsonl", std::ios::binary);
  std::map<std::string, int64_t> counts = at_.counts, changed;
  std::string line;
  for (int64_t at = at_.events_bytes; read_line(events, at, line); at += std::ssize(line) + 1) {
    const json event = json_or_nothing(line);
    const std::string kind = json_string(event, "event");
    if (kind.empty()) continue;
    changed[kind] = ++counts[kind];
    out.time = std::max(out.time, json_number(event, "time"));
  }
  for (const auto& [kind, count] : changed) out.values.emplace_back("events/" + kind, static_cast<double>(count));
  return out;
}

std::optional<int64_t> exit_code_of(const fs::path& run) {
  std::optional<int64_t> out;
  std::ifstream in(run / "events.jsonl", std::ios::binary);
  for (std::string line; std::getline(in, line) && !in.eof();) {
    const bool start = line.find("\"event\":\"start\"") != std::string::npos;
    if (start) out.reset();
    if (start || line.find("\"event\":\"end\"") == std::string::npos) continue;
    const json event = json_or_nothing(line);
    if (json_string(event, "event") == "end") out = json_count(event, "exit_code");
  }
  return out;
}

}  // namespace cairn::tools
