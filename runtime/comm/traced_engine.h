#pragma once
// An engine whose groups draw each operation on the timeline of the calling thread (runtime/telemetry/trace.h), with
// group, bytes and, for messages, an arrow from send to receive. Made only when a trace is asked for: without one no
// operation pays for it.

#include <memory>

#include "runtime/comm/comm.h"

namespace cairn::comm {

/// `inner` is borrowed and outlives the engine and its groups.
std::unique_ptr<Engine> make_traced_engine(Engine& inner);

}  // namespace cairn::comm
