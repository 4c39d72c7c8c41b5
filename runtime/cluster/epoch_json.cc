#include "runtime/cluster/epoch_json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/cluster/node_list.h"
#include "runtime/json/json.h"

namespace cairn::cluster {

using nlohmann::json;

namespace {

constexpr int64_t kMostPort = 65535;

}  // namespace

json encode_epoch(const Epoch& epoch) {
  json members = json::array();
  for (const Member& m : epoch.members) {
    members.push_back({{"name", m.name}, {"address", m.address}, {"boot_id", m.boot_id}, {"index", m.index}});
  }
  return {{"epoch", epoch.number},
          {"leader", epoch.leader},
          {"port", epoch.port},
          {"incarnation", epoch.incarnation},
          {"members", members},
          {"ranks_per_host", epoch.ranks_per_host},
          {"recipe_hash", epoch.recipe_hash},
          {"build", epoch.build},
          {"reason", epoch.reason}};
}

Result<Epoch> decode_epoch(const json& from) {
  const auto wrong = [](std::string_view key) {
    return Error{ErrorCode::kCorrupt, fmt::format("`{}` is missing or of another kind", key)};
  };
  if (!from.is_object()) return wrong("epoch");
  Epoch out;
  for (const auto& [key, field] :
       {std::pair("incarnation", &out.incarnation), std::pair("recipe_hash", &out.recipe_hash),
        std::pair("build", &out.build), std::pair("reason", &out.reason)}) {
    if (!from.contains(key) || !from[key].is_string()) return wrong(key);
    *field = from[key];
  }
  if (!from.contains("members") || !from["members"].is_array() || from["members"].empty()) return wrong("members");
  for (const json& member : from["members"]) {
    Member& to = out.members.emplace_back();
    for (const auto& [key, field] :
         {std::pair("name", &to.name), std::pair("address", &to.address), std::pair("boot_id", &to.boot_id)}) {
      if (!member.is_object() || !member.contains(key) || !member[key].is_string()) return wrong(key);
      *field = member[key];
    }
    // Records of before spares could take a place have none.
    to.index = std::ssize(out.members) - 1;
    if (!member.contains("index")) continue;
    const std::optional<int64_t> index = json_integer(member["index"], 0, kMostHosts);
    if (!index) return wrong("index");
    to.index = *index;
  }
  const auto integer = [&](const char* key, int64_t least, int64_t most) -> Result<int64_t> {
    const std::optional<int64_t> found = from.contains(key) ? json_integer(from[key], least, most) : std::nullopt;
    if (!found) return wrong(key);
    return *found;
  };
  RT_TRY_SET(out.number, integer("epoch", 1, kMostEpoch));
  RT_TRY_SET(out.leader, integer("leader", 0, std::ssize(out.members) - 1));
  RT_TRY_SET(out.port, integer("port", 1, kMostPort));
  RT_TRY_SET(out.ranks_per_host, integer("ranks_per_host", 1, kMostHosts));
  return out;
}

}  // namespace cairn::cluster
