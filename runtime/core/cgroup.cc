#include "runtime/core/cgroup.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace cairn {
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

/// The number behind `name` in a file of "name number" lines.
std::optional<int64_t> line_named(const std::string& text, std::string_view name) {
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.size() > name.size() + 1 && line.starts_with(name) && line[name.size()] == ' ')
      return number_in(std::string_view(line).substr(name.size() + 1));
  }
  return std::nullopt;
}

/// The folder of `path` below `top`, and those above it up to `top`. Where a container sees only a part of the tree its
/// path may begin with names that the mount does not have: these are passed over.
std::vector<fs::path> upwards(const fs::path& top, fs::path path) {
  std::error_code failed;
  if (std::ranges::find(path, "..") != path.end()) path.clear();  // moved out of the mounted tree
  path = path.relative_path();
  while (!path.empty() && !fs::exists(top / path, failed)) {
    fs::path rest;
    for (auto name = std::next(path.begin()); name != path.end(); ++name) rest /= *name;
    path = rest;
  }
  std::vector<fs::path> out;
  for (; !path.empty(); path = path.parent_path()) out.push_back(top / path);
  out.push_back(top);
  return out;
}

/// `quota` and `period` in microseconds; "max" or -1 as quota: no limit.
std::optional<double> processors(const std::string& quota, const std::string& period) {
  const std::optional<int64_t> used = number_in(quota), of = number_in(period);
  if (!used || !of || *used <= 0 || *of <= 0) return std::nullopt;
  return static_cast<double>(*used) / static_cast<double>(*of);
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

std::optional<double> Cgroup::cpu_limit() const {
  std::optional<double> least;
  const auto take = [&](const std::optional<double>& limit) {
    if (limit && (!least || *limit < *least)) least = limit;
  };
  for (const fs::path& at : upwards(mount_, path_2_)) {  // cpu.max: "50000 100000", "max 100000"
    std::istringstream in(read_whole(at / "cpu.max").value_or(""));
    if (std::string quota, period; in >> quota >> period) take(processors(quota, period));
  }
  for (const char* controller : {"cpu", "cpu,cpuacct"}) {
    for (const fs::path& at : upwards(mount_ / controller, cpu_1_)) {
      const auto quota = read_whole(at / "cpu.cfs_quota_us"), period = read_whole(at / "cpu.cfs_period_us");
      if (quota && period) take(processors(*quota, *period));
    }
  }
  return least;
}

int64_t usable_cpus(const Cgroup& cgroup) {
  int64_t cpus = 0;
  for (int most = CPU_SETSIZE; most <= (1 << 20) && cpus == 0; most *= 2) {  // EINVAL: the machine has more
    cpu_set_t* const set = CPU_ALLOC(static_cast<size_t>(most));
    if (set == nullptr) break;
    if (::sched_getaffinity(0, CPU_ALLOC_SIZE(static_cast<size_t>(most)), set) == 0)
      cpus = CPU_COUNT_S(CPU_ALLOC_SIZE(static_cast<size_t>(most)), set);
    CPU_FREE(set);
  }
  if (cpus == 0) cpus = std::thread::hardware_concurrency();
  if (const std::optional<double> limit = cgroup.cpu_limit(); limit && *limit < static_cast<double>(cpus))
    cpus = static_cast<int64_t>(std::ceil(*limit));
  return std::max<int64_t>(1, cpus);
}

}  // namespace cairn
