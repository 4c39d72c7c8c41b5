#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <vector>

#include "runtime/core/check.h"
#include "runtime/kernels/gemm_amx.h"
#include "runtime/kernels/gemm_kernel.h"
#include "runtime/kernels/matmul_impl.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/scratch.h"
#include "runtime/kernels/simd.h"

// After Goto & van de Geijn 2008. C is computed in blocks of columns; for each, the sum runs in chunks. A chunk of B is
// packed by all threads into one block in the shared cache; then threads take parts of the rows, pack them into their
// own second-level cache, and multiply, panel of B by panel. When no part is left to begin, panels of those at work are
// taken.
//
// An element's sum is cut into chunks by k alone and each chunk runs in order, so its bits depend neither on the number
// of threads nor on m, n or the element's place. A sum in parts (MatmulArgs::parts) has its tree inside a chunk, tile
// by tile, where whole parts fit into one, and across chunks where they do not; neither shows in the bits.

namespace cairn::kernels {
namespace {

constexpr int64_t kBlockWords = 6 << 18;           // 6 MiB of B
constexpr int64_t kSumRows = 2048;                 // of float sums kept from chunk to chunk for 16-bit results,
constexpr int64_t kSumColumns = 3072;              // and columns
constexpr int64_t kPastBytes = 4 << 20;            // a larger result would leave the caches before it is read
constexpr int64_t kTurnRows = 256;                 // of C, in float while a kernel takes its sums in turns,
constexpr int64_t kTreeRows = 64;                  // or while trees of them grow, each level in as much memory
constexpr int64_t kLeastTaken = 3;                 // panels of B for which another core's rows are worth reading
constexpr int64_t kPiecesPerThread = 4;            // of B to pack, or of rows that lie ready
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
RT_INLINE void add_tile_body(const float* tile, int64_t tile_stride, float* to, int64_t stride, int64_t rows,
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
RT_CLONES(add_tile)

/// to = tile (+ sums) (+ to), rounded once.
template <typename T>
RT_INLINE void round_tile_body(float* tile, int64_t tile_stride, const float* sums, int64_t sums_stride, T* to,
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
RT_CLONES(round_tile)

RT_INLINE void add_row_body(const float* row, float* tile, int64_t tile_stride, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) tile[r * tile_stride + c] += row[c];
  }
}
RT_CLONES(add_row)

template <typename T>
void load_bias(const void* from, int64_t at, int64_t columns, float* to) {
  for (int64_t c = 0; c < columns; ++c) to[c] = load_f32(static_cast<const T*>(from)[at + c]);
}

void load_bias(const MatmulArgs& args, int64_t at, int64_t columns, float* to) {
  if (args.ab_dtype == DType::kF32) return load_bias<float>(address_of(args.bias), at, columns, to);
  if (args.ab_dtype == DType::kBf16) return load_bias<bf16>(address_of(args.bias), at, columns, to);
  load_bias<f16>(address_of(args.bias), at, columns, to);
}

/// A run of the sum that is contiguous in A and in B.
struct Segment {
  int64_t a0 = 0;           // its first element, of k
  const void* b = nullptr;  // operand B, and its first row there
  int64_t b0 = 0;
  int64_t depth = 0, steps = 0;
  int64_t step0 = 0;                     // steps of the chunk before it
  bool begins = true, completes = true;  // a part of the sum
};

/// One chunk of the sum: segments, and what its sum becomes. Sums wait at levels 0, 1, ..., those of larger subtrees
/// below.
struct ChunkSum {
  std::span<const Segment> segments;
  int64_t steps = 0;
  bool continues = false;  // the sum at `level` is of the same part
  int64_t level = 0;       // where it stands
  int64_t joins = 0;       // sums below it that it completes: so many levels down
  bool first = false, last = false;
};

/// One chunk of the sum for one block of C.
struct Chunk {
  const MatmulArgs& args;
  const GemmKernel& kernel;
  GemmIsa isa;
  const ChunkSum& sum;
  bool whole_steps;                      // each segment is
  int64_t row0, rows, column0, columns;  // the block of C
  uint32_t* b;                           // packed
  const float* bias;                     // [columns], or null
  float* sums;                           // levels of [sum_rows, columns], but for level 0 of a float C, which is C
  int64_t sum_rows;

  /// A where it is packed: rows from row0 on, segment by segment.
  struct PackedA {
    uint32_t* words = nullptr;  // null: as it lies
    int64_t row0 = 0, rows = 0;
  };
  /// Rows [begin, end) times panels of B up to panel1. One thread packs the rows; whoever takes the next panel
  /// multiplies.
  struct Part {
    int64_t begin = 0, end = 0, panel1 = 0;
    PackedA a;
    std::atomic<bool> packed = false;
    alignas(64) std::atomic<int64_t> next_panel = 0;
  };
  /// A level of the sums at (row, column) of the block.
  struct Level {
    float* at;
    int64_t stride;
  };

  /// Both on `threads` threads.
  void pack_b(int64_t threads) const;
  void multiply(int64_t threads) const;
  void pack_a(int64_t begin, int64_t end, const PackedA& to) const;
  /// All panels of B that nobody has taken.
  void multiply_part(Part& part) const;
  /// What a tile will be added to lies far away; it arrives while the tile is computed.
  void fetch(int64_t row, int64_t column, int64_t count, int64_t width) const;
  void store(float* tile, int64_t row, int64_t column, int64_t count, int64_t width) const;
  int64_t turn_steps() const { return kernel.turn_steps == 0 ? sum.steps : kernel.turn_steps; }
  int64_t rows_of_turn() const {
    const int64_t most = sum.segments.size() > 1 ? kTreeRows : turn_steps() < sum.steps ? kTurnRows : kernel.rows;
    return most / kernel.rows * kernel.rows;
  }
  /// One for each subtree that waits, the part at work, and what is added to it where the kernel does not do that.
  int64_t slots_of_turn() const { return sum.segments.size() > 1 ? std::bit_width(sum.segments.size()) + 2 : 1; }
  /// Rows are written while the next ones are computed, so turns take two such memories in turn.
  int64_t turns_elems() const { return (writes_rows() ? 2 : 1) * slots_of_turn() * rows_of_turn() * kernel.columns; }
  /// Whether the kernel writes whole rows of tiles itself, in store() or beside its next tiles; and such rows.
  bool writes_rows() const;
  GemmRows rows_to_write(const float* sums, int64_t row, int64_t column, int64_t count) const;
  Level level(int64_t level, int64_t row, int64_t column) const {
    if (args.c_dtype != DType::kF32) return {sums + (level * sum_rows + row) * columns + column, columns};
    if (level == 0)
      return {static_cast<float*>(address_of(args.c)) + (row0 + row) * args.ldc + column0 + column, args.ldc};
    return {sums + ((level - 1) * sum_rows + row) * columns + column, columns};
  }
  int64_t panels() const { return ceil_div(columns, kernel.columns); }
  /// Whether rows of A are multiplied as they lie: whole tiles of them, and not all in the same sets of a cache.
  bool takes_rows() const {
    constexpr int64_t kSetsBytes = 4096;
    return kernel.lying && !args.trans_a && rows % kernel.rows == 0 && whole_steps && args.lda * 2 % kSetsBytes != 0;
  }
};

/// A tile at (row, column) of the block.
void Chunk::store(float* tile, int64_t row, int64_t column, int64_t count, int64_t width) const {
  const int64_t tile_stride = kernel.columns;
  if (writes_rows() && width == tile_stride) {
    GemmRows out = rows_to_write(tile, row, column, count);
    return amx_write(out, count);
  }
  if (sum.first && bias != nullptr) add_row(bias + column, tile, tile_stride, count, width);
  bool continues = sum.continues;
  if (sum.joins > 0) {
    for (int64_t down = continues ? 0 : 1; down <= sum.joins; ++down) {
      const Level joined = level(sum.level - down, row, column);
      add_tile(joined.at, joined.stride, tile, tile_stride, count, width, true);
    }
    continues = false;
  }
  if (args.c_dtype == DType::kF32 || !sum.last) {
    const Level to = level(sum.level - sum.joins, row, column);
    const bool adds = continues || (sum.first && args.c_dtype == DType::kF32 && args.accumulate);
    return add_tile(tile, tile_stride, to.at, to.stride, count, width, adds);
  }
  const float* const before = continues ? level(sum.level, row, column).at : nullptr;
  const int64_t at = (row0 + row) * args.ldc + column0 + column;
  if (args.c_dtype == DType::kBf16) {
    return round_tile(tile, tile_stride, before, columns, static_cast<bf16*>(address_of(args.c)) + at, args.ldc, count,
                      width, args.accumulate);
  }
  round_tile(tile, tile_stride, before, columns, static_cast<f16*>(address_of(args.c)) + at, args.ldc, count, width,
             args.accumulate);
}

bool Chunk::writes_rows() const {
  // Sums in parts are rounded elsewhere too, where denormal numbers stay; as float, one chunk has all of their tree.
  if (args.parts > 1) return kernel.amx && args.c_dtype == DType::kF32 && sum.first && sum.last;
  return kernel.amx && (args.c_dtype == DType::kF32 || !sum.last || (args.c_dtype == DType::kBf16 && !args.accumulate));
}

GemmRows Chunk::rows_to_write(const float* from, int64_t row, int64_t column, int64_t count) const {
  const Level partial = level(0, row, column);
  GemmRows out{.from = from,
               .bias = sum.first && bias != nullptr ? bias + column : nullptr,
               .before_row = partial.stride,
               .to = reinterpret_cast<char*>(partial.at),
               .row_bytes = partial.stride * 4,
               .rows = count};
  const bool float_c = args.c_dtype == DType::kF32;
  if (sum.continues || (sum.first && float_c && args.accumulate)) out.before = partial.at;
  if (!sum.last) return out;
  if (!float_c) {
    out.round = true;
    out.to = static_cast<char*>(address_of(args.c)) + ((row0 + row) * args.ldc + column0 + column) * 2;
    out.row_bytes = args.ldc * 2;
  }
  out.past = !(float_c && out.before != nullptr) && args.m * args.n * dtype_size_bytes(args.c_dtype) >= kPastBytes &&
             (reinterpret_cast<uintptr_t>(out.to) | static_cast<uintptr_t>(out.row_bytes)) % 64 == 0;
  return out;
}

void Chunk::fetch(int64_t row, int64_t column, int64_t count, int64_t width) const {
  const bool adds = sum.continues || (args.c_dtype == DType::kF32 && args.accumulate);
  if (!adds || kernel.amx) return;
  const Level to = level(sum.level, row, column);
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t x = 0; x < width; x += 16) __builtin_prefetch(to.at + r * to.stride + x, 1);
  }
}

void Chunk::multiply_part(Part& part) const {
  const auto take = [&] { return part.next_panel.fetch_add(1, std::memory_order_relaxed); };
  int64_t panel = take();
  if (panel >= part.panel1) return;
  const int64_t begin = part.begin, end = part.end;
  const PackedA& a = part.a;
  const int64_t a_row_bytes = a.words == nullptr ? args.lda * 2 : 0;
  const auto rows_of_a = [&](const Segment& segment, int64_t row, int64_t step) -> const void* {
    if (a.words != nullptr) {
      return a.words + segment.step0 * a.rows + (row - a.row0) * segment.steps + step * kernel.rows;
    }
    return static_cast<const bf16*>(address_of(args.a)) + (row0 + row) * args.lda + segment.a0 + 2 * step;
  };
  const int64_t most_steps = turn_steps(), turn_rows = rows_of_turn(), slots = slots_of_turn();
  const int64_t tile_elems = kernel.rows * kernel.columns, turn_elems = turn_rows * kernel.columns;
  const bool beside = writes_rows();
  const Scratch scratch(turns_elems());
  float* const memory = scratch.floats();
  float* tiles = memory;
  GemmRows out;
  constexpr int64_t kLineWords = 16;  // a panel of B has a line of a column for every 16 steps
  const int64_t fetch_lines = kernel.amx ? ceil_div(kernel.columns, ceil_div(end - begin, kernel.rows)) : 0;
  const AmxTiles registers(kernel.amx);
  for (; panel < part.panel1; panel = take()) {
    const int64_t column = panel * kernel.columns;
    const int64_t width = std::min(kernel.columns, columns - column);
    for (int64_t turn_row = begin; turn_row < end; turn_row += turn_rows) {
      const int64_t turn_end = std::min(turn_row + turn_rows, end);
      uint64_t parts_done = 0;
      const bool whole = width == kernel.columns;
      if (beside) tiles = tiles == memory ? memory + slots * turn_elems : memory;
      const int64_t tile_steps = ceil_div(turn_end - turn_row, kernel.rows) * (sum.steps / kAmxSteps);
      const int64_t out_rows = beside ? ceil_div(out.rows, tile_steps) : 0;
      for (const Segment& segment : sum.segments) {
        const bool last = &segment == &sum.segments.back();
        const uint32_t* const b_panel = b + segment.step0 * panels() * kernel.columns + column * segment.steps;
        // Of the panel that follows, each tile of rows fetches its share.
        const int64_t fetched = (turn_row - begin) / kernel.rows * segment.steps / kAmxSteps * fetch_lines;
        const uint32_t* next = b_panel + segment.steps * kernel.columns + fetched * kLineWords;
        float* const slot = tiles + std::popcount(parts_done) * turn_elems;
        const int64_t joins = segment.completes ? std::countr_one(parts_done) : 0;
        for (int64_t s = 0; s < segment.steps; s += most_steps) {
          const bool ends = s + most_steps >= segment.steps;
          const int64_t steps = std::min(most_steps, segment.steps - s);
          for (int64_t row = turn_row; row < turn_end; row += kernel.rows) {
            const int64_t count = std::min(kernel.rows, end - row);
            if (ends && last) fetch(row, column, count, width);
            float* tile = slot + (row - turn_row) * kernel.columns;
            const bool adds = s > 0 || !segment.begins, apart = adds && !kernel.amx;
            float* const to = apart ? tiles + (slots - 1) * turn_elems : tile;
            kernel.tile(rows_of_a(segment, row, s), a_row_bytes, b_panel + s * kernel.columns, steps, adds && !apart,
                        to, kernel.columns,
                        {.fetch = reinterpret_cast<const char*>(next),
                         .fetch_lines = fetch_lines,
                         .out = &out,
                         .out_rows = out_rows});
            next += steps / kAmxSteps * fetch_lines * kLineWords;
            if (apart) add_tile(to, tile_elems, tile, tile_elems, 1, tile_elems, true);
            if (!ends) continue;
            for (int64_t j = 0; j < joins; ++j, tile -= turn_elems) {
              add_tile(tile, tile_elems, tile - turn_elems, tile_elems, 1, tile_elems, true);
            }
            if (last && !(whole && beside)) store(tile, row, column, count, width);
          }
        }
        parts_done += segment.completes ? 1 : 0;
      }
      if (out.rows > 0) amx_write(out, out.rows);
      if (whole && beside) out = rows_to_write(tiles, turn_row, column, turn_end - turn_row);
    }
  }
  if (out.rows > 0) amx_write(out, out.rows);
}

void Chunk::pack_b(int64_t threads) const {
  const int64_t pieces = threads == 1 ? 1 : kPiecesPerThread * threads;
  // A piece is what lies together in memory: lines of the sum, or steps of all lines.
  const int64_t line_pieces = args.trans_b ? pieces : 1, step_pieces = pieces / line_pieces;
  const int64_t size = ceil_div(panels(), line_pieces) * kernel.columns;
  for (const Segment& segment : sum.segments) {
    const int64_t steps = round_up(ceil_div(segment.steps, step_pieces), kernel.step_unit);
    const int64_t line_tasks = ceil_div(panels() * kernel.columns, size);
    parallel_tasks(line_tasks * ceil_div(segment.steps, steps), threads == 1, [&](int64_t task) {
      const int64_t line = task % line_tasks * size, step = task / line_tasks * steps;
      const int64_t depth = kernel.depth_of(step);
      pack_panels(isa, kernel, {segment.b, args.ldb, args.trans_b, args.ab_dtype}, GemmSide::kB, column0 + line,
                  std::min(size, columns - line), segment.b0 + depth,
                  std::min(kernel.depth_of(steps), segment.depth - depth), segment.steps,
                  b + segment.step0 * panels() * kernel.columns + line * segment.steps + step * kernel.columns);
    });
  }
}

void Chunk::pack_a(int64_t begin, int64_t end, const PackedA& to) const {
  const GemmOperand from{address_of(args.a), args.lda, !args.trans_a, args.ab_dtype};
  for (const Segment& segment : sum.segments) {
    pack_panels(isa, kernel, from, GemmSide::kA, row0 + begin, end - begin, segment.a0, segment.depth, segment.steps,
                to.words + segment.step0 * to.rows + (begin - to.row0) * segment.steps);
  }
}

void Chunk::multiply(int64_t threads) const {
  const int64_t steps = sum.steps, row_tiles = ceil_div(rows, kernel.rows);
  int64_t row_parts = ceil_div(row_tiles, std::max<int64_t>(kernel.part_words / steps / kernel.rows, 1));
  if (threads > 1) row_parts = round_up(std::max(row_parts, rows / kernel.least_rows), threads);
  row_parts = std::min(row_parts, row_tiles);
  const auto part_begin = [&](int64_t part) { return std::min(part * row_tiles / row_parts * kernel.rows, rows); };
  const bool direct = takes_rows();
  const int64_t packed_elems = direct ? 0 : ceil_div(row_tiles, row_parts) * kernel.rows * steps;
  // Rows that lie ready are cut by columns too: a thread's half of B may stay in its second-level cache.
  const int64_t column_parts =
      direct && threads > 1 ? std::min(panels(), ceil_div(kPiecesPerThread * threads, row_parts)) : 1;
  const int64_t count = row_parts * column_parts;
  thread_local std::unique_ptr<Part[]> memory;
  thread_local int64_t capacity = 0;
  if (count > capacity) memory = std::make_unique<Part[]>(static_cast<size_t>(capacity = count));
  Part* const parts = memory.get();
  for (int64_t k = 0; k < count; ++k) {
    const int64_t row_part = k / column_parts, column_part = k % column_parts;
    Part& part = parts[k];
    part.begin = part_begin(row_part);
    part.end = part_begin(row_part + 1);
    part.a = {};
    part.packed.store(direct, std::memory_order_relaxed);
    part.next_panel.store(column_part * panels() / column_parts, std::memory_order_relaxed);
    part.panel1 = (column_part + 1) * panels() / column_parts;
  }
  // A part's own thread keeps its rows packed: it begins no other before this one's panels are taken, and once others
  // help, no part is left to begin. So they lie at one place of a thread's scratch, and all else it takes behind them.
  const int64_t helping = threads == 1 ? 0 : threads;
  parallel_tasks(count + helping, threads == 1, [&](int64_t task) {
    const Scratch packed(packed_elems, turns_elems());
    if (task >= count) {
      for (int64_t other = count - 1; other >= 0; --other) {
        Part& part = parts[other];
        if (part.next_panel.load(std::memory_order_relaxed) > part.panel1 - kLeastTaken) continue;
        part.packed.wait(false, std::memory_order_acquire);
        multiply_part(part);
      }
      return;
    }
    Part& part = parts[task];
    if (!direct) {
      part.a = {reinterpret_cast<uint32_t*>(packed.floats()), part.begin, round_up(part.end - part.begin, kernel.rows)};
      pack_a(part.begin, part.end, part.a);
      part.packed.store(true, std::memory_order_release);
      part.packed.notify_all();
    }
    multiply_part(part);
  });
}

/// The chunks of a sum, in order.
class SumPlan {
 public:
  SumPlan(const MatmulArgs& args, const GemmKernel& kernel) {
    segments_.clear();
    chunks_.clear();
    const MatmulStretch one{args.b, args.k};
    const std::span<const MatmulStretch> stretches =
        args.stretches.empty() ? std::span(&one, 1) : std::span(args.stretches);
    int64_t part_steps = 0, part_depth = 0;
    for (const MatmulStretch& stretch : stretches) {
      part_steps += kernel.steps_of(stretch.k / args.parts);
      part_depth += stretch.k / args.parts;
    }
    const int64_t chunk_steps = kernel.chunk_steps(part_depth);
    // Whole parts, as many as fit into a chunk; one that does not is cut into chunks as a sum of its own.
    int64_t together = 1;
    while (2 * together <= args.parts && 2 * together * part_steps <= kernel.max_steps) together *= 2;
    for (int64_t part = 0; part < args.parts; ++part) {
      bool begins = true;
      int64_t stretch_a0 = 0;
      for (const MatmulStretch& stretch : stretches) {
        const int64_t depth = stretch.k / args.parts, unit = kernel.depth_of(kernel.step_unit);
        const int64_t most =
            part_steps <= kernel.max_steps ? depth : part_size(depth, kernel.depth_of(chunk_steps), unit);
        for (int64_t at = 0; at < depth; at += most) {
          const int64_t b0 = part * depth + at, size = std::min(most, depth - at);
          segments_.push_back({.a0 = stretch_a0 + b0,
                               .b = address_of(stretch.b),
                               .b0 = b0,
                               .depth = size,
                               .steps = kernel.steps_of(size),
                               .begins = begins,
                               .completes = false});
          whole_steps_ = whole_steps_ && size % unit == 0;
          begins = false;
        }
        stretch_a0 += stretch.k;
      }
      segments_.back().completes = true;
    }
    cut(part_steps <= kernel.max_steps ? together : 0);
  }

  const std::vector<ChunkSum>& chunks() const { return chunks_; }
  int64_t most_steps() const { return most_steps_; }
  int64_t levels() const { return levels_; }
  int64_t most_segments() const { return most_segments_; }
  bool whole_steps() const { return whole_steps_; }

 private:
  /// Chunks of `together` parts; 0: of a segment each, and a part's first one begins a sum anew.
  void cut(int64_t together) {
    uint64_t done = 0;  // chunks, or parts, that are complete
    bool continues = false;
    for (size_t begin = 0, end; begin < segments_.size(); begin = end) {
      ChunkSum chunk{.continues = continues, .level = std::popcount(done), .first = begin == 0};
      int64_t parts = 0;
      for (end = begin; end < segments_.size() && (end == begin || parts < together); ++end) {
        Segment& segment = segments_[end];
        segment.step0 = chunk.steps;
        chunk.steps += segment.steps;
        parts += segment.completes ? 1 : 0;
      }
      const bool completes = segments_[end - 1].completes;
      if (together == 0) segments_[begin].begins = true;
      chunk.segments = {&segments_[begin], end - begin};
      chunk.last = end == segments_.size();
      if (completes) chunk.joins = std::countr_one(done++);
      continues = !completes;
      if (!chunk.last) levels_ = std::max(levels_, chunk.level - chunk.joins + 1);
      most_steps_ = std::max(most_steps_, chunk.steps);
      most_segments_ = std::max(most_segments_, std::ssize(chunk.segments));
      chunks_.push_back(chunk);
    }
  }

  static thread_local std::vector<Segment> segments_;  // kept from call to call
  static thread_local std::vector<ChunkSum> chunks_;
  int64_t most_steps_ = 0, most_segments_ = 0, levels_ = 0;
  bool whole_steps_ = true;
};
thread_local std::vector<Segment> SumPlan::segments_;
thread_local std::vector<ChunkSum> SumPlan::chunks_;

/// Of any kernel.
constexpr int64_t kMostTileRows = 32, kMostTileColumns = 64, kMostSteps = 1536, kMostPartWords = 224 << 10;

/// Of a task: a part of A of m rows, and its turns of tiles.
int64_t task_scratch(int64_t m, int64_t segments) {
  const int64_t packed =
      std::max(std::min(kMostPartWords, round_up(m, kMostTileRows) * kMostSteps), kMostTileRows * kMostSteps);
  const int64_t of_tree = (std::bit_width(static_cast<uint64_t>(segments)) + 2) * kTreeRows;
  return packed + 2 * std::max(of_tree, kTurnRows) * kMostTileColumns;
}

}  // namespace

ScratchElems matmul_scratch(const MatmulArgs& args) {
  const int64_t columns = round_up(args.n, kMostTileColumns), runs = std::max<int64_t>(std::ssize(args.stretches), 1);
  ScratchElems out{.own = std::min(kBlockWords, columns * kMostSteps) + columns,
                   .task = task_scratch(args.m, args.parts * runs)};
  // The smallest chunk of any kernel has 512 elements of a sum; those of parts are padded.
  if (args.k <= 512 && args.parts == 1) return out;
  const int64_t levels = std::bit_width(static_cast<uint64_t>(args.parts)) - (args.c_dtype == DType::kF32 ? 1 : 0);
  out.own += levels * std::min(args.m, kSumRows) * std::min(columns, kSumColumns);
  return out;
}

void matmul_packed(const MatmulArgs& args, GemmIsa isa) {
  const GemmKernel kernel = gemm_kernel(isa, args.ab_dtype);
  const SumPlan plan(args, kernel);
  const int64_t steps = plan.most_steps();
  const int64_t kept = std::max<int64_t>(0, plan.levels() - (args.c_dtype == DType::kF32 ? 1 : 0));
  const int64_t fitting = kept > 0 ? std::min(kBlockWords / steps, kSumColumns) : kBlockWords / steps;
  const int64_t columns_size = std::min(part_size(args.n, fitting, kernel.columns), round_up(args.n, kernel.columns));
  const int64_t rows_size = kept > 0 ? std::min(args.m, kSumRows) : args.m;
  const int64_t threads = args.m * args.n * args.k < kMinParallelProducts ? 1 : team_threads();

  const Scratch scratch(columns_size * steps + columns_size + kept * rows_size * columns_size,
                        task_scratch(args.m, plan.most_segments()));
  float* const memory = scratch.floats();
  auto* const b = reinterpret_cast<uint32_t*>(memory);
  float* const bias = memory + columns_size * steps;
  float* const sums = kept > 0 ? bias + columns_size : nullptr;

  for (int64_t column0 = 0; column0 < args.n; column0 += columns_size) {
    const int64_t columns = std::min(columns_size, args.n - column0);
    if (args.bias) load_bias(args, column0, columns, bias);
    for (int64_t row0 = 0; row0 < args.m; row0 += rows_size) {
      const int64_t rows = std::min(rows_size, args.m - row0);
      for (const ChunkSum& sum : plan.chunks()) {
        const Chunk chunk{.args = args,
                          .kernel = kernel,
                          .isa = isa,
                          .sum = sum,
                          .whole_steps = plan.whole_steps(),
                          .row0 = row0,
                          .rows = rows,
                          .column0 = column0,
                          .columns = columns,
                          .b = b,
                          .bias = args.bias ? bias : nullptr,
                          .sums = sums,
                          .sum_rows = rows_size};
        chunk.pack_b(threads);
        chunk.multiply(threads);
      }
    }
  }
}

}  // namespace cairn::kernels
