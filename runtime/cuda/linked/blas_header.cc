// Compares the table of cuBLASLt (runtime/cuda/blas_api.h) with the toolkit's header; nothing is linked for it.
#include "runtime/cuda/blas_api.h"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>

#include <type_traits>

namespace cairn::cuda {
namespace {

static_assert(kComputeF32 == CUBLAS_COMPUTE_32F);
static_assert(kTypeF32 == CUDA_R_32F && kTypeF16 == CUDA_R_16F && kTypeBf16 == CUDA_R_16BF);
static_assert(kOpNone == CUBLAS_OP_N && kOpTranspose == CUBLAS_OP_T);
static_assert(kEpilogueNone == CUBLASLT_EPILOGUE_DEFAULT && kEpilogueBias == CUBLASLT_EPILOGUE_BIAS);
static_assert(kEpilogueGeluAux == CUBLASLT_EPILOGUE_GELU_AUX &&
              kEpilogueGeluAuxBias == CUBLASLT_EPILOGUE_GELU_AUX_BIAS &&
              kEpilogueGeluGradient == CUBLASLT_EPILOGUE_DGELU && kEpilogueSumsOfB == CUBLASLT_EPILOGUE_BGRADB);
static_assert(kProductAux == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER &&
              kProductAuxLd == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
static_assert(kProductOpA == CUBLASLT_MATMUL_DESC_TRANSA && kProductOpB == CUBLASLT_MATMUL_DESC_TRANSB &&
              kProductEpilogue == CUBLASLT_MATMUL_DESC_EPILOGUE && kProductBias == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
static_assert(kWishWorkspace == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES &&
              kWishReductions == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK &&
              kWishAlignA == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES &&
              kWishAlignB == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES &&
              kWishAlignC == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES &&
              kWishAlignD == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(kOrderedSums == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
static_assert(sizeof(BlasAlgorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(BlasChoice) == sizeof(cublasLtMatmulHeuristicResult_t) &&
              offsetof(BlasChoice, workspace_bytes) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) &&
              offsetof(BlasChoice, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));

/// Types that are passed alike.
template <typename Table, typename Header>
constexpr bool kAlike = std::is_same_v<Table, Header> || (std::is_pointer_v<Table> && std::is_pointer_v<Header>) ||
                        (std::is_same_v<Table, int> && std::is_enum_v<Header> && sizeof(Header) == 4);
template <typename Table, typename Header>
struct SameCall;
template <typename Gives, typename... Table, typename GivesToo, typename... Header>
struct SameCall<Gives (*)(Table...), GivesToo (*)(Header...)>
    : std::bool_constant<kAlike<Gives, GivesToo> && (kAlike<Table, Header> && ...)> {};

#define RT_COMPARED(member, function, parameters) \
  static_assert(SameCall<decltype(BlasApi::member), decltype(&::function)>::value, #function);
RT_BLAS_CALLS(RT_COMPARED)
#undef RT_COMPARED
static_assert(SameCall<decltype(BlasApi::version), decltype(&::cublasLtGetVersion)>::value);
static_assert(SameCall<decltype(BlasApi::status_name), decltype(&::cublasLtGetStatusName)>::value);

}  // namespace
}  // namespace cairn::cuda
#endif
