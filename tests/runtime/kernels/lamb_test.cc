#include "runtime/kernels/lamb.h"

#include "tests/runtime/kernels/kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;

TEST_SUITE("runtime/kernels/lamb") {
  TEST_CASE("nothing is written where the norm of the gradients is not finite") {
    std::vector<float> grad{1.0f}, master{1.0f}, m{0.25f}, v{0.5f};
    const kernels::StateArrays state = state_at(master.data(), m.data(), v.data());
    const kernels::Clip clip = kernels::clip_of(INFINITY, {.most = 1});
    const kernels::AdamwArgs args{
        .lr = 0.5f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 0.1f, .weight_decay = 0.1f, .clip = DevicePtr(&clip)};
    kernels::lamb_moments(args, grad.data(), state, state, 1, {});
    kernels::lamb_step(args, 1.0f, state, state, 1);
    CHECK(std::vector{master[0], m[0], v[0]} == std::vector{1.0f, 0.25f, 0.5f});
  }

  TEST_CASE("two steps agree with the formula in double, in place and from one copy to another") {
    constexpr int64_t kCount = 5000;
    const kernels::AdamwArgs base{.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-6f, .weight_decay = 0.1f};
    auto w = normals<float>("w", kCount), m = std::vector<float>(kCount, 0.0f), v = m;
    std::vector<double> dw = doubles(w), dm(kCount, 0.0), dv(kCount, 0.0);
    auto w2 = w, m2 = m, v2 = v;
    const kernels::Clip half{.grad_scale = 0.5f};
    for (int64_t t = 1; t <= 2; ++t) {
      const auto grad = normals<float>(t == 1 ? "g1" : "g2", kCount);
      kernels::AdamwArgs args = base;
      args.step = t;
      args.clip = DevicePtr(&half);
      const kernels::StateArrays state = state_at(w.data(), m.data(), v.data());
      std::vector<double> words(kernels::TensorNorms::kWords), other_words = words;
      const kernels::TensorNorms norms{words}, others{other_words};
      kernels::lamb_moments(args, grad.data(), state, state, kCount, norms);
      const double trust = std::sqrt(norms.weight().value()) / std::sqrt(norms.step().value());
      double weight2 = 0, step2 = 0;
      std::vector<double> r(kCount);
      for (int64_t i = 0; i < kCount; ++i) {
        const double g = 0.5 * static_cast<double>(grad[i]);
        dm[i] = 0.9 * dm[i] + 0.1 * g;
        dv[i] = 0.99 * dv[i] + 0.01 * g * g;
        r[i] = dm[i] / (1 - std::pow(0.9, t)) / (std::sqrt(dv[i] / (1 - std::pow(0.99, t))) + 1e-6) + 0.1 * dw[i];
        weight2 += dw[i] * dw[i];
        step2 += r[i] * r[i];
      }
      CHECK(norms.weight().value() == doctest::Approx(weight2).epsilon(1e-6));
      CHECK(norms.step().value() == doctest::Approx(step2).epsilon(1e-5));
      kernels::lamb_step(args, static_cast<float>(trust), state, state, kCount);
      for (int64_t i = 0; i < kCount; ++i) dw[i] -= 0.01 * std::sqrt(weight2 / step2) * r[i];
      check_close(w, dw, {.relative = 1e-5, .absolute = 1e-5});

      // From one copy to another, cut in two, on another number of threads: the same bits.
      auto w3 = w2, m3 = m2, v3 = v2;
      omp_set_num_threads(1);
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 2048}, {2048, kCount}}) {
        const kernels::StateArrays from = state_at(&w2[begin], &m2[begin], &v2[begin]),
                                   to = state_at(&w3[begin], &m3[begin], &v3[begin]);
        kernels::lamb_moments(args, &grad[begin], from, to, end - begin, others);
        kernels::lamb_step(args, static_cast<float>(trust), from, to, end - begin);
      }
      omp_set_num_threads(omp_get_num_procs());
      CHECK(others.step().value() == norms.step().value());
      CHECK(others.weight().value() == norms.weight().value());
      w2 = w3, m2 = m3, v2 = v3;
      CHECK(w2 == w);
      CHECK(v2 == v);
    }
  }
}
