#pragma once
// A group of a device's ranks that can sum one chunk of rows while the next is computed: its sums have a stream of
// their own. Products of a chunk may have other bits than those of all rows, so all engines of devices divide alike;
// one that communicates through the host sums a chunk when it is asked to.

#include <cstdint>
#include <string_view>

#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/device/pointer.h"

namespace cairn::comm {

/// A run's. The number was measured on no device.
constexpr int64_t kLeastSumChunk = int64_t{8} << 20;

class SideSums {
 public:
  virtual ~SideSums() = default;
  /// Bytes that make a chunk worth an operation of its own. 0: sums are not taken in chunks, which would have other
  /// bits, or the calling thread orders on another stream than the rank's.
  virtual int64_t least_chunk_bytes() const = 0;
  /// all_reduce() by kSum, with its bits, behind all that the rank's stream was asked for before. Its later work
  /// does not wait, and does not touch `data` until join_sums().
  virtual Status sum_beside(DevicePtr<void> data, int64_t count, DType dtype, std::string_view what) = 0;
  /// Later work of the rank's stream comes behind all of these sums.
  virtual Status join_sums() = 0;
};

}  // namespace cairn::comm
