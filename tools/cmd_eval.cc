// cairn eval: loss, perplexity and bits per byte of a text under the model of a checkpoint or a Hugging Face folder.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "converters/hf_folder.h"
#include "tools/commands.h"
#include "tools/model_source.h"

namespace cairn::tools {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;

struct Options {
  std::string from, text, tokenizer;
  int64_t max_tokens = 0;
};

Result<int> run(const Options& options, bool json) {
  RT_TRY_SET(const std::string text, convert::read_text_file(options.text, kMaxTextBytes));
  RT_TRY_SET(LoadedModel model, load_model(options.from, options.tokenizer));
  std::vector<int32_t> ids;
  RT_TRY(model.tokenizer->encode(text, &ids).with(options.text));
  const auto all = static_cast<int64_t>(ids.size());
  if (options.max_tokens > 0 && all > options.max_tokens) ids.resize(options.max_tokens);
  if (ids.size() < 2) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: has {} tokens; a loss needs at least two", options.text, ids.size())};
  }
  const auto start = std::chrono::steady_clock::now();
  // Windows that touch: each token but the first is predicted once, from at most a context of what stands before it in
  // its window.
  const auto context = static_cast<size_t>(model.recipe.model.context);
  double sum = 0;
  int64_t predicted = 0;
  for (size_t begin = 0; begin + 1 < ids.size(); begin += context) {
    const size_t count = std::min(context + 1, ids.size() - begin);
    RT_TRY_SET(const std::vector<float> losses,
               model.session->token_losses(std::span<const int32_t>(ids).subspan(begin, count)));
    for (const float loss : losses) sum += loss;
    predicted += static_cast<int64_t>(losses.size());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double loss = sum / static_cast<double>(predicted);
  // The bytes that the predicted tokens spell: those of the text without the first token's.
  RT_TRY_SET(const std::string spelled, model.tokenizer->decode(std::span<const int32_t>(ids).subspan(1)));
  const double bits_per_byte = sum / std::log(2.0) / static_cast<double>(std::max<size_t>(1, spelled.size()));
  if (json) {
    fmt::print("{}\n", nlohmann::json{{"model", model.from.string()},
                                      {"text", options.text},
                                      {"tokens", predicted},
                                      {"loss", loss},
                                      {"perplexity", std::exp(loss)},
                                      {"bits_per_byte", bits_per_byte},
                                      {"tokens_per_s", static_cast<double>(predicted) / seconds}}
                           .dump(2));
    return 0;
  }
  fmt::print("loss {:.4f} nats a token, perplexity {:.2f}, {:.4f} bits per byte; {} tokens of {}, {:.0f} tokens/s\n",
             loss, std::exp(loss), bits_per_byte, predicted, options.text, static_cast<double>(predicted) / seconds);
  return 0;
}

}  // namespace

void add_eval(CLI::App& app, Session& session) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("eval", "loss, perplexity and bits per byte of a text under a model");
  command
      ->add_option("model", options->from, "a checkpoint, a run folder (newest checkpoint), or a Hugging Face folder")
      ->required();
  command->add_option("--text", options->text, "the text, a file")->required();
  command->add_option("--max-tokens", options->max_tokens, "stop after so many; 0: the whole text")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--tokenizer", options->tokenizer, "bytes, or a SentencePiece model; default: the model's own");
  add_json_flag(*command, session);
  command->final_callback(
      [options, &session] { session.action = [options, &session] { return run(*options, session.json); }; });
}

}  // namespace cairn::tools
