#pragma once
// Text files -> a Megatron pair, streaming: what `cairn data tokenize` does.
//
// Memory is bounded for any input: some hundred MiB for a document without line ends, and several times the longest
// line of JSON lines, which may have 64 MiB. Bytes are encoded as they come. With another tokenizer a document longer
// than a MiB is encoded in parts. It is cut after a line end between a letter or mark and a letter, in 4 MiB; without
// one, after any line end, or at a character border. A tokenizer.json whose patterns cut at the first of these gives
// the ids of the complete text; what it adds before a text, or strips at its ends, is for the ends of the document. For
// SentencePiece a part begins as a line of its own would (its dummy prefix stands there).

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/data.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/data/chat_encode.h"
#include "runtime/data/text_input.h"
#include "runtime/text/tokenizer.h"

namespace cairn::data {

/// What ends a document. The separator itself (the line end; the blank lines) is not part of any document; documents
/// of nothing but separators are dropped and counted. A file's end always ends its document.
enum class DocumentSeparator {
  kWholeFile,
  kLine,       // one document a line; LF or CRLF
  kJsonLine,   // one JSON object a line, whose text is that of one field; empty lines are dropped and counted; or a row
               // of a table, whose text is that of one column
  kBlankLine,  // set apart by lines of nothing but spaces and tabs; blanks at a document's end are dropped too
};

struct TokenizeProgress {
  int64_t bytes_done = 0, bytes_total = 0;  // 0 of total: a pipe is among the inputs
  int64_t documents = 0, tokens = 0;
};

struct TokenizeArgs {
  std::vector<std::string> inputs;  // files or pipes, in the order in which they are to stand in the set
  std::string output_prefix;        // <prefix>.bin, .idx, .made.json (set_origin.h), .origin; of a chat .loss, .channel
  TokenizerConfig tokenizer;
  DocumentSeparator separator = DocumentSeparator::kWholeFile;
  std::string json_key = "text";  // kJsonLine: the field
  std::string chat;               // kJsonLine: rows of instruction data, by this format (chat_format.h); empty: texts
  ContentSpecials specials = ContentSpecials::kRefuse;  // chat
  std::string channel_key;                              // chat: the field of a row that names its channel; empty: none
  bool any_text = false;                         // files that are of another kind (text_input.h) are taken as they are
  int64_t threads = 1;                           // that encode; the pair is the same for any number
  int64_t most_line_bytes = kMostJsonLineBytes;  // kJsonLine: a line is read as a whole, by each thread
  bool append_eod = false;                       // the tokenizer's end-of-document id after each document
  bool overwrite = false;
  bool origins = true;                                    // document_origins.h
  std::function<bool(const TokenizeProgress&)> progress;  // about once per MiB; false stops with kStopped. May be null.
};

struct TokenizeReport {
  int64_t bytes = 0;            // read
  int64_t documents = 0;        // written
  int64_t empty_documents = 0;  // dropped
  int64_t tokens = 0;           // written, end-of-document ids included
  int64_t vocab = 0;
  DType dtype = DType::kU16;
  // For a chat:
  int64_t counted = 0;             // tokens whose guessing is learnt
  int64_t open = 0;                // documents with an answer whose end is not learnt
  std::vector<std::string> opens;  // the first of them, as file:line
};

/// Errors: kInvalidInput (no inputs, a missing file, one of another kind, a line without the field, a row that is none
/// of chat_rows.h, text that is not UTF-8, except for bytes, with path and byte, a NUL byte when it would be mistaken
/// for the bytes tokenizer's end of document, an output that exists), kStopped, kTimeout, kNoSpace, kIo. On any error
/// no pair is written and an old one stands.
Result<TokenizeReport> tokenize_file(const TokenizeArgs& args);

/// Takes a document's text, or a part of it. Called on args.threads threads at once.
using TextVisitor = std::function<Status(std::string_view text, text::Part part)>;

/// Gives every text that tokenize_file() would encode to `visit`, in parts cut as for a tokenizer.json, and writes
/// nothing. `args` without output_prefix, tokenizer, chat, append_eod and overwrite. Errors: those of reading and of
/// `visit`; kInvalidInput where there is no text.
Result<TokenizeReport> visit_texts(const TokenizeArgs& args, const TextVisitor& visit);

}  // namespace cairn::data
