#include "runtime/cluster/lease.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <chrono>

#include "runtime/cluster/connection.h"
#include "runtime/cluster/token.h"
#include "runtime/core/unique_handle.h"

namespace cairn::cluster {
namespace {

constexpr int64_t kLookNs = 200'000'000;  // a folder that many hosts share is not asked more often

std::string lease_file(const std::filesystem::path& directory) { return (directory / "lease").string(); }

/// Opened each time: between hosts a file's content is fresh at its opening, and durable at its closing.
std::string content_of(const std::string& path) {
  std::array<char, 128> bytes;
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const ssize_t size = fd ? ::read(fd.get(), bytes.data(), bytes.size()) : 0;
  return size > 0 ? std::string(bytes.data(), static_cast<size_t>(size)) : "";
}

}  // namespace

Lease::Lease(const std::filesystem::path& directory)
    : path_(lease_file(directory)), own_(random_hex().substr(0, 16)), thread_([this] { run(); }) {}

Lease::~Lease() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Lease::run() {
  std::unique_lock lock(mutex_);
  for (int64_t count = 0; !ends_; ++count) {
    lock.unlock();
    if (held_) {
      const std::string text = fmt::format("{} {:012}\n", own_, count);
      const Fd fd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
      // What cannot be written is not held: that is what it says to the others.
      const bool written = fd && ::pwrite(fd.get(), text.data(), text.size(), 0) > 0;
      static_cast<void>(written);
    }
    lock.lock();
    changed_.wait_for(lock, std::chrono::duration<double>(kLeaseEveryS), [this] { return ends_; });
  }
}

LeaseWatch::LeaseWatch(const std::filesystem::path& directory)
    : path_(lease_file(directory)), seen_(content_of(path_)), since_ns_(steady_ns()) {}

double LeaseWatch::still_s() {
  const int64_t now_ns = steady_ns();
  if (now_ns - looked_ns_ >= kLookNs) {
    looked_ns_ = now_ns;
    if (std::string now = content_of(path_); now != seen_) {
      seen_ = std::move(now);
      since_ns_ = now_ns;
      changed_ = true;
    }
  }
  return static_cast<double>(now_ns - since_ns_) / 1e9;
}

}  // namespace cairn::cluster
