// Rules of merging against plain ones that sort, on tensors small enough to sort.
#include "ckpt/merge_rule.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "runtime/core/random.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

using Values = std::vector<double>;

/// Numbers that a float holds, some of them equal in size.
Values drawn(uint64_t key, size_t n) {
  Values out(n);
  for (size_t e = 0; e < n; ++e) out[e] = std::round(normal_at(key, e) * 64) / 64;
  return out;
}

/// The whole tensor in pieces of `step` elements.
Values merged(const MergeRule& rule, const Values& base, const std::vector<Values>& sources, size_t step) {
  const size_t n = sources.front().size();
  TensorMerge merge(rule, "model.w", static_cast<int64_t>(n));
  Values out(n);
  const auto over_pieces = [&](const auto& each) {
    for (size_t at = 0; at < n; at += step) {
      const size_t end = std::min(n, at + step);
      std::vector<Values> of;
      for (const Values& source : sources) of.emplace_back(source.begin() + at, source.begin() + end);
      std::vector<int64_t> index(end - at);
      std::iota(index.begin(), index.end(), static_cast<int64_t>(at));
      const auto part = base.empty() ? std::span<const double>() : std::span(base).subspan(at, end - at);
      each(MergePiece{.base = part, .sources = of, .index = index}, std::span(out).subspan(at, end - at));
    }
  };
  for (int pass = 0; pass < TensorMerge::passes(rule.method); ++pass) {
    over_pieces([&](const MergePiece& piece, std::span<double>) { merge.look(pass, piece); });
    merge.end_pass(pass);
  }
  over_pieces([&](const MergePiece& piece, std::span<double> into) { merge.merge(piece, into); });
  return out;
}

/// A task vector without its least elements.
Values greatest(Values delta, double density) {
  Values sizes(delta.size());
  std::ranges::transform(delta, sizes.begin(), [](double d) { return std::abs(static_cast<float>(d)); });
  std::ranges::sort(sizes, std::greater());
  const auto kept = std::max<size_t>(1, static_cast<size_t>(density * static_cast<double>(delta.size())));
  for (double& d : delta) {
    if (std::abs(static_cast<float>(d)) < sizes[kept - 1]) d = 0;
  }
  return delta;
}

Values minus(const Values& a, const Values& b) {
  Values out(a.size());
  std::ranges::transform(a, b, out.begin(), std::minus());
  return out;
}

void check_near(const Values& a, const Values& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (size_t e = 0; e < a.size(); ++e) worst = std::max(worst, std::abs(a[e] - b[e]));
  CHECK(worst < 1e-12);
}

}  // namespace

TEST_SUITE("ckpt/merge_rule") {
  TEST_CASE("sums and task vectors are those of their formula, for any pieces") {
    const Values base = drawn(1, 1000), a = drawn(2, 1000), b = drawn(3, 1000);
    for (const size_t step : {size_t{1000}, size_t{7}}) {
      Values mean(1000), sum(1000), task(1000), shared(1000);
      for (size_t e = 0; e < 1000; ++e) {
        mean[e] = (3 * a[e] + b[e]) / 4;
        sum[e] = 3 * a[e] + b[e];
        task[e] = base[e] + 0.5 * (3 * (a[e] - base[e]) - (b[e] - base[e]));
        shared[e] = base[e] + (3 * (a[e] - base[e]) - (b[e] - base[e])) / 2;
      }
      check_near(merged({.weights = {3, 1}}, {}, {a, b}, step), mean);
      check_near(merged({.weights = {3, 1}, .normalize = false}, {}, {a, b}, step), sum);
      MergeRule rule{.method = MergeMethod::kTaskArithmetic, .weights = {3, -1}, .normalize = false, .lambda = 0.5};
      check_near(merged(rule, base, {a, b}, step), task);
      rule.normalize = true;
      rule.lambda = 1;
      check_near(merged(rule, base, {a, b}, step), shared);
    }
  }

  TEST_CASE("TIES keeps the greatest elements of each task vector and the sign that weighs more") {
    const Values base = drawn(1, 3000);
    const std::vector<Values> sources = {drawn(2, 3000), drawn(3, 3000), drawn(4, 3000)};
    for (const double density : {1e-9, 0.01, 0.3, 0.5, 0.999, 1.0}) {
      for (const bool normalize : {true, false}) {
        const MergeRule rule{.method = MergeMethod::kTies,
                             .weights = {1, 0.5, 2},
                             .densities = {density, density, 1},
                             .normalize = normalize,
                             .lambda = 0.7};
        std::vector<Values> deltas;
        for (size_t i = 0; i < 3; ++i) deltas.push_back(greatest(minus(sources[i], base), rule.densities[i]));
        Values want(3000);
        for (size_t e = 0; e < 3000; ++e) {
          double all = 0, sum = 0, weight = 0;
          for (size_t i = 0; i < 3; ++i) all += rule.weights[i] * deltas[i][e];
          for (size_t i = 0; i < 3; ++i) {
            if (deltas[i][e] == 0 || (deltas[i][e] > 0) != (all >= 0)) continue;
            sum += rule.weights[i] * deltas[i][e];
            weight += rule.weights[i];
          }
          want[e] = base[e] + 0.7 * (normalize && weight != 0 ? sum / weight : sum);
        }
        check_near(merged(rule, base, sources, 3000), want);
        CHECK(merged(rule, base, sources, 11) == merged(rule, base, sources, 3000));
      }
    }
  }

  TEST_CASE("DARE drops drawn elements and scales the others to the magnitude of all") {
    constexpr size_t kElems = 20'000;
    const Values base = drawn(1, kElems);
    const std::vector<Values> sources = {drawn(2, kElems), drawn(3, kElems)};
    MergeRule rule{
        .method = MergeMethod::kDareLinear, .weights = {1, 1}, .densities = {0.3, 1}, .normalize = false, .seed = 5};
    const auto kept_of = [&](size_t source, const MergeRule& by) {  // from the merge of that source only
      MergeRule alone = by;
      alone.weights = {source == 0 ? 1.0 : 0.0, source == 1 ? 1.0 : 0.0};
      const Values delta = minus(sources[source], base), out = minus(merged(alone, base, sources, kElems), base);
      double before = 0, after = 0;
      std::vector<bool> kept(kElems);
      for (size_t e = 0; e < kElems; ++e) {
        kept[e] = out[e] != 0;
        before += std::abs(delta[e]);
        after += kept[e] ? std::abs(delta[e]) : 0;
      }
      for (size_t e = 0; e < kElems; ++e) {
        if (kept[e]) REQUIRE(out[e] == doctest::Approx(delta[e] * before / after).epsilon(1e-9));
      }
      return kept;
    };
    const std::vector<bool> first = kept_of(0, rule);
    const auto share = static_cast<double>(std::ranges::count(first, true)) / kElems;
    CHECK(std::abs(share - 0.3 * (1 - 1.0 / 128)) < 0.02);  // some task vectors' elements are 0 by themselves
    CHECK(merged(rule, base, sources, 13) == merged(rule, base, sources, kElems));
    CHECK(kept_of(0, rule) == first);

    MergeRule other = rule;
    other.seed = 6;
    other.densities = {0.3, 0.3};
    const std::vector<bool> reseeded = kept_of(0, other), second = kept_of(1, other);
    const auto both = [&](const std::vector<bool>& a, const std::vector<bool>& b) {
      double n = 0;
      for (size_t e = 0; e < kElems; ++e) n += a[e] && b[e] ? 1 : 0;
      return n / kElems;
    };
    CHECK(std::abs(both(first, reseeded) - 0.09) < 0.015);  // independent of each other
    CHECK(std::abs(both(reseeded, second) - 0.09) < 0.015);

    // With the sign that weighs more: of the elements that were drawn.
    rule.method = MergeMethod::kDareTies;
    rule.densities = {0.3, 0.3};
    MergeRule linear = rule;
    linear.method = MergeMethod::kDareLinear;
    std::vector<Values> deltas;
    for (size_t i = 0; i < 2; ++i) {
      linear.weights = {i == 0 ? 1.0 : 0.0, i == 1 ? 1.0 : 0.0};
      deltas.push_back(minus(merged(linear, base, sources, kElems), base));
    }
    Values want(kElems);
    for (size_t e = 0; e < kElems; ++e) {
      const double sum = deltas[0][e] + deltas[1][e];
      want[e] = base[e];
      for (const Values& delta : deltas) want[e] += delta[e] != 0 && (delta[e] > 0) == (sum >= 0) ? delta[e] : 0;
    }
    check_near(merged(rule, base, sources, 17), want);
  }

  TEST_CASE("SLERP walks the arc between two tensors, and a line where there is no arc") {
    const Values a = {3, 0, 0, 0}, b = {0, 0, 2, 0};
    const double half = std::sqrt(0.5);
    check_near(merged({.method = MergeMethod::kSlerp, .weights = {1, 1}, .t = 0.5}, {}, {a, b}, 3),
               {3 * half, 0, 2 * half, 0});
    check_near(merged({.method = MergeMethod::kSlerp, .weights = {1, 1}, .t = 0}, {}, {a, b}, 3), a);
    check_near(merged({.method = MergeMethod::kSlerp, .weights = {1, 1}, .t = 1}, {}, {a, b}, 3), b);
    check_near(merged({.method = MergeMethod::kSlerp, .weights = {1, 1}, .t = 0.25}, {}, {a, {1, 0, 0, 0}}, 3),
               {2.5, 0, 0, 0});
    check_near(merged({.method = MergeMethod::kSlerp, .weights = {1, 1}, .t = 0.25}, {}, {a, {0, 0, 0, 0}}, 3),
               {3 * std::sin(std::acos(0.0) * 0.75), 0, 0, 0});
  }

  TEST_CASE("a NaN of a source stays a NaN in the result and spreads no further") {
    const Values base = drawn(1, 100), a = drawn(2, 100);
    for (const MergeMethod method : {MergeMethod::kTaskArithmetic, MergeMethod::kTies, MergeMethod::kDareTies}) {
      Values b = drawn(3, 100);
      b[50] = std::numeric_limits<double>::quiet_NaN();
      const Values out = merged({.method = method, .weights = {1, 1}, .densities = {1, 1}}, base, {a, b}, 100);
      for (size_t e = 0; e < 100; ++e) CHECK(std::isnan(out[e]) == (e == 50));
    }
  }

  TEST_CASE("numbers that are none or out of range are refused") {
    const double nan = std::nan("");
    const struct {
      MergeRule rule;
      size_t sources;
      const char* says;
    } cases[] = {
        {{.weights = {1}}, 1, "a merge (linear) is of two checkpoints or more, got 1"},
        {{.method = MergeMethod::kTies}, 0, "a merge (ties) is of one checkpoint or more, got 0"},
        {{.method = MergeMethod::kSlerp}, 3, "slerp is of two checkpoints, got 3"},
        {{.method = MergeMethod::kSlerp, .t = 1.5}, 2, "t = 1.5 is not from 0 to 1"},
        {{.weights = {1, nan}}, 2, "weight nan is no number"},
        {{.weights = {1, -1}}, 2, "the weights add up to 0"},
        {{.weights = {1, 1e308, 1e308}}, 3, "too large for a double"},
        {{.weights = {1, 1, 1}}, 2, "3 weights for 2 checkpoints"},
        {{.method = MergeMethod::kTaskArithmetic, .weights = {1}, .lambda = nan}, 1, "lambda nan is no number"},
        {{.method = MergeMethod::kTies, .weights = {1}, .densities = {0}}, 1, "density 0 is not above 0 and up to 1"},
        {{.method = MergeMethod::kDareTies, .weights = {1}, .densities = {nan}}, 1, "density nan"},
        {{.method = MergeMethod::kDareLinear, .weights = {1}}, 1, "0 densities for 1 checkpoints"},
    };
    for (const auto& one : cases) {
      const Status said = check_merge_rule(one.rule, one.sources);
      REQUIRE_FALSE(said.ok());
      CHECK(said.error().code == ErrorCode::kInvalidInput);
      CHECK(said.error().message.find(one.says) != std::string::npos);
    }
    CHECK(check_merge_rule({.weights = {1, -1}, .normalize = false}, 2).ok());
  }
}
