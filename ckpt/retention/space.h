#pragma once
// Whether the disk can hold what a run will leave lying on it at once: asked before anything is started, so that the
// answer does not come after a day of training.

#include <cstdint>
#include <filesystem>
#include <string>

#include "ckpt/retention/policy.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct SpaceNeed {
  int64_t checkpoint_bytes = 0;  // of one, as the plan has it
  KeptAtOnce kept;
  int64_t in_flight = 1;  // being written while those are still there
};

struct SpaceReport {
  int64_t needed_bytes = 0;   // what is certain to lie there at once
  int64_t present_bytes = 0;  // checkpoints of this folder, which count towards it
  int64_t free_bytes = 0;     // with leftovers that go before the first save
  int64_t missing_bytes = 0;  // 0: it fits
  /// "DIR: 2 kept + 1 being written, 1.2 GiB each, are 3.6 GiB; 0.4 GiB of checkpoints are there and 1.0 GiB are free:
  /// 2.2 GiB are missing. Make room, ..."; empty when it fits.
  std::string text;
};

/// "1.25 GiB", for people.
std::string size_text(int64_t bytes);

/// `checkpoints_dir` may not be there yet; its nearest parent is asked then. Errors: those of the backend.
Result<SpaceReport> check_space(IoBackend& io, const std::filesystem::path& checkpoints_dir, const SpaceNeed& need);

}  // namespace cairn::ckpt
