#pragma once
// What lies in a checkpoints folder. `latest` is never stored: it is found by looking.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct CheckpointInfo {
  int64_t step = 0;
  std::filesystem::path dir;
  bool complete = false;  // the manifest's checksum holds, it is valid, and each file is there with its size
  std::string problem;    // why not complete
  int64_t created_unix_ms = 0;
  int64_t size_bytes = 0;  // of the files the manifest names (or that lie there, when it cannot be read)
};

struct Catalog {
  std::vector<CheckpointInfo> checkpoints;  // by step, ascending
  std::vector<std::string> leftovers;       // names of dead or running saves and half-done deletes
  std::vector<std::string> unknown;         // other names; never touched
};

/// A folder that does not exist is an empty catalog.
Result<Catalog> list_checkpoints(IoBackend& io, const std::filesystem::path& checkpoints_dir);

/// The complete checkpoint with the highest step. Errors: kInvalidInput when there is none; the message names each
/// damaged one and why.
Result<CheckpointInfo> newest_complete(IoBackend& io, const std::filesystem::path& checkpoints_dir);

}  // namespace cairn::ckpt
