#include "ckpt/persist/buffer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

/// Memory of its own, not the heap's: what the heap hands out again was split into small pages when it was small
/// things, and stays so. Null when there is none.
std::byte* map_huge_pages(int64_t bytes) {
  const auto room = static_cast<size_t>(bytes + kHugePage);
  void* mapped = ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = aligned + static_cast<uintptr_t>(bytes);
  if (aligned != begin) ::munmap(mapped, aligned - begin);
  if (end != begin + room) ::munmap(reinterpret_cast<void*>(end), begin + room - end);
  auto* const out = reinterpret_cast<std::byte*>(aligned);
  ::madvise(out, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // may be refused
  return out;
}

}  // namespace

void Buffer::Freer::operator()(std::byte* p) const {
  if (mapped_bytes > 0) {
    ::munmap(p, static_cast<size_t>(mapped_bytes));
  } else {
    std::free(p);
  }
}

Result<Buffer> Buffer::allocate(int64_t bytes) {
  Buffer out;
  if (bytes % kHugePage == 0) {
    out.memory_ = {map_huge_pages(bytes), Freer{bytes}};
  } else {
    const int64_t whole = (bytes + kIoAlign - 1) / kIoAlign * kIoAlign;
    out.memory_ = {static_cast<std::byte*>(std::aligned_alloc(kIoAlign, static_cast<size_t>(whole))), Freer{}};
  }
  out.bytes_ = bytes;
  if (!out.memory_)
    return Error{ErrorCode::kUnavailable, fmt::format("no memory for a buffer of {} bytes", bytes), ENOMEM};
  return out;
}

void Buffer::touch() {
  const std::span<std::byte> all = bytes();
  for (size_t at = 0; at < all.size(); at += kIoAlign) {
    auto* const byte = reinterpret_cast<volatile std::byte*>(all.data() + at);
    *byte = *byte;
  }
}

std::optional<Buffer> BufferStore::take_kept(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  for (auto it = buffers_.rbegin(); it != buffers_.rend(); ++it) {  // the last one used: caches may know it
    if (std::ssize(it->bytes()) != bytes) continue;
    Buffer buffer = std::move(*it);
    buffers_.erase(std::next(it).base());
    bytes_ -= bytes;
    return buffer;
  }
  return std::nullopt;
}

Result<Buffer> BufferStore::take(int64_t bytes) {
  if (std::optional<Buffer> kept = take_kept(bytes)) return std::move(*kept);
  return Buffer::allocate(bytes);
}

void BufferStore::put_back(Buffer buffer) {
  const std::lock_guard lock(mutex_);
  if (!buffer || std::ssize(buffer.bytes()) > max_bytes_) return;
  bytes_ += std::ssize(buffer.bytes());
  buffers_.push_back(std::move(buffer));
  trim();
}

void BufferStore::limit(int64_t max_bytes) {
  const std::lock_guard lock(mutex_);
  max_bytes_ = max_bytes;
  trim();
}

void BufferStore::trim() {
  auto kept = buffers_.begin();
  for (; bytes_ > max_bytes_; ++kept) bytes_ -= std::ssize(kept->bytes());
  buffers_.erase(buffers_.begin(), kept);
}

int64_t BufferStore::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

BufferWarmer::BufferWarmer(int64_t bytes, int64_t count) {
  try {
    thread_ = std::thread([this, bytes, count] { work(bytes, count); });
  } catch (const std::system_error&) {  // a limit of threads: whoever needs a buffer makes it
    done_ = true;
  }
}

BufferWarmer::~BufferWarmer() {
  closing_ = true;
  if (thread_.joinable()) thread_.join();
}

void BufferWarmer::work(int64_t bytes, int64_t count) {
  for (int64_t i = 0; i < count && !closing_; ++i) {
    Result<Buffer> buffer = Buffer::allocate(bytes);
    if (!buffer.ok()) break;  // whoever needs it will find out, and say so
    buffer.value().touch();
    {
      const std::lock_guard lock(mutex_);
      ready_.push_back(std::move(buffer).value());
    }
    changed_.notify_one();
  }
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  changed_.notify_one();
}

std::optional<Buffer> BufferWarmer::poll() {
  const std::lock_guard lock(mutex_);
  if (ready_.empty()) return std::nullopt;
  Buffer buffer = std::move(ready_.back());
  ready_.pop_back();
  return buffer;
}

std::optional<Buffer> BufferWarmer::wait() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ || !ready_.empty(); });
  }
  return poll();
}

bool BufferWarmer::finished() const {
  const std::lock_guard lock(mutex_);
  return done_ && ready_.empty();
}

}  // namespace cairn::ckpt
