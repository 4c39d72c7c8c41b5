#include "tools/serve/view_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/core/no_signals.h"

namespace cairn::tools {
namespace {

constexpr int kThreads = 2;
constexpr size_t kMostOrders = 16;
constexpr int64_t kReadsOn = int64_t{512} << 10;  // into a block: then the next ones are made too

}  // namespace

ViewReader::ViewReader(int64_t kept_bytes) : store_(kept_bytes) {
  const NoSignals none;
  for (int k = 0; k < kThreads; ++k) threads_.emplace_back([this] { work(); });
}

ViewReader::~ViewReader() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Result<int64_t> ViewReader::read(const std::shared_ptr<const convert::HfView>& view, const convert::ViewFile& file,
                                 int64_t offset, std::span<std::byte> into) {
  if (file.weights < 0) {
    const size_t n = std::min(into.size(), file.text.size() - static_cast<size_t>(offset));
    std::memcpy(into.data(), file.text.data() + offset, n);
    return static_cast<int64_t>(n);
  }
  const int64_t block = offset / view->block_bytes(), within = offset % view->block_bytes();
  for (int64_t next = block + 1; within >= kReadsOn && next <= block + kThreads; ++next) {
    if (next * view->block_bytes() < file.bytes) order({view, file.weights, next});
  }
  RT_TRY_SET(const convert::BlockStore::Bytes bytes, store_.get(view, file.weights, block));
  const auto n = std::min<int64_t>(std::ssize(into), std::ssize(*bytes) - within);
  std::memcpy(into.data(), bytes->data() + within, static_cast<size_t>(n));
  return n;
}

void ViewReader::order(Order next) {
  if (store_.has(next.view->id(), next.weights, next.block)) return;
  {
    const std::lock_guard lock(mutex_);
    const bool there = std::ranges::any_of(orders_, [&](const Order& one) {
      return one.view == next.view && one.weights == next.weights && one.block == next.block;
    });
    if (there || orders_.size() >= kMostOrders) return;
    orders_.push_back(std::move(next));
  }
  changed_.notify_one();
}

void ViewReader::work() {
  for (;;) {
    Order next;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || !orders_.empty(); });
      if (ends_) return;
      next = std::move(orders_.front());
      orders_.pop_front();
    }
    const auto made = store_.get(next.view, next.weights, next.block);
    if (!made.ok()) ignore(made.error(), "the read that needs it meets the same error");
  }
}

}  // namespace cairn::tools
