#include "runtime/data/chat_rows.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "runtime/data/channels.h"
#include "runtime/json/json.h"

namespace cairn::data {
namespace {

using nlohmann::json;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

std::string kind_of(const json& value) {
  if (value.is_null()) return "null";
  return fmt::format("{} {}", value.is_structured() ? "an" : "a", value.type_name());  // an array, an object
}

/// A text field. Errors name it by `where`.
Result<std::string> text_of(const json& value, std::string_view where) {
  if (value.is_array()) {
    return invalid(
        fmt::format("{} is a list of parts, expected a text: pictures, sounds and lists of texts are not read", where));
  }
  if (!value.is_string()) return invalid(fmt::format("{} is {}, expected a text", where, kind_of(value)));
  std::string out = value.get<std::string>();
  if (has_half_pair(out))
    return invalid(fmt::format("{} has half of a surrogate pair (\\ud800 to \\udfff), which is no character", where));
  return out;
}

bool is_empty(const json& value) { return value.is_null() || value.empty() || value == ""; }

/// Whether an answer counts, as "train" and "weight" say.
Result<bool> counts(const json& message, bool usual, const std::string& where) {
  const json& train = json_field(message, "train");
  const json& weight = json_field(message, "weight");
  if (!train.is_null() && !train.is_boolean())
    return invalid(fmt::format("{}.train is {}, expected true or false", where, kind_of(train)));
  if (!weight.is_null() && weight != 0 && weight != 1)
    return invalid(fmt::format("{}.weight is {}, expected 0 or 1", where, json_text(weight)));
  if (train.is_boolean()) return train.get<bool>();
  return weight.is_null() ? usual : usual && weight == 1;
}

/// A list of {role, content}. `answers`: whether an assistant's turns count where they do not say.
Result<std::vector<Turn>> read_messages(const json& list, const std::string& name, bool answers) {
  if (!list.is_array()) return invalid(fmt::format("{} is {}, expected a list", name, kind_of(list)));
  std::vector<Turn> out;
  for (size_t k = 0; k < list.size(); ++k) {
    const std::string where = fmt::format("{}[{}]", name, k);
    const json& message = list[k];
    if (!message.is_object()) return invalid(fmt::format("{} is {}, expected an object", where, kind_of(message)));
    for (const char* call : {"tool_calls", "function_call"}) {
      if (!is_empty(json_field(message, call)))
        return invalid(
            fmt::format("{}.{}: calls of tools are not written by a chat format; make rows of \"ids\" and "
                        "\"loss\" from the model's own template",
                        where, call));
    }
    for (const char* thought : {"reasoning_content", "thinking"}) {
      if (!is_empty(json_field(message, thought)))
        return invalid(
            fmt::format("{}.{}: a chat format has no place for it; put it into the content as the model "
                        "writes it, or remove the field",
                        where, thought));
    }
    Turn turn;
    RT_TRY_SET(turn.role, text_of(json_field(message, "role"), where + ".role"));
    if (turn.role.empty() || turn.role.find(' ') != turn.role.npos || turn.role == "begin" || turn.role == "end")
      return invalid(
          fmt::format("{}.role is \"{}\", expected system, user or assistant", where, printable_ascii(turn.role)));
    RT_TRY_SET(turn.content, text_of(json_field(message, "content"), where + ".content"));
    RT_TRY_SET(turn.counts, counts(message, answers && turn.role == "assistant", where));
    out.push_back(std::move(turn));
  }
  return out;
}

Result<std::vector<Turn>> read_sharegpt(const json& list) {
  if (!list.is_array()) return invalid(fmt::format("conversations is {}, expected a list", kind_of(list)));
  std::vector<Turn> out;
  for (size_t k = 0; k < list.size(); ++k) {
    const std::string where = fmt::format("conversations[{}]", k);
    const json& message = list[k];
    if (!message.is_object()) return invalid(fmt::format("{} is {}, expected an object", where, kind_of(message)));
    RT_TRY_SET(const std::string from, text_of(json_field(message, "from"), where + ".from"));
    Turn turn;
    if (from == "human" || from == "user") {
      turn.role = "user";
    } else if (from == "gpt" || from == "assistant") {
      turn.role = "assistant";
    } else if (from == "system") {
      turn.role = from;
    } else {
      return invalid(fmt::format("{}.from is \"{}\", expected human, gpt or system", where, printable_ascii(from)));
    }
    RT_TRY_SET(turn.content, text_of(json_field(message, "value"), where + ".value"));
    RT_TRY_SET(turn.counts, counts(message, turn.role == "assistant", where));
    out.push_back(std::move(turn));
  }
  return out;
}

Result<ChatRow> read_ids(const json& row) {
  ChatRow out{.kind = ChatRow::Kind::kIds};
  const json& ids = json_field(row, "ids");
  if (!ids.is_array() || ids.empty()) return invalid("ids: expected a list of token ids");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (size_t k = 0; k < ids.size(); ++k) {
    const std::optional<int64_t> id = json_integer(ids[k], 0, kMost);
    if (!id) return invalid(fmt::format("ids[{}] is {}, expected a token id", k, json_text(ids[k])));
    out.ids.push_back(static_cast<int32_t>(*id));
  }
  const json& loss = json_field(row, "loss");
  if (!loss.is_array() || loss.empty())
    return invalid("loss: expected a list of spans [from, to) of the ids that count, as [[3, 7]]");
  int64_t least = 0;
  for (size_t k = 0; k < loss.size(); ++k) {
    const bool pair = loss[k].is_array() && loss[k].size() == 2;
    const auto from = pair ? json_integer(loss[k][0], least, std::ssize(out.ids)) : std::nullopt;
    const auto to = from ? json_integer(loss[k][1], *from + 1, std::ssize(out.ids)) : std::nullopt;
    if (!to)
      return invalid(fmt::format("loss[{}] is {}, expected [from, to) with {} <= from < to <= {}", k,
                                 json_text(loss[k]), least, out.ids.size()));
    out.spans.push_back({static_cast<uint32_t>(*from), static_cast<uint32_t>(*to)});
    least = *to;
  }
  return out;
}

/// The turns of a prompt and its answer, both texts.
Result<std::vector<Turn>> read_pair(const json& row, const char* prompt, const char* answer) {
  std::vector<Turn> out(2);
  out[0].role = "user";
  RT_TRY_SET(out[0].content, text_of(json_field(row, prompt), prompt));
  out[1] = {.role = "assistant", .content = {}, .counts = true};
  RT_TRY_SET(out[1].content, text_of(json_field(row, answer), answer));
  return out;
}

Result<std::vector<Turn>> read_turns(const json& row, const ChatFormat& format) {
  const auto has = [&](const char* key) { return !json_field(row, key).is_null(); };
  if (has("messages")) return read_messages(json_field(row, "messages"), "messages", true);
  if (has("conversations")) return read_sharegpt(json_field(row, "conversations"));
  const char* completion = has("completion") ? "completion" : "response";
  if (has("prompt") && has(completion)) {
    const json& prompt = json_field(row, "prompt");
    if (!prompt.is_array()) return read_pair(row, "prompt", completion);
    RT_TRY_SET(std::vector<Turn> out, read_messages(prompt, "prompt", false));
    RT_TRY_SET(const std::vector<Turn> answer, read_messages(json_field(row, completion), completion, true));
    out.insert(out.end(), answer.begin(), answer.end());
    return out;
  }
  const char* output = has("output") ? "output" : "response";
  if (has("instruction") && has(output)) {
    RT_TRY_SET(std::vector<Turn> out, read_pair(row, "instruction", output));
    if (is_empty(json_field(row, "input"))) return out;
    RT_TRY_SET(std::string input, text_of(json_field(row, "input"), "input"));
    if (format.has("task") && format.has("input")) {
      out[0].role = "task";
      out.insert(out.begin() + 1, {.role = "input", .content = std::move(input)});
    } else {
      out[0].content += "\n" + input;
    }
    return out;
  }
  if (has("chosen") || has("rejected"))
    return invalid("is a row of preferences (\"chosen\", \"rejected\"), which are not trained on here");
  std::vector<std::string> found;
  for (const auto& [key, value] : row.items()) found.push_back("\"" + printable_ascii(key) + "\"");
  constexpr size_t kNamed = 8;
  if (found.size() > kNamed) found.resize(kNamed);
  return invalid(
      fmt::format("is no row of instruction data: found {}, expected messages, conversations, prompt with "
                  "response or completion, instruction with output, text, or ids with loss",
                  found.empty() ? "no field" : fmt::format("{}", fmt::join(found, ", "))));
}

/// The name in a row's field `key`.
Result<std::string> read_channel(const json& row, const std::string& key) {
  RT_TRY_SET(std::string out, text_of(json_field(row, key), printable_ascii(key)));
  if (out.empty() || std::ssize(out) > kLongestChannelName)
    return invalid(fmt::format("{} has {} bytes, expected the name of a channel of 1 to {}", printable_ascii(key),
                               out.size(), kLongestChannelName));
  return out;
}

Result<ChatRow> read_row(const json& row, const ChatFormat& format) {
  for (const char* tools : {"tools", "functions"}) {
    if (!is_empty(json_field(row, tools)))
      return invalid(
          fmt::format("{}: tools are not written by a chat format; make rows of \"ids\" and \"loss\" from "
                      "the model's own template, or remove the field",
                      tools));
  }
  if (!is_empty(json_field(row, "history")))
    return invalid("history: earlier turns beside an instruction are not read; make a row of \"messages\"");
  const auto has = [&](const char* key) { return !json_field(row, key).is_null(); };
  ChatRow out;
  if (has("ids")) return read_ids(row);
  const bool turns = has("messages") || has("conversations") || has("prompt") || has("instruction");
  if (has("text") && !turns) {
    out.kind = ChatRow::Kind::kText;
    RT_TRY_SET(out.text, text_of(json_field(row, "text"), "text"));
    if (out.text.empty()) return invalid("text is empty");
    return out;
  }
  RT_TRY_SET(out.turns, read_turns(row, format));
  if (!is_empty(json_field(row, "system"))) {
    RT_TRY_SET(std::string system, text_of(json_field(row, "system"), "system"));
    if (!out.turns.empty() && out.turns[0].role == "system")
      return invalid("system stands beside turns that begin with one of the role system; remove one of the two");
    out.turns.insert(out.turns.begin(), {.role = "system", .content = std::move(system)});
  }
  if (out.turns.empty()) return invalid("has no turn");
  for (size_t k = 0; k < out.turns.size(); ++k) {
    const Turn& turn = out.turns[k];
    if (turn.counts && turn.content.find_first_not_of(" \t\r\n") == turn.content.npos)
      return invalid(
          fmt::format("turn {} (from 1) is an empty answer; remove the row, or say \"train\": false", k + 1));
  }
  if (std::ranges::none_of(out.turns, &Turn::counts))
    return invalid("no answer counts: no turn of an assistant is to be learnt");
  return out;
}

}  // namespace

Result<ChatRow> read_chat_row(std::string_view line, const ChatFormat& format, const std::string& channel_key) {
  Result<json> parsed = parse_json(line, kMaxJsonDepth, JsonNumbers::kPython);
  if (!parsed.ok()) return invalid(parsed.error().message);
  const json& row = parsed.value();
  if (!row.is_object()) return invalid(fmt::format("is {}, expected a JSON object a line", kind_of(row)));
  RT_TRY_SET(ChatRow out, read_row(row, format));
  if (!channel_key.empty()) {
    RT_TRY_SET(out.channel, read_channel(row, channel_key));
  }
  return out;
}

}  // namespace cairn::data
