#pragma once
// Brings files of a revision into the cache: several at once, each resumed where an earlier try was cut, also that of a
// killed process, and checked against the hash that the Hub lists before it gets its name.
//
// Steps for one file: 1. HEAD, for the name of its content; 2. its lock; 3. the bytes behind those of ETAG.incomplete;
// 4. length and hash; 5. fsync, rename to the blob; 6. the link in the snapshot.
// A hash that fails after a resume is tried once from the first byte. Memory: 256 KiB a file under way.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/hub/cache.h"
#include "runtime/hub/hub.h"

namespace cairn::hub {

struct FetchOptions {
  int64_t at_once = 4;                             // files
  std::function<void(int64_t, int64_t)> progress;  // bytes that have come, of all; from any thread, one at a time
  std::function<void(const std::string&)> notice;  // a line for the person, as of progress
  Hub::Cancelled cancelled;
};

/// Errors: those of Hub; kCorrupt: a file that is not what the list says; kNoSpace, kIo; kTimeout: another process
/// holds the lock of a file and writes nothing.
Status fetch(const Settings& settings, const Revision& revision, const std::vector<RemoteFile>& files,
             const FetchOptions& options);

}  // namespace cairn::hub
