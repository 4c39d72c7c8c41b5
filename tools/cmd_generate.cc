// cairn generate: continues texts with the model of a checkpoint or a Hugging Face folder.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/core/count_text.h"
#include "runtime/data/text_input.h"
#include "runtime/inference/generate.h"
#include "runtime/json/json.h"
#include "tools/commands.h"
#include "tools/device_option.h"
#include "tools/hub_source.h"
#include "tools/model_source.h"
#include "tools/number_option.h"
#include "tools/prompt.h"

namespace cairn::tools {
namespace {

constexpr int64_t kMaxPromptBytes = int64_t{1} << 28;

struct Options {
  DeviceChoice device = DeviceChoice::kAuto;
  std::string from, prompts_file, tokenizer, precision;
  std::vector<std::string> prompts, stop;
  InfillTokens infill;
  bool ignore_eos = false, raw = false, specials = false, ema = false, any_text = false;
  inference::GenerateOptions generate{.sampling = {.temperature = 0.8}};
};

/// One text as it grows. Text that might be the beginning of a stop text is held back.
class Output {
 public:
  Output(const text::Tokenizer& tokenizer, const Options& options)
      : decoder_(tokenizer, options.specials ? text::Specials::kKeep : text::Specials::kSkip), stop_(options.stop) {}

  /// What is new and certain. `stopped`: a stop text came; it and what follows are not part of the text.
  Result<std::string> add(int32_t token, bool* stopped) {
    tokens.push_back(token);
    RT_TRY_SET(const std::string more, decoder_.add(token));
    return take(more, stopped);
  }
  Result<std::string> finish() {
    bool stopped = false;
    RT_TRY_SET(const std::string more, decoder_.finish());
    RT_TRY_SET(std::string out, take(more, &stopped));
    if (!stopped) {
      out += held_;
      shown += held_;
    }
    held_.clear();
    return out;
  }

  std::string shown;
  std::vector<int32_t> tokens;

 private:
  Result<std::string> take(const std::string& more, bool* stopped) {
    held_ += more;
    size_t end = held_.size(), keep = 0;
    for (const std::string& stop : stop_) {
      const size_t found = held_.find(stop);
      if (found != held_.npos) {
        *stopped = true;
        end = std::min(end, found);
      }
      for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
        if (held_.ends_with(std::string_view(stop).substr(0, n))) keep = n;
      }
    }
    if (!*stopped) end = held_.size() - keep;
    std::string out = held_.substr(0, end);
    held_ = *stopped ? std::string() : held_.substr(end);
    shown += out;
    return out;
  }

  text::StreamDecoder decoder_;
  const std::vector<std::string>& stop_;
  std::string held_;
};

/// Lines of a file; a line that is a JSON string stands for that string.
Result<std::vector<std::string>> read_prompts(const std::string& path, bool any_text) {
  RT_TRY_SET(const std::string file,
             data::read_text(path, kMaxPromptBytes, any_text ? data::TextRule::kAnything : data::TextRule::kAlsoJson));
  std::vector<std::string> out;
  const size_t begin = std::min(file.find_first_not_of(" \t\r\n"), file.size());
  const bool brackets = !any_text && begin < file.size() && (file[begin] == '[' || file[begin] == '{');
  const auto is_structured = [](std::string_view text) {
    return json_or_nothing(text, JsonNumbers::kPython).is_structured();
  };
  if (brackets && !is_structured(std::string_view(file).substr(0, file.find('\n', begin))) && is_structured(file)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: is one JSON {}, whose lines would become the prompts: write a prompt a line, each a "
                             "JSON string, or give --any-text to take lines as they are",
                             path, file[begin] == '[' ? "array" : "object")};
  }
  int64_t number = 0;
  for (size_t at = 0; at < file.size();) {
    const size_t end = std::min(file.find('\n', at), file.size());
    std::string line = file.substr(at, end - at);
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if ((line.starts_with('{') || line.starts_with('[')) && !any_text && is_structured(line)) {
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("{}:{}: is a JSON {}, whose {} would become the prompt: write the prompt as a JSON string, or "
                      "give --any-text to take lines as they are",
                      path, number, line[0] == '{' ? "object" : "array",
                      line[0] == '{' ? "braces and keys" : "brackets and quotes")};
    }
    if (line.starts_with('"')) {
      const auto parsed = json_or_nothing(line, JsonNumbers::kPython);
      if (parsed.is_string()) line = parsed.get<std::string>();
      if (has_half_pair(line)) {
        return Error{ErrorCode::kInvalidInput,
                     fmt::format("{}:{}: has half of a surrogate pair (\\ud800 to \\udfff), which is no character; "
                                 "write it as UTF-8 or leave it out",
                                 path, number)};
      }
    }
    if (!line.empty()) out.push_back(std::move(line));
    at = end + 1;
  }
  if (out.empty()) return Error{ErrorCode::kInvalidInput, fmt::format("{}: holds no prompts, one a line", path)};
  return out;
}

/// Those of the command line come before the model's own.
Status take_infill_tokens(const Options& options, LoadedModel* model) {
  const auto take = [&](const char* name, int32_t said, int32_t* id) -> Status {
    if (said < 0) return {};
    if (model->recipe.model.mask != Mask::kPrefix) {
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("{} is for models that fill gaps (model.mask = prefix); this one's mask is causal", name)};
    }
    if (said >= model->recipe.model.vocab) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{} {}: the model has {} ids", name, said, model->recipe.model.vocab)};
    }
    *id = said;
    return {};
  };
  InfillTokens& ids = model->infill;
  RT_TRY(take("--mask-token", options.infill.mask, &ids.mask));
  RT_TRY(take("--gmask-token", options.infill.gmask, &ids.gmask));
  RT_TRY(take("--start-token", options.infill.start, &ids.start));
  RT_TRY(take("--end-token", options.infill.end, &ids.end));
  if (ids.end >= 0 && std::ranges::find(model->stop, ids.end) == model->stop.end()) model->stop.push_back(ids.end);
  return {};
}

std::string_view name_of(inference::Finish finish) {
  switch (finish) {
    case inference::Finish::kLength:
      return "length";
    case inference::Finish::kToken:
      return "eos";
    case inference::Finish::kCaller:
      return "stop";
  }
  return "";
}

Result<int> run(Options options, bool json) {
  if (options.from.empty()) return Error{ErrorCode::kInvalidInput, "name a model: cairn generate --from MODEL"};
  std::erase(options.stop, std::string());
  if (!options.prompts_file.empty()) {
    RT_TRY_SET(const std::vector<std::string> more, read_prompts(options.prompts_file, options.any_text));
    options.prompts.insert(options.prompts.end(), more.begin(), more.end());
  }
  if (options.prompts.empty()) options.prompts.emplace_back();
  RT_TRY_SET(const DeviceChoice device,
             choose_device({.flag = options.device, .run = {}, .what = "generate", .here = true}));
  RT_TRY_SET(const HubFolder from, hub_folder(options.from, hub::Bare::kNever));
  RT_TRY_SET(LoadedModel model, load_model(from.path, options.tokenizer, options.precision,
                                           options.ema ? convert::WeightsOf::kAverage : convert::WeightsOf::kTraining,
                                           Works::kOnText, device));
  if (!json) {
    for (const std::string& warning : model.warnings) fmt::print(stderr, "cairn generate: warning: {}\n", warning);
  }
  RT_TRY(take_infill_tokens(options, &model));
  for (const std::string& note : model.tokenizer->notes()) fmt::print(stderr, "cairn generate: note: {}\n", note);
  if (!options.ignore_eos) options.generate.stop_ids = model.stop;

  std::vector<std::vector<int32_t>> prompts;
  std::vector<Output> outputs;
  int64_t prompt_tokens = 0;
  for (const std::string& prompt : options.prompts) {
    RT_TRY_SET(Prompt encoded, encode_prompt(model, prompt, options.raw));
    prompt_tokens += std::ssize(encoded.tokens);
    prompts.push_back(std::move(encoded.tokens));
    options.generate.shapes.push_back(encoded.shape);
    outputs.emplace_back(*model.tokenizer, options);
  }
  const bool stream = !json && prompts.size() == 1;
  if (stream) fmt::print("{}", options.prompts[0]);
  const auto start = std::chrono::steady_clock::now();
  double first_token_s = 0;
  int64_t made = 0;
  Status failed;
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  RT_TRY_SET(const std::vector<inference::Finish> finish,
             inference::generate(*model.session, prompts, options.generate, [&](size_t k, int32_t token) {
               if (++made == 1) first_token_s = seconds();
               bool stopped = false;
               Result<std::string> more = outputs[k].add(token, &stopped);
               if (!more.ok()) {
                 failed = std::move(more).error();
                 return false;
               }
               if (stream) {
                 fmt::print("{}", more.value());
                 std::fflush(stdout);
               }
               return !stopped;
             }));
  const double total_s = seconds();
  RT_TRY(std::move(failed));
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (finish[k] == inference::Finish::kCaller) continue;
    RT_TRY_SET(const std::string rest, outputs[k].finish());
    if (stream) fmt::print("{}", rest);
  }
  const double tokens_per_s = static_cast<double>(made) / std::max(total_s, 1e-9);
  if (json) {
    nlohmann::json texts = nlohmann::json::array();
    for (size_t k = 0; k < outputs.size(); ++k) {
      texts.push_back({{"prompt", options.prompts[k]},
                       {"prompt_tokens", prompts[k].size()},
                       {"text", outputs[k].shown},
                       {"tokens", outputs[k].tokens},
                       {"finish", name_of(finish[k])}});
    }
    print_json(nlohmann::json{{"model", model.from.string()},
                              {"texts", texts},
                              {"warnings", model.warnings},
                              {"tokens", made},
                              {"first_token_s", first_token_s},
                              {"seconds", total_s},
                              {"tokens_per_s", tokens_per_s}});
    return 0;
  }
  if (stream) {
    fmt::print("\n");
  } else {
    for (size_t k = 0; k < outputs.size(); ++k) {
      fmt::print("--- {} ({}, {})\n{}{}\n", k + 1, count_text(outputs[k].tokens.size(), "token"), name_of(finish[k]),
                 options.prompts[k], outputs[k].shown);
    }
  }
  if (is_terminal(STDERR_FILENO)) {
    fmt::print(stderr, "{} prompt tokens, {} made, first after {:.2f} s, {:.1f} tokens/s\n", prompt_tokens, made,
               first_token_s, tokens_per_s);
  }
  return 0;
}

}  // namespace

void add_generate(CLI::App& app, Session& session) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("generate", "continue texts with a trained model");
  command->add_option(
      "model,--from", options->from,
      "a checkpoint, a run folder (newest checkpoint), a Hugging Face folder, or hf://ORG/NAME@REVISION of the Hub");
  command->add_option("--prompt", options->prompts, "text to continue; repeatable; none: the start of a document")
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);  // or CLI11 takes "[MASK]" for a list
  command->add_option("--prompts", options->prompts_file, "a file of prompts, one a line (or JSON strings)")
      ->type_name("FILE");
  command->add_option("--max-tokens,--tokens", options->generate.max_tokens, "how many to add, at most")
      ->transform(whole_number(1, 1'000'000))
      ->capture_default_str();
  command->add_option("--temperature", options->generate.sampling.temperature, "0: always the likeliest token")
      ->transform(number_in(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-k", options->generate.sampling.top_k, "choose among the k likeliest; 0: among all")
      ->transform(whole_number(0));
  command
      ->add_option("--top-p", options->generate.sampling.top_p,
                   "choose among the likeliest whose probabilities reach this")
      ->transform(number_in(0.0, 1.0));
  command->add_option("--seed", options->generate.sampling.seed, "same seed, prompt and weights: same text")
      ->transform(number_in(uint64_t{0}, std::numeric_limits<uint64_t>::max()));
  command->add_option("--stop", options->stop, "a text that ends a text and is left out; repeatable")
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--mask-token", options->infill.mask, "id of [MASK], the gap in a prompt (GLM)")
      ->transform(whole_number(0));
  command->add_option("--gmask-token", options->infill.gmask, "id of [gMASK], the gap at a prompt's end (GLM)")
      ->transform(whole_number(0));
  command->add_option("--start-token", options->infill.start, "id of sop, which begins what fills a gap (GLM)")
      ->transform(whole_number(0));
  command->add_option("--end-token", options->infill.end, "id of eop, which ends it (GLM)")->transform(whole_number(0));
  command->add_flag("--any-text", options->any_text,
                    "take the lines of --prompts as they are, whatever they look like");
  command->add_flag("--ignore-eos", options->ignore_eos, "continue after the end-of-text token");
  command->add_flag("--special", options->specials, "show special tokens");
  command->add_flag("--raw", options->raw, "do not put the tokenizer's special tokens before a prompt");
  command->add_option("--batch", options->generate.batch, "prompts worked on together")
      ->transform(whole_number(1, 4096))
      ->capture_default_str();
  command->add_option("--precision", options->precision, "fp32 or bf16; default: the recipe's, fp32 for a folder")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  command->add_flag("--ema", options->ema, "the moving average of the weights that the checkpoint holds");
  command->add_option("--tokenizer", options->tokenizer,
                      "bytes, a tokenizer.json (or its folder) or a SentencePiece model; default: the model's own");
  add_model_device_option(*command, options->device);
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 done, 2 refused, 65 weights or data are damaged, 74 out of memory or an I/O error.\n"
      "Examples:\n"
      "  cairn generate runs/mine --prompt 'In the beginning' --temperature 0.7 --seed 1\n"
      "  cairn generate HF_DIR --prompts prompts.txt --max-tokens 64 --json");
  command->final_callback(
      [options, &session] { session.action = [options, &session] { return run(*options, session.json); }; });
}

}  // namespace cairn::tools
