#include "tools/run/folder/excluded.h"

#include <fmt/format.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/json/json.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

fs::path file_of(const fs::path& run) { return run / "cluster" / "excluded.json"; }

constexpr int64_t kSchema = 1;

}  // namespace

Result<std::vector<Exclusion>> read_excluded(const fs::path& run) {
  std::vector<Exclusion> out;
  const Result<std::string> text = read_text_file(file_of(run));
  if (!text.ok() && text.error().os_errno == ENOENT) return out;
  if (!text.ok()) return text.error();
  const auto wrong = [&](std::string_view what) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: {}. It is left as it is: mend it, or remove it to let the hosts in again that this "
                             "run has excluded",
                             file_of(run).string(), what)};
  };
  const json file = json_or_nothing(text.value());
  const json& hosts = json_field(file, "hosts");
  if (json_count(file, "schema", kSchema) != kSchema)
    return wrong(fmt::format("\"schema\" is not {}, the one that this build knows", kSchema));
  if (!hosts.is_array()) return wrong("no JSON object with a list of \"hosts\"");
  for (const json& host : hosts) {
    if (json_string(host, "name").empty() || !json_field(host, "boot_id").is_string())
      return wrong(fmt::format("entry {} of \"hosts\" has no \"name\" and \"boot_id\"", out.size() + 1));
    out.push_back(
        {.name = json_string(host, "name"),
         .boot_id = json_string(host, "boot_id"),
         .index = json_count(host, "index"),
         .reason = json_string(host, "reason"),
         .failure_class = agent::class_named(json_string(host, "class")).value_or(agent::FailureClass::kError),
         .time = json_number(host, "time"),
         .epoch = json_count(host, "epoch")});
  }
  return out;
}

Status add_excluded(const fs::path& run, Exclusion one) {
  RT_TRY_SET(std::vector<Exclusion> all, read_excluded(run));
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
  return write_text_file(file_of(run), json_text(json{{"schema", kSchema}, {"hosts", std::move(hosts)}}, 2) + "\n");
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
