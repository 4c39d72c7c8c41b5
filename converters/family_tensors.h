#pragma once
// The tensors of a checkpoint as a family's files have them: which rows of which logical tensors make each, and their
// bytes. Weights and moments alike.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "converters/block_fp8.h"
#include "converters/family.h"
#include "converters/hf_writer.h"
#include "converters/weight_source.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

/// Rows of a stored tensor (columns of a transposed one, from a row of it on) that are rows of a logical tensor.
struct OutputRun {
  int64_t stored = 0, count = 0;
  int64_t source = 0, row = 0;  // index into the source's tensors, its first row
  int64_t stride = 1;           // from one to the next
  int64_t line = 0;             // transposed: stored row of the logical tensor's first column
};

/// One tensor of the folder and the logical tensors it is made of.
struct Output {
  std::string name;
  Shape shape;
  bool transpose = false;
  std::optional<DType> own_dtype;  // where it is not that of the others
  std::vector<OutputRun> runs;     // in the order of the stored rows
  OutputPart part = OutputPart::kNumbers;
  Shape matrix;  // of which scales are
};

/// In the order in which shards are filled: embedding, layers by number, final norm, head. `blocks`: null for none.
std::vector<Output> outputs_of(const Family& family, const WeightSource& source, const BlockFp8* blocks);

enum class OutputReads {
  kInOrder,   // ahead, by a thread of its own; memory: some 80 MiB
  kAnywhere,  // nothing but the range; memory: a chunk, and of a transposed tensor a block of 32 MiB
};

/// Reads `tensors` of `outputs` out of the checkpoint in `dir`. The arguments outlive it.
Result<std::unique_ptr<TensorSource>> open_outputs(const std::filesystem::path& dir, const CheckpointWeights& weights,
                                                   const std::vector<Output>& outputs, DType dtype,
                                                   const BlockFp8& blocks, std::span<const int64_t> tensors,
                                                   OutputReads reads = OutputReads::kInOrder);

}  // namespace cairn::convert
