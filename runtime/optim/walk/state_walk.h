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

#include "runtime/device/copy_gate.h"
#include "runtime/device/host_numbers.h"
#include "runtime/device/pager.h"
#include "runtime/device/peer_copy.h"
#include "runtime/kernels/state_ops.h"
#include "runtime/plan/plan.h"

namespace cairn::optim {

/// Where an array of that kind is found.
DevicePtr<float> kernels::StateArrays::*member_of(StateKind kind);

/// Where the arrays of a rank lie; memory of others.
struct Arrays {
  DevicePtr<std::byte> weights;        // weight_bytes, in the compute dtype: RankPlan::weight_offset()
  DevicePtr<float> grads;              // reduced sums: RankPlan::grad_offset()
  kernels::StateArrays private_state;  // private_elems each
  DevicePtr<float> private_sums;       // of the SumPieces that others save
  std::vector<std::vector<kernels::StateArrays>> banks;  // of each bank, where each primary piece's state lies
  std::vector<std::vector<DevicePtr<float>>> bank_sums;  // of each bank, where each primary SumPiece lies
  DevicePtr<std::byte> work;                             // RankPlan::work_bytes()
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
  DevicePtr<const float> grad;    // reduced
  int64_t weight = 0;             // of its first element, into Arrays::weights
  kernels::StateArrays from, to;  // both begin at `begin`, and may be the same memory
};

class StateWalk {
 public:
  /// All outlive it. What is done is ordered on `stream`.
  StateWalk(Stream& stream, const Plan& plan, const RankPlan& rank, Arrays arrays);

  const kernels::StateExec& on() const { return on_; }
  const Plan& plan() const { return plan_; }
  const RankPlan& rank() const { return rank_; }
  const Arrays& arrays() const { return arrays_; }

  /// What is gone through: the pieces that gradients train, the same to look at only, or those that balance experts.
  /// kTrainedAgain, kBalancingAgain: this update has gone through them before, so it is behind the copy of all of them.
  enum class Pieces { kTrained, kReadOnly, kTrainedAgain, kBalancing, kBalancingAgain };
  /// Calls `body` for all of those that this rank updates, with state of bank `from` and of bank `to`. A piece is one
  /// block, except: on a disk, or while it is copied, it is several, and peer copies end where they end.
  void for_blocks(int64_t from, int64_t to, const std::function<void(const StateBlock&)>& body,
                  Pieces pieces = Pieces::kTrained) const;
  /// The same with as many blocks at once as may be overwritten together: all of them, except on a disk or while state
  /// is copied.
  void for_batches(int64_t from, int64_t to, const std::function<void(std::span<const StateBlock>)>& body,
                   Pieces pieces = Pieces::kTrained) const;
  /// Calls body(index into RankPlan::sums, state in slot `from`, state in slot `to`) for all of them. Work ordered
  /// behind it may write them.
  using ForSum = std::function<void(int64_t, DevicePtr<const float>, DevicePtr<float>)>;
  void for_sums(int64_t from, int64_t to, const ForSum& body) const;

  /// The weights that forward and backward read, from the block's masters in bank `to`.
  void put_weights(const StateBlock& block) const;
  /// Their place, in the compute dtype.
  DevicePtr<void> weights_of(const StateBlock& block) const { return weights_at(block.weight); }

  /// Where a kernel that writes `count` arrays of this block, from `first_array` on, leaves their checksums; nowhere if
  /// they are not wanted. The blocks of a piece come in order.
  kernels::BlockSums sums_of(const StateBlock& block, int64_t first_array, int64_t count);
  /// Takes the checksums of sums in slot `to`, once these are written.
  void sum_up_sums(int64_t to);
  /// The checksums of all its arrays except the average, by a pass of their own.
  void sum_up(const StateBlock& block);
  /// word_sums (runtime/core/word_sums.h) of what the last update wrote into a bank, in its order; the stream is
  /// settled. With a gate none are taken: who copies takes them.
  std::vector<uint64_t> sums() const;

  /// In place of an update: saved state goes from bank `from` into bank `to` as it is.
  void keep(int64_t from, int64_t to);

  /// Private state is still where Arrays::peer_copies says.
  bool reads_peers() const { return reads_peers_; }
  /// Copies all of it to where it belongs, from the peers' bank `bank`.
  void bring_peer_copies(int64_t bank);
  /// An update has written all of it where it belongs.
  void leave_peers() { reads_peers_ = false; }

  /// Once the state of all ranks is there (initialised or loaded): the weights of this rank's shard of a bucket from
  /// the masters, those of `bank` and private ones or their peer copies there. No update may run; from any thread,
  /// ordered on a stream of its own.
  void make_weights(Stream& stream, int64_t bank, const Bucket& bucket) const;

 private:
  int64_t index_of(const StatePiece& piece) const { return &piece - rank_.pieces.data(); }
  int64_t private_pieces() const { return std::ssize(rank_.pieces) - saved_pieces_; }
  /// Elements of each array that are best overwritten at once, beside a copy.
  int64_t most_at_once() const;
  std::vector<StateBlock> cut(int64_t from, int64_t to, Pieces pieces) const;
  StateBlock block_of(const StatePiece& piece, int64_t saved, int64_t begin, int64_t count) const;
  /// The same of saved state, which lies in both slots.
  StateBlock saved_block(const StatePiece& piece, int64_t begin, int64_t count, int64_t from, int64_t to) const;
  /// The same of private state, as long as private_run() has it.
  StateBlock private_block(const StatePiece& piece, int64_t begin, int64_t count, int64_t from) const;
  /// What an update reads and writes of a saved block: brought from the disk, or put there.
  void fetch(const StateBlock& block) const;
  void release(const StateBlock& block) const;
  /// Private state of a piece from element `begin` on, as long as it lies in one run, at most `count` elements: where
  /// it belongs, or while it is not there, in bank `bank` of the rank that saves it.
  std::pair<kernels::StateArrays, int64_t> private_run(const StatePiece& piece, int64_t begin, int64_t count,
                                                       int64_t bank) const;
  /// A copy from element `begin` on in bank `bank` of the rank that saves it, to the end of the run.
  std::pair<DevicePtr<float>, int64_t> at_peer(int64_t copy, int64_t begin, int64_t bank) const;
  /// Copies it to where it belongs.
  void bring_copy(int64_t copy, int64_t bank) const;
  DevicePtr<std::byte> weights_at(int64_t weight) const;
  /// Places of checksums of so many arrays of a saved piece, from the first on; of a saved SumPiece its one.
  std::span<uint64_t> places(int64_t saved, int64_t first_array, int64_t count) {
    return sums_.room(saved * std::ssize(members_) + first_array, count);
  }
  std::span<uint64_t> place_of_sum(int64_t saved) {
    return sums_.room(saved_pieces_ * std::ssize(members_) + saved, 1);
  }

  const kernels::StateExec on_;
  const Plan& plan_;
  const RankPlan& rank_;
  Arrays arrays_;
  std::vector<DevicePtr<float> kernels::StateArrays::*> members_;  // of a bank's arrays
  std::vector<int64_t> saved_before_;                              // by piece: primary ones in front of it
  int64_t saved_pieces_ = 0;                                       // primary ones
  std::vector<DevicePtr<float>> copies_;                           // where private state belongs, by PeerCopy::copy
  bool summed_;                                                    // sums_ are taken
  bool reads_peers_;
  HostNumbers<uint64_t> sums_;  // of each saved piece those of its arrays, then of each saved SumPiece
};

}  // namespace cairn::optim
