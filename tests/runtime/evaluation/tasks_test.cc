// Tasks from files, their transforms, their few-shot texts, their results and where those are kept.

#include "runtime/evaluation/task.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/evaluation/questions.h"
#include "runtime/evaluation/results.h"
#include "runtime/json/json.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::evaluation;
namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

namespace {

void write(const fs::path& path, std::string_view text) { std::ofstream(path, std::ios::binary) << text; }

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

constexpr std::string_view kItems =
    "{\"id\": \"one\", \"question\": \"Q1\", \"choices\": [\"a\", \"b\", \"c\"], \"answer\": 1}\n"
    "{\"question\": \"Q2\", \"choices\": [\"d\", \"e\", \"f\"], \"answer\": [0, 2]}\n\n"
    "{\"question\": \"Q3\", \"choices\": [\"g\", \"h\"], \"answer\": \"g\"}\n";

constexpr std::string_view kYaml =
    "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: items.jsonl}}\ntest_split: test\n"
    "fewshot_split: test\nfewshot_config: {sampler: first_n}\noutput_type: multiple_choice\n"
    "doc_to_text: \"{{question}}?\"\ndoc_to_choice: choices\ndoc_to_target: answer\ntarget_delimiter: \"=\"\n";

Task task_of(const fs::path& path, const TaskOptions& options = {}) {
  Result<Task> made = read_task(path.string(), options);
  REQUIRE_OK(made);
  return std::move(made).value();
}

std::string refusal(const fs::path& path, const TaskOptions& options = {}) {
  const Result<Task> made = read_task(path.string(), options);
  REQUIRE_FALSE(made.ok());
  return made.error().message;
}

std::string context(const Task& task, size_t k) {
  const auto made = context_of(task, k);
  REQUIRE_OK(made);
  return made.value();
}

}  // namespace

TEST_SUITE("runtime/evaluation/tasks") {
  TEST_CASE("the fields of JSON lines say what a task is") {
    const testing::TempDir dir;
    const auto kind = [&](std::string_view line) {
      write(dir / "t.jsonl", line);
      return task_of(dir / "t.jsonl").kind;
    };
    CHECK(kind(kItems) == Kind::kChoice);
    CHECK(kind("{\"question\": \"a\", \"answers\": [\"b\"]}") == Kind::kGenerate);
    CHECK(kind("{\"prompt\": \"a\", \"text\": \"b\"}") == Kind::kProbe);
    CHECK(kind("{\"text\": \"b\"}") == Kind::kText);
    CHECK(kind("{\"better\": \"b\", \"worse\": \"c\"}") == Kind::kContrast);
    CHECK(kind("{\"prompt\": \"b\", \"tokens\": [\"c\"]}") == Kind::kNext);
    write(dir / "t.jsonl", "{\"other\": 1}\n");
    CHECK(refusal(dir / "t.jsonl").find("t.jsonl:1: an item has") != std::string::npos);
    write(dir / "t.jsonl", "{\"text\": \"a\"}\n{\"text\": \n");
    CHECK(refusal(dir / "t.jsonl").find("t.jsonl:2: ") != std::string::npos);
    write(dir / "t.jsonl", "\n");
    CHECK(refusal(dir / "t.jsonl").find("has no items") != std::string::npos);
    CHECK(refusal(dir / "t.csv").find("is a .yaml file, or JSON lines") != std::string::npos);
  }

  TEST_CASE("a harness task's contexts have its examples, which are never the item itself") {
    const testing::TempDir dir;
    write(dir / "items.jsonl", kItems);
    write(dir / "t.yaml", kYaml);
    const Task none = task_of(dir / "t.yaml");
    CHECK(none.name == "mine");
    CHECK(context(none, 0) == "Q1?");
    const Task two = task_of(dir / "t.yaml", {.shots = 2});
    CHECK(context(two, 0) == "Q2?=d\n\nQ3?=g\n\nQ1?");
    CHECK(context(two, 2) == "Q1?=b\n\nQ2?=d\n\nQ3?");
    const auto tokenizer = text::make_tokenizer({.kind = TokenizerConfig::Kind::kBytes});
    REQUIRE_OK(tokenizer);
    const TextIds ids{tokenizer.value().get(), {}, 0};
    const auto questions = make_questions(two, ids);
    REQUIRE_OK(questions);
    CHECK(questions.value()[1].right == std::vector<int64_t>{0, 2});
    CHECK(questions.value()[2].requests[1].continuation == std::vector<int32_t>{'=', 'h'});
    const Task three = task_of(dir / "t.yaml", {.shots = 3});
    const auto too_many = make_questions(three, ids);
    REQUIRE_FALSE(too_many.ok());
    CHECK(too_many.error().message.find("item one: 3 examples are wanted, and there are 2") != std::string::npos);
    // The hash is of all that decides.
    const auto hash = [&](const Task& task, const char* how) {
      return questions_hash(task, make_questions(task, ids).value(), how);
    };
    CHECK(hash(two, "fp32") == hash(two, "fp32"));
    CHECK(hash(two, "fp32") != hash(two, "bf16"));
    CHECK(hash(two, "fp32") != hash(none, "fp32"));
    CHECK(hash(task_of(dir / "t.yaml", {.limit = 2}), "") != hash(none, ""));
  }

  TEST_CASE("the reader refuses what it does not read of a harness task, by its key") {
    const testing::TempDir dir;
    write(dir / "items.jsonl", kItems);
    const auto with = [&](std::string_view more) {
      write(dir / "t.yaml", std::string(kYaml) + std::string(more));
      return refusal(dir / "t.yaml");
    };
    CHECK(with("process_docs: !function utils.f\n").find("line 12: !function utils.f") != std::string::npos);
    CHECK(with("gen_prefix: a\n").find("the key \"gen_prefix\" is not read") != std::string::npos);
    CHECK(with("repeats: 2\n").find("repeats") != std::string::npos);
    CHECK(with("metric_list: [{metric: f1}]\n").find("metric_list: f1 is not computed") != std::string::npos);
    CHECK(with("transforms: [turn]\n").find("the transform \"turn\" is not known; known: shuffle") !=
          std::string::npos);
    CHECK(with("num_fewshot: -1\n").find("num_fewshot: found -1") != std::string::npos);
    CHECK(with("description: \"{% for %}\"\n").find("description: byte 0: the tag {% for %}") != std::string::npos);
    write(dir / "t.yaml",
          "dataset_path: arc\ntest_split: t\noutput_type: multiple_choice\ndoc_to_text: a\n"
          "doc_to_choice: b\ndoc_to_target: c\n");
    CHECK(refusal(dir / "t.yaml").find("dataset_path: \"arc\": only local JSON lines are read") != std::string::npos);
    write(dir / "u.yaml", "include: t.yaml\ndataset_path: json\nfile: items.jsonl\ndoc_to_text: \"{{question}}\"\n");
    CHECK(context(task_of(dir / "u.yaml"), 1) == "Q2");
  }

  TEST_CASE("each transform makes the same items of an item and a seed, in order of application") {
    const testing::TempDir dir;
    write(dir / "t.jsonl", kItems);
    const auto fields = [&](std::vector<std::string> names) {
      return task_of(dir / "t.jsonl", {.transforms = std::move(names)});
    };
    const Task shuffled = fields({"shuffle"});
    CHECK(shuffled.name == "t+shuffle");
    bool moved = false;
    for (size_t k = 0; k < 3; ++k) {
      const Json& now = shuffled.items[k].fields;
      const Json was = task_of(dir / "t.jsonl").items[k].fields;
      const auto before = texts_of(was["choices"], "").value(), after = texts_of(now["choices"], "").value();
      moved = moved || before != after;
      CHECK(std::is_permutation(before.begin(), before.end(), after.begin(), after.end()));
      std::vector<std::string> right_then, right_now;
      for (const int64_t r : right_choices(was["answer"], before).value()) right_then.push_back(before[r]);
      for (const int64_t r : right_choices(now["answer"], after).value()) right_now.push_back(after[r]);
      CHECK(std::is_permutation(right_then.begin(), right_then.end(), right_now.begin(), right_now.end()));
      CHECK(now == fields({"shuffle"}).items[k].fields);
    }
    CHECK(moved);
    CHECK(refusal(dir / "t.jsonl", {.transforms = {"others_wrong"}}).find("item 2: others_wrong: one right choice") !=
          std::string::npos);
    const Task single = fields({"single", "others_wrong"});
    REQUIRE(single.items.size() == 4);
    CHECK(single.items[1].id == "2#0");
    CHECK(single.items[0].fields["choices"] == Json{"a", "All other answers are wrong", "c"});
    CHECK(single.items[2].fields["choices"] == Json{"e", "All other answers are wrong"});
    CHECK(single.items[2].fields["answer"] == 1);
    std::vector<Item> many;
    for (int k = 0; k < 200; ++k)
      many.push_back({std::to_string(k), Json{{"choices", {"x", "y", "z"}}, {"answer", 1}}});
    const auto none_right = make_transform(Json{{"none_right", {{"text", "none"}, {"share", 0.25}}}});
    REQUIRE_OK(none_right);
    const Status applied = apply_transform(none_right.value(), 3, &many);
    REQUIRE_OK(applied);
    const auto right = std::ranges::count_if(many, [](const Item& one) { return one.fields["choices"][1] == "none"; });
    const auto wrong = std::ranges::count_if(many, [](const Item& one) { return one.fields["choices"][1] == "y"; });
    CHECK(right + wrong == 200);
    CHECK(wrong > 25);
    CHECK(wrong < 80);
    const Task statements = fields({"statements"});
    CHECK(statements.items[0].fields["question"] == "Q1 a\nQ1 b\nQ1 c\n\nQ1");
    const Task open = fields({"open"});
    CHECK(open.kind == Kind::kGenerate);
    CHECK(open.items[1].fields["answers"] == Json{"d", "f"});
    CHECK(refusal(dir / "t.jsonl", {.transforms = {"rename"}}).find("no label would change") != std::string::npos);
    write(dir / "r.yaml",
          "file: t.jsonl\noutput_type: multiple_choice\ndoc_to_text: \"{{options}}\"\n"
          "doc_to_choice: \"{{labels}}\"\ndoc_to_target: \"{{answer}}\"\ntransforms: [{rename: [x, y, z]}]\n");
    CHECK(context(task_of(dir / "r.yaml"), 0) == "x. a\ny. b\nz. c");
  }

  TEST_CASE("a limit draws items by the seed, in the file's order, and another seed draws others") {
    const testing::TempDir dir;
    std::string text;
    for (int k = 0; k < 100; ++k) text += "{\"text\": \"t" + std::to_string(k) + "\"}\n";
    write(dir / "t.jsonl", text);
    const auto ids = [&](uint64_t seed) {
      std::vector<int> out;
      for (const Item& one : task_of(dir / "t.jsonl", {.limit = 10, .seed = seed}).items)
        out.push_back(std::stoi(one.id));
      return out;
    };
    CHECK(ids(0).size() == 10);
    CHECK(std::ranges::is_sorted(ids(0)));
    CHECK(ids(0) == ids(0));
    CHECK(ids(0) != ids(1));
    CHECK(ids(0).back() > 10);  // not the head
  }

  TEST_CASE("results cut at any byte are continued behind the last whole line, and nothing is computed twice") {
    const testing::TempDir dir;
    const fs::path path = results_path(dir / "evals", "a/b+c", "q", 120, "w");
    CHECK(path == dir / "evals" / "a_b+c-q" / "step-00000120-w.jsonl");
    const Json head = {{"task", "t"}, {"questions", "q"}};
    const std::vector<std::string> ids = {"1", "2", "3"};
    const auto item = [](size_t k) {
      return Json{{"id", std::to_string(k + 1)}, {"acc", 1.0 / (3.0 + static_cast<double>(k))}};
    };
    const auto evaluate = [&]() {
      Result<Results> opened = Results::open(path, head, ids);
      REQUIRE_OK(opened);
      Results results = std::move(opened).value();
      int computed = 0;
      if (results.complete()) return computed;
      while (results.done() < ids.size()) {
        const Status added = results.add(item(results.done()));
        REQUIRE_OK(added);
        ++computed;
      }
      const Status finished = results.finish(Json{{"n", 3}});
      REQUIRE_OK(finished);
      return computed;
    };
    CHECK(evaluate() == 3);
    const std::string whole = read(path);
    CHECK(std::ranges::count(whole, '\n') == 5);
    CHECK(evaluate() == 0);
    for (size_t cut = 0; cut < whole.size(); ++cut) {
      if (cut % 8 != 0 && whole.find('\n', cut - 1) > cut) continue;  // within a line some do
      CAPTURE(cut);
      write(path, whole.substr(0, cut));
      const auto lines = std::ranges::count(whole.substr(0, cut), '\n');
      CHECK(evaluate() == 3 - std::clamp<int>(static_cast<int>(lines) - 1, 0, 3));
      CHECK(read(path) == whole);
      write(path, whole.substr(0, cut) + std::string(5, '\0'));  // as after a power cut
      evaluate();
      CHECK(read(path) == whole);
    }
    // One writer at a time.
    write(path, whole.substr(0, whole.size() - 2));
    const auto held = Results::open(path, head, ids);
    REQUIRE_OK(held);
    const auto second = Results::open(path, head, ids);
    REQUIRE_FALSE(second.ok());
    CHECK(second.error().code == ErrorCode::kUnavailable);
  }
}
