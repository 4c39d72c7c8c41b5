// MLflow by its REST API, version 2.0. The run there has the tag cairn_run, by which it is found again. Each time that
// this process begins, or a request had no good answer, the server says which step of each name and which parameters it
// has: nothing is sent twice or left out, whatever was lost on the way.
#include <fmt/format.h>

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <map>
#include <utility>

#include "runtime/json/json.h"
#include "tools/track/service.h"
#include "tools/track/web.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

constexpr size_t kMostMetrics = 1000, kMostParams = 100, kMostValueBytes = 500;  // of one request; of a parameter
constexpr const char* kApi = "/api/2.0/mlflow/";
constexpr const char* kToken = "MLFLOW_TRACKING_TOKEN";

/// Letters, digits and what else MLflow takes in a name.
std::string plain_name(std::string name) {
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && std::string_view("_-. /").find(c) == std::string_view::npos)
      c = '_';
  }
  return name;
}

/// The fields of a recipe by their paths.
void add_params(const json& value, const std::string& path, std::map<std::string, std::string>& out) {
  if (value.is_object()) {
    for (const auto& [key, inner] : value.items()) add_params(inner, path.empty() ? key : path + "." + key, out);
    return;
  }
  std::string text = value.is_string() ? value.get<std::string>() : json_text(value);
  if (text.size() > kMostValueBytes) text.resize(kMostValueBytes);
  out.emplace(plain_name(path), std::move(text));
}

class Mlflow final : public TrackService {
 public:
  Mlflow(std::unique_ptr<JsonClient> client, std::string experiment)
      : client_(std::move(client)), experiment_(std::move(experiment)) {}
  std::string describe() const override { return "MLflow at " + client_->url(); }
  int64_t most_steps() const override { return 200; }

  Status open(const TrackedRun& run, json& note) override {
    run_ = json_string(note, "run_id");
    if (run_.empty()) {
      RT_TRY_SET(const std::string experiment, find_experiment(experiment_.empty() ? run.name : experiment_));
      RT_TRY_SET(run_, find_run(experiment, run));
      note["run_id"] = run_;
    }
    RT_TRY_SET(const json answer, client_->get(std::string(kApi) + "runs/get?run_id=" + query_text(run_)));
    const json& known = json_field(answer, "run");
    status_ = json_string(json_field(known, "info"), "status");
    arrived_.clear();
    for (const json& metric : list_of(json_field(known, "data"), "metrics"))
      arrived_[json_string(metric, "key")] = {step_of(metric), json_number(metric, "value")};
    return send_params(run, list_of(json_field(known, "data"), "params"));
  }

  Status send(std::span<const TrackedStep> steps, json&) override {
    json metrics = json::array();
    const auto post = [&]() -> Status {
      if (metrics.empty()) return {};
      RT_TRY(set_status("RUNNING"));
      return log("metrics", std::exchange(metrics, json::array()));
    };
    for (const TrackedStep& step : steps) {
      for (const auto& [name, value] : step.values) {
        const std::string key = plain_name(name);
        if (has(key, step.step, value)) continue;
        metrics.push_back(
            {{"key", key}, {"value", value}, {"timestamp", std::llround(step.time * 1000)}, {"step", step.step}});
        if (metrics.size() == kMostMetrics) RT_TRY(post());
      }
    }
    return post();
  }

  Status finish(const TrackedEnd& end, json& note) override {
    if (!end.late.values.empty()) RT_TRY(send({&end.late, 1}, note));
    return set_status(end.exit_code == 0 ? "FINISHED" : "FAILED");
  }

 private:
  struct Arrived {
    int64_t step = 0;
    double value = 0;
  };

  static const json& list_of(const json& from, std::string_view key) {
    static const json kNone = json::array();
    const json& list = json_field(from, key);
    return list.is_array() ? list : kNone;
  }

  /// Whether the server had it when this was opened. A count of events that has grown since its step is news.
  bool has(const std::string& key, int64_t step, double value) const {
    const auto last = arrived_.find(key);
    if (last == arrived_.end() || last->second.step < step) return false;
    return last->second.step > step || !key.starts_with("events/") || value <= last->second.value;
  }

  Status set_status(const std::string& status) {
    if (status_ == status) return {};
    RT_TRY(client_->post(std::string(kApi) + "runs/update", {{"run_id", run_}, {"status", status}}));
    status_ = status;
    return {};
  }

  /// `kind`: "metrics" or "params". A batch that is too large goes in halves.
  Status log(const std::string& kind, const json& batch) {
    const Result<json> answer = client_->post(std::string(kApi) + "runs/log-batch", {{"run_id", run_}, {kind, batch}});
    if (answer.ok()) return {};
    if (!client_->refused()) return answer.error();
    if (client_->too_large() && batch.size() > 1) {
      const auto middle = batch.begin() + static_cast<std::ptrdiff_t>(batch.size() / 2);
      RT_TRY(log(kind, json::array_t(batch.begin(), middle)));
      return log(kind, json::array_t(middle, batch.end()));
    }
    refused(answer.error().message);
    return {};
  }

  /// The parameters that the run there has not: a process may have died before it sent them. Others never change.
  Status send_params(const TrackedRun& run, const json& known) {
    if (!run.recipe.is_object()) return {};
    std::map<std::string, std::string> params;
    add_params(run.recipe, "", params);
    for (const json& param : known) params.erase(json_string(param, "key"));
    json batch = json::array();
    for (const auto& [key, value] : params) {
      batch.push_back({{"key", key}, {"value", value}});
      if (batch.size() == kMostParams) RT_TRY(log("params", std::exchange(batch, json::array())));
    }
    return batch.empty() ? Status() : log("params", batch);
  }

  /// A number, or the text of one: 64 bits come as text.
  static int64_t step_of(const json& metric) {
    const json& step = json_field(metric, "step");
    if (step.is_string()) return std::strtoll(step.get_ref<const std::string&>().c_str(), nullptr, 10);
    return json_count(metric, "step");
  }

  Result<std::string> find_experiment(const std::string& name) {
    const auto look = [&]() -> Result<std::string> {
      RT_TRY_SET(const json answer,
                 client_->get(std::string(kApi) + "experiments/get-by-name?experiment_name=" + query_text(name)));
      return json_string(json_field(answer, "experiment"), "experiment_id");
    };
    Result<std::string> known = look();
    if (known.ok() || known.error().message.find("RESOURCE_DOES_NOT_EXIST") == std::string::npos) return known;
    const Result<json> made = client_->post(std::string(kApi) + "experiments/create", {{"name", name}});
    if (made.ok()) return json_string(made.value(), "experiment_id");
    if (made.error().message.find("RESOURCE_ALREADY_EXISTS") != std::string::npos) return look();  // made meanwhile
    return made.error();
  }

  Result<std::string> find_run(const std::string& experiment, const TrackedRun& run) {
    RT_TRY_SET(const json found, client_->post(std::string(kApi) + "runs/search",
                                               {{"experiment_ids", json::array({experiment})},
                                                {"filter", fmt::format("tags.cairn_run = '{}'", run.id)},
                                                {"max_results", 1}}));
    const json& runs = json_field(found, "runs");
    if (runs.is_array() && !runs.empty()) return json_string(json_field(runs[0], "info"), "run_id");
    const std::string place = run.folder.string();
    RT_TRY_SET(const json made, client_->post(std::string(kApi) + "runs/create",
                                              {{"experiment_id", experiment},
                                               {"run_name", run.name},
                                               {"start_time", static_cast<int64_t>(::time(nullptr)) * 1000},
                                               {"tags", json::array({{{"key", "cairn_run"}, {"value", run.id}},
                                                                     {{"key", "cairn_folder"}, {"value", place}}})}}));
    const std::string id = json_string(json_field(json_field(made, "run"), "info"), "run_id");
    if (id.empty()) return Error{ErrorCode::kUnavailable, describe() + " has made a run and says no run_id"};
    return id;
  }

  std::unique_ptr<JsonClient> client_;
  std::string experiment_, run_, status_;
  std::map<std::string, Arrived> arrived_;  // the last of each name when this was opened
};

std::vector<std::string> authorization() {
  const char* const token = std::getenv(kToken);
  if (token == nullptr || *token == '\0') return {};
  return {std::string("Authorization: Bearer ") + token};
}

}  // namespace

Result<std::unique_ptr<TrackService>> open_mlflow(const Tracker& tracker) {
  const char* const ca_file = std::getenv("MLFLOW_TRACKING_SERVER_CERT_PATH");
  RT_TRY_SET(std::unique_ptr<JsonClient> client,
             JsonClient::make("mlflow", tracker.to, kToken, authorization(), ca_file == nullptr ? "" : ca_file));
  return std::unique_ptr<TrackService>(std::make_unique<Mlflow>(std::move(client), tracker.project));
}

}  // namespace cairn::tools
