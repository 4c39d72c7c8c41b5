#pragma once
// Looks at every id of a stream of tokens before a run depends on them: a set that was made with another tokenizer
// shows itself in one id, which may lie days into a run.
//
// Threads: as many as are asked for, for the duration of the call; TokenSource::id_range is called from all of them.

#include <cstdint>

#include "runtime/core/result.h"
#include "runtime/data/token_file.h"

namespace cairn::data {

struct ScanOptions {
  int64_t vocab = 0;    // ids at or above it are outside; 0: those above what an int32 holds
  int64_t threads = 0;  // 0: as many as cores
  double seconds = 0;   // after so much time no further block is begun; 0: all are looked at
};

struct ScanReport {
  int64_t tokens = 0;  // looked at
  int64_t of = 0;      // asked for
  IdRange ids;         // of those looked at; `outside`: below 0, or at or above the vocabulary
  /// TokenSource::read's error at one of those outside, the first in the file where all were looked at: file, token,
  /// byte, value, expected. ok() while there is none.
  Status bad;
  double share() const { return of == 0 ? 1.0 : static_cast<double>(tokens) / static_cast<double>(of); }
};

/// Tokens [0, count) of `source`, which must have been opened with the same vocabulary. With a limit of time blocks are
/// taken in an order that spreads over the whole range, the last one first: what was looked at then stands for the
/// rest. Errors: kCorrupt or kIo when the file no longer delivers.
Result<ScanReport> scan_tokens(const TokenSource& source, int64_t count, const ScanOptions& options);

}  // namespace cairn::data
