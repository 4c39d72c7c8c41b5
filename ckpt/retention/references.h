#pragma once
// Which steps others need. A checkpoint, or a save at work, that refers to files of earlier steps says so in a small
// file. So a removal finds out without decoding manifests, and before a save's manifest is written.
//
// Save:   announce (A), look whether the files are there (B1), write, look again (B2), commit. Not there: write all.
// Remove: rename to .trash (E), look for announcements (F); if there is one, rename back (R), else delete (X).
// A pin (pin.h) announces its step in the same way, and its reader looks as a save does at B1.
// E before B2: the save sees that the files are gone. E after B2: A was before F, which lists work directories before
// steps, so it sees the announcement under one name or the other. Killed between E and R: clean_leftovers does R.

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

/// Which steps each checkpoint and each save at work in this folder says it needs, by the directory's name; and each
/// pin whose process may live.
Result<std::map<std::string, std::set<int64_t>>> announcements(IoBackend& io,
                                                               const std::filesystem::path& checkpoints_dir);
/// Of all of them together.
Result<std::set<int64_t>> announced_references(IoBackend& io, const std::filesystem::path& checkpoints_dir);

/// Other steps of this folder that need files of `step`: each that may be whole. Cost: reads every manifest.
Result<std::vector<int64_t>> steps_that_need(IoBackend& io, const std::filesystem::path& checkpoints_dir, int64_t step);

}  // namespace cairn::ckpt
