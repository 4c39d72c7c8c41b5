#include "runtime/kernels/cuda/grouped.h"

#include "runtime/kernels/matmul.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::GroupRows;

namespace {

/// Groups where group_choices() places them, padded to 32 rows.
std::vector<GroupRows> groups_of(const std::vector<int64_t>& counts) {
  std::vector<GroupRows> out;
  GroupRows at;
  for (const int64_t count : counts) {
    at.filled = count;
    at.rows = (count + 31) / 32 * 32;
    out.push_back(at);
    at.first += at.rows;
    at.tiles += GroupRows::tiles_of(at.rows);
  }
  out.push_back({.first = at.first, .tiles = at.tiles});
  return out;
}

// None, less than a tile, more than one, one that ends with a tile, none at the end.
const std::vector<int64_t> kCounts = {0, 5, 140, 0, 128, 33, 0};
constexpr int64_t kGroups = 7;
// Not whole tiles, nor whole steps of k.
constexpr int64_t kN = 136, kK = 40;

/// Rows of A, and of C as long as its rows are apart.
template <typename T>
struct Matrices {
  std::vector<GroupRows> groups = groups_of(kCounts);
  int64_t rows = groups.back().first;
  std::vector<T> a = normals<T>("a", rows*kK), b = normals<T>("b", kGroups*kK*kN), c = normals<T>("c", rows*kN),
                 bias = normals<T>("bias", kGroups*kN);

  kernels::MatmulArgs product(bool transposed, bool accumulate, std::vector<T>* to) const {
    kernels::MatmulArgs of{.n = kN, .k = kK};
    of.a = DevicePtr<const void>(a.data());
    of.lda = kK;
    of.ldb = transposed ? kK : kN;
    of.trans_b = transposed;
    of.c = DevicePtr<void>(to->data());
    of.ldc = kN;
    of.ab_dtype = of.c_dtype = DTypeOf<T>::value;
    of.accumulate = accumulate;
    return of;
  }
};

template <typename T>
void rows_by_matrices(bool transposed, bool accumulate, bool biased = false) {
  CAPTURE(transposed);
  CAPTURE(accumulate);
  CAPTURE(biased);
  const Matrices<T> of;
  std::vector<T> c = of.c;
  kernels::MatmulGroups products;
  for (int64_t group = 0; group < kGroups; ++group) {
    products.products.push_back(of.product(transposed, accumulate, &c));
    products.products.back().b = DevicePtr<const void>(of.b.data() + group * kK * kN);
    if (biased) products.products.back().bias = DevicePtr<const void>(of.bias.data() + group * kN);
    products.ends.push_back(products.products.size());
  }
  products.places = DevicePtr<const GroupRows>(of.groups.data());
  kernels::matmul_groups(products);
  in_every_order([&] {
    OnDevice<GroupRows> d_groups(of.groups);
    OnDevice<T> d_a(of.a), d_b(of.b), d_c(of.c), d_bias(of.bias);
    Queue on;
    // A tile more than there are rows for, as where the host does not know.
    kernels::cuda::RowProducts<T> there{.groups = {d_groups.data(), 0, kGroups, of.groups.back().tiles + 1},
                                        .a = d_a.data(),
                                        .lda = kK,
                                        .b = d_b.data(),
                                        .b_step = kK * kN,
                                        .ldb = transposed ? kK : kN,
                                        .transposed = transposed,
                                        .c = d_c.data(),
                                        .ldc = kN,
                                        .n = kN,
                                        .k = kK,
                                        .accumulate = accumulate,
                                        .bias = biased ? d_bias.data() : nullptr,
                                        .bias_step = kN};
    kernels::cuda::multiply_rows_of_groups<T>(on, there);
    check_alike(d_c.values(), c, chain_of_sums<T>(kK));
    // Two of the groups by themselves: the same bits, and the others' rows stay.
    OnDevice<T> d_some(of.c);
    there.groups = {d_groups.data(), 2, 5, of.groups.back().tiles};
    there.b += 2 * kK * kN;
    if (biased) there.bias += 2 * kN;
    there.c = d_some.data();
    kernels::cuda::multiply_rows_of_groups<T>(on, there);
    const std::vector<T> all = d_c.values(), some = d_some.values();
    for (int64_t i = 0; i < std::ssize(some); ++i) {
      const bool inside = i >= of.groups[2].first * kN && i < of.groups[5].first * kN;
      REQUIRE(to_f32(some[i]) == to_f32(inside ? all[i] : of.c[i]));
    }
  });
}

template <typename T>
void sums_over_rows(bool accumulate) {
  CAPTURE(accumulate);
  const std::vector<GroupRows> groups = groups_of(kCounts);
  const int64_t rows = groups.back().first;
  const auto a = normals<T>("a", rows * kK), b = normals<T>("b", rows * kN);
  const auto before = normals<float>("c", kGroups * kK * kN);
  std::vector<float> c = before;
  kernels::MatmulGroups products;
  for (int64_t group = 0; group < kGroups; ++group) {
    kernels::MatmulArgs of{.m = kK, .n = kN};
    of.a = DevicePtr<const void>(a.data());
    of.lda = kK;
    of.trans_a = true;
    of.b = DevicePtr<const void>(b.data());
    of.ldb = kN;
    of.c = DevicePtr<void>(c.data() + group * kK * kN);
    of.ldc = kN;
    of.ab_dtype = DTypeOf<T>::value;
    of.accumulate = accumulate;
    products.products.push_back(of);
    products.ends.push_back(products.products.size());
  }
  products.places = DevicePtr<const GroupRows>(groups.data());
  kernels::matmul_groups(products);
  CHECK(c[0] == (accumulate ? before[0] : 0.0f));  // of a group without rows
  in_every_order([&] {
    OnDevice<GroupRows> d_groups(groups);
    OnDevice<T> d_a(a), d_b(b);
    OnDevice<float> d_c(before);
    Queue on;
    kernels::cuda::multiply_over_rows_of_groups<T>(on, {.groups = {d_groups.data(), 0, kGroups, groups.back().tiles},
                                                        .a = d_a.data(),
                                                        .lda = kK,
                                                        .b = d_b.data(),
                                                        .ldb = kN,
                                                        .c = d_c.data(),
                                                        .c_step = kK * kN,
                                                        .ldc = kN,
                                                        .m = kK,
                                                        .n = kN,
                                                        .accumulate = accumulate});
    check_alike(d_c.values(), c, chain_of_sums<float>(160));
  });
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/grouped") {
  TEST_CASE_TEMPLATE("rows of groups by their own matrices are the CPU's, whatever other groups there are", T, float,
                     bf16, f16) {
    for (const bool transposed : {true, false}) {
      for (const bool accumulate : {false, true}) rows_by_matrices<T>(transposed, accumulate);
    }
    rows_by_matrices<T>(true, false, true);
  }
  TEST_CASE_TEMPLATE("sums over the rows of groups are the CPU's, 0 where there are none", T, float, bf16, f16) {
    for (const bool accumulate : {false, true}) sums_over_rows<T>(accumulate);
  }
  TEST_CASE("no tile and no group is no launch") {
    Queue on;
    simt::take_counts();
    kernels::cuda::multiply_rows_of_groups<bf16>(on, {});
    kernels::cuda::multiply_over_rows_of_groups<bf16>(on, {});
    kernels::cuda::multiply_rows_of_groups<float>(on, {});
    kernels::cuda::multiply_over_rows_of_groups<float>(on, {});
    CHECK(simt::take_counts().launches == 0);
  }
}
