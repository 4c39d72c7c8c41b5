#pragma once
// What a save that was cut off leaves for the next one. A save with WriteOptions::resume_key puts a note beside each
// file that is durable; the next save of the same state takes those files over after every byte of them has been
// compared with the note. Notes lie in work directories only: they are removed before the commit.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct FinishedFile {
  FileEntry file;
  std::vector<ShardEntry> shards;  // in the file's order; of each only how it is stored, and its hashes
};

std::string note_name(const std::string& file_name);
bool is_note_name(std::string_view name);

/// Writes and syncs the note of a durable file. The directory is not synced.
Status write_note(IoBackend& io, const std::filesystem::path& work, uint64_t key, const FinishedFile& finished);

/// By file name. Notes that are torn, or of another key, are as if they were not there.
Result<std::map<std::string, FinishedFile>> read_notes(IoBackend& io, const std::filesystem::path& work, uint64_t key);

/// Reads the whole file. Errors: kCorrupt when it is not what the note says, those of reading.
Status check_finished(IoBackend& io, const std::filesystem::path& work, const FinishedFile& finished);

/// Of what dead saves of this step have left in `dir`: the work directory that has most files to go on from, or "". The
/// others are removed, and their names added to `cleaned`. `alive`: whose directories are let alone.
Result<std::string> find_unfinished(IoBackend& io, const std::filesystem::path& dir, int64_t step, uint64_t key,
                                    const std::function<bool(const WriterId&)>& alive,
                                    std::vector<std::string>* cleaned);

Status remove_notes(IoBackend& io, const std::filesystem::path& work);

}  // namespace cairn::ckpt
