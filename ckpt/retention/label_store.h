#pragma once
// Changes of labels.json by hand or by a guard, one step at a time; the rules that judge all of them are in labels.h.
// Whoever calls has the run to itself: its agent, or a command that holds the run's lock.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/retention/labels.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

/// Labels the save of `step` that is there. `by`: "guard" or "hand". Errors:
/// kInvalidInput where the folder has no such complete step; those of read_labels() and of `check_folder`
/// (write_labels()).
Status put_label(IoBackend& io, const std::filesystem::path& checkpoints_dir, int64_t step, Label label,
                 const std::string& why, const std::string& by, const std::function<Status()>& check_folder = {});

/// From now on no rule of retention removes these steps, for `why`; the others are held no more. Steps that are not
/// there are passed over.
Status hold_steps(IoBackend& io, const std::filesystem::path& checkpoints_dir, const std::vector<int64_t>& steps,
                  const std::string& why);

/// Entries of another folder's or place's labels that are of saves which lie here, merged into labels.json.
Status take_labels(IoBackend& io, const std::filesystem::path& checkpoints_dir, const Labels& theirs);

/// Moves every step above `step` out of the folder to `abandoned` / step-NNNNNNNN-J, J counting up from 1, the newest
/// first, and removes what lies there already but for the newest two. A step whose files others refer to, or that
/// refers to others, is removed instead: its files would not be found where it goes. Returns the steps, ascending.
/// `writer` names the trash.
Result<std::vector<int64_t>> abandon_steps(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                           const std::filesystem::path& abandoned, int64_t step,
                                           const WriterId& writer);

}  // namespace cairn::ckpt
