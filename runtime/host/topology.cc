#include "runtime/host/topology.h"

#include <fmt/format.h>
#include <hwloc.h>
#include <sched.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace cairn::host {
namespace {

/// Freed with the bitmap's own function.
struct FreesBitmap {
  void operator()(hwloc_bitmap_s* set) const { hwloc_bitmap_free(set); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, FreesBitmap>;

std::vector<int64_t> numbers_of(hwloc_const_bitmap_t set) {
  std::vector<int64_t> out;
  for (int k = hwloc_bitmap_first(set); k >= 0; k = hwloc_bitmap_next(set, k)) out.push_back(k);
  return out;
}

/// The devices of the operating system below a PCI device.
void take_names(hwloc_obj_t below, Nic& nic) {
  for (hwloc_obj_t child = below->io_first_child; child != nullptr; child = child->next_sibling) {
    if (child->type == HWLOC_OBJ_OS_DEVICE && child->name != nullptr) {
      if (child->attr->osdev.type == HWLOC_OBJ_OSDEV_NETWORK && nic.interface.empty()) nic.interface = child->name;
      if (child->attr->osdev.type == HWLOC_OBJ_OSDEV_OPENFABRICS && nic.hca.empty()) nic.hca = child->name;
    }
    take_names(child, nic);
  }
}

std::string pci_text(hwloc_obj_t pci) {
  const auto& at = pci->attr->pcidev;
  return fmt::format("{:04x}:{:02x}:{:02x}.{:x}", at.domain, at.bus, at.dev, at.func);
}

}  // namespace

class Topology::Impl {
 public:
  ~Impl() {
    if (made_) hwloc_topology_destroy(tree_);
  }

  Status load(const std::string* xml) {
    if (hwloc_topology_init(&tree_) != 0) return Error{ErrorCode::kUnavailable, "hwloc_topology_init failed"};
    made_ = true;
    // Parts that may not be used stay in the tree: a GPU may hang there.
    hwloc_topology_set_flags(tree_, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
    hwloc_topology_set_io_types_filter(tree_, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
    if (xml != nullptr && hwloc_topology_set_xmlbuffer(tree_, xml->c_str(), static_cast<int>(xml->size()) + 1) != 0)
      return Error{ErrorCode::kInvalidInput, "this is no XML of hwloc"};
    if (hwloc_topology_load(tree_) != 0) {
      return Error{xml == nullptr ? ErrorCode::kUnavailable : ErrorCode::kInvalidInput,
                   "hwloc cannot read the topology of the host"};
    }
    allowed_.reset(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(tree_)));
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (xml == nullptr && ::sched_getaffinity(0, sizeof(mask), &mask) == 0) {  // a host with more cpus says EINVAL
      for (const int64_t cpu : numbers_of(allowed_.get())) {
        if (!CPU_ISSET(static_cast<size_t>(cpu), &mask)) hwloc_bitmap_clr(allowed_.get(), static_cast<unsigned>(cpu));
      }
    }
    return {};
  }

  std::vector<Core> cores_in(hwloc_const_bitmap_t set) const {
    std::vector<Core> out;
    const Bitmap usable(hwloc_bitmap_alloc());
    hwloc_bitmap_and(usable.get(), set, allowed_.get());
    const Bitmap of_core(hwloc_bitmap_alloc()), rest(hwloc_bitmap_dup(usable.get()));
    for (hwloc_obj_t core = nullptr; (core = hwloc_get_next_obj_by_type(tree_, HWLOC_OBJ_CORE, core)) != nullptr;) {
      hwloc_bitmap_and(of_core.get(), core->cpuset, usable.get());
      if (hwloc_bitmap_iszero(of_core.get())) continue;
      out.push_back(numbers_of(of_core.get()));
      hwloc_bitmap_andnot(rest.get(), rest.get(), core->cpuset);
    }
    for (const int64_t cpu : numbers_of(rest.get())) out.push_back({cpu});  // some virtual machines show no cores
    std::ranges::sort(out);
    return out;
  }

  std::vector<Core> cores() const { return cores_in(hwloc_topology_get_complete_cpuset(tree_)); }

  hwloc_obj_t device(const std::string& pci) const {
    return pci.empty() ? nullptr : hwloc_get_pcidev_by_busidstring(tree_, pci.c_str());
  }

  Near near(const std::string& pci) const {
    Near out;
    if (const hwloc_obj_t found = device(pci); found != nullptr) {
      const hwloc_obj_t at = hwloc_get_non_io_ancestor_obj(tree_, found);
      out.known = true;
      out.cores = cores_in(at->cpuset);
      const std::vector<int64_t> nodes = numbers_of(at->nodeset);
      if (nodes.size() == 1 && !out.cores.empty()) out.numa = nodes.front();
    }
    if (out.cores.empty()) out.cores = cores();
    return out;
  }

  std::vector<Nic> nics_near(const std::string& pci) const {
    const hwloc_obj_t gpu = device(pci);
    std::map<int64_t, std::vector<Nic>> by_steps;
    for (hwloc_obj_t at = nullptr; gpu != nullptr && (at = hwloc_get_next_pcidev(tree_, at)) != nullptr;) {
      Nic nic{.interface = {}, .hca = {}, .pci = pci_text(at)};
      take_names(at, nic);
      if (!nic.interface.empty() || !nic.hca.empty()) by_steps[steps_between(gpu, at)].push_back(nic);
    }
    if (by_steps.empty()) return {};
    std::ranges::sort(by_steps.begin()->second, {}, &Nic::pci);
    return by_steps.begin()->second;
  }

 private:
  static int64_t steps_between(hwloc_obj_t a, hwloc_obj_t b) {
    std::map<hwloc_obj_t, int64_t> above;
    int64_t steps = 0;
    for (hwloc_obj_t at = a; at != nullptr; at = at->parent) above[at] = steps++;
    steps = 0;
    for (hwloc_obj_t at = b; at != nullptr; at = at->parent, ++steps) {
      if (const auto found = above.find(at); found != above.end()) return found->second + steps;
    }
    return INT64_MAX;
  }

  hwloc_topology_t tree_ = nullptr;
  bool made_ = false;
  Bitmap allowed_;
};

Topology::Topology(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Topology::~Topology() = default;
Topology::Topology(Topology&&) noexcept = default;
Topology& Topology::operator=(Topology&&) noexcept = default;

Result<Topology> Topology::of_host() {
  auto impl = std::make_unique<Impl>();
  RT_TRY(impl->load(nullptr));
  return Topology(std::move(impl));
}

Result<Topology> Topology::from_xml(const std::string& xml) {
  auto impl = std::make_unique<Impl>();
  RT_TRY(impl->load(&xml));
  return Topology(std::move(impl));
}

std::vector<Core> Topology::cores() const { return impl_->cores(); }
Near Topology::near(const std::string& pci) const { return impl_->near(pci); }
std::vector<Nic> Topology::nics_near(const std::string& pci) const { return impl_->nics_near(pci); }

std::vector<RankCores> share_cores(std::span<const Near> of_ranks) {
  std::vector<RankCores> out(of_ranks.size());
  if (std::ranges::none_of(of_ranks, &Near::known)) return out;
  // Small neighbourhoods first, each whole: what lies inside another one is served before it.
  std::vector<size_t> order(of_ranks.size());
  for (size_t k = 0; k < order.size(); ++k) order[k] = k;
  std::ranges::stable_sort(order, {}, [&](size_t k) { return std::pair(of_ranks[k].cores.size(), of_ranks[k].cores); });
  std::map<Core, size_t> wanted;
  for (const Near& one : of_ranks) {
    for (const Core& core : one.cores) ++wanted[core];
  }
  // How many cores each gets: in turn one that is free, such as the fewest others want.
  std::vector<size_t> counts(of_ranks.size(), 0);
  std::set<Core> taken;
  for (bool any = true; any;) {
    any = false;
    for (const size_t k : order) {
      const Core* free = nullptr;
      for (const Core& core : of_ranks[k].cores) {
        if (!taken.contains(core) && (free == nullptr || wanted[core] < wanted[*free])) free = &core;
      }
      if (free == nullptr) continue;
      taken.insert(*free);
      ++counts[k];
      any = true;
    }
  }
  std::set<std::vector<Core>> crowded;
  for (const size_t k : order) {
    if (counts[k] == 0) crowded.insert(of_ranks[k].cores);
  }
  // Which ones: in a tree the counts can be had in this order too.
  taken.clear();
  for (const size_t k : order) {
    RankCores& rank = out[k];
    rank.numa = of_ranks[k].numa;
    size_t left = counts[k];
    const bool shares = crowded.contains(of_ranks[k].cores);
    for (const Core& core : of_ranks[k].cores) {
      if (!shares && (left == 0 || !taken.insert(core).second)) continue;
      if (!shares) --left;
      rank.cpus.insert(rank.cpus.end(), core.begin(), core.end());
    }
    std::ranges::sort(rank.cpus);
  }
  return out;
}

std::vector<RankCores> cores_of_ranks(const Topology& topology, std::span<const std::string> gpu_of_rank) {
  std::vector<Near> near;
  for (const std::string& pci : gpu_of_rank) near.push_back(topology.near(pci));
  return share_cores(near);
}

std::string nearest_interface(const Topology& topology, std::span<const std::string> gpu_of_rank,
                              std::span<const std::string> interfaces) {
  std::map<std::string, int64_t> near;
  for (const std::string& pci : gpu_of_rank) {
    for (const Nic& nic : topology.nics_near(pci)) ++near[nic.interface];
  }
  std::string best;
  for (const std::string& one : interfaces) {
    const auto found = near.find(one);
    if (found != near.end() && (best.empty() || found->second > near[best])) best = one;
  }
  return best;
}

}  // namespace cairn::host
