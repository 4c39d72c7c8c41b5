#include "runtime/kernels/embedding.h"

#include "runtime/kernels/cuda/embedding.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

/// With memory for a backward pass.
ScratchQueue queue(int64_t rows, int64_t width) {
  return ScratchQueue(kernels::cuda::look_up_scratch_bytes(rows, width) / 4);
}

/// Of `rows`: every other one is one of two frequent ids, the rest are drawn from few, some beyond a table of 40.
std::vector<int32_t> frequent_ids(int64_t rows) {
  std::vector<int32_t> out(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    const auto drawn = static_cast<int32_t>((r * 7919 + 13) % 43);
    out[static_cast<size_t>(r)] = r % 2 == 0 ? (r % 16 == 0 ? 5 : 3) : drawn;
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/embedding") {
  TEST_CASE_TEMPLATE("look-ups and their gradients are the CPU's, rows added in their order", T, float, bf16, f16) {
    const std::vector<int32_t> ids = {5, 2, 5, 5, 0, 11, 6, 2, 9, 5};  // in and out of [2, 8)
    const int64_t rows = std::ssize(ids), first = 2, in_table = 6;
    for (const int64_t width : {24, 5}) {
      CAPTURE(width);
      const auto table = normals<T>("table", in_table * width), dout = normals<T>("dout", rows * width);
      std::vector<T> out(rows * width);
      std::vector<float> dtable(in_table * width, 0.5f);
      kernels::embedding_forward<T>(ids.data(), rows, {first, in_table, width}, table.data(), out.data());
      kernels::embedding_backward<T>(ids.data(), rows, {first, in_table, width}, dout.data(), dtable.data(), 1.5f);
      in_every_order([&] {
        OnDevice<int32_t> d_ids(ids);
        OnDevice<T> d_table(table), d_dout(dout), d_out(rows * width);
        OnDevice<float> d_dtable(filled<float>(in_table * width, 0.5f));
        ScratchQueue on = queue(rows, width);
        kernels::cuda::embedding_forward<T>(on, d_ids.data(), rows, {first, in_table, width}, d_table.data(),
                                            d_out.data());
        CHECK(same_bits(d_out.values(), out));
        kernels::cuda::embedding_backward<T>(on, d_ids.data(), rows, {first, in_table, width}, d_dout.data(),
                                             d_dtable.data(), 1.5f);
        check_alike(d_dtable.values(), dtable, sum_of<float>(4));
      });
    }
  }

  TEST_CASE_TEMPLATE("places with more rows than a piece, over several chunks of rows", T, float, bf16) {
    const int64_t rows = 2500, in_table = 40;
    const std::vector<int32_t> ids = frequent_ids(rows);
    const int64_t width = sizeof(T) == 2 ? 8 : 3;
    const auto dout = normals<T>("dout", rows * width);
    std::vector<float> dtable(in_table * width, 0.5f);
    kernels::embedding_backward<T>(ids.data(), rows, {0, in_table, width}, dout.data(), dtable.data(), 1.5f);
    // A place's sum is of its own rows: the same bits where they are the only ones, and each other row lies elsewhere.
    std::vector<int32_t> alone = ids;
    for (int32_t& id : alone) id = id == 3 ? 3 : 1000;
    in_every_order([&] {
      OnDevice<int32_t> d_ids(ids), d_alone(alone);
      OnDevice<T> d_dout(dout);
      const auto before = filled<float>(in_table * width, 0.5f);
      OnDevice<float> all(before), of_one(before);
      ScratchQueue on = queue(rows, width);
      kernels::cuda::embedding_backward<T>(on, d_ids.data(), rows, {0, in_table, width}, d_dout.data(), all.data(),
                                           1.5f);
      check_alike(all.values(), dtable, sum_of<float>(1200));
      kernels::cuda::embedding_backward<T>(on, d_alone.data(), rows, {0, in_table, width}, d_dout.data(), of_one.data(),
                                           1.5f);
      const auto row_of = [&](OnDevice<float>& of, int64_t place) {
        const auto values = of.values();
        return std::vector<float>(values.begin() + place * width, values.begin() + (place + 1) * width);
      };
      CHECK(same_bits(row_of(all, 3), row_of(of_one, 3)));
      CHECK(row_of(of_one, 5) == filled<float>(width, 0.5f));
    });
  }

  TEST_CASE("parts with more rows of a place than a piece: halves of the rows give subtrees") {
    const int64_t rows = 1600, half = rows / 2, width = 5;
    const std::vector<int32_t> ids = frequent_ids(rows);
    const kernels::TableRange of{0, 40, width};
    const auto dout = normals<float>("dout", rows * width);
    std::vector<float> dtable(of.count * width);
    kernels::embedding_backward_parts<float>(ids.data(), rows, 4, of, dout.data(), dtable.data(), 1.5f);
    in_every_order([&] {
      OnDevice<int32_t> d_ids(ids);
      OnDevice<float> d_dout(dout);
      const auto zeros = filled<float>(of.count * width, 0);
      OnDevice<float> whole(zeros), first(zeros), second(zeros);
      ScratchQueue on = queue(rows, width);
      kernels::cuda::embedding_backward_parts<float>(on, d_ids.data(), rows, 4, of, d_dout.data(), whole.data(), 1.5f);
      kernels::cuda::embedding_backward_parts<float>(on, d_ids.data(), half, 2, of, d_dout.data(), first.data(), 1.5f);
      kernels::cuda::embedding_backward_parts<float>(on, d_ids.data() + half, half, 2, of, d_dout.data() + half * width,
                                                     second.data(), 1.5f);
      check_alike(whole.values(), dtable, sum_of<float>(800));
      std::vector<float> joined = first.values();
      for (size_t i = 0; i < joined.size(); ++i) joined[i] += second.values()[i];
      CHECK(same_bits(joined, whole.values()));
    });
  }

  TEST_CASE_TEMPLATE("gradients of look-ups in parts: two halves of the rows give subtrees of the whole", T, float,
                     bf16, f16) {
    const std::vector<int32_t> ids = {5, 2, 5, 5, 0, 5, 2, 5, 5, 11, 6, 2, 5, 5, 2, 5};
    const int64_t rows = std::ssize(ids), half = rows / 2, width = 130;
    const kernels::TableRange of{2, 6, width};
    const auto dout = normals<T>("dout", rows * width);
    std::vector<float> dtable(of.count * width);
    kernels::embedding_backward_parts<T>(ids.data(), rows, 8, of, dout.data(), dtable.data(), 1.5f);
    in_every_order([&] {
      OnDevice<int32_t> d_ids(ids);
      OnDevice<T> d_dout(dout);
      const auto zeros = filled<float>(of.count * width, 0);
      OnDevice<float> whole(zeros), first(zeros), second(zeros);
      ScratchQueue on = queue(rows, width);
      kernels::cuda::embedding_backward_parts<T>(on, d_ids.data(), rows, 8, of, d_dout.data(), whole.data(), 1.5f);
      kernels::cuda::embedding_backward_parts<T>(on, d_ids.data(), half, 4, of, d_dout.data(), first.data(), 1.5f);
      kernels::cuda::embedding_backward_parts<T>(on, d_ids.data() + half, half, 4, of, d_dout.data() + half * width,
                                                 second.data(), 1.5f);
      check_alike(whole.values(), dtable, sum_of<float>(12));
      std::vector<float> joined = first.values();
      for (size_t i = 0; i < joined.size(); ++i) joined[i] += second.values()[i];
      CHECK(same_bits(joined, whole.values()));
    });
  }

  TEST_CASE_TEMPLATE("positions are added, and their gradients, as the CPU does", T, float, bf16, f16) {
    const std::vector<int32_t> at = {0, 1, 2, 0, 1, 2, 2};
    const int64_t rows = std::ssize(at), positions = 3, width = 16;
    const auto x = normals<T>("x", rows * width), table = normals<T>("table", positions * width);
    std::vector<T> y = x;
    std::vector<float> dtable(positions * width, 0.5f);
    const kernels::RowPositions given{DevicePtr<const int32_t>(at.data()), 0, {}, 1};
    kernels::positions_forward<T>(y.data(), table.data(), given, rows, width);
    kernels::positions_backward<T>(x.data(), dtable.data(), given, rows, width);
    in_every_order([&] {
      OnDevice<int32_t> d_at(at);
      OnDevice<T> d_x(x), d_table(table);
      OnDevice<float> d_dtable(filled<float>(positions * width, 0.5f));
      ScratchQueue on = queue(rows, width);
      const kernels::RowPositions d_given{DevicePtr<const int32_t>(d_at.data()), 0, {}, 1};
      kernels::cuda::positions_backward<T>(on, d_x.data(), d_dtable.data(), d_given, rows, width);
      check_alike(d_dtable.values(), dtable, sum_of<float>(3));
      kernels::cuda::positions_forward<T>(on, d_x.data(), d_table.data(), d_given, rows, width);
      CHECK(same_bits(d_x.values(), y));
    });
  }

  TEST_CASE("positions of a rank's chunks come of its rows' numbers") {
    // The second of two ranks of a sequence of 8 tokens, two samples: tokens 2 to 5.
    const kernels::RowPositions held{nullptr, 0, TokenRuns::of_rank(8, 2, 1), 2};
    const int64_t rows = 8, width = 6;
    const auto x = normals<float>("x", rows * width), table = normals<float>("table", 8 * width);
    std::vector<float> y = x, out(rows * width), dtable(8 * width, 0.5f);
    kernels::positions_forward<float>(y.data(), table.data(), held, rows, width);
    kernels::positions_look_up<float>(table.data(), held, rows, width, out.data());
    kernels::positions_backward<float>(x.data(), dtable.data(), held, rows, width);
    in_every_order([&] {
      OnDevice<float> d_x(x), d_table(table), d_out(rows * width), d_dtable(filled<float>(8 * width, 0.5f));
      ScratchQueue on = queue(rows, width);
      kernels::cuda::positions_backward<float>(on, d_x.data(), d_dtable.data(), held, rows, width);
      check_alike(d_dtable.values(), dtable, sum_of<float>(2));
      kernels::cuda::positions_look_up<float>(on, d_table.data(), held, rows, width, d_out.data());
      CHECK(same_bits(d_out.values(), out));
      kernels::cuda::positions_forward<float>(on, d_x.data(), d_table.data(), held, rows, width);
      CHECK(same_bits(d_x.values(), y));
    });
  }
}
