#include "runtime/comm/shm_world.h"

#include <utility>

#include "runtime/comm/segment_comm.h"
#include "runtime/comm/thread_world.h"

namespace cairn::comm {

Result<ShmWorld> ShmWorld::create(const ShmWorldConfig& config) {
  Fd fd;
  RT_TRY_SET(auto segment, Segment::create_memfd(config, &fd));
  const int64_t bytes = segment->header().total_bytes;
  return ShmWorld(std::move(fd), std::move(segment), bytes);
}

int64_t ShmWorld::used_bytes() const { return segment_->used_bytes(); }

void ShmWorld::abort(std::string_view reason, ErrorCode code) { segment_->abort(code, reason); }

bool ShmWorld::aborted() const { return segment_->aborted(); }

std::string ShmWorld::abort_reason() const {
  return segment_->aborted() ? segment_->abort_error().message : std::string();
}

std::vector<RankView> ShmWorld::ranks() const {
  std::vector<RankView> views;
  for (int64_t r = 0; r < segment_->world_size(); ++r) {
    RankSlot& slot = segment_->slot(r);
    RankView view;
    static_cast<OperationView&>(view) = segment_->view(slot.operations[static_cast<int>(RankThread::kMain)]);
    view.beside = segment_->view(slot.operations[static_cast<int>(RankThread::kLane)]);
    view.pid = slot.pid.load();
    view.closed = slot.state.load() == static_cast<uint32_t>(RankState::kClosed);
    view.step = slot.placed.load() != 0 ? slot.step.load(std::memory_order_relaxed) : -1;
    view.phase = segment_->phase(r);
    view.description = segment_->describe_operation(r);
    views.push_back(std::move(view));
  }
  return views;
}

Result<std::unique_ptr<LinkedEngine>> attach_linked_shm_engine(int fd, int64_t rank, Options options) {
  RT_TRY_SET(auto segment, Segment::attach(fd));
  RT_TRY(claim_rank(*segment, rank));
  return std::unique_ptr<LinkedEngine>(std::make_unique<SegmentEngine>(std::move(segment), rank, options));
}

Result<std::unique_ptr<Engine>> attach_shm_engine(int fd, int64_t rank, Options options) {
  RT_TRY_SET(auto engine, attach_linked_shm_engine(fd, rank, options));
  return std::unique_ptr<Engine>(std::move(engine));
}

ThreadWorld::ThreadWorld(int64_t size, Options options) : ThreadWorld(ShmWorldConfig{.world_size = size}, options) {}

ThreadWorld::ThreadWorld(const ShmWorldConfig& config, Options options) : options_(options) {
  auto segment = Segment::create_anonymous(config);
  RT_CHECK(segment.ok(), "{}", segment.error().message);
  segment_ = std::move(segment).value();
}

std::unique_ptr<Engine> ThreadWorld::engine(int64_t rank) {
  const Status claimed = claim_rank(*segment_, rank);
  RT_CHECK(claimed.ok(), "{}", claimed.error().message);
  return std::make_unique<SegmentEngine>(segment_, rank, options_);
}

}  // namespace cairn::comm
