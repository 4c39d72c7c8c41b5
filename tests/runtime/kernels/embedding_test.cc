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
    kernels::embedding_forward(ids.data(), std::ssize(ids), {first, rows_in_table, width}, table.data(), out.data());
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
        kernels::embedding_backward(ids.data(), rows, {first, rows_in_table, width}, dout.data(), got.data());
        CHECK(same_bits(got, wanted));
      });
    }
  }

  TEST_CASE_TEMPLATE("in parts each id's rows are a tree, of which calls with a part of the rows give subtrees", T,
                     float, bf16, f16) {
    const int64_t width = 130, rows = 512, parts = 8, first = 3, rows_in_table = 40;
    std::vector<int32_t> ids(rows);
    for (int64_t r = 0; r < rows; ++r) ids[r] = static_cast<int32_t>(mix64(r) % (r < 300 ? 60 : 7));
    const auto dout = normals<T>("dout", rows * width);
    const auto gradient = [&](int64_t begin, int64_t count, int64_t of_parts) {
      std::vector<float> out(rows_in_table * width);
      kernels::embedding_backward_parts(ids.data() + begin, count, of_parts, {first, rows_in_table, width},
                                        dout.data() + begin * width, out.data(), 0.7f);
      return out;
    };
    std::vector<std::vector<float>> tree;
    for (int64_t part = 0; part < parts; ++part) {
      std::vector<float>& leaf = tree.emplace_back(rows_in_table * width);
      kernels::embedding_backward(ids.data() + part * rows / parts, rows / parts, {first, rows_in_table, width},
                                  dout.data() + part * rows / parts * width, leaf.data(), 0.7f);
    }
    const std::vector<float> first_leaf = tree.front();
    for (int64_t step = 1; step < parts; step *= 2) {
      for (int64_t part = 0; part < parts; part += 2 * step) {
        for (size_t i = 0; i < tree[part].size(); ++i) tree[part][i] += tree[part + step][i];
      }
    }
    for (const int threads : {1, 2}) {
      with_threads(threads, [&] { CHECK(same_bits(gradient(0, rows, parts), tree.front())); });
    }
    CHECK(same_bits(gradient(0, rows / parts, 1), first_leaf));
    std::vector<float> left = gradient(0, rows / 2, parts / 2);
    const std::vector<float> right = gradient(rows / 2, rows / 2, parts / 2);
    for (size_t i = 0; i < left.size(); ++i) left[i] += right[i];
    CHECK(same_bits(left, tree.front()));
    CHECK_FALSE(same_bits(gradient(0, rows, 1), tree.front()));
  }

  TEST_CASE_TEMPLATE("positions wrap at each sample, also from the middle of one", T, float, bf16, f16) {
    const int64_t width = 70, tokens = 5, rows = 12;
    const auto x = normals<T>("x", rows * width), table = normals<T>("table", tokens * width);
    for (const int64_t first_row : {0, 3, 13}) {
      auto got = x;
      const kernels::RowPositions wrapped{.at = nullptr, .first_row = first_row, .tokens = tokens, .samples = 1};
      kernels::positions_forward(got.data(), table.data(), wrapped, rows, width);
      std::vector<int32_t> listed;
      for (int64_t r = 0; r < rows; ++r) listed.push_back(static_cast<int32_t>((first_row + r) % tokens));
      const kernels::RowPositions by_list{.at = DevicePtr<const int32_t>(listed.data())};
      auto as_listed = x, looked_up = x;
      kernels::positions_forward(as_listed.data(), table.data(), by_list, rows, width);
      CHECK(same_bits(as_listed, got));
      kernels::positions_look_up(table.data(), by_list, rows, width, looked_up.data());
      auto rows_of_table = x;
      for (int64_t r = 0; r < rows; ++r) std::copy_n(&table[listed[r] * width], width, &rows_of_table[r * width]);
      CHECK(same_bits(looked_up, rows_of_table));
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
      kernels::positions_backward(x.data(), dtable.data(), wrapped, rows, width);
      std::vector<float> of_list(tokens * width);
      kernels::positions_backward(x.data(), of_list.data(), by_list, rows, width);
      CHECK(same_bits(of_list, dtable));
      check_close(dtable, gradient, sum_of<float>(3));
    }
  }
}
