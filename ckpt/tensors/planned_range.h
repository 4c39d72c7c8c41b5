#pragma once
// Where planning and reading meet: neither knows the other.

#include <cstddef>

#include "ckpt/persist/read.h"
#include "ckpt/plan/load_plan.h"

namespace cairn::ckpt {

/// A planned read, into the memory of the box that it is for.
inline ReadRange range_of(const LoadRead& read, std::byte* box) {
  return {.file = read.file,
          .offset = read.offset,
          .bytes = read.bytes,
          .dst = box + read.target_offset,
          .rows = read.rows,
          .source_stride = read.source_stride,
          .target_stride = read.target_stride};
}

}  // namespace cairn::ckpt
