// MLflow by its REST API, version 2.0. The run there has the tag cairn_run, by which it is found again. Each time that
// this process begins, or a request had no good answer, the server says which step of each name it has: nothing is sent
// twice, whatever was lost on the way.
#include <fmt/format.h>

#include <algorithm>
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

/// Letters, digits and what else MLflow takes in a name.
std::string plain_name(std::string name) {
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && std::string_view("_-. /").find(c) == std::string_view::npos)
      c = '_';
  }
  return name;
}

/// The fields of a recipe by their paths.
void add_params(const json& value, const std::string& path, json& out) {
  if (value.is_object()) {
    for (const auto& [key, inner] : value.items()) add_params(inner, path.empty() ? key : path + "." + key, out);
    return;
  }
  std::string text = value.is_string() ? value.get<std::string>() : json_text(value);
  if (text.size() > kMostValueBytes) text.resize(kMostValueBytes);
  out.push_back({{"key", plain_name(path)}, {"value", std::move(text)}});
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
    if (json_string(json_field(known, "info"), "status") != "RUNNING")
      RT_TRY(client_->post(std::string(kApi) + "runs/update", {{"run_id", run_}, {"status", "RUNNING"}}));
    arrived_.clear();
    const json& metrics = json_field(json_field(known, "data"), "metrics");
    for (const json& metric : metrics.is_array() ? metrics : json::array())
      arrived_[json_string(metric, "key")] = step_of(metric);
    return {};
  }

  Status send(std::span<const TrackedStep> steps, json&) override {
    json metrics = json::array();
    const auto post = [&]() -> Status {
      if (metrics.empty()) return {};
      RT_TRY(client_->post(std::string(kApi) + "runs/log-batch", {{"run_id", run_}, {"metrics", std::move(metrics)}}));
      metrics = json::array();
      return {};
    };
    for (const TrackedStep& step : steps) {
      for (const auto& [name, value] : step.values) {
        const std::string key = plain_name(name);
        if (const auto last = arrived_.find(key); last != arrived_.end() && last->second >= step.step) continue;
        metrics.push_back(
            {{"key", key}, {"value", value}, {"timestamp", std::llround(step.time * 1000)}, {"step", step.step}});
        if (metrics.size() == kMostMetrics) RT_TRY(post());
      }
    }
    return post();
  }

  Status finish(int64_t exit_code, json&) override {
    RT_TRY(client_->post(std::string(kApi) + "runs/update",
                         {{"run_id", run_}, {"status", exit_code == 0 ? "FINISHED" : "FAILED"}}));
    return {};
  }

 private:
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
    RT_TRY_SET(const json made,
               client_->post(std::string(kApi) + "runs/create",
                             {{"experiment_id", experiment},
                              {"run_name", run.name},
                              {"start_time", static_cast<int64_t>(::time(nullptr)) * 1000},
                              {"tags", json::array({{{"key", "cairn_run"}, {"value", run.id}},
                                                    {{"key", "cairn_folder"}, {"value", place}}})}}));
    const std::string id = json_string(json_field(json_field(made, "run"), "info"), "run_id");
    if (id.empty()) return Error{ErrorCode::kUnavailable, describe() + " has made a run and says no run_id"};
    json params = json::array();
    add_params(run.recipe, "", params);
    for (size_t at = 0; at < params.size() && run.recipe.is_object(); at += kMostParams) {
      json some = json::array();
      for (size_t k = at; k < std::min(params.size(), at + kMostParams); ++k) some.push_back(params[k]);
      RT_TRY(client_->post(std::string(kApi) + "runs/log-batch", {{"run_id", id}, {"params", std::move(some)}}));
    }
    return id;
  }

  std::unique_ptr<JsonClient> client_;
  std::string experiment_, run_;
  std::map<std::string, int64_t> arrived_;  // the last step of each name when this was opened
};

std::vector<std::string> authorization() {
  const char* const token = std::getenv("MLFLOW_TRACKING_TOKEN");
  if (token == nullptr || *token == '\0') return {};
  return {std::string("Authorization: Bearer ") + token};
}

}  // namespace

Result<std::unique_ptr<TrackService>> open_mlflow(const Tracker& tracker) {
  const char* const ca_file = std::getenv("MLFLOW_TRACKING_SERVER_CERT_PATH");
  RT_TRY_SET(std::unique_ptr<JsonClient> client,
             JsonClient::make("mlflow", tracker.to, authorization(), ca_file == nullptr ? "" : ca_file));
  return std::unique_ptr<TrackService>(std::make_unique<Mlflow>(std::move(client), tracker.project));
}

}  // namespace cairn::tools
