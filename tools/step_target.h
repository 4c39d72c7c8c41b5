#pragma once
// Folders and places that a command puts a step into: whose they are, and whether that step may go there.

#include <cstdint>
#include <string>
#include <vector>

#include "ckpt/mirror/place.h"
#include "runtime/core/result.h"

namespace cairn::tools {

/// The run that `run.json` beside the steps names; empty when there is none, or one of something else.
Result<std::string> noted_run(ckpt::Place& place);

/// The run that would take a step put there for its own. Either run.json names it, as a run leaves it in its mirror, or
/// the steps lie in its folder, once it has some. Empty: none.
Result<std::string> run_of_target(ckpt::Place& target);

/// A run goes on from the newest step of its folder, and retention counts all of them: none of another run gets in.
/// `owner` from run_of_target(); `from`: the ids that the step's run has, its manifest's first. Errors: kInvalidInput.
Status check_run(const std::string& where, const std::string& owner, int64_t step,
                 const std::vector<std::string>& from);

/// A run folder's steps are looked for in its `checkpoints`; beside that nobody finds them. Errors: kInvalidInput.
Status check_not_beside_checkpoints(const std::string& target);

}  // namespace cairn::tools
