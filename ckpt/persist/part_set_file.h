#pragma once
// What a host tells the one that commits a step of its part: a PartSet as a file in the folder of the step under way,
// for with many shards it is too long for a message. It is removed before the commit.

#include <cstdint>
#include <filesystem>
#include <string>

#include "ckpt/persist/write_parts.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

/// "parts-2.json": of host 2.
std::string part_set_name(int64_t host);

/// Durable once `work` is synced. Without the stats of taken and spare files, which nobody else needs.
Status write_part_set(IoBackend& io, const std::filesystem::path& work, int64_t host, const PartSet& set);
/// Errors: kCorrupt naming the file; those of reading.
Result<PartSet> read_part_set(IoBackend& io, const std::filesystem::path& work, int64_t host);

}  // namespace cairn::ckpt
