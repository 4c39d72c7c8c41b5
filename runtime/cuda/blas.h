#pragma once
// Matrix products by cuBLASLt, ordered on a stream. For each kind of product (shape, types, transposes, alignment) an
// algorithm is chosen the first time and kept, without sums over k in parts, so that results have the same bits each
// time. A first time may not be within a capture.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>

#include "runtime/core/dtype.h"
#include "runtime/cuda/blas_api.h"
#include "runtime/cuda/stream.h"

namespace cairn::cuda {

/// kernels::MatmulMap.
enum class ProductMap { kNone, kGelu, kGeluGradient };

/// c [m, n] = op(a) [m, k] op(b) [k, n] (+ c) (+ bias [n] to each row) (+ residual [m, n]), all row-major: as
/// kernels::MatmulArgs has it.
struct Product {
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  int64_t lda = 0;
  bool trans_a = false;
  const void* b = nullptr;
  int64_t ldb = 0;
  bool trans_b = false;
  void* c = nullptr;
  int64_t ldc = 0;
  DType ab_dtype = DType::kF32, c_dtype = DType::kF32;
  bool accumulate = false;
  const void* bias = nullptr;      // of c_dtype
  const void* residual = nullptr;  // of c_dtype, rows as far apart as c's; may be c; not with `accumulate`
  ProductMap map = ProductMap::kNone;
  void* pre = nullptr;    // [m, n] of c_dtype, beside a map: written by kGelu, read by its gradient
  float* sums = nullptr;  // [m]: of op(a) over k, beside a float c and no bias

  /// Whether it asks for more than a sum and a bias: a library may have no such kernel.
  bool fused() const { return residual != nullptr || map != ProductMap::kNone || sums != nullptr; }
  /// Its address is kProductBias.
  const void* vector() const { return sums != nullptr ? sums : bias; }
};

/// Threads: any; memory for products is each stream's own.
class Blas {
 public:
  /// `api` outlives it. The context's device is the calling thread's current one. Errors: kUnavailable.
  static Result<std::unique_ptr<Blas>> open(const BlasApi& api, std::shared_ptr<Context> context);
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;

  /// Orders it on the stream, with this memory for the algorithm. What fails is left in the stream. False: the library
  /// has no kernel for all that this product asks for, and nothing was ordered; only of fused() ones. The answer to the
  /// first of a kind stays, so that results have the same bits each time.
  bool multiply(CudaStream& on, const Product& of, DeviceBytes workspace);

  /// Kinds of products that have an algorithm.
  int64_t kinds() const;

 private:
  struct Key;
  struct Kind;
  Blas(const BlasApi& api, std::shared_ptr<Context> context);
  Status checked(int status, const char* what) const;
  Result<Kind*> kind_of(const Product& of, int64_t workspace_bytes);
  Result<std::unique_ptr<Kind>> choose(const Key& key, const Product& of, int64_t workspace_bytes) const;
  static void refuse(Kind& kind, const Product& of, std::string_view why);
  Status order(CudaStream& on, const Product& of, DeviceBytes workspace, const Kind& kind, int* status) const;

  const BlasApi& api_;
  const std::shared_ptr<Context> context_;
  BlasHandle handle_ = nullptr;
  mutable std::mutex mutex_;
  std::map<Key, std::unique_ptr<Kind>> kinds_;
};

}  // namespace cairn::cuda
