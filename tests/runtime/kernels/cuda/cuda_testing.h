#pragma once
// Kernels for CUDA against the CPU's on the same inputs. In a plain build a test runs in all orders of threads, in the
// others in one; and no build may have anything to report of the kernels.

#include <doctest/doctest.h>

#include <span>
#include <string>
#include <vector>

#include "tests/runtime/kernels/cuda/comparing.h"
#include "tests/simt/device_memory.h"
#include "tests/simt/executor.h"
#include "tests/simt/reports.h"

namespace cairn::testing {

using kernels::cuda::Queue;
template <typename T>
using OnDevice = simt::DeviceArray<T>;

/// With as many floats as scratch.
struct ScratchQueue : Queue {
  explicit ScratchQueue(int64_t floats) : memory(floats) {
    scratch = reinterpret_cast<std::byte*>(memory.data());
    scratch_bytes = floats * static_cast<int64_t>(sizeof(float));
  }
  OnDevice<float> memory;
};

/// In these orders of threads; the first of them where the build is not a plain one.
template <typename Body>
void in_orders(std::span<const simt::Order> orders, const Body& body) {
  for (const simt::Order& order : orders) {
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
template <typename Body>
void in_every_order(const Body& body) {
  in_orders(simt::kOrders, body);
}

}  // namespace cairn::testing
