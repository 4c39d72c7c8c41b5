// Row-major c = op(a) op(b) is asked for as column-major c' = op(b)' op(a)': what lies in memory is the same, so the
// library's first matrix is b, its second a, its rows our columns.
#include "runtime/cuda/blas.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/cuda/time_calls.h"

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

ProductKind key_of(const Product& of, int64_t workspace_bytes) {
  const int64_t ab = dtype_size_bytes(of.ab_dtype), c = dtype_size_bytes(of.c_dtype);
  const uint32_t align_d = alignment(of.c, of.ldc * c);
  return {.m = of.m,
          .n = of.n,
          .k = of.k,
          .lda = of.lda,
          .ldb = of.ldb,
          .ldc = of.ldc,
          .trans_a = of.trans_a,
          .trans_b = of.trans_b,
          .added = of.residual != nullptr,
          .epilogue = epilogue_of(of),
          .ab_dtype = of.ab_dtype,
          .c_dtype = of.c_dtype,
          .align_a = alignment(of.a, of.lda * ab),
          .align_b = alignment(of.b, of.ldb * ab),
          .align_c = of.residual != nullptr ? alignment(of.residual, of.ldc * c) : align_d,
          .align_d = align_d,
          .align_vector = of.vector() != nullptr ? alignment(of.vector(), 0) : 0,
          .align_pre = of.pre != nullptr ? alignment(of.pre, 0) : 0,
          .workspace_bytes = workspace_bytes};
}
/// For messages.
std::string text(const Product& of) { return text(key_of(of, 0)); }

int type_of(DType dtype) { return dtype == DType::kF32 ? kTypeF32 : dtype == DType::kBf16 ? kTypeBf16 : kTypeF16; }

}  // namespace

std::string text(const ProductKind& of) {
  const char* const more = of.added                                                         ? " with a residual"
                           : (of.epilogue & kEpilogueGeluGradient) == kEpilogueGeluGradient ? " through gelu's gradient"
                           : (of.epilogue & kEpilogueGeluAux) == kEpilogueGeluAux           ? " through gelu"
                           : of.epilogue == kEpilogueSumsOfB                                ? " with sums"
                                                                                            : "";
  return fmt::format("{} [{}, {}] x [{}, {}] to {}{}", dtype_name(of.ab_dtype), of.m, of.k, of.k, of.n,
                     dtype_name(of.c_dtype), more);
}

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
  Product last;          // that was asked for
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

Result<std::unique_ptr<Blas::Kind>> Blas::describe(const ProductKind& key, const Product& of) const {
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
  return out;
}

Result<std::vector<BlasChoice>> Blas::propose(const ProductKind& key, const Kind& kind, int most) const {
  WishHandle wish = nullptr;
  RT_TRY(checked(api_.create_wish(&wish), "cublasLtMatmulPreferenceCreate"));
  std::vector<BlasChoice> out(static_cast<size_t>(most));
  int found = 0;
  const auto ask = [&]() -> Status {
    const auto wanted = [&](int attribute, const auto& value) {
      return checked(api_.set_wish(wish, attribute, &value, sizeof(value)), "cublasLtMatmulPreferenceSetAttribute");
    };
    RT_TRY(wanted(kWishWorkspace, static_cast<uint64_t>(key.workspace_bytes)));
    RT_TRY(wanted(kWishReductions, kOrderedSums));
    RT_TRY(wanted(kWishAlignA, key.align_b));
    RT_TRY(wanted(kWishAlignB, key.align_a));
    RT_TRY(wanted(kWishAlignC, key.align_c));
    RT_TRY(wanted(kWishAlignD, key.align_d));
    return checked(api_.choose(handle_, kind.product, kind.b, kind.a, kind.c, kind.c, wish, most, out.data(), &found),
                   "cublasLtMatmulAlgoGetHeuristic");
  };
  Status asked = ask();
  api_.destroy_wish(wish);
  RT_TRY(std::move(asked));
  out.resize(static_cast<size_t>(std::clamp(found, 0, most)));
  std::erase_if(out, [](const BlasChoice& choice) { return choice.state != 0; });
  if (out.empty()) return Error{ErrorCode::kUnsupported, "cuBLASLt has no algorithm for this product"};
  return out;
}

void Blas::refuse(Kind& kind, std::string_view why) {
  kind.refused = true;
  spdlog::debug("{}: by kernels one after another ({})", text(kind.last), why);
}

Result<Blas::Kind*> Blas::kind_of(const Product& of, int64_t workspace_bytes) {
  const ProductKind key = key_of(of, workspace_bytes);
  std::unique_ptr<Kind>& kind = kinds_[key];
  if (kind == nullptr) {
    Result<std::unique_ptr<Kind>> made = [&]() -> Result<std::unique_ptr<Kind>> {
      const auto given = given_.find(key);
      if (given != given_.end() && !given->second.by_library) {
        return Error{ErrorCode::kUnsupported, "so it was chosen"};
      }
      RT_TRY_SET(std::unique_ptr<Kind> out, describe(key, of));
      if (given != given_.end()) {
        out->algorithm = given->second.algorithm;
      } else {
        RT_TRY_SET(const std::vector<BlasChoice> proposed, propose(key, *out, 1));
        out->algorithm = proposed.front().algorithm;
      }
      return out;
    }();
    if (!made.ok() && !of.fused()) {
      kinds_.erase(key);
      return std::move(made).error();
    }
    kind = made.ok() ? std::move(made).value() : std::make_unique<Kind>(api_);
    kind->last = of;
    if (!made.ok()) refuse(*kind, made.error().message);
  }
  kind->last = of;
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
    refuse(*kind.value(), ordered.error().message);
    return false;
  }
  on.keep(Error(ordered.error()).with(text(of)));
  return true;
}

std::vector<ProductKind> Blas::unchosen() const {
  const std::lock_guard lock(mutex_);
  std::vector<ProductKind> out;
  for (const auto& [key, kind] : kinds_) {
    if (!kind->last.varies && !given_.contains(key)) out.push_back(key);
  }
  return out;
}

void Blas::use(const ProductKind& kind, const ProductChoice& choice) {
  const std::lock_guard lock(mutex_);
  given_.insert_or_assign(kind, choice);
  kinds_.erase(kind);  // made anew when it is next asked for
}

Result<bool> Blas::repeats(CudaStream& on, const Kind& kind, DeviceBytes workspace, const ProductTiming& how) const {
  Product of = kind.last;
  if (!how.sum || of.pre == of.c) return true;
  // A product that adds to its own output would have another input each time. It adds behind the sum over k, whose
  // order is what an algorithm chooses.
  of.accumulate = false;
  if (of.residual == of.c) of.residual = nullptr;
  const int64_t c_bytes = dtype_size_bytes(of.c_dtype);
  std::array<uint64_t, 3> first{};
  for (int64_t run = 0; run < std::max<int64_t>(2, how.runs); ++run) {
    int status = 0;
    RT_TRY(order(on, of, workspace, kind, &status));
    std::array<uint64_t, 3> sums{};
    RT_TRY_SET(sums[0], how.sum(of.c, ((of.m - 1) * of.ldc + of.n) * c_bytes));
    if (of.map == ProductMap::kGelu) {
      RT_TRY_SET(sums[1], how.sum(of.pre, of.m * of.n * c_bytes));
    }
    if (of.sums != nullptr) {
      RT_TRY_SET(sums[2], how.sum(of.sums, of.m * static_cast<int64_t>(sizeof(float))));
    }
    if (run == 0) first = sums;
    if (sums != first) return false;
  }
  return true;
}

Result<TimedProduct> Blas::time(CudaStream& on, const ProductKind& key, DeviceBytes workspace,
                                const ProductTiming& how) {
  const std::lock_guard lock(mutex_);
  const auto found = kinds_.find(key);
  if (found == kinds_.end()) {
    return Error{ErrorCode::kInternal, fmt::format("{}: no such product was asked for", text(key))};
  }
  Kind& kind = *found->second;
  TimedProduct out{.choice = {.by_library = false}};
  if (kind.product == nullptr) return out;  // no description that the library takes
  if (workspace.size < key.workspace_bytes) {
    return Error{ErrorCode::kInternal,
                 fmt::format("{}: {} bytes for algorithms of {}", text(key), workspace.size, key.workspace_bytes)};
  }
  const BlasAlgorithm before = kind.algorithm;
  const Result<std::vector<BlasChoice>> proposed = propose(key, kind, kMostProposals);
  if (!proposed.ok()) {
    if (key.fused()) return out;
    return proposed.error();
  }
  out.proposed = std::ssize(proposed.value());
  for (const BlasChoice& proposal : proposed.value()) {
    kind.algorithm = proposal.algorithm;
    int status = 0;
    const Status ordered = order(on, kind.last, workspace, kind, &status);
    RT_TRY(on.settle());
    if (!ordered.ok()) {
      spdlog::debug("{}: a proposal is refused: {}", text(key), ordered.error().message);
      continue;
    }
    RT_TRY_SET(const bool same, repeats(on, kind, workspace, how));
    if (!same) {
      spdlog::info("{}: an algorithm of cuBLASLt is left out: its bits do not repeat", text(key));
      continue;
    }
    double us = 0;  // of a single proposal it says nothing
    if (out.proposed > 1) {
      RT_TRY_SET(us, time_us(on, [&]() -> Status {
                   int refused = 0;
                   return order(on, kind.last, workspace, kind, &refused);
                 }));
    }
    if (++out.repeated == 1) out.first_us = us;
    if (out.repeated > 1 && us >= std::min(out.us, (1 - kWorthwhile) * out.first_us)) continue;
    out.us = us;
    out.choice = {.algorithm = proposal.algorithm, .workspace_bytes = static_cast<int64_t>(proposal.workspace_bytes)};
  }
  kind.algorithm = before;
  if (out.repeated == 0 && !key.fused()) {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{}: cuBLASLt has no algorithm whose bits repeat ({} proposed)", text(key), out.proposed)};
  }
  return out;
}

}  // namespace cairn::cuda
