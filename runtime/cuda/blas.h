#pragma once
// Matrix products by cuBLASLt, ordered on a stream. For each kind of product (shape, types, transposes, epilogue,
// alignment) an algorithm is chosen the first time and kept, whose sums have one order, so that results have the same
// bits each time. It is the one that was given (use()), else the library's first proposal. time() measures the
// library's proposals (runtime/cuda/tuning). A first time may not be within a capture.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

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
  bool varies = false;    // its shape is another one in each step: not measured

  /// Whether it asks for more than a sum and a bias: a library may have no such kernel.
  bool fused() const { return residual != nullptr || map != ProductMap::kNone || sums != nullptr; }
  /// Its address is kProductBias.
  const void* vector() const { return sums != nullptr ? sums : bias; }
};

/// Products of one kind have one algorithm. Numbers as in Product; alignments in bytes, 0 where there is
/// no such array.
struct ProductKind {
  int64_t m = 0, n = 0, k = 0, lda = 0, ldb = 0, ldc = 0;
  bool trans_a = false, trans_b = false, added = false;  // added: a residual
  uint32_t epilogue = kEpilogueNone;                     // of cublasLtEpilogue_t
  DType ab_dtype = DType::kF32, c_dtype = DType::kF32;
  uint32_t align_a = 0, align_b = 0, align_c = 0, align_d = 0, align_vector = 0, align_pre = 0;
  int64_t workspace_bytes = 0;  // the most that an algorithm may take
  auto operator<=>(const ProductKind&) const = default;

  /// Whether it asks for more than a sum and a bias, as Product::fused().
  bool fused() const { return added || (epilogue != kEpilogueNone && epilogue != kEpilogueBias); }
};
/// For messages: "bf16 [8192, 768] x [768, 3072] to bf16 through gelu".
std::string text(const ProductKind& of);

/// How a kind is done. Without `algorithm` the library has no kernel for it, and separate kernels do it; only of
/// fused() ones.
struct ProductChoice {
  bool by_library = true;
  BlasAlgorithm algorithm{};
  int64_t workspace_bytes = 0;
};

/// Found by time().
struct TimedProduct {
  ProductChoice choice;
  int64_t proposed = 0, repeated = 0;  // algorithms of the library; of these, whose bits repeat
  double us = 0, first_us = 0;         // the chosen one; the first of those whose bits repeat; 0: one was proposed
};

struct ProductTiming {
  /// A checksum of this memory of the device, once all that was ordered is done. Empty: bits are not compared.
  std::function<Result<uint64_t>(const void* first, int64_t bytes)> sum;
  int64_t runs = 4;  // whose bits are compared, at least 2
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
  /// The library's: 130100 is 13.1.
  int64_t version() const { return static_cast<int64_t>(api_.version()); }

  /// Kinds that were multiplied and were given no choice, in order; none of Product::varies.
  std::vector<ProductKind> unchosen() const;
  /// Products of this kind are done so from now on.
  void use(const ProductKind& kind, const ProductChoice& choice);
  /// Times the library's proposals for a kind that was multiplied, on the arrays of its last product, whose outputs are
  /// overwritten; the stream does nothing else meanwhile. The fastest whose bits repeat is the choice, the first of
  /// these where no other is faster by kWorthwhile. use() is the caller's. Errors: of the stream; kUnsupported where
  /// no proposal's bits repeat and separate kernels cannot do it.
  Result<TimedProduct> time(CudaStream& on, const ProductKind& kind, DeviceBytes workspace, const ProductTiming& how);

  static constexpr int kMostProposals = 8;

 private:
  struct Kind;
  Blas(const BlasApi& api, std::shared_ptr<Context> context);
  Status checked(int status, const char* what) const;
  Result<Kind*> kind_of(const Product& of, int64_t workspace_bytes);
  Result<std::unique_ptr<Kind>> describe(const ProductKind& key, const Product& of) const;
  /// At least one. Errors: kUnsupported where the library has none.
  Result<std::vector<BlasChoice>> propose(const ProductKind& key, const Kind& kind, int most) const;
  /// Whether runs of the kind's last product, by its algorithm, give the same bits.
  Result<bool> repeats(CudaStream& on, const Kind& kind, DeviceBytes workspace, const ProductTiming& how) const;
  static void refuse(Kind& kind, std::string_view why);
  Status order(CudaStream& on, const Product& of, DeviceBytes workspace, const Kind& kind, int* status) const;

  const BlasApi& api_;
  const std::shared_ptr<Context> context_;
  BlasHandle handle_ = nullptr;
  mutable std::mutex mutex_;
  std::map<ProductKind, std::unique_ptr<Kind>> kinds_;
  std::map<ProductKind, ProductChoice> given_;  // by use()
};

}  // namespace cairn::cuda
