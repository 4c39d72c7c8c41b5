#include "runtime/core/error.h"

#include <cerrno>
#include <cstring>
#include <utility>

namespace cairn {

std::string_view error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidInput:
      return "invalid input";
    case ErrorCode::kCorrupt:
      return "corrupt";
    case ErrorCode::kUnavailable:
      return "unavailable";
    case ErrorCode::kNoSpace:
      return "no space";
    case ErrorCode::kIo:
      return "i/o";
    case ErrorCode::kPeerLost:
      return "peer lost";
    case ErrorCode::kTimeout:
      return "timeout";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kStopped:
      return "stopped";
    case ErrorCode::kGuard:
      return "guard";
    case ErrorCode::kInternal:
      return "internal";
  }
  return "unknown";
}

Error Error::with(std::string_view context) && {
  message.insert(0, ": ").insert(0, context);
  return std::move(*this);
}

int Error::exit_code() const {
  switch (code) {
    case ErrorCode::kInvalidInput:
    case ErrorCode::kUnsupported:
      return 2;
    case ErrorCode::kCorrupt:
      return 65;
    case ErrorCode::kUnavailable:
      return os_errno == EBUSY ? 73 : 69;  // another process holds it: trying again while that runs is in vain
    case ErrorCode::kPeerLost:
    case ErrorCode::kTimeout:
      return 69;
    case ErrorCode::kInternal:
      return 70;
    case ErrorCode::kNoSpace:
    case ErrorCode::kIo:
      return 74;
    case ErrorCode::kStopped:
      return 75;
    case ErrorCode::kGuard:
      return 76;
  }
  return 70;
}

Error os_error(int os_errno, std::string_view what) {
  ErrorCode code = ErrorCode::kIo;
  if (os_errno == ENOSPC || os_errno == EDQUOT) code = ErrorCode::kNoSpace;
  if (os_errno == ENOENT || os_errno == ENOTDIR || os_errno == EACCES || os_errno == EISDIR)
    code = ErrorCode::kInvalidInput;
  return Error{code, std::string(what) + ": " + std::strerror(os_errno), os_errno};
}

}  // namespace cairn
