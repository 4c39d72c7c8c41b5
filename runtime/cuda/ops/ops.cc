#include "runtime/cuda/ops/ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "runtime/core/exact_sum.h"
#include "runtime/cuda/attention_ways.h"
#include "runtime/cuda/blas.h"
#include "runtime/cuda/cudnn_attention.h"
#include "runtime/cuda/ops/missing.h"
#include "runtime/cuda/stream.h"
#include "runtime/kernels/cuda/adafactor.h"
#include "runtime/kernels/cuda/attention.h"
#include "runtime/kernels/cuda/dropout.h"
#include "runtime/kernels/cuda/embedding.h"
#include "runtime/kernels/cuda/experts.h"
#include "runtime/kernels/cuda/grouped.h"
#include "runtime/kernels/cuda/head_clip.h"
#include "runtime/kernels/cuda/latent.h"
#include "runtime/kernels/cuda/loss.h"
#include "runtime/kernels/cuda/maps.h"
#include "runtime/kernels/cuda/norm.h"
#include "runtime/kernels/cuda/rotary.h"
#include "runtime/kernels/cuda/rows.h"
#include "runtime/kernels/cuda/square_rounds.h"
#include "runtime/kernels/cuda/state.h"
#include "runtime/kernels/cuda/sums.h"
#include "runtime/kernels/cuda/update.h"
#include "runtime/kernels/cuda/whole_norm.h"

namespace cairn::cuda {
namespace {

namespace k = kernels::cuda;
using k::Queue;
using kernels::Gate;
using kernels::Param;

void missing(Stream& on, const char* what) {
  cuda_stream(on).keep({ErrorCode::kUnsupported, fmt::format("CUDA has no {} yet; use device \"cpu\"", what)});
}
/// Whether `wanted`, which is missing then.
bool lacks(CudaStream& on, bool wanted, const char* what) {
  if (wanted) missing(on, what);
  return wanted;
}
template <const char* const& kWhat>
void stop(Stream& on) {
  missing(on, kWhat);
}
// --- calls
// --------------------------------------------------------------------------------------------------------------

/// body(stream, queue), where the stream takes work.
template <typename Body>
void order(Stream& stream, const char* what, const Body& body) {
  CudaStream& on = cuda_stream(stream);
  if (!on.ready()) return;
  Queue queue{.stream = on.handle(),
              .scratch = static_cast<std::byte*>(on.scratch(0, what)),
              .scratch_bytes = on.scratch_bytes()};
  body(on, queue);
  on.keep(queue.error, what);
  if (queue.lacked_bytes > 0) on.scratch(queue.lacked_bytes, what);  // keeps the error
}

/// A launching function with the parameters of the table.
template <auto kFunction>
struct Direct;
template <typename... A, void (*kFunction)(Queue&, A...)>
struct Direct<kFunction> {
  static void run(Stream& stream, typename Param<A>::Type... of) {
    order(stream, "launching a kernel", [&](CudaStream&, Queue& queue) { kFunction(queue, Param<A>::on_cpu(of)...); });
  }
};

template <typename T>
int64_t bytes_of(int64_t count) {
  return count * static_cast<int64_t>(sizeof(T));
}
template <typename T>
void copy(Stream& stream, DevicePtr<const T> from, DevicePtr<T> to, int64_t count) {
  cuda_stream(stream).copy(to.address(), from.address(), bytes_of<T>(count), kOnDevice);
}
template <typename T>
void clear(Stream& stream, DevicePtr<T> x, int64_t count) {
  cuda_stream(stream).set(x.address(), 0, bytes_of<T>(count));  // the bits of 0 in all types
}
template <typename T>
void to_host(Stream& stream, DevicePtr<const T> from, std::span<T> host) {
  cuda_stream(stream).copy(host.data(), from.address(), std::ssize(host) * static_cast<int64_t>(sizeof(T)), kToHost);
}
/// What the host has computed. The runtime has read it when the call returns, since it is not pinned.
void from_host(CudaStream& on, const std::vector<float>& host, float* to) {
  on.copy(to, host.data(), bytes_of<float>(std::ssize(host)), kToDevice);
}

/// Memory of the host that kernels add to: body(numbers, scratch) with what stands there, which goes back afterwards.
template <typename U, typename Body>
void with_numbers(CudaStream& on, std::span<U> host, int64_t scratch_bytes, const char* who, const Body& body) {
  const auto bytes = static_cast<int64_t>(host.size_bytes());
  auto* const memory = static_cast<std::byte*>(on.scratch(bytes + scratch_bytes, who));
  if (memory == nullptr) return;
  on.copy(memory, host.data(), bytes, kToDevice);
  body(reinterpret_cast<U*>(memory), memory + bytes);
  on.copy(host.data(), memory, bytes, kToHost);
}

template <typename T, Gate kGate>
void forward(Stream& stream, DevicePtr<const T> x, DevicePtr<T> y, int64_t count) {
  order(stream, "an activation",
        [&](CudaStream&, Queue& on) { k::activation_forward<T>(on, kGate, x.address(), y.address(), count); });
}
template <typename T, Gate kGate>
void backward(Stream& stream, DevicePtr<const T> dy, DevicePtr<const T> x, DevicePtr<T> dx, int64_t count) {
  order(stream, "an activation's gradient", [&](CudaStream&, Queue& on) {
    k::activation_backward<T>(on, kGate, dy.address(), x.address(), dx.address(), count);
  });
}
template <typename T, Gate kGate>
void both(Stream& stream, DevicePtr<const T> x, DevicePtr<T> dy, DevicePtr<T> y, int64_t count) {
  order(stream, "an activation with its gradient", [&](CudaStream&, Queue& on) {
    k::activation_both<T>(on, kGate, x.address(), dy.address(), y.address(), count);
  });
}

template <typename T>
void fill_norms(kernels::Ops<T>& out) {
  out.layer_norm_forward = &Direct<&k::layer_norm_forward<T>>::run;
  out.layer_norm_backward = &Direct<&k::layer_norm_backward<T>>::run;
  out.rms_norm_forward = &Direct<&k::rms_norm_forward<T>>::run;
  out.rms_norm_backward = &Direct<&k::rms_norm_backward<T>>::run;
  out.head_norm_forward = &Direct<&k::head_norm_forward<T>>::run;
  out.head_norm_backward = &Direct<&k::head_norm_backward<T>>::run;
  out.row_dots = &Direct<&k::row_dots<T>>::run;
  out.whole_norm_forward = &Direct<&k::whole_norm_forward<T>>::run;
  out.whole_norm_backward = &Direct<&k::whole_norm_backward<T>>::run;
}

template <typename T>
void fill_experts(kernels::Ops<T>& out) {
  using kernels::RouterDims;
  out.route_forward = [](Stream& stream, const RouterDims& d, DevicePtr<float> logits, DevicePtr<int32_t> chosen,
                         DevicePtr<float> weights, DevicePtr<float> log_sums) {
    order(stream, "route_forward", [&](CudaStream& cuda, Queue& on) {
      if (lacks(cuda, d.experts > k::kMostExperts, kManyExperts)) return;
      k::route_forward(on, d, logits.address(), chosen.address(), weights.address(), log_sums.address());
    });
  };
  out.route_backward = &Direct<&k::route_backward<T>>::run;
  out.count_choices = [](Stream& stream, DevicePtr<const int32_t> chosen, int64_t choices, std::span<int32_t> counts) {
    order(stream, "count_choices", [&](CudaStream& cuda, Queue& on) {
      const int64_t bytes = bytes_of<int32_t>(std::ssize(counts));
      auto* const there = static_cast<int32_t*>(cuda.scratch(bytes, "count_choices"));
      if (there == nullptr) return;
      k::count_choices(on, chosen.address(), choices, std::ssize(counts), there);
      cuda.copy(counts.data(), there, bytes, kToHost);
    });
  };
  out.place_choices = [](Stream& stream, DevicePtr<const int32_t> chosen, int64_t choices, std::span<int64_t> next,
                         DevicePtr<int32_t> rows_of) {
    order(stream, "place_choices", [&](CudaStream& cuda, Queue& on) {
      const int64_t bytes = bytes_of<int64_t>(std::ssize(next));
      auto* const there = static_cast<int64_t*>(cuda.scratch(bytes, "place_choices"));
      if (there == nullptr) return;
      cuda.copy(there, next.data(), bytes, kToDevice);
      k::place_choices(on, chosen.address(), choices, std::ssize(next), there, rows_of.address());
    });
  };
  out.group_choices = &Direct<&k::group_choices>::run;
  out.clear_padding = &Direct<&k::clear_padding<T>>::run;
  out.rows_to_experts = &Direct<&k::rows_to_experts<T>>::run;
  out.scale_expert_rows = &Direct<&k::scale_expert_rows<T>>::run;
  out.rows_to_tokens = &Direct<&k::rows_to_tokens<T>>::run;
  out.dot_and_scale_rows = &Direct<&k::dot_and_scale_rows<T>>::run;
  out.gate_rows = &Direct<&k::gate_rows<T>>::run;
  out.gate_backward = &Direct<&k::gate_backward<T>>::run;
}

template <typename T>
void fill_maps(kernels::Ops<T>& out) {
  out.add = &Direct<&k::add<T>>::run;
  out.add_bias = &Direct<&k::add_bias<T>>::run;
  out.add_scaled = &Direct<&k::add_scaled<T>>::run;
  out.scale = &Direct<&k::scale<T>>::run;
  out.cap = &Direct<&k::cap<T>>::run;
  out.clip = &Direct<&k::clip<T>>::run;
  out.clip_backward = &Direct<&k::clip_backward<T>>::run;
#define RT_ACTIVATION(name, gate)                 \
  out.name##_forward = &forward<T, Gate::gate>;   \
  out.name##_backward = &backward<T, Gate::gate>; \
  out.name##_both = &both<T, Gate::gate>;
  RT_ACTIVATION(gelu_tanh, kGeluTanh)
  RT_ACTIVATION(gelu_erf, kGeluErf)
  RT_ACTIVATION(gelu_quick, kGeluQuick)
  RT_ACTIVATION(relu, kRelu)
  RT_ACTIVATION(relu2, kRelu2)
  RT_ACTIVATION(silu, kSilu)
#undef RT_ACTIVATION
  out.gated_forward = &Direct<&k::gated_forward<T>>::run;
  out.gated_backward = &Direct<&k::gated_backward<T>>::run;
  out.clamped_gate_forward = &Direct<&k::clamped_gate_forward<T>>::run;
  out.clamped_gate_backward = &Direct<&k::clamped_gate_backward<T>>::run;
  out.join_latent_heads = &Direct<&k::join_latent_heads<T>>::run;
  out.split_latent_heads = &Direct<&k::split_latent_heads<T>>::run;
  out.rotary = &Direct<&k::rotary<T>>::run;
  out.bias_backward = &Direct<&k::bias_backward<T>>::run;
  out.dropout = &Direct<&k::dropout<T>>::run;
}

bool no_attention(CudaStream& on, const kernels::AttentionDims& d) {
  return lacks(on, d.head_dim > k::kWidestHead, kWideHeads) || lacks(on, k::in_parts(d), kPartsOfTokens);
}

/// Warpgroups where the device has them and the run lets them.
k::Units units_of(CudaStream& on) {
  return on.warpgroups() && k::has_warpgroups() ? k::Units::kWarpgroups : k::Units::kWarps;
}
k::Units units_of(AttentionBy by) {
  return by == AttentionBy::kWarpgroup && k::has_warpgroups() ? k::Units::kWarpgroups : k::Units::kWarps;
}

template <typename T>
constexpr DType kDTypeOf = std::is_same_v<T, bf16>  ? DType::kBf16
                           : std::is_same_v<T, f16> ? DType::kF16
                                                    : DType::kF32;

/// Cairn's own kernels, over arrays as a library has them.
template <typename T>
struct OwnForward {
  kernels::AttentionDims d;

  void operator()(CudaStream& cuda, Queue& on, const AttentionArrays& a, k::Units units) const {
    float* maxima = nullptr;
    if (d.max_scores) {
      maxima = static_cast<float*>(cuda.scratch(bytes_of<float>(k::attention_maxima(d)), "attention_forward"));
      if (maxima == nullptr) return;
    }
    k::attention_forward<T>(on, d, static_cast<const T*>(a.q), static_cast<const T*>(a.k), static_cast<const T*>(a.v),
                            static_cast<T*>(a.out), a.logsumexp, maxima, units);
  }
};
template <typename T>
struct OwnBackward {
  kernels::AttentionDims d;
  float* deltas;

  void operator()(CudaStream&, Queue& on, const AttentionArrays& a, k::Units units) const {
    k::attention_backward<T, T>(on, d, static_cast<const T*>(a.q), static_cast<const T*>(a.k),
                                static_cast<const T*>(a.v), static_cast<const T*>(a.out), a.logsumexp,
                                static_cast<const T*>(a.dout), static_cast<T*>(a.dq), static_cast<T*>(a.dk),
                                static_cast<T*>(a.dv), deltas, units);
  }
};

template <typename Own>
Status order_own(CudaStream& cuda, const AttentionArrays& arrays, const Own& own, k::Units units) {
  Queue on{cuda.handle()};
  own(cuda, on, arrays, units);
  if (on.error == 0) return {};
  return Error{ErrorCode::kUnsupported, fmt::format("launching a kernel: the runtime's error {}", on.error)};
}

/// How a pass can be ordered again, by whom time() asks for.
template <typename T, typename Own>
AttentionCall call_of(CudaStream& cuda, const AttentionKind& kind, const AttentionArrays& arrays, const Own& own) {
  AttentionCall out{.arrays = arrays};
  if constexpr (sizeof(T) == 2) {
    out.warpgroups =
        k::has_warpgroups() && k::warpgroups_take<T>(own.d, static_cast<const T*>(arrays.q),
                                                     static_cast<const T*>(arrays.k), static_cast<const T*>(arrays.v),
                                                     {arrays.out, arrays.dout, arrays.dq, arrays.dk, arrays.dv});
  }
  out.order = [&cuda, kind, arrays, own](AttentionBy by) -> Status {
    if (by != AttentionBy::kCudnn) return order_own(cuda, arrays, own, units_of(by));
    RT_TRY_SET(const bool ordered,
               cuda.attention()->order(cuda, kind.shape, kind.pass, arrays, cuda.attention_workspace()));
    if (ordered) return {};
    return Error{ErrorCode::kUnsupported, "an array does not begin at a multiple of 16 bytes"};
  };
  if (kind.pass == AttentionPass::kBackward) {
    out.order_forward_by_own = [&cuda, arrays, forward = OwnForward<T>{own.d}] {
      return order_own(cuda, arrays, forward, k::Units::kWarps);
    };
  }
  return out;
}

/// By cuDNN, where the run asks for it and has a plan of just this, or by Cairn's own kernels; where time decides, as
/// it has decided.
template <typename T, typename Own>
void attention(CudaStream& cuda, Queue& on, AttentionPass pass, const AttentionArrays& arrays, const Own& own) {
  const std::optional<AttentionShape> shape = kernels::plain_shape(own.d, kDTypeOf<T>);
  const auto by_cudnn = [&] {
    return shape && cuda.attention() != nullptr &&
           cuda.attention()->run(cuda, *shape, pass, arrays, cuda.attention_workspace());
  };
  AttentionWays* const ways = cuda.attention_ways();
  if (ways == nullptr) {
    if (!by_cudnn()) own(cuda, on, arrays, units_of(cuda));
    return;
  }
  AttentionBy by = AttentionBy::kOwn;
  if (shape && ways->allows(*shape)) {
    const AttentionKind kind{*shape, pass};
    const std::optional<AttentionBy> chosen = ways->by(kind);
    if (!chosen) ways->note(kind, call_of<T>(cuda, kind, arrays, own));
    by = chosen.value_or(AttentionBy::kOwn);
  }
  if (by != AttentionBy::kCudnn || !by_cudnn()) own(cuda, on, arrays, units_of(by));
}

template <typename T, typename G>
void attention_backward(Stream& stream, const kernels::AttentionDims& d, DevicePtr<const T> q, DevicePtr<const T> k,
                        DevicePtr<const T> v, DevicePtr<const T> out, DevicePtr<const float> logsumexp,
                        DevicePtr<const T> dout, DevicePtr<T> dq, DevicePtr<G> dk, DevicePtr<G> dv,
                        DevicePtr<float> scratch) {
  order(stream, "attention_backward", [&](CudaStream& cuda, Queue& on) {
    if (no_attention(cuda, d)) return;
    if constexpr (std::is_same_v<T, G>) {
      const AttentionArrays arrays{.q = q.address(),
                                   .k = k.address(),
                                   .v = v.address(),
                                   .out = const_cast<T*>(out.address()),
                                   .logsumexp = const_cast<float*>(logsumexp.address()),
                                   .dout = dout.address(),
                                   .dq = dq.address(),
                                   .dk = dk.address(),
                                   .dv = dv.address(),
                                   .scale = d.scale};
      attention<T>(cuda, on, AttentionPass::kBackward, arrays, OwnBackward<T>{d, scratch.address()});
    } else {
      const k::Units units = cuda.attention_ways() == nullptr ? units_of(cuda) : k::Units::kWarps;
      k::attention_backward<T, G>(on, d, q.address(), k.address(), v.address(), out.address(), logsumexp.address(),
                                  dout.address(), dq.address(), dk.address(), dv.address(), scratch.address(), units);
    }
  });
}

template <typename T>
void fill_attention(kernels::Ops<T>& out) {
  using kernels::AttentionDims;
  out.attention_forward = [](Stream& stream, const AttentionDims& d, DevicePtr<const T> q, DevicePtr<const T> k,
                             DevicePtr<const T> v, DevicePtr<T> to, DevicePtr<float> logsumexp) {
    order(stream, "attention_forward", [&](CudaStream& cuda, Queue& on) {
      if (no_attention(cuda, d)) return;
      const AttentionArrays arrays{.q = q.address(),
                                   .k = k.address(),
                                   .v = v.address(),
                                   .out = to.address(),
                                   .logsumexp = logsumexp.address(),
                                   .scale = d.scale};
      attention<T>(cuda, on, AttentionPass::kForward, arrays, OwnForward<T>{d});
    });
  };
  out.attention_backward = &attention_backward<T, T>;
  out.attention_backward_sums = &attention_backward<T, float>;
  out.attention_decode = [](Stream& stream, const AttentionDims& d, int64_t past, int64_t capacity,
                            DevicePtr<const T> q, DevicePtr<const T> k_cache, DevicePtr<const T> v_cache,
                            DevicePtr<T> to) {
    order(stream, "attention_decode", [&](CudaStream& cuda, Queue& on) {
      if (no_attention(cuda, d)) return;
      k::attention_decode<T>(on, d, past, capacity, q.address(), k_cache.address(), v_cache.address(), to.address());
    });
  };
}

template <typename T>
void fill_rows(kernels::Ops<T>& out) {
  out.embedding_forward = &Direct<&k::embedding_forward<T>>::run;
  out.embedding_backward = &Direct<&k::embedding_backward<T>>::run;
  out.embedding_backward_parts = &Direct<&k::embedding_backward_parts<T>>::run;
  out.positions_forward = &Direct<&k::positions_forward<T>>::run;
  out.positions_backward = &Direct<&k::positions_backward<T>>::run;
  out.positions_look_up = &Direct<&k::positions_look_up<T>>::run;
  out.row_sums = &Direct<&k::row_sums<T>>::run;
  out.cross_entropy = &Direct<&k::cross_entropy<T>>::run;
  out.cross_entropy_backward = &Direct<&k::cross_entropy_backward<T>>::run;
  out.copy = &copy<T>;
  out.clear = &clear<T>;
  out.copy_rows = &Direct<&k::copy_rows<T>>::run;
  out.round_rows = &Direct<&k::round_rows<T>>::run;
  out.scatter_rows = &Direct<&k::scatter_rows<T>>::run;
  out.to_floats = &Direct<&k::to_floats<T>>::run;
  out.from_floats = &Direct<&k::from_floats<T>>::run;
  out.rows_to_host = [](Stream& stream, DevicePtr<const T> x, int64_t stride, int64_t rows, int64_t width,
                        std::span<float> host) {
    order(stream, "rows_to_host", [&](CudaStream& cuda, Queue& on) {
      const int64_t fit = std::max<int64_t>(1, cuda.scratch_bytes() / bytes_of<float>(std::max<int64_t>(1, width)));
      for (int64_t row = 0; row < rows; row += fit) {
        const int64_t count = std::min(fit, rows - row);
        auto* const floats = static_cast<float*>(cuda.scratch(bytes_of<float>(count * width), "rows_to_host"));
        if (floats == nullptr) return;
        k::rows_to_floats<T>(on, x.address() + row * stride, stride, count, width, floats);
        cuda.copy(host.data() + row * width, floats, bytes_of<float>(count * width), kToHost);
      }
    });
  };
}

// --- products
// -----------------------------------------------------------------------------------------------------------

/// body(a T) for the type.
template <typename Body>
void with_type(DType dtype, const Body& body) {
  if (dtype == DType::kF32) return body(float());
  dtype == DType::kBf16 ? body(bf16()) : body(f16());
}

/// The library has no kernel for all that `of` asks for: several do it, one after another.
void multiply_then(CudaStream& on, const Product& of) {
  Product sum = of;
  if (of.map != ProductMap::kNone) {
    sum.map = ProductMap::kNone;
    sum.pre = nullptr;
    const bool forward = of.map == ProductMap::kGelu;
    if (forward) sum.c = of.pre;
    on.blas()->multiply(on, sum, on.blas_workspace());
    return order(on, "a product's activation", [&](CudaStream&, Queue& queue) {
      with_type(of.c_dtype, [&]<typename T>(T) {
        auto* const c = static_cast<T*>(of.c);
        const auto* const pre = static_cast<const T*>(of.pre);
        if (forward) return k::activation_forward<T>(queue, Gate::kGeluTanh, pre, c, of.m * of.n);
        k::activation_backward<T>(queue, Gate::kGeluTanh, c, pre, c, of.m * of.n);
      });
    });
  }
  if (of.sums != nullptr) {
    sum.sums = nullptr;
    on.blas()->multiply(on, sum, on.blas_workspace());
    on.set(of.sums, 0, bytes_of<float>(of.m));
    return order(on, "a product's sums", [&](CudaStream&, Queue& queue) {
      with_type(of.ab_dtype,
                [&]<typename T>(T) { k::bias_backward<T>(queue, static_cast<const T*>(of.a), of.sums, of.k, of.m); });
    });
  }
  sum.residual = nullptr;
  sum.accumulate = of.residual == of.c;  // nothing but c holds it then
  if (sum.accumulate) sum.bias = nullptr;
  on.blas()->multiply(on, sum, on.blas_workspace());
  order(on, "a product's residual", [&](CudaStream&, Queue& queue) {
    with_type(of.c_dtype, [&]<typename T>(T) {
      auto* const c = static_cast<T*>(of.c);
      if (!sum.accumulate) return k::add<T>(queue, static_cast<const T*>(of.residual), c, c, of.m * of.n);
      if (of.bias != nullptr) k::add_bias<T>(queue, c, static_cast<const T*>(of.bias), of.m, of.n);
    });
  });
}

ProductMap map_of(kernels::MatmulMap map) {
  switch (map) {
    case kernels::MatmulMap::kGeluTanh:
      return ProductMap::kGelu;
    case kernels::MatmulMap::kGeluTanhGradient:
      return ProductMap::kGeluGradient;
    case kernels::MatmulMap::kNone:
      break;
  }
  return ProductMap::kNone;
}

/// `varies`: Product::varies.
void multiply(CudaStream& on, const kernels::MatmulArgs& of, bool varies = false) {
  if (lacks(on, of.parts > 1 || !of.stretches.empty(), kSumParts)) return;
  const bool added_behind = of.bias && of.c_dtype != of.ab_dtype;  // the library's bias is of the result's type
  if (on.blas() == nullptr) return on.keep({ErrorCode::kInternal, "a stream without cuBLASLt is asked for a product"});
  const Product product{.m = of.m,
                        .n = of.n,
                        .k = of.k,
                        .a = of.a.address(),
                        .lda = of.lda,
                        .trans_a = of.trans_a,
                        .b = of.b.address(),
                        .ldb = of.ldb,
                        .trans_b = of.trans_b,
                        .c = of.c.address(),
                        .ldc = of.ldc,
                        .ab_dtype = of.ab_dtype,
                        .c_dtype = of.c_dtype,
                        .accumulate = of.accumulate,
                        .bias = added_behind ? nullptr : of.bias.address(),
                        .residual = of.residual.address(),
                        .map = map_of(of.map),
                        .pre = of.pre.address(),
                        .sums = of.sums.address(),
                        .varies = varies};
  if (!on.blas()->multiply(on, product, on.blas_workspace())) return multiply_then(on, product);
  if (!added_behind) return;
  order(on, "a bias", [&](CudaStream&, Queue& queue) {
    auto* const sum = static_cast<float*>(of.c.address());
    if (of.ab_dtype == DType::kBf16) {
      k::add_bias_to_floats(queue, sum, of.ldc, static_cast<const bf16*>(of.bias.address()), of.m, of.n);
    } else {
      k::add_bias_to_floats(queue, sum, of.ldc, static_cast<const f16*>(of.bias.address()), of.m, of.n);
    }
  });
}

/// From one group's matrix to the next one's, in bytes.
int64_t step_between(DevicePtr<const void> a, DevicePtr<const void> b) {
  return static_cast<const std::byte*>(b.address()) - static_cast<const std::byte*>(a.address());
}

/// Groups [begin, end) of those at `places`, which have at most `all_rows` rows.
k::Groups groups_of(DevicePtr<const kernels::GroupRows> places, int64_t all_rows, int64_t begin, int64_t end) {
  return {places.address(), begin, end, all_rows / kernels::kGroupTile + end - begin};  // each may end within a tile
}

/// How far apart neighbouring groups' arrays lie, in bytes.
struct GroupSteps {
  int64_t matrix = 0, bias = 0;
  bool operator==(const GroupSteps&) const = default;
};

/// Orders the products `of` of groups [begin, end). They differ only in the places of one matrix and of the bias.
template <typename T>
void multiply_run_of_groups(Queue& on, const kernels::MatmulGroups& groups, const kernels::MatmulArgs& of,
                            int64_t begin, int64_t end, const GroupSteps& steps) {
  const k::Groups rows = groups_of(groups.places, groups.all_rows, begin, end);
  if (of.trans_a) {
    return k::multiply_over_rows_of_groups<T>(on, {.groups = rows,
                                                   .a = static_cast<const T*>(of.a.address()),
                                                   .lda = of.lda,
                                                   .b = static_cast<const T*>(of.b.address()),
                                                   .ldb = of.ldb,
                                                   .c = static_cast<float*>(of.c.address()),
                                                   .c_step = steps.matrix / static_cast<int64_t>(sizeof(float)),
                                                   .ldc = of.ldc,
                                                   .m = of.m,
                                                   .n = of.n,
                                                   .accumulate = of.accumulate});
  }
  k::multiply_rows_of_groups<T>(on, {.groups = rows,
                                     .a = static_cast<const T*>(of.a.address()),
                                     .lda = of.lda,
                                     .b = static_cast<const T*>(of.b.address()),
                                     .b_step = steps.matrix / static_cast<int64_t>(sizeof(T)),
                                     .ldb = of.ldb,
                                     .transposed = of.trans_b,
                                     .c = static_cast<T*>(of.c.address()),
                                     .ldc = of.ldc,
                                     .n = of.n,
                                     .k = of.k,
                                     .accumulate = of.accumulate,
                                     .bias = static_cast<const T*>(of.bias.address()),
                                     .bias_step = steps.bias / static_cast<int64_t>(sizeof(T))});
}

/// The n-th products of all groups at once, where the experts' matrices lie equally far apart: they do, since those of
/// a layer have equal shapes and follow one another.
template <typename T>
void multiply_placed_groups(Stream& stream, const kernels::MatmulGroups& groups) {
  order(stream, "matmul_groups", [&](CudaStream&, Queue& on) {
    const int64_t count = std::ssize(groups.ends), each = count == 0 ? 0 : std::ssize(groups.products) / count;
    for (int64_t n = 0; n < each; ++n) {
      const auto product = [&](int64_t group) -> const kernels::MatmulArgs& {
        return groups.products[static_cast<size_t>(group * each + n)];
      };
      const auto steps_to = [&](int64_t group) -> GroupSteps {
        const kernels::MatmulArgs &of = product(group - 1), &next = product(group);
        return {of.trans_a ? step_between(of.c, next.c) : step_between(of.b, next.b), step_between(of.bias, next.bias)};
      };
      for (int64_t begin = 0, end; begin < count; begin = end) {
        const GroupSteps steps = begin + 1 < count ? steps_to(begin + 1) : GroupSteps();
        for (end = begin + 1; end < count && steps_to(end) == steps; ++end) {
          if (product(end).accumulate != product(begin).accumulate) break;
        }
        multiply_run_of_groups<T>(on, groups, product(begin), begin, end, steps);
      }
    }
  });
}

/// Calls body(first group, group behind the last, elements between their arrays) for arrays that lie equally far apart.
template <typename A, typename Body>
void for_equal_steps(std::span<const DevicePtr<A>> arrays, const Body& body) {
  const auto step_to = [&](size_t group) { return arrays[group].address() - arrays[group - 1].address(); };
  for (size_t begin = 0, end; begin < arrays.size(); begin = end) {
    const int64_t step = begin + 1 < arrays.size() ? step_to(begin + 1) : 0;
    for (end = begin + 1; end < arrays.size() && step_to(end) == step;) ++end;
    body(static_cast<int64_t>(begin), static_cast<int64_t>(end), step);
  }
}

template <typename T>
void fill_biases_of_groups(kernels::Ops<T>& out) {
  out.fill_groups = [](Stream& stream, DevicePtr<const kernels::GroupRows> places, int64_t all_rows,
                       std::span<const DevicePtr<const T>> from, int64_t width, DevicePtr<T> rows) {
    order(stream, "fill_groups", [&](CudaStream&, Queue& on) {
      for_equal_steps(from, [&](int64_t begin, int64_t end, int64_t step) {
        k::fill_groups<T>(on, groups_of(places, all_rows, begin, end), from[static_cast<size_t>(begin)].address(), step,
                          width, rows.address());
      });
    });
  };
  out.add_rows_of_groups = [](Stream& stream, DevicePtr<const kernels::GroupRows> places, int64_t all_rows,
                              DevicePtr<const T> rows, int64_t stride, int64_t width,
                              std::span<const DevicePtr<float>> sums) {
    order(stream, "add_rows_of_groups", [&](CudaStream&, Queue& on) {
      for_equal_steps(sums, [&](int64_t begin, int64_t end, int64_t step) {
        k::add_rows_of_groups<T>(on, groups_of(places, all_rows, begin, end), rows.address(), stride, width,
                                 sums[static_cast<size_t>(begin)].address(), step);
      });
    });
  };
}

template <typename T>
kernels::Ops<T> filled() {
  kernels::Ops<T> out;
  fill_norms(out);
  fill_maps(out);
  fill_attention(out);
  fill_experts(out);
  fill_rows(out);
  fill_biases_of_groups(out);
  out.rotary_table = [](Stream& stream, DevicePtr<float> table, int64_t first, int64_t tokens,
                        std::span<const float> frequencies, double factor) {
    std::vector<float> host(static_cast<size_t>(tokens * std::ssize(frequencies) * 2));
    kernels::rotary_table(host.data(), first, tokens, frequencies, factor);
    from_host(cuda_stream(stream), host, table.address());
  };
  out.alibi_slopes = [](Stream& stream, int64_t heads, int64_t first, int64_t count, DevicePtr<float> slopes) {
    std::vector<float> host(static_cast<size_t>(count));
    kernels::alibi_slopes(heads, first, count, host.data());
    from_host(cuda_stream(stream), host, slopes.address());
  };
  out.fuses_products = true;
  out.matmul = [](Stream& stream, const kernels::MatmulArgs& of) { multiply(cuda_stream(stream), of); };
  out.places_groups = true;
  out.matmul_groups = [](Stream& stream, const kernels::MatmulGroups& groups) {
    if (groups.places) return multiply_placed_groups<T>(stream, groups);
    for (const kernels::MatmulArgs& of : groups.products) multiply(cuda_stream(stream), of, /*varies=*/true);
  };
  out.sink_gradients = &Direct<&k::sink_gradients>::run;
  out.join_maxima = &Direct<&k::join_maxima>::run;
  out.rescale_sums = &Direct<&k::rescale_sums>::run;
  out.row_losses = &Direct<&k::row_losses>::run;
  out.row_scales = &Direct<&k::row_scales>::run;
  out.add_to = &Direct<&k::add_to>::run;
  out.scale_floats = &Direct<&k::scale_floats>::run;
  out.copy_floats = &copy<float>;
  out.copy_ints = &copy<int32_t>;
  out.clear_floats = &clear<float>;
  out.clear_floats_of_runs = &Direct<&k::clear_floats_of_runs>::run;
  out.gather_floats = &Direct<&k::gather_floats>::run;
  out.scatter_floats = &Direct<&k::scatter_floats>::run;
  out.floats_to_host = &to_host<float>;
  out.ints_to_host = &to_host<int32_t>;
  out.note_not_finite = &Direct<&k::note_not_finite>::run;
  return out;
}

// --- training state
// -----------------------------------------------------------------------------------------------------

void put_weights(Stream& stream, DevicePtr<const float> master, int64_t count, DType dtype, DevicePtr<void> weights) {
  order(stream, "put_weights", [&](CudaStream& cuda, Queue& on) {
    switch (dtype) {
      case DType::kF32:
        return cuda.copy(weights.address(), master.address(), bytes_of<float>(count), kOnDevice);
      case DType::kBf16:
        return k::from_floats<bf16>(on, master.address(), static_cast<bf16*>(weights.address()), count);
      case DType::kF16:
        return k::from_floats<f16>(on, master.address(), static_cast<f16*>(weights.address()), count);
      default:
        cuda.keep({ErrorCode::kInternal, fmt::format("weights as {}", dtype_name(dtype))});
    }
  });
}

k::StateRun run_of(const kernels::StateArrays& of) {
  return {of.master.address(), of.exp_avg.address(), of.exp_avg_sq.address()};
}

static_assert(sizeof(k::UpdateRun) <= kernels::kGivenRunBytes);
static_assert(sizeof(k::FactoredRun) <= kernels::kGivenRunBytes);
static_assert(k::kChunk == kernels::kStateChunk);

k::UpdateRun run_of(const kernels::AdamRun& of) {
  return {.grad = of.grad.address(),
          .from = run_of(of.from),
          .to = run_of(of.to),
          .weights = of.weights.address(),
          .count = of.count,
          .of = k::UpdateNumbers::of(of.args),
          .dtype = of.dtype,
          .counts = of.counts,
          .tensor = static_cast<int32_t>(of.tensor)};
}
k::UpdateRun run_of(const kernels::NormRun& of) {
  return {.count = of.count, .tensor = static_cast<int32_t>(of.tensor)};
}
k::UpdateRun run_of(const kernels::EmaRun& of) {
  return {.grad = of.weight.address(),
          .from = {const_cast<float*>(of.from.address()), nullptr, nullptr},
          .to = {of.to.address(), nullptr, nullptr},
          .count = of.count};
}
k::ScaledRun run_of(const kernels::HeadRun& of) {
  return {.master = of.master.address(),
          .factors = of.factors.address(),
          .weights = of.weights.address(),
          .begin = of.begin,
          .count = of.count,
          .head_elems = of.head_elems,
          .dtype = of.dtype};
}
k::FactoredRun run_of(const kernels::AdafactorRun& of) {
  return {.grad = of.matrix.grad.address(),
          .row = of.factors.row.address(),
          .col = of.factors.col.address(),
          .master = of.from.master.address(),
          .avg = of.from.exp_avg.address(),
          .master_out = of.to.master.address(),
          .avg_out = of.to.exp_avg.address(),
          .weights = of.weights.address(),
          .begin = of.matrix.begin,
          .count = of.matrix.count,
          .cols = of.matrix.cols,
          .decay = of.decay,
          .beta1 = of.beta1,
          .dtype = of.dtype,
          .tensor = static_cast<int32_t>(of.tensor)};
}

/// body(stream, queue, tables) with the runs on the device, for as long as what it orders takes.
template <typename Run, typename Body>
void with_runs(Stream& stream, const char* what, std::span<const Run> runs, const Body& body) {
  using Given = decltype(run_of(runs[0]));
  order(stream, what, [&](CudaStream& cuda, Queue& on) {
    std::vector<Given> table;
    for (const Run& run : runs) table.push_back(run_of(run));
    const int64_t chunks = k::RunTable<Given>::number_chunks(table);
    if (chunks == 0) return;
    const DevicePtr<const Given> there = cuda.give(std::span<const Given>(table));
    if (there) body(cuda, on, k::RunTable<Given>{there.address(), std::ssize(table), chunks});
  });
}

/// The checksum of one of the arrays that a kernel has written; where the clip is not finite it has written nothing.
void put_sums(CudaStream& cuda, Queue& on, const kernels::BlockSums& sums, size_t array, const float* x, int64_t count,
              const kernels::Clip* clip) {
  with_numbers(cuda, sums.sums.subspan(array, 1), bytes_of<uint64_t>(k::kSumBlocks), "checksums",
               [&](uint64_t* sum, std::byte* partials) {
                 k::add_word_sums(on, x, count, sums.first, clip, reinterpret_cast<uint64_t*>(partials), sum);
               });
}

void fill_lamb(kernels::StateOps& out) {
  using kernels::AdamRun;
  out.lamb_moments_of_runs = [](Stream& stream, std::span<const AdamRun> runs, DevicePtr<double> partials) {
    with_runs(stream, "lamb_moments", runs, [&](CudaStream&, Queue& on, const k::UpdateTables& tables) {
      k::lamb_moments(on, tables, runs[0].args.clip.address(), partials.address());
    });
  };
  out.add_norms_of_runs = [](Stream& stream, std::span<const kernels::NormRun> runs, DevicePtr<const double> partials,
                             DevicePtr<double> words) {
    with_runs(stream, "add_norms_of_runs", runs, [&](CudaStream&, Queue& on, const k::UpdateTables& tables) {
      k::add_words_of_tensors(on, partials.address(), tables, words.address());
    });
  };
  out.lamb_step_of_runs = [](Stream& stream, std::span<const AdamRun> runs, DevicePtr<const double> words) {
    with_runs(stream, "lamb_step", runs, [&](CudaStream&, Queue& on, const k::UpdateTables& tables) {
      k::lamb_step(on, tables, runs[0].args.clip.address(), words.address());
    });
  };
}

/// A table on the device, null where it has no room.
template <typename Run>
k::RunTable<Run> table_of(CudaStream& cuda, const std::vector<Run>& runs, int64_t chunks) {
  return {cuda.give(std::span<const Run>(runs)).address(), std::ssize(runs), chunks};
}

/// Orders a round; partials, or null: it is not ordered.
double* order_squares(CudaStream& cuda, Queue& on, const k::SquareRound& round, const kernels::Clip* clip) {
  auto* const partials = on.room<double>(round.part_sums);
  const k::SquaredRuns runs = table_of(cuda, round.runs, round.blocks);
  if (partials == nullptr || runs.runs == nullptr) return nullptr;
  k::square_runs(on, runs, clip, partials);
  return partials;
}
void add_squares(CudaStream& cuda, Queue& on, std::span<const k::SquareRound> rounds, const kernels::Clip* clip) {
  for (const k::SquareRound& round : rounds) {
    const double* const partials = order_squares(cuda, on, round, clip);
    if (partials == nullptr) return;
    const k::RunTable<k::ColumnParts> columns = table_of(cuda, round.columns, round.column_blocks);
    if (columns.runs != nullptr) k::add_columns(on, columns, partials);
  }
}

k::MomentsOfDim moments_of(const kernels::FactoredDim& of) {
  return {.squares = of.squares.address(),
          .from = of.from.address(),
          .to = of.to.address(),
          .factors = of.factors.address(),
          .count = of.count,
          .terms = static_cast<double>(of.terms)};
}
std::vector<k::MomentsOfTensor> moments_of(std::span<const kernels::FactoredTensor> tensors) {
  std::vector<k::MomentsOfTensor> out;
  for (const kernels::FactoredTensor& of : tensors) {
    out.push_back({moments_of(of.rows), moments_of(of.cols), of.mean_of_cols});
  }
  return out;
}
static_assert(sizeof(k::SquaredRun) <= kernels::kGivenRunBytes);
static_assert(sizeof(k::ColumnParts) <= kernels::kGivenRunBytes);
static_assert(sizeof(k::MomentsOfTensor) <= kernels::kGivenRunBytes);

void order_factors(CudaStream& cuda, Queue& on, const kernels::AdafactorDecay& decay,
                   const std::vector<k::MomentsOfTensor>& tensors) {
  if (tensors.empty()) return;
  const DevicePtr<const k::MomentsOfTensor> there = cuda.give(std::span<const k::MomentsOfTensor>(tensors));
  if (there) k::make_factors(on, decay.old_part, decay.clip.address(), there.address(), std::ssize(tensors));
}

/// Squares and factors. Where one round has all squares, the factors take the sums of parts of columns as they are.
void order_moments(CudaStream& cuda, Queue& on, const kernels::AdafactorDecay& decay,
                   std::span<const kernels::SquaresRun> runs, std::span<const kernels::FactoredTensor> tensors) {
  const std::vector<k::SquareRound> rounds = k::square_rounds(runs);
  std::vector<k::MomentsOfTensor> moments = moments_of(tensors);
  if (rounds.size() != 1) {
    add_squares(cuda, on, rounds, decay.clip.address());
    return order_factors(cuda, on, decay, moments);
  }
  const double* const partials = order_squares(cuda, on, rounds.front(), decay.clip.address());
  if (partials == nullptr) return;
  std::unordered_map<const double*, const k::ColumnParts*> parts_of;
  for (const k::ColumnParts& parts : rounds.front().columns) parts_of.emplace(parts.sums, &parts);
  for (k::MomentsOfTensor& of : moments) {
    const auto found = parts_of.find(of.cols.squares);
    if (found == parts_of.end()) continue;
    of.cols.squares = partials + found->second->first_part;
    of.cols.parts = found->second->parts;
  }
  order_factors(cuda, on, decay, moments);
}

void fill_adafactor(kernels::StateOps& out) {
  using kernels::AdafactorDecay;
  using kernels::AdafactorRate;
  using kernels::AdafactorRun;
  using kernels::FactoredTensor;
  using kernels::SquaresRun;
  out.adafactor_squares_of_runs = [](Stream& stream, std::span<const SquaresRun> runs) {
    order(stream, "adafactor_squares", [&](CudaStream& cuda, Queue& on) {
      if (!runs.empty()) add_squares(cuda, on, k::square_rounds(runs), runs[0].matrix.clip.address());
    });
  };
  out.adafactor_factors_of_tensors = [](Stream& stream, const AdafactorDecay& decay,
                                        std::span<const FactoredTensor> tensors) {
    order(stream, "adafactor_factors",
          [&](CudaStream& cuda, Queue& on) { order_factors(cuda, on, decay, moments_of(tensors)); });
  };
  out.adafactor_moments = [](Stream& stream, const AdafactorDecay& decay, std::span<const SquaresRun> runs,
                             std::span<const FactoredTensor> tensors) {
    order(stream, "adafactor_moments",
          [&](CudaStream& cuda, Queue& on) { order_moments(cuda, on, decay, runs, tensors); });
  };
  out.adafactor_norms_of_runs = [](Stream& stream, std::span<const AdafactorRun> runs, DevicePtr<double> partials) {
    with_runs(stream, "adafactor_norms", runs, [&](CudaStream&, Queue& on, const k::FactoredRuns& table) {
      k::adafactor_norms(on, table, runs[0].matrix.clip.address(), partials.address());
    });
  };
  out.adafactor_rates_of_runs = [](Stream& stream, const kernels::AdafactorLimits& limits,
                                   std::span<const AdafactorRate> tensors, std::span<const kernels::NormRun> runs,
                                   DevicePtr<const double> partials, DevicePtr<double> words, DevicePtr<float> rates) {
    with_runs(stream, "adafactor_rates", runs, [&](CudaStream& cuda, Queue& on, const k::UpdateTables& tables) {
      const DevicePtr<const AdafactorRate> there = cuda.give(tensors);
      if (!there) return;
      k::add_words_for_rates(on, partials.address(), tables, words.address(), limits, there.address(), rates.address());
    });
  };
  out.adafactor_rates = [](Stream& stream, const kernels::AdafactorLimits& limits,
                           std::span<const AdafactorRate> tensors, DevicePtr<const double> words,
                           DevicePtr<float> rates) {
    order(stream, "adafactor_rates", [&](CudaStream& cuda, Queue& on) {
      const DevicePtr<const AdafactorRate> there = cuda.give(tensors);
      if (there) {
        k::adafactor_rates(on, limits, there.address(), std::ssize(tensors), words.address(), rates.address());
      }
    });
  };
  out.adafactor_step_of_runs = [](Stream& stream, std::span<const AdafactorRun> runs, DevicePtr<const float> rates) {
    with_runs(stream, "adafactor_step", runs, [&](CudaStream&, Queue& on, const k::FactoredRuns& table) {
      k::adafactor_step(on, table, runs[0].matrix.clip.address(), rates.address());
    });
  };
}

kernels::StateOps filled_state() {
  using kernels::BlockSums;
  kernels::StateOps out;
  out.adamw_of_runs = [](Stream& stream, std::span<const kernels::AdamRun> runs) {
    with_runs(stream, "adamw", runs, [&](CudaStream& cuda, Queue& on, const k::UpdateTables& tables) {
      k::adamw(on, tables, runs[0].args.clip.address());
      for (const kernels::AdamRun& run : runs) {
        const DevicePtr<float> written[] = {run.to.master, run.to.exp_avg, run.to.exp_avg_sq};
        for (size_t array = 0; array < run.sums.sums.size(); ++array) {
          put_sums(cuda, on, run.sums, array, written[array].address(), run.count, run.args.clip.address());
        }
      }
    });
  };
  fill_lamb(out);
  fill_adafactor(out);
  out.ema_of_runs = [](Stream& stream, double decay, std::span<const kernels::EmaRun> runs) {
    with_runs(stream, "ema", runs, [&](CudaStream& cuda, Queue& on, const k::UpdateTables& tables) {
      k::ema(on, decay, tables, runs[0].clip.address());
      for (const kernels::EmaRun& run : runs) {
        if (!run.sums.sums.empty()) put_sums(cuda, on, run.sums, 0, run.to.address(), run.count, run.clip.address());
      }
    });
  };
  out.balance_bias = &Direct<&k::balance_bias>::run;
  out.count_not_finite = [](Stream& stream, DevicePtr<const float> x, int64_t count, std::span<int64_t> counts) {
    order(stream, "count_not_finite", [&](CudaStream& cuda, Queue& on) {
      with_numbers(cuda, counts.first(1), bytes_of<int64_t>(k::kSumBlocks), "count_not_finite",
                   [&](int64_t* found, std::byte* partials) {
                     k::count_not_finite(on, x.address(), count, reinterpret_cast<int64_t*>(partials), found);
                   });
    });
  };
  out.clip_by_norm = &Direct<&k::clip_by_norm>::run;
  out.head_factors = &Direct<&k::head_factors>::run;
  out.scale_heads_of_runs = [](Stream& stream, std::span<const kernels::HeadRun> runs, DevicePtr<const float> clipped,
                               DevicePtr<const kernels::Clip> clip) {
    with_runs(stream, "scale_heads", runs, [&](CudaStream&, Queue& on, const k::RunTable<k::ScaledRun>& table) {
      k::scale_heads(on, table, clipped.address(), clip.address());
    });
  };
  out.floats_to_host = &to_host<float>;
  out.copy_state = &copy<float>;
  out.copy_summed = [](Stream& stream, DevicePtr<const float> from, DevicePtr<float> to, int64_t count,
                       const BlockSums& sums) {
    if (DevicePtr<const float>(to) != from) copy<float>(stream, from, to, count);
    if (sums.sums.empty()) return;
    order(stream, "copy_summed",
          [&](CudaStream& cuda, Queue& on) { put_sums(cuda, on, sums, 0, to.address(), count, nullptr); });
  };
  out.clear_floats = &clear<float>;
  out.fill_doubles = &Direct<&k::fill_doubles>::run;
  out.draw_weights = [](Stream& stream, const kernels::FirstWeights& box, DevicePtr<float> to) {
    // Once a run, by the host's threads, with the CPU's bits. In parts: memory for a whole tensor would be made and
    // cleared by one thread.
    constexpr int64_t kPartElems = int64_t{1} << 20;
    const int64_t rows =
        std::clamp<int64_t>(kPartElems / std::max<int64_t>(1, box.width), 1, std::max<int64_t>(1, box.rows));
    std::vector<float> host(static_cast<size_t>(std::min(rows, box.rows) * box.width));
    for (int64_t row = 0; row < box.rows; row += rows) {
      kernels::FirstWeights part = box;
      part.rows = std::min(rows, box.rows - row);
      part.first += row * box.stride;
      kernels::draw_weights(part, host.data());
      const int64_t bytes = bytes_of<float>(part.rows * part.width);
      cuda_stream(stream).copy(to.address() + row * box.width, host.data(), bytes, kToDevice);  // host is read by then
    }
  };
  out.put_weights = &put_weights;
  out.put_first_weights = &put_weights;
  out.add_squares_of_runs = &Direct<&k::add_squares_of_runs>::run;
  out.doubles_to_host = &to_host<double>;
  return out;
}

}  // namespace

template <typename T>
const kernels::Ops<T>& ops() {
  static const kernels::Ops<T> table = filled<T>();
  return table;
}
template const kernels::Ops<float>& ops<float>();
template const kernels::Ops<bf16>& ops<bf16>();
template const kernels::Ops<f16>& ops<f16>();

const kernels::StateOps& state_ops() {
  static const kernels::StateOps table = filled_state();
  return table;
}

void serve_ops() {
  kernels::serve_cuda_ops(ops<float>());
  kernels::serve_cuda_ops(ops<bf16>());
  kernels::serve_cuda_ops(ops<f16>());
  kernels::serve_cuda_state_ops(state_ops());
}

int64_t scratch_bytes(int64_t rows, int64_t width, int64_t parts) {
  return std::max(bytes_of<float>(std::max({k::norm_partials(rows, width, true, parts),
                                            k::bias_partials(rows, width, parts), rows * width})),
                  std::max(bytes_of<int64_t>(k::kMostExperts), k::look_up_scratch_bytes(rows, width)));
}

int64_t state_scratch_bytes(int64_t elems, int64_t cols) {
  return bytes_of<double>(std::max(k::kSumBlocks + 1, k::part_sums(elems, cols)));  // one of the sums for the host
}

int64_t scratch_bytes(const WorkShapes& work) {
  // Of fewer rows there may be more runs, up to where each has the least rows.
  const auto most = [&](int64_t rows, int64_t each, int64_t runs) {
    return std::min(rows, each * runs * work.row_parts);
  };
  const int64_t norm_rows = most(work.rows, k::kNormRunRows, k::kNormRuns);
  const int64_t head_rows = std::min(work.head_rows, k::kNormRunRows * k::kNormRuns);
  const int64_t floats = std::max(
      {k::norm_partials(norm_rows, work.norm_width, true, work.row_parts),
       k::bias_partials(most(work.rows, k::kBiasRunRows, k::kBiasRuns), work.bias_width, work.row_parts),
       k::norm_partials(head_rows, work.head_width, false), work.told_width, work.expert_tiles * work.bias_width,
       k::attention_maxima(work.score_heads, work.score_queries, work.score_width)});
  return std::max({bytes_of<float>(floats), bytes_of<int64_t>(k::kMostExperts),
                   k::look_up_scratch_bytes(work.rows, work.norm_width), bytes_of<double>(k::kSquaresPartials),
                   state_scratch_bytes(work.squared_elems, work.squared_cols)});
}

}  // namespace cairn::cuda
