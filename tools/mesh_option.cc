#include "tools/mesh_option.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

namespace cairn::tools {
namespace {

constexpr int64_t kMaxExtent = 65536;            // of an axis, as in recipes: nothing reads a checkpoint of another
constexpr int64_t kMaxRanks = int64_t{1} << 24;  // of all: far beyond any machine, far from overflow

}  // namespace

Result<MeshConfig> parse_mesh(std::string_view text) {
  const auto refuse = [&](std::string_view why) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--mesh {}: {}; expected for example tp=2,pp=1,dp=4 (an axis not named is 1)", text, why)};
  };
  static constexpr std::pair<std::string_view, int64_t MeshConfig::*> kAxes[] = {{"tp", &MeshConfig::tp},
                                                                                 {"pp", &MeshConfig::pp},
                                                                                 {"dp", &MeshConfig::dp},
                                                                                 {"ep", &MeshConfig::ep},
                                                                                 {"cp", &MeshConfig::cp}};
  MeshConfig out{.dp = 1};
  std::set<std::string_view> seen;
  for (std::string_view rest = text; !rest.empty() || rest.data() == text.data();) {
    const size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos) return refuse(fmt::format("\"{}\" is no axis=size", part));
    const std::string_view axis = part.substr(0, equals), number = part.substr(equals + 1);
    const auto* const known =
        std::find_if(std::begin(kAxes), std::end(kAxes), [&](const auto& a) { return a.first == axis; });
    if (known == std::end(kAxes)) return refuse(fmt::format("there is no axis \"{}\"", axis));
    if (!seen.insert(axis).second) return refuse(fmt::format("{} is given twice", axis));
    int64_t& size = out.*known->second;
    const auto [end, failed] = std::from_chars(number.data(), number.data() + number.size(), size);
    if (failed != std::errc() || end != number.data() + number.size() || size < 1 || size > kMaxExtent)
      return refuse(fmt::format("{} = \"{}\" is no size from 1 to {}", axis, number, kMaxExtent));
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
    if (rest.empty()) return refuse("it ends with a comma");
  }
  int64_t ranks = 1;
  for (const int64_t extent : {out.tp, out.pp, out.dp, out.cp}) {
    ranks *= extent;
    if (ranks > kMaxRanks) return refuse(fmt::format("it asks for more than {} ranks", kMaxRanks));
  }
  return out;
}

}  // namespace cairn::tools
