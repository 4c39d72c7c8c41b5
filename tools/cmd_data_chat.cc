// cairn data chat: conversations to a Megatron pair and the tokens of it that count.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "runtime/core/count_text.h"
#include "runtime/data/tokenize.h"
#include "tools/data_tools.h"

namespace cairn::tools {
namespace {

struct ChatOptions : MakeSetOptions {
  std::string format, specials = "refuse", channel;
};

Result<int> chat(const ChatOptions& options, bool json) {
  static const std::map<std::string, data::ContentSpecials> kSpecials = {{"refuse", data::ContentSpecials::kRefuse},
                                                                         {"text", data::ContentSpecials::kText},
                                                                         {"keep", data::ContentSpecials::kKeep}};
  RT_TRY_SET(data::TokenizeArgs args, make_set_args(options));
  args.separator = data::DocumentSeparator::kJsonLine;
  args.chat = options.format;
  args.specials = kSpecials.at(options.specials);
  args.channel_key = options.channel;
  RT_TRY_SET(const MadeSet made, tokenize_live(std::move(args)));
  const data::TokenizeReport& report = made.report;
  if (json) {
    nlohmann::json out = made_set_json(made, options.out);
    out["counted"] = report.counted;
    out["open_answers"] = report.open;
    print_json(out);
  } else {
    const double share = 100.0 * static_cast<double>(report.counted) / static_cast<double>(report.tokens);
    fmt::print(
        "{0}.bin, {0}.idx, {0}.loss: {1} ({2}) in {3}, {4} of them count ({5:.1f} %), vocabulary {6}; {7} read "
        "in {8:.1f} s\n",
        options.out, count_text(report.tokens, "token"), dtype_name(report.dtype),
        count_text(report.documents, "document"), report.counted, share, report.vocab, format_bytes(report.bytes),
        made.seconds);
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
  make->add_option("INPUT", t->inputs,
                   "files of JSON lines, a row each, plain or packed by gzip or zstd, or tables where the build has "
                   "Arrow; a quoted pattern, 'part-*.zst', for the "
                   "files it matches; -: standard input")
      ->required();
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
  make->add_option(
          "--channel", t->channel,
          "the field of each row that names its channel, at most 64 of them: training reports the loss of each")
      ->type_name("KEY");
  add_make_set_flags(*make, *t, "set");
  add_json_flag(*make, session);
  make->footer(
      "A row is one of: {\"messages\": [{\"role\", \"content\"}]}, {\"conversations\": [{\"from\", \"value\"}]},\n"
      "{\"prompt\", \"response\" or \"completion\"}, {\"instruction\", \"input\", \"output\"}, {\"text\"}, or\n"
      "{\"ids\", \"loss\": [[from, to], ...]}. Answers count, with their end of turn.\n"
      "Exit codes: 0 done, 2 refused: file and line are named, 65 a damaged input, 74 disk full or an I/O error.\n"
      "Examples:\n"
      "  cairn data chat chats.jsonl --out data/chats --tokenizer HF_DIR --chat chatml\n"
      "  tools/chat_joins.py HF_DIR > joins.json\n"
      "  cairn data chat chats.jsonl --out data/chats --tokenizer HF_DIR --chat joins.json --channel topic");
  make->callback([t, &session] { session.action = [t, &session] { return chat(*t, session.json); }; });
}

}  // namespace cairn::tools
