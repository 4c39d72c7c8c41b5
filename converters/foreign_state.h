#pragma once
// A training state that another program saved, opened: the model's weights and moments under the names of Hugging Face,
// and where training stood. A state that cannot be taken is refused before anything is read.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "converters/flat_tensors.h"
#include "converters/training_state.h"
#include "runtime/config/optimizer.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/optim/loss_scale.h"

namespace cairn::convert {

/// An archive of torch.save: a file, or a stretch of one.
struct ArchivePlace {
  std::filesystem::path path;
  int64_t begin = 0, bytes = -1;  // -1: the whole file
};

struct ForeignState {
  TrainingState about;
  std::shared_ptr<FilePool> files;
  std::unique_ptr<FlatTensors> weights;              // float masters; with weights_only what the model computes with
  std::unique_ptr<FlatTensors> exp_avg, exp_avg_sq;  // null: only weights
  std::unique_ptr<FlatTensors> model_copy;           // 16-bit weights to compare the masters with; null: none is saved
  std::vector<ArchivePlace> archives;                // that have checksums
  int64_t step = 0, samples = 0, tokens = 0;
  int64_t adam_step = 0;  // the optimizer's own count, for its bias correction
  optim::LossScale loss_scale;
  OptimizerConfig optimizer;  // as it was set at the save; peak_lr: the rate of the next step
  nlohmann::json kept;        // settings, configuration and plain client state, for people
  std::vector<std::string> notes;
  std::string config;  // the model's config.json where the state itself says what the model is; empty: it does not
};

/// Reads every archive and compares it with its checksums. Errors: kCorrupt naming file and entry, kIo.
Status verify_archives(const ForeignState& state);

/// Checks that every master, rounded to nearest even, is the model's weight, bit for bit (NaN equals NaN). This finds a
/// wrong order of parameters, a swapped rank, masters of another step.
/// Errors: kCorrupt naming the tensor, the count and the first index. Memory: a few MiB.
Status check_masters(const ForeignState& state);

}  // namespace cairn::convert
