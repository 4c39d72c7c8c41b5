#include "runtime/dlrm/table_shard.h"

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <random>
#include <vector>

using namespace cairn;
using namespace cairn::dlrm;

namespace {

constexpr int64_t kRows = 50, kWidth = 7, kSamples = 3000;

/// Bags of a table in which some rows are read a hundred times; big enough for several threads.
struct Drawn {
  std::vector<std::vector<int32_t>> rows;
  std::vector<Bag> bags;
  std::vector<double> gradients;
  std::vector<const double*> addresses;

  Drawn() {
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    for (int64_t s = 0; s < kSamples; ++s) {
      rows.emplace_back();
      for (int64_t i = random() % 4; i > 0; --i) rows.back().push_back(static_cast<int32_t>(random() % (kRows - 5)));
    }
    for (const auto& bag : rows) bags.push_back({bag.data(), static_cast<int32_t>(bag.size())});
    for (int64_t i = 0; i < kSamples * kWidth; ++i) gradients.push_back(normal(random));
    for (int64_t s = 0; s < kSamples; ++s) addresses.push_back(&gradients[static_cast<size_t>(s * kWidth)]);
  }

  /// The sums of each row.
  std::vector<double> sums() const {
    std::vector<double> sums(kRows * kWidth);
    for (size_t s = 0; s < rows.size(); ++s)
      for (const int32_t row : rows[s])
        for (size_t c = 0; c < kWidth; ++c) sums[static_cast<size_t>(row) * kWidth + c] += addresses[s][c];
    return sums;
  }
};

ShardRows<double> filled(DlrmRule rule) {
  ShardRows<double> shard(kRows, kWidth, rule);
  for (size_t i = 0; i < shard.weights().size(); ++i) shard.weights()[i] = std::sin(static_cast<double>(i));
  return shard;
}

}  // namespace

TEST_SUITE("runtime/dlrm/table_shard") {
  TEST_CASE("a bag is the sum of its rows, an empty one zeros") {
    const Drawn drawn;
    const ShardRows<double> shard = filled(DlrmRule::kSgd);
    std::vector<double> out(kSamples * (kWidth + 2), 9), twice = out;
    shard.pool(drawn.bags, out.data(), kWidth + 2, false);
    shard.pool(drawn.bags, twice.data(), kWidth + 2, false);
    shard.pool(drawn.bags, twice.data(), kWidth + 2, true);
    double apart = 0;
    for (size_t s = 0; s < kSamples; ++s) {
      for (size_t c = 0; c < kWidth; ++c) {
        double want = 0;
        for (const int32_t row : drawn.rows[s])
          want += std::sin(static_cast<double>(row) * kWidth + static_cast<double>(c));
        apart = std::max(apart, std::abs(out[s * (kWidth + 2) + c] - want));
        apart = std::max(apart, std::abs(twice[s * (kWidth + 2) + c] - 2 * want));
      }
      apart += std::abs(out[s * (kWidth + 2) + kWidth] - 9);  // what is behind a row stays
    }
    CHECK(apart <= 1e-12);
  }

  TEST_CASE("SGD moves each row by the sum of its gradients") {
    const Drawn drawn;
    ShardRows<double> shard = filled(DlrmRule::kSgd), dense = filled(DlrmRule::kSgd);
    const RowUpdate how{DlrmRule::kSgd, 0.25, 1};
    shard.update(how, drawn.bags, drawn.addresses);
    const std::vector<double> sums = drawn.sums();
    dense.update_all(how, sums.data());
    for (size_t i = 0; i < sums.size(); ++i) {
      CHECK(shard.weights()[i] == doctest::Approx(std::sin(static_cast<double>(i)) - 0.25 * sums[i]).epsilon(1e-12));
      CHECK(dense.weights()[i] == doctest::Approx(shard.weights()[i]).epsilon(1e-12));
    }
  }

  TEST_CASE("row-wise Adagrad adds the mean square of the summed gradient once, and leaves unread rows") {
    const Drawn drawn;
    ShardRows<double> shard = filled(DlrmRule::kRowAdagrad);
    const RowUpdate how{DlrmRule::kRowAdagrad, 0.25, 1e-10};
    const std::vector<double> sums = drawn.sums();
    std::vector<double> squares(kRows), want(kRows * kWidth);
    for (size_t i = 0; i < want.size(); ++i) want[i] = std::sin(static_cast<double>(i));
    for (int step = 0; step < 2; ++step) {
      shard.update(how, drawn.bags, drawn.addresses);
      for (size_t r = 0; r < kRows; ++r) {
        double square = 0;
        for (size_t c = 0; c < kWidth; ++c) square += sums[r * kWidth + c] * sums[r * kWidth + c];
        squares[r] += square / kWidth;
        for (size_t c = 0; c < kWidth; ++c)
          if (square > 0) want[r * kWidth + c] -= 0.25 * sums[r * kWidth + c] / (std::sqrt(squares[r]) + 1e-10);
      }
    }
    for (size_t i = 0; i < want.size(); ++i) CHECK(shard.weights()[i] == doctest::Approx(want[i]).epsilon(1e-12));
    for (size_t r = 0; r < kRows; ++r) CHECK(shard.square_sums()[r] == doctest::Approx(squares[r]).epsilon(1e-12));
    for (size_t r = kRows - 5; r < kRows; ++r) CHECK(shard.square_sums()[r] == 0);
  }
}
