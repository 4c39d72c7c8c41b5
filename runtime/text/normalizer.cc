#include "runtime/text/normalizer.h"

#include <fmt/format.h>
#include <unicode/brkiter.h>
#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <array>
#include <mutex>

#include "runtime/text/json_fields.h"
#include "runtime/text/regex.h"
#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

using nlohmann::json;

Error icu_error(std::string_view what, UErrorCode code) {
  return {ErrorCode::kInternal, fmt::format("ICU: {}: {}", what, u_errorName(code))};
}

/// What the reference's tables for normal forms and combining marks know: Unicode 9.0.
constexpr const char* kKnownCharacters = "[:age=9.0:]";

bool is_mark(char32_t c) {
  UVersionInfo age{};
  u_charAge(static_cast<UChar32>(c), age);
  if (age[0] == 0 || age[0] > 9 || c == 0x111C9) return false;  // that one became a mark in 11.0
  return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_M_MASK) != 0 || c == 0x1CF2 || c == 0x1CF3;  // marks until 12.0
}

/// Capital letters that are younger than ICU's tables (Unicode 15) and known to the reference: first, last, distance.
struct Capitals {
  char32_t first, last;
  int32_t distance;
};
constexpr Capitals kNewCapitals[] = {{0x1C89, 0x1C89, 1},    {0xA7CB, 0xA7CB, 0x264 - 0xA7CB},
                                     {0xA7CC, 0xA7CC, 1},    {0xA7CE, 0xA7CE, 1},
                                     {0xA7D2, 0xA7D2, 1},    {0xA7D4, 0xA7D4, 1},
                                     {0xA7DA, 0xA7DA, 1},    {0xA7DC, 0xA7DC, 0x19B - 0xA7DC},
                                     {0x10D50, 0x10D65, 32}, {0x16EA0, 0x16EB8, 27}};

char32_t lower_of(char32_t c) {
  for (const Capitals& range : kNewCapitals) {
    if (c >= range.first && c <= range.last) return static_cast<char32_t>(static_cast<int32_t>(c) + range.distance);
  }
  return static_cast<char32_t>(u_tolower(static_cast<UChar32>(c)));
}

Result<const icu::Normalizer2*> normal_form(std::string_view name) {
  struct Forms {
    UErrorCode code = U_ZERO_ERROR;
    icu::UnicodeSet known{kKnownCharacters, code};
    icu::FilteredNormalizer2 nfc{*icu::Normalizer2::getNFCInstance(code), known};
    icu::FilteredNormalizer2 nfd{*icu::Normalizer2::getNFDInstance(code), known};
    icu::FilteredNormalizer2 nfkc{*icu::Normalizer2::getNFKCInstance(code), known};
    icu::FilteredNormalizer2 nfkd{*icu::Normalizer2::getNFKDInstance(code), known};
    Forms() { known.freeze(); }
  };
  static const Forms forms;
  if (U_FAILURE(forms.code)) return icu_error("its data for normal forms", forms.code);
  return name == "NFC" ? &forms.nfc : name == "NFD" ? &forms.nfd : name == "NFKC" ? &forms.nfkc : &forms.nfkd;
}

Result<std::string> to_normal_form(const icu::Normalizer2& form, const std::string& text) {
  std::string out;
  icu::StringByteSink<std::string> sink(&out);
  UErrorCode code = U_ZERO_ERROR;
  form.normalizeUTF8(0, text, sink, nullptr, code);
  if (U_FAILURE(code)) return icu_error("normalizing", code);
  return out;
}

template <typename Keep>
std::string filtered(const std::string& text, const Keep& keep) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_length(text[at]);
    if (keep(utf8_at(text, at))) out.append(text, at, length);
    at += length;
  }
  return out;
}

std::string stripped(const std::string& text, bool left, bool right) {
  size_t begin = 0, end = text.size();
  while (left && begin < end && u_isUWhiteSpace(static_cast<UChar32>(utf8_at(text, begin)))) {
    begin += utf8_length(text[begin]);
  }
  while (right && end > begin) {
    size_t last = end - 1;
    while ((static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
    if (!u_isUWhiteSpace(static_cast<UChar32>(utf8_at(text, last)))) break;
    end = last;
  }
  return text.substr(begin, end - begin);
}

/// Character by character, no look at what stands beside: so "Σ" is always "σ".
std::string lowercased(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = utf8_at(text, at);
    at += utf8_length(text[at]);
    if (c == 0x130) {  // the one character whose lower case is two
      out += "i\xCC\x87";
    } else {
      append_utf8(lower_of(c), &out);
    }
  }
  return out;
}

/// The compiled rules of a SentencePiece model: a double-array trie (darts-clone's units) whose values are offsets into
/// NUL-terminated replacements.
class CharsMap {
 public:
  static Result<std::shared_ptr<const CharsMap>> decode(std::string_view base64) {
    auto out = std::make_shared<CharsMap>();
    std::string bytes;
    uint32_t bits = 0;
    int held = 0;
    for (const char c : base64) {
      if (c == '=') break;
      const int value = c >= 'A' && c <= 'Z'   ? c - 'A'
                        : c >= 'a' && c <= 'z' ? c - 'a' + 26
                        : c >= '0' && c <= '9' ? c - '0' + 52
                        : c == '+'             ? 62
                        : c == '/'             ? 63
                                               : -1;
      if (value < 0) return Error{ErrorCode::kInvalidInput, "\"precompiled_charsmap\" is no base64"};
      bits = bits << 6 | static_cast<uint32_t>(value);
      if ((held += 6) >= 8) bytes.push_back(static_cast<char>(bits >> (held -= 8)));
    }
    const auto u32 = [&](size_t at) {
      uint32_t x = 0;
      for (int k = 3; k >= 0; --k) x = x << 8 | static_cast<unsigned char>(bytes[at + static_cast<size_t>(k)]);
      return x;
    };
    if (bytes.size() < 4 || u32(0) % 4 != 0 || u32(0) > bytes.size() - 4) {
      return Error{ErrorCode::kInvalidInput, "\"precompiled_charsmap\" is shorter than it says"};
    }
    for (size_t at = 4; at < 4 + u32(0); at += 4) out->units_.push_back(u32(at));
    out->replacements_ = bytes.substr(4 + u32(0));
    RT_TRY(out->check_replacements());
    return std::shared_ptr<const CharsMap>(std::move(out));
  }

  /// What stands for the shortest known beginning of `key`, or null.
  const char* find(std::string_view key) const {
    if (units_.empty()) return nullptr;
    size_t at = offset(units_[0]);
    for (const char c : key) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte == 0) return nullptr;
      at ^= byte;
      if (at >= units_.size() || (units_[at] & (0x80000000u | 0xFF)) != byte) return nullptr;
      const bool leaf = (units_[at] >> 8 & 1) != 0;
      at ^= offset(units_[at]);
      if (!leaf) continue;
      if (at >= units_.size()) return nullptr;
      const size_t value = units_[at] & 0x7FFFFFFFu;
      return value < replacements_.size() ? replacements_.c_str() + value : nullptr;
    }
    return nullptr;
  }

 private:
  /// What is put into text is text: each replacement is whole characters.
  Status check_replacements() const {
    const auto wrong = [](size_t at) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("\"precompiled_charsmap\": its replacement at byte {} is not UTF-8", at)};
    };
    if (const int64_t bad = find_invalid_utf8(replacements_); bad >= 0) return wrong(static_cast<size_t>(bad));
    for (size_t at = 0; at < units_.size(); ++at) {
      if ((units_[at] >> 8 & 1) == 0) continue;
      const size_t value_at = at ^ offset(units_[at]);
      const size_t value = value_at < units_.size() ? units_[value_at] & 0x7FFFFFFFu : replacements_.size();
      if (value < replacements_.size() && (static_cast<unsigned char>(replacements_[value]) & 0xC0) == 0x80)
        return wrong(value);
    }
    return {};
  }
  static size_t offset(uint32_t unit) { return static_cast<size_t>(unit >> 10) << ((unit & 1u << 9) >> 6); }
  std::vector<uint32_t> units_;
  std::string replacements_;
};

Result<std::string> by_charsmap(const CharsMap& map, const std::string& text) {
  std::string out;
  const auto character_by_character = [&](std::string_view part) {
    for (size_t at = 0; at < part.size();) {
      const std::string_view one = part.substr(at, utf8_length(part[at]));
      const char* found = map.find(one);
      out += found != nullptr ? std::string_view(found) : one;
      at += one.size();
    }
  };
  // Grapheme by grapheme: a short one is looked up as a whole first.
  UErrorCode code = U_ZERO_ERROR;
  thread_local const std::unique_ptr<icu::BreakIterator> graphemes(
      icu::BreakIterator::createCharacterInstance(icu::Locale::getRoot(), code));
  if (graphemes == nullptr) return icu_error("grapheme breaks", code);
  const icu::UnicodeString wide = icu::UnicodeString::fromUTF8(text);
  graphemes->setText(wide);
  size_t at = 0;
  for (int32_t begin = graphemes->first(), end = graphemes->next(); end != icu::BreakIterator::DONE;
       begin = end, end = graphemes->next()) {
    size_t length = 0;
    for (int32_t k = begin; k < end; k = wide.moveIndex32(k, 1)) length += utf8_length(text[at + length]);
    const std::string_view grapheme = std::string_view(text).substr(at, length);
    at += length;
    const char* found = grapheme.size() < 6 ? map.find(grapheme) : nullptr;
    if (found != nullptr) {
      out += found;
    } else {
      character_by_character(grapheme);
    }
  }
  return out;
}

}  // namespace

Result<Normalizer> Normalizer::make(const json& spec) {
  Normalizer out;
  if (!spec.is_null()) RT_TRY(out.add(spec).with("normalizer"));
  return out;
}

Status Normalizer::add(const json& spec) {
  RT_TRY_SET(const std::string type, type_of(spec, "normalizer"));
  if (type == "Sequence") {
    const auto list = spec.find("normalizers");
    if (list == spec.end() || !list->is_array()) return bad_field("normalizers", "a list", spec);
    for (const json& step : *list) RT_TRY(add(step));
  } else if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    RT_TRY_SET(const icu::Normalizer2* form, normal_form(type));
    steps_.push_back([form](const std::string& text, Part) { return to_normal_form(*form, text); });
  } else if (type == "Lowercase") {
    steps_.push_back([](const std::string& text, Part) -> Result<std::string> { return lowercased(text); });
  } else if (type == "StripAccents") {
    steps_.push_back([](const std::string& text, Part) -> Result<std::string> {
      return filtered(text, [](char32_t c) { return !is_mark(c); });
    });
  } else if (type == "Prepend") {
    RT_TRY_SET(const std::string prefix, string_field(spec, "prepend"));
    steps_.push_back([prefix](std::string text, Part part) -> Result<std::string> {
      return text.empty() || !part.first ? text : prefix + text;
    });
  } else if (type == "Strip") {
    RT_TRY_SET(const bool left, bool_field(spec, "strip_left", true));
    RT_TRY_SET(const bool right, bool_field(spec, "strip_right", true));
    steps_.push_back([left, right](const std::string& text, Part part) -> Result<std::string> {
      return stripped(text, left && part.first, right && part.last);
    });
  } else if (type == "Replace") {
    RT_TRY_SET(const Regex pattern, Regex::from_json(spec));
    RT_TRY_SET(const std::string content, string_field(spec, "content"));
    steps_.push_back([pattern, content](const std::string& text, Part) { return pattern.replaced(text, content); });
  } else if (type == "Precompiled") {
    if (spec.contains("precompiled_charsmap") && spec["precompiled_charsmap"].is_null()) return {};
    RT_TRY_SET(const std::string base64, string_field(spec, "precompiled_charsmap"));
    RT_TRY_SET(const std::shared_ptr<const CharsMap> map, CharsMap::decode(base64));
    steps_.push_back([map](const std::string& text, Part) { return by_charsmap(*map, text); });
  } else {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("the type {} is not read here; known are Lowercase, NFC, NFD, NFKC, NFKD, Precompiled, "
                             "Prepend, Replace, Sequence, Strip, StripAccents",
                             type)};
  }
  return {};
}

Result<std::string> Normalizer::apply(std::string_view text, Part part) const {
  std::string out(text);
  for (const Step& step : steps_) {
    RT_TRY_SET(out, step(std::move(out), part));
  }
  return out;
}

}  // namespace cairn::text
