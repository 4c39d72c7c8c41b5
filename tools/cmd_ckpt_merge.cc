// cairn ckpt average, cairn ckpt merge: the weights of several checkpoints as those of one, as a run of its own.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <vector>

#include "ckpt/merge.h"
#include "ckpt/persist/read.h"
#include "ckpt/plan/partial.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/uring_backend.h"
#include "dsl/dsl.h"
#include "runtime/core/count_text.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/number_option.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct MergeArgs {
  std::vector<std::string> sources;
  std::string target, moments = "drop", method = "linear", base, normalize;
  std::vector<double> weights, densities;
  std::optional<double> lambda, t;
  std::optional<int64_t> seed;
  bool positive_weights = false;
  int64_t last = 0;
  uint64_t memory_bytes = 256 << 20;
  bool overwrite = false;
};

constexpr ckpt::MergeMethod kMethods[] = {ckpt::MergeMethod::kLinear,         ckpt::MergeMethod::kSlerp,
                                          ckpt::MergeMethod::kTaskArithmetic, ckpt::MergeMethod::kTies,
                                          ckpt::MergeMethod::kDareLinear,     ckpt::MergeMethod::kDareTies};

/// One number for all sources, or one for each; none: `otherwise` for all.
Result<std::vector<double>> for_each_source(std::vector<double> given, size_t sources, double otherwise,
                                            std::string_view flag) {
  if (given.empty()) return std::vector<double>(sources, otherwise);
  if (given.size() == 1 && flag != "--weights") given.assign(sources, given.front());
  if (given.size() == sources) return given;
  return Error{ErrorCode::kInvalidInput, fmt::format("{} has {} for {}", flag, count_text(given.size(), "number"),
                                                     count_text(sources, "checkpoint"))};
}

/// Errors: kInvalidInput: a flag that the method does not read.
Result<ckpt::MergeRule> rule_of(const MergeArgs& args, size_t sources) {
  ckpt::MergeRule rule;
  for (const ckpt::MergeMethod method : kMethods) {
    if (ckpt::merge_method_name(method) == args.method) rule.method = method;
  }
  const bool slerp = rule.method == ckpt::MergeMethod::kSlerp;
  const bool task = ckpt::needs_base(rule.method);
  for (const auto& [flag, given, reads] :
       {std::tuple{"--weights", !args.weights.empty(), !slerp},
        std::tuple{"--density", !args.densities.empty(), ckpt::reads_density(rule.method)},
        std::tuple{"--lambda", args.lambda.has_value(), task}, std::tuple{"--t", args.t.has_value(), slerp},
        std::tuple{"--seed", args.seed.has_value(), ckpt::draws(rule.method)},
        std::tuple{"--normalize", !args.normalize.empty(), !slerp},
        std::tuple{"--moments", args.moments != "drop", rule.method == ckpt::MergeMethod::kLinear}}) {
    if (given && !reads)
      return Error{ErrorCode::kInvalidInput, fmt::format("{}: {} does not read it; leave it out", flag, args.method)};
  }
  RT_TRY_SET(rule.weights, for_each_source(args.weights, sources, 1, "--weights"));
  for (const double weight : rule.weights) {
    if (args.positive_weights && !(weight > 0))
      return Error{ErrorCode::kInvalidInput, fmt::format("--weights: {} is no positive number", weight)};
  }
  if (ckpt::reads_density(rule.method)) {
    if (args.densities.empty())
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{} keeps a share of what each checkpoint has learned: give it with --density, as 0.5",
                               args.method)};
    RT_TRY_SET(rule.densities, for_each_source(args.densities, sources, 1, "--density"));
  }
  rule.normalize = args.normalize.empty() ? ckpt::normalizes(rule.method) : args.normalize == "yes";
  rule.lambda = args.lambda.value_or(1);
  rule.t = args.t.value_or(0.5);
  rule.seed = static_cast<uint64_t>(args.seed.value_or(0));
  return rule;
}

/// The checkpoints meant: each path's, or with --last the newest complete ones of a run.
Result<std::vector<fs::path>> source_dirs(const MergeArgs& args, ckpt::IoBackend& io) {
  std::vector<fs::path> out;
  if (args.last == 0) {
    for (const std::string& source : args.sources) {
      RT_TRY_SET(fs::path dir, resolve_checkpoint(source));
      out.push_back(std::move(dir));
    }
    return out;
  }
  if (args.sources.size() != 1)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--last {} is of one run, {} paths were given", args.last, args.sources.size())};
  RT_TRY_SET(const fs::path dir, checkpoints_dir_of(args.sources[0]));
  RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_checkpoints(io, dir));
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    if (info.complete && !info.bad()) out.push_back(info.dir);
  }
  const auto cannot_be_read = [&](const ckpt::CheckpointInfo& info) {
    return Error{info.os_errno != 0 ? ErrorCode::kIo : ErrorCode::kUnsupported,
                 fmt::format("--last {}: step {} would be one of them and cannot be read; name the steps to do without "
                             "it: {}",
                             args.last, info.step, info.problem),
                 info.os_errno};
  };
  const bool enough = static_cast<int64_t>(out.size()) >= args.last;
  if (enough) out.erase(out.begin(), out.end() - args.last);
  bool among = !enough;  // by step, ascending
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    among = among || info.dir == out.front();
    if (among && info.unread) return cannot_be_read(info);
  }
  if (!enough) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--last {}: {} has {} complete checkpoints", args.last, dir.string(), out.size())};
  }
  return out;
}

void warn_of(const ckpt::MergeReport& report) {
  constexpr size_t kMaxListed = 20;
  const std::vector<ckpt::NotFinite>& tensors = report.not_finite;
  if (tensors.empty()) return;
  fmt::print(stderr,
             "warning: {} of {} weights have elements that are not finite (NaN or infinite), from these sources:\n",
             tensors.size(), report.merged_tensors);
  for (size_t t = 0; t < std::min(tensors.size(), kMaxListed); ++t) {
    std::vector<std::string> from;
    for (const fs::path& source : tensors[t].sources) from.push_back(source.string());
    fmt::print(stderr, "  {}: {}\n", printable(tensors[t].tensor),
               from.empty() ? "none: the result is too large for its dtype"
                            : printable(fmt::format("{}", fmt::join(from, ", "))));
  }
  if (tensors.size() > kMaxListed) fmt::print(stderr, "  and {} more\n", tensors.size() - kMaxListed);
}

/// Says where moments and position are, and how to use the result.
std::string moments_text(const MergeArgs& args, const ckpt::Manifest& last, const std::string& last_dir,
                         const std::optional<int64_t>& newer, const fs::path& written) {
  const std::string taken = ckpt::kinds_in(last).has(StateKind::kEma) ? "Moments, the moving average (ema)" : "Moments";
  if (args.moments != "last") {
    return fmt::format(
        "{} and position are dropped: it is a model to evaluate, to export, or to begin a run from, not to resume "
        "({}).",
        taken, ckpt::how_to_begin_from(newer ? written : fs::path(args.target)));
  }
  if (newer)
    return fmt::format("{} and position are those of {}; but `cairn resume {}` resumes from step {}, which is newer.",
                       taken, last_dir, args.target, *newer);
  return fmt::format("{} and position are those of {}: `cairn resume {}` trains on from the merged weights.", taken,
                     last_dir, args.target);
}

json report_json(const ckpt::MergeReport& report, const MergeArgs& args, const ckpt::MergeRule& rule,
                 const std::vector<fs::path>& dirs, const fs::path& base) {
  json list = json::array();
  for (size_t i = 0; i < dirs.size(); ++i) list.push_back({{"dir", dirs[i].string()}, {"weight", rule.weights[i]}});
  json not_finite = json::array();
  for (const ckpt::NotFinite& one : report.not_finite) {
    json from = json::array();
    for (const fs::path& source : one.sources) from.push_back(source.string());
    not_finite.push_back({{"tensor", one.tensor}, {"sources", std::move(from)}});
  }
  json out = {{"dir", report.dir.string()},
              {"method", args.method},
              {"sources", std::move(list)},
              {"run_id", report.manifest.run.id},
              {"parents", report.manifest.run.parents},
              {"origin", report.manifest.origin},
              {"step", report.manifest.step},
              {"merged_tensors", report.merged_tensors},
              {"not_finite", std::move(not_finite)},
              {"moments", args.moments},
              {"payload_bytes", ckpt::payload_bytes(report.manifest)},
              {"seconds", report.seconds}};
  if (!base.empty()) out["base"] = base.string();
  return out;
}

Result<int> merge_of(const std::vector<fs::path>& dirs, const fs::path& base, const MergeArgs& args, bool as_json) {
  RT_TRY_SET(const int64_t memory, memory_option(args.memory_bytes));
  RT_TRY_SET(const ckpt::MergeRule rule, rule_of(args, dirs.size()));
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  RT_TRY_SET(const ckpt::Manifest last, ckpt::read_manifest(*io, dirs.back()));
  const fs::path target(args.target);
  std::vector<fs::path> read = dirs;
  if (!base.empty()) read.push_back(base);
  for (const fs::path& dir : read) {
    if (!is_step_of(dir, target)) continue;
    return Error{ErrorCode::kInvalidInput, fmt::format("{} is the run that {} belongs to; give a folder of its own",
                                                       target.string(), dir.string())};
  }
  dsl::LoadedRecipe recipe;
  recipe.canonical_json = last.recipe;
  const std::string name = last.run.name.empty() ? "merge" : last.run.name;
  RT_TRY_SET(const std::unique_ptr<TargetRun> run, TargetRun::open(target, recipe, name, last.step, args.overwrite));
  RT_TRY_SET(const std::vector<std::string> cleaned, run->clean(*io, std::nullopt));

  ckpt::MergeOptions options;
  options.rule = rule;
  options.base = base;
  options.moments = args.moments == "last" ? ckpt::Moments::kLast : ckpt::Moments::kDrop;
  options.memory_bytes = memory;
  options.replace_existing = args.overwrite;
  options.run_id = run->folder().id();
  options.run_name = name;
  options.cancel = &stop_on_signals();
  options.make_io = [] { return ckpt::make_best_backend(); };
  Result<ckpt::MergeReport> done = [&] {
    ByteProgress progress("written");
    options.progress = [&](int64_t bytes, int64_t total) { progress.show(bytes, total); };
    return ckpt::merge_checkpoints(*io, dirs, run->folder().checkpoints(), options);
  }();
  RT_TRY_SET(const ckpt::MergeReport report, std::move(done));
  RT_TRY(run->keep());
  const std::string note = moments_text(args, last, dirs.back().string(), run->newer(), report.dir);
  warn_of(report);
  if (as_json) {
    json out = report_json(report, args, rule, dirs, base);
    out["cleaned"] = cleaned;
    out["notes"] = {note};
    print_json(out);
    return 0;
  }
  for (const std::string& one : cleaned) fmt::print("removed {}, left by a writer that died\n", one);
  fmt::print("{}: {}; {}, {} in {}, {}\n{}\n", report.dir.string(), report.manifest.origin,
             count_text(report.merged_tensors, "weight"), format_bytes(ckpt::payload_bytes(report.manifest)),
             count_text(report.manifest.files.size(), "file"), telemetry::format_duration(report.seconds), note);
  return 0;
}

Result<int> merge(const MergeArgs& args, bool as_json) {
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  RT_TRY_SET(const std::vector<fs::path> dirs, source_dirs(args, *io));
  std::vector<fs::path> read = dirs;
  fs::path base;
  if (!args.base.empty()) {
    RT_TRY_SET(base, resolve_checkpoint(args.base));
    read.push_back(base);
  }
  return unless_removed(read, merge_of(dirs, base, args, as_json));
}

void add_shared_flags(CLI::App& command, MergeArgs& args, Session& session) {
  command.add_option("--to", args.target, "the new run's folder")->required()->type_name("DST_RUN");
  command
      .add_option("--moments", args.moments,
                  "drop: only weights (default). last: moments, ema and position of the last SRC, to train on")
      ->type_name("drop|last")
      ->check(CLI::IsMember({"drop", "last"}));
  command.add_option("--memory", args.memory_bytes, "what it may take (default 256MiB)")
      ->type_name("SIZE")
      ->transform(size_in_bytes());
  command.add_flag("--overwrite", args.overwrite,
                   "replace the step or the recipe of a run that exists, or write a step below its newest");
  add_json_flag(command, session);
}

}  // namespace

void add_ckpt_average(CLI::App& ckpt, Session& session) {
  CLI::App* command = ckpt.add_subcommand("average", "the mean of the weights of several checkpoints, as a new run");
  const auto args = std::make_shared<MergeArgs>();
  command->add_option("SRC", args->sources, "step folders, or run folders for their newest complete steps")
      ->required()
      ->expected(1, -1);
  command->add_option("--weights", args->weights, "a number for each, divided by their sum; default: all the same")
      ->delimiter(',')
      ->type_name("W,W,...");
  command->add_option("--last", args->last, "the N newest complete checkpoints of the run SRC")
      ->type_name("N")
      ->transform(whole_number(2, 100000));
  add_shared_flags(*command, *args, session);
  command->footer(
      "Any layouts; the result has the layout, the step and the recipe of the last SRC. Sums are in double precision.\n"
      "Exit codes: 0 done, 2 refused, 65 a source is damaged, 74 disk full or an I/O error, 75 stopped.\nExamples:\n  "
      "cairn ckpt average runs/gpt2 --last 5 --to runs/gpt2-mean\n"
      "  cairn ckpt average runs/a runs/b --weights 0.7,0.3 --to runs/soup\n"
      "  cairn ckpt average runs/a runs/b --moments last --to runs/on");
  args->positive_weights = true;
  command->callback([args, &session] { session.action = [args, &session] { return merge(*args, session.json); }; });
}

void add_ckpt_merge(CLI::App& ckpt, Session& session) {
  CLI::App* command =
      ckpt.add_subcommand("merge", "task vectors, TIES, DARE, SLERP or sums of several checkpoints, as a new run");
  const auto args = std::make_shared<MergeArgs>();
  std::vector<std::string> methods;
  for (const ckpt::MergeMethod method : kMethods) methods.emplace_back(ckpt::merge_method_name(method));
  command->add_option("SRC", args->sources, "step folders, or run folders for their newest complete steps")
      ->required()
      ->expected(1, -1);
  command->add_option("--method", args->method, "how, below")
      ->required()
      ->type_name("METHOD")
      ->check(CLI::IsMember(methods));
  command->add_option("--base", args->base, "the checkpoint that all SRC began with; task vectors are SRC - BASE")
      ->type_name("BASE");
  command->add_option("--weights", args->weights, "a number for each SRC, negative ones too; default: 1 each")
      ->delimiter(',')
      ->type_name("W,W,...");
  command
      ->add_option("--density", args->densities, "ties, dare: the share of each task vector to keep; one, or one each")
      ->delimiter(',')
      ->type_name("D,D,...");
  command->add_option("--lambda", args->lambda, "times the merged task vectors (default 1)")
      ->type_name("X")
      ->transform(number_in<double>(-1e6, 1e6));
  command->add_option("--t", args->t, "slerp: from 0, the first SRC, to 1, the second (default 0.5)")
      ->type_name("T")
      ->transform(number_in<double>(0, 1));
  command->add_option("--seed", args->seed, "dare: of the elements that are drawn (default 0)")
      ->type_name("N")
      ->transform(whole_number(0));
  command->add_option("--normalize", args->normalize, "divide by the sum of weights (default: yes for linear and ties)")
      ->type_name("yes|no")
      ->check(CLI::IsMember({"yes", "no"}));
  add_shared_flags(*command, *args, session);
  command->footer(
      "Methods, as mergekit computes them, in double precision:\n"
      "  linear           the weighted mean\n"
      "  slerp            on the arc between two, each tensor as one vector\n"
      "  task_arithmetic  BASE + lambda x the sum of W x (SRC - BASE)\n"
      "  ties             as that, of each task vector its greatest elements, and of those the sign that weighs more\n"
      "  dare_linear      as task_arithmetic, of each task vector drawn elements, scaled up to the whole's magnitude\n"
      "  dare_ties        as dare_linear, and of those the sign that weighs more\n"
      "Any layouts; the result has the layout, the step and the recipe of the last SRC, and does not depend on "
      "layouts.\n"
      "Exit codes: 0 done, 2 refused, 65 a source is damaged, 74 disk full or an I/O error, 75 stopped.\nExamples:\n"
      "  cairn ckpt merge runs/math runs/code --base runs/base --method ties --density 0.2 --to runs/both\n"
      "  cairn ckpt merge runs/math --base runs/base --method task_arithmetic --weights -0.5 --to runs/less\n"
      "  cairn ckpt merge runs/a runs/b --method slerp --t 0.3 --to runs/between");
  command->callback([args, &session] { session.action = [args, &session] { return merge(*args, session.json); }; });
}

}  // namespace cairn::tools
