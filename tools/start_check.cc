#include "tools/start_check.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "ckpt/format/names.h"
#include "ckpt/mirror/place.h"
#include "ckpt/node.h"
#include "ckpt/persist/read.h"
#include "ckpt/plan/free_copies.h"
#include "ckpt/restore.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/run_memory.h"
#include "ckpt/snapshot/memory_room.h"
#include "ckpt/start_state.h"
#include "ckpt/store/posix_backend.h"
#include "dsl/dsl.h"
#include "runtime/config/metric_name.h"
#include "runtime/core/count_text.h"
#include "runtime/cuda/nccl_api.h"
#include "runtime/cuda/recipe/refusals.h"
#include "runtime/data/dataset.h"
#include "runtime/data/order.h"
#include "runtime/data/token_scan.h"
#include "runtime/json/json.h"
#include "runtime/plan/activations.h"
#include "runtime/text/tokenizer.h"
#include "runtime/trainer/replicas.h"
#include "runtime/trainer/staging_rooms.h"
#include "runtime/trainer/sum_rooms.h"
#include "tools/attention_option.h"
#include "tools/commands.h"
#include "tools/hf_start.h"
#include "tools/init_options.h"
#include "tools/model_source.h"
#include "tools/recipe_tasks.h"
#include "tools/run/agent/copies.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/start.h"
#include "tools/run/hosts/replicas.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// What is found goes here; `field` of the recipe, empty for machine and folder.
class Findings {
 public:
  explicit Findings(StartReport& report) : report_(report) {}
  void refuse(std::string field, std::string message, ErrorCode code = ErrorCode::kInvalidInput) {
    refuse(std::move(field), Error{code, std::move(message)});
  }
  void refuse(std::string field, const Error& error) {
    report_.problems.push_back({std::move(field), error.message, error.code, error.os_errno});
  }
  void warn(std::string field, std::string message, bool start_says_it = false) {
    report_.warnings.push_back({std::move(field), std::move(message), ErrorCode::kInvalidInput, 0, start_says_it});
  }

 private:
  StartReport& report_;
};

// --- Data

std::string source_field(const Recipe& recipe, size_t k) {
  return recipe.data.sources.size() == 1 ? "data" : fmt::format("data.sources[{}]", k + 1);
}

/// The tokens of a source that windows of the run can reach, in its training part and, where that is read, the other.
int64_t reachable(const data::Dataset::Source& source, const Recipe& recipe, data::DataPart part) {
  const bool train = part == data::DataPart::kTrain;
  const data::TokenSource* const tokens = train ? source.train.get() : source.valid.get();
  if (tokens == nullptr || (!train && recipe.eval.every_steps == 0)) return 0;
  const int64_t windows = data::window_count(tokens->token_count(), recipe.model.context);
  return windows == 0 ? 0 : windows * recipe.model.context + 1;
}

/// All ids that the run may read, as far as `seconds` suffice; each part of a source has its share of them.
void scan_ids(const data::Dataset& dataset, const std::vector<size_t>& index, const Recipe& recipe, double seconds,
              DataFacts& facts, StartReport& report) {
  constexpr std::array kParts = {data::DataPart::kTrain, data::DataPart::kValid};
  Findings findings(report);
  int64_t all = 0;
  for (const data::Dataset::Source& source : dataset.sources) {
    for (const data::DataPart part : kParts) all += reachable(source, recipe, part);
  }
  for (size_t s = 0; s < dataset.sources.size(); ++s) {
    const data::Dataset::Source& source = dataset.sources[s];
    SourceFacts& of = facts.sources[index[s]];
    const DataSource& config = recipe.data.sources[index[s]];
    const std::string field = source_field(recipe, index[s]);
    int64_t looked = 0, wanted = 0;
    for (const data::DataPart part : kParts) {
      const int64_t tokens = reachable(source, recipe, part);
      if (tokens == 0) continue;
      const Result<data::ScanReport> scanned =
          data::scan_tokens(part == data::DataPart::kTrain ? *source.train : *source.valid, tokens,
                            {.vocab = recipe.model.vocab,
                             .threads = 0,
                             .seconds = seconds * static_cast<double>(tokens) / static_cast<double>(all)});
      if (!scanned.ok()) {
        findings.refuse(field, scanned.error());
        continue;
      }
      const data::ScanReport& ids = scanned.value();
      looked += ids.tokens;
      wanted += ids.of;
      of.largest_id = std::max(of.largest_id, ids.ids.greatest);
      if (ids.bad.ok()) continue;
      findings.refuse(field,
                      fmt::format("{} ({} of {} looked at are outside, from {} to {}); make it with the recipe's "
                                  "tokenizer, or give model.vocab at least {} rows",
                                  ids.bad.error().message, ids.ids.outside, count_text(ids.tokens, "id"), ids.ids.least,
                                  ids.ids.greatest, std::max(ids.ids.greatest + 1, recipe.model.vocab)),
                      ErrorCode::kCorrupt);
    }
    of.scanned = wanted > 0 ? static_cast<double>(looked) / static_cast<double>(wanted) : 1;
    if (looked == wanted) continue;
    report.facts.push_back(fmt::format(
        "source {}: {:.3g} % of its ids were looked at, as far as {:g} s go; `cairn data info {}{} --vocab {}` looks "
        "at "
        "all",
        of.name, 100 * of.scanned, seconds, of.path,
        config.kind == DataSource::Kind::kTokenFile ? " --dtype " + config.dtype : std::string(), recipe.model.vocab));
  }
}

/// Samples of each source, by its name, over the complete run: those drawn, and those to come by each segment's
/// weights.
std::map<std::string, double> samples_of(const Course& course, const std::string& sampler) {
  std::map<std::string, double> out;
  const auto add = [&](const Recipe& recipe, int64_t samples) {
    double weights = 0;
    for (const DataSource& source : recipe.data.sources) weights += source.weight;
    for (const DataSource& source : recipe.data.sources) {
      if (weights > 0) out[source_name(source)] += source.weight / weights * static_cast<double>(samples);
    }
  };
  const Result<data::SamplerState> drawn = data::sampler_state_from_json(sampler);
  const bool named = drawn.ok() && std::ranges::none_of(drawn.value().sources, [](const data::SourceState& source) {
                       return source.name.empty();  // of version 1
                     });
  if (named) {
    for (const data::SourceState& source : drawn.value().sources) out[source.name] += static_cast<double>(source.taken);
  } else {
    add(course.segments.front().recipe, course.segments.front().begin.samples);
  }
  for (const dsl::RunSegment& segment : course.segments)
    add(segment.recipe, std::max<int64_t>(0, segment.end.samples - segment.begin.samples));
  return out;
}

/// The validation windows of each source, and which of them the batches of an evaluation hold.
void check_validation(const data::Dataset& dataset, const Recipe& recipe, const Plan& plan, DataFacts& facts,
                      Findings& findings) {
  const int64_t batch = plan.step_stages.back().samples;
  const Result<data::ValidationSet> made =
      data::ValidationSet::make(dataset, recipe.model.context, batch, recipe.eval.steps);
  if (!made.ok()) return findings.refuse("eval", made.error());
  const data::ValidationSet& set = made.value();
  facts.valid_batches = set.batches();
  for (int64_t b = 0; b < set.batches(); ++b) {
    for (const data::SampleRef& sample : set.batch(b))
      ++facts.sources[static_cast<size_t>(sample.source)].valid_samples;
  }
  if (set.batches() == 0) return;  // eval.steps = 0
  for (size_t k = 0; k < facts.sources.size(); ++k) {
    const SourceFacts& source = facts.sources[k];
    if (source.valid_samples > 0 || source.weight == 0) continue;
    const std::string why =
        source.valid_tokens == 0 ? "has no validation part"
        : source.valid_windows == 0
            ? fmt::format("has {} in its validation part, and a window needs {}",
                          count_text(source.valid_tokens, "token"), recipe.model.context + 1)
            : fmt::format("has so little weight ({:.3g}) that none of the {} validation windows is of it",
                          source.weight, set.batches() * batch);
    findings.warn(source_field(recipe, k),
                  fmt::format("source {} {}: the validation loss, and T.best by it, say nothing of this source; {}",
                              source.name, why,
                              source.valid_windows == 0 ? data::larger_validation(recipe.data.sources[k].kind)
                                                        : "evaluate more batches (eval.steps)"));
  }
}

/// A source that a later stage brings: its files may still come.
void add_later(const DataSource& config, const dsl::RunSegment& segment, double samples, DataFacts& facts,
               Findings& findings) {
  SourceFacts& of = facts.sources.emplace_back();
  of.path = config.path;
  of.name = source_name(config);
  of.weight = 0;
  of.samples = samples;
  const Result<data::Dataset::Source> opened =
      data::open_source(config, segment.recipe.model.vocab, segment.recipe.model.context);
  if (!opened.ok()) {
    of.problem = opened.error().message;
    return findings.warn(fmt::format("stages[{}]", segment.stages),
                         fmt::format("source {}, from step {} on: {}", of.name, segment.begin.step + 1, of.problem));
  }
  const int64_t context = segment.recipe.model.context;
  of.train_tokens = opened.value().train->token_count();
  of.train_windows = data::window_count(of.train_tokens, context);
  of.valid_tokens = opened.value().valid ? opened.value().valid->token_count() : 0;
  of.valid_windows = data::window_count(of.valid_tokens, context);
}

/// The validation windows of segments to come, which would end with an error of their ranks where they are too few.
void check_later_validation(data::Dataset& dataset, const Recipe& recipe, const Course& course, Findings& findings) {
  for (size_t k = 1; k < course.plans.size(); ++k) {
    const Recipe& then = course.segments[k].recipe;
    if (then.eval.every_steps == 0 || then.data.sources.size() != recipe.data.sources.size()) continue;
    for (size_t i = 0; i < dataset.sources.size(); ++i) dataset.sources[i].weight = then.data.sources[i].weight;
    const auto made = data::ValidationSet::make(dataset, then.model.context, course.plans[k].step_stages.back().samples,
                                                then.eval.steps);
    if (made.ok()) continue;
    return findings.refuse("stages", fmt::format("stages[{}]: {}", course.segments[k].stages, made.error().message));
  }
}

}  // namespace

DataFacts check_data(const Plan& plan, const Course& course, const std::string& sampler_state, double scan_seconds,
                     StartReport& report) {
  const Recipe& recipe = plan.recipe;
  Findings findings(report);
  DataFacts out;
  data::Dataset dataset;      // those that could be opened
  std::vector<size_t> index;  // of each in the recipe
  const int64_t context = recipe.model.context;
  double weights = 0;
  for (const DataSource& source : recipe.data.sources) weights += source.weight;
  const std::map<std::string, double> samples = samples_of(course, sampler_state);
  const auto drawn_of = [&](const std::string& name) {
    const auto found = samples.find(name);
    return found == samples.end() ? 0 : found->second;
  };
  std::set<std::string> names;
  bool all_there = true;
  for (size_t k = 0; k < recipe.data.sources.size(); ++k) {
    const DataSource& config = recipe.data.sources[k];
    const std::string field = source_field(recipe, k);
    SourceFacts& facts = out.sources.emplace_back();
    facts.path = config.path;
    facts.name = source_name(config);
    facts.weight = weights > 0 ? config.weight / weights : 0;
    facts.samples = drawn_of(facts.name);
    if (!names.insert(facts.name).second) {
      findings.refuse(field, fmt::format("two data sources are named \"{}\"; give one a name of its own", facts.name));
    }
    Result<data::Dataset::Source> opened = data::open_source(config, recipe.model.vocab, context);
    if (!opened.ok()) {
      const Error& error = opened.error();
      facts.problem = error.message;
      std::error_code unknown;
      if (error.message.find(std::strerror(ENOENT)) != std::string::npos && fs::path(config.path).is_relative()) {
        facts.problem += fmt::format(
            "; paths are relative to the working directory, {}: start there, mend the path, or "
            "make the set (cairn data tokenize)",
            fs::current_path(unknown).string());
      }
      findings.refuse(field, fmt::format("source {}: {}", facts.name, facts.problem), error.code);
      all_there = false;
      continue;
    }
    index.push_back(k);
    const data::Dataset::Source& source = dataset.sources.emplace_back(std::move(opened).value());
    facts.train_tokens = source.train->token_count();
    facts.train_windows = data::window_count(facts.train_tokens, context);
    facts.valid_tokens = source.valid ? source.valid->token_count() : 0;
    facts.valid_windows = data::window_count(facts.valid_tokens, context);
    if (facts.train_windows == 0) {
      findings.refuse(field,
                      fmt::format("source {}: {} to train on, and a sample of model.context = {} needs {}; bring "
                                  "more text, or take a shorter context",
                                  facts.name, count_text(facts.train_tokens, "token"), context, context + 1));
    }
  }
  if (scan_seconds > 0) scan_ids(dataset, index, recipe, scan_seconds, out, report);
  for (const dsl::RunSegment& segment : course.segments) {
    for (const DataSource& config : segment.recipe.data.sources) {
      if (names.insert(source_name(config)).second)
        add_later(config, segment, drawn_of(source_name(config)), out, findings);
    }
  }
  if (!all_there) return out;
  if (recipe.eval.every_steps > 0) check_validation(dataset, recipe, plan, out, findings);
  const Result<data::Sampler::Spec> spec = data::sampler_spec(dataset, recipe);
  const Result<data::Sampler> sampler = spec.ok() ? data::Sampler::make(spec.value()) : spec.error();
  if (sampler.ok()) {
    if (const Status fits = data::check_state_fits(sampler.value().state()); !fits.ok())
      findings.refuse("data", fits.error());
  }
  const bool other = std::any_of(report.problems.begin(), report.problems.end(),
                                 [](const StartFinding& problem) { return problem.field.starts_with("data"); });
  if (!sampler.ok() && !other) findings.refuse("data", sampler.error());
  check_later_validation(dataset, recipe, course, findings);
  return out;
}

namespace {

// --- Rules of retention

/// T.best by an evaluation sees only the checkpoints at whose very step it ran.
void check_best(const Recipe& recipe, int64_t steps, StartReport& report) {
  const CheckpointConfig& checkpoint = recipe.checkpoint;
  const auto rule = std::ranges::find_if(
      checkpoint.keep, [](const Keep& one) { return one.kind == Keep::Kind::kBest && one.metric != "loss"; });
  if (rule == checkpoint.keep.end()) return;
  const bool of_task = rule->metric.starts_with(MetricName::kTask);
  const int64_t eval = of_task && recipe.eval.tasks_steps > 0 ? recipe.eval.tasks_steps : recipe.eval.every_steps;
  if (eval <= 0) return;  // without evaluations the recipe is refused
  int64_t saves = 0;      // steps at which one is certain, but for the last
  int64_t meet = 0;       // of those, with the metric
  bool by_time = false;
  std::string rhythm;
  for (const Every& every : checkpoint.save) {
    by_time = by_time || every.seconds > 0;
    if (every.steps <= 0) continue;
    rhythm += fmt::format("{}{}", rhythm.empty() ? "every " : " and ", every.steps);
    saves += (steps - 1) / every.steps;
    meet += (steps - 1) / std::lcm(every.steps, eval);
  }
  Findings findings(report);
  const std::string remedy = fmt::format("let {} be a rhythm that divides that of checkpoint.save{}",
                                         of_task && recipe.eval.tasks_steps > 0 ? "eval.tasks_at" : "eval.at",
                                         rhythm.empty() ? ", which needs one in steps" : "");
  if (meet == 0) {
    findings.warn(
        "checkpoint.keep",
        fmt::format("T.best by {} never finds one before the end: evaluations are every {}, "
                    "saves {}, and none falls on the same of the {} steps but the last{}; {}",
                    rule->metric, count_text(eval, "step"), rhythm.empty() ? "at no certain step" : rhythm + " steps",
                    steps, by_time ? " (saves by the clock may, by chance)" : "", remedy));
  } else if (meet < saves) {
    report.facts.push_back(
        fmt::format("T.best by {} chooses among {} of {} saves: those at whose step an evaluation runs; {}",
                    rule->metric, meet, saves, remedy));
  }
}

// --- Tokenizer

void check_tokenizer(const Recipe& recipe, Findings& findings) {
  if (recipe.tokenizer.kind == TokenizerConfig::Kind::kNone) return;
  const auto made = text::make_tokenizer(recipe.tokenizer);
  if (!made.ok()) {  // training reads ids alone
    return findings.warn("tokenizer", fmt::format("{}; training reads ids alone, but `eval --text`, `generate` and "
                                                  "`export` will want it",
                                                  made.error().message));
  }
  if (made.value()->own_vocab() <= recipe.model.vocab) return;
  findings.warn("tokenizer",
                fmt::format("it has ids up to {}, and model.vocab = {} has rows for ids up to {}; text that "
                            "uses the others can be neither trained on nor evaluated",
                            made.value()->own_vocab() - 1, recipe.model.vocab, recipe.model.vocab - 1));
}

// --- Replicas

/// A comparison of weights that no two ranks hold compares nothing.
void check_replicas(const Plan& plan, Findings& findings) {
  if (plan.recipe.watch.replica_steps == 0) return;
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
    for (size_t kind = 0; kind < trainer::kHeldByCount; ++kind) {
      if (trainer::holders(plan, rank, static_cast<trainer::HeldBy>(kind)).size() > 1) return;
    }
  }
  findings.warn("watch.replicas",
                fmt::format("nothing is compared: no two ranks hold the same weights (dp = {}, zero = {}){}",
                            plan.mesh.dp(), plan.zero(),
                            plan.zero() >= 3 ? "; mesh.shard below dp makes groups that do, watch.audit needs none"
                                             : "; watch.audit needs no replicas"));
}

// --- Tasks

/// The tasks of one segment, and whether the metrics that rules choose by are among theirs.
void check_tasks(const Plan& plan, bool first, StartReport& report) {
  Findings findings(report);
  const Recipe& recipe = plan.recipe;
  const Result<std::optional<evaluation::RunTasks>> tasks = recipe_tasks(plan);
  if (!tasks.ok()) return findings.refuse("eval.tasks", tasks.error());
  if (!tasks.value()) return;
  const std::vector<std::string> numbers = tasks.value()->numbers();
  const auto look_for = [&](const std::string& field, const std::string& metric) {
    if (!metric.starts_with(MetricName::kTask)) return;
    if (std::ranges::find(numbers, metric.substr(MetricName::kTask.size())) != numbers.end()) return;
    findings.refuse(field,
                    fmt::format("{} asks for {}, and the tasks have {}", field, metric, fmt::join(numbers, ", ")));
  };
  for (const Keep& rule : recipe.checkpoint.keep) {
    if (rule.kind == Keep::Kind::kBest) look_for("checkpoint.keep", rule.metric);
  }
  look_for("watch.early_stop", recipe.watch.early_stop.metric);
  if (!first) return;
  const Plan last = plan.at(plan.step_stages.size() - 1);
  const Result<data::TextRows> rows =
      data::TextRows::make(tasks.value()->texts(), last.sequence_tokens, has_own_rows(recipe));
  if (!rows.ok()) return findings.refuse("eval.tasks", rows.error());
  const int64_t room = last.tokens_per_step / last.sequence_tokens;  // sequences of a pass, which are computed all
  const int64_t tokens = (rows.value().sequences() + room - 1) / room * last.tokens_per_step;
  const int64_t every = recipe.eval.tasks_steps > 0 ? recipe.eval.tasks_steps : recipe.eval.every_steps;
  // Without backward a pass is a third of a step's work.
  const double share = static_cast<double>(tokens) / 3 / static_cast<double>(every * last.tokens_per_step);
  report.facts.push_back(fmt::format("tasks: {} and {}, {} tokens each time, about {:.2g} % of the run's time",
                                     count_text(std::ssize(recipe.eval.tasks), "task"),
                                     count_text(tasks.value()->items(), "item"),
                                     format_count(static_cast<double>(tokens)), 100 * share));
  if (recipe.eval.budget > 0 && share > recipe.eval.budget)
    findings.warn("eval.budget", fmt::format("eval.budget = {} is less than the {:.2g} that the tasks are expected to "
                                             "take: evaluations will be left out; more steps between them, or a limit",
                                             recipe.eval.budget, share));
}

// --- The run folder

/// Why no process of this user can make or change entries of a folder; empty: it can, as far as can be known.
std::string why_not_writable(const fs::path& dir) {
  if (::faccessat(AT_FDCWD, dir.c_str(), W_OK | X_OK, AT_EACCESS) != 0) return std::strerror(errno);
  struct statfs system {};
  if (::statfs(dir.c_str(), &system) == 0 && (system.f_type == PROC_SUPER_MAGIC || system.f_type == SYSFS_MAGIC))
    return "a file system of the kernel's own, where nothing can be kept";
  struct statx more {};  // what the superuser's rights do not overrule
  if (::statx(AT_FDCWD, dir.c_str(), 0, STATX_BASIC_STATS, &more) == 0 &&
      (more.stx_attributes & (STATX_ATTR_IMMUTABLE | STATX_ATTR_APPEND)) != 0) {
    return "it is marked immutable or append-only (chattr)";
  }
  return {};
}

/// A folder that a start makes when it is missing, and writes into.
void check_folder(const fs::path& wanted, Findings& findings) {
  const auto refuse = [&](const fs::path& at, std::string_view why) {
    findings.refuse("", fmt::format("{}: cannot be written{}: {}; choose another run folder (--run), or have it made "
                                    "writable",
                                    wanted.string(), at == wanted ? "" : fmt::format(" ({})", at.string()), why));
  };
  fs::path at = (fs::absolute(wanted).lexically_normal() / "").parent_path();
  for (;; at = at.parent_path()) {
    std::error_code failed;
    const fs::file_status link = fs::symlink_status(at, failed);
    if (link.type() == fs::file_type::none) return refuse(at, failed.message());
    if (link.type() == fs::file_type::not_found) {
      if (failed.value() == ENOTDIR) continue;  // the file in the way is found above
      if (!at.has_relative_path()) return;
      continue;
    }
    const fs::file_type type = fs::status(at, failed).type();
    if (type == fs::file_type::none) return refuse(at, failed.message());
    if (type == fs::file_type::not_found) return refuse(at, "it is a link to nothing");
    if (type != fs::file_type::directory) return refuse(at, "it is a file, and a folder is needed");
    if (const std::string why = why_not_writable(at); !why.empty()) refuse(at, why);
    return;
  }
}

void check_file(const fs::path& file, Findings& findings) {
  if (::faccessat(AT_FDCWD, file.c_str(), W_OK, AT_EACCESS) == 0 || errno == ENOENT || errno == ENOTDIR) return;
  findings.refuse(
      "", fmt::format("{}: cannot be written: {}; a start goes on writing it", file.string(), std::strerror(errno)));
}

void check_run_folder(const StartQuestion& question, const InitConfig& init, Findings& findings) {
  const fs::path& run = question.run;
  check_folder(run, findings);
  if (const std::optional<RunHolder> holder = question.held ? std::nullopt : holder_of_run(run)) {
    findings.refuse("", Error{ErrorCode::kUnavailable,
                              fmt::format("{} is in use by another cairn ({}); one run folder, one run", run.string(),
                                          holder->describe()),
                              EBUSY});
  }
  std::error_code unknown;
  if (!fs::is_directory(run, unknown)) return;
  for (const char* below : {"logs", "tensorboard", "checkpoints"}) {
    if (fs::exists(fs::symlink_status(run / below, unknown))) check_folder(run / below, findings);
  }
  for (const char* file : {"run.lock", "metrics.jsonl", "events.jsonl"}) check_file(run / file, findings);
  if (init.path.empty() && !fs::exists(run / "world", unknown)) {
    if (const Status below = check_steps_lie_below(run); !below.ok()) findings.refuse("", below.error());
  }
  if (question.fresh && fs::exists(run / "checkpoints", unknown) && !fs::is_empty(run / "checkpoints", unknown)) {
    findings.refuse("",
                    fmt::format("--fresh: {} already holds checkpoints; choose another run folder, or leave --fresh "
                                "out to resume from them",
                                run.string()));
  }
}

/// Whether the checkpoint that the start goes on from is of this model.
void check_checkpoint(const StartQuestion& question, ckpt::IoBackend& io, Findings& findings) {
  std::string place = question.goes_on_from.value_or("");
  if (!question.goes_on_from) {
    const Result<ckpt::StartState> state =
        ckpt::look_at_start(io, start_look(question.run, run_id_of(question.run), question.loaded.recipe));
    if (!state.ok()) return findings.refuse("", state.error());
    if (state.value().source == ckpt::StartState::Source::kDisk) place = state.value().place;
  }
  if (place.empty()) return;
  if (const Status fits = ckpt::check_resumable(io, question.plan, place); !fits.ok())
    findings.refuse("", fits.error());
}

// --- What the run begins with

void check_init(const StartQuestion& question, const InitConfig& init, const HubPending& pending, ckpt::IoBackend& io,
                StartReport& report) {
  Findings findings(report);
  if (init.path.empty()) return;
  if (!pending.name.empty()) {  // its tensors are looked at once they are here
    report.facts.push_back(fmt::format("a new run begins with {}: {} of weights in {} to fetch", pending.name,
                                       format_bytes(pending.bytes), count_text(pending.files, "file")));
    return;
  }
  const std::string field = question.init.path.empty() ? "init" : "";
  Plan plan = question.plan;
  plan.recipe.init = init;
  const Result<ckpt::InitMatch> match = ckpt::match_init(io, plan, init.path, open_hf_for(plan.recipe.model));
  if (!match.ok()) return findings.refuse(field, match.error());
  if (!match.value().foreign) {
    const ckpt::CheckpointInfo info = ckpt::look_at_directory(io, init.path, match.value().saved_step);
    if (!info.complete)
      return findings.refuse(field, fmt::format("{}: {}", init.path, info.problem), ErrorCode::kCorrupt);
  }
  report.facts.push_back(fmt::format("a new run begins with {}: {} of {} taken", init.path, match.value().match.taken(),
                                     count_text(question.plan.tensors.size(), "tensor")));
}

// --- Memory and disk

/// What these ranks pin of the host where they train on CUDA and communicate through it.
int64_t pinned_bytes(const Plan& plan, const ckpt::RankRange& ranks) {
  if (plan.mesh.world() == 1) return 0;
  std::vector<int64_t> of_stage(static_cast<size_t>(plan.mesh.pp()), -1);
  int64_t out = 0;
  for (int64_t r = ranks.first; r < ranks.end; ++r) {
    int64_t& bytes = of_stage[static_cast<size_t>(plan.mesh.coords(r).pp)];
    if (bytes < 0) bytes = trainer::staging_rooms(plan, r).total_bytes();
    out += bytes;
  }
  return out;
}

/// What these ranks allocate besides the shared memory of the run.
int64_t private_bytes(const Plan& plan, const ckpt::RankRange& ranks) {
  const bool own_weights = plan.recipe.checkpoint.snapshot_by == SnapshotBy::kCopy;
  std::vector<int64_t> of_stage(static_cast<size_t>(plan.mesh.pp()), -1);  // all ranks of a stage allocate the same
  int64_t out = 0;
  for (int64_t r = ranks.first; r < ranks.end; ++r) {
    int64_t& bytes = of_stage[static_cast<size_t>(plan.mesh.coords(r).pp)];
    if (bytes < 0) {
      const RankPlan rank = plan.rank(r);
      const int64_t bank = own_weights ? 0 : rank.bank_bytes();
      bytes = rank.optimizer_bytes - bank + rank.gathered_bytes + rank.grad_bytes +
              (own_weights ? rank.weight_bytes : 0) + largest_stage_buffers_bytes(plan, r);
    }
    out += bytes;
  }
  return out;
}

/// Bytes that these ranks allocate more where they keep norms' outputs.
int64_t norm_bytes(const Plan& plan, const ckpt::RankRange& ranks) {
  std::vector<int64_t> of_stage(static_cast<size_t>(plan.mesh.pp()), -1);
  int64_t out = 0;
  for (int64_t r = ranks.first; r < ranks.end; ++r) {
    int64_t& bytes = of_stage[static_cast<size_t>(plan.mesh.coords(r).pp)];
    if (bytes < 0) bytes = kept_norms_bytes(plan, r);
    out += bytes;
  }
  return out;
}

void check_memory(const StartQuestion& question, StartReport& report) {
  Findings findings(report);
  const Plan& plan = question.plan;
  const ckpt::RunText run{.run_name = question.loaded.recipe.name,
                          .run_id = question.loaded.recipe.name + "-0000000000000000",
                          .recipe_json = question.loaded.canonical_json,
                          .recipe_hash = question.loaded.hash_hex};
  const Result<ckpt::ArenaSpec> spec = ckpt::arena_spec(plan, run, question.ranks);
  if (!spec.ok()) return findings.refuse("", spec.error());
  const bool offloads = !plan.recipe.optimizer.offload.empty();
  const std::string field = offloads ? "optimizer.offload" : "";
  if (offloads) {
    std::error_code unknown;
    const std::string why =
        fs::is_directory(spec.value().folder, unknown) ? why_not_writable(spec.value().folder) : std::string();
    if (!why.empty())
      findings.refuse(field, fmt::format("{}: cannot be written: {}; name another folder", spec.value().folder, why));
  }
  int64_t freed = 0;  // what a start takes over, writes out or gives up where it has no room
  for (const ckpt::StaleArena& stale : ckpt::stale_arenas(spec.value().folder))
    freed += stale.elsewhere ? 0 : stale.bytes;
  ckpt::ArenaSpec least = spec.value();
  least.slots = std::min<int64_t>(2, least.slots);
  if (const Status room = ckpt::Arena::has_room(least, freed); !room.ok()) return findings.refuse(field, room.error());
  if (const Status room = ckpt::Arena::has_room(spec.value(), freed); !room.ok()) {
    findings.warn(field,
                  fmt::format("only 2 of {} banks of the training state may fit ({}): a step may have to wait for "
                              "a checkpoint that is being written",
                              spec.value().slots, room.error().message),
                  true);
    return;
  }
  int64_t shared = offloads ? 0 : ckpt::Arena::total_bytes(spec.value());
  if (question.ranks && plan.recipe.checkpoint.replicate_steps > 0) {
    const int64_t ranks = question.ranks->size();
    const Result<ckpt::ArenaSpec> held = ward_spec(plan, run, question.ranks->first / ranks, plan.mesh.world() / ranks);
    if (held.ok()) {
      shared += ckpt::Arena::total_bytes(held.value());
      report.facts.push_back(
          ckpt::free_holders(plan, plan.mesh.world() / ranks).empty()
              ? fmt::format("replicas: {} more of memory for two copies of another host's part",
                            format_bytes(ckpt::Arena::total_bytes(held.value())))
              : fmt::format("replicas: free of network, ranks keep the same state as another host's; {} more of memory",
                            format_bytes(ckpt::Arena::total_bytes(held.value()))));
    }
  }
  const bool on_device = plan.recipe.device == DeviceChoice::kCuda;
  const ckpt::RankRange ranks = question.ranks.value_or(ckpt::RankRange{0, plan.mesh.world()});
  const auto most = [&](int64_t (*bytes_of)(const Plan&, const ckpt::RankRange&)) {
    int64_t bytes = bytes_of(plan, ranks);
    for (const Plan& then : question.course.plans) bytes = std::max(bytes, bytes_of(then, ranks));
    return bytes;  // the most of any segment: the ranks of each are started anew
  };
  const int64_t needed = most(private_bytes), pinned = question.nccl ? 0 : most(pinned_bytes),
                own = on_device ? pinned : needed, available = ckpt::available_memory(freed);
  if (on_device) {
    const int64_t sums = question.nccl ? ranks.size() * trainer::sum_rooms(plan).total_bytes() : 0;
    const int64_t attention = question.cudnn ? ranks.size() * attention_room(plan) : 0;
    report.facts.push_back(fmt::format(
        "device memory: {} of state and activations, {} more for norms' outputs where there is room{}{}{}",
        format_bytes(needed), format_bytes(most(norm_bytes)),
        sums > 0 ? fmt::format(", {} to sum what ranks send each other", format_bytes(sums)) : "",
        attention > 0 ? fmt::format(", {} for attention by cuDNN", format_bytes(attention)) : "",
        question.registered ? fmt::format(", each rank's in whole pieces of {}", format_bytes(cuda::kNcclPiece)) : ""));
  }
  report.facts.push_back(
      fmt::format("memory: {} in {}, {} of the ranks' own{}", format_bytes(ckpt::Arena::total_bytes(spec.value())),
                  spec.value().folder, format_bytes(own),
                  available == INT64_MAX ? "" : fmt::format("; {} are available", format_bytes(available))));
  if (available - shared >= own) return;
  findings.warn("", fmt::format("the ranks need {} of memory besides {} that they share, and {} are available: the "
                                "system may kill one; use fewer or larger ranks' parts (mesh, batch.micro, recompute, "
                                "optimizer.zero)",
                                format_bytes(own), format_bytes(shared), format_bytes(available)));
}

/// Second places: where no complete checkpoint is here the newest one there is brought. Only folders are asked, no
/// network. True when one is, or may be.
bool check_copies(const StartQuestion& question, bool any_here, StartReport& report) {
  Findings findings(report);
  const std::vector<CopyTo>& places = question.plan.recipe.checkpoint.copy_to;
  const bool asked = question.ask_run && !any_here && !question.fresh;
  bool may_come = false;
  std::pair<int64_t, std::string> newest{-1, ""};
  for (size_t k = 0; k < places.size(); ++k) {
    const std::string field = fmt::format("checkpoint.copy_to[{}]", k + 1);
    const Result<std::unique_ptr<ckpt::Place>> opened = ckpt::open_place(place_options(places[k], question.run));
    if (!opened.ok()) {
      findings.refuse(field, opened.error());
      continue;
    }
    if (!asked) continue;
    ckpt::Place& place = *opened.value();
    const bool store = ckpt::is_s3_path(place.describe());
    may_come = may_come || store;
    if (store) continue;
    const Result<PlaceContents> looked = look_at_place(place, question.run, static_cast<int64_t>(k));
    if (!looked.ok()) {
      findings.refuse(field, not_known_there(looked.error(), place, question.run));
      may_come = true;
      continue;
    }
    for (const ckpt::PlacedStep& step : looked.value().steps) {
      if (step.complete) newest = std::max(newest, std::pair(step.step, place.describe()));
    }
  }
  if (newest.first >= 0) {
    report.facts.push_back(
        fmt::format("no checkpoint here: step {} would be brought from {}", newest.first, newest.second));
  }
  return may_come || newest.first >= 0;
}

/// File and line of the nearest field above `field` that somebody has written.
std::pair<std::string, int> place_of(const dsl::LoadedRecipe& loaded, std::string field) {
  while (!field.empty()) {
    for (const dsl::Origin& origin : loaded.origins) {
      const bool below =
          origin.path == field ||
          (origin.path.starts_with(field) && (origin.path[field.size()] == '.' || origin.path[field.size()] == '['));
      if (below && !origin.file.empty() && origin.line > 0) return {origin.file, origin.line};
    }
    const size_t end = field.find_last_of(".[");
    field.resize(end == std::string::npos ? 0 : end);
  }
  return {};
}

}  // namespace

std::string source_name(const DataSource& source) {
  return source.name.empty() ? fs::path(source.path).stem().string() : source.name;
}

Status check_steps_lie_below(const fs::path& run) {
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Names here, ckpt::list_names(io, run));
  RT_TRY_SET(const ckpt::Names below, ckpt::list_names(io, run / "checkpoints"));
  if (!below.steps.empty() || here.steps.empty()) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{} holds {}, and a run keeps its checkpoints in {}: move them there to resume from them, "
                           "or choose another run folder",
                           run.string(), ckpt::step_dir_name(here.steps.back()), (run / "checkpoints").string())};
}

StartReport check_host_memory(const StartQuestion& question) {
  StartReport report;
  check_memory(question, report);
  return report;
}

StartReport check_start(const StartQuestion& question) {
  StartReport report;
  Findings findings(report);
  const Recipe& recipe = question.plan.recipe;
  if (recipe.device == DeviceChoice::kCuda) {
    for (const cuda::Refusal& one : cuda::refusals(question.plan))
      findings.refuse(one.field, one.message, ErrorCode::kUnsupported);
  }
  const Course& course = question.course;
  report.data = check_data(question.plan, course, question.sampler, question.scan_seconds, report);
  check_best(recipe, course.run_steps(), report);
  if (question.scan_seconds > 0) check_tokenizer(recipe, findings);  // no start opens it
  check_replicas(question.plan, findings);
  for (size_t k = 0; k < course.plans.size(); ++k) check_tasks(course.plans[k], k == 0, report);

  ckpt::PosixBackend io;
  std::string notice;
  HubPending pending;
  const Result<InitConfig> init =
      effective_init(question.loaded.recipe.init, question.init, question.run, &notice, &pending);
  if (!init.ok()) findings.refuse(question.init.path.empty() ? "init" : "", init.error());
  if (!notice.empty()) report.facts.push_back(notice);
  if (init.ok()) check_init(question, init.value(), pending, io, report);

  const fs::path checkpoints = question.run / "checkpoints";
  const Result<ckpt::Catalog> catalog = ckpt::list_unlabelled(io, checkpoints);
  const bool any_here =
      catalog.ok() && std::ranges::any_of(catalog.value().checkpoints, &ckpt::CheckpointInfo::complete);
  if (question.ask_run) {
    check_run_folder(question, init.ok() ? init.value() : InitConfig{}, findings);
  } else {
    check_folder(question.run, findings);
  }
  const bool brought = check_copies(question, any_here, report);
  if (question.ask_run && !brought && !question.fresh) {
    if (const Status lost = check_nothing_lost(question.run); !lost.ok()) findings.refuse("", lost.error());
    check_checkpoint(question, io, findings);
  }
  // Whoever has the run has its memory and its room too.
  if (question.ask_run && !question.held && holder_of_run(question.run)) return report;
  check_memory(question, report);
  std::vector<std::string> notices;
  Plan whole = question.plan;
  whole.steps = course.run_steps();
  if (const Status room = ckpt::look_for_space(whole, io, checkpoints, &notices); !room.ok())
    findings.refuse("checkpoint", room.error());
  for (std::string& line : notices) {
    if (line.starts_with("warning: ")) line.erase(0, 9);
    findings.warn("checkpoint", line, true);
  }
  return report;
}

std::vector<std::string> data_lines(const DataFacts& data) {
  std::vector<std::string> out;
  size_t widest = 0;
  double all = 0;
  for (const SourceFacts& source : data.sources) {
    widest = std::max(widest, source.name.size());
    all += source.samples;
  }
  for (const SourceFacts& source : data.sources) {
    const std::string name = fmt::format("{:<{}}", printable(source.name), widest);
    const auto count = [](int64_t number) { return format_count(static_cast<double>(number)); };
    if (!source.problem.empty()) {
      out.push_back(fmt::format("{}  {} samples are to come of it, but it cannot be opened: {}", name,
                                format_count(std::round(source.samples)), printable(source.problem)));
      continue;
    }
    std::string line = fmt::format("{}  {} tokens, {} windows to train on: {} samples, {:.3g} epochs", name,
                                   count(source.train_tokens), count(source.train_windows),
                                   format_count(std::round(source.samples)), source.epochs());
    if (data.sources.size() > 1) line += fmt::format(" ({:.3g} %)", all > 0 ? 100 * source.samples / all : 0);
    if (source.weight == 0) line += source.samples > 0 ? ", from a later stage on" : ", not drawn from yet";
    line += source.valid_windows > 0 ? fmt::format("; {} windows to validate on", count(source.valid_windows))
                                     : std::string("; none to validate on");
    if (source.largest_id >= 0) line += fmt::format("; largest id {}", source.largest_id);
    out.push_back(std::move(line));
  }
  return out;
}

std::string start_text(const StartReport& report, const dsl::LoadedRecipe& loaded) {
  std::string out;
  const auto tell = [&](const StartFinding& finding, std::string_view kind) {
    const auto [file, line] = place_of(loaded, finding.field);
    if (!file.empty()) out += fmt::format("{}:{}: ", file, line);
    out += kind;
    if (!finding.field.empty()) out += finding.field + ": ";
    out += printable(finding.message, true) + "\n";
  };
  for (const StartFinding& problem : report.problems) tell(problem, "");
  for (const StartFinding& warning : report.warnings) tell(warning, "warning: ");
  if (!report.ok())
    out += fmt::format("{}. Nothing was started.\n", count_text(std::ssize(report.problems), "problem"));
  return out;
}

json data_json(const DataFacts& data) {
  json sources = json::array();
  for (const SourceFacts& source : data.sources) {
    sources.push_back({{"name", source.name},
                       {"path", source.path},
                       {"weight", source.weight},
                       {"there", source.problem.empty()},
                       {"train_tokens", source.train_tokens},
                       {"train_windows", source.train_windows},
                       {"valid_tokens", source.valid_tokens},
                       {"valid_windows", source.valid_windows},
                       {"samples", std::llround(source.samples)},
                       {"epochs", source.epochs()},
                       {"valid_samples", source.valid_samples}});
    if (!source.problem.empty()) sources.back()["problem"] = source.problem;
    if (source.largest_id < 0) continue;
    sources.back()["largest_id"] = source.largest_id;
    sources.back()["scanned"] = source.scanned;
  }
  return {{"sources", std::move(sources)}, {"valid_batches", data.valid_batches}};
}

json start_json(const StartReport& report, const dsl::LoadedRecipe& loaded) {
  const auto list = [&](const std::vector<StartFinding>& findings) {
    json out = json::array();
    for (const StartFinding& finding : findings) {
      out.push_back({{"message", finding.message}, {"code", error_code_name(finding.code)}});
      if (!finding.field.empty()) out.back()["path"] = finding.field;
      if (const auto [file, line] = place_of(loaded, finding.field); !file.empty())
        out.back().update({{"file", file}, {"line", line}});
    }
    return out;
  };
  return {{"ok", report.ok()},
          {"diagnostics", list(report.problems)},
          {"warnings", list(report.warnings)},
          {"facts", report.facts},
          {"data", data_json(report.data)}};
}

}  // namespace cairn::tools
