#pragma once
// The resolved recipe as plain structs: what every rank, the plan, the checkpoints and the converters agree on.
// dsl/ fills it from Lua and turns it to and from canonical JSON; nothing here parses, checks or has behaviour.
// Defaults stand in dsl/schema.cc, once; the initial values here are only "nothing set".

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/agent.h"
#include "runtime/config/batch.h"
#include "runtime/config/checkpoint.h"
#include "runtime/config/data.h"
#include "runtime/config/evaluation.h"
#include "runtime/config/layout.h"
#include "runtime/config/model.h"
#include "runtime/config/numbers.h"
#include "runtime/config/optimizer.h"
#include "runtime/config/span.h"
#include "runtime/config/watch.h"

namespace cairn {

/// From the first step at which `at` has been trained on, other values. Made and read by dsl/stages.h.
struct RecipeStage {
  Span at;              // above 0; a fraction is of the recipe's stop
  std::string changes;  // canonical JSON: an object from canonical key path ("optimizer.peak_lr") to the new value
};

struct Recipe {
  std::string name;
  uint64_t seed = 0;
  Span stop;
  ModelConfig model;
  TokenizerConfig tokenizer;
  DataConfig data;
  ObjectiveConfig objective;
  BatchConfig batch;
  OptimizerConfig optimizer;
  DeviceChoice device = DeviceChoice::kAuto;
  Precision precision = Precision::kF32;
  LossScaleConfig loss_scale;
  Deterministic deterministic = Deterministic::kRun;  // what gives the same bits: one layout; any dp, tp, pp, ZeRO
  Sums sums = Sums::kRanked;                          // of ranks on CUDA: in their order, or as NCCL adds
  MeshConfig mesh;
  PipelineKind schedule = PipelineKind::k1F1B;
  RecomputeConfig recompute;
  CheckpointConfig checkpoint;
  InitConfig init;
  EvalConfig eval;
  LogConfig log;
  RestartConfig restart;
  WatchConfig watch;
  std::vector<Hook> hooks;
  std::vector<RecipeStage> stages;  // in the order of their beginnings
};

/// Whether rows of a sample stand and see otherwise than one after the other: prefixes, gaps, documents apart.
inline bool has_own_rows(const Recipe& recipe) {
  const ObjectiveConfig& objective = recipe.objective;
  if (objective.kind != ObjectiveConfig::Kind::kNextToken || objective.document_end >= 0) return true;
  for (const DataSource& source : recipe.data.sources) {
    if (source.kind == DataSource::Kind::kInstruct) return true;
  }
  return false;
}

}  // namespace cairn
