#pragma once
// A recommender model on one rank of a world: its part of the tables, a copy of all else, and the steps of training.
//
// A step: bags to the owners of their rows, pooled rows back (exchange.h); forward and backward of the own samples
// (dense_part.h); gradients of pooled rows to the owners; one all-reduce of the other gradients; updates. The loss is
// the mean over all samples. Any cut and any number of ranks give the losses of one rank but for the order in which
// the gradients of copies are added; with kRowAdagrad and columns each part keeps sums of its own, as torchrec's.
//
// Initial values depend on seed, tensor and element only. Their distributions are the reference implementation's:
// tables uniform within 1 / sqrt(rows), weights normal with variance 2 / (in + out), biases with 1 / out, those of
// cross layers 0.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/config/dlrm.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"
#include "runtime/data/click_batch.h"
#include "runtime/dlrm/dense_part.h"
#include "runtime/dlrm/exchange.h"
#include "runtime/dlrm/shards.h"
#include "runtime/dlrm/table_shard.h"

namespace cairn::dlrm {

/// A rank's part of a logical tensor of the state.
template <typename T>
struct StatePart {
  std::string name;  // "table.C1", "table.C1.square_sums" [rows, parts of its columns], "top.0.weight", ...
  Shape shape;
  Box box;
  std::span<T> data;  // of the box, row-major
};

template <typename T>
class Model {
 public:
  /// `engine` outlives the model. Errors: those of check() and cut_tables().
  static Result<std::unique_ptr<Model>> make(const DlrmConfig& config, const DlrmOptimizer& optimizer,
                                             const std::vector<TableCut>& cuts, comm::Engine& engine, uint64_t seed);

  /// The step behind the last one. `batch` has the samples that samples_of() gives this rank.
  /// Returns the mean loss over all samples, the same on each rank. Errors: kInvalidInput for a batch of another shape
  /// or a row outside its table; kGuard, with nothing updated, where the loss is not finite; those of communication.
  Result<double> train(const data::ClickBatch& batch, int64_t global_samples);

  /// Probabilities of a click of this rank's samples. All ranks call it together.
  Result<std::vector<float>> score(const data::ClickBatch& batch, int64_t global_samples);

  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps) { steps_ = steps; }
  /// All of the state that this rank has; what several ranks have is equal on them.
  std::vector<StatePart<T>> state();
  comm::Comm::Traffic traffic() const { return world_->traffic(); }

 private:
  Model(const DlrmConfig& config, const DlrmOptimizer& optimizer, std::vector<TableShard> owned,
        std::vector<TableShard> copies, std::unique_ptr<comm::Comm> world);

  void initialise(uint64_t seed);
  Status check_batch(const data::ClickBatch& batch, int64_t global_samples) const;
  Result<std::span<const T>> forward(const data::ClickBatch& batch, int64_t global_samples);
  void update();
  std::vector<Bag> local_bags(int64_t table, const data::ClickBatch& batch) const;

  const DlrmConfig config_;
  const DlrmOptimizer optimizer_;
  std::unique_ptr<comm::Comm> world_;
  Exchange<T> exchange_;
  DensePart<T> dense_;
  std::vector<ShardRows<T>> rows_;  // of exchange_.own()
  std::vector<TableShard> copies_;
  std::vector<ShardRows<T>> copied_rows_;
  std::vector<std::vector<Bag>> copied_bags_;
  std::vector<T> parameters_, square_sums_;  // of the dense part
  std::vector<T> gradients_;                 // of the dense part, then of the copies
  std::vector<T> dlogits_;
  int64_t steps_ = 0;
};

}  // namespace cairn::dlrm
