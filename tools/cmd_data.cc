// cairn data tokenize | encode | info: text files to a Megatron pair, and the contents of a token store.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <vector>

#include "runtime/core/count_text.h"
#include "runtime/data/loss_spans.h"
#include "runtime/data/set_origin.h"
#include "runtime/data/text_input.h"
#include "runtime/data/token_file.h"
#include "runtime/data/token_scan.h"
#include "runtime/data/tokenize.h"
#include "runtime/json/json.h"
#include "runtime/text/tokenizer.h"
#include "tools/commands.h"
#include "tools/data_tools.h"
#include "tools/model_source.h"
#include "tools/number_option.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxLinesBytes = int64_t{1} << 30;

struct TokenizeOptions : MakeSetOptions, DocumentOptions {
  bool eod = false;
};

struct EncodeOptions {
  std::vector<std::string> texts;
  std::string tokenizer = "bytes", lines;
  bool special = false, json_lines = false, any_text = false;
};

struct InfoOptions {
  std::string path, dtype;
  int64_t vocab = 0;
  bool scan = false;  // of earlier builds: it is done always
};

Result<int> tokenize(const TokenizeOptions& options, bool json) {
  RT_TRY_SET(data::TokenizeArgs args, make_set_args(options));
  RT_TRY(set_documents(options, &args));
  args.append_eod = options.eod;
  RT_TRY_SET(const MadeSet made, tokenize_live(std::move(args)));
  const data::TokenizeReport& report = made.report;
  if (json) {
    nlohmann::json out = made_set_json(made, options.out);
    out["empty_documents"] = report.empty_documents;
    print_json(out);
    return 0;
  }
  fmt::print("{}.bin, {}.idx: {} ({}) in {}, vocabulary {}; {} read in {:.1f} s\n", options.out, options.out,
             count_text(report.tokens, "token"), dtype_name(report.dtype), count_text(report.documents, "document"),
             report.vocab, format_bytes(report.bytes), made.seconds);
  if (report.empty_documents > 0) fmt::print("  {} dropped\n", count_text(report.empty_documents, "empty document"));
  return 0;
}

struct SetFacts {
  int64_t longest = 0;             // tokens of a sequence
  std::optional<int64_t> counted;  // of instruction data
  std::optional<data::SetOrigin> origin;
};

/// `prefix`: of a pair; empty: a token file.
Result<SetFacts> set_facts(const data::TokenSource& source, const std::string& prefix) {
  SetFacts out{.longest = source.token_count()};
  if (prefix.empty()) return out;
  constexpr int64_t kAtOnce = 64 << 10;
  const int64_t sequences = source.sequence_count();
  std::optional<data::LossSpans> loss;
  if (fs::exists(data::loss_path(prefix))) {
    RT_TRY_SET(data::LossSpans spans, data::LossSpans::open(prefix, sequences, source.token_count()));
    loss.emplace(std::move(spans));
    out.counted = 0;
  }
  out.longest = 0;
  std::vector<data::LossSpan> spans;
  std::vector<uint64_t> begins;
  for (int64_t first = 0; first < sequences; first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, sequences - first);
    RT_TRY_SET(const std::vector<int64_t> starts, source.sequence_starts(first, count));
    for (int64_t k = 0; k < count; ++k) out.longest = std::max(out.longest, starts[k + 1] - starts[k]);
    if (loss) RT_TRY(loss->read(first, count, &spans, &begins));
    for (const data::LossSpan& span : spans) *out.counted += span.to - span.from;
  }
  RT_TRY_SET(out.origin, data::read_origin(prefix, sequences, source.token_count()));
  return out;
}

nlohmann::json origin_json(const data::SetOrigin& origin) {
  nlohmann::json inputs = nlohmann::json::array();
  for (const data::SetOrigin::Input& input : origin.inputs)
    inputs.push_back({{"path", input.path}, {"bytes", input.bytes}, {"packed", data::packing_name(input.packing)}});
  return {{"tokenizer", origin.tokenizer},
          {"tokenizer_hash", origin.tokenizer_hash},
          {"chat", origin.chat},
          {"inputs", std::move(inputs)}};
}

std::string origin_text(const data::SetOrigin& origin) {
  constexpr size_t kNamed = 4;
  std::string out = fmt::format("  made by the tokenizer {}{}{}, of:\n", origin.tokenizer,
                                origin.chat.empty() ? "" : " in the chat format ", origin.chat);
  for (const data::SetOrigin::Input& input : std::span(origin.inputs).first(std::min(kNamed, origin.inputs.size()))) {
    const bool table = input.packing == data::Packing::kTable;
    const std::string_view packed = table ? "" : data::packing_name(input.packing);
    out += fmt::format("    {}: {}{}{}{}\n", input.path, format_bytes(input.bytes), table ? " of rows" : "",
                       packed.empty() ? "" : ", packed by ", packed);
  }
  if (origin.inputs.size() > kNamed) out += fmt::format("    and {} more files\n", origin.inputs.size() - kNamed);
  return out;
}

Result<int> info(const InfoOptions& options, bool json) {
  RT_TRY_SET(const data::NamedTokens named,
             data::open_named_tokens(options.path, options.dtype, data::OpenOptions{options.vocab}));
  const std::unique_ptr<data::TokenSource>& source = named.source;
  const std::string& prefix = named.prefix;
  const int64_t tokens = source->token_count();
  const int64_t sequences = source->sequence_count();
  RT_TRY_SET(const data::ScanReport scan, data::scan_tokens(*source, tokens, {.vocab = options.vocab}));
  const std::string& name = prefix.empty() ? options.path : prefix;
  RT_TRY_SET(const SetFacts facts, set_facts(*source, prefix));
  if (json) {
    nlohmann::json out = {{"path", name},
                          {"kind", prefix.empty() ? "token_file" : "megatron"},
                          {"tokens", tokens},
                          {"sequences", sequences},
                          {"longest_sequence", facts.longest},
                          {"fingerprint", fmt::format("{:016x}", source->fingerprint())}};
    out["largest_token"] = scan.ids.greatest;
    out["smallest_token"] = scan.ids.least;
    if (options.vocab > 0) out["vocab"] = options.vocab;
    out["outside"] = scan.ids.outside;
    if (facts.counted) out["counted"] = *facts.counted;
    if (facts.origin) out["made_of"] = origin_json(*facts.origin);
    if (!scan.bad.ok()) out["error"] = scan.bad.error().message;
    print_json(out);
    return scan.bad.ok() ? 0 : kRefused;
  }
  fmt::print("{}: {}, {}", name, prefix.empty() ? "token file" : "Megatron pair", count_text(tokens, "token"));
  if (!prefix.empty())
    fmt::print(" in {}, the longest of {}", count_text(sequences, "sequence"), count_text(facts.longest, "token"));
  fmt::print(", largest id {}, fingerprint {:016x}\n", scan.ids.greatest, source->fingerprint());
  if (facts.counted) {
    fmt::print("  instruction data: {} of the tokens count ({:.1f} %)\n", *facts.counted,
               100.0 * static_cast<double>(*facts.counted) / static_cast<double>(std::max<int64_t>(tokens, 1)));
  }
  if (facts.origin) fmt::print("{}", origin_text(*facts.origin));
  if (scan.bad.ok()) return 0;
  fmt::print(stderr, "cairn data info: {}\n  {} of {} ids are outside, from {} to {}\n", scan.bad.error().message,
             scan.ids.outside, tokens, scan.ids.least, scan.ids.greatest);
  return kRefused;
}

/// Ids of each line, a line each: to see how a text is cut, and to compare with other programs.
Result<int> encode(const EncodeOptions& options, bool json) {
  RT_TRY(check_tokenizer_name(options.tokenizer));
  RT_TRY_SET(const std::unique_ptr<text::Tokenizer> tokenizer,
             text::make_tokenizer(text::tokenizer_config(options.tokenizer)));
  for (const std::string& note : tokenizer->notes()) fmt::print(stderr, "cairn data encode: note: {}\n", note);
  const auto one = [&](const std::string& line) -> Status {
    std::vector<int32_t> ids = options.special ? tokenizer->before() : std::vector<int32_t>();
    RT_TRY(tokenizer->encode(line, &ids));
    if (options.special) {
      for (const int32_t id : tokenizer->after()) ids.push_back(id);
    }
    if (!json) {
      fmt::print("{}\n", fmt::join(ids, " "));
      return {};
    }
    nlohmann::json pieces = nlohmann::json::array();
    for (const int32_t id : ids) {
      RT_TRY_SET(std::string piece, tokenizer->decode(std::span(&id, 1)));
      pieces.push_back(std::move(piece));
    }
    RT_TRY_SET(const std::string decoded, tokenizer->decode(ids));
    fmt::print("{}\n", json_text(nlohmann::json{{"ids", ids}, {"pieces", pieces}, {"decoded", decoded}}));
    return {};
  };
  for (const std::string& line : options.texts) RT_TRY(one(line));
  if (options.lines.empty()) return 0;
  RT_TRY_SET(const std::string all,
             data::read_text(options.lines, kMaxLinesBytes,
                             options.any_text ? data::TextRule::kAnything : data::TextRule::kAlsoJson));
  int64_t number = 0;
  for (size_t at = 0; at < all.size();) {
    const size_t end = std::min(all.find('\n', at), all.size());
    std::string line = all.substr(at, end - at);
    at = end + 1;
    const std::string where = fmt::format("{}:{}", options.lines, ++number);
    if (options.json_lines) {
      const auto parsed = json_or_nothing(line, JsonNumbers::kPython);
      if (!parsed.is_string() || has_half_pair(parsed.get<std::string>()))
        return Error{ErrorCode::kInvalidInput, where + ": is no JSON string of characters"};
      line = parsed.get<std::string>();
    }
    RT_TRY(one(line).with(where));
  }
  return 0;
}

}  // namespace

void add_data(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("data", "make and look at token stores");
  command->require_subcommand(1);

  CLI::App* make = command->add_subcommand("tokenize", "text files to a Megatron pair, OUT.bin and OUT.idx");
  const auto t = std::make_shared<TokenizeOptions>();
  t->tokenizer = "bytes";
  add_text_inputs(*make, t->inputs);
  make->add_option("--out", t->out, "path without .bin and .idx")->required()->type_name("PREFIX");
  make->add_option("--tokenizer", t->tokenizer,
                   "bytes, a tokenizer.json (or its folder), or a SentencePiece model (default: bytes)")
      ->type_name("NAME");
  add_document_options(*make, *t);
  make->add_flag("--eod", t->eod, "append the tokenizer's end-of-document token to each");
  add_make_set_flags(*make, *t, "pair");
  add_json_flag(*make, session);
  make->footer(
      "Exit codes: 0 done, 2 refused: file and line are named, 65 a damaged input, 74 disk full or an I/O error.\n"
      "Examples:\n"
      "  cairn data tokenize data/kjv.txt --out data/kjv_text_document --tokenizer bytes\n"
      "  cairn data tokenize part-*.jsonl --out data/web --tokenizer HF_DIR --eod --json-key content\n"
      "  cairn data tokenize 'crawl/*.jsonl.zst' --out data/crawl --tokenizer HF_DIR --eod\n"
      "  cairn data tokenize 'web/*.parquet' --out data/web --tokenizer HF_DIR --eod --json-key content\n"
      "  xz -dc part-*.jsonl.xz | cairn data tokenize - --documents json --out data/web");
  make->callback([t, &session] { session.action = [t, &session] { return tokenize(*t, session.json); }; });

  add_data_chat(*command, session);
  add_data_samples(*command, session);
  add_data_losses(*command, session);
  add_data_scan(*command, session);
  add_data_train(*command, session);

  add_data_sets(*command, session);

  CLI::App* ids = command->add_subcommand("encode", "show the ids of texts, a line for each");
  const auto e = std::make_shared<EncodeOptions>();
  ids->add_option("TEXT", e->texts, "texts to encode");
  ids->add_option("--lines", e->lines, "a file, each line of which is a text")->type_name("FILE");
  ids->add_flag("--json-lines", e->json_lines, "each line of that file is a JSON string")->needs("--lines");
  ids->add_flag("--any-text", e->any_text, "take that file as it is, whatever it looks like");
  ids->add_option("--tokenizer", e->tokenizer,
                  "bytes, a tokenizer.json (or its folder), or a SentencePiece model (default: bytes)")
      ->type_name("NAME");
  ids->add_flag("--special", e->special, "with the ids that the tokenizer puts around a text");
  add_json_flag(*ids, session);
  ids->footer(
      "Exit codes: 0 done, 2 refused.\n"
      "Examples:\n"
      "  cairn data encode 'In the beginning' --tokenizer HF_DIR\n"
      "  cairn data encode --lines prompts.txt --tokenizer tokenizer.json --special");
  ids->callback([e, &session] { session.action = [e, &session] { return encode(*e, session.json); }; });

  CLI::App* look =
      command->add_subcommand("info", "kind, tokens, sequences, largest id, what counts and what it was made of");
  const auto i = std::make_shared<InfoOptions>();
  look->add_option("PATH", i->path, "prefix of a Megatron pair, or a token file")->required();
  look->add_option("--dtype", i->dtype, "of a plain token file: uint16 or uint32")->type_name("TYPE");
  look->add_option("--vocab", i->vocab, "rows of a model: exit code 2 when an id is beyond them")
      ->type_name("N")
      ->transform(whole_number(1));
  look->add_flag("--scan", i->scan, "every token is read and the largest id told in any case")->group("");
  add_json_flag(*look, session);
  look->footer(
      "Exit codes: 0 done, 2 refused, or an id beyond --vocab, 65 damaged.\n"
      "Examples:\n"
      "  cairn data info data/kjv_text_document --vocab 256\n"
      "  cairn data info tokens.bin --dtype uint16");
  look->callback([i, &session] { session.action = [i, &session] { return info(*i, session.json); }; });
}

}  // namespace cairn::tools
