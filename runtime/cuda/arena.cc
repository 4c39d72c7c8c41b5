#include "runtime/cuda/arena.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/core/check.h"

namespace cairn::cuda {
namespace {

constexpr int64_t kAlign = 256;  // as the device's own allocations begin

int64_t rounded(int64_t bytes, int64_t to = kAlign) { return (bytes + to - 1) / to * to; }

}  // namespace

Result<std::unique_ptr<Arena>> Arena::reserve(std::shared_ptr<Context> context, int64_t bytes, const NcclApi* nccl) {
  RT_CHECK(bytes > 0, "an arena of {} bytes", bytes);
  std::unique_ptr<Arena> out(new Arena(std::move(context), reserved_for(bytes, nccl != nullptr), nccl));
  const Context& on = *out->context_;
  RT_TRY(on.checked(on.select(), "cudaSetDevice").with(device_name(on.device())));
  RT_TRY(out->allocate().with(fmt::format("{} bytes on {}", out->bytes_, device_name(on.device()))));
  serve_heap(on.device(), out.get());
  RT_TRY(out->clear(out->bytes_));
  return out;
}

Status Arena::allocate() {
  void* memory = nullptr;
  const auto bytes = static_cast<size_t>(bytes_);
  if (nccl_ == nullptr) {
    RT_TRY(context_->checked(context_->api().allocate(&memory, bytes), "cudaMalloc"));
    memory_ = static_cast<std::byte*>(memory);
    return {};
  }
  if (const int error = nccl_->mem_alloc(&memory, bytes); error != kNcclOk) {
    context_->api().last_error();
    return Error{ErrorCode::kNoSpace,
                 fmt::format("ncclMemAlloc: {}: {}", nccl_->error_string(error), nccl_->last_error(nullptr))};
  }
  memory_ = static_cast<std::byte*>(memory);
  return check_pieces();
}

Status Arena::check_pieces() const {
  const auto refused = [](std::string why) {
    return Error{ErrorCode::kUnsupported, fmt::format("ncclMemAlloc: {}; do without: --comm nccl", why)};
  };
  const auto attribute = reinterpret_cast<PointerAttribute>(context_->driver_function(kPointerAttribute));
  const auto range = reinterpret_cast<AddressRange>(context_->driver_function(kAddressRange));
  if (attribute == nullptr || range == nullptr) {
    return refused(fmt::format("the driver has no {} or no {}", kPointerAttribute, kAddressRange));
  }
  const auto address = reinterpret_cast<unsigned long long>(memory_);
  int legacy = 0;
  unsigned long long first = 0;
  size_t bytes = 0;
  if (const int error = attribute(&legacy, kIsLegacyIpc, address); error != 0) {
    return refused(fmt::format("{} gives CUresult {}", kPointerAttribute, error));
  }
  if (legacy != 0) {
    return refused(
        "it gave memory of cudaMalloc, in which NCCL registers nothing: NCCL_CUMEM_ENABLE=0 in the "
        "environment or in nccl.conf, or a device without virtual memory");
  }
  if (const int error = range(&first, &bytes, address); error != 0) {
    return refused(fmt::format("{} gives CUresult {}", kAddressRange, error));
  }
  if (first == address && static_cast<int64_t>(bytes) == bytes_) return {};
  return refused(fmt::format("it took {} bytes, {} were planned in pieces of {}", bytes, bytes_, kNcclPiece));
}

Arena::~Arena() {
  if (memory_ == nullptr) return;
  serve_heap(context_->device(), nullptr);
  bool refused = context_->select() != 0;
  refused |= (nccl_ != nullptr ? nccl_->mem_free(memory_) : context_->api().free(memory_)) != 0;
  if (refused) context_->api().last_error();
}

int64_t Arena::bytes_for(std::span<const int64_t> blocks) {
  int64_t out = 0;
  for (const int64_t bytes : blocks) out += rounded(bytes);
  return out;
}

int64_t Arena::reserved_for(int64_t bytes, bool of_nccl) { return rounded(bytes, of_nccl ? kNcclPiece : kAlign); }

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
