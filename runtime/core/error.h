#pragma once
// What can go wrong, and what the caller does next. The code decides retry, fallback and exit status; the message is
// for the person and carries its own place (file:line, path and byte offset, rank and operation).

#include <string>
#include <string_view>

namespace cairn {

enum class ErrorCode {
  kInvalidInput,  // tell the person: recipe, flag, plan, foreign file that we refuse
  kCorrupt,       // bytes that should be whole are not: try an older checkpoint
  kUnavailable,   // a peer, a store or a device is not there now: retry may help
  kNoSpace,       // the disk is full or the quota is reached
  kIo,            // the storage failed while reading or writing
  kPeerLost,      // a rank died: re-form the mesh
  kTimeout,       // a named wait passed its deadline
  kUnsupported,   // a valid wish that this build or machine cannot meet
  kStopped,       // asked to leave (signal, stop file); not a failure
  kGuard,         // a guard stopped the run: the loss or a gradient is not finite
  kInternal,      // our own mistake
};

std::string_view error_code_name(ErrorCode code);

struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
  int os_errno = 0;  // 0 when no system call was involved

  /// The same error with `context` in front: "context: message".
  Error with(std::string_view context) &&;

  /// Process exit status for this error (docs/operations/exit-codes.md).
  int exit_code() const;
};

/// An Error from errno: "<what>: <strerror>". ENOSPC, EDQUOT become kNoSpace, other I/O failures kIo.
Error os_error(int os_errno, std::string_view what);

}  // namespace cairn
