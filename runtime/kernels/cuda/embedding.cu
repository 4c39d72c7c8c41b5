#include "runtime/kernels/cuda/embedding.h"

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

constexpr int kAdders = 128;

/// A block for each row: the first of its place adds up all rows of it, in their order.
template <int N, typename Place, typename T>
__global__ void __launch_bounds__(kAdders, 6)
    add_rows_of_place(Place place_of, const T* dout, float* dtable, int64_t rows, int64_t width, float factor) {
  RT_SHARED(float, room, 2 * kAdders / kWarp);
  const int64_t row = blockIdx.x, place = place_of(row);
  if (place < 0) return;  // the block alike
  float earlier = 0, none = 0;
  for (int64_t r = threadIdx.x; r < row; r += kAdders) earlier += place_of(r) == place ? 1.0f : 0.0f;
  block_sums(earlier, none, room);
  if (earlier > 0) return;
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * N; c < width; c += kAdders * N) {
    auto sum = load_pack<N>(dtable + place * width + c);
    for (int64_t r = row; r < rows; ++r) {
      if (place_of(r) != place) continue;
      const auto of = load_pack<N>(dout + r * width + c);
#pragma unroll
      for (int k = 0; k < N; ++k) sum.at[k] += factor * load_f32(of.at[k]);
    }
    store_pack<N>(dtable + place * width + c, sum);
  }
}

/// The same with the sums of `parts` equal runs of rows added by a balanced tree, of which each thread keeps a sum of
/// each level. A run without rows of the place adds 0.
template <typename Place, typename T>
__global__ void __launch_bounds__(kAdders)
    add_parts_of_place(Place place_of, const T* dout, float* dtable, int64_t rows, int64_t parts, int64_t width,
                       float factor) {
  RT_SHARED(float, room, 2 * kAdders / kWarp);
  const int64_t row = blockIdx.x, place = place_of(row), part_rows = rows / parts;
  if (place < 0) return;  // the block alike
  float earlier = 0, none = 0;
  for (int64_t r = threadIdx.x; r < row; r += kAdders) earlier += place_of(r) == place ? 1.0f : 0.0f;
  block_sums(earlier, none, room);
  if (earlier > 0) return;
  for (int64_t c = threadIdx.x; c < width; c += kAdders) {
    float levels[kMostLevels], sum = 0;
#pragma unroll
    for (int level = 0; level < kMostLevels; ++level) levels[level] = 0;
    for (int64_t part = 0; part < parts; ++part) {
      sum = 0;
      for (int64_t r = part * part_rows; r < (part + 1) * part_rows; ++r) {
        if (place_of(r) == place) sum += factor * load_f32(dout[r * width + c]);
      }
      bool joins = true;
#pragma unroll
      for (int level = 0; level < kMostLevels; ++level) {
        if (joins && (part >> level & 1) != 0) {
          sum = levels[level] + sum;
        } else if (joins) {
          levels[level] = sum;
          joins = false;
        }
      }
    }
    dtable[place * width + c] += sum;
  }
}

template <typename Place, typename T>
void add_rows(Queue& on, const Place& place, const T* dout, float* dtable, int64_t rows, int64_t width, float factor) {
  constexpr int kMany = 4;
  const Size size{{static_cast<unsigned>(rows)}, {kAdders}};
  if (width % kMany == 0 && aligned_to(16, dtable) && aligned_to(kMany * static_cast<int64_t>(sizeof(T)), dout)) {
    launch(on, size, add_rows_of_place<kMany, Place, T>, place, dout, dtable, rows, width, factor);
  } else {
    launch(on, size, add_rows_of_place<1, Place, T>, place, dout, dtable, rows, width, factor);
  }
}

/// A thread adds up N columns of one row of the table.
template <typename T>
struct AddRows {
  DeviceRowsByPlace by;
  const T* dout;
  float* dtable;
  int64_t width;
  float factor;
  template <int N>
  __device__ void at(int64_t place, int64_t c) const {
    float* const into = dtable + by.places[place] * width + c;
    auto sum = load_pack<N>(into);
    for (int32_t i = by.begins[place]; i < by.begins[place + 1]; ++i) {
      const auto of = load_pack<N>(dout + by.rows[i] * width + c);
#pragma unroll
      for (int k = 0; k < N; ++k) sum.at[k] += factor * load_f32(of.at[k]);
    }
    store_pack<N>(into, sum);
  }
};

}  // namespace

template <typename T>
void embedding_forward(Queue& on, const int32_t* ids, int64_t rows, const T* table, int64_t first,
                       int64_t rows_in_table, int64_t width, T* out) {
  map_rows<kWide<T>>(on, LookUp<T>{ids, table, out, first, rows_in_table, width}, rows, width,
                     aligned_to(16, table, out));
}
template <typename T>
void embedding_backward(Queue& on, const DeviceRowsByPlace& by, const T* dout, int64_t width, float* dtable,
                        float factor) {
  map_rows<4>(on, AddRows<T>{by, dout, dtable, width, factor}, by.count, width,
              aligned_to(16, dtable) && aligned_to(4 * static_cast<int64_t>(sizeof(T)), dout));
}
template <typename T>
void embedding_backward(Queue& on, const int32_t* ids, int64_t rows, const TableRange& of, const T* dout, float* dtable,
                        float factor) {
  add_rows(on, PlaceOfId{ids, of.first, of.count}, dout, dtable, rows, of.width, factor);
}
template <typename T>
void embedding_backward_parts(Queue& on, const int32_t* ids, int64_t rows, int64_t parts, const TableRange& of,
                              const T* dout, float* dtable, float factor) {
  launch(on, {{static_cast<unsigned>(rows)}, {kAdders}}, add_parts_of_place<PlaceOfId, T>,
         PlaceOfId{ids, of.first, of.count}, dout, dtable, rows, parts, of.width, factor);
}
template <typename T>
void positions_forward(Queue& on, T* x, const T* table, const RowPositions& positions, int64_t rows, int64_t width) {
  map_rows<kWide<T>>(on, AddPosition<T>{x, table, PlaceOfRow(positions), width}, rows, width, aligned_to(16, x, table));
}
template <typename T>
void positions_backward(Queue& on, const T* dout, float* dtable, const RowPositions& positions, int64_t rows,
                        int64_t width) {
  add_rows(on, PlaceOfRow(positions), dout, dtable, rows, width, 1.0f);
}
template <typename T>
void positions_look_up(Queue& on, const T* table, const RowPositions& positions, int64_t rows, int64_t width, T* out) {
  map_rows<kWide<T>>(on, LookUpPosition<T>{table, out, PlaceOfRow(positions), width}, rows, width,
                     aligned_to(16, table, out));
}

#define RT_INSTANTIATE(T)                                                                                           \
  template void embedding_forward<T>(Queue&, const int32_t*, int64_t, const T*, int64_t, int64_t, int64_t, T*);     \
  template void embedding_backward<T>(Queue&, const DeviceRowsByPlace&, const T*, int64_t, float*, float);          \
  template void embedding_backward<T>(Queue&, const int32_t*, int64_t, const TableRange&, const T*, float*, float); \
  template void embedding_backward_parts<T>(Queue&, const int32_t*, int64_t, int64_t, const TableRange&, const T*,  \
                                            float*, float);                                                         \
  template void positions_forward<T>(Queue&, T*, const T*, const RowPositions&, int64_t, int64_t);                  \
  template void positions_backward<T>(Queue&, const T*, float*, const RowPositions&, int64_t, int64_t);             \
  template void positions_look_up<T>(Queue&, const T*, const RowPositions&, int64_t, int64_t, T*)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
