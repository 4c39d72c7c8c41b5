#pragma once
// Which samples a step trains on, found without a rank and without a model: from a recipe, or from what a run wrote
// down. The segments of its lineage are gone through as the run went through them, each with its recipe and its data.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "runtime/data/dataset.h"
#include "runtime/data/sampler.h"
#include "runtime/plan/batch_schedule.h"
#include "runtime/telemetry/metrics.h"
#include "tools/run/folder/lineage.h"

namespace cairn::tools {

/// One step's samples; what it refers to lives for the length of the visit.
struct OrderedStep {
  int64_t step = 0;
  std::vector<data::SampleRef> samples;
  std::vector<int64_t> epochs;                     // of each sample: passes over its source before this one
  bool trained = false;                            // a run has made an update of them, as its metrics.jsonl says
  std::vector<telemetry::OutlierSample> outliers;  // that it says of the step
  const data::Dataset& dataset;
  const Recipe& recipe;
};

class SampleOrder {
 public:
  /// All steps of a recipe, stages included, before any run of it. Errors: those of dsl::segments_ahead.
  static Result<SampleOrder> of_recipe(const Recipe& recipe);
  /// The steps that a run made and the one behind them, in which it may have failed. A run without a lineage is taken
  /// by its recipe. Errors: those of reading the run's records; kCorrupt for a damaged lineage.
  static Result<SampleOrder> of_run(const std::filesystem::path& run);

  int64_t last_step() const { return segments_.back().end; }

  /// The step that takes a position of the order, or passes over it; 0: the last step is before it.
  struct Place {
    int64_t step = 0;
    bool skipped = false;
  };
  Result<Place> place_of(int64_t position) const;
  /// The position behind the last one of step - 1, from 1 on; the last segment's rules hold behind last_step() too.
  Result<int64_t> begin_of(int64_t step) const;

  /// Steps first to last, 1 <= first <= last <= last_step(), in order. Errors: those of opening the data; kInvalidInput
  /// where the data are no longer those that were trained on, naming the source; kCorrupt where the run's own records
  /// disagree; what `visit` returns.
  Status visit(int64_t first, int64_t last, const std::function<Status(const OrderedStep&)>& visit) const;

 private:
  struct Segment {
    Recipe recipe;  // without stages
    RunPast past;
    PastPoint begin;
    int64_t end = 0;                            // its last step
    std::map<std::string, SourceContent> data;  // as it was trained on; empty: not known
    std::string lineage;                        // hash of its entry
  };
  /// Where to begin: a segment, and the sampler's state there; none: at position 0.
  struct Beginning {
    size_t segment = 0;
    std::optional<data::SamplerState> state;
  };
  Result<Beginning> beginning(int64_t first) const;
  Status visit_segment(const Segment& segment, int64_t first, int64_t last, std::optional<data::SamplerState>& state,
                       const std::function<Status(const OrderedStep&)>& visit) const;

  /// The run's line of a step; null: it has none.
  const telemetry::StepMetrics* told_of(int64_t step) const;
  /// Whether the run has made an update in the step, which ends `samples` samples from the beginning. Errors: kCorrupt
  /// where metrics.jsonl says another number.
  Result<bool> was_trained(int64_t step, int64_t samples) const;

  std::filesystem::path run_;                 // empty: of a recipe
  std::vector<telemetry::StepMetrics> told_;  // of the run, ascending
  std::vector<Segment> segments_;
};

}  // namespace cairn::tools
