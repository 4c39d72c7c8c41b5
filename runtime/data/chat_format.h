#pragma once
// How the turns of a conversation become one text. A format is a table of joins: the text between two turns, by the
// role before and the role behind, and which contents are stripped. It is what a tokenizer's chat_template writes for
// text; tools/chat_joins.py derives the table from the template and proves it, since a template is a program.

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/text/tokenizer.h"

namespace cairn::data {

struct Turn {
  std::string role, content;
  bool counts = false;  // the model learns to write it
};

struct ChatFormat {
  std::string name;                          // as it was given
  std::map<std::string, std::string> joins;  // "begin user", "user assistant", "assistant end": the text between
  std::set<std::string> trims;               // "user assistant": contents of a user are stripped before an assistant
  bool around = false;                       // the tokens that a model wants before a text come first
  std::string generate;                      // what stands behind the last turn when the model is to write
  bool has(std::string_view role) const;     // some join names it
};

/// `name`: chatml, llama3, alpaca, plain, or a file that tools/chat_joins.py has written: a JSON object with "joins",
/// "trim" and "generate". The formats alpaca and plain end an answer with the tokenizer's end of document. Errors:
/// kInvalidInput, with the file and what is wrong; kIo.
Result<ChatFormat> chat_format(const std::string& name, const text::Tokenizer& tokenizer);
/// The names of those that are built in.
std::vector<std::string> chat_format_names();

/// A conversation as one text.
struct ChatText {
  std::string text;
  std::vector<text::ByteRange> contents;  // of each turn
};
/// Errors: kInvalidInput for no turn, or two roles that the format does not join, naming those that it does.
Result<ChatText> join_turns(const ChatFormat& format, const std::vector<Turn>& turns);

}  // namespace cairn::data
