#include "runtime/cuda/arena.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/core/check.h"

namespace cairn::cuda {
namespace {

constexpr int64_t kAlign = 256;  // as the device's own allocations begin

int64_t rounded(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

Result<std::unique_ptr<Arena>> Arena::reserve(std::shared_ptr<Context> context, int64_t bytes) {
  RT_CHECK(bytes > 0, "an arena of {} bytes", bytes);
  std::unique_ptr<Arena> out(new Arena(std::move(context), rounded(bytes)));
  const Context& on = *out->context_;
  RT_TRY(on.checked(on.select(), "cudaSetDevice").with(device_name(on.device())));
  void* memory = nullptr;
  RT_TRY(on.checked(on.api().allocate(&memory, static_cast<size_t>(out->bytes_)), "cudaMalloc")
             .with(fmt::format("{} bytes on {}", out->bytes_, device_name(on.device()))));
  out->memory_ = static_cast<std::byte*>(memory);
  serve_heap(on.device(), out.get());
  RT_TRY(out->clear(out->bytes_));
  return out;
}

Arena::~Arena() {
  if (memory_ == nullptr) return;
  serve_heap(context_->device(), nullptr);
  bool refused = context_->select() != 0;
  refused |= context_->api().free(memory_) != 0;
  if (refused) context_->api().last_error();
}

int64_t Arena::bytes_for(std::span<const int64_t> blocks) {
  int64_t out = 0;
  for (const int64_t bytes : blocks) out += rounded(bytes);
  return out;
}

Status Arena::clear(int64_t bytes) {
  const std::unique_ptr<CudaStream> stream = CudaStream::make(context_);
  stream->set(memory_, 0, bytes);
  return stream->settle();
}

Result<std::byte*> Arena::take(int64_t bytes) {
  if (rounded(bytes) > bytes_ - used_) {
    return Error{ErrorCode::kNoSpace, fmt::format("no room for {} bytes on {}: {} of {} reserved there are in use",
                                                  bytes, device_name(context_->device()), used_, bytes_)};
  }
  if (used_ == 0 && soiled_ > 0) {
    RT_TRY(clear(soiled_));
    soiled_ = 0;
  }
  std::byte* const out = memory_ + used_;
  used_ += rounded(bytes);
  ++blocks_;
  return out;
}

void Arena::give_back(std::byte*, int64_t) {
  if (--blocks_ > 0) return;
  soiled_ = std::max(soiled_, used_);
  used_ = 0;
}

}  // namespace cairn::cuda
