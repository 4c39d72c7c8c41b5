#pragma once
// The commands of `cairn data` share these.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/data/document_origins.h"
#include "runtime/data/tokenize.h"
#include "tools/commands.h"

namespace CLI {
class App;
}

namespace cairn::tools {

/// The options that `tokenize` and `chat` share.
struct MakeSetOptions {
  std::vector<std::string> inputs;  // names, patterns, -
  std::string out, tokenizer;
  int64_t threads = 0;  // 0: as many as there are cores
  bool overwrite = false;
  bool no_origin = false;
};

/// The options that say what a document of the inputs is.
struct DocumentOptions {
  std::string documents, json_key;
  bool any_text = false;
};

/// INPUT of a command that reads texts.
void add_text_inputs(CLI::App& command, std::vector<std::string>& inputs);

/// --documents, --json-key, --any-text.
void add_document_options(CLI::App& command, DocumentOptions& options);

/// Sets the separator and its key, for args->inputs. Errors: kInvalidInput for a key without JSON lines.
Status set_documents(const DocumentOptions& options, data::TokenizeArgs* args);

/// --threads, --overwrite and --no-origin of a command that makes a `what`, "pair" or "set".
void add_make_set_flags(CLI::App& command, MakeSetOptions& options, const std::string& what);

/// With patterns replaced by the files they match. Errors: those of data::expand_patterns and check_tokenizer_name.
Result<data::TokenizeArgs> make_set_args(const MakeSetOptions& options);

struct MadeSet {
  data::TokenizeReport report;
  double seconds = 0;
};

/// {"file", "byte", or "row" of a table, "packed"}. `byte`: as data::DocumentOrigin counts it.
nlohmann::json document_origin_json(const data::OriginFile& file, uint64_t byte);
/// The same as a person reads it: "a.gz at byte 12 of its unpacked text", "a.parquet, row 12".
std::string document_origin_text(const nlohmann::json& origin);

/// data::tokenize_file(), with a line of progress on a terminal.
Result<MadeSet> tokenize_live(data::TokenizeArgs args);

/// The JSON that both commands print.
nlohmann::json made_set_json(const MadeSet& made, const std::string& prefix);

/// Adds `cairn data chat`.
void add_data_chat(CLI::App& command, Session& session);
/// Adds `cairn data samples`.
void add_data_samples(CLI::App& command, Session& session);

/// `cairn data losses` (cmd_data_losses.cc).
void add_data_losses(CLI::App& command, Session& session);

/// Adds `cairn data scan`.
void add_data_scan(CLI::App& command, Session& session);

/// Adds `cairn data train-tokenizer`.
void add_data_train(CLI::App& command, Session& session);

/// Adds `cairn data decode` and `cairn data merge`.
void add_data_sets(CLI::App& command, Session& session);

}  // namespace cairn::tools
