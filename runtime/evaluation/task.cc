#include "runtime/evaluation/task.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "runtime/data/text_input.h"
#include "runtime/evaluation/python_text.h"
#include "runtime/json/json.h"

namespace cairn::evaluation {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMostFileBytes = int64_t{1} << 30;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// `labels` and `options` of items with choices, for the templates.
Status add_options(Item* item) {
  if (!item->fields.contains("choices") || !item->fields["choices"].is_array()) return {};
  RT_TRY_SET(const std::vector<std::string> choices, texts_of(item->fields["choices"], "choices"));
  if (!item->fields.contains("labels")) {
    Json labels = Json::array();
    for (size_t k = 0; k < choices.size() && k < 26; ++k) labels.push_back(std::string(1, static_cast<char>('A' + k)));
    item->fields["labels"] = std::move(labels);
  }
  if (item->fields.contains("options")) return {};
  RT_TRY_SET(const std::vector<std::string> labels, texts_of(item->fields["labels"], "labels"));
  std::string options;
  for (size_t k = 0; k < std::min(labels.size(), choices.size()); ++k) {
    options += fmt::format("{}{}. {}", k == 0 ? "" : "\n", labels[k], choices[k]);
  }
  item->fields["options"] = std::move(options);
  return {};
}

/// After `open` an item has texts to be generated.
Status open_task(Task* task) {
  if (task->kind != Kind::kChoice) return invalid("open: the items have no choices");
  task->kind = Kind::kGenerate;
  task->choices = {};
  RT_TRY_SET(task->target, Field::make("answers"));
  task->match.strip = true;
  return {};
}

Status transform(const std::vector<Transform>& transforms, Task* task) {
  for (const Transform& one : transforms) {
    if (one.name == "rename") {
      const auto uses = [&](const Field& field) {
        return field.source().find("labels") != std::string::npos ||
               field.source().find("options") != std::string::npos;
      };
      if (!uses(task->prompt) && !uses(task->choices)) {
        return invalid("rename: the task's templates show no {{labels}} or {{options}}, so no label would change");
      }
    }
    RT_TRY(apply_transform(one, task->seed, &task->items));
    if (!task->examples_are_items) RT_TRY(apply_transform(one, task->seed, &task->examples));
    if (one.name == "open") RT_TRY(open_task(task));
    task->name += "+" + one.name;
  }
  return {};
}

/// The `limit` items with the lowest draws, in the order of the file.
void limit_items(const TaskOptions& options, std::vector<Item>* items) {
  if (options.limit <= 0 || std::ssize(*items) <= options.limit) return;
  std::vector<uint64_t> keys;
  for (const Item& item : *items) keys.push_back(draw_key(options.seed, "limit", item.id));
  std::vector<uint64_t> sorted = keys;
  std::ranges::nth_element(sorted, sorted.begin() + options.limit);
  const uint64_t bound = sorted[options.limit];
  std::vector<Item> kept;
  for (size_t k = 0; k < items->size(); ++k) {
    if (keys[k] < bound && std::ssize(kept) < options.limit) kept.push_back(std::move((*items)[k]));
  }
  *items = std::move(kept);
}

struct Form {
  Kind kind;
  const char* needs[2];
};
// By the fields of the first item; the first form whose fields exist counts.
constexpr Form kForms[] = {{Kind::kChoice, {"question", "choices"}}, {Kind::kGenerate, {"question", "answers"}},
                           {Kind::kContrast, {"better", "worse"}},   {Kind::kNext, {"prompt", "tokens"}},
                           {Kind::kProbe, {"prompt", "text"}},       {Kind::kText, {"text", "text"}}};

}  // namespace

std::string_view kind_name(Kind kind) {
  switch (kind) {
    case Kind::kChoice:
      return "choice";
    case Kind::kGenerate:
      return "generate";
    case Kind::kProbe:
      return "probe";
    case Kind::kText:
      return "text";
    case Kind::kContrast:
      return "contrast";
    case Kind::kNext:
      return "next";
  }
  return "";
}

Result<Field> Field::make(const Json& value) {
  Field out;
  out.said_ = true;
  if (!value.is_string()) {
    out.constant_ = value;
    return out;
  }
  out.source_ = value.get<std::string>();
  RT_TRY_SET(out.pattern_, Template::parse(out.source_));
  return out;
}

Result<Json> Field::value(const Json& item) const {
  if (!constant_.is_null()) return constant_;
  if (item.contains(source_)) return item[source_];
  return pattern_.value(item);
}

Result<std::vector<Item>> read_items(const std::string& path) {
  RT_TRY_SET(const std::string text, data::read_text(path, kMostFileBytes, data::TextRule::kAlsoJson));
  std::vector<Item> out;
  int64_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = std::string_view(text).substr(at, end - at);
    at = end + 1;
    ++number;
    if (stripped(line).empty()) continue;
    const std::string where = fmt::format("{}:{}", path, number);
    RT_TRY(data::check_json_line(std::ssize(line)).with(where));
    Result<Json> fields = parse_ordered_json(line);
    if (!fields.ok()) return invalid(fields.error().message).with(where);
    if (!fields.value().is_object()) return invalid(where + ": an item is an object: {\"question\": ...}");
    Item item{.id = fmt::format("{}", number), .fields = std::move(fields).value()};
    if (item.fields.contains("id") && (item.fields["id"].is_string() || item.fields["id"].is_number())) {
      item.id = python_text(item.fields["id"]);
    }
    out.push_back(std::move(item));
  }
  if (out.empty()) return invalid(path + ": has no items");
  return out;
}

Result<Task> read_task_lines(const std::string& path) {
  Task out;
  out.file = path;
  out.name = std::filesystem::path(path).filename().string();
  out.name = out.name.substr(0, out.name.find('.'));
  RT_TRY_SET(out.items, read_items(path));
  const Json& first = out.items[0].fields;
  const Form* form = nullptr;
  for (const Form& one : kForms) {
    if (form == nullptr && first.contains(one.needs[0]) && first.contains(one.needs[1])) form = &one;
  }
  if (form == nullptr) {
    return invalid(
        fmt::format("{}:1: an item has question and choices and answer, question and answers, prompt and text, "
                    "better and worse, prompt and tokens, or text",
                    path));
  }
  out.kind = form->kind;
  out.examples = out.items;
  out.examples_are_items = true;
  const auto set = [](Field& field, const char* source) -> Status {
    RT_TRY_SET(field, Field::make(source));
    return {};
  };
  if (out.kind == Kind::kChoice || out.kind == Kind::kGenerate) {
    RT_TRY(set(out.prompt, "Question: {{question}}\nAnswer:"));
    RT_TRY(set(out.target, out.kind == Kind::kChoice ? "answer" : "answers"));
    if (out.kind == Kind::kChoice) RT_TRY(set(out.choices, "choices"));
    out.match.strip = true;
  } else if (out.kind == Kind::kProbe || out.kind == Kind::kNext ||
             (out.kind == Kind::kContrast && first.contains("prompt"))) {
    RT_TRY(set(out.prompt, "prompt"));
  }
  if (out.kind == Kind::kProbe || out.kind == Kind::kText) RT_TRY(set(out.target, "text"));
  if (out.kind == Kind::kProbe) out.target_delimiter = "";
  return out;
}

Result<Task> read_task(const std::string& path, const TaskOptions& options) {
  const std::string suffix = std::filesystem::path(path).extension().string();
  const bool yaml = suffix == ".yaml" || suffix == ".yml";
  if (!yaml && !data::named_as_json_lines(path)) {
    return invalid(fmt::format("{}: a task is a .yaml file, or JSON lines (.jsonl)", path));
  }
  RT_TRY_SET(Task out, yaml ? read_task_yaml(path) : read_task_lines(path));
  if (options.shots >= 0) out.shots = options.shots;
  if (out.shots > 0 && out.kind != Kind::kChoice && out.kind != Kind::kGenerate) {
    return invalid(fmt::format("{}: examples (shots) are for choices and generation", path));
  }
  std::vector<Transform> more = out.transforms;
  for (const std::string& name : options.transforms) {
    RT_TRY_SET(Transform one, make_transform(Json(name)));
    more.push_back(std::move(one));
  }
  RT_TRY(transform(more, &out).with(path));
  for (std::vector<Item>* items : {&out.items, &out.examples}) {
    for (Item& item : *items) RT_TRY(add_options(&item).with(fmt::format("{}: item {}", path, item.id)));
  }
  if (out.examples_are_items) out.examples = out.items;
  limit_items(options, &out.items);
  return out;
}

}  // namespace cairn::evaluation
