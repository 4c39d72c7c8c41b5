#include "runtime/cuda/attention_ways.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "runtime/core/dtype.h"
#include "runtime/core/random.h"
#include "runtime/cuda/time_calls.h"

namespace cairn::cuda {
namespace {

/// Rows of numbers on the device.
struct Rows {
  std::byte* first = nullptr;
  int64_t rows = 0, width = 0, stride = 0;  // elements
  DType dtype = DType::kF32;

  int64_t bytes() const { return ((rows - 1) * stride + width) * dtype_size_bytes(dtype); }
};

Rows rows_of(const AttentionShape& of, const void* array, int64_t heads, int64_t stride) {
  return {.first = static_cast<std::byte*>(const_cast<void*>(array)),
          .rows = of.samples * of.tokens,
          .width = heads * of.head_dim,
          .stride = stride,
          .dtype = of.dtype};
}

std::vector<Rows> inputs_of(const AttentionShape& of, const AttentionArrays& all) {
  std::vector<Rows> out = {rows_of(of, all.q, of.heads, of.q_stride), rows_of(of, all.k, of.kv_heads, of.kv_stride),
                           rows_of(of, all.v, of.kv_heads, of.kv_stride)};
  if (all.dout != nullptr) out.push_back(rows_of(of, all.dout, of.heads, of.out_stride));
  return out;
}

/// Results of the first `samples` samples.
std::vector<Rows> outputs_of(const AttentionKind& kind, const AttentionArrays& all, int64_t samples) {
  AttentionShape of = kind.shape;
  of.samples = samples;
  if (kind.pass == AttentionPass::kBackward) {
    return {rows_of(of, all.dq, of.heads, of.q_stride), rows_of(of, all.dk, of.kv_heads, of.kv_stride),
            rows_of(of, all.dv, of.kv_heads, of.kv_stride)};
  }
  return {rows_of(of, all.out, of.heads, of.out_stride),
          {.first = reinterpret_cast<std::byte*>(all.logsumexp),
           .rows = 1,
           .width = of.samples * of.heads * of.tokens,
           .stride = 0,
           .dtype = DType::kF32}};
}

/// Numbers like those of a model, other ones in each of the arrays.
Status draw(CudaStream& on, const Rows& to, uint64_t key) {
  constexpr int64_t kMost = (int64_t{1} << 19) - 1;  // drawn; they come again behind these
  const int64_t count = to.bytes() / dtype_size_bytes(to.dtype), drawn = std::min(count, kMost);
  std::vector<uint16_t> numbers(static_cast<size_t>(drawn));
  for (int64_t i = 0; i < drawn; ++i) {
    const float x = normal_at(key, static_cast<uint64_t>(i));
    numbers[static_cast<size_t>(i)] = to.dtype == DType::kBf16 ? to_bf16(x).bits : to_f16(x).bits;
  }
  constexpr int64_t kElem = sizeof(uint16_t);
  for (int64_t at = 0; at < count; at += drawn) {
    on.copy(to.first + at * kElem, numbers.data(), std::min(drawn, count - at) * kElem, kToDevice);
  }
  return on.settle();
}

Result<std::vector<float>> numbers_of(CudaStream& on, const Rows& from) {
  std::vector<std::byte> bytes(static_cast<size_t>(from.bytes()));
  on.copy(bytes.data(), from.first, from.bytes(), kToHost);
  RT_TRY(on.settle());
  std::vector<float> out;
  out.reserve(static_cast<size_t>(from.rows * from.width));
  const auto add = [&]<typename T>(T) {
    for (int64_t row = 0; row < from.rows; ++row) {
      for (int64_t i = 0; i < from.width; ++i) {
        T x{};
        std::memcpy(&x, bytes.data() + (row * from.stride + i) * static_cast<int64_t>(sizeof(T)), sizeof(T));
        out.push_back(to_f32(x));
      }
    }
  };
  if (from.dtype == DType::kF32) {
    add(float());
  } else {
    from.dtype == DType::kBf16 ? add(bf16()) : add(f16());
  }
  return out;
}

/// How far `found` is from `wanted`, as a share of the length of `wanted` as a vector.
double difference(const std::vector<float>& found, const std::vector<float>& wanted) {
  double apart = 0, length = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double by = static_cast<double>(found[i]) - static_cast<double>(wanted[i]);
    apart += by * by;
    length += static_cast<double>(wanted[i]) * static_cast<double>(wanted[i]);
  }
  return std::sqrt(apart / std::max(length, 1e-30));
}

// Kernels round scores and results to 8 bits at the least: a difference of 1 %. A logarithm to base 2 would be one of
// 44 %, another mask or scale more.
constexpr double kMostDifference = 0.05;

using Numbers = std::vector<std::vector<float>>;

Result<Numbers> results_of(CudaStream& on, const AttentionKind& kind, const AttentionArrays& arrays) {
  Numbers out;
  for (const Rows& rows : outputs_of(kind, arrays, 1)) {
    RT_TRY_SET(out.emplace_back(), numbers_of(on, rows));
  }
  return out;
}

Result<bool> repeats(const AttentionKind& kind, const AttentionCall& call, AttentionBy by, const AttentionTiming& how) {
  if (!how.sum) return true;
  std::vector<uint64_t> first;
  for (int64_t run = 0; run < std::max<int64_t>(2, how.runs); ++run) {
    RT_TRY(call.order(by));
    std::vector<uint64_t> sums;
    for (const Rows& rows : outputs_of(kind, call.arrays, kind.shape.samples)) {
      RT_TRY_SET(sums.emplace_back(), how.sum(rows.first, rows.bytes()));
    }
    if (run == 0) first = sums;
    if (sums != first) return false;
  }
  return true;
}

}  // namespace

const char* by_word(AttentionBy by) {
  switch (by) {
    case AttentionBy::kOwn:
      return "own";
    case AttentionBy::kWarpgroup:
      return "warpgroup";
    case AttentionBy::kCudnn:
      break;
  }
  return "cudnn";
}

void AttentionWays::allow(std::span<const AttentionShape> shapes) {
  for (const AttentionShape& of : shapes) {
    const bool by_library = plans_ != nullptr && why_not_by_cudnn(of).empty();
    if (by_library || (times_warpgroups_ && dtype_size_bytes(of.dtype) == 2)) allowed_.insert(of);
  }
}

std::optional<AttentionBy> AttentionWays::by(const AttentionKind& kind) const {
  const auto found = chosen_.find(kind);
  return found == chosen_.end() ? std::nullopt : std::optional(found->second);
}

std::vector<AttentionKind> AttentionWays::unchosen() const {
  std::vector<AttentionKind> out;
  for (const auto& [kind, call] : calls_) out.push_back(kind);
  return out;
}

Status AttentionWays::use(const AttentionKind& kind, AttentionBy by) {
  if (by == AttentionBy::kCudnn) {
    const std::string why = plans_ == nullptr ? "cuDNN is missing" : plans_->prepare(kind.shape, kind.pass);
    if (!why.empty()) {
      return Error{ErrorCode::kUnsupported,
                   fmt::format("attention of {}, {}, was chosen to be by cuDNN, which has no plan of it here: {}; "
                               "--attention own takes Cairn's kernels, whose bits are other ones",
                               attention_text(kind.shape), pass_word(kind.pass), why)};
    }
  }
  chosen_.insert_or_assign(kind, by);
  calls_.erase(kind);
  return {};
}

Result<TimedAttention> AttentionWays::time(CudaStream& on, const AttentionKind& kind, const AttentionTiming& how) {
  const std::string name = fmt::format("attention of {}, {}", attention_text(kind.shape), pass_word(kind.pass));
  const auto found = calls_.find(kind);
  if (found == calls_.end()) return Error{ErrorCode::kInternal, name + ": it was not asked for"};
  const AttentionCall& call = found->second;
  const auto leave_out = [&](AttentionBy by, const std::string& why) {
    spdlog::info("{}: \"{}\" is left out: {}", name, by_word(by), why);
  };
  std::vector<AttentionBy> others;
  if (times_warpgroups_ && call.warpgroups) others.push_back(AttentionBy::kWarpgroup);
  if (plans_ != nullptr) {
    const std::string& why = plans_->prepare(kind.shape, kind.pass);
    if (why.empty()) {
      others.push_back(AttentionBy::kCudnn);
    } else {
      leave_out(AttentionBy::kCudnn, why);
    }
  }
  TimedAttention out;
  if (others.empty()) return out;

  uint64_t key = 0;
  for (const Rows& rows : inputs_of(kind.shape, call.arrays)) RT_TRY(draw(on, rows, ++key));
  if (call.order_forward_by_own) RT_TRY(call.order_forward_by_own());
  RT_TRY(call.order(AttentionBy::kOwn));
  RT_TRY_SET(const Numbers wanted, results_of(on, kind, call.arrays));
  RT_TRY_SET(const double own_us, time_us(on, [&] { return call.order(AttentionBy::kOwn); }));
  out.us.emplace_back(AttentionBy::kOwn, own_us);
  double best = (1 - kWorthwhile) * own_us;
  for (const AttentionBy by : others) {
    const Status ordered = call.order(by);
    RT_TRY(on.settle());
    if (!ordered.ok()) {
      leave_out(by, ordered.error().message);
      continue;
    }
    RT_TRY_SET(const Numbers results, results_of(on, kind, call.arrays));
    double apart = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double one = difference(results[i], wanted[i]);
      if (!(one <= apart)) apart = one;  // NaN stays
      if (std::isnan(apart)) break;
    }
    if (!(apart <= kMostDifference)) {
      leave_out(by, fmt::format("its results differ from Cairn's own by {:.3g} of their size, {} may be", apart,
                                kMostDifference));
      continue;
    }
    RT_TRY_SET(const bool same, repeats(kind, call, by, how));
    if (!same) {
      leave_out(by, "its bits do not repeat");
      continue;
    }
    RT_TRY_SET(const double us, time_us(on, [&] { return call.order(by); }));
    out.us.emplace_back(by, us);
    if (us >= best) continue;
    best = us;
    out.by = by;
  }
  RT_TRY(call.order(AttentionBy::kOwn));  // what follows reads these results
  RT_TRY(on.settle());
  return out;
}

}  // namespace cairn::cuda
