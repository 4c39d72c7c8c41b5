#pragma once
// Runs kernels (runtime/kernels/cuda/simt.h) on a CPU: a block at a time, each of its threads a fiber that runs until
// it waits for others. Shared memory is full of NaN when a block begins, and the device's when it is allocated, so that
// what no thread has written shows in results.
//
// A launch that no device would carry out as written ends in a Stop, thrown from launch(): threads that wait for each
// other for ever, lanes of a warp at different exchanges, lanes named that have ended or do not take part, threads that
// ended before a barrier which others wait at, or are at different ones; packs that are not aligned; copies to shared
// memory that a thread has not waited for when it ends; too many threads, too much shared memory.
//
// Threads: each OS thread has an executor of its own.

#include <array>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "runtime/kernels/cuda/simt.h"

namespace cairn::simt {

/// In which order blocks run, and threads of a block between two barriers.
struct Order {
  enum class Kind { kForward, kReverse, kShuffled };
  Kind kind = Kind::kForward;
  uint64_t seed = 0;
  const char* name = "forward";
};
constexpr std::array<Order, 5> kOrders = {
    Order{}, Order{Order::Kind::kReverse, 0, "reverse"}, Order{Order::Kind::kShuffled, 1, "shuffled by 1"},
    Order{Order::Kind::kShuffled, 2, "shuffled by 2"}, Order{Order::Kind::kShuffled, 3, "shuffled by 3"}};
/// Of this thread's launches from now on.
void set_order(const Order& order);

/// Whether this process's launches are on a card with warpgroups (runtime/kernels/cuda/warpgroup_units.h). At first
/// not.
void give_warpgroups(bool has);

class Stop : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Where all launches go instead of being carried out at once; empty: no longer. Gives a cudaError_t.
using Taker = std::function<int(CUstream_st* stream, const Launch& launch, std::function<void()> work)>;
void take_launches(Taker taker);

struct Counts {
  int64_t launches = 0, blocks = 0, switches = 0;
};
/// Of this thread, since it was last asked.
Counts take_counts();

// --- for the watch (watch.h)
// ------------------------------------------------------------------------------------------

/// The thread of a kernel that runs; null: host code does.
struct Fiber {
  Here here;
  int number = 0;           // in the block
  uint32_t epoch = 0;       // barriers of the block passed
  uint32_t warp_epoch = 0;  // exchanges of its whole warp passed
  const char* stack = nullptr;
  const char* stack_end = nullptr;
};
extern constinit thread_local Fiber* running;
/// Of the launch that runs.
int64_t block_number();

}  // namespace cairn::simt
