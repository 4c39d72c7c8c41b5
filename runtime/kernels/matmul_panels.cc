#include <algorithm>

#include "runtime/kernels/matmul_impl.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/scratch.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

// A block of A is used for all of n and a block of B for kMaxRows rows, so that the copies cost a few per cent;
// together with a block of C they bound the scratch: 16 + 8 + 2 MiB and the padding.
constexpr int64_t kMaxRows = 1024;
constexpr int64_t kMaxColumns = 512;
constexpr int64_t kMaxDepth = 4096;

/// Floats from row to row of a packed block: whole cache lines, and never a multiple of 1 KiB apart.
int64_t packed_stride(int64_t columns) {
  const int64_t stride = (columns + 15) / 16 * 16;
  return stride % 256 == 0 ? stride + 16 : stride;
}

template <typename T>
RT_CLONES void convert_rows(const T* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
                            int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) to[r * to_stride + c] = load_f32(from[r * from_stride + c]);
  }
}

template <typename T>
RT_CLONES void store_rows(const float* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows,
                          int64_t columns, bool accumulate) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* in = from + r * from_stride;
    T* out = to + r * to_stride;
    if (accumulate) {
      for (int64_t c = 0; c < columns; ++c) store_f32(&out[c], load_f32(out[c]) + in[c]);
    } else {
      for (int64_t c = 0; c < columns; ++c) store_f32(&out[c], in[c]);
    }
  }
}

void to_floats(const void* from, DType dtype, int64_t at, int64_t from_stride, float* to, int64_t to_stride,
               int64_t rows, int64_t columns) {
  switch (dtype) {
    case DType::kBf16:
      return convert_rows(static_cast<const bf16*>(from) + at, from_stride, to, to_stride, rows, columns);
    case DType::kF16:
      return convert_rows(static_cast<const f16*>(from) + at, from_stride, to, to_stride, rows, columns);
    default:
      return convert_rows(static_cast<const float*>(from) + at, from_stride, to, to_stride, rows, columns);
  }
}

/// A or B as it is stored, and the block of it that lies packed in scratch.
struct Operand {
  const void* data;
  int64_t stride;
  DType dtype;
  float* packed;
  int64_t row = -1, column = -1;  // of the packed block

  /// Packs rows [row0, row0 + rows) and columns [column0, ...) unless they are packed already; returns their stride.
  int64_t pack(int64_t row0, int64_t rows, int64_t column0, int64_t columns) {
    const int64_t to_stride = packed_stride(columns);
    if (row == row0 && column == column0) return to_stride;
    row = row0;
    column = column0;
    parallel_ranges(rows, 1, columns, [&](int64_t begin, int64_t end) {
      to_floats(data, dtype, (row0 + begin) * stride + column0, stride, packed + begin * to_stride, to_stride,
                end - begin, columns);
    });
    return to_stride;
  }
};

int64_t packed_elems(int64_t rows, int64_t columns) { return rows * packed_stride(columns); }

}  // namespace

Status matmul_panels(const MatmulArgs& args) {
  const int64_t max_rows = std::min(args.m, kMaxRows), max_columns = std::min(args.n, kMaxColumns);
  const int64_t max_depth = std::min(args.k, kMaxDepth);
  const bool low_out = args.c_dtype != DType::kF32;  // 16 bits: through a block of floats
  const int64_t a_elems = args.trans_a ? packed_elems(max_depth, max_rows) : packed_elems(max_rows, max_depth);
  const int64_t b_elems = args.trans_b ? packed_elems(max_columns, max_depth) : packed_elems(max_depth, max_columns);
  const int64_t c_elems = low_out ? packed_elems(max_rows, max_columns) : 0;
  thread_local Scratch scratch;
  float* const a_block = scratch.floats(a_elems + b_elems + c_elems + kMaxColumns);
  float* const b_block = a_block + a_elems;
  float* const c_block = b_block + b_elems;
  float* const bias_block = c_block + c_elems;
  Operand a{args.a, args.lda, args.ab_dtype, a_block};
  Operand b{args.b, args.ldb, args.ab_dtype, b_block};

  for (int64_t i = 0; i < args.m; i += kMaxRows) {
    const int64_t rows = std::min(kMaxRows, args.m - i);
    for (int64_t j = 0; j < args.n; j += kMaxColumns) {
      const int64_t columns = std::min(kMaxColumns, args.n - j);
      MatmulArgs block{.m = rows, .n = columns};
      block.c = low_out ? c_block : static_cast<float*>(args.c) + i * args.ldc + j;
      block.ldc = low_out ? packed_stride(columns) : args.ldc;
      if (args.bias != nullptr) {
        to_floats(args.bias, args.ab_dtype, j, 0, bias_block, 0, 1, columns);
        block.bias = bias_block;
      }
      for (int64_t l = 0; l < args.k; l += kMaxDepth) {
        block.k = std::min(kMaxDepth, args.k - l);
        block.trans_a = args.trans_a;
        block.trans_b = args.trans_b;
        block.lda = args.trans_a ? a.pack(l, block.k, i, rows) : a.pack(i, rows, l, block.k);
        block.ldb = args.trans_b ? b.pack(j, columns, l, block.k) : b.pack(l, block.k, j, columns);
        block.a = a_block;
        block.b = b_block;
        block.accumulate = l > 0 || (args.accumulate && !low_out);
        RT_TRY(matmul_onednn(block).with(describe(args)));
        block.bias = nullptr;  // once is enough
      }
      const auto store = [&](auto* c) {
        parallel_ranges(rows, 1, columns, [&](int64_t begin, int64_t end) {
          store_rows(c_block + begin * block.ldc, block.ldc, c + begin * args.ldc, args.ldc, end - begin, columns,
                     args.accumulate);
        });
      };
      if (args.c_dtype == DType::kBf16) store(static_cast<bf16*>(args.c) + i * args.ldc + j);
      if (args.c_dtype == DType::kF16) store(static_cast<f16*>(args.c) + i * args.ldc + j);
    }
  }
  return {};
}

}  // namespace cairn::kernels
