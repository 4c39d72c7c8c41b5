#pragma once
// Wraps a backend so that a long load or save ends when somebody asks for it: from then on no file is made or opened,
// and nothing is read or written any more (kStopped). What is in flight is waited for, and what tidies up, as removing
// what a save has written so far, goes on.

#include <functional>
#include <memory>

#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {

/// `stopped` is asked before each of these calls, on the thread that makes it. Empty: `inner` itself.
std::unique_ptr<IoBackend> make_stoppable(std::unique_ptr<IoBackend> inner, std::function<bool()> stopped);

}  // namespace cairn::ckpt
