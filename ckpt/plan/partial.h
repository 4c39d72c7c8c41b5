#pragma once
// What a model takes from a checkpoint that need not be exactly of this model: which tensors come from it, which start
// anew, what stays behind. Pure; agent and ranks compute the same answer from the same manifest and recipe.
//
// Strict by default: every tensor of the model must be there with its shape and type, and nothing else. Each exception
// has a name in InitConfig, and a message about a misfit names the one that would allow it.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/format/manifest.h"
#include "runtime/config/checkpoint.h"
#include "runtime/core/glob.h"
#include "runtime/core/result.h"
#include "runtime/plan/model_tensors.h"
#include "runtime/plan/state_kinds.h"

namespace cairn::ckpt {

struct TensorMatch {
  bool weight = true;   // taken from the checkpoint; else it starts anew, as a fresh run's would
  bool moments = true;  // taken; else they start at zero
  std::string why;      // in words, when something is not taken
};

struct LoadMatch {
  std::vector<TensorMatch> tensors;  // as the model's, in their order
  std::vector<std::string> left;     // "weight head.weight f32 [65, 24]": of the checkpoint, training state alone
  bool has_moments = true;           // the checkpoint
  bool weights_only = false;         // asked for: a new run, from step 0
  bool everything() const;           // weights and moments of every tensor of the model
  int64_t taken() const;
  int64_t with_moments() const;
};

/// Errors: kInvalidInput, in one message: each tensor that does not fit, with what was found and expected and the
/// option that would allow it (the first 20, then their number), and each pattern of `only` and `except` that is of no
/// tensor of the model.
/// `kinds` of state of the run.
Result<LoadMatch> match_tensors(const Manifest& manifest, const std::vector<TensorSpec>& tensors,
                                const StateKinds& kinds, const InitConfig& how);

/// For people: the command that begins a run with the weights of a checkpoint, or of a run's newest.
std::string how_to_begin_from(const std::filesystem::path& checkpoint);

/// For people: what was taken, what starts anew and why, what was left. One line, then up to 20 for exceptions.
std::vector<std::string> report_lines(const LoadMatch& match, const std::vector<TensorSpec>& tensors, int64_t step);

}  // namespace cairn::ckpt
