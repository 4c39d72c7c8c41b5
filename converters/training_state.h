#pragma once
// What a folder that another program's trainer wrote is, said before anything is read from it: the program and its
// version, how the state is laid out, its sizes, what is missing of it, and what Cairn would not take.
//
//   DeepSpeed       ZeRO-0 to 3, universal, pipelines, with experts
//   Megatron-LM     torch_dist, zarr, legacy files of ranks
//   torch           torch.distributed.checkpoint: complete, without coordination, of safetensors
// Names decide first, no more than 4096 of them; then small pickles and JSON are read, never a tensor's data but single
// numbers. Sources: DeepSpeed deepspeed/runtime/engine.py and checkpoint/constants.py; Megatron-LM
// megatron/core/dist_checkpointing/core.py; pytorch torch/distributed/checkpoint/.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::convert {

struct TrainingState {
  std::string program, layout;   // "DeepSpeed", "ZeRO-2"
  std::string version;           // of the program; empty where the folder does not say it
  std::filesystem::path folder;  // of the step
  int64_t step = -1;             // steps done; -1: the folder does not say it
  int64_t samples = -1, skipped = -1;
  int64_t data_ranks = 0, model_ranks = 0;  // ranks that saved; 0: unknown
  int64_t tensors = 0, elements = 0;        // of the model, where a small file says them
  std::string dtype;                        // of the model's copy, as safetensors names it
  int64_t files = 0, bytes = 0;             // of the step's folder
  std::vector<std::string> optimizer;       // names of the optimizer's state: exp_avg, ...
  double adam_step = -1;                    // the optimizer's own count
  std::vector<std::string> kept, lost;      // lines for people: what an import takes, and what it leaves
  std::vector<std::string> problems;        // what is missing or damaged, each with found, expected, remedy
};

/// The state in `dir`, or below it where a file in it names the newest step; no value for any other folder.
/// Errors: kInvalidInput for a pointer to nothing. A damaged file is one of `problems`.
Result<std::optional<TrainingState>> look_at_training_state(const std::filesystem::path& dir);

}  // namespace cairn::convert
