// What the end of a rank means: by its status, by what the cgroup counts, by the kernel's log.
#include "runtime/agent/failure_class.h"

#include <doctest/doctest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include "runtime/agent/host_watch.h"
#include "runtime/agent/kernel_log.h"
#include "runtime/agent/supervisor.h"
#include "tests/support/temp_dir.h"

using namespace cairn::agent;
using enum FailureClass;
using cairn::testing::TempDir;
namespace fs = std::filesystem;

namespace {

FailureClass of_code(int code, const Evidence& evidence = {}) { return classify({.exit_code = code}, 100, evidence); }
FailureClass of_signal(int signal, const Evidence& evidence = {}) {
  return classify({.signal = signal}, 100, evidence);
}

void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

constexpr char kXid79[] =
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.";
constexpr char kXid31[] = "NVRM: Xid (PCI:0000:3b:00): 31, pid=812, name=cairn, Ch 00000008, MMU Fault";

}  // namespace

TEST_SUITE("runtime/agent/failure_class") {
  TEST_CASE("each exit code and signal of the table has its class, and what may be done about it") {
    struct Row {
      int code;
      FailureClass which;
      Fault fault;
      Restart here;
    };
    for (const Row& row : {Row{1, kError, Fault::kRank, Restart::kInPlace},
                           {2, kRefused, Fault::kRun, Restart::kEnd},
                           {14, kDevice, Fault::kHost, Restart::kEnd},
                           {65, kData, Fault::kRun, Restart::kEnd},
                           {69, kSymptom, Fault::kUnknown, Restart::kInPlace},
                           {70, kInternal, Fault::kRun, Restart::kEnd},
                           {74, kDisk, Fault::kHost, Restart::kEnd},
                           {75, kSymptom, Fault::kUnknown, Restart::kInPlace},
                           {76, kGuard, Fault::kRun, Restart::kEnd},
                           {96, kError, Fault::kRank, Restart::kInPlace},
                           {125, kHostSetup, Fault::kHost, Restart::kEnd},
                           {126, kHostSetup, Fault::kHost, Restart::kEnd},
                           {127, kHostSetup, Fault::kHost, Restart::kEnd},
                           {128, kHostSetup, Fault::kHost, Restart::kEnd},
                           {128 + SIGKILL, kKilled, Fault::kRank, Restart::kInPlace},
                           {128 + SIGSEGV, kCrash, Fault::kRank, Restart::kInPlace},
                           {128 + SIGTERM, kAskedToGo, Fault::kScheduler, Restart::kLeave},
                           {201, kDevice, Fault::kHost, Restart::kEnd},
                           {202, kDevice, Fault::kHost, Restart::kEnd}}) {
      CAPTURE(row.code);
      const FailureClass which = of_code(row.code);
      CHECK(rule_of(which).name == rule_of(row.which).name);
      CHECK(rule_of(which).fault == row.fault);
      CHECK(restart_here(which) == row.here);
    }
    for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE}) CHECK(of_signal(signal) == kCrash);
    CHECK(of_signal(SIGTERM) == kAskedToGo);
    CHECK(of_signal(SIGXCPU) == kKilled);
    CHECK(signal_of({.exit_code = 139}) == SIGSEGV);
    CHECK(signal_of({.exit_code = 128}) == 0);
    CHECK(signal_of({.exit_code = 201}) == 0);  // no signal has the number 73
  }

  TEST_CASE("names of classes are distinct, and are found again") {
    for (size_t k = 0; k < kFailureClasses; ++k) {
      const auto which = static_cast<FailureClass>(k);
      CHECK(class_named(rule_of(which).name) == which);
    }
    CHECK_FALSE(class_named("").has_value());
    CHECK_FALSE(class_named("other").has_value());
  }

  TEST_CASE("SIGKILL is lack of memory only where the kernel has counted it, or says so of this process") {
    CHECK(of_signal(SIGKILL, {.oom_kills = 1}) == kOutOfMemory);
    CHECK(of_code(137, {.oom_kills = 1}) == kOutOfMemory);
    CHECK(of_signal(SIGKILL, {.oom_kills = 0}) == kKilled);
    CHECK(of_signal(SIGKILL) == kKilled);
    CHECK(of_signal(SIGSEGV, {.oom_kills = 1}) == kCrash);
    const KernelFinding ours{KernelFinding::Kind::kOutOfMemory, 100, "Out of memory: Killed process 100 (cairn)"};
    KernelFinding other = ours;
    other.pid = 99;
    CHECK(of_signal(SIGKILL, {.kernel = ours}) == kOutOfMemory);
    CHECK(of_signal(SIGKILL, {.kernel = other}) == kKilled);
    CHECK(of_signal(SIGKILL, {.oom_kills = 0, .kernel = ours}) ==
          kKilled);  // the number of another container's process
    CHECK(
        evidence_text(kOutOfMemory, {.oom_kills = 1, .memory_peak_bytes = 64 << 20, .memory_limit_bytes = 64 << 20}) ==
        "out of memory: the kernel has killed 1 process of this cgroup (64.0 MiB of 64.0 MiB at the peak)");
    CHECK(evidence_text(kKilled, {.oom_kills = 0}).find("no lack of memory") != std::string::npos);
    CHECK(evidence_text(kKilled, {}).empty());
  }

  TEST_CASE("SIGBUS with a full /dev/shm is no crash") {
    CHECK(of_signal(SIGBUS, {.shm_full = true}) == kShmFull);
    CHECK(of_signal(SIGBUS, {.shm_full = false}) == kCrash);
    CHECK(of_signal(SIGSEGV, {.shm_full = true}) == kCrash);
  }

  TEST_CASE("a device that the kernel calls broken is the cause of whatever its ranks end by") {
    const Evidence broken{.kernel = KernelFinding{KernelFinding::Kind::kDevice, -1, "Xid 79"}};
    for (const int code : {1, 65, 69, 70, 76, 134}) CHECK(of_code(code, broken) == kDevice);
    CHECK(of_signal(SIGSEGV, broken) == kDevice);
    CHECK(of_code(2, broken) == kRefused);
    CHECK(evidence_text(kDevice, broken) == "the kernel's log: Xid 79");
    const Evidence program{.kernel = KernelFinding{KernelFinding::Kind::kProgram, -1, "Xid 31"}};
    CHECK(of_code(1, program) == kError);
    CHECK(evidence_text(kError, program) == "the kernel's log: Xid 31");
  }

  TEST_CASE("lines of the kernel's log: broken devices, mistakes of programs, memory, and what matters to nobody") {
    using Kind = KernelFinding::Kind;
    const auto kind = [](const std::string& line) -> int {
      const std::optional<KernelFinding> found = find_in_kernel_line(line);
      return found ? static_cast<int>(found->kind) : -1;
    };
    const auto xid = [](int number) {
      return "4,900,12345678,-;NVRM: Xid (PCI:0000:3b:00): " + std::to_string(number) + ", pid=812, name=cairn";
    };
    for (const int number :
         {46, 48, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143, 154, 156, 158}) {
      CAPTURE(number);
      CHECK(kind(xid(number)) == static_cast<int>(Kind::kDevice));
    }
    for (const int number : {11, 13, 25, 31, 43, 45, 69, 137}) {
      CAPTURE(number);
      CHECK(kind(xid(number)) == static_cast<int>(Kind::kProgram));
    }
    CHECK(kind("NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x2 (OS Reboot) to 0x0 (None)") ==
          -1);
    CHECK(kind(xid(68)) == -1);
    CHECK(find_in_kernel_line(xid(31))->pid == 812);
    CHECK(kind("0,7,1,-;mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: be00000000800400") ==
          static_cast<int>(Kind::kDevice));
    CHECK(kind("mce: [Hardware Error]: Machine check events logged") == -1);  // may have been corrected
    CHECK(kind("Memory failure: 0x12345: recovery action for dirty LRU page: Recovered") ==
          static_cast<int>(Kind::kDevice));
    const auto oom = find_in_kernel_line(
        "3,1,2,-;Memory cgroup out of memory: Killed process 4711 (cairn) total-vm:1kB, anon-rss:1kB");
    REQUIRE(oom.has_value());
    CHECK(oom->kind == Kind::kOutOfMemory);
    CHECK(oom->pid == 4711);
    CHECK(kind("6,1,2,-;usb 1-1: new device") == -1);
    CHECK(kind("NVRM: Xid (PCI") == -1);
    CHECK(kind("NVRM: Xid (PCI:1): x") == -1);
    CHECK(kind("") == -1);
  }

  TEST_CASE("of the kernel's log only what comes after the start counts, and the weightiest of it") {
    const TempDir dir("kernel-log");
    const fs::path path = dir.path / "kmsg";
    write(path, std::string(kXid79) + "\n");
    KernelLog log(path);
    CHECK_FALSE(log.finding().has_value());
    std::ofstream more(path, std::ios::app);
    more << kXid31 << "\nsomething else\n" << std::string(kXid79).substr(0, 30);
    more.flush();
    REQUIRE(log.finding().has_value());
    CHECK(log.finding()->kind == KernelFinding::Kind::kProgram);
    more << std::string(kXid79).substr(30) << "\n" << kXid31 << "\n";
    more.flush();
    REQUIRE(log.finding().has_value());
    CHECK(log.finding()->kind == KernelFinding::Kind::kDevice);
    CHECK(log.finding()->text == kXid79);
    log.skip();
    CHECK_FALSE(log.finding().has_value());
    CHECK_FALSE(KernelLog(dir.path / "none").finding().has_value());
  }

  TEST_CASE("of a whole log the last Xid of each GPU and number is told, since the driver was loaded") {
    const TempDir dir("kernel-log");
    const fs::path path = dir.path / "kmsg";
    const std::string xid48 = "NVRM: Xid (PCI:0000:5e:00): 48, pid=1, DBE";
    write(path, xid48 + "\n4,1,2,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.65.06\n" +
                    std::string(kXid31) + "\nNVRM: Xid (PCI:0000:3b:00): 79, the first\n" + "4,900,12345678,-;" +
                    kXid79 + "\nNVRM: Xid (PCI:0000:5e:00): 63, remapped");
    const cairn::Result<std::vector<Xid>> found = xids_in(path);
    REQUIRE(found.ok());
    CHECK(found.value() == std::vector<Xid>{{79, "0000:3b:00", "fallen off the bus", true, kXid79},
                                            {63, "0000:5e:00", "memory to be remapped", false,
                                             "NVRM: Xid (PCI:0000:5e:00): 63, remapped"}});
    const std::string of_mig = "NVRM: Xid (PCI:0000:3b:00 GPU-I:02 GPU-CI:00): 94, pid=1, contained";
    const std::string recovery = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from ";
    write(path, of_mig + "\n" + recovery + "0x0 (None) to 0x1 (GPU Reset Required)\n");
    REQUIRE(xids_in(path).ok());
    CHECK(xids_in(path).value() == std::vector<Xid>{{94, "0000:3b:00", "contained memory error", false, of_mig},
                                                    {154, "0000:3b:00", "the driver asks for its recovery", true,
                                                     recovery + "0x0 (None) to 0x1 (GPU Reset Required)"}});
    write(path, recovery + "0x0 (None) to 0x1 (GPU Reset Required)\n" + recovery +
                    "0x1 (GPU Reset Required) to 0x0 (None)\n");
    REQUIRE(xids_in(path).ok());
    CHECK(xids_in(path).value().empty());
    write(path, "NVRM: Xid (PCI\nNVRM: Xid (PCI:1): x\nNVRM: Xid (): 79\n" + std::string(100'000, 'x'));
    REQUIRE(xids_in(path).ok());
    CHECK(xids_in(path).value().size() == 1);  // of no GPU that it names
    const cairn::Result<std::vector<Xid>> none = xids_in(dir.path / "none");
    REQUIRE_FALSE(none.ok());
    CHECK(none.error().message.find((dir.path / "none").string()) != std::string::npos);
  }

  TEST_CASE("a host shows what has happened since its ranks started") {
    const TempDir dir("host-watch");
    write(dir.path / "self", "0::/\n");
    write(dir.path / "cg/memory.events", "oom_kill 3\n");
    write(dir.path / "kmsg", "");
    HostWatch watch({.cgroups = dir.path / "cg",
                     .self_cgroup = dir.path / "self",
                     .kernel_log = dir.path / "kmsg",
                     .shm = dir.path});
    CHECK(watch.look().oom_kills == 0);
    CHECK_FALSE(watch.look().shm_full);
    write(dir.path / "cg/memory.events", "oom_kill 4\n");
    std::ofstream(dir.path / "kmsg", std::ios::app) << kXid79 << "\n";
    CHECK(watch.look().oom_kills == 1);
    REQUIRE(watch.look().kernel.has_value());
    watch.begin();
    CHECK(watch.look().oom_kills == 0);
    CHECK_FALSE(watch.look().kernel.has_value());
  }
}
