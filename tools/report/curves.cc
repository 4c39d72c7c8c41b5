#include "tools/report/curves.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace cairn::tools {
namespace {

using nlohmann::json;
using telemetry::StepMetrics;

constexpr int64_t kNumberBytes = 9;      // of text: six digits, point, comma, now and then a sign
constexpr int64_t kFinePerCoarse = 4;    // buckets of the loss for one of the other series
constexpr int64_t kLeastBuckets = 100;   // however little the bytes are
constexpr int64_t kSparseBuckets = 500;  // evaluations, saves, an abandoned piece
constexpr int64_t kMostPieces = 20;      // the newest
constexpr size_t kMostSources = 24, kMostNotFinite = 200;

struct Series {
  std::string name;
  std::vector<double> values;  // one a step; NaN: missing
  bool nan_counts = false, mean_only = false, fine = false;
};

json numbers(const std::vector<double>& values) {
  json out = json::array();
  for (const double value : values) out.push_back(std::isfinite(value) ? json(rounded(value)) : json());
  return out;
}

/// Axes and series of one report; every series names its axis.
class Curves {
 public:
  explicit Curves(const std::vector<StepMetrics>& steps) : steps_(steps) {}

  size_t add_axis(std::span<const StepMetrics> steps, int64_t each) {
    json step = json::array(), tokens = json::array(), seconds = json::array();
    const double digits = steps_.back().time - steps_.front().time < 1000 ? 1000 : 10;
    for (size_t k = 0; k < steps.size(); k += static_cast<size_t>(each)) {
      step.push_back(steps[k].step);
      tokens.push_back(steps[k].tokens);
      const double since = steps[k].time - steps_.front().time;
      seconds.push_back(std::isfinite(since) ? json(std::round(since * digits) / digits) : json());
    }
    axes_.push_back({{"each", each}, {"step", step}, {"tokens", tokens}, {"seconds", seconds}});
    axes_.back()["last_step"] = steps.back().step;
    return axes_.size() - 1;
  }

  json series(const Series& of, std::span<const StepMetrics> steps, size_t axis, int64_t each) const {
    const Reduced reduced = reduce(of.values, each, of.nan_counts);
    json out{{"axis", axis}, {"mean", numbers(reduced.mean)}};
    if (each > 1 && !of.mean_only) {
      out["least"] = numbers(reduced.least);
      out["greatest"] = numbers(reduced.greatest);
    }
    if (!reduced.not_finite.empty()) {
      json at = json::array();
      for (size_t k = 0; k < std::min(reduced.not_finite.size(), kMostNotFinite); ++k)
        at.push_back(steps[static_cast<size_t>(reduced.not_finite[k])].step);
      out["not_finite"] = {{"count", reduced.not_finite.size()}, {"steps", std::move(at)}};
    }
    return out;
  }

  /// Values at some of the steps, on an axis of their own.
  void add_sparse(Series of, std::span<const StepMetrics> at) {
    if (at.empty()) return;
    const int64_t each = (std::ssize(at) + kSparseBuckets - 1) / kSparseBuckets;
    const size_t axis = add_axis(at, each);
    named_[of.name] = series(of, at, axis, each);
  }

  void add_dense(const std::vector<Series>& all, int64_t bytes) {
    if (steps_.empty() || all.empty()) return;
    const auto n = std::ssize(steps_);
    const auto fine = std::ranges::count(all, true, &Series::fine), coarse = std::ssize(all) - fine;
    int64_t fine_each = 1, coarse_each = 1;
    if (kNumberBytes * n * (std::ssize(all) + 3) > bytes) {
      const int64_t bucket = kNumberBytes * 3 * (coarse + 1 + kFinePerCoarse * (fine + 1));
      const int64_t buckets = std::max(kLeastBuckets, bytes / bucket);
      coarse_each = (n + buckets - 1) / buckets;
      fine_each = std::max<int64_t>(1, coarse_each / kFinePerCoarse);
    }
    const size_t fine_axis = add_axis(steps_, fine_each);
    const size_t coarse_axis = coarse_each == fine_each ? fine_axis : add_axis(steps_, coarse_each);
    for (const Series& of : all)
      named_[of.name] = series(of, steps_, of.fine ? fine_axis : coarse_axis, of.fine ? fine_each : coarse_each);
  }

  void add_abandoned(std::span<const StepMetrics> piece) {
    Series loss{.name = "loss", .nan_counts = true};
    for (const StepMetrics& step : piece) loss.values.push_back(step.loss);
    const int64_t each = (std::ssize(piece) + kSparseBuckets - 1) / kSparseBuckets;
    const size_t axis = add_axis(piece, each);
    abandoned_.push_back(series(loss, piece, axis, each));
  }

  json take() {
    return {{"axes", std::move(axes_)}, {"series", std::move(named_)}, {"abandoned", std::move(abandoned_)}};
  }

 private:
  const std::vector<StepMetrics>& steps_;
  json axes_ = json::array(), named_ = json::object(), abandoned_ = json::array();
};

using Named = std::vector<std::pair<std::string, double>>;

/// A series for each name that the steps have, at most `most`; returns the number of names left out.
int64_t add_named(const std::string& before, const std::vector<StepMetrics>& steps, Named StepMetrics::*field,
                  size_t most, bool mean_only, std::vector<Series>& out) {
  std::map<std::string, size_t> known;
  int64_t left_out = 0;
  for (size_t k = 0; k < steps.size(); ++k) {
    for (const auto& [name, value] : steps[k].*field) {
      auto at = known.find(name);
      if (at == known.end()) {
        at = known.emplace(name, known.size() < most ? out.size() : SIZE_MAX).first;
        if (at->second == SIZE_MAX) {
          ++left_out;
        } else {
          out.push_back(
              {.name = before + name, .values = std::vector<double>(steps.size(), NAN), .mean_only = mean_only});
        }
      }
      if (at->second != SIZE_MAX) out[at->second].values[k] = value;
    }
  }
  return left_out;
}

void add_where_known(const char* name, const std::vector<StepMetrics>& steps,
                     const std::function<double(const StepMetrics&)>& value, std::vector<Series>& out) {
  Series of{.name = name};
  for (const StepMetrics& step : steps) of.values.push_back(value(step));
  if (!std::ranges::all_of(of.values, [](double one) { return std::isnan(one); })) out.push_back(std::move(of));
}

std::vector<Series> dense_series(const std::vector<StepMetrics>& steps, int64_t* left_out) {
  std::vector<Series> out(2);
  out[0] = {.name = "loss", .nan_counts = true, .fine = true};
  out[1] = {.name = "grad_norm", .nan_counts = true, .fine = true};
  for (const StepMetrics& step : steps) {
    out[0].values.push_back(step.loss);
    out[1].values.push_back(step.grad_norm);
  }
  const auto of = [](std::optional<double> StepMetrics::*field) {
    return [field](const StepMetrics& step) { return (step.*field).value_or(NAN); };
  };
  add_where_known(
      "lr", steps, [](const StepMetrics& step) { return step.lr; }, out);
  add_where_known(
      "tokens_per_s", steps, [](const StepMetrics& step) { return step.tokens_per_s; }, out);
  add_where_known(
      "step_ms", steps, [](const StepMetrics& step) { return step.step_ms; }, out);
  add_where_known("mfu", steps, of(&StepMetrics::mfu), out);
  add_where_known("tflops", steps, of(&StepMetrics::tflops), out);
  add_where_known("mtp_loss", steps, of(&StepMetrics::mtp_loss), out);
  add_where_known("loss_scale", steps, of(&StepMetrics::loss_scale), out);
  add_where_known("max_attention_score", steps, of(&StepMetrics::max_attention_score), out);
  *left_out = add_named("source_loss/", steps, &StepMetrics::source_loss, kMostSources, false, out);
  add_named("channel_loss/", steps, &StepMetrics::channel_loss, kMostSources, false, out);
  add_named("split_ms/", steps, &StepMetrics::split_ms, kMostSources, true, out);
  return out;
}

void add_evaluations(const std::vector<StepMetrics>& steps, Curves& curves) {
  std::vector<StepMetrics> at;
  std::ranges::copy_if(steps, std::back_inserter(at),
                       [](const StepMetrics& step) { return step.valid_loss.has_value(); });
  Series all{.name = "valid_loss", .nan_counts = true};
  for (const StepMetrics& step : at) all.values.push_back(*step.valid_loss);
  curves.add_sparse(std::move(all), at);
  std::vector<Series> sources;
  add_named("valid_source_loss/", at, &StepMetrics::valid_source_loss, kMostSources, false, sources);
  for (Series& source : sources) curves.add_sparse(std::move(source), at);
}

void add_tasks(const History& history, Curves& curves) {
  for (const TaskCurve& task : history.tasks) {
    std::vector<StepMetrics> at;
    Series series{.name = task.name, .nan_counts = true};
    for (const auto& [number, value] : task.points) {
      const auto step = std::ranges::lower_bound(history.steps, number, {}, &StepMetrics::step);
      if (step == history.steps.end() || step->step != number) continue;  // of a step that another start has left
      at.push_back(*step);
      series.values.push_back(value);
    }
    curves.add_sparse(std::move(series), at);
  }
}

void add_stalls(const History& history, Curves& curves) {
  std::vector<StepMetrics> at;
  std::ranges::copy_if(history.steps, std::back_inserter(at),
                       [](const StepMetrics& step) { return step.checkpoint_lost_ms > 0; });
  Series lost{.name = "checkpoint_lost_ms"};
  for (const StepMetrics& step : at) lost.values.push_back(step.checkpoint_lost_ms);
  curves.add_sparse(std::move(lost), at);
  Series seconds{.name = "save_seconds"}, pause{.name = "save_pause_ms"};
  at.clear();
  for (const Save& save : history.saves) {
    const auto step = std::ranges::lower_bound(history.steps, save.step, {}, &StepMetrics::step);
    if (step == history.steps.end() || (!at.empty() && step->step <= at.back().step)) continue;  // saved again
    at.push_back(*step);
    seconds.values.push_back(save.seconds);
    pause.values.push_back(save.pause_s * 1000);
  }
  curves.add_sparse(std::move(seconds), at);
  curves.add_sparse(std::move(pause), at);
}

/// Steps that follow one another, of those that were done again.
std::vector<std::span<const StepMetrics>> pieces_of(std::span<const StepMetrics> all) {
  std::vector<std::span<const StepMetrics>> out;
  for (size_t from = 0, to = 0; from < all.size(); from = to) {
    for (to = from + 1; to < all.size() && all[to].step - 1 == all[to - 1].step; ++to) continue;
    out.push_back(all.subspan(from, to - from));
  }
  return out;
}

}  // namespace

Reduced reduce(std::span<const double> values, int64_t each, bool nan_counts) {
  Reduced out{.each = each};
  for (size_t from = 0; from < values.size(); from += static_cast<size_t>(each)) {
    const size_t to = std::min(values.size(), from + static_cast<size_t>(each));
    double sum = 0, least = INFINITY, greatest = -INFINITY;
    int64_t count = 0;
    for (size_t k = from; k < to; ++k) {
      if (std::isfinite(values[k])) {
        sum += values[k], ++count;
        least = std::min(least, values[k]);
        greatest = std::max(greatest, values[k]);
      } else if (nan_counts || std::isinf(values[k])) {
        out.not_finite.push_back(static_cast<int64_t>(k));
      }
    }
    out.mean.push_back(count > 0 ? sum / static_cast<double>(count) : NAN);
    out.least.push_back(count > 0 ? least : NAN);
    out.greatest.push_back(count > 0 ? greatest : NAN);
  }
  return out;
}

double rounded(double value) { return std::strtod(fmt::format("{:.6g}", value).c_str(), nullptr); }

json curves_of(const History& history, int64_t bytes) {
  Curves curves(history.steps);
  int64_t left_out = 0, pieces_left_out = 0;
  if (!history.steps.empty()) {
    curves.add_dense(dense_series(history.steps, &left_out), bytes);
    add_evaluations(history.steps, curves);
    add_tasks(history, curves);
    add_stalls(history, curves);
    const std::vector<std::span<const StepMetrics>> pieces = pieces_of(history.superseded);
    pieces_left_out = std::max<int64_t>(0, std::ssize(pieces) - kMostPieces);
    for (auto piece = pieces.begin() + pieces_left_out; piece != pieces.end(); ++piece) curves.add_abandoned(*piece);
  }
  json out = curves.take();
  out["left_out"] = {{"sources", left_out}, {"abandoned", pieces_left_out}};
  return out;
}

}  // namespace cairn::tools
