// Rules of the run: rates over its length, data and evaluation, checkpoints and where they go, its name.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <optional>
#include <string_view>
#include <vector>

#include "runtime/config/metric_name.h"
#include "runtime/core/url.h"
#include "runtime/plan/rule_list.h"

namespace cairn {
namespace {

std::string span_text(const Span& span) {
  static constexpr const char* kUnits[] = {"steps", "samples", "tokens", "of the run"};
  return fmt::format("{} {}", span.value, kUnits[static_cast<int>(span.unit)]);
}

void name(RuleList& rules) {
  const Recipe& recipe = rules.recipe;
  if (!rules.known({"name"})) return;
  const auto plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; };
  if (recipe.name.empty() || recipe.name.size() > 100 || recipe.name[0] == '.' || recipe.name[0] == '-' ||
      !std::all_of(recipe.name.begin(), recipe.name.end(), plain))
    rules.fail("name", fmt::format("name = \"{}\" cannot be the name of a folder", recipe.name),
               "1 to 100 letters, digits, - _ and dots, beginning with a letter, a digit or _");
}

/// What a run consumes is counted in tokens.
void length(RuleList& rules) {
  constexpr double kMostTokens = 0x1p53;
  const Recipe& recipe = rules.recipe;
  if (!rules.known({"stop", "batch.samples", "model.context"})) return;
  const auto context = static_cast<double>(recipe.model.context), batch = static_cast<double>(recipe.batch.samples);
  const bool steps = recipe.stop.unit == Span::Unit::kSteps;
  const double a_unit = steps ? batch * context : recipe.stop.unit == Span::Unit::kSamples ? context : 1;
  if (recipe.stop.unit == Span::Unit::kFraction || recipe.stop.value * a_unit <= kMostTokens) return;
  rules.fail(
      "stop",
      fmt::format("stop = {} of {} tokens{}: {:.3g} tokens are more than can be counted", span_text(recipe.stop),
                  a_unit, rules.where("stop", steps ? "batch.samples" : "model.context"), recipe.stop.value * a_unit),
      fmt::format("at most {:.0f} {}", std::floor(kMostTokens / a_unit), steps ? "steps" : "samples"));
}

/// The stage without `over`, from 1, or 0; none when the order of the stages is a mistake already.
std::optional<size_t> open_stage(RuleList& rules) {
  const std::vector<LrStage>& stages = rules.recipe.optimizer.lr;
  size_t open = 0;
  for (size_t i = 0; i < stages.size(); ++i) {
    const std::string path = fmt::format("optimizer.lr[{}]", i + 1);
    if (i > 0 && stages[i].kind == LrStage::Kind::kWarmup)
      rules.fail(path, fmt::format("{}: T.warmup starts from 0, so it can only be the first stage", path),
                 "T.warmup first, or T.linear up to a rate");
    if (stages[i].over.value != 0) continue;
    if (open > 0) {
      rules.fail(path,
                 fmt::format("{} has no `over`, and nor has stage {}: only one stage can take what the others leave",
                             path, open),
                 "over = T.steps(n), T.samples(n), T.tokens(n), T.epochs(n) or T.fraction(x)");
      return std::nullopt;
    }
    open = i + 1;
  }
  return open;
}

void rates(RuleList& rules) {
  const Recipe& recipe = rules.recipe;
  if (!rules.known({"optimizer.lr"})) return;
  const std::optional<size_t> open = open_stage(rules);
  if (!open || !rules.known({"stop"})) return;
  const Span& stop = recipe.stop;
  // Everything in samples. Spans do not add up where the sizes are not known, nor where a step is not as many samples
  // in the whole run: with a batch that changes, or that was another one in the past.
  const bool sizes =
      rules.known({"batch.samples", "model.context"}) && !rules.changes_batch() && rules.past.points.empty();
  const auto samples = [&](const Span& span) -> std::optional<double> {
    switch (span.unit) {
      case Span::Unit::kSteps:
        return span.value * static_cast<double>(recipe.batch.samples);
      case Span::Unit::kSamples:
        return span.value;
      case Span::Unit::kTokens:
        return span.value / static_cast<double>(recipe.model.context);
      case Span::Unit::kFraction:
        break;
    }
    return std::nullopt;
  };
  if (!sizes || stop.unit == Span::Unit::kFraction) return;
  const int64_t begin = recipe.optimizer.lr_from == LrFrom::kStage ? rules.past.lr_step : 0;
  const double whole = *samples(stop) - static_cast<double>(begin) * static_cast<double>(recipe.batch.samples);
  if (whole <= 0) return;  // a schedule that this run does not reach
  double used = 0;
  for (const LrStage& stage : recipe.optimizer.lr) {
    if (stage.over.value != 0)
      used += stage.over.unit == Span::Unit::kFraction ? stage.over.value * whole : *samples(stage.over);
  }
  if (*open > 0 && used >= whole * (1 - 1e-9)) {
    const std::string path = fmt::format("optimizer.lr[{}]", *open);
    rules.fail(path,
               fmt::format("{} has no time left: the other stages take all of stop = {}{}", path, span_text(stop),
                           rules.where(path, "stop")),
               "a later stop, or a shorter `over` of the others");
    return;
  }
  if (used > whole * (1 + 1e-9)) {
    const double steps = static_cast<double>(recipe.batch.samples);
    rules.fail(
        "optimizer.lr",
        fmt::format("optimizer.lr: its stages take {:.10g} steps, but the run stops after {:.10g}{} (stop = {}{})",
                    used / steps, whole / steps, begin > 0 ? " more" : "", span_text(stop),
                    rules.where("optimizer.lr", "stop")),
        "stages that sum to at most stop; leave out `over` of one to fill the rest");
  }
}

void data(RuleList& rules) {
  const Recipe& recipe = rules.recipe;
  if (!rules.known({"data"})) return;
  std::vector<std::string> names;
  for (const DataSource& source : recipe.data.sources) {
    if (std::find(names.begin(), names.end(), source.name) != names.end())
      rules.fail("data",
                 fmt::format("data: two sources are called \"{}\"; their losses could not be told apart", source.name),
                 "name = \"...\" in one of them");
    names.push_back(source.name);
  }
  if (!recipe.data.sources.empty() &&
      std::ranges::all_of(recipe.data.sources, [](const DataSource& source) { return source.weight == 0; }))
    rules.fail("data", "data: every source has weight 0, so that none is drawn from",
               "a weight > 0 in one of them at least");
  const bool packed = std::ranges::any_of(
      recipe.data.sources, [](const DataSource& source) { return source.kind == DataSource::Kind::kInstruct; });
  if (packed && recipe.objective.kind != ObjectiveConfig::Kind::kNextToken) {
    rules.fail("objective.kind",
               "objective.kind: T.instruct says itself which tokens are guessed, each by those before it",
               "next_token");
  }
  if (packed && recipe.model.mask == Mask::kBidirectional) {
    rules.fail("model.mask", "model.mask: T.instruct needs a causal mask, and it is bidirectional", "causal");
  }
  const bool by_sample = std::ranges::any_of(
      recipe.data.sources, [](const DataSource& source) { return source.weigh == DataSource::Weigh::kSample; });
  if (by_sample && recipe.model.mtp.depth > 0) {
    rules.fail("model.mtp.depth",
               fmt::format("model.mtp.depth = {}: the losses of further tokens always weigh by token, and a T.instruct "
                           "says weigh = \"sample\"{}",
                           recipe.model.mtp.depth, rules.where("model.mtp.depth", "data")),
               "0, or weigh = \"token\"");
  }
  if (const MaskRepeats& mask = recipe.data.mask_repeats; (mask.period > 0) != (mask.count > 0) || mask.count == 1)
    rules.fail("data",
               fmt::format("data.mask_repeats: {} tokens that stand {} times are no repeat", mask.period, mask.count),
               "T.repeats { period = 13, count = 32 }");
  if (recipe.eval.every_steps == 0) return;
  const bool valid = std::any_of(recipe.data.sources.begin(), recipe.data.sources.end(), [](const DataSource& source) {
    if (source.weight == 0) return false;  // it waits, and is not evaluated
    if (source.kind == DataSource::Kind::kTokenFile) return !source.valid_path.empty();
    return source.split.size() > 1 && source.split[1] > 0;
  });
  if (!valid)
    rules.fail(
        "eval.at",
        fmt::format("eval.at asks for evaluation, but data{} has no validation part", rules.where("eval.at", "data")),
        "split = { 95, 5 } in T.megatron or T.instruct, or valid = \"file\" in T.token_files");
}

void snapshots(RuleList& rules) {
  const Recipe& recipe = rules.recipe;
  const CheckpointConfig& config = recipe.checkpoint;
  if (config.in_flight == 0 && (config.snapshot_by != SnapshotBy::kCopy || config.replicate_steps > 0)) {
    rules.fail("checkpoint.in_flight",
               "checkpoint.in_flight = 0 leaves one slot, which is enough only for snapshot_by = \"copy\" "
               "without checkpoint.replicate",
               "snapshot_by = \"copy\" without replicate, or in_flight = 1");
  }
  if (recipe.checkpoint.snapshot_by != SnapshotBy::kCopy || recipe.optimizer.offload.empty()) return;
  rules.fail(
      "checkpoint.snapshot_by",
      fmt::format("checkpoint.snapshot_by = \"copy\" keeps the optimizer state in memory and copies it from there, but "
                  "optimizer.offload keeps it on a disk{}",
                  rules.where("checkpoint.snapshot_by", "optimizer.offload")),
      "snapshot_by = \"banks\", or no optimizer.offload");
}

/// Whether the recipe's run will have the metric, as far as it says so itself: the files of tasks say their names.
void known_metric(RuleList& rules, const std::string& field, std::string_view does, const std::string& name) {
  const Recipe& recipe = rules.recipe;
  const Result<MetricName> metric = parse_metric(name);
  if (!metric.ok())
    return rules.fail(field, fmt::format("{}: {}", field, metric.error().message),
                      "loss, valid_loss, valid_source_loss/SOURCE or eval/TASK/NUMBER");
  using Kind = MetricName::Kind;
  const std::string asks = fmt::format("{} {} {}", field, does, name);
  if (metric.value().kind == Kind::kTask && recipe.eval.tasks.empty())
    return rules.fail(field, fmt::format("{}, but eval.tasks is empty{}", asks, rules.where(field, "eval.tasks")),
                      "tasks = { T.task { \"facts.jsonl\" } } in T.eval");
  const bool valid = metric.value().kind == Kind::kValidLoss || metric.value().kind == Kind::kValidSourceLoss;
  if (valid && recipe.eval.every_steps == 0)
    return rules.fail(field, fmt::format("{}, but nothing is evaluated{}", asks, rules.where(field, "eval.at")),
                      "eval = T.eval { at = T.every { steps = n } }, or metric = \"loss\"");
  const auto& sources = recipe.data.sources;
  if (metric.value().kind == Kind::kValidSourceLoss &&
      std::ranges::find(sources, metric.value().of, &DataSource::name) == sources.end())
    rules.fail(field, fmt::format("{}, but no source has that name{}", asks, rules.where(field, "data")),
               "the name of a source of data");
}

void retention(RuleList& rules) {
  const Recipe& recipe = rules.recipe;
  for (const Keep& rule : recipe.checkpoint.keep) {
    if (rule.kind == Keep::Kind::kBest) known_metric(rules, "checkpoint.keep", "asks for the best", rule.metric);
  }
}

void early_stop(RuleList& rules) {
  const PatienceConfig& patience = rules.recipe.watch.early_stop;
  if (patience.metric.empty() != (patience.evaluations == 0))
    rules.fail("watch.early_stop",
               patience.metric.empty() ? "watch.early_stop names no metric"
                                       : "watch.early_stop does not say after how many evaluations the run ends",
               "T.patience { metric = \"valid_loss\", evaluations = 5 }");
  if (patience.metric.empty()) return;
  known_metric(rules, "watch.early_stop", "waits for a better", patience.metric);
  if (patience.metric == "loss")
    rules.fail("watch.early_stop", "watch.early_stop counts evaluations, and the loss is of each step",
               "metric = \"valid_loss\", \"valid_source_loss/SOURCE\" or \"eval/TASK/NUMBER\"");
}

/// Tasks of the run itself: what they need of the recipe.
void tasks(RuleList& rules) {
  const Recipe& recipe = rules.recipe;
  const EvalConfig& eval = recipe.eval;
  if (eval.tasks.empty()) {
    if (eval.tasks_steps > 0)
      rules.fail("eval.tasks_at", "eval.tasks_at asks for evaluations of tasks, and eval.tasks has none",
                 "tasks = { T.task { \"facts.jsonl\" } }");
    return;
  }
  if (eval.every_steps == 0 && eval.tasks_steps == 0)
    rules.fail("eval.tasks", "eval.tasks has tasks, and nothing says when they are evaluated",
               "tasks_at = T.every { steps = n }, or at for them and the validation loss");
  if (recipe.tokenizer.kind == TokenizerConfig::Kind::kNone)
    rules.fail("eval.tasks", "eval.tasks are texts, and the recipe names no tokenizer",
               "tokenizer = T.bytes, T.sentencepiece \"path\" or T.hf_tokenizer \"path\"");
  if (recipe.model.mask != Mask::kCausal || recipe.objective.kind != ObjectiveConfig::Kind::kNextToken)
    rules.fail(
        "eval.tasks",
        fmt::format("eval.tasks are for models that guess the next token{}", rules.where("eval.tasks", "objective")),
        "no tasks, or a causal mask and the objective of the next token");
}

void places(RuleList& rules) {
  const Recipe& recipe = rules.recipe;
  const std::vector<CopyTo>& places = recipe.checkpoint.copy_to;
  for (size_t i = 0; i < places.size(); ++i) {
    const std::string at = fmt::format("checkpoint.copy_to[{}]", i + 1);
    const std::string& path = places[i].path;
    const bool s3 = path.rfind("s3://", 0) == 0;
    if (path.empty() || (path.find("://") != std::string::npos && !s3) || (s3 && path.size() < 6 + 2))
      rules.fail("checkpoint.copy_to", fmt::format("{}: \"{}\" is no place for checkpoints", at, path),
                 "a directory, or s3://bucket/prefix");
    if (!s3 && !(places[i].endpoint.empty() && places[i].region.empty()))
      rules.fail("checkpoint.copy_to",
                 fmt::format("{}: endpoint and region are for S3, and \"{}\" is a directory", at, path),
                 "a path that begins with s3://");
    if (!places[i].ca_file.empty() && (!s3 || places[i].endpoint.rfind("http://", 0) == 0))
      rules.fail("checkpoint.copy_to",
                 fmt::format("{}: ca_file is for S3 over https, and {}", at,
                             s3 ? fmt::format("the endpoint is \"{}\"", places[i].endpoint)
                                : fmt::format("\"{}\" is a directory", path)),
                 s3 ? "endpoint = \"https://...\"" : "a path that begins with s3://");
    if (places[i].keep_every > 0 && places[i].keep_last == 0)
      rules.fail("checkpoint.copy_to", fmt::format("{}: keep_every has no meaning while keep_last = 0 keeps all", at),
                 "keep_last = n besides");
    for (size_t j = 0; j < i; ++j)
      if (places[j].path == path && places[j].endpoint == places[i].endpoint)
        rules.fail("checkpoint.copy_to", fmt::format("{}: \"{}\" is named twice", at, path), "each place once");
  }
}

std::string_view name_of(GuardAction action) {
  constexpr std::array<std::string_view, 5> kNames = {"roll_back", "stop", "skip", "lower_lr", "recompute"};
  return kNames[static_cast<size_t>(action)];
}

/// Each trouble has actions of its own, and roll_back needs a checkpoint to go back to.
void guards(RuleList& rules) {
  using enum GuardAction;
  const WatchConfig& watch = rules.recipe.watch;
  struct Trouble {
    const char* field;
    const std::vector<GuardAction>& actions;
    std::vector<GuardAction> possible;
  };
  const Trouble all[] = {{"watch.on_outlier", watch.on_outlier, {kRecompute, kSkip}},
                         {"watch.on_sdc", watch.on_sdc, {kRollBack, kStop}},
                         {"watch.on_divergence", watch.on_divergence, {kRollBack, kLowerLr, kStop}},
                         {"watch.on_drop", watch.on_drop, {kRollBack, kLowerLr, kStop}},
                         {"watch.on_not_finite", watch.on_not_finite, {kRollBack, kStop}}};
  for (const auto& [field, actions, possible] : all) {
    for (const GuardAction action : actions) {
      if (std::ranges::find(possible, action) != possible.end()) continue;
      std::vector<std::string_view> names;
      for (const GuardAction one : possible) names.push_back(name_of(one));
      rules.fail(field, fmt::format("{}: {} is no answer to it", field, name_of(action)),
                 fmt::format("{}", fmt::join(names, ", ")));
    }
    const bool goes_back = std::ranges::find(actions, kRollBack) != actions.end();
    if (goes_back && rules.recipe.checkpoint.save.empty())
      rules.fail(field, fmt::format("{}: roll_back needs a way back, and checkpoint.save is empty", field),
                 "checkpoint.save = { T.every { steps = n } }, or { \"stop\" }");
  }
  const bool again = watch.audit_steps > 0 || std::ranges::find(watch.on_outlier, kRecompute) != watch.on_outlier.end();
  if (again && rules.recipe.sums == Sums::kNccl)
    rules.fail("sums", "sums = \"nccl\" gives other bits each time, so that steps which are computed again differ",
               "sums = \"ranked\", or neither watch.audit nor recompute");
  if (!watch.on_sdc.empty() && watch.audit_steps == 0 && watch.replica_steps == 0)
    rules.fail("watch.on_sdc", "watch.on_sdc has no meaning: nothing looks for errors of the machine",
               "watch.audit = T.every { steps = n } besides, or watch.replicas");
}

void trackers(RuleList& rules) {
  using Kind = Tracker::Kind;
  const std::vector<Tracker>& all = rules.recipe.log.trackers;
  for (size_t i = 0; i < all.size(); ++i) {
    const Tracker& one = all[i];
    const std::string at = fmt::format("log.trackers[{}]", i + 1);
    const bool by_url = one.kind == Kind::kMlflow || one.kind == Kind::kOtlp;
    if (by_url && has_user_information(one.to)) {  // the text of the URL is in messages, so it is not in this one
      rules.fail(at,
                 fmt::format("{}: its URL has a user in front of the host, but {} in the environment carries secrets",
                             at, one.kind == Kind::kMlflow ? "MLFLOW_TRACKING_TOKEN" : "OTEL_EXPORTER_OTLP_HEADERS"),
                 "the URL without user and password");
    } else if (by_url && one.to.rfind("http://", 0) != 0 && one.to.rfind("https://", 0) != 0) {
      rules.fail(at, fmt::format("{}: \"{}\" is no URL", at, one.to), "http://... or https://...");
    }
    if (one.kind == Kind::kPrometheus && one.to.empty())
      rules.fail(at, fmt::format("{}: T.prometheus names no file", at), "T.prometheus \"/path/run.prom\"");
    if (one.kind == Kind::kPrometheus && !one.to.empty() && !one.to.ends_with(".prom"))
      rules.fail(at, fmt::format("{}: the collector reads only names that end in \".prom\", not \"{}\"", at, one.to),
                 "T.prometheus \"/path/run.prom\"");
    const bool twice = std::any_of(all.begin(), all.begin() + static_cast<ptrdiff_t>(i),
                                   [&](const Tracker& other) { return other.kind == one.kind && other.to == one.to; });
    if (twice) rules.fail(at, fmt::format("{}: this tracker is named twice", at), "each place once");
  }
}

void hooks(RuleList& rules) {
  const Recipe& recipe = rules.recipe;
  const bool has_best =
      std::ranges::any_of(recipe.checkpoint.keep, [](const Keep& rule) { return rule.kind == Keep::Kind::kBest; });
  for (size_t i = 0; i < recipe.hooks.size(); ++i) {
    const Hook& hook = recipe.hooks[i];
    const std::string at = fmt::format("hooks[{}]", i + 1);
    if (hook.events.empty()) rules.fail(at, at + ": T.on names no event", "T.on { \"saved\", run = {...} }");
    if (hook.run.empty() || hook.run.front().empty())
      rules.fail(at, fmt::format("{}: run names no program", at), "run = { \"program\", \"argument\", ... }");
    if ((hook.at_most > 0) != (hook.within_s > 0))
      rules.fail(at,
                 fmt::format("{}: at_most and within count together, and {} is missing", at,
                             hook.at_most > 0 ? "within" : "at_most"),
                 "at_most = 10, within = \"1h\"");
    if (std::ranges::find(hook.events, "best") != hook.events.end() && !has_best && rules.known({"checkpoint.keep"}))
      rules.fail(at,
                 fmt::format("{}: \"best\" is the checkpoint that T.best keeps, and checkpoint.keep has no T.best{}",
                             at, rules.where(at, "checkpoint.keep")),
                 "checkpoint.keep = { T.best {...}, ... }");
  }
}

}  // namespace

void run_rules(RuleList& rules) {
  length(rules);
  rates(rules);
  data(rules);
  snapshots(rules);
  retention(rules);
  early_stop(rules);
  tasks(rules);
  places(rules);
  guards(rules);
  trackers(rules);
  hooks(rules);
  name(rules);
}

}  // namespace cairn
