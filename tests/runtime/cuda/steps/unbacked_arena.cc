#include "tests/runtime/cuda/steps/unbacked_arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "ckpt/restore.h"
#include "ckpt/run_memory.h"
#include "ckpt/snapshot/prepared_memory.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/core/check.h"
#include "tests/support/temp_dir.h"

// In place of the system's, for code of this program.
extern "C" int posix_fallocate(int /*file*/, off_t /*offset*/, off_t /*length*/) { return 0; }
extern "C" int madvise(void* at, size_t bytes, int advice) noexcept {
  constexpr int kPopulateWrite = 23;
  return advice == kPopulateWrite ? 0 : static_cast<int>(syscall(SYS_madvise, at, bytes, advice));
}

namespace cairn::testing {
namespace {

template <typename T>
T value_of(Result<T> made) {
  RT_CHECK(made.ok(), "{}", made.error().message);
  return std::move(made).value();
}

/// Zeros that are never written take no memory to read, huge ones nearly no time either.
void put_zeros(std::span<std::byte> slot) {
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(slot.data()) + kPage - 1) / kPage * kPage;
  const uintptr_t end = reinterpret_cast<uintptr_t>(slot.data() + slot.size()) / kPage * kPage;
  if (begin >= end) return;
  void* const there = mmap(reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  RT_CHECK(there != MAP_FAILED, "{} bytes of addresses", end - begin);
  madvise(there, end - begin, MADV_HUGEPAGE);
}

}  // namespace

UnbackedArena::UnbackedArena(const Plan& plan) {
  static int64_t made = 0;
  ckpt::ArenaSpec spec =
      value_of(ckpt::arena_spec(plan, {.run_name = "steps",
                                       .run_id = "steps-" + std::to_string(getpid()) + "-" + std::to_string(++made),
                                       .recipe_json = "{}",
                                       .recipe_hash = "steps"}));
  spec.huge_pages = false;
  // Prepared memory counts as room.
  spec.prepared = std::make_shared<ckpt::PreparedMemory>(
      value_of(ckpt::PreparedMemory::make(spec.folder, ckpt::Arena::total_bytes(spec), false, {})));
  arena_ = std::make_unique<ckpt::Arena>(value_of(ckpt::Arena::create(spec)));
  for (int64_t slot = 0; slot < arena_->slots(); ++slot) put_zeros(arena_->payload(0, slot));
  const TempDir none;
  ckpt::PosixBackend io;
  ckpt::RestoreDecider decider(plan, *arena_, io, ckpt::RestoreRequest{none.path, {}});
  value_of(decider.next_incarnation());
}

UnbackedArena::~UnbackedArena() { ignore(arena_->remove(), "end of the test"); }

}  // namespace cairn::testing
