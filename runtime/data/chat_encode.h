#pragma once
// A row of instruction data -> the ids of a document, and which of them count. A conversation is encoded in one piece,
// as the model's own template would give it. An answer counts from the first token that holds a byte of it to the first
// special token behind it, which is its end of turn and counts too.

#include <string>
#include <utility>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/data/chat_format.h"
#include "runtime/data/chat_rows.h"
#include "runtime/text/tokenizer.h"

namespace cairn::data {

/// How a content is read that spells a special token, "<|im_end|>" for one.
enum class ContentSpecials {
  kRefuse,
  kText,  // its characters become the tokens of ordinary text
  kKeep,  // it becomes the special token
};

struct ChatDocument {
  std::vector<int32_t> ids;
  std::vector<LossSpan> spans;
  std::string channel;
  bool open =
      false;  // an answer's last token that counts neither is special nor ends a document: its end is not learnt
};

/// Threads: any number.
class ChatEncoder {
 public:
  /// `channel_key`: the field of a row that names its channel; empty: there is none.
  ChatEncoder(const ChatFormat& format, const text::Tokenizer& tokenizer, ContentSpecials specials,
              std::string channel_key = "")
      : format_(format), tokenizer_(tokenizer), specials_(specials), channel_key_(std::move(channel_key)) {}

  /// Errors: those of read_chat_row, join_turns and the tokenizer; kInvalidInput for a content that spells a special
  /// token, and an id that the tokenizer has not.
  Result<ChatDocument> encode(std::string_view line) const;

 private:
  Result<ChatDocument> encode_row(ChatRow row) const;
  Result<ChatDocument> encode_turns(const std::vector<Turn>& turns) const;
  Result<ChatDocument> encode_text(const std::string& text) const;
  Status check_content(const std::string& text, std::string_view where) const;
  const ChatFormat& format_;
  const text::Tokenizer& tokenizer_;
  ContentSpecials specials_;
  std::string channel_key_;
};

}  // namespace cairn::data
