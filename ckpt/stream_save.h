#pragma once
// How a tool saves what it computes while it writes, in the memory that it is given.

#include <atomic>
#include <cstdint>

#include "ckpt/persist/save.h"
#include "ckpt/tensors/box_stream.h"

namespace cairn::ckpt {

/// An eighth of payload's share for what is computed, in chunks of 64 KiB to 4 MiB.
inline SaveOptions stream_save(int64_t memory_bytes, bool replace_existing, const std::atomic<bool>* cancel) {
  SaveOptions out;
  out.fill_bytes = payload_share(memory_bytes) / 8;
  out.chunk_bytes = int64_t{64} << 10;
  while (out.chunk_bytes < int64_t{4} << 20 && out.chunk_bytes * 2 <= out.fill_bytes / 4) out.chunk_bytes *= 2;
  out.replace_existing = replace_existing;
  out.cancel = cancel;
  return out;
}

}  // namespace cairn::ckpt
