#pragma once
// Attention by cuDNN, where a run asks for it: which shapes it takes, what memory they need, and their plans, which are
// made before the first step and looked up by shape afterwards. Nothing here knows cuDNN: runtime/cuda/cudnn builds a
// plan, in tests a double does. What has no plan is for Cairn's own kernels.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
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

/// A library, open for a device.
struct AttentionLibrary {
  AttentionBuilder build;
  int64_t version = 0;  // 91900 is 9.19.0
};

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

  /// Makes the plan of a pass, unless it was asked for before: a second or so, and not within a capture. Gives why
  /// there is none; empty: there is one.
  const std::string& prepare(const AttentionShape& of, AttentionPass pass);
  /// The same for both passes of these shapes. Gives a line for each pass that is left to Cairn's own kernels, with the
  /// reason; none for what it was asked for before.
  std::vector<std::string> prepare(std::span<const AttentionShape> shapes);
  bool has(const AttentionShape& of, AttentionPass pass) const;
  /// Passes that have a plan.
  int64_t count() const;

  /// Orders it on the stream; false where there is no plan for it, or an array does not begin at 16 bytes.
  /// `workspace`: at least attention_workspace_bytes() of all shapes that were prepared. Errors: the library's.
  Result<bool> order(CudaStream& on, const AttentionShape& of, AttentionPass pass, const AttentionArrays& arrays,
                     DeviceBytes workspace) const;
  /// The same; what fails is left in the stream.
  bool run(CudaStream& on, const AttentionShape& of, AttentionPass pass, const AttentionArrays& arrays,
           DeviceBytes workspace) const;

 private:
  struct Plan {
    std::unique_ptr<AttentionPlan> plan;  // null: refused
    std::string why;
    AttentionShape piece;  // of a call of it
  };
  Result<std::unique_ptr<AttentionPlan>> checked(const AttentionShape& of, AttentionPass pass) const;

  AttentionBuilder build_;
  int64_t most_;
  std::map<std::pair<AttentionShape, AttentionPass>, Plan> plans_;
};

/// "bf16 16 x 1024 tokens, 12 heads of 64"
std::string attention_text(const AttentionShape& of);
/// "forward", "backward"
const char* pass_word(AttentionPass pass);

}  // namespace cairn::cuda
