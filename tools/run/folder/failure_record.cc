#include "tools/run/folder/failure_record.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

#include "runtime/core/clock.h"
#include "runtime/core/unique_handle.h"
#include "runtime/json/json.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

constexpr size_t kTerminationBytes = 4096;  // Kubernetes reads no more

const char* environment(const char* name) {
  const char* const text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : nullptr;
}

/// For people who read it in `kubectl describe`: "device on h2, rank 5: rank 5 (pid 9) ...".
std::string short_text(const json& record) {
  std::string out = json_string(record, "message");
  if (record.contains("class") && record.contains("host")) {
    out = fmt::format("{} on {}, rank {}: {}", json_string(record, "class"), json_string(record, "host"),
                      json_count(record, "rank"), out);
  }
  if (out.size() <= kTerminationBytes) return out;
  size_t end = kTerminationBytes;
  while (end > 0 && (static_cast<unsigned char>(out[end]) & 0xc0u) == 0x80u) --end;  // no half of a character
  return out.substr(0, end);
}

}  // namespace

json failure_record(const agent::Failure& failure, double first_seen) {
  const agent::ClassRule& rule = agent::rule_of(failure.failure_class);
  json others = json::array();
  for (const agent::Failure& other : failure.others) {
    others.push_back({{"host", other.host_name},
                      {"rank", other.rank},
                      {"class", agent::rule_of(other.failure_class).name},
                      {"after_ms", static_cast<double>(other.seen_ns - failure.seen_ns) / 1e6}});
  }
  return {{"host", failure.host_name},
          {"rank", failure.rank},
          {"class", rule.name},
          {"fault", agent::fault_name(rule.fault)},
          {"exit", failure.exit_code()},
          {"signal", agent::signal_of(failure.status)},
          {"hang", failure.hang},
          {"message", failure.message},
          {"last_lines", failure.last_lines},
          {"first_seen", first_seen},
          {"generation", failure.generation},
          {"others", std::move(others)}};
}

json earlier_failures(const json& record) {
  json out = json_field(record, "earlier");
  if (!out.is_array()) out = json::array();
  if (!record.is_object()) return out;
  json last = json::object();
  for (const char* field : {"host", "rank", "class", "message", "first_seen", "step"})
    last[field] = json_field(record, field);
  out.push_back(std::move(last));
  if (out.size() > kMostEarlier) out.erase(out.begin(), out.end() - kMostEarlier);
  return out;
}

Status write_failure(const std::filesystem::path& run, json record) {
  const Result<std::string> before = read_text_file(run / "failure.json");
  record["earlier"] = earlier_failures(before.ok() ? json_or_nothing(before.value()) : json());
  return write_unsynced_text_file(run / "failure.json", json_text(record, 2) + "\n");
}

void tell_launcher(const json& record, int exit_code) {
  if (const char* const path = environment("TORCHELASTIC_ERROR_FILE")) {
    // As torch.distributed.elastic's error handler writes it; an agent of it names the first by timestamp.
    const auto now = static_cast<int64_t>(SystemClock().unix_s());
    const auto seen = static_cast<int64_t>(json_number(record, "first_seen", static_cast<double>(now)));
    json extra{{"py_callstack", ""}, {"timestamp", std::to_string(seen)}, {"cairn", record}};
    const json file{
        {"message", {{"message", short_text(record)}, {"errorCode", exit_code}, {"extraInfo", std::move(extra)}}}};
    ignore(write_unsynced_text_file(path, json_text(file) + "\n"), "for whoever started this alone");
  }
  const char* const named = environment("CAIRN_TERMINATION_LOG");
  const Fd log(::open(named != nullptr ? named : "/dev/termination-log", O_WRONLY | O_TRUNC | O_CLOEXEC | O_NONBLOCK));
  if (!log) return;
  const std::string text = short_text(record);
  [[maybe_unused]] const ssize_t n = ::write(log.get(), text.data(), text.size());
}

}  // namespace cairn::tools
