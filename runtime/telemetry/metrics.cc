#include "runtime/telemetry/metrics.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/config/metric_name.h"
#include "runtime/core/clock.h"
#include "runtime/core/file_calls.h"
#include "runtime/core/new_file.h"
#include "runtime/json/json.h"

namespace cairn::telemetry {
namespace {

using nlohmann::json;

/// Between the end of a step on rank 0 and its line, on a machine with more to do than it can; and when so many lines
/// wait that the news of the first are gone.
constexpr std::chrono::milliseconds kTellingTakes{100}, kCatchingUpTakes{1000};

std::vector<StepMetrics> parse_news(std::span<const std::string> news) {
  std::vector<StepMetrics> out;
  for (const std::string& text : news) {
    Result<StepMetrics> metrics = step_metrics_from_json(json_or_nothing(text));
    if (metrics.ok()) out.push_back(std::move(metrics).value());
  }
  return out;
}

json finite(double value) { return std::isfinite(value) ? json(value) : json(nullptr); }

}  // namespace

std::optional<double> value_of(const StepMetrics& metrics, std::string_view name) {
  const Result<MetricName> parsed = parse_metric(name);
  if (!parsed.ok()) return std::nullopt;
  const auto among = [](const auto& numbers, const std::string& wanted) -> std::optional<double> {
    const auto at = std::ranges::find(numbers, wanted, [](const auto& one) { return one.first; });
    return at == numbers.end() ? std::nullopt : std::optional(at->second);
  };
  switch (parsed.value().kind) {
    case MetricName::Kind::kLoss:
      return metrics.loss;
    case MetricName::Kind::kValidLoss:
      return metrics.valid_loss;
    case MetricName::Kind::kValidSourceLoss:
      return among(metrics.valid_source_loss, parsed.value().of);
    case MetricName::Kind::kTask:
      for (const TaskNumbers& task : metrics.tasks) {
        if (task.task == parsed.value().of) return among(task.numbers, parsed.value().number);
      }
      return std::nullopt;
  }
  return std::nullopt;
}

std::vector<std::pair<std::string, double>> named_values(const StepMetrics& metrics) {
  std::vector<std::pair<std::string, double>> out = {{"loss", metrics.loss}};
  if (metrics.valid_loss) out.emplace_back("valid_loss", *metrics.valid_loss);
  for (const auto& [source, loss] : metrics.valid_source_loss)
    out.emplace_back(std::string(MetricName::kSource) + source, loss);
  for (const TaskNumbers& task : metrics.tasks) {
    for (const auto& [number, value] : task.numbers) {
      if (number != "n" && number != "tokens" && !number.ends_with("_stderr"))
        out.emplace_back(fmt::format("{}{}/{}", MetricName::kTask, task.task, number), value);
    }
  }
  return out;
}

json to_json(const StepMetrics& m) {
  json sources = json::object();
  for (const auto& [name, loss] : m.source_loss) sources[name] = finite(loss);
  json out = {{"step", m.step},
              {"samples", m.samples},
              {"tokens", m.tokens},
              {"time", m.time},
              {"loss", finite(m.loss)},
              {"source_loss", std::move(sources)},
              {"grad_norm", finite(m.grad_norm)},
              {"lr", m.lr},
              {"tokens_per_s", finite(m.tokens_per_s)},
              {"step_ms", finite(m.step_ms)},
              {"checkpoint_lost_ms", finite(m.checkpoint_lost_ms)}};
  if (m.snapshot_left_out) out["snapshot_left_out"] = true;
  for (const auto& [name, loss] : m.channel_loss) out["channel_loss"][name] = finite(loss);
  if (m.mtp_loss) out["mtp_loss"] = finite(*m.mtp_loss);
  if (m.masked_tokens) out["masked_tokens"] = *m.masked_tokens;
  if (m.valid_loss) out["valid_loss"] = finite(*m.valid_loss);
  for (const auto& [name, loss] : m.valid_source_loss) out["valid_source_loss"][name] = finite(loss);
  for (const TaskNumbers& task : m.tasks) {
    json& numbers = out["eval"][task.task] = json::object();
    for (const auto& [name, value] : task.numbers) numbers[name] = finite(value);
  }
  if (m.tasks_left_out) out["eval_left_out"] = true;
  if (m.tasks_ms) out["eval_ms"] = finite(*m.tasks_ms);
  if (m.ended_early) {
    out["ended_early"] = {{"metric", m.ended_early->metric},
                          {"best", finite(m.ended_early->best)},
                          {"best_step", m.ended_early->best_step},
                          {"evaluations", m.ended_early->evaluations}};
  }
  if (m.end_loss) out["end_loss"] = finite(*m.end_loss);
  if (m.loss_scale) {
    out["loss_scale"] = finite(*m.loss_scale);
    out["skipped"] = m.skipped;
  }
  if (m.skipped > 0) out["skipped"] = m.skipped;
  if (!m.skipped_steps.empty()) out["skipped_steps"] = m.skipped_steps;
  if (!m.skip_why.empty()) out["skip_why"] = m.skip_why;
  if (m.again) {
    json& again = out["computed_again"];
    again = {{"found", to_text(m.again->found)}, {"audit", m.again->audit}};
    if (m.again->found != ComputedAgain::Found::kSame) again["ranks"] = m.again->ranks;
    if (m.again->audit) again["since"] = m.again->since;
  }
  if (m.replicas) {
    json& replicas = out["replicas"];
    replicas = {{"ranks", m.replicas->ranks}, {"since", m.replicas->since}};
    if (m.replicas->tied) replicas["tied"] = true;
  }
  if (m.max_attention_score) {
    out["max_attention_score"] = finite(*m.max_attention_score);
    out["clipped_heads"] = m.clipped_heads;
  }
  for (const OutlierSample& one : m.outliers) out["outlier"].push_back({one.position, one.loss, one.z});
  for (const auto& [phase, ms] : m.split_ms) out["split_ms"][phase] = finite(ms);
  if (m.tflops) out["tflops"] = finite(*m.tflops);
  if (m.mfu) out["mfu"] = finite(*m.mfu);
  return out;
}

namespace {

std::vector<int64_t> whole_numbers(const json& in, const char* name) {
  std::vector<int64_t> out;
  const auto list = in.find(name);
  if (list == in.end() || !list->is_array()) return out;
  for (const json& one : *list) {
    if (one.is_number_integer()) out.push_back(one.get<int64_t>());
  }
  return out;
}

std::optional<ComputedAgain> computed_again(const json& in) {
  const auto again = in.find("computed_again");
  if (again == in.end() || !again->is_object()) return std::nullopt;
  ComputedAgain out{.audit = json_flag(*again, "audit"), .ranks = whole_numbers(*again, "ranks")};
  const std::string found = json_string(*again, "found");
  for (const auto one : {ComputedAgain::Found::kTransient, ComputedAgain::Found::kPersistent}) {
    if (to_text(one) == found) out.found = one;
  }
  if (const auto since = again->find("since"); since != again->end() && since->is_number_integer())
    out.since = since->get<int64_t>();
  return out;
}

std::optional<ReplicaCheck> replica_check(const json& in) {
  const auto replicas = in.find("replicas");
  if (replicas == in.end() || !replicas->is_object()) return std::nullopt;
  return ReplicaCheck{.ranks = whole_numbers(*replicas, "ranks"),
                      .tied = json_flag(*replicas, "tied"),
                      .since = json_count(*replicas, "since")};
}

}  // namespace

std::vector<MachineError> machine_errors(const StepMetrics& metrics) {
  std::vector<MachineError> out;
  const auto& replicas = metrics.replicas;
  if (replicas && !replicas->ranks.empty())
    out.push_back({"replica", replicas->ranks, replicas->tied, replicas->since});
  const auto& again = metrics.again;
  if (again && again->audit && again->found != ComputedAgain::Found::kSame)
    out.push_back({to_text(again->found), again->ranks, false, again->since});
  return out;
}

std::string_view to_text(ComputedAgain::Found found) {
  switch (found) {
    case ComputedAgain::Found::kSame:
      return "same";
    case ComputedAgain::Found::kTransient:
      return "transient";
    case ComputedAgain::Found::kPersistent:
      break;
  }
  return "persistent";
}

Result<StepMetrics> step_metrics_from_json(const json& in) {
  StepMetrics out;
  std::string wrong;
  const auto number = [&](const char* name, auto& into) {
    const auto it = in.find(name);
    if (it == in.end() || !(it->is_number() || it->is_null())) {
      if (wrong.empty()) wrong = name;
    } else {
      into = it->is_null() ? static_cast<std::decay_t<decltype(into)>>(NAN) : it->get<std::decay_t<decltype(into)>>();
    }
  };
  if (!in.is_object()) return Error{ErrorCode::kCorrupt, "a metrics record is no object"};
  for (const char* whole : {"step", "samples", "tokens"}) {
    if (!in.contains(whole) || !in[whole].is_number_integer()) wrong = whole;
  }
  if (wrong.empty()) {
    number("step", out.step);
    number("samples", out.samples);
    number("tokens", out.tokens);
  }
  number("time", out.time);
  number("loss", out.loss);
  number("grad_norm", out.grad_norm);
  number("lr", out.lr);
  number("tokens_per_s", out.tokens_per_s);
  number("step_ms", out.step_ms);
  number("checkpoint_lost_ms", out.checkpoint_lost_ms);
  if (!wrong.empty())
    return Error{ErrorCode::kCorrupt, fmt::format("metrics field \"{}\" is missing or no number", wrong)};
  out.snapshot_left_out = json_flag(in, "snapshot_left_out");
  out.tasks_left_out = json_flag(in, "eval_left_out");
  const auto optional = [&](const char* name, std::optional<double>& into) {
    if (in.contains(name)) number(name, into.emplace());
  };
  optional("mtp_loss", out.mtp_loss);
  if (in.contains("masked_tokens")) number("masked_tokens", out.masked_tokens.emplace());
  optional("valid_loss", out.valid_loss);
  optional("eval_ms", out.tasks_ms);
  optional("end_loss", out.end_loss);
  if (in.contains("loss_scale")) {
    double scale = 0;
    number("loss_scale", scale);
    out.loss_scale = scale;
  }
  if (in.contains("skipped")) number("skipped", out.skipped);
  if (in.contains("max_attention_score")) {
    double score = 0;
    number("max_attention_score", score);
    out.max_attention_score = score;
    number("clipped_heads", out.clipped_heads);
  }
  if (!wrong.empty())
    return Error{ErrorCode::kCorrupt, fmt::format("metrics field \"{}\" is missing or no number", wrong)};
  out.skipped_steps = whole_numbers(in, "skipped_steps");
  out.again = computed_again(in);
  out.replicas = replica_check(in);
  out.skip_why = json_string(in, "skip_why");
  if (const auto outliers = in.find("outlier"); outliers != in.end() && outliers->is_array()) {
    for (const json& one : *outliers) {
      if (one.is_array() && one.size() == 3 && one[0].is_number_integer() && one[1].is_number() && one[2].is_number())
        out.outliers.push_back({one[0].get<int64_t>(), one[1].get<double>(), one[2].get<double>()});
    }
  }
  if (in.contains("split_ms") && in["split_ms"].is_object()) {
    for (const auto& [phase, ms] : in["split_ms"].items()) {
      if (ms.is_number()) out.split_ms.emplace_back(phase, ms.get<double>());
    }
  }
  for (const auto& [name, into] : {std::pair("tflops", &out.tflops), std::pair("mfu", &out.mfu)}) {
    if (in.contains(name) && in[name].is_number()) *into = in[name].get<double>();
  }
  for (const auto& [name, into] :
       {std::pair("source_loss", &out.source_loss), std::pair("channel_loss", &out.channel_loss),
        std::pair("valid_source_loss", &out.valid_source_loss)}) {
    if (!in.contains(name) || !in[name].is_object()) continue;
    for (const auto& [source, loss] : in[name].items()) {
      if (loss.is_number()) into->emplace_back(source, loss.get<double>());
    }
  }
  if (const json end = json_field(in, "ended_early"); end.is_object()) {
    const json best = json_field(end, "best");
    out.ended_early = EarlyEnd{.metric = json_string(end, "metric"),
                               .best = best.is_number() ? best.get<double>() : NAN,
                               .best_step = json_integer(json_field(end, "best_step"), 0, INT64_MAX).value_or(0),
                               .evaluations = json_integer(json_field(end, "evaluations"), 0, INT64_MAX).value_or(0)};
  }
  if (const json tasks = json_field(in, "eval"); tasks.is_object()) {
    for (const auto& [task, numbers] : tasks.items()) {
      TaskNumbers& told = out.tasks.emplace_back(TaskNumbers{.task = task});
      if (!numbers.is_object()) continue;
      for (const auto& [name, value] : numbers.items()) {
        if (value.is_number()) told.numbers.emplace_back(name, value.get<double>());
      }
    }
  }
  return out;
}

Result<LineFile> LineFile::open(const std::filesystem::path& path) {
  LineFile out;
  out.path_ = path;
  RT_TRY_SET(out.fd_, open_own(path, O_RDWR | O_APPEND));
  struct stat info {};
  if (::fstat(out.fd_.get(), &info) != 0) return os_error(errno, path.string());
  out.was_empty_ = info.st_size == 0;
  char last = '\n';
  if (!out.was_empty_ && ::pread(out.fd_.get(), &last, 1, info.st_size - 1) != 1) return os_error(errno, path.string());
  out.torn_ = last != '\n';
  return out;
}

Status LineFile::append(std::string line) {
  line += '\n';
  if (torn_) line.insert(line.begin(), '\n');  // readers drop what is no JSON
  const int64_t n = write_fully(fd_.get(), line);
  const int why = errno;
  if (n > 0) torn_ = n < std::ssize(line) && (n > 1 || !torn_);
  return n == std::ssize(line) ? Status() : os_error(why, path_.string());
}

Status LineFile::sync() {
  if (sync_data_to_disk(fd_.get()) != 0) return os_error(errno, path_.string());
  return {};
}

Result<std::unique_ptr<MetricsWriter>> MetricsWriter::open(const std::filesystem::path& path, const std::string& run) {
  std::unique_ptr<MetricsWriter> out(new MetricsWriter);
  RT_TRY_SET(out->file_, LineFile::open(path));
  if (out->file_.was_empty()) {
    RT_TRY(out->line({{"schema", 1}, {"run", run}}));
    return out;
  }
  out->begun_ = true;
  const Result<std::vector<StepMetrics>> before = read_metrics(path);
  if (before.ok() && !before.value().empty()) out->last_ = before.value().back().step;
  return out;
}

Status MetricsWriter::line(const json& record) { return file_.append(json_text(record)); }

Status MetricsWriter::told(const StepMetrics& metrics) {
  last_ = metrics.step;  // a full disk is no reason to wait for this line
  begun_ = true;
  changed_.notify_all();
  return line(to_json(metrics));
}

Status MetricsWriter::write(const StepMetrics& metrics) {
  const std::lock_guard lock(mutex_);
  return told(metrics);
}

Status MetricsWriter::resumed(int64_t step) {
  const std::lock_guard lock(mutex_);
  last_ = step;
  return std::exchange(begun_, true) ? line({{"resumed_at", step}}) : Status();
}

Status MetricsWriter::catch_up(std::span<const std::string> news) {
  const std::lock_guard lock(mutex_);
  return tell_untold(parse_news(news));
}

Status MetricsWriter::tell_untold(std::vector<StepMetrics> news) {
  for (StepMetrics& metrics : news) {
    if (metrics.step <= last_) continue;
    metrics.time = SystemClock().unix_s();
    RT_TRY(told(metrics));
  }
  return {};
}

Status MetricsWriter::complete(int64_t step, std::span<const std::string> news) {
  std::vector<StepMetrics> known = parse_news(news);
  const int64_t first = known.empty() ? step + 1 : known.front().step;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kCatchingUpTakes, [&] { return last_ >= first - 1; });
  changed_.wait_for(lock, kTellingTakes, [&] { return last_ >= step; });
  RT_TRY(tell_untold(std::move(known)));
  lock.unlock();  // a sync may take long, and the next lines need not wait for it
  return file_.sync();
}

Result<ToldSteps> read_told_steps(const std::filesystem::path& path) {
  std::ifstream in(path);
  if (!in) return os_error(errno != 0 ? errno : ENOENT, path.string());
  ToldSteps out;
  std::map<int64_t, StepMetrics> kept;
  const auto supersede = [&](auto from) {
    for (auto step = from; step != kept.end(); ++step) out.superseded.push_back(std::move(step->second));
    kept.erase(from, kept.end());
  };
  int64_t number = 0;
  for (std::string text; std::getline(in, text);) {
    ++number;
    const json record = json_or_nothing(text);
    if (record.is_discarded() || !record.is_object()) continue;  // torn by a kill, or the empty line that ended it
    if (record.contains("resumed_at") && record["resumed_at"].is_number_integer()) {
      supersede(kept.upper_bound(record["resumed_at"].get<int64_t>()));
    } else if (record.contains("step")) {
      Result<StepMetrics> step = step_metrics_from_json(record);
      if (!step.ok()) return std::move(step).error().with(fmt::format("{}:{}", path.string(), number));
      const int64_t of = step.value().step;
      if (const auto before = kept.find(of); before != kept.end()) out.superseded.push_back(std::move(before->second));
      kept[of] = std::move(step).value();
    }
  }
  for (auto& [step, metrics] : kept) out.kept.push_back(std::move(metrics));
  return out;
}

Result<std::vector<StepMetrics>> read_metrics(const std::filesystem::path& path) {
  RT_TRY_SET(ToldSteps told, read_told_steps(path));
  return std::move(told.kept);
}

}  // namespace cairn::telemetry
