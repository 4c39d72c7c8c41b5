#pragma once
// A checkpoint -> a folder of torch.distributed.checkpoint that FSDP2 loads into a model of transformers: weights,
// Adam's moments and settings by Hugging Face's names, and the position. torchtitan's own names are read, not written.
//
//   model.NAME                              float32; of tied weights both names point to the same bytes
//   optimizer.state.NAME.exp_avg, .exp_avg_sq, .step     as get_optimizer_state_dict with flatten_optimizer_state_dict
//   optimizer.param_groups.NAME.lr, ...     all settings of torch's AdamW, with the recipe's groups
//   lr_scheduler.last_epoch, train_state.step, train_state.ntokens_seen
//
//   1. The folder is locked. It is empty, or has the file .cairn-export of an export that was cut off: its parts go.
//   2. .distcp files, each durable before the next: chunks of at most 64 MiB, cut in dim 0.
//   3. config.json and the tokenizer's files that the checkpoint keeps.
//   4. .metadata.tmp, durable, takes the name .metadata: from here on there is a checkpoint. .cairn-export is removed.
// On an error before that what was written is removed; later nothing is. Memory: some 150 MiB.
// Source: pytorch torch/distributed/checkpoint/{metadata,filesystem,state_dict}.py.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ckpt/store/io_backend.h"
#include "converters/weight_source.h"
#include "runtime/core/result.h"

namespace cairn::convert {

struct DistExportOptions {
  bool weights_only = false;
  int64_t chunk_bytes = int64_t{64} << 20;  // about
  int64_t file_bytes = int64_t{16} << 30;   // about
  const std::atomic<bool>* cancel = nullptr;
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;  // may be empty
};

struct DistExportReport {
  std::filesystem::path dir;
  std::string model_type;
  int64_t tensors = 0, parameters = 0, data_bytes = 0, files = 0, step = 0, adam_step = 0;
  bool moments = false;
  double seconds = 0;
  std::vector<std::string> warnings;
};

/// Errors: kInvalidInput (no checkpoint, a target that is not empty, another process that writes it), kUnsupported (no
/// family holds the model; an optimizer that torch's AdamW cannot continue; groups that part a stored tensor),
/// kCorrupt, kNoSpace, kIo, kStopped.
Result<DistExportReport> export_dist(ckpt::IoBackend& io, const std::filesystem::path& checkpoint_dir,
                                     const std::filesystem::path& target, const DistExportOptions& options,
                                     const RecipeDecoder& decode);

}  // namespace cairn::convert
