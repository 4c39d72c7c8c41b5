#pragma once
// Attention by warpgroups: what its kernels share. For .cu files; T is bf16 or f16.
//
// A block has a tile of rows, queries or keys, and visits tiles of columns. The first warpgroup's first thread begins
// copies of tiles; each of the others has 64 of the rows. Scores and sums are fragments, as in attention_matrix.h with
// 16 rows a warp, and scores are rounded to T where they are multiplied again.
//
// Tiles of columns come in turn to kStages rooms. A room's `full` barrier ends a phase when its copies have come, its
// `empty` barrier when all warps have read it. A warpgroup that sees nothing of a tile waits for it all the same, so
// that no barrier is a phase ahead.

#include "runtime/kernels/cuda/attention_matrix.h"
#include "runtime/kernels/cuda/warpgroup_units.h"

namespace cairn::kernels::cuda {

/// Whether warpgroups take it: what matrix units take, without slopes, caps and dropout. The caller looks for maxima.
template <typename T>
bool by_warpgroups(const AttentionArgs<T>& of) {
  return by_matrix_units(of) && is_plain(of);
}

/// Registers of a thread that copies, and of one that multiplies, in a block with kGroups warpgroups of the latter: all
/// of a multiprocessor's.
template <int kGroups>
struct RegistersOf {
  static_assert(kGroups == 2 || kGroups == 3);
  static constexpr int kCopying = kGroups == 3 ? 32 : 24, kMultiplying = kGroups == 3 ? 160 : 240;
};

/// A tile of rows, panel by panel: of all rows, or of each warpgroup's 64.
template <int kD>
struct PanelsOf {
  static_assert(kD % kPanelWidth == 0);
  static constexpr int kCount = kD / kPanelWidth;
  static constexpr int bytes(int rows) { return rows * kD * 2; }
  static constexpr int panel_bytes(int rows) { return rows * kPanelRowBytes; }
};

/// Which of kStages rooms comes next, and the parity of its phase.
template <int kStages>
struct Stage {
  int at = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++at < kStages) return;
    at = 0;
    parity ^= 1;
  }
};

/// Begins to copy rows [row, row + kRows) of a head: all panels of it.
template <int kD, int kRows>
__device__ __forceinline__ void begin_rows(SharedAt to, const TensorMap& map, SharedAt barrier, int row, int head,
                                           int sample) {
#pragma unroll
  for (int p = 0; p < PanelsOf<kD>::kCount; ++p) {
    begin_panel(to + p * PanelsOf<kD>::panel_bytes(kRows), map, barrier, p * kPanelWidth, row, head, sample);
  }
}

/// sums = `left` [64, kD] times the transpose of `right` [kRightRows, kD], tiles of rows.
template <typename T, int kD, int kRightRows>
__device__ __forceinline__ void begin_rows_product(float (&sums)[kRightRows / 8][4], SharedAt left, SharedAt right) {
  const uint64_t left_panel = panel(left), right_panel = panel(right);
#pragma unroll
  for (int i = 0; i < kD / kDepth; ++i) {
    constexpr int kSteps = kPanelWidth / kDepth;
    const int in_panel = i % kSteps * kDepth * 2, p = i / kSteps;
    begin_product<T>(sums, panel_behind(left_panel, p * PanelsOf<kD>::panel_bytes(kWarpgroupRows) + in_panel),
                     panel_behind(right_panel, p * PanelsOf<kD>::panel_bytes(kRightRows) + in_panel), i > 0);
  }
}

/// sums += words of a left matrix [64, kRightRows] times `right` [kRightRows, kD].
template <typename T, int kD, int kRightRows>
__device__ __forceinline__ void begin_words_product(float (&sums)[kD / 8][4],
                                                    const uint32_t (&words)[kRightRows / kDepth][4], SharedAt right) {
  const uint64_t right_panel = panel(right, PanelsOf<kD>::panel_bytes(kRightRows));
#pragma unroll
  for (int i = 0; i < kRightRows / kDepth; ++i) {
    begin_product<T>(sums, words[i], panel_behind(right_panel, i * kDepth * kPanelRowBytes), true);
  }
}

/// Scores, rounded, as words of a left matrix.
template <typename T, int kColumns>
__device__ __forceinline__ void to_words(const float (&scores)[kColumns][4], uint32_t (&words)[kColumns / 2][4]) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const float(&low)[4] = scores[2 * i], (&high)[4] = scores[2 * i + 1];
    words[i][0] = pack_words<T>(low[0], low[1]);
    words[i][1] = pack_words<T>(low[2], low[3]);
    words[i][2] = pack_words<T>(high[0], high[1]);
    words[i][3] = pack_words<T>(high[2], high[3]);
  }
}

/// Tiles of keys that a tile of queries sees any of.
template <int kColumns>
struct KeyTiles {
  int key0 = 0, count = 0;  // the first one's first key
  int first = 0, end = 0;   // of these, those that the warpgroup's rows see any of: see()

  template <typename T>
  __device__ KeyTiles(const AttentionArgs<T>& of, int sample, const QueryTile& tile) {
    const auto range = of.visible(sample, tile);
    key0 = range.first / kColumns * kColumns;
    count = (range.end - key0 + kColumns - 1) / kColumns;
  }
  __device__ __forceinline__ void see(const Seen& seen) {
    const bool any = seen.any_end > seen.any_first;
    first = any ? (seen.any_first - key0) / kColumns : count;
    end = any ? (seen.any_end - key0 + kColumns - 1) / kColumns : count;
  }
};

/// A thread's scores in this half of its rows become -infinity where the query does not see the key. `row`: of the
/// block's tile `number` of kRows; one beyond the queries sees what the last one sees. `first_key`: of the thread's
/// columns.
template <int kRows, int kColumns, typename T>
__device__ __forceinline__ void leave_out_unseen(const AttentionArgs<T>& of, int sample, int number, int row, int half,
                                                 int first_key, float (&scores)[kColumns][4]) {
  const QueryTile tile = of.tile(sample, made_here(number), kRows);
  const auto seen = of.visible(sample, tile.position(row < tile.rows ? row : tile.rows - 1));
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int e = 2 * half; e < 2 * half + 2; ++e) {
      const int key = first_key + n * 8 + e % 2;
      if (key < seen.first || key >= seen.end) scores[n][e] = -INFINITY;
    }
  }
}

/// Maps of a call. Errors: a cudaError_t.
template <typename T>
struct AttentionMaps {
  const AttentionArgs<T>& of;
  int64_t samples;

  /// Rows of queries, or of what lies beside them with this stride.
  int of_queries(const T* base, int64_t stride, int box_rows, TensorMap* out) const {
    return make_map<T>(
        {base, of.head_dim, of.queries, of.heads, samples, stride, of.head_dim, of.queries * stride, box_rows}, out);
  }
  int of_keys(const T* base, int box_rows, TensorMap* out) const {
    return make_map<T>({base, of.head_dim, of.key_rows, of.heads / of.group, samples, of.kv_stride, of.head_dim,
                        of.key_rows * of.kv_stride, box_rows},
                       out);
  }
};

/// Launches by warpgroups, of what by_warpgroups() takes. The numbers of blocks are those of whole tiles.
template <typename T>
void attention_by_warpgroups(Queue& on, const AttentionArgs<T>& args, int64_t batch, const ForwardOut<T>& to);
template <typename T>
void attention_backward_by_warpgroups(Queue& on, const AttentionArgs<T>& args, int64_t batch, const BackwardOut<T>& to);

}  // namespace cairn::kernels::cuda
