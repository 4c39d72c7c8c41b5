#pragma once
// The two all-to-alls of a recommender model: bags of rows go to the ranks that own them, pooled rows come back; then
// their gradients go the same way as the bags. Each rank has its own samples, and each shard sees all samples.
//
//   1. lengths and rows of the bags     rank of the samples -> owner of the shard
//   2. pooled rows                      owner -> rank, which adds the parts of a table that is cut by rows
//   3. gradients of the pooled rows     rank -> owner
//
// Parts of rows are added in the order of the shards, so the bits do not depend on their owners.
// Buffers grow with the largest batch so far. Threads: one object is used by one thread at a time.

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/core/result.h"
#include "runtime/data/click_batch.h"
#include "runtime/dlrm/shards.h"
#include "runtime/dlrm/table_shard.h"

namespace cairn::dlrm {

template <typename T>
class Exchange {
 public:
  /// `shards` are those of cut_tables(), without copies; `world` outlives this.
  Exchange(std::vector<TableShard> shards, int64_t dim, comm::Comm& world);

  /// The shards of this rank, in order.
  const std::vector<TableShard>& own() const { return own_; }

  /// Step 1. `batch` has this rank's samples of `global_samples`, and its rows are checked.
  Status send_bags(const data::ClickBatch& batch, int64_t global_samples);
  /// The bags of all samples, for own()[shard].
  std::span<const Bag> bags(size_t shard) const { return bags_[shard]; }

  /// Step 2: pools by rows[shard], and fills table t of sample s: to[s * stride + t * dim].
  Status pool(const std::vector<ShardRows<T>>& rows, T* to, int64_t stride);

  /// Step 3, from the same places.
  Status send_gradients(const T* from, int64_t stride);
  /// Where the gradients of all samples lie then, for own()[shard].
  std::span<const T* const> gradients(size_t shard) const { return gradients_[shard]; }

 private:
  struct Part {
    size_t shard = 0;    // in shards_
    int64_t before = 0;  // columns of the owner's shards before this one
  };
  struct Owner {
    std::vector<Part> parts;
    int64_t width = 0;  // of all of them
  };

  int64_t samples() const { return ranges_[static_cast<size_t>(world_.rank())].count; }
  /// The place of sample `s`, one of `rank`'s, in what own()[shard] gives.
  T* owned_at(size_t shard, int64_t rank, int64_t s);
  Status all_to_all(const std::vector<int64_t>& out, const void* from, const std::vector<int64_t>& in, void* to,
                    std::string_view what);

  const std::vector<TableShard> shards_;
  const int64_t dim_;
  comm::Comm& world_;
  std::vector<TableShard> own_;
  std::vector<Owner> owners_;        // by rank
  std::vector<SampleRange> ranges_;  // by rank
  std::vector<int32_t> out_lengths_, in_lengths_, out_rows_, in_rows_;
  std::vector<T> owned_;    // for each rank, for each shard of this one: [samples of the rank, width]
  std::vector<T> sampled_;  // for each owner, for each of its shards: [own samples, width]
  std::vector<std::vector<Bag>> bags_;
  std::vector<std::vector<const T*>> gradients_;
};

}  // namespace cairn::dlrm
