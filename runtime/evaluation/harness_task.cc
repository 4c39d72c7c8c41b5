// Task files in YAML, with the keys of lm-evaluation-harness 0.4.13 (lm_eval/config/task.py, api/task.py). A key that
// changes numbers and is not read is refused; keys that only describe are ignored.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>

#include "runtime/data/text_input.h"
#include "runtime/evaluation/task.h"
#include "runtime/evaluation/yaml.h"
#include "runtime/json/json.h"

namespace cairn::evaluation {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kMostYamlBytes = int64_t{1} << 20;
constexpr int kMostIncludes = 8;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

/// The table of a file, over that of the file it includes.
Result<Json> read_table(const fs::path& path, int includes) {
  if (includes > kMostIncludes)
    return invalid(fmt::format("{}: includes go deeper than {}", path.string(), kMostIncludes));
  RT_TRY_SET(const std::string text, data::read_text(path.string(), kMostYamlBytes, data::TextRule::kAnything));
  Result<Json> parsed = parse_yaml(text);
  if (!parsed.ok()) return std::move(parsed).error().with(path.string());
  Json own = std::move(parsed).value();
  if (!own.is_object()) return invalid(path.string() + ": a task file is a table of keys");
  if (!own.contains("include")) return own;
  if (!own["include"].is_string()) return invalid(path.string() + ": include: names one file");
  RT_TRY_SET(Json base, read_table(path.parent_path() / own["include"].get<std::string>(), includes + 1));
  for (const auto& [key, value] : own.items()) {
    if (key != "include") base[key] = value;
  }
  return base;
}

class Reader {
 public:
  Reader(fs::path path, const Json& table) : path_(std::move(path)), table_(table) {}

  Result<Task> task() {
    task_.file = path_.string();
    RT_TRY(check_keys());
    RT_TRY(plain_keys());
    RT_TRY(metrics());
    RT_TRY(generation());
    RT_TRY(items());
    RT_TRY(examples());
    RT_TRY(transforms());
    return std::move(task_);
  }

 private:
  const Json& at(const char* key) const {
    static const Json kNone;
    return table_.contains(key) ? table_[key] : kNone;
  }

  Status check_keys() const {
    // They describe, or say what the harness does besides.
    constexpr std::array kDescribe = {"task",
                                      "task_alias",
                                      "tag",
                                      "group",
                                      "metadata",
                                      "should_decontaminate",
                                      "doc_to_decontamination_query",
                                      "dataset_name",
                                      "training_split",
                                      "unsafe_code"};
    constexpr std::array kRead = {"dataset_path",
                                  "dataset_kwargs",
                                  "validation_split",
                                  "test_split",
                                  "fewshot_split",
                                  "fewshot_config",
                                  "output_type",
                                  "doc_to_text",
                                  "doc_to_target",
                                  "doc_to_choice",
                                  "description",
                                  "target_delimiter",
                                  "fewshot_delimiter",
                                  "num_fewshot",
                                  "metric_list",
                                  "generation_kwargs",
                                  "repeats",
                                  "filter_list",
                                  "file",
                                  "transforms",
                                  "seed"};
    for (const auto& [key, value] : table_.items()) {
      const auto is = [&, name = std::string_view(key)](const char* one) { return name == one; };
      if (std::ranges::any_of(kDescribe, is) || std::ranges::any_of(kRead, is) || value.is_null()) continue;
      return unsupported(fmt::format("the key \"{}\" is not read", key));
    }
    if (const Json& repeats = at("repeats"); !repeats.is_null() && repeats != 1) {
      return unsupported("repeats: an item is asked once");
    }
    for (const Json& filter : at("filter_list")) {
      for (const Json& one : json_field_of(filter, "filter")) {
        if (json_field_of(one, "function") != "take_first") return unsupported("filter_list: only take_first is read");
      }
    }
    return {};
  }

  static Json json_field_of(const Json& from, const char* key) {
    return from.is_object() && from.contains(key) ? from[key] : Json();
  }

  Status field(const char* key, Field* out) const {
    if (at(key).is_null()) return {};
    Result<Field> made = Field::make(at(key));
    if (!made.ok()) return std::move(made).error().with(key);
    *out = std::move(made).value();
    return {};
  }

  Status text(const char* key, std::string* out) const {
    const Json& said = at(key);
    if (said.is_null()) return {};
    if (!said.is_string()) return invalid(fmt::format("{}: is no text", key));
    *out = said.get<std::string>();
    return {};
  }

  Status number(const char* key, int64_t most, int64_t* out) const {
    const Json& said = at(key);
    if (said.is_null()) return {};
    const auto fits = json_integer(nlohmann::json(said), 0, most);
    if (!fits)
      return invalid(fmt::format("{}: found {}, expected a whole number from 0 to {}", key, python_text(said), most));
    *out = *fits;
    return {};
  }

  Status plain_keys() {
    task_.name = path_.stem().string();
    RT_TRY(text("task", &task_.name));
    std::string type = "generate_until";
    RT_TRY(text("output_type", &type));
    const std::map<std::string, Kind> kinds = {{"multiple_choice", Kind::kChoice},
                                               {"generate_until", Kind::kGenerate},
                                               {"loglikelihood", Kind::kProbe},
                                               {"loglikelihood_rolling", Kind::kText}};
    const auto kind = kinds.find(type);
    if (kind == kinds.end()) return unsupported(fmt::format("output_type: \"{}\" is not read", type));
    task_.kind = kind->second;
    RT_TRY(field("doc_to_text", &task_.prompt));
    RT_TRY(field("doc_to_target", &task_.target));
    RT_TRY(field("doc_to_choice", &task_.choices));
    RT_TRY(field("description", &task_.description));
    RT_TRY(text("target_delimiter", &task_.target_delimiter));
    if (task_.kind == Kind::kProbe) task_.target_delimiter = "";  // as the harness has it
    RT_TRY(text("fewshot_delimiter", &task_.example_delimiter));
    RT_TRY(number("num_fewshot", 1000, &task_.shots));
    int64_t seed = 0;
    RT_TRY(number("seed", INT64_MAX, &seed));
    task_.seed = static_cast<uint64_t>(seed);
    if (!task_.target.said()) return invalid("doc_to_target is missing");
    if (task_.kind != Kind::kText && !task_.prompt.said()) return invalid("doc_to_text is missing");
    if (task_.kind == Kind::kChoice && !task_.choices.said()) return invalid("doc_to_choice is missing");
    return {};
  }

  Status metrics() {
    const std::map<Kind, std::vector<std::string>> known = {
        {Kind::kChoice, {"acc", "acc_norm", "acc_bytes"}},
        {Kind::kGenerate, {"exact_match"}},
        {Kind::kProbe, {"perplexity", "acc"}},
        {Kind::kText, {"word_perplexity", "byte_perplexity", "bits_per_byte"}}};
    for (const Json& one : at("metric_list")) {
      const Json name = json_field_of(one, "metric");
      const std::vector<std::string>& mine = known.at(task_.kind);
      if (!name.is_string() || std::ranges::find(mine, name.get<std::string>()) == mine.end()) {
        return unsupported(fmt::format("metric_list: {} is not computed of this output_type", python_text(name)));
      }
      for (const auto& [key, value] : one.items()) {
        bool* rule = key == "ignore_case"          ? &task_.match.ignore_case
                     : key == "ignore_punctuation" ? &task_.match.ignore_punctuation
                     : key == "ignore_numbers"     ? &task_.match.ignore_numbers
                                                   : nullptr;
        if (rule != nullptr && value.is_boolean()) {
          *rule = value.get<bool>();
        } else if (key == "aggregation" ? value != "mean" && task_.kind != Kind::kText && value != "perplexity"
                                        : key != "metric" && key != "higher_is_better" && key != "hf_evaluate") {
          return unsupported(
              fmt::format("metric_list: {}: {}: {} is not read", python_text(name), key, python_text(value)));
        }
      }
    }
    return {};
  }

  Status generation() {
    if (task_.kind != Kind::kGenerate) return {};
    task_.stop = {task_.example_delimiter};
    task_.max_tokens = 256;
    const Json& said = at("generation_kwargs");
    if (said.is_null()) return {};
    if (!said.is_object()) return invalid("generation_kwargs: is no table");
    for (const auto& [key, value] : said.items()) {
      if (key == "until") {
        RT_TRY_SET(task_.stop, texts_of(value.is_string() ? Json::array({value}) : value, "until"));
      } else if (key == "max_gen_toks" || key == "max_new_tokens" || key == "max_tokens") {
        const auto most = json_integer(nlohmann::json(value), 1, int64_t{1} << 20);
        if (!most) return invalid(fmt::format("generation_kwargs: {}: {}", key, python_text(value)));
        task_.max_tokens = *most;
      } else if (!((key == "do_sample" && value == false) ||
                   (key == "temperature" && value.is_number() && value == 0) ||
                   (key == "top_p" && value.is_number()))) {
        return unsupported(
            fmt::format("generation_kwargs: {}: {} is not read: texts are greedy", key, python_text(value)));
      }
    }
    return {};
  }

  /// From the working directory, as the harness has it; else beside the task file.
  fs::path data_path(const std::string& said) const {
    std::error_code error;
    if (fs::path(said).is_absolute() || fs::exists(said, error)) return said;
    return path_.parent_path() / said;
  }

  Result<std::vector<Item>> split(const std::string& name) {
    const Json files = json_field_of(at("dataset_kwargs"), "data_files");
    Json said = files.is_object() ? json_field_of(files, name.c_str()) : name == "train" ? files : Json();
    if (said.is_null())
      return invalid(fmt::format("dataset_kwargs: data_files names no file of the split \"{}\"", name));
    RT_TRY_SET(const std::vector<std::string> paths,
               texts_of(said.is_string() ? Json::array({said}) : said, "data_files"));
    std::vector<Item> out;
    for (const std::string& one : paths) {
      RT_TRY_SET(std::vector<Item> items, read_items(data_path(one).string()));
      for (Item& item : items) {
        if (paths.size() > 1) item.id = fmt::format("{}:{}", fs::path(one).filename().string(), item.id);
        out.push_back(std::move(item));
      }
    }
    return out;
  }

  Status items() {
    std::string file;
    RT_TRY(text("file", &file));
    if (!file.empty()) {
      RT_TRY_SET(task_.items, read_items(data_path(file).string()));
      return {};
    }
    std::string kind;
    RT_TRY(text("dataset_path", &kind));
    if (kind != "json") {
      return unsupported(
          fmt::format("dataset_path: \"{}\": only local JSON lines are read; say dataset_path: json with "
                      "dataset_kwargs: {{data_files: {{test: FILE}}}}, or file: FILE",
                      kind));
    }
    RT_TRY(text("validation_split", &split_));
    RT_TRY(text("test_split", &split_));
    if (split_.empty()) return invalid("test_split or validation_split is missing");
    RT_TRY_SET(task_.items, split(split_));
    return {};
  }

  Status examples() {
    const Json& config = at("fewshot_config");
    std::string from;
    for (const char* const key : {"training_split", "fewshot_split"}) RT_TRY(text(key, &from));
    std::string sampler = "default";
    Json samples;
    if (!config.is_null() && !config.is_object()) return invalid("fewshot_config: is no table");
    for (const auto& [key, value] : config.items()) {
      if (key == "sampler" && (value == "first_n" || value == "default")) {
        sampler = value.get<std::string>();
      } else if (key == "split" && value.is_string()) {
        from = value.get<std::string>();
      } else if (key == "samples" && value.is_array()) {
        samples = value;
      } else if (!value.is_null()) {
        return unsupported(fmt::format("fewshot_config: {}: {} is not read", key, python_text(value)));
      }
    }
    if (from.empty() && samples.is_array()) {
      for (const Json& one : samples) task_.examples.push_back({fmt::format("sample {}", task_.examples.size()), one});
    } else if (!from.empty() && from != split_ && at("file").is_null()) {
      // A split without a file matters where examples are wanted: questions.cc misses them then.
      if (!json_field_of(json_field_of(at("dataset_kwargs"), "data_files"), from.c_str()).is_null()) {
        RT_TRY_SET(task_.examples, split(from));
      }
    } else {
      task_.examples = task_.items;
      task_.examples_are_items = true;
    }
    task_.seeded_examples = sampler == "default" && !samples.is_array();
    if (task_.seeded_examples) {
      task_.notes.push_back(
          "examples are drawn by Cairn's seed; the harness draws others (sampler: first_n is the same)");
    }
    return {};
  }

  Status transforms() {
    const Json& said = at("transforms");
    if (said.is_null()) return {};
    if (!said.is_array()) return invalid("transforms: is no list");
    for (const Json& one : said) {
      RT_TRY_SET(Transform made, make_transform(one));
      task_.transforms.push_back(std::move(made));
    }
    return {};
  }

  fs::path path_;
  const Json& table_;
  std::string split_;
  Task task_;
};

}  // namespace

Result<Task> read_task_yaml(const std::string& path) {
  RT_TRY_SET(const Json table, read_table(path, 0));
  return Reader(path, table).task().with(path);
}

}  // namespace cairn::evaluation
