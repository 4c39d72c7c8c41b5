#include "runtime/kernels/cuda/embedding.h"

#include <algorithm>

#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

template <typename T>
struct LookUp {
  const int32_t* ids;
  const T* table;
  T* out;
  int64_t first, rows_in_table, width;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    const int64_t place = ids[row] - first;
    Pack<T, N> of;
    if (place >= 0 && place < rows_in_table) {
      of = load_pack<N>(table + place * width + c);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) store_f32(&of.at[k], 0.0f);
    }
    store_pack<N>(out + row * width + c, of);
  }
};

/// Places of rows in a table; below 0: none.
struct PlaceOfId {
  const int32_t* ids;
  int64_t first, rows_in_table;
  __device__ __forceinline__ int64_t operator()(int64_t row) const {
    const int64_t place = ids[row] - first;
    return place < rows_in_table ? place : -1;
  }
};
struct PlaceOfRow {
  const int32_t* at;
  TokenRuns tokens;
  int64_t first_row, samples;
  explicit PlaceOfRow(const RowPositions& of)
      : at(address_of(of.at)), tokens(of.tokens), first_row(of.first_row), samples(of.samples) {}
  __device__ __forceinline__ int64_t operator()(int64_t row) const {
    return at != nullptr ? at[row] : tokens.place(first_row + row, samples).position;
  }
};

template <typename T>
struct AddPosition {
  T* x;
  const T* table;
  PlaceOfRow place;
  int64_t width;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    auto of = load_pack<N>(x + row * width + c);
    const auto added = load_pack<N>(table + place(row) * width + c);
#pragma unroll
    for (int k = 0; k < N; ++k) store_f32(&of.at[k], load_f32(of.at[k]) + load_f32(added.at[k]));
    store_pack<N>(x + row * width + c, of);
  }
};

template <typename T>
struct LookUpPosition {
  const T* table;
  T* out;
  PlaceOfRow place;
  int64_t width;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    store_pack<N>(out + row * width + c, load_pack<N>(table + place(row) * width + c));
  }
};

// --- rows by place
// ----------------------------------------------------------------------------------------------------

constexpr int kSorters = static_cast<int>(kSortedRows / 2);
constexpr uint32_t kNoPlace = 0x7fffffff;  // behind all places

/// Place and row: no two are equal, so there is one order.
__device__ __forceinline__ uint64_t key_of(uint32_t place, int64_t row) {
  return static_cast<uint64_t>(place) << 32 | static_cast<uint64_t>(row);
}

/// A block sorts the keys of its chunk: Batcher's bitonic network (1968).
template <typename Place>
__global__ void __launch_bounds__(kSorters) sort_chunks(Place place_of, int64_t rows, uint64_t* keys) {
  RT_SHARED(uint64_t, room, kSortedRows);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSortedRows;
  for (int k = static_cast<int>(threadIdx.x); k < kSortedRows; k += kSorters) {
    const int64_t row = first + k, place = row < rows ? place_of(row) : -1;
    room[k] = key_of(place < 0 ? kNoPlace : static_cast<uint32_t>(place), row);
  }
  __syncthreads();
  const int t = static_cast<int>(threadIdx.x);
  for (int size = 2; size <= kSortedRows; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      const int low = 2 * t - (t & (step - 1)), high = low + step;
      const uint64_t a = room[low], b = room[high];
      if ((a > b) != ((low & size) != 0)) {
        room[low] = b;
        room[high] = a;
      }
      __syncthreads();
    }
  }
  for (int k = t; k < kSortedRows; k += kSorters) keys[first + k] = room[k];
}

/// Keys of a sorted chunk that are below `key`.
__device__ __forceinline__ int64_t keys_below(const uint64_t* chunk, uint64_t key) {
  int64_t below = 0;
#pragma unroll
  for (int64_t half = kSortedRows / 2; half > 0; half /= 2) below += chunk[below + half - 1] < key ? half : 0;
  return below + (chunk[below] < key ? 1 : 0);
}

/// A row that is sorted: `number` counts the rows of its place and part from 0, `of_place` those of its place. place
/// below 0: none.
struct Sorted {
  int32_t place, row, number, of_place;
};
__device__ __forceinline__ Sorted sorted_at(const int32_t* sorted, int64_t i) {
  const auto of = load_pack<4>(sorted + 4 * i);
  return {of.at[0], of.at[1], of.at[2], of.at[3]};
}

/// A thread puts its key where all chunks together have it. part_rows: of each part of the rows.
__global__ void __launch_bounds__(kThreads)
    merge_chunks(const uint64_t* keys, int64_t rows, int64_t part_rows, int32_t* sorted) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, chunks = row_chunks(rows);
  if (i >= chunks * kSortedRows) return;
  const uint64_t key = keys[i];
  const auto place = static_cast<uint32_t>(key >> 32);
  const auto row = static_cast<int64_t>(key & 0xffffffffu);
  if (row >= rows) return;
  const uint64_t first_of_part = key_of(place, row / part_rows * part_rows), first_of_place = key_of(place, 0);
  int64_t at = 0, part = 0, all = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    at += keys_below(keys + chunk * kSortedRows, key);
    part += keys_below(keys + chunk * kSortedRows, first_of_part);
    if (part_rows < rows) all += keys_below(keys + chunk * kSortedRows, first_of_place);
  }
  if (part_rows >= rows) all = part;
  Pack<int32_t, 4> of;
  of.at[0] = place == kNoPlace ? -1 : static_cast<int32_t>(place);
  of.at[1] = static_cast<int32_t>(row);
  of.at[2] = static_cast<int32_t>(at - part);
  of.at[3] = static_cast<int32_t>(at - all);
  store_pack<4>(sorted + 4 * at, of);
}

// --- their sums
// -------------------------------------------------------------------------------------------------------

template <typename T>
struct AddRows {
  const int32_t* sorted;  // [rows, 4]: Sorted
  const T* dout;
  float *partials, *dtable;
  int64_t rows, width, parts;
  float factor;

  /// Where the sum of the piece that begins with sorted row i is.
  __device__ __forceinline__ float* partial(int64_t i, bool first) const {
    return partials + (i / kPieceRows * 2 + (first ? 0 : 1)) * width;
  }
  /// Whether sorted row i is the number-th of its part of a place, which begins with sorted row i - number.
  __device__ __forceinline__ bool goes_on(int64_t i, int64_t number) const {
    if (i >= rows) return false;
    const Sorted of = sorted_at(sorted, i);
    return of.place >= 0 && of.number == number;
  }
  /// Rows from sorted row i on, `number` in their part: of the same part, and kPieceRows at most. By a warp.
  __device__ __forceinline__ int piece(int64_t i, int64_t number) const {
    int count = 0;
#pragma unroll
    for (int64_t k = 0; k < kPieceRows; k += kWarp) {
      const int64_t more = k + threadIdx.x % kWarp;
      count += __popc(__ballot_sync(kAllLanes, goes_on(i + more, number + more)));
    }
    return count;
  }
  template <int N>
  __device__ __forceinline__ Pack<float, N> sum_of_rows(int64_t i, int count, int64_t c) const {
    Pack<float, N> sum;
#pragma unroll
    for (int k = 0; k < N; ++k) sum.at[k] = 0;
#pragma unroll 8
    for (int row = 0; row < count; ++row) {
      const auto of = load_pack<N>(dout + sorted[4 * (i + row) + 1] * width + c);
#pragma unroll
      for (int k = 0; k < N; ++k) sum.at[k] += factor * load_f32(of.at[k]);
    }
    return sum;
  }
};

constexpr int kAdders = 192;  // threads of a block at most

/// Block (k, 0) has the first piece of the part of a place that begins among sorted rows [k kPieceRows, ...), block
/// (k, 1) a further one; where a part has one piece only there is nothing to do.
template <int N, typename T>
__global__ void __launch_bounds__(kAdders) add_pieces(AddRows<T> f) {
  int64_t i = -1;
  for (int64_t k = 0; k < kPieceRows; k += kWarp) {  // each warp for itself
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kPieceRows + k + threadIdx.x % kWarp;
    bool mine = false;
    if (at < f.rows) {
      const Sorted of = sorted_at(f.sorted, at);
      mine = of.place >= 0 && of.number % kPieceRows == 0 && (of.number != 0) == (blockIdx.y != 0) &&
             f.goes_on(at - of.number + kPieceRows, kPieceRows);
    }
    const uint32_t lanes = __ballot_sync(kAllLanes, mine);
    if (lanes != 0) i = static_cast<int64_t>(blockIdx.x) * kPieceRows + k + __ffs(static_cast<int>(lanes)) - 1;
  }
  if (i < 0) return;  // the block alike
  const int count = f.piece(i, sorted_at(f.sorted, i).number);
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * N; c < f.width; c += blockDim.x * N) {
    store_pack<N>(f.partial(i, blockIdx.y == 0) + c, f.template sum_of_rows<N>(i, count, c));
  }
}

/// A block for each sorted row: the first of a place adds up the rows of it, and where rows are cut into parts the sums
/// of these by a balanced tree, of which each thread keeps a sum of each level. A part without rows of the place is 0.
template <bool kTree, int N, typename T>
__global__ void __launch_bounds__(kAdders) add_places(AddRows<T> f) {
  const int64_t first = blockIdx.x, part_rows = f.rows / f.parts;
  const Sorted of = sorted_at(f.sorted, first);
  if (of.place < 0 || of.of_place != 0) return;  // the block alike
  const int64_t columns = (f.width + N - 1) / N, turns = (columns + blockDim.x - 1) / blockDim.x;
  for (int64_t turn = 0; turn < turns; ++turn) {  // whole warps, for piece()
    const int64_t column = (turn * blockDim.x + threadIdx.x) * N;
    const bool has = column < f.width;
    const int64_t c = has ? column : 0;
    float* const to = f.dtable + of.place * f.width + c;
    Pack<float, N> sum, into, levels[kTree ? kMostLevels : 1];
    if (has) into = load_pack<N>(to);  // beside the rows
    int64_t i = first;
    for (int64_t part = kTree ? 0 : f.parts - 1; part < f.parts; ++part) {
#pragma unroll
      for (int k = 0; k < N; ++k) sum.at[k] = 0;
      bool here = true;
      if constexpr (kTree) {
        here = i < f.rows;
        if (here) {
          const Sorted next = sorted_at(f.sorted, i);
          here = next.place == of.place && next.row / part_rows == part;
        }
      }
      if (here) {
        const int count = f.piece(i, 0);
        if (!f.goes_on(i + kPieceRows, kPieceRows)) {
          sum = f.template sum_of_rows<N>(i, count, c);
          i += count;
        } else {
          const int64_t begin = i;
          for (; f.goes_on(i, i - begin); i += kPieceRows) {
            const auto more = load_pack<N>(f.partial(i, i == begin) + c);
#pragma unroll
            for (int k = 0; k < N; ++k) sum.at[k] += more.at[k];
          }
          if constexpr (kTree) i += f.piece(i - kPieceRows, i - kPieceRows - begin) - kPieceRows;
        }
      }
      if constexpr (kTree) {
        bool joins = true;
#pragma unroll
        for (int level = 0; level < kMostLevels; ++level) {
          if (joins && (part >> level & 1) != 0) {
#pragma unroll
            for (int k = 0; k < N; ++k) sum.at[k] = levels[level].at[k] + sum.at[k];
          } else if (joins) {
            levels[level] = sum;
            joins = false;
          }
        }
      }
    }
    if (!has) continue;
#pragma unroll
    for (int k = 0; k < N; ++k) into.at[k] += sum.at[k];
    store_pack<N>(to, into);
  }
}

template <int N, typename T>
void add_sorted(Queue& on, const AddRows<T>& f) {
  const int64_t warps = std::min<int64_t>(blocks_for(f.width, N * kWarp), kAdders / kWarp);
  const dim3 threads{static_cast<unsigned>(warps * kWarp)};
  if (f.rows / f.parts > kPieceRows) {
    launch(on, {{static_cast<unsigned>(row_pieces(f.rows) / 2), 2}, threads}, add_pieces<N, T>, f);
  }
  const Size size{{static_cast<unsigned>(f.rows)}, threads};
  if (f.parts == 1) {
    launch(on, size, add_places<false, N, T>, f);
  } else {
    launch(on, size, add_places<true, 1, T>, f);
  }
}

template <typename Place, typename T>
void add_rows(Queue& on, const Place& place, const T* dout, float* dtable, int64_t rows, int64_t parts, int64_t width,
              float factor) {
  constexpr int kMany = 4;
  std::byte* const scratch = on.room<std::byte>(look_up_scratch_bytes(rows, width));
  if (scratch == nullptr) return;
  const int64_t chunks = row_chunks(rows);
  auto* const keys = reinterpret_cast<uint64_t*>(scratch);
  auto* const sorted = reinterpret_cast<int32_t*>(keys + chunks * kSortedRows);
  auto* const partials = reinterpret_cast<float*>(sorted + 4 * rows);
  launch(on, {{static_cast<unsigned>(chunks)}, {kSorters}}, sort_chunks<Place>, place, rows, keys);
  launch(on, {{blocks_for(chunks * kSortedRows, kThreads)}, {kThreads}}, merge_chunks, keys, rows, rows / parts,
         sorted);
  const AddRows<T> f{sorted, dout, partials, dtable, rows, width, parts, factor};
  if (width % kMany == 0 && aligned_to(16, dtable) && aligned_to(kMany * static_cast<int64_t>(sizeof(T)), dout)) {
    add_sorted<kMany>(on, f);
  } else {
    add_sorted<1>(on, f);
  }
}

}  // namespace

template <typename T>
void embedding_forward(Queue& on, const int32_t* ids, int64_t rows, const TableRange& of, const T* table, T* out) {
  map_rows<kWide<T>>(on, LookUp<T>{ids, table, out, of.first, of.count, of.width}, rows, of.width,
                     aligned_to(16, table, out));
}
template <typename T>
void embedding_backward(Queue& on, const int32_t* ids, int64_t rows, const TableRange& of, const T* dout, float* dtable,
                        float factor) {
  add_rows(on, PlaceOfId{ids, of.first, of.count}, dout, dtable, rows, 1, of.width, factor);
}
template <typename T>
void embedding_backward_parts(Queue& on, const int32_t* ids, int64_t rows, int64_t parts, const TableRange& of,
                              const T* dout, float* dtable, float factor) {
  add_rows(on, PlaceOfId{ids, of.first, of.count}, dout, dtable, rows, parts, of.width, factor);
}
template <typename T>
void positions_forward(Queue& on, T* x, const T* table, const RowPositions& positions, int64_t rows, int64_t width) {
  map_rows<kWide<T>>(on, AddPosition<T>{x, table, PlaceOfRow(positions), width}, rows, width, aligned_to(16, x, table));
}
template <typename T>
void positions_backward(Queue& on, const T* dout, float* dtable, const RowPositions& positions, int64_t rows,
                        int64_t width) {
  add_rows(on, PlaceOfRow(positions), dout, dtable, rows, 1, width, 1.0f);
}
template <typename T>
void positions_look_up(Queue& on, const T* table, const RowPositions& positions, int64_t rows, int64_t width, T* out) {
  map_rows<kWide<T>>(on, LookUpPosition<T>{table, out, PlaceOfRow(positions), width}, rows, width,
                     aligned_to(16, table, out));
}

#define RT_INSTANTIATE(T)                                                     \
  template decltype(embedding_forward<T>) embedding_forward<T>;               \
  template decltype(embedding_backward<T>) embedding_backward<T>;             \
  template decltype(embedding_backward_parts<T>) embedding_backward_parts<T>; \
  template decltype(positions_forward<T>) positions_forward<T>;               \
  template decltype(positions_backward<T>) positions_backward<T>;             \
  template decltype(positions_look_up<T>) positions_look_up<T>
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
