#include "tools/serve/hub_path.h"

#include <optional>

namespace cairn::tools {
namespace {

/// Takes `prefix` off, if `path` has it.
bool take(std::string_view& path, std::string_view prefix) {
  if (!path.starts_with(prefix)) return false;
  path.remove_prefix(prefix.size());
  return true;
}

/// Takes all up to the next "/", which goes too; nothing where that is empty.
std::optional<std::string> take_part(std::string_view& path) {
  const std::string_view part = path.substr(0, path.find('/'));
  if (part.empty()) return std::nullopt;
  path.remove_prefix(part.size() < path.size() ? part.size() + 1 : part.size());
  return std::string(part);
}

std::optional<std::string> take_id(std::string_view& path) {
  const auto owner = take_part(path);
  const auto name = owner ? take_part(path) : std::nullopt;
  return name ? std::optional(*owner + "/" + *name) : std::nullopt;
}

}  // namespace

HubPath parse_hub_path(std::string_view path) {
  if (path == "/") return {.question = HubQuestion::kIndex};
  const bool api = take(path, "/api/models/");
  if (!api && !take(path, "/")) return {};
  const auto id = take_id(path);
  if (!id) return {};
  HubPath out{.id = *id, .revision = "main"};
  if (api && path.empty()) {
    out.question = HubQuestion::kModel;
    return out;
  }
  const auto verb = take_part(path);
  if (!verb) return {};
  if (api && *verb == "refs" && path.empty()) {
    out.question = HubQuestion::kRefs;
    return out;
  }
  const auto revision = take_part(path);
  if (!revision) return {};
  out.revision = *revision;
  out.file = path;
  if (api && *verb == "revision" && path.empty()) out.question = HubQuestion::kModel;
  if (api && *verb == "tree") out.question = HubQuestion::kTree;
  if (!api && *verb == "resolve" && !path.empty()) out.question = HubQuestion::kFile;
  return out;
}

}  // namespace cairn::tools
