// cairn eval: loss, perplexity and bits per byte of texts and token stores under the model of a checkpoint or a Hugging
// Face folder.
//
// A set is cut into windows of --window tokens that begin --stride tokens apart. Each token but the first of the set
// (of each document, with --documents) is predicted once, in the first window that holds it: so with a stride below the
// window every token but those of the first window sees at least window - stride tokens before it.
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

#include "converters/hf_folder.h"
#include "runtime/data/token_file.h"
#include "tools/commands.h"
#include "tools/device_option.h"
#include "tools/model_source.h"

namespace cairn::tools {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;
constexpr int64_t kUsualWindow = 2048;

struct Options {
  DeviceChoice device = DeviceChoice::kAuto;
  std::string from, tokenizer, precision, dtype;
  std::vector<std::string> texts, data;
  int64_t max_tokens = 0, window = 0, stride = 0;
  bool documents = false, raw = false, ema = false;
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
    const int64_t context = model.recipe.model.context;
    window_ = options.window > 0 ? options.window : std::min(context, kUsualWindow);
    stride_ = options.stride > 0 ? options.stride : window_;
  }
  int64_t window() const { return window_; }
  int64_t stride() const { return stride_; }

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

  Result<Score> score_text(const Set& set) {
    RT_TRY_SET(const std::string text, convert::read_text_file(set.path, kMaxTextBytes));
    std::vector<int32_t> ids = options_.raw ? std::vector<int32_t>() : model_.before;
    RT_TRY(model_.tokenizer->encode(text, &ids).with(set.path));
    Score out;
    RT_TRY(document(ids, &out).with(set.path));
    return checked(set, out);
  }

  Result<Score> score_data(const Set& set) {
    std::error_code error;
    const bool pair = std::filesystem::exists(set.path + ".idx", error);
    RT_TRY_SET(const std::unique_ptr<data::TokenSource> source,
               pair ? data::open_megatron(set.path) : data::open_token_file(set.path, options_.dtype));
    Score out;
    const int64_t tokens = source->token_count();
    if (!options_.documents || !pair) {
      RT_TRY(piece(*source, 0, options_.max_tokens > 0 ? std::min(tokens, options_.max_tokens) : tokens, &out)
                 .with(set.path));
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
  Status document(std::span<const int32_t> ids, Score* out) {
    const auto read = [&](int64_t first, int64_t count) -> Result<std::span<const int32_t>> {
      return ids.subspan(static_cast<size_t>(first), static_cast<size_t>(count));
    };
    return windows(std::ssize(ids), read, out);
  }

  template <typename Read>
  Status windows(int64_t size, const Read& read, Score* out) {
    const auto start = std::chrono::steady_clock::now();
    ++out->documents;
    int64_t scored = 1;  // tokens before this have been predicted; the first never is
    for (int64_t begin = 0; scored < size && !enough(*out); begin += stride_) {
      const int64_t count = std::min(window_ + 1, size - begin);
      RT_TRY_SET(const std::span<const int32_t> ids, read(begin, count));
      RT_TRY_SET(const std::vector<float> losses, model_.session->token_losses(ids));
      int64_t last = begin + count;
      if (options_.max_tokens > 0) last = std::min(last, scored + options_.max_tokens - out->tokens);
      for (int64_t t = scored; t < last; ++t) out->loss_sum += losses[t - begin - 1];
      if (model_.tokenizer != nullptr) {  // the bytes that the predicted tokens spell; special tokens spell none
        RT_TRY_SET(const std::string spelled,
                   model_.tokenizer->decode(ids.subspan(scored - begin, last - scored), text::Specials::kSkip));
        out->bytes += static_cast<double>(spelled.size());
      }
      out->tokens += last - scored;
      scored = last;
    }
    out->seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return {};
  }

  LoadedModel& model_;
  const Options& options_;
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

Result<int> run(const Options& options, bool json) {
  if (options.from.empty()) return Error{ErrorCode::kInvalidInput, "name a model: cairn eval --from MODEL"};
  std::vector<Set> sets;
  for (const std::string& text : options.texts) sets.push_back(parse_set(text, true));
  for (const std::string& text : options.data) sets.push_back(parse_set(text, false));
  if (sets.empty()) return Error{ErrorCode::kInvalidInput, "name what to evaluate: --text FILE or --data PREFIX"};
  RT_TRY_SET(const DeviceChoice device,
             choose_device({.flag = options.device, .run = {}, .what = "evaluate", .here = true}));
  RT_TRY_SET(LoadedModel model, load_model(options.from, options.tokenizer, options.precision,
                                           options.ema ? convert::WeightsOf::kAverage : convert::WeightsOf::kTraining,
                                           options.texts.empty() ? Works::kOnIds : Works::kOnText, device));
  Evaluator evaluator(model, options);
  RT_TRY(evaluator.check());
  size_t width = 4;
  for (const Set& set : sets) width = std::max(width, set.name.size());
  if (!json) {
    fmt::print("{}: windows of {} tokens, stride {}\n", model.from.string(), evaluator.window(), evaluator.stride());
    fmt::print("{:{}}  {:>10}  {:>8}  {:>11}  {:>10}  {:>9}\n", "set", width, "tokens", "loss", "perplexity",
               "bits/byte", "tokens/s");
  }
  nlohmann::json out = nlohmann::json::array();
  for (const Set& set : sets) {
    RT_TRY_SET(const Score score, set.is_text ? evaluator.score_text(set) : evaluator.score_data(set));
    const nlohmann::json row = to_json(set, score, model.tokenizer != nullptr);
    out.push_back(row);
    if (json) continue;
    const std::string bits =
        row["bits_per_byte"].is_null() ? "-" : fmt::format("{:.4f}", row["bits_per_byte"].get<double>());
    fmt::print("{:{}}  {:>10}  {:>8.4f}  {:>11.3f}  {:>10}  {:>9.0f}\n", set.name, width, score.tokens, score.loss(),
               std::exp(score.loss()), bits, row["tokens_per_s"].get<double>());
    std::fflush(stdout);
  }
  if (json) {
    print_json(nlohmann::json{
        {"model", model.from.string()}, {"window", evaluator.window()}, {"stride", evaluator.stride()}, {"sets", out}});
  }
  return 0;
}

}  // namespace

void add_eval(CLI::App& app, Session& session) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("eval", "loss, perplexity and bits per byte of texts or token stores under a model");
  command->add_option("model,--from", options->from,
                      "a checkpoint, a run folder (newest checkpoint), or a Hugging Face folder");
  command->add_option("--text", options->texts, "a text file, or NAME=FILE; repeatable")->expected(1)->take_all();
  command->add_option("--data", options->data, "a Megatron pair's prefix or a token file, or NAME=PATH; repeatable")
      ->expected(1)
      ->take_all();
  command->add_option("--dtype", options->dtype, "of plain token files: uint16 or uint32")
      ->check(CLI::IsMember({"uint16", "uint32"}));
  command->add_option("--window", options->window, "tokens seen at once (default: the model's context, at most 2048)")
      ->check(CLI::PositiveNumber);
  command->add_option("--stride", options->stride, "tokens from window to window (default: the window)")
      ->check(CLI::PositiveNumber);
  command->add_flag("--documents", options->documents, "windows begin anew at each document of a Megatron pair");
  command->add_option("--max-tokens", options->max_tokens, "stop a set after so many; 0: all of it")
      ->check(CLI::NonNegativeNumber);
  command->add_flag("--raw", options->raw, "do not put the tokenizer's special tokens before a text");
  command->add_option("--precision", options->precision, "fp32 or bf16; default: the recipe's, fp32 for a folder")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  command->add_flag("--ema", options->ema, "the moving average of the weights that the checkpoint holds");
  command->add_option(
      "--tokenizer", options->tokenizer,
      "bytes, a tokenizer.json (or its folder) or a SentencePiece model; default: the model's own. With "
      "--data alone there need be none: only bits/byte wants one");
  add_model_device_option(*command, options->device);
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 done, 2 refused, 65 weights or data are damaged, 74 out of memory or an I/O error.\n"
      "Examples:\n"
      "  cairn eval runs/mine --text kjv=data/kjv.txt\n"
      "  cairn eval HF_DIR --data valid=data/valid --window 1024 --stride 512");
  command->final_callback(
      [options, &session] { session.action = [options, &session] { return run(*options, session.json); }; });
}

}  // namespace cairn::tools
