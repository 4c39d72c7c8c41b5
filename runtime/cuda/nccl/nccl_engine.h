#pragma once
// Communication of arrays in devices' memory by NCCL, one rank a device. An operation is ordered on the stream that the
// calling thread orders on (runtime/comm/ordered_on.h) and has been done when that is settled; nothing waits before.
// Its errors are those of that settle, or of a later operation.
//
// Sums are taken in the order of ranks, or by a tree, with the bits of the host's engines: ranks exchange what is to be
// summed as NCCL's messages, and an own kernel adds it up. With NcclOptions::nccl_sums plain sums are NCCL's own, in an
// order of its own; maxima, which hand a NaN on, and trees stay as they are.
//
// A message has a communicator of its two ranks and its direction, and a stream of its own: in NCCL a send waits for
// its receiver, and isend() must not. Where devices begin what they are asked for in one order over all communicators
// (NCCL_LAUNCH_ORDER_IMPLICIT), a message that cannot begin yet keeps back what is asked for behind it: so there are as
// many communicators as messages must be under way.
//
// What lies in the host's memory goes by the host's engine, at once, without any order among it and what devices do;
// barriers too. The sizes of an all_to_all are compared by it first, which waits for the other ranks.
//
// Each operation has a deadline on the device, from when its stream has come to it (watcher.h).
//
// All calls of a rank come from one thread, in the order of the program. Ranks that run the same program, or programs
// whose messages have an order, so ask their devices in one common order, and no two of them can wait for each other
// (docs/cuda-communication.md). NCCL connects two ranks, and takes memory for it, when a communicator first has an
// operation of a kind. A group has one of each kind when it is made, so nothing of that is left for a step. Registered
// memory is mapped by the first operation that is not a small one, so then these are as large as the room for sums.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "runtime/comm/comm.h"
#include "runtime/comm/linked_engine.h"
#include "runtime/cuda/nccl_api.h"
#include "runtime/cuda/stream.h"
#include "runtime/device/pointer.h"
#include "runtime/kernels/cuda/rank_sums.h"

namespace cairn::cuda {

/// Which members of a group may send to each other.
enum class NcclPeers { kNone, kNeighbours, kAll };  // kNeighbours: in the group's order, first and last too

/// Memory of the device for what other ranks send to be summed: of the rank's own stream, and of the one that is beside
/// it. Larger operations go in parts, except that with NCCL's sums what reduce_scatter_add() adds has to fit. At least
/// 256 bytes for each rank of a group; all its members have the same.
struct NcclRooms {
  DeviceBytes own, beside;
};

struct NcclOptions {
  int64_t deadline_ms = 60000;
  std::function<NcclRooms()> rooms;  // asked when the first group is made
  /// Memory that is registered with each communicator, asked for with the rooms; empty: none is. All that NCCL is given
  /// lies in it. All ranks do so or none: NCCL leaves it undefined what else comes of it.
  std::function<DeviceBytes()> registered;
  bool nccl_sums = false;  // Sums::kNccl
  /// Blocks of the device that an operation of a group of this axis may take; empty or 0: what NCCL wants.
  std::function<int(std::string_view axis)> max_ctas;
  int max_message_ctas = 4;  // and a message
  /// Communicators of a direction between two ranks, which its messages take in turn: so many may be under way before
  /// what the sender asks for next waits for the receiver (runtime/plan/message_order.h).
  int64_t ways = 1;
  int64_t least_chunk_bytes = 0;  // comm::SideSums
  std::function<bool(const void*)> on_device;
  std::function<NcclPeers(std::string_view axis)> peers;  // empty: all
  /// Each rank is told of every axis of groups, by group() with as many members everywhere or by no_group(), in one
  /// order. Then communicators of groups are split off the world's.
  bool whole_axes = false;
  std::string host_name;  // of this host, for messages; empty: its own name
  /// By which the ranks of this host are seen, and whether the others have given up. Null: `host`, if it can be asked.
  comm::LinkedEngine* local = nullptr;
  /// Told once why the rank gives up, before its communicators are aborted, which may hang. From any thread; may be
  /// empty.
  std::function<void(const Error&)> on_failure;
};

/// `host`, `api`, `sums` and `rank` (the rank's stream) are borrowed and outlive the engine, which outlives its groups.
/// Waits until all ranks of the world have come. Errors: what NCCL cannot do.
Result<std::unique_ptr<comm::Engine>> make_nccl_engine(comm::Engine& host, const NcclApi& api,
                                                       const kernels::cuda::RankSums& sums, CudaStream& rank,
                                                       const NcclOptions& options);

}  // namespace cairn::cuda
