#include "ckpt/shared_order.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace cairn::ckpt {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

int64_t bytes_of(std::span<const ShardData> shards) {
  int64_t bytes = 0;
  for (const ShardData& shard : shards) bytes += shard.bytes;
  return bytes;
}

// One file of a group, and how far the order has come in it.
class File {
 public:
  File(int64_t index, const WriterPart& part) : index_(index), shards_(part.shards) { find_end(); }

  /// The tensor that comes next, kNone behind the last one; and what this file wants of it.
  int64_t tensor() const { return tensor_; }
  int64_t tensor_bytes() const { return tensor_ == kNone ? 0 : bytes_of(shards_.subspan(at_, end_ - at_)); }

  /// On to the next tensor. What was passed is in no step yet.
  void pass() {
    at_ = end_;
    find_end();
  }
  /// A step up to here, when anything was passed since the last one.
  void step(std::vector<WriteStep>& out) {
    if (stepped_ == at_) return;
    out.push_back({index_, static_cast<int64_t>(at_), 0});
    stepped_ = at_;
  }
  /// A step up to byte `bytes` of what it wants of this tensor; rounded down to `step_bytes` within a shard.
  void step_within(int64_t bytes, int64_t step_bytes, std::vector<WriteStep>& out) const {
    size_t shard = at_;
    for (; shard < end_ && bytes >= shards_[shard].bytes; ++shard) bytes -= shards_[shard].bytes;
    if (shard < end_) out.push_back({index_, static_cast<int64_t>(shard), bytes / step_bytes * step_bytes});
  }

 private:
  // Behind the shards of the tensor at at_.
  void find_end() {
    end_ = at_;
    if (at_ == shards_.size()) {
      tensor_ = kNone;
      return;
    }
    tensor_ = std::max(shards_[at_].tensor, at_ == 0 ? int64_t{0} : tensor_);
    while (end_ < shards_.size() && shards_[end_].tensor <= tensor_) ++end_;
  }

  int64_t index_;
  std::span<const ShardData> shards_;
  size_t at_ = 0, end_ = 0, stepped_ = 0;
  int64_t tensor_ = 0;
};

void order_group(std::vector<File>& files, const SharedOrderLimits& limits, std::vector<WriteStep>& out) {
  int64_t band = 0;  // bytes that are passed and in no step
  const auto end_band = [&] {
    for (File& file : files) file.step(out);
    band = 0;
  };
  while (true) {
    int64_t tensor = kNone, bytes = 0;
    for (const File& file : files) tensor = std::min(tensor, file.tensor());
    if (tensor == kNone) break;
    for (const File& file : files) bytes += file.tensor() == tensor ? file.tensor_bytes() : 0;
    if (band + bytes > limits.band_bytes) end_band();
    const int64_t bands = (bytes + limits.band_bytes - 1) / limits.band_bytes;
    for (int64_t b = 1; b < bands; ++b) {
      for (const File& file : files) {
        if (file.tensor() == tensor) file.step_within(file.tensor_bytes() / bands * b, limits.step_bytes, out);
      }
    }
    for (File& file : files) {
      if (file.tensor() == tensor) file.pass();
    }
    band += bytes / bands;
  }
  end_band();
}

}  // namespace

std::vector<WriteStep> shared_order(std::span<const WriterPart> parts, const SharedOrderLimits& limits) {
  std::vector<WriteStep> out;
  std::vector<File> files;
  int64_t bytes = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    if (parts[p].shards.empty()) {
      out.push_back({static_cast<int64_t>(p), 0, 0});
      continue;
    }
    files.emplace_back(static_cast<int64_t>(p), parts[p]);
    bytes += bytes_of(parts[p].shards);
    if (p + 1 < parts.size() && files.size() < kOpenFiles && bytes < limits.commit_bytes) continue;
    order_group(files, limits, out);
    files.clear();
    bytes = 0;
  }
  if (!files.empty()) order_group(files, limits, out);
  return out;
}

}  // namespace cairn::ckpt
