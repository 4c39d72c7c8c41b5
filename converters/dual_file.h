#pragma once
// One file that is safetensors and HDF5 at once, so that weights for both kinds of readers lie on the disk once.
//
//   0                 8 + N bytes: the safetensors header, padded with spaces to U = 4096 x 2^k; for HDF5 a user block
//   U                 HDF5's superblock; from here on also the data part of safetensors
//   ...               object headers, contiguous datasets, gaps, as libhdf5 laid them out
//
// A safetensors file may have no holes, so every span that is no tensor (superblock, object headers, gaps) is declared
// as a tensor of bytes, "__hdf5__.0", "__hdf5__.1", ... (dtype U8). HDF5 knows nothing of them. The datasets are those
// of a checkpoint's shard file (docs/format.md): /weight/<name>/0_0 with all its attributes, chunk hashes included.

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/format/manifest.h"
#include "converters/safetensors.h"
#include "runtime/core/result.h"

namespace cairn::convert {

struct DualTensor {
  std::string name;     // of safetensors
  std::string dataset;  // of HDF5, [A-Za-z0-9_.-]: the last part but one of the path; empty: `name`
  DType dtype = DType::kF32;
  Shape shape;
};

struct DualReport {
  int64_t file_bytes = 0, user_block_bytes = 0, data_bytes = 0;
  int64_t structures = 0;                // tensors of bytes
  std::vector<ckpt::ShardEntry> shards;  // one a tensor, as a manifest has them: tensor k, file 0
  uint64_t rest_hash = 0;                // of all other bytes, as a manifest has it
};

/// Temporary name, fsync, rename, fsync of the folder, like write_safetensors. `fill(index, sink)` is called in the
/// given order and hands over exactly the tensor's bytes, in pieces. `step` becomes HDF5's attribute of that name.
/// Errors: kInvalidInput (names that HDF5 or the prefix does not allow, empty tensors), kUnsupported (header too
/// large), what `fill` says, kIo, kNoSpace.
Result<DualReport> write_dual(const std::filesystem::path& path, const std::vector<DualTensor>& tensors,
                              const std::map<std::string, std::string>& metadata, int64_t step,
                              const std::function<Status(size_t index, const ByteSink&)>& fill);

}  // namespace cairn::convert
