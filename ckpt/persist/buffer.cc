#include "ckpt/persist/buffer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>

#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {

void Buffer::Freer::operator()(std::byte* p) const { std::free(p); }

Result<Buffer> Buffer::allocate(int64_t bytes) {
  constexpr int64_t kHugePage = int64_t{2} << 20;
  const int64_t align = bytes % kHugePage == 0 ? kHugePage : kIoAlign;
  Buffer out;
  out.memory_.reset(static_cast<std::byte*>(
      std::aligned_alloc(static_cast<size_t>(align), static_cast<size_t>((bytes + align - 1) / align * align))));
  out.bytes_ = bytes;
  if (!out.memory_)
    return Error{ErrorCode::kUnavailable, fmt::format("no memory for a buffer of {} bytes", bytes), ENOMEM};
  // Fewer pages to pin; may be refused. Smaller buffers would get huge pages that reach beyond them.
  if (align == kHugePage) ::madvise(out.memory_.get(), static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return out;
}

}  // namespace cairn::ckpt
