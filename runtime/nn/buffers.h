#pragma once
// The stage's buffers inside the memory that the caller gave: each where the plan's list puts it.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/core/check.h"
#include "runtime/core/result.h"
#include "runtime/device/pointer.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/buffer_names.h"

namespace cairn {
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
}  // namespace cairn

namespace cairn::nn {

/// The copies of one buffer.
template <typename Real>
struct Copies {
  DevicePtr<Real> first;
  int64_t stride_elems = 0, count = 0;

  explicit operator bool() const { return static_cast<bool>(first); }
  DevicePtr<Real> at(int64_t copy) const {
    RT_CHECK(copy >= 0 && copy < count, "copy {} of {}", copy, count);
    return first + copy * stride_elems;
  }
};

class Buffers {
 public:
  /// Errors: kInternal when `memory` is not stage_buffers_bytes() long or not aligned to kBufferAlignBytes.
  static Result<Buffers> lay_out(const Plan& plan, const RankPlan& rank, DeviceBytes memory);

  /// The buffer of that name in the list; `slot` 0 for scratch. A name that is not in the list, another type or a slot
  /// out of range is our own mistake.
  template <typename Real>
  DevicePtr<Real> get(std::string_view name, int64_t slot = 0) const {
    const Copies<Real> all = copies<Real>(name);
    RT_CHECK(all, "no buffer {} in the plan", name);
    return all.at(slot);
  }

  /// All copies of the buffer of that name, or nothing when the list has none.
  template <typename Real>
  Copies<Real> copies(std::string_view name) const {
    const Placed* placed = find(name, DTypeOf<Real>::value);
    if (placed == nullptr) return {};
    return {placed->start.template as<Real>(), placed->spec.bytes() / static_cast<int64_t>(sizeof(Real)),
            placed->spec.copies};
  }

  /// Bytes from the first buffer to the end of the last.
  int64_t size_bytes() const { return size_bytes_; }

 private:
  struct Placed {
    BufferSpec spec;
    DevicePtr<std::byte> start;
  };
  /// Null when the list has no such name.
  const Placed* find(std::string_view name, DType dtype) const;

  std::vector<Placed> placed_;
  int64_t size_bytes_ = 0;
};

}  // namespace cairn::nn
