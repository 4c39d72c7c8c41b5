#include "ckpt/persist/read_pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

namespace cairn::ckpt {

ReadPipeline::~ReadPipeline() {
  // Left early on an error: the requests still own the memory that goes away now.
  for (Flight& flight : flights_) ignore(flight.file->wait(flight.ticket), "an earlier error is being told");
}

Result<Buffer> ReadPipeline::take_buffer(int64_t bytes) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (static_cast<int64_t>(it->bytes().size()) < bytes) continue;
    Buffer buffer = std::move(*it);
    free_.erase(it);
    return buffer;
  }
  if (!free_.empty()) free_.pop_back();  // too small for what comes; do not hoard
  // Sizes in powers of two make buffers fit again.
  int64_t capacity = int64_t{64} << 10;
  while (capacity < bytes) capacity *= 2;
  return Buffer::allocate(capacity);
}

Status ReadPipeline::submit(IoFile& file, int64_t file_bytes, int64_t offset, int64_t bytes, std::byte* dst,
                            Done done) {
  constexpr size_t kMaxFlights = 256;
  while (!flights_.empty() && (used_bytes_ + bytes > window_bytes_ || flights_.size() >= kMaxFlights))
    RT_TRY(finish_oldest());
  Flight flight;
  flight.file = &file;
  flight.done = std::move(done);
  int64_t from = offset, to = offset + bytes;
  if (dst == nullptr) {
    from = offset / kIoAlign * kIoAlign;
    to = std::max(to, std::min(file_bytes, (to + kIoAlign - 1) / kIoAlign * kIoAlign));
    RT_TRY_SET(flight.bounce, take_buffer(to - from));
    dst = flight.bounce.bytes().data();
    flight.bytes = std::span<const std::byte>(dst + (offset - from), static_cast<size_t>(bytes));
  } else {
    flight.bytes = std::span<const std::byte>(dst, static_cast<size_t>(bytes));
  }
  flight.window_bytes = bytes;
  Result<IoTicket> ticket = file.submit_read(from, dst, to - from);
  if (!ticket.ok()) return flight.done(std::move(ticket).error(), {});
  flight.ticket = ticket.value();
  used_bytes_ += bytes;
  flights_.push_back(std::move(flight));
  return {};
}

Status ReadPipeline::finish_oldest() {
  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  used_bytes_ -= flight.window_bytes;
  Status read = flight.file->wait(flight.ticket);
  const bool ok = read.ok();
  Status result = flight.done(std::move(read), ok ? flight.bytes : std::span<const std::byte>());
  if (flight.bounce) free_.push_back(std::move(flight.bounce));
  return result;
}

Status ReadPipeline::drain() {
  while (!flights_.empty()) RT_TRY(finish_oldest());
  return {};
}

}  // namespace cairn::ckpt
