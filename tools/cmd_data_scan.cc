// cairn data scan: documents of a set that are unlike the others.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

#include "runtime/core/count_text.h"
#include "runtime/core/new_file.h"
#include "runtime/data/document_origins.h"
#include "runtime/data/document_scan.h"
#include "runtime/data/set_origin.h"
#include "runtime/data/token_file.h"
#include "runtime/json/json.h"
#include "runtime/text/tokenizer.h"
#include "tools/commands.h"
#include "tools/data_tools.h"
#include "tools/model_source.h"
#include "tools/number_option.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

struct ScanArgs {
  std::string path, tokenizer, list;
  int64_t top = 50, piece = 2048, text = 0;
  double share = 1, limit = 6;
};

/// The one that is named, else the one that made the set; null: neither can be used, and `note` says why.
Result<std::unique_ptr<text::Tokenizer>> tokenizer_for(const ScanArgs& args, const std::optional<data::SetOrigin>& made,
                                                       std::string* note) {
  if (!args.tokenizer.empty()) {
    RT_TRY(check_tokenizer_name(args.tokenizer));
    return text::make_tokenizer(text::tokenizer_config(args.tokenizer));
  }
  if (!made) {
    *note = "nothing says which tokenizer made the set; characters are not looked at without --tokenizer";
    return std::unique_ptr<text::Tokenizer>();
  }
  Result<std::unique_ptr<text::Tokenizer>> own = text::make_tokenizer(text::tokenizer_config(made->tokenizer));
  if (own.ok()) return own;
  *note = fmt::format("{}; characters are not looked at without --tokenizer", own.error().message);
  return std::unique_ptr<text::Tokenizer>();
}

/// A piece that is unlike the others, and by which measures.
struct Suspect {
  size_t piece = 0;
  float furthest = 0;
};

class ScanTeller {
 public:
  ScanTeller(const data::TokenSource& source, const std::optional<data::DocumentOrigins>& origins,
             const text::Tokenizer* tokenizer, int64_t text_bytes)
      : source_(source), origins_(origins), tokenizer_(tokenizer), text_bytes_(text_bytes) {}

  Result<json> row(const data::ScannedPiece& piece, const std::array<float, data::kScanCount>& z) const {
    json out = {{"document", piece.document}, {"begin", piece.begin}, {"end", piece.begin + piece.tokens}};
    for (size_t m = 0; m < data::kScanCount; ++m)
      out["measures"][std::string(data::kScanMeasures[m])] = {{"value", piece.measures[m]}, {"z", z[m]}};
    if (origins_) {
      RT_TRY_SET(const auto from, origins_->read(piece.document, 1));
      out["origin"] = document_origin_json(origins_->files()[from[0].file], from[0].byte);
    }
    if (text_bytes_ > 0) {
      RT_TRY_SET(out["text"], text_of(piece));
    }
    return out;
  }

  Status tell(const json& row, double limit) const {
    std::string why;
    for (const auto& [name, measure] : row["measures"].items()) {
      const double z = measure["z"].get<double>();
      if (std::fabs(z) > limit)
        why += fmt::format("{}{} {:.3g} ({:+.1f})", why.empty() ? "" : ", ", name, measure["value"].get<double>(), z);
    }
    fmt::print("document {}, tokens {} to {}: {}\n", row["document"].get<int64_t>(), row["begin"].get<int64_t>(),
               row["end"].get<int64_t>() - 1, why);
    if (row.contains("origin")) fmt::print("  {}\n", document_origin_text(row["origin"]));
    if (row.contains("text")) fmt::print("  {}\n", json_text(row["text"]));
    return {};
  }

 private:
  Result<std::string> text_of(const data::ScannedPiece& piece) const {
    RT_TRY_SET(const int64_t begin, source_.sequence_start(piece.document));
    std::vector<int32_t> ids(static_cast<size_t>(std::min(piece.tokens, text_bytes_)));
    RT_TRY(source_.read(begin + piece.begin, std::ssize(ids), ids.data()));
    RT_TRY_SET(std::string text, tokenizer_->decode(ids));
    if (std::ssize(text) > text_bytes_) text.resize(static_cast<size_t>(text_bytes_));
    return text;
  }

  const data::TokenSource& source_;
  const std::optional<data::DocumentOrigins>& origins_;
  const text::Tokenizer* tokenizer_;
  int64_t text_bytes_;
};

Result<int> scan(const ScanArgs& args, bool as_json) {
  const std::string prefix = data::megatron_prefix(args.path);
  RT_TRY_SET(const std::unique_ptr<data::TokenSource> source, data::open_megatron(prefix.empty() ? args.path : prefix));
  const int64_t documents = source->sequence_count(), tokens = source->token_count();
  RT_TRY_SET(const auto origins, data::DocumentOrigins::open(prefix, documents, tokens));
  RT_TRY_SET(const auto made, data::read_origin(prefix, documents, tokens));
  std::string note;
  RT_TRY_SET(const std::unique_ptr<text::Tokenizer> tokenizer, tokenizer_for(args, made, &note));
  if (args.text > 0 && tokenizer == nullptr) return Error{ErrorCode::kInvalidInput, "--text: " + note};
  if (!note.empty()) fmt::print(stderr, "cairn data scan: note: {}\n", note);
  RT_TRY_SET(
      const std::vector<data::ScannedPiece> pieces,
      data::scan_documents(
          *source, {.piece_tokens = args.piece, .share = args.share, .tokenizer = tokenizer.get(), .progress = {}}));
  const auto z = data::scan_deviations(pieces);
  const std::vector<int64_t> first = data::first_copies(pieces);
  std::vector<Suspect> suspects;
  int64_t copies = 0;
  for (size_t k = 0; k < pieces.size(); ++k) {
    if (first[k] != static_cast<int64_t>(k)) ++copies;
    const float furthest = std::fabs(*std::ranges::max_element(z[k], {}, [](float one) { return std::fabs(one); }));
    if (furthest > args.limit) suspects.push_back({k, furthest});
  }
  if (!args.list.empty()) {
    std::set<int64_t> named;
    for (const Suspect& one : suspects) named.insert(pieces[one.piece].document);
    std::string lines;
    for (const int64_t document : named) lines += fmt::format("{}:{}\n", prefix.empty() ? args.path : prefix, document);
    RT_TRY(write_output(args.list, lines));
  }
  std::ranges::stable_sort(suspects, [](const Suspect& a, const Suspect& b) { return a.furthest > b.furthest; });
  const auto shown = std::min<int64_t>(args.top, std::ssize(suspects));
  const ScanTeller teller(*source, origins, tokenizer.get(), args.text);
  json rows = json::array(), copied = json::array();
  for (int64_t k = 0; k < shown; ++k) {
    const size_t piece = suspects[static_cast<size_t>(k)].piece;
    RT_TRY_SET(json row, teller.row(pieces[piece], z[piece]));
    rows.push_back(std::move(row));
  }
  for (size_t k = 0; k < pieces.size() && std::ssize(copied) < args.top; ++k) {
    if (first[k] == static_cast<int64_t>(k)) continue;
    const data::ScannedPiece& original = pieces[static_cast<size_t>(first[k])];
    copied.push_back({{"document", pieces[k].document},
                      {"begin", pieces[k].begin},
                      {"of", {{"document", original.document}, {"begin", original.begin}}}});
  }
  if (as_json) {
    print_json({{"path", prefix},
                {"documents", documents},
                {"pieces", pieces.size()},
                {"suspects", suspects.size()},
                {"rows", std::move(rows)},
                {"copies", copies},
                {"copied", std::move(copied)}});
    return 0;
  }
  fmt::print("{}: {} in {} of at most {} tokens; {} unlike the others, {} of an earlier one\n", prefix,
             count_text(documents, "document"), count_text(std::ssize(pieces), "piece"), args.piece, suspects.size(),
             copies == 1 ? "1 a copy" : fmt::format("{} copies", copies));
  for (const json& row : rows) RT_TRY(teller.tell(row, args.limit));
  if (shown < std::ssize(suspects)) fmt::print("and {} more: --top\n", std::ssize(suspects) - shown);
  for (const json& one : copied) {
    fmt::print("document {}, from token {} on: a copy of document {}, from token {} on\n",
               one["document"].get<int64_t>(), one["begin"].get<int64_t>(), one["of"]["document"].get<int64_t>(),
               one["of"]["begin"].get<int64_t>());
  }
  if (std::ssize(copied) < copies) fmt::print("and {} more copies: --top\n", copies - std::ssize(copied));
  return 0;
}

}  // namespace

void add_data_scan(CLI::App& command, Session& session) {
  CLI::App* look = command.add_subcommand("scan", "documents of a pair that are unlike the others, and copies");
  const auto args = std::make_shared<ScanArgs>();
  look->add_option("PREFIX", args->path, "of a Megatron pair")->required();
  look->add_option("--top", args->top, "pieces, and copies, that are listed at most (default: 50)")
      ->type_name("N")
      ->transform(whole_number(1));
  look->add_option("--limit", args->limit, "robust deviations from which a piece is listed (default: 6)")
      ->type_name("Z")
      ->check(CLI::Range(1.0, 1e6));
  look->add_option("--piece", args->piece, "tokens that are measured at a time (default: 2048)")
      ->type_name("N")
      ->transform(whole_number(16));
  look->add_option("--sample", args->share, "share of the documents that is read (default: 1)")
      ->type_name("X")
      ->check(CLI::Range(1e-9, 1.0));
  look->add_option("--list", args->list,
                   "write all these documents, but for copies, into a file for `cairn data samples --documents`")
      ->type_name("FILE");
  look->add_option("--tokenizer", args->tokenizer, "to look at characters (default: the one that made the set)")
      ->type_name("NAME");
  look->add_option("--text", args->text, "the first N bytes of each listed piece (N is 200 where none is given)")
      ->type_name("N")
      ->expected(0, 1)
      ->default_str("200")
      ->transform(whole_number(1));
  add_json_flag(*look, session);
  look->footer(
      "Measured are how well the ids pack, how many differ, the longest run and the longest repeated period, and "
      "control\n"
      "characters; each is compared with pieces of a similar length, upwards and downwards. Number in brackets: "
      "robust\n"
      "deviations.\n"
      "Exit codes: 0 done, 2 refused, 65 damaged.\n"
      "Examples:\n"
      "  cairn data scan data/web --text\n"
      "  cairn data scan data/web --sample 0.01 --top 20 --json");
  look->callback([args, &session] { session.action = [args, &session] { return scan(*args, session.json); }; });
}

}  // namespace cairn::tools
