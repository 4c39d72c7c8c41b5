#include "runtime/cuda/cudnn_attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "runtime/core/check.h"

namespace cairn::cuda {
namespace {

constexpr int64_t kWidestHead = 256;
constexpr int64_t kAlign = 16;  // bytes, of arrays and of rows of heads
constexpr int64_t kElemBytes = 2;
constexpr int64_t kPack = kAlign / kElemBytes;

constexpr int64_t kOwnBytes = 256;  // of any plan, at most: descriptors and the like

int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int64_t backward_bytes(const AttentionShape& of) {
  constexpr int64_t kTileQueries = 64, kTileKeys = 128;
  const int64_t scores = rounded(of.tokens, kTileQueries) * rounded(of.tokens, kTileKeys) * kElemBytes;
  const int64_t deltas = of.tokens * static_cast<int64_t>(sizeof(float));
  // Gradients of keys and values, before they are summed over the query heads of each.
  const int64_t wide = of.kv_heads == of.heads ? 0 : 2 * of.tokens * of.head_dim * kElemBytes;
  return of.samples * of.heads * (scores + deltas + wide);
}

/// The largest divisor d of n for which d * each <= most; 1 where there is none.
int64_t fitting(int64_t n, int64_t each, int64_t most) {
  for (int64_t d = n; d > 1; --d) {
    if (n % d == 0 && d * each <= most) return d;
  }
  return 1;
}

const void* moved(const void* array, int64_t elems) {
  return array == nullptr ? nullptr : static_cast<const std::byte*>(array) + elems * kElemBytes;
}
void* moved(void* array, int64_t elems) {
  return array == nullptr ? nullptr : static_cast<std::byte*>(array) + elems * kElemBytes;
}

/// Of the piece that begins at this sample and this key head.
AttentionArrays arrays_of(const AttentionShape& whole, const AttentionArrays& all, int64_t sample, int64_t kv_head) {
  const int64_t row = sample * whole.tokens, head = kv_head * (whole.heads / whole.kv_heads);
  const int64_t q = row * whole.q_stride + head * whole.head_dim, kv = row * whole.kv_stride + kv_head * whole.head_dim,
                out = row * whole.out_stride + head * whole.head_dim;
  return {.q = moved(all.q, q),
          .k = moved(all.k, kv),
          .v = moved(all.v, kv),
          .out = moved(all.out, out),
          .logsumexp = all.logsumexp + (sample * whole.heads + head) * whole.tokens,
          .dout = moved(all.dout, out),
          .dq = moved(all.dq, q),
          .dk = moved(all.dk, kv),
          .dv = moved(all.dv, kv),
          .scale = all.scale};
}

bool aligned(const AttentionArrays& of) {
  for (const void* const array :
       {of.q, of.k, of.v, static_cast<const void*>(of.out), of.dout, static_cast<const void*>(of.dq),
        static_cast<const void*>(of.dk), static_cast<const void*>(of.dv)}) {
    if (reinterpret_cast<uintptr_t>(array) % kAlign != 0) return false;
  }
  return true;
}

}  // namespace

AttentionShape attention_piece(const AttentionShape& of, int64_t most) {
  AttentionShape out = of;
  out.samples = 1;
  const int64_t sample = backward_bytes(out);
  if (sample <= most || of.alibi) {  // slopes are of all heads
    out.samples = fitting(of.samples, sample, most);
    return out;
  }
  out.kv_heads = fitting(of.kv_heads, sample / of.kv_heads, most);
  out.heads = of.heads / of.kv_heads * out.kv_heads;
  return out;
}

std::string why_not_by_cudnn(const AttentionShape& of) {
  if (of.dtype != DType::kBf16 && of.dtype != DType::kF16) return fmt::format("it takes no {}", dtype_name(of.dtype));
  if (of.head_dim % kPack != 0 || of.head_dim > kWidestHead) {
    return fmt::format("heads of {} channels; it takes multiples of {} up to {}", of.head_dim, kPack, kWidestHead);
  }
  if ((of.q_stride | of.kv_stride | of.out_stride) % kPack != 0) return "rows that do not begin at 16 bytes";
  if (of.tokens < 2) return "samples of one token";
  if (of.alibi && !of.causal) return "slopes without a causal mask";
  if (const int64_t bytes = backward_bytes(attention_piece(of)); bytes > kMostAttentionWorkspace) {
    return fmt::format("samples of {} tokens: {} MiB for one call, {} may be", of.tokens, bytes >> 20,
                       kMostAttentionWorkspace >> 20);
  }
  return {};
}

int64_t attention_workspace_bytes(const AttentionShape& of, AttentionPass pass, int64_t most) {
  const int64_t slopes = of.alibi ? rounded(of.heads * static_cast<int64_t>(sizeof(float)), kAlign) : 0;
  return kOwnBytes + slopes + (pass == AttentionPass::kForward ? 0 : backward_bytes(attention_piece(of, most)));
}

int64_t attention_workspace_bytes(std::span<const AttentionShape> shapes) {
  int64_t out = 0;
  for (const AttentionShape& of : shapes) {
    if (!why_not_by_cudnn(of).empty()) continue;
    for (const AttentionPass pass : {AttentionPass::kForward, AttentionPass::kBackward}) {
      out = std::max(out, attention_workspace_bytes(of, pass));
    }
  }
  return out;
}

Result<std::unique_ptr<AttentionPlan>> AttentionPlans::checked(const AttentionShape& of, AttentionPass pass) const {
  RT_TRY_SET(std::unique_ptr<AttentionPlan> out, build_(of, pass));
  const int64_t needs = out->workspace_bytes(), has = attention_workspace_bytes(of, pass, most_);
  if (needs <= has) return out;
  return Error{ErrorCode::kUnsupported,
               fmt::format("its plan wants {} bytes of workspace, and the run has planned {}", needs, has)};
}

const std::string& AttentionPlans::prepare(const AttentionShape& of, AttentionPass pass) {
  const auto [at, is_new] = plans_.try_emplace({of, pass});
  Plan& plan = at->second;
  if (!is_new) return plan.why;
  plan.why = why_not_by_cudnn(of);
  if (!plan.why.empty()) return plan.why;
  plan.piece = pass == AttentionPass::kForward ? of : attention_piece(of, most_);
  Result<std::unique_ptr<AttentionPlan>> made = checked(plan.piece, pass);
  if (made.ok()) {
    plan.plan = std::move(made).value();
  } else {
    plan.why = made.error().message;
  }
  return plan.why;
}

std::vector<std::string> AttentionPlans::prepare(std::span<const AttentionShape> shapes) {
  std::vector<std::string> out;
  const auto tell = [&](const AttentionShape& of, const std::string& pass, const std::string& why) {
    if (why.empty()) return;
    out.push_back(fmt::format("attention of {}{} is by Cairn's own kernels: {}", attention_text(of), pass, why));
  };
  for (const AttentionShape& of : shapes) {
    if (plans_.contains({of, AttentionPass::kForward})) continue;
    const std::string &forward = prepare(of, AttentionPass::kForward),
                      &backward = prepare(of, AttentionPass::kBackward);
    if (forward == backward) {
      tell(of, "", forward);
      continue;
    }
    tell(of, ", forward,", forward);
    tell(of, ", backward,", backward);
  }
  return out;
}

bool AttentionPlans::has(const AttentionShape& of, AttentionPass pass) const {
  const auto found = plans_.find({of, pass});
  return found != plans_.end() && found->second.plan != nullptr;
}

int64_t AttentionPlans::count() const {
  return std::ranges::count_if(plans_, [](const auto& one) { return one.second.plan != nullptr; });
}

Result<bool> AttentionPlans::order(CudaStream& on, const AttentionShape& of, AttentionPass pass,
                                   const AttentionArrays& arrays, DeviceBytes workspace) const {
  const auto found = plans_.find({of, pass});
  if (found == plans_.end() || found->second.plan == nullptr || arrays.logsumexp == nullptr || !aligned(arrays)) {
    return false;
  }
  const int64_t needed = attention_workspace_bytes(of, pass, most_);
  RT_CHECK(workspace.size >= needed, "attention has {} bytes of workspace, and needs {}", workspace.size, needed);
  const Plan& plan = found->second;
  void* const room = workspace.first.address();
  for (int64_t sample = 0; sample < of.samples; sample += plan.piece.samples) {
    for (int64_t head = 0; head < of.kv_heads; head += plan.piece.kv_heads) {
      RT_TRY(plan.plan->run(on, arrays_of(of, arrays, sample, head), room));
    }
  }
  return true;
}

bool AttentionPlans::run(CudaStream& on, const AttentionShape& of, AttentionPass pass, const AttentionArrays& arrays,
                         DeviceBytes workspace) const {
  Result<bool> ordered = order(on, of, pass, arrays, workspace);
  if (ordered.ok()) return ordered.value();
  on.keep(std::move(ordered).error());
  return true;
}

const char* pass_word(AttentionPass pass) { return pass == AttentionPass::kForward ? "forward" : "backward"; }

std::string attention_text(const AttentionShape& of) {
  return fmt::format("{} {} x {} tokens, {} heads of {}{}", dtype_name(of.dtype), of.samples, of.tokens, of.heads,
                     of.head_dim, of.kv_heads == of.heads ? "" : fmt::format(" over {} of keys", of.kv_heads));
}

}  // namespace cairn::cuda
