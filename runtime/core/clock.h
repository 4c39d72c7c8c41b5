#pragma once
// Time behind a seam: tests move it by hand.

#include <chrono>
#include <cstdint>

namespace cairn {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t now_ns() const = 0;  // monotonic
  virtual double unix_s() const = 0;   // wall clock, for people and event files
};

class SystemClock final : public Clock {
 public:
  int64_t now_ns() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  double unix_s() const override {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }
};

}  // namespace cairn
