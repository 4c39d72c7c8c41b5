#include "runtime/kernels/adamw.h"

#include <cstring>

#include "kernel_testing.h"
#include "runtime/core/word_sums.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

constexpr kernels::Clip kHalf{.grad_scale = 0.5f}, kOne;

}  // namespace

TEST_SUITE("runtime/kernels/adamw") {
  TEST_CASE("ten steps follow a naive loop in double") {
    const int64_t count = 1003;
    auto master = normals<float>("w", count), m = std::vector<float>(count), v = m;
    std::vector<bf16> weight(count);
    auto w64 = doubles(master), m64 = doubles(m), v64 = doubles(v);
    kernels::AdamwArgs args{
        .lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .clip = DevicePtr(&kHalf)};
    for (args.step = 1; args.step <= 10; ++args.step) {
      args.portable = args.step % 2 == 0;
      const auto grad = normals<float>("g" + std::to_string(args.step), count);
      const kernels::StateArrays state = state_at(master.data(), m.data(), v.data());
      kernels::adamw(args, grad.data(), state, state, nullptr, weight.data(), count);
      const double beta1 = args.beta1, beta2 = args.beta2, t = static_cast<double>(args.step);
      for (int64_t i = 0; i < count; ++i) {
        const double g = grad[i] * static_cast<double>(kHalf.grad_scale);
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

  TEST_CASE("AdamW without a bf16 weight gives the same numbers; threads do not change them") {
    const int64_t count = 200000;
    const auto grad = normals<float>("g", count);
    const kernels::AdamwArgs args{.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .clip = DevicePtr(&kOne)};
    std::vector<std::vector<float>> masters;
    for (const int threads : {1, 3}) {
      for (const bool rounded : {false, true}) {
        with_threads(threads, [&] {
          auto master = normals<float>("w", count), m = std::vector<float>(count), v = m;
          std::vector<bf16> weight(count);
          const kernels::StateArrays state = state_at(master.data(), m.data(), v.data());
          kernels::adamw(args, grad.data(), state, state, nullptr, rounded ? weight.data() : nullptr, count);
          masters.push_back(master);
        });
      }
    }
    for (const auto& master : masters) CHECK(same_bits(master, masters[0]));
  }

  TEST_CASE("a NaN gradient shows in its element alone; a gradient of zero with eps 0.1 does not move") {
    std::vector<float> grad{1.0f, NAN, 0.0f}, master{1.0f, 1.0f, 1.0f}, m(3), v(3);
    const kernels::StateArrays state = state_at(master.data(), m.data(), v.data());
    kernels::adamw({.lr = 0.5f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 0.1f, .clip = DevicePtr(&kOne)}, grad.data(),
                   state, state, nullptr, nullptr, 3);
    CHECK(master[0] == doctest::Approx(1.0 - 0.5 / 1.1));
    CHECK(std::isnan(master[1]));
    CHECK(master[2] == 1.0f);
  }

  TEST_CASE("nothing is written where the norm of the gradients is not finite") {
    std::vector<float> grad{1.0f}, master{1.0f}, m{0.25f}, v{0.5f}, weight{2.0f};
    const kernels::StateArrays state = state_at(master.data(), m.data(), v.data());
    const kernels::Clip clip = kernels::clip_of(INFINITY, {.most = 1});
    kernels::adamw({.lr = 0.5f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 0.1f, .clip = DevicePtr(&clip)}, grad.data(),
                   state, state, weight.data(), nullptr, 1);
    CHECK(std::vector{master[0], m[0], v[0], weight[0]} == std::vector{1.0f, 0.25f, 0.5f, 2.0f});
  }

  TEST_CASE(
      "AdamW gives the same bits and sums in place or into other memory, past the caches or not, at any alignment") {
    for (const int64_t signed_count :
         {1, -1, 37, 512, -512, 1003, -1003, 150001, -150001}) {  // negative: portable code
      for (const int64_t shift : {0, 1, 5}) {                     // elements off a cache line
        const int64_t count = std::abs(signed_count);
        const auto room = static_cast<size_t>(count + shift);
        const auto grad = normals<float>("g", count + shift), w = normals<float>("w", count + shift),
                   m = normals<float>("m", count + shift);
        auto v = normals<float>("v", count + shift);
        for (float& x : v) x = x * x;
        kernels::AdamwArgs args{.lr = 0.01f,
                                .beta1 = 0.9f,
                                .beta2 = 0.95f,
                                .eps = 1e-8f,
                                .weight_decay = 0.1f,
                                .clip = DevicePtr(&kHalf),
                                .step = 3,
                                .portable = signed_count < 0};
        std::vector<float> first[3];
        std::vector<float> first_weight;
        std::vector<bf16> first_low;
        for (const int how : {0, 1, 2}) {  // in place, into other memory, streamed
          for (const int threads : {1, 3}) {
            std::vector<float> in[3] = {w, m, v}, out[3], weight(room);
            std::vector<bf16> low(room);
            for (auto& array : out) array.assign(room, -7.0f);
            const kernels::StateArrays from =
                state_at(in[0].data() + shift, in[1].data() + shift, in[2].data() + shift);
            const kernels::StateArrays other =
                state_at(out[0].data() + shift, out[1].data() + shift, out[2].data() + shift);
            const kernels::StateArrays& to = how == 0 ? from : other;
            args.stream = how == 2;
            uint64_t told[3] = {};
            with_threads(threads, [&] {
              kernels::adamw(args, grad.data() + shift, from, to, weight.data() + shift, nullptr, count, {told});
            });
            const float* const made[3] = {address_of(to.master), address_of(to.exp_avg), address_of(to.exp_avg_sq)};
            for (int k = 0; k < 3; ++k) {
              const std::vector<float> got(made[k], made[k] + count);
              CHECK(told[k] == word_sums_plain(reinterpret_cast<const std::byte*>(got.data()), count));
              if (first[k].empty()) first[k] = got;
              REQUIRE(same_bits(got, first[k]));
              if (how == 0) continue;
              const std::vector<float>& before = k == 0 ? w : k == 1 ? m : v;
              REQUIRE(same_bits(in[k], before));  // what it reads stays
              for (int64_t i = 0; i < shift; ++i) REQUIRE(out[k][i] == -7.0f);
            }
            REQUIRE(std::memcmp(weight.data() + shift, made[0], count * 4) == 0);
            with_threads(threads, [&] {
              std::vector<float> again[3] = {w, m, v};
              const kernels::StateArrays source =
                  state_at(again[0].data() + shift, again[1].data() + shift, again[2].data() + shift);
              kernels::adamw(args, grad.data() + shift, source, how == 0 ? source : other, nullptr, low.data() + shift,
                             count);
            });
            for (int64_t i = 0; i < count; ++i) REQUIRE(low[shift + i].bits == to_bf16(first[0][i]).bits);
          }
        }
      }
    }
  }

  TEST_CASE("word sums find each flipped bit and exchanged words, and add up from parts") {
    std::vector<float> x = normals<float>("x", 300);
    auto* bytes = reinterpret_cast<std::byte*>(x.data());
    const uint64_t whole = word_sums_plain(bytes, 300);
    CHECK(word_sums(bytes, 300) == whole);
    CHECK(add_word_sums(word_sums_plain(bytes + 400, 200, 100), word_sums_plain(bytes, 100)) == whole);
    for (int64_t bit = 0; bit < 300 * 32; ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
      REQUIRE(word_sums_plain(bytes, 300) != whole);
      bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    }
    std::swap(x[10], x[11]);
    CHECK(word_sums_plain(bytes, 300) != whole);
  }
}
