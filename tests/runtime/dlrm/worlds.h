#pragma once
// Models on worlds of threads, and what the tests train them on.

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/thread_world.h"
#include "runtime/core/random.h"
#include "runtime/dlrm/model.h"

namespace cairn::dlrm::testing {

using data::Bags;
using data::ClickBatch;

/// Complete tensors by name.
template <typename T>
using State = std::map<std::string, std::vector<T>>;

/// Calls at(index in the complete tensor, index in the part) for each element.
template <typename T, typename Body>
void each_elem(const StatePart<T>& part, const Body& at) {
  size_t i = 0;
  const int64_t columns = part.shape.size() == 2 ? part.shape[1] : 1;
  const int64_t lo = part.shape.size() == 2 ? part.box.lo[1] : 0, hi = part.shape.size() == 2 ? part.box.hi[1] : 1;
  for (int64_t r = part.box.lo[0]; r < part.box.hi[0]; ++r)
    for (int64_t c = lo; c < hi; ++c) at(static_cast<size_t>(r * columns + c), i++);
}

template <typename T>
void read_state(Model<T>& model, State<T>* to) {
  for (const StatePart<T>& part : model.state()) {
    auto& tensor = (*to)[part.name];
    tensor.resize(static_cast<size_t>(count_elems(part.shape)));
    each_elem(part, [&](size_t global, size_t local) { tensor[global] = part.data[local]; });
  }
}

template <typename T>
void write_state(const State<T>& from, Model<T>* model) {
  for (const StatePart<T>& part : model->state()) {
    const auto& tensor = from.at(part.name);
    RT_CHECK(std::ssize(tensor) == count_elems(part.shape), "{}", part.name);
    each_elem(part, [&](size_t global, size_t local) { part.data[local] = tensor[global]; });
  }
}

/// Samples [first, first + count).
inline ClickBatch slice(const ClickBatch& batch, int64_t first, int64_t count) {
  ClickBatch out;
  const auto dense = std::ssize(batch.dense) / batch.samples;
  out.samples = count;
  out.labels.assign(batch.labels.begin() + first, batch.labels.begin() + first + count);
  out.dense.assign(batch.dense.begin() + first * dense, batch.dense.begin() + (first + count) * dense);
  for (const Bags& bags : batch.tables) {
    Bags part;
    for (int64_t s = first; s < first + count; ++s) {
      part.rows.insert(part.rows.end(), bags.rows.begin() + bags.offsets[s], bags.rows.begin() + bags.offsets[s + 1]);
      part.offsets.push_back(std::ssize(part.rows));
    }
    out.tables.push_back(part);
  }
  return out;
}

inline ClickBatch part_of(const ClickBatch& batch, int64_t rank, int64_t world) {
  const SampleRange range = samples_of(batch.samples, rank, world);
  return slice(batch, range.first, range.count);
}

/// Drawn samples: bags of 0 to `most` rows, of which some repeat.
inline ClickBatch drawn_batch(const DlrmConfig& config, int64_t samples, uint64_t seed, int64_t most = 4) {
  ClickBatch batch;
  batch.samples = samples;
  uint64_t i = 0;
  const auto draw = [&](int64_t below) {
    return static_cast<int64_t>(uniform_at(seed, i++) * static_cast<double>(below));
  };
  for (int64_t s = 0; s < samples; ++s) batch.labels.push_back(static_cast<float>(draw(2)));
  for (int64_t s = 0; s < samples * config.dense; ++s) batch.dense.push_back(normal_at(seed + 1, i++));
  for (const DlrmTable& table : config.tables) {
    Bags bags;
    for (int64_t s = 0; s < samples; ++s) {
      for (int64_t n = draw(most + 1); n > 0; --n) bags.rows.push_back(static_cast<int32_t>(draw(table.rows)));
      bags.offsets.push_back(std::ssize(bags.rows));
    }
    batch.tables.push_back(bags);
  }
  return batch;
}

template <typename T>
struct Trained {
  std::vector<double> losses;
  State<T> state;
  std::vector<comm::Comm::Traffic> traffic;  // by rank
  std::string error;                         // the first rank's
};

/// Trains each batch once on `world` ranks. Starts from `start` where it is not empty, as after `steps` steps.
template <typename T>
Trained<T> train(const DlrmConfig& config, const DlrmOptimizer& optimizer, const std::vector<TableCut>& cuts,
                 int64_t world, const std::vector<ClickBatch>& batches, const State<T>& start = {}, int64_t steps = 0) {
  Trained<T> out;
  out.traffic.resize(static_cast<size_t>(world));
  std::vector<std::unique_ptr<Model<T>>> models(static_cast<size_t>(world));
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::vector<double>> losses(static_cast<size_t>(world));
  comm::ThreadWorld threads_world(world, {.deadline_ms = 60000});
  std::vector<std::unique_ptr<comm::Engine>> engines(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      const auto rank = static_cast<size_t>(r);
      engines[rank] = threads_world.engine(r);
      auto made = Model<T>::make(config, optimizer, cuts, *engines[rank], 7);
      if (!made.ok()) return void(errors[rank] = made.error().message);
      models[rank] = std::move(made).value();
      if (!start.empty()) write_state(start, models[rank].get());
      models[rank]->set_steps(steps);
      for (const ClickBatch& batch : batches) {
        const auto loss = models[rank]->train(world == 1 ? batch : part_of(batch, r, world), batch.samples);
        if (!loss.ok()) {
          errors[rank] = loss.error().message;
          engines[rank]->abort(errors[rank]);
          return;
        }
        losses[rank].push_back(loss.value());
      }
      out.traffic[rank] = models[rank]->traffic();
    });
  }
  for (auto& thread : threads) thread.join();
  for (size_t r = 0; r < models.size(); ++r) {
    if (out.error.empty() && !errors[r].empty()) out.error = fmt::format("rank {}: {}", r, errors[r]);
    if (losses[r] != losses[0]) out.error = fmt::format("rank {} has other losses than rank 0", r);
    if (models[r] != nullptr) read_state(*models[r], &out.state);
  }
  out.losses = losses[0];
  models.clear();
  return out;
}

/// The largest difference of an element; infinite where the tensors are others.
template <typename T>
double distance(const State<T>& a, const State<T>& b) {
  if (a.size() != b.size()) return INFINITY;
  double most = 0;
  for (const auto& [name, tensor] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second.size() != tensor.size()) return INFINITY;
    for (size_t i = 0; i < tensor.size(); ++i) {
      const double apart = std::abs(static_cast<double>(tensor[i]) - static_cast<double>(other->second[i]));
      most = apart >= 0 ? std::max(most, apart) : INFINITY;
    }
  }
  return most;
}

inline TableCut on(int64_t rank) { return {CutKind::kTable, {rank}}; }
inline TableCut columns(std::vector<int64_t> ranks) { return {CutKind::kColumns, std::move(ranks)}; }
inline TableCut rows(std::vector<int64_t> ranks) { return {CutKind::kRows, std::move(ranks)}; }
inline TableCut copies() { return {CutKind::kCopies, {}}; }

}  // namespace cairn::dlrm::testing
