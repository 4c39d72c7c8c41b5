// cairn data chat: conversations to a Megatron pair and the tokens of it that count.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "runtime/core/cgroup.h"
#include "runtime/core/count_text.h"
#include "runtime/data/tokenize.h"
#include "runtime/text/tokenizer.h"
#include "tools/data_tools.h"
#include "tools/model_source.h"
#include "tools/number_option.h"

namespace cairn::tools {
namespace {

struct ChatOptions {
  std::vector<std::string> inputs;
  std::string out, tokenizer, format, specials = "refuse";
  int64_t threads = 0;  // 0: as many as there are cores
  bool overwrite = false;
};

Result<int> chat(const ChatOptions& options, bool json) {
  static const std::map<std::string, data::ContentSpecials> kSpecials = {{"refuse", data::ContentSpecials::kRefuse},
                                                                         {"text", data::ContentSpecials::kText},
                                                                         {"keep", data::ContentSpecials::kKeep}};
  RT_TRY(check_tokenizer_name(options.tokenizer));
  data::TokenizeArgs args;
  args.inputs = options.inputs;
  args.output_prefix = options.out;
  args.tokenizer = text::tokenizer_config(options.tokenizer);
  args.separator = data::DocumentSeparator::kJsonLine;
  args.chat = options.format;
  args.specials = kSpecials.at(options.specials);
  args.threads = options.threads > 0 ? options.threads : usable_cpus();
  args.overwrite = options.overwrite;
  const auto begin = std::chrono::steady_clock::now();
  RT_TRY_SET(const data::TokenizeReport report, tokenize_live(std::move(args)));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (json) {
    print_json(nlohmann::json{{"prefix", options.out},
                              {"bytes", report.bytes},
                              {"documents", report.documents},
                              {"tokens", report.tokens},
                              {"counted", report.counted},
                              {"open_answers", report.open},
                              {"vocab", report.vocab},
                              {"dtype", dtype_name(report.dtype)},
                              {"seconds", seconds}});
  } else {
    const double share = 100.0 * static_cast<double>(report.counted) / static_cast<double>(report.tokens);
    fmt::print(
        "{0}.bin, {0}.idx, {0}.loss: {1} ({2}) in {3}, {4} of them count ({5:.1f} %), vocabulary {6}; {7} read "
        "in {8:.1f} s\n",
        options.out, count_text(report.tokens, "token"), dtype_name(report.dtype),
        count_text(report.documents, "document"), report.counted, share, report.vocab, format_bytes(report.bytes),
        seconds);
  }
  if (report.open > 0) {
    fmt::print(stderr,
               "cairn data chat: warning: {} where the last token that counts is no special one: the model will not "
               "learn to end there ({}{})\n",
               count_text(report.open, "document"), fmt::join(report.opens, ", "),
               report.open > std::ssize(report.opens) ? ", ..." : "");
  }
  return 0;
}

}  // namespace

void add_data_chat(CLI::App& command, Session& session) {
  CLI::App* make = command.add_subcommand("chat", "conversations to a Megatron pair, and which tokens of it count");
  const auto t = std::make_shared<ChatOptions>();
  make->add_option("INPUT", t->inputs, "files of JSON lines, a row each; -: standard input")->required();
  make->add_option("--out", t->out, "path without .bin, .idx and .loss")->required()->type_name("PREFIX");
  make->add_option("--tokenizer", t->tokenizer,
                   "bytes, a tokenizer.json (or its folder), or a SentencePiece model: that of the model to be trained")
      ->required()
      ->type_name("NAME");
  make->add_option("--chat", t->format,
                   "how turns become a text: alpaca, chatml, llama3, plain, or a file that tools/chat_joins.py made "
                   "from a tokenizer's chat_template")
      ->required()
      ->type_name("FORMAT");
  make->add_option(
          "--specials", t->specials,
          "where a content spells a special token: refuse the row, make ordinary text of it, or keep the token "
          "(refuse, text, keep; default: refuse)")
      ->type_name("WHAT")
      ->check(CLI::IsMember({"refuse", "text", "keep"}));
  make->add_option("--threads", t->threads, "that encode; the set is the same for any number (default: all cores)")
      ->type_name("N")
      ->transform(whole_number(1));
  make->add_flag("--overwrite", t->overwrite, "replace a set that exists");
  add_json_flag(*make, session);
  make->footer(
      "A row is one of: {\"messages\": [{\"role\", \"content\"}]}, {\"conversations\": [{\"from\", \"value\"}]},\n"
      "{\"prompt\", \"response\" or \"completion\"}, {\"instruction\", \"input\", \"output\"}, {\"text\"}, or\n"
      "{\"ids\", \"loss\": [[from, to], ...]}. Answers count, with their end of turn.\n"
      "Exit codes: 0 done, 2 refused: file and line are named, 74 disk full or an I/O error.\n"
      "Examples:\n"
      "  cairn data chat chats.jsonl --out data/chats --tokenizer HF_DIR --chat chatml\n"
      "  tools/chat_joins.py HF_DIR > joins.json\n"
      "  cairn data chat chats.jsonl --out data/chats --tokenizer HF_DIR --chat joins.json");
  make->callback([t, &session] { session.action = [t, &session] { return chat(*t, session.json); }; });
}

}  // namespace cairn::tools
