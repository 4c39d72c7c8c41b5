#include "runtime/kernels/cuda/experts.h"

#include <numeric>

#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::RouterDims;
using kernels::RouterLosses;

namespace {

struct Case {
  const char* name;
  RouterDims dims;
  bool biased = false, balanced = false, z = false;
};

template <typename T>
void route(const Case& of) {
  CAPTURE(std::string(of.name));
  const RouterDims& d = of.dims;
  const auto logits = normals<float>("logits", d.tokens * d.experts), bias = normals<float>("bias", d.experts, 0.1),
             dweights = normals<float>("dweights", d.tokens * d.choices),
             balance = normals<float>("balance", d.experts, 0.1);
  std::vector<float> scores = logits, weights(d.tokens * d.choices), log_sums(d.tokens);
  std::vector<int32_t> chosen(weights.size());
  std::vector<T> dlogits(logits.size());
  RouterDims here = d;
  if (of.biased) here.bias = DevicePtr(bias.data());
  kernels::route_forward(here, scores.data(), chosen.data(), weights.data(), log_sums.data());
  RouterLosses losses;
  if (of.balanced) losses.balance = DevicePtr(balance.data());
  if (of.z) losses.log_sums = DevicePtr<const float>(log_sums.data());
  losses.z = 1e-2f;
  kernels::route_backward<T>(here, scores.data(), chosen.data(), dweights.data(), losses, dlogits.data());
  in_every_order([&] {
    OnDevice<float> d_logits(logits), d_weights(d.tokens * d.choices), d_bias(bias), d_dweights(dweights),
        d_balance(balance), d_log_sums(std::vector<float>(d.tokens));
    OnDevice<int32_t> d_chosen(d.tokens * d.choices);
    OnDevice<T> d_dlogits(d.tokens * d.experts);
    RouterDims there = d;
    if (of.biased) there.bias = DevicePtr<const float>(d_bias.data());
    Queue on;
    kernels::cuda::route_forward(on, there, d_logits.data(), d_chosen.data(), d_weights.data(), d_log_sums.data());
    CHECK(d_chosen.values() == chosen);
    const Tolerance row = chain_of_sums<float>(d.experts);
    check_alike(d_logits.values(), scores, row);
    check_alike(d_weights.values(), weights, row);
    if (!d.sigmoid) check_alike(d_log_sums.values(), log_sums, row);
    RouterLosses of_device;
    if (of.balanced) of_device.balance = DevicePtr<const float>(d_balance.data());
    if (of.z) of_device.log_sums = DevicePtr<const float>(d_log_sums.data());
    of_device.z = losses.z;
    kernels::cuda::route_backward<T>(on, there, d_logits.data(), d_chosen.data(), d_dweights.data(), of_device,
                                     d_dlogits.data());
    check_alike(d_dlogits.values(), dlogits, chain_of_sums<T>(d.experts));
  });
}

// Warps of a block that have no token; lanes without an expert, and with several.
const Case kCases[] = {
    {"softmax", {.tokens = 11, .experts = 8, .choices = 2}, false, false, false},
    {"softmax with both losses, not renormalised",
     {.tokens = 3, .experts = 40, .choices = 3, .renormalise = false, .scale = 2.5f},
     false,
     true,
     true},
    {"sigmoids with biases, in groups",
     {.tokens = 5, .experts = 80, .choices = 4, .sigmoid = true, .groups = 40, .groups_per_token = 3},
     true,
     true,
     false},
    {"softmax in groups",
     {.tokens = 4, .experts = 12, .choices = 3, .groups = 4, .groups_per_token = 2},
     false,
     true,
     false},
};

template <typename T>
void move_rows(int64_t width) {
  CAPTURE(width);
  constexpr int64_t kTokens = 7, kChoices = 2, kAll = kTokens * kChoices;
  std::vector<int32_t> rows_of(kAll);
  for (int64_t i = 0; i < kAll; ++i) rows_of[i] = static_cast<int32_t>(i * 5 % kAll);
  const auto tokens = normals<T>("tokens", kTokens * width), a = normals<T>("a", kAll * width),
             b = normals<T>("b", kAll * width);
  const auto factors = normals<float>("factors", kAll);
  std::vector<T> placed(a.size()), plain(tokens.size()), weighted(tokens.size()), x = a, y = b, gated = a, scaled = a;
  std::vector<float> dots(kAll), gates = factors;
  kernels::rows_to_experts<T>(tokens.data(), rows_of.data(), kTokens, kChoices, width, placed.data());
  kernels::rows_to_tokens<T>(a.data(), rows_of.data(), nullptr, kTokens, kChoices, width, plain.data());
  kernels::rows_to_tokens<T>(a.data(), rows_of.data(), factors.data(), kTokens, kChoices, width, weighted.data());
  kernels::dot_and_scale_rows<T>(x.data(), y.data(), rows_of.data(), factors.data(), kTokens, kChoices, width,
                                 dots.data());
  kernels::gate_rows<T>(gates.data(), gated.data(), kAll, width);
  kernels::scale_expert_rows<T>(scaled.data(), rows_of.data(), factors.data(), kAll, width);
  std::vector<T> dlogits(kAll);
  kernels::gate_backward<T>(gates.data(), factors.data(), dlogits.data(), kAll);
  in_every_order([&] {
    OnDevice<int32_t> d_rows_of(rows_of);
    OnDevice<T> d_tokens(tokens), d_a(a), d_b(b), d_gated(a), d_scaled(a), d_placed(kAll * width),
        d_to(kTokens * width), d_dlogits(kAll);
    OnDevice<float> d_factors(factors), d_dots(kAll), d_gates(factors);
    Queue on;
    kernels::cuda::rows_to_experts<T>(on, d_tokens.data(), d_rows_of.data(), kTokens, kChoices, width, d_placed.data());
    CHECK(same_bits(d_placed.values(), placed));
    kernels::cuda::rows_to_tokens<T>(on, d_a.data(), d_rows_of.data(), nullptr, kTokens, kChoices, width, d_to.data());
    check_alike(d_to.values(), plain, sum_of<T>(kChoices));
    kernels::cuda::rows_to_tokens<T>(on, d_a.data(), d_rows_of.data(), d_factors.data(), kTokens, kChoices, width,
                                     d_to.data());
    check_alike(d_to.values(), weighted, sum_of<T>(kChoices));
    kernels::cuda::dot_and_scale_rows<T>(on, d_a.data(), d_b.data(), d_rows_of.data(), d_factors.data(), kTokens,
                                         kChoices, width, d_dots.data());
    check_alike(d_dots.values(), dots, sum_of<float>(width));
    check_alike(d_a.values(), x, pointwise<T>());
    check_alike(d_b.values(), y, pointwise<T>());
    kernels::cuda::gate_rows<T>(on, d_gates.data(), d_gated.data(), kAll, width);
    check_alike(d_gates.values(), gates, pointwise<float>());
    check_alike(d_gated.values(), gated, pointwise<T>());
    kernels::cuda::scale_expert_rows<T>(on, d_scaled.data(), d_rows_of.data(), d_factors.data(), kAll, width);
    check_alike(d_scaled.values(), scaled, pointwise<T>());
    kernels::cuda::gate_backward<T>(on, d_gates.data(), d_factors.data(), d_dlogits.data(), kAll);
    check_alike(d_dlogits.values(), dlogits, pointwise<T>());
  });
}

/// Groups without rows, within a tile, beyond one; rows are parts of longer ones.
template <typename T>
void biases_of_groups() {
  constexpr int64_t kWidth = 300, kStride = 310, kGroups = 4;
  std::vector<kernels::GroupRows> groups;
  kernels::GroupRows at;
  for (const int64_t rows : {5, 0, 300, 128}) {
    at.filled = at.rows = rows;
    groups.push_back(at);
    at.first += rows;
    at.tiles += kernels::GroupRows::tiles_of(rows);
  }
  groups.push_back({.first = at.first, .tiles = at.tiles});
  const int64_t rows = at.first;
  const auto biases = normals<T>("biases", kGroups * kWidth), others = normals<T>("rows", rows * kStride);
  const auto before = normals<float>("sums", kGroups * kWidth);
  std::vector<T> filled(rows * kWidth);
  std::vector<float> sums = before;
  std::vector<DevicePtr<const T>> from;
  std::vector<DevicePtr<float>> to;
  for (int64_t group = 0; group < kGroups; ++group) {
    from.emplace_back(biases.data() + group * kWidth);
    to.emplace_back(sums.data() + group * kWidth);
  }
  kernels::fill_groups<T>(groups.data(), rows, from, kWidth, filled.data());
  kernels::add_rows_of_groups<T>(groups.data(), rows, others.data(), kStride, kWidth, to);
  in_every_order([&] {
    OnDevice<kernels::GroupRows> d_groups(groups);
    OnDevice<T> d_biases(biases), d_others(others), d_filled(std::vector<T>(rows * kWidth));
    OnDevice<float> d_sums(before);
    // A tile more than there are rows for, as where the host does not know.
    const kernels::cuda::Groups all{d_groups.data(), 0, kGroups, at.tiles + 1};
    ScratchQueue on(all.tiles * kWidth);
    kernels::cuda::fill_groups<T>(on, all, d_biases.data(), kWidth, kWidth, d_filled.data());
    const std::vector<T> got = d_filled.values();
    for (size_t i = 0; i < got.size(); ++i) REQUIRE(to_f32(got[i]) == to_f32(filled[i]));
    kernels::cuda::add_rows_of_groups<T>(on, all, d_others.data(), kStride, kWidth, d_sums.data(), kWidth);
    check_alike(d_sums.values(), sums, chain_of_sums<float>(300));
    // The last two by themselves: the same bits, and the others' sums stay.
    OnDevice<float> d_some(before);
    kernels::cuda::add_rows_of_groups<T>(on, {d_groups.data(), 2, kGroups, at.tiles}, d_others.data(), kStride, kWidth,
                                         d_some.data() + 2 * kWidth, kWidth);
    const std::vector<float> whole = d_sums.values(), some = d_some.values();
    for (int64_t i = 0; i < kGroups * kWidth; ++i) REQUIRE(some[i] == (i < 2 * kWidth ? before[i] : whole[i]));
  });
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/experts") {
  TEST_CASE("groups of experts stand where the CPU puts them, more experts than threads among them") {
    for (const int64_t experts : {5, 300}) {
      CAPTURE(experts);
      constexpr int64_t kChoices = 700;
      std::vector<int32_t> chosen(kChoices);
      for (int64_t i = 0; i < kChoices; ++i)
        chosen[i] = static_cast<int32_t>(i * i % (experts - 1));  // none of the last
      const kernels::GroupDims dims{kChoices, experts, 32};
      std::vector<kernels::GroupRows> groups(experts + 1);
      std::vector<float> counts(experts);
      std::vector<int32_t> rows_of(kChoices);
      kernels::group_choices(dims, chosen.data(), groups.data(), counts.data(), rows_of.data());
      constexpr int64_t kWidth = 12;
      const auto rows = normals<bf16>("rows", groups.back().first * kWidth);
      std::vector<bf16> cleared = rows;
      kernels::clear_padding<bf16>(groups.data(), experts, kWidth, cleared.data());
      in_every_order([&] {
        OnDevice<int32_t> d_chosen(chosen), d_rows_of(kChoices);
        OnDevice<kernels::GroupRows> d_groups(experts + 1);
        OnDevice<float> d_counts(experts);
        OnDevice<bf16> d_rows(rows);
        ScratchQueue on(experts);
        kernels::cuda::group_choices(on, dims, d_chosen.data(), d_groups.data(), d_counts.data(), d_rows_of.data());
        kernels::cuda::clear_padding<bf16>(on, d_groups.data(), experts, kWidth, d_rows.data());
        CHECK(d_rows_of.values() == rows_of);
        CHECK(d_counts.values() == counts);
        CHECK(same_bits(d_rows.values(), cleared));
        const auto got = d_groups.values();
        for (size_t e = 0; e < groups.size(); ++e) {
          CHECK(got[e].first == groups[e].first);
          CHECK(got[e].filled == groups[e].filled);
          CHECK(got[e].rows == groups[e].rows);
          CHECK(got[e].tiles == groups[e].tiles);
        }
      });
    }
  }
  TEST_CASE_TEMPLATE("the router is the CPU's, forward and backward", T, float, bf16, f16) {
    for (const Case& of : kCases) route<T>(of);
  }
  TEST_CASE("equal scores go to the lower expert, and what is no number is chosen last") {
    const RouterDims d{.tokens = 2, .experts = 40, .choices = 3, .sigmoid = true};
    std::vector<float> logits(80, 0.5f);
    logits[40] = NAN;
    in_every_order([&] {
      OnDevice<float> d_logits(logits), weights(6);
      OnDevice<int32_t> chosen(6);
      Queue on;
      kernels::cuda::route_forward(on, d, d_logits.data(), chosen.data(), weights.data(), nullptr);
      CHECK(chosen.values() == std::vector<int32_t>{0, 1, 2, 1, 2, 3});
    });
  }
  TEST_CASE("choices are counted, and placed in their order") {
    constexpr int64_t kExperts = 5, kChoices = 700;  // more than twice the threads of a block
    std::vector<int32_t> chosen(kChoices), counts(kExperts), rows_of(kChoices);
    for (int64_t i = 0; i < kChoices; ++i)
      chosen[i] = static_cast<int32_t>((i * i / 3 + i) % 7 % 4);  // none of the last
    kernels::count_choices(chosen.data(), kChoices, counts);
    std::vector<int64_t> next(kExperts, 3);
    for (int64_t e = 1; e < kExperts; ++e) next[e] = next[e - 1] + counts[e - 1];
    const std::vector<int64_t> begins = next;
    kernels::place_choices(chosen.data(), kChoices, next, rows_of.data());
    in_every_order([&] {
      OnDevice<int32_t> d_chosen(chosen), d_counts(kExperts), d_rows_of(kChoices);
      OnDevice<int64_t> d_next(begins);
      Queue on;
      kernels::cuda::count_choices(on, d_chosen.data(), kChoices, kExperts, d_counts.data());
      CHECK(d_counts.values() == counts);
      kernels::cuda::place_choices(on, d_chosen.data(), kChoices, kExperts, d_next.data(), d_rows_of.data());
      CHECK(d_rows_of.values() == rows_of);
    });
  }
  TEST_CASE_TEMPLATE("rows of groups become their biases, and are added up to their gradients", T, float, bf16, f16) {
    biases_of_groups<T>();
  }
  TEST_CASE_TEMPLATE("rows go to experts and back as the CPU's do, and are gated", T, float, bf16, f16) {
    for (const int64_t width : {64, 9}) move_rows<T>(width);
  }
}
