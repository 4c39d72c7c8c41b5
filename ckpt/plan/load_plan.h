#pragma once
// Loading as arithmetic: boxes wanted and boxes saved -> byte ranges to read and where they go. The layout that saved
// and the layout that loads never meet: both are only lists of boxes of logical tensors.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ckpt/format/manifest.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::ckpt {

/// A box that somebody needs, to be laid densely, row-major, into memory of its own.
struct WantedBox {
  std::string_view kind, name;  // as TensorEntry's; must outlive the call
  Box box;
};

/// Bytes [offset, offset + bytes) of a file go to [target_offset, ...) of the wanted box's memory; and so do `rows` - 1
/// more of that length, each a stride behind the one before.
struct LoadRead {
  int64_t file = 0;  // index into Manifest::files
  int64_t offset = 0, bytes = 0;
  int64_t wanted = 0;  // index into the span given to plan_reads
  int64_t target_offset = 0;
  int64_t rows = 1;
  int64_t source_stride = 0, target_stride = 0;
  bool operator==(const LoadRead&) const = default;
};

/// Whether the checkpoint is of exactly these tensors.
/// Errors: kInvalidInput, one message that lists every tensor which is missing, extra, or of another shape or dtype
/// (the first 20, then their number). `extra_allowed`: a target that wants a part, as an export of weights does.
Status check_tensors(const Manifest& manifest, std::span<const TensorEntry> expected, bool extra_allowed = false);

/// An index of one manifest: made once, then asked for any number of ranks. Holds a reference to the manifest.
/// Cost: O(shards log shards) to make; a question costs the shards of the tensors it names.
class LoadPlanner {
 public:
  explicit LoadPlanner(const Manifest& manifest);

  /// Reads that fill every wanted box exactly once, sorted by (file, offset). Their number goes with the boxes that
  /// meet, not with the rows of a tensor: a cut of columns is one read.
  /// Errors: kInvalidInput listing every tensor that is not there and every box that leaves its tensor; kCorrupt
  /// listing boxes that the shards do not cover, or cover twice.
  Result<std::vector<LoadRead>> plan_reads(std::span<const WantedBox> wanted) const;

  /// The kind that state of `kind` is read from: its own, but an average of weights that the checkpoint does not hold
  /// begins at the weights.
  std::string_view kind_to_read(std::string_view kind, std::string_view name) const;

  /// Index into Manifest::tensors, or -1.
  int64_t find(std::string_view kind, std::string_view name) const;

 private:
  const Manifest& manifest_;
  std::unordered_map<std::string, int64_t> tensor_;  // "kind name"
  std::vector<int64_t> shard_;                       // by tensor, then by first index
  std::vector<int64_t> first_;                       // shards of tensor t: shard_[first_[t] .. first_[t + 1])
};

}  // namespace cairn::ckpt
