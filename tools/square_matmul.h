#pragma once
// The product that stands for a machine's peak: two dense square matrices of one dtype, on this CPU.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/kernels/matmul.h"

namespace cairn::tools {

class SquareMatmul {
 public:
  SquareMatmul(int64_t size, DType factors, DType product)
      : size_(size),
        a_(bytes_of(factors)),
        b_(a_.size()),
        c_(bytes_of(product)),
        args_{.m = size,
              .n = size,
              .k = size,
              .a = DevicePtr(a_.data()),
              .lda = size,
              .b = DevicePtr(b_.data()),
              .ldb = size,
              .c = DevicePtr(c_.data()),
              .ldc = size,
              .ab_dtype = factors,
              .c_dtype = product} {}
  SquareMatmul(const SquareMatmul&) = delete;  // the arguments point into it
  SquareMatmul& operator=(const SquareMatmul&) = delete;

  std::vector<std::byte>& a() { return a_; }
  std::vector<std::byte>& b() { return b_; }
  const std::vector<std::byte>& product() const { return c_; }

  void run() const { kernels::matmul(args_); }
  double flops() const { return 2.0 * static_cast<double>(size_) * static_cast<double>(size_ * size_); }

 private:
  size_t bytes_of(DType dtype) const { return static_cast<size_t>(size_ * size_ * dtype_size_bytes(dtype)); }

  int64_t size_;
  std::vector<std::byte> a_, b_, c_;
  kernels::MatmulArgs args_;
};

}  // namespace cairn::tools
