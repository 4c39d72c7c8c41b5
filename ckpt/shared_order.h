#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ckpt/persist/save.h"

namespace cairn::ckpt {

struct SharedOrderLimits {
  int64_t band_bytes = 0;    // of all files together, written before the first of them goes on
  int64_t step_bytes = 0;    // ends within a shard are multiples of it; of 4096
  int64_t commit_bytes = 0;  // as SaveOptions': a group of files ends once it has so many
};

/// The order in which files that want parts of the same tensors are written side by side. What they all want of a
/// tensor is asked for within one band, so a chunk is read once for all of them, not once for each. Tensors of up to a
/// band are kept together, several to a band; larger ones are cut into equal parts of each file's share. Parts are
/// taken in groups of consecutive ones, up to kOpenFiles and commit_bytes; a group becomes durable together.
///
/// Shards of a part come in their order; those of tensors with a lower index than the one before go with that one.
std::vector<WriteStep> shared_order(std::span<const WriterPart> parts, const SharedOrderLimits& limits);

}  // namespace cairn::ckpt
