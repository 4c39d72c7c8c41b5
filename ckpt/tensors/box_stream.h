#pragma once
// Streams the bytes of a list of boxes, one after the other, through windows of bounded memory. Resharding,
// averaging, comparing and printing tensors use it. The order of boxes in the checkpoint's files does not matter: a
// window of consecutive bytes is read at a time, and a chunk that feeds several boxes of it is read and verified
// once.
//
// Threads: with `ahead` a thread of the stream's own reads the next window while the caller works on this one; the
// reader (and its backend) must then be used by nobody else. Without it everything happens in copy().

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "ckpt/persist/read.h"
#include "ckpt/plan/load_plan.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::ckpt {

/// A box of a tensor, laid out densely, row-major, or a part of that: `bytes` of it from `begin` on, whole elements.
struct StreamItem {
  int64_t tensor = 0;              // index into the tensors of the reader's manifest
  std::shared_ptr<const Box> box;  // shared by the parts of it
  int64_t bytes = 0, elem_bytes = 0, begin = 0;
};

/// The whole box; fills in the sizes.
StreamItem stream_item(const Manifest& manifest, int64_t tensor, Box box);

/// Reads bytes [offset, offset + out.size()) of an item, whole elements: the chunks that hold them and no others.
/// Errors: those of CheckpointReader::read_ranges.
Status read_item(CheckpointReader& reader, const LoadPlanner& planner, const StreamItem& item, int64_t offset,
                 std::span<std::byte> out);

struct StreamOptions {
  int64_t memory_bytes = int64_t{64} << 20;  // windows and the plans of reading them
  bool ahead = false;
};

/// How a tool spends the memory that it is given: payload_share of it goes to payload, the rest is what else it takes,
/// and manifests of some megabytes; larger ones come on top. memory_for: the least memory with such a share.
inline constexpr int64_t kMinStreamBytes = int64_t{8} << 20;
int64_t payload_share(int64_t memory_bytes);
int64_t memory_for(int64_t payload_bytes);

/// Of checkpoints that are read side by side: seven eighths of payload's share; an eighth is left.
struct SourceMemory {
  int64_t window_bytes = 0, reader_bytes = 0;  // of each: its stream's, and its reader's for reads under way
};
/// `largest_chunk` of all of them: chunks are read whole. `what` needs it, in words: "a comparison".
/// Errors: kInvalidInput with the least memory that would do.
Result<SourceMemory> memory_of_sources(int64_t memory_bytes, int64_t sources, int64_t largest_chunk,
                                       std::string_view what);

int64_t largest_chunk(const Manifest& source);

/// What a stream may take besides its windows: bounce memory of the reader that it is given.
/// Errors: kInvalidInput when a chunk of the source, which is read whole, does not fit into `window_bytes`.
Status check_chunks_fit(const Manifest& source, int64_t window_bytes, int64_t* largest);

class BoxStream {
 public:
  /// `reader`, `planner` and `items` outlive the stream; `items` is not changed after the first copy().
  BoxStream(CheckpointReader& reader, const LoadPlanner& planner, const std::vector<StreamItem>& items,
            const StreamOptions& options);
  ~BoxStream();

  /// Bytes [offset, offset + out.size()) of an item. Fast when asked for in order; each step back reads a window again.
  /// Errors: those of CheckpointReader::read_ranges (kCorrupt names the chunk), kUnavailable without memory.
  Status copy(int64_t item, int64_t offset, std::span<std::byte> out);

  int64_t windows() const;  // read so far

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cairn::ckpt
