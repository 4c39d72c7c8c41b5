#pragma once
// This program's source, from its own line tables.

#include <string>

namespace cairn::simt {

/// "norm.cu:41": of code that was inlined from runtime/kernels/cuda/simt.h, the line that calls it. The address where
/// nothing is known.
std::string line_of(const void* pc);
/// A function by its address, without arguments: "layer_norm_forward<bf16>".
std::string name_of(const void* function);

}  // namespace cairn::simt
