#include "runtime/cuda/staged/staging_lane.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "runtime/core/check.h"
#include "runtime/device/staging_rooms.h"

namespace cairn::cuda {

std::byte* PinnedRoom::take(int64_t bytes) {
  if (all_.empty() || bytes > bytes_) {
    bytes_ = std::max<int64_t>(bytes, 2 * bytes_);
    all_.push_back(stream_.host_memory(bytes_));
    pinned_ += StagingRooms::pages(bytes_);
  }
  return all_.back().get();
}

StagingLane::StagingLane(std::unique_ptr<Stream> stream, comm::RankThread as, std::atomic<int64_t>& pinned)
    : owned_(std::move(stream)),
      stream_(&cuda_stream(*owned_)),
      as_(as),
      room_(*stream_, pinned),
      word_memory_(stream_->host_memory(sizeof(std::atomic<uint32_t>))),
      done_(new (word_memory_.get()) std::atomic<uint32_t>(0)) {
  pinned += StagingRooms::kPage;
}

Result<std::unique_ptr<StagingLane>> StagingLane::make(const CudaStream& beside, comm::RankThread as,
                                                       std::atomic<int64_t>& pinned) {
  std::unique_ptr<StagingLane> out(new StagingLane(beside.beside(), as, pinned));
  RT_TRY(out->stream_->can_follow(*out->done_).with("communication through the host's memory"));
  out->thread_ = std::thread([lane = out.get()] { lane->run(); });
  return out;
}

StagingLane::~StagingLane() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  submitted_.notify_one();
  thread_.join();
  done_->store(last_, std::memory_order_release);  // the stream ends what it was asked for, in memory that goes
  ignore(stream_->settle(), "the rank's stream has followed it");
}

Status StagingLane::until_reached(const Event& event) {
  const auto begin = std::chrono::steady_clock::now();
  constexpr auto kSpin = std::chrono::microseconds(200), kNap = std::chrono::microseconds(20);
  while (!stop_) {
    RT_TRY_SET(const bool reached, is_reached(event));
    if (reached) return {};
    if (std::chrono::steady_clock::now() - begin > kSpin) std::this_thread::sleep_for(kNap);
  }
  return Error{ErrorCode::kStopped, "communication of a rank that leaves"};
}

void StagingLane::run() {
  comm::current_rank_thread() = as_;
  std::unique_lock lock(mutex_);
  for (;;) {
    submitted_.wait(lock, [&] { return stop_ || !pieces_.empty(); });
    if (stop_) return;
    Status status;
    if (failed_.ok()) {
      const Piece piece = std::move(pieces_.front());
      lock.unlock();
      if (piece.behind != nullptr) status = until_reached(*piece.behind);
      if (status.ok()) status = piece.work();
      lock.lock();
    }
    pieces_.pop_front();
    if (failed_.ok()) failed_ = std::move(status);
    done_->fetch_add(1, std::memory_order_release);
    finished_.notify_all();
  }
}

StagingLane::Number StagingLane::submit(std::function<Status()> work, bool behind_stream) {
  Piece piece{std::move(work), behind_stream ? stream_->mark() : nullptr};
  Number out = 0;
  {
    const std::lock_guard lock(mutex_);
    pieces_.push_back(std::move(piece));
    out = ++last_;
  }
  submitted_.notify_one();
  return out;
}

Status StagingLane::wait(Number piece) {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return static_cast<int32_t>(done_->load(std::memory_order_relaxed) - piece) >= 0; });
  return failed_;
}

void StagingLane::drain() { ignore(wait(last_), "it is told where its result is asked for"); }

Status StagingLane::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

}  // namespace cairn::cuda
