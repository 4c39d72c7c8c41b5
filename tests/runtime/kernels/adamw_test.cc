#include "runtime/kernels/adamw.h"

#include "kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;

TEST_SUITE("runtime/kernels/adamw") {
  TEST_CASE("ten steps follow a naive loop in double") {
    const int64_t count = 1003;
    auto master = normals<float>("w", count), m = std::vector<float>(count), v = m;
    std::vector<bf16> weight(count);
    auto w64 = doubles(master), m64 = doubles(m), v64 = doubles(v);
    kernels::AdamwArgs args{
        .lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .grad_scale = 0.5f};
    for (args.step = 1; args.step <= 10; ++args.step) {
      const auto grad = normals<float>("g" + std::to_string(args.step), count);
      kernels::adamw(args, grad.data(), master.data(), m.data(), v.data(), weight.data(), count);
      const double beta1 = args.beta1, beta2 = args.beta2, t = static_cast<double>(args.step);
      for (int64_t i = 0; i < count; ++i) {
        const double g = grad[i] * static_cast<double>(args.grad_scale);
        m64[i] = beta1 * m64[i] + (1 - beta1) * g;
        v64[i] = beta2 * v64[i] + (1 - beta2) * g * g;
        const double m_hat = m64[i] / (1 - std::pow(beta1, t)), v_hat = v64[i] / (1 - std::pow(beta2, t));
        w64[i] -= args.lr * args.weight_decay * w64[i];
        w64[i] -= args.lr * m_hat / (std::sqrt(v_hat) + args.eps);
      }
    }
    check_close(master, w64, sum_of<float>(10));
    check_close(m, m64, sum_of<float>(10));
    check_close(v, v64, sum_of<float>(10));
    for (int64_t i = 0; i < count; ++i) REQUIRE(weight[i].bits == to_bf16(master[i]).bits);
  }

  TEST_CASE("without a bf16 weight the same numbers come out; threads do not change them") {
    const int64_t count = 200000;
    const auto grad = normals<float>("g", count);
    const kernels::AdamwArgs args{.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f};
    std::vector<std::vector<float>> masters;
    for (const int threads : {1, 3}) {
      for (const bool rounded : {false, true}) {
        with_threads(threads, [&] {
          auto master = normals<float>("w", count), m = std::vector<float>(count), v = m;
          std::vector<bf16> weight(count);
          kernels::adamw(args, grad.data(), master.data(), m.data(), v.data(), rounded ? weight.data() : nullptr,
                         count);
          masters.push_back(master);
        });
      }
    }
    for (const auto& master : masters) CHECK(same_bits(master, masters[0]));
  }

  TEST_CASE("a NaN gradient shows in its element alone; a gradient of zero with eps 0.1 does not move") {
    std::vector<float> grad{1.0f, NAN, 0.0f}, master{1.0f, 1.0f, 1.0f}, m(3), v(3);
    kernels::adamw({.lr = 0.5f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 0.1f}, grad.data(), master.data(), m.data(),
                   v.data(), nullptr, 3);
    CHECK(master[0] == doctest::Approx(1.0 - 0.5 / 1.1));
    CHECK(std::isnan(master[1]));
    CHECK(master[2] == 1.0f);
  }
}
