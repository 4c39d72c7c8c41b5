#include "runtime/data/chat_format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unicode/uchar.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "runtime/data/text_input.h"
#include "runtime/json/json.h"
#include "runtime/text/utf8.h"

namespace cairn::data {
namespace {

using nlohmann::json;

constexpr int64_t kMostFormatBytes = 1 << 20;
constexpr std::string_view kBegin = "begin", kEnd = "end";

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

std::string pair_of(std::string_view before, std::string_view behind) { return fmt::format("{} {}", before, behind); }

/// Every role opened by `open` and closed by `close`, in any order.
ChatFormat by_roles(std::string_view begin, std::string_view close,
                    const std::vector<std::pair<std::string, std::string>>& opens) {
  ChatFormat out;
  for (const auto& [role, open] : opens) {
    out.joins[pair_of(kBegin, role)] = std::string(begin) + open;
    out.joins[pair_of(role, kEnd)] = close;
    for (const auto& [next, next_open] : opens) out.joins[pair_of(role, next)] = std::string(close) + next_open;
    if (role == "assistant") out.generate = open;
  }
  return out;
}

ChatFormat chatml() {
  const auto open = [](const std::string& role) { return std::pair(role, "<|im_start|>" + role + "\n"); };
  return by_roles("", "<|im_end|>\n", {open("system"), open("user"), open("assistant"), open("tool")});
}

ChatFormat llama3() {
  const auto open = [](const std::string& role) {
    return std::pair(role, "<|start_header_id|>" + role + "<|end_header_id|>\n\n");
  };
  ChatFormat out = by_roles("<|begin_of_text|>", "<|eot_id|>", {open("system"), open("user"), open("assistant")});
  for (const auto& [roles, join] : out.joins) {
    if (!roles.starts_with(kBegin)) out.trims.insert(roles);
  }
  return out;
}

/// Stanford Alpaca's prompts (Taori et al. 2023): with an input, whose instruction has the role "task", and without.
ChatFormat alpaca(const std::string& end) {
  const std::string answer = "\n\n### Response:\n", instruction = "### Instruction:\n";
  const std::string wish = "Write a response that appropriately completes the request.\n\n";
  ChatFormat out;
  out.joins = {
      {"begin user", "Below is an instruction that describes a task. " + wish + instruction},
      {"begin task",
       "Below is an instruction that describes a task, paired with an input that provides further context. " + wish +
           instruction},
      {"begin system", ""},
      {"system user", "\n\n" + instruction},
      {"system task", "\n\n" + instruction},
      {"task input", "\n\n### Input:\n"},
      {"input assistant", answer},
      {"user assistant", answer},
      {"assistant user", end + "\n\n" + instruction},
      {"assistant end", end},
  };
  out.generate = answer;
  return out;
}

ChatFormat plain(const std::string& end) {
  ChatFormat out;
  out.joins = {{"begin user", ""}, {"user assistant", ""}, {"assistant user", end}, {"assistant end", end}};
  return out;
}

/// The white space that Python's str.strip() takes, which templates use.
bool is_space(char32_t c) { return u_isUWhiteSpace(static_cast<UChar32>(c)) != 0 || (c >= 0x1C && c <= 0x1F); }

std::string_view stripped(std::string_view content) {
  size_t begin = 0, end = content.size();
  while (begin < end && is_space(text::utf8_at(content, begin))) begin += text::utf8_length(content[begin]);
  while (end > begin) {
    size_t last = end - 1;
    while (last > begin && (static_cast<unsigned char>(content[last]) & 0xC0) == 0x80) --last;
    if (!is_space(text::utf8_at(content, last))) break;
    end = last;
  }
  return content.substr(begin, end - begin);
}

Result<ChatFormat> read_format(const std::string& path) {
  RT_TRY_SET(const std::string said, read_text(path, kMostFormatBytes, TextRule::kAlsoJson));
  Result<json> parsed = parse_json_strictly(said, "the chat format", kMaxJsonDepth);
  if (!parsed.ok()) return invalid(parsed.error().message);
  const json& spec = parsed.value();
  const json& joins = json_field(spec, "joins");
  if (!joins.is_object() || joins.empty()) {
    return invalid("has no object \"joins\" that gives the text between two roles; tools/chat_joins.py writes one");
  }
  ChatFormat out;
  for (const auto& [key, value] : spec.items()) {
    if (key != "joins" && key != "trim" && key != "generate" && key != "made")
      return invalid(
          fmt::format("has the field \"{}\"; known are joins, trim, generate and made", printable_ascii(key)));
  }
  const auto is_pair = [](const std::string& roles) {
    const size_t space = roles.find(' ');
    return space != roles.npos && space > 0 && space + 1 < roles.size() && roles.find(' ', space + 1) == roles.npos;
  };
  for (const auto& [roles, join] : joins.items()) {
    if (!is_pair(roles) || !join.is_string())
      return invalid(
          fmt::format("joins: \"{}\": expected a text for two roles with a space between, as \"user assistant\"",
                      printable_ascii(roles)));
    out.joins[roles] = join.get<std::string>();
  }
  const json& trims = json_field(spec, "trim");
  if (!trims.is_null() && !trims.is_array()) return invalid("trim: expected a list of pairs of roles");
  for (const json& roles : trims) {
    if (!roles.is_string() || !is_pair(roles.get<std::string>()))
      return invalid("trim: expected a list of pairs of roles, as \"user assistant\"");
    out.trims.insert(roles.get<std::string>());
  }
  const json& generate = json_field(spec, "generate");
  if (!generate.is_null() && !generate.is_string()) return invalid("generate: expected a text");
  out.generate = json_string(spec, "generate");
  return out;
}

}  // namespace

bool ChatFormat::has(std::string_view role) const {
  return std::ranges::any_of(joins, [&](const auto& join) {
    const std::string& roles = join.first;
    return roles.starts_with(std::string(role) + " ") || roles.ends_with(" " + std::string(role));
  });
}

std::vector<std::string> chat_format_names() { return {"alpaca", "chatml", "llama3", "plain"}; }

Result<ChatFormat> chat_format(const std::string& name, const text::Tokenizer& tokenizer) {
  ChatFormat out;
  if (name == "chatml") {
    out = chatml();
  } else if (name == "llama3") {
    out = llama3();
  } else if (name == "alpaca" || name == "plain") {
    const int32_t eod = tokenizer.eod();
    if (eod < 0)
      return invalid(
          fmt::format("the chat format {} ends an answer with the token that ends a document, and there is "
                      "none: {}",
                      name, tokenizer.why_no_eod()));
    RT_TRY_SET(const std::string end, tokenizer.decode(std::span(&eod, 1)));
    std::vector<int32_t> ids;
    RT_TRY(tokenizer.encode(end, &ids));
    if (ids != std::vector<int32_t>{eod})
      return invalid(
          fmt::format("the chat format {} ends an answer with the token {}, which ends a document, and no "
                      "text spells it for this tokenizer: its tokenizer_config.json is missing, or does not "
                      "list the token",
                      name, eod));
    out = name == "alpaca" ? alpaca(end) : plain(end);
    out.around = true;
  } else {
    std::error_code error;
    if (!std::filesystem::exists(name, error))
      return invalid(
          fmt::format("the chat format \"{}\" is neither built in ({}) nor a file; tools/chat_joins.py makes "
                      "one from a tokenizer's chat_template",
                      printable_ascii(name), fmt::join(chat_format_names(), ", ")));
    RT_TRY_SET(out, read_format(name).with(name));
  }
  out.name = name;
  return out;
}

Result<ChatText> join_turns(const ChatFormat& format, const std::vector<Turn>& turns) {
  if (turns.empty()) return invalid("a conversation without a turn");
  ChatText out;
  std::string_view before = kBegin;
  const auto join = [&](std::string_view behind) -> Status {
    const auto found = format.joins.find(pair_of(before, behind));
    if (found == format.joins.end()) {
      std::vector<std::string> known;
      for (const auto& [roles, text] : format.joins) known.push_back("\"" + roles + "\"");
      return invalid(fmt::format("the chat format {} joins no \"{} {}\"; it joins {}", format.name,
                                 printable_ascii(before), printable_ascii(behind), fmt::join(known, ", ")));
    }
    out.text += found->second;
    return {};
  };
  for (size_t k = 0; k < turns.size(); ++k) {
    const Turn& turn = turns[k];
    RT_TRY(join(turn.role));
    const std::string_view behind = k + 1 < turns.size() ? std::string_view(turns[k + 1].role) : kEnd;
    const bool trim = format.trims.contains(pair_of(turn.role, behind));
    const std::string_view content = trim ? stripped(turn.content) : std::string_view(turn.content);
    out.contents.push_back({out.text.size(), out.text.size() + content.size()});
    out.text += content;
    before = turn.role;
  }
  RT_TRY(join(kEnd));
  return out;
}

}  // namespace cairn::data
