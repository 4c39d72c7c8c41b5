#pragma once
// On which stream the calling thread's communication is ordered: a job's of a lane on the lane's, all else on the
// rank's own. An engine for a device's memory asks; one of the host's memory has nothing to order.

#include <utility>

#include "runtime/device/stream.h"

namespace cairn::comm {

/// Of the calling thread; null: the rank's own.
inline Stream*& ordering_stream() {
  thread_local Stream* stream = nullptr;
  return stream;
}

/// While it lives.
class OrderedOn {
 public:
  explicit OrderedOn(Stream& stream) : before_(std::exchange(ordering_stream(), &stream)) {}
  ~OrderedOn() { ordering_stream() = before_; }
  OrderedOn(const OrderedOn&) = delete;
  OrderedOn& operator=(const OrderedOn&) = delete;

 private:
  Stream* const before_;
};

}  // namespace cairn::comm
