// Each kernel of the tables for CUDA against the CPU's of the same name, by the very call that a layer makes: through
// Exec and StateExec, on the double of the runtime and the executor of kernels. That none is left out is checked too,
// and that what is missing says so.
#include "runtime/cuda/ops/ops.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "runtime/core/word_sums.h"
#include "runtime/cuda/arena.h"
#include "runtime/cuda/blas.h"
#include "runtime/device/host_numbers.h"
#include "tests/runtime/cuda/ops/device_of_tests.h"
#include "tests/runtime/kernels/cuda/comparing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::Exec;
using kernels::StateExec;

namespace {

/// Names of ops that a test has compared.
std::set<std::string>& compared() {
  static std::set<std::string> names;
  return names;
}

/// An array of the host and one of the device with the same values at first.
template <typename U>
struct Twin {
  std::vector<U> host;
  Buffer device;
};

/// Where the arrays of one side are.
struct Side {
  bool cuda;
  template <typename U>
  DevicePtr<U> operator()(Twin<U>& of) const {
    return cuda ? of.device.template at<U>() : DevicePtr<U>(of.host.data());
  }
};

class Sides {
 public:
  Sides() : context_(device_.open()) {
    auto reserved = cuda::Arena::reserve(context_, int64_t{1} << 24);
    REQUIRE_OK(reserved);
    arena_ = std::move(reserved).value();
    scratch_ = Buffer::allocate(context_->device(), int64_t{1} << 20).value();
    stream_ = cuda::CudaStream::make(context_);
    stream_->use_scratch(scratch_.all());
    given_ = Buffer::allocate(context_->device(), int64_t{1} << 14).value();
    stream_->use_given(given_.all());
    workspace_ = Buffer::allocate(context_->device(), int64_t{1} << 16).value();
    auto opened = cuda::Blas::open(device_.products(), context_);
    REQUIRE_OK(opened);
    blas_ = std::move(opened).value();
    stream_->use_blas(*blas_, workspace_.all());
    cuda::serve_ops();
  }
  ~Sides() {
    CHECK(stream_->settle().ok());
    device_.check_use();
    blas_.reset();
    device_.check_left();
  }

  template <typename U>
  Twin<U> array(std::vector<U> values) {
    Twin<U> out{std::move(values), {}};
    const auto bytes = std::ssize(out.host) * static_cast<int64_t>(sizeof(U));
    out.device = Buffer::allocate(context_->device(), bytes).value();
    stream_->copy(out.device.at().address(), out.host.data(), bytes, cuda::kToDevice);
    return out;
  }
  template <typename U>
  Twin<U> zeros(int64_t count) {
    return array(std::vector<U>(static_cast<size_t>(count)));
  }

  /// body(exec, side) on both.
  template <typename T, typename Body>
  void run(const char* name, const Body& body) {
    compared().insert(name);
    body(kernels::exec_on<T>(*cpu_), Side{false});
    body(kernels::exec_on<T>(*stream_), Side{true});
    const Status settled = stream_->settle();
    REQUIRE_OK(settled);
  }
  template <typename Body>
  void run_state(const char* name, const Body& body) {
    compared().insert(name);
    body(kernels::state_exec_on(*cpu_), Side{false});
    body(kernels::state_exec_on(*stream_), Side{true});
    const Status settled = stream_->settle();
    REQUIRE_OK(settled);
  }

  template <typename U>
  std::vector<U> on_device(Twin<U>& of) {
    HostNumbers<U> numbers(*stream_, std::ssize(of.host));
    stream_->copy(numbers.room().data(), of.device.at().address(),
                  std::ssize(of.host) * static_cast<int64_t>(sizeof(U)), cuda::kToHost);
    REQUIRE(stream_->settle().ok());
    return {numbers.read().begin(), numbers.read().end()};
  }
  template <typename U>
  void same(Twin<U>& of) {
    CHECK(same_bits(on_device(of), of.host));
  }
  template <typename U>
  void alike(Twin<U>& of, Tolerance tolerance) {
    check_alike(on_device(of), of.host, tolerance);
  }

  cuda::CudaStream& stream() { return *stream_; }
  Stream& cpu() { return *cpu_; }
#ifndef CAIRN_ON_DEVICE
  /// How often cuBLASLt was asked for an algorithm.
  int64_t choices() { return device_.library().choices(); }
  simt::BlasDouble& library() { return device_.library(); }
  /// Since the last time.
  int64_t launches() { return device_.launches(); }
#endif

 private:
  DeviceOfTests device_;
  std::shared_ptr<cuda::Context> context_;
  std::unique_ptr<cuda::Arena> arena_;
  Buffer scratch_, given_, workspace_;
  std::unique_ptr<cuda::Blas> blas_;
  std::unique_ptr<cuda::CudaStream> stream_;
  std::unique_ptr<Stream> cpu_ = make_cpu_stream();
};

constexpr int64_t kRows = 6, kWidth = 40, kCount = kRows * kWidth;

template <typename T>
void compare_maps() {
  Sides on;
  auto a = on.array(normals<T>("a", kCount)), b = on.array(normals<T>("b", kCount)), out = on.zeros<T>(kCount);
  auto bias = on.array(normals<T>("bias", kWidth));
  on.run<T>("add", [&](Exec<T> e, Side at) { e.add(at(a), at(b), at(out), kCount); });
  on.alike(out, pointwise<T>());
  on.run<T>("add_scaled", [&](Exec<T> e, Side at) { e.add_scaled(at(a), 0.75f, at(b), at(out), kCount); });
  on.alike(out, pointwise<T>());
  on.run<T>("add_bias", [&](Exec<T> e, Side at) { e.add_bias(at(out), at(bias), kRows, kWidth); });
  on.alike(out, pointwise<T>() + pointwise<T>());
  on.run<T>("copy", [&](Exec<T> e, Side at) { e.copy(at(a), at(out), kCount); });
  on.same(out);
  on.run<T>("scale", [&](Exec<T> e, Side at) { e.scale(at(out), 3.0f, kCount); });
  on.alike(out, pointwise<T>());
  on.run<T>("cap", [&](Exec<T> e, Side at) { e.cap(at(out), 2.0f, kCount); });
  on.alike(out, pointwise<T>() + pointwise<T>());
  on.run<T>("clip", [&](Exec<T> e, Side at) {
    e.copy(at(a), at(out), kCount);
    e.clip(at(out), 0.5f, kCount);
  });
  on.same(out);
  on.run<T>("clip_backward", [&](Exec<T> e, Side at) {
    e.copy(at(b), at(out), kCount);
    e.clip_backward(at(a), at(out), 0.5f, kCount);
  });
  on.same(out);
  on.run<T>("clear", [&](Exec<T> e, Side at) { e.clear(at(out), kCount - 1); });
  on.same(out);

  auto dbias = on.array(std::vector<float>(kWidth, 0.5f));
  auto levels = on.zeros<float>(2 * 2 * kWidth);
  for (const int64_t parts : {1, 2}) {
    on.run<T>("bias_backward", [&](Exec<T> e, Side at) {
      e.bias_backward(at(a), at(dbias), kRows, kWidth, {parts, parts > 1 ? at(levels) : nullptr});
    });
    on.alike(dbias, sum_of<float>(2 * kRows));
  }

  auto y = on.zeros<T>(kCount), dx = on.zeros<T>(kCount);
#define RT_COMPARE(name)                                                                                      \
  on.run<T>(#name "_forward", [&](Exec<T> e, Side at) { e.name##_forward(at(a), at(y), kCount); });           \
  on.alike(y, pointwise<T>());                                                                                \
  on.run<T>(#name "_backward", [&](Exec<T> e, Side at) { e.name##_backward(at(b), at(a), at(dx), kCount); }); \
  on.alike(dx, pointwise<T>());                                                                               \
  on.run<T>(#name "_both", [&](Exec<T> e, Side at) {                                                          \
    e.copy(at(b), at(dx), kCount);                                                                            \
    e.name##_both(at(a), at(dx), at(y), kCount);                                                              \
  });                                                                                                         \
  on.alike(y, pointwise<T>());                                                                                \
  on.alike(dx, pointwise<T>());
  RT_COMPARE(gelu_tanh)
  RT_COMPARE(gelu_erf)
  RT_COMPARE(gelu_quick)
  RT_COMPARE(relu)
  RT_COMPARE(relu2)
  RT_COMPARE(silu)
#undef RT_COMPARE
  using kernels::Gate;
  auto gated = on.zeros<T>(kCount / 2), dgated = on.zeros<T>(kCount);
  for (const Gate gate : {Gate::kSilu, Gate::kGeluErf, Gate::kGeluTanh, Gate::kRelu, Gate::kGeluQuick, Gate::kRelu2}) {
    on.run<T>("gated_forward", [&](Exec<T> e, Side at) { e.gated_forward(gate, at(a), at(gated), kRows, kWidth / 2); });
    on.alike(gated, pointwise<T>() + pointwise<T>());
    on.run<T>("gated_backward",
              [&](Exec<T> e, Side at) { e.gated_backward(gate, at(b), at(a), at(dgated), kRows, kWidth / 2); });
    on.alike(dgated, pointwise<T>() + pointwise<T>());
  }
  const kernels::ClampedGate clamped{.alpha = 1.702f, .limit = 1};
  on.run<T>("clamped_gate_forward",
            [&](Exec<T> e, Side at) { e.clamped_gate_forward(clamped, at(a), at(gated), kRows, kWidth / 2); });
  on.alike(gated, pointwise<T>() + pointwise<T>());
  on.run<T>("clamped_gate_backward",
            [&](Exec<T> e, Side at) { e.clamped_gate_backward(clamped, at(b), at(a), at(dgated), kRows, kWidth / 2); });
  on.alike(dgated, pointwise<T>() + pointwise<T>());

  // 5 heads of 8 channels, of which 4 turn.
  const std::vector<float> frequencies = {1.0f, 0.25f};
  auto table = on.zeros<float>(kRows * 2 * 2);
  on.run<T>("rotary_table", [&](Exec<T> e, Side at) { e.rotary_table(at(table), 3, kRows, frequencies, 1.25); });
  on.same(table);
  auto places = on.array(std::vector<int32_t>{5, 0, 1, 1, 4, 2});
  for (const bool placed : {false, true}) {
    on.run<T>("rotary", [&](Exec<T> e, Side at) {
      kernels::RotaryDims dims{kRows, kRows, kWidth / 8, 8, kWidth, 4, false, nullptr};
      if (placed) dims.positions = at(places);
      e.rotary(dims, at(out), at(table), placed);
    });
    on.alike(out, pointwise<T>() + pointwise<T>());
  }
  auto slopes = on.zeros<float>(6);
  on.run<T>("alibi_slopes", [&](Exec<T> e, Side at) { e.alibi_slopes(12, 3, 6, at(slopes)); });
  on.same(slopes);

  auto keys = on.array(std::vector<uint64_t>{11, 22});
  on.run<T>("dropout", [&](Exec<T> e, Side at) {
    e.dropout(
        {kRows, kWidth, 1, TokenRuns(4), 2, at(keys), kernels::dropout_site(3, 1), kernels::DropoutRate::of(0.25)},
        at(a), at(out));
  });
  on.same(out);
}

template <typename T>
void compare_norms() {
  Sides on;
  const Tolerance row = chain_of_sums<T>(kWidth), column = chain_of_sums<float>(kWidth + kRows);
  auto x = on.array(normals<T>("x", kCount)), dy = on.array(normals<T>("dy", kCount)), y = on.zeros<T>(kCount),
       dx = on.zeros<T>(kCount);
  auto weight = on.array(normals<T>("weight", kWidth)), bias = on.array(normals<T>("bias", kWidth));
  auto mean = on.zeros<float>(kRows), rstd = on.zeros<float>(kRows);
  auto dweight = on.array(std::vector<float>(kWidth, 0.5f)), dbias = on.array(std::vector<float>(kWidth, 0.25f));
  auto levels = on.zeros<float>(2 * 2 * kWidth);  // for the CPU's sums in two parts
  // As LayerNorm has it; with weights that count from 1; without any.
  struct {
    bool weighted;
    float offset;
  } const kinds[] = {{true, 0}, {true, 1}, {false, 0}};
  for (const auto& [weighted, offset] : kinds) {
    CAPTURE(weighted);
    CAPTURE(offset);
    const kernels::NormRows of{kRows, kWidth, 1e-5f, offset};
    const bool with = weighted;
    const auto w = [&](Side at) { return with ? DevicePtr<const T>(at(weight)) : nullptr; };
    const auto gradients = [&](Side at, bool biased) {
      return kernels::NormGradients{
          with ? at(dweight) : nullptr, with && biased ? at(dbias) : nullptr, {2, offset > 0 ? at(levels) : nullptr}};
    };
    on.run<T>("layer_norm_forward", [&](Exec<T> e, Side at) {
      e.layer_norm_forward(of, at(x), w(at), with ? DevicePtr<const T>(at(bias)) : nullptr, at(y), at(mean), at(rstd));
    });
    on.alike(y, row);
    on.alike(mean, sum_of<float>(kWidth));
    on.alike(rstd, sum_of<float>(kWidth));
    on.run<T>("layer_norm_backward", [&](Exec<T> e, Side at) {
      e.layer_norm_backward(of, at(dy), at(x), w(at), at(mean), at(rstd), at(dx), gradients(at, true));
    });
    on.alike(dx, row);
    on.alike(dweight, column);
    on.alike(dbias, column);
    kernels::NormRows adding = of;
    adding.adds = true;
    on.run<T>("layer_norm_backward", [&](Exec<T> e, Side at) {
      e.layer_norm_backward(adding, at(dy), at(x), w(at), at(mean), at(rstd), at(dx), gradients(at, true));
    });
    on.alike(dx, row + row);
    on.run<T>("rms_norm_forward", [&](Exec<T> e, Side at) { e.rms_norm_forward(of, at(x), w(at), at(y), at(rstd)); });
    on.alike(y, row);
    on.run<T>("rms_norm_backward", [&](Exec<T> e, Side at) {
      e.rms_norm_backward(of, at(dy), at(x), w(at), at(rstd), at(dx), gradients(at, false));
      e.rms_norm_backward(adding, at(dy), at(x), w(at), at(rstd), at(dx), gradients(at, false));
    });
    on.alike(dx, row + row);
    on.alike(dweight, column);
  }
  // Half of the channels of a norm over two ranks.
  const kernels::WholeNorm whole{kRows, kWidth, 2 * kWidth, 1, 1e-5f, 1.0f};
  auto squares = on.array(filled<float>(kRows, 90.0f)), dots = on.zeros<float>(2 * kRows);
  on.run<T>("row_dots", [&](Exec<T> e, Side at) {
    e.row_dots({kRows, kWidth, 2, kRows}, {at(x), kWidth}, {at(dy), kWidth}, at(weight), 1.0f, at(dots));
  });
  on.alike(dots, sum_of<float>(kWidth));
  on.run<T>("whole_norm_forward", [&](Exec<T> e, Side at) {
    e.whole_norm_forward(whole, {at(x), kWidth}, at(weight), at(squares), {at(y), kWidth});
  });
  on.alike(y, pointwise<T>() + pointwise<T>());
  on.run<T>("whole_norm_backward", [&](Exec<T> e, Side at) {
    e.whole_norm_backward(whole, {at(dy), kWidth}, {at(x), kWidth}, at(weight), at(squares), at(dots), {at(dx), kWidth},
                          {at(dweight), nullptr, {2, at(levels)}});
  });
  on.alike(dx, pointwise<T>() + pointwise<T>() + sum_of<T>(kWidth));
  on.alike(dweight, column);
  // 5 heads of 8 channels; rows stand side by side with nothing. RMSNorm, LayerNorm with a bias, weights of each head.
  auto scratch = on.zeros<float>(2 * kRows * 5);
  for (const auto& [centred, own] : {std::pair(false, false), {true, false}, {true, true}}) {
    const kernels::HeadNorm d{kRows, kWidth / 8, 8, 1e-5f, 1.0f, centred, own};
    const bool biased = centred && !own;
    const int64_t weights = own ? kWidth : 8;
    auto head_weight = on.array(normals<T>("head_weight", weights)), head_bias = on.array(normals<T>("head_bias", 8));
    auto head_dweight = on.array(filled<float>(weights, 0.5f)), head_dbias = on.array(filled<float>(8, 0.5f));
    on.run<T>("head_norm_forward", [&](Exec<T> e, Side at) {
      e.head_norm_forward(d, {at(x), kWidth}, at(head_weight), biased ? at(head_bias) : nullptr, {at(y), kWidth});
    });
    on.alike(y, row);
    on.run<T>("head_norm_backward", [&](Exec<T> e, Side at) {
      e.head_norm_backward(d, {at(dy), kWidth}, {at(x), kWidth}, at(head_weight), {at(dx), kWidth},
                           {at(head_dweight), biased ? at(head_dbias) : nullptr, {}}, at(scratch));
    });
    on.alike(dx, row);
    on.alike(head_dweight, column);
    on.alike(head_dbias, column);
  }
}

template <typename T>
void compare_attention(int64_t tokens, int64_t head_dim) {
  CAPTURE(tokens);
  CAPTURE(head_dim);
  Sides on;
  // Grouped heads, masks of every kind at once, the largest scores, sinks; rows with nothing between.
  constexpr int64_t kSamples = 2, kHeads = 4, kKvHeads = 2;
  const int64_t kv = kKvHeads * head_dim, all = kHeads * head_dim, width = all + 2 * kv, queries = kSamples * tokens;
  auto qkv = on.array(normals<T>("qkv", queries * width)), dout = on.array(normals<T>("dout", queries * all));
  auto out = on.zeros<T>(queries * all), dqkv = on.zeros<T>(queries * width);
  auto dkv_sums = on.zeros<float>(queries * width), logsumexp = on.zeros<float>(queries * kHeads);
  auto ends = on.zeros<int32_t>(queries), starts = on.zeros<int32_t>(queries);
  for (int64_t row = 0; row < queries; ++row) {
    const auto t = static_cast<int32_t>(row % tokens);
    ends.host[row] = std::max(t < 3 ? 3 : 0, t + 1);
    starts.host[row] = t < 6 ? 0 : 6;
  }
  ends = on.array(std::move(ends.host));
  starts = on.array(std::move(starts.host));
  auto slopes = on.array(std::vector<float>{0.5f, 0.25f, 0.125f, 0.0625f}),
       maxima = on.array(std::vector<float>(kHeads, -1e30f)), sinks = on.array(std::vector<float>{2, -1, 0.5f, 0}),
       dsinks = on.array(std::vector<float>(kHeads, 0.5f));
  auto keys = on.array(std::vector<uint64_t>{11, 22});
  auto scratch = on.zeros<float>(queries * kHeads * (1 + 2 * head_dim));
  enum { kPlain, kEverything, kSinks, kRounded };
  for (const int with : {kPlain, kEverything, kSinks, kRounded}) {
    CAPTURE(with);
    const auto dims = [&](Side at) {
      kernels::AttentionDims d{kSamples, tokens, kHeads, kKvHeads, head_dim, width, width, all, 0.35f};
      if (with == kSinks) {
        d.mask.chunk = 4;
        d.sinks = at(sinks);
      }
      if (with == kRounded) {
        d.alibi_slopes = at(slopes);
        d.alibi_rounded = true;
      }
      if (with != kEverything) return d;
      d.cap = 3.0f;
      d.mask = {.causal = true, .window = 5, .ends = at(ends), .starts = at(starts)};
      d.alibi_slopes = at(slopes);
      d.dropout = {kernels::DropoutRate::of(0.25), at(keys), kernels::dropout_site(1, 2), 4};
      d.max_scores = at(maxima);
      return d;
    };
    on.run<T>("attention_forward", [&](Exec<T> e, Side at) {
      e.attention_forward(dims(at), at(qkv), at(qkv) + all, at(qkv) + (all + kv), at(out), at(logsumexp));
    });
    on.alike(out, attention_sums<T>(tokens));
    on.alike(logsumexp, chain_of_sums<float>(tokens));
    on.alike(maxima, chain_of_sums<float>(head_dim));
    on.run<T>("attention_backward", [&](Exec<T> e, Side at) {
      e.attention_backward(dims(at), at(qkv), at(qkv) + all, at(qkv) + (all + kv), at(out), at(logsumexp), at(dout),
                           at(dqkv), at(dqkv) + all, at(dqkv) + (all + kv), at(scratch));
    });
    on.alike(dqkv, attention_gradients<T>(2 * tokens));
    on.run<T>("attention_backward_sums", [&](Exec<T> e, Side at) {
      e.attention_backward_sums(dims(at), at(qkv), at(qkv) + all, at(qkv) + (all + kv), at(out), at(logsumexp),
                                at(dout), at(dqkv), at(dkv_sums) + all, at(dkv_sums) + (all + kv), at(scratch));
    });
    on.alike(dkv_sums, attention_gradients<T>(2 * tokens));
    if (with != kSinks) continue;
    on.run<T>("sink_gradients",
              [&](Exec<T> e, Side at) { e.sink_gradients(dims(at), at(logsumexp), at(scratch), at(dsinks)); });
    on.alike(dsinks, attention_gradients<T>(queries));
  }
}

/// Latent heads and a step of generation.
template <typename T>
void compare_other_heads() {
  Sides on;
  constexpr int64_t kSamples = 2, kTokens = 11, kHeads = 4, kKvHeads = 2, kHeadDim = 8, kKv = kKvHeads * kHeadDim,
                    kRow = kHeads * kHeadDim + 2 * kKv, kQueries = kSamples * kTokens, kOut = kHeads * kHeadDim;
  auto qkv = on.array(normals<T>("qkv", kQueries * kRow)), dqkv = on.array(normals<T>("dqkv", kQueries * kRow));
  // Latent heads: 3 with 4 channels of a key of their own, 2 that are shared, 5 of a value.
  const kernels::LatentHeads latent{kQueries, 3, 4, 2, 5};
  constexpr int64_t kLatent = 3 * (4 + 5), kJoined = 3 * (4 + 2);
  auto kv = on.array(normals<T>("kv", kQueries * kLatent)), shared = on.array(normals<T>("shared", kQueries * 3));
  auto joined_k = on.zeros<T>(kQueries * kRow), joined_v = on.array(normals<T>("v", kQueries * kJoined));
  on.run<T>("join_latent_heads", [&](Exec<T> e, Side at) {
    e.join_latent_heads(latent, at(kv), {at(shared), 3}, {at(joined_k), kRow}, {at(joined_v), kJoined});
  });
  on.same(joined_k);
  on.same(joined_v);
  on.run<T>("split_latent_heads", [&](Exec<T> e, Side at) {
    e.split_latent_heads(latent, {at(dqkv), kRow}, {at(joined_v), kJoined}, at(kv), {at(shared), 3});
  });
  on.alike(kv, attention_gradients<T>(2 * kTokens));
  on.alike(shared, attention_gradients<T>(3 * 2 * kTokens));
  // The samples' keys and values as two caches, of which one more is empty.
  auto caches = on.array(normals<T>("caches", 2 * kSamples * kTokens * kKv)), next = on.zeros<T>(kSamples * kOut);
  on.run<T>("attention_decode", [&](Exec<T> e, Side at) {
    kernels::AttentionDims d{.batch = kSamples, .heads = kHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    e.attention_decode(d, kTokens - 2, kTokens, at(qkv), at(caches), at(caches) + kSamples * kTokens * kKv, at(next));
  });
  on.alike(next, attention_sums<T>(kTokens));
}

template <typename T>
void compare_experts() {
  Sides on;
  constexpr int64_t kExperts = 5, kChoices = 2, kAll = kRows * kChoices;
  auto logits = on.array(normals<float>("logits", kRows * kExperts)), weights = on.zeros<float>(kAll),
       log_sums = on.zeros<float>(kRows), dots = on.zeros<float>(kAll), gates = on.array(normals<float>("gates", kAll));
  auto balance = on.array(normals<float>("balance", kExperts, 0.1));
  auto chosen = on.zeros<int32_t>(kAll), rows_of = on.zeros<int32_t>(kAll);
  auto dlogits = on.zeros<T>(kRows * kExperts), dgates = on.zeros<T>(kAll);
  auto tokens = on.array(normals<T>("tokens", kCount)), to = on.zeros<T>(kCount);
  auto rows = on.zeros<T>(kAll * kWidth), others = on.array(normals<T>("others", kAll * kWidth));
  const kernels::RouterDims d{.tokens = kRows, .experts = kExperts, .choices = kChoices};
  on.run<T>("route_forward",
            [&](Exec<T> e, Side at) { e.route_forward(d, at(logits), at(chosen), at(weights), at(log_sums)); });
  on.same(chosen);
  for (Twin<float>* const of : {&logits, &weights, &log_sums}) on.alike(*of, chain_of_sums<float>(kExperts));
  on.run<T>("route_backward", [&](Exec<T> e, Side at) {
    e.route_backward(d, at(logits), at(chosen), at(weights), {at(balance), at(log_sums), 0.01f}, at(dlogits));
  });
  on.alike(dlogits, chain_of_sums<T>(kExperts));
  std::vector<int32_t> host_counts(kExperts);
  HostNumbers<int32_t> counts(on.stream(), kExperts);
  on.run<T>("count_choices", [&](Exec<T> e, Side at) {
    e.count_choices(at(chosen), kAll, at.cuda ? counts.room() : std::span(host_counts));
  });
  CHECK(std::ranges::equal(counts.read(), host_counts));
  on.run<T>("place_choices", [&](Exec<T> e, Side at) {
    std::vector<int64_t> next(kExperts);
    for (size_t expert = 1; expert < kExperts; ++expert) next[expert] = next[expert - 1] + host_counts[expert - 1];
    e.place_choices(at(chosen), kAll, next, at(rows_of));
  });
  on.same(rows_of);
  auto groups = on.zeros<kernels::GroupRows>(kExperts + 1);
  auto of_each = on.zeros<float>(kExperts);
  auto placed = on.zeros<int32_t>(kAll);
  on.run<T>("group_choices", [&](Exec<T> e, Side at) {
    CHECK(e.places_groups == at.cuda);
    e.group_choices({kAll, kExperts, 1}, at(chosen), at(groups), at(of_each), at(placed));
  });
  on.same(of_each);
  on.same(placed);
  auto padded = on.array(normals<T>("padded", kAll * kWidth));
  on.run<T>("clear_padding", [&](Exec<T> e, Side at) { e.clear_padding(at(groups), kExperts, kWidth, at(padded)); });
  on.same(padded);
  // Arrays that lie equally far apart, and one that does not.
  auto biases = on.array(normals<T>("biases", 2 * kExperts * kWidth));
  auto sums = on.array(normals<float>("sums", 2 * kExperts * kWidth));
  const auto of_experts = [&](auto first) {
    std::vector<decltype(first)> out;
    for (int64_t e = 0; e < kExperts; ++e) out.push_back(first + (e + (e == 3 ? 4 : 0)) * kWidth);
    return out;
  };
  on.run<T>("fill_groups", [&](Exec<T> e, Side at) {
    const auto from = of_experts(DevicePtr<const T>(at(biases)));
    e.fill_groups(at(groups), kAll, from, kWidth, at(padded));
  });
  on.same(padded);
  on.run<T>("add_rows_of_groups", [&](Exec<T> e, Side at) {
    const auto to = of_experts(DevicePtr<float>(at(sums)));
    e.add_rows_of_groups(at(groups), kAll, at(others), kWidth, kWidth, to);
  });
  on.alike(sums, chain_of_sums<float>(kAll));
  on.run<T>("rows_to_experts",
            [&](Exec<T> e, Side at) { e.rows_to_experts(at(tokens), at(rows_of), kRows, kChoices, kWidth, at(rows)); });
  on.same(rows);
  on.run<T>("scale_expert_rows",
            [&](Exec<T> e, Side at) { e.scale_expert_rows(at(rows), at(rows_of), at(weights), kAll, kWidth); });
  on.alike(rows, pointwise<T>());
  on.run<T>("rows_to_tokens", [&](Exec<T> e, Side at) {
    e.rows_to_tokens(at(rows), at(rows_of), at(weights), kRows, kChoices, kWidth, at(to));
  });
  on.alike(to, sum_of<T>(kChoices));
  on.run<T>("dot_and_scale_rows", [&](Exec<T> e, Side at) {
    e.dot_and_scale_rows(at(rows), at(others), at(rows_of), at(weights), kRows, kChoices, kWidth, at(dots));
  });
  on.alike(dots, sum_of<float>(kWidth));
  on.alike(rows, pointwise<T>() + pointwise<T>());
  on.run<T>("gate_rows", [&](Exec<T> e, Side at) { e.gate_rows(at(gates), at(others), kAll, kWidth); });
  on.alike(gates, pointwise<float>());
  on.alike(others, pointwise<T>() + pointwise<T>());
  on.run<T>("gate_backward", [&](Exec<T> e, Side at) { e.gate_backward(at(gates), at(dots), at(dgates), kAll); });
  on.alike(dgates, pointwise<T>() + sum_of<T>(kWidth));
}

template <typename T>
void compare_rows() {
  Sides on;
  auto from = on.array(normals<T>("from", kCount)), to = on.zeros<T>(kCount + kWidth);
  auto floats = on.array(normals<float>("floats", kCount)), more = on.zeros<float>(kCount);
  on.run<T>("copy_rows", [&](Exec<T> e, Side at) { e.copy_rows(at(from), kWidth, at(to), kWidth, kRows, kWidth - 3); });
  on.same(to);
  on.run<T>("round_rows",
            [&](Exec<T> e, Side at) { e.round_rows(at(floats), kWidth, at(to), kWidth, kRows, kWidth / 2); });
  on.same(to);
  auto places = on.array(std::vector<int64_t>{3, -1, 0, 5, 1, 6});
  on.run<T>("scatter_rows",
            [&](Exec<T> e, Side at) { e.scatter_rows(at(from), kWidth, at(places), kRows, kWidth, at(to)); });
  on.same(to);
  on.run<T>("to_floats", [&](Exec<T> e, Side at) { e.to_floats(at(from), at(more), kCount); });
  on.same(more);
  on.run<T>("from_floats", [&](Exec<T> e, Side at) { e.from_floats(at(floats), at(to), kCount); });
  on.same(to);

  auto ids = on.array(std::vector<int32_t>{3, 9, 3, 2, 1, 3});
  auto table = on.array(normals<T>("table", 4 * kWidth));
  auto dtable = on.array(std::vector<float>(4 * kWidth, 0.5f));
  const kernels::TableRange range{1, 4, kWidth};
  on.run<T>("embedding_forward",
            [&](Exec<T> e, Side at) { e.embedding_forward(at(ids), kRows, range, at(table), at(to)); });
  on.same(to);
  on.run<T>("embedding_backward",
            [&](Exec<T> e, Side at) { e.embedding_backward(at(ids), kRows, range, at(from), at(dtable), 1.5f); });
  on.alike(dtable, sum_of<float>(3));
  on.run<T>("embedding_backward_parts", [&](Exec<T> e, Side at) {
    e.clear_floats(at(dtable), 4 * kWidth);
    e.embedding_backward_parts(at(ids), kRows, 2, range, at(from), at(dtable), 1.5f);
  });
  on.alike(dtable, sum_of<float>(3));
  const kernels::RowPositions positions{nullptr, 1, TokenRuns(4), 2};
  on.run<T>("positions_look_up",
            [&](Exec<T> e, Side at) { e.positions_look_up(at(table), positions, kRows, kWidth, at(to)); });
  on.same(to);
  on.run<T>("positions_forward",
            [&](Exec<T> e, Side at) { e.positions_forward(at(to), at(table), positions, kRows, kWidth); });
  on.alike(to, pointwise<T>());
  on.run<T>("positions_backward",
            [&](Exec<T> e, Side at) { e.positions_backward(at(from), at(dtable), positions, kRows, kWidth); });
  on.alike(dtable, sum_of<float>(6));

  // A vocabulary in two parts of 20, the second's last 4 columns padding.
  auto logits = on.array(normals<T>("logits", kCount));
  auto targets = on.array(std::vector<int32_t>{0, 21, -1, 35, 19, 20});
  auto maxima = on.zeros<float>(2 * kRows), sums = on.zeros<float>(2 * kRows), max = on.zeros<float>(kRows),
       loss = on.zeros<float>(kRows), scales = on.zeros<float>(kRows), sum = on.zeros<float>(kRows);
  const Tolerance of_row = sum_of<float>(kWidth);
  for (const int64_t part : {0, 1}) {
    on.run<T>("row_sums", [&](Exec<T> e, Side at) {
      e.row_sums({kRows, kWidth / 2, part == 0 ? 20 : 16, part * 20, at(targets)}, at(logits) + part * kCount / 2,
                 at(maxima) + part * kRows, at(sums) + part * kRows, at(loss));
    });
  }
  on.same(maxima);
  on.alike(sums, of_row);
  on.alike(loss, of_row);
  on.run<T>("join_maxima", [&](Exec<T> e, Side at) { e.join_maxima(at(maxima), 2, kRows, at(max)); });
  on.same(max);
  on.run<T>("rescale_sums", [&](Exec<T> e, Side at) { e.rescale_sums(at(maxima), at(max), 2, 2, kRows, at(sums)); });
  on.alike(sums, of_row + of_row);
  on.run<T>("copy_floats", [&](Exec<T> e, Side at) { e.copy_floats(at(sums), at(sum), kRows); });
  on.run<T>("add_to", [&](Exec<T> e, Side at) { e.add_to(at(sum), at(sums) + kRows, kRows); });
  on.alike(sum, of_row + of_row);
  on.run<T>("row_losses", [&](Exec<T> e, Side at) { e.row_losses(at(targets), at(max), at(sum), kRows, at(loss)); });
  on.alike(loss, of_row + of_row);
  auto row_weights = on.array(std::vector<float>{1.0f, 0.3f, 2.0f, 1.7f, 0.0f, 1.0f});
  on.run<T>("row_scales",
            [&](Exec<T> e, Side at) { e.row_scales(at(targets), at(row_weights), 0.1f, kRows, at(scales)); });
  on.same(scales);
  on.run<T>("row_scales", [&](Exec<T> e, Side at) { e.row_scales(at(targets), nullptr, 0.125f, kRows, at(scales)); });
  on.same(scales);
  on.run<T>("cross_entropy_backward", [&](Exec<T> e, Side at) {
    e.cross_entropy_backward({kRows, kWidth / 2, 16, 20, at(targets)}, at(logits) + kCount / 2, at(max), at(sum),
                             at(scales), 1e-3f, 0.0f);
  });
  on.alike(logits, chain_of_sums<T>(kWidth));
  on.run<T>("cross_entropy_backward", [&](Exec<T> e, Side at) {  // as if they were capped
    e.cross_entropy_backward({kRows, kWidth / 2, 20, 0, at(targets)}, at(logits), at(max), at(sum), at(scales), 0.0f,
                             30.0f);
  });
  on.alike(logits, chain_of_sums<T>(kWidth));

  auto all_logits = on.array(normals<T>("whole", kCount));
  on.run<T>("cross_entropy", [&](Exec<T> e, Side at) {
    e.cross_entropy({kRows, kWidth, kWidth - 3, 0, at(targets)}, at(all_logits), 0.25f, 1e-3f, at(max), at(sum),
                    at(scales), at(loss));
  });
  on.alike(all_logits, chain_of_sums<T>(kWidth));
  on.alike(loss, chain_of_sums<float>(kWidth));

  on.run<T>("scale_floats", [&](Exec<T> e, Side at) { e.scale_floats(at(more), 0.5f, kCount); });
  on.same(more);
  on.run<T>("clear_floats", [&](Exec<T> e, Side at) { e.clear_floats(at(more), kWidth); });
  on.same(more);
  auto many = on.array(normals<float>("many", 50));
  auto runs = on.array(std::vector<kernels::ElemRun>{{1, 7}, {12, 0}, {16, 5}});  // askew, empty, packs with a tail
  on.run<T>("clear_floats_of_runs", [&](Exec<T> e, Side at) { e.clear_floats_of_runs(at(many), at(runs), 3); });
  on.same(many);
  auto order = on.array(std::vector<int32_t>{5, 3, 0, 1, 2, 4}), ints = on.zeros<int32_t>(kRows);
  on.run<T>("copy_ints", [&](Exec<T> e, Side at) { e.copy_ints(at(order), at(ints), kRows); });
  on.same(ints);
  on.run<T>("gather_floats", [&](Exec<T> e, Side at) { e.gather_floats(at(floats), at(order), kRows, at(more)); });
  on.same(more);
  on.run<T>("scatter_floats", [&](Exec<T> e, Side at) { e.scatter_floats(at(floats), at(order), kRows, at(more)); });
  on.same(more);

  // For the host: what each side leaves there.
  std::vector<float> host_rows(kRows * 7), host_floats(kRows);
  std::vector<int32_t> host_ints(kRows);
  HostNumbers<float> rows(on.stream(), kRows * 7), numbers(on.stream(), kRows);
  HostNumbers<int32_t> whole(on.stream(), kRows);
  on.run<T>("rows_to_host", [&](Exec<T> e, Side at) {
    e.rows_to_host(at(from), kWidth, kRows, 7, at.cuda ? rows.room() : std::span(host_rows));
  });
  on.run<T>("floats_to_host", [&](Exec<T> e, Side at) {
    e.floats_to_host(at(floats), at.cuda ? numbers.room() : std::span(host_floats));
  });
  auto found = on.zeros<double>(1);
  on.run<T>("note_not_finite", [&](Exec<T> e, Side at) { e.note_not_finite(at(floats), kRows, true, at(found)); });
  on.same(found);
  on.run<T>("ints_to_host",
            [&](Exec<T> e, Side at) { e.ints_to_host(at(order), at.cuda ? whole.room() : std::span(host_ints)); });
  CHECK(std::ranges::equal(rows.read(), host_rows));
  CHECK(std::ranges::equal(numbers.read(), host_floats));
  CHECK(std::ranges::equal(whole.read(), host_ints));
}

template <typename T>
void compare_products() {
  Sides on;
  constexpr int64_t kM = 5, kN = 7, kK = 9, kPad = 3;  // rows longer than their matrix, no sizes alike
  constexpr DType kType = DTypeOf<T>::value;
  auto a = on.array(normals<T>("a", (kM + kPad) * (kK + kPad))),
       b = on.array(normals<T>("b", (kN + kPad) * (kK + kPad)));
  auto bias = on.array(normals<T>("bias", kN));
  auto c = on.array(normals<T>("c", kM * (kN + kPad)));
  auto sums = on.array(normals<float>("sums", kM * (kN + kPad)));
  int64_t kinds = 0;
  for (const bool trans_a : {false, true}) {
    for (const bool trans_b : {false, true}) {
      for (const bool to_float : {false, true}) {
        for (const bool more : {false, true}) {  // added to what is there; else with a bias
          CAPTURE(trans_a);
          CAPTURE(trans_b);
          CAPTURE(to_float);
          CAPTURE(more);
          const auto multiply = [&](Exec<T> e, Side at) {
            kernels::MatmulArgs of{.m = kM, .n = kN, .k = kK};
            of.a = at(a);
            of.lda = (trans_a ? kM : kK) + kPad;
            of.trans_a = trans_a;
            of.b = at(b);
            of.ldb = (trans_b ? kK : kN) + kPad;
            of.trans_b = trans_b;
            of.c = to_float ? DevicePtr<void>(at(sums)) : DevicePtr<void>(at(c));
            of.ldc = kN + kPad;
            of.ab_dtype = kType;
            of.c_dtype = to_float ? DType::kF32 : kType;
            of.accumulate = more;
            if (!more) of.bias = at(bias);
            e.matmul(of);
          };
          on.run<T>("matmul", multiply);
          if (to_float) {
            on.alike(sums, chain_of_sums<float>(kK));
          } else {
            on.alike(c, chain_of_sums<T>(kK));
          }
          kinds += 1;
#ifndef CAIRN_ON_DEVICE  // Another one of its kind asks for nothing.
          const int64_t choices = on.choices();
          on.run<T>("matmul", multiply);
          CHECK(on.choices() == choices);
#endif
        }
      }
    }
  }
#ifndef CAIRN_ON_DEVICE  // Whether c is read is no matter of the choice: float with a bias or without, and added to or
                         // not.
  CHECK(on.choices() == (kType == DType::kF32 ? 8 : 12));
#endif
  CHECK(kinds == 16);
  on.run<T>("matmul_groups", [&](Exec<T> e, Side at) {
    kernels::MatmulGroups groups;
    for (int64_t group = 0; group < 2; ++group) {
      kernels::MatmulArgs of{.m = 2, .n = kN, .k = kK};
      of.a = at(a) + group * 2 * kK;
      of.lda = kK;
      of.b = at(b) + group;
      of.ldb = kN;
      of.c = at(c) + group * 2 * (kN + kPad);
      of.ldc = kN + kPad;
      of.ab_dtype = of.c_dtype = kType;
      groups.products.push_back(of);
      groups.ends.push_back(groups.products.size());
    }
    groups.most_rows = 2;
    groups.all_rows = 4;
    e.matmul_groups(groups);
  });
  on.alike(c, chain_of_sums<T>(kK));
}

/// Groups that the device places: their matrices equally far apart, and not.
template <typename T>
void compare_placed_products() {
  Sides on;
  constexpr int64_t kGroups = 4, kN = 24, kK = 16, kRoom = 96;
  constexpr DType kType = DTypeOf<T>::value;
  auto places = on.array(std::vector<kernels::GroupRows>{{.first = 0, .filled = 3, .rows = 32, .tiles = 0},
                                                         {.first = 32, .filled = 0, .rows = 0, .tiles = 1},
                                                         {.first = 32, .filled = 32, .rows = 32, .tiles = 1},
                                                         {.first = 64, .filled = 1, .rows = 32, .tiles = 2},
                                                         {.first = 96, .tiles = 3}});
  auto a = on.array(normals<T>("a", kRoom * kK)), b = on.array(normals<T>("b", (kGroups + 1) * kN * kK));
  auto c = on.zeros<T>(kRoom * kN);
  auto sums = on.array(normals<float>("sums", (kGroups + 1) * kN * kK));
  for (const int64_t gap : {0, 1}) {  // before the last matrix
    CAPTURE(gap);
    const auto place_of = [&](int64_t group) { return (group + (group == kGroups - 1 ? gap : 0)) * kN * kK; };
    on.run<T>("matmul_groups", [&](Exec<T> e, Side at) {
      kernels::MatmulGroups groups;
      for (int64_t group = 0; group < kGroups; ++group) {
        kernels::MatmulArgs of{.n = kN, .k = kK};
        of.a = at(a);
        of.lda = kK;
        of.b = at(b) + place_of(group);
        of.ldb = kK;
        of.trans_b = true;
        of.c = at(c);
        of.ldc = kN;
        of.ab_dtype = of.c_dtype = kType;
        groups.products.push_back(of);
        groups.ends.push_back(groups.products.size());
      }
      groups.all_rows = kRoom;
      groups.places = at(places);
      e.matmul_groups(groups);
    });
    on.alike(c, chain_of_sums<T>(kK));
    on.run<T>("matmul_groups", [&](Exec<T> e, Side at) {
      kernels::MatmulGroups groups;
      for (int64_t group = 0; group < kGroups; ++group) {
        kernels::MatmulArgs of{.m = kK, .n = kK};
        of.a = at(a);
        of.lda = kK;
        of.trans_a = true;
        of.b = at(a);
        of.ldb = kK;
        of.c = at(sums) + place_of(group);
        of.ldc = kK;
        of.ab_dtype = kType;
        of.accumulate = group == 0;
        groups.products.push_back(of);
        groups.ends.push_back(groups.products.size());
      }
      groups.all_rows = kRoom;
      groups.places = at(places);
      e.matmul_groups(groups);
    });
    on.alike(sums, chain_of_sums<float>(64));
  }
}

/// With `refuse` of the library's double what a product asks for beside a sum and a bias is done by other kernels.
template <typename T>
void compare_fused_products([[maybe_unused]] bool refuse) {
  Sides on;
  constexpr int64_t kM = 6, kN = 40, kK = 24;
  auto a = on.array(normals<T>("a", kM * kK)), b = on.array(normals<T>("b", kN * kK));
  auto bias = on.array(normals<T>("bias", kN + 1)), x = on.array(normals<T>("x", kM * kN));
  auto c = on.zeros<T>(kM * kN);
#ifndef CAIRN_ON_DEVICE
  if (refuse) {
    on.library().refuse_other_c();
    on.library().refuse(
        [](uint32_t epilogue) { return epilogue != cuda::kEpilogueNone && epilogue != cuda::kEpilogueBias; });
  }
  const auto launches = [&] { return on.launches(); };
#endif
  const auto product = [&](Side at) {
    kernels::MatmulArgs of{.m = kM, .n = kN, .k = kK};
    of.a = at(a);
    of.lda = of.ldb = kK;
    of.b = at(b);
    of.trans_b = true;
    of.c = at(c);
    of.ldc = kN;
    of.ab_dtype = of.c_dtype = DTypeOf<T>::value;
    return of;
  };
  for (const int64_t bias_at : {-1, 0, 1}) {  // none, and two that are aligned differently
    for (const bool own : {false, true}) {    // the residual is the result's memory
      CAPTURE(bias_at);
      CAPTURE(own);
#ifndef CAIRN_ON_DEVICE
      launches();
#endif
      on.run<T>("matmul", [&](Exec<T> e, Side at) {
        CHECK(e.fuses_products == at.cuda);
        kernels::MatmulArgs of = product(at);
        if (bias_at >= 0) of.bias = at(bias) + bias_at;
        of.residual = own ? DevicePtr<const void>(at(c)) : DevicePtr<const void>(at(x));
        e.matmul(of);
      });
#ifndef CAIRN_ON_DEVICE
      CHECK(launches() == (refuse && !(own && bias_at < 0) ? 2 : 1));
#endif
      // Rounded once more where it is refused; c itself came from two roundings that may differ.
      on.alike(c, chain_of_sums<T>(own ? 2 * kK : kK) + chain_of_sums<T>(2));
    }
  }
  auto pre = on.zeros<T>(kM * kN + 1);
  int weights_written = 0;
  struct Case {
    kernels::MatmulMap map;
    bool biased;
    int64_t n, pre_at;
    bool fits;
  };
  using Map = kernels::MatmulMap;
  for (const Case& of : {Case{Map::kGeluTanh, true, kN, 0, true},
                         {Map::kGeluTanhGradient, false, kN, 0, true},
                         {Map::kGeluTanh, false, kN, 0, true},
                         {Map::kGeluTanh, true, kN, 1, false},  // not at a multiple of 16 bytes
                         {Map::kGeluTanhGradient, false, kN, 1, false},
                         {Map::kGeluTanh, true, kN - 4, 0, false}}) {  // rows not at multiples of 8 elements
    CAPTURE(static_cast<int>(of.map));
    CAPTURE(of.biased);
    CAPTURE(of.n);
    CAPTURE(of.pre_at);
#ifndef CAIRN_ON_DEVICE
    launches();
#endif
    on.run<T>("matmul", [&](Exec<T> e, Side at) {
      kernels::MatmulArgs args = product(at);
      args.n = args.ldc = of.n;
      if (of.biased) args.bias = at(bias);
      args.map = of.map;
      args.pre = at(pre) + of.pre_at;
      e.matmul(args);
    });
#ifndef CAIRN_ON_DEVICE
    CHECK(launches() == (refuse || !of.fits ? 2 : 1));
#endif
    // Rounded before the map too, or not; a slope is 1.13 at most.
    on.alike(pre, chain_of_sums<T>(kK));
    on.alike(c, chain_of_sums<T>(2 * kK) + chain_of_sums<T>(2));
  }
  // A weight's gradient with its bias': the first written, then added to; and sums that are not aligned.
  auto weights = on.array(normals<float>("weights", kM * kN)), sums = on.array(normals<float>("sums", kM + 1));
  for (const int64_t sums_at : {0, 0, 1}) {
    CAPTURE(sums_at);
    const bool more = weights_written++ > 0;
#ifndef CAIRN_ON_DEVICE
    launches();
#endif
    on.run<T>("matmul", [&](Exec<T> e, Side at) {
      kernels::MatmulArgs of{.m = kM, .n = kN, .k = kK};
      of.a = at(a);
      of.lda = kM;
      of.trans_a = true;
      of.b = at(b);
      of.ldb = of.ldc = kN;
      of.c = at(weights);
      of.ab_dtype = DTypeOf<T>::value;
      of.accumulate = more;
      of.sums = at(sums) + sums_at;
      e.matmul(of);
    });
#ifndef CAIRN_ON_DEVICE
    CHECK((launches() > 1) == (refuse || sums_at > 0));
#endif
    on.alike(weights, chain_of_sums<float>(3 * kK));
    on.alike(sums, chain_of_sums<float>(kK));
  }
}

/// Names of a table that a test has to compare: all that are not missing.
std::vector<std::string> not_compared(std::vector<std::string> names) {
  const auto missing = cuda::missing_ops();
  std::erase_if(names, [&](const std::string& name) {
    return compared().count(name) > 0 || std::ranges::find(missing, name) != missing.end();
  });
  return names;
}

}  // namespace

TEST_SUITE("runtime/cuda/ops") {
  TEST_CASE_TEMPLATE("maps give what the CPU's give", T, float, bf16, f16) { compare_maps<T>(); }
  TEST_CASE_TEMPLATE("norms give what the CPU's give", T, float, bf16, f16) { compare_norms<T>(); }
  TEST_CASE_TEMPLATE("attention gives what the CPU's gives", T, float, bf16, f16) {
    compare_attention<T>(11, 8);
#ifdef CAIRN_ON_DEVICE  // attention_test compares such where there is none
    compare_attention<T>(300, 64);
    compare_attention<T>(200, 128);
    compare_attention<T>(129, 72);
#endif
  }
  TEST_CASE_TEMPLATE("latent heads and a step of generation give what the CPU's give", T, float, bf16, f16) {
    compare_other_heads<T>();
  }
  TEST_CASE_TEMPLATE("experts give what the CPU's give", T, float, bf16, f16) { compare_experts<T>(); }
  TEST_CASE_TEMPLATE("rows, look-ups, losses and copies give what the CPU's give", T, float, bf16, f16) {
    compare_rows<T>();
  }

  TEST_CASE_TEMPLATE("products give what the CPU's give, whatever their descriptors say", T, float, bf16, f16) {
    compare_products<T>();
    if constexpr (!std::is_same_v<T, float>) compare_placed_products<T>();
  }

  TEST_CASE_TEMPLATE("fused products give what the CPU's give, by one kernel or by several", T, float, bf16, f16) {
    compare_fused_products<T>(false);
#ifndef CAIRN_ON_DEVICE
    compare_fused_products<T>(true);
#endif
  }

  TEST_CASE("training state: first weights, AdamW, squares of gradients, copies") {
    Sides on;
    constexpr int64_t kElems = 3 * 16384 + 37;
    auto drawn = on.zeros<float>(kElems), master = on.zeros<float>(kElems), m = on.zeros<float>(kElems),
         v = on.zeros<float>(kElems), weight = on.zeros<float>(kElems);
    auto low = on.zeros<bf16>(kElems);
    auto low16 = on.zeros<f16>(kElems);
    auto grad = on.array(normals<float>("grad", kElems));
    auto clip = on.array(std::vector<kernels::Clip>{{.grad_scale = 0.5f}});
    using Kind = kernels::FirstWeights::Kind;
    for (const Kind kind : {Kind::kZeros, Kind::kOnes, Kind::kNormal}) {
      on.run_state("draw_weights", [&](StateExec e, Side at) {
        e.draw_weights({kind, 77, 0.02f, 3, 16384, 5, 20000}, at(drawn));
      });
      on.same(drawn);
    }
    {  // more than is drawn at once: 70 rows of 16,384, of which 64 are a part, with other elements between them
      auto large = on.zeros<float>(70 * 16384);
      on.run_state("draw_weights", [&](StateExec e, Side at) {
        e.draw_weights({Kind::kNormal, 78, 0.02f, 70, 16384, 5, 20000}, at(large));
      });
      on.same(large);
    }
    on.run_state("copy_state", [&](StateExec e, Side at) { e.copy_state(at(drawn), at(master), kElems); });
    on.same(master);
    on.run_state("copy_summed", [&](StateExec e, Side at) { e.copy_summed(at(drawn), at(weight), kElems, {}); });
    on.same(weight);
    kernels::AdamwArgs args{.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-8f, .weight_decay = 0.1f};
    for (const bool to_low : {false, true}) {
      on.run_state("adamw_of_runs", [&](StateExec e, Side at) {
        kernels::AdamwArgs of = args;
        of.clip = at(clip);
        of.step = to_low ? 2 : 1;
        const kernels::StateArrays state{at(master), at(m), at(v), nullptr};
        // Two runs, cut between chunks; then the weights in all types.
        std::vector<kernels::AdamRun> runs(2);
        for (const int64_t k : {0, 1}) {
          const int64_t first = k * 16384;
          const auto from = [&](const DevicePtr<float>& array) { return array + first; };
          const kernels::StateArrays part{from(state.master), from(state.exp_avg), from(state.exp_avg_sq), nullptr};
          runs[k] = {.args = of,
                     .grad = at(grad) + first,
                     .from = part,
                     .to = part,
                     .dtype = to_low ? DType::kBf16 : DType::kF32,
                     .weights = to_low ? DevicePtr<void>(at(low) + first) : DevicePtr<void>(at(weight) + first),
                     .count = k == 0 ? 16384 : kElems - 16384};
        }
        e.adamw_of_runs(runs);
      });
      for (Twin<float>* const of : {&master, &m, &v}) on.alike(*of, chain_of_sums<float>(4));
    }
    on.alike(weight, chain_of_sums<float>(4));
    on.alike(low, chain_of_sums<bf16>(4));
    on.run_state("put_weights", [&](StateExec e, Side at) {
      e.put_weights(at(drawn), kElems, DType::kBf16, DevicePtr<void>(at(low)));
      e.put_weights(at(drawn), kElems, DType::kF16, DevicePtr<void>(at(low16)));
    });
    on.same(low);
    on.same(low16);
    on.run_state("put_first_weights", [&](StateExec e, Side at) {
      e.put_first_weights(at(grad), kElems, DType::kF32, DevicePtr<void>(at(weight)));
    });
    on.same(weight);
    auto scores = on.array(std::vector<float>{1, 50, 100, 400}), of_query = on.zeros<float>(4),
         of_key = on.zeros<float>(2), clipped = on.zeros<float>(1);
    auto of_step = on.array(std::vector<kernels::Clip>(1));
    auto low_weight = on.zeros<bf16>(kElems);
    on.run_state("head_factors", [&](StateExec e, Side at) {
      e.head_factors({.most = 100, .group = 2, .key_heads = 2}, at(scores), at(of_query), at(of_key), at(clipped));
    });
    for (Twin<float>* const of : {&of_query, &of_key, &clipped}) on.same(*of);
    on.run_state("scale_heads_of_runs", [&](StateExec e, Side at) {
      const kernels::HeadRun run{at(weight), at(of_query), 0, kElems, kElems / 4 + 1, DType::kBf16, at(low_weight)};
      e.scale_heads_of_runs({&run, 1}, at(clipped), at(of_step));
    });
    on.same(low_weight);
    std::vector<float> host_scores(4);
    HostNumbers<float> told_scores(on.stream(), 4);
    on.run_state("floats_to_host", [&](StateExec e, Side at) {
      e.floats_to_host(at(scores), at.cuda ? told_scores.room() : std::span(host_scores));
    });
    CHECK(std::ranges::equal(told_scores.read(), host_scores));
    CHECK(host_scores[3] == 400);
    on.same(weight);
    on.run_state("clear_floats", [&](StateExec e, Side at) { e.clear_floats(at(weight), 100); });
    on.same(weight);

    // Whole chunks, tails, an empty run, one that lies askew; with numbers there that do not count. Exact: the same
    // bits.
    auto runs = on.array(std::vector<kernels::ElemRun>{{0, 16384}, {16400, 2 * 16384 + 21}, {16384, 0}, {16384, 5}});
    std::vector<double> host(ExactSum::kWords, 3.0);
    HostNumbers<double> words(on.stream(), ExactSum::kWords);
    auto squares = on.array(host);
    std::ranges::fill(words.room(), 3.0);
    const auto of_side = [&](Side at) { return at.cuda ? words.room() : std::span(host); };
    on.run_state("add_squares_of_runs",
                 [&](StateExec e, Side at) { e.add_squares_of_runs(at(grad), at(runs), 4, at(squares)); });
    on.run_state("doubles_to_host", [&](StateExec e, Side at) { e.doubles_to_host(at(squares), of_side(at)); });
    const auto sum_of_words = [](std::span<const double> of) {
      return ExactSum::from(of.first<ExactSum::kWords>()).value();
    };
    CHECK(sum_of_words(words.read()) == sum_of_words(host));
    CHECK(sum_of_words(host) > 1000);

    auto norm = on.array(host);
    auto numbers = on.array(std::vector<kernels::ClipNumbers>{{0.5, 1.25, 4.0}});
    on.run_state("clip_by_norm",
                 [&](StateExec e, Side at) { e.clip_by_norm(at(norm), at(numbers), nullptr, nullptr, at(clip)); });
    on.same(clip);
  }

  TEST_CASE("training state: checksums with the CPU's bits, LAMB, Adafactor, averages, counts") {
    Sides on;
    constexpr int64_t kElems = 16384 + 5000, kCols = 50;
    auto grad = on.array(normals<float>("grad", kElems)), master = on.array(normals<float>("master", kElems)),
         m = on.array(normals<float>("m", kElems, 0.1)), v = on.array(filled<float>(kElems, 0.5f)),
         average = on.zeros<float>(kElems);
    auto clips = on.array(std::vector<kernels::Clip>{{.grad_scale = 0.5f}, {.finite = 0}});
    // What each side leaves for the host.
    std::vector<uint64_t> host_sums(3);
    HostNumbers<uint64_t> sums(on.stream(), 3);
    const auto sums_of = [&](Side at, size_t count, int64_t first) {
      return kernels::BlockSums{(at.cuda ? sums.room() : std::span(host_sums)).first(count), first};
    };
    const auto sums_of_arrays = [&](std::vector<Twin<float>*> arrays) {  // of the device, which rounds its own way
      const auto got = sums.read();
      for (size_t a = 0; a < arrays.size(); ++a) {
        const auto values = on.on_device(*arrays[a]);
        CHECK(got[a] == word_sums(reinterpret_cast<const std::byte*>(values.data()), kElems));
      }
    };
    kernels::AdamwArgs args{.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-8f, .weight_decay = 0.1f};
    const auto state = [&](Side at) { return kernels::StateArrays{at(master), at(m), at(v), nullptr}; };
    // In two blocks, the second of which begins anywhere; nothing where the clip is not finite.
    for (const int64_t clip : {0, 1}) {
      on.run_state("adamw_of_runs", [&](StateExec e, Side at) {
        kernels::AdamwArgs of = args;
        of.clip = at(clips) + clip;
        const auto from = [&](int64_t first) {
          return kernels::StateArrays{at(master) + first, at(m) + first, at(v) + first, nullptr};
        };
        for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1003}, {1003, kElems - 1003}}) {
          const kernels::AdamRun run{.args = of,
                                     .grad = at(grad) + first,
                                     .from = from(first),
                                     .to = from(first),
                                     .count = count,
                                     .sums = sums_of(at, 3, first)};
          e.adamw_of_runs({&run, 1});
        }
      });
      sums_of_arrays({&master, &m, &v});
    }
    on.run_state("ema_of_runs", [&](StateExec e, Side at) {
      const kernels::EmaRun run{at(master), at(average), at(average), kElems, sums_of(at, 1, 0)};
      e.ema_of_runs(0.75, {&run, 1});
    });
    sums_of_arrays({&average});
    on.alike(average, chain_of_sums<float>(4));
    on.run_state("copy_summed", [&](StateExec e, Side at) {
      e.copy_summed(at(grad), at(average), kElems, sums_of(at, 1, 0));
      e.copy_summed(at(grad), at(grad), kElems, sums_of(at, 1, 7));
    });
    CHECK(sums.read()[0] == host_sums[0]);

    std::vector<double> host_words(kernels::TensorNorms::kWords);
    HostNumbers<double> words(on.stream(), kernels::TensorNorms::kWords);
    const auto norms_of = [&](Side at) { return kernels::TensorNorms{at.cuda ? words.room() : std::span(host_words)}; };
    const auto same_norms = [&] {
      std::vector<double> got(words.read().begin(), words.read().end());
      const kernels::TensorNorms here{host_words}, there{got};
      CHECK(there.weight().value() == doctest::Approx(here.weight().value()).epsilon(1e-6));
      CHECK(there.step().value() == doctest::Approx(here.step().value()).epsilon(1e-5));
      CHECK(here.step().value() > 0);
    };
    args.step = 3;
    const auto lamb_run = [&](Side at) {
      kernels::AdamRun run{
          .args = args, .grad = at(grad), .from = state(at), .to = state(at), .count = kElems, .tensor = 1};
      run.args.clip = at(clips);
      return run;
    };
    auto tensors = on.zeros<double>(2 * kernels::TensorNorms::kWords);  // of which the run's is the second
    constexpr int64_t kParts = kernels::norm_chunks(kElems) * kernels::TensorNorms::kWords;
    auto partials = on.zeros<double>(3 * kParts);
    on.run_state("lamb_moments_of_runs", [&](StateExec e, Side at) {
      const kernels::AdamRun run = lamb_run(at);
      for (int64_t k = 0; k < 3; ++k) {
        e.lamb_moments_of_runs({&run, 1}, at(partials) + k * kParts);
      }
    });
    on.run_state("add_norms_of_runs", [&](StateExec e, Side at) {
      const std::vector<kernels::NormRun> runs(3, {.count = kElems, .tensor = 1});
      e.add_norms_of_runs(runs, at(partials), at(tensors));
    });
    on.run_state("doubles_to_host", [&](StateExec e, Side at) {
      e.doubles_to_host(at(tensors) + kernels::TensorNorms::kWords, norms_of(at).words);
    });
    same_norms();
    for (Twin<float>* const of : {&m, &v}) on.alike(*of, chain_of_sums<float>(8));
    auto rounded = on.zeros<f16>(kElems);
    on.run_state("lamb_step_of_runs", [&](StateExec e, Side at) {
      kernels::AdamRun run = lamb_run(at);
      run.dtype = DType::kF16;
      run.weights = at(rounded);
      e.lamb_step_of_runs({&run, 1}, at(tensors));
    });
    on.alike(master, chain_of_sums<float>(8));
    on.alike(rounded, chain_of_sums<f16>(8));

    // A share of a matrix that begins and ends within rows.
    constexpr int64_t kMatrixRows = 400, kBegin = 33, kShare = 10000;
    auto row_sums = on.array(std::vector<double>(kMatrixRows, 7.0)),
         col_sums = on.array(std::vector<double>(kCols, 7.0));
    auto row_moments = on.array(filled<float>(kMatrixRows, 0.5f)), col_moments = on.array(filled<float>(kCols, 0.25f)),
         row_factors = on.zeros<float>(kMatrixRows), col_factors = on.zeros<float>(kCols);
    const auto run = [&](Side at) { return kernels::MatrixRun{at(grad), at(clips), kBegin, kShare, kCols}; };
    const auto factors = [&](Side at) { return kernels::AdafactorFactors{at(row_factors), at(col_factors)}; };
    on.run_state("fill_doubles", [&](StateExec e, Side at) {
      e.fill_doubles(0, at(row_sums), kMatrixRows);
      e.fill_doubles(1.5, at(col_sums), kCols);
    });
    on.same(row_sums);
    on.same(col_sums);
    const auto squares = [&](Side at) { return kernels::SquaresRun{run(at), at(row_sums), at(col_sums)}; };
    const auto tensor = [&](Side at) {
      return kernels::FactoredTensor{
          .rows = {at(row_sums), at(row_moments), at(row_moments), at(row_factors), kMatrixRows, kCols},
          .cols = {at(col_sums), at(col_moments), at(col_moments), at(col_factors), kCols, kMatrixRows}};
    };
    on.run_state("adafactor_squares_of_runs", [&](StateExec e, Side at) {
      const auto of = squares(at);
      e.adafactor_squares_of_runs({&of, 1});
    });
    on.run_state("adafactor_factors_of_tensors", [&](StateExec e, Side at) {
      const auto of = tensor(at);
      e.adafactor_factors_of_tensors({0.75, at(clips)}, {&of, 1});
    });
    for (Twin<float>* const of : {&row_moments, &col_moments, &row_factors, &col_factors}) {
      on.alike(*of, pointwise<float>());
    }
    on.run_state("adafactor_moments", [&](StateExec e, Side at) {
      e.fill_doubles(0, at(row_sums), kMatrixRows);
      e.fill_doubles(0, at(col_sums), kCols);
      const auto runs = squares(at);
      const auto of = tensor(at);
      e.adafactor_moments({0.75, at(clips)}, {&runs, 1}, {&of, 1});
    });
    for (Twin<float>* const of : {&row_moments, &col_moments, &row_factors, &col_factors}) {
      on.alike(*of, pointwise<float>());
    }
    const auto factored = [&](Side at, bool averaged) {
      kernels::StateArrays arrays{.master = at(master)};
      if (averaged) arrays.exp_avg = at(m);
      return kernels::AdafactorRun{.matrix = run(at),
                                   .factors = factors(at),
                                   .from = arrays,
                                   .to = arrays,
                                   .decay = 0.001f,
                                   .beta1 = 0.9f,
                                   .dtype = DType::kF16,
                                   .weights = at(rounded),
                                   .tensor = 1};
    };
    auto of_tensors = on.zeros<double>(2 * kernels::TensorNorms::kWords);
    on.run_state("adafactor_norms_of_runs", [&](StateExec e, Side at) {
      const kernels::AdafactorRun of = factored(at, true);
      e.adafactor_norms_of_runs({&of, 1}, at(partials));
    });
    on.run_state("add_norms_of_runs", [&](StateExec e, Side at) {
      const kernels::NormRun of{.count = kShare, .tensor = 1};
      e.add_norms_of_runs({&of, 1}, at(partials), at(of_tensors));
    });
    on.run_state("doubles_to_host", [&](StateExec e, Side at) {
      e.doubles_to_host(at(of_tensors) + kernels::TensorNorms::kWords, norms_of(at).words);
    });
    same_norms();
    auto rates = on.zeros<float>(2);
    on.run_state("adafactor_rates", [&](StateExec e, Side at) {
      const std::vector<kernels::AdafactorRate> of = {{1, 0}, {kShare, 0.01}};
      e.adafactor_rates({.update_clip = 0.5, .least_scale = 1e-3, .scale_parameter = true}, of, at(of_tensors),
                        at(rates));
    });
    on.alike(rates, chain_of_sums<float>(8));
    on.run_state("adafactor_rates_of_runs", [&](StateExec e, Side at) {
      const std::vector<kernels::AdafactorRate> tensors = {{1, 0}, {kShare, 0.02}};
      const kernels::NormRun of{.count = kShare, .tensor = 1};
      e.fill_doubles(0, at(of_tensors), 2 * kernels::TensorNorms::kWords);
      e.adafactor_rates_of_runs({.update_clip = 0.5, .least_scale = 1e-3, .scale_parameter = true}, tensors, {&of, 1},
                                at(partials), at(of_tensors), at(rates));
    });
    on.alike(rates, chain_of_sums<float>(8));
    on.run_state("adafactor_step_of_runs", [&](StateExec e, Side at) {
      for (const bool averaged : {true, false}) {
        const kernels::AdafactorRun of = factored(at, averaged);
        e.adafactor_step_of_runs({&of, 1}, at(rates));
      }
    });
    on.alike(master, chain_of_sums<float>(8));
    on.alike(m, chain_of_sums<float>(8));
    on.alike(rounded, chain_of_sums<f16>(8));

    auto choices = on.array(std::vector<float>{1, 2, 3}), bias = on.array(std::vector<float>{0.5f, 0.5f, 0.5f});
    on.run_state("balance_bias",
                 [&](StateExec e, Side at) { e.balance_bias(0.125f, 2, nullptr, at(choices), at(bias), at(bias), 3); });
    on.same(bias);
    auto odd = on.array(std::vector<float>{1, NAN, INFINITY, 0, -INFINITY});
    std::vector<int64_t> host_found = {5};
    HostNumbers<int64_t> found(on.stream(), 1);
    found.room()[0] = 5;
    on.run_state("count_not_finite", [&](StateExec e, Side at) {
      e.count_not_finite(at(odd), 5, at.cuda ? found.room() : std::span(host_found));
    });
    CHECK(found.read()[0] == host_found[0]);
    CHECK(host_found[0] == 8);
  }

  TEST_CASE("each name of the tables is compared above, or is one of those that are missing") {
#define RT_NAME(name) #name,
    CHECK(not_compared({RT_KERNELS_OF_T(RT_NAME) RT_KERNELS(RT_NAME) "attention_backward"}) ==
          std::vector<std::string>{});
    CHECK(not_compared({RT_STATE_KERNELS(RT_NAME)}) == std::vector<std::string>{});
#undef RT_NAME
    for (const std::string_view name : cuda::missing_ops()) {
      CAPTURE(std::string(name));
      CHECK(compared().count(std::string(name)) == 0);
    }
  }

  TEST_CASE("no table has a hole, and a missing kernel fails its stream by name, as do missing ways of others") {
    const auto refused = [](const std::function<void(cuda::CudaStream&)>& body) {
      DeviceOfTests device;
      auto context = device.open();
      auto stream = cuda::CudaStream::make(context);
      cuda::serve_ops();
      body(*stream);
      const Status settled = stream->settle();
      REQUIRE_FALSE(settled.ok());
      CHECK(settled.error().code == ErrorCode::kUnsupported);
      return settled.error().message;
    };
    const auto words = [](std::string_view what) {
      return "cuda:0: CUDA has no " + std::string(what) + " yet; use device \"cpu\"";
    };
    const auto& ops = cuda::ops<float>();
#define RT_CHECK_THERE(name) CHECK_MESSAGE(static_cast<bool>(ops.name != nullptr), #name);
    RT_KERNELS_OF_T(RT_CHECK_THERE)
    RT_KERNELS(RT_CHECK_THERE)
    RT_CHECK_THERE(attention_backward)
#undef RT_CHECK_THERE
    const auto& state = cuda::state_ops();
#define RT_CHECK_THERE(name) CHECK_MESSAGE(static_cast<bool>(state.name != nullptr), #name);
    RT_STATE_KERNELS(RT_CHECK_THERE)
#undef RT_CHECK_THERE
    CHECK(refused([&](cuda::CudaStream& on) {
            kernels::MatmulArgs of;
            of.parts = 2;
            ops.matmul(on, of);
          }) == words("products whose sums are cut into parts or stretches"));
    CHECK(refused([&](cuda::CudaStream& on) {
            ops.attention_forward(on, {.head_dim = 264}, nullptr, nullptr, nullptr, nullptr, nullptr);
          }) == words("attention of heads wider than 256 channels"));
    CHECK(refused([&](cuda::CudaStream& on) {
            kernels::AttentionDims of{.head_dim = 64};
            of.held.parts = 2;
            ops.attention_backward(on, of, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                   nullptr, nullptr);
          }) == words("attention whose sums over tokens are cut into parts"));
    CHECK(refused([&](cuda::CudaStream& on) {
            ops.route_forward(on, {.experts = 4096}, nullptr, nullptr, nullptr, nullptr);
          }) == words("routers of more than 2048 experts"));
  }
}
