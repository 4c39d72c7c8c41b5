#include "runtime/evaluation/run_tasks.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace cairn::evaluation {
namespace {

using Json = nlohmann::ordered_json;

/// Texts of a question.
size_t texts_of_question(Kind kind, const Question& question, int64_t tokens) {
  if (kind == Kind::kText) return rolling_windows(std::ssize(question.ids) + 1, tokens).size();
  return kind == Kind::kNext ? question.next.size() : question.requests.size();
}

/// Their scores as result_of() wants them.
std::vector<Score> scores_of_question(Kind kind, const Question& question, std::span<const data::TextScore> scores) {
  std::vector<Score> out;
  for (size_t k = 0; k < scores.size(); ++k) {
    const int64_t tokens = kind == Kind::kNext   ? 1
                           : kind == Kind::kText ? std::ssize(question.ids)
                                                 : std::ssize(question.requests[k].continuation);
    if (kind == Kind::kText && !out.empty()) {  // windows of one text
      out[0].logprob += scores[k].logprob;
    } else {
      out.push_back({.logprob = scores[k].logprob, .first_logprob = scores[k].first_logprob, .tokens = tokens});
    }
  }
  return out;
}

}  // namespace

Status RunTasks::add_text(std::vector<int32_t> ids, int64_t scored, int64_t tokens) {
  if (scored > tokens) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} tokens to be predicted; a sequence of the run has {}", scored, tokens)};
  }
  if (std::ssize(ids) > tokens + 1) ids.erase(ids.begin(), ids.end() - (tokens + 1));
  texts_.push_back({std::move(ids), scored});
  return {};
}

Status RunTasks::add(const Task& task, const Question& question, const TextIds& ids, int64_t tokens) {
  if (task.kind == Kind::kText) {
    std::vector<int32_t> all = {ids.begin};
    all.insert(all.end(), question.ids.begin(), question.ids.end());
    for (const auto& [first, scored, end] : rolling_windows(std::ssize(all), tokens)) {
      RT_TRY(add_text({all.begin() + first, all.begin() + end}, end - scored, tokens));
    }
    return {};
  }
  for (const int32_t token : question.next) {
    std::vector<int32_t> all = question.ids;
    all.push_back(token);
    RT_TRY(add_text(std::move(all), 1, tokens));
  }
  for (const Encoded& request : question.requests) {
    std::vector<int32_t> all = request.context;
    all.insert(all.end(), request.continuation.begin(), request.continuation.end());
    RT_TRY(add_text(std::move(all), std::ssize(request.continuation), tokens));
  }
  return {};
}

Result<RunTasks> RunTasks::read(std::span<const EvalTask> tasks, const TextIds& ids, int64_t tokens) {
  RunTasks out;
  out.tokens_ = tokens;
  for (const EvalTask& one : tasks) {
    RT_TRY_SET(
        Task task,
        read_task(one.file, {.shots = one.shots, .limit = one.limit, .seed = one.seed, .transforms = one.transforms}));
    if (task.kind == Kind::kGenerate) {
      return Error{ErrorCode::kUnsupported,
                   fmt::format("{}: its answers have to be generated, which a run does not do; `cairn eval RUN --tasks "
                               "{} --follow` does it beside the run",
                               one.file, one.file)};
    }
    if (task.items.empty()) return Error{ErrorCode::kInvalidInput, fmt::format("{}: has no items", one.file)};
    const auto same = [&](const auto& other) { return other.first.name == task.name; };
    if (std::ranges::any_of(out.tasks_, same)) {
      return Error{ErrorCode::kInvalidInput, fmt::format("{}: another task is named \"{}\" too", one.file, task.name)};
    }
    RT_TRY_SET(std::vector<Question> questions, make_questions(task, ids));
    for (const Question& question : questions) {
      RT_TRY(out.add(task, question, ids, tokens).with(fmt::format("{}: item {}", one.file, question.id)));
    }
    out.tasks_.emplace_back(std::move(task), std::move(questions));
  }
  return out;
}

int64_t RunTasks::items() const {
  int64_t out = 0;
  for (const auto& [task, questions] : tasks_) out += std::ssize(questions);
  return out;
}

std::vector<std::string> RunTasks::numbers() const {
  std::vector<std::string> out;
  const std::vector<data::TextScore> scores(texts_.size());
  for (const telemetry::TaskNumbers& task : told_by(scores)) {
    for (const auto& [number, value] : task.numbers) out.push_back(task.task + "/" + number);
  }
  return out;
}

std::vector<telemetry::TaskNumbers> RunTasks::told_by(std::span<const data::TextScore> scores) const {
  std::vector<telemetry::TaskNumbers> out;
  for (const auto& [task, questions] : tasks_) {
    std::vector<Json> results;
    for (const Question& question : questions) {
      const size_t count = texts_of_question(task.kind, question, tokens_);
      results.push_back(result_of(task, question, scores_of_question(task.kind, question, scores.first(count))));
      scores = scores.subspan(count);
    }
    telemetry::TaskNumbers& told = out.emplace_back(telemetry::TaskNumbers{.task = task.name});
    const Json sum = sum_of(task.kind, results);
    for (const auto& [name, value] : sum.items()) {
      if (value.is_number()) told.numbers.emplace_back(name, value.get<double>());
    }
  }
  return out;
}

}  // namespace cairn::evaluation
