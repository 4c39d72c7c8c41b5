// Real processes, real files: a writer killed with SIGKILL, and a kernel that refuses io_uring.
#include <doctest/doctest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

TestState state_at(int64_t step) { return make_state(step, static_cast<uint64_t>(step)); }

SaveOptions own_name() {
  SaveOptions options = small_options();
  options.writer.reset();  // this process, so that others can see whether it lives
  return options;
}

// Saves steps one after the other, keeping two, until it is killed. Exits only on an error.
[[noreturn]] void write_for_ever(const fs::path& dir) {
  const std::unique_ptr<IoBackend> io = make_best_backend();
  const Result<Catalog> before = list_checkpoints(*io, dir);
  if (!before.ok()) ::_exit(3);
  const std::vector<CheckpointInfo>& there = before.value().checkpoints;
  for (int64_t step = there.empty() ? 1 : there.back().step;; ++step) {  // the last one again: replaced
    if (!save(*io, dir, state_at(step), own_name()).ok()) ::_exit(4);
    if (!apply_retention(*io, dir, {2, {}}, this_writer()).ok()) ::_exit(5);
  }
}

}  // namespace

TEST_SUITE("ckpt/persist/crash") {
  TEST_CASE("a writer killed at any moment leaves whole checkpoints and leftovers that are recognised as dead") {
    const cairn::testing::TempDir dir("crash");
    const std::unique_ptr<IoBackend> io = make_best_backend();
    int64_t newest = 0, leftovers = 0;  // enough of both, however slow the disk is
    for (uint64_t round = 0; round < 25 || (round < 400 && (newest <= 3 || leftovers <= 3)); ++round) {
      CAPTURE(round);
      const pid_t child = ::fork();
      if (child == 0) write_for_ever(dir.path);
      ::usleep(static_cast<useconds_t>(2000 + mix64(round) % 200'000));
      ::kill(child, SIGKILL);
      int status = 0;
      ::waitpid(child, &status, 0);
      REQUIRE(WIFSIGNALED(status));
      const Catalog catalog = list_checkpoints(*io, dir.path).value();
      leftovers += static_cast<int64_t>(catalog.leftovers.size());
      for (const CheckpointInfo& info : catalog.checkpoints) {
        REQUIRE_MESSAGE(info.complete, info.problem);
        REQUIRE(compare(*io, info.dir, state_at(info.step)) == "");
        REQUIRE(verify_checkpoint(*io, info.dir).value().whole());
      }
      if (!catalog.checkpoints.empty()) {
        REQUIRE(catalog.checkpoints.back().step >= newest);  // what was committed never goes back
        newest = catalog.checkpoints.back().step;
      }
      const CleanReport cleaned = clean_leftovers(*io, dir.path).value();
      REQUIRE(cleaned.left.empty());
      REQUIRE(list_checkpoints(*io, dir.path).value().leftovers.empty());
    }
    MESSAGE(newest << " steps saved, " << leftovers << " leftovers found");
    CHECK(newest > 3);
    CHECK(leftovers > 3);
  }

  TEST_CASE("without io_uring the plain backend is used, and the bytes are the same") {
    const cairn::testing::TempDir dir("no-uring");
    const TestState state = state_at(12);
    const pid_t child = ::fork();
    if (child == 0) {
      sock_filter refuse[] = {
          BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      };
      const sock_fprog program{4, refuse};
      if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        ::_exit(77);
      const Result<std::unique_ptr<IoBackend>> ring = make_uring_backend();
      if (ring.ok() || ring.error().code != ErrorCode::kUnsupported) ::_exit(3);
      const std::unique_ptr<IoBackend> io = make_best_backend();
      if (io->name() != "posix") ::_exit(4);
      ::_exit(save(*io, dir.path, state).ok() ? 0 : 5);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    REQUIRE(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) {
      MESSAGE("skipped: this machine allows no seccomp filter");
      return;
    }
    REQUIRE(WEXITSTATUS(status) == 0);
    const std::unique_ptr<IoBackend> io = make_best_backend();
    CHECK(compare(*io, dir.path / "step-00000012", state) == "");
    REQUIRE(io->rename(dir.path / "step-00000012", dir.path / "plain").ok());
    REQUIRE(save(*io, dir.path, state).ok());
    const std::vector<DirEntry> names = io->list(dir.path / "plain").value();
    CHECK(names.size() == 4);
    for (const DirEntry& entry : names) {
      CHECK((read_file(*io, dir.path / "plain" / entry.name, 1 << 20).value() ==
             read_file(*io, dir.path / "step-00000012" / entry.name, 1 << 20).value()));
    }
  }
}
