#include "tests/runtime/kernels/cuda/attention_cases.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

template <typename T, typename G>
void compare(const Shape& s) {
  const auto in_orders = [](const auto& body) { in_every_order(body); };
  compare_in<T, G>(in_orders, s, kernels::cuda::Units::kWarps);
}

/// The watched build is slow, and sees the same accesses whatever the type.
template <typename T>
bool left_out() {
  return simt::build() == simt::Build::kWatched && !std::is_same_v<T, bf16>;
}

// Tiles with rows to spare, packs and none, and each width of heads; masks that begin and end inside tiles.
const Shape kShapes[] = {
    {"two tiles, grouped", 1, 70, 2, 1, 16},
    {"heads of no packs", 1, 21, 2, 2, 7},
    {"heads of up to 128", 1, 34, 2, 1, 72, 8},
    {"heads of up to 256", 1, 33, 2, 2, 132},
};
const Shape kMasks[] = {
    {"both directions", 1, 67, 2, 2, 8, 0, 0, false},
    {"windows", 1, 70, 2, 1, 8, 0, 5},
    {"prefixes", 2, 20, 2, 1, 8, 3, 0, true, true},
    {"documents", 2, 35, 2, 1, 8, 0, 0, true, false, true},
    {"prefixes, documents and windows", 1, 70, 2, 1, 8, 0, 12, true, true, true},
    {"slopes and caps", 2, 20, 4, 2, 8, 0, 0, true, false, false, true, false, false, false, 0.8f},
    {"dropout", 2, 20, 4, 2, 8, 0, 0, true, false, false, false, true},
    {"maxima", 2, 66, 1, 1, 8, 0, 0, true, false, false, false, false, true},
    {"tokens of a rank, with slopes and dropout", 2, 80, 2, 1, 8, 0, 50, true, false, false, true, true, false, true},
    {.name = "chunks", .batch = 1, .tokens = 70, .heads = 2, .kv_heads = 1, .head_dim = 8, .chunk = 24},
    {.name = "chunks of documents, sinks",
     .batch = 2,
     .tokens = 35,
     .heads = 3,
     .kv_heads = 1,
     .head_dim = 8,
     .starts = true,
     .chunk = 9,
     .sinks = true},
    {.name = "sinks, caps and dropout",
     .batch = 2,
     .tokens = 67,
     .heads = 2,
     .kv_heads = 1,
     .head_dim = 8,
     .dropped = true,
     .cap = 0.8f,
     .sinks = true},
};

// Slopes times bf16 positions, in heads that matrix units would take otherwise; beyond 256 positions are rounded.
const Shape kRounded[] = {
    {.name = "documents",
     .batch = 2,
     .tokens = 70,
     .heads = 3,
     .kv_heads = 3,
     .head_dim = 16,
     .starts = true,
     .sloped = true,
     .rounded = true},
    {.name = "a rank's tokens behind 256, caps and dropout",
     .batch = 1,
     .tokens = 536,
     .heads = 2,
     .kv_heads = 1,
     .head_dim = 72,
     .window = 70,
     .sloped = true,
     .dropped = true,
     .held = true,
     .cap = 0.8f,
     .rounded = true},
};

// The same for matrix units, whose tiles have 64 keys and up to 128 queries: lengths around those, each width of heads,
// groups; and masks that leave tiles out, cut them and leave them whole.
const Shape kTileShapes[] = {
    {"one token", 1, 1, 1, 1, 8},
    {"three tiles of keys, grouped", 1, 150, 2, 1, 64},
    {"one key in the last tile", 2, 65, 1, 1, 40, 8},
    {"wide heads, grouped", 1, 130, 2, 1, 128},
    {"heads of 80", 1, 64, 1, 1, 80},
};
const Shape kTileMasks[] = {
    {"both directions", 1, 131, 2, 2, 8, 0, 0, false},
    {"narrow windows", 1, 200, 1, 1, 8, 0, 5},
    {"wide windows", 1, 280, 2, 1, 16, 0, 140},
    {"prefixes", 2, 140, 1, 1, 8, 8, 0, true, true},
    {"documents", 2, 140, 1, 1, 8, 0, 0, true, false, true},
    {"prefixes, documents and windows", 1, 200, 1, 1, 8, 0, 12, true, true, true},
    {"slopes and caps", 1, 140, 2, 1, 8, 0, 0, true, false, false, true, false, false, false, 0.8f},
    {"caps of wide heads", 1, 70, 2, 1, 72, 0, 0, true, false, false, false, false, false, false, 0.8f},
    {"slopes in both directions", 1, 70, 1, 1, 8, 0, 0, false, false, false, true},
    {"dropout", 2, 80, 2, 1, 8, 0, 0, true, false, false, false, true},
    {"maxima", 2, 140, 2, 2, 8, 0, 0, true, false, false, false, false, true},
    {"maxima of caps", 2, 70, 2, 1, 8, 0, 0, true, false, false, false, false, true, false, 0.8f},
    {"tokens of a rank", 1, 280, 2, 1, 8, 0, 0, true, false, false, false, false, false, true},
    {"tokens of a rank, with slopes and dropout", 2, 160, 2, 1, 8, 0, 50, true, false, false, true, true, false, true},
    {.name = "chunks", .batch = 1, .tokens = 150, .heads = 1, .kv_heads = 1, .head_dim = 8, .chunk = 70},
    {.name = "short chunks of documents, sinks",
     .batch = 1,
     .tokens = 140,
     .heads = 3,
     .kv_heads = 1,
     .head_dim = 8,
     .starts = true,
     .chunk = 9,
     .sinks = true},
    {.name = "windows and sinks",
     .batch = 1,
     .tokens = 100,
     .heads = 2,
     .kv_heads = 1,
     .head_dim = 64,
     .window = 70,
     .sinks = true},
    {.name = "sinks of a rank's tokens, with slopes",
     .batch = 1,
     .tokens = 80,
     .heads = 2,
     .kv_heads = 1,
     .head_dim = 72,
     .sloped = true,
     .held = true,
     .sinks = true},
};

}  // namespace

TEST_SUITE("runtime/kernels/cuda/attention") {
  TEST_CASE_TEMPLATE("attention is the CPU's, forward and backward, whatever the heads", T, float, bf16, f16) {
    if (left_out<T>()) return;
    for (const Shape& shape : kShapes) compare<T, T>(shape);
  }
  TEST_CASE("attention is the CPU's with every mask, slope, cap, sink and dropout") {
    for (const Shape& shape : kMasks) compare<float, float>(shape);
  }
  TEST_CASE_TEMPLATE("attention with rounded ALiBi is the CPU's", T, float, bf16, f16) {
    if (left_out<T>()) return;
    for (const Shape& shape : kRounded) compare<T, T>(shape);
  }
  TEST_CASE_TEMPLATE("attention by matrix units is the CPU's, forward and backward, whatever the shape", T, bf16, f16) {
    if (left_out<T>()) return;
    for (const Shape& shape : kTileShapes) compare<T, T>(shape);
  }
  TEST_CASE_TEMPLATE("attention by matrix units is the CPU's with every mask, slope, cap, sink and dropout", T, bf16,
                     f16) {
    if (left_out<T>()) return;
    for (const Shape& shape : kTileMasks) compare<T, T>(shape);
  }
  TEST_CASE("gradients of keys and values are written as float too") {
    for (const Shape& small : {Shape{"no packs of 16 bytes", 2, 20, 4, 2, 12}, Shape{"such packs", 2, 20, 4, 2, 16}}) {
      compare<bf16, float>(small);
      compare<f16, float>(small);
    }
  }
  TEST_CASE_TEMPLATE("one token against a cache is the CPU's", T, float, bf16, f16) {
    if (left_out<T>()) return;
    constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kHeadDim = 12, kCapacity = 80;
    AttentionDims dims{.batch = kBatch, .heads = kHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim, .scale = 0.3f};
    const auto q = normals<T>("q", kBatch * kHeads * kHeadDim);
    const auto k = normals<T>("k", kBatch * kCapacity * kKvHeads * kHeadDim),
               v = normals<T>("v", kBatch * kCapacity * kKvHeads * kHeadDim);
    std::vector<float> slopes(kHeads), sinks = {0.7f, 9.0f, -30.0f, 0.0f};
    kernels::alibi_slopes(kHeads, 0, kHeads, slopes.data());
    for (const int64_t past : {0, 1, 70}) {
      for (const int64_t window : {0, 9}) {
        CAPTURE(past);
        CAPTURE(window);
        dims.mask.window = window;
        dims.mask.chunk = window > 0 ? 0 : 16;
        dims.sinks = DevicePtr<const float>(window > 0 ? nullptr : sinks.data());
        dims.cap = window > 0 ? 2.0f : 0.0f;
        std::vector<T> out(q.size());
        dims.alibi_slopes = DevicePtr<const float>(window > 0 ? slopes.data() : nullptr);
        dims.alibi_rounded = past == 70;
        kernels::attention_decode<T>(dims, past, kCapacity, q.data(), k.data(), v.data(), out.data());
        in_every_order([&] {
          OnDevice<T> d_q(q), d_k(k), d_v(v), d_out(std::ssize(out));
          OnDevice<float> d_slopes(slopes), d_sinks(sinks);
          AttentionDims there = dims;
          there.alibi_slopes = DevicePtr<const float>(window > 0 ? d_slopes.data() : nullptr);
          there.sinks = DevicePtr<const float>(window > 0 ? nullptr : d_sinks.data());
          Queue on;
          kernels::cuda::attention_decode<T>(on, there, past, kCapacity, d_q.data(), d_k.data(), d_v.data(),
                                             d_out.data());
          check_alike(d_out.values(), out, attention_sums<T>(past + 1));
        });
      }
    }
  }
  TEST_CASE("scores in shared memory and rows of whole packs meet few conflicts and waste no sector") {
    if (simt::build() != simt::Build::kWatched) return;
    const Shape s{"", 1, 64, 1, 1, 64};
    OnDevice<bf16> qkv(normals<bf16>("qkv", s.tokens * s.row())), out(s.tokens * 64);
    OnDevice<float> logsumexp(s.tokens);
    Queue on;
    simt::take_traffic();
    kernels::cuda::attention_forward<bf16>(on, dims_of(s, {}), qkv.data(), qkv.data() + 64, qkv.data() + 128,
                                           out.data(), logsumexp.data(), nullptr);
    int64_t rows = 0, tiles = 0;
    for (const simt::Traffic& traffic : simt::take_traffic()) {
      CAPTURE(traffic.line);
      if (traffic.bytes / traffic.requests < 128) continue;
      if (traffic.shared) {
        CAPTURE(traffic.turns);
        CAPTURE(traffic.bytes);
        CHECK(traffic.turns <= traffic.bytes / 128);
        ++tiles;
      } else {
        CHECK(traffic.used() >= 1);
        ++rows;
      }
    }
    CHECK(rows >= 1);
    CHECK(tiles >= 3);
  }
  TEST_CASE("a NaN in a value stays in its channel of its head, and is seen there") {
    const Shape s{"", 1, 6, 2, 2, 4};
    std::vector<float> values(s.tokens * s.row(), 0.5f);
    values[3 * s.row() + 16 + 4 + 1] = NAN;  // of the second head's value at token 3
    OnDevice<float> qkv(values), out(s.tokens * 8), logsumexp(s.tokens * 2);
    Queue on;
    kernels::cuda::attention_forward<float>(on, dims_of(s, {}), qkv.data(), qkv.data() + 8, qkv.data() + 16, out.data(),
                                            logsumexp.data(), nullptr);
    for (int i = 0; i < 48; ++i) {
      if (i % 8 != 5) CHECK_FALSE(std::isnan(out.values()[i]));
      if (i % 8 == 5 && i >= 3 * 8) CHECK(std::isnan(out.values()[i]));
    }
  }
  TEST_CASE("no sample is no launch") {
    Queue on;
    simt::take_counts();
    kernels::cuda::attention_forward<float>(on, dims_of({"", 0, 4, 1, 1, 8}, {}), nullptr, nullptr, nullptr, nullptr,
                                            nullptr, nullptr);
    CHECK(simt::take_counts().launches == 0);
  }
}
