#pragma once
// The executor's part of warpgroup_units.h (tests/simt/warpgroups.cc). No device has these.

#include "runtime/kernels/cuda/simt.h"

#define __grid_constant__

namespace cairn::simt {

/// A tensor in memory, a box of which a copy takes. Sizes and the box in elements, strides of all but the first
/// dimension in bytes.
struct TensorMap {
  const void* base = nullptr;
  int element_bytes = 0, dims = 0;
  uint64_t sizes[5] = {}, strides[5] = {};
  uint32_t box[5] = {};
};
/// Whether the executor stands for a card of compute capability 9.0.
bool has_warpgroups();
/// 0, or the cudaError_t of what a driver refuses.
int check_map(const TensorMap& map);
/// Shared memory that launches of this kernel may ask for beyond what every card gives, as 9.0 does.
void allow_shared(const void* kernel, int64_t bytes);
/// Offset of a place in the block's shared memory, as a device's addresses of 32 bits have it.
uint32_t shared_window(const void* at);

void init_barrier(void* barrier, int arrivals);
void publish_barriers();
void arrive(void* barrier, int64_t expected_bytes);
void wait_barrier(const void* barrier, int parity, Place place);
void copy_box(void* to, const TensorMap& map, void* barrier, const int* at);

/// A product of 64 rows, as an instruction orders it. `left`: four words of a lane, or null: `left_panel` describes it.
struct WarpgroupProduct {
  uint64_t left_panel = 0, right_panel = 0;
  const uint32_t* left = nullptr;
  float* sums = nullptr;  // of a lane: 4 for each 8 columns
  int columns = 0;
  bool add = false, right_by_rows = false;  // by rows: of the dimension that is summed over
  float (*value)(uint16_t bits) = nullptr;
};
void fence_products();
void begin_product(const WarpgroupProduct& product, Place place);
void end_products();
void wait_for_products(int groups, Place place);

/// A float in shared memory that another thread reads behind a barrier, to which the one that keeps it arrives.
void keep_float(float* to, float x);
float kept_float(const float* from);

}  // namespace cairn::simt
