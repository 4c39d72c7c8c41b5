#include "tests/simt/attention_double.h"

#include <fmt/format.h>

#include <cstring>
#include <memory>

#include "runtime/core/check.h"
#include "runtime/kernels/cuda/attention.h"
#include "tests/simt/symbols.h"

namespace cairn::simt {
namespace {

using namespace cairn::cuda;

/// Whether the thread orders the library's work.
thread_local bool by_library = false;

class Plan final : public AttentionPlan {
 public:
  Plan(const AttentionShape& of, AttentionPass pass, AttentionCounts& counts, const AttentionDouble& library)
      : of_(of), pass_(pass), counts_(counts), library_(library) {}

  /// All that the library may have.
  int64_t workspace_bytes() const override { return attention_workspace_bytes(of_, pass_, INT64_MAX); }

  Status run(CudaStream& on, const AttentionArrays& arrays, void* workspace) override {
    ++(pass_ == AttentionPass::kForward ? counts_.forward : counts_.backward);
    const std::optional<AttentionFault> fault = library_.fault(pass_);
    if (fault == AttentionFault::kFails) return Error{ErrorCode::kUnsupported, "planted"};
    kernels::cuda::Queue queue{on.handle()};
    by_library = true;
    of_.dtype == DType::kBf16 ? launch<bf16>(queue, arrays, workspace) : launch<f16>(queue, arrays, workspace);
    by_library = false;
    if (queue.error != 0) return Error{ErrorCode::kInternal, fmt::format("launching a kernel: {}", queue.error)};
    if (fault) spoil(on, arrays, *fault);
    return {};
  }

 private:
  template <typename T>
  void launch(kernels::cuda::Queue& on, const AttentionArrays& a, void* workspace) const {
    const kernels::AttentionDims dims{.batch = of_.samples,
                                      .tokens = of_.tokens,
                                      .heads = of_.heads,
                                      .kv_heads = of_.kv_heads,
                                      .head_dim = of_.head_dim,
                                      .q_stride = of_.q_stride,
                                      .kv_stride = of_.kv_stride,
                                      .out_stride = of_.out_stride,
                                      .scale = a.scale,
                                      .mask = {.causal = of_.causal, .window = of_.window}};
    const auto in = [](const void* array) { return static_cast<const T*>(array); };
    const auto out = [](void* array) { return static_cast<T*>(array); };
    if (pass_ == AttentionPass::kForward) {
      return kernels::cuda::attention_forward<T>(on, dims, in(a.q), in(a.k), in(a.v), out(a.out), a.logsumexp, nullptr);
    }
    const int64_t deltas = kernels::cuda::attention_deltas(dims) * static_cast<int64_t>(sizeof(float));
    RT_CHECK(deltas <= workspace_bytes(), "{} bytes of deltas", deltas);
    kernels::cuda::attention_backward<T, T>(on, dims, in(a.q), in(a.k), in(a.v), in(a.out), a.logsumexp, in(a.dout),
                                            out(a.dq), out(a.dk), out(a.dv), static_cast<float*>(workspace));
  }

  /// The logarithm is to base 2, a number is none, or the last bit of the first or of the last is another one every
  /// other time.
  void spoil(CudaStream& on, const AttentionArrays& arrays, AttentionFault fault) {
    const int64_t sums = of_.samples * of_.heads * of_.tokens;
    void* const first = pass_ == AttentionPass::kForward ? arrays.out : arrays.dq;
    const bool steady = fault != AttentionFault::kUnsteady && fault != AttentionFault::kUnsteadyEnd;
    const bool flips = !steady && ++runs_ % 2 == 0;
    const bool doubles = fault == AttentionFault::kWrong, nan = fault == AttentionFault::kNotANumber;
    auto* last = static_cast<uint16_t*>(first);
    if (fault == AttentionFault::kUnsteadyEnd) {
      const int64_t rows = of_.samples * of_.tokens - 1;
      last = pass_ == AttentionPass::kForward
                 ? reinterpret_cast<uint16_t*>(arrays.logsumexp + sums - 1)
                 : static_cast<uint16_t*>(arrays.dv) + rows * of_.kv_stride + of_.kv_heads * of_.head_dim - 1;
    }
    const int64_t numbers = of_.tokens * of_.heads * of_.head_dim;
    library_.cuda()->launch(on.handle(),
                            [=, sums = pass_ == AttentionPass::kForward ? sums : 0, lse = arrays.logsumexp] {
                              if (flips) *last ^= 1;
                              if (nan) static_cast<uint16_t*>(first)[0] = 0x7fff;
                              if (!doubles) return;
                              for (int64_t i = 0; i < sums; ++i) lse[i] *= 1.442695f;
                              if (sums == 0) std::memset(first, 0, static_cast<size_t>(numbers) * sizeof(uint16_t));
                            });
  }

  const AttentionShape of_;
  const AttentionPass pass_;
  AttentionCounts& counts_;
  const AttentionDouble& library_;
  int64_t runs_ = 0;
};

}  // namespace

std::optional<AttentionFault> AttentionDouble::fault(AttentionPass pass) const {
  const auto found = faults_.find(pass);
  return found == faults_.end() ? std::nullopt : std::optional(found->second);
}

void AttentionDouble::plant(const AttentionTimes& times) {
  cuda_->slow(
      [this, times, names = std::make_shared<std::map<const void*, std::string>>()](const Ordered& of) -> int64_t {
        if (of.kernel == nullptr) return 0;
        std::string& name = (*names)[of.kernel];
        if (name.empty()) name = name_of(of.kernel);
        if (!name.starts_with("attention_")) return 0;
        const bool forward = name.find("gradients") == std::string::npos;
        if (!forward && name.find("query_gradients") == std::string::npos) return 0;  // one of a pass
        const AttentionBy by = by_library                                ? AttentionBy::kCudnn
                               : name.starts_with("attention_warpgroup") ? AttentionBy::kWarpgroup
                                                                         : AttentionBy::kOwn;
        if (by == AttentionBy::kWarpgroup) ++counts_.warpgroups;
        return (forward ? times.forward : times.backward)[static_cast<size_t>(by)];
      });
}

cuda::AttentionBuilder AttentionDouble::builder() {
  return [this](const AttentionShape& of, AttentionPass pass) -> Result<std::unique_ptr<AttentionPlan>> {
    if (of.alibi || of.head_dim == refused_ || fault(pass) == AttentionFault::kRefused) {
      return Error{ErrorCode::kUnsupported, fmt::format("refused by the double: {}", attention_text(of))};
    }
    ++counts_.built;
    return std::unique_ptr<AttentionPlan>(std::make_unique<Plan>(of, pass, counts_, *this));
  };
}

}  // namespace cairn::simt
