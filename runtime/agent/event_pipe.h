#pragma once
// Events from a child to its supervisor: JSON objects, one a line, on a pipe whose number stands in CAIRN_EVENT_FD.
// The pipe is a side channel for people and policies; nothing that must survive a kill travels on it. A line that a
// kill has torn (no newline at its end) is dropped by the reader.
//
// One event is known to the supervisor itself and decides what a failure is blamed on:
//   {"event": "error", "exit_code": 65, "message": "step-00000100/rank-3.h5: byte 8192: ..."}
// A child sends it before it starts to take anything down. All other events belong to the client.

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::agent {

constexpr const char* kEventFdEnv = "CAIRN_EVENT_FD";
constexpr int64_t kMaxEventBytes = int64_t{1} << 20;  // a longer line is dropped, whole

/// Cuts a byte stream into lines. Bytes may arrive in any portions.
class LineSplitter {
 public:
  /// Calls `line` for each complete line, without its newline. Lines over kMaxEventBytes are counted and dropped.
  void feed(std::string_view bytes, const std::function<void(std::string_view)>& line);
  int64_t dropped() const { return dropped_; }
  bool torn() const { return !partial_.empty() || skipping_; }  // bytes after the last newline

 private:
  std::string partial_;
  bool skipping_ = false;
  int64_t dropped_ = 0;
};

/// The child's end. Any thread may send: lines come whole.
class EventWriter {
 public:
  /// Takes the descriptor named by CAIRN_EVENT_FD; without the variable a writer that swallows events, so that a child
  /// can be run by hand. Errors: kInvalidInput when the variable is set but names no open descriptor.
  static Result<EventWriter> from_environment();

  /// One line; blocks while the pipe is full. Errors: kPeerLost when the supervisor is gone.
  Status send(const nlohmann::json& event);
  /// The event `error` for this error. Its own failure is of no use to the caller, who is leaving.
  void send_error(const Error& error);

 private:
  Fd fd_;
  std::unique_ptr<std::mutex> sending_ = std::make_unique<std::mutex>();  // a long line is written in several pieces
};

}  // namespace cairn::agent
