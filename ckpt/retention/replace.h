#pragma once
// A checkpoint in the place of another one of its step. Where the file system can, the two names are exchanged. Where
// it cannot (most network file systems), W being the writer that the work directory's name tells:
//
//   1. step-N is renamed to .trash-step-N.W; .tmp-step-N.W is durable by then, and so is its name
//   2. .tmp-step-N.W is renamed to step-N
//
// Between the two there is no step-N, and no other moment shows both names of one W. Whoever meets them does 2 in W's
// place, whether W lives or not: of several who try one succeeds, and the others find it done. Who only reads is told
// (CheckpointInfo::unread), and takes no older step meanwhile.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct Replacement {
  Status status;
  std::filesystem::path old;  // when ok: where what was there lies now; it may go once the folder is synced
  bool cut_off = false;       // not ok, between 1 and 2: both directories are to stay, for finish_replacements()
};

/// `work`, durable, in the place of the step that its name tells. Errors: kUnsupported with `must_exchange`, where the
/// file system cannot; the system's.
Replacement replace_step(IoBackend& io, const std::filesystem::path& work, bool must_exchange = false);

/// Whether two names of this folder can be exchanged: found out with two empty work directories of `writer`, which are
/// gone again.
Result<bool> can_exchange(IoBackend& io, const std::filesystem::path& checkpoints_dir, const WriterId& writer);

/// Of a step that was cut off between 1 and 2, the directory that finish_replacements() puts in its place: the new one,
/// or where that does not hold the old one. Neither holds: one that is not `complete`. One that cannot be read now:
/// that.
CheckpointInfo look_at_cut_off(IoBackend& io, const std::filesystem::path& checkpoints_dir, const CutOff& cut);

/// Ends what was cut off between 1 and 2, durably: with the new one, or where that does not hold with the old one.
/// Returns a sentence for each.
Result<std::vector<std::string>> finish_replacements(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                                     const Names& names);

}  // namespace cairn::ckpt
