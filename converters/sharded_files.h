#pragma once
// Checkpoints of Megatron-LM's legacy format and its relatives: a torch.save file for each tensor-parallel rank, and
// for each pipeline stage where there are several, seen as one file of whole tensors.
//
//   mp_rank_TT/model_optim_rng.pt        Megatron-LM, tensor-parallel rank TT
//   mp_rank_TT_PPP/model_optim_rng.pt    with pipeline stages PPP; layers are numbered from 0 in each
//   mp_rank_TT_model_states.pt           DeepSpeed, SwissArmyTransformer (GLM-130B), CodeGeeX cut for several ranks
//   NAME.pt                              the only .pt file of a folder without any of these: one rank (CodeGeeX as
//   published)
// They lie in the folder itself or where it points: latest_checkpointed_iteration.txt ("release" or N, iter_NNNNNNN),
// latest (the name of a folder).
//
// A rank's file holds more than weights (arguments, optimizer state, random states): that is passed over, never run.
// Source: Megatron-LM megatron/training/checkpointing.py (legacy format), GLM-130B tools/convert_tp.py.

#include <filesystem>
#include <memory>
#include <vector>

#include "converters/family.h"
#include "converters/weights_file.h"
#include "runtime/core/result.h"

namespace cairn::convert {

/// `dir`, or the folder that a file in it names as the newest. Errors: kInvalidInput for a pointer to nothing.
Result<std::filesystem::path> pointed_folder(const std::filesystem::path& dir);

/// Where the ranks' files are, or an empty path when `dir` is no such checkpoint. Errors: kInvalidInput for a pointer
/// to nothing.
Result<std::filesystem::path> find_sharded_files(const std::filesystem::path& dir);

class ShardedFiles final : public WeightsFile {
 public:
  /// `dir` from find_sharded_files(). Rows of a vocabulary beyond model.vocab are padding and left out.
  /// Errors, all naming files: kInvalidInput (ranks or layers that are missing, a tensor that ranks hold in shapes that
  /// do not join), and those of TorchBinFile::open.
  static Result<std::unique_ptr<ShardedFiles>> open(const std::filesystem::path& dir, const Family& family,
                                                    const ModelConfig& model);

  const std::filesystem::path& path() const override { return path_; }
  std::vector<std::filesystem::path> paths() const override;
  const std::vector<SafeTensor>& tensors() const override { return tensors_; }
  Status read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const override;
  /// The checksums in the files; and that ranks agree where each holds the whole tensor. Errors: kCorrupt, naming both.
  Status verify() const override;

 private:
  ShardedFiles() = default;
  struct Part {
    const WeightsFile* file = nullptr;
    const SafeTensor* tensor = nullptr;
  };
  struct Joined {
    Join join = Join::kWhole;
    std::vector<Part> parts;  // of each tensor-parallel rank
  };
  Status add(const std::string& name, Joined joined, const ModelConfig& model);

  std::filesystem::path path_;
  std::vector<std::unique_ptr<WeightsFile>> files_;
  std::vector<SafeTensor> tensors_;
  std::vector<Joined> joined_;  // of each of tensors_
};

}  // namespace cairn::convert
