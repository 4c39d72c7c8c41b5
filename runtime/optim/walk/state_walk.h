#pragma once
// A rank's optimizer state, and the way an update goes through it, whatever its rule: block by block in the order of
// the flat range. Saved state lies in banks, and goes from one into another; what other replicas save is private, and
// updated in place. Around each block the walk does what the memory asks for: banks on a disk come and go (Pager), a
// bank that is being copied is waited for (CopyGate), private state is read at its peers until it is here (PeerCopy).
// Beside it the walk keeps checksums of what is written into a bank.
//
// Owns no memory. Threads: one, except for make_weights().

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "runtime/kernels/state_arrays.h"
#include "runtime/plan/plan.h"
#include "runtime/device/copy_gate.h"
#include "runtime/device/pager.h"
#include "runtime/device/peer_copy.h"

namespace cairn::optim {

/// Where an array of that kind is found.
float* kernels::StateArrays::*member_of(StateKind kind);

/// Where the arrays of a rank lie; memory of others.
struct Arrays {
  void* weights = nullptr;             // weight_bytes, in the compute dtype: RankPlan::weight_offset()
  float* grads = nullptr;              // reduced sums: RankPlan::grad_offset()
  kernels::StateArrays private_state;  // private_elems each
  float* private_sums = nullptr;       // of the SumPieces that others save
  std::vector<std::vector<kernels::StateArrays>> banks;  // of each bank, where each primary piece's state lies
  std::vector<std::vector<float*>> bank_sums;            // of each bank, where each primary SumPiece lies
  std::byte* work = nullptr;                             // RankPlan::work_bytes()
  Pager* pager = nullptr;                                // of banks on a disk
  CopyGate* gate = nullptr;                              // of bank 0, the only one written: copied beside training
  /// Of all private state, which is found there until the first update puts it where it belongs. Null: it is where it
  /// belongs.
  std::optional<std::vector<PeerCopy>> peer_copies;
};

/// Of each tensor that a rank saves, in the order of a bank (each array of all primary pieces, then the primary
/// SumPieces): its turn in an update. Turns count from 0; tensors of one turn are overwritten together, block by block.
/// First come biases that balance experts, then sums of whole tensors, then what gradients train, piece by piece.
std::vector<int64_t> overwrite_turns(const Plan& plan, const RankPlan& rank);

/// Elements [begin, begin + count) of a piece, and all that an update needs of them.
struct StateBlock {
  const StatePiece* piece = nullptr;
  int64_t saved = -1;  // number of the piece among those that this rank saves; -1: it is private
  int64_t begin = 0, count = 0;
  const float* grad = nullptr;    // reduced
  int64_t weight = 0;             // of its first element, into Arrays::weights
  kernels::StateArrays from, to;  // both begin at `begin`, and may be the same memory
};

class StateWalk {
 public:
  /// `plan` and `rank` outlive it.
  StateWalk(const Plan& plan, const RankPlan& rank, Arrays arrays);

  const Plan& plan() const { return plan_; }
  const RankPlan& rank() const { return rank_; }
  const Arrays& arrays() const { return arrays_; }

  /// What is gone through: the pieces that gradients train, the same to look at only, or those that balance experts.
  enum class Pieces { kTrained, kReadOnly, kBalancing };
  /// Calls `body` for all of those that this rank updates, with state of bank `from` and of bank `to`. A piece is one
  /// block, except: on a disk, or while it is copied, it is several, and peer copies end where they end.
  void for_blocks(int64_t from, int64_t to, const std::function<void(const StateBlock&)>& body,
                  Pieces pieces = Pieces::kTrained) const;
  /// Calls body(index into RankPlan::sums, state in bank `from`, state in bank `to`) for all of them, and takes the
  /// checksums of what it leaves.
  void for_sums(int64_t from, int64_t to, const std::function<void(int64_t, const float*, float*)>& body);

  /// The weights that forward and backward read, from the block's masters in bank `to`.
  void put_weights(const StateBlock& block) const { put_weights(block.to.master, block.weight, block.count); }

  /// The checksums of what is written into this block are wanted.
  bool summed(const StateBlock& block) const { return summed_ && block.saved >= 0; }
  /// word_sums of what was written into a block of an array, if they are wanted; the blocks of a piece come in order.
  void note_sum(const StateBlock& block, int64_t array, uint64_t sums);
  /// The same of all its arrays except the average, taken here.
  void note_sums(const StateBlock& block);
  /// word_sums (runtime/core/word_sums.h) of what the last update wrote into a bank, in its order. With a gate none are
  /// taken: who copies takes them.
  std::span<const uint64_t> sums() const { return sums_; }

  /// In place of an update: saved state goes from bank `from` into bank `to` as it is.
  void keep(int64_t from, int64_t to);

  /// Private state is still where Arrays::peer_copies says.
  bool reads_peers() const { return reads_peers_; }
  /// Copies all of it to where it belongs, from the peers' bank `bank`.
  void bring_peer_copies(int64_t bank);
  /// An update has written all of it where it belongs.
  void leave_peers() { reads_peers_ = false; }

  /// Once the state of all ranks is there (initialised or loaded): the weights of this rank's shard of a bucket from
  /// the masters, those of `bank` and private ones or their peer copies there. No update may run; from any thread.
  void make_weights(int64_t bank, const Bucket& bucket) const;

 private:
  int64_t index_of(const StatePiece& piece) const { return &piece - rank_.pieces.data(); }
  int64_t private_pieces() const { return std::ssize(rank_.pieces) - saved_pieces_; }
  std::vector<StateBlock> cut(int64_t from, int64_t to, Pieces pieces) const;
  StateBlock block_of(const StatePiece& piece, int64_t saved, int64_t begin, int64_t count) const;
  /// What an update reads and writes of a saved block: brought from the disk, or put there.
  void fetch(const StateBlock& block) const;
  void release(const StateBlock& block) const;
  /// Private state of a piece from element `begin` on, as long as it lies in one run, at most `count` elements: where
  /// it belongs, or while it is not there, in bank `bank` of the rank that saves it.
  std::pair<kernels::StateArrays, int64_t> private_run(const StatePiece& piece, int64_t begin, int64_t count,
                                                       int64_t bank) const;
  /// A copy from element `begin` on in bank `bank` of the rank that saves it, to the end of the run.
  std::span<float> at_peer(int64_t copy, int64_t begin, int64_t bank) const;
  /// Copies it to where it belongs.
  void bring_copy(int64_t copy, int64_t bank) const;
  void put_weights(const float* master, int64_t weight, int64_t count) const;

  const Plan& plan_;
  const RankPlan& rank_;
  Arrays arrays_;
  std::vector<float * kernels::StateArrays::*> members_;  // of a bank's arrays
  std::vector<int64_t> saved_before_;                     // by piece: primary ones in front of it
  int64_t saved_pieces_ = 0;                              // primary ones
  std::vector<float*> copies_;                            // where private state belongs, by PeerCopy::copy
  bool summed_;                                           // sums_ are taken
  bool reads_peers_;
  std::vector<uint64_t> sums_;
};

}  // namespace cairn::optim
