#pragma once
// The seam between the executor's parts: the block that runs, and how its threads wait and stop.

#include <cstdint>
#include <functional>
#include <string>

#include "tests/simt/executor.h"

namespace cairn::simt {

/// The thread that runs, until `condition` holds. The executor asks it at each of the thread's turns.
void wait_until(const std::function<bool()>& condition, Place place);
/// Ends the launch, from one of its threads.
[[noreturn]] void stop_launch(std::string what);
/// The block's dynamic shared memory.
char* dynamic_begin(int64_t* bytes);
std::string place_text(Place place);

// warpgroups.cc
/// A block of `threads` begins.
void begin_block(int threads);
/// Copies and products that a thread or block leaves under way at its end; "": none.
std::string left_by_thread(int thread);
std::string left_by_block();

}  // namespace cairn::simt
