#pragma once
// The float32 bytes of a list of boxes of a WeightSource, one after the other, in bounded memory: the next window is
// made by threads of the stream's own while the caller writes this one. ckpt/tensors/box_stream.h does the same for
// checkpoints; this one asks the source for boxes, so that a box costs what it reads and no more.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "converters/weight_source.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

struct SourceBox {
  int64_t tensor = 0;  // index into the source's tensors
  Box box;
};

struct SourceStreamOptions {
  int64_t window_bytes = int64_t{32} << 20;  // two of them are held
  int64_t threads = 2;                       // that make a window
};

class SourceStream {
 public:
  /// `source` and `boxes` outlive the stream; its read_box may be called from several threads.
  SourceStream(const WeightSource& source, const std::vector<SourceBox>& boxes, const SourceStreamOptions& options);
  ~SourceStream();

  /// Bytes [offset, offset + out.size()) of a box, dense, row-major; multiples of 4. Fast when asked for in order.
  Status copy(int64_t box, int64_t offset, std::span<std::byte> out);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cairn::convert
