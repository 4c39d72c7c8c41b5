#pragma once
// The stage's buffers inside the memory that the caller gave: each where the plan's list puts it.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/plan/activations.h"

namespace cairn {
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
}  // namespace cairn

namespace cairn::nn {

class Buffers {
 public:
  /// Errors: kInternal when `memory` is not stage_buffers_bytes() long or not aligned to kBufferAlignBytes.
  static Result<Buffers> lay_out(const Plan& plan, const RankPlan& rank, std::span<std::byte> memory);

  /// The buffer of that name in the list; `slot` 0 for scratch. A name that is not in the list, another type or a slot
  /// out of range is our own mistake.
  template <typename Real>
  Real* get(std::string_view name, int64_t slot = 0) const {
    return reinterpret_cast<Real*>(find(name, DTypeOf<Real>::value, slot));
  }

  /// Bytes from the first buffer to the end of the last.
  int64_t size_bytes() const { return size_bytes_; }

 private:
  struct Placed {
    BufferSpec spec;
    std::byte* start = nullptr;
  };
  std::byte* find(std::string_view name, DType dtype, int64_t slot) const;

  std::vector<Placed> placed_;
  int64_t size_bytes_ = 0;
};

}  // namespace cairn::nn
