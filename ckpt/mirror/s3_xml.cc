#include "ckpt/mirror/s3_xml.h"

#include <fmt/format.h>

#include <charconv>

namespace cairn::ckpt {
namespace {

constexpr int kMaxDepth = 32;

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }
bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
         c == '.' || c == ':' || static_cast<unsigned char>(c) >= 0x80;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<XmlNode> document() {
    if (starts("\xEF\xBB\xBF")) at_ += 3;
    RT_TRY(skip_misc());
    RT_TRY_SET(XmlNode root, element(0));
    RT_TRY(skip_misc());
    if (at_ != text_.size()) return wrong("nothing more");
    return root;
  }

 private:
  Error wrong(std::string_view expected) const {
    return Error{ErrorCode::kInvalidInput, fmt::format("XML: byte {}: expected {}", at_, expected)};
  }
  bool starts(std::string_view what) const { return text_.substr(at_, what.size()) == what; }
  void skip_space() {
    while (at_ < text_.size() && is_space(text_[at_])) ++at_;
  }
  Status skip_past(std::string_view end) {
    const size_t found = text_.find(end, at_);
    if (found == std::string_view::npos) return wrong(end);
    at_ = found + end.size();
    return {};
  }
  /// White space, <?...?> and comments.
  Status skip_misc() {
    for (;;) {
      skip_space();
      if (starts("<?")) {
        RT_TRY(skip_past("?>"));
      } else if (starts("<!--")) {
        RT_TRY(skip_past("-->"));
      } else {
        return {};
      }
    }
  }
  Result<std::string> name() {
    const size_t begin = at_;
    while (at_ < text_.size() && is_name(text_[at_])) ++at_;
    if (at_ == begin) return wrong("a name");
    const std::string_view whole = text_.substr(begin, at_ - begin);
    const size_t colon = whole.rfind(':');
    return std::string(colon == std::string_view::npos ? whole : whole.substr(colon + 1));
  }
  Status reference(std::string& out) {
    static constexpr std::pair<std::string_view, char> kNamed[] = {
        {"&lt;", '<'}, {"&gt;", '>'}, {"&amp;", '&'}, {"&quot;", '"'}, {"&apos;", '\''}};
    for (const auto& [spelling, c] : kNamed) {
      if (!starts(spelling)) continue;
      out += c;
      at_ += spelling.size();
      return {};
    }
    if (!starts("&#")) return wrong("one of the five entities or a character reference");
    const bool hexadecimal = starts("&#x");
    const char* begin = text_.data() + at_ + (hexadecimal ? 3 : 2);
    uint32_t code = 0;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), code, hexadecimal ? 16 : 10);
    if (error != std::errc() || end == begin || end == text_.data() + text_.size() || *end != ';' || code == 0 ||
        code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
      return wrong("a character reference");
    }
    at_ = static_cast<size_t>(end - text_.data()) + 1;
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else if (code < 0x800) {
      out += static_cast<char>(0xC0 | code >> 6);
      out += static_cast<char>(0x80 | (code & 0x3F));
    } else {
      if (code < 0x10000) {
        out += static_cast<char>(0xE0 | code >> 12);
      } else {
        out += static_cast<char>(0xF0 | code >> 18);
        out += static_cast<char>(0x80 | (code >> 12 & 0x3F));
      }
      out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
      out += static_cast<char>(0x80 | (code & 0x3F));
    }
    return {};
  }
  /// Attributes are checked for form and dropped.
  Status attributes() {
    for (;;) {
      skip_space();
      if (at_ >= text_.size()) return wrong("the end of a tag");
      if (text_[at_] == '>' || text_[at_] == '/') return {};
      RT_TRY(name());
      skip_space();
      if (!starts("=")) return wrong("=");
      ++at_;
      skip_space();
      if (!starts("\"") && !starts("'")) return wrong("a quoted value");
      const char quote = text_[at_++];
      RT_TRY(skip_past(std::string_view(&quote, 1)));
    }
  }
  Result<XmlNode> element(int depth) {
    if (depth > kMaxDepth) return wrong("no deeper nesting");
    if (!starts("<")) return wrong("an element");
    ++at_;
    XmlNode node;
    RT_TRY_SET(node.name, name());
    RT_TRY(attributes());
    if (starts("/>")) {
      at_ += 2;
      return node;
    }
    if (!starts(">")) return wrong(">");
    ++at_;
    while (at_ < text_.size()) {
      if (starts("</")) {
        at_ += 2;
        RT_TRY_SET(const std::string end, name());
        if (end != node.name) return wrong("</" + node.name + ">");
        skip_space();
        if (!starts(">")) return wrong(">");
        ++at_;
        return node;
      }
      if (starts("<!--")) {
        RT_TRY(skip_past("-->"));
      } else if (starts("<![CDATA[")) {
        at_ += 9;
        const size_t end = text_.find("]]>", at_);
        if (end == std::string_view::npos) return wrong("]]>");
        node.text += text_.substr(at_, end - at_);
        at_ = end + 3;
      } else if (starts("<?")) {
        RT_TRY(skip_past("?>"));
      } else if (starts("<")) {
        RT_TRY_SET(XmlNode child, element(depth + 1));
        node.children.push_back(std::move(child));
      } else if (starts("&")) {
        RT_TRY(reference(node.text));
      } else {
        node.text += text_[at_++];
      }
    }
    return wrong("</" + node.name + ">");
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

const XmlNode* XmlNode::find(std::string_view child) const {
  for (const XmlNode& node : children) {
    if (node.name == child) return &node;
  }
  return nullptr;
}

std::string XmlNode::get(std::string_view child) const {
  const XmlNode* node = find(child);
  return node == nullptr ? std::string() : node->text;
}

Result<XmlNode> parse_xml(std::string_view text) { return Parser(text).document(); }

}  // namespace cairn::ckpt
