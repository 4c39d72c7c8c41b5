// Row-major c = op(a) op(b) is asked for as column-major c' = op(b)' op(a)': what lies in memory is the same, so the
// library's first matrix is b, its second a, its rows our columns.
#include "runtime/cuda/blas.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <bit>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace cairn::cuda {
namespace {

constexpr int64_t kPreElems = 8;     // its leading dimension is a multiple
constexpr int kNotSupported = 15;    // CUBLAS_STATUS_NOT_SUPPORTED
constexpr uint32_t kBestAlign = 16;  // bytes, of the fast algorithms

/// The largest power of two up to kBestAlign at whose multiples rows begin.
uint32_t alignment(const void* at, int64_t stride_bytes) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(at) | static_cast<uint64_t>(stride_bytes) | kBestAlign;
  return uint32_t{1} << std::countr_zero(bits);
}

/// For messages.
std::string text(const Product& of) {
  const char* const more = of.residual != nullptr                ? " with a residual"
                           : of.map == ProductMap::kGelu         ? " through gelu"
                           : of.map == ProductMap::kGeluGradient ? " through gelu's gradient"
                           : of.sums != nullptr                  ? " with sums"
                                                                 : "";
  return fmt::format("{} [{}, {}] x [{}, {}] to {}{}", dtype_name(of.ab_dtype), of.m, of.k, of.k, of.n,
                     dtype_name(of.c_dtype), more);
}

uint32_t epilogue_of(const Product& of) {
  switch (of.map) {
    case ProductMap::kGelu:
      return of.bias != nullptr ? kEpilogueGeluAuxBias : kEpilogueGeluAux;
    case ProductMap::kGeluGradient:
      return kEpilogueGeluGradient;
    case ProductMap::kNone:
      break;
  }
  if (of.sums != nullptr) return kEpilogueSumsOfB;
  return of.bias != nullptr ? kEpilogueBias : kEpilogueNone;
}

int type_of(DType dtype) { return dtype == DType::kF32 ? kTypeF32 : dtype == DType::kBf16 ? kTypeBf16 : kTypeF16; }

}  // namespace

struct Blas::Key {
  int64_t m, n, k, lda, ldb, ldc;
  bool trans_a, trans_b, added;
  uint32_t epilogue;
  DType ab_dtype, c_dtype;
  uint32_t align_a, align_b, align_c, align_d, align_vector, align_pre;
  int64_t workspace_bytes;
  auto operator<=>(const Key&) const = default;
};

/// What the library needs to know, and its choice. Addresses of what it visits beside are set before each product.
struct Blas::Kind {
  explicit Kind(const BlasApi& api) : api(api) {}
  ~Kind() {
    if (product != nullptr) api.destroy_product(product);
    for (const LayoutHandle layout : {a, b, c}) {
      if (layout != nullptr) api.destroy_layout(layout);
    }
  }
  Kind(const Kind&) = delete;
  Kind& operator=(const Kind&) = delete;

  const BlasApi& api;
  ProductHandle product = nullptr;
  LayoutHandle a = nullptr, b = nullptr, c = nullptr;
  BlasAlgorithm algorithm{};
  bool refused = false;  // there is none
};

Blas::Blas(const BlasApi& api, std::shared_ptr<Context> context) : api_(api), context_(std::move(context)) {}

Blas::~Blas() {
  kinds_.clear();
  if (handle_ != nullptr) api_.destroy(handle_);
}

Status Blas::checked(int status, const char* what) const {
  if (status == 0) return {};
  return Error{ErrorCode::kInternal, fmt::format("{}: {}", what, api_.status_name(status))};
}

Result<std::unique_ptr<Blas>> Blas::open(const BlasApi& api, std::shared_ptr<Context> context) {
  std::unique_ptr<Blas> out(new Blas(api, std::move(context)));
  RT_TRY(out->context_->checked(out->context_->select(), "cudaSetDevice"));
  Status made = out->checked(api.create(&out->handle_), "cublasLtCreate");
  if (!made.ok()) return Error{ErrorCode::kUnavailable, made.error().message};
  return out;
}

int64_t Blas::kinds() const {
  const std::lock_guard lock(mutex_);
  return std::ssize(kinds_);
}

Result<std::unique_ptr<Blas::Kind>> Blas::choose(const Key& key, const Product& of, int64_t workspace_bytes) const {
  auto out = std::make_unique<Kind>(api_);
  RT_TRY(checked(api_.create_product(&out->product, kComputeF32, kTypeF32), "cublasLtMatmulDescCreate"));
  const auto set = [&](int attribute, const auto& value) {
    return checked(api_.set_product(out->product, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
  };
  const int32_t op_b = of.trans_b ? kOpTranspose : kOpNone, op_a = of.trans_a ? kOpTranspose : kOpNone;
  RT_TRY(set(kProductOpA, op_b));
  RT_TRY(set(kProductOpB, op_a));
  RT_TRY(set(kProductEpilogue, key.epilogue));
  if (of.vector() != nullptr) RT_TRY(set(kProductBias, of.vector()));
  if (of.sums != nullptr && key.align_vector < kBestAlign) {
    return Error{ErrorCode::kUnsupported, "sums do not begin where cuBLASLt wants them"};
  }
  if (of.pre != nullptr) {
    if (of.n % kPreElems != 0 || key.align_pre < kBestAlign) {
      return Error{ErrorCode::kUnsupported, "rows of the activation's input do not begin where cuBLASLt wants them"};
    }
    RT_TRY(set(kProductAux, of.pre));
    RT_TRY(set(kProductAuxLd, of.n));
  }
  // A matrix stored [rows, cols] row-major is [cols, rows] to the library.
  const auto layout = [&](LayoutHandle* made, DType dtype, int64_t rows, int64_t cols, int64_t ld) {
    return checked(
        api_.create_layout(made, type_of(dtype), static_cast<uint64_t>(cols), static_cast<uint64_t>(rows), ld),
        "cublasLtMatrixLayoutCreate");
  };
  RT_TRY(layout(&out->a, of.ab_dtype, of.trans_a ? of.k : of.m, of.trans_a ? of.m : of.k, of.lda));
  RT_TRY(layout(&out->b, of.ab_dtype, of.trans_b ? of.n : of.k, of.trans_b ? of.k : of.n, of.ldb));
  RT_TRY(layout(&out->c, of.c_dtype, of.m, of.n, of.ldc));

  WishHandle wish = nullptr;
  RT_TRY(checked(api_.create_wish(&wish), "cublasLtMatmulPreferenceCreate"));
  BlasChoice choice{};
  int found = 0;
  const auto ask = [&]() -> Status {
    const auto wanted = [&](int attribute, const auto& value) {
      return checked(api_.set_wish(wish, attribute, &value, sizeof(value)), "cublasLtMatmulPreferenceSetAttribute");
    };
    RT_TRY(wanted(kWishWorkspace, static_cast<uint64_t>(workspace_bytes)));
    RT_TRY(wanted(kWishReductions, kOrderedSums));
    RT_TRY(wanted(kWishAlignA, key.align_b));
    RT_TRY(wanted(kWishAlignB, key.align_a));
    RT_TRY(wanted(kWishAlignC, key.align_c));
    RT_TRY(wanted(kWishAlignD, key.align_d));
    return checked(api_.choose(handle_, out->product, out->b, out->a, out->c, out->c, wish, 1, &choice, &found),
                   "cublasLtMatmulAlgoGetHeuristic");
  };
  Status asked = ask();
  api_.destroy_wish(wish);
  RT_TRY(std::move(asked));
  if (found == 0 || choice.state != 0) {
    return Error{ErrorCode::kUnsupported, "cuBLASLt has no algorithm for this product"};
  }
  out->algorithm = choice.algorithm;
  return out;
}

void Blas::refuse(Kind& kind, const Product& of, std::string_view why) {
  kind.refused = true;
  spdlog::debug("{}: by kernels one after another ({})", text(of), why);
}

Result<Blas::Kind*> Blas::kind_of(const Product& of, int64_t workspace_bytes) {
  const int64_t ab = dtype_size_bytes(of.ab_dtype), c = dtype_size_bytes(of.c_dtype);
  const uint32_t align_d = alignment(of.c, of.ldc * c);
  const Key key{of.m,
                of.n,
                of.k,
                of.lda,
                of.ldb,
                of.ldc,
                of.trans_a,
                of.trans_b,
                of.residual != nullptr,
                epilogue_of(of),
                of.ab_dtype,
                of.c_dtype,
                alignment(of.a, of.lda * ab),
                alignment(of.b, of.ldb * ab),
                of.residual != nullptr ? alignment(of.residual, of.ldc * c) : align_d,
                align_d,
                of.vector() != nullptr ? alignment(of.vector(), 0) : 0,
                of.pre != nullptr ? alignment(of.pre, 0) : 0,
                workspace_bytes};
  std::unique_ptr<Kind>& kind = kinds_[key];
  if (kind == nullptr) {
    auto chosen = choose(key, of, workspace_bytes);
    if (!chosen.ok() && !of.fused()) {
      kinds_.erase(key);
      return std::move(chosen).error();
    }
    if (chosen.ok()) {
      kind = std::move(chosen).value();
    } else {
      kind = std::make_unique<Kind>(api_);
      refuse(*kind, of, chosen.error().message);
    }
  }
  return kind.get();
}

Status Blas::order(CudaStream& on, const Product& of, DeviceBytes workspace, const Kind& kind, int* status) const {
  const auto set = [&](int attribute, const auto& value) {
    return checked(api_.set_product(kind.product, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
  };
  if (of.vector() != nullptr) RT_TRY(set(kProductBias, of.vector()));
  if (of.pre != nullptr) RT_TRY(set(kProductAux, of.pre));
  const bool adds = of.accumulate || of.residual != nullptr;
  const float one = 1, beta = adds ? 1.0f : 0.0f;
  const void* const added = of.residual != nullptr ? of.residual : of.c;
  *status = api_.multiply(handle_, kind.product, &one, of.b, kind.b, of.a, kind.a, &beta, added, kind.c, of.c, kind.c,
                          &kind.algorithm, workspace.first.address(), static_cast<size_t>(workspace.size), on.handle());
  return checked(*status, "cublasLtMatmul");
}

bool Blas::multiply(CudaStream& on, const Product& of, DeviceBytes workspace) {
  if (of.m == 0 || of.n == 0 || !on.ready()) return true;
  const std::lock_guard lock(mutex_);  // addresses lie in what threads share
  const auto kind = kind_of(of, workspace.size);
  if (!kind.ok()) {
    on.keep(Error(kind.error()).with(text(of)));
    return true;
  }
  if (kind.value()->refused) return false;
  int status = 0;
  const Status ordered = order(on, of, workspace, *kind.value(), &status);
  if (ordered.ok()) return true;
  if (status == kNotSupported && of.fused()) {
    refuse(*kind.value(), of, ordered.error().message);
    return false;
  }
  on.keep(Error(ordered.error()).with(text(of)));
  return true;
}

}  // namespace cairn::cuda
