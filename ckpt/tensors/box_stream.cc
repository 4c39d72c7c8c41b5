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

#include "ckpt/tensors/planned_range.h"
#include "runtime/core/dtype.h"

namespace cairn::ckpt {

StreamItem stream_item(const Manifest& manifest, int64_t tensor, Box box) {
  const int64_t elem_bytes = dtype_size_bytes(manifest.tensors[static_cast<size_t>(tensor)].dtype);
  const int64_t bytes = box.count_elems() * elem_bytes;
  return {tensor, std::make_shared<const Box>(std::move(box)), bytes, elem_bytes};
}

// What is not payload, as measured for states from 0.1 to 1 GiB: ring, libhdf5 and its pages, manifests, stacks, and
// what rounding to huge pages adds.
static constexpr int64_t kFixedBytes = int64_t{12} << 20;

int64_t payload_share(int64_t memory_bytes) { return std::max(memory_bytes - kFixedBytes, memory_bytes / 2); }

int64_t memory_for(int64_t payload_bytes) {
  return std::max(kMinStreamBytes, std::min(payload_bytes + kFixedBytes, 2 * payload_bytes));
}

Result<SourceMemory> memory_of_sources(int64_t memory_bytes, int64_t sources, int64_t largest_chunk,
                                       std::string_view what) {
  // A chunk under way and one in the window, of each.
  const int64_t least = memory_for((8 * 2 * sources * largest_chunk + 6) / 7);
  if (memory_bytes < least) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} needs {} bytes of memory, {} are given: chunks of up to {} bytes are read whole", what,
                             least, memory_bytes, largest_chunk)};
  }
  const int64_t each = payload_share(memory_bytes) / 8 * 7 / sources;
  const int64_t reader_bytes = std::max(each / 3, largest_chunk);
  return SourceMemory{.window_bytes = each - reader_bytes, .reader_bytes = reader_bytes};
}

int64_t largest_chunk(const Manifest& source) {
  int64_t largest = 0;
  for (const ShardEntry& shard : source.shards) largest = std::max(largest, std::min(shard.chunk_bytes, shard.bytes));
  return largest;
}

Status check_chunks_fit(const Manifest& source, int64_t window_bytes, int64_t* largest) {
  *largest = largest_chunk(source);
  for (const ShardEntry& shard : source.shards) {
    const int64_t chunk = std::min(shard.chunk_bytes, shard.bytes);
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

/// The reads of bytes [offset, offset + bytes) of an item, dense, to `to`.
Result<std::vector<ReadRange>> ranges_of_item(const Manifest& manifest, const LoadPlanner& planner,
                                              const StreamItem& item, int64_t offset, int64_t bytes, std::byte* to) {
  const TensorEntry& tensor = manifest.tensors[static_cast<size_t>(item.tensor)];
  std::vector<WantedBox> wanted;
  std::vector<std::byte*> starts;
  const int64_t from = item.begin + offset;
  for (Box& box : boxes_of_flat_range(item.box->extents(), from / item.elem_bytes, (from + bytes) / item.elem_bytes)) {
    starts.push_back(to);
    to += box.count_elems() * item.elem_bytes;
    for (size_t d = 0; d < box.lo.size(); ++d) {
      box.lo[d] += item.box->lo[d];
      box.hi[d] += item.box->lo[d];
    }
    wanted.push_back({tensor.kind, tensor.name, std::move(box)});
  }
  RT_TRY_SET(const std::vector<LoadRead> reads, planner.plan_reads(wanted));
  std::vector<ReadRange> out;
  out.reserve(reads.size());
  for (const LoadRead& read : reads) out.push_back(range_of(read, starts[static_cast<size_t>(read.wanted)]));
  return out;
}

struct Place {
  int64_t item = 0, offset = 0;
  bool operator==(const Place&) const = default;
};

/// What a plan must know of the source besides its boxes.
struct SourceShards {
  std::vector<std::pair<int64_t, int64_t>> starts;  // (file, offset), ascending
  int64_t smallest_chunk = INT64_MAX;

  explicit SourceShards(const Manifest& source) {
    for (const ShardEntry& shard : source.shards) {
      starts.emplace_back(shard.file, shard.offset);
      smallest_chunk = std::min(smallest_chunk, shard.chunk_bytes);
    }
    std::sort(starts.begin(), starts.end());
  }
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
              const SourceShards& shards, Place place) {
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
    plan_bytes_ = 0;
    begin_ = end_ = place;
    int64_t used = 0;
    for (; end_.item < static_cast<int64_t>(items.size()); ++end_.item, end_.offset = 0) {
      const StreamItem& item = items[static_cast<size_t>(end_.item)];
      while (end_.offset < item.bytes) {
        const int64_t bytes = std::min(granule_bytes_ / item.elem_bytes * item.elem_bytes, item.bytes - end_.offset);
        if (!extents_.empty() && (used + plan_bytes_ + bytes > budget_bytes_ || used + bytes > capacity_))
          return reader.read_ranges(ranges_);
        RT_TRY(plan(reader.manifest(), planner, shards, item, end_.offset, bytes, memory_.get() + used));
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
  Status plan(const Manifest& manifest, const LoadPlanner& planner, const SourceShards& shards, const StreamItem& item,
              int64_t offset, int64_t bytes, std::byte* to) {
    RT_TRY_SET(const std::vector<ReadRange> ranges, ranges_of_item(manifest, planner, item, offset, bytes, to));
    for (const ReadRange& range : ranges) {
      // One range instead of two, so that a whole chunk is seen as one; a range stays within one shard.
      ReadRange* const last = ranges_.empty() ? nullptr : &ranges_.back();
      if (last != nullptr && last->rows == 1 && range.rows == 1 && last->file == range.file &&
          last->offset + last->bytes == range.offset && last->dst + last->bytes == range.dst &&
          !std::binary_search(shards.starts.begin(), shards.starts.end(), std::pair(range.file, range.offset))) {
        last->bytes += range.bytes;
        continue;
      }
      ranges_.push_back(range);
      // Where source and items cut across each other a range may be a few bytes long, and its bookkeeping longer.
      const int64_t pieces = std::min(range.rows, range.span_bytes() / shards.smallest_chunk + 2);
      plan_bytes_ += static_cast<int64_t>(sizeof(ReadRange) + sizeof(LoadRead)) + pieces * kPieceBytes;
    }
    return {};
  }

  static constexpr int64_t kPieceBytes = 80;  // the reader's, for each chunk that a range touches
  int64_t budget_bytes_, granule_bytes_, capacity_ = 0;
  int64_t plan_bytes_ = 0;  // of memory, for the ranges below
  std::unique_ptr<std::byte, Freer> memory_;
  std::vector<Extent> extents_;  // ascending
  std::vector<ReadRange> ranges_;
  Place begin_, end_;
};

}  // namespace

Status read_item(CheckpointReader& reader, const LoadPlanner& planner, const StreamItem& item, int64_t offset,
                 std::span<std::byte> out) {
  RT_TRY_SET(const std::vector<ReadRange> ranges,
             ranges_of_item(reader.manifest(), planner, item, offset, std::ssize(out), out.data()));
  return reader.read_ranges(ranges);
}

struct BoxStream::Impl {
  CheckpointReader& reader;
  const LoadPlanner& planner;
  const std::vector<StreamItem>& items;
  bool ahead;
  Window current, next;
  SourceShards shards;
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
        next(options.memory_bytes / 2),
        shards(reader.manifest()) {}
  ~Impl() {
    {
      const std::lock_guard lock(mutex);
      closing = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }

  Status load(Window& window, Place place) { return window.load(reader, planner, items, shards, place); }

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
