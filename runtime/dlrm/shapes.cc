#include "runtime/dlrm/shapes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

namespace cairn::dlrm {
namespace {

// Products of two numbers of a model stay far below 2^63, and a row fits the int32 that is sent for it.
constexpr int64_t kMostWidth = 1 << 20;
constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostTables = 1 << 16;

Error wrong(std::string text) { return Error{ErrorCode::kInvalidInput, std::move(text)}; }

Status check_number(std::string_view field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return {};
  return wrong(fmt::format("{} must be {} to {}, got {}", field, least, most, value));
}

Status check_widths(std::string_view field, const std::vector<int64_t>& widths, int64_t last, std::string_view why) {
  if (widths.empty()) return wrong(fmt::format("{} has no layers; its last width must be {} ({})", field, last, why));
  for (size_t i = 0; i < widths.size(); ++i)
    RT_TRY(check_number(fmt::format("{}[{}]", field, i + 1), widths[i], 1, kMostWidth));
  if (widths.back() == last) return {};
  return wrong(fmt::format("{}[{}] must be {} ({}), got {}", field, widths.size(), last, why, widths.back()));
}

void add_layers(std::string_view part, int64_t in, const std::vector<int64_t>& widths,
                std::vector<TensorShape>* tensors) {
  for (size_t i = 0; i < widths.size(); ++i) {
    tensors->push_back({fmt::format("{}.{}.weight", part, i), {widths[i], in}});
    tensors->push_back({fmt::format("{}.{}.bias", part, i), {widths[i]}});
    in = widths[i];
  }
}

}  // namespace

Status check(const DlrmConfig& config) {
  RT_TRY(check_number("dense", config.dense, 1, kMostWidth));
  RT_TRY(check_number("dim", config.dim, 1, kMostWidth));
  RT_TRY(check_number("the number of tables", std::ssize(config.tables), 1, kMostTables));
  std::unordered_set<std::string> names;
  for (const DlrmTable& table : config.tables) {
    if (table.name.empty()) return wrong("a table has no name");
    if (!names.insert(table.name).second) return wrong(fmt::format("two tables are called {}", table.name));
    RT_TRY(check_number(fmt::format("rows of table {}", table.name), table.rows, 1, kMostRows));
    if (!(table.hot >= 0) || !std::isfinite(table.hot))
      return wrong(fmt::format("hot of table {} must be a number from 0 on, got {}", table.name, table.hot));
  }
  RT_TRY(check_widths("bottom", config.bottom, config.dim, "as dim"));
  RT_TRY(check_widths("top", config.top, 1, "the logit of a click"));
  if (config.interaction == Interaction::kCross) {
    RT_TRY(check_number("cross layers", config.cross_layers, 1, 1024));
    RT_TRY(check_number("cross rank", config.cross_rank, 1, kMostWidth));
  }
  return check_number("the width of the interaction", interaction_width(config), 1, int64_t{1} << 31);
}

Status check(const DlrmOptimizer& optimizer) {
  const auto finite = [](std::string_view field, double value, bool positive) -> Status {
    if (std::isfinite(value) && (positive ? value > 0 : value >= 0)) return {};
    return wrong(fmt::format("{} must be {} 0, got {}", field, positive ? "above" : "at least", value));
  };
  RT_TRY(finite("lr", optimizer.lr, true));
  RT_TRY(finite("eps", optimizer.eps, true));
  if (optimizer.eps < 1e-30)  // a row without gradients is divided by it, as float
    return wrong(fmt::format("eps must be at least 1e-30, got {}", optimizer.eps));
  RT_TRY(finite("lr_decay", optimizer.lr_decay, false));
  constexpr int64_t kMostSteps = int64_t{1} << 53;
  RT_TRY(check_number("warmup", optimizer.warmup, 0, kMostSteps));
  RT_TRY(check_number("decay_start", optimizer.decay_start, 0, kMostSteps));
  RT_TRY(check_number("decay_steps", optimizer.decay_steps, 0, kMostSteps));
  if (optimizer.decay_steps > 0 && optimizer.decay_start < optimizer.warmup)
    return wrong(
        fmt::format("decay_start must be at least warmup ({}), got {}", optimizer.warmup, optimizer.decay_start));
  return {};
}

int64_t interaction_width(const DlrmConfig& config) {
  const int64_t vectors = std::ssize(config.tables) + 1;
  if (config.interaction != Interaction::kDot) return vectors * config.dim;
  return config.dim + vectors * (config.self_interaction ? vectors + 1 : vectors - 1) / 2;
}

std::vector<TensorShape> dense_tensors(const DlrmConfig& config) {
  std::vector<TensorShape> tensors;
  add_layers("bottom", config.dense, config.bottom, &tensors);
  const int64_t width = interaction_width(config);
  if (config.interaction == Interaction::kCross) {
    for (int64_t i = 0; i < config.cross_layers; ++i) {
      tensors.push_back({fmt::format("cross.{}.v", i), {config.cross_rank, width}});
      tensors.push_back({fmt::format("cross.{}.w", i), {width, config.cross_rank}});
      tensors.push_back({fmt::format("cross.{}.bias", i), {width}});
    }
  }
  add_layers("top", width, config.top, &tensors);
  return tensors;
}

std::vector<TensorShape> table_tensors(const DlrmConfig& config) {
  std::vector<TensorShape> tensors;
  for (const DlrmTable& table : config.tables) tensors.push_back({"table." + table.name, {table.rows, config.dim}});
  return tensors;
}

int64_t count_elems(const std::vector<TensorShape>& tensors) {
  int64_t elems = 0;
  for (const TensorShape& tensor : tensors) elems += cairn::count_elems(tensor.shape);
  return elems;
}

double learning_rate(const DlrmOptimizer& optimizer, int64_t step) {
  constexpr double kFloor = 1e-7;
  double lr = optimizer.lr;
  if (step < optimizer.warmup) {
    lr *= static_cast<double>(step) / static_cast<double>(optimizer.warmup);
  } else if (optimizer.decay_steps > 0 && step >= optimizer.decay_start) {
    const int64_t left = std::max<int64_t>(1, optimizer.decay_start + optimizer.decay_steps - step);
    const double part = static_cast<double>(left) / static_cast<double>(optimizer.decay_steps);
    lr = std::max(kFloor, lr * part * part);
  }
  if (optimizer.rule == DlrmRule::kRowAdagrad) lr /= 1 + static_cast<double>(step - 1) * optimizer.lr_decay;
  return lr;
}

}  // namespace cairn::dlrm
