// cairn eval: loss, perplexity and bits per byte of texts and token stores under the model of a checkpoint or a Hugging
// Face folder.
//
// A set is cut into windows of --window tokens that begin --stride tokens apart. Each token but the first of the set
// (of each document, with --documents) is predicted once, in the first window that holds it: so with a stride below the
// window every token but those of the first window sees at least window - stride tokens before it.
//
// Each window is what training makes of its tokens: where the run's objective parts documents, they are parted here.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/data/input_files.h"
#include "runtime/data/loss_spans.h"
#include "runtime/data/objective.h"
#include "runtime/data/text_input.h"
#include "runtime/data/token_file.h"
#include "runtime/json/json.h"
#include "tools/commands.h"
#include "tools/device_option.h"
#include "tools/eval_tasks.h"
#include "tools/hub_source.h"
#include "tools/model_source.h"
#include "tools/number_option.h"

namespace cairn::tools {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;
constexpr int64_t kUsualWindow = 2048;

struct Options {
  DeviceChoice device = DeviceChoice::kAuto;
  std::string from, tokenizer, precision, dtype, json_key;
  std::vector<std::string> texts, data;
  int64_t max_tokens = 0, window = 0, stride = 0;
  bool documents = false, across = false, any_text = false, raw = false, ema = false;
  TaskArgs tasks;
};

struct Set {
  std::string name, path;
  bool is_text = false;
};

struct Score {
  double loss_sum = 0, bytes = 0, seconds = 0;
  int64_t tokens = 0, documents = 0;
  double loss() const { return loss_sum / static_cast<double>(std::max<int64_t>(1, tokens)); }
};

/// "NAME=PATH", or a path that names itself. A path that exists is a path, whatever it contains.
Set parse_set(const std::string& text, bool is_text) {
  const size_t equals = text.find('=');
  std::error_code error;
  if (equals == text.npos || equals == 0 || std::filesystem::exists(text, error)) {
    return {std::filesystem::path(text).stem().string(), text, is_text};
  }
  return {text.substr(0, equals), text.substr(equals + 1), is_text};
}

class Evaluator {
 public:
  Evaluator(LoadedModel& model, const Options& options) : model_(model), options_(options) {
    const Recipe& recipe = model.recipe;
    const int64_t trained = recipe.batch.tokens > 0 ? recipe.batch.tokens : recipe.model.context;
    window_ = options.window > 0 ? options.window : std::min(trained, kUsualWindow);
    stride_ = options.stride > 0 ? options.stride : window_;
    if (!options.across) objective_ = recipe.objective;
  }
  int64_t window() const { return window_; }
  int64_t stride() const { return stride_; }

  /// How documents within a window are read.
  std::string rule() const {
    if (objective_.document_end < 0) return "documents within a window are not parted";
    return fmt::format("documents end at token {} (the run's objective): {}, {}, {}", objective_.document_end,
                       objective_.reset_attention ? "each sees itself" : "attention runs across",
                       objective_.reset_positions ? "positions restart" : "positions continue",
                       objective_.document_loss ? "first tokens count" : "first tokens do not count");
  }
  nlohmann::json rule_json() const {
    if (objective_.document_end < 0) return nullptr;
    return {{"document_end", objective_.document_end},
            {"reset_attention", objective_.reset_attention},
            {"reset_positions", objective_.reset_positions},
            {"document_loss", objective_.document_loss}};
  }

  Status check() const {
    if (model_.recipe.model.mask != Mask::kCausal) {
      return Error{ErrorCode::kUnsupported,
                   "the tokens of this model see a prefix both ways (model.mask): perplexity is of causal models"};
    }
    const int64_t context = model_.recipe.model.context;
    if (window_ > context) {
      return Error{ErrorCode::kInvalidInput, fmt::format("--window {}: the model's context is {}", window_, context)};
    }
    if (stride_ > window_) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("--stride {} is above the window of {}: tokens would be left out", stride_, window_)};
    }
    return {};
  }

  /// The field of JSON lines whose text is scored; empty: the set is no JSON lines.
  std::string json_key(const Set& set) const {
    if (!set.is_text || (options_.json_key.empty() && (options_.any_text || !data::named_as_json_lines(set.path)))) {
      return {};
    }
    return options_.json_key.empty() ? "text" : options_.json_key;
  }

  Result<Score> score_text(const Set& set) {
    const std::string key = json_key(set);
    const data::TextRule rule = options_.any_text ? data::TextRule::kAnything
                                : key.empty()     ? data::TextRule::kNoJson
                                                  : data::TextRule::kAlsoJson;
    RT_TRY_SET(const std::string text, data::read_text(set.path, kMaxTextBytes, rule));
    Score out;
    if (key.empty()) {
      RT_TRY(document(text, &out).with(set.path));
      return checked(set, out);
    }
    int64_t number = 0;
    for (size_t at = 0; at < text.size() && !enough(out);) {
      const size_t end = std::min(text.find('\n', at), text.size());
      const std::string_view line = std::string_view(text).substr(at, end - at);
      at = end + 1;
      ++number;
      if (line.find_first_not_of(" \t\r") == line.npos) continue;
      const auto read_line = [&]() -> Status {
        RT_TRY(data::check_json_line(std::ssize(line)));
        const Result<std::string> field = json_text_field(line, key);
        if (!field.ok()) return Error{ErrorCode::kInvalidInput, field.error().message};  // the text is refused
        return field.value().empty() ? Status() : document(field.value(), &out);
      };
      RT_TRY(read_line().with(fmt::format("{}:{}", set.path, number)));
    }
    return checked(set, out);
  }

  Result<Score> score_data(const Set& set) {
    RT_TRY_SET(const data::NamedTokens named, data::open_named_tokens(set.path, options_.dtype));
    const std::unique_ptr<data::TokenSource>& source = named.source;
    const bool pair = !named.prefix.empty();
    std::error_code unknown;
    if (pair && std::filesystem::exists(data::loss_path(named.prefix), unknown)) {
      fmt::print(stderr, "cairn eval: note: {}: all of its tokens are scored; in training those count that {} names\n",
                 set.path, data::loss_path(named.prefix));
    }
    Score out;
    const int64_t tokens = source->token_count();
    if (options_.documents && !pair) {
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("{}: --documents is for Megatron pairs; a token file has no list of documents", set.path)};
    }
    if (!options_.documents) {
      RT_TRY(piece(*source, 0, tokens, &out).with(set.path));
      return checked(set, out);
    }
    for (int64_t s = 0; s < source->sequence_count() && !enough(out); ++s) {
      RT_TRY_SET(const int64_t begin, source->sequence_start(s));
      RT_TRY_SET(const int64_t end, source->sequence_start(s + 1));
      RT_TRY(piece(*source, begin, end, &out).with(set.path));
    }
    return checked(set, out);
  }

 private:
  bool enough(const Score& score) const { return options_.max_tokens > 0 && score.tokens >= options_.max_tokens; }

  static Result<Score> checked(const Set& set, const Score& score) {
    if (score.tokens > 0) return score;
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: has too few tokens; a loss needs at least two", set.path)};
  }

  /// Windows over tokens [begin, end) of a store, read one at a time.
  Status piece(const data::TokenSource& source, int64_t begin, int64_t end, Score* out) {
    std::vector<int32_t> ids;
    const auto read = [&](int64_t first, int64_t count) -> Result<std::span<const int32_t>> {
      ids.resize(static_cast<size_t>(count));
      RT_TRY(source.read(begin + first, count, ids.data()));
      return std::span<const int32_t>(ids);
    };
    return windows(end - begin, read, out);
  }
  /// Windows over one text.
  Status document(std::string_view text, Score* out) {
    std::vector<int32_t> ids = options_.raw ? std::vector<int32_t>() : model_.before;
    RT_TRY(model_.tokenizer->encode(text, &ids));
    const auto read = [&](int64_t first, int64_t count) -> Result<std::span<const int32_t>> {
      return std::span<const int32_t>(ids).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
    };
    return windows(std::ssize(ids), read, out);
  }

  /// The losses of predicting ids[1..], and in rows_ what training makes of them.
  Result<std::vector<float>> losses_of(std::span<const int32_t> ids) {
    rows_.samples = 1;
    rows_.seq_len = std::ssize(ids) - 1;
    rows_.inputs.assign(ids.begin(), ids.end() - 1);
    rows_.targets.assign(ids.begin() + 1, ids.end());
    constexpr data::SampleRef kNoDraws = {};
    data::apply_objective(objective_, 0, rows_.seq_len, std::span(&kNoDraws, 1), &rows_);
    return model_.session->token_losses(rows_.inputs, rows_.targets, {rows_.positions, rows_.starts, {}});
  }

  /// The bytes that predicted tokens spell; special tokens spell none.
  Status count_bytes(std::span<const int32_t> predicted, Score* out) {
    if (model_.tokenizer == nullptr || predicted.empty()) return {};
    RT_TRY_SET(const std::string spelled, model_.tokenizer->decode(predicted, text::Specials::kSkip));
    out->bytes += static_cast<double>(spelled.size());
    return {};
  }

  template <typename Read>
  Status windows(int64_t size, const Read& read, Score* out) {
    const auto start = std::chrono::steady_clock::now();
    ++out->documents;
    int64_t scored = 1;  // tokens before this have been predicted; the first never is
    for (int64_t begin = 0; scored < size && !enough(*out); begin += stride_) {
      const int64_t count = std::min(window_ + 1, size - begin);
      RT_TRY_SET(const std::span<const int32_t> ids, read(begin, count));
      RT_TRY_SET(const std::vector<float> losses, losses_of(ids));
      int64_t run = scored;  // of tokens that count, in a row
      for (; scored < begin + count && !enough(*out); ++scored) {
        const auto row = static_cast<size_t>(scored - begin - 1);
        if (rows_.targets[row] == kNoTarget) {
          RT_TRY(count_bytes(ids.subspan(run - begin, scored - run), out));
          run = scored + 1;
          continue;
        }
        out->loss_sum += losses[row];
        ++out->tokens;
      }
      RT_TRY(count_bytes(ids.subspan(run - begin, scored - run), out));
    }
    out->seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return {};
  }

  LoadedModel& model_;
  const Options& options_;
  ObjectiveConfig objective_;  // that windows are read by
  data::MicroBatch rows_;      // of the latest window
  int64_t window_ = 0, stride_ = 0;
};

/// `spells`: there is a tokenizer, and bytes were counted.
nlohmann::json to_json(const Set& set, const Score& score, bool spells) {
  const double bits = score.loss_sum / std::log(2.0) / std::max(1.0, score.bytes);
  return {{"name", set.name},
          {set.is_text ? "text" : "data", set.path},
          {"tokens", score.tokens},
          {"documents", score.documents},
          {"loss", score.loss()},
          {"perplexity", std::exp(score.loss())},
          {"bits_per_byte", spells ? nlohmann::json(bits) : nlohmann::json()},
          {"tokens_per_s", static_cast<double>(score.tokens) / std::max(score.seconds, 1e-9)}};
}

/// Tasks are evaluated apart from texts.
Result<int> run_tasks(const Options& options, bool json) {
  if (!options.texts.empty() || !options.data.empty()) {
    return Error{ErrorCode::kInvalidInput, "--tasks, and --text or --data, are two evaluations: call cairn eval twice"};
  }
  TaskArgs args = options.tasks;
  RT_TRY_SET(const HubFolder from, hub_folder(options.from, hub::Bare::kNever));
  args.from = from.path.string();
  args.tokenizer = options.tokenizer;
  args.precision = options.precision;
  args.device = options.device;
  args.json = json;
  if (options.ema) args.weights_of = convert::WeightsOf::kAverage;
  return eval_tasks(args);
}

Result<int> run(const Options& options, bool json) {
  if (options.from.empty()) return Error{ErrorCode::kInvalidInput, "name a model: cairn eval --from MODEL"};
  if (!options.tasks.files.empty()) return run_tasks(options, json);
  std::vector<Set> sets;
  for (const std::string& text : options.texts) sets.push_back(parse_set(text, true));
  for (const std::string& text : options.data) sets.push_back(parse_set(text, false));
  if (sets.empty())
    return Error{ErrorCode::kInvalidInput, "name what to evaluate: --text FILE, --data PREFIX or --tasks FILE"};
  std::vector<std::string> read;
  for (const Set& set : sets) read.push_back(set.path);
  RT_TRY(data::check_read_once(read));
  RT_TRY_SET(const DeviceChoice device,
             choose_device({.flag = options.device, .run = {}, .what = "evaluate", .here = true}));
  RT_TRY_SET(const HubFolder from, hub_folder(options.from, hub::Bare::kNever));
  RT_TRY_SET(LoadedModel model, load_model(from.path, options.tokenizer, options.precision,
                                           options.ema ? convert::WeightsOf::kAverage : convert::WeightsOf::kTraining,
                                           options.texts.empty() ? Works::kOnIds : Works::kOnText, device));
  if (!json) {
    for (const std::string& warning : model.warnings) fmt::print(stderr, "cairn eval: warning: {}\n", warning);
  }
  if (model.tokenizer != nullptr && !options.texts.empty()) {
    for (const std::string& note : model.tokenizer->notes()) fmt::print(stderr, "cairn eval: note: {}\n", note);
  }
  Evaluator evaluator(model, options);
  RT_TRY(evaluator.check());
  size_t width = 4;
  for (const Set& set : sets) width = std::max(width, set.name.size());
  if (!json) {
    fmt::print("{}: windows of {} tokens, stride {}; {}\n", model.from.string(), evaluator.window(), evaluator.stride(),
               evaluator.rule());
    fmt::print("{:{}}  {:>10}  {:>8}  {:>11}  {:>10}  {:>9}\n", "set", width, "tokens", "loss", "perplexity",
               "bits/byte", "tokens/s");
  }
  nlohmann::json out = nlohmann::json::array();
  for (const Set& set : sets) {
    RT_TRY_SET(const Score score, set.is_text ? evaluator.score_text(set) : evaluator.score_data(set));
    nlohmann::json row = to_json(set, score, model.tokenizer != nullptr);
    const std::string key = evaluator.json_key(set);
    if (!key.empty()) row["json_key"] = key;
    out.push_back(row);
    if (json) continue;
    const std::string bits =
        row["bits_per_byte"].is_null() ? "-" : fmt::format("{:.4f}", row["bits_per_byte"].get<double>());
    fmt::print("{:{}}  {:>10}  {:>8.4f}  {:>11.3f}  {:>10}  {:>9.0f}\n", set.name, width, score.tokens, score.loss(),
               std::exp(score.loss()), bits, row["tokens_per_s"].get<double>());
    if (!key.empty()) fmt::print("  {}: JSON lines, \"{}\" of {} documents\n", set.path, key, score.documents);
    std::fflush(stdout);
  }
  if (json) {
    print_json(nlohmann::json{{"model", model.from.string()},
                              {"window", evaluator.window()},
                              {"stride", evaluator.stride()},
                              {"objective", evaluator.rule_json()},
                              {"warnings", model.warnings},
                              {"sets", out}});
  }
  return 0;
}

void add_task_options(CLI::App& command, TaskArgs& tasks) {
  command
      .add_option("--tasks", tasks.files, "a task file: YAML, or JSON lines of items; repeatable (docs/evaluating.md)")
      ->type_name("FILE")
      ->expected(1)
      ->take_all();
  const auto of_tasks = [&](CLI::Option* option) { option->needs("--tasks"); };
  of_tasks(
      command.add_option("--shots", tasks.options.shots, "examples before each item; default: the task's own number")
          ->transform(whole_number(0)));
  of_tasks(command.add_option("--limit", tasks.options.limit, "that many items of each task, drawn by --seed; 0: all")
               ->transform(whole_number(0)));
  of_tasks(command.add_option("--seed", tasks.options.seed, "of --limit (default 0)")->transform(whole_number(0)));
  of_tasks(command
               .add_option("--transform", tasks.options.transforms,
                           "makes other items of each: shuffle, rename, others_wrong, "
                           "none_right, statements, single or open; repeatable, in order")
               ->type_name("NAME")
               ->expected(1)
               ->take_all());
  of_tasks(command.add_option("--steps", tasks.steps, "of a run: all, latest, or A..B; default: latest"));
  of_tasks(command.add_flag("--follow", tasks.follow, "evaluate each new step of a run, until the run ends"));
  of_tasks(command.add_flag("--items", tasks.items, "with --json, the result of each item too"));
}

}  // namespace

void add_eval(CLI::App& app, Session& session) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "eval", "loss, perplexity and bits per byte of texts or token stores under a model; tasks and probes");
  command->add_option(
      "model,--from", options->from,
      "a checkpoint, a run folder (newest checkpoint), a Hugging Face folder, or hf://ORG/NAME@REVISION of the Hub");
  command
      ->add_option("--text", options->texts,
                   "a text file, JSON lines or a pipe, or NAME=FILE; repeatable; -: standard input")
      ->expected(1)
      ->take_all();
  command->add_option("--json-key", options->json_key, "of JSON lines, the field that has the text (default: text)")
      ->type_name("KEY");
  command->add_flag("--any-text", options->any_text, "take texts as they are, whatever they look like");
  command->add_option("--data", options->data, "a Megatron pair's prefix or a token file, or NAME=PATH; repeatable")
      ->expected(1)
      ->take_all();
  command->add_option("--dtype", options->dtype, "of plain token files: uint16 or uint32")
      ->check(CLI::IsMember({"uint16", "uint32"}));
  command->add_option("--window", options->window, "tokens seen at once (default: a sequence of the run, at most 2048)")
      ->transform(whole_number(1));
  command->add_option("--stride", options->stride, "tokens from window to window (default: the window)")
      ->transform(whole_number(1));
  command->add_flag("--documents", options->documents, "windows begin anew at each document of a Megatron pair");
  command->add_flag("--across-documents", options->across,
                    "windows run across documents, whatever the run's objective");
  command->add_option("--max-tokens", options->max_tokens, "stop a set after so many; 0: all of it")
      ->transform(whole_number(0));
  command->add_flag("--raw", options->raw, "do not put the tokenizer's special tokens before a text");
  command->add_option("--precision", options->precision, "fp32 or bf16; default: the recipe's, fp32 for a folder")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  command->add_flag("--ema", options->ema, "the moving average of the weights that the checkpoint holds");
  command->add_option(
      "--tokenizer", options->tokenizer,
      "bytes, a tokenizer.json (or its folder) or a SentencePiece model; default: the model's own. With "
      "--data alone there need be none: only bits/byte wants one");
  add_task_options(*command, options->tasks);
  add_model_device_option(*command, options->device);
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 done, 2 refused, 65 weights or data are damaged, 74 out of memory or an I/O error.\n"
      "Examples:\n"
      "  cairn eval runs/mine --text kjv=data/kjv.txt\n"
      "  cairn eval HF_DIR --data valid=data/valid --window 1024 --stride 512\n"
      "  cairn eval HF_DIR --text valid.jsonl.zst --json-key content\n"
      "  cairn eval runs/mine --tasks arc.yaml --tasks probes.jsonl --shots 2 --limit 200 --steps all");
  command->final_callback(
      [options, &session] { session.action = [options, &session] { return run(*options, session.json); }; });
}

}  // namespace cairn::tools
