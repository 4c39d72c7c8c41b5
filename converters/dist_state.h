#pragma once
// Training states of torch.distributed.checkpoint (dist_metadata.h): the model's tensors, torch's own Adam state beside
// them by the tensors' names, and single numbers that say where training stood.
//
//   model.NAME                                      or NAME, or under `app`, as the saved dicts were nested
//   optimizer.state.NAME.exp_avg, .exp_avg_sq, .step     also `optim`; torchtitan and FSDP2 save so
//   optimizer.param_groups.NAME.lr, or .G.lr and .G.params    settings
//   train_state.step, global_step, step             steps done; else the optimizer's own count
// Names are Hugging Face's, or torchtitan's own of a Llama model: their q and k have the rotary pairs as neighbours.
// Refused by name: state that is numbered and not named, optimizers other than Adam, a name that appears twice.
// Source: pytorch torch/distributed/checkpoint/state_dict.py; torchtitan torchtitan/components/checkpoint.py,
// torchtitan/models/llama3/.

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "converters/dist_metadata.h"
#include "converters/foreign_state.h"
#include "runtime/core/result.h"

namespace cairn::convert {

/// Ends the layout of a state whose optimizer's keys are of no form above: an import refuses it but for the weights.
inline constexpr std::string_view kOtherForm = ", an optimizer's state of another form";

/// A key of the optimizer's state, "app.optim.state.NAME.exp_avg": NAME, without wrappers of modules, and the kind.
struct DistStateKey {
  std::string parameter, kind;
  /// A number in place of a name.
  bool is_numbered() const;
};
/// Nothing for a key of anything else.
std::optional<DistStateKey> dist_state_key(std::string_view saved);

/// Whether a key is of an optimizer's state, whatever its form: "optimizer_0.state.NAME.exp_avg" too.
bool is_optimizer_key(std::string_view saved);

/// Steps and tokens as plain numbers of the state say them; -1: the state has no such key.
struct DistPosition {
  int64_t step = -1, tokens = -1, schedule = -1;
  double adam_step = -1;  // of one parameter
};
/// `read`: the archives of the numbers, to verify; null: for no use. Errors: those of reading an archive, kCorrupt for
/// a step or tokens that are no whole number.
Result<DistPosition> dist_position(const std::filesystem::path& dir, const DistIndex& index,
                                   std::vector<ArchivePlace>* read = nullptr);

/// `about`: of look_at_training_state(), with program "torch.distributed.checkpoint"; `config`: the model's
/// config.json, or null. Reads only pickles and single numbers. Errors: kInvalidInput (a file that is missing),
/// kCorrupt, kUnsupported; each names the file, what was found, what was expected and what to do.
Result<ForeignState> open_dist_state(TrainingState about, bool weights_only, const nlohmann::json& config);

}  // namespace cairn::convert
