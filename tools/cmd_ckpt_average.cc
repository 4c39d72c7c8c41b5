// cairn ckpt average SRC... --to DST_RUN: the mean of the weights of several checkpoints, as a run of its own.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "ckpt/average.h"
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

struct AverageArgs {
  std::vector<std::string> sources;
  std::string target, moments = "drop";
  std::vector<double> weights;
  int64_t last = 0;
  uint64_t memory_bytes = 256 << 20;
  bool overwrite = false;
};

/// The checkpoints meant: each path's, or with --last the newest complete ones of a run.
Result<std::vector<fs::path>> source_dirs(const AverageArgs& args, ckpt::IoBackend& io) {
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

void warn_of(const std::vector<ckpt::NotFinite>& tensors, int64_t averaged, const std::vector<fs::path>& dirs) {
  constexpr size_t kMaxListed = 20;
  if (tensors.empty()) return;
  fmt::print(stderr,
             "warning: {} of {} weights have elements that are not finite (NaN or infinite), from these sources:\n",
             tensors.size(), averaged);
  for (size_t t = 0; t < std::min(tensors.size(), kMaxListed); ++t) {
    std::vector<std::string> from;
    for (const size_t source : tensors[t].sources) from.push_back(dirs[source].string());
    fmt::print(stderr, "  {}: {}\n", printable(tensors[t].tensor), printable(fmt::format("{}", fmt::join(from, ", "))));
  }
  if (tensors.size() > kMaxListed) fmt::print(stderr, "  and {} more\n", tensors.size() - kMaxListed);
}

Result<int> average_of(const std::vector<fs::path>& dirs, const AverageArgs& args, bool as_json) {
  RT_TRY_SET(const int64_t memory, memory_option(args.memory_bytes));
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  if (!args.weights.empty() && args.weights.size() != dirs.size()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--weights has {} for {}", count_text(args.weights.size(), "number"),
                             count_text(dirs.size(), "checkpoint"))};
  }
  std::vector<ckpt::AverageSource> sources;
  for (size_t i = 0; i < dirs.size(); ++i) sources.push_back({dirs[i], args.weights.empty() ? 1.0 : args.weights[i]});
  RT_TRY_SET(const ckpt::Manifest last, ckpt::read_manifest(*io, dirs.back()));

  const fs::path target(args.target);
  for (const fs::path& dir : dirs) {
    if (!is_step_of(dir, target)) continue;
    return Error{ErrorCode::kInvalidInput, fmt::format("{} is the run that {} belongs to; give a folder of its own",
                                                       target.string(), dir.string())};
  }
  dsl::LoadedRecipe recipe;
  recipe.canonical_json = last.recipe;
  const std::string name = last.run.name.empty() ? "average" : last.run.name;
  RT_TRY_SET(const std::unique_ptr<TargetRun> run, TargetRun::open(target, recipe, name, last.step, args.overwrite));
  RunFolder& folder = run->folder();
  RT_TRY_SET(const std::vector<std::string> cleaned, run->clean(*io, std::nullopt));

  ckpt::AverageOptions options;
  options.moments = args.moments == "last" ? ckpt::Moments::kLast : ckpt::Moments::kDrop;
  options.memory_bytes = memory;
  options.replace_existing = args.overwrite;
  options.run_id = folder.id();
  options.run_name = name;
  options.cancel = &stop_on_signals();
  options.make_io = [] { return ckpt::make_best_backend(); };
  Result<ckpt::AverageReport> done = [&] {
    ByteProgress progress("written");
    options.progress = [&](int64_t bytes, int64_t total) { progress.show(bytes, total); };
    return ckpt::average_checkpoints(*io, sources, folder.checkpoints(), options);
  }();
  RT_TRY_SET(const ckpt::AverageReport report, std::move(done));
  RT_TRY(run->keep());

  const bool moments = options.moments == ckpt::Moments::kLast;
  const std::string taken = ckpt::kinds_in(last).has(StateKind::kEma) ? "Moments, the moving average (ema)" : "Moments";
  const std::string moments_text =
      moments && run->newer()
          ? fmt::format("{} and position are those of {}; but `cairn resume {}` resumes from step {}, which is newer.",
                        taken, dirs.back().string(), target.string(), *run->newer())
      : moments ? fmt::format("{} and position are those of {}: `cairn resume {}` trains on from the averaged weights.",
                              taken, dirs.back().string(), target.string())
                : fmt::format(
                      "{} and position are dropped: it is a model to evaluate, to export, or to begin a run "
                      "from, not to resume ({}).",
                      taken, ckpt::how_to_begin_from(run->newer() ? report.dir : target));
  warn_of(report.not_finite, report.averaged_tensors, dirs);
  if (as_json) {
    json list = json::array();
    for (const ckpt::AverageSource& source : sources)
      list.push_back({{"dir", source.dir.string()}, {"weight", source.weight}});
    json not_finite = json::array();
    for (const ckpt::NotFinite& one : report.not_finite) {
      json from = json::array();
      for (const size_t source : one.sources) from.push_back(dirs[source].string());
      not_finite.push_back({{"tensor", one.tensor}, {"sources", std::move(from)}});
    }
    print_json({{"dir", report.dir.string()},
                {"sources", std::move(list)},
                {"run_id", report.manifest.run.id},
                {"parents", report.manifest.run.parents},
                {"origin", report.manifest.origin},
                {"step", report.manifest.step},
                {"averaged_tensors", report.averaged_tensors},
                {"not_finite", std::move(not_finite)},
                {"moments", args.moments},
                {"payload_bytes", ckpt::payload_bytes(report.manifest)},
                {"seconds", report.seconds},
                {"cleaned", cleaned},
                {"notes", {moments_text}}});
    return 0;
  }
  for (const std::string& one : cleaned) fmt::print("removed {}, left by a writer that died\n", one);
  fmt::print("{}: {}; {}, {} in {}, {}\n{}\n", report.dir.string(), report.manifest.origin,
             count_text(report.averaged_tensors, "weight"), format_bytes(ckpt::payload_bytes(report.manifest)),
             count_text(report.manifest.files.size(), "file"), telemetry::format_duration(report.seconds),
             moments_text);
  return 0;
}

Result<int> average(const AverageArgs& args, bool as_json) {
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  RT_TRY_SET(const std::vector<fs::path> dirs, source_dirs(args, *io));
  return unless_removed(dirs, average_of(dirs, args, as_json));
}

}  // namespace

void add_ckpt_average(CLI::App& ckpt, Session& session) {
  CLI::App* command = ckpt.add_subcommand("average", "the mean of the weights of several checkpoints, as a new run");
  const auto args = std::make_shared<AverageArgs>();
  command->add_option("SRC", args->sources, "step folders, or run folders for their newest complete steps")
      ->required()
      ->expected(1, -1);
  command->add_option("--to", args->target, "the new run's folder")->required()->type_name("DST_RUN");
  command->add_option("--weights", args->weights, "a number for each, divided by their sum; default: all the same")
      ->delimiter(',')
      ->type_name("W,W,...");
  command->add_option("--last", args->last, "the N newest complete checkpoints of the run SRC")
      ->type_name("N")
      ->transform(whole_number(2, 100000));
  command
      ->add_option("--moments", args->moments,
                   "drop: weights alone (default). last: moments, ema and position of the last SRC, to train on")
      ->type_name("drop|last")
      ->check(CLI::IsMember({"drop", "last"}));
  command->add_option("--memory", args->memory_bytes, "what it may take (default 256MiB)")
      ->type_name("SIZE")
      ->transform(size_in_bytes());
  command->add_flag("--overwrite", args->overwrite,
                    "replace the step or the recipe of a run that is there, or write a step below its newest");
  add_json_flag(*command, session);
  command->footer(
      "Any layouts; the result has the layout, the step and the recipe of the last SRC. Sums are in double precision.\n"
      "Exit codes: 0 done, 2 refused, 65 a source is damaged, 74 disk full or an I/O error, 75 stopped.\nExamples:\n  "
      "cairn ckpt average runs/gpt2 --last 5 --to runs/gpt2-mean\n"
      "  cairn ckpt average runs/a runs/b --weights 0.7,0.3 --to runs/soup\n"
      "  cairn ckpt average runs/a runs/b --moments last --to runs/on");
  command->callback([args, &session] { session.action = [args, &session] { return average(*args, session.json); }; });
}

}  // namespace cairn::tools
