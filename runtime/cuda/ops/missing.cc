#include "runtime/cuda/ops/missing.h"

namespace cairn::cuda {
namespace {

constexpr std::string_view kMissing[] = {kWideHeads, kPartsOfTokens, kSumParts, kManyExperts};

}  // namespace

std::span<const std::string_view> missing_ops() { return kMissing; }

}  // namespace cairn::cuda
