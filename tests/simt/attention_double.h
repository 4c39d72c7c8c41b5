#pragma once
// Attention by a library, as a double: plans that Cairn's own kernels run, piece by piece as the library would. What is
// proved by it is which calls have plans, where pieces begin and what memory they have, and nothing of cuDNN, whose
// real plans are built elsewhere (tests/runtime/cuda/cudnn). Over a double of the runtime it also plants how long each
// way takes, and what may be wrong with the library's.

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "runtime/cuda/attention_ways.h"
#include "runtime/cuda/cudnn_attention.h"
#include "tests/simt/stream_double.h"

namespace cairn::simt {

/// By all of the process.
struct AttentionCounts {
  std::atomic<int64_t> built{0}, forward{0}, backward{0};
  std::atomic<int64_t> warpgroups{0};  // passes by Cairn's kernels of these, where times are planted
};

/// Microseconds of a pass, beside its own pieces of work: by AttentionBy.
struct AttentionTimes {
  std::array<int64_t, 3> forward{}, backward{};
};

enum class AttentionFault { kRefused, kFails, kWrong, kNotANumber, kUnsteady, kUnsteadyEnd };

/// Outlives what it has built.
class AttentionDouble {
 public:
  AttentionDouble() = default;
  explicit AttentionDouble(StreamDouble& cuda) : cuda_(&cuda) {}

  cuda::AttentionBuilder builder();
  cuda::AttentionLibrary library() { return {.build = builder(), .version = version_}; }
  const AttentionCounts& counts() const { return counts_; }
  /// Refuses heads of so many channels, as a device might.
  void refuse(int64_t head_dim) { refused_ = head_dim; }
  /// 91900 where it is not said.
  void use_version(int64_t version) { version_ = version; }

  // With a double of the runtime.
  void plant(const AttentionTimes& times);
  /// A fault of the library's pass: no plan of it; its run fails; its results are other ones; one is no number; the
  /// first, or the very last one, is another one each time.
  void plant(cuda::AttentionPass pass, AttentionFault fault) { faults_[pass] = fault; }

  // For plans.
  std::optional<AttentionFault> fault(cuda::AttentionPass pass) const;
  StreamDouble* cuda() const { return cuda_; }

 private:
  AttentionCounts counts_;
  std::atomic<int64_t> refused_{0};
  StreamDouble* cuda_ = nullptr;
  int64_t version_ = 91900;
  std::map<cuda::AttentionPass, AttentionFault> faults_;
};

}  // namespace cairn::simt
