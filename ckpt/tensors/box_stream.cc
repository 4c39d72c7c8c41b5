#include "ckpt/tensors/box_stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "runtime/core/dtype.h"

namespace cairn::ckpt {

StreamItem stream_item(const Manifest& manifest, int64_t tensor, Box box) {
  const int64_t elem_bytes = dtype_size_bytes(manifest.tensors[static_cast<size_t>(tensor)].dtype);
  const int64_t bytes = box.count_elems() * elem_bytes;
  return {tensor, std::make_shared<const Box>(std::move(box)), bytes, elem_bytes};
}

Status check_chunks_fit(const Manifest& source, int64_t window_bytes, int64_t* largest_chunk) {
  *largest_chunk = 0;
  for (const ShardEntry& shard : source.shards) {
    const int64_t chunk = std::min(shard.chunk_bytes, shard.bytes);
    *largest_chunk = std::max(*largest_chunk, chunk);
    if (chunk <= window_bytes) continue;
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("{} has chunks of {} bytes, which are read whole, and a window is of {} bytes: more memory "
                    "is needed",
                    describe_shard(source, shard), chunk, window_bytes)};
  }
  return {};
}

namespace {

struct Place {
  int64_t item = 0, offset = 0;
  bool operator==(const Place&) const = default;
};

/// Consecutive bytes of the items, in memory.
class Window {
 public:
  explicit Window(int64_t budget_bytes)
      : budget_bytes_(std::max(budget_bytes, kIoAlign)),
        granule_bytes_(std::min(std::clamp<int64_t>(budget_bytes_ / 128, 32 << 10, 1 << 20), budget_bytes_)) {}

  Place begin() const { return begin_; }
  Place end() const { return end_; }
  void clear() { extents_.clear(); }

  /// Bytes from `place` on, as many as there are and fit.
  std::span<const std::byte> find(Place place) const {
    const auto after =
        std::upper_bound(extents_.begin(), extents_.end(), place, [](const Place& key, const Extent& extent) {
          return std::pair(key.item, key.offset) < std::pair(extent.item, extent.offset);
        });
    if (after == extents_.begin()) return {};
    const Extent& extent = *(after - 1);
    const int64_t within = place.offset - extent.offset;
    if (extent.item != place.item || within >= extent.bytes) return {};
    return std::span<const std::byte>(memory_.get() + extent.at + within, static_cast<size_t>(extent.bytes - within));
  }

  /// Fills the window from `place` on.
  Status load(CheckpointReader& reader, const LoadPlanner& planner, const std::vector<StreamItem>& items,
              const std::vector<std::pair<int64_t, int64_t>>& shard_starts, Place place) {
    // Where source and items cut across each other a range may be a few bytes long, and its bookkeeping longer.
    constexpr int64_t kRangeBytes = sizeof(ReadRange) + 80 + 40;  // the reader's piece, the planner's read
    if (!memory_) {
      int64_t all = 0;
      for (const StreamItem& item : items) all += item.bytes + kIoAlign;
      capacity_ = std::min(budget_bytes_, all);
      memory_.reset(
          static_cast<std::byte*>(std::aligned_alloc(kIoAlign, (capacity_ + kIoAlign - 1) / kIoAlign * kIoAlign)));
      if (!memory_) {
        return Error{ErrorCode::kUnavailable, fmt::format("no memory for a window of {} bytes", capacity_), ENOMEM};
      }
    }
    extents_.clear();
    ranges_.clear();
    begin_ = end_ = place;
    int64_t used = 0;
    for (; end_.item < static_cast<int64_t>(items.size()); ++end_.item, end_.offset = 0) {
      const StreamItem& item = items[static_cast<size_t>(end_.item)];
      while (end_.offset < item.bytes) {
        const int64_t bytes = std::min(granule_bytes_ / item.elem_bytes * item.elem_bytes, item.bytes - end_.offset);
        const int64_t spent = used + static_cast<int64_t>(ranges_.size()) * kRangeBytes;
        if (!extents_.empty() && (spent + bytes > budget_bytes_ || used + bytes > capacity_))
          return reader.read_ranges(ranges_);
        RT_TRY(plan(reader.manifest(), planner, shard_starts, item, end_.offset, bytes, memory_.get() + used));
        if (!extents_.empty() && extents_.back().item == end_.item) {
          extents_.back().bytes += bytes;
        } else {
          extents_.push_back({end_.item, end_.offset, bytes, used});
        }
        used += bytes;
        end_.offset += bytes;
      }
      used = (used + kIoAlign - 1) / kIoAlign * kIoAlign;  // aligned, a whole chunk can be read where it belongs
    }
    return reader.read_ranges(ranges_);
  }

 private:
  // Bytes [offset, offset + bytes) of an item stand at `at` of the memory.
  struct Extent {
    int64_t item, offset, bytes, at;
  };
  struct Freer {
    void operator()(void* p) const { std::free(p); }
  };

  /// Adds the reads for bytes [offset, offset + bytes) of an item.
  Status plan(const Manifest& manifest, const LoadPlanner& planner,
              const std::vector<std::pair<int64_t, int64_t>>& shard_starts, const StreamItem& item, int64_t offset,
              int64_t bytes, std::byte* to) {
    const TensorEntry& tensor = manifest.tensors[static_cast<size_t>(item.tensor)];
    std::vector<WantedBox> wanted;
    std::vector<std::byte*> starts;
    const int64_t from = item.begin + offset;
    for (Box& box :
         boxes_of_flat_range(item.box->extents(), from / item.elem_bytes, (from + bytes) / item.elem_bytes)) {
      starts.push_back(to);
      to += box.count_elems() * item.elem_bytes;
      for (size_t d = 0; d < box.lo.size(); ++d) {
        box.lo[d] += item.box->lo[d];
        box.hi[d] += item.box->lo[d];
      }
      wanted.push_back({tensor.kind, tensor.name, std::move(box)});
    }
    RT_TRY_SET(const std::vector<LoadRead> reads, planner.plan_reads(wanted));
    for (const LoadRead& read : reads) {
      std::byte* dst = starts[static_cast<size_t>(read.wanted)] + read.target_offset;
      // One range instead of two, so that a whole chunk is seen as one; a range stays within one shard.
      if (!ranges_.empty() && ranges_.back().file == read.file &&
          ranges_.back().offset + ranges_.back().bytes == read.offset &&
          ranges_.back().dst + ranges_.back().bytes == dst &&
          !std::binary_search(shard_starts.begin(), shard_starts.end(), std::pair(read.file, read.offset))) {
        ranges_.back().bytes += read.bytes;
      } else {
        ranges_.push_back({read.file, read.offset, read.bytes, dst});
      }
    }
    return {};
  }

  int64_t budget_bytes_, granule_bytes_, capacity_ = 0;
  std::unique_ptr<std::byte, Freer> memory_;
  std::vector<Extent> extents_;  // ascending
  std::vector<ReadRange> ranges_;
  Place begin_, end_;
};

}  // namespace

struct BoxStream::Impl {
  CheckpointReader& reader;
  const LoadPlanner& planner;
  const std::vector<StreamItem>& items;
  bool ahead;
  Window current, next;
  std::vector<std::pair<int64_t, int64_t>> shard_starts;  // (file, offset), ascending
  int64_t windows = 0;

  // The thread that reads ahead has one order at a time, and `next`, until it has answered.
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<Place> order;
  std::optional<Status> answer;
  bool ordered = false, closing = false;  // ordered: from the order until its answer has been taken; caller only
  std::thread thread;

  Impl(CheckpointReader& r, const LoadPlanner& p, const std::vector<StreamItem>& i, const StreamOptions& options)
      : reader(r),
        planner(p),
        items(i),
        ahead(options.ahead),
        current(options.ahead ? options.memory_bytes / 2 : options.memory_bytes),
        next(options.memory_bytes / 2) {
    for (const ShardEntry& shard : reader.manifest().shards) shard_starts.emplace_back(shard.file, shard.offset);
    std::sort(shard_starts.begin(), shard_starts.end());
  }
  ~Impl() {
    {
      const std::lock_guard lock(mutex);
      closing = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }

  Status load(Window& window, Place place) { return window.load(reader, planner, items, shard_starts, place); }

  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return closing || order.has_value(); });
      if (!order) return;
      const Place place = *std::exchange(order, std::nullopt);
      lock.unlock();
      Status status = load(next, place);
      lock.lock();
      answer = std::move(status);
      changed.notify_all();
    }
  }

  void start_ahead() {
    const Place from = current.end();
    if (!ahead || ordered || from.item >= static_cast<int64_t>(items.size())) return;
    if (!thread.joinable()) thread = std::thread([this] { work(); });
    {
      const std::lock_guard lock(mutex);
      order = from;
    }
    ordered = true;
    changed.notify_all();
  }

  Status take_ahead() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return answer.has_value(); });
    ordered = false;
    return *std::exchange(answer, std::nullopt);
  }

  Status move_to(Place place) {
    ++windows;
    if (ordered) {
      Status status = take_ahead();
      if (next.begin() == place) {
        if (!status.ok()) return status;
        std::swap(current, next);
        start_ahead();
        return {};
      }
      ignore(std::move(status), "another place is asked for");
    }
    RT_TRY(load(current, place));
    start_ahead();
    return {};
  }
};

BoxStream::BoxStream(CheckpointReader& reader, const LoadPlanner& planner, const std::vector<StreamItem>& items,
                     const StreamOptions& options)
    : impl_(std::make_unique<Impl>(reader, planner, items, options)) {}
BoxStream::~BoxStream() = default;
int64_t BoxStream::windows() const { return impl_->windows; }

Status BoxStream::copy(int64_t item, int64_t offset, std::span<std::byte> out) {
  while (!out.empty()) {
    const std::span<const std::byte> there = impl_->current.find({item, offset});
    if (there.empty()) {
      Status moved = impl_->move_to({item, offset});
      if (!moved.ok()) {
        impl_->current.clear();
        return moved;
      }
      continue;
    }
    const size_t bytes = std::min(out.size(), there.size());
    std::memcpy(out.data(), there.data(), bytes);
    offset += static_cast<int64_t>(bytes);
    out = out.subspan(bytes);
  }
  return {};
}

}  // namespace cairn::ckpt
