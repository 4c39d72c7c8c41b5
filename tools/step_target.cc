#include "tools/step_target.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "tools/ckpt_places.h"
#include "tools/run/agent/copies.h"

namespace cairn::tools {

namespace fs = std::filesystem;

Result<std::string> noted_run(ckpt::Place& place) {
  Result<std::string> owner = place_owner(place);
  if (!owner.ok() && owner.error().code == ErrorCode::kCorrupt) return std::string();
  return owner;
}

Result<std::string> run_of_target(ckpt::Place& target) {
  RT_TRY_SET(std::string noted, noted_run(target));
  if (!noted.empty() || ckpt::is_store_address(target.describe())) return noted;
  std::string around = run_around(target.describe());
  if (around.empty()) return around;
  RT_TRY_SET(const std::vector<ckpt::PlacedStep> there, target.list());
  return there.empty() ? std::string() : around;
}

Status check_run(const std::string& where, const std::string& owner, int64_t step,
                 const std::vector<std::string>& from) {
  if (owner.empty() || std::find(from.begin(), from.end(), owner) != from.end()) return {};
  return Error{
      ErrorCode::kInvalidInput,
      fmt::format("{} has the checkpoints of run {}, and step {} is of run {}: that run would go on with it, and "
                  "its retention count it; choose another folder",
                  where, owner, step, from.front())};
}

Status check_not_beside_checkpoints(const std::string& target) {
  std::error_code unknown;
  const fs::path below = fs::path(target) / "checkpoints";
  if (!fs::is_directory(below, unknown)) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: steps would be looked for in {}, and not there; name that or another folder", target,
                           below.string())};
}

}  // namespace cairn::tools
