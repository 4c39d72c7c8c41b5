#include "tests/simt/warpgroup_probes.h"

#include "runtime/kernels/cuda/warpgroup_units.h"

namespace cairn::simt::probes {

using kernels::cuda::arrive;
using kernels::cuda::arrive_expecting;
using kernels::cuda::begin_panel;
using kernels::cuda::begin_product;
using kernels::cuda::end_products;
using kernels::cuda::fence_products;
using kernels::cuda::init_barrier;
using kernels::cuda::kDepth;
using kernels::cuda::keep_float;
using kernels::cuda::kept_float;
using kernels::cuda::kPanelRowBytes;
using kernels::cuda::kPanelWidth;
using kernels::cuda::kWarp;
using kernels::cuda::launch_on_hopper;
using kernels::cuda::make_map;
using kernels::cuda::panel;
using kernels::cuda::panel_behind;
using kernels::cuda::publish_barriers;
using kernels::cuda::Queue;
using kernels::cuda::settled;
using kernels::cuda::shared_at;
using kernels::cuda::SharedAt;
using kernels::cuda::TensorMap;
using kernels::cuda::to_panel;
using kernels::cuda::wait_barrier;
using kernels::cuda::wait_for_products;

namespace {

struct Maps {
  TensorMap left, right;
};

/// The last warp copies, the first four multiply.
template <typename T, int kColumns, bool kByRows>
__global__ void panels(const __grid_constant__ Maps maps, const T* left, const float* shift, float* out, Fault fault) {
  constexpr int kPanels = kByRows ? kColumns / kPanelWidth : 1, kRightRows = kByRows ? 64 : kColumns;
  constexpr int kLeftBytes = 64 * kPanelRowBytes, kRightBytes = kRightRows * kPanelRowBytes;
  RT_DYNAMIC_SHARED(unsigned char, dynamic);
  unsigned char* const all = dynamic + to_panel(shared_at(dynamic)) + (fault == Fault::kBesideAtom ? 128 : 0);
  const SharedAt left_at = shared_at(all), right_at = left_at + kLeftBytes;
  const SharedAt full = right_at + kPanels * kRightBytes, kept_full = full + 8;
  float* const kept = reinterpret_cast<float*>(all + kLeftBytes + kPanels * kRightBytes + 16);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  if (thread == 0) {
    init_barrier(full, 1);
    init_barrier(kept_full, 1);
    if (fault != Fault::kNotPublished) publish_barriers();
  }
  __syncthreads();
  const auto copy_right = [&] {
    for (int p = 0; p < kPanels; ++p)
      begin_panel(right_at + p * kRightBytes, maps.right, full, p * kPanelWidth, 0, 0, 0);
  };
  if (warp == 4) {
    if (lane != 0) return;
    arrive_expecting(full, kLeftBytes + kPanels * kRightBytes - (fault == Fault::kTooFewBytes ? 128 : 0));
    begin_panel(left_at, maps.left, full, 0, 0, 0, 0);
    copy_right();
    keep_float(kept, shift[0]);
    arrive(kept_full);
    return;
  }
  if (fault != Fault::kCopyNotAwaited || warp != 2) wait_barrier(full, 0);
  if (fault != Fault::kFloatNotAwaited) wait_barrier(kept_full, 0);
  float sums[kColumns / 8][4];
  const int g = lane / 4, t = lane % 4, row = warp * 16 + g;
  const auto word = [&](int r, int c) {
    return left[r * 64 + c].bits | static_cast<uint32_t>(left[r * 64 + c + 1].bits) << 16;
  };
  uint32_t words[4][4];
  for (int i = 0; i < 4; ++i) {
    const int c = i * kDepth + 2 * t;
    words[i][0] = word(row, c);
    words[i][1] = word(row + 8, c);
    words[i][2] = word(row, c + 8);
    words[i][3] = word(row + 8, c + 8);
  }
  if (fault != Fault::kNoFence) fence_products();
  uint64_t left_panel = panel(left_at), right_panel = panel(right_at, kByRows ? kRightBytes : 16);
  if (fault == Fault::kNoSwizzle) right_panel &= ~(uint64_t{3} << 62);
  if (fault == Fault::kOtherOperands && warp == 3) right_panel = panel(left_at);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kByRows) {
      begin_product<T>(sums, words[i], panel_behind(right_panel, i * kDepth * kPanelRowBytes), i > 0);
    } else {
      begin_product<T>(sums, panel_behind(left_panel, i * kDepth * 2), panel_behind(right_panel, i * kDepth * 2),
                       i > 0);
    }
  }
  end_products();
  if (fault == Fault::kOverwritten && thread == 127) {
    arrive_expecting(full, kPanels * kRightBytes);
    copy_right();
  }
  if (fault == Fault::kSumsTouched) sums[1][2] = 2;
  if (fault != Fault::kProductNotAwaited && fault != Fault::kProductLeft) wait_for_products<0>();
  settled(sums);
  if (fault == Fault::kOverwritten) wait_barrier(full, 1);
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      out[(row + e / 2 * 8) * kColumns + n * 8 + 2 * t + e % 2] = sums[n][e] + kept_float(kept);
    }
  }
  if (fault == Fault::kProductNotAwaited) wait_for_products<0>();
  if (fault == Fault::kCopyLeft && thread == 127) {
    arrive_expecting(full, kLeftBytes);
    begin_panel(left_at, maps.left, full, 0, 0, 0, 0);
  }
}

template <typename T, int kColumns, bool kByRows>
void launch_panels(Queue& on, const T* left, const T* right, const float* shift, float* out, Fault fault) {
  Maps maps{};
  const int width = kByRows ? kColumns : 64, rows = kByRows ? 64 : kColumns;
  on.error = make_map<T>({left, 64, 64, 1, 1, 64, 64, 64 * 64, 64}, &maps.left);
  if (on.error == 0) on.error = make_map<T>({right, width, rows, 1, 1, width, width, rows * width, rows}, &maps.right);
  if (on.error != 0) return;
  launch_on_hopper(on, {{1}, {5 * kWarp}, 120 << 10}, panels<T, kColumns, kByRows>, maps, left, shift, out, fault);
}

}  // namespace

template <typename T>
void multiply_panels(Queue& on, const T* left, const T* right, const float* shift, float* out, int columns,
                     bool by_rows, Fault fault) {
  if (by_rows) {
    columns == 64 ? launch_panels<T, 64, true>(on, left, right, shift, out, fault)
                  : launch_panels<T, 128, true>(on, left, right, shift, out, fault);
  } else {
    columns == 64 ? launch_panels<T, 64, false>(on, left, right, shift, out, fault)
                  : launch_panels<T, 128, false>(on, left, right, shift, out, fault);
  }
}
template void multiply_panels<bf16>(Queue&, const bf16*, const bf16*, const float*, float*, int, bool, Fault);
template void multiply_panels<f16>(Queue&, const f16*, const f16*, const float*, float*, int, bool, Fault);

}  // namespace cairn::simt::probes
