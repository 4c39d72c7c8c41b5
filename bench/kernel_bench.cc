// Measures the CPU kernels at the sizes of GPT-2 124M: GFLOP/s of the products, GB/s of the rest (bytes read and
// written once each, as the kernel must move them at least).
//   kernel_bench [--tiny] [--rounds=N] [--only=TEXT]
// Each line gives the median over the rounds and, in brackets, the slowest and the fastest. Run with the number of
// threads in OMP_NUM_THREADS and OMP_WAIT_POLICY=passive, as ranks run.

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/device/buffer.h"
#include "runtime/kernels/adamw.h"
#include "runtime/kernels/attention.h"
#include "runtime/kernels/cross_entropy.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/embedding.h"
#include "runtime/kernels/gemm_amx.h"
#include "runtime/kernels/gemm_kernel.h"
#include "runtime/kernels/matmul.h"
#include "runtime/kernels/norm.h"
#include "runtime/kernels/tile_gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace cairn;

namespace {

struct Options {
  bool tiny = false;
  int rounds = 7;
  std::string_view only;
};

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class Bench {
 public:
  explicit Bench(Options options) : options_(options) {}

  /// Runs `body` once unmeasured, then for the rounds. `amount` is floating-point operations or bytes of one call.
  template <typename Body>
  void run(const std::string& name, double amount, std::string_view unit, const Body& body) {
    if (name.find(options_.only) == std::string::npos) return;
    body();
    std::vector<double> rates;
    for (int round = 0; round < (options_.tiny ? 1 : options_.rounds); ++round) {
      int64_t calls = 0;
      const double start = now_s();
      double spent = 0;
      do {
        body();
        ++calls;
        spent = now_s() - start;
      } while (spent < (options_.tiny ? 0.0 : 0.02));
      rates.push_back(amount * static_cast<double>(calls) / spent * 1e-9);
    }
    std::sort(rates.begin(), rates.end());
    fmt::print("{:<58} {:8.1f} {:<8} [{:.1f} .. {:.1f}]\n", name, rates[rates.size() / 2], unit, rates.front(),
               rates.back());
    std::fflush(stdout);
  }

 private:
  Options options_;
};

template <typename T>
std::string_view name_of() {
  return dtype_name(DTypeOf<T>::value);
}

/// `count` small values that are neither zero nor denormal.
template <typename T>
class Values {
 public:
  explicit Values(int64_t count, float sigma = 1.0f) {
    Result<Buffer> buffer = Buffer::allocate(Device{}, count * static_cast<int64_t>(sizeof(T)));
    RT_CHECK(buffer.ok(), "{}", buffer.error().message);
    buffer_ = std::move(buffer).value();
    uint32_t state = 1;
    for (T& x : buffer_.as<T>()) {
      state = state * 1664525u + 1013904223u;
      const float value = sigma * (static_cast<float>(state >> 8) * 0x1p-23f - 1.0f);
      if constexpr (sizeof(T) == 4) {
        x = value;
      } else {
        x = to_bf16(value);
      }
    }
  }
  operator T*() { return buffer_.as<T>().data(); }  // NOLINT: stands for the array
  DevicePtr<T> at() { return buffer_.at<T>(); }

 private:
  Buffer buffer_;
};

template <typename AB, typename C>
void bench_matmul(Bench& bench, std::string_view what, int64_t m, int64_t k, int64_t n, bool trans_a, bool trans_b,
                  bool accumulate, int64_t parts = 0) {
  Values<AB> a(m * k), b(k * n);
  Values<C> c(m * n);
  const std::string name = fmt::format("matmul {}->{} {} {}x{}x{}{}", name_of<AB>(), name_of<C>(), what, m, k, n,
                                       parts > 0 ? fmt::format(", parts {}", parts) : "");
  bench.run(name, 2.0 * static_cast<double>(m) * static_cast<double>(k) * static_cast<double>(n), "GFLOP/s", [&] {
    kernels::matmul({.m = m,
                     .n = n,
                     .k = k,
                     .a = DevicePtr(a.at()),
                     .lda = trans_a ? m : k,
                     .trans_a = trans_a,
                     .b = DevicePtr(b.at()),
                     .ldb = trans_b ? k : n,
                     .trans_b = trans_b,
                     .c = DevicePtr(c.at()),
                     .ldc = n,
                     .ab_dtype = DTypeOf<AB>::value,
                     .c_dtype = DTypeOf<C>::value,
                     .accumulate = accumulate,
                     .parts = std::max<int64_t>(1, parts)});
  });
}

/// One linear layer [T, K] -> [T, N] with its weight stored [N, K]: forward, input gradient, weight gradient.
template <typename T>
void bench_linear(Bench& bench, std::string_view what, int64_t tokens, int64_t k, int64_t n) {
  bench_matmul<T, T>(bench, fmt::format("{} forward", what), tokens, k, n, false, true, false);
  bench_matmul<T, T>(bench, fmt::format("{} dx", what), tokens, n, k, false, false, false);
  bench_matmul<T, float>(bench, fmt::format("{} dw", what), n, tokens, k, true, false, true);
}

/// The same products with their sums in parts, next to one part: what one order for every layout costs.
template <typename T>
void bench_parts(Bench& bench, int64_t tokens, int64_t k, int64_t n) {
  for (const int64_t parts : {1, 4, 8}) {
    bench_matmul<T, T>(bench, "forward", tokens, k, n, false, true, false, parts);
    bench_matmul<T, T>(bench, "dx", tokens, n, k, false, false, false, parts);
    bench_matmul<T, float>(bench, "dw", n, tokens, k, true, false, false, parts);
  }
}

template <typename T>
void bench_products(Bench& bench, bool tiny) {
  const int64_t tokens = tiny ? 32 : 2048, width = tiny ? 64 : 768, vocabulary = tiny ? 128 : 50304;
  bench_parts<T>(bench, tokens, width, width);
  bench_parts<T>(bench, tokens, width, 4 * width);
  bench_parts<T>(bench, tokens, 4 * width, width);
  bench_linear<T>(bench, "qkv", tokens, width, 3 * width);
  bench_linear<T>(bench, "out", tokens, width, width);
  bench_linear<T>(bench, "fc", tokens, width, 4 * width);
  bench_linear<T>(bench, "proj", tokens, 4 * width, width);
  bench_linear<T>(bench, "head", tiny ? 32 : 512, width, vocabulary);
}

template <typename T>
void bench_attention(Bench& bench, int64_t batch, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim) {
  const int64_t row = (heads + 2 * kv_heads) * head_dim, out_row = heads * head_dim, rows = batch * tokens;
  const kernels::AttentionDims dims{.batch = batch,
                                    .tokens = tokens,
                                    .heads = heads,
                                    .kv_heads = kv_heads,
                                    .head_dim = head_dim,
                                    .q_stride = row,
                                    .kv_stride = row,
                                    .out_stride = out_row,
                                    .scale = 1.0f / std::sqrt(static_cast<float>(head_dim))};
  Values<T> qkv(rows * row), out(rows * out_row), dout(rows * out_row), grad(rows * row);
  Values<float> lse(batch * heads * tokens), scratch(kernels::attention_backward_scratch_elems(dims));
  const T* q = qkv;
  T* dq = grad;
  const int64_t k_at = heads * head_dim, v_at = k_at + kv_heads * head_dim;
  // the pairs a causal query sees, two products each
  const double flop = 4.0 * static_cast<double>(batch * heads * tokens * (tokens + 1) / 2 * head_dim);
  const std::string shape =
      fmt::format("{} B{} S{} N{} K{} D{}", name_of<T>(), batch, tokens, heads, kv_heads, head_dim);
  bench.run("attention forward " + shape, flop, "GFLOP/s",
            [&] { kernels::attention_forward<T>(dims, q, q + k_at, q + v_at, out, lse); });
  bench.run("attention backward " + shape, 2.5 * flop, "GFLOP/s", [&] {
    kernels::attention_backward<T>(dims, q, q + k_at, q + v_at, out, lse, dout, dq, dq + k_at, dq + v_at, scratch);
  });
}

template <typename T>
void bench_decode(Bench& bench, int64_t tokens, int64_t heads, int64_t head_dim) {
  const int64_t row = heads * head_dim;
  const kernels::AttentionDims dims{
      .batch = 1, .tokens = tokens, .heads = heads, .kv_heads = heads, .head_dim = head_dim, .scale = 0.125f};
  Values<T> q(row), k(tokens * row), v(tokens * row), out(row);
  bench.run(fmt::format("attention decode {} of {} keys", name_of<T>(), tokens),
            2.0 * static_cast<double>(tokens * row) * sizeof(T), "GB/s",
            [&] { kernels::attention_decode<T>(dims, tokens - 1, tokens, q, k, v, out); });
}

template <typename T>
void bench_maps(Bench& bench, bool tiny) {
  const int64_t rows = tiny ? 16 : 2048, width = tiny ? 64 : 768, ffn = 4 * width;
  const int64_t vocabulary = tiny ? 100 : 50257, padded = tiny ? 128 : 50304, head_rows = tiny ? 4 : 256;
  const std::string t(name_of<T>());
  const double bytes = static_cast<double>(rows * width) * sizeof(T);
  Values<T> x(rows * ffn), y(rows * ffn), z(rows * ffn), w(ffn), b(ffn);
  Values<float> mean(rows), rstd(rows), dw(ffn), db(ffn);
  bench.run("add " + t, 3 * bytes, "GB/s", [&] { kernels::add<T>(x, y, z, rows * width); });
  bench.run("add_bias " + t, 8 * bytes, "GB/s", [&] { kernels::add_bias<T>(z, b, rows, ffn); });
  bench.run("bias_backward " + t, 4 * bytes, "GB/s", [&] { kernels::bias_backward<T>(x, db, rows, ffn); });
  bench.run("gelu_tanh forward " + t, 8 * bytes, "GB/s", [&] { kernels::gelu_tanh_forward<T>(x, y, rows * ffn); });
  bench.run("gelu_tanh backward " + t, 12 * bytes, "GB/s",
            [&] { kernels::gelu_tanh_backward<T>(y, x, z, rows * ffn); });
  bench.run("gelu_erf forward " + t, 8 * bytes, "GB/s", [&] { kernels::gelu_erf_forward<T>(x, y, rows * ffn); });
  bench.run("gelu_erf backward " + t, 12 * bytes, "GB/s", [&] { kernels::gelu_erf_backward<T>(y, x, z, rows * ffn); });
  bench.run("relu forward " + t, 8 * bytes, "GB/s", [&] { kernels::relu_forward<T>(x, y, rows * ffn); });
  bench.run("swiglu forward " + t, 6 * bytes, "GB/s",
            [&] { kernels::gated_forward<T>(kernels::Gate::kSilu, x, y, rows, ffn / 2); });
  bench.run("swiglu backward " + t, 10 * bytes, "GB/s",
            [&] { kernels::gated_backward<T>(kernels::Gate::kSilu, y, x, z, rows, ffn / 2); });
  const kernels::NormRows norm{rows, width, 1e-5f};
  const kernels::NormGradients to{dw.at(), db.at()};
  bench.run("layer_norm forward " + t, 2 * bytes, "GB/s",
            [&] { kernels::layer_norm_forward<T>(norm, x, w, b, y, mean, rstd); });
  bench.run("layer_norm backward " + t, 3 * bytes, "GB/s",
            [&] { kernels::layer_norm_backward<T>(norm, y, x, w, mean, rstd, z, to); });
  bench.run("rms_norm forward " + t, 2 * bytes, "GB/s", [&] { kernels::rms_norm_forward<T>(norm, x, w, y, rstd); });
  bench.run("rms_norm backward " + t, 3 * bytes, "GB/s",
            [&] { kernels::rms_norm_backward<T>(norm, y, x, w, rstd, z, to); });
  Values<float> table(rows / 4 * 64);
  std::vector<float> frequencies(32);
  for (size_t i = 0; i < frequencies.size(); ++i) frequencies[i] = std::pow(10000.0f, -static_cast<float>(i) / 32);
  kernels::rotary_table(table, 0, rows / 4, frequencies, 1);
  const kernels::RotaryDims rotary{
      .rows = rows, .tokens = rows / 4, .heads = width / 64, .head_dim = 64, .stride = width, .turning = 64};
  bench.run("rotary " + t, 2 * bytes, "GB/s", [&] { kernels::rotary<T>(rotary, x, table, false); });

  Values<T> logits(head_rows * padded);
  std::vector<int32_t> ids(static_cast<size_t>(std::max(rows, head_rows)));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 7919 % static_cast<size_t>(vocabulary));
  Values<float> max(head_rows), sum(head_rows), target(head_rows), scale(head_rows);
  const double head_bytes = static_cast<double>(head_rows * padded) * sizeof(T);
  const kernels::LogitRows head{head_rows, padded, vocabulary, 0, DevicePtr<const int32_t>(ids.data())};
  bench.run("row_sums " + t, head_bytes, "GB/s", [&] { kernels::row_sums<T>(head, logits, max, sum, target); });
  bench.run("cross_entropy_backward " + t, 2 * head_bytes, "GB/s",
            [&] { kernels::cross_entropy_backward<T>(head, logits, max, sum, scale); });
  Values<T> embedding(vocabulary * width);
  Values<float> dembedding(vocabulary * width);
  bench.run("embedding forward " + t, 2 * bytes, "GB/s", [&] {
    kernels::embedding_forward<T>(ids.data(), rows, {0, vocabulary, width}, embedding, x);
  });
  bench.run("embedding backward " + t, bytes + 2.0 * static_cast<double>(rows * width) * 4, "GB/s", [&] {
    kernels::embedding_backward<T>(ids.data(), rows, {0, vocabulary, width}, x, dembedding);
  });
}

void bench_optimizer(Bench& bench, bool tiny) {
  const int64_t count = tiny ? 1000 : 16 << 20;
  Values<float> grad(count), master(count), m(count), v(count);
  for (int64_t i = 0; i < count; ++i) v[i] = std::abs(v[i]);
  Values<bf16> weight(count);
  Values<float> other_master(count), other_m(count), other_v(count), float_weight(count);
  const auto arrays = [](float* w, float* avg, float* avg_sq) {
    return kernels::StateArrays{DevicePtr(w), DevicePtr(avg), DevicePtr(avg_sq), nullptr};
  };
  const kernels::StateArrays state = arrays(master, m, v), other = arrays(other_master, other_m, other_v);
  const kernels::Clip clip;
  kernels::AdamwArgs args{
      .lr = 1e-4f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .clip = DevicePtr(&clip)};
  const double bytes = static_cast<double>(count) * 4;
  bench.run("adamw f32", 7 * bytes, "GB/s", [&] { kernels::adamw(args, grad, state, state, nullptr, nullptr, count); });
  // Into other memory: as many bytes as in place when streamed, three arrays more when not.
  args.stream = true;
  bench.run("adamw f32 into another bank, streamed", 7 * bytes, "GB/s",
            [&] { kernels::adamw(args, grad, state, other, nullptr, nullptr, count); });
  uint64_t sums[3] = {};
  bench.run("adamw f32 into another bank, streamed, with checksums", 7 * bytes, "GB/s",
            [&] { kernels::adamw(args, grad, state, other, nullptr, nullptr, count, {sums}); });
  bench.run("adamw f32 into another bank, streamed, with checksums and float weight", 8 * bytes, "GB/s",
            [&] { kernels::adamw(args, grad, state, other, float_weight, nullptr, count, {sums}); });
  args.stream = false;
  bench.run("adamw f32 into another bank, through the caches", 7 * bytes, "GB/s",
            [&] { kernels::adamw(args, grad, state, other, nullptr, nullptr, count); });
  bench.run("adamw f32 and bf16 weight", 7.5 * bytes, "GB/s",
            [&] { kernels::adamw(args, grad, state, state, nullptr, weight, count); });
  bench.run("add_squares", bytes, "GB/s", [&] {
    ExactSum exact;
    kernels::add_squares(grad, count, exact);
    const volatile double sum = exact.value();
    (void)sum;
  });
  bench.run("add_to", 3 * bytes, "GB/s", [&] { kernels::add_to(m, grad, count); });
  bench.run("cast f32 -> bf16", 1.5 * bytes, "GB/s", [&] { kernels::cast(grad, weight, count); });
  bench.run("cast bf16 -> f32", 1.5 * bytes, "GB/s", [&] { kernels::cast(weight, m, count); });
  bench.run("memcpy (one thread, to compare)", 2 * bytes, "GB/s",
            [&] { std::memcpy(static_cast<float*>(m), static_cast<float*>(grad), static_cast<size_t>(count) * 4); });
}

/// What one thread reaches on float multiply-adds with operands in the first-level cache.
void bench_tiles(Bench& bench) {
  Values<float> a(60 * 64), b(64 * 64), c(60 * 64);
  bench.run("tile_gemm f32 60x64x64 (the level for attention)", 2.0 * 60 * 64 * 64, "GFLOP/s", [&] {
    kernels::tile_gemm(
        {.m = 60, .n = 64, .k = 64, .a = a, .a_row = 64, .a_col = 1, .b = b, .b_row = 64, .c = c, .c_row = 64});
  });
}

#if defined(__x86_64__)
// What is left in registers may be denormal numbers, which some processors multiply many times as slowly.
#define RT_PEAK_LOOP(INSTRUCTION)                                                                                   \
  const uint32_t one = 0x3f803f80; /* as a float, and as two bf16 */                                                \
  asm volatile("vpbroadcastd %1,%%zmm30\nvpbroadcastd %1,%%zmm31\n" RT_TEN("vpxord", "")                            \
                   RT_TEN("vpxord", "1") "1:\n" INSTRUCTION "dec %0\njnz 1b\n"                                      \
               : "+r"(turns)                                                                                        \
               : "r"(one)                                                                                           \
               : "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11",  \
                 "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", \
                 "zmm23", "zmm30", "zmm31")
#define RT_TEN(OP, T)                                                                                            \
  OP " %%zmm30,%%zmm31,%%zmm" T "0\n" OP " %%zmm30,%%zmm31,%%zmm" T "1\n" OP " %%zmm30,%%zmm31,%%zmm" T "2\n" OP \
     " %%zmm30,%%zmm31,%%zmm" T "3\n" OP " %%zmm30,%%zmm31,%%zmm" T "4\n" OP " %%zmm30,%%zmm31,%%zmm" T "5\n" OP \
     " %%zmm30,%%zmm31,%%zmm" T "6\n" OP " %%zmm30,%%zmm31,%%zmm" T "7\n" OP " %%zmm30,%%zmm31,%%zmm" T "8\n" OP \
     " %%zmm30,%%zmm31,%%zmm" T "9\n"

/// 20 independent multiply-adds of registers a turn.
__attribute__((target("avx512f"), noinline)) void peak_bf16(int64_t turns) {
  RT_PEAK_LOOP(RT_TEN("vdpbf16ps", "") RT_TEN("vdpbf16ps", "1"));
}
__attribute__((target("avx512f"), noinline)) void peak_f32(int64_t turns) {
  RT_PEAK_LOOP(RT_TEN("vfmadd231ps", "") RT_TEN("vfmadd231ps", "1"));
}

/// Four products of register tiles a turn.
__attribute__((target("amx-tile,amx-bf16"), noinline)) void peak_amx(int64_t turns) {
  const kernels::AmxTiles registers(true);
  for (int64_t turn = 0; turn < turns; ++turn) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

/// The most that the processor's multiply-adds yield: what the products above are a share of.
void bench_peak(Bench& bench) {
  constexpr int64_t kTurns = 200'000, kInstructions = 20;
  const int64_t threads = omp_get_max_threads();
  const auto on_all = [&](void (*loop)(int64_t)) {
#pragma omp parallel
    loop(kTurns);
  };
  const auto instructions = static_cast<double>(threads * kTurns * kInstructions);
  if (kernels::gemm_isa_runs(kernels::GemmIsa::kAmx)) {
    constexpr double kTileFlops = 2 * 16 * 16 * 32;
    bench.run("peak bf16 (tdpbf16ps in registers)", kTileFlops * 4 * static_cast<double>(threads * kTurns), "GFLOP/s",
              [&] { on_all(peak_amx); });
  }
  if (kernels::gemm_isa_runs(kernels::GemmIsa::kAvx512Bf16)) {
    bench.run("peak bf16 (vdpbf16ps in registers)", 64 * instructions, "GFLOP/s", [&] { on_all(peak_bf16); });
  }
  if (kernels::gemm_isa_runs(kernels::GemmIsa::kAvx512)) {
    bench.run("peak f32 (vfmadd231ps in registers)", 32 * instructions, "GFLOP/s", [&] { on_all(peak_f32); });
  }
}
#else
void bench_peak(Bench&) {}
#endif

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

bool parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg == "--tiny") {
      options->tiny = true;
    } else if (arg.starts_with("--only=")) {
      options->only = arg.substr(7);
    } else if (arg.starts_with("--rounds=")) {
      const auto [end, error] = std::from_chars(arg.data() + 9, arg.data() + arg.size(), options->rounds);
      if (error != std::errc() || end != arg.data() + arg.size() || options->rounds < 1) {
        fmt::print(stderr, "kernel_bench: {}: rounds must be a whole number from 1\n", arg);
        return false;
      }
    } else {
      fmt::print(stderr, "kernel_bench: {}: not an option\nusage: kernel_bench [--tiny] [--rounds=N] [--only=TEXT]\n",
                 arg);
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, &options)) return 2;
  fmt::print("cpu {}; threads {}; build {}\n", cpu_model(), omp_get_max_threads(), CAIRN_BUILD_TYPE);
#ifndef NDEBUG
  fmt::print("warning: this build is not optimised; its numbers say nothing\n");
#endif
  Bench bench(options);
  bench_peak(bench);
  bench_tiles(bench);
  bench_products<float>(bench, options.tiny);
  bench_products<bf16>(bench, options.tiny);
  const int64_t batch = options.tiny ? 1 : 2, tokens = options.tiny ? 70 : 512;
  bench_attention<float>(bench, batch, tokens, 12, 12, 64);
  bench_attention<bf16>(bench, batch, tokens, 12, 12, 64);
  bench_attention<bf16>(bench, 1, options.tiny ? 70 : 2048, 8, 2, 128);
  bench_decode<float>(bench, tokens, 12, 64);
  bench_decode<bf16>(bench, tokens, 12, 64);
  bench_maps<float>(bench, options.tiny);
  bench_maps<bf16>(bench, options.tiny);
  bench_optimizer(bench, options.tiny);
  return 0;
}
