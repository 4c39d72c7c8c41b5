#include "runtime/cuda/gpu_health.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <utility>

namespace cairn::cuda {
namespace {

constexpr const char* kTodo =
    "see what `nvidia-smi` says; a container needs NVIDIA_DRIVER_CAPABILITIES with `utility` in it";

GpuHealth read_gpu(const NvmlApi& api, unsigned index) {
  GpuHealth out{.index = index, .name = {}, .uuid = {}, .pci = {}, .lost = {}, .links_down = {}, .processes = {}};
  NvmlDevice device = nullptr;
  // What a device cannot say stays unknown. That it is gone, any call may be the first to find.
  const auto ok = [&](int error) {
    if ((error == kNvmlLost || error == kNvmlNeedsReset) && out.lost.empty()) out.lost = api.error_string(error);
    return error == kNvmlOk;
  };
  if (const int error = api.device(index, &device); !ok(error)) {
    if (out.lost.empty()) out.lost = api.error_string(error);
    return out;
  }
  std::array<char, 96> text{};
  if (ok(api.name(device, text.data(), text.size()))) out.name = text.data();
  text = {};
  if (ok(api.uuid(device, text.data(), text.size()))) out.uuid = text.data();
  if (NvmlPci pci{}; ok(api.pci(device, &pci)))
    out.pci = fmt::format("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device);
  if (unsigned now = 0, later = 0; ok(api.mig(device, &now, &later))) out.mig = now != 0;
  if (unsigned long long errors = 0; ok(api.ecc_errors(device, kNvmlUncorrected, kNvmlSinceDriver, &errors)))
    out.ecc_uncorrected = static_cast<int64_t>(errors);
  unsigned corrected = 0, uncorrected = 0, pending = 0, failed = 0;
  if (ok(api.remapped_rows(device, &corrected, &uncorrected, &pending, &failed))) {
    out.rows_remapped = int64_t{corrected} + uncorrected;
    out.remapping_pending = pending != 0 ? 1 : 0;
    out.remapping_failed = failed != 0 ? 1 : 0;
  }
  for (const int cause : {kNvmlBySingleBits, kNvmlByDoubleBit}) {
    unsigned pages = 0;
    const int error = api.retired_pages(device, cause, &pages, nullptr);
    if (error == kNvmlTooSmall || ok(error)) out.pages_retired = std::max<int64_t>(0, out.pages_retired) + pages;
  }
  if (int waits = 0; ok(api.retirement_pending(device, &waits))) out.retirement_pending = waits != 0 ? 1 : 0;
  out.links_active = 0;
  for (unsigned link = 0; link < kNvmlLinks; ++link) {
    int active = 0;
    if (!ok(api.link_state(device, link, &active))) continue;
    ++out.links;
    if (active != 0) {
      ++out.links_active;
    } else {
      out.links_down.push_back(link);
    }
  }
  if (unsigned long long why = 0; ok(api.slowed_by(device, &why))) out.slowed_by = why;
  std::array<NvmlProcess, 64> processes{};
  auto count = static_cast<unsigned>(processes.size());
  if (const int error = api.processes(device, &count, processes.data()); ok(error) || error == kNvmlTooSmall) {
    for (size_t k = 0; k < std::min<size_t>(count, processes.size()); ++k)
      out.processes.push_back(int64_t{processes[k].pid});
  }
  return out;
}

}  // namespace

Result<std::vector<GpuHealth>> read_gpus(const NvmlApi& api) {
  if (const int error = api.open(); error != kNvmlOk) {
    return Error{ErrorCode::kUnavailable, fmt::format("nvmlInit_v2: {}; {}", api.error_string(error), kTodo)};
  }
  std::vector<GpuHealth> out;
  unsigned count = 0;
  const int error = api.count(&count);
  for (unsigned k = 0; error == kNvmlOk && k < count; ++k) out.push_back(read_gpu(api, k));
  api.close();
  if (error != kNvmlOk) {
    return Error{ErrorCode::kUnavailable, fmt::format("nvmlDeviceGetCount_v2: {}; {}", api.error_string(error), kTodo)};
  }
  return out;
}

Result<std::vector<GpuHealth>> read_gpus() {
  static const Result<LoadedNvml> once = load_nvml(library_candidates(kNvmlFile));
  if (!once.ok()) return Error{once.error().code, fmt::format("{}; {}", once.error().message, kTodo)};
  return read_gpus(once.value().api);
}

std::string slowed_text(uint64_t slowed_by) {
  std::vector<std::string> out;
  if ((slowed_by & (kSlowedByHeat | kSlowedByHeatInHardware)) != 0) out.emplace_back("heat");
  if ((slowed_by & kSlowedByPowerBrake) != 0) out.emplace_back("power brake");
  if (out.empty() && (slowed_by & kSlowedByHardware) != 0) out.emplace_back("hardware slowdown");
  return fmt::format("{}", fmt::join(out, ", "));
}

std::string pci_text(std::string_view written) {
  if (const size_t dot = written.find('.'); dot != std::string_view::npos) written = written.substr(0, dot);
  std::array<unsigned, 3> numbers{};
  for (size_t k = 0; k < numbers.size(); ++k) {
    const size_t colon = written.find(':');
    const std::string_view part = written.substr(0, colon);
    if ((colon == std::string_view::npos) != (k + 1 == numbers.size())) return {};
    const auto [end, failed] = std::from_chars(part.data(), part.data() + part.size(), numbers[k], 16);
    if (failed != std::errc() || end != part.data() + part.size()) return {};
    if (colon != std::string_view::npos) written.remove_prefix(colon + 1);
  }
  return fmt::format("{:04x}:{:02x}:{:02x}.0", numbers[0], numbers[1], numbers[2]);
}

}  // namespace cairn::cuda
