#pragma once
// Rows of instruction data, as people have them: a JSON object a line.
//
//   messages       [{role, content, train?, weight?}]     also prompt + completion as two such lists
//   conversations  [{from, value}], from human, gpt, system (ShareGPT)
//   prompt         + response | completion
//   instruction    (+ input) + output | response (Alpaca)
//   text           a text, all of which counts
//   ids            + loss, [[from, to), ...]: token ids made elsewhere, and those that count
//
// Answers count: turns of an assistant whose "train" is not false and whose "weight" is not 0. A "system" text beside
// the turns is the first of them.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/data/chat_format.h"

namespace cairn::data {

/// Tokens [from, to) of a document whose guessing counts.
struct LossSpan {
  uint32_t from = 0, to = 0;
  bool operator==(const LossSpan&) const = default;
};

struct ChatRow {
  enum class Kind { kTurns, kText, kIds } kind = Kind::kTurns;
  std::vector<Turn> turns;
  std::string text;
  std::vector<int32_t> ids;
  std::vector<LossSpan> spans;  // kIds
  std::string channel;          // empty: no field was named for it
};

/// An instruction that has an input keeps it apart where `format` has the roles "task" and "input"; elsewhere the two
/// are one turn of the user, a line end between. Errors: kInvalidInput with what was found and expected: a form, a
/// role or a content that is none of the above, an empty answer, nothing that counts, tools, pictures, preferences; no
/// channel in the field `channel_key`, where that is not empty.
Result<ChatRow> read_chat_row(std::string_view line, const ChatFormat& format, const std::string& channel_key = "");

}  // namespace cairn::data
