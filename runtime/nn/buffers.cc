#include "runtime/nn/buffers.h"

#include <fmt/format.h>

namespace cairn::nn {

Result<Buffers> Buffers::lay_out(const Plan& plan, const RankPlan& rank, DeviceBytes memory) {
  Buffers out;
  for (BufferSpec& spec : stage_buffers(plan, rank)) {
    const DevicePtr<std::byte> start = memory.first + out.size_bytes_;
    out.size_bytes_ += spec.bytes() * spec.copies;
    out.placed_.push_back({std::move(spec), start});
  }
  if (memory.size != out.size_bytes_) {
    return Error{ErrorCode::kInternal, fmt::format("the activations of rank {} take {} bytes, the memory given has {}",
                                                   rank.rank, out.size_bytes_, memory.size)};
  }
  if (!memory.first.aligned_to(kBufferAlignBytes)) {
    return Error{ErrorCode::kInternal,
                 fmt::format("the memory for activations is not aligned to {} bytes", kBufferAlignBytes)};
  }
  return out;
}

const Buffers::Placed* Buffers::find(std::string_view name, DType dtype) const {
  for (const Placed& placed : placed_) {
    if (placed.spec.name != name) continue;
    RT_CHECK(placed.spec.dtype == dtype, "buffer {} is {}, asked for {}", name, dtype_name(placed.spec.dtype),
             dtype_name(dtype));
    return &placed;
  }
  return nullptr;
}

}  // namespace cairn::nn
