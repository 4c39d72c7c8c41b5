#pragma once
// A checkpoint of torch.distributed.checkpoint, seen as one file of whole tensors: `.metadata` (dist_metadata.h) beside
// .distcp files, which hold a chunk of a tensor after the other. Megatron-LM's torch_dist format is one; there the
// layers may be stacked into one tensor for each kind of parameter, and are numbered here again. Source: Megatron-LM
// megatron/core/dist_checkpointing/strategies/torch.py, core/transformer/transformer_block.py.

#include <filesystem>
#include <memory>
#include <vector>

#include "converters/dist_metadata.h"
#include "converters/family.h"
#include "converters/torch_bin.h"
#include "converters/weights_file.h"
#include "runtime/core/result.h"

namespace cairn::convert {

/// The folder of such a checkpoint, or an empty path when `dir` is none and points to none (sharded_files.h says how).
/// Errors: kInvalidInput for a pointer to nothing.
Result<std::filesystem::path> find_dist_files(const std::filesystem::path& dir);

/// A tensor of the model as a stored one holds it: all of it, or one layer of a stack.
struct DistView {
  std::string name;    // as the family's table has it
  Shape shape;         // without the dim of the layers, and without rows behind the vocabulary
  int64_t layer = -1;  // of a stack; -1: the stored tensor is no stack
};
/// The views of one stored tensor; none where the family ignores it. Errors: kCorrupt for more layers than the model
/// has.
Result<std::vector<DistView>> views_of(const DistTensor& tensor, const Family& family, const ModelConfig& model);

class DistFiles final : public WeightsFile {
 public:
  /// `dir` from find_dist_files(). Optimizer state and what is no tensor is passed over. Rows of a vocabulary beyond
  /// model.vocab are padding where the family's table says so, and left out. Errors, all naming files: kInvalidInput
  /// (a file that is missing), kCorrupt (a chunk that is not what `.metadata` says), those of read_dist_metadata().
  static Result<std::unique_ptr<DistFiles>> open(const std::filesystem::path& dir, const Family& family,
                                                 const ModelConfig& model);

  const std::filesystem::path& path() const override { return path_; }
  std::vector<std::filesystem::path> paths() const override { return paths_; }
  const std::vector<SafeTensor>& tensors() const override { return tensors_; }
  Status read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const override;
  /// The checksums of the chunks' archives. Errors: kCorrupt, naming the file.
  Status verify() const override;

 private:
  DistFiles() = default;
  struct Stored {
    DistTensor tensor;
    std::vector<std::unique_ptr<TorchBinFile>> chunks;  // of each of tensor.chunks
  };
  struct View {
    size_t stored = 0;
    int64_t first = 0;  // element
  };

  std::filesystem::path path_;
  std::vector<std::filesystem::path> paths_;
  std::vector<Stored> stored_;
  std::vector<SafeTensor> tensors_;
  std::vector<View> views_;  // of each of tensors_
};

}  // namespace cairn::convert
