#pragma once

#include <cstdint>
#include <span>

namespace cairn::ckpt {

/// Payload bytes that one checksum of a raw shard, the box [lo, hi), stands for, in a save whose requests are of
/// `chunk_bytes`.
///
/// That many, but less where rows are long: who reads some of the columns and verifies them reads each chunk that he
/// touches whole. A row of 64 KiB and more gets 16 checksums, or 8, 4 or 2 so that each stands for whole pages and for
/// 16 KiB at least: a half or a quarter of the columns, and mostly an eighth, is then whole chunks and nothing else.
/// With shorter rows leaving out what is not wanted gains little or nothing (docs/benchmarks). A row is what one step
/// in a dim spans; of several dims with long rows the innermost decides, which serves the others.
int64_t checksum_bytes(std::span<const int64_t> lo, std::span<const int64_t> hi, int64_t elem_bytes,
                       int64_t chunk_bytes);

}  // namespace cairn::ckpt
