#include "tools/run/host_wire.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <utility>

#include "runtime/json/json.h"
#include "runtime/kernels/isa.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

constexpr int64_t kMost = INT64_MAX;

constexpr std::array kCodes = {ErrorCode::kInvalidInput, ErrorCode::kCorrupt,     ErrorCode::kUnavailable,
                               ErrorCode::kNoSpace,      ErrorCode::kIo,          ErrorCode::kPeerLost,
                               ErrorCode::kTimeout,      ErrorCode::kUnsupported, ErrorCode::kStopped,
                               ErrorCode::kGuard,        ErrorCode::kInternal};

Error garbled(std::string_view what) {
  return {ErrorCode::kCorrupt, fmt::format("a message of another agent has no {} that makes sense", what)};
}

std::string text_of(const json& from, const char* key) {
  const auto at = from.find(key);
  return at != from.end() && at->is_string() ? at->get<std::string>() : std::string();
}

int64_t number_of(const json& from, const char* key, int64_t least, int64_t other) {
  const auto at = from.find(key);
  return at == from.end() ? other : json_integer(*at, least, kMost).value_or(other);
}

bool flag_of(const json& from, const char* key) {
  const auto at = from.find(key);
  return at != from.end() && at->is_boolean() && at->get<bool>();
}

/// Numbers of 64 bits without a sign.
std::optional<uint64_t> unsigned_of(const json& value) {
  return value.is_number_unsigned() ? std::optional(value.get<uint64_t>()) : std::nullopt;
}

}  // namespace

json error_to_json(const Error& error) { return {{"code", error_code_name(error.code)}, {"message", error.message}}; }

Error error_from_json(const json& body) {
  const auto at = body.find("error");
  if (at == body.end() || !at->is_object()) return garbled("error");
  Error out{ErrorCode::kInternal, text_of(*at, "message")};
  for (const ErrorCode code : kCodes) {
    if (error_code_name(code) == text_of(*at, "code")) out.code = code;
  }
  if (out.message.empty()) out.message = "another agent tells of an error and not what it is";
  return out;
}

json slot_to_json(const ckpt::WholeSlot& slot) {
  return {{"slot", slot.slot}, {"incarnation", slot.incarnation}, {"step", slot.step}};
}

std::optional<ckpt::WholeSlot> slot_from_json(const json& from) {
  if (!from.is_object() || !from.contains("incarnation")) return std::nullopt;
  const std::optional<uint64_t> incarnation = unsigned_of(from["incarnation"]);
  const int64_t slot = number_of(from, "slot", 0, -1), step = number_of(from, "step", 0, -1);
  if (!incarnation || slot < 0 || slot >= ckpt::arena::kMaxSlots || step < 0) return std::nullopt;
  return ckpt::WholeSlot{slot, *incarnation, step};
}

json memory_to_json(const ckpt::HostMemory& memory) {
  json whole = json::array();
  for (const ckpt::WholeSlot& slot : memory.whole) whole.push_back(slot_to_json(slot));
  return {{"incarnation", memory.incarnation}, {"whole", std::move(whole)}};
}

Result<ckpt::HostMemory> memory_from_json(const json& from) {
  if (!from.is_object() || !from.contains("incarnation") || !from.contains("whole")) return garbled("memory");
  const std::optional<uint64_t> incarnation = unsigned_of(from["incarnation"]);
  if (!incarnation || !from["whole"].is_array()) return garbled("memory");
  ckpt::HostMemory out{.incarnation = *incarnation, .whole = {}};
  for (const json& slot : from["whole"]) {
    const std::optional<ckpt::WholeSlot> whole = slot_from_json(slot);
    if (!whole) return garbled("slot");
    out.whole.push_back(*whole);
  }
  return out;
}

json order_to_json(const HostOrder& order) {
  json peers = json::array();
  for (const PeerAddress& peer : order.peers) peers.push_back(peer_to_json(peer));
  const ckpt::RestoreChoice& choice = order.choice;
  return {{"incarnation", choice.incarnation},
          {"source", choice.source == ckpt::arena::Source::kMemory ? "memory"
                     : choice.source == ckpt::arena::Source::kDisk ? "disk"
                                                                   : "fresh"},
          {"step", choice.step},
          {"slot", choice.slot},
          {"slot_incarnation", choice.slot_incarnation},
          {"dir", choice.dir.string()},
          {"init", choice.match.has_value()},
          {"foreign", choice.foreign},
          {"starts", order.starts},
          {"promised", order.promised},
          {"kernel_level", order.kernel_level},
          {"epoch", order.epoch},
          {"peers", std::move(peers)}};
}

Result<HostOrder> order_from_json(const json& from) {
  if (!from.is_object()) return garbled("order");
  HostOrder out;
  for (const auto& [key, field] : {std::pair("incarnation", &out.choice.incarnation),
                                   std::pair("slot_incarnation", &out.choice.slot_incarnation)}) {
    const std::optional<uint64_t> found = from.contains(key) ? unsigned_of(from[key]) : std::nullopt;
    if (!found) return garbled(key);
    *field = *found;
  }
  const std::string source = text_of(from, "source");
  if (source != "memory" && source != "disk" && source != "fresh") return garbled("source");
  out.choice.source = source == "memory" ? ckpt::arena::Source::kMemory
                      : source == "disk" ? ckpt::arena::Source::kDisk
                                         : ckpt::arena::Source::kFresh;
  out.choice.step = number_of(from, "step", 0, -1);
  out.choice.slot = number_of(from, "slot", 0, -1);
  if (out.choice.step < 0 || out.choice.slot < 0 || out.choice.slot >= ckpt::arena::kMaxSlots) return garbled("step");
  out.choice.dir = text_of(from, "dir");
  if (flag_of(from, "init")) out.choice.match.emplace();
  out.choice.foreign = flag_of(from, "foreign");
  for (const json& start : json_field(from, "starts")) out.starts.push_back(unsigned_of(start).value_or(0));
  for (const json& step : json_field(from, "promised"))
    out.promised.push_back(json_integer(step, 0, kMost).value_or(0));
  out.epoch = number_of(from, "epoch", 0, 0);
  const json peers = json_field(from, "peers");
  for (const json& peer : peers.is_array() ? peers : json::array()) out.peers.push_back(peer_from_json(peer));
  out.kernel_level = number_of(from, "kernel_level", 0, -1);
  if (out.kernel_level < 0 || out.kernel_level >= std::ssize(kernels::kGemmIsas)) return garbled("kernel_level");
  return out;
}

namespace {

/// Two hexadecimal digits a byte: JSON holds text alone.
std::string digits_of(const std::string& bytes) {
  std::string out;
  out.reserve(2 * bytes.size());
  for (const char byte : bytes) out += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return out;
}

std::optional<std::string> bytes_of(const json& from, const char* key) {
  const std::string digits = text_of(from, key);
  if (digits.size() % 2 != 0) return std::nullopt;
  std::string out;
  for (size_t k = 0; k < digits.size(); k += 2) {
    unsigned value = 0;
    const auto [end, failed] = std::from_chars(digits.data() + k, digits.data() + k + 2, value, 16);
    if (failed != std::errc() || end != digits.data() + k + 2) return std::nullopt;
    out += static_cast<char>(value);
  }
  return out;
}

}  // namespace

json published_to_json(const Published& one) {
  return {{"incarnation", one.incarnation}, {"key", digits_of(one.key)}, {"value", digits_of(one.value)}};
}

std::optional<Published> published_from_json(const json& from) {
  if (!from.is_object() || !from.contains("incarnation")) return std::nullopt;
  const std::optional<uint64_t> incarnation = unsigned_of(from["incarnation"]);
  const std::optional<std::string> key = bytes_of(from, "key"), value = bytes_of(from, "value");
  if (!incarnation || !key || key->empty() || !value) return std::nullopt;
  return Published{*incarnation, *key, *value};
}

json failure_to_json(const agent::Failure& failure) {
  return {{"rank", failure.rank},
          {"exit_code", failure.status.exit_code},
          {"signal", failure.status.signal},
          {"hang", failure.hang},
          {"message", failure.message},
          {"class", agent::rule_of(failure.failure_class).name},
          {"pid", failure.pid},
          {"seen_ns", failure.seen_ns},
          {"last_lines", failure.last_lines}};
}

agent::Failure failure_from_json(const json& from) {
  const json body = from.is_object() ? from : json::object();
  agent::Failure out{.rank = number_of(body, "rank", 0, 0), .hang = flag_of(body, "hang")};
  out.status.exit_code = static_cast<int>(number_of(body, "exit_code", 0, 1)) & 0xff;
  out.status.signal = static_cast<int>(number_of(body, "signal", 0, 0)) & 0x7f;
  out.message = text_of(body, "message");
  out.pid = number_of(body, "pid", 0, 0);
  out.seen_ns = number_of(body, "seen_ns", 0, 0);
  out.failure_class = agent::class_named(text_of(body, "class")).value_or(agent::classify(out.status, out.pid, {}));
  const json lines = json_field(body, "last_lines");
  for (const json& line : lines.is_array() ? lines : json::array()) {
    if (line.is_string()) out.last_lines.push_back(line.get<std::string>());
  }
  return out;
}

namespace {

json operation_to_json(const comm::OperationView& view) {
  return {{"inside", view.inside},
          {"operations", view.operations},
          {"awaits", view.awaits},
          {"since_ms", view.since_ms},
          {"text", view.text}};
}

void operation_from_json(const json& from, comm::OperationView& view) {
  view.inside = flag_of(from, "inside");
  view.operations = number_of(from, "operations", 0, 0);
  view.awaits = number_of(from, "awaits", -1, -1);
  view.since_ms = number_of(from, "since_ms", 0, 0);
  view.text = text_of(from, "text");
}

}  // namespace

json states_to_json(const std::vector<agent::RankState>& ranks) {
  json out = json::array();
  for (const agent::RankState& rank : ranks) {
    json one = operation_to_json(rank.view);
    one["rank"] = rank.rank;
    one["state"] = std::string(1, rank.state);
    one["beside"] = operation_to_json(rank.view.beside);
    one["pid"] = rank.view.pid;
    one["closed"] = rank.view.closed;
    one["step"] = rank.view.step;
    one["phase"] = rank.view.phase;
    one["description"] = rank.view.description;
    out.push_back(std::move(one));
  }
  return out;
}

std::vector<agent::RankState> states_from_json(const json& from) {
  std::vector<agent::RankState> out;
  for (const json& one : from.is_array() ? from : json::array()) {
    if (!one.is_object() || number_of(one, "rank", 0, -1) < 0) continue;
    agent::RankState rank{.rank = number_of(one, "rank", 0, -1)};
    const std::string state = text_of(one, "state");
    rank.state = state.empty() ? '?' : state.front();
    operation_from_json(one, rank.view);
    operation_from_json(json_field(one, "beside"), rank.view.beside);
    rank.view.pid = number_of(one, "pid", 0, 0);
    rank.view.closed = flag_of(one, "closed");
    rank.view.step = number_of(one, "step", -1, -1);
    rank.view.phase = text_of(one, "phase");
    rank.view.description = text_of(one, "description");
    out.push_back(std::move(rank));
  }
  return out;
}

namespace {

/// The texts of a segment by their names.
template <typename Segment>
auto texts_of(Segment& segment) {
  return std::array{std::pair("recipe", &segment.recipe),
                    std::pair("past", &segment.past),
                    std::pair("init", &segment.init),
                    std::pair("run_name", &segment.run_name),
                    std::pair("run_id", &segment.run_id),
                    std::pair("lineage", &segment.lineage),
                    std::pair("recipe_json", &segment.recipe_json),
                    std::pair("recipe_hash", &segment.recipe_hash),
                    std::pair("trace", &segment.trace)};
}

}  // namespace

json segment_to_json(const HostSegment& segment) {
  json out{{"end_step", segment.end_step}, {"hosts", segment.hosts}, {"time_kernels", segment.time_kernels}};
  for (const auto& [key, text] : texts_of(segment)) out[key] = *text;
  return out;
}

Result<HostSegment> segment_from_json(const json& from) {
  if (!from.is_object()) return garbled("segment");
  HostSegment out;
  out.end_step = number_of(from, "end_step", 0, -1);
  if (out.end_step < 0) return garbled("end_step");
  out.hosts = number_of(from, "hosts", 1, -1);
  if (out.hosts < 0) return garbled("hosts");
  if (!json_field(from, "time_kernels").is_boolean()) return garbled("time_kernels");
  out.time_kernels = from["time_kernels"].get<bool>();
  for (const auto& [key, text] : texts_of(out)) {
    if (!from.contains(key) || !from[key].is_string()) return garbled(key);
    *text = from[key];
  }
  return out;
}

}  // namespace cairn::tools
