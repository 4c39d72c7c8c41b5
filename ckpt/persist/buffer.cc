#include "ckpt/persist/buffer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>

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

}  // namespace cairn::ckpt
