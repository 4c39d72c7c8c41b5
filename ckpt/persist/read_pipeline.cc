#include "ckpt/persist/read_pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

namespace cairn::ckpt {

namespace {

constexpr int64_t kWarmBytes = int64_t{4} << 20;  // of a buffer that is made ahead: a chunk, or small ones merged
constexpr int64_t kMinWarmed = 4;                 // fewer are not worth a thread

/// Sizes in powers of two make buffers fit again.
int64_t capacity_for(int64_t bytes) {
  int64_t capacity = int64_t{64} << 10;
  while (capacity < bytes) capacity *= 2;
  return capacity;
}

}  // namespace

ReadPipeline::ReadPipeline(int64_t window_bytes, BufferStore* kept, int64_t expected_bytes)
    : window_bytes_(window_bytes), own_(window_bytes), kept_(kept != nullptr ? *kept : own_) {
  const int64_t missing = std::min(window_bytes, expected_bytes) - kept_.memory_bytes();
  if (missing >= kMinWarmed * kWarmBytes) warmer_.emplace(kWarmBytes, missing / kWarmBytes);
}

ReadPipeline::~ReadPipeline() {
  // Left early on an error: the requests still own the memory that goes away now.
  for (Flight& flight : flights_) ignore(flight.file->wait(flight.ticket), "an earlier error is being told");
  while (warmer_) {  // touched for nothing here, but not for who comes next
    std::optional<Buffer> buffer = warmer_->poll();
    if (!buffer) break;
    kept_.put_back(std::move(*buffer));
  }
}

std::optional<Buffer> ReadPipeline::take_touched(int64_t capacity) {
  std::optional<Buffer> buffer = kept_.take_kept(capacity);
  if (!buffer && warmer_ && capacity == kWarmBytes) buffer = warmer_->poll();
  return buffer;
}

/// While buffers are still being made, the one that comes back from the oldest read is there sooner than a new one.
Result<Buffer> ReadPipeline::take_buffer(int64_t bytes) {
  const int64_t capacity = capacity_for(bytes);
  while (true) {
    if (std::optional<Buffer> buffer = take_touched(capacity)) return std::move(*buffer);
    if (warmer_ && warmer_->finished()) warmer_.reset();
    if (!warmer_ || capacity != kWarmBytes) return Buffer::allocate(capacity);
    if (!flights_.empty()) {
      RT_TRY(finish_oldest());
    } else if (std::optional<Buffer> buffer = warmer_->wait()) {
      return std::move(*buffer);
    }
  }
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
  if (flight.bounce) kept_.put_back(std::move(flight.bounce));
  return result;
}

Status ReadPipeline::finish(const IoFile& file) {
  const auto last =
      std::find_if(flights_.rbegin(), flights_.rend(), [&](const Flight& flight) { return flight.file == &file; });
  for (auto count = flights_.rend() - last; count > 0; --count) RT_TRY(finish_oldest());
  return {};
}

Status ReadPipeline::drain() {
  while (!flights_.empty()) RT_TRY(finish_oldest());
  return {};
}

}  // namespace cairn::ckpt
