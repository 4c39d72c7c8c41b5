#pragma once
// The data-parallel movements of a step, ZeRO stages 0 to 3: gradients are reduced beside backward, weights gathered
// beside forward. What is done to the reduced gradients is runtime/optim's. Owns no arrays, but a thread.
//
// Life of a step:
//   begin_pass      the sums of gradients are zero; those of matrices that one product fills are marked as unwritten
//                   instead, and the first product of the step overwrites them
//   forward         before a layer: its weights are there (what spread_weights left running; ZeRO-3: the layer's own
//                   gather, begun a layer ahead)
//   backward        after a layer: ZeRO-0 and -1 reduce a bucket once its last gradient of the last micro-batch is
//                   written; ZeRO-2 and -3 add the layer's gradients of each micro-batch to the shards
//                   (deterministic = "layout" has added over tp what is partial there before, and adds the cp ranks of
//                   a replica by a tree)
//   finish          all sums done; then what is partial over tp and the two parts of a tied embedding are added, shard
//                   by shard
//   spread_weights  after the update: gathers of the new weights begin (ZeRO-1, -2); and at the start of a run, where
//                   they are made from the masters first
// Shard groups smaller than dp reduce and scatter inside, and all-reduce the shards across the groups once a step.
//
// Order. All collectives of the data-parallel groups run on one lane, in an order that the plan alone decides: the
// same on all members, and the same with and without a thread, so overlapping changes no bit. A device needs no thread
// for that: its lane has a stream, and is asked for its work by the rank's own thread. ZeRO-2 and -3 add the
// micro-batches one by one, each over the replicas in order: the sums do not depend on how micro-batches are divided
// among replicas.

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/comm/lane.h"
#include "runtime/comm/rank_groups.h"
#include "runtime/core/result.h"
#include "runtime/device/stream.h"
#include "runtime/kernels/ops.h"
#include "runtime/nn/stage_model.h"
#include "runtime/plan/communication.h"
#include "runtime/plan/plan.h"

namespace cairn::data_parallel {

/// Where the arrays of a rank lie; memory of others, sizes from the plan.
struct Memory {
  DevicePtr<std::byte> weights;   // weight_bytes: what an update leaves
  DevicePtr<std::byte> gathered;  // gathered_bytes; null but with ZeRO-3
  DevicePtr<float> sums;          // grad_elems()
  DevicePtr<float> slots;         // behind the sums; null but with ZeRO-2 and -3
  DevicePtr<float> partial;       // RankPlan::partial_elems: gathers what is partial over tp or kv for one all-reduce

  /// What forward and backward take.
  DevicePtr<std::byte> used_weights() const { return gathered ? gathered : weights; }
  DevicePtr<float> used_grads() const { return slots ? slots : sums; }
};

class DataParallel final : public nn::UseListener {
 public:
  /// All outlive it.
  DataParallel(Stream& stream, const Plan& plan, const RankPlan& rank, const comm::RankGroups& groups,
               const Memory& memory);

  /// Before a training step or an evaluation runs.
  void begin_pass(bool training);
  Status begin_use(int64_t layer, nn::Pass pass) override;
  Status end_use(int64_t layer, nn::Pass pass) override;
  std::span<uint8_t> unwritten() override { return unwritten_; }

  /// After the last backward of a step: the sums of this rank's shards are complete when it returns.
  Status finish();

  /// Orders the writing of this rank's shard of a bucket's weights.
  using MakeWeights = std::function<void(Stream&, const Bucket&)>;

  /// Makes the weights whole on all ranks, beside whatever follows: bucket by bucket, this rank's shards by `make`,
  /// which may be null where an update has written them, the others' by gathers. `whole` is called once they are. Both
  /// may be called on another thread.
  Status spread_weights(const MakeWeights& make, std::function<Status()> whole);

  /// Returns when nothing runs any more. Before memory goes, or groups are used otherwise.
  Status settle() { return lane_.wait_all(); }
  bool busy() const { return lane_.busy(); }

 private:
  /// Gradients of `range` begin anew: the runs of it to which layers only add, and which must be zero. It marks the
  /// others unwritten: their products overwrite them.
  std::vector<kernels::ElemRun> added_to(FlatRange range);
  /// What no product of the unit has written is zero.
  void fill_unwritten(const Unit& unit);
  std::span<const LocalTensor> tensors_in(FlatRange range) const;
  Status prepare_weights(int64_t unit);
  Status prepare_grads(int64_t unit);
  void gather_unit(const UnitUse& use);
  void reduce_bucket(const Bucket& bucket);
  void add_unit(const Unit& unit, bool last);
  Status add_bucket(const Unit& unit, const Bucket& bucket);
  /// Adds runs of gradients over a group whose ranks all hold them, in one reduction. for_runs(body) calls body(run,
  /// elems) for each, in the same order every time.
  template <typename ForRuns>
  Status sum_runs(const ForRuns& for_runs, comm::Comm* group, comm::ReduceOp op, std::string_view what);
  /// Those of this rank's shards of the tensors that `partial` marks.
  Status sum_partial(bool LocalTensor::*partial, comm::Comm* group, std::string_view what);
  /// Those of one micro-batch in a unit that are partial over tp.
  Status sum_partial_of(const Unit& unit);
  Status sum_table_copies();

  const kernels::Exec<float> on_;
  const Plan& plan_;
  const RankPlan& rank_;
  comm::RankGroups groups_;
  Memory memory_;
  int64_t elem_bytes_;
  std::vector<UnitUse> train_uses_, evaluate_uses_;  // with ZeRO-3

  const std::vector<UnitUse>* uses_ = nullptr;
  size_t next_use_ = 0, next_gather_ = 0;  // of uses_
  std::vector<int64_t> passed_;            // by unit: backwards that have used it
  std::vector<int64_t> open_units_;        // by bucket: units whose gradients are not complete
  std::vector<comm::Lane::Ticket> weights_of_,
      grads_from_;                  // by bucket or unit its gather; by slot its last reduction
  std::vector<uint8_t> unwritten_;  // by tensor of the rank
  comm::Lane lane_;                 // last: its thread uses all above
};

}  // namespace cairn::data_parallel
