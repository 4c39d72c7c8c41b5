#pragma once
// Bytes of views for many clients: blocks are made once, kept a while, and the next one of a client that reads on is
// made before it is asked for.
//
// Threads: read() may be called from any, several at once; two threads of its own read ahead.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "converters/hf_view.h"
#include "runtime/core/result.h"

namespace cairn::tools {

class ViewReader {
 public:
  explicit ViewReader(int64_t kept_bytes);
  ~ViewReader();
  ViewReader(const ViewReader&) = delete;

  /// Bytes of a file from `offset` on, at least one: up to the end of a block, of the file or of `into`. `offset` lies
  /// in the file. Errors: those of HfView::block().
  Result<int64_t> read(const std::shared_ptr<const convert::HfView>& view, const convert::ViewFile& file,
                       int64_t offset, std::span<std::byte> into);
  void forget(const convert::HfView& view) { store_.forget(view.id()); }

 private:
  struct Order {
    std::shared_ptr<const convert::HfView> view;
    int64_t weights = 0, block = 0;
  };
  void order(Order next);
  void work();

  convert::BlockStore store_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Order> orders_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace cairn::tools
