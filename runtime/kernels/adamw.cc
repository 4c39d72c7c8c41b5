#include "runtime/kernels/adamw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>
#if defined(__x86_64__) && defined(__GNUC__)
#define RT_HAS_AVX512 1
// g++ 12's header starts undefined vectors with themselves, and its own warnings find that (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

#include "runtime/core/check.h"
#include "runtime/core/word_sums.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"
#include "runtime/kernels/state_copies.h"

namespace cairn::kernels {
namespace {

struct Coefficients {
  float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2;
  float decay;           // 1 - lr * weight_decay
  float step_size;       // lr / (1 - beta1^t)
  float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^t)
  float eps;
};

/// StateArrays, as a rule of three arrays takes them.
struct Run {
  explicit Run(const StateArrays& of)
      : master(of.master.address()), exp_avg(of.exp_avg.address()), exp_avg_sq(of.exp_avg_sq.address()) {}
  float *master, *exp_avg, *exp_avg_sq;
};

struct Task {
  Coefficients k;
  const float* grad;
  Run from, to;
  float* weight;
  bf16* weight_low;
  bool stream, summed, portable;
};

// --- any processor ---------------------------------------------------------------------------------------------------

constexpr int64_t kBlockElems = 512;  // four arrays in, three out, together in the first-level cache

/// Inputs and outputs may be the same arrays: element i of all outputs depends on element i of the inputs alone.
RT_INLINE void adamw_block_body(Coefficients k, const float* grad, const float* master, const float* exp_avg,
                                const float* exp_avg_sq, float* master_out, float* exp_avg_out, float* exp_avg_sq_out,
                                int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * k.grad_scale;
    const float m = k.beta1 * exp_avg[i] + k.one_minus_beta1 * g;
    const float v = k.beta2 * exp_avg_sq[i] + k.one_minus_beta2 * g * g;
    exp_avg_out[i] = m;
    exp_avg_sq_out[i] = v;
    master_out[i] = k.decay * master[i] - k.step_size * m / (std::sqrt(v) * k.inv_sqrt_bias2 + k.eps);
  }
}
RT_CLONES(adamw_block)

RT_INLINE void round_block_body(const float* from, bf16* to, int64_t n) { store_block(from, to, n); }
RT_CLONES(round_block)

/// Elements [begin, end) of the task, through the caches; adds to the sums.
void adamw_range(const Task& t, int64_t begin, int64_t end, uint64_t* sums) {
  for (int64_t i = begin; i < end; i += kBlockElems) {
    const int64_t n = std::min(kBlockElems, end - i);
    float* const out[3] = {t.to.master + i, t.to.exp_avg + i, t.to.exp_avg_sq + i};
    adamw_block(t.k, t.grad + i, t.from.master + i, t.from.exp_avg + i, t.from.exp_avg_sq + i, out[0], out[1], out[2],
                n);
    for (int a = 0; t.summed && a < 3; ++a)
      sums[a] = add_word_sums(sums[a], word_sums(reinterpret_cast<const std::byte*>(out[a]), n, i));
    if (t.weight_low != nullptr) round_block(out[0], t.weight_low + i, n);
    if (t.weight != nullptr) std::memcpy(t.weight + i, out[0], n * sizeof(float));
  }
}

// --- AVX-512 ---------------------------------------------------------------------------------------------------------
// By hand for the streaming stores: they must leave from registers, line by line in the order of the loads. Going
// through a block in the cache first costs a quarter more time.
#ifdef RT_HAS_AVX512
#define RT_AVX512 __attribute__((target("avx512f")))

bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") != 0;
  return has;
}

/// As store_f32(bf16*).
RT_AVX512 RT_INLINE __m256i to_bf16_bits(__m512 x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i high = _mm512_srli_epi32(u, 16);
  const __m512i lsb = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)));
}

RT_AVX512 inline bool on_line(const void* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

struct Constants {
  __m512 scale, beta1, beta2, rest1, rest2, decay, step, bias2, eps;
};

/// Word sums lane by lane, by additions alone: after J vectors of one array, low is the sum of its x_j and high that of
/// (J - j) x_j.
struct LaneSums {
  __m512i low[3], high[3];
};

template <bool kWhole>
RT_AVX512 RT_INLINE __m512 load_vector(const float* from, __mmask16 mask) {
  return kWhole ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(mask, from);
}

template <bool kWhole>
RT_AVX512 RT_INLINE void store_vector(float* to, __m512 x, __mmask16 mask, bool past_caches) {
  if (!kWhole) {
    _mm512_mask_storeu_ps(to, mask, x);
  } else if (past_caches) {
    _mm512_stream_ps(to, x);
  } else {
    _mm512_storeu_ps(to, x);
  }
}

/// One vector of elements from `i` on, of which `mask` counts. kWeight: 0 none, 1 float, 2 bf16.
template <bool kWhole, bool kSummed, int kWeight>
RT_AVX512 RT_INLINE void update_vector(const Task& t, const Constants& c, int64_t i, __mmask16 mask, bool state_past,
                                       bool weight_past, LaneSums& lanes) {
  const __m512 g = _mm512_mul_ps(load_vector<kWhole>(t.grad + i, mask), c.scale);
  const __m512 m = _mm512_fmadd_ps(c.beta1, load_vector<kWhole>(t.from.exp_avg + i, mask), _mm512_mul_ps(c.rest1, g));
  const __m512 v = _mm512_fmadd_ps(c.beta2, load_vector<kWhole>(t.from.exp_avg_sq + i, mask),
                                   _mm512_mul_ps(_mm512_mul_ps(c.rest2, g), g));
  const __m512 scaled = _mm512_div_ps(_mm512_mul_ps(c.step, m), _mm512_fmadd_ps(_mm512_sqrt_ps(v), c.bias2, c.eps));
  const __m512 w = _mm512_fmsub_ps(c.decay, load_vector<kWhole>(t.from.master + i, mask), scaled);
  store_vector<kWhole>(t.to.exp_avg + i, m, mask, state_past);
  store_vector<kWhole>(t.to.exp_avg_sq + i, v, mask, state_past);
  store_vector<kWhole>(t.to.master + i, w, mask, state_past);
  if constexpr (kWeight == 1) store_vector<kWhole>(t.weight + i, w, mask, weight_past);
  if constexpr (kWeight == 2) {
    const __m256i bits = to_bf16_bits(w);
    if constexpr (kWhole) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(t.weight_low + i), bits);
    } else {
      alignas(32) uint16_t tail[16];
      _mm256_store_si256(reinterpret_cast<__m256i*>(tail), bits);
      for (int64_t j = 0; mask >> j & 1; ++j) t.weight_low[i + j].bits = tail[j];
    }
  }
  if constexpr (kSummed) {
    const __m512 made[3] = {w, m, v};
    for (int a = 0; a < 3; ++a) {
      __m512i words = _mm512_castps_si512(made[a]);
      if constexpr (!kWhole) words = _mm512_maskz_mov_epi32(mask, words);
      lanes.low[a] = _mm512_add_epi32(lanes.low[a], words);
      lanes.high[a] = _mm512_add_epi32(lanes.high[a], lanes.low[a]);
    }
  }
}

template <bool kSummed, int kWeight>
RT_AVX512 void adamw_range_avx512(const Task& t, int64_t begin, int64_t end, uint64_t* sums) {
  const Coefficients& k = t.k;
  const Constants c{_mm512_set1_ps(k.grad_scale),      _mm512_set1_ps(k.beta1),           _mm512_set1_ps(k.beta2),
                    _mm512_set1_ps(k.one_minus_beta1), _mm512_set1_ps(k.one_minus_beta2), _mm512_set1_ps(k.decay),
                    _mm512_set1_ps(k.step_size),       _mm512_set1_ps(k.inv_sqrt_bias2),  _mm512_set1_ps(k.eps)};
  const bool state_past =
      t.stream && on_line(t.to.master + begin) && on_line(t.to.exp_avg + begin) && on_line(t.to.exp_avg_sq + begin);
  const bool weight_past = kWeight == 1 && t.stream && on_line(t.weight + begin);
  LaneSums lanes{};
  const int64_t whole = begin + (end - begin) / 16 * 16;
  if (state_past && (weight_past || kWeight != 1)) {
    for (int64_t i = begin; i < whole; i += 16)
      update_vector<true, kSummed, kWeight>(t, c, i, 0xffff, true, true, lanes);
  } else if (!t.stream) {
    for (int64_t i = begin; i < whole; i += 16)
      update_vector<true, kSummed, kWeight>(t, c, i, 0xffff, false, false, lanes);
  } else {
    for (int64_t i = begin; i < whole; i += 16)
      update_vector<true, kSummed, kWeight>(t, c, i, 0xffff, state_past, weight_past, lanes);
  }
  int64_t vectors = (whole - begin) / 16;
  if (whole < end) {
    const auto mask = static_cast<__mmask16>((1u << (end - whole)) - 1);
    update_vector<false, kSummed, kWeight>(t, c, whole, mask, false, false, lanes);
    ++vectors;
  }
  for (int a = 0; kSummed && a < 3; ++a) {
    alignas(64) uint32_t low[16], high[16];
    _mm512_store_si512(low, lanes.low[a]);
    _mm512_store_si512(high, lanes.high[a]);
    uint32_t plain = 0, weighted = 0;
    for (uint32_t lane = 0; lane < 16; ++lane) {
      const uint32_t by_vector = static_cast<uint32_t>(vectors) * low[lane] - high[lane];  // sum of j x_j
      plain += low[lane];
      weighted += 16 * by_vector + (static_cast<uint32_t>(begin) + lane) * low[lane];
    }
    sums[a] = add_word_sums(sums[a], static_cast<uint64_t>(weighted) << 32 | plain);
  }
  if (t.stream) _mm_sfence();  // streamed stores are ordered with nothing else
}
#endif

void run_range(const Task& t, int64_t begin, int64_t end, uint64_t* sums) {
#ifdef RT_HAS_AVX512
  if (!t.portable && has_avx512()) {
    const int weight = t.weight != nullptr ? 1 : t.weight_low != nullptr ? 2 : 0;
    const auto run = t.summed ? (weight == 0   ? adamw_range_avx512<true, 0>
                                 : weight == 1 ? adamw_range_avx512<true, 1>
                                               : adamw_range_avx512<true, 2>)
                              : (weight == 0   ? adamw_range_avx512<false, 0>
                                 : weight == 1 ? adamw_range_avx512<false, 1>
                                               : adamw_range_avx512<false, 2>);
    return run(t, begin, end, sums);
  }
#endif
  adamw_range(t, begin, end, sums);
}

}  // namespace

void adamw(const AdamwArgs& args, const float* grad, const StateArrays& from, const StateArrays& to, float* weight,
           bf16* weight_low, int64_t count, const BlockSums& sums) {
  RT_CHECK(args.step >= 1, "AdamW counts steps from 1, got {}", args.step);
  RT_CHECK(weight == nullptr || weight_low == nullptr, "weights in two types");
  const Clip& clip = *args.clip.address();
  if (clip.finite == 0) return;
  // In double: 1 - beta2^t loses most of its digits in float for the first steps.
  const double beta1 = args.beta1, beta2 = args.beta2, t = static_cast<double>(args.step);
  const Coefficients k{
      .grad_scale = clip.grad_scale,
      .beta1 = args.beta1,
      .one_minus_beta1 = static_cast<float>(1.0 - beta1),
      .beta2 = args.beta2,
      .one_minus_beta2 = static_cast<float>(1.0 - beta2),
      .decay = static_cast<float>(1.0 - static_cast<double>(args.lr) * args.weight_decay),
      .step_size = static_cast<float>(args.lr / (1.0 - std::pow(beta1, t))),
      .inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, t))),
      .eps = args.eps,
  };
  const bool in_place = from.master == to.master;
  const Task task{
      k, grad, Run(from), Run(to), weight, weight_low, args.stream && !in_place, !sums.sums.empty(), args.portable};
  uint64_t total[3] = {};
  std::mutex mutex;
  parallel_elements(count, [&](int64_t begin, int64_t end) {
    uint64_t mine[3] = {};
    run_range(task, begin, end, mine);
    if (!task.summed) return;
    const std::lock_guard lock(mutex);  // once a thread
    for (int a = 0; a < 3; ++a) total[a] = add_word_sums(total[a], mine[a]);
  });
  for (size_t a = 0; task.summed && a < 3; ++a) sums.put(a, total[a]);
}

void adamw_of_runs(std::span<const AdamRun> runs) {
  for (const AdamRun& run : runs) {
    void* const weights = run.weights.address();
    adamw(run.args, run.grad.address(), run.from, run.to,
          run.dtype == DType::kF32 ? static_cast<float*>(weights) : nullptr,
          run.dtype == DType::kBf16 ? static_cast<bf16*>(weights) : nullptr, run.count, run.sums);
    if (run.dtype == DType::kF16 && weights != nullptr)
      put_weights(run.to.master.address(), run.count, run.dtype, weights);
  }
}

}  // namespace cairn::kernels
