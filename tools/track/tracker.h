#pragma once
// One tracker of a run: reads what is new of its files, sends it, and remembers where it stands.
//   1. RUN/tracking/NAME.json holds the position and the service's note; RUN/tracking/NAME.lock, locked, that one
//   process
//      does this.
//   2. A batch is read from the position on and sent. Only then NAME.json is replaced, at once.
//      A NAME.json that cannot be read is renamed to NAME.json.damaged, and the position is the first step.
//   3. After an error the service is opened anew, so that it finds out what has arrived, and the same batch comes
//   again.
// A kill between 2's halves costs a batch that is sent again, of which the service keeps what it has not.

#include <filesystem>
#include <functional>
#include <string>

#include "runtime/config/agent.h"
#include "runtime/core/result.h"
#include "tools/track/service.h"

namespace cairn::tools {

/// The loop calls these between batches.
struct TrackLoop {
  std::function<bool()> finishing;                      // nothing more will be written: send what there is, and leave
  std::function<void(double seconds)> wait;             // for news; returns early where there may be some
  std::function<void(const Error& error)> failed;       // once in a row; the loop tries again
  std::function<void(const std::string& text)> warned;  // the work continues
  std::function<void(int64_t step)> sent;               // up to this step all is with the service
  double patience_s = 0;  // while finishing: the longest time without success; infinite: no limit
};

/// The name of its files, from what it is and where it goes.
std::string tracker_name(const Tracker& tracker);

/// Errors: kUnavailable with EBUSY: another process does it; those of the service once the patience is at its end;
/// kInvalidInput: no run, no such URL.
Status track(const Tracker& tracker, const std::filesystem::path& run, const TrackLoop& loop);

}  // namespace cairn::tools
