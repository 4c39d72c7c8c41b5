#pragma once
// The choices of a device (runtime/device/tuning.h) as a run has them: equal on all ranks, and kept in a file.
//
// 1. The rank that decides reads the run's file and the one that a person has given, and gives their texts to all.
// 2. Where a rank's file does not cover what is trained, all ranks do forward and backward of the next step once, which
//    is not kept: its products are what a step asks for.
// 3. The ranks send each other the work without a choice. The first rank with some work on its card times it and sends
//    its choice. A choice for another card is kept, and used by ranks on such a card.
// 4. The rank that decides writes the run's file. Training begins with these choices, also after a resume.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/core/result.h"
#include "runtime/device/tuning.h"

namespace cairn::trainer {

/// kKept: on, unless the run's file says that choices are off.
enum class TuningWish { kKept, kOn, kOff };

/// Files of the rank that decides.
struct TuningFiles {
  TuningWish wish = TuningWish::kKept;
  std::string layout;  // names program, recipe and world: equal ones ask for the same work
  /// Path and text of each file, the run's own first: the first one with a choice wins. Missing files are left out.
  std::function<Result<std::vector<std::pair<std::string, std::string>>>()> read;
  std::function<Status(const std::string& text)> write;  // the run's own
  /// A line for people, of products, of attention, and whether bits change by it. May be empty.
  std::function<void(const std::string& line, bool changes)> on_result;
};

/// All ranks of `world` call it. `files`: null on ranks other than `decides`; null there too: no choices are made.
/// `resumes`: steps of before may have had other choices. `pass`: forward and backward of a step. Errors: those of the
/// files, naming one; of the device; of communication.
Status tune(DeviceTuning& tuning, comm::Comm& world, int64_t decides, const TuningFiles* files, bool resumes,
            const std::function<Status()>& pass);

}  // namespace cairn::trainer
