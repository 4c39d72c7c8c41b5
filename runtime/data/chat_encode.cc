#include "runtime/data/chat_encode.h"

#include <fmt/format.h>

#include "runtime/json/json.h"

namespace cairn::data {

Status ChatEncoder::check_content(const std::string& text, std::string_view where) const {
  if (specials_ != ContentSpecials::kRefuse) return {};
  RT_TRY_SET(const std::string found, tokenizer_.special_within(text));
  if (found.empty()) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{} spells the special token \"{}\"; --specials text makes ordinary text of it, --specials "
                           "keep the token",
                           where, printable_ascii(found))};
}

Result<ChatDocument> ChatEncoder::encode_turns(const std::vector<Turn>& turns) const {
  RT_TRY_SET(const ChatText joined, join_turns(format_, turns));
  for (size_t k = 0; k < turns.size(); ++k)
    RT_TRY(check_content(turns[k].content, fmt::format("turn {} (from 1)", k + 1)));
  std::vector<size_t> bytes;  // where contents begin and end
  for (const text::ByteRange& content : joined.contents) {
    bytes.push_back(content.begin);
    bytes.push_back(content.end);
  }
  const bool text = specials_ == ContentSpecials::kText;
  ChatDocument out;
  if (format_.around) out.ids = tokenizer_.before();
  const size_t around = out.ids.size();
  RT_TRY_SET(
      const std::vector<text::Place> places,
      tokenizer_.encode_joined(
          joined.text, bytes,
          text ? std::span<const text::ByteRange>(joined.contents) : std::span<const text::ByteRange>(), &out.ids));
  for (size_t k = 0; k < turns.size(); ++k) {
    if (!turns[k].counts) continue;
    const size_t from = around + places[2 * k].ended, end = around + places[2 * k + 1].begun;
    const size_t next = k + 1 < turns.size() ? around + places[2 * k + 2].ended : out.ids.size();
    size_t to = end;
    while (to < next && !tokenizer_.special(out.ids[to])) ++to;
    to = to < next ? to + 1 : end;  // none: only the content
    out.open = out.open || !tokenizer_.special(out.ids[to - 1]);
    if (!out.spans.empty() && out.spans.back().to >= from) {
      out.spans.back().to = static_cast<uint32_t>(to);
    } else {
      out.spans.push_back({static_cast<uint32_t>(from), static_cast<uint32_t>(to)});
    }
  }
  return out;
}

Result<ChatDocument> ChatEncoder::encode_text(const std::string& text) const {
  RT_TRY(check_content(text, "text"));
  ChatDocument out;
  out.ids = tokenizer_.before();
  const text::ByteRange whole{0, text.size()};
  const bool plain = specials_ == ContentSpecials::kText;
  RT_TRY(tokenizer_.encode_joined(text, {}, std::span(&whole, plain ? 1 : 0), &out.ids));
  if (tokenizer_.eod() >= 0) out.ids.push_back(tokenizer_.eod());
  out.open = tokenizer_.eod() < 0;
  out.spans = {{0, static_cast<uint32_t>(out.ids.size())}};
  return out;
}

Result<ChatDocument> ChatEncoder::encode(std::string_view line) const {
  RT_TRY_SET(ChatRow row, read_chat_row(line, format_, channel_key_));
  std::string channel = std::move(row.channel);
  RT_TRY_SET(ChatDocument out, encode_row(std::move(row)));
  out.channel = std::move(channel);
  return out;
}

Result<ChatDocument> ChatEncoder::encode_row(ChatRow row) const {
  if (row.kind == ChatRow::Kind::kTurns) return encode_turns(row.turns);
  if (row.kind == ChatRow::Kind::kText) return encode_text(row.text);
  for (size_t k = 0; k < row.ids.size(); ++k) {
    if (!tokenizer_.has(row.ids[k]))
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("ids[{}] is {}, which no token of the tokenizer has", k, row.ids[k])};
  }
  return ChatDocument{.ids = std::move(row.ids), .spans = std::move(row.spans)};
}

}  // namespace cairn::data
