#include "runtime/cuda/timer.h"

#include "runtime/core/check.h"

namespace cairn::cuda {

CudaTimer::~CudaTimer() {
  bool refused = context_->select() != 0;
  if (last_ != nullptr) free_.push_back(last_);
  for (const std::vector<EventHandle>* const events : {&marked_, &free_}) {
    for (const EventHandle event : *events) refused |= context_->api().destroy_event(event) != 0;
  }
  if (refused) context_->api().last_error();
}

void CudaTimer::mark() {
  if (!stream_.ready()) return;
  EventHandle event = nullptr;
  if (!free_.empty()) {
    event = free_.back();
    free_.pop_back();
  } else {
    stream_.keep(context_->api().create_event(&event, kBlockingSync), "cudaEventCreate");
    if (!stream_.ok()) return;
  }
  marked_.push_back(event);
  stream_.keep(context_->api().record(event, stream_.handle()), "cudaEventRecord");
}

Status CudaTimer::read(std::span<double> ms) {
  if (!stream_.ready()) return stream_.status();
  RT_CHECK(ms.size() <= marked_.size(), "{} moments of {}", ms.size(), marked_.size());
  for (size_t i = 0; i < ms.size(); ++i) {
    float since = 0;
    if (last_ != nullptr) {
      stream_.keep(context_->api().elapsed(&since, last_, marked_[i]), "cudaEventElapsedTime");
      free_.push_back(last_);
    }
    last_ = marked_[i];
    ms[i] = static_cast<double>(since);
  }
  marked_.erase(marked_.begin(), marked_.begin() + std::ssize(ms));
  return stream_.status();
}

}  // namespace cairn::cuda
