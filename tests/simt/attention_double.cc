#include "tests/simt/attention_double.h"

#include <fmt/format.h>

#include "runtime/core/check.h"
#include "runtime/kernels/cuda/attention.h"

namespace cairn::simt {
namespace {

using namespace cairn::cuda;

class Plan final : public AttentionPlan {
 public:
  Plan(const AttentionShape& of, AttentionPass pass, AttentionCounts& counts) : of_(of), pass_(pass), counts_(counts) {}

  /// All that the library may have.
  int64_t workspace_bytes() const override { return attention_workspace_bytes(of_, pass_, INT64_MAX); }

  Status run(CudaStream& on, const AttentionArrays& arrays, void* workspace) override {
    ++(pass_ == AttentionPass::kForward ? counts_.forward : counts_.backward);
    kernels::cuda::Queue queue{on.handle()};
    of_.dtype == DType::kBf16 ? launch<bf16>(queue, arrays, workspace) : launch<f16>(queue, arrays, workspace);
    if (queue.error == 0) return {};
    return Error{ErrorCode::kInternal, fmt::format("launching a kernel: {}", queue.error)};
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

  const AttentionShape of_;
  const AttentionPass pass_;
  AttentionCounts& counts_;
};

}  // namespace

cuda::AttentionBuilder AttentionDouble::builder() {
  return [this](const AttentionShape& of, AttentionPass pass) -> Result<std::unique_ptr<AttentionPlan>> {
    if (of.alibi || of.head_dim == refused_) {
      return Error{ErrorCode::kUnsupported, fmt::format("refused by the double: {}", attention_text(of))};
    }
    ++counts_.built;
    return std::unique_ptr<AttentionPlan>(std::make_unique<Plan>(of, pass, counts_));
  };
}

}  // namespace cairn::simt
