#pragma once
// Reads every byte of a checkpoint and compares it with the manifest's checksums. The calling thread keeps the disk
// busy with reads of some megabytes, over all files as if they were one; other threads hash what has come.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

/// One damaged place.
struct Damage {
  std::string file;               // name in the checkpoint's directory
  int64_t shard = -1;             // index into Manifest::shards; -1: not payload
  int64_t chunk = -1;             // of that shard
  int64_t offset = 0, bytes = 0;  // in the file, when known
  std::string message;            // a sentence with file, tensor, box, chunk and both checksums
  std::string kind, tensor;       // whose payload; empty: not payload
};

struct VerifyReport {
  std::vector<Damage> damages;
  int64_t files = 0, shards = 0, chunks = 0, bytes = 0;  // checked
  double seconds = 0;
  bool whole() const { return damages.empty(); }
};

struct VerifyOptions {
  int64_t max_damages = 10000;  // then the search ends
  int64_t threads = 0;          // that hash; 0: one per core, at most four (they outrun any disk that we met)
  bool structure = true;        // also open each file with libhdf5 and look up every dataset
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;  // after each piece; may be empty
};

/// Checks manifest, file sizes, each chunk, each file's HDF5 structure (its checksum first: libhdf5 sees only bytes
/// that passed), and that each dataset lies where the manifest says. Damage is in the report. An error means that
/// nothing is known: kInvalidInput: no such directory; kIo: the system refuses a file of it (is_refused); kUnsupported:
/// a newer build wrote it; kStopped: `io` was asked to stop. Memory: up to 128 MiB of payload on its way, and the HDF5
/// structure of the files at work.
Result<VerifyReport> verify_checkpoint(IoBackend& io, const std::filesystem::path& dir,
                                       const VerifyOptions& options = {});

}  // namespace cairn::ckpt
