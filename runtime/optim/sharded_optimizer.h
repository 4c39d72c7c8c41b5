#pragma once
// AdamW, LAMB or Adafactor over a rank's shards of the flat parameter range: state for what this rank updates, in banks
// what it saves, private what other replicas save. Gradients come reduced and weights go out by runtime/data_parallel.
// Owns no memory.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "runtime/comm/rank_groups.h"
#include "runtime/core/exact_sum.h"
#include "runtime/core/result.h"
#include "runtime/device/copy_gate.h"
#include "runtime/device/pager.h"
#include "runtime/kernels/adafactor.h"
#include "runtime/kernels/adamw.h"
#include "runtime/optim/groups.h"
#include "runtime/optim/qk_clip.h"
#include "runtime/plan/plan.h"

namespace cairn::optim {

/// Where an array of that kind is found.
float* kernels::AdamwState::*member_of(StateKind kind);

/// A run of private state, and where the rank that saves the same has it in each of its banks.
struct Original {
  float* copy = nullptr;
  int64_t count = 0;
  std::vector<const float*> banks;
};

/// Where the arrays of a rank lie; memory of others.
struct Arrays {
  void* weights = nullptr;                              // weight_bytes, in the compute dtype: RankPlan::weight_offset()
  float* grads = nullptr;                               // reduced sums: RankPlan::grad_offset()
  kernels::AdamwState private_state;                    // private_elems each
  float* private_sums = nullptr;                        // of the SumPieces that others save
  std::vector<std::vector<kernels::AdamwState>> banks;  // of each bank, where each primary piece's state lies
  std::vector<std::vector<float*>> bank_sums;           // of each bank, where each primary SumPiece lies
  std::byte* work = nullptr;                            // RankPlan::work_bytes()
  Pager* pager = nullptr;                               // of banks on a disk
  CopyGate* gate = nullptr;                             // of bank 0, the only one written: copied beside training
  /// Of all private state, by address: it is found there until the first update puts it where it belongs. Null: it is
  /// where it belongs.
  std::optional<std::vector<Original>> originals;
};

class ShardedOptimizer {
 public:
  ShardedOptimizer(const Plan& plan, const RankPlan& rank, const comm::RankGroups& groups, Arrays arrays);

  /// This rank's part of the squared global gradient norm: add over the world, then square root. The same bits for
  /// every way of cutting gradients over dp and pp.
  ExactSum squared_norm_part() const;

  /// `update` counts from 1 (bias correction); `grad_scale` is the clip coefficient. The saved state goes from bank
  /// `from` into bank `to`, which may be the same; a kill leaves `from` whole if it is another. The rest is updated in
  /// place; the first time it comes from its originals in bank `from`, which must stay until all ranks have called. All
  /// ranks give the same banks. All memory is written when it returns, visible to other processes.
  /// `world`: all ranks; LAMB and Adafactor add up the norms of each tensor there. `tokens` of the step. `heads`,
  /// unless it is null, scales the rows of the query and key projections when they have been updated; the average of
  /// the weights, if one is kept, comes last.
  Status update(int64_t update, double lr, float grad_scale, int64_t from, int64_t to, int64_t tokens,
                comm::Comm& world, const HeadFactors* heads = nullptr);

  /// In place of an update when the step is skipped: the saved state goes from bank `from` into bank `to` as it is.
  void keep(int64_t from, int64_t to);

  /// word_sums (runtime/core/word_sums.h) of what the last update wrote into a bank, in its order: each array of all
  /// primary pieces, then the primary SumPieces. With a gate none are taken: who copies takes them.
  std::span<const uint64_t> sums() const { return sums_; }

  /// Once the state of all ranks is there (initialised or loaded): the weights of this rank's shard of a bucket from
  /// the masters, those of `bank` and private ones or their originals there. No update may run; from any thread.
  void make_weights(int64_t bank, const Bucket& bucket) const;

 private:
  kernels::AdamwState private_at(int64_t offset) const;
  /// Calls body(begin, count, state) for runs of `count` elements of private state from `offset` on, where each lies:
  /// there, or as long as it is not, in bank `bank` of the rank that saves it. `begin` counts from `offset`.
  template <typename Body>
  void for_private(int64_t bank, int64_t offset, int64_t count, const Body& body) const;
  /// The original that this element of private state belongs to.
  const Original& original_of(const float* copy) const;
  /// Copies a run of private state to where it belongs; all of it.
  void copy_originals(int64_t bank, float* copy, int64_t count);
  void copy_originals(int64_t bank);
  /// The weights that forward and backward read, from the float master.
  void put_weights(const float* master, int64_t flat, int64_t count) const;
  kernels::AdamwArgs args_of(int64_t tensor, int64_t update, double lr, float grad_scale) const;
  void adamw(int64_t update, double lr, float grad_scale, int64_t from, int64_t to);
  Status lamb(int64_t update, double lr, float grad_scale, int64_t from, int64_t to, comm::Comm& world);
  Status adafactor(int64_t update, double lr, float grad_scale, int64_t from, int64_t to, comm::Comm& world);
  /// Adafactor: sums of squares over the rows and columns of whole tensors, in the order of RankPlan::sums' work.
  Status add_squares(float grad_scale);
  /// Adafactor: the second moments of rows and columns go on, and leave their factors.
  void factor(int64_t update, int64_t from, int64_t to);
  /// The run of its local tensor's matrix that a part is, and the factors of that tensor.
  std::pair<kernels::MatrixRun, kernels::AdafactorFactors> matrix_run(int64_t flat_offset, const float* grad,
                                                                      float grad_scale, int64_t count) const;
  /// Sums of whole tensors: those of the parts in `sums`, added up over the world.
  static Status add_norms(std::span<const ExactSum> sums, comm::Comm& world, std::vector<double>* out);
  double* work() const { return reinterpret_cast<double*>(arrays_.work); }
  float* factors() const { return reinterpret_cast<float*>(work() + rank_.dense_work + rank_.expert_work); }
  float* state_of(const SumPiece& piece, size_t index, int64_t bank) const;
  /// Biases that balance experts (TensorSpec::balances): each goes a step of bias_rate towards as many choices as the
  /// others have (Wang et al. 2024; DeepSeek-V3). Their moments stay.
  void balance(int64_t from, int64_t to, int64_t tokens);
  /// word_sums of a block that begins at element `begin` of a saved piece's array; blocks come in order.
  void note_sum(int64_t array, int64_t saved_piece, int64_t begin, uint64_t sums);
  void note_sums(int64_t saved_piece, int64_t begin, const kernels::AdamwState& state, int64_t count);
  void find_head_rows();
  void scale_heads(const HeadFactors& heads, int64_t bank);
  void average(int64_t from, int64_t to);
  /// What an update goes through: the pieces that gradients train, the same to look at only, or the rest.
  enum class Parts { kTrained, kReadOnly, kBalancing };
  /// Calls body(piece, begin, count, state in bank `from`, state in bank `to`, number of the saved piece or -1) for
  /// elements [begin, begin + count) of all those pieces that this rank updates. Both states begin at `begin`. Of
  /// private state, both are the same memory, or the first is its original. A piece is one block, except: banks on a
  /// disk come and go around the calls, a copied bank is waited for, and originals end where they end.
  template <typename Body>
  void for_parts(int64_t from, int64_t to, const Body& body, Parts which = Parts::kTrained) const;
  /// What an update reads and writes of a saved piece: brought from the disk, or put there.
  void fetch(const kernels::AdamwState& from, const kernels::AdamwState& to, int64_t count) const;
  void release(const kernels::AdamwState& from, const kernels::AdamwState& to, int64_t count) const;

  const Plan& plan_;
  const RankPlan& rank_;
  comm::RankGroups groups_;
  Arrays arrays_;
  std::vector<float * kernels::AdamwState::*> members_;  // of a bank's arrays
  std::vector<int64_t> saved_before_;                    // by piece: primary ones in front of it
  bool summed_;                                          // sums_ are taken
  bool stream_;                                          // a bank is larger than the caches
  bool elsewhere_;                                       // private state is where Arrays::originals says
  std::vector<uint64_t> sums_;
  std::vector<TensorRates> rates_;  // of the plan's tensors
  /// The query and key projections that this rank has a part of, weights and biases.
  struct HeadRows {
    int64_t tensor = 0, offset = 0;            // of its first element here, into the flat range
    int64_t head_elems = 0, first_factor = 0;  // of the first head here, into HeadFactors::query or ::key
    bool key = false;
  };
  std::vector<HeadRows> head_rows_;  // with qk_clip
  struct LocalSums {
    int64_t rows = -1,
            cols = -1;  // RankPlan::sums of a local tensor: of its rows, of its columns or a vector's elements
  };
  std::vector<LocalSums> local_sums_;  // of RankPlan::tensors
};

}  // namespace cairn::optim
