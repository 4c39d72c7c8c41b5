#include "tools/data_tools.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/core/cgroup.h"
#include "runtime/core/count_text.h"
#include "runtime/core/dtype.h"
#include "runtime/data/input_files.h"
#include "runtime/data/set_origin.h"
#include "runtime/telemetry/terminal.h"
#include "runtime/text/tokenizer.h"
#include "tools/model_source.h"
#include "tools/number_option.h"
#include "tools/run/folder/text.h"

namespace cairn::tools {

void add_text_inputs(CLI::App& command, std::vector<std::string>& inputs) {
  command
      .add_option("INPUT", inputs,
                  "text files or pipes, plain or packed by gzip or zstd, or tables where the build has Arrow, in the "
                  "order in which they are to stand; a quoted pattern, 'part-*.zst', for the files it matches; -: "
                  "standard input")
      ->required();
}

void add_document_options(CLI::App& command, DocumentOptions& options) {
  command
      .add_option(
          "--documents", options.documents,
          "what a document is: a file, a line, what blank-line sets apart, or the text in an object of JSON lines "
          "or in a row of a table (file, line, blank-line, json; default: json for .jsonl and .ndjson, packed or not, "
          "and for .parquet, .arrow and .feather, else file)")
      ->type_name("WHAT")
      ->check(CLI::IsMember({"file", "line", "blank-line", "json"}));
  command
      .add_option("--json-key", options.json_key,
                  "of JSON lines or a table, the field or column that has the text (default: text)")
      ->type_name("KEY");
  command.add_flag("--any-text", options.any_text, "take files as they are, whatever they look like");
}

Status set_documents(const DocumentOptions& options, data::TokenizeArgs* args) {
  static const std::map<std::string, data::DocumentSeparator> kSeparators = {
      {"file", data::DocumentSeparator::kWholeFile},
      {"line", data::DocumentSeparator::kLine},
      {"blank-line", data::DocumentSeparator::kBlankLine},
      {"json", data::DocumentSeparator::kJsonLine}};
  const bool rows = std::ranges::all_of(args->inputs, [](const std::string& path) {
    return data::named_as_json_lines(path) || data::named_as_table(path);
  });
  std::string documents = options.documents;
  if (documents.empty()) documents = rows || !options.json_key.empty() ? "json" : "file";
  if (documents != "json" && !options.json_key.empty())
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--json-key is for JSON lines, and --documents is {}", documents)};
  args->separator = kSeparators.at(documents);
  if (!options.json_key.empty()) args->json_key = options.json_key;
  args->any_text = options.any_text;
  return {};
}

void add_make_set_flags(CLI::App& command, MakeSetOptions& options, const std::string& what) {
  command
      .add_option("--threads", options.threads,
                  fmt::format("that work on texts; the {} is the same for any number (default: all cores)", what))
      ->type_name("N")
      ->transform(whole_number(1));
  command.add_flag("--overwrite", options.overwrite, fmt::format("replace a {} that exists", what));
  command.add_flag("--no-origin", options.no_origin,
                   "write no PREFIX.origin, by which `cairn data samples` names a document's file and byte");
}

Result<data::TokenizeArgs> make_set_args(const MakeSetOptions& options) {
  RT_TRY(check_tokenizer_name(options.tokenizer));
  data::TokenizeArgs args;
  RT_TRY_SET(args.inputs, data::expand_patterns(options.inputs));
  args.output_prefix = options.out;
  args.tokenizer = text::tokenizer_config(options.tokenizer);
  args.threads = options.threads > 0 ? options.threads : usable_cpus();
  args.overwrite = options.overwrite;
  args.origins = !options.no_origin;
  return args;
}

Result<MadeSet> tokenize_live(data::TokenizeArgs args) {
  const bool live = is_terminal(STDERR_FILENO);
  const auto begin = std::chrono::steady_clock::now();
  if (live) {
    args.progress = [begin](const data::TokenizeProgress& at) {
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      const auto done = static_cast<double>(at.bytes_done), left = static_cast<double>(at.bytes_total) - done;
      const bool known = at.bytes_total > 0;
      fmt::print(stderr, "\r{}{}, {} tokens, {}/s, eta {}\033[K", format_bytes(at.bytes_done),
                 known ? " of " + format_bytes(at.bytes_total) : "", format_count(static_cast<double>(at.tokens)),
                 format_bytes(static_cast<int64_t>(done / std::max(seconds, 1e-3))),
                 known && done > 0 ? telemetry::format_duration(left * seconds / done) : "?");
      return true;
    };
  }
  Result<data::TokenizeReport> done = data::tokenize_file(args);
  if (live) std::fputs("\r\033[K", stderr);
  if (!done.ok()) return std::move(done).error();
  return MadeSet{.report = std::move(done).value(),
                 .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()};
}

nlohmann::json document_origin_json(const data::OriginFile& file, uint64_t byte) {
  return {{"file", file.name},
          {file.packing == data::Packing::kTable ? "row" : "byte", byte},
          {"packed", data::packing_name(file.packing)}};
}

std::string document_origin_text(const nlohmann::json& origin) {
  const std::string name = printable(origin["file"].get<std::string>());
  if (origin.contains("row")) return fmt::format("{}, row {}", name, origin["row"].get<uint64_t>());
  return fmt::format("{} at byte {}{}", name, origin["byte"].get<uint64_t>(),
                     origin["packed"] == "" ? "" : " of its unpacked text");
}

nlohmann::json made_set_json(const MadeSet& made, const std::string& prefix) {
  const data::TokenizeReport& report = made.report;
  return {{"prefix", prefix},        {"bytes", report.bytes}, {"documents", report.documents},
          {"tokens", report.tokens}, {"vocab", report.vocab}, {"dtype", dtype_name(report.dtype)},
          {"seconds", made.seconds}};
}

}  // namespace cairn::tools
