#pragma once
// Kernels for CUDA against the CPU's on the same inputs. In a plain build a test runs in all orders of threads, in the
// others in one; and no build may have anything to report of the kernels.

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/runtime/kernels/kernel_testing.h"
#include "tests/simt/device_memory.h"
#include "tests/simt/executor.h"
#include "tests/simt/reports.h"

namespace cairn::testing {

using kernels::cuda::Queue;
template <typename T>
using OnDevice = simt::DeviceArray<T>;

template <typename Body>
void in_every_order(const Body& body) {
  for (const simt::Order& order : simt::kOrders) {
    CAPTURE(std::string(order.name));
    simt::set_order(order);
    body();
    std::string reports;
    for (const std::string& line : simt::take_reports()) reports += line + "\n";
    CHECK(reports == "");
    if (simt::build() != simt::Build::kPlain) break;
  }
  simt::set_order({});
}

/// Both are within `tolerance` of the true result.
template <typename T>
void check_alike(const std::vector<T>& got, const std::vector<T>& cpu, Tolerance tolerance) {
  check_close(got, doubles(cpu), tolerance + tolerance);
}

template <typename T>
std::vector<T> filled(int64_t count, float value) {
  std::vector<T> out(static_cast<size_t>(count));
  for (T& x : out) {
    if constexpr (std::is_same_v<T, float>) {
      x = value;
    } else if constexpr (std::is_same_v<T, f16>) {
      x = to_f16(value);
    } else {
      x = to_bf16(value);
    }
  }
  return out;
}

}  // namespace cairn::testing
