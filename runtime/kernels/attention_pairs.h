#pragma once
// Attention's tiles where the processor multiplies bf16 faster than float: products in bf16 with float sums, for which
// probabilities and gradients of scores are rounded to bf16.

#include <cstdint>

#include "runtime/core/dtype.h"
#include "runtime/kernels/attention_tiles.h"
#include "runtime/kernels/gemm_amx.h"

namespace cairn::kernels {

/// Whether gemm_isa() is such a one.
bool pairs_run();

/// To be held by a thread while it multiplies.
struct PairRegisters : AmxTiles {
  explicit PairRegisters(bool pairs);
};

// --- operands: packed as gemm_kernel.h says, or rows as they lie
// -------------------------------------------------------

/// Words that a packed operand takes.
int64_t pair_left_words(int64_t lines, int64_t depth);
int64_t pair_right_words(int64_t lines, int64_t depth);

struct PairLeft {
  const void* data = nullptr;
  int64_t row_bytes = 0;  // 0: packed
};
/// `lines` rows of `from`, `depth` long, `stride` elements apart; packed into `room` where they must be.
PairLeft pair_left_rows(const bf16* from, int64_t stride, int64_t lines, int64_t depth, uint32_t* room);
/// `lines` columns of `from`, of `depth` rows.
PairLeft pair_left_columns(const bf16* from, int64_t stride, int64_t lines, int64_t depth, uint32_t* room);
/// The same for the right side: `along` packs rows, else columns.
void pair_right(const bf16* from, int64_t stride, bool along, int64_t lines, int64_t depth, uint32_t* room);

/// c [rows, columns] (+)= a b. What is not added to is kKeys wide and has room for whole tiles.
void multiply_pairs(PairLeft a, const uint32_t* b, int64_t rows, int64_t columns, int64_t depth, float* c,
                    int64_t c_row, bool add);

// --- scores ----------------------------------------------------------------------------------------------------------

/// One tile's step of the online softmax: scores [rows, kKeys], times `scale`, become `low`, the probabilities relative
/// to the new maximum, times `mask` unless that is null. max, sum and the rows of out [rows, padded] are rescaled; the
/// sum is of all probabilities.
void pair_softmax(const float* scores, int64_t rows, const VisibleColumns& columns, float scale, float* max, float* sum,
                  float* out, int64_t padded, const float* mask, bf16* low);

/// Backward: from scores, before `scale`, and the gradients dp of probabilities, the probabilities `low` that the
/// values were multiplied with and the gradients `dlow` of the scores before `factor`: p (dp - delta) factor, times
/// `slopes` [rows, kKeys] unless that is null.
void pair_score_gradients(const float* scores, const float* dp, int64_t rows, const VisibleColumns& columns,
                          float scale, const float* logsumexp, const float* delta, float factor, const float* mask,
                          const float* slopes, bf16* low, bf16* dlow);

}  // namespace cairn::kernels
