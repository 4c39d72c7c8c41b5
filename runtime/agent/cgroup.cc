#include "runtime/agent/cgroup.h"

#include <charconv>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>

namespace cairn::agent {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kNoLimit = int64_t{1} << 60;  // version 1 writes the largest multiple of a page for none

std::optional<std::string> read_whole(const fs::path& path) {
  std::ifstream in(path);
  if (!in) return std::nullopt;
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

std::optional<int64_t> number_in(std::string_view text) {
  int64_t out = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), out);
  return failed == std::errc() ? std::optional(out) : std::nullopt;
}

/// Of a file of "name number" lines.
std::optional<int64_t> line_named(const std::string& text, std::string_view name) {
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.size() > name.size() + 1 && line.starts_with(name) && line[name.size()] == ' ')
      return number_in(std::string_view(line).substr(name.size() + 1));
  }
  return std::nullopt;
}

bool has_controller(std::string_view list, std::string_view name) {
  while (!list.empty()) {
    const size_t comma = list.find(',');
    if (list.substr(0, comma) == name) return true;
    if (comma == std::string_view::npos) break;
    list.remove_prefix(comma + 1);
  }
  return false;
}

}  // namespace

Cgroup::Cgroup(fs::path mount, const fs::path& self) : mount_(std::move(mount)) {
  std::ifstream in(self);
  for (std::string line; std::getline(in, line);) {  // "4:memory:/a/b", or "0::/a/b" for version 2
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    fs::path path = fs::path(line.substr(second + 1)).relative_path();
    if (controllers.empty()) path_2_ = path;
    if (has_controller(controllers, "memory")) memory_1_ = path;
    if (has_controller(controllers, "cpu")) cpu_1_ = path;
  }
}

std::optional<std::string> Cgroup::text_of(const char* file_2, const char* controller, const char* file_1) const {
  const fs::path& path_1 = std::string_view(controller) == "cpu" ? cpu_1_ : memory_1_;
  for (const fs::path& at : {mount_ / path_2_ / file_2, mount_ / file_2, mount_ / controller / path_1 / file_1,
                             mount_ / controller / file_1}) {
    if (std::optional<std::string> text = read_whole(at)) return text;
  }
  return std::nullopt;
}

std::optional<int64_t> Cgroup::oom_kills() const {
  const std::optional<std::string> text = text_of("memory.events", "memory", "memory.oom_control");
  return text ? line_named(*text, "oom_kill") : std::nullopt;
}

int64_t Cgroup::memory_peak_bytes() const {
  const std::optional<std::string> text = text_of("memory.peak", "memory", "memory.max_usage_in_bytes");
  return text ? number_in(*text).value_or(-1) : -1;
}

int64_t Cgroup::memory_limit_bytes() const {
  const std::optional<std::string> text = text_of("memory.max", "memory", "memory.limit_in_bytes");
  const int64_t limit = text ? number_in(*text).value_or(-1) : -1;  // "max": none
  return limit < kNoLimit ? limit : -1;
}

std::optional<int64_t> Cgroup::throttled_us() const {
  const std::optional<std::string> text = text_of("cpu.stat", "cpu", "cpu.stat");
  if (!text) return std::nullopt;
  if (const std::optional<int64_t> us = line_named(*text, "throttled_usec")) return us;
  const std::optional<int64_t> ns = line_named(*text, "throttled_time");
  return ns ? std::optional(*ns / 1000) : std::nullopt;
}

}  // namespace cairn::agent
