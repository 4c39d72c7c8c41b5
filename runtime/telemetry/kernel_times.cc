#include "runtime/telemetry/kernel_times.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/core/count_text.h"
#include "runtime/json/json.h"

namespace cairn::telemetry {

using nlohmann::json;

namespace {

constexpr size_t kMostLines = 25;  // of single ops

/// "8192x3072x768 bias gelu"
std::string shape_of(const OpTime& op) {
  std::string out;
  for (const int64_t size : op.sizes) out += fmt::format("{}{}", out.empty() ? "" : "x", size);
  for (const std::string& word : op.words) out += fmt::format("{}{}", out.empty() ? "" : " ", word);
  return out;
}

Error ill(const char* field) { return Error{ErrorCode::kCorrupt, fmt::format("kernel times: no valid \"{}\"", field)}; }

Result<int64_t> count_in(const json& from, const char* field) {
  const std::optional<int64_t> out = json_integer(json_field(from, field), 0, INT64_MAX);
  if (!out) return ill(field);
  return *out;
}

Result<double> ms_in(const json& from, const char* field) {
  const json& value = json_field(from, field);
  if (!value.is_number() || !std::isfinite(value.get<double>())) return ill(field);
  return value.get<double>();
}

Result<std::string> text_in(const json& from, const char* field) {
  const json& value = json_field(from, field);
  if (!value.is_string()) return ill(field);
  return value.get<std::string>();
}

Result<OpTime> op_from_json(const json& from) {
  OpTime out;
  RT_TRY_SET(out.name, text_in(from, "op"));
  RT_TRY_SET(out.calls, count_in(from, "calls"));
  RT_TRY_SET(out.ms, ms_in(from, "ms"));
  const json &sizes = json_field(from, "sizes"), &words = json_field(from, "words");
  if (!sizes.is_array()) return ill("sizes");
  if (!words.is_array()) return ill("words");
  for (const json& size : sizes) {
    if (!size.is_number_integer()) return ill("sizes");
    out.sizes.push_back(size.get<int64_t>());
  }
  for (const json& word : words) {
    if (!word.is_string()) return ill("words");
    out.words.push_back(word.get<std::string>());
  }
  return out;
}

}  // namespace

json to_json(const KernelTimes& of) {
  json ops = json::array();
  for (const OpTime& op : of.times.ops) {
    ops.push_back({{"op", op.name}, {"sizes", op.sizes}, {"words", op.words}, {"calls", op.calls}, {"ms", op.ms}});
  }
  return {{"rank", of.rank},
          {"device", of.device},
          {"steps", of.times.steps},
          {"left_out", of.times.left_out},
          {"steps_ms", of.times.steps_ms()},
          {"gaps_ms", of.times.gaps_ms},
          {"ops", std::move(ops)}};
}

Result<KernelTimes> kernel_times_from_json(const json& from) {
  KernelTimes out;
  RT_TRY_SET(out.rank, count_in(from, "rank"));
  RT_TRY_SET(out.device, text_in(from, "device"));
  RT_TRY_SET(out.times.steps, count_in(from, "steps"));
  RT_TRY_SET(out.times.left_out, count_in(from, "left_out"));
  RT_TRY_SET(out.times.gaps_ms, ms_in(from, "gaps_ms"));
  const json& ops = json_field(from, "ops");
  if (!ops.is_array()) return ill("ops");
  for (const json& op : ops) {
    RT_TRY_SET(OpTime one, op_from_json(op));
    out.times.ops.push_back(std::move(one));
  }
  return out;
}

std::vector<std::string> table_of(const KernelTimes& of) {
  const OpTimes& times = of.times;
  const std::string who = fmt::format("kernel times of rank {} on {}", of.rank, of.device);
  if (times.steps == 0) {
    return {fmt::format("{}: none; the first {} of a start do not count, and there were no more", who,
                        count_text(OpClock::kWarmUpSteps, "step"))};
  }
  const auto steps = static_cast<double>(times.steps);
  const double all = times.steps_ms();
  const auto shown = static_cast<std::ptrdiff_t>(std::min(times.ops.size(), kMostLines));
  size_t name = 5, shape = 5;  // columns
  for (auto op = times.ops.begin(); op != times.ops.begin() + shown; ++op) {
    name = std::max(name, op->name.size());
    shape = std::max(shape, shape_of(*op).size());
  }
  const auto line = [&](std::string_view what, std::string_view sizes, const std::string& calls, double ms) {
    return fmt::format("  {:<{}}  {:<{}}  {:>8}  {:>10.3f}  {:>5.1f}%", what, name, sizes, shape, calls, ms / steps,
                       all > 0 ? 100 * ms / all : 0);
  };
  const auto calls_text = [&](int64_t calls) {
    const double mean = static_cast<double>(calls) / steps;
    return calls % times.steps == 0 ? fmt::format("{}", calls / times.steps) : fmt::format("{:.1f}", mean);
  };
  std::vector<std::string> out = {
      fmt::format("{}, of a step (mean of {}; the first {} left out)", who, times.steps, times.left_out),
      fmt::format("  {:<{}}  {:<{}}  {:>8}  {:>10}  {:>6}", "op", name, "sizes", shape, "calls", "ms", "share")};
  for (auto op = times.ops.begin(); op != times.ops.begin() + shown; ++op) {
    out.push_back(line(op->name, shape_of(*op), calls_text(op->calls), op->ms));
  }
  if (const size_t others = times.ops.size() - static_cast<size_t>(shown); others > 0) {
    OpTime sum;
    for (auto op = times.ops.begin() + shown; op != times.ops.end(); ++op) {
      sum.calls += op->calls;
      sum.ms += op->ms;
    }
    out.push_back(line("other", fmt::format("({})", count_text(others, "kind")), calls_text(sum.calls), sum.ms));
  }
  out.push_back(line("gaps", "", "", times.gaps_ms));
  out.push_back(line("step", "", "", all));
  return out;
}

}  // namespace cairn::telemetry
