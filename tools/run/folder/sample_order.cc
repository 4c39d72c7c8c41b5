#include "tools/run/folder/sample_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "ckpt/retention/catalog.h"
#include "ckpt/start_state.h"
#include "ckpt/store/posix_backend.h"
#include "dsl/dsl.h"
#include "dsl/stages.h"
#include "runtime/telemetry/metrics.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

/// The segment's data as they were trained on: a source that has grown since is cut to the tokens it had.
Result<data::Dataset> open_as_trained(Recipe& recipe, const std::map<std::string, SourceContent>& then) {
  const int64_t vocab = recipe.model.vocab, context = recipe.model.context;
  RT_TRY_SET(data::Dataset dataset, data::open_dataset(recipe.data, vocab, context));
  if (then.empty()) return dataset;
  bool cut = false;
  for (size_t k = 0; k < dataset.sources.size(); ++k) {
    const auto found = then.find(dataset.sources[k].name);
    if (found == then.end() || dataset.sources[k].train->token_count() <= found->second.tokens) continue;
    recipe.data.sources[k].tokens = found->second.tokens;
    cut = true;
  }
  if (cut) {
    RT_TRY_SET(dataset, data::open_dataset(recipe.data, vocab, context));
  }
  for (const data::Dataset::Source& source : dataset.sources) {
    const auto found = then.find(source.name);
    if (found == then.end()) continue;
    const data::TokenSource& train = *source.train;
    RT_TRY_SET(const SourceContent now, content_of(train));
    if (now == found->second) continue;
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("data source {}: {} is not what the run trained on: content {} of {} tokens, now {} of "
                    "{}. Bring the old file back to its place",
                    source.name, train.name(), found->second.content, found->second.tokens, now.content, now.tokens)};
  }
  return dataset;
}

}  // namespace

Result<SampleOrder> SampleOrder::of_recipe(const Recipe& recipe) {
  SampleOrder out;
  RT_TRY_SET(std::vector<dsl::RunSegment> segments, dsl::segments_ahead(recipe));
  for (dsl::RunSegment& segment : segments) {
    if (segment.end.step <= segment.begin.step) continue;
    out.segments_.push_back({.recipe = std::move(segment.recipe),
                             .past = std::move(segment.past),
                             .begin = segment.begin,
                             .end = segment.end.step,
                             .data = {},
                             .lineage = {}});
  }
  return out;
}

Result<SampleOrder> SampleOrder::of_run(const fs::path& run) {
  RT_TRY_SET(const std::string recipe_json, recipe_of_run(run));
  std::vector<telemetry::StepMetrics> told;
  if (const fs::path metrics = run / "metrics.jsonl"; !is_gone(metrics)) {
    RT_TRY_SET(told, telemetry::read_metrics(metrics));
  }
  const int64_t last = told.empty() ? 1 : told.back().step + 1;
  RT_TRY_SET(const Lineage lineage, Lineage::read(run));
  if (!lineage.problem().empty()) return Error{ErrorCode::kCorrupt, lineage.problem()};
  std::vector<LineageEntry> entries = lineage.segments();
  std::erase_if(entries, [&](const LineageEntry& entry) { return entry.at.step >= last; });
  if (entries.empty()) {
    RT_TRY_SET(const Recipe recipe, dsl::decode_recipe(recipe_json).with((run / "recipe.resolved.json").string()));
    RT_TRY_SET(SampleOrder out, of_recipe(recipe));
    std::erase_if(out.segments_, [&](const Segment& segment) { return segment.begin.step >= last; });
    out.segments_.back().end = last;
    out.run_ = run;
    out.told_ = std::move(told);
    return out;
  }
  SampleOrder out;
  out.run_ = run;
  out.told_ = std::move(told);
  RunPast past;
  for (size_t k = 0; k < entries.size(); ++k) {
    LineageEntry& entry = entries[k];
    RT_TRY_SET(Recipe recipe, recipe_of_segment(run, entry));
    if (entry.at.step > 0) past.points.push_back(entry.at);
    out.segments_.push_back({.recipe = std::move(recipe),
                             .past = past,
                             .begin = entry.at,
                             .end = k + 1 < entries.size() ? entries[k + 1].at.step : last,
                             .data = std::move(entry.data),
                             .lineage = entry.hash});
  }
  return out;
}

/// A run that began elsewhere has no order from its beginning, and old data may be gone: the newest checkpoint before
/// the step knows where the order stood.
Result<SampleOrder::Beginning> SampleOrder::beginning(int64_t first) const {
  if (!run_.empty()) {
    ckpt::PosixBackend io;
    RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_unlabelled(io, run_ / "checkpoints"));
    for (auto info = catalog.checkpoints.rbegin(); info != catalog.checkpoints.rend(); ++info) {
      if (!info->complete || info->step >= first) continue;
      RT_TRY_SET(const ckpt::StartState state, ckpt::state_in(io, info->dir));
      const auto trained_by = std::ranges::find(segments_, state.lineage, &Segment::lineage);
      if (trained_by == segments_.end() || state.lineage.empty()) continue;  // of a line that the run went back behind
      if (info->step <= trained_by->begin.step || info->step > trained_by->end) continue;
      RT_TRY_SET(data::SamplerState sampler, data::sampler_state_from_json(state.position.sampler));
      return Beginning{static_cast<size_t>(trained_by - segments_.begin()), std::move(sampler)};
    }
  }
  if (const PastPoint& origin = segments_.front().begin; origin.samples > 0)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: its lineage begins at step {}, and no checkpoint of it is left from before step {}: "
                             "where its order stood is not known",
                             run_.string(), origin.step, first)};
  return Beginning{};
}

Result<SampleOrder::Place> SampleOrder::place_of(int64_t position) const {
  int64_t begin = segments_.front().begin.samples;  // the segment's first position
  for (const Segment& segment : segments_) {
    RT_TRY_SET(const SkippedPositions skip, SkippedPositions::parse(segment.recipe.batch.skip).with("batch.skip"));
    const std::vector<StepStage> stages = step_stages(segment.recipe, segment.past);
    const int64_t end = skip.after(begin, samples_after(stages, segment.end) - segment.begin.samples);
    if (position >= end) {
      begin = end;
      continue;
    }
    const int64_t trained = segment.begin.samples + (position - begin) - skip.count(begin, position);
    const int64_t step = steps_for_samples(stages, static_cast<double>(trained + 1));
    return Place{.step = std::max(step, segment.begin.step + 1), .skipped = skip.holds(position)};
  }
  return Place{};
}

Result<int64_t> SampleOrder::begin_of(int64_t step) const {
  int64_t begin = segments_.front().begin.samples;
  for (const Segment& segment : segments_) {
    RT_TRY_SET(const SkippedPositions skip, SkippedPositions::parse(segment.recipe.batch.skip).with("batch.skip"));
    const int64_t to = &segment == &segments_.back() ? step - 1 : std::min(step - 1, segment.end);
    begin =
        skip.after(begin, samples_after(step_stages(segment.recipe, segment.past), std::max(to, segment.begin.step)) -
                              segment.begin.samples);
    if (to == step - 1) break;
  }
  return begin;
}

const telemetry::StepMetrics* SampleOrder::told_of(int64_t step) const {
  const auto told = std::ranges::lower_bound(told_, step, {}, &telemetry::StepMetrics::step);
  return told == told_.end() || told->step != step ? nullptr : &*told;
}

Result<bool> SampleOrder::was_trained(int64_t step, int64_t samples) const {
  const telemetry::StepMetrics* told = told_of(step);
  if (told == nullptr) return false;
  if (told->samples != samples)
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: {} samples after step {}, and {} by its recipes: recipes or lineage.jsonl are not "
                             "those of this run",
                             (run_ / "metrics.jsonl").string(), told->samples, step, samples)};
  return told == told_.data() ? told->skipped == 0 : told->skipped == (told - 1)->skipped;
}

Status SampleOrder::visit(int64_t first, int64_t last, const std::function<Status(const OrderedStep&)>& visit) const {
  RT_TRY_SET(Beginning from, beginning(first));
  for (size_t k = from.segment; k < segments_.size() && segments_[k].begin.step < last; ++k)
    RT_TRY(visit_segment(segments_[k], first, last, from.state, visit));
  return {};
}

Status SampleOrder::visit_segment(const Segment& segment, int64_t first, int64_t last,
                                  std::optional<data::SamplerState>& state,
                                  const std::function<Status(const OrderedStep&)>& visit) const {
  Recipe recipe = segment.recipe;
  RT_TRY_SET(const data::Dataset dataset, open_as_trained(recipe, segment.data));
  RT_TRY_SET(const data::Sampler::Spec spec, data::sampler_spec(dataset, recipe));
  RT_TRY_SET(data::Sampler sampler, state ? data::Sampler::resume(spec, *state) : data::Sampler::make(spec));
  const std::vector<StepStage> stages = step_stages(recipe, segment.past);
  const auto go_to = [&](int64_t samples) -> Status {
    if (samples < sampler.trained())
      return Error{ErrorCode::kCorrupt, fmt::format("the order of samples stands behind {} samples, and step {} of the "
                                                    "recipe begins behind {}: they are not of one run",
                                                    sampler.trained(), first, samples)};
    sampler.advance(samples - sampler.trained());
    return {};
  };
  for (int64_t step = std::max(first, segment.begin.step + 1); step <= std::min(last, segment.end); ++step) {
    RT_TRY(go_to(samples_after(stages, step - 1)));
    OrderedStep out{.step = step,
                    .samples = sampler.peek(stages[stage_of_step(stages, step)].samples),
                    .epochs = {},
                    .trained = false,
                    .outliers = {},
                    .dataset = dataset,
                    .recipe = recipe};
    RT_TRY_SET(out.trained, was_trained(step, samples_after(stages, step)));
    if (const telemetry::StepMetrics* told = told_of(step)) out.outliers = told->outliers;
    for (const data::SampleRef& sample : out.samples) out.epochs.push_back(sampler.epoch_of(sample));
    RT_TRY(visit(out));
  }
  if (last <= segment.end) return {};
  RT_TRY(go_to(samples_after(stages, segment.end)));
  state = sampler.state();
  return {};
}

}  // namespace cairn::tools
