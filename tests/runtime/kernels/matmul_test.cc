#include "runtime/kernels/matmul.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <thread>

#include "kernel_testing.h"
#include "runtime/kernels/matmul_impl.h"
#include "runtime/kernels/simd.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::GemmIsa;
using kernels::matmul;
using kernels::MatmulArgs;

namespace {

struct Case {
  int64_t m, n, k;
  bool trans_a, trans_b, accumulate, bias;
  int64_t spare;  // elements between rows
};

struct Product {
  std::string name;
  std::function<void(const MatmulArgs&)> run;
};

/// Each of `products` against one naive product, which takes most of the time.
template <typename AB, typename C>
void check_product(const Case& t, const std::vector<Product>& products = {{"matmul", matmul}}) {
  CAPTURE(t.m);
  CAPTURE(t.n);
  CAPTURE(t.k);
  CAPTURE(t.trans_a);
  CAPTURE(t.trans_b);
  CAPTURE(t.accumulate);
  CAPTURE(t.bias);
  const int64_t lda = (t.trans_a ? t.m : t.k) + t.spare, ldb = (t.trans_b ? t.k : t.n) + t.spare, ldc = t.n + t.spare;
  const auto a = normals<AB>("a", lda * (t.trans_a ? t.k : t.m));
  const auto b = normals<AB>("b", ldb * (t.trans_b ? t.n : t.k));
  const auto bias = normals<AB>("bias", t.n);
  const auto before = normals<C>("c", ldc * t.m);
  std::vector<double> wanted = doubles(before);  // the gap between rows must stay
  std::vector<double> row(t.k), columns(t.n * t.k);
  for (int64_t j = 0; j < t.n; ++j) {
    for (int64_t l = 0; l < t.k; ++l) columns[j * t.k + l] = to_f32(b[t.trans_b ? j * ldb + l : l * ldb + j]);
  }
  for (int64_t i = 0; i < t.m; ++i) {
    for (int64_t l = 0; l < t.k; ++l) row[l] = to_f32(a[t.trans_a ? l * lda + i : i * lda + l]);
    for (int64_t j = 0; j < t.n; ++j) {
      const double sum = std::inner_product(row.begin(), row.end(), columns.begin() + j * t.k,
                                            t.accumulate ? wanted[i * ldc + j] : 0.0);
      wanted[i * ldc + j] = sum + (t.bias ? to_f32(bias[j]) : 0.0);
    }
  }
  MatmulArgs args{.m = t.m,
                  .n = t.n,
                  .k = t.k,
                  .a = DevicePtr(a.data()),
                  .lda = lda,
                  .trans_a = t.trans_a,
                  .b = DevicePtr(b.data()),
                  .ldb = ldb,
                  .trans_b = t.trans_b,
                  .c = nullptr,
                  .ldc = ldc,
                  .ab_dtype = DTypeOf<AB>::value,
                  .c_dtype = DTypeOf<C>::value,
                  .accumulate = t.accumulate,
                  .bias = t.bias ? DevicePtr(bias.data()) : nullptr};
  for (const Product& product : products) {
    CAPTURE(product.name);
    for (int round = 0; round < 2; ++round) {  // the second call finds the scratch of the first
      auto c = before;
      args.c = DevicePtr(c.data());
      product.run(args);
      check_close(c, wanted, sum_of<C>(t.k));
    }
  }
}

/// C[m, n] = A[m, k] B[k, n], nothing between rows.
template <typename AB>
MatmulArgs dense(int64_t m, int64_t n, int64_t k, const std::vector<AB>& a, const std::vector<AB>& b,
                 std::vector<float>& c) {
  return {.m = m,
          .n = n,
          .k = k,
          .a = DevicePtr(a.data()),
          .lda = k,
          .b = DevicePtr(b.data()),
          .ldb = n,
          .c = DevicePtr(c.data()),
          .ldc = n,
          .ab_dtype = DTypeOf<AB>::value};
}

}  // namespace

TEST_SUITE("runtime/kernels/matmul") {
  TEST_CASE_TEMPLATE("every way of storing, adding and biasing agrees with the naive product", T,
                     std::pair<float, float>, std::pair<bf16, bf16>, std::pair<bf16, float>, std::pair<f16, f16>,
                     std::pair<f16, float>) {
    using AB = typename T::first_type;
    using C = typename T::second_type;
    for (int flags = 0; flags < 16; ++flags) {
      for (const int64_t spare : {0, 5}) {
        check_product<AB, C>(
            {37, 45, 51, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, (flags & 8) != 0, spare});
      }
      check_product<AB, C>({64, 96, 128, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, (flags & 8) != 0, 0});
    }
  }

  TEST_CASE_TEMPLATE("rows, columns and sums of one, and empty ones", T, std::pair<float, float>, std::pair<bf16, bf16>,
                     std::pair<bf16, float>, std::pair<f16, f16>, std::pair<f16, float>) {
    using AB = typename T::first_type;
    using C = typename T::second_type;
    for (int flags = 0; flags < 16; ++flags) {
      const bool ta = flags & 1, tb = flags & 2, acc = flags & 4, bias = flags & 8;
      check_product<AB, C>({1, 33, 17, ta, tb, acc, bias, 0});
      check_product<AB, C>({33, 1, 17, ta, tb, acc, bias, 3});
      check_product<AB, C>({19, 21, 1, ta, tb, acc, bias, 0});
      check_product<AB, C>({5, 7, 0, ta, tb, acc, bias, 2});
      check_product<AB, C>({0, 7, 3, ta, tb, acc, bias, 2});
    }
  }

  TEST_CASE_TEMPLATE("every instruction set's packed product agrees with the naive one", T, std::pair<float, float>,
                     std::pair<bf16, bf16>, std::pair<bf16, float>, std::pair<f16, f16>, std::pair<f16, float>) {
    using AB = typename T::first_type;
    using C = typename T::second_type;
    std::vector<Product> products;
    for (const GemmIsa isa :
         {GemmIsa::kBaseline, GemmIsa::kAvx2, GemmIsa::kAvx512, GemmIsa::kAvx512Bf16, GemmIsa::kAmx}) {
      const std::string name = "instruction set " + std::to_string(static_cast<int>(isa));
      if (!kernels::gemm_isa_runs(isa)) {
        MESSAGE("not on this machine: ", name);
        continue;
      }
      products.push_back({name, [isa](const MatmulArgs& args) { kernels::matmul_packed(args, isa); }});
    }
    for (int flags = 0; flags < 16; ++flags) {
      const bool ta = flags & 1, tb = flags & 2, acc = flags & 4, bias = flags & 8;
      check_product<AB, C>({37, 45, 51, ta, tb, acc, bias, 5}, products);
      check_product<AB, C>({12, 64, 32, ta, tb, acc, bias, 0}, products);
      check_product<AB, C>({1, 1, 1, ta, tb, acc, bias, 1}, products);
      check_product<AB, C>({3, 65, 1100, ta, tb, acc, bias, 1}, products);   // chunks of the sum: 512 steps at most
      check_product<AB, C>({100, 70, 301, ta, tb, acc, bias, 0}, products);  // turns of AMX: 128 steps, 64 rows
      check_product<AB, C>({64, 128, 320, ta, tb, acc, bias, 0}, products);  // rows of A as they lie
      check_product<AB, C>({3, 65, 3100, ta, tb, acc, bias, 1}, products);   // chunks of AMX: 1,536 steps
    }
    // More than one block of rows that keep sums (2048), of columns (6 MiB), of A's part (384 KiB).
    check_product<AB, C>({2060, 1, 1030, false, true, true, true, 0}, products);
    check_product<AB, C>({1, 3100, 1030, false, false, false, true, 0}, products);
    check_product<AB, C>({400, 20, 520, true, true, true, false, 0}, products);
    check_product<AB, C>({130, 140, 150, true, false, true, false, 0}, products);     // enough for several threads
    check_product<AB, C>({1088, 2048, 64, false, false, false, false, 0}, products);  // rounded past the caches
  }

  TEST_CASE_TEMPLATE("a sum in parts is the tree of its parts' sums, whoever takes which subtree", T,
                     std::pair<float, float>, std::pair<bf16, bf16>, std::pair<f16, f16>) {
    using AB = typename T::first_type;
    using C = typename T::second_type;
    for (const GemmIsa isa :
         {GemmIsa::kBaseline, GemmIsa::kAvx2, GemmIsa::kAvx512, GemmIsa::kAvx512Bf16, GemmIsa::kAmx}) {
      if (!kernels::gemm_isa_runs(isa)) continue;
      CAPTURE(static_cast<int>(isa));
      struct Sum {
        int64_t m, n, parts;
        std::vector<int64_t> runs;  // k of each
        bool trans_b;
      };
      const std::vector<Sum> sums = {
          {37, 45, 4, {64}, true},
          {64, 128, 4, {128}, false},           // rows of A as they lie
          {33, 70, 8, {24, 8, 8}, false},       // runs that no kernel's steps divide
          {64, 64, 4, {256, 128, 128}, false},  // runs that they do
          {34, 65, 2, {6200}, true},            // parts of several chunks
          {34, 65, 8, {4160}, false},           // several parts a chunk, several chunks
          {34, 65, 4, {8192, 2048}, false},     // a part of several runs and chunks
          {2060, 1, 4, {2400}, false},          // more rows than are kept at once
          {200, 140, 4, {600}, true},           // several threads
      };
      for (const Sum& t : sums) {
        int64_t k = 0;
        for (const int64_t run : t.runs) k += run;
        CAPTURE(k);
        CAPTURE(t.parts);
        const auto a = normals<AB>("a", t.m * k), b = normals<AB>("b", k * t.n);
        // Subtrees of `of` parts, one after another: of every run the elements [part, part + of) * run / parts.
        const auto subtree = [&](int64_t part, int64_t of, DType c_dtype, void* c) {
          std::vector<kernels::MatmulStretch> stretches;
          std::vector<AB> some(t.m * k / t.parts * of);
          const int64_t lda = k / t.parts * of;
          int64_t at = 0, to = 0;
          for (const int64_t run : t.runs) {
            const int64_t first = at + run / t.parts * part, count = run / t.parts * of;
            for (int64_t i = 0; i < t.m; ++i) std::copy_n(&a[i * k + first], count, &some[i * lda + to]);
            stretches.push_back({DevicePtr(b.data() + (t.trans_b ? first : first * t.n)), count});
            at += run;
            to += count;
          }
          if (t.runs.size() == 1 && of == 1) stretches.clear();  // plain
          kernels::matmul_packed(
              {.m = t.m,
               .n = t.n,
               .k = lda,
               .a = DevicePtr(some.data()),
               .lda = lda,
               .b = DevicePtr(b.data() + (t.trans_b ? k / t.parts * part : k / t.parts * part * t.n)),
               .ldb = t.trans_b ? k : t.n,
               .trans_b = t.trans_b,
               .c = DevicePtr(c),
               .ldc = t.n,
               .ab_dtype = DTypeOf<AB>::value,
               .c_dtype = c_dtype,
               .parts = of,
               .stretches = stretches},
              isa);
        };
        std::vector<float> whole(t.m * t.n);
        subtree(0, t.parts, DType::kF32, whole.data());
        std::vector<double> naive(t.m * t.n, 0.0);
        for (int64_t i = 0; i < t.m; ++i) {
          for (int64_t l = 0; l < k; ++l) {
            const double x = to_f32(a[i * k + l]);
            for (int64_t j = 0; j < t.n; ++j) naive[i * t.n + j] += x * to_f32(b[t.trans_b ? j * k + l : l * t.n + j]);
          }
        }
        check_close(whole, naive, sum_of<float>(k));
        std::vector<C> rounded(t.m * t.n), wanted;
        subtree(0, t.parts, DTypeOf<C>::value, rounded.data());
        for (const float x : whole) {
          if constexpr (std::is_same_v<C, bf16>) wanted.push_back(to_bf16(x));
          if constexpr (std::is_same_v<C, f16>) wanted.push_back(to_f16(x));
          if constexpr (std::is_same_v<C, float>) wanted.push_back(x);
        }
        CHECK(same_bits(rounded, wanted));
        for (int64_t of = 1; of < t.parts; of *= 2) {
          CAPTURE(of);
          std::vector<std::vector<float>> level;
          for (int64_t part = 0; part < t.parts; part += of) {
            subtree(part, of, DType::kF32, level.emplace_back(t.m * t.n).data());
          }
          for (; level.size() > 1; level.resize(level.size() / 2)) {
            for (size_t pair = 0; pair < level.size() / 2; ++pair) {
              std::vector<float> joined = level[2 * pair];
              for (size_t i = 0; i < joined.size(); ++i) joined[i] += level[2 * pair + 1][i];
              level[pair] = std::move(joined);
            }
          }
          CHECK(same_bits(level.front(), whole));
        }
        std::vector<float> plain(t.m * t.n);
        if (t.runs.size() == 1) {
          kernels::matmul_packed({.m = t.m,
                                  .n = t.n,
                                  .k = k,
                                  .a = DevicePtr(a.data()),
                                  .lda = k,
                                  .b = DevicePtr(b.data()),
                                  .ldb = t.trans_b ? k : t.n,
                                  .trans_b = t.trans_b,
                                  .c = DevicePtr(plain.data()),
                                  .ldc = t.n,
                                  .ab_dtype = DTypeOf<AB>::value},
                                 isa);
          CHECK_FALSE(same_bits(plain, whole));  // otherwise the tree would say nothing
        }
      }
    }
  }

  TEST_CASE("rows of B a multiple of 4 KiB apart") {
    check_product<float, float>({70, 3072, 65, false, false, true, true, 0});
    check_product<float, float>({70, 2048, 65, true, false, false, false, 0});
  }

  TEST_CASE("a weight gradient of many tokens keeps its digits") {
    check_product<float, float>({96, 160, 2000, true, false, true, false, 0});
    check_product<bf16, float>({96, 160, 2000, true, false, true, false, 0});
  }

  TEST_CASE("ranks as threads multiply at the same time without touching each other") {
    std::vector<std::thread> ranks;
    std::vector<int> good(4, 0);
    for (int rank = 0; rank < 4; ++rank) {
      ranks.emplace_back([rank, &good] {
        const int64_t n = 48;
        std::vector<float> a(n * n, static_cast<float>(rank + 1)), b(n * n, 1.0f), c(n * n);
        for (int round = 0; round < 50; ++round) {
          std::fill(c.begin(), c.end(), -1.0f);
          matmul({.m = n,
                  .n = n,
                  .k = n,
                  .a = DevicePtr(a.data()),
                  .lda = n,
                  .b = DevicePtr(b.data()),
                  .ldb = n,
                  .c = DevicePtr(c.data()),
                  .ldc = n});
          bool all = true;
          for (const float x : c) all = all && x == static_cast<float>(n * (rank + 1));
          good[static_cast<size_t>(rank)] += all;
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
    for (const int rounds : good) CHECK(rounds == 50);
  }

  TEST_CASE_TEMPLATE("sums of bf16 keep as many digits as multiply-adds of floats do", T, float, f16) {
    if (!kernels::gemm_isa_runs(GemmIsa::kAmx)) {
      MESSAGE("not on this machine");
      return;
    }
    constexpr bool kWide = std::is_same_v<T, float>;
    struct Input {
      std::string what;
      std::function<float(float x, float y)> make;  // of two normal values
    };
    const std::vector<Input> inputs = {
        {"normal values", [](float x, float) { return x; }},
        {"of one sign: nothing cancels", [](float x, float) { return std::fabs(x); }},
        {"of every size", [](float x, float y) { return x * std::exp2((kWide ? 8.0f : 3.0f) * y); }},
        {"small", [](float x, float) { return x * (kWide ? 1e-12f : 1e-4f); }},
        {"a bf16 and the last bit",
         [](float x, float) { return x < 0 ? 1.0f + (kWide ? 0x1p-23f : 0x1p-10f) : -1.0f; }},
    };
    const int64_t m = 40, n = 72;
    for (const int64_t k : {1, 7, 64, 500, 1100}) {
      for (const Input& input : inputs) {
        CAPTURE(k);
        CAPTURE(input.what);
        const auto made = [&](const std::string& name, int64_t count) {
          const auto x = normals<float>(name, count), y = normals<float>(name + " size", count);
          std::vector<T> out(x.size());
          for (size_t i = 0; i < x.size(); ++i) kernels::store_f32(&out[i], input.make(x[i], y[i]));
          return out;
        };
        const auto a = made("a", m * k), b = made("b", k * n);
        std::vector<double> wanted(m * n, 0.0), sizes(m * n, 0.0);
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t l = 0; l < k; ++l) {
            for (int64_t j = 0; j < n; ++j) {
              const double term = static_cast<double>(to_f32(a[i * k + l])) * to_f32(b[l * n + j]);
              wanted[i * n + j] += term;
              sizes[i * n + j] += std::fabs(term);
            }
          }
        }
        // The root of the mean square, and the largest, in units of a float's rounding of the sum of all sizes.
        const auto error = [&](GemmIsa isa) {
          std::vector<float> c(m * n);
          kernels::matmul_packed(dense(m, n, k, a, b, c), isa);
          double squares = 0, largest = 0;
          for (int64_t i = 0; i < m * n; ++i) {
            const double e = std::fabs(c[i] - wanted[i]) / sizes[i] * 0x1p24;
            squares += e * e;
            largest = std::max(largest, e);
          }
          return std::pair(std::sqrt(squares / static_cast<double>(m * n)), largest);
        };
        const auto [amx, amx_largest] = error(GemmIsa::kAmx);
        const auto [fma, fma_largest] = error(GemmIsa::kAvx512);
        // A single product is rounded once by a multiply-add; here its pieces are summed, each sum rounded.
        CHECK(amx <= std::max(fma, 0.75));
        CHECK(amx_largest <= std::max(1.25 * fma_largest, 2.5));
      }
    }
  }

  TEST_CASE_TEMPLATE("no finite number comes of what is not, and nothing spreads to other rows", T, float, bf16, f16) {
    const int64_t m = 40, n = 50, k = 70, row = 17;
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      auto a = normals<T>("a", m * k);
      const auto b = normals<T>("b", k * n);
      std::vector<float> before(m * n), after(m * n);
      matmul(dense(m, n, k, a, b, before));
      kernels::store_f32(&a[row * k + 33], bad);
      matmul(dense(m, n, k, a, b, after));
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          const float x = after[i * n + j];
          if (i == row ? std::isfinite(x) : x != before[i * n + j]) FAIL("(", i, ", ", j, ") is ", x);
        }
      }
    }
  }

  TEST_CASE_TEMPLATE("the same bits whoever takes which part and panel", T, float, bf16, f16) {
    struct Shape {
      int64_t m, n, k;
      bool trans_a;
    };
    for (const GemmIsa isa :
         {GemmIsa::kBaseline, GemmIsa::kAvx2, GemmIsa::kAvx512, GemmIsa::kAvx512Bf16, GemmIsa::kAmx}) {
      if (!kernels::gemm_isa_runs(isa)) continue;
      CAPTURE(static_cast<int>(isa));
      // Rows as they lie and packed ones; parts for each thread and fewer than threads; chunks that join their sums.
      for (const Shape& t :
           {Shape{320, 900, 64, false}, {300, 200, 130, true}, {30, 1500, 64, false}, {64, 96, 3300, true}}) {
        CAPTURE(t.m);
        const auto a = normals<T>("a", t.m * t.k), b = normals<T>("b", t.k * t.n);
        const auto product = [&](int threads) {
          std::vector<T> c(t.m * t.n);
          with_threads(threads, [&] {
            kernels::matmul_packed({.m = t.m,
                                    .n = t.n,
                                    .k = t.k,
                                    .a = DevicePtr(a.data()),
                                    .lda = t.trans_a ? t.m : t.k,
                                    .trans_a = t.trans_a,
                                    .b = DevicePtr(b.data()),
                                    .ldb = t.n,
                                    .c = DevicePtr(c.data()),
                                    .ldc = t.n,
                                    .ab_dtype = DTypeOf<T>::value,
                                    .c_dtype = DTypeOf<T>::value},
                                   isa);
          });
          return c;
        };
        const std::vector<T> alone = product(1);
        for (const int threads : {2, 3, 5}) {
          CAPTURE(threads);
          for (int round = 0; round < 10; ++round) CHECK(same_bits(alone, product(threads)));
        }
      }
    }
  }
}
