#pragma once
// cuDNN, as far as a program needs it that does not compute by it: whether it is there, where, and which version. What
// computes by it is in runtime/cuda/cudnn.

#include <span>
#include <string>

#include "runtime/core/result.h"
#include "runtime/cuda/api.h"

namespace cairn::cuda {

inline constexpr const char* kCudnnFile = "libcudnn.so.9";
constexpr int kCudnnLeast = 91800;  // plans have been built with 9.19 alone

struct LoadedCudnn {
  Library library;  // open
  std::string path;
  int version = 0;
};

/// As load_api(), of libcudnn.so.9.
Result<LoadedCudnn> load_cudnn(std::span<const std::string> candidates);

/// "9.19.0" of 91900.
std::string cudnn_version_text(int version);

}  // namespace cairn::cuda
