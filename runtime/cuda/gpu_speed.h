#pragma once
// What the GPUs of a host reach, and whether they compute and copy right: a matrix product, copies within a GPU, from
// and to the host, and from each GPU to each other.
//
// Factors are small whole numbers, so that no sum of the product is rounded: each GPU, whatever its product, algorithm
// and order of sums, has to give the same bits, which the host knows. Rows and columns repeat, so it knows them soon.
// Every element is compared, of the first product, of the last one and of each copy.
//
// Each GPU in turn, then pairs in turn: nothing shares its way. Threads: none.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/cuda/blas_api.h"

namespace cairn::cuda {

struct SpeedOptions {
  DType dtype = DType::kBf16;                   // of factors
  int64_t size = 8192;                          // rows and columns of the product, whose sums have half as many terms
  double window_s = 0.1;                        // of each rate, of which the best of three counts
  double limit_s = 9;                           // what has not begun by then is not measured
  int64_t deadline_ms = 5000;                   // of a wait for a device
  std::map<std::string, std::string> left_out;  // PCI address: why that GPU is not measured
};
/// The size of a product is a multiple of this.
constexpr int64_t kSpeedTile = 64;
/// Of each GPU, beside its context.
int64_t speed_bytes(const SpeedOptions& options);

/// A rate of 0 was not measured.
struct GpuSpeed {
  std::string pci;
  double product_tflops = 0, copy_gb_s = 0, to_device_gb_s = 0, to_host_gb_s = 0;
  std::map<std::string, double> to_gpus_gb_s;  // by the other's PCI address
  std::string wrong, failed, not_measured;     // empty: nothing
};

/// Of all GPUs that CUDA shows this process. Errors: kUnavailable where it shows none, or none can be asked.
Result<std::vector<GpuSpeed>> measure_gpus(const Api& api, const BlasApi& products, const SpeedOptions& options);

}  // namespace cairn::cuda
