// cairn generate: continues a text with the model of a checkpoint or a Hugging Face folder.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/commands.h"
#include "tools/model_source.h"

namespace cairn::tools {
namespace {

struct Options {
  std::string from, prompt, tokenizer;
  int64_t tokens = 128;
  inference::Sampling sampling{.temperature = 0.8};
};

/// How much of `text` ends with whole characters: what is printed as it comes must not cut one in two.
size_t whole_characters(const std::string& text) {
  size_t begin = text.size();
  while (begin > 0 && text.size() - begin < 4) {
    const auto byte = static_cast<unsigned char>(text[begin - 1]);
    --begin;
    if ((byte & 0xc0) == 0x80) continue;
    const size_t length = byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
    return begin + length > text.size() ? begin : text.size();
  }
  return text.size();
}

Result<int> run(const Options& options, bool json) {
  RT_TRY_SET(LoadedModel model, load_model(options.from, options.tokenizer));
  std::vector<int32_t> prompt;
  RT_TRY(model.tokenizer->encode(options.prompt, &prompt).with("--prompt"));
  if (prompt.empty()) {
    if (model.tokenizer->eod() < 0) {
      return Error{ErrorCode::kInvalidInput, "--prompt: is empty, and the tokenizer has no id that starts a document"};
    }
    prompt.push_back(model.tokenizer->eod());
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<int32_t> made;
  std::string shown;
  Status decoded;
  if (!json) fmt::print("{}", options.prompt);
  RT_TRY(inference::generate(*model.session, prompt, options.tokens, options.sampling, [&](int32_t token) {
    made.push_back(token);
    // All of it is decoded each time: how a token is spelled may depend on the one before.
    Result<std::string> text = model.tokenizer->decode(made);
    if (!text.ok()) {
      if (decoded.ok()) decoded = std::move(text).error();
      return;
    }
    const size_t end = std::max(shown.size(), whole_characters(text.value()));
    if (!json) {
      fmt::print(
          "{}", std::string_view(text.value()).substr(std::min(shown.size(), text.value().size()), end - shown.size()));
      std::fflush(stdout);
    }
    shown = text.value().substr(0, end);
  }));
  if (!json) fmt::print("\n");
  RT_TRY(decoded);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (json) {
    RT_TRY_SET(const std::string text, model.tokenizer->decode(made));
    fmt::print("{}\n", nlohmann::json{{"model", model.from.string()},
                                      {"prompt", options.prompt},
                                      {"text", text},
                                      {"tokens", made},
                                      {"tokens_per_s", static_cast<double>(made.size()) / seconds}}
                           .dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  return 0;
}

}  // namespace

void add_generate(CLI::App& app, Session& session) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("generate", "continue a text with a trained model");
  command
      ->add_option("model", options->from, "a checkpoint, a run folder (newest checkpoint), or a Hugging Face folder")
      ->required();
  command->add_option("--prompt", options->prompt, "text to continue; none: the start of a document");
  command->add_option("--tokens", options->tokens, "how many to add")
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000}))
      ->capture_default_str();
  command->add_option("--temperature", options->sampling.temperature, "0: always the likeliest token")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-k", options->sampling.top_k, "choose among the k likeliest; 0: among all")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--top-p", options->sampling.top_p, "choose among the likeliest whose probabilities reach this")
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--seed", options->sampling.seed, "same seed, prompt and weights: same text");
  command->add_option("--tokenizer", options->tokenizer, "bytes, or a SentencePiece model; default: the model's own");
  add_json_flag(*command, session);
  command->final_callback(
      [options, &session] { session.action = [options, &session] { return run(*options, session.json); }; });
}

}  // namespace cairn::tools
