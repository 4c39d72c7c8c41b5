#include <algorithm>

#include "runtime/core/check.h"
#include "runtime/kernels/gemm_amx.h"
#include "runtime/kernels/gemm_kernel.h"
#include "runtime/kernels/matmul_impl.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/scratch.h"
#include "runtime/kernels/simd.h"

// After Goto & van de Geijn 2008. C is computed in blocks of columns; for each, the sum runs in chunks. A chunk of B is
// packed by all threads into one block in the shared cache; then threads take blocks of rows, pack their part of A into
// their own second-level cache, and multiply tile by tile.
//
// An element's sum is cut into chunks by k alone and each chunk runs in order, so its bits depend neither on the number
// of threads nor on m, n or the element's place.

namespace cairn::kernels {
namespace {

constexpr int64_t kBlockWords = 6 << 18;           // 6 MiB of B
constexpr int64_t kSumRows = 2048;                 // of float sums kept from chunk to chunk for 16-bit results
constexpr int64_t kPastBytes = 4 << 20;            // a larger result would leave the caches before it is read
constexpr int64_t kTurnRows = 64;                  // of C, in float while a kernel takes its sums in turns
constexpr int64_t kMinParallelProducts = 1 << 21;  // multiply-adds below which waking a thread does not pay

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// Equal parts of `total`, multiples of `unit`, at most `limit` if that is one unit at least.
int64_t part_size(int64_t total, int64_t limit, int64_t unit) {
  const int64_t parts = ceil_div(total, std::max(limit / unit * unit, unit));
  return round_up(ceil_div(total, parts), unit);
}

// --- what becomes of a tile ------------------------------------------------------------------------------------------

/// to = 0 + tile, or to += tile, the same bits where `to` is 0; rows of the tile `tile_stride` apart.
RT_CLONES void add_tile(const float* tile, int64_t tile_stride, float* to, int64_t stride, int64_t rows,
                        int64_t columns, bool add) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* const in = tile + r * tile_stride;
    float* const out = to + r * stride;
    if (add) {
      for (int64_t c = 0; c < columns; ++c) out[c] += in[c];
    } else {
      for (int64_t c = 0; c < columns; ++c) out[c] = 0.0f + in[c];
    }
  }
}

/// to = tile (+ sums) (+ to), rounded once.
template <typename T>
RT_CLONES void round_tile(float* tile, int64_t tile_stride, const float* sums, int64_t sums_stride, T* to,
                          int64_t stride, int64_t rows, int64_t columns, bool add) {
  for (int64_t r = 0; r < rows; ++r) {
    float* const in = tile + r * tile_stride;
    T* const out = to + r * stride;
    if (sums != nullptr) {
      for (int64_t c = 0; c < columns; ++c) in[c] += sums[r * sums_stride + c];
    }
    if (add) {
      for (int64_t c = 0; c < columns; ++c) in[c] += load_f32(out[c]);
    }
    for (int64_t c = 0; c < columns; ++c) store_f32(&out[c], in[c]);
  }
}

RT_CLONES void add_row(const float* row, float* tile, int64_t tile_stride, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) tile[r * tile_stride + c] += row[c];
  }
}

template <typename T>
void load_bias(const void* from, int64_t at, int64_t columns, float* to) {
  for (int64_t c = 0; c < columns; ++c) to[c] = load_f32(static_cast<const T*>(from)[at + c]);
}

void load_bias(const MatmulArgs& args, int64_t at, int64_t columns, float* to) {
  if (args.ab_dtype == DType::kF32) return load_bias<float>(args.bias, at, columns, to);
  if (args.ab_dtype == DType::kBf16) return load_bias<bf16>(args.bias, at, columns, to);
  load_bias<f16>(args.bias, at, columns, to);
}

/// One chunk of the sum for one block of C.
struct Chunk {
  const MatmulArgs& args;
  const GemmKernel& kernel;
  GemmIsa isa;
  int64_t row0, rows, column0, columns;  // the block of C
  int64_t depth0, depth, steps;
  bool first, last;   // of the sum's chunks
  uint32_t* b;        // packed
  const float* bias;  // [columns], or null
  float* sums;        // [rows, columns] between the chunks of a 16-bit result; null when there is one chunk

  /// Both on `threads` threads.
  void pack_b(int64_t threads) const;
  void multiply(int64_t threads) const;
  void pack_a(int64_t begin, int64_t end, uint32_t* a) const;
  /// Rows [begin, end) times panels [panel0, panel1) of B. `a`: the rows packed; null: as they lie.
  void multiply_part(int64_t begin, int64_t end, int64_t panel0, int64_t panel1, const uint32_t* a) const;
  /// What a tile will be added to lies far away; it arrives while the tile is computed.
  void fetch(int64_t row, int64_t column, int64_t count, int64_t width) const;
  void store(float* tile, int64_t row, int64_t column, int64_t count, int64_t width) const;
  int64_t panels() const { return ceil_div(columns, kernel.columns); }
  /// Whether rows of A are multiplied as they lie: whole tiles of them, and not all in the same sets of a cache.
  bool takes_rows() const {
    constexpr int64_t kSetsBytes = 4096;
    return kernel.amx && !args.trans_a && rows % kernel.rows == 0 && args.k % (2 * kernel.step_unit) == 0 &&
           args.lda * 2 % kSetsBytes != 0;
  }
};

/// A tile at (row, column) of the block.
void Chunk::store(float* tile, int64_t row, int64_t column, int64_t count, int64_t width) const {
  const int64_t tile_stride = kernel.columns;
  if (first && bias != nullptr) add_row(bias + column, tile, tile_stride, count, width);
  const int64_t at = (row0 + row) * args.ldc + column0 + column;
  if (args.c_dtype == DType::kF32) {
    return add_tile(tile, tile_stride, static_cast<float*>(args.c) + at, args.ldc, count, width,
                    args.accumulate || !first);
  }
  float* const kept = sums == nullptr ? nullptr : sums + row * columns + column;
  if (!last) return add_tile(tile, tile_stride, kept, columns, count, width, !first);
  const float* const before = first ? nullptr : kept;
  if (kernel.amx && args.c_dtype == DType::kBf16 && !args.accumulate && before == nullptr && width == tile_stride) {
    const bool past = args.m * args.n * dtype_size_bytes(args.c_dtype) >= kPastBytes;
    return amx_round(tile, count, static_cast<bf16*>(args.c) + at, args.ldc, past);
  }
  if (args.c_dtype == DType::kBf16) {
    return round_tile(tile, tile_stride, before, columns, static_cast<bf16*>(args.c) + at, args.ldc, count, width,
                      args.accumulate);
  }
  round_tile(tile, tile_stride, before, columns, static_cast<f16*>(args.c) + at, args.ldc, count, width,
             args.accumulate);
}

void Chunk::fetch(int64_t row, int64_t column, int64_t count, int64_t width) const {
  const bool adds = args.c_dtype == DType::kF32 ? args.accumulate || !first : !first;
  if (!adds || kernel.amx) return;
  const float* const to = sums != nullptr
                              ? sums + row * columns + column
                              : static_cast<const float*>(args.c) + (row0 + row) * args.ldc + column0 + column;
  const int64_t stride = sums != nullptr ? columns : args.ldc;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t x = 0; x < width; x += 16) __builtin_prefetch(to + r * stride + x, 1);
  }
}

void Chunk::multiply_part(int64_t begin, int64_t end, int64_t panel0, int64_t panel1, const uint32_t* a) const {
  const int64_t a_row_bytes = a == nullptr ? args.lda * 2 : 0;
  const auto rows_of_a = [&](int64_t row, int64_t step) -> const void* {
    if (a != nullptr) return a + (row - begin) * steps + step * kernel.rows;
    return static_cast<const bf16*>(args.a) + (row0 + row) * args.lda + depth0 + 2 * step;
  };
  const int64_t turn_steps = kernel.turn_steps == 0 ? steps : kernel.turn_steps;
  const int64_t turn_rows = turn_steps < steps ? kTurnRows : kernel.rows;
  thread_local Scratch scratch;
  float* const tiles = scratch.floats(turn_rows * kernel.columns);
  // A panel of B has kAmxColumns lines for every 16 steps, which come in two halves of each tile of rows.
  constexpr int64_t kLineBytes = 64, kHalfLines = kAmxColumns / 2;
  const int64_t fetch_lines = kernel.amx ? ceil_div(kHalfLines, ceil_div(end - begin, kernel.rows)) : 0;
  const AmxTiles registers(kernel.amx);
  for (int64_t panel = panel0; panel < panel1; ++panel) {
    const int64_t column = panel * kernel.columns;
    const uint32_t* const b_panel = b + column * steps;
    const int64_t width = std::min(kernel.columns, columns - column);
    const auto* next = reinterpret_cast<const char*>(b_panel + steps * kernel.columns);  // the panel that follows
    for (int64_t turn_row = begin; turn_row < end; turn_row += turn_rows) {
      const int64_t turn_end = std::min(turn_row + turn_rows, end);
      for (int64_t s = 0; s < steps; s += turn_steps) {
        const bool ends = s + turn_steps >= steps;
        for (int64_t row = turn_row; row < turn_end; row += kernel.rows) {
          const int64_t count = std::min(kernel.rows, end - row);
          if (ends) fetch(row, column, count, width);
          float* const tile = tiles + (row - turn_row) * kernel.columns;
          const int64_t now = std::min(turn_steps, steps - s);
          kernel.tile(rows_of_a(row, s), a_row_bytes, b_panel + s * kernel.columns, now, s > 0, tile, kernel.columns,
                      next, fetch_lines);
          next += now / kAmxSteps * 2 * fetch_lines * kLineBytes;
          if (ends) store(tile, row, column, count, width);
        }
      }
    }
  }
}

void Chunk::pack_b(int64_t threads) const {
  const GemmOperand from{args.b, args.ldb, args.trans_b, args.ab_dtype};
  const int64_t size = ceil_div(panels(), threads == 1 ? 1 : kPiecesPerThread * threads);
  parallel_tasks(ceil_div(panels(), size), threads == 1, [&](int64_t task) {
    const int64_t line = task * size * kernel.columns;
    pack_panels(isa, kernel, from, kernel.columns, column0 + line, std::min(size * kernel.columns, columns - line),
                depth0, depth, b + line * steps);
  });
}

void Chunk::pack_a(int64_t begin, int64_t end, uint32_t* a) const {
  const GemmOperand from{args.a, args.lda, !args.trans_a, args.ab_dtype};
  pack_panels(isa, kernel, from, kernel.rows, row0 + begin, end - begin, depth0, depth, a);
}

void Chunk::multiply(int64_t threads) const {
  int64_t row_parts = ceil_div(rows, std::max(kernel.part_words / steps / kernel.rows * kernel.rows, kernel.rows));
  if (threads > 1) row_parts = round_up(std::max(row_parts, rows / kernel.least_rows), threads);
  const int64_t part = round_up(ceil_div(rows, row_parts), kernel.rows);
  row_parts = ceil_div(rows, part);
  const int64_t column_parts = threads == 1 ? 1 : std::min(panels(), ceil_div(kPiecesPerThread * threads, row_parts));
  const int64_t part_panels = ceil_div(panels(), column_parts);
  // A part that one task uses is packed by it, into its core's cache; others by all threads before.
  thread_local Scratch shared_scratch;
  uint32_t* shared = nullptr;
  const bool direct = takes_rows();
  if (column_parts > 1 && !direct) {
    shared = reinterpret_cast<uint32_t*>(shared_scratch.floats(row_parts * part * steps));
    const int64_t pieces = std::max(row_parts, kPiecesPerThread * threads);
    const int64_t piece = round_up(ceil_div(rows, pieces), kernel.rows);
    parallel_tasks(ceil_div(rows, piece), false, [&](int64_t task) {
      pack_a(task * piece, std::min((task + 1) * piece, rows), shared + task * piece * steps);
    });
  }
  parallel_tasks(row_parts * column_parts, threads == 1, [&](int64_t task) {
    const int64_t begin = task / column_parts * part, panel = task % column_parts * part_panels;
    const int64_t end = std::min(begin + part, rows);
    const uint32_t* a = shared == nullptr ? nullptr : shared + begin * steps;
    if (shared == nullptr && !direct) {
      thread_local Scratch scratch;
      auto* const own = reinterpret_cast<uint32_t*>(scratch.floats(part * steps));
      pack_a(begin, end, own);
      a = own;
    }
    multiply_part(begin, end, panel, std::min(panel + part_panels, panels()), a);
  });
}

}  // namespace

void matmul_packed(const MatmulArgs& args, GemmIsa isa) {
  const GemmKernel kernel = gemm_kernel(isa, args.ab_dtype);
  const int64_t depth_unit = kernel.pairs ? 2 : 1;
  const int64_t depth_size = part_size(args.k, kernel.chunk_steps(args.k) * depth_unit, depth_unit * kernel.step_unit);
  const int64_t steps = kernel.steps_of(depth_size), chunks = ceil_div(args.k, depth_size);
  const int64_t columns_size =
      std::min(part_size(args.n, kBlockWords / steps, kernel.columns), round_up(args.n, kernel.columns));
  const bool keeps_sums = chunks > 1 && args.c_dtype != DType::kF32;
  const int64_t rows_size = keeps_sums ? std::min(args.m, kSumRows) : args.m;
  const int64_t threads = args.m * args.n * args.k < kMinParallelProducts ? 1 : team_threads();

  thread_local Scratch scratch;
  float* const memory =
      scratch.floats(columns_size * steps + columns_size + (keeps_sums ? rows_size * columns_size : 0));
  auto* const b = reinterpret_cast<uint32_t*>(memory);
  float* const bias = memory + columns_size * steps;
  float* const sums = keeps_sums ? bias + columns_size : nullptr;

  for (int64_t column0 = 0; column0 < args.n; column0 += columns_size) {
    const int64_t columns = std::min(columns_size, args.n - column0);
    if (args.bias != nullptr) load_bias(args, column0, columns, bias);
    for (int64_t row0 = 0; row0 < args.m; row0 += rows_size) {
      const int64_t rows = std::min(rows_size, args.m - row0);
      for (int64_t depth0 = 0; depth0 < args.k; depth0 += depth_size) {
        const int64_t depth = std::min(depth_size, args.k - depth0);
        const Chunk chunk{.args = args,
                          .kernel = kernel,
                          .isa = isa,
                          .row0 = row0,
                          .rows = rows,
                          .column0 = column0,
                          .columns = columns,
                          .depth0 = depth0,
                          .depth = depth,
                          .steps = kernel.steps_of(depth),
                          .first = depth0 == 0,
                          .last = depth0 + depth == args.k,
                          .b = b,
                          .bias = args.bias != nullptr ? bias : nullptr,
                          .sums = sums};
        chunk.pack_b(threads);
        chunk.multiply(threads);
      }
    }
  }
}

}  // namespace cairn::kernels
