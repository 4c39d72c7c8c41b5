#include "tools/run/check/gpu_judge.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "runtime/json/json.h"

namespace cairn::tools {
namespace {

using cuda::GpuHealth;
using nlohmann::json;

using Hosts = std::map<int64_t, const HostGpus*>;

GpuFault fault(const GpuHealth& gpu, std::string measured, std::string found, std::string expected, std::string todo) {
  return {.index = gpu.index,
          .uuid = gpu.uuid,
          .pci = gpu.pci,
          .measured = std::move(measured),
          .found = std::move(found),
          .expected = std::move(expected),
          .todo = std::move(todo)};
}

std::string reset(const GpuHealth& gpu) {
  return fmt::format("reset it (nvidia-smi --gpu-reset -i {}) or boot the host", gpu.index);
}

/// The most frequent one, of equally many the highest; -1 where there is none.
int64_t most_common(const std::vector<int64_t>& values) {
  std::map<int64_t, int64_t> times;
  for (const int64_t value : values) ++times[value];
  int64_t best = -1, most = 0;
  for (const auto& [value, count] : times) {
    if (count < most) continue;
    most = count;
    best = value;
  }
  return best;
}

const GpuFigures* of_pci(const HostGpus& host, const std::string& pci) {
  const auto at = std::ranges::find_if(host.gpus, [&](const GpuFigures& one) { return one.health.pci == pci; });
  return at == host.gpus.end() ? nullptr : &*at;
}

struct Rate {
  double GpuFigures::*of;
  const char* what;
  double scale;
  const char* unit;
  double bar;
};
constexpr std::array kRates = {
    Rate{&GpuFigures::product_tflops, "matrix products", 1, "TFLOP/s", kSlowGpu},
    Rate{&GpuFigures::copy_gb_s, "copies in its memory", 1, "GB/s", kSlowGpu},
    Rate{&GpuFigures::to_device_gb_s, "copies from the host", 1, "GB/s", kSlowGpuCopy},
    Rate{&GpuFigures::to_host_gb_s, "copies to the host", 1, "GB/s", kSlowGpuCopy},
};

/// What a copy from one GPU of a host to another is to reach. By NVLink all pairs are alike; else what lies between two
/// GPUs is known of the same places of other hosts alone, of three at least.
double usual_copy(const Hosts& hosts, const GpuFigures& from, const GpuFigures& to) {
  const auto linked = [](const GpuFigures& gpu) { return gpu.health.links_active > 0; };
  std::vector<double> rates;
  for (const auto& [host, gpus] : hosts) {
    if (!linked(from) || !linked(to)) {
      const GpuFigures* const same = of_pci(*gpus, from.health.pci);
      const auto rate =
          same == nullptr ? decltype(from.to_gpus_gb_s)::const_iterator() : same->to_gpus_gb_s.find(to.health.pci);
      if (same != nullptr && same->health.name == from.health.name && rate != same->to_gpus_gb_s.end())
        rates.push_back(rate->second);
      continue;
    }
    for (const GpuFigures& gpu : gpus->gpus) {
      if (gpu.health.name != from.health.name || !linked(gpu)) continue;
      for (const auto& [pci, rate] : gpu.to_gpus_gb_s) rates.push_back(rate);
    }
  }
  return linked(from) && linked(to) ? upper_median(rates) : rates.size() < 3 ? 0 : upper_median(rates);
}

/// Pairs of GPUs whose copies are slow, told of the one that has more of them.
void add_slow_copies(const Hosts& hosts, const HostGpus& own, std::vector<GpuFault>& out) {
  struct Slow {
    const GpuFigures *from, *to;
    double rate, usual;
  };
  std::vector<Slow> slow;
  std::map<std::string, int64_t> times;
  for (const GpuFigures& from : own.gpus) {
    for (const auto& [pci, rate] : from.to_gpus_gb_s) {
      const GpuFigures* const to = of_pci(own, pci);
      if (to == nullptr || rate <= 0) continue;
      const double usual = usual_copy(hosts, from, *to);
      if (rate * kSlowGpuCopy >= usual) continue;
      slow.push_back({&from, to, rate, usual});
      ++times[from.health.pci];
      ++times[pci];
    }
  }
  std::map<std::string, std::pair<const GpuFigures*, std::vector<Slow>>> blamed;
  for (const Slow& one : slow) {
    const GpuFigures* const who = times[one.to->health.pci] > times[one.from->health.pci] ? one.to : one.from;
    blamed[who->health.pci].first = who;
    blamed[who->health.pci].second.push_back(one);
  }
  for (const auto& [pci, of] : blamed) {
    std::vector<std::string> found;
    for (const Slow& one : of.second) {
      if (found.size() == 2) break;
      found.push_back(one.from == of.first ? fmt::format("to {}: {:.3g} GB/s", gpu_text(one.to->health), one.rate)
                                           : fmt::format("from {}: {:.3g} GB/s", gpu_text(one.from->health), one.rate));
    }
    GpuFault made = fault(of.first->health, "copies between GPUs", fmt::format("copies {}", fmt::join(found, ", ")),
                          fmt::format("{:.3g} GB/s as other pairs", of.second.front().usual),
                          "look at `nvidia-smi topo -m` and `nvidia-smi nvlink -e`: a link may run at a lower rate");
    made.slow = true;
    out.push_back(std::move(made));
  }
}

double number(const json& from, const char* key) {
  const auto at = from.find(key);
  if (at == from.end() || !at->is_number()) return 0;
  const double out = at->get<double>();
  return std::isfinite(out) ? out : 0;
}
int64_t integer(const json& from, const char* key) {
  return json_integer(json_field(from, key), 0, INT64_MAX).value_or(-1);
}
std::string text(const json& from, const char* key) {
  const auto at = from.find(key);
  return at != from.end() && at->is_string() ? at->get<std::string>() : std::string();
}
bool flag(const json& from, const char* key) {
  const auto at = from.find(key);
  return at != from.end() && at->is_boolean() && at->get<bool>();
}
std::vector<int64_t> integers(const json& from, const char* key) {
  std::vector<int64_t> out;
  const json list = json_field(from, key);
  for (const json& one : list.is_array() ? list : json::array()) {
    if (const auto value = json_integer(one, 0, INT64_MAX)) out.push_back(*value);
  }
  return out;
}

json to_json(const GpuFigures& gpu) {
  const GpuHealth& health = gpu.health;
  json out{{"index", health.index},
           {"name", health.name},
           {"uuid", health.uuid},
           {"pci", health.pci},
           {"lost", health.lost},
           {"mig", health.mig},
           {"links", health.links},
           {"links_active", health.links_active},
           {"links_down", health.links_down},
           {"slowed_by", health.slowed_by},
           {"processes", health.processes},
           {"product_tflops", gpu.product_tflops},
           {"copy_gb_s", gpu.copy_gb_s},
           {"to_device_gb_s", gpu.to_device_gb_s},
           {"to_host_gb_s", gpu.to_host_gb_s},
           {"to_gpus_gb_s", gpu.to_gpus_gb_s},
           {"wrong", gpu.wrong},
           {"failed", gpu.failed},
           {"not_measured", gpu.not_measured}};
  const auto known = [&](const char* key, int64_t value) {
    if (value >= 0) out[key] = value;
  };
  known("ecc_uncorrected", health.ecc_uncorrected);
  known("rows_remapped", health.rows_remapped);
  known("remapping_pending", health.remapping_pending);
  known("remapping_failed", health.remapping_failed);
  known("pages_retired", health.pages_retired);
  known("retirement_pending", health.retirement_pending);
  json& xids = out["xids"] = json::array();
  for (const agent::Xid& xid : gpu.xids) {
    xids.push_back(
        {{"number", xid.number}, {"pci", xid.pci}, {"words", xid.words}, {"broken", xid.broken}, {"text", xid.text}});
  }
  return out;
}

GpuFigures figures_from_json(const json& from) {
  GpuFigures out;
  GpuHealth& health = out.health;
  health.index = integer(from, "index");
  health.name = text(from, "name");
  health.uuid = text(from, "uuid");
  health.pci = text(from, "pci");
  health.lost = text(from, "lost");
  health.mig = flag(from, "mig");
  health.ecc_uncorrected = integer(from, "ecc_uncorrected");
  health.rows_remapped = integer(from, "rows_remapped");
  health.remapping_pending = integer(from, "remapping_pending");
  health.remapping_failed = integer(from, "remapping_failed");
  health.pages_retired = integer(from, "pages_retired");
  health.retirement_pending = integer(from, "retirement_pending");
  health.links = std::max<int64_t>(0, integer(from, "links"));
  health.links_active = integer(from, "links_active");
  health.links_down = integers(from, "links_down");
  health.slowed_by = static_cast<uint64_t>(std::max<int64_t>(0, integer(from, "slowed_by")));
  health.processes = integers(from, "processes");
  out.product_tflops = number(from, "product_tflops");
  out.copy_gb_s = number(from, "copy_gb_s");
  out.to_device_gb_s = number(from, "to_device_gb_s");
  out.to_host_gb_s = number(from, "to_host_gb_s");
  const json to = json_field(from, "to_gpus_gb_s");
  if (to.is_object()) {
    for (const auto& one : to.items()) out.to_gpus_gb_s[one.key()] = number(to, one.key().c_str());
  }
  out.wrong = text(from, "wrong");
  out.failed = text(from, "failed");
  out.not_measured = text(from, "not_measured");
  const json xids = json_field(from, "xids");
  for (const json& xid : xids.is_array() ? xids : json::array()) {
    if (!xid.is_object()) continue;
    out.xids.push_back(
        {integer(xid, "number"), text(xid, "pci"), text(xid, "words"), flag(xid, "broken"), text(xid, "text")});
  }
  return out;
}

}  // namespace

double upper_median(std::vector<double> values) {
  std::erase_if(values, [](double value) { return value <= 0; });
  if (values.empty()) return 0;
  std::ranges::sort(values);
  return values[values.size() / 2];
}

std::string gpu_text(const GpuHealth& gpu) {
  return fmt::format("GPU {} ({}{}{})", gpu.index, gpu.uuid, gpu.uuid.empty() || gpu.pci.empty() ? "" : ", ", gpu.pci);
}

std::string health_text(const GpuFigures& gpu) {
  const GpuHealth& health = gpu.health;
  std::vector<std::string> out{fmt::format("{} {}", health.uuid, health.pci)};
  const auto number = [](int64_t value) { return value < 0 ? std::string("not known") : std::to_string(value); };
  out.push_back("uncorrected memory errors: " + number(health.ecc_uncorrected));
  if (health.rows_remapped >= 0) out.push_back("rows remapped: " + number(health.rows_remapped));
  if (health.pages_retired >= 0) out.push_back("pages retired: " + number(health.pages_retired));
  if (health.links > 0) out.push_back(fmt::format("NVLinks: {} of {}", health.links_active, health.links));
  return fmt::format("{}", fmt::join(out, ", "));
}

std::string fault_text(const GpuFault& fault) {
  const std::string who = fault.index < 0 ? "a GPU"
                                          : gpu_text({.index = fault.index,
                                                      .name = {},
                                                      .uuid = fault.uuid,
                                                      .pci = fault.pci,
                                                      .lost = {},
                                                      .links_down = {},
                                                      .processes = {}});
  return fmt::format("{} is {}: {}, expected {}; to do: {}", who,
                     fault.index < 0 ? "missing"
                     : fault.slow    ? "slow"
                                     : "broken",
                     fault.found, fault.expected, fault.todo);
}

std::vector<GpuFault> faults_of(const GpuFigures& gpu) {
  const GpuHealth& health = gpu.health;
  std::vector<GpuFault> out;
  const auto add = [&](std::string measured, std::string found, std::string expected, std::string todo) {
    out.push_back(fault(health, std::move(measured), std::move(found), std::move(expected), std::move(todo)));
  };
  if (!health.lost.empty()) add("lost", "NVML: " + health.lost, "a GPU that answers", reset(health));
  if (!gpu.wrong.empty()) {
    add("wrong", gpu.wrong, "the same bits as everywhere",
        "take it out of use and have it looked at (dcgmi diag -r 3): what it has trained may be wrong");
  }
  if (!gpu.failed.empty())
    add("failed", gpu.failed, "a GPU that computes", "see the kernel's log (dmesg), then " + reset(health));
  if (health.ecc_uncorrected > 0) {
    add("ecc", fmt::format("{} uncorrected memory errors since the driver was loaded", health.ecc_uncorrected), "none",
        reset(health) + "; replace it if they come again");
  }
  if (health.remapping_failed > 0) {
    add("remapping", "a row of its memory could not be remapped", "rows to spare", "replace it");
  }
  for (const agent::Xid& xid : gpu.xids) {
    if (!xid.broken) continue;
    add(fmt::format("xid {}", xid.number),
        fmt::format("Xid {} in the kernel's log, {}: {}", xid.number, xid.words, xid.text), "none",
        fmt::format("{}; the line counts until the driver is loaded anew, {:.0f} hours at most", reset(health),
                    agent::kXidCountsS / 3600));
  }
  return out;
}

std::vector<GpuFault> faults_beside(const Hosts& hosts, int64_t host) {
  std::vector<GpuFault> out;
  const HostGpus& own = *hosts.at(host);
  for (const GpuFigures& gpu : own.gpus) {
    if (!gpu.health.lost.empty() || gpu.health.links_active < 0) continue;
    std::vector<int64_t> active;
    for (const auto& [index, other] : hosts) {
      for (const GpuFigures& one : other->gpus) {
        if (one.health.name == gpu.health.name && one.health.links_active >= 0 && one.health.lost.empty())
          active.push_back(one.health.links_active);
      }
    }
    const int64_t usual = most_common(active);
    if (gpu.health.links_active >= usual) continue;
    std::vector<int64_t> down = gpu.health.links_down;
    out.push_back(
        fault(gpu.health, "links",
              fmt::format("{} NVLinks are active{}", gpu.health.links_active,
                          down.empty() ? std::string() : fmt::format(", down: {}", fmt::join(down, ", "))),
              fmt::format("{}, as the others have", usual),
              fmt::format("{}; see `nvidia-smi nvlink -s -i {}`, and Fabric Manager's log where there are switches",
                          reset(gpu.health), gpu.health.index)));
  }
  std::vector<int64_t> counts;
  for (const auto& [index, other] : hosts) counts.push_back(std::ssize(other->gpus));
  const int64_t usual = most_common(counts);
  if (std::ssize(own.gpus) < usual) {
    // Hosts of a kind have their GPUs at the same addresses.
    std::map<std::string, int64_t> places;
    for (const auto& [index, other] : hosts) {
      for (const GpuFigures& gpu : other->gpus) ++places[gpu.health.pci];
    }
    std::vector<std::string> missing;
    for (const auto& [pci, times] : places) {
      if (!pci.empty() && 2 * times >= std::ssize(hosts) && of_pci(own, pci) == nullptr) missing.push_back(pci);
    }
    GpuFault made{
        .index = -1,
        .uuid = {},
        .pci = missing.size() == 1 ? missing.front() : std::string(),
        .measured = "missing",
        .found = fmt::format("{} GPUs{}", own.gpus.size(),
                             missing.empty() ? std::string() : fmt::format(", none at {}", fmt::join(missing, ", "))),
        .expected = fmt::format("{}, as the other hosts have", usual),
        .todo = "see `lspci -d 10de:` and the kernel's log, and what the scheduler gives the job; boot the host"};
    out.push_back(std::move(made));
  }
  return out;
}

std::vector<GpuFault> slow_beside(const Hosts& hosts, int64_t host) {
  std::vector<GpuFault> out;
  const HostGpus& own = *hosts.at(host);
  for (const GpuFigures& gpu : own.gpus) {
    for (const Rate& rate : kRates) {
      std::vector<double> all;
      for (const auto& [index, other] : hosts) {
        for (const GpuFigures& one : other->gpus) {
          if (one.health.name == gpu.health.name) all.push_back(one.*rate.of);
        }
      }
      const double mine = gpu.*rate.of, usual = upper_median(all);
      if (mine <= 0 || mine * rate.bar >= usual) continue;
      const std::string held = cuda::slowed_text(gpu.health.slowed_by);
      GpuFault made =
          fault(gpu.health, rate.what,
                fmt::format("{}: {:.3g} {}{}", rate.what, mine, rate.unit,
                            held.empty() ? held : fmt::format(" (its clocks are held back by {})", held)),
                fmt::format("{:.3g}, the median of all {}", usual, gpu.health.name.empty() ? "GPUs" : gpu.health.name),
                "see `nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,TEMPERATURE` and its PCIe link; "
                "cool it or reset it");
      made.slow = true;
      out.push_back(std::move(made));
    }
  }
  add_slow_copies(hosts, own, out);
  return out;
}

std::vector<std::string> notes_of(const GpuFigures& gpu) {
  const GpuHealth& health = gpu.health;
  std::vector<std::string> out;
  const auto add = [&](std::string what) { out.push_back(std::move(what)); };
  if (!gpu.not_measured.empty()) add("not measured: " + gpu.not_measured);
  if (health.remapping_pending > 0) add("a row of its memory is to be remapped when it is reset: " + reset(health));
  if (health.retirement_pending > 0) add("pages of its memory are to be retired when the driver is loaded anew");
  if (const std::string held = cuda::slowed_text(health.slowed_by); !held.empty())
    add("its clocks are held back by " + held);
  for (const agent::Xid& xid : gpu.xids) {
    if (!xid.broken) add(fmt::format("Xid {} in the kernel's log, {}", xid.number, xid.words));
  }
  return out;
}

Result<HostGpus> look_at_gpus() {
  RT_TRY_SET(const std::vector<GpuHealth> found, cuda::read_gpus());
  HostGpus out;
  for (const GpuHealth& one : found) out.gpus.emplace_back().health = one;
  const Result<std::vector<agent::Xid>> xids = agent::xids_in(agent::kernel_log_path());
  if (!xids.ok()) {
    out.notes.push_back(
        fmt::format("Xids are not known, {}; who may read the log can name a copy of it in CAIRN_KERNEL_LOG",
                    xids.error().message));
    return out;
  }
  for (const agent::Xid& xid : xids.value()) {
    const std::string pci = cuda::pci_text(xid.pci);
    const auto at = std::ranges::find_if(out.gpus, [&](const GpuFigures& gpu) { return gpu.health.pci == pci; });
    if (at != out.gpus.end()) {
      at->xids.push_back(xid);
    } else {  // of none that this process may use, or of one that is gone
      out.notes.push_back(fmt::format("Xid {} of a GPU that is not here: {}", xid.number, xid.text));
    }
  }
  return out;
}

std::string gpus_text(const HostGpus& host) {
  if (host.gpus.empty()) return "no GPU";
  std::set<std::string> names;
  for (const GpuFigures& gpu : host.gpus) names.insert(gpu.health.name);
  std::string out = fmt::format("{} GPUs ({})", host.gpus.size(), fmt::join(names, ", "));
  const auto add = [&](const char* what, const char* unit, const std::vector<double>& all) {
    std::vector<double> values = all;
    std::erase_if(values, [](double value) { return value <= 0; });
    if (values.empty()) return;
    const auto [low, high] = std::ranges::minmax(values);
    out += fmt::format("   {} {:.3g} to {:.3g} {}", what, low, high, unit);
  };
  for (const Rate& rate : kRates) {
    std::vector<double> all;
    for (const GpuFigures& gpu : host.gpus) all.push_back(gpu.*rate.of);
    add(rate.what, rate.unit, all);
  }
  std::vector<double> pairs;
  for (const GpuFigures& gpu : host.gpus) {
    for (const auto& [pci, rate] : gpu.to_gpus_gb_s) pairs.push_back(rate);
  }
  add("copies between GPUs", "GB/s", pairs);
  return out;
}

json to_json(const HostGpus& host) {
  json gpus = json::array();
  for (const GpuFigures& gpu : host.gpus) gpus.push_back(to_json(gpu));
  return {{"gpus", std::move(gpus)}, {"notes", host.notes}};
}

HostGpus host_gpus_from_json(const json& from) {
  HostGpus out;
  if (!from.is_object()) return out;
  const json gpus = json_field(from, "gpus"), notes = json_field(from, "notes");
  for (const json& one : gpus.is_array() ? gpus : json::array()) {
    if (one.is_object()) out.gpus.push_back(figures_from_json(one));
  }
  for (const json& one : notes.is_array() ? notes : json::array()) {
    if (one.is_string()) out.notes.push_back(one.get<std::string>());
  }
  return out;
}

}  // namespace cairn::tools
