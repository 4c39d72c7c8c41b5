// Attention that a library has plans for, on doubles: what is asked of it, and in which pieces.

#include "runtime/cuda/cudnn_attention.h"

#include <cstring>
#include <random>
#include <vector>

#include "runtime/cuda/heap.h"
#include "runtime/cuda/stream.h"
#include "runtime/device/buffer.h"
#include "runtime/kernels/attention.h"
#include "tests/runtime/cuda/cuda_machine.h"
#include "tests/simt/attention_double.h"
#include "tests/support/attention_shape.h"

using namespace cairn;
using namespace cairn::cuda;
using cairn::testing::shape;

namespace {

constexpr int64_t kOwn = 256;  // bytes of any plan

}  // namespace

TEST_SUITE("runtime/cuda/attention_plans") {
  TEST_CASE("a piece is all, whole samples, or heads of a sample that share keys, as the bound allows") {
    const AttentionShape of = shape(6, 128, 8, 4, 16);
    // 2 bytes a score, in tiles; a float a query; keys' and values' gradients of all heads.
    const int64_t group = 2 * (128 * 128 * 2 + 128 * 4 + 2 * 128 * 16 * 2), sample = 4 * group, whole = 6 * sample;
    const auto piece = [&](int64_t most) {
      const AttentionShape found = attention_piece(of, most);
      CHECK(found.q_stride == of.q_stride);
      CHECK(attention_piece(found, most) == found);
      const int64_t bytes = attention_workspace_bytes(of, AttentionPass::kBackward, most);
      CHECK(bytes == attention_workspace_bytes(found, AttentionPass::kBackward, most));
      if (most >= group) CHECK(bytes <= most + kOwn);
      return std::vector<int64_t>{found.samples, found.heads, found.kv_heads};
    };
    using V = std::vector<int64_t>;
    CHECK(piece(whole) == V{6, 8, 4});
    CHECK(piece(whole - 1) == V{3, 8, 4});  // pieces are of one size
    CHECK(piece(2 * sample) == V{2, 8, 4});
    CHECK(piece(sample) == V{1, 8, 4});
    CHECK(piece(sample - 1) == V{1, 4, 2});
    CHECK(piece(group) == V{1, 2, 1});
    CHECK(piece(1) == V{1, 2, 1});  // no less can be
    CHECK(attention_workspace_bytes(of, AttentionPass::kBackward) == whole + kOwn);
    CHECK(attention_workspace_bytes(shape(1, 33, 1, 1, 8), AttentionPass::kBackward) == 64 * 128 * 2 + 33 * 4 + kOwn);
    CHECK(attention_workspace_bytes(of, AttentionPass::kForward) == kOwn);
  }

  TEST_CASE("the numbers of attention say all of it, or there are none") {
    kernels::AttentionDims dims{.batch = 2, .tokens = 8, .heads = 4, .kv_heads = 2, .head_dim = 16};
    dims.q_stride = dims.kv_stride = 128;
    dims.out_stride = 64;
    AttentionShape wanted = shape(2, 8, 4, 2, 16);
    CHECK(kernels::plain_shape(dims, DType::kBf16) == wanted);
    dims.mask.window = 5;
    wanted.window = 5;
    CHECK(kernels::plain_shape(dims, DType::kBf16) == wanted);
    dims.mask.window = 8;  // of all tokens: none
    wanted.window = 0;
    CHECK(kernels::plain_shape(dims, DType::kBf16) == wanted);
    dims.held = TokenRuns(8);
    CHECK(kernels::plain_shape(dims, DType::kBf16) == wanted);
    using Dims = kernels::AttentionDims;
    const auto other = [&](auto change) {
      Dims changed = dims;
      change(changed);
      return !kernels::plain_shape(changed, DType::kBf16).has_value();
    };
    int32_t ints = 0;
    float floats = 0;
    uint64_t keys = 0;
    CHECK(other([](Dims& d) { d.cap = 1; }));
    CHECK(other([](Dims& d) { d.mask.chunk = 4; }));
    CHECK(other([&](Dims& d) { d.mask.ends = DevicePtr<const int32_t>(&ints); }));
    CHECK(other([&](Dims& d) { d.mask.starts = DevicePtr<const int32_t>(&ints); }));
    CHECK(other([&](Dims& d) { d.sinks = DevicePtr<const float>(&floats); }));
    CHECK(other([&](Dims& d) { d.max_scores = DevicePtr<float>(&floats); }));
    CHECK(other([&](Dims& d) { d.dropout = {kernels::DropoutRate::of(0.5), DevicePtr<const uint64_t>(&keys), 0, 0}; }));
    CHECK(other([](Dims& d) { d.key_parts = 2; }));
    CHECK(other([](Dims& d) { d.held.count = 4; }));
    CHECK_FALSE(other([](Dims&) {}));
  }

  TEST_CASE("what is not asked for has a reason") {
    const auto why = [](auto change) {
      AttentionShape of = shape(1, 64, 2, 2, 64);
      change(of);
      return why_not_by_cudnn(of);
    };
    using S = AttentionShape;
    CHECK(why([](S&) {}) == "");
    CHECK(why([](S& s) { s.dtype = DType::kF32; }) == "it takes no f32");
    CHECK(why([](S& s) { s.head_dim = 36; }).find("heads of 36 channels") == 0);
    CHECK(why([](S& s) { s.head_dim = 264; }).find("heads of 264 channels") == 0);
    CHECK(why([](S& s) { s.q_stride += 4; }) != "");
    CHECK(why([](S& s) { s.tokens = 1; }) == "samples of one token");
    CHECK(why([](S& s) { s.alibi = true, s.causal = false; }) == "slopes without a causal mask");
    CHECK(why([](S& s) { s.tokens = 1 << 17; }).find("MiB for one call") != std::string::npos);
  }

  TEST_CASE("attention in pieces has the bits of one call; what has no plan is left alone") {
    cairn::testing::CudaMachine machine(3);
    {
      const auto context = machine.open();
      const auto stream = CudaStream::make(context);
      const AttentionShape of = shape(4, 20, 4, 2, 16);
      const int64_t rows = of.samples * of.tokens, width = of.q_stride, out_width = of.out_stride;
      std::mt19937 draw(5);
      std::normal_distribution<float> normal;
      const auto drawn = [&](int64_t count) {
        std::vector<bf16> out(static_cast<size_t>(count));
        for (bf16& x : out) x = to_bf16(normal(draw));
        return out;
      };
      const auto qkv = drawn(rows * width), dout = drawn(rows * out_width);
      const int64_t sums = of.samples * of.heads * of.tokens;
      const auto device = context->device();
      const auto room = [&](int64_t bytes) {
        auto made = Buffer::allocate(device, bytes);
        REQUIRE_OK(made);
        return std::move(made).value();
      };
      Heap heap(context);
      const int64_t whole = attention_workspace_bytes(of, AttentionPass::kBackward) - kOwn, sample = whole / 4;
      Buffer in = room(2 * rows * width), gradient = room(2 * rows * out_width), out = room(2 * rows * out_width),
             logsumexp = room(4 * sums), dqkv = room(2 * rows * width), work = room(whole + kOwn);
      stream->copy(in.at().address(), qkv.data(), 2 * rows * width, kToDevice);
      stream->copy(gradient.at().address(), dout.data(), 2 * rows * out_width, kToDevice);
      auto* const at = static_cast<std::byte*>(static_cast<void*>(in.at().address()));
      auto* const dat = static_cast<std::byte*>(static_cast<void*>(dqkv.at().address()));
      const int64_t k_at = 2 * of.heads * of.head_dim, v_at = k_at + 2 * of.kv_heads * of.head_dim;
      const AttentionArrays arrays{.q = at,
                                   .k = at + k_at,
                                   .v = at + v_at,
                                   .out = out.at().address(),
                                   .logsumexp = static_cast<float*>(static_cast<void*>(logsumexp.at().address())),
                                   .dout = gradient.at().address(),
                                   .dq = dat,
                                   .dk = dat + k_at,
                                   .dv = dat + v_at,
                                   .scale = 0.25f};
      std::vector<bf16> wanted;
      for (const auto& [most, calls] : {std::pair(whole, 1), {2 * sample, 2}, {sample, 4}, {sample / 2, 8}}) {
        CAPTURE(calls);
        simt::AttentionDouble library;
        AttentionPlans plans(library.builder(), most);
        CHECK(plans.prepare(std::vector{of, of}).empty());
        CHECK(library.counts().built == 2);
        stream->set(out.at().address(), 0xff, 2 * rows * out_width);
        stream->set(dqkv.at().address(), 0xff, 2 * rows * width);
        CHECK(plans.run(*stream, of, AttentionPass::kForward, arrays, work.all()));
        CHECK(plans.run(*stream, of, AttentionPass::kBackward, arrays, work.all()));
        AttentionShape other = of;
        other.tokens = 21;
        CHECK_FALSE(plans.run(*stream, other, AttentionPass::kForward, arrays, work.all()));
        AttentionArrays shifted = arrays;
        shifted.q = at + 2;
        CHECK_FALSE(plans.run(*stream, of, AttentionPass::kForward, shifted, work.all()));
        std::vector<bf16> found(static_cast<size_t>(rows * (width + out_width)));
        stream->copy(found.data(), dqkv.at().address(), 2 * rows * width, kToHost);
        stream->copy(found.data() + rows * width, out.at().address(), 2 * rows * out_width, kToHost);
        REQUIRE_OK(stream->settle());
        CHECK(library.counts().forward == 1);
        CHECK(library.counts().backward == calls);
        if (wanted.empty()) wanted = found;
        CHECK(std::memcmp(found.data(), wanted.data(), found.size() * sizeof(bf16)) == 0);
      }
      bool any = false;
      for (const bf16 x : wanted) any |= to_f32(x) != to_f32(x);
      CHECK_FALSE(any);  // all was written
    }
    CHECK(machine.cuda.misuses() == std::vector<std::string>());
    CHECK(machine.cuda.left() == std::vector<std::string>());
  }

  TEST_CASE(
      "a pass that is refused is by Cairn's own kernels, alone, and so is a plan that wants more than was planned") {
    struct Large final : AttentionPlan {
      int64_t workspace_bytes() const override { return int64_t{1} << 40; }
      Status run(CudaStream&, const AttentionArrays&, void*) override { return {}; }
    };
    AttentionPlans large([](const AttentionShape&, AttentionPass) -> Result<std::unique_ptr<AttentionPlan>> {
      return std::unique_ptr<AttentionPlan>(std::make_unique<Large>());
    });
    const AttentionShape of = shape(1, 64, 2, 2, 64);
    const auto told = large.prepare(std::vector{of});
    REQUIRE(told.size() == 2);
    CHECK(told[0] ==
          "attention of bf16 1 x 64 tokens, 2 heads of 64, forward, is by Cairn's own kernels: its plan wants "
          "1099511627776 bytes of workspace, and the run has planned 256");
    CHECK(told[1].starts_with("attention of bf16 1 x 64 tokens, 2 heads of 64, backward, is by Cairn's own kernels: "));
    CHECK(large.count() == 0);
    simt::AttentionDouble library;
    AttentionPlans one([build = library.builder()](const AttentionShape& shape,
                                                   AttentionPass pass) -> Result<std::unique_ptr<AttentionPlan>> {
      if (pass == AttentionPass::kBackward) return Error{ErrorCode::kUnsupported, "no backward"};
      return build(shape, pass);
    });
    CHECK(one.prepare(std::vector{of}) ==
          std::vector<std::string>{"attention of bf16 1 x 64 tokens, 2 heads of 64, backward, is by Cairn's own "
                                   "kernels: no backward"});
    CHECK(one.has(of, AttentionPass::kForward));
    CHECK_FALSE(one.has(of, AttentionPass::kBackward));
    CHECK(one.count() == 1);
    CHECK(one.prepare(std::vector{of}).empty());
  }
}
