// Which GPUs of hosts are blamed, for what, with what is to be done: each planted fault on each GPU, and none where all
// are well but noisy.
#include "tools/run/check/gpu_judge.h"

#include <doctest/doctest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "tools/run/check/check_judge.h"

using namespace cairn;
using namespace cairn::tools;

namespace {

constexpr int64_t kHosts = 4, kGpus = 8;

/// Rates are as far from each other as `noise` says: 0.2 is a fifth.
HostGpus host_of(int64_t host, double noise = 0, uint64_t seed = 0) {
  std::mt19937_64 random(seed + static_cast<uint64_t>(host));
  std::uniform_real_distribution<double> factor(1 - noise, 1);
  HostGpus out;
  for (int64_t k = 0; k < kGpus; ++k) {
    GpuFigures& gpu = out.gpus.emplace_back();
    gpu.health = {.index = k,
                  .name = "H100",
                  .uuid = "GPU-" + std::to_string(10 * host + k),
                  .pci = "0000:0" + std::to_string(k) + ":00.0",
                  .lost = {},
                  .ecc_uncorrected = 0,
                  .rows_remapped = 0,
                  .remapping_pending = 0,
                  .remapping_failed = 0,
                  .links = 18,
                  .links_active = 18,
                  .links_down = {},
                  .processes = {}};
    gpu.product_tflops = 600 * factor(random);
    gpu.copy_gb_s = 2600 * factor(random);
    gpu.to_device_gb_s = 50 * factor(random);
    gpu.to_host_gb_s = 50 * factor(random);
    for (int64_t other = 0; other < kGpus; ++other) {
      if (other != k) gpu.to_gpus_gb_s["0000:0" + std::to_string(other) + ":00.0"] = 350 * factor(random);
    }
  }
  return out;
}

std::vector<GpuFault> all_faults(const std::vector<HostGpus>& hosts, int64_t host) {
  std::map<int64_t, const HostGpus*> all;
  for (int64_t k = 0; k < std::ssize(hosts); ++k) all[k] = &hosts[static_cast<size_t>(k)];
  std::vector<GpuFault> out;
  for (const GpuFigures& gpu : hosts[static_cast<size_t>(host)].gpus) {
    for (GpuFault& fault : faults_of(gpu)) out.push_back(std::move(fault));
  }
  for (GpuFault& fault : faults_beside(all, host)) out.push_back(std::move(fault));
  for (GpuFault& fault : slow_beside(all, host)) out.push_back(std::move(fault));
  return out;
}

agent::Xid xid(int64_t number, bool broken) {
  return {number, "0000:05:00", "words of it", broken, "NVRM: Xid (PCI:0000:05:00): " + std::to_string(number)};
}

struct Ill {
  std::function<void(GpuFigures&)> plant;
  bool slow;
  const char *found, *expected, *todo;
};

const std::vector<Ill>& ills() {
  static const std::vector<Ill> out = {
      {[](GpuFigures& gpu) { gpu.product_tflops = 350; }, true, "matrix products: 350 TFLOP/s",
       "600, the median of all", "nvidia-smi -q"},
      {[](GpuFigures& gpu) {
         gpu.copy_gb_s = 1000;
         gpu.health.slowed_by = cuda::kSlowedByHeat;
       },
       true, "copies in its memory: 1e+03 GB/s (its clocks are held back by heat)", "2.6e+03", "cool it"},
      {[](GpuFigures& gpu) { gpu.to_device_gb_s = 12; }, true, "copies from the host: 12 GB/s", "50, ", "PCIe"},
      {[](GpuFigures& gpu) { gpu.to_host_gb_s = 12; }, true, "copies to the host: 12 GB/s", "50, ", "PCIe"},
      {[](GpuFigures& gpu) {
         for (auto& [pci, rate] : gpu.to_gpus_gb_s) rate = 20;
       },
       true, "copies to GPU ", "350 GB/s as other pairs", "nvidia-smi topo -m"},
      {[](GpuFigures& gpu) { gpu.wrong = "1 of 64 elements"; }, false, "1 of 64 elements", "the same bits",
       "dcgmi diag"},
      {[](GpuFigures& gpu) { gpu.failed = "cudaMalloc: an error"; }, false, "cudaMalloc: an error", "computes",
       "reset it"},
      {[](GpuFigures& gpu) { gpu.health.ecc_uncorrected = 3; }, false, "3 uncorrected memory errors", "none",
       "reset it"},
      {[](GpuFigures& gpu) { gpu.health.remapping_failed = 1; }, false, "could not be remapped", "rows to spare",
       "replace it"},
      {[](GpuFigures& gpu) { gpu.health.lost = "GPU is lost"; }, false, "NVML: GPU is lost", "answers",
       "boot the host"},
      {[](GpuFigures& gpu) {
         gpu.health.links_active = 17;
         gpu.health.links_down = {4};
       },
       false, "17 NVLinks are active, down: 4", "18, as the others", "nvlink -s"},
      {[](GpuFigures& gpu) { gpu.xids = {xid(79, true)}; }, false, "Xid 79 in the kernel's log, words of it: NVRM: Xid",
       "none", "24 hours"},
  };
  return out;
}

}  // namespace

TEST_SUITE("tools/run/gpu_judge") {
  TEST_CASE("GPUs that are well have no fault in any of 20 checks, however far from each other within the noise") {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      std::vector<HostGpus> hosts;
      for (int64_t host = 0; host < kHosts; ++host) hosts.push_back(host_of(host, 0.3, 100 * seed));
      for (int64_t host = 0; host < kHosts; ++host) CHECK(all_faults(hosts, host).empty());
    }
  }

  TEST_CASE("each fault is told of its GPU alone, with what was found, what was expected and what to do") {
    for (size_t k = 0; k < ills().size(); ++k) {
      for (int64_t ill = 0; ill < kHosts; ++ill) {
        const int64_t index = (3 * ill + 1) % kGpus;
        CAPTURE(k);
        CAPTURE(ill);
        std::vector<HostGpus> hosts;
        for (int64_t host = 0; host < kHosts; ++host) hosts.push_back(host_of(host));
        ills()[k].plant(hosts[static_cast<size_t>(ill)].gpus[static_cast<size_t>(index)]);
        for (int64_t host = 0; host < kHosts; ++host) {
          const std::vector<GpuFault> found = all_faults(hosts, host);
          REQUIRE(std::ssize(found) == (host == ill ? 1 : 0));
          if (host != ill) continue;
          CHECK(found[0].index == index);
          CHECK(found[0].uuid == "GPU-" + std::to_string(10 * ill + index));
          CHECK(found[0].pci == "0000:0" + std::to_string(index) + ":00.0");
          CHECK(found[0].slow == ills()[k].slow);
          CHECK_MESSAGE(found[0].found.find(ills()[k].found) != std::string::npos, found[0].found);
          CHECK_MESSAGE(found[0].expected.find(ills()[k].expected) != std::string::npos, found[0].expected);
          CHECK_MESSAGE(found[0].todo.find(ills()[k].todo) != std::string::npos, found[0].todo);
        }
      }
    }
  }

  TEST_CASE("a pair of GPUs that copies slowly is told once, with both") {
    std::vector<HostGpus> hosts{host_of(0), host_of(1)};
    hosts[1].gpus[2].to_gpus_gb_s["0000:05:00.0"] = 40;
    const std::vector<GpuFault> found = all_faults(hosts, 1);
    REQUIRE(found.size() == 1);
    CHECK(
        fault_text(found[0]).starts_with("GPU 2 (GPU-12, 0000:02:00.0) is slow: copies to GPU 5 (GPU-15, "
                                         "0000:05:00.0): 40 GB/s, expected 350 GB/s as other pairs; to do: "));
    // Without NVLink pairs differ by what lies between them: the same pair of two other hosts is needed.
    for (HostGpus& host : hosts) {
      for (GpuFigures& gpu : host.gpus) gpu.health.links = gpu.health.links_active = 0;
    }
    CHECK(all_faults(hosts, 1).empty());
    hosts.push_back(hosts[0]);
    CHECK(all_faults(hosts, 1).size() == 1);
  }

  TEST_CASE("a GPU that a host lacks is told, with its place") {
    std::vector<HostGpus> hosts{host_of(0), host_of(1), host_of(2)};
    hosts[2].gpus.erase(hosts[2].gpus.begin() + 3);
    CHECK(all_faults(hosts, 0).empty());
    const std::vector<GpuFault> found = all_faults(hosts, 2);
    REQUIRE(found.size() == 1);
    CHECK(fault_text(found[0]).starts_with(
        "a GPU is missing: 7 GPUs, none at 0000:03:00.0, expected 8, as the other hosts have; to do: see `lspci"));
    hosts[2].gpus.clear();
    REQUIRE(all_faults(hosts, 2).size() == 1);
    CHECK(all_faults(hosts, 2)[0].found.starts_with("0 GPUs, none at 0000:00:00.0, "));
  }

  TEST_CASE("GPUs of other products are not compared") {
    std::vector<HostGpus> hosts{host_of(0), host_of(1)};
    for (GpuFigures& gpu : hosts[1].gpus) {
      gpu.health.name = "L4";
      gpu.health.links = gpu.health.links_active = 0;
      gpu.product_tflops = 60;
      gpu.copy_gb_s = 200;
      gpu.to_gpus_gb_s.clear();
    }
    for (int64_t host = 0; host < 2; ++host) CHECK(all_faults(hosts, host).empty());
  }

  TEST_CASE(
      "what is no fault is a note: a row to be remapped, heat, an Xid that breaks nothing, what was not measured") {
    GpuFigures gpu = host_of(0).gpus[0];
    CHECK(notes_of(gpu).empty());
    gpu.health.remapping_pending = 1;
    gpu.health.slowed_by = cuda::kSlowedByPowerBrake;
    gpu.xids = {xid(63, false)};
    gpu.not_measured = "process 4711 computes on it";
    CHECK(faults_of(gpu).empty());
    const std::vector<std::string> notes = notes_of(gpu);
    REQUIRE(notes.size() == 4);
    CHECK(notes[0] == "not measured: process 4711 computes on it");
    CHECK(notes[1].find("remapped when it is reset") != std::string::npos);
    CHECK(notes[2] == "its clocks are held back by power brake");
    CHECK(notes[3] == "Xid 63 in the kernel's log, words of it");
  }

  TEST_CASE("what a host sends comes back the same, and of what is not of its type nothing is believed") {
    HostGpus host = host_of(1, 0.1);
    for (size_t k = 0; k < ills().size(); ++k) ills()[k].plant(host.gpus[k % kGpus]);
    host.gpus[1].health.processes = {1, 2};
    host.gpus[1].health.mig = true;
    host.notes = {"a note"};
    const nlohmann::json sent = to_json(host);
    CHECK(host_gpus_from_json(nlohmann::json::parse(sent.dump())) == host);
    for (const auto& other : {nlohmann::json(7), nlohmann::json::array(), nlohmann::json{{"gpus", 3}, {"notes", "x"}},
                              nlohmann::json{{"gpus", {1, "x", nullptr}}}})
      CHECK(host_gpus_from_json(other) == HostGpus{});
    // Each member in turn as something else.
    for (const auto& [key, value] : sent["gpus"][0].items()) {
      for (const auto& bad : {nlohmann::json(-1), nlohmann::json("x"), nlohmann::json(1e300), nlohmann::json::object(),
                              nlohmann::json{{1, "x", nullptr}}}) {
        nlohmann::json broken = sent;
        broken["gpus"][0][key] = bad;
        CHECK(host_gpus_from_json(broken).gpus.size() == kGpus);
      }
    }
  }
}
