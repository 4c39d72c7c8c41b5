#include "tools/eval_tasks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <thread>

#include "ckpt/format/names.h"
#include "ckpt/persist/priority.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/evaluation/questions.h"
#include "runtime/evaluation/results.h"
#include "tools/commands.h"
#include "tools/model_source.h"
#include "tools/run/folder/folder.h"
#include "tools/step_range.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using evaluation::Question;
using evaluation::Results;
using evaluation::Task;
using Json = nlohmann::ordered_json;

constexpr int kFollowNice = 19;
constexpr auto kLookAgain = std::chrono::seconds(1);

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// A model to evaluate.
struct Source {
  fs::path path;
  int64_t step = -1;  // -1: a Hugging Face folder
};

/// The run whose checkpoint lies at `step`; empty: it is in none.
fs::path run_of(const fs::path& step) {
  std::error_code error;
  const fs::path run = fs::weakly_canonical(step, error).parent_path().parent_path();
  return !error && fs::exists(run / "run.json", error) ? run : fs::path();
}

class TaskEvaluation {
 public:
  TaskEvaluation(const TaskArgs& args, DeviceChoice device) : args_(args), device_(device) {}

  Status read_tasks() {
    std::set<std::string> names;
    for (const std::string& file : args_.files) {
      RT_TRY_SET(Task task, evaluation::read_task(file, args_.options));
      if (!names.insert(task.name).second) {
        return invalid(fmt::format("{}: another task is named \"{}\" too", file, task.name));
      }
      for (const std::string& note : task.notes) {
        if (task.shots > 0) fmt::print(stderr, "cairn eval: note: {}: {}\n", task.name, note);
      }
      name_width_ = std::max(name_width_, task.name.size());
      tasks_.push_back(std::move(task));
    }
    return {};
  }

  Result<int> run() {
    RT_TRY_SET(std::vector<Source> sources, choose());
    if (!args_.json) fmt::print("{:>10}  {:{}}  {:>6}\n", "step", "task", name_width_, "items");
    for (;;) {
      for (const Source& source : sources) RT_TRY(evaluate(source));
      if (!args_.follow) break;
      RT_TRY_SET(sources, wait_for_more());
      if (sources.empty()) break;
    }
    if (args_.json) print_json(nlohmann::json{{"model", args_.from}, {"results", all_}});
    return 0;
  }

 private:
  /// The steps that --steps names, ascending; else the one model.
  Result<std::vector<Source>> choose() {
    if (is_hf_folder(args_.from)) {
      if (!args_.steps.empty() || args_.follow) {
        return invalid(fmt::format("{}: a Hugging Face folder has no steps", args_.from));
      }
      return std::vector<Source>{{args_.from, -1}};
    }
    RT_TRY_SET(const fs::path newest, resolve_source(args_.from));
    std::error_code error;
    const auto number = ckpt::parse_step_dir_name(fs::weakly_canonical(newest, error).filename().string());
    const bool one = fs::exists(fs::path(args_.from) / ckpt::kManifestName, error);
    if (one && (!args_.steps.empty() || args_.follow)) {
      return invalid(fmt::format("{}: is one checkpoint; name its run for several steps", args_.from));
    }
    if (one || ((args_.steps.empty() || args_.steps == "latest") && !args_.follow)) {
      return std::vector<Source>{{newest, number.value_or(0)}};
    }
    folder_ = newest.parent_path();
    if (args_.steps.empty() || args_.steps == "all") {
      range_ = {0, INT64_MAX};
    } else if (args_.steps == "latest") {
      range_ = {number.value_or(0), INT64_MAX};
    } else {
      RT_TRY_SET(range_, step_range("--steps", args_.steps));
    }
    RT_TRY_SET(std::vector<Source> out, steps_there());
    if (out.empty() && !args_.follow) {
      return invalid(fmt::format("{}: has no complete step of {}", folder_.string(), args_.steps));
    }
    return out;
  }

  /// Complete steps of the range that were not evaluated by this process.
  Result<std::vector<Source>> steps_there() {
    ckpt::PosixBackend io;
    RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_unlabelled(io, folder_, &seen_));
    std::vector<Source> out;
    for (const ckpt::CheckpointInfo& one : catalog.checkpoints) {
      if (!one.complete || one.step < range_.first || one.step > range_.last) continue;
      if (evaluated_.contains({one.step, one.created_unix_ms})) continue;
      evaluated_.insert({one.step, one.created_unix_ms});
      out.push_back({one.dir, one.step});
    }
    return out;
  }

  /// New steps of a run under way; none: it has ended, and all of its steps are evaluated.
  Result<std::vector<Source>> wait_for_more() {
    for (;;) {
      const bool trains = holder_of_run(run_of(folder_ / ckpt::step_dir_name(0))).has_value();
      RT_TRY_SET(std::vector<Source> more, steps_there());
      if (!more.empty() || !trains) return more;
      std::this_thread::sleep_for(kLookAgain);
    }
  }

  Status evaluate(const Source& source) {
    const Status done = evaluate_all(source);
    // Retention may remove a step before it is read.
    if (!done.ok() && args_.follow && is_gone(source.path)) {
      fmt::print(stderr, "cairn eval: note: step {} was removed before it was evaluated\n", source.step);
      return {};
    }
    return done;
  }

  Status evaluate_all(const Source& source) {
    RT_TRY_SET(OpenedModel opened, open_model(source.path, args_.tokenizer, args_.precision, args_.weights_of));
    for (const std::string& warning : opened.model.warnings) {
      if (!args_.json) fmt::print(stderr, "cairn eval: warning: {}\n", warning);
    }
    const evaluation::TextIds ids{opened.model.tokenizer.get(), opened.model.before, opened.model.begin};
    const fs::path run = source.step < 0 ? fs::path() : run_of(opened.model.from);
    if (source.step >= 0 && run.empty()) {
      fmt::print(stderr, "cairn eval: note: {} lies in no run's folder: results are not kept\n", source.path.string());
    }
    std::vector<std::vector<Question>> questions;
    std::vector<Results> results;
    for (const Task& task : tasks_) {
      RT_TRY_SET(std::vector<Question> made, evaluation::make_questions(task, ids));
      RT_TRY_SET(Results kept, open_results(task, made, opened.model, run, source));
      questions.push_back(std::move(made));
      results.push_back(std::move(kept));
    }
    // Tokenizer and stop ids move with the model; `ids` keeps pointing at the tokenizer.
    std::optional<LoadedModel> model;
    for (size_t k = 0; k < tasks_.size(); ++k) {
      const size_t kept = results[k].done();
      if (!results[k].complete()) {
        if (!model) {
          RT_TRY_SET(LoadedModel loaded, load_weights(std::move(opened), device_));
          model.emplace(std::move(loaded));
        }
        RT_TRY(compute(tasks_[k], questions[k], ids, *model, &results[k]).with(tasks_[k].name));
      }
      report(tasks_[k], source, results[k], kept);
    }
    return {};
  }

  Result<Results> open_results(const Task& task, const std::vector<Question>& questions, const LoadedModel& model,
                               const fs::path& run, const Source& source) {
    std::vector<std::string> item_ids;
    for (const Question& one : questions) item_ids.push_back(one.id);
    if (run.empty()) return Results::unkept(std::move(item_ids));
    std::string how = model.recipe.precision == Precision::kF32    ? "fp32"
                      : model.recipe.precision == Precision::kBf16 ? "bf16"
                                                                   : "fp16";
    how += fmt::format(" {} {}", device_word(device_),
                       args_.weights_of == convert::WeightsOf::kAverage ? "ema" : "trained");
    const std::string hash = evaluation::questions_hash(task, questions, how);
    const Json head = {{"task", task.name},   {"kind", evaluation::kind_name(task.kind)},
                       {"questions", hash},   {"weights", model.weights_hash},
                       {"step", source.step}, {"how", how},
                       {"shots", task.shots}, {"version", evaluation::kEvaluatorVersion}};
    return Results::open(evaluation::results_path(run / "evals", task.name, hash, source.step, model.weights_hash),
                         head, std::move(item_ids));
  }

  Status compute(const Task& task, const std::vector<Question>& questions, const evaluation::TextIds& ids,
                 LoadedModel& model, Results* results) {
    evaluation::Scorer scorer(*model.session);
    RT_TRY(scorer.check());
    while (results->done() < questions.size()) {
      const Question& question = questions[results->done()];
      Result<Json> said = evaluation::answer(scorer, ids, model.stop, task, question);
      if (!said.ok()) return std::move(said).error().with(fmt::format("item {}", question.id));
      RT_TRY(results->add(std::move(said).value()));
      if (is_terminal(2)) fmt::print(stderr, "\r{} {}/{}\x1b[K\r", task.name, results->done(), questions.size());
    }
    return results->finish(evaluation::sum_of(task.kind, results->items()));
  }

  void report(const Task& task, const Source& source, const Results& results, size_t kept) {
    const Json& sum = results.sum();
    if (args_.json) {
      Json row = {{"step", source.step < 0 ? Json() : Json(source.step)},
                  {"task", task.name},
                  {"kind", evaluation::kind_name(task.kind)},
                  {"shots", task.shots},
                  {"computed", results.done() - kept},
                  {"sum", sum}};
      if (args_.items) row["items"] = results.items();
      all_.push_back(std::move(row));
      return;
    }
    std::string line = fmt::format("{:>10}  {:{}}  {:>6}", source.step < 0 ? "-" : fmt::format("{}", source.step),
                                   task.name, name_width_, results.done());
    for (const std::string_view name : evaluation::shown_numbers(task.kind)) {
      line += fmt::format("  {} {:.4f}", name, sum[std::string(name)].get<double>());
      const std::string error = std::string(name) + "_stderr";
      if (sum.contains(error) && sum[error].is_number())
        line += fmt::format(" \u00b1 {:.4f}", sum[error].get<double>());
    }
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }

  const TaskArgs& args_;
  const DeviceChoice device_;
  std::vector<Task> tasks_;
  size_t name_width_ = 4;
  fs::path folder_;  // of checkpoints, where several may be evaluated
  StepRange range_;
  ckpt::CatalogCache seen_;
  std::set<std::pair<int64_t, int64_t>> evaluated_;  // steps, and when each was saved
  Json all_ = Json::array();
};

}  // namespace

Result<int> eval_tasks(const TaskArgs& args) {
  if (args.follow) ckpt::lower_thread_priority(kFollowNice);
  RT_TRY_SET(const DeviceChoice device,
             choose_device({.flag = args.device, .run = {}, .what = "evaluate", .here = true}));
  TaskEvaluation evaluation(args, device);
  RT_TRY(evaluation.read_tasks());
  return evaluation.run();
}

}  // namespace cairn::tools
