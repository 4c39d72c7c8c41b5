#include "runtime/dlrm/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "runtime/core/random.h"
#include "runtime/dlrm/click_loss.h"
#include "runtime/dlrm/shapes.h"
#include "runtime/kernels/parallel.h"

namespace cairn::dlrm {
namespace {

template <typename T>
void fill_rows(uint64_t seed, const TensorShape& tensor, const TableShard& shard, std::span<T> weights) {
  const uint64_t key = stream_key(seed, tensor.name);
  const double bound = std::sqrt(1 / static_cast<double>(tensor.shape[0]));
  const int64_t dim = tensor.shape[1], width = shard.width();
  kernels::parallel_ranges(shard.rows(), 1, 8 * width, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      for (int64_t c = 0; c < width; ++c) {
        const auto at = static_cast<uint64_t>((shard.box.lo[0] + row) * dim + shard.box.lo[1] + c);
        weights[static_cast<size_t>(row * width + c)] = static_cast<T>((2 * uniform_at(key, at) - 1) * bound);
      }
    }
  });
}

double deviation(const TensorShape& tensor) {
  if (tensor.shape.size() == 2) return std::sqrt(2 / static_cast<double>(tensor.shape[0] + tensor.shape[1]));
  return tensor.name.starts_with("cross.") ? 0 : std::sqrt(1 / static_cast<double>(tensor.shape[0]));
}

}  // namespace

template <typename T>
Model<T>::Model(const DlrmConfig& config, const DlrmOptimizer& optimizer, std::vector<TableShard> owned,
                std::vector<TableShard> copies, std::unique_ptr<comm::Comm> world)
    : config_(config),
      optimizer_(optimizer),
      world_(std::move(world)),
      exchange_(std::move(owned), config.dim, *world_),
      dense_(config),
      copies_(std::move(copies)),
      copied_bags_(copies_.size()),
      parameters_(static_cast<size_t>(dense_.parameter_count())) {
  int64_t gradients = dense_.parameter_count();
  for (const TableShard& shard : exchange_.own()) rows_.emplace_back(shard.rows(), shard.width(), optimizer.rule);
  for (const TableShard& shard : copies_) {
    copied_rows_.emplace_back(shard.rows(), shard.width(), optimizer.rule);
    gradients += shard.elems();
  }
  gradients_.resize(static_cast<size_t>(gradients));
  if (optimizer.rule == DlrmRule::kRowAdagrad) square_sums_.resize(parameters_.size());
}

template <typename T>
Result<std::unique_ptr<Model<T>>> Model<T>::make(const DlrmConfig& config, const DlrmOptimizer& optimizer,
                                                 const std::vector<TableCut>& cuts, comm::Engine& engine,
                                                 uint64_t seed) {
  RT_TRY(check(config));
  RT_TRY(check(optimizer));
  RT_TRY_SET(std::vector<TableShard> shards, cut_tables(config, cuts, engine.world_size()));
  std::vector<TableShard> copies;
  std::ranges::copy_if(shards, std::back_inserter(copies), [](const auto& s) { return s.owner == kEveryRank; });
  std::erase_if(shards, [](const auto& s) { return s.owner == kEveryRank; });
  std::vector<int64_t> ranks(static_cast<size_t>(engine.world_size()));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  RT_TRY_SET(std::unique_ptr<comm::Comm> world, engine.group("world", ranks));
  std::unique_ptr<Model> model(new Model(config, optimizer, std::move(shards), std::move(copies), std::move(world)));
  model->initialise(seed);
  return model;
}

template <typename T>
void Model<T>::initialise(uint64_t seed) {
  T* to = parameters_.data();
  for (const TensorShape& tensor : dense_tensors(config_)) {
    const uint64_t key = stream_key(seed, tensor.name);
    const double scale = deviation(tensor);
    for (int64_t i = 0; i < cairn::count_elems(tensor.shape); ++i)
      *to++ = static_cast<T>(scale * normal_at(key, static_cast<uint64_t>(i)));
  }
  const std::vector<TensorShape> tables = table_tensors(config_);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const TableShard& shard = exchange_.own()[i];
    fill_rows(seed, tables[static_cast<size_t>(shard.table)], shard, rows_[i].weights());
  }
  for (size_t i = 0; i < copies_.size(); ++i)
    fill_rows(seed, tables[static_cast<size_t>(copies_[i].table)], copies_[i], copied_rows_[i].weights());
}

template <typename T>
Status Model<T>::check_batch(const data::ClickBatch& batch, int64_t global_samples) const {
  const auto wrong = [](std::string text) { return Error{ErrorCode::kInvalidInput, "batch: " + std::move(text)}; };
  if (global_samples < 1) return wrong(fmt::format("it must have at least 1 sample, got {}", global_samples));
  const SampleRange range = samples_of(global_samples, world_->rank(), world_->size());
  if (batch.samples != range.count) {
    return wrong(fmt::format("rank {} of {} has {} of {} samples, got {}", world_->rank(), world_->size(), range.count,
                             global_samples, batch.samples));
  }
  if (std::ssize(batch.labels) != batch.samples)
    return wrong(fmt::format("{} labels for {} samples", batch.labels.size(), batch.samples));
  if (std::ssize(batch.dense) != batch.samples * config_.dense)
    return wrong(
        fmt::format("{} dense numbers for {} samples of {}", batch.dense.size(), batch.samples, config_.dense));
  if (batch.tables.size() != config_.tables.size())
    return wrong(fmt::format("bags of {} tables, the model has {}", batch.tables.size(), config_.tables.size()));
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    const auto& [offsets, rows] = batch.tables[t];
    const DlrmTable& table = config_.tables[t];
    if (std::ssize(offsets) != batch.samples + 1 || offsets.front() != 0 || offsets.back() != std::ssize(rows) ||
        !std::ranges::is_sorted(offsets)) {
      return wrong(fmt::format("the offsets of table {} are not {} ascending numbers from 0 to {}", table.name,
                               batch.samples + 1, rows.size()));
    }
    const auto bad = std::ranges::find_if(rows, [&](int32_t row) { return row < 0 || row >= table.rows; });
    if (bad != rows.end()) {
      const int64_t at = bad - rows.begin();
      const int64_t sample = std::ranges::upper_bound(offsets, at) - offsets.begin() - 1;
      return wrong(fmt::format("sample {} reads row {} of table {}, which has rows 0 to {}", range.first + sample, *bad,
                               table.name, table.rows - 1));
    }
  }
  return {};
}

template <typename T>
std::vector<Bag> Model<T>::local_bags(int64_t table, const data::ClickBatch& batch) const {
  const auto& [offsets, rows] = batch.tables[static_cast<size_t>(table)];
  std::vector<Bag> bags;
  for (size_t s = 0; s + 1 < offsets.size(); ++s)
    bags.push_back({rows.data() + offsets[s], static_cast<int32_t>(offsets[s + 1] - offsets[s])});
  return bags;
}

template <typename T>
Result<std::span<const T>> Model<T>::forward(const data::ClickBatch& batch, int64_t global_samples) {
  RT_TRY(check_batch(batch, global_samples));
  RT_TRY(exchange_.send_bags(batch, global_samples));
  T* const pooled = dense_.vectors(batch.samples) + config_.dim;
  for (size_t i = 0; i < copies_.size(); ++i) {
    copied_bags_[i] = local_bags(copies_[i].table, batch);
    copied_rows_[i].pool(copied_bags_[i], pooled + copies_[i].table * config_.dim, dense_.sample_stride(), false);
  }
  RT_TRY(exchange_.pool(rows_, pooled, dense_.sample_stride()));
  return dense_.forward(parameters_, batch.dense.data(), batch.samples);
}

template <typename T>
Result<double> Model<T>::train(const data::ClickBatch& batch, int64_t global_samples) {
  RT_TRY_SET(const std::span<const T> logits, forward(batch, global_samples));
  dlogits_.resize(static_cast<size_t>(batch.samples));
  double loss = click_loss(config_.loss, logits.data(), batch.labels.data(), batch.samples,
                           1 / static_cast<double>(global_samples), static_cast<T*>(nullptr), dlogits_.data());
  RT_TRY(world_->all_reduce(&loss, 1, DType::kF64, comm::ReduceOp::kSum, "dlrm.loss"));
  loss /= static_cast<double>(global_samples);
  if (!std::isfinite(loss))
    return Error{ErrorCode::kGuard, fmt::format("step {}: the loss is {}; no update was made", steps_ + 1, loss)};

  const std::span<T> gradients(gradients_);
  const T* const dz =
      dense_.backward(parameters_, dlogits_, gradients.first(static_cast<size_t>(dense_.parameter_count())));
  const T* const dpooled = dz + config_.dim;
  T* to = gradients_.data() + dense_.parameter_count();
  std::fill(to, gradients_.data() + gradients_.size(), T{0});
  for (size_t i = 0; i < copies_.size(); ++i) {
    copied_rows_[i].add_gradients(copied_bags_[i], dpooled + copies_[i].table * config_.dim, dense_.sample_stride(),
                                  to);
    to += copies_[i].elems();
  }
  RT_TRY(exchange_.send_gradients(dpooled, dense_.sample_stride()));
  RT_TRY(world_->all_reduce(gradients_.data(), std::ssize(gradients_), sizeof(T) == 4 ? DType::kF32 : DType::kF64,
                            comm::ReduceOp::kSum, "dlrm.dense"));
  ++steps_;
  update();
  return loss;
}

template <typename T>
void Model<T>::update() {
  const RowUpdate how{optimizer_.rule, learning_rate(optimizer_, steps_), optimizer_.eps};
  const T lr = static_cast<T>(how.lr), eps = static_cast<T>(how.eps);
  T* const w = parameters_.data();
  const T* const g = gradients_.data();
  T* const sums = square_sums_.data();
  kernels::parallel_elements(dense_.parameter_count(), [=](int64_t i, int64_t end) {
    if (how.rule == DlrmRule::kSgd) {
      for (; i < end; ++i) w[i] -= lr * g[i];
    } else {
      for (; i < end; ++i) {
        sums[i] += g[i] * g[i];
        w[i] -= lr * g[i] / (std::sqrt(sums[i]) + eps);
      }
    }
  });
  const T* from = g + dense_.parameter_count();
  for (size_t i = 0; i < copies_.size(); ++i) {
    copied_rows_[i].update_all(how, from);
    from += copies_[i].elems();
  }
  // Many shards are taken by the threads side by side, few one after another, each by all threads.
  const int64_t shards = std::ssize(rows_);
  kernels::parallel_tasks(shards, shards < 2 * kernels::team_threads(), [&](int64_t i) {
    const auto shard = static_cast<size_t>(i);
    rows_[shard].update(how, exchange_.bags(shard), exchange_.gradients(shard));
  });
}

template <typename T>
Result<std::vector<float>> Model<T>::score(const data::ClickBatch& batch, int64_t global_samples) {
  RT_TRY_SET(const std::span<const T> logits, forward(batch, global_samples));
  std::vector<T> scores(logits.size());
  click_loss(config_.loss, logits.data(), batch.labels.data(), batch.samples, 1, scores.data(),
             static_cast<T*>(nullptr));
  return std::vector<float>(scores.begin(), scores.end());
}

template <typename T>
std::vector<StatePart<T>> Model<T>::state() {
  std::vector<StatePart<T>> parts;
  size_t at = 0;
  for (const TensorShape& tensor : dense_tensors(config_)) {
    const auto count = static_cast<size_t>(cairn::count_elems(tensor.shape));
    parts.push_back({tensor.name, tensor.shape, Box::whole(tensor.shape), std::span(parameters_).subspan(at, count)});
    if (!square_sums_.empty()) {
      parts.push_back({tensor.name + ".square_sums", tensor.shape, Box::whole(tensor.shape),
                       std::span(square_sums_).subspan(at, count)});
    }
    at += count;
  }
  const std::vector<TensorShape> tables = table_tensors(config_);
  const auto add = [&](const TableShard& shard, ShardRows<T>& rows) {
    const TensorShape& table = tables[static_cast<size_t>(shard.table)];
    parts.push_back({table.name, table.shape, shard.box, rows.weights()});
    if (rows.square_sums().empty()) return;
    Box box = shard.box;
    box.lo[1] = shard.column_part, box.hi[1] = shard.column_part + 1;
    parts.push_back({table.name + ".square_sums", {table.shape[0], shard.column_parts}, box, rows.square_sums()});
  };
  for (size_t i = 0; i < rows_.size(); ++i) add(exchange_.own()[i], rows_[i]);
  for (size_t i = 0; i < copies_.size(); ++i) add(copies_[i], copied_rows_[i]);
  return parts;
}

template class Model<float>;
template class Model<double>;

}  // namespace cairn::dlrm
