#pragma once
// Communication among ranks: one interface, several engines (threads of one process, processes of one host through
// shared memory, processes of several hosts through Gloo). One conformance suite, tests/runtime/comm, runs over all.
//
// Every operation has a name and a deadline. When a peer dies, or the run is aborted, every rank that waits gets an
// Error (kPeerLost, kTimeout, kStopped) which says rank, group, operation; nothing waits for ever.
// Reductions are deterministic: contributions are added in group-rank order 0..n-1 (or by a tree of them, kTreeSum), in
// float32 for bf16 and f16 payloads, so every member gets the same bits and a rerun gets them again. An engine may keep
// another order (Engine::keeps_rank_order()); what needs this one asks. A Comm is driven
// by one thread at a time; different Comms of a rank may be driven by different threads. Members call the same
// collectives in the same order.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/traffic.h"
#include "runtime/device/guard.h"
#include "runtime/device/pointer.h"

namespace cairn::comm {

/// kTreeSum adds by a balanced tree instead of in rank order: ((0 + 1) + (2 + 3)) + ... So ranks that each hold the
/// root of an equal subtree of a larger tree get the larger tree's bits, however many they are.
enum class ReduceOp { kSum, kMax, kTreeSum };

/// A run of bytes that goes to a member of a group, or comes from it.
struct OutPart {
  int64_t peer = 0;
  const void* data = nullptr;
  int64_t bytes = 0;

  static OutPart of(int64_t peer, DevicePtr<const void> data, int64_t bytes) { return {peer, data.address(), bytes}; }
};
struct InPart {
  int64_t peer = 0;
  void* data = nullptr;
  int64_t bytes = 0;

  static InPart of(int64_t peer, DevicePtr<void> data, int64_t bytes) { return {peer, data.address(), bytes}; }
};

/// A group of ranks. Ranks below are group ranks, 0..size()-1.
class Comm {
 public:
  virtual ~Comm() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  virtual const std::string& name() const = 0;  // "tp[0,1]"

  /// In place. `count` elements of `dtype` (f32, bf16, f16, f64, i64).
  virtual Status all_reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) = 0;
  /// `input` holds size() chunks of `count_per_rank`; chunk rank() of the sum goes to `output`, which may be that very
  /// chunk of `input` (in place) and otherwise must not overlap it.
  virtual Status reduce_scatter(const void* input, void* output, int64_t count_per_rank, DType dtype, ReduceOp op,
                                std::string_view what) = 0;
  /// Adds chunk rank() of the sum to `output`, which must not overlap `input`: output, then the members' chunks in
  /// order. So sums that are taken one input after another are the same bits, however the inputs lie on the members.
  /// Each input may lie on `tree` neighbours, as roots of equal subtrees: those are added as kTreeSum does. It divides
  /// size().
  virtual Status reduce_scatter_add(const void* input, void* output, int64_t count_per_rank, DType dtype, int64_t tree,
                                    std::string_view what) = 0;
  /// `output` receives size() chunks; `input` may be chunk rank() of it (in place). Moves bytes: any dtype.
  virtual Status all_gather(const void* input, void* output, int64_t bytes_per_rank, std::string_view what) = 0;
  virtual Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) = 0;
  /// Every member sends bytes of its own choice to every member, itself included: the parts for a peer in the order
  /// given, which fill the parts that the peer takes from this rank, in its order. Parts may be cut differently on the
  /// two sides, but their bytes must add up to the same (kInternal otherwise). Both lists are in the order of peers;
  /// parts of zero bytes and peers without parts are allowed. No incoming part may overlap another part.
  virtual Status all_to_all(std::span<const OutPart> out, std::span<const InPart> in, std::string_view what) = 0;
  virtual Status barrier(std::string_view what) = 0;

  /// Point to point, ordered per (source, destination). isend takes the bytes or remembers the buffer, which must stay
  /// untouched until wait_sends(); it never blocks on the receiver. recv blocks until the message is there; the sizes
  /// must agree (kInternal otherwise). Any blocking call of this Comm also moves pending sends along.
  virtual Status isend(const void* data, int64_t bytes, int64_t dst, std::string_view what) = 0;
  virtual Status recv(void* data, int64_t bytes, int64_t src, std::string_view what) = 0;
  virtual Status wait_sends(std::string_view what) = 0;
  /// Until at most `may_stay` messages to `dst`, the newest, still need their buffers: who sends from a ring of n
  /// buffers waits with may_stay = n - 1 before the next one is filled.
  virtual Status wait_sends_to(int64_t dst, int64_t may_stay, std::string_view what) = 0;

  /// What this rank has put in since creation; the plan predicts it (plan/communication.h). A group of one moves
  /// nothing and counts nothing; nor do recv, wait_sends and barrier. Not locked: ask between operations.
  using Traffic = cairn::Traffic;
  using Volume = cairn::Volume;
  virtual Traffic traffic() const = 0;

  // The same on a device's memory, ordered after the work that was asked for before. An engine of the host's memory
  // finds it done.
  Status all_reduce(DevicePtr<void> data, int64_t count, DType dtype, ReduceOp op, std::string_view what) {
    const DeviceAccess inside;
    return all_reduce(data.address(), count, dtype, op, what);
  }
  Status reduce_scatter(DevicePtr<const void> input, DevicePtr<void> output, int64_t count_per_rank, DType dtype,
                        ReduceOp op, std::string_view what) {
    const DeviceAccess inside;
    return reduce_scatter(input.address(), output.address(), count_per_rank, dtype, op, what);
  }
  Status reduce_scatter_add(DevicePtr<const void> input, DevicePtr<void> output, int64_t count_per_rank, DType dtype,
                            int64_t tree, std::string_view what) {
    const DeviceAccess inside;
    return reduce_scatter_add(input.address(), output.address(), count_per_rank, dtype, tree, what);
  }
  Status all_gather(DevicePtr<const void> input, DevicePtr<void> output, int64_t bytes_per_rank,
                    std::string_view what) {
    const DeviceAccess inside;
    return all_gather(input.address(), output.address(), bytes_per_rank, what);
  }
  Status isend(DevicePtr<const void> data, int64_t bytes, int64_t dst, std::string_view what) {
    const DeviceAccess inside;
    return isend(data.address(), bytes, dst, what);
  }
  Status recv(DevicePtr<void> data, int64_t bytes, int64_t src, std::string_view what) {
    const DeviceAccess inside;
    return recv(data.address(), bytes, src, what);
  }
};

/// One per rank: makes the groups this rank belongs to. Members of a group call group() with equal arguments, and all
/// ranks create the groups they share in the same order.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual int64_t world_rank() const = 0;
  virtual int64_t world_size() const = 0;
  virtual Result<std::unique_ptr<Comm>> group(std::string_view axis, const std::vector<int64_t>& world_ranks) = 0;
  /// This rank is in none of the groups of the axis that others make now, at this place of the order.
  virtual Status no_group(std::string_view /*axis*/) { return {}; }
  /// A group for results that no order of additions changes, so that an engine may reduce by any tree: maxima, sums of
  /// i64, sums of f64 that hold integers below 2^53 / size() (core/exact_sum.h) or are not finite; broadcasts and
  /// barriers. They give the bits that group() gives (of a NaN: a NaN). Anything else is a mistake: RT_CHECK.
  virtual Result<std::unique_ptr<Comm>> exact_group(std::string_view axis, const std::vector<int64_t>& world_ranks);
  /// Whether what group() makes adds floats in the order that Comm promises. An engine that adds in an order of its own
  /// gives every member the same bits all the same, and a rerun too, but not those of one rank: reduce_scatter_add()
  /// adds the members' sum in one piece.
  virtual bool keeps_rank_order() const = 0;
  /// Wakes every rank that waits, here and elsewhere, with `kStopped` and this reason. Safe from any thread.
  virtual void abort(std::string_view reason) = 0;
  /// Like abort(), with any code; the reason is taken as it stands. With another code than kStopped the others get
  /// kPeerLost. Safe from any thread.
  virtual void give_up(ErrorCode code, std::string_view reason) = 0;
  /// Where this rank is, for messages and reports about it: "step 12, forward and backward". Cheap.
  virtual void at(int64_t /*step*/, std::string_view /*phase*/) {}
};

struct Options {
  int64_t deadline_ms = 60000;  // of each wait
};

}  // namespace cairn::comm
