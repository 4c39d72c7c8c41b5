#include "runtime/text/added_tokens.h"

#include <unicode/uchar.h>

#include <algorithm>

#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

bool is_space(char32_t c) { return u_isUWhiteSpace(static_cast<UChar32>(c)) != 0; }

bool is_word(char32_t c) {
  const auto point = static_cast<UChar32>(c);
  constexpr uint32_t kWord = U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK;
  return u_isUAlphabetic(point) != 0 || (U_GET_GC_MASK(point) & kWord) != 0 ||
         u_hasBinaryProperty(point, UCHAR_JOIN_CONTROL) != 0;
}

/// Start of the last character before `end` > 0.
size_t previous(std::string_view text, size_t end) {
  do --end;
  while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80);
  return end;
}

}  // namespace

void AddedTokens::add(AddedToken token) {
  if (token.content.empty()) return;  // upstream has them in the vocabulary and never finds them
  std::vector<size_t>& same = by_first_[static_cast<unsigned char>(token.content[0])];
  tokens_.push_back(std::move(token));
  same.push_back(tokens_.size() - 1);
  std::stable_sort(same.begin(), same.end(),
                   [&](size_t a, size_t b) { return tokens_[a].content.size() > tokens_[b].content.size(); });
}

const AddedToken* AddedTokens::longest_at(std::string_view text, size_t at, size_t plain_from) const {
  for (const size_t k : by_first_[static_cast<unsigned char>(text[at])]) {
    const AddedToken& token = tokens_[k];
    if (token.special && at + token.content.size() > plain_from) continue;
    if (text.substr(at).starts_with(token.content)) return &token;
  }
  return nullptr;
}

std::vector<TextPart> AddedTokens::split(std::string_view text, std::span<const ByteRange> plain) const {
  std::vector<TextPart> out;
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    while (!plain.empty() && plain.front().end <= at) plain = plain.subspan(1);
    const AddedToken* token = longest_at(text, at, plain.empty() ? text.size() : plain.front().begin);
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + token->content.size();
    at = end;  // where the next search begins, whatever white space is taken
    if (token->single_word && ((begin > 0 && is_word(utf8_at(text, previous(text, begin)))) ||
                               (end < text.size() && is_word(utf8_at(text, end))))) {
      continue;
    }
    if (begin < done) continue;  // in the white space that the one before took
    while (token->lstrip && begin > done && is_space(utf8_at(text, previous(text, begin)))) {
      begin = previous(text, begin);
    }
    while (token->rstrip && end < text.size() && is_space(utf8_at(text, end))) end += utf8_length(text[end]);
    if (begin > done) out.push_back({done, begin, -1});
    out.push_back({begin, end, token->id});
    done = end;
  }
  if (done < text.size()) out.push_back({done, text.size(), -1});
  return out;
}

std::string_view AddedTokens::special_within(std::string_view text) const {
  for (const TextPart& part : split(text)) {
    const auto is_it = [&](const AddedToken& token) { return token.id == part.id && token.special; };
    if (part.id >= 0 && std::ranges::any_of(tokens_, is_it)) return text.substr(part.begin, part.end - part.begin);
  }
  return {};
}

}  // namespace cairn::text
