#include "tools/run/excluded.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/json/json.h"
#include "tools/run/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

fs::path file_of(const fs::path& run) { return run / "cluster" / "excluded.json"; }

std::string text_of(const json& from, const char* key) {
  const auto at = from.find(key);
  return at != from.end() && at->is_string() ? at->get<std::string>() : std::string();
}

}  // namespace

std::vector<Exclusion> read_excluded(const fs::path& run) {
  std::vector<Exclusion> out;
  const Result<std::string> text = read_text_file(file_of(run));
  const json file = text.ok() ? json_or_nothing(text.value()) : json();
  const json hosts = json_field(file, "hosts");
  for (const json& host : hosts.is_array() ? hosts : json::array()) {
    if (!host.is_object() || text_of(host, "name").empty()) continue;
    const json time = json_field(host, "time");
    out.push_back({.name = text_of(host, "name"),
                   .boot_id = text_of(host, "boot_id"),
                   .index = json_integer(json_field(host, "index"), 0, INT64_MAX).value_or(0),
                   .reason = text_of(host, "reason"),
                   .failure_class = agent::class_named(text_of(host, "class")).value_or(agent::FailureClass::kError),
                   .time = time.is_number() ? time.get<double>() : 0,
                   .epoch = json_integer(json_field(host, "epoch"), 0, INT64_MAX).value_or(0)});
  }
  return out;
}

Status add_excluded(const fs::path& run, Exclusion one) {
  std::vector<Exclusion> all = read_excluded(run);
  std::erase_if(all, [&](const Exclusion& other) { return other.name == one.name; });
  all.push_back(std::move(one));
  json hosts = json::array();
  for (const Exclusion& host : all) {
    hosts.push_back({{"name", host.name},
                     {"boot_id", host.boot_id},
                     {"index", host.index},
                     {"reason", host.reason},
                     {"class", agent::rule_of(host.failure_class).name},
                     {"time", host.time},
                     {"epoch", host.epoch}});
  }
  return write_text_file(file_of(run), json_text(json{{"hosts", std::move(hosts)}}, 2) + "\n");
}

std::string why_excluded(const std::vector<Exclusion>& all, const std::string& name, const std::string& boot_id) {
  for (const Exclusion& one : all) {
    if (one.name != name || one.boot_id != boot_id) continue;
    return fmt::format("this run has excluded {}: {}; boot it, or remove it from RUN/cluster/excluded.json", name,
                       one.reason);
  }
  return "";
}

}  // namespace cairn::tools
