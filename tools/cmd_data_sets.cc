// cairn data decode | merge: the text of a token store, and several pairs as one.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/core/count_text.h"
#include "runtime/core/dtype.h"
#include "runtime/data/loss_spans.h"
#include "runtime/data/merge.h"
#include "runtime/data/token_file.h"
#include "runtime/json/json.h"
#include "runtime/text/tokenizer.h"
#include "tools/data_tools.h"
#include "tools/model_source.h"
#include "tools/number_option.h"

namespace cairn::tools {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 26;  // of a document that is decoded at once

struct DecodeOptions {
  std::string path, tokenizer = "bytes", dtype, documents, tokens;
  bool raw = false;
};

/// "A", "A..B": [A, B + 1).
Result<std::pair<int64_t, int64_t>> range_of(const std::string& option, const std::string& text, int64_t count,
                                             const std::string& of) {
  const size_t dots = text.find("..");
  const auto first = number_of<int64_t>(text.substr(0, dots));
  const auto last = dots == std::string::npos ? first : number_of<int64_t>(text.substr(dots + 2));
  if (!first || !last || *first < 0 || *last < *first)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} is \"{}\", expected a number from 0, or A..B with both ends", option, text)};
  if (*last >= count)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} is {}, and {} has {}, the last of which is {}", option, text, of, count, count - 1)};
  return std::pair(*first, *last + 1);
}

/// A part of a store that is printed: a document, or a range of tokens.
struct Shown {
  int64_t document = -1;  // -1: a range of tokens
  int64_t begin = 0, end = 0;
  std::vector<data::LossSpan> spans;
};

class Decoder {
 public:
  Decoder(const data::TokenSource& source, const text::Tokenizer& tokenizer, bool has_loss, bool raw, bool json)
      : source_(source), tokenizer_(tokenizer), has_loss_(has_loss), raw_(raw), json_(json) {}

  Status print(const Shown& shown) {
    const std::string where = shown.document < 0 ? fmt::format("tokens {} to {}", shown.begin, shown.end - 1)
                                                 : fmt::format("document {}", shown.document);
    const int64_t count = shown.end - shown.begin;
    if (count > kMostTokens)
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}: {} has {} tokens, and {} are decoded at once: name a range by --tokens",
                               source_.name(), where, count, kMostTokens)};
    ids_.resize(static_cast<size_t>(count));
    RT_TRY(source_.read(shown.begin, count, ids_.data()));
    Result<std::string> text = tokenizer_.decode(ids_);
    if (!text.ok()) return Status(std::move(text).error()).with(source_.name() + ": " + where);
    if (json_) {
      nlohmann::json out = {{"first_token", shown.begin}, {"tokens", count}, {"text", text.value()}};
      if (shown.document >= 0) out["document"] = shown.document;
      if (has_loss_ && shown.document >= 0) {
        out["loss"] = nlohmann::json::array();
        for (const data::LossSpan& span : shown.spans) out["loss"].push_back({span.from, span.to});
      }
      fmt::print("{}\n", json_text(out));
      return {};
    }
    if (!raw_) fmt::print("--- {}, {} from {} on{}\n", where, count_text(count, "token"), shown.begin, counts(shown));
    std::fwrite(text.value().data(), 1, text.value().size(), stdout);
    if (!raw_ && !text.value().ends_with('\n')) std::fputc('\n', stdout);
    return {};
  }

 private:
  std::string counts(const Shown& shown) const {
    if (!has_loss_ || shown.document < 0) return {};
    int64_t counted = 0;
    for (const data::LossSpan& span : shown.spans) counted += span.to - span.from;
    return fmt::format(", {} count", counted);
  }

  const data::TokenSource& source_;
  const text::Tokenizer& tokenizer_;
  bool has_loss_, raw_, json_;
  std::vector<int32_t> ids_;
};

Result<int> decode(const DecodeOptions& options, bool json) {
  RT_TRY(check_tokenizer_name(options.tokenizer));
  RT_TRY_SET(const std::unique_ptr<text::Tokenizer> tokenizer,
             text::make_tokenizer(text::tokenizer_config(options.tokenizer)));
  RT_TRY_SET(const data::NamedTokens named, data::open_named_tokens(options.path, options.dtype));
  const data::TokenSource& source = *named.source;
  std::optional<data::LossSpans> loss;
  if (!named.prefix.empty() && std::filesystem::exists(data::loss_path(named.prefix))) {
    RT_TRY_SET(data::LossSpans spans,
               data::LossSpans::open(named.prefix, source.sequence_count(), source.token_count()));
    loss.emplace(std::move(spans));
  }
  Decoder decoder(source, *tokenizer, loss.has_value(), options.raw, json);
  if (!options.tokens.empty() || named.prefix.empty()) {
    if (!options.documents.empty())
      return Error{ErrorCode::kInvalidInput, named.prefix.empty()
                                                 ? options.path + " has no documents: name tokens by --tokens"
                                                 : "--documents and --tokens exclude each other"};
    Shown shown{.end = source.token_count()};
    if (!options.tokens.empty()) {
      RT_TRY_SET(const auto range, range_of("--tokens", options.tokens, source.token_count(), source.name()));
      std::tie(shown.begin, shown.end) = range;
    }
    RT_TRY(decoder.print(shown));
    return 0;
  }
  std::pair<int64_t, int64_t> range = {0, source.sequence_count()};
  if (!options.documents.empty()) {
    RT_TRY_SET(range, range_of("--documents", options.documents, source.sequence_count(), source.name()));
  }
  std::vector<uint64_t> begins;
  for (int64_t document = range.first; document < range.second; ++document) {
    RT_TRY_SET(const std::vector<int64_t> starts, source.sequence_starts(document, 1));
    Shown shown{.document = document, .begin = starts[0], .end = starts[1]};
    if (loss) RT_TRY(loss->read(document, 1, &shown.spans, &begins));
    RT_TRY(decoder.print(shown));
  }
  return 0;
}

struct MergeOptions {
  std::vector<std::string> prefixes;
  std::string out;
  bool overwrite = false;
};

Result<int> merge(const MergeOptions& options, bool json) {
  RT_TRY_SET(const data::MergeReport report, data::merge_sets(options.prefixes, options.out, options.overwrite));
  for (const std::string& prefix : report.unknown) {
    fmt::print(stderr, "cairn data merge: note: no {}.made.json of this pair says which tokenizer made it\n", prefix);
  }
  if (json) {
    nlohmann::json out = {{"prefix", options.out},
                          {"documents", report.documents},
                          {"empty_documents", report.empty_documents},
                          {"tokens", report.tokens},
                          {"dtype", dtype_name(report.dtype)}};
    if (report.counted >= 0) out["counted"] = report.counted;
    print_json(out);
    return 0;
  }
  fmt::print("{0}.bin, {0}.idx{1}: {2} ({3}) in {4}", options.out, report.counted >= 0 ? ", .loss" : "",
             count_text(report.tokens, "token"), dtype_name(report.dtype), count_text(report.documents, "document"));
  if (report.counted >= 0) fmt::print(", {} of them count", report.counted);
  fmt::print("\n");
  if (report.empty_documents > 0) fmt::print("  {} dropped\n", count_text(report.empty_documents, "empty document"));
  return 0;
}

}  // namespace

void add_data_sets(CLI::App& command, Session& session) {
  CLI::App* show = command.add_subcommand("decode", "the text of a token store, by document or by range");
  const auto d = std::make_shared<DecodeOptions>();
  show->add_option("PATH", d->path, "prefix of a Megatron pair, or a token file")->required();
  show->add_option("--tokenizer", d->tokenizer,
                   "bytes, a tokenizer.json (or its folder), or a SentencePiece model (default: bytes)")
      ->type_name("NAME");
  show->add_option("--documents", d->documents, "counted from 0: one, or A..B with both ends (default: all)")
      ->type_name("A..B");
  show->add_option("--tokens", d->tokens, "the same of tokens, whatever the documents")->type_name("A..B");
  show->add_option("--dtype", d->dtype, "of a plain token file: uint16 or uint32")->type_name("TYPE");
  show->add_flag("--raw", d->raw, "only the bytes of the texts, one after the other");
  add_json_flag(*show, session);
  show->footer(
      "Without --raw a line that begins with --- stands before each text. With --json each is an object on a line of "
      "its\n"
      "own; of instruction data it has the tokens that count, \"loss\": [[from, to], ...].\n"
      "Exit codes: 0 done, 2 refused, 65 damaged, or an id that the tokenizer has not.\n"
      "Examples:\n"
      "  cairn data decode data/kjv_text_document --tokens 0..99\n"
      "  cairn data decode data/chats --tokenizer HF_DIR --documents 17\n"
      "  cairn data decode data/web --tokenizer HF_DIR --documents 0..999 --json");
  show->callback([d, &session] { session.action = [d, &session] { return decode(*d, session.json); }; });

  CLI::App* join = command.add_subcommand("merge", "several Megatron pairs as one, document after document");
  const auto m = std::make_shared<MergeOptions>();
  join->add_option("PREFIX", m->prefixes, "pairs, in the order in which they are to stand")->required();
  join->add_option("--out", m->out, "path without .bin and .idx")->required()->type_name("PREFIX");
  join->add_flag("--overwrite", m->overwrite, "replace a pair that exists");
  add_json_flag(*join, session);
  join->footer(
      "Sets of conversations keep what counts. Pairs of other types, of other tokenizers (as PREFIX.made.json names\n"
      "them), or of which only some have a PREFIX.loss, are refused.\n"
      "Exit codes: 0 done, 2 refused, 65 damaged, 74 disk full or an I/O error.\n"
      "Examples:\n"
      "  cairn data merge data/part-0 data/part-1 --out data/all");
  join->callback([m, &session] { session.action = [m, &session] { return merge(*m, session.json); }; });
}

}  // namespace cairn::tools
