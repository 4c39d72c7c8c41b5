#include "tests/simt/nvml_double.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "runtime/core/check.h"

namespace cairn::simt {
namespace {

using cuda::NvmlDevice;

NvmlDouble* current = nullptr;

/// Handles are numbers from 1 on.
template <typename Body>
int of(NvmlDevice device, const Body& body) {
  RT_CHECK(current != nullptr, "a call of an NVML that is gone");
  if (current->open <= 0) return kNvmlUninitialized;
  const size_t number = reinterpret_cast<uintptr_t>(device);
  if (number == 0 || number > current->devices().size()) return kNvmlInvalid;
  NvmlDeviceState& state = current->devices()[number - 1];
  return state.lost ? cuda::kNvmlLost : body(state);
}

int give_text(const std::string& text, char* to, unsigned bytes) {
  if (text.size() + 1 > bytes) return cuda::kNvmlTooSmall;
  std::memcpy(to, text.c_str(), text.size() + 1);
  return 0;
}

cuda::NvmlApi table() {
  cuda::NvmlApi out;
  out.open = [] { return current->refuses() ? kNvmlUnknown : (++current->open, 0); };
  out.close = [] { return current->open-- > 0 ? 0 : kNvmlUninitialized; };
  out.count = [](unsigned* count) {
    return current->open > 0 ? (*count = static_cast<unsigned>(current->devices().size()), 0) : kNvmlUninitialized;
  };
  out.device = [](unsigned index, NvmlDevice* device) {
    *device = reinterpret_cast<NvmlDevice>(uintptr_t{index} + 1);
    return of(*device, [](NvmlDeviceState&) { return 0; });
  };
  out.name = [](NvmlDevice device, char* to, unsigned bytes) {
    return of(device, [&](const NvmlDeviceState& state) { return give_text(state.name, to, bytes); });
  };
  out.uuid = [](NvmlDevice device, char* to, unsigned bytes) {
    return of(device, [&](const NvmlDeviceState& state) { return give_text(state.uuid, to, bytes); });
  };
  out.pci = [](NvmlDevice device, cuda::NvmlPci* pci) {
    return of(device, [&](const NvmlDeviceState& state) {
      *pci = {};
      pci->domain = state.domain;
      pci->bus = state.bus;
      std::snprintf(pci->text, sizeof(pci->text), "%08X:%02X:00.0", state.domain, state.bus);
      return 0;
    });
  };
  out.mig = [](NvmlDevice device, unsigned* now, unsigned* later) {
    return of(device, [&](const NvmlDeviceState& state) { return *now = *later = state.mig ? 1 : 0, 0; });
  };
  out.ecc_errors = [](NvmlDevice device, int kind, int since, unsigned long long* errors) {
    RT_CHECK(kind == cuda::kNvmlUncorrected && since == cuda::kNvmlSinceDriver, "other errors than those in use");
    return of(device, [&](const NvmlDeviceState& state) { return *errors = state.ecc_uncorrected, 0; });
  };
  out.remapped_rows = [](NvmlDevice device, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
                         unsigned* failed) {
    return of(device, [&](const NvmlDeviceState& state) {
      if (!state.remaps_rows) return kNvmlNotSupported;
      *corrected = 0;
      *uncorrected = state.remapping_pending || state.remapping_failed ? 1 : 0;
      *pending = state.remapping_pending ? 1 : 0;
      *failed = state.remapping_failed ? 1 : 0;
      return 0;
    });
  };
  out.retired_pages = [](NvmlDevice device, int cause, unsigned* count, unsigned long long* addresses) {
    return of(device, [&](const NvmlDeviceState& state) {
      if (state.remaps_rows) return kNvmlNotSupported;
      RT_CHECK(addresses == nullptr && *count == 0, "addresses of pages are asked for");
      *count = cause == cuda::kNvmlByDoubleBit ? state.pages_retired : 0;
      return *count > 0 ? cuda::kNvmlTooSmall : 0;
    });
  };
  out.retirement_pending = [](NvmlDevice device, int* waits) {
    return of(device, [&](const NvmlDeviceState& state) {
      return state.remaps_rows ? kNvmlNotSupported : (*waits = state.pages_retired > 0 ? 1 : 0, 0);
    });
  };
  out.slowed_by = [](NvmlDevice device, unsigned long long* why) {
    return of(device, [&](const NvmlDeviceState& state) { return *why = state.slowed_by, 0; });
  };
  out.link_state = [](NvmlDevice device, unsigned link, int* active) {
    return of(device, [&](const NvmlDeviceState& state) {
      if (link >= state.links) return kNvmlNotSupported;
      return *active = state.links_down.contains(link) ? 0 : 1, 0;
    });
  };
  out.processes = [](NvmlDevice device, unsigned* count, cuda::NvmlProcess* to) {
    return of(device, [&](const NvmlDeviceState& state) {
      const unsigned room = *count;
      *count = static_cast<unsigned>(state.processes.size());
      for (unsigned k = 0; k < std::min(room, *count); ++k) to[k] = {.pid = state.processes[k]};
      return *count > room ? cuda::kNvmlTooSmall : 0;
    });
  };
  out.error_string = [](int error) {
    return error == cuda::kNvmlLost ? "GPU is lost" : error == kNvmlUnknown ? "Unknown Error" : "refused by the double";
  };
  return out;
}

}  // namespace

NvmlDouble::NvmlDouble(std::vector<NvmlDeviceState> devices) : devices_(std::move(devices)), api_(table()) {
  RT_CHECK(current == nullptr, "two doubles of NVML at a time");
  current = this;
}

NvmlDouble::~NvmlDouble() { current = nullptr; }

bool is_planted(const std::string& faults, const std::string& fault, int device, int other) {
  std::string one = "," + fault + ":" + std::to_string(device);
  if (other >= 0) one += "-" + std::to_string(other);
  return ("," + faults + ",").find(one + ",") != std::string::npos;
}

std::vector<NvmlDeviceState> nvml_devices(int count, const std::string& faults) {
  std::vector<NvmlDeviceState> out;
  for (int k = 0; k < count; ++k) {
    const auto has = [&](const char* fault) { return is_planted(faults, fault, k); };
    NvmlDeviceState& state = out.emplace_back();
    state.uuid = "GPU-d" + std::to_string(k);
    state.bus = static_cast<unsigned>(k) + 1;
    state.lost = has("lost");
    state.mig = has("mig");
    state.ecc_uncorrected = has("ecc") ? 2 : 0;
    state.remapping_pending = has("remapping_pending");
    state.remapping_failed = has("remapping_failed");
    if (has("link_down")) state.links_down = {3, 4};
    if (has("hot")) state.slowed_by = cuda::kSlowedByHeat;
    if (has("busy")) state.processes = {4711};
  }
  return out;
}

}  // namespace cairn::simt
