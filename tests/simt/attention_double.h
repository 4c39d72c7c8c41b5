#pragma once
// Attention by a library, as a double: plans that Cairn's own kernels run, piece by piece as the library would. What is
// proved by it is which calls have plans, where pieces begin and what memory they have, and nothing of cuDNN, whose
// real plans are built elsewhere (tests/runtime/cuda/cudnn).

#include <atomic>
#include <string>

#include "runtime/cuda/cudnn_attention.h"

namespace cairn::simt {

/// By all of the process.
struct AttentionCounts {
  std::atomic<int64_t> built{0}, forward{0}, backward{0};
};

/// Outlives what it has built.
class AttentionDouble {
 public:
  cuda::AttentionBuilder builder();
  const AttentionCounts& counts() const { return counts_; }
  /// Refuses heads of so many channels, as a device might.
  void refuse(int64_t head_dim) { refused_ = head_dim; }

 private:
  AttentionCounts counts_;
  std::atomic<int64_t> refused_{0};
};

}  // namespace cairn::simt
