// Attention by warpgroups, on the executor as on a card of compute capability 9.0.
#include <array>
#include <functional>
#include <set>

#include "tests/runtime/kernels/cuda/attention_cases.h"
#include "tests/simt/symbols.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

/// In the order of threads, and shuffled: blocks of 512 threads are slow here.
void in_two_orders(const std::function<void()>& body) {
  in_orders(std::array{simt::kOrders[0], simt::kOrders[2]}, body);
}

template <typename T, typename G>
void compare(const Shape& s) {
  compare_in<T, G>(in_two_orders, s, kernels::cuda::Units::kWarpgroups);
}

/// Around tiles of 64 rows of a warpgroup, 128 and 192 of a block, 64 and 128 columns.
constexpr int64_t kLengths[] = {1,   2,   63,  64,  65,  100, 127, 128, 129, 130,
                                191, 192, 193, 200, 255, 256, 257, 300, 320, 385};

/// A mask for each length; heads of 64 and 128 in turn, two or one for each key and value.
std::vector<Shape> shapes_with(void (*mask)(Shape&)) {
  std::vector<Shape> out;
  for (const int64_t tokens : kLengths) {
    const bool odd = out.size() % 2 == 1;
    Shape s{"by length", 1, tokens, out.size() % 4 < 2 ? 2 : 1, 1, odd ? 128 : 64};
    s.pad = odd ? 8 : 0;
    mask(s);
    out.push_back(s);
  }
  return out;
}

template <typename T>
void compare_all(void (*mask)(Shape&)) {
  const std::vector<Shape> shapes = shapes_with(mask);
  // The other builds are slower, and see the same accesses.
  const size_t step = simt::build() == simt::Build::kPlain ? 1 : 5;
  for (size_t i = step - 1; i < shapes.size(); i += step) compare<T, T>(shapes[i]);
}

/// Names of kernels that both passes launch.
std::set<std::string> kernels_of(Shape s) {
  const int64_t rows = s.batch * s.tokens, row = s.row();
  OnDevice<bf16> qkv(rows * row), out(rows * s.heads * s.head_dim), dqkv(rows * row);
  OnDevice<float> logsumexp(s.batch * s.heads * s.tokens), deltas(s.batch * s.heads * s.tokens), maxima(1 << 10),
      slopes(s.heads);
  OnDevice<uint64_t> keys(s.batch);
  const AttentionDims dims = dims_of(s, {nullptr, nullptr, slopes.data(), nullptr, keys.data(), maxima.data()});
  std::set<std::string> names;
  simt::take_launches([&](CUstream_st*, const simt::Launch& launch, const std::function<void()>&) {
    const std::string name = simt::name_of(launch.kernel);
    names.insert(name.substr(0, name.find('<')));
    return 0;
  });
  Queue on;
  const bf16* const at = qkv.data();
  const int64_t k_at = s.heads * s.head_dim, v_at = k_at + s.kv_heads * s.head_dim;
  kernels::cuda::attention_forward<bf16>(on, dims, at, at + k_at, at + v_at, out.data(), logsumexp.data(),
                                         maxima.data(), kernels::cuda::Units::kWarpgroups);
  kernels::cuda::attention_backward<bf16, bf16>(on, dims, at, at + k_at, at + v_at, out.data(), logsumexp.data(),
                                                out.data(), dqkv.data(), dqkv.data() + k_at, dqkv.data() + v_at,
                                                deltas.data(), kernels::cuda::Units::kWarpgroups);
  simt::take_launches({});
  CHECK(on.error == 0);
  return names;
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/attention_warpgroup") {
  TEST_CASE("attention by warpgroups is the CPU's for causal masks of 20 lengths") {
    compare_all<bf16>([](Shape&) {});
  }
  TEST_CASE("attention by warpgroups is the CPU's in f16, in both directions, for 20 lengths") {
    compare_all<f16>([](Shape& s) { s.causal = false; });
  }
  TEST_CASE("attention by warpgroups is the CPU's for windows at 20 lengths") {
    compare_all<bf16>([](Shape& s) { s.window = s.tokens % 3 == 0 ? 5 : 70; });
  }
  TEST_CASE("attention by warpgroups is the CPU's for documents and prefixes at 20 lengths") {
    compare_all<bf16>([](Shape& s) {
      s.starts = true;
      s.ends = s.tokens % 2 == 0 && s.tokens > 20;
    });
  }
  TEST_CASE("attention by warpgroups is the CPU's for sinks, chunks and a rank's tokens at 20 lengths") {
    compare_all<f16>([](Shape& s) {
      s.sinks = true;
      if (s.tokens % 4 == 0) {
        s.held = true;
      } else {
        s.chunk = 70;
      }
    });
  }
  TEST_CASE("attention by warpgroups takes samples, narrow heads and groups") {
    const Shape shapes[] = {{"samples", 3, 70, 2, 2, 64},      {"groups of samples", 2, 130, 4, 2, 128},
                            {"heads of 8", 2, 65, 2, 1, 8},    {"heads of 40, rows apart", 1, 129, 1, 1, 40, 8},
                            {"heads of 80", 1, 140, 2, 1, 80}, {"heads of 120", 2, 66, 1, 1, 120}};
    for (const Shape& s : shapes) {
      if (simt::build() != simt::Build::kPlain && s.batch == 1) continue;
      compare<bf16, bf16>(s);
    }
    compare<bf16, float>({"gradients as float", 2, 70, 2, 1, 64});
    compare<f16, float>({"gradients of wide heads as float", 1, 70, 2, 1, 128});
  }
  TEST_CASE("warpgroups leave slopes, caps, dropout, maxima and wide heads to the other kernels, by name") {
    const Shape plain{"", 1, 70, 2, 1, 64};
    CHECK(kernels_of(plain) == std::set<std::string>{"attention_warpgroup", "attention_warpgroup_query_gradients",
                                                     "attention_warpgroup_key_gradients"});
    const std::set<std::string> by_warps = {"attention_matrix", "attention_matrix_query_gradients",
                                            "attention_matrix_key_gradients"};
    Shape s = plain;
    s.cap = 2;
    CHECK(kernels_of(s) == by_warps);
    s = plain;
    s.sloped = true;
    CHECK(kernels_of(s) == by_warps);
    s = plain;
    s.dropped = true;
    CHECK(kernels_of(s) == by_warps);
    s = plain;
    s.maxima = true;
    CHECK(kernels_of(s) == std::set<std::string>{"attention_matrix", "raise_maxima",
                                                 "attention_warpgroup_query_gradients",
                                                 "attention_warpgroup_key_gradients"});
    s = plain;
    s.head_dim = 136;
    CHECK(kernels_of(s) ==
          std::set<std::string>{"attention_tiles", "attention_query_gradients", "attention_key_gradients"});
  }
}
