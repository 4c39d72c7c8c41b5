#pragma once
// What CUDA's kernels cannot do yet. Includes no kernel and needs none linked, so the whole program may ask.

#include <span>
#include <string_view>

namespace cairn::cuda {

/// The closed list by which a recipe's check refuses (runtime/cuda/recipe), until it is empty.
std::span<const std::string_view> missing_ops();

inline constexpr const char* kWideHeads = "attention of heads wider than 256 channels";
inline constexpr const char* kPartsOfTokens = "attention whose sums over tokens are cut into parts";
inline constexpr const char* kSumParts = "products whose sums are cut into parts or stretches";
inline constexpr const char* kManyExperts = "routers of more than 2048 experts";

}  // namespace cairn::cuda
