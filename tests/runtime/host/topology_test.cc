// Cores and network devices next to GPUs, on machines that are written down as hwloc's XML.
#include "runtime/host/topology.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::host;

namespace {

using Cpus = std::vector<int64_t>;

struct Device {
  std::string pci, type;  // "0302"
  std::string interface, hca;
};

/// A host of sockets, each a NUMA node with `cores` cores, and PCI switches with devices below it. With two threads a
/// core the second ones are numbered behind all first ones, as Linux does.
struct Machine {
  int64_t sockets = 2, cores = 4, threads = 1;
  std::vector<std::vector<std::vector<Device>>> switches;  // of each socket
  std::vector<std::vector<Device>> apart;                  // that no table places: below the host itself
  uint64_t allowed = ~uint64_t{0};

  std::string xml() const {
    int64_t id = 1;
    const auto sets = [](uint64_t cpus, uint64_t nodes) {
      return fmt::format("cpuset=\"{0:#x}\" complete_cpuset=\"{0:#x}\" nodeset=\"{1:#x}\" complete_nodeset=\"{1:#x}\"",
                         cpus, nodes);
    };
    const auto bridge = [&](const std::vector<Device>& devices) {
      const std::string bus = devices.front().pci.substr(0, 7);
      std::string out = fmt::format(
          "<object type=\"Bridge\" gp_index=\"{}\" bridge_type=\"0-1\" depth=\"0\" "
          "bridge_pci=\"{}:[{}-{}]\">",
          id++, bus.substr(0, 4), bus.substr(5), bus.substr(5));
      for (const Device& one : devices) {
        out += fmt::format(
            "<object type=\"PCIDev\" gp_index=\"{}\" pci_busid=\"{}\" pci_type=\"{} [10de:2330] "
            "[10de:16c1] a1\" pci_link_speed=\"0.0\">",
            id++, one.pci, one.type);
        if (!one.interface.empty())
          out +=
              fmt::format("<object type=\"OSDev\" gp_index=\"{}\" name=\"{}\" osdev_type=\"2\"/>", id++, one.interface);
        if (!one.hca.empty())
          out += fmt::format("<object type=\"OSDev\" gp_index=\"{}\" name=\"{}\" osdev_type=\"3\"/>", id++, one.hca);
        out += "</object>";
      }
      return out + "</object>";
    };
    const int64_t all = sockets * cores * threads;
    const uint64_t cpus = all == 64 ? ~uint64_t{0} : (uint64_t{1} << all) - 1;
    const uint64_t nodes = (uint64_t{1} << sockets) - 1;
    std::string out = fmt::format(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><!DOCTYPE topology SYSTEM \"hwloc2.dtd\"><topology version=\"2.0\">"
        "<object type=\"Machine\" os_index=\"0\" {} allowed_cpuset=\"{:#x}\" allowed_nodeset=\"{:#x}\" "
        "gp_index=\"{}\">",
        sets(cpus, nodes), cpus & allowed, nodes, id++);
    for (int64_t socket = 0; socket < sockets; ++socket) {
      uint64_t of_socket = 0;
      std::string inner;
      for (int64_t k = 0; k < cores; ++k) {
        const int64_t core = socket * cores + k;
        uint64_t of_core = 0;
        std::string units;
        for (int64_t thread = 0; thread < threads; ++thread) {
          const int64_t cpu = core + thread * sockets * cores;
          of_core |= uint64_t{1} << cpu;
          units += fmt::format("<object type=\"PU\" os_index=\"{}\" {} gp_index=\"{}\"/>", cpu,
                               sets(uint64_t{1} << cpu, uint64_t{1} << socket), id++);
        }
        of_socket |= of_core;
        inner += fmt::format("<object type=\"Core\" os_index=\"{}\" {} gp_index=\"{}\">{}</object>", core,
                             sets(of_core, uint64_t{1} << socket), id++, units);
      }
      out += fmt::format("<object type=\"Package\" os_index=\"{}\" {} gp_index=\"{}\">", socket,
                         sets(of_socket, uint64_t{1} << socket), id++);
      out += fmt::format("<object type=\"NUMANode\" os_index=\"{}\" {} gp_index=\"{}\" local_memory=\"1073741824\"/>",
                         socket, sets(of_socket, uint64_t{1} << socket), id++);
      out += inner;
      if (socket < std::ssize(switches)) {
        for (const auto& devices : switches[static_cast<size_t>(socket)]) out += bridge(devices);
      }
      out += "</object>";
    }
    for (const auto& devices : apart) out += bridge(devices);
    out += "</object></topology>";
    std::string lines;  // hwloc's own reader wants them
    for (const char c : out) lines += c == '<' && !lines.empty() ? std::string("\n<") : std::string(1, c);
    return lines;
  }
};

/// Two sockets of eight cores, four GPUs each, a network device beside every two.
Machine eight_gpus() {
  return {.sockets = 2,
          .cores = 8,
          .threads = 1,
          .switches = {{{{"0000:10:00.0", "0302", "", ""},
                         {"0000:10:01.0", "0302", "", ""},
                         {"0000:10:02.0", "0207", "ib0", "mlx5_0"}},
                        {{"0000:20:00.0", "0302", "", ""},
                         {"0000:20:01.0", "0302", "", ""},
                         {"0000:20:02.0", "0207", "ib1", "mlx5_1"}},
                        {{"0000:30:00.0", "0200", "eth0", ""}}},
                       {{{"0000:80:00.0", "0302", "", ""},
                         {"0000:80:01.0", "0302", "", ""},
                         {"0000:80:02.0", "0207", "ib2", "mlx5_2"}},
                        {{"0000:90:00.0", "0302", "", ""},
                         {"0000:90:01.0", "0302", "", ""},
                         {"0000:90:02.0", "0207", "ib3", "mlx5_3"}}}},
          .apart = {}};
}
const std::vector<std::string> kEight = {"0000:10:00.0", "0000:10:01.0", "0000:20:00.0", "0000:20:01.0",
                                         "0000:80:00.0", "0000:80:01.0", "0000:90:00.0", "0000:90:01.0"};

Topology topology(const Machine& machine) {
  Result<Topology> out = Topology::from_xml(machine.xml());
  REQUIRE_OK(out);
  return std::move(out).value();
}

std::vector<Cpus> cpus_of(const std::vector<RankCores>& ranks) {
  std::vector<Cpus> out;
  for (const RankCores& one : ranks) out.push_back(one.cpus);
  return out;
}

std::vector<std::string> names(const std::vector<Nic>& nics) {
  std::vector<std::string> out;
  for (const Nic& one : nics) out.push_back(one.interface + "/" + one.hca);
  return out;
}

void check_apart(const std::vector<RankCores>& ranks) {
  std::set<int64_t> seen;
  for (const RankCores& one : ranks) {
    for (const int64_t cpu : one.cpus) CHECK(seen.insert(cpu).second);
  }
}

}  // namespace

TEST_SUITE("runtime/host/topology") {
  TEST_CASE("two sockets with four GPUs each: ranks share the cores of their socket, and its memory") {
    const Topology host = topology(eight_gpus());
    const std::vector<RankCores> ranks = cores_of_ranks(host, kEight);
    CHECK(cpus_of(ranks) == std::vector<Cpus>{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}});
    for (size_t k = 0; k < ranks.size(); ++k) CHECK(ranks[k].numa == (k < 4 ? 0 : 1));
    // Ranks need not come in the order of addresses.
    const std::vector<std::string> two = {"0000:90:00.0", "0000:10:01.0"};
    CHECK(cpus_of(cores_of_ranks(host, two)) ==
          std::vector<Cpus>{{8, 9, 10, 11, 12, 13, 14, 15}, {0, 1, 2, 3, 4, 5, 6, 7}});
  }

  TEST_CASE("network devices next to a GPU are those behind its switch, then those of its socket") {
    const Topology host = topology(eight_gpus());
    CHECK(names(host.nics_near("0000:10:01.0")) == std::vector<std::string>{"ib0/mlx5_0"});
    CHECK(names(host.nics_near("0000:90:00.0")) == std::vector<std::string>{"ib3/mlx5_3"});
    Machine one = eight_gpus();
    for (auto& socket : one.switches) {
      for (auto& devices : socket) std::erase_if(devices, [](const Device& of) { return !of.hca.empty(); });
    }
    CHECK(names(topology(one).nics_near("0000:20:00.0")) == std::vector<std::string>{"eth0/"});
    CHECK(names(topology(one).nics_near("0000:80:00.0")) == std::vector<std::string>{"eth0/"});
    CHECK(topology(one).nics_near("0000:77:00.0").empty());
    CHECK(topology(one).nics_near("").empty());
  }

  TEST_CASE("of interfaces that would do the one next to most GPUs is taken, and none where nothing is known") {
    const Topology host = topology(eight_gpus());
    const auto of = [&](std::vector<std::string> gpus, std::vector<std::string> interfaces) {
      return nearest_interface(host, gpus, interfaces);
    };
    CHECK(of({"0000:20:00.0", "0000:20:01.0", "0000:80:00.0"}, {"eth0", "ib2", "ib1"}) == "ib1");
    CHECK(of(kEight, {"ib1", "ib0"}) == "ib1");  // as near: the first
    CHECK(of({"0000:20:00.0"}, {"eth0", "ib3"}) == "");
    CHECK(of({""}, {"ib0"}) == "");
  }

  TEST_CASE("threads of a core stay together") {
    Machine machine = eight_gpus();
    machine.threads = 2;
    const std::vector<RankCores> ranks = cores_of_ranks(topology(machine), kEight);
    CHECK(ranks[0].cpus == Cpus{0, 1, 16, 17});
    CHECK(ranks[7].cpus == Cpus{14, 15, 30, 31});
    check_apart(ranks);
  }

  TEST_CASE("one socket: ranks share all cores, as evenly as can be") {
    const Machine machine{.sockets = 1,
                          .cores = 8,
                          .threads = 1,
                          .switches = {{{{"0000:01:00.0", "0300", "", ""}, {"0000:01:01.0", "0300", "", ""}},
                                        {{"0000:02:00.0", "0300", "", ""}, {"0000:02:01.0", "0200", "eth0", ""}}}},
                          .apart = {}};
    const std::vector<std::string> gpus = {"0000:01:00.0", "0000:01:01.0", "0000:02:00.0"};
    const std::vector<RankCores> ranks = cores_of_ranks(topology(machine), gpus);
    CHECK(cpus_of(ranks) == std::vector<Cpus>{{0, 1, 2}, {3, 4, 5}, {6, 7}});
    CHECK(ranks[2].numa == 0);
  }

  TEST_CASE("a cgroup with half of the cores: ranks get those alone, and without any next to the GPU what there is") {
    Machine machine = eight_gpus();
    machine.allowed = 0x0f0f;  // half of each socket
    const std::vector<RankCores> halves = cores_of_ranks(topology(machine), kEight);
    CHECK(cpus_of(halves) == std::vector<Cpus>{{0}, {1}, {2}, {3}, {8}, {9}, {10}, {11}});
    CHECK(halves[5].numa == 1);
    machine.allowed = 0x00ff;  // one socket
    const Topology host = topology(machine);
    CHECK(host.cores().size() == 8);
    const std::vector<RankCores> one = cores_of_ranks(host, kEight);
    check_apart(one);
    for (const RankCores& rank : one) CHECK(rank.cpus.size() == 1);
    CHECK(one[0].numa == 0);
    CHECK(one[7].numa == -1);  // the GPU's node is not where its rank runs
  }

  TEST_CASE("no PCI device, or none that is known: nothing is bound") {
    const Topology host = topology({.switches = {}, .apart = {}});
    CHECK(cores_of_ranks(host, kEight) == std::vector<RankCores>(8));
    CHECK(cores_of_ranks(host, std::vector<std::string>{"", ""}) == std::vector<RankCores>(2));
    CHECK(host.near("0000:10:00.0") == Near{false, {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}, -1});
  }

  TEST_CASE("a GPU that is next to no socket leaves the others their cores") {
    Machine machine = eight_gpus();
    machine.apart = {{{"0000:f0:00.0", "0302", "", ""}}};
    const std::vector<std::string> gpus = {"0000:f0:00.0", "0000:10:00.0"};
    const std::vector<RankCores> ranks = cores_of_ranks(topology(machine), gpus);
    check_apart(ranks);
    CHECK(ranks[0] == RankCores{{8, 9, 10, 11, 12, 13, 14, 15}, -1});
    CHECK(ranks[1] == RankCores{{0, 1, 2, 3, 4, 5, 6, 7}, 0});
  }

  TEST_CASE("more ranks than cores share those next to their GPU") {
    const std::vector<std::string> gpus(20, "0000:80:00.0");
    for (const RankCores& one : cores_of_ranks(topology(eight_gpus()), gpus))
      CHECK(one == RankCores{{8, 9, 10, 11, 12, 13, 14, 15}, 1});
  }

  TEST_CASE("this host can be read, and what is no topology is refused") {
    const Result<Topology> host = Topology::of_host();
    REQUIRE_OK(host);
    CHECK_FALSE(host.value().cores().empty());
    const Result<Topology> none = Topology::from_xml("<topology>");
    REQUIRE_FALSE(none.ok());
    CHECK(none.error().code == ErrorCode::kInvalidInput);
  }
}
