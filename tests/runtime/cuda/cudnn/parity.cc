// Attention by cuDNN against Cairn's own kernels, on a device: in gpu_ops_tests, which bench/gpu_test runs. It has the
// same logsumexp, out and gradients, and the same bits each time.

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "runtime/cuda/cudnn/cudnn.h"
#include "runtime/cuda/cudnn_api.h"
#include "runtime/cuda/heap.h"
#include "runtime/cuda/linked/linked_api.h"
#include "runtime/cuda/ops/ops.h"
#include "runtime/device/buffer.h"
#include "tests/runtime/kernels/cuda/comparing.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

constexpr int kRepeats = 100;

template <typename T>
struct Pass {
  std::vector<T> out, dqkv;
  std::vector<float> logsumexp;
};

template <typename T>
class Device {
 public:
  explicit Device(std::shared_ptr<cuda::Context> context)
      : context_(context), heap_(context), stream_(cuda::CudaStream::make(context)) {
    cuda::serve_ops();
  }
  cuda::CudaStream& stream() { return *stream_; }
  Buffer room(int64_t bytes) {
    auto made = Buffer::allocate(context_->device(), bytes);
    REQUIRE_OK(made);
    return std::move(made).value();
  }
  template <typename U>
  Buffer array(const std::vector<U>& host) {
    const auto bytes = std::ssize(host) * static_cast<int64_t>(sizeof(U));
    Buffer out = room(bytes);
    stream_->copy(out.at().address(), host.data(), bytes, cuda::kToDevice);
    return out;
  }
  template <typename U>
  std::vector<U> told(Buffer& of) {
    std::vector<U> out(static_cast<size_t>(of.size_bytes()) / sizeof(U));
    stream_->copy(out.data(), of.at().address(), of.size_bytes(), cuda::kToHost);
    REQUIRE_OK(stream_->settle());
    return out;
  }

  /// Both passes of attention, as the tables have them.
  Pass<T> run(const kernels::AttentionDims& dims, Buffer& qkv, Buffer& dout) {
    const int64_t rows = dims.batch * dims.tokens, width = dims.q_stride, bytes = static_cast<int64_t>(sizeof(T));
    const int64_t k_at = dims.heads * dims.head_dim, v_at = k_at + dims.kv_heads * dims.head_dim;
    Buffer out = room(rows * dims.out_stride * bytes), dqkv = room(rows * width * bytes),
           logsumexp = room(rows * dims.heads * 4), scratch = room(rows * dims.heads * 4 * (1 + 2 * dims.head_dim));
    for (Buffer* const poisoned : {&out, &dqkv, &logsumexp}) {
      stream_->set(poisoned->at().address(), 0xff, poisoned->size_bytes());
    }
    const kernels::Exec<T> on = kernels::exec_on<T>(*stream_);
    const auto x = qkv.template at<T>(), y = out.template at<T>(), dx = dqkv.template at<T>();
    const auto sums = logsumexp.template at<float>();
    on.attention_forward(dims, x, x + k_at, x + v_at, y, sums);
    on.attention_backward(dims, x, x + k_at, x + v_at, y, sums, dout.template at<T>(), dx, dx + k_at, dx + v_at,
                          scratch.template at<float>());
    return {told<T>(out), told<T>(dqkv), told<float>(logsumexp)};
  }

 private:
  std::shared_ptr<cuda::Context> context_;
  cuda::Heap heap_;
  std::unique_ptr<cuda::CudaStream> stream_;
};

template <typename T>
void compare(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, bool causal, int64_t window,
             bool slopes) {
  CAPTURE(tokens);
  CAPTURE(head_dim);
  CAPTURE(window);
  CAPTURE(slopes);
  constexpr int64_t kSamples = 2;
  auto context = cuda::Context::open(cuda::linked_api(), 0);
  REQUIRE_OK(context);
  auto library = cuda::open_cudnn(cuda::linked_api(), 0);
  REQUIRE_OK(library);
  Device<T> device(context.value());
  const int64_t row = (heads + 2 * kv_heads) * head_dim, rows = kSamples * tokens;
  kernels::AttentionDims dims{kSamples, tokens, heads, kv_heads, head_dim, row, row, heads * head_dim, 0.125f};
  dims.mask.causal = causal;
  dims.mask.window = window;
  std::vector<float> host_slopes(static_cast<size_t>(heads));
  kernels::alibi_slopes(heads, 0, heads, host_slopes.data());
  Buffer on_device = device.array(host_slopes);
  if (slopes) dims.alibi_slopes = on_device.at<float>();
  Buffer qkv = device.array(normals<T>("qkv", rows * row)),
         dout = device.array(normals<T>("dout", rows * heads * head_dim));

  const Pass<T> own = device.run(dims, qkv, dout);
  const auto shape = kernels::plain_shape(dims, std::is_same_v<T, bf16> ? DType::kBf16 : DType::kF16);
  REQUIRE(shape.has_value());
  // In pieces too: of one group of heads of one sample.
  for (const int64_t most : {cuda::kMostAttentionWorkspace, int64_t{1}}) {
    if (slopes && most == 1) continue;  // slopes are of all heads
    CAPTURE(most);
    cuda::AttentionPlans plans(library.value().build, most);
    const std::vector<std::string> left = plans.prepare(std::vector{*shape});
    CAPTURE(left.empty() ? std::string() : left[0]);
    REQUIRE(left.empty());
    Buffer workspace = device.room(cuda::attention_workspace_bytes(*shape, cuda::AttentionPass::kBackward, most));
    device.stream().use_attention(&plans, workspace.all());
    const Pass<T> first = device.run(dims, qkv, dout);
    check_alike(first.out, own.out, attention_sums<T>(tokens));
    check_alike(first.logsumexp, own.logsumexp, chain_of_sums<float>(tokens));
    check_alike(first.dqkv, own.dqkv, attention_gradients<T>(2 * tokens));
    CHECK_FALSE(same_bits(first.dqkv, own.dqkv));  // they were not computed by the same kernels
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      const Pass<T> again = device.run(dims, qkv, dout);
      REQUIRE(same_bits(again.out, first.out));
      REQUIRE(same_bits(again.logsumexp, first.logsumexp));
      REQUIRE(same_bits(again.dqkv, first.dqkv));
    }
    device.stream().use_attention(nullptr, {});
  }
}

}  // namespace

TEST_SUITE("runtime/cuda/cudnn/parity") {
  TEST_CASE_TEMPLATE("cuDNN's attention gives what Cairn's own gives, with the same bits a hundred times", T, bf16,
                     f16) {
    if (const auto library = cuda::load_cudnn(cuda::library_candidates(cuda::kCudnnFile)); !library.ok()) {
      MESSAGE("not compared: ", library.error().message);
      return;
    }
    compare<T>(300, 4, 4, 64, true, 0, false);
    compare<T>(256, 8, 2, 128, true, 0, false);
    compare<T>(512, 4, 2, 64, true, 128, false);
    compare<T>(129, 2, 2, 72, false, 0, false);
    compare<T>(256, 12, 12, 64, true, 0, true);
  }
}
