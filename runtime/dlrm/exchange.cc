#include "runtime/dlrm/exchange.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/core/check.h"
#include "runtime/kernels/parallel.h"

namespace cairn::dlrm {
namespace {

template <typename T>
T* room(std::vector<T>* buffer, int64_t count) {
  if (std::ssize(*buffer) < count) buffer->resize(static_cast<size_t>(count));
  return buffer->data();
}

int64_t sum(const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t{0}); }

}  // namespace

template <typename T>
Exchange<T>::Exchange(std::vector<TableShard> shards, int64_t dim, comm::Comm& world)
    : shards_(std::move(shards)), dim_(dim), world_(world), owners_(static_cast<size_t>(world.size())) {
  for (size_t i = 0; i < shards_.size(); ++i) {
    RT_CHECK(shards_[i].owner >= 0 && shards_[i].owner < world.size());
    Owner& owner = owners_[static_cast<size_t>(shards_[i].owner)];
    owner.parts.push_back({i, owner.width});
    owner.width += shards_[i].width();
    if (shards_[i].owner == world.rank()) own_.push_back(shards_[i]);
  }
  bags_.resize(own_.size());
  gradients_.resize(own_.size());
}

/// `out` and `in` say how many bytes each rank takes and gives, one behind the other in `from` and `to`.
template <typename T>
Status Exchange<T>::all_to_all(const std::vector<int64_t>& out, const void* from, const std::vector<int64_t>& in,
                               void* to, std::string_view what) {
  std::vector<comm::OutPart> out_parts;
  std::vector<comm::InPart> in_parts;
  const auto* source = static_cast<const char*>(from);
  auto* sink = static_cast<char*>(to);
  for (int64_t r = 0; r < world_.size(); ++r) {
    out_parts.push_back({r, source, out[static_cast<size_t>(r)]});
    in_parts.push_back({r, sink, in[static_cast<size_t>(r)]});
    source += out_parts.back().bytes;
    sink += in_parts.back().bytes;
  }
  return world_.all_to_all(out_parts, in_parts, what);
}

template <typename T>
Status Exchange<T>::send_bags(const data::ClickBatch& batch, int64_t global_samples) {
  const int64_t world = world_.size(), own = std::ssize(own_);
  ranges_.clear();
  for (int64_t r = 0; r < world; ++r) ranges_.push_back(samples_of(global_samples, r, world));
  RT_CHECK(batch.samples == samples());

  std::vector<int64_t> out_counts, in_counts, out_row_counts, in_row_counts;
  int32_t* length = room(&out_lengths_, batch.samples * std::ssize(shards_));
  out_rows_.clear();
  for (const Owner& owner : owners_) {
    const size_t before = out_rows_.size();
    for (const Part& part : owner.parts) {
      const TableShard& shard = shards_[part.shard];
      const data::Bags& bags = batch.tables[static_cast<size_t>(shard.table)];
      const int64_t first = shard.box.lo[0], end = shard.box.hi[0];
      for (int64_t s = 0; s < batch.samples; ++s) {
        const size_t size = out_rows_.size();
        for (int64_t i = bags.offsets[static_cast<size_t>(s)]; i < bags.offsets[static_cast<size_t>(s + 1)]; ++i) {
          const int64_t row = bags.rows[static_cast<size_t>(i)];
          if (row >= first && row < end) out_rows_.push_back(static_cast<int32_t>(row - first));
        }
        *length++ = static_cast<int32_t>(out_rows_.size() - size);
      }
    }
    out_counts.push_back(batch.samples * std::ssize(owner.parts) * 4);
    out_row_counts.push_back(static_cast<int64_t>(out_rows_.size() - before) * 4);
  }
  for (const SampleRange& range : ranges_) in_counts.push_back(range.count * own * 4);
  int32_t* const lengths = room(&in_lengths_, sum(in_counts) / 4);
  RT_TRY(all_to_all(out_counts, out_lengths_.data(), in_counts, lengths, "dlrm.lengths"));
  const int32_t* next = lengths;
  for (const int64_t bytes : in_counts) {
    in_row_counts.push_back(std::accumulate(next, next + bytes / 4, int64_t{0}) * 4);
    next += bytes / 4;
  }
  int32_t* const rows = room(&in_rows_, sum(in_row_counts) / 4);
  RT_TRY(all_to_all(out_row_counts, out_rows_.data(), in_row_counts, rows, "dlrm.rows"));

  for (auto& bags : bags_) bags.resize(static_cast<size_t>(global_samples));
  next = lengths;
  const int32_t* row = rows;
  for (const SampleRange& range : ranges_) {
    for (auto& bags : bags_) {
      for (int64_t s = range.first; s < range.first + range.count; ++s) {
        bags[static_cast<size_t>(s)] = {row, *next};
        row += *next++;
      }
    }
  }
  return {};
}

template <typename T>
T* Exchange<T>::owned_at(size_t shard, int64_t rank, int64_t s) {
  const Owner& me = owners_[static_cast<size_t>(world_.rank())];
  const SampleRange& range = ranges_[static_cast<size_t>(rank)];
  return owned_.data() + me.width * range.first + me.parts[shard].before * range.count +
         (s - range.first) * own_[shard].width();
}

template <typename T>
Status Exchange<T>::pool(const std::vector<ShardRows<T>>& rows, T* to, int64_t stride) {
  const int64_t all = ranges_.back().first + ranges_.back().count, world = world_.size();
  const Owner& me = owners_[static_cast<size_t>(world_.rank())];
  room(&owned_, me.width * all);
  const int64_t mean = own_.empty() ? 0 : me.width / std::ssize(own_);
  // Items are the samples of one shard after another; a range of them may begin and end anywhere.
  kernels::parallel_ranges(std::ssize(own_) * all, 1, mean, [&](int64_t item, int64_t end) {
    while (item < end) {
      const auto shard = static_cast<size_t>(item / all);
      const int64_t first = item % all, stop = std::min(all, first + end - item);
      for (int64_t r = 0; r < world; ++r) {
        const SampleRange& range = ranges_[static_cast<size_t>(r)];
        const int64_t lo = std::max(first, range.first), hi = std::min(stop, range.first + range.count);
        if (lo >= hi) continue;
        rows[shard].pool(bags(shard).subspan(static_cast<size_t>(lo), static_cast<size_t>(hi - lo)),
                         owned_at(shard, r, lo), rows[shard].width(), false);
      }
      item += stop - first;
    }
  });

  std::vector<int64_t> out, in;
  for (const SampleRange& range : ranges_) out.push_back(range.count * me.width * static_cast<int64_t>(sizeof(T)));
  for (const Owner& owner : owners_) in.push_back(samples() * owner.width * static_cast<int64_t>(sizeof(T)));
  const T* part = room(&sampled_, sum(in) / static_cast<int64_t>(sizeof(T)));
  RT_TRY(all_to_all(out, owned_.data(), in, sampled_.data(), "dlrm.pooled"));

  std::vector<const T*> parts(shards_.size());
  for (const Owner& owner : owners_) {
    for (const Part& p : owner.parts) parts[p.shard] = part + p.before * samples();
    part += owner.width * samples();
  }
  kernels::parallel_ranges(samples(), 1, dim_ * std::ssize(shards_), [&](int64_t s, int64_t end) {
    for (; s < end; ++s) {
      for (size_t i = 0; i < shards_.size(); ++i) {
        const TableShard& shard = shards_[i];
        const int64_t width = shard.width();
        const T* const from = parts[i] + s * width;
        T* const at = to + s * stride + shard.table * dim_ + shard.box.lo[1];
        if (shard.box.lo[0] == 0) {
          std::copy_n(from, width, at);
        } else {
          for (int64_t c = 0; c < width; ++c) at[c] += from[c];
        }
      }
    }
  });
  return {};
}

template <typename T>
Status Exchange<T>::send_gradients(const T* from, int64_t stride) {
  T* to = sampled_.data();
  for (const Owner& owner : owners_) {
    for (const Part& part : owner.parts) {
      const TableShard& shard = shards_[part.shard];
      const T* const column = from + shard.table * dim_ + shard.box.lo[1];
      for (int64_t s = 0; s < samples(); ++s) to = std::copy_n(column + s * stride, shard.width(), to);
    }
  }
  const Owner& me = owners_[static_cast<size_t>(world_.rank())];
  std::vector<int64_t> out, in;
  for (const Owner& owner : owners_) out.push_back(samples() * owner.width * static_cast<int64_t>(sizeof(T)));
  for (const SampleRange& range : ranges_) in.push_back(range.count * me.width * static_cast<int64_t>(sizeof(T)));
  RT_TRY(all_to_all(out, sampled_.data(), in, owned_.data(), "dlrm.gradients"));
  for (size_t shard = 0; shard < own_.size(); ++shard) {
    gradients_[shard].clear();
    for (int64_t r = 0; r < world_.size(); ++r) {
      const SampleRange& range = ranges_[static_cast<size_t>(r)];
      for (int64_t s = range.first; s < range.first + range.count; ++s)
        gradients_[shard].push_back(owned_at(shard, r, s));
    }
  }
  return {};
}

template class Exchange<float>;
template class Exchange<double>;

}  // namespace cairn::dlrm
