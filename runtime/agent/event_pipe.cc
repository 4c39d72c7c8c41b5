#include "runtime/agent/event_pipe.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "runtime/json/json.h"

namespace cairn::agent {

void LineSplitter::feed(std::string_view bytes, const std::function<void(std::string_view)>& line) {
  while (!bytes.empty()) {
    const size_t newline = bytes.find('\n');
    const std::string_view part = bytes.substr(0, newline);
    if (!skipping_ && static_cast<int64_t>(partial_.size() + part.size()) > kMaxEventBytes) {
      skipping_ = true;
      ++dropped_;
      partial_.clear();
    }
    if (newline == std::string_view::npos) {
      if (!skipping_) partial_.append(part);
      return;
    }
    if (!skipping_) {
      if (partial_.empty()) {
        line(part);
      } else {
        partial_.append(part);
        line(partial_);
      }
    }
    skipping_ = false;
    partial_.clear();
    bytes.remove_prefix(newline + 1);
  }
}

Result<EventWriter> EventWriter::from_environment() {
  EventWriter writer;
  const char* text = std::getenv(kEventFdEnv);
  if (text == nullptr) return writer;
  int fd = -1;
  const char* end = text + std::strlen(text);
  const auto [stop, code] = std::from_chars(text, end, fd);
  if (code != std::errc() || stop != end || fd < 3 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("{}={}: expected the number of an open pipe; the supervisor sets it, unset it to run by hand",
                    kEventFdEnv, text)};
  }
  writer.fd_.reset(fd);
  return writer;
}

Status EventWriter::send(const nlohmann::json& event) {
  if (!fd_) return {};
  // Bytes that are no UTF-8 (a path in a message) must not lose the event.
  std::string line = json_text(event);
  line.push_back('\n');
  const std::lock_guard lock(*sending_);
  for (size_t done = 0; done < line.size();) {
    const ssize_t n = write(fd_.get(), line.data() + done, line.size() - done);
    if (n >= 0) {
      done += static_cast<size_t>(n);
    } else if (errno != EINTR) {
      return Error{ErrorCode::kPeerLost, fmt::format("event to the supervisor: {}", std::strerror(errno)), errno};
    }
  }
  return {};
}

void EventWriter::send_error(const Error& error) {
  ignore(send({{"event", "error"}, {"exit_code", error.exit_code()}, {"message", error.message}}),
         "the exit code tells the supervisor as well");
}

}  // namespace cairn::agent
