#include "ckpt/snapshot/populate.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

namespace {

struct Mapped {
  explicit Mapped(int64_t size, int protection = PROT_READ | PROT_WRITE)
      : bytes(size), base(mmap(nullptr, size, protection, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  ~Mapped() { munmap(base, bytes); }
  /// Pages of [first, first + count) bytes that are there.
  int64_t pages(int64_t first, int64_t count) const {
    std::vector<unsigned char> there(count / 4096);
    mincore(static_cast<std::byte*>(base) + first, count, there.data());
    return std::count_if(there.begin(), there.end(), [](unsigned char one) { return (one & 1) != 0; });
  }
  int64_t bytes;
  void* base;
};

}  // namespace

TEST_SUITE("ckpt/snapshot/populate") {
  TEST_CASE("all pages are made and no others, by one thread and by several") {
    for (const int64_t bytes : {int64_t{4096}, int64_t{65} << 20, (int64_t{513} << 20) + 4096}) {
      CAPTURE(bytes);
      const Mapped memory(bytes + 4096);
      REQUIRE(memory.base != MAP_FAILED);
      const int made = cairn::ckpt::populate(memory.base, bytes);
      if (made == EINVAL) return;  // a kernel that cannot
      CHECK(made == 0);
      CHECK(memory.pages(0, bytes) == bytes / 4096);
      CHECK(memory.pages(bytes, 4096) == 0);
    }
  }

  TEST_CASE("what cannot be made is told") {
    const Mapped memory(int64_t{1} << 20, PROT_READ);
    REQUIRE(memory.base != MAP_FAILED);
    CHECK(cairn::ckpt::populate(memory.base, memory.bytes) != 0);
    CHECK(cairn::ckpt::populate(memory.base, 0) == 0);
  }
}
