#include "runtime/telemetry/trace.h"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "runtime/core/new_file.h"
#include "runtime/json/json.h"

namespace cairn::telemetry {
namespace {

using nlohmann::json;

constexpr int64_t kAgentProcess = 1 << 30;  // no rank's number

template <size_t N>
void put(char (&to)[N], std::string_view from) {
  const size_t n = std::min(from.size(), N - 1);
  std::memcpy(to, from.data(), n);
  to[n] = '\0';
}

double us(int64_t ns) { return static_cast<double>(ns) / 1e3; }

json process_metadata(int64_t process, const std::string& name, int64_t place) {
  return json::array(
      {{{"ph", "M"}, {"name", "process_name"}, {"pid", process}, {"tid", 0}, {"args", {{"name", name}}}},
       {{"ph", "M"}, {"name", "process_sort_index"}, {"pid", process}, {"tid", 0}, {"args", {{"sort_index", place}}}}});
}

std::string file_of(const json& events) {
  std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  for (size_t i = 0; i < events.size(); ++i) {
    out += json_text(events[i]);
    out += i + 1 < events.size() ? ",\n" : "\n";
  }
  return out + "]}\n";
}

}  // namespace

thread_local Recorder::Lane* Recorder::lane_ = nullptr;

int64_t trace_clock_ns() {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

std::string_view phase_name(Phase phase) {
  constexpr std::array<std::string_view, kPhases> kNames = {
      "other", "data", "forward", "backward", "pipeline", "reduce", "optimizer", "validation", "checkpoint", "log"};
  return kNames[static_cast<size_t>(phase)];
}

Result<TraceWindow> parse_trace_window(std::string_view text) {
  std::string_view rest = text;
  if (rest.starts_with("steps=")) rest.remove_prefix(6);
  const size_t dots = rest.find("..");
  const auto number = [](std::string_view word, int64_t& into) {
    const auto [end, problem] = std::from_chars(word.data(), word.data() + word.size(), into);
    return problem == std::errc() && end == word.data() + word.size() && into >= 1;
  };
  TraceWindow window;
  const bool ok = dots == std::string_view::npos
                      ? number(rest, window.first) && number(rest, window.last)
                      : number(rest.substr(0, dots), window.first) && number(rest.substr(dots + 2), window.last);
  if (!ok || window.empty()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("trace window {}: expected steps=A..B with 1 <= A <= B, or one step", text)};
  }
  return window;
}

Recorder::Recorder(TraceWindow window, int64_t rank, std::string process_name)
    : window_(window), rank_(rank), process_name_(std::move(process_name)) {}

Recorder::~Recorder() {
  if (lane_ != nullptr && lane_->recorder == this) lane_ = nullptr;
}

void Recorder::attach(std::string_view name) {
  auto lane = std::make_unique<Lane>();
  lane->recorder = this;
  lane->name = name;
  lane->since_ns = trace_clock_ns();
  lane_ = lane.get();
  const std::lock_guard lock(mutex_);
  lanes_.push_back(std::move(lane));
}

void Recorder::detach() { lane_ = nullptr; }

Recorder* Recorder::current() { return lane_ == nullptr ? nullptr : lane_->recorder; }

void Recorder::begin_step(int64_t step) {
  step_.store(step, std::memory_order_relaxed);
  drawing_.store(window_.contains(step), std::memory_order_relaxed);
}

bool Recorder::end_window() {
  drawing_.store(false, std::memory_order_relaxed);
  return !window_.empty() && step_.load(std::memory_order_relaxed) >= window_.first;
}

StepSplit Recorder::take_split() {
  StepSplit split{};
  if (lane_ == nullptr || lane_->recorder != this) return split;
  lane_->enter(lane_->phase, trace_clock_ns());
  for (size_t i = 0; i < kPhases; ++i) split[i] = static_cast<double>(lane_->spent_ns[i]) / 1e6;
  lane_->spent_ns = {};
  return split;
}

Phase Recorder::Lane::enter(Phase next, int64_t now_ns) {
  spent_ns[static_cast<size_t>(phase)] += now_ns - since_ns;
  since_ns = now_ns;
  return std::exchange(phase, next);
}

void Recorder::Lane::draw(const char* category, std::string_view bar, int64_t begin_ns, int64_t end_ns,
                          const TraceArgs& args) {
  Event& event = events.emplace_back();
  event.begin_ns = begin_ns;
  event.end_ns = end_ns;
  event.step = recorder->step_.load(std::memory_order_relaxed);
  event.bytes = args.bytes;
  event.layer = args.layer;
  event.micro_batch = args.micro_batch;
  event.chunk = args.chunk;
  event.flow = args.flow;
  event.flow_begins = args.flow_begins;
  event.category = category;
  put(event.name, bar);
  put(event.group, args.group);
  put(event.what, args.what);
}

std::string Recorder::to_json() const {
  const std::lock_guard lock(mutex_);
  json events = process_metadata(rank_, process_name_, rank_);
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    events.push_back({{"ph", "M"},
                      {"name", "thread_name"},
                      {"pid", rank_},
                      {"tid", lane},
                      {"args", {{"name", lanes_[lane]->name}}}});
    for (const Event& event : lanes_[lane]->events) {
      json args = {{"step", event.step}};
      if (event.bytes >= 0) args["bytes"] = event.bytes;
      if (event.layer >= 0) args["layer"] = event.layer;
      if (event.micro_batch >= 0) args["micro_batch"] = event.micro_batch;
      if (event.chunk >= 0) args["chunk"] = event.chunk;
      if (event.group[0] != '\0') args["group"] = event.group;
      if (event.what[0] != '\0') args["what"] = event.what;
      events.push_back({{"ph", "X"},
                        {"cat", event.category},
                        {"name", event.name},
                        {"pid", rank_},
                        {"tid", lane},
                        {"ts", us(event.begin_ns)},
                        {"dur", us(event.end_ns - event.begin_ns)},
                        {"args", std::move(args)}});
      if (event.flow == 0) continue;
      // A flow's end binds to the bar that encloses it: the receive.
      json flow = {{"ph", event.flow_begins ? "s" : "f"},
                   {"cat", "p2p"},
                   {"name", "message"},
                   {"id", fmt::format("{:016x}", event.flow)},
                   {"pid", rank_},
                   {"tid", lane},
                   {"ts", us(event.flow_begins ? event.begin_ns : event.end_ns)}};
      if (!event.flow_begins) flow["bp"] = "e";
      events.push_back(std::move(flow));
    }
  }
  return file_of(events);
}

PhaseScope::PhaseScope(Phase phase, const TraceArgs& args) : lane_(Recorder::lane_), phase_(phase) {
  if (lane_ == nullptr) return;
  const int64_t now_ns = trace_clock_ns();
  before_ = lane_->enter(phase, now_ns);
  if (!lane_->recorder->drawing()) return;
  begin_ns_ = now_ns;
  args_ = args;
}

PhaseScope::~PhaseScope() {
  if (lane_ == nullptr) return;
  const int64_t now_ns = trace_clock_ns();
  lane_->enter(before_, now_ns);
  if (begin_ns_ != 0) lane_->draw("phase", phase_name(phase_), begin_ns_, now_ns, args_);
}

void TraceScope::begin(const char* category, const char* name, const TraceArgs& args) {
  category_ = category;
  name_ = name;
  args_ = args;
  begin_ns_ = trace_clock_ns();
}

void TraceScope::end() { lane_->draw(category_, name_, begin_ns_, trace_clock_ns(), args_); }

Status merge_traces(const std::vector<TracePart>& parts, const std::vector<TraceSpan>& agent,
                    const std::filesystem::path& out) {
  json events = process_metadata(kAgentProcess, "agent", -1);  // above the ranks
  for (const TraceSpan& span : agent) {
    json args = json::object();
    if (span.bytes >= 0) args["bytes"] = span.bytes;
    events.push_back({{"ph", "X"},
                      {"cat", "checkpoint"},
                      {"name", span.name},
                      {"pid", kAgentProcess},
                      {"tid", 0},
                      {"ts", us(span.begin_ns)},
                      {"dur", us(span.end_ns - span.begin_ns)},
                      {"args", std::move(args)}});
  }
  for (const auto& [path, ahead_ns] : parts) {
    std::ifstream in(path, std::ios::binary);
    if (!in) return os_error(errno, path.string());
    json trace = json_or_nothing(std::string(std::istreambuf_iterator<char>(in), {}));
    if (!trace.is_object() || !trace.contains("traceEvents") || !trace["traceEvents"].is_array()) {
      return Error{ErrorCode::kCorrupt, fmt::format("{}: no trace", path.string())};
    }
    for (json& event : trace["traceEvents"]) {
      const json& at = json_field(event, "ts");
      if (at.is_number()) event["ts"] = at.get<double>() - us(ahead_ns);
      if (event.is_object() && (at.is_number() || at.is_null())) events.push_back(std::move(event));
    }
  }
  double first = std::numeric_limits<double>::infinity();
  for (const json& event : events) {
    if (event.contains("ts")) first = std::min(first, event["ts"].get<double>());
  }
  for (json& event : events) {
    if (event.contains("ts")) event["ts"] = event["ts"].get<double>() - first;
  }
  return place_file(out, file_of(events), Durable::kNo);
}

}  // namespace cairn::telemetry
