// Which GPUs a process may use, by pages and nodes in a folder, and by the variables of CUDA, Slurm and containers.
#include "runtime/host/visible_gpus.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::host;
using cairn::testing::TempDir;

namespace {

/// GPUs of PCI buses 10, 11, ..., whose minors count down: the kernel need not number them by address.
std::vector<Gpu> machine(int64_t count, bool pages = true) {
  std::vector<Gpu> out;
  for (int64_t k = 0; k < count; ++k) {
    if (!pages) {
      out.push_back({.model = {}, .uuid = {}, .pci = {}, .minor = k});
      continue;
    }
    out.push_back({.model = "H100",
                   .uuid = "GPU-a" + std::to_string(k) + "00-x",
                   .pci = "0000:1" + std::to_string(k) + ":00.0",
                   .minor = count - 1 - k});
  }
  return out;
}

using Set = std::map<std::string, std::string>;
Variables environment(const Set& all) {
  return [all](const char* name) -> std::optional<std::string> {
    const auto found = all.find(name);
    return found == all.end() ? std::nullopt : std::optional(found->second);
  };
}

/// Places in `of` of what is visible; -1: it is none of those.
std::vector<int64_t> places(const VisibleGpus& visible, const std::vector<Gpu>& of) {
  std::vector<int64_t> out;
  for (const VisibleGpu& one : visible.gpus) {
    const auto at = one.gpu ? std::ranges::find(of, *one.gpu) : of.end();
    out.push_back(at == of.end() ? -1 : at - of.begin());
  }
  return out;
}

std::string value_of(const VisibleGpus& visible, const std::string& name) {
  for (const auto& [variable, value] : visible.variables) {
    if (variable == name) return value;
  }
  return "(not set)";
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

using Places = std::vector<int64_t>;

}  // namespace

TEST_SUITE("runtime/host/visible_gpus") {
  TEST_CASE("each variable leaves what it names, in its order, and says so") {
    struct Row {
      Set variables;
      Places left;
      std::string by, shown;  // CUDA_VISIBLE_DEVICES that is set for CUDA
    };
    const std::vector<Gpu> four = machine(4);
    const std::string none = "(not set)";
    const std::vector<Row> rows = {
        {{}, {0, 1, 2, 3}, "", none},
        {{{"CUDA_VISIBLE_DEVICES", "2,0"}}, {2, 0}, "CUDA_VISIBLE_DEVICES=2,0", none},
        {{{"CUDA_VISIBLE_DEVICES", " 3 "}}, {3}, "CUDA_VISIBLE_DEVICES= 3 ", none},
        {{{"CUDA_VISIBLE_DEVICES", "GPU-a1,GPU-a300-x"}}, {1, 3}, "CUDA_VISIBLE_DEVICES=GPU-a1,GPU-a300-x", none},
        {{{"CUDA_VISIBLE_DEVICES", ""}}, {}, "CUDA_VISIBLE_DEVICES=", none},
        {{{"CUDA_VISIBLE_DEVICES", "-1"}}, {}, "CUDA_VISIBLE_DEVICES=-1", none},
        {{{"CUDA_VISIBLE_DEVICES", "1,-1,2"}}, {1}, "CUDA_VISIBLE_DEVICES=1,-1,2", none},
        {{{"CUDA_VISIBLE_DEVICES", "NoDevFiles"}}, {}, "CUDA_VISIBLE_DEVICES=NoDevFiles", none},
        {{{"CUDA_VISIBLE_DEVICES", "MIG-7,MIG-8"}}, {-1, -1}, "CUDA_VISIBLE_DEVICES=MIG-7,MIG-8", none},
        // Slurm's numbers are those of the nodes: 0 is the last one by address here.
        {{{"SLURM_STEP_GPUS", "0,1"}}, {3, 2}, "SLURM_STEP_GPUS=0,1", "GPU-a300-x,GPU-a200-x"},
        {{{"SLURM_JOB_GPUS", "3"}}, {0}, "SLURM_JOB_GPUS=3", "GPU-a000-x"},
        {{{"SLURM_STEP_GPUS", "2"}, {"SLURM_JOB_GPUS", "0,1,2"}}, {1}, "SLURM_STEP_GPUS=2", "GPU-a100-x"},
        {{{"SLURM_STEP_GPUS", "4,5,6,7"}}, {0, 1, 2, 3}, "", none},  // the cgroup has chosen
        {{{"SLURM_STEP_GPUS", "3"}, {"CUDA_VISIBLE_DEVICES", "1"}}, {1}, "CUDA_VISIBLE_DEVICES=1", none},
        {{{"NVIDIA_VISIBLE_DEVICES", "all"}}, {0, 1, 2, 3}, "", none},
        {{{"NVIDIA_VISIBLE_DEVICES", "void"}}, {0, 1, 2, 3}, "", none},
        {{{"NVIDIA_VISIBLE_DEVICES", ""}}, {0, 1, 2, 3}, "", none},
        {{{"NVIDIA_VISIBLE_DEVICES", "/var/run/nvidia-container-devices"}}, {0, 1, 2, 3}, "", none},
        {{{"NVIDIA_VISIBLE_DEVICES", "4,5,6,7"}}, {0, 1, 2, 3}, "", none},
        {{{"NVIDIA_VISIBLE_DEVICES", "none"}}, {}, "NVIDIA_VISIBLE_DEVICES=none", ""},
        {{{"NVIDIA_VISIBLE_DEVICES", "GPU-a200-x"}}, {2}, "NVIDIA_VISIBLE_DEVICES=GPU-a200-x", "GPU-a200-x"},
        {{{"NVIDIA_VISIBLE_DEVICES", "GPU-a200-x,GPU-a100-x"}, {"SLURM_STEP_GPUS", "1"}},
         {2},
         "SLURM_STEP_GPUS=1",
         "GPU-a200-x"},
        {{{"NVIDIA_VISIBLE_DEVICES", "GPU-a200-x"}, {"CUDA_VISIBLE_DEVICES", "2"}},
         {2},
         "CUDA_VISIBLE_DEVICES=2",
         none},
    };
    for (const Row& row : rows) {
      CAPTURE(row.by);
      const Result<VisibleGpus> visible = visible_gpus(four, environment(row.variables));
      REQUIRE_OK(visible);
      CHECK(places(visible.value(), four) == row.left);
      CHECK(visible.value().by == row.by);
      CHECK(value_of(visible.value(), "CUDA_VISIBLE_DEVICES") == row.shown);
      CHECK(value_of(visible.value(), "CUDA_DEVICE_ORDER") == "PCI_BUS_ID");
      CHECK(visible.value().of_machine == 4);
    }
  }

  TEST_CASE("a value that names no GPU, one twice, or more than was given is refused with what is there") {
    const std::vector<Gpu> two = machine(2);
    const std::vector<std::pair<Set, std::string>> rows = {
        {{{"CUDA_VISIBLE_DEVICES", "0,2"}}, "CUDA_VISIBLE_DEVICES=0,2: '2' is no GPU that this process sees"},
        {{{"CUDA_VISIBLE_DEVICES", "-2"}}, "'-2' is no GPU that this process sees"},
        {{{"CUDA_VISIBLE_DEVICES", "1,1"}}, "'1' stands there twice"},
        {{{"CUDA_VISIBLE_DEVICES", "1,GPU-a1"}}, "'GPU-a1' stands there twice"},
        {{{"CUDA_VISIBLE_DEVICES", "GPU-a"}}, "'GPU-a' begins the names of several"},
        {{{"CUDA_VISIBLE_DEVICES", "GPU-b"}}, "'GPU-b' is no GPU that this process sees"},
        {{{"CUDA_VISIBLE_DEVICES", "0;1"}}, "'0;1' is neither a number, nor begins with GPU- or MIG-"},
        {{{"CUDA_VISIBLE_DEVICES", "0,,1"}}, "'' is neither a number"},
        {{{"CUDA_VISIBLE_DEVICES", "all"}}, "'all' is neither a number"},
        {{{"SLURM_STEP_GPUS", "7"}}, "SLURM_STEP_GPUS=7: '7' is no GPU of this host"},
        {{{"NVIDIA_VISIBLE_DEVICES", "GPU-b"}}, "NVIDIA_VISIBLE_DEVICES=GPU-b: 'GPU-b' is no GPU of this host"},
        {{{"NVIDIA_VISIBLE_DEVICES", "GPU-a000-x"}, {"CUDA_VISIBLE_DEVICES", "1"}},
         "'1' is not among what NVIDIA_VISIBLE_DEVICES=GPU-a000-x gives; visible here: 0 (GPU-a000-x)"},
    };
    for (const auto& [variables, why] : rows) {
      CAPTURE(why);
      const Result<VisibleGpus> visible = visible_gpus(two, environment(variables));
      REQUIRE_FALSE(visible.ok());
      CHECK(visible.error().code == ErrorCode::kInvalidInput);
      CHECK_MESSAGE(visible.error().message.find(why) != std::string::npos, visible.error().message);
    }
    const Result<VisibleGpus> told = visible_gpus(two, environment({{"CUDA_VISIBLE_DEVICES", "5"}}));
    CHECK(told.error().message.find("visible here: 0 (GPU-a000-x), 1 (GPU-a100-x). Name those") != std::string::npos);
  }

  TEST_CASE("without pages numbers are those of the nodes, and a UUID is CUDA's to find") {
    const std::vector<Gpu> two = machine(2, false);
    const Result<VisibleGpus> uuid = visible_gpus(two, environment({{"CUDA_VISIBLE_DEVICES", "GPU-77"}}));
    REQUIRE_OK(uuid);
    CHECK(places(uuid.value(), two) == Places{-1});
    const Result<VisibleGpus> slurm = visible_gpus(two, environment({{"SLURM_JOB_GPUS", "1"}}));
    REQUIRE_OK(slurm);
    CHECK(value_of(slurm.value(), "CUDA_VISIBLE_DEVICES") == "1");
  }

  TEST_CASE("where CUDA orders GPUs of several models by speed, their numbers say nothing of the pages") {
    std::vector<Gpu> two = machine(2);
    const Variables fastest = environment({{"CUDA_DEVICE_ORDER", "FASTEST_FIRST"}, {"CUDA_VISIBLE_DEVICES", "1"}});
    CHECK(places(visible_gpus(two, fastest).value(), two) == Places{1});
    two[1].model = "T4";
    CHECK(places(visible_gpus(two, fastest).value(), two) == Places{-1});
    CHECK(value_of(visible_gpus(two, fastest).value(), "CUDA_DEVICE_ORDER") == "(not set)");
  }

  TEST_CASE("ranks take GPUs in turn, and a rank of a MIG device sees that one alone") {
    const VisibleGpus two = visible_gpus(machine(2), environment({})).value();
    CHECK(gpu_of_rank(two, 0) == RankGpu{0, {}});
    CHECK(gpu_of_rank(two, 1) == RankGpu{1, {}});
    CHECK(gpu_of_rank(two, 4) == RankGpu{0, {}});
    const VisibleGpus mig = visible_gpus(machine(1), environment({{"CUDA_VISIBLE_DEVICES", "MIG-7,MIG-8"}})).value();
    CHECK(gpu_of_rank(mig, 0) == RankGpu{0, "MIG-7"});
    CHECK(gpu_of_rank(mig, 1) == RankGpu{0, "MIG-8"});
    CHECK(gpu_of_rank(VisibleGpus{}, 3) == RankGpu{0, {}});
  }

  TEST_CASE("the start says how many GPUs are used, by whom they are restricted, and that ranks share them") {
    const VisibleGpus all = visible_gpus(machine(4), environment({})).value();
    CHECK(placed_text(all, 4) == "4 GPUs, a rank on each");
    CHECK(placed_text(all, 1) == "4 GPUs, 1 in use: 1 rank");
    const VisibleGpus two = visible_gpus(machine(4), environment({{"CUDA_VISIBLE_DEVICES", "2,3"}})).value();
    CHECK(placed_text(two, 2) == "2 of 4 GPUs by CUDA_VISIBLE_DEVICES=2,3, a rank on each");
    CHECK(
        placed_text(two, 8) ==
        "2 of 4 GPUs by CUDA_VISIBLE_DEVICES=2,3, shared by 8 ranks: what they send each other goes through the host's "
        "memory");
  }

  TEST_CASE("GPUs are those with pages and nodes, by PCI address; in a container those with nodes") {
    const TempDir dir;
    const auto page = [&](const std::string& pci, int64_t minor) {
      write(dir.path / "proc/driver/nvidia/gpus" / pci / "information",
            "Model: \t\t NVIDIA H100\nIRQ:   \t\t 42\nGPU UUID: \t GPU-" + pci + "\nBus Location: \t " + pci +
                "\nDevice Minor: \t " + std::to_string(minor) + "\n");
    };
    CHECK(gpus_of_machine(dir.path).empty());
    page("0000:3b:00.0", 1);
    page("0000:1b:00.0", 0);
    const std::vector<Gpu> both = {{"NVIDIA H100", "GPU-0000:1b:00.0", "0000:1b:00.0", 0},
                                   {"NVIDIA H100", "GPU-0000:3b:00.0", "0000:3b:00.0", 1}};
    CHECK(gpus_of_machine(dir.path) == both);  // no node at all: not a place where nodes say anything
    write(dir.path / "dev/nvidiactl", "");
    write(dir.path / "dev/nvidia-uvm", "");
    CHECK(gpus_of_machine(dir.path) == both);
    write(dir.path / "dev/nvidia1", "");
    CHECK(gpus_of_machine(dir.path) == std::vector<Gpu>{both[1]});
    std::filesystem::remove_all(dir.path / "proc");
    CHECK(gpus_of_machine(dir.path) == std::vector<Gpu>{{"", "", "", 1}});
    CHECK(gpu_name(gpus_of_machine(dir.path).front()) == "/dev/nvidia1");
  }
}
