#pragma once
// Attention's kernels where a run lets time decide (runtime/cuda/tuning): for each shape and pass apart, Cairn's
// own of every card, Cairn's own by warpgroups, or those of a library. Passes mix: all kernels keep the natural
// logarithm of the sum of a row's exponentials, and time() leaves out what gives other numbers than Cairn's own.

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/cuda/cudnn_attention.h"
#include "runtime/cuda/stream.h"
#include "runtime/device/attention_shape.h"

namespace cairn::cuda {

/// Whether attention by warpgroups takes part. False until a card has run it: `true` here is all that is needed.
inline constexpr bool kTimesWarpgroups = false;

enum class AttentionBy { kOwn, kWarpgroup, kCudnn };
/// "own", "warpgroup", "cudnn"
const char* by_word(AttentionBy by);

struct AttentionKind {
  AttentionShape shape;
  AttentionPass pass = AttentionPass::kForward;
  auto operator<=>(const AttentionKind&) const = default;
};

/// A call of a kind, which can be done again.
struct AttentionCall {
  AttentionArrays arrays;
  bool warpgroups = false;                         // they take it, on this device
  std::function<Status(AttentionBy)> order;        // Errors: it is refused, and the stream is as it was
  std::function<Status()> order_forward_by_own{};  // of a backward pass: what writes its out and logsumexp
};

/// Found by time().
struct TimedAttention {
  AttentionBy by = AttentionBy::kOwn;
  std::vector<std::pair<AttentionBy, double>> us;  // Cairn's own first; empty where only these could do it
};

struct AttentionTiming {
  /// A checksum of this memory of the device, once all that was ordered is done. Empty: bits are not compared.
  std::function<Result<uint64_t>(const void* first, int64_t bytes)> sum;
  int64_t runs = 4;  // whose bits are compared, at least 2
};

/// Threads: one at a time, that of the stream.
class AttentionWays {
 public:
  /// `plans`: of a library; null: there is none. Outlives it.
  explicit AttentionWays(AttentionPlans* plans, bool times_warpgroups = kTimesWarpgroups)
      : plans_(plans), times_warpgroups_(times_warpgroups) {}

  /// From now on those of these shapes have a choice that something beside Cairn's own kernels may take.
  void allow(std::span<const AttentionShape> shapes);
  bool allows(const AttentionShape& shape) const { return allowed_.contains(shape); }
  bool allows_any() const { return !allowed_.empty(); }

  /// The choice that was given; nothing: none was.
  std::optional<AttentionBy> by(const AttentionKind& kind) const;
  /// It was called without a choice. The last call of a kind is kept.
  void note(const AttentionKind& kind, AttentionCall call) { calls_.insert_or_assign(kind, std::move(call)); }
  /// Kinds of these calls, in order.
  std::vector<AttentionKind> unchosen() const;

  /// It is done so from now on. A library's plan of it is made here. Errors: there is none.
  Status use(const AttentionKind& kind, AttentionBy by);
  /// Times what can do a kind that was noted, on the arrays of its last call: inputs are overwritten with drawn
  /// numbers, and outputs. Left out, with a line in the log, is what is refused, differs from Cairn's own by more than
  /// rounding, or does not repeat its bits. The fastest is the choice; Cairn's own where none is faster by kWorthwhile.
  /// use() is the caller's. Errors: of the stream; of Cairn's own kernels.
  Result<TimedAttention> time(CudaStream& on, const AttentionKind& kind, const AttentionTiming& how);

 private:
  AttentionPlans* const plans_;
  const bool times_warpgroups_;
  std::set<AttentionShape> allowed_;
  std::map<AttentionKind, AttentionCall> calls_;
  std::map<AttentionKind, AttentionBy> chosen_;
};

}  // namespace cairn::cuda
