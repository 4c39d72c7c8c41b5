#pragma once
// Attention by cuDNN, where a run asks for it: which shapes it takes, what memory they need, and their plans, which are
// made before the first step and looked up by shape afterwards. Nothing here knows cuDNN: runtime/cuda/cudnn builds a
// plan, in tests a double does. What has no plan is for Cairn's own kernels.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/cuda/stream.h"
#include "runtime/device/attention_shape.h"

namespace cairn::cuda {

enum class AttentionPass { kForward, kBackward };

/// Arrays of a pass, in the device's memory. The forward pass writes out and logsumexp, the backward one reads them.
struct AttentionArrays {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  void* out = nullptr;
  float* logsumexp = nullptr;
  const void* dout = nullptr;  // of the backward pass, as dq, dk and dv
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  float scale = 1.0f;
};

/// A pass of one shape.
class AttentionPlan {
 public:
  virtual ~AttentionPlan() = default;
  virtual int64_t workspace_bytes() const = 0;
  /// Orders it; `workspace` has so many bytes, and no other stream uses them.
  virtual Status run(CudaStream& on, const AttentionArrays& of, void* workspace) = 0;
};

/// Errors: what is refused, in the library's words.
using AttentionBuilder =
    std::function<Result<std::unique_ptr<AttentionPlan>>(const AttentionShape& of, AttentionPass pass)>;

/// What one call of the backward pass takes of `of`: all of it, or as many samples, or heads of one sample, as need no
/// more workspace than `most`. Its strides are those of the whole.
constexpr int64_t kMostAttentionWorkspace = int64_t{1536} << 20;
AttentionShape attention_piece(const AttentionShape& of, int64_t most = kMostAttentionWorkspace);

/// Whether cuDNN is asked for it; a device may refuse more. Empty: it is; else why not.
std::string why_not_by_cudnn(const AttentionShape& of);

/// Device memory for either pass of a shape that it is asked for. cuDNN's deterministic backward keeps the gradients of
/// all scores, in 16 bits, and keys' gradients of all query heads.
int64_t attention_workspace_bytes(const AttentionShape& of, AttentionPass pass, int64_t most = kMostAttentionWorkspace);
/// The most that any of these needs.
int64_t attention_workspace_bytes(std::span<const AttentionShape> shapes);

class AttentionPlans {
 public:
  /// `most`: of attention_piece().
  explicit AttentionPlans(AttentionBuilder build, int64_t most = kMostAttentionWorkspace)
      : build_(std::move(build)), most_(most) {}

  /// Makes plans of both passes for those of these shapes that it has not been asked for yet: a second or so for each,
  /// and not within a capture. Gives a line for each that is left to Cairn's own kernels, with the reason; where one
  /// pass is refused both are.
  std::vector<std::string> prepare(std::span<const AttentionShape> shapes);
  bool has(const AttentionShape& of) const { return plans_.contains(of); }
  int64_t count() const { return static_cast<int64_t>(plans_.size()); }

  /// Orders it on the stream; false where there is no plan for it, or an array does not begin at 16 bytes. What fails
  /// is left in the stream. `workspace`: at least attention_workspace_bytes() of all shapes that were prepared.
  bool run(CudaStream& on, const AttentionShape& of, AttentionPass pass, const AttentionArrays& arrays,
           DeviceBytes workspace);

 private:
  struct Plan {
    std::unique_ptr<AttentionPlan> forward, backward;
    AttentionShape piece;  // of backward
  };
  Result<std::unique_ptr<AttentionPlan>> checked(const AttentionShape& of, AttentionPass pass) const;

  AttentionBuilder build_;
  int64_t most_;
  std::map<AttentionShape, Plan> plans_;
  std::set<AttentionShape> refused_;
};

/// "bf16 16 x 1024 tokens, 12 heads of 64"
std::string attention_text(const AttentionShape& of);

}  // namespace cairn::cuda
