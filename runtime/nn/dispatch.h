#pragma once
// How rows get to their experts and back. The rows of a micro-batch's choices are put in the order of experts. With
// expert parallelism (mesh.ep > 1) one all_to_all sends them to the ranks that hold these, and another returns what the
// experts made of them. None is dropped.
//
// On the rank of the experts rows stand in *groups*: those of one expert. With deterministic = "layout": those of one
// expert from one rank of the ep group, so that each product is that of a rank which holds all experts. A group is
// padded with zeros to a multiple of kExpertRowsAlign, so that few shapes of products occur.
//
// The host places the groups, so a forward waits for the counts once a layer, with expert parallelism twice; a backward
// has them from its forward. Where one rank has
// all experts a device may place them (places()): then the host knows how many rows there are at most, and no more.
//
// One object serves all layers of a stage; what it knows is of the micro-batch and layer given to begin().
// Legend: T rows of tokens, k choices of a token, X experts, P rows of this rank's experts, padding included.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/device/host_numbers.h"
#include "runtime/kernels/ops.h"
#include "runtime/nn/buffers.h"
#include "runtime/plan/activations.h"

namespace cairn::nn {

template <typename Real>
class Dispatch {
 public:
  /// Neighbouring rows of one expert.
  struct Group {
    int64_t expert = 0;                       // of this rank's
    int64_t source = 0;                       // ep rank that they are from, where that is kept apart
    int64_t first = 0, filled = 0, rows = 0;  // rows: with padding
  };

  /// `ep` may be null when there is one rank.
  Dispatch(const kernels::Exec<Real>& on, const StageDims& dims, comm::Comm* ep, const Buffers& buffers);

  /// Finds the places of all rows. chosen [T, k]; counts [ep, X], how many rows each rank has for each expert, is what
  /// the ranks tell each other; null with one rank. `kept` [kept_counts()] of the host is for begin_again().
  Status begin(DevicePtr<const int32_t> chosen, DevicePtr<int32_t> counts, std::span<int32_t> kept,
               std::string_view what);
  /// The same in the backward of what was begun so.
  void begin_again(DevicePtr<const int32_t> chosen, std::span<const int32_t> kept);
  /// This rank's own for each expert, then what the ranks have told each other.
  static int64_t kept_counts(const StageDims& dims) { return (1 + dims.ep) * dims.experts; }

  /// [X + 1] on the device, which has placed them; null: the host has, and knows groups().
  DevicePtr<const kernels::GroupRows> places() const { return places_; }
  /// How often this rank's tokens chose each expert, [X] on the device, where that has placed them.
  DevicePtr<float> counts() const { return placed_counts_X_; }
  std::span<const Group> groups() const { return groups_; }
  /// Rows that may be of experts: on a device all there is room for.
  int64_t used_rows() const {
    if (places_) return dims_.expert_rows;
    return groups_.empty() ? 0 : groups_.back().first + groups_.back().rows;
  }
  /// Rows of this rank's tokens for expert e of all, where the host has placed them.
  int64_t choices_of(int64_t expert) const { return sent_at_[expert + 1] - sent_at_[expert]; }

  /// rows [P, H]: each token's row of tokens [T, H] for each of its choices, times weights [T, k] (null: 1); padding is
  /// zero.
  Status to_experts(DevicePtr<const Real> tokens_TH, DevicePtr<const float> weights, DevicePtr<Real> rows_PH,
                    std::string_view what);
  /// tokens [T, H]: the sum over a token's choices of weights [T, k] (null: 1) times the choice's row of rows [P, H].
  Status to_tokens(DevicePtr<Real> rows_PH, DevicePtr<const float> weights, DevicePtr<Real> tokens_TH,
                   std::string_view what);
  /// dots [T, k] of the choices' rows of a and b [P, width]; then both are multiplied by weights [T, k].
  Status dot_and_scale(DevicePtr<Real> a, DevicePtr<Real> b, DevicePtr<const float> weights, int64_t width,
                       DevicePtr<float> dots, std::string_view what);

 private:
  bool alone() const { return ep_ == nullptr || ep_->size() == 1; }
  /// Finds from kept counts where all rows go.
  void place(DevicePtr<const int32_t> chosen, std::span<const int32_t> kept);
  void place_groups();
  /// Rows of rank r for this rank's e-th expert.
  int64_t count_of(int64_t r, int64_t e) const {
    return told_[static_cast<size_t>(r * dims_.experts + dims_.first_expert + e)];
  }
  /// Runs of `width` elements for each row, between the order of tokens' experts and the rows of this rank's experts.
  template <typename T>
  Status exchange(DevicePtr<T> sent, DevicePtr<T> rows, int64_t width, bool to_experts, std::string_view what);

  const kernels::Exec<Real>& on_;
  StageDims dims_;
  comm::Comm* ep_;
  DevicePtr<Real> sent_CH_;                                       // C = T k; null alone
  DevicePtr<float> sent_numbers_C_, row_weights_P_, row_dots_P_;  // likewise
  DevicePtr<kernels::GroupRows> places_;
  DevicePtr<float> placed_counts_X_;
  DevicePtr<int32_t> rows_of_Tk_;             // alone places in P, else in C
  std::vector<int64_t> sent_at_;              // [X + 1], of C
  HostNumbers<int32_t> own_counts_, counts_;  // [X]; [ep, X]
  std::vector<int32_t> told_;                 // [ep, X], of what is under way
  std::vector<Group> groups_;
  std::vector<int64_t> arrivals_at_, next_;  // [ep, local experts], of P; [X]
  std::vector<comm::OutPart> out_;
  std::vector<comm::InPart> in_;
};

}  // namespace cairn::nn
