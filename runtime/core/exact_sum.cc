#include "runtime/core/exact_sum.h"

#include <bit>
#include <cmath>
#include <limits>

namespace cairn {
namespace {

constexpr int kDigitBits = 24;
constexpr int64_t kDigitMask = (int64_t{1} << kDigitBits) - 1;
constexpr int kLowest = -168;                // the exponent of the last digit's unit
constexpr int kHighest = 120;                // terms are below 2^this
constexpr int64_t kRoom = int64_t{1} << 36;  // terms of 24 bits that a digit of 63 surely holds

}  // namespace

void ExactSum::add(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
  if (exponent == 0) return;  // zero, or below 2^-1022
  if (exponent - 1022 > kHighest) {
    special_ += std::isfinite(x) ? std::copysign(std::numeric_limits<double>::infinity(), x) : x;
    return;
  }
  // |x| = mantissa * 2^(exponent - 1075), which begins `shift` bits above the lowest digit.
  uint64_t mantissa = (bits & ((uint64_t{1} << 52) - 1)) | uint64_t{1} << 52;
  int shift = exponent - 1075 - kLowest;
  if (shift < 0) {
    if (shift <= -53) return;
    mantissa >>= -shift;
    shift = 0;
  }
  auto wide = static_cast<unsigned __int128>(mantissa) << (shift % kDigitBits);
  const int64_t sign = bits >> 63 != 0 ? -1 : 1;
  int64_t* digit = digits_.data() + shift / kDigitBits;
  for (; wide != 0; wide >>= kDigitBits) *digit++ += sign * (static_cast<int64_t>(wide) & kDigitMask);
  if (++terms_ == kRoom) carry();
}

void ExactSum::carry() {
  for (int k = 0; k + 1 < kDigits; ++k) {
    digits_[k + 1] += digits_[k] >> kDigitBits;  // rounds down: what stays is not negative
    digits_[k] &= kDigitMask;
  }
  terms_ = 0;
}

void ExactSum::add(const ExactSum& other) {
  ExactSum plain = other;
  plain.carry();
  carry();
  for (int k = 0; k < kDigits; ++k) digits_[k] += plain.digits_[k];
  special_ += other.special_;
}

double ExactSum::value() const {
  if (special_ != 0) return special_;  // NaN is not 0 either
  ExactSum plain = *this;
  plain.carry();
  double sum = 0;
  for (int k = kDigits; k-- > 0;) sum += std::ldexp(static_cast<double>(plain.digits_[k]), k * kDigitBits + kLowest);
  return sum;
}

std::array<double, ExactSum::kWords> ExactSum::words() const {
  ExactSum plain = *this;
  plain.carry();
  std::array<double, kWords> out{};
  for (int k = 0; k < kDigits; ++k) out[k] = static_cast<double>(plain.digits_[k]);
  out[kDigits] = special_;
  return out;
}

ExactSum ExactSum::from(std::span<const double, kWords> words) {
  ExactSum out;
  for (int k = 0; k < kDigits; ++k) out.digits_[k] = static_cast<int64_t>(words[k]);
  out.special_ = words[kDigits];
  return out;
}

}  // namespace cairn
