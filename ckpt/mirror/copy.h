#pragma once
// Copies a whole checkpoint to a place and back.
//
// To a place: 1. the local checkpoint is verified (damage must not spread); 2. every file but the manifest is put,
// what an interrupted copy left being kept; 3. every file is read back and its hash compared with what was read here;
// 4. the manifest is put, which makes the copy complete. Killed at any moment, the place has the copy whole or has
// none that counts, and the next try goes on.
//
// From a place: into `.tmp-step-N...`, file by file, going on where a killed one ended; then every byte is verified
// against the manifest's checksums, synced, and one rename makes it a checkpoint.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "ckpt/mirror/place.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

enum class CopyPhase { kVerifySource, kSend, kReadBack, kFetch, kVerifyFetched, kCheckThere, kVerifyHere };

/// What a copy may do to another checkpoint of the same step that is complete there. One that cannot be read is always
/// replaced.
enum class Replace {
  kOwnLine,  // the mirror of a run: the run went on from an older step. What refers to the replaced one is of the old
             // line too, and goes with it
  kSameRun,  // only what the same run saved, and only what no other step there refers to
  kAnyRun,   // only what no other step there refers to
};

struct CopyOptions {
  Replace replace = Replace::kOwnLine;
  bool check_there = false;  // before "it is there already" every byte there is looked at, and damage repaired
  bool read_back = true;     // false: trust the place's own checksums (S3) or the fsync (directory)
  Traffic traffic;           // on_bytes is set here
  std::function<void(CopyPhase phase, int64_t done_bytes, int64_t total_bytes)> progress;
};

struct CopyReport {
  int64_t step = 0;
  int64_t files = 0, bytes = 0;
  int64_t sent_bytes = 0, reused_bytes = 0;  // fetch: received, and kept from a killed one
  bool was_there = false;                    // complete and equal already: nothing was done
  std::vector<int64_t> repaired;             // were there with the same manifest, but damaged (check_there)
  std::vector<int64_t> replaced;             // other checkpoints of these steps were there
  std::vector<int64_t> removed;              // from the place: they referred to a replaced one (Replace::kOwnLine)
  double seconds = 0, verify_seconds = 0;
  std::filesystem::path dir;  // fetch
};

/// Errors: kInvalidInput: `replace` forbids it. kUnavailable also when steps there refer to what is to be replaced.
/// kCorrupt: the local checkpoint is damaged, or (kOwnLine) the one there is and cannot be repaired from this one. kIo:
/// a disk, or what was read back differs even at a second try. kUnavailable, kTimeout, kNoSpace, kStopped.
/// is_not_found() when the local checkpoint went away.
Result<CopyReport> copy_checkpoint(Place& place, IoBackend& io, const std::filesystem::path& step_dir,
                                   const CopyOptions& options = {});

/// Brings a step to `checkpoints_dir`. A complete one of that number there is an error unless it is the same
/// (was_there); one that is damaged is exchanged for the same, another that cannot be used is replaced. Errors:
/// kCorrupt when the copy is damaged, naming the places; nothing of it stays then.
Result<CopyReport> fetch_checkpoint(Place& place, IoBackend& io, const PlacedStep& step,
                                    const std::filesystem::path& checkpoints_dir, const CopyOptions& options = {});

}  // namespace cairn::ckpt
