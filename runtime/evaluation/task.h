#pragma once
// Tasks: files of items, and how an item becomes texts to be scored. A task file is YAML with the keys of
// lm-evaluation-harness' tasks (0.4.13), or JSON lines by themselves, whose fields say what they are
// (docs/evaluating.md).

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/evaluation/template.h"
#include "runtime/evaluation/transforms.h"

namespace cairn::evaluation {

enum class Kind {
  kChoice,    // the likeliest of an item's choices
  kGenerate,  // greedy text against right ones
  kProbe,     // one text behind its prompt
  kText,      // texts, every token predicted once
  kContrast,  // a better text against a worse one
  kNext,      // the probability that the next token begins one of several texts
};
std::string_view kind_name(Kind kind);

/// A key of a task, for each item: the name of a field, a template, or a constant.
class Field {
 public:
  /// `value`: as the file has it. Errors: those of Template::parse.
  static Result<Field> make(const nlohmann::ordered_json& value);
  bool said() const { return said_; }
  const std::string& source() const { return source_; }  // the template's text; empty for a constant
  /// A text that is one expression keeps its value's type. Errors: as Template.
  Result<nlohmann::ordered_json> value(const nlohmann::ordered_json& item) const;

 private:
  bool said_ = false;
  nlohmann::ordered_json constant_;  // null: `pattern_`
  std::string source_;
  Template pattern_;
};

/// How a generated text is compared with a right one.
struct MatchRule {
  bool ignore_case = false, ignore_punctuation = false, ignore_numbers = false, strip = false;
};

struct Task {
  std::string name;  // with the names of its transforms: "arc+shuffle"
  std::string file;  // that it was read from
  Kind kind = Kind::kChoice;
  std::vector<Item> items, examples;
  bool examples_are_items = false;  // an item is no example of itself
  bool seeded_examples = false;     // else the first ones
  int64_t shots = 0;
  uint64_t seed = 0;
  Field prompt, target, choices, description;
  std::string target_delimiter = " ", example_delimiter = "\n\n";
  std::vector<std::string> stop = {"\n"};
  int64_t max_tokens = 64;
  MatchRule match;
  std::vector<Transform> transforms;  // of the file, applied by read_task()
  std::vector<std::string> notes;     // for the person: where numbers differ from the harness'
};

/// The command line's settings of all tasks.
struct TaskOptions {
  int64_t shots = -1;  // -1: the task's own number
  int64_t limit = 0;   // items by a seeded choice, in the file's order; 0: all
  uint64_t seed = 0;
  std::vector<std::string> transforms;  // by name, behind the file's own
};

/// Errors: kInvalidInput with file and line, or key; kUnsupported naming the key, the tag, the metric that is not read.
Result<Task> read_task(const std::string& path, const TaskOptions& options);

/// The parts of read_task() for the two kinds of file. `limit` is not applied.
Result<Task> read_task_yaml(const std::string& path);
Result<Task> read_task_lines(const std::string& path);
/// The items of a file of JSON lines.
Result<std::vector<Item>> read_items(const std::string& path);

}  // namespace cairn::evaluation
