#include "runtime/kernels/embedding.h"

#include "kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;

TEST_SUITE("runtime/kernels/embedding") {
  TEST_CASE_TEMPLATE("rows of the table's range are copied and the others are zero", T, float, bf16, f16) {
    const int64_t width = 19, first = 100, rows_in_table = 7;
    const std::vector<int32_t> ids{100, 106, 99, 107, 103, 103, -1, 2147483647, -2147483647 - 1};
    const auto table = normals<T>("table", rows_in_table * width);
    std::vector<T> out(ids.size() * width, table[0]);
    kernels::embedding_forward(ids.data(), std::ssize(ids), table.data(), first, rows_in_table, width, out.data());
    for (size_t r = 0; r < ids.size(); ++r) {
      const int64_t row = ids[r] - first;
      const bool here = row >= 0 && row < rows_in_table;
      for (int64_t c = 0; c < width; ++c) {
        REQUIRE(to_f32(out[r * width + c]) == (here ? to_f32(table[row * width + c]) : 0.0f));
      }
    }
  }

  TEST_CASE_TEMPLATE("the gradient adds each row to its id, in row order whatever the threads", T, float, bf16, f16) {
    const int64_t width = 200, rows = 500, first = 10, rows_in_table = 6;
    std::vector<int32_t> ids(rows);
    for (int64_t r = 0; r < rows; ++r) ids[r] = static_cast<int32_t>(8 + mix64(r) % 10);  // 8, 9, 16, 17 are elsewhere
    const auto dout = normals<T>("dout", rows * width);
    const auto before = normals<float>("before", rows_in_table * width);
    std::vector<float> wanted = before;  // the same order of float additions: equal bits
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = ids[r] - first;
      if (row < 0 || row >= rows_in_table) continue;
      for (int64_t c = 0; c < width; ++c) wanted[row * width + c] += to_f32(dout[r * width + c]);
    }
    for (const int threads : {1, 2, 3}) {
      with_threads(threads, [&] {
        auto got = before;
        kernels::embedding_backward(ids.data(), rows, dout.data(), first, rows_in_table, width, got.data());
        CHECK(same_bits(got, wanted));
      });
    }
  }

  TEST_CASE_TEMPLATE("positions wrap at each sample, also from the middle of one", T, float, bf16, f16) {
    const int64_t width = 70, tokens = 5, rows = 12;
    const auto x = normals<T>("x", rows * width), table = normals<T>("table", tokens * width);
    for (const int64_t first_row : {0, 3, 13}) {
      auto got = x;
      kernels::positions_forward(got.data(), table.data(), rows, first_row, tokens, 1, width);
      std::vector<double> wanted(got.size()), gradient(tokens * width);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < width; ++c) {
          const int64_t at = (first_row + r) % tokens * width + c;
          wanted[r * width + c] = static_cast<double>(to_f32(x[r * width + c])) + to_f32(table[at]);
          gradient[at] += to_f32(x[r * width + c]);
        }
      }
      check_close(got, wanted, pointwise<T>());
      std::vector<float> dtable(tokens * width);
      kernels::positions_backward(x.data(), dtable.data(), rows, first_row, tokens, 1, width);
      check_close(dtable, gradient, sum_of<float>(3));
    }
  }
}
