#pragma once
// The part of cuBLASLt that is used, as a table like that of the runtime (runtime/cuda/api.h). Its matrices are
// column-major. Handles are pointers to what only the library knows.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "runtime/core/result.h"
#include "runtime/cuda/api.h"

namespace cairn::cuda {

using BlasHandle = void*;
using ProductHandle = void*;  // cublasLtMatmulDesc_t
using LayoutHandle = void*;   // cublasLtMatrixLayout_t
using WishHandle = void*;     // cublasLtMatmulPreference_t

/// A choice of algorithm: bytes of the library.
struct BlasAlgorithm {
  uint64_t data[8];
};
struct BlasChoice {
  BlasAlgorithm algorithm;
  size_t workspace_bytes;
  int state;  // 0: it can be used
  float waves;
  int reserved[4];
};

constexpr int kComputeF32 = 68;                            // floats as floats: no TF32
constexpr int kTypeF32 = 0, kTypeF16 = 2, kTypeBf16 = 14;  // cudaDataType
constexpr int kOpNone = 0, kOpTranspose = 1;               // cublasOperation_t
constexpr int kEpilogueNone = 1, kEpilogueBias = 4;        // cublasLtEpilogue_t
// The tanh form of gelu; Aux: its input is an output, with the pointer of kProductAux. The gradient reads it there.
constexpr int kEpilogueGeluAux = 32 | 128, kEpilogueGeluAuxBias = 32 | 128 | 4, kEpilogueGeluGradient = 64 | 128;
constexpr int kProductOpA = 3, kProductOpB = 4, kProductEpilogue = 7;  // attributes of a product
constexpr int kEpilogueSumsOfB = 512;  // over k of the library's second matrix, of D's type, to kProductBias
constexpr int kProductBias = 8, kProductAux = 11, kProductAuxLd = 12;
constexpr int kWishWorkspace = 1, kWishReductions = 3;  // attributes of a wish
constexpr int kWishAlignA = 5, kWishAlignB = 6, kWishAlignC = 7, kWishAlignD = 8;
// The sum over k by one block, or in parts that lie in the workspace and are added up in a kernel of their own: the
// same bits each time.
constexpr uint32_t kOrderedSums = 2;

/// X(member, function of the library, parameters). Each gives a cublasStatus_t.
// clang-format off
#define RT_BLAS_CALLS(X)                                                                                             \
  X(create, cublasLtCreate, (BlasHandle*))                                                                           \
  X(destroy, cublasLtDestroy, (BlasHandle))                                                                          \
  X(create_product, cublasLtMatmulDescCreate, (ProductHandle*, int, int))                                            \
  X(destroy_product, cublasLtMatmulDescDestroy, (ProductHandle))                                                     \
  X(set_product, cublasLtMatmulDescSetAttribute, (ProductHandle, int, const void*, size_t))                          \
  X(create_layout, cublasLtMatrixLayoutCreate, (LayoutHandle*, int, uint64_t, uint64_t, int64_t))                    \
  X(destroy_layout, cublasLtMatrixLayoutDestroy, (LayoutHandle))                                                     \
  X(create_wish, cublasLtMatmulPreferenceCreate, (WishHandle*))                                                      \
  X(destroy_wish, cublasLtMatmulPreferenceDestroy, (WishHandle))                                                     \
  X(set_wish, cublasLtMatmulPreferenceSetAttribute, (WishHandle, int, const void*, size_t))                          \
  X(choose, cublasLtMatmulAlgoGetHeuristic, (BlasHandle, ProductHandle, LayoutHandle, LayoutHandle, LayoutHandle,    \
                                             LayoutHandle, WishHandle, int, BlasChoice*, int*))                      \
  X(multiply, cublasLtMatmul, (BlasHandle, ProductHandle, const void*, const void*, LayoutHandle, const void*,       \
                               LayoutHandle, const void*, const void*, LayoutHandle, void*, LayoutHandle,            \
                               const BlasAlgorithm*, void*, size_t, StreamHandle))
// clang-format on

struct BlasApi {
#define RT_MEMBER(member, name, parameters) int(*member) parameters = nullptr;
  RT_BLAS_CALLS(RT_MEMBER)
#undef RT_MEMBER
  size_t (*version)() = nullptr;              // cublasLtGetVersion
  const char* (*status_name)(int) = nullptr;  // cublasLtGetStatusName
};

struct LoadedBlas {
  BlasApi api;
  std::string path;
};

/// As load_api(), of libcublasLt.so.13.
Result<LoadedBlas> load_blas(std::span<const std::string> candidates);

}  // namespace cairn::cuda
