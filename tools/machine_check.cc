#include "tools/machine_check.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <thread>

#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/memory_room.h"
#include "ckpt/store/uring_backend.h"
#include "runtime/cluster/placement.h"
#include "runtime/core/cgroup.h"
#include "runtime/core/count_text.h"
#include "runtime/core/units.h"
#include "runtime/cuda/blas_api.h"
#include "runtime/cuda/context.h"
#include "runtime/cuda/cudnn_api.h"
#include "runtime/cuda/machine/module.h"
#include "runtime/host/bind.h"
#include "runtime/host/gpu_list.h"
#include "runtime/host/nccl_check.h"
#include "tools/run/check/gpu_judge.h"
#include "tools/run/folder/text.h"
#include "tools/version.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using Verdict = MachineCheck::Verdict;

constexpr int kDriver = 580;  // the first that runs CUDA 13, which libraries and kernels here are of
constexpr long kTmpfs = 0x01021994;

std::string text_of(const fs::path& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// "580.65.06" out of the driver's page; empty where it says nothing.
std::string driver_version(const std::string& page) {
  std::istringstream words(page);
  for (std::string word; words >> word;) {
    if (std::count(word.begin(), word.end(), '.') > 0 &&
        std::ranges::all_of(word, [](unsigned char c) { return std::isdigit(c) != 0 || c == '.'; }))
      return word;
  }
  return {};
}

MachineCheck check_driver(bool any_device) {
  MachineCheck out{.what = "NVIDIA driver",
                   .needed = fmt::format("{} or newer, for CUDA {}", kDriver, cuda::kMajor),
                   .verdict = any_device ? Verdict::kProblem : Verdict::kNote};
  const fs::path page = host::nvidia_root() / "proc/driver/nvidia/version";
  const std::string version = driver_version(text_of(page));
  if (version.empty()) {
    out.found = fmt::format("none: {} is not there or names no version", page.string());
    if (any_device)
      out.todo = "install the driver; in a container start it with the NVIDIA runtime (docker run --gpus all)";
    return out;
  }
  out.found = fmt::format("{}, {}", version, page.string());
  if (std::atoi(version.c_str()) < kDriver) {
    out.todo = "install a newer driver";
    return out;
  }
  out.verdict = Verdict::kFine;
  return out;
}

/// Kernels and products, then whether they find a device.
void add_libraries(bool any_device, bool opens, std::vector<MachineCheck>& out) {
  const Verdict bad = any_device ? Verdict::kProblem : Verdict::kNote;
  const auto one = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  MachineCheck kernels{.what = "kernels for CUDA",
                       .needed = fmt::format("{} of the same sources, beside the program", cuda::kModuleFile),
                       .verdict = bad};
  const Result<cuda::LoadedModule> module = cuda::load_module(tree_version());
  if (module.ok()) {
    int runtime = 0;
    if (module.value().module->api().runtime_version(&runtime) != 0) runtime = 0;
    kernels.verdict = Verdict::kFine;
    kernels.found =
        fmt::format("{}, with CUDA runtime {}.{}", module.value().path, runtime / 1000, runtime % 1000 / 10);
  } else {
    kernels.found = module.error().message;
    if (any_device) kernels.todo = "build with the preset `cuda` (docs/gpu.md), or train on the CPU: --device cpu";
  }
  out.push_back(std::move(kernels));

  MachineCheck products{.what = "cuBLASLt", .needed = fmt::format("libcublasLt.so.{}", cuda::kMajor), .verdict = bad};
  const auto candidates = cuda::library_candidates("libcublasLt.so.13");
  if (const Result<cuda::LoadedBlas> loaded = cuda::load_blas(candidates); loaded.ok()) {
    const size_t version = loaded.value().api.version();
    products.verdict = Verdict::kFine;
    products.found = fmt::format("{}, version {}.{}", loaded.value().path, version / 10000, version % 10000 / 100);
  } else {
    products.found = one(loaded.error().message);
    if (any_device)
      products.todo = "install CUDA 13's libraries, or name their folder in CAIRN_CUDA_PATH (folders apart by `:`)";
  }
  out.push_back(std::move(products));

  if (!module.ok() || !any_device) return;
  MachineCheck device{
      .what = opens ? "a device opens" : "CUDA finds a device", .needed = "cuda:0", .verdict = Verdict::kProblem};
  const cuda::Api& api = module.value().module->api();
  Status usable;
  if (opens) {
    if (auto opened = cuda::Context::open(api, 0); !opened.ok()) usable = std::move(opened).error();
  } else {
    usable = cuda::Context::find(api, 0);
  }
  if (usable.ok()) {
    device.verdict = Verdict::kFine;
    device.found = "cuda:0";
  } else {
    device.found = usable.error().message;
    device.todo = "see what `nvidia-smi` says of it; in a container it needs /dev/nvidia* and libcuda.so.1";
  }
  out.push_back(std::move(device));
}

MachineCheck check_shared_memory() {
  MachineCheck out{.what = "shared memory",
                   .needed = fmt::format("{} as tmpfs, of the size that `cairn plan` says", ckpt::kSharedMemory)};
  struct statfs info {};
  struct statvfs room {};
  if (::statfs(ckpt::kSharedMemory, &info) != 0 || ::statvfs(ckpt::kSharedMemory, &room) != 0) {
    out.found = fmt::format("{}: {}", ckpt::kSharedMemory, std::strerror(errno));
  } else if (::access(ckpt::kSharedMemory, W_OK) != 0) {
    out.found = fmt::format("{} cannot be written: {}", ckpt::kSharedMemory, std::strerror(errno));
  } else {
    const auto bytes = [&](uint64_t blocks) { return format_bytes(static_cast<int64_t>(blocks * room.f_frsize)); };
    out.found = fmt::format("{} of {} free", bytes(room.f_bavail), bytes(room.f_blocks));
    if (info.f_type == kTmpfs) {
      constexpr uint64_t kDocker = 64 << 20;  // what containers get unasked
      if (room.f_blocks * room.f_frsize > kDocker) return out;
      out.verdict = Verdict::kNote;
      out.todo = "give the container more: --shm-size, or `--ipc host`";
      return out;
    }
    out.found += ", and no tmpfs";
    out.verdict = Verdict::kNote;
    out.todo = "mount a tmpfs there: a snapshot costs a disk's time else";
    return out;
  }
  out.verdict = Verdict::kProblem;
  out.todo = "mount a tmpfs there that this user may write";
  return out;
}

/// Segments of shared memory that runs have left: they take room, and may hold steps that no checkpoint has.
std::vector<MachineCheck> check_dead_runs() {
  std::vector<MachineCheck> out;
  for (const ckpt::StaleArena& stale : ckpt::stale_arenas()) {
    const std::string held = !stale.unread.empty()     ? stale.unread
                             : stale.unsaved_step != 0 ? fmt::format("step {} of {}, which no checkpoint has",
                                                                     stale.unsaved_step, stale.run_id)
                                                       : fmt::format("nothing that {} lacks", stale.run_id);
    out.push_back({.what = "memory of a dead run",
                   .found = fmt::format("{} in {}: {}", format_bytes(stale.bytes), stale.name, held),
                   .verdict = Verdict::kNote,
                   .todo = stale.unread.empty() ? "resume that run, or remove the file"
                                                : "resume that run with the build that left it, or remove the file"});
  }
  return out;
}

MachineCheck check_ring() {
  MachineCheck out{.what = "io_uring", .found = "works", .needed = "for saves at the disk's speed"};
  if (const auto made = ckpt::make_uring_backend(); !made.ok()) {
    out.found = made.error().message;
    out.verdict = Verdict::kNote;
    out.todo =
        "saves use plain system calls, which cost more of a core; a container's seccomp profile or "
        "kernel.io_uring_disabled may forbid it";
  }
  return out;
}

MachineCheck check_disk(const fs::path& folder) {
  std::error_code failed;
  fs::path at = fs::absolute(folder, failed);
  while (!at.empty() && at != at.parent_path() && !fs::exists(at, failed)) at = at.parent_path();
  MachineCheck out{.what = fmt::format("disk of {}", folder.string()), .needed = "room for what checkpoint.keep keeps"};
  struct statvfs room {};
  if (::statvfs(at.c_str(), &room) != 0 || ::access(at.c_str(), W_OK | X_OK) != 0) {
    out.found = fmt::format("{}: {}", at.string(), std::strerror(errno));
    out.verdict = Verdict::kProblem;
    out.todo = "name another run folder (--run), or let this user write there";
    return out;
  }
  out.found =
      fmt::format("{} free in {}", format_bytes(static_cast<int64_t>(room.f_bavail * room.f_frsize)), at.string());
  if (room.f_bavail == 0) {
    out.verdict = Verdict::kProblem;
    out.todo = "make room there, or name another run folder (--run)";
    return out;
  }
  // A file without a name, which goes with its descriptor.
  const int file = ::open(at.c_str(), O_TMPFILE | O_WRONLY | O_DIRECT | O_CLOEXEC, 0600);
  if (file >= 0) {
    ::close(file);
    out.found += ", O_DIRECT works";
  } else if (errno == EINVAL) {
    out.found += ", without O_DIRECT";
    out.verdict = Verdict::kNote;
    out.todo = "saves go through the page cache there: the same bytes, more of the machine's memory in use";
  }
  return out;
}

/// "eth0 10.0.0.1" each, but the loopback's.
std::vector<std::string> addresses() {
  std::vector<std::string> out;
  for (const host::Interface& one : host::HostNetwork::of_host().interfaces) {
    for (const std::string& address : one.addresses) {
      if (one.up && !one.loopback) out.push_back(fmt::format("{} {}", one.name, address));
    }
  }
  return out;
}

MachineCheck check_hosts() {
  MachineCheck out{.what = "several hosts", .needed = "the Gloo module, and an address that the others reach"};
  const std::vector<std::string> here = addresses();
  out.found = here.empty() ? "no address but the loopback's" : fmt::format("{}", fmt::join(here, ", "));
  if (here.empty()) {
    out.verdict = Verdict::kNote;
    out.todo = "runs of one host need none";
  }
  if (const Result<std::string> module = program_and_module_version(); !module.ok()) {
    out.found += fmt::format("; {}", module.error().message);
    out.verdict = Verdict::kNote;
    out.todo = "runs of one host need none; else move libcairn_gloo.so with the program";
  }
  return out;
}

MachineCheck check_cores() {
  const int64_t memory = ckpt::available_memory();
  const std::optional<double> limit = Cgroup().cpu_limit();
  return {.what = "processors, memory",
          .found = fmt::format("{}{}, {} available", count_text(std::thread::hardware_concurrency(), "core"),
                               limit ? fmt::format(" (limit of processor time: {:.4g})", *limit) : "",
                               memory == INT64_MAX ? std::string("an unknown amount") : format_bytes(memory)),
          .needed = "what `cairn plan RECIPE` says of a rank"};
}

std::string_view word_of(Verdict verdict) {
  return verdict == Verdict::kFine ? "ok" : verdict == Verdict::kNote ? "note" : "PROBLEM";
}

}  // namespace

Result<host::VisibleGpus> own_gpus() {
  return host::visible_gpus(host::gpus_of_machine(), cluster::process_environment());
}

void show_to_cuda(const host::VisibleGpus& visible) {
  for (const auto& [name, value] : visible.variables) ::setenv(name.c_str(), value.c_str(), 1);
}

std::string names_of(const host::VisibleGpus& visible) {
  std::vector<std::string> out;
  for (const host::VisibleGpu& one : visible.gpus) out.push_back(one.gpu ? host::gpu_name(*one.gpu) : one.id);
  return fmt::format("{}", fmt::join(out, ", "));
}

std::vector<MachineCheck> check_cuda(bool opens) {
  MachineCheck devices{.what = "devices", .needed = "none; one to train on CUDA"};
  const Result<host::VisibleGpus> visible = own_gpus();
  bool any = true;
  if (!visible.ok()) {
    devices.verdict = Verdict::kProblem;
    devices.found = visible.error().message;
  } else if (visible.value().of_machine == 0) {
    any = false;
    devices.verdict = Verdict::kNote;
    devices.found = "no NVIDIA device: runs use the CPU";
  } else if (visible.value().gpus.empty()) {
    any = false;
    devices.verdict = Verdict::kNote;
    devices.found = fmt::format("{} lets runs use none of {}: they use the CPU", visible.value().by,
                                count_text(visible.value().of_machine, "device"));
  } else {
    devices.found = names_of(visible.value());
    if (!visible.value().by.empty())
      devices.found +=
          fmt::format(" ({} of {}, by {})", visible.value().size(), visible.value().of_machine, visible.value().by);
    show_to_cuda(visible.value());
  }
  std::vector<MachineCheck> out{std::move(devices)};
  out.push_back(check_driver(any));
  add_libraries(any, opens, out);
  return out;
}

std::vector<MachineCheck> check_places(const Result<host::VisibleGpus>& visible,
                                       const Result<host::Topology>& topology) {
  std::vector<MachineCheck> out;
  if (!visible.ok()) return out;
  std::vector<std::string> addresses;
  for (int64_t k = 0; k < visible.value().size(); ++k) addresses.push_back(host::pci_of_rank(visible.value(), k));
  std::vector<host::RankCores> cores(addresses.size());
  if (topology.ok()) cores = host::cores_of_ranks(topology.value(), addresses);
  for (size_t k = 0; k < addresses.size(); ++k) {
    MachineCheck one{.what = fmt::format("place of GPU {}", k),
                     .found = addresses[k].empty() ? "its PCI address is not known" : addresses[k],
                     .needed = "its memory node, cores and network device: ranks are bound next to their GPUs"};
    const host::Near near = topology.ok() ? topology.value().near(addresses[k]) : host::Near{};
    std::vector<std::string> nics;
    if (topology.ok()) {
      for (const host::Nic& nic : topology.value().nics_near(addresses[k]))
        nics.push_back(nic.hca.empty() ? nic.interface : nic.interface.empty() ? nic.hca : nic.hca + "/" + nic.interface);
    }
    if (!topology.ok()) {
      one.verdict = Verdict::kNote;
      one.found += fmt::format("; {}", topology.error().message);
    } else if (!near.known) {
      one.verdict = Verdict::kNote;
      one.found += cores[k].cpus.empty() ? "; nothing says what lies next to it: its rank is not bound"
                                         : "; nothing says what lies next to it";
    } else if (near.numa < 0) {
      one.found += ", next to several memory nodes, or none whose cores this process has";
    } else {
      one.found += fmt::format(", NUMA node {}", near.numa);
    }
    if (!cores[k].cpus.empty()) one.found += fmt::format(", cores {}", host::ranges_text(cores[k].cpus));
    if (!nics.empty()) one.found += fmt::format(", network {}", fmt::join(nics, ", "));
    out.push_back(std::move(one));
  }
  return out;
}

std::vector<MachineCheck> check_gpu_health() {
  std::vector<MachineCheck> out;
  if (host::gpus_of_machine().empty()) return out;
  const Result<HostGpus> host = look_at_gpus();
  if (!host.ok()) {
    out.push_back({.what = "health of GPUs",
                   .found = host.error().message,
                   .needed = fmt::format("{} of the driver: without it nothing is known of failed memory and links",
                                         cuda::kNvmlFile),
                   .verdict = Verdict::kNote});
    return out;
  }
  const std::vector<GpuFault> beside = faults_beside({{0, &host.value()}}, 0);
  for (const GpuFigures& gpu : host.value().gpus) {
    MachineCheck one{.what = fmt::format("health of GPU {}", gpu.health.index),
                     .found = health_text(gpu),
                     .needed = "memory without uncorrected errors, all links, no Xid of a broken device"};
    std::vector<GpuFault> faults = faults_of(gpu);
    std::ranges::copy_if(beside, std::back_inserter(faults),
                         [&](const GpuFault& fault) { return fault.index == gpu.health.index; });
    for (const GpuFault& fault : faults) {
      one.verdict = Verdict::kProblem;
      one.found += fmt::format("; {}, expected {}", fault.found, fault.expected);
      one.todo += (one.todo.empty() ? "" : "; ") + fault.todo;
    }
    for (const std::string& note : notes_of(gpu)) {
      if (one.verdict == Verdict::kFine) one.verdict = Verdict::kNote;
      one.found += "; " + note;
    }
    out.push_back(std::move(one));
  }
  for (const std::string& note : host.value().notes) {
    out.push_back({.what = "Xids of GPUs",
                   .found = note,
                   .needed = "the kernel's log: it tells of GPUs that failed",
                   .verdict = Verdict::kNote});
  }
  return out;
}

MachineCheck check_cudnn() {
  MachineCheck out{.what = "cuDNN", .needed = "9, for --attention cudnn alone", .verdict = Verdict::kNote};
  const auto loaded = cuda::load_cudnn(cuda::library_candidates(cuda::kCudnnFile));
  if (!loaded.ok()) {
    out.found = loaded.error().message.substr(0, loaded.error().message.find('\n'));
    return out;
  }
  out.found = fmt::format("{}, version {}", loaded.value().path, cuda::cudnn_version_text(loaded.value().version));
  const Result<cuda::LoadedModule> module = cuda::load_module(tree_version());
  if (module.ok() && module.value().module->kernels().cudnn == nullptr) {
    out.found += "; the kernels for CUDA were built without it";
  } else if (module.ok()) {
    out.verdict = Verdict::kFine;
  }
  return out;
}

std::vector<MachineCheck> check_nccl_here() {
  const host::NcclVariables variables = host::nccl_variables({}, environ);
  std::vector<MachineCheck> out;
  if (variables.empty()) return out;
  const host::NcclCheck check = host::check_nccl(variables, host::HostNetwork::of_host(), 1);
  const auto add = [&](Verdict verdict, const std::string& found) {
    out.push_back(
        {.what = "NCCL's variables", .found = found, .needed = "none; NCCL chooses by itself", .verdict = verdict});
  };
  for (const std::string& one : check.problems) add(Verdict::kProblem, one);
  for (const std::string& one : check.warnings) add(Verdict::kNote, one);
  if (!out.empty()) return out;
  std::vector<std::string> words;
  for (const auto& [name, value] : variables) words.push_back(name + "=" + value);
  add(Verdict::kFine, fmt::format("{}", fmt::join(words, ", ")));
  return out;
}

std::vector<MachineCheck> check_host(const fs::path& folder) {
  std::vector<MachineCheck> out = {check_cores(), check_shared_memory()};
  std::ranges::move(check_dead_runs(), std::back_inserter(out));
  for (MachineCheck& one : std::array{check_ring(), check_disk(folder), check_hosts()}) out.push_back(std::move(one));
  return out;
}

bool any_problem(const std::vector<MachineCheck>& checks) {
  return std::ranges::any_of(checks, [](const MachineCheck& one) { return one.verdict == Verdict::kProblem; });
}

std::string machine_text(const std::vector<MachineCheck>& checks) {
  std::string out;
  for (const MachineCheck& one : checks) {
    out += fmt::format("{:<8}{}: {}\n", word_of(one.verdict), one.what, printable(one.found));
    if (one.verdict != Verdict::kFine && !one.needed.empty()) out += fmt::format("          needed: {}\n", one.needed);
    if (!one.todo.empty()) out += fmt::format("          to do: {}\n", one.todo);
  }
  return out;
}

nlohmann::json machine_json(const std::vector<MachineCheck>& checks) {
  nlohmann::json out = nlohmann::json::array();
  for (const MachineCheck& one : checks) {
    out.push_back({{"what", one.what},
                   {"found", one.found},
                   {"needed", one.needed},
                   {"verdict", one.verdict == Verdict::kFine   ? "ok"
                               : one.verdict == Verdict::kNote ? "note"
                                                               : "problem"},
                   {"to_do", one.todo}});
  }
  return out;
}

}  // namespace cairn::tools
