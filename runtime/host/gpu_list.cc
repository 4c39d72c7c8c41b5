#include "runtime/host/gpu_list.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string_view>

namespace cairn::host {
namespace {

namespace fs = std::filesystem;

/// "Device Minor: \t 0" and its like, by what stands before the colon.
std::map<std::string, std::string> fields_of(const fs::path& page) {
  std::ifstream in(page);
  std::map<std::string, std::string> out;
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1), end = line.find_last_not_of(" \t\r");
    if (begin != std::string::npos) out[line.substr(0, colon)] = line.substr(begin, end - begin + 1);
  }
  return out;
}

int64_t number_or(std::string_view text, int64_t otherwise) {
  int64_t out = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), out);
  return failed == std::errc() && end == text.data() + text.size() ? out : otherwise;
}

/// The numbers of /dev/nvidiaN, and whether this process may have each.
std::map<int64_t, bool> nodes_in(const fs::path& dev) {
  constexpr std::string_view kPrefix = "nvidia";
  std::map<int64_t, bool> out;
  std::error_code failed;
  for (const fs::directory_entry& entry : fs::directory_iterator(dev, failed)) {
    const std::string name = entry.path().filename().string();
    const int64_t minor = name.starts_with(kPrefix) ? number_or(std::string_view(name).substr(kPrefix.size()), -1) : -1;
    if (minor >= 0) out[minor] = ::access(entry.path().c_str(), R_OK | W_OK) == 0 || errno != EPERM;
  }
  return out;
}

}  // namespace

fs::path nvidia_root() {
  const char* const root = std::getenv("CAIRN_NVIDIA_ROOT");
  return root != nullptr ? root : "/";
}

std::vector<Gpu> gpus_of_machine(const fs::path& root) {
  const std::map<int64_t, bool> nodes = nodes_in(root / "dev");
  std::vector<Gpu> out;
  bool pages = false;
  std::error_code failed;
  for (const fs::directory_entry& entry : fs::directory_iterator(root / "proc/driver/nvidia/gpus", failed)) {
    pages = true;
    std::map<std::string, std::string> fields = fields_of(entry.path() / "information");
    const Gpu gpu{.model = fields["Model"],
                  .uuid = fields["GPU UUID"],
                  .pci = entry.path().filename().string(),
                  .minor = number_or(fields["Device Minor"], -1)};
    const auto node = nodes.find(gpu.minor);
    const bool given = nodes.empty() || gpu.minor < 0 || (node != nodes.end() && node->second);
    if (given) out.push_back(gpu);
  }
  if (!pages) {
    for (const auto& [minor, given] : nodes) {
      if (given) out.push_back({.model = {}, .uuid = {}, .pci = {}, .minor = minor});
    }
  }
  std::ranges::sort(out, {}, [](const Gpu& gpu) { return std::pair(gpu.pci, gpu.minor); });
  return out;
}

std::string gpu_name(const Gpu& gpu) {
  if (!gpu.model.empty()) return gpu.model;
  return gpu.pci.empty() ? "/dev/nvidia" + std::to_string(gpu.minor) : gpu.pci;
}

}  // namespace cairn::host
