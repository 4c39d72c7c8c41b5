#pragma once
// Whose kernels attention has where a run computes on CUDA: --attention, and what the run had before. The agent chooses
// once, for all ranks of the start.

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"

namespace CLI {
class App;
}

namespace cairn::tools {

/// kKept: what the run folder says; Cairn's own where it says nothing, kAuto in a new run. kAuto: the fastest, by
/// timing at the start (runtime/cuda/tuning). kOwn: those of every card, kWarpgroup: those of compute capability 9.x
/// before them.
enum class AttentionWish { kKept, kAuto, kOwn, kWarpgroup, kCudnn };

/// --attention; kKept where it is not given.
void add_attention_option(CLI::App& command, AttentionWish& wish);

struct AttentionQuestion {
  AttentionWish wish = AttentionWish::kKept;
  DeviceChoice device = DeviceChoice::kCpu;  // where the ranks compute
  const Recipe& recipe;
  int64_t world = 1;
  std::filesystem::path run;  // its folder; it need not be there
};

struct AttentionChoice {
  AttentionWish by = AttentionWish::kOwn;  // not kKept
  bool cudnn = false;                      // ranks need memory for cuDNN's
  std::string text;                        // for people; empty where there is nothing to tell
  nlohmann::json record;                   // of the run's record: {"by", "version", "path"}; null on the CPU

  /// For `cairn _rank --attention`.
  std::string word() const;
};

/// Opens cuDNN, and no device. Errors, with exit code 2: cuDNN was asked for, or the run has it, and it cannot be,
/// saying what is missing and what to do.
Result<AttentionChoice> choose_attention(const AttentionQuestion& question);

/// Device memory of a rank for attention by cuDNN. 0: cuDNN takes none of it.
int64_t attention_room(const Plan& plan);

/// Writes into the run folder whose kernels attention has from now on; nothing where they were always Cairn's own.
Status note_attention(const std::filesystem::path& run, const AttentionChoice& choice);

}  // namespace cairn::tools
