#include "ckpt/plan/load_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "ckpt/plan/overlap.h"
#include "ckpt/plan/save_plan.h"

namespace cairn::ckpt {
namespace {

constexpr size_t kMaxListed = 20;

std::string key(std::string_view kind, std::string_view name) { return fmt::format("{} {}", kind, name); }

/// Collects everything that is wrong before it is said once.
class Complaints {
 public:
  void add(std::string line) {
    if (lines_.size() < kMaxListed) lines_.push_back(std::move(line));
    ++count_;
  }
  bool any() const { return count_ > 0; }
  Error error(ErrorCode code, std::string_view what) const {
    std::string text = fmt::format("{}:", what);
    for (const std::string& line : lines_) text += "\n  " + line;
    if (count_ > lines_.size()) text += fmt::format("\n  and {} more", count_ - lines_.size());
    return Error{code, std::move(text)};
  }

 private:
  std::vector<std::string> lines_;
  size_t count_ = 0;
};

}  // namespace

Status check_tensors(const Manifest& manifest, std::span<const TensorEntry> expected, bool extra_allowed) {
  std::unordered_map<std::string, const TensorEntry*> saved;
  for (const TensorEntry& entry : manifest.tensors) saved.emplace(key(entry.kind, entry.name), &entry);
  Complaints wrong;
  for (const TensorEntry& want : expected) {
    const auto it = saved.find(key(want.kind, want.name));
    if (it == saved.end()) {
      wrong.add(
          fmt::format("missing: {} {} {} {}", want.kind, want.name, dtype_name(want.dtype), to_string(want.shape)));
      continue;
    }
    const TensorEntry& found = *it->second;
    if (found.shape != want.shape) {
      wrong.add(fmt::format("shape:   {} {} is {}, the model has {}", want.kind, want.name, to_string(found.shape),
                            to_string(want.shape)));
    } else if (found.dtype != want.dtype) {
      wrong.add(fmt::format("dtype:   {} {} is {}, expected {}", want.kind, want.name, dtype_name(found.dtype),
                            dtype_name(want.dtype)));
    }
    saved.erase(it);
  }
  if (!extra_allowed) {
    for (const TensorEntry& entry : manifest.tensors) {  // in the manifest's order
      if (saved.contains(key(entry.kind, entry.name))) {
        wrong.add(fmt::format("extra:   {} {} {} {}, not in the model", entry.kind, entry.name, dtype_name(entry.dtype),
                              to_string(entry.shape)));
      }
    }
  }
  if (!wrong.any()) return {};
  return wrong.error(ErrorCode::kInvalidInput, "the checkpoint is not of this model");
}

LoadPlanner::LoadPlanner(const Manifest& manifest) : manifest_(manifest) {
  const auto tensors = static_cast<int64_t>(manifest.tensors.size());
  tensor_.reserve(tensors);
  for (int64_t t = 0; t < tensors; ++t) {
    tensor_.emplace(key(manifest.tensors[t].kind, manifest.tensors[t].name), t);
  }
  shard_.resize(manifest.shards.size());
  std::iota(shard_.begin(), shard_.end(), 0);
  std::sort(shard_.begin(), shard_.end(), [&](int64_t a, int64_t b) {
    const ShardEntry &x = manifest.shards[a], &y = manifest.shards[b];
    if (x.tensor != y.tensor) return x.tensor < y.tensor;
    return x.box.lo != y.box.lo ? x.box.lo < y.box.lo : a < b;
  });
  first_.assign(tensors + 1, static_cast<int64_t>(shard_.size()));
  for (int64_t k = static_cast<int64_t>(shard_.size()) - 1; k >= 0; --k) first_[manifest.shards[shard_[k]].tensor] = k;
  for (int64_t t = tensors - 1; t >= 0; --t) first_[t] = std::min(first_[t], first_[t + 1]);
}

std::string_view LoadPlanner::kind_to_read(std::string_view kind, std::string_view name) const {
  return kind == kEmaKind && find(kind, name) < 0 ? kWeightKind : kind;
}

int64_t LoadPlanner::find(std::string_view kind, std::string_view name) const {
  const auto it = tensor_.find(key(kind, name));
  return it == tensor_.end() ? -1 : it->second;
}

Result<std::vector<LoadRead>> LoadPlanner::plan_reads(std::span<const WantedBox> wanted) const {
  std::vector<LoadRead> reads;
  Complaints absent, uncovered;
  for (size_t w = 0; w < wanted.size(); ++w) {
    const WantedBox& want = wanted[w];
    const int64_t tensor = find(want.kind, want.name);
    if (tensor < 0) {
      absent.add(fmt::format("{} {} is not in the checkpoint", want.kind, want.name));
      continue;
    }
    const TensorEntry& entry = manifest_.tensors[tensor];
    if (!inside(want.box, entry.shape)) {
      absent.add(fmt::format("{} {}: box {} is wanted, the checkpoint's shape is {}", want.kind, want.name,
                             to_string(want.box), to_string(entry.shape)));
      continue;
    }
    if (want.box.empty()) continue;

    // Shards are sorted by first index. One that begins behind the wanted box ends the search; what was found is
    // checked for overlaps against those that may still reach into it.
    int64_t covered = 0;
    bool twice = false;
    std::vector<Box> found;
    for (int64_t k = first_[tensor]; k < first_[tensor + 1]; ++k) {
      const ShardEntry& shard = manifest_.shards[shard_[k]];
      if (!shard.box.lo.empty() && shard.box.lo[0] >= want.box.hi[0]) break;
      if (!meet(shard.box, want.box)) continue;
      RT_TRY_SET(const std::vector<CopyRows> copies, overlap_rows(shard.box, want.box, entry.shape, entry.dtype));
      for (const CopyRows& copy : copies) {
        reads.push_back({shard.file, shard.offset + copy.source_offset, copy.bytes, static_cast<int64_t>(w),
                         copy.target_offset, copy.rows, copy.source_stride, copy.target_stride});
      }
      Box common = intersect(shard.box, want.box);
      covered += common.count_elems();
      for (const Box& other : found) twice = twice || meet(common, other);
      std::erase_if(found, [&](const Box& other) {  // later shards begin at or behind this one
        return !other.hi.empty() && other.hi[0] <= common.lo[0];
      });
      found.push_back(std::move(common));
    }
    if (covered != want.box.count_elems() || twice) {
      uncovered.add(fmt::format("{} {}: {} wanted, {} of {} elements saved{}", want.kind, want.name,
                                to_string(want.box), covered, want.box.count_elems(),
                                twice ? ", some of them twice" : ""));
    }
  }
  if (absent.any()) return absent.error(ErrorCode::kInvalidInput, "the checkpoint does not fit");
  if (uncovered.any()) return uncovered.error(ErrorCode::kCorrupt, "the checkpoint does not cover what is wanted");
  std::sort(reads.begin(), reads.end(), [](const LoadRead& a, const LoadRead& b) {
    return a.file != b.file ? a.file < b.file : a.offset < b.offset;
  });
  return reads;
}

}  // namespace cairn::ckpt
