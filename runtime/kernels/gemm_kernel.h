#pragma once
// The innermost loops of packed_gemm: tiles of C in registers, and the packing of A and B into the order they read.
//
// A panel of A holds `rows` rows of it, a panel of B `columns` columns, both as [steps][rows or columns] words of 32
// bits: a step is one element of the sum in float, or two neighbours of it in bf16 (what vdpbf16ps multiplies at once).
// What a panel has beyond the matrix is zero, so tiles are always whole. AMX has panels of its own (gemm_amx.h), where
// two neighbours of a sum of floats take three steps, of f16 two.

#include <cstdint>

#include "runtime/core/dtype.h"
#include "runtime/kernels/isa.h"

namespace cairn::kernels {

/// Rows of finished sums on their way to where they belong, one after the other.
struct GemmRows {
  bool round = false;             // to bf16, denormal numbers as zero; else they stay float
  bool past = false;              // not by way of the caches: `to` and `row_bytes` are multiples of 64
  const float* from = nullptr;    // [rows, columns of a tile]
  const float* bias = nullptr;    // [columns of a tile], added; or null
  const float* before = nullptr;  // [rows, columns of a tile], added; or null
  int64_t before_row = 0;         // from one row of it to the next
  char* to = nullptr;
  int64_t row_bytes = 0;  // from one row of `to` to the next
  int64_t rows = 0;       // still to come
};

/// What memory is asked to do while a tile is computed. All at once it would stand in the way of what the tile waits
/// for.
struct GemmBeside {
  const char* fetch = nullptr;  // lines from here on come into the second-level cache,
  int64_t fetch_lines = 0;      // so many with every 16 steps,
  GemmRows* out = nullptr;      // and so many of these rows are written
  int64_t out_rows = 0;
};

/// tile [rows, columns] = panel of A times panel of B. AMX can do more: of bf16, `a` may be rows of A as they lie,
/// `a_row_bytes` apart (0: a panel); the product is added to the tile; rows of the tile lie `tile_row` floats apart
/// (else `columns`); and what is done beside it.
using GemmTile = void (*)(const void* a, int64_t a_row_bytes, const uint32_t* b, int64_t steps, bool add, float* tile,
                          int64_t tile_row, const GemmBeside& beside);

enum class GemmSide { kA, kB };

struct GemmKernel {
  int64_t rows = 0, columns = 0;  // of a tile
  bool pairs = false;             // a word is two bf16, neighbours in the sum
  int64_t pieces = 1;             // words such a pair takes, a step each
  GemmTile tile = nullptr;
  int64_t step_unit = 1;  // a panel's steps are a multiple of it
  bool amx = false;       // a thread has AmxTiles while it calls `tile`, which writes rows beside its product
  bool lying = false;     // `tile` takes rows of A as they lie, too
  // How much of a product is worked on at once, by what the caches hold.
  int64_t turn_steps = 0;  // of one call of `tile`: so much of a panel of B stays in the first-level cache; 0: all
  int64_t max_steps = 0;   // of a sum in one chunk
  int64_t many_steps = 0;  // of a chunk, when there are several; 0: max_steps
  int64_t part_words = 0;  // of A, in a core's second-level cache
  int64_t least_rows = 0;  // of a part, when more parts would only balance better

  int64_t width(GemmSide side) const { return side == GemmSide::kA ? rows : columns; }  // of a panel
  int64_t steps_of(int64_t depth) const {
    const int64_t steps = pairs ? (depth + 1) / 2 * pieces : depth;
    return (steps + step_unit - 1) / step_unit * step_unit;
  }
  /// Of a multiple of step_unit.
  int64_t depth_of(int64_t steps) const { return pairs ? steps / pieces * 2 : steps; }
  int64_t chunk_steps(int64_t depth) const {
    return many_steps == 0 || steps_of(depth) <= max_steps ? max_steps : many_steps;
  }
};
constexpr int64_t kMaxTileElems = 32 * 64;

/// For operands of that type.
GemmKernel gemm_kernel(GemmIsa isa, DType dtype);

/// A matrix to be packed: `lines` are the rows of A or the columns of B.
struct GemmOperand {
  const void* data = nullptr;
  int64_t stride = 0;  // elements from one stored row to the next
  bool along = false;  // the elements of one line's sum lie side by side; else the lines do
  DType dtype = DType::kF32;
};

/// Panels of kernel.width(side) lines each: lines [line0, line0 + lines) and elements [depth0, depth0 + depth) of the
/// sum, where depth0 is even with pairs. `out` [panels][panel_steps][width], of which these are the first steps.
void pack_panels(GemmIsa isa, const GemmKernel& kernel, const GemmOperand& from, GemmSide side, int64_t line0,
                 int64_t lines, int64_t depth0, int64_t depth, int64_t panel_steps, uint32_t* out);

}  // namespace cairn::kernels
