#pragma once
// Products by AMX: tiles of 16 rows of 64 bytes, multiplied as pairs of bf16 into sums of float.
//
// A tile of C is 32 x 32. Panels of 32 rows of A and of 32 columns of B are runs of register tiles, 1 KiB each: [steps
// / 16][lines / 16][16][16] words, where a word is a pair and a register tile of A has a row for each of its lines, one
// of B a row for each step. So both have a multiple of 16 steps.
//
// A float is the sum of three bf16 exactly: x rounded, the rest rounded, and the rest of that (8 bits of the 24 each).
// Of two floats' nine products of such pieces the six largest are summed; the other three together are below 2^-25 of
// the whole, less than a float's own rounding. An f16 is the sum of two (11 bits), and all four products are summed. A
// panel in pieces has 16 steps of first ones, the 16 of the second of the same elements, and so on.

#include <cstdint>

#include "runtime/core/dtype.h"
#include "runtime/kernels/gemm_kernel.h"

namespace cairn::kernels {

constexpr int64_t kAmxRows = 32, kAmxColumns = 32, kAmxSteps = 16;
/// Bf16 that an element is the sum of.
constexpr int64_t amx_pieces(DType dtype) { return dtype == DType::kF32 ? 3 : dtype == DType::kF16 ? 2 : 1; }

/// Whether the processor has it and the kernel of the system lets this process use it (asked for here, once).
bool amx_runs();

/// While one lives, its thread's tile registers are set up for amx_tile(). They cost a switch of threads 8 KiB.
class AmxTiles {
 public:
  explicit AmxTiles(bool wanted);
  AmxTiles(const AmxTiles&) = delete;
  ~AmxTiles();

 private:
  bool wanted_;
};

/// tile [32, 32] = panel of A times panel of B (+ tile): a GemmTile.
void amx_tile(const void* a, int64_t a_row_bytes, const uint32_t* b, int64_t steps, bool add, float* tile,
              int64_t tile_row, const GemmBeside& beside);

/// The same of panels in pieces; `a` is one, `steps` a multiple of 16 of each.
void amx_tile_f32(const void* a, int64_t a_row_bytes, const uint32_t* b, int64_t steps, bool add, float* tile,
                  int64_t tile_row, const GemmBeside& beside);
void amx_tile_f16(const void* a, int64_t a_row_bytes, const uint32_t* b, int64_t steps, bool add, float* tile,
                  int64_t tile_row, const GemmBeside& beside);

/// Writes the next `count` of the rows, or those that are left, if fewer.
void amx_write(GemmRows& out, int64_t count);

/// Packs `lines` rows of A or columns of B into the first `steps` of panels of `panel_steps`, zero
/// behind the last line and the sum's `depth` elements. `from.data` is the first element.
void pack_amx(GemmSide side, const GemmOperand& from, int64_t lines, int64_t depth, int64_t steps, int64_t panel_steps,
              uint32_t* out);

}  // namespace cairn::kernels
