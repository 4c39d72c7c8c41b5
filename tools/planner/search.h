#pragma once
// Finds layouts of a recipe for a number of devices with so much memory each, and says why the others lose. Every
// layout the program can run is costed (cost.h): sizes of the mesh, micro-batch, schedule, ZeRO stage, what
// is recomputed. From the fastest on, memory is then reckoned by the plan until enough of them fit. Pure.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/plan/plan.h"
#include "tools/planner/cost.h"
#include "tools/planner/course.h"

namespace cairn::tools {

struct Layout {
  int64_t tp = 1, dp = 1, pp = 1, virtual_stages = 1, micro = 1;
  int zero = 0;
  bool sequence_parallel = false;
  PipelineKind schedule = PipelineKind::k1F1B;
  RecomputeMode recompute = RecomputeMode::kNone;
  bool distribute = false;  // RecomputeConfig::distribute
  bool operator==(const Layout&) const = default;
};

/// What a person wants a layout to have; the search takes no other.
struct Pins {
  std::optional<int64_t> tp, pp, dp, virtual_stages, micro;
  std::optional<int> zero;
  std::optional<bool> sequence_parallel, distribute;
  std::optional<PipelineKind> schedule;
  std::optional<RecomputeMode> recompute;
  std::string text;  // as typed, for messages
  bool allow(const Layout& layout) const;
};

/// "tp=8,pp=4,schedule=1f1b". Errors: kInvalidInput naming the word, and what there is.
Result<Pins> parse_pins(std::string_view text);

struct Candidate {
  Layout layout;
  StepEstimate estimate;
  int64_t micro_batches = 0;
  double bubble = 0;        // of the pipeline's time
  int64_t rank_bytes = -1;  // of the fullest rank; -1: not reckoned
  bool exact = false;       // else rank_bytes is a lower bound, which does not fit already
  std::string loses;        // why it is not the choice; empty for the choice
  double ms() const { return estimate.cost.total(); }
};

struct SearchResult {
  int64_t layouts = 0;             // that the recipe can run at this world size
  std::vector<Candidate> fitting;  // fastest first; the first is the choice
  /// Each axis of the choice, set otherwise and nothing else changed: "zero 1: 3 % faster, but takes 93 GiB a rank".
  std::vector<std::string> reasons;
  /// Faster than the choice, but they do not fit; fastest first. Their first ones, which search_text() shows, are
  /// exact.
  std::vector<Candidate> too_large;
  int64_t least_bytes = -1;  // when nothing fits: of the smallest layout
};

/// The recipe with this layout. All layers are recomputed, or none.
Recipe with_layout(const Recipe& recipe, const Layout& layout);

/// "tp 8, pp 16, dp 8, micro 1, sequence parallel, ZeRO-1, interleaved 2, recompute full"
std::string layout_text(const Layout& layout);

/// Text for people, and an object for programs.
std::string search_text(const Recipe& recipe, const SearchResult& found, int64_t world, const Machine& machine);
nlohmann::json search_json(const SearchResult& found, const Machine& machine);

/// Layouts for `world` ranks that each have machine.usable_bytes(). Times are those of the plan of each layout in the
/// last batch phase of the run, bytes the most of any of its stages. Errors: kInvalidInput when the recipe can run on
/// this world in no layout that `pins` allow, with the reason of the last refusal.
Result<SearchResult> search_layouts(const Recipe& recipe, int64_t world, const Machine& machine, const Pins& pins,
                                    size_t wanted);

}  // namespace cairn::tools
