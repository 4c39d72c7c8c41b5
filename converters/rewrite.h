#pragma once
// A Hugging Face folder -> a Hugging Face folder: another dtype, another split, pytorch_model.bin or eight-bit weights
// to safetensors, and clean: names with the backbone's prefix, no masks and buffers, a tied head once, a config.json
// that both transformers lines read, no code. Tensors go as they are stored, without a detour over logical ones; where
// nothing is to be computed their bytes are copied.

#include <filesystem>
#include <string>
#include <vector>

#include "converters/export.h"
#include "runtime/core/result.h"

namespace cairn::convert {

struct RewriteOptions {
  ExportOptions to;       // dtype unset: that of the source; hdf5 is not for this
  bool untie = false;     // HfOptions::untie
  bool drop_mtp = false;  // HfOptions::drop_mtp
};

/// Errors: those of HfFolder::open and write_hf_folder; kInvalidInput when the target is the source; kUnsupported for a
/// number that f16 cannot hold.
Result<ExportReport> rewrite_hf(const std::filesystem::path& source, const std::filesystem::path& target,
                                const RewriteOptions& options);

}  // namespace cairn::convert
