#include "tools/run/folder/start_verdict.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "dsl/compare.h"
#include "dsl/dsl.h"
#include "dsl/stages.h"
#include "runtime/core/count_text.h"
#include "runtime/data/dataset.h"
#include "runtime/data/sampler.h"
#include "runtime/optim/lr_schedule.h"
#include "runtime/plan/plan.h"
#include "tools/run/folder/text.h"

namespace cairn::tools {
namespace {

using dsl::ChangeClass;
using dsl::FieldChange;
using trainer::TrainPosition;

constexpr double kMostRise = 2;  // of the rate from one step to the next, unasked

bool reached(const Span& at, const Segment& now, const TrainPosition& position) {
  switch (at.unit) {
    case Span::Unit::kSteps:
      return static_cast<double>(position.step) >= at.value;
    case Span::Unit::kSamples:
      return static_cast<double>(position.samples) >= at.value;
    case Span::Unit::kTokens:
      return static_cast<double>(position.tokens) >= at.value;
    case Span::Unit::kFraction:
      return position.step >= RunClock(now.recipe, now.past).step_of(at, now.steps);
  }
  return false;
}

bool same_schedule(const Recipe& a, const Recipe& b) {
  return std::ranges::none_of(dsl::compare_recipes(a, b), [](const FieldChange& one) {
    return one.path == "optimizer.lr" || one.path == "optimizer.lr_from";
  });
}

/// Whether the schedule of `recipe`, behind the first `entered` of `stages`, begins at this position: `before` has
/// another one, or still had a stage ahead of it that sets it anew.
bool schedule_begins(const Recipe& recipe, std::span<const RecipeStage> entered, const Recipe* before) {
  if (before == nullptr || !same_schedule(*before, recipe)) return true;
  return std::ranges::any_of(entered, [&](const RecipeStage& stage) {
    return dsl::schedule_set(stage) && std::ranges::any_of(before->stages, [&](const RecipeStage& ahead) {
             return ahead.at.unit == stage.at.unit && ahead.at.value == stage.at.value &&
                    ahead.changes == stage.changes;
           });
  });
}

/// Whether the optimizer of `after` finds no moments of its own in the state of `before`: theirs are of another form.
bool moments_begin(const Recipe& before, const Recipe& after) {
  return StateKinds(before.optimizer).moments() != StateKinds(after.optimizer).moments();
}

/// The past as it is for `recipe` from this position on.
RunPast past_of(const Recipe& recipe, std::span<const RecipeStage> entered, const TrainPosition& position,
                const Recipe* before) {
  RunPast past = position.past;
  const PastPoint here{position.step, position.samples, position.tokens};
  if (here.step > 0 && RunClock(recipe, past).at(here.step) != here) past.points.push_back(here);
  if (recipe.optimizer.lr_from == LrFrom::kStart) {
    past.lr_step = 0;
    past.lr = 0;
  } else if (schedule_begins(recipe, entered, before)) {
    past.lr_step = position.step;
    // The schedule continues without the factors of guards, which learning_rate() adds.
    const double lowered = before != nullptr ? optim::lowered_by(before->watch.lowered_rates, position.step) : 1;
    past.lr = std::isfinite(position.lr) ? position.lr / lowered : 0;
  }
  if (before != nullptr && moments_begin(*before, recipe)) {
    // As the trainer counts them: without a loss scale no step is left out any more.
    const int64_t skipped = recipe.precision == Precision::kF16 ? position.loss_scale.skipped : 0;
    past.moments_from = position.step - skipped - position.guards.skipped;
  } else if (recipe.precision != Precision::kF16) {
    past.moments_from +=
        position.loss_scale.skipped;  // the trainer drops it with the scale; the optimizer's count stays
  }
  return past;
}

std::set<std::string> tensor_texts(const ModelConfig& model) {
  std::set<std::string> out;
  for (const TensorSpec& tensor : model_tensors(model)) {
    out.insert(fmt::format("{} [{}]", tensor.name, fmt::join(tensor.shape, ", ")));
  }
  return out;
}

/// "layers.2.attn.q.weight [32, 32], ... (9 more)": of one and not of the other.
std::string differing_tensors(const ModelConfig& before, const ModelConfig& after) {
  const std::set<std::string> a = tensor_texts(before), b = tensor_texts(after);
  std::vector<std::string> differ;
  std::ranges::set_symmetric_difference(a, b, std::back_inserter(differ));
  if (differ.empty()) return {};
  constexpr size_t kShown = 3;
  std::string out =
      fmt::format("{}", fmt::join(differ.begin(), differ.begin() + std::min(kShown, differ.size()), ", "));
  if (differ.size() > kShown) out += fmt::format(" and {} more", differ.size() - kShown);
  return out;
}

/// Whether `all` ends with `stages`.
bool end_with(std::span<const RecipeStage> all, std::span<const RecipeStage> stages) {
  const auto same = [](const RecipeStage& a, const RecipeStage& b) {
    return a.at.unit == b.at.unit && a.at.value == b.at.value && a.changes == b.changes;
  };
  return stages.size() <= all.size() && std::ranges::equal(stages, all.last(stages.size()), same);
}

class Judge {
 public:
  Judge(const StartRequest& request, StartVerdict& verdict, const Recipe& before)
      : request_(request), out_(verdict), before_(before), now_(verdict.segment.recipe) {}

  void fields();
  void stages(const Recipe& before);
  void tokenizer_file();
  Status data();
  void rate();

 private:
  void add(FieldVerdict verdict) {
    const auto names = [&](const std::vector<std::string>& fields) {
      return std::ranges::find(fields, verdict.field) != fields.end();
    };
    // What the recipe has said ahead, by a stage, is not asked for when it comes.
    const bool planned = !out_.edited && !verdict.field.starts_with("data.");
    verdict.accepted = planned || names(request_.accept) || names(request_.accepted);
    out_.changes.push_back(std::move(verdict));
  }
  std::optional<FieldVerdict> judge(const FieldChange& change) const;

  const StartRequest& request_;
  StartVerdict& out_;
  const Recipe& before_;
  const Recipe& now_;
};

/// Whether the field has the value that follows from others, and says nothing by itself: model.kv_heads of model.heads.
bool is_derived(const std::string& path, const Recipe& recipe) {
  std::map<std::string, nlohmann::json> values;
  for (dsl::StoredValue& value : dsl::stored_values(recipe)) values[value.path] = std::move(value.value);
  const auto get = [&](const std::string& of) -> std::optional<nlohmann::json> {
    const auto found = values.find(of);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  };
  for (const bool llama : {false, true}) {
    const std::optional<nlohmann::json> usual = dsl::derived_default(path, llama, get);
    if (usual && *usual == values[path]) return true;
  }
  return false;
}

std::optional<FieldVerdict> Judge::judge(const FieldChange& change) const {
  const dsl::ChangeRule& rule = dsl::change_rule(change.path);
  FieldVerdict out{change.path, change.before, change.after, rule.change, std::string(rule.says)};
  if (out.field.starts_with("model.") && out.change != ChangeClass::kExact) {
    if (const std::string tensors = differing_tensors(before_.model, now_.model); !tensors.empty()) {
      // A field that leaves the tensors as they are is not what makes them differ.
      Recipe alone = before_;
      const std::string only =
          dsl::set_field(alone, change).ok() ? differing_tensors(before_.model, alone.model) : tensors;
      if (!only.empty()) {
        out.change = ChangeClass::kRefused;
        out.says =
            fmt::format("other tensors ({}); a new run can begin with those that fit: T.init_from with `except`", only);
      }
    } else if (out.change == ChangeClass::kRefused) {
      out.change = ChangeClass::kAccept;
    }
  }
  if (out.field.starts_with("data.") && out.field.ends_with(".weigh")) {
    out.change = ChangeClass::kRule;
    out.says = "from the next step on";
  }
  const bool same_kind = before_.optimizer.kind == now_.optimizer.kind;
  if (out.field == (same_kind ? "optimizer.beta1" : "optimizer.kind") && moments_begin(before_, now_)) {
    out.change = ChangeClass::kAccept;
    out.says = fmt::format(
        "the moments are of another form: they begin at zero, and bias correction counts from here. Warm the rate up "
        "again, as by T.stage {{ at = T.steps({}), optimizer = {{ lr = T.schedule {{ T.linear {{ over = T.steps(1), to "
        "= 0 }}, T.linear {{ over = T.steps(100), to = {:.3g} }}, T.hold {{}} }} }} }}",
        out_.state.step(), now_.optimizer.peak_lr);
  }
  const text::TokenizerHashes &words_then = request_.tokenizer_before, &words_now = request_.tokenizer_now;
  if (out.field == "tokenizer" && before_.tokenizer.kind == now_.tokenizer.kind && !words_then.file.empty() &&
      words_then.file == words_now.file && text::tokenizer_changes("", words_then, words_now).empty()) {
    out.change = ChangeClass::kExact;
    out.says = "the same file, elsewhere";
  }
  if (out.field == "optimizer.ema" && now_.optimizer.ema == 0) {
    out.change = ChangeClass::kAccept;
    out.says = "the average is dropped";
  }
  if (out.field.starts_with("batch.")) {
    const trainer::TrainPosition& at = out_.state.position;
    out.says = fmt::format("{}, which is sample {}", out.says, at.samples);
  }
  if (out.field == "batch.phases" || out.field == "batch.ramp" || out.field.starts_with("batch.ramp.")) {
    out.says += "; what of it lies before counts as begun here";
  }
  return out;
}

/// `before`: with the stages that were ahead of it.
void Judge::stages(const Recipe& before) {
  Recipe ahead = now_;
  ahead.stages = out_.segment.remaining.stages;
  const bool stay = end_with(request_.recipe.stages, before.stages) && end_with(before.stages, ahead.stages);
  if (!out_.edited || stay || request_.init || out_.state.bare) return;
  for (const FieldChange& change : dsl::compare_recipes(before, ahead)) {
    if (change.path == "stages") add(*judge(change));
  }
}

void Judge::tokenizer_file() {
  const std::vector<text::TokenizerChange> changes =
      text::tokenizer_changes(now_.tokenizer.path, request_.tokenizer_before, request_.tokenizer_now);
  if (changes.empty() || request_.init) return;
  if (std::ranges::any_of(out_.changes, [](const FieldVerdict& one) { return one.field == "tokenizer"; })) return;
  std::string names;
  for (const text::TokenizerChange& one : changes) names += fmt::format("{}{}", names.empty() ? "" : ", ", one.path);
  add({"tokenizer", changes[0].then, changes[0].now, ChangeClass::kAccept,
       fmt::format("another content of {}: {}", names, dsl::change_rule("tokenizer").says)});
}

void Judge::fields() {
  // What begins with somebody else's state is asked for what its weights mean, as with a Hugging Face folder: which
  // tensors are taken is told by their names and shapes, and rate, data and length are the new run's own.
  const bool begins = request_.init || out_.state.bare;
  const bool loses_moments = !request_.init && out_.state.step() > 0 && moments_begin(before_, now_);
  for (const FieldChange& change : dsl::compare_recipes(before_, now_)) {
    const bool of_moments = loses_moments && (change.path == "optimizer.kind" || change.path == "optimizer.beta1");
    if (begins && !of_moments && (!change.path.starts_with("model.") || change.path == "model.context")) continue;
    if (is_derived(change.path, before_) && is_derived(change.path, now_)) continue;
    std::optional<FieldVerdict> verdict = judge(change);
    if (!verdict || (begins && verdict->change == ChangeClass::kRefused)) continue;
    add(std::move(*verdict));
  }
}

/// What another content of the data does to the order of the samples that are still to come.
Status Judge::data() {
  if (out_.state.position.sampler.empty() || request_.init) return {};
  RT_TRY_SET(const data::Dataset dataset, data::open_dataset(now_.data, now_.model.vocab, now_.model.context));
  RT_TRY_SET(const data::SamplerState state, data::sampler_state_from_json(out_.state.position.sampler));
  RT_TRY_SET(const data::Sampler::Spec spec, data::sampler_spec(dataset, now_));
  RT_TRY_SET(const std::vector<data::OrderChange> changes, data::Sampler::changes(spec, state));
  using Kind = data::OrderChange::Kind;
  // Where no source of before is left, whether by intent or by a wrong path, these are other data.
  const auto came = [](const data::OrderChange& change) {
    return change.kind == Kind::kAdded || change.kind == Kind::kReplaced;
  };
  const bool all_other = std::ranges::count_if(changes, came) == std::ssize(now_.data.sources);
  for (const data::OrderChange& change : changes) {
    if (change.kind == Kind::kSeqLen) continue;  // model.context says it
    if (change.kind == Kind::kSeed) {            // where neither field of a recipe says it
      const bool told = std::ranges::any_of(
          out_.changes, [](const FieldVerdict& one) { return one.field == "seed" || one.field == "data.seed"; });
      if (!told) add({"seed", change.before, change.after, ChangeClass::kAccept, change.text});
      continue;
    }
    if (change.kind == Kind::kWeights) {
      bool told = false;
      for (FieldVerdict& one : out_.changes) {
        if (!one.field.starts_with("data.") || !one.field.ends_with(".weight")) continue;
        if (one.change == ChangeClass::kRule) continue;
        one.change = ChangeClass::kRule;
        one.says = change.text;
        told = true;
      }
      if (!told) add({"data.weights", change.before, change.after, ChangeClass::kRule, change.text});
      continue;
    }
    const std::string field = "data." + change.source;
    const auto weight = std::ranges::find(out_.changes, field + ".weight", &FieldVerdict::field);
    const bool of_weight = change.kind == Kind::kReturned || change.kind == Kind::kRemoved;
    if (of_weight && weight != out_.changes.end()) {  // to or from 0, and in the recipe all the time
      weight->change = ChangeClass::kRule;
      weight->says = change.text;
      continue;
    }
    const bool asks = change.kind == Kind::kReplaced || (all_other && change.kind == Kind::kAdded);
    std::erase_if(out_.changes, [&](const FieldVerdict& one) { return one.field == field; });
    add({field, change.before, change.after, asks ? ChangeClass::kAccept : ChangeClass::kRule,
         change.text + (asks && change.kind == Kind::kAdded ? "; no source that the run was trained on is left" : "")});
  }
  return {};
}

void Judge::rate() {
  const TrainPosition& at = out_.state.position;
  const int64_t next = at.step + 1;
  const auto rate = [&](const Recipe& recipe, const RunPast& past) {
    return optim::learning_rate(recipe, next, RunClock(recipe, past).step_of(recipe.stop, 0), past);
  };
  out_.lr_next = rate(now_, out_.segment.past);
  if (request_.init || out_.state.bare || out_.finished) return;
  // A schedule that begins here begins at the rate so far.
  if (now_.optimizer.lr_from == LrFrom::kStage && out_.segment.past.lr_step == at.step) return;
  const double as_before = std::max(at.lr, rate(before_, at.past));
  if (!out_.changed() || !(out_.lr_next > kMostRise * as_before)) return;
  const std::string says = fmt::format(
      "the rate more than doubles between two steps: {:.3g} at step {}, {:.3g} at step {}; a smooth way is T.stage {{ "
      "at "
      "= T.steps({}), optimizer = {{ lr = T.schedule {{...}} }} }}, which begins at the rate so far",
      at.lr, at.step, out_.lr_next, next, at.step);
  for (FieldVerdict& one : out_.changes) {
    if (one.field != "optimizer.lr") continue;
    one.change = ChangeClass::kAccept;
    one.says = says;
    return;
  }
  add({"optimizer.lr", fmt::format("{:.3g}", at.lr), fmt::format("{:.3g}", out_.lr_next), ChangeClass::kAccept, says});
}

/// Whether `before`, with the stages that were ahead of it, is not what `whole` is from one of its segments on, in
/// anything that is trained.
Result<bool> is_edited(const Recipe& before, const Recipe& whole) {
  if (!end_with(whole.stages, before.stages)) return true;
  RT_TRY_SET(std::vector<Recipe> recipes, dsl::recipe_segments(whole));
  Recipe then = before;
  then.stages.clear();
  return std::ranges::any_of(
      dsl::compare_recipes(then, recipes[whole.stages.size() - before.stages.size()]),
      [](const FieldChange& one) { return dsl::change_rule(one.path).change != ChangeClass::kExact; });
}

std::string mesh_text(const ckpt::MeshInfo& mesh) {
  std::string out = fmt::format("tp {} pp {} dp {}", mesh.tp, mesh.pp, mesh.dp);
  if (mesh.cp > 1) out += fmt::format(" cp {}", mesh.cp);
  if (mesh.ep > 1) out += fmt::format(" ep {}", mesh.ep);
  if (mesh.zero > 0) out += fmt::format(" zero {}", mesh.zero);
  return out;
}

}  // namespace

std::string FieldVerdict::text() const {
  const std::string from = before.empty() ? "(none)" : before, to = after.empty() ? "(none)" : after;
  return fmt::format("{} {} -> {}: {}", field, from, to, says);
}

Result<Segment> segment_at(const Recipe& whole, const TrainPosition& position, const Recipe* before) {
  RT_TRY_SET(std::vector<Recipe> recipes, dsl::recipe_segments(whole));
  Segment out;
  const auto take = [&](size_t index) {
    out.index = static_cast<int64_t>(index);
    out.recipe = std::move(recipes[index]);
    out.past = past_of(out.recipe, std::span(whole.stages).first(index), position, before);
    out.steps = RunClock(out.recipe, out.past).step_of(out.recipe.stop, 0);
  };
  take(0);
  size_t k = 0;
  while (k < whole.stages.size() && reached(whole.stages[k].at, out, position)) take(++k);
  out.remaining = out.recipe;
  out.remaining.stages.assign(whole.stages.begin() + static_cast<std::ptrdiff_t>(k), whole.stages.end());
  RT_TRY_SET(out.course, dsl::segments_ahead(out.remaining, out.past, position.step));
  out.end_step = out.course.front().end.step;
  out.stage_follows = out.course.size() > 1;
  out.run_steps = out.course.back().end.step;
  if (trainer::ended_early(out.recipe.watch.early_stop, position.patience)) {
    out.ended_early = true;
    out.end_step = out.run_steps = position.step;
    out.stage_follows = false;
  }
  return out;
}

bool StartVerdict::changed() const {
  return std::ranges::any_of(changes, [](const FieldVerdict& one) { return one.change != ChangeClass::kExact; });
}

Status StartVerdict::check(const StartRequest& request) const {
  const std::string of = request.init ? state.place : request.run;
  if (finished) {
    std::string text;
    for (const FieldVerdict& one : changes) {
      if (one.change == ChangeClass::kExact || one.field == "stop") continue;
      text += fmt::format("\n  {} {}, now {}", one.field, one.before, one.after);
    }
    if (text.empty()) return {};
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("{} has finished, at step {} of {}, with another recipe:{}\nA new experiment needs a new folder "
                    "(--run); to train on: a larger stop; to begin from its weights: --init-from {}",
                    of, state.step(), segment.run_steps, text, of)};
  }
  std::string text, accept;
  for (const FieldVerdict& one : changes) {
    if (!one.refused()) continue;
    text += "\n  " + one.text();
    if (one.change == ChangeClass::kAccept) accept += " --accept " + one.field;
  }
  if (text.empty()) return {};
  std::string remedy = "Nothing was changed. Set it back";
  if (!accept.empty()) remedy += fmt::format(", or resume all the same with{}", accept);
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{} was trained up to step {} with another recipe:{}\n{}", of, state.step(), text, remedy)};
}

std::string StartVerdict::describe(int64_t world) const {
  const int64_t to_stage = segment.end_step - state.step();
  const std::string until =
      segment.stage_follows ? fmt::format(", {} of them until the next stage", to_stage) : std::string();
  if (!state.any()) return fmt::format("a fresh start: {}{}", count_text(segment.run_steps, "step"), until);
  const trainer::TrainPosition& at = state.position;
  const MeshConfig& mesh = segment.recipe.mesh;
  const int64_t dp = mesh.dp > 0 ? mesh.dp : std::max<int64_t>(1, world / (mesh.tp * mesh.pp * mesh.cp));
  const ckpt::MeshInfo wanted{
      .tp = mesh.tp, .pp = mesh.pp, .dp = dp, .zero = segment.recipe.optimizer.zero, .ep = mesh.ep, .cp = mesh.cp};
  const std::string here = mesh_text(wanted), there = mesh_text(state.mesh);
  std::string out = fmt::format("{} step {} ({}{})", finished ? "is at" : "resumes from", at.step,
                                state.source == ckpt::StartState::Source::kMemory ? "shared memory" : state.place,
                                here == there ? "" : fmt::format(", {} -> {}", there, here));
  if (finished) return out + fmt::format("; nothing remains to be trained, the run ends at step {}", segment.run_steps);
  out += state.bare ? fmt::format("; lr {:.3g}", lr_next) : fmt::format("; lr {:.3g} -> {:.3g}", at.lr, lr_next);
  return out + fmt::format("; {} steps remain{}", segment.run_steps - at.step, until);
}

std::vector<std::string> StartVerdict::lines(int64_t world) const {
  std::vector<std::string> out;
  for (const std::string& one : state.passed_over) out.push_back("passed over: " + one);
  out.push_back(describe(world));
  std::string exact;
  for (const FieldVerdict& one : changes) {
    if (one.change == ChangeClass::kExact) {
      exact += (exact.empty() ? "" : ", ") + one.field;
    } else {
      out.push_back(one.text());
    }
  }
  out.insert(out.end(), notes.begin(), notes.end());
  if (!exact.empty()) out.push_back(fmt::format("other than before, without a change to what is trained: {}", exact));
  return out;
}

nlohmann::json StartVerdict::json() const {
  nlohmann::json out{{"step", state.step()},
                     {"source", !state.any()                                        ? "fresh"
                                : state.source == ckpt::StartState::Source::kMemory ? "memory"
                                                                                    : "disk"},
                     {"place", state.place},
                     {"samples", state.position.samples},
                     {"tokens", state.position.tokens},
                     {"lr", state.position.lr},
                     {"lr_next", lr_next},
                     {"steps", segment.run_steps},
                     {"stage", segment.index},
                     {"finished", finished},
                     {"passed_over", state.passed_over},
                     {"changes", nlohmann::json::array()}};
  for (const FieldVerdict& one : changes) out["changes"].push_back(one.json());
  return out;
}

nlohmann::json FieldVerdict::json() const {
  return {{"field", field},
          {"before", before},
          {"after", after},
          {"class", dsl::change_class_name(change)},
          {"rule", says}};
}

Status check_accepted_names(const std::vector<std::string>& accept, const Recipe& recipe) {
  std::vector<std::string> names = dsl::field_paths();
  for (const DataSource& source : recipe.data.sources) names.push_back("data." + source.name);
  for (const std::string& field : accept) {
    // A source that is there no more, or a part of one, has no field of its own.
    if (field.starts_with("data.") || std::ranges::find(names, field) != names.end()) continue;
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--accept {}: no field of a recipe has that name{}", field, suggestion(field, names))};
  }
  return {};
}

Result<StartVerdict> judge_start(const StartRequest& request, ckpt::StartState state) {
  StartVerdict out{.state = std::move(state)};
  if (request.weights_only) out.state.position = {};  // a new run's beginning
  std::optional<Recipe> before;
  if (!out.state.recipe.empty()) {
    RT_TRY_SET(before, dsl::decode_recipe(out.state.recipe).with("recipe in " + out.state.place));
  }
  RT_TRY_SET(out.segment, segment_at(request.recipe, out.state.position, before ? &*before : nullptr));
  if (const TrainPosition& at = out.state.position; out.state.any() && at.step > 0 && at.sampler.empty()) {
    out.notes.push_back(
        fmt::format("data begins anew: the {} that another trainer took are not known here; the recipe's own order "
                    "begins at sample 0",
                    at.samples > 0 ? count_text(at.samples, "sample") : "samples"));
  }
  out.finished = out.state.any() && !request.weights_only && !out.segment.stage_follows &&
                 (out.segment.steps <= out.state.step() || out.segment.ended_early);
  if (!out.state.any() || !before) {
    out.lr_next = optim::learning_rate(out.segment.recipe, out.state.step() + 1, out.segment.steps, out.segment.past);
    return out;
  }
  RT_TRY_SET(out.edited, is_edited(*before, request.recipe));
  Recipe trained = *before;
  trained.stages.clear();
  Judge judge(request, out, trained);
  judge.fields();
  judge.stages(*before);
  judge.tokenizer_file();
  RT_TRY(judge.data());
  judge.rate();
  return out;
}

}  // namespace cairn::tools
