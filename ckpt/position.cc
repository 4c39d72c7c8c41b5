#include "ckpt/position.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/json/json.h"
#include "runtime/telemetry/metrics.h"

namespace cairn::ckpt {
namespace {

using nlohmann::json;
using trainer::GuardState;
using trainer::PatienceState;
using trainer::TrainPosition;

json number_or_null(double x) { return std::isfinite(x) ? json(x) : json(nullptr); }

json past_json(const RunPast& past) {
  json points = json::array();
  for (const PastPoint& point : past.points) points.push_back({point.step, point.samples, point.tokens});
  json out{{"points", std::move(points)}, {"lr_step", past.lr_step}, {"lr", number_or_null(past.lr)}};
  if (past.moments_from != 0) out["moments_from"] = past.moments_from;
  return out;
}

/// Floats as hex digits of their bits, eight each: exact, and shorter than numbers.
std::string bits_text(const std::vector<float>& values) {
  std::string out;
  for (const float value : values) out += fmt::format("{:08x}", std::bit_cast<uint32_t>(value));
  return out;
}

json guards_json(const GuardState& guards) {
  json out = json::object();
  if (guards.level != 0) {
    out = {{"level", guards.level},
           {"losses", bits_text(guards.losses)},
           {"norms", bits_text(guards.norms)},
           {"outliers_in_row", guards.outliers_in_row}};
  }
  if (guards.skipped != 0) out["skipped"] = guards.skipped;
  if (!guards.skipped_steps.empty()) out["skipped_steps"] = guards.skipped_steps;
  if (!guards.without_targets.empty()) out["without_targets"] = guards.without_targets;
  if (!guards.recomputed.empty()) out["recomputed"] = guards.recomputed;
  if (guards.audited != 0) out["audited"] = guards.audited;
  if (guards.replicated != 0) out["replicated"] = guards.replicated;
  return out;
}

json patience_json(const PatienceState& state) {
  return {{"metric", state.metric},
          {"best", number_or_null(state.best)},
          {"best_step", state.best_step},
          {"evaluations", state.evaluations},
          {"without", state.without}};
}

json state_of(const TrainPosition& position) {
  json out;
  out["lr"] = number_or_null(position.lr);
  out["loss"] = number_or_null(position.loss);
  out["seed"] = position.seed;
  if (const optim::LossScale& s = position.loss_scale; s.scale > 0) {
    out["loss_scale"] = {{"scale", s.scale},
                         {"good_steps", s.good_steps},
                         {"hysteresis_left", s.hysteresis_left},
                         {"skipped", s.skipped}};
  }
  if (position.guards != GuardState{}) out["guards"] = guards_json(position.guards);
  if (position.patience != PatienceState{}) out["patience"] = patience_json(position.patience);
  if (position.past != RunPast{}) out["past"] = past_json(position.past);
  // As JSON where it is JSON, so that a person can read it in the manifest; any other text stays text.
  json sampler = json_or_nothing(position.sampler);
  out["sampler"] = sampler.is_object() ? std::move(sampler) : json(position.sampler);
  return out;
}

Error wrong(const char* field, const json& found) {
  return Error{ErrorCode::kCorrupt,
               fmt::format("training position: {} is {}", field, found.is_null() ? "missing" : json_text(found))};
}

Status read_double(const json& object, const char* field, double& out) {
  const auto it = object.find(field);
  if (it == object.end()) return {};
  if (it->is_null()) {
    out = std::numeric_limits<double>::quiet_NaN();
  } else if (it->is_number()) {
    out = it->get<double>();
  } else {
    return wrong(field, *it);
  }
  return {};
}

/// Steps, samples, tokens: no run comes near 2^53, and what is counted on from there stays far from overflow.
constexpr int64_t kMostCount = int64_t{1} << 53;

Status read_count(const json& object, const char* field, int64_t& out, int64_t least = 0) {
  const json found = json_field(object, field);
  const std::optional<int64_t> count = json_integer(found, least, kMostCount);
  if (!count) return wrong(field, found);
  out = *count;
  return {};
}

Status read_past(const json& object, RunPast& out) {
  const json points = json_field(object, "points");
  if (!points.is_array()) return wrong("past.points", points);
  for (const json& point : points) {
    const bool counts = point.is_array() && point.size() == 3 && std::ranges::all_of(point, [](const json& number) {
                          return json_integer(number, 0, kMostCount).has_value();
                        });
    if (!counts) return wrong("past.points", point);
    const PastPoint next{point[0].get<int64_t>(), point[1].get<int64_t>(), point[2].get<int64_t>()};
    const PastPoint before = out.points.empty() ? PastPoint{} : out.points.back();
    if (next.step < before.step || next.samples < before.samples || next.tokens < before.tokens) {
      return wrong("past.points", points);
    }
    out.points.push_back(next);
  }
  RT_TRY(read_count(object, "lr_step", out.lr_step));
  if (object.contains("moments_from")) RT_TRY(read_count(object, "moments_from", out.moments_from, -kMostCount));
  return read_double(object, "lr", out.lr);
}

Status read_bits(const json& object, const char* field, std::vector<float>& out) {
  const json found = json_field(object, field);
  if (!found.is_string()) return wrong(field, found);
  const auto& text = found.get_ref<const std::string&>();
  if (text.size() % 8 != 0 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    return wrong(field, found);
  for (size_t at = 0; at < text.size(); at += 8)
    out.push_back(std::bit_cast<float>(static_cast<uint32_t>(std::stoul(text.substr(at, 8), nullptr, 16))));
  return {};
}

Status read_steps(const json& object, const char* field, std::vector<int64_t>& out) {
  const auto found = object.find(field);
  if (found == object.end()) return {};
  if (!found->is_array()) return wrong(field, *found);
  for (const json& step : *found) {
    const std::optional<int64_t> number = json_integer(step, 1, kMostCount);
    if (!number || (!out.empty() && *number <= out.back())) return wrong(field, *found);
    out.push_back(*number);
  }
  return {};
}

Status read_guards(const json& object, GuardState& out) {
  if (!object.is_object()) return wrong("guards", object);
  if (const auto level = object.find("level"); level != object.end()) {
    if (!level->is_number_unsigned()) return wrong("guards.level", *level);
    out.level = level->get<uint64_t>();
    RT_TRY(read_bits(object, "losses", out.losses));
    RT_TRY(read_bits(object, "norms", out.norms));
    RT_TRY(read_count(object, "outliers_in_row", out.outliers_in_row));
  }
  if (object.contains("skipped")) RT_TRY(read_count(object, "skipped", out.skipped));
  if (object.contains("audited")) RT_TRY(read_count(object, "audited", out.audited));
  if (object.contains("replicated")) RT_TRY(read_count(object, "replicated", out.replicated));
  RT_TRY(read_steps(object, "skipped_steps", out.skipped_steps));
  RT_TRY(read_steps(object, "without_targets", out.without_targets));
  return read_steps(object, "recomputed", out.recomputed);
}

Status read_patience(const json& object, PatienceState& out) {
  const json metric = json_field(object, "metric");
  if (!metric.is_string()) return wrong("patience.metric", metric);
  out.metric = metric.get<std::string>();
  RT_TRY(read_double(object, "best", out.best));
  RT_TRY(read_count(object, "best_step", out.best_step));
  RT_TRY(read_count(object, "evaluations", out.evaluations));
  return read_count(object, "without", out.without);
}

Status read_state(const json& object, TrainPosition& out) {
  RT_TRY(read_double(object, "lr", out.lr));
  RT_TRY(read_double(object, "loss", out.loss));
  if (const auto it = object.find("loss_scale"); it != object.end()) {
    if (!it->is_object()) return wrong("loss_scale", *it);
    RT_TRY(read_double(*it, "scale", out.loss_scale.scale));
    RT_TRY(read_count(*it, "good_steps", out.loss_scale.good_steps));
    RT_TRY(read_count(*it, "hysteresis_left", out.loss_scale.hysteresis_left));
    RT_TRY(read_count(*it, "skipped", out.loss_scale.skipped));
    if (!(out.loss_scale.scale > 0)) return wrong("loss_scale.scale", *it);
  }
  if (const auto it = object.find("guards"); it != object.end()) RT_TRY(read_guards(*it, out.guards));
  if (const auto it = object.find("patience"); it != object.end()) RT_TRY(read_patience(*it, out.patience));
  if (const auto it = object.find("past"); it != object.end()) RT_TRY(read_past(*it, out.past));
  if (const auto it = object.find("seed"); it != object.end()) {
    if (!it->is_number_unsigned()) return wrong("seed", *it);
    out.seed = it->get<uint64_t>();
  }
  if (const auto it = object.find("sampler"); it != object.end()) {
    if (!it->is_string() && !it->is_object()) return wrong("sampler", *it);
    out.sampler = it->is_string() ? it->get<std::string>() : json_text(*it);
  }
  return {};
}

}  // namespace

std::string encode_position(const TrainPosition& position) {
  json out = state_of(position);
  out["step"] = position.step;
  out["samples"] = position.samples;
  out["tokens"] = position.tokens;
  if (json metrics = json_or_nothing(position.metrics); metrics.is_object()) {
    out["metrics"] = std::move(metrics);
  }
  return json_text(out);
}

std::string encode_position(TrainPosition position, int64_t most_bytes) {
  std::string text = encode_position(position);
  if (std::ssize(text) <= most_bytes) return text;
  position.metrics.clear();
  return encode_position(position);
}

Result<TrainPosition> decode_position(std::string_view text) {
  const json object = json_or_nothing(text);
  if (!object.is_object()) return Error{ErrorCode::kCorrupt, "training position: not a JSON object"};
  TrainPosition out;
  RT_TRY(read_count(object, "step", out.step));
  RT_TRY(read_count(object, "samples", out.samples));
  RT_TRY(read_count(object, "tokens", out.tokens));
  RT_TRY(read_state(object, out));
  if (const auto it = object.find("metrics"); it != object.end()) out.metrics = json_text(*it);
  return out;
}

std::string encode_past(const RunPast& past) { return json_text(past_json(past)); }

Result<RunPast> decode_past(std::string_view text) {
  RunPast out;
  RT_TRY(read_past(json_or_nothing(text), out));
  return out;
}

void put_position(const TrainPosition& position, Manifest& manifest) {
  manifest.step = position.step;
  manifest.samples = position.samples;
  manifest.tokens = position.tokens;
  manifest.state = json_text(state_of(position));
  manifest.metrics.clear();
  if (std::isfinite(position.loss)) manifest.metrics["loss"] = position.loss;
  const json told = json_or_nothing(position.metrics);  // of this very step, or empty
  const Result<telemetry::StepMetrics> metrics = telemetry::step_metrics_from_json(told);
  if (!metrics.ok()) return;  // no metrics, or those of another build
  for (const auto& [name, value] : telemetry::named_values(metrics.value())) {
    if (std::isfinite(value)) manifest.metrics.emplace(metric_key(name), value);
  }
}

Result<TrainPosition> position_of(const Manifest& manifest) {
  TrainPosition out{.step = manifest.step, .samples = manifest.samples, .tokens = manifest.tokens};
  const json object = json_or_nothing(manifest.state);
  if (!object.is_object()) return Error{ErrorCode::kCorrupt, "training position: the manifest's state is no object"};
  for (const auto& [field, count] : {std::pair("samples", out.samples), {"tokens", out.tokens}}) {
    if (count > kMostCount) return wrong(field, count);
  }
  RT_TRY(read_state(object, out));
  return out;
}

}  // namespace cairn::ckpt
