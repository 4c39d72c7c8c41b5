#pragma once
// A sum of doubles that is exact, so neither the order of the terms nor how they are spread over ranks changes a bit of
// it. The value is kept as digits of 24 bits from 2^144 down to 2^-168; of a term, bits below that are cut off, and a
// term beyond 2^120 makes the sum infinite. Infinities and NaN go through.

#include <array>
#include <cstdint>
#include <span>

namespace cairn {

class ExactSum {
 public:
  static constexpr int kDigits = 13;
  static constexpr int64_t kWords = kDigits + 1;

  void add(double x);
  void add(const ExactSum& other);
  double value() const;

  /// As kWords doubles: when the words of several sums (fewer than 2^28) are added, in any order, from() makes the sum
  /// of all.
  std::array<double, kWords> words() const;
  static ExactSum from(std::span<const double, kWords> words);

 private:
  void carry();

  std::array<int64_t, kDigits> digits_{};  // of 2^(24 k - 168)
  int64_t terms_ = 0;                      // since the last carry
  double special_ = 0;                     // infinite or NaN when a term was
};

}  // namespace cairn
