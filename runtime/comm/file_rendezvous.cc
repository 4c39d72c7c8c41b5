#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <utility>

#include "runtime/comm/rendezvous.h"
#include "runtime/core/new_file.h"

namespace cairn::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kShortestPause(1), kLongestPause(250);

class FileRendezvous final : public Rendezvous {
 public:
  explicit FileRendezvous(std::string directory) : directory_(std::move(directory)) {}

  Result<bool> publish(const std::string& key, const std::string& value, Time /*until*/) override {
    const auto attempt = [&]() -> Result<bool> {
      RT_TRY_SET(NewFile file, NewFile::beside(path(key), 0600));
      RT_TRY(file.write(value));
      return file.publish_if_free(Durable::kNo);
    };
    Result<bool> made = attempt();
    return made.ok() ? made : std::move(made).error().with("rendezvous file");
  }

  Result<std::optional<std::string>> await(const std::string& key, Time until) override {
    const Time since = Clock::now();
    for (;;) {
      if (auto value = look(key)) return value;
      const Time now = Clock::now();
      if (now >= until) return std::optional<std::string>();
      const Time next = now + std::clamp<Clock::duration>((now - since) / 8, kShortestPause, kLongestPause);
      std::unique_lock lock(mutex_);
      if (closing_.wait_until(lock, std::min(until, next), [&] { return closed_; })) {
        return std::optional<std::string>();
      }
    }
  }

  milliseconds lag() const override { return milliseconds(0); }

  void close() override {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    closing_.notify_all();
  }

 private:
  // Keys hold slashes and brackets: anything but plain characters is written as %XX.
  std::string path(const std::string& key) const {
    std::string name;
    for (const char c : key) {
      const bool plain =
          (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '-';
      if (plain) {
        name += c;
      } else {
        name += fmt::format("%{:02X}", static_cast<unsigned char>(c));
      }
    }
    return directory_ + "/" + name;
  }

  std::optional<std::string> look(const std::string& key) const {
    const Fd fd(::open(path(key).c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) return std::nullopt;
    std::string value;
    char buffer[4096];
    for (;;) {
      const ssize_t n = ::read(fd.get(), buffer, sizeof(buffer));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return std::nullopt;
      if (n == 0) return value;
      value.append(buffer, static_cast<size_t>(n));
    }
  }

  const std::string directory_;
  std::mutex mutex_;
  std::condition_variable closing_;
  bool closed_ = false;  // guarded by mutex_
};

}  // namespace

Result<std::shared_ptr<Rendezvous>> open_file_rendezvous(std::string directory) {
  std::error_code code;
  std::filesystem::create_directories(directory, code);
  if (code) return os_error(code.value(), fmt::format("rendezvous directory {}", directory));
  return std::shared_ptr<Rendezvous>(std::make_shared<FileRendezvous>(std::move(directory)));
}

}  // namespace cairn::comm
