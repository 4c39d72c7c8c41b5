#pragma once
// What one stream of a rank lets the host do between a device's memory and the other ranks: pieces of communication, in
// the order in which they are asked for, each on its way through pinned memory.
//
// Life of a piece: 1. The lane's stream, behind what the rank's stream was asked for before, copies to pinned memory.
// 2. A thread of the lane waits for that copy and communicates. 3. Then it raises a word in pinned memory, for which
// the lane's stream waits; behind that come copies to the device, and the rank's stream follows those. So whoever asks
// waits for nothing, and the order is that of the calls. The thread is the only one that waits for other ranks: a
// function that the device's driver calls on the host may not, since the driver has few threads for all streams.
//
// After an error no later piece is communicated; their words are raised all the same, so that the device ends what it
// was asked for, and who settles the rank's stream is told (CudaStream::settle_with()).

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/comm/rank_thread.h"
#include "runtime/core/result.h"
#include "runtime/cuda/stream.h"

namespace cairn::cuda {

/// Pinned memory of one stream.
class PinnedRoom {
 public:
  /// `pinned` counts the bytes, in whole pages; it outlives this.
  PinnedRoom(const CudaStream& stream, std::atomic<int64_t>& pinned) : stream_(stream), pinned_(pinned) {}
  /// At least so many bytes, which are the same ones as before unless there were fewer. Those stay pinned: work that is
  /// ordered may still use them.
  std::byte* take(int64_t bytes);

 private:
  const CudaStream& stream_;
  std::atomic<int64_t>& pinned_;
  std::vector<std::shared_ptr<std::byte>> all_;
  int64_t bytes_ = 0;  // of the last
};

/// Threads: pieces are asked for by one thread at a time.
class StagingLane {
 public:
  /// Which piece: they count from 1.
  using Number = uint32_t;

  /// `beside`: a stream of the device. `pinned` counts what is pinned, and outlives the lane. Errors: what the device
  /// cannot do.
  static Result<std::unique_ptr<StagingLane>> make(const CudaStream& beside, comm::RankThread as,
                                                   std::atomic<int64_t>& pinned);
  /// Waits for the piece that communicates; those behind it are dropped. Give up the engine first if peers may not
  /// come.
  ~StagingLane();
  StagingLane(const StagingLane&) = delete;
  StagingLane& operator=(const StagingLane&) = delete;

  CudaStream& stream() { return *stream_; }
  /// Where a piece's bytes lie while it is under way. Pieces may share it: a copy to it is behind the piece before.
  std::byte* room(int64_t bytes) { return room_.take(bytes); }

  /// The thread does `work` behind all pieces before it, and, `behind_stream`, behind what the lane's stream was asked
  /// for.
  Number submit(std::function<Status()> work, bool behind_stream);
  /// The lane's stream comes behind that piece.
  void order_behind(Number piece) { stream_->follow(*done_, piece); }
  /// The host waits for it; its error, or an earlier one.
  Status wait(Number piece);
  /// For all of them.
  void drain();
  /// The first error of a piece.
  Status failed() const;

 private:
  StagingLane(std::unique_ptr<Stream> stream, comm::RankThread as, std::atomic<int64_t>& pinned);
  struct Piece {
    std::function<Status()> work;
    std::shared_ptr<const Event> behind;
  };
  void run();
  Status until_reached(const Event& event);

  const std::unique_ptr<Stream> owned_;
  CudaStream* const stream_;
  const comm::RankThread as_;
  PinnedRoom room_;
  const std::shared_ptr<std::byte> word_memory_;
  std::atomic<uint32_t>* const done_;  // pieces, counted round; in pinned memory, for which the stream waits
  mutable std::mutex mutex_;
  std::condition_variable submitted_, finished_;
  std::deque<Piece> pieces_;  // the front one is under way
  Number last_ = 0;
  Status failed_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace cairn::cuda
