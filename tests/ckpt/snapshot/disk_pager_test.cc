#include "ckpt/snapshot/disk_pager.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "runtime/core/unique_handle.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

constexpr int64_t kBytes = int64_t{16} << 20;

struct Mapping {
  Fd fd;
  std::byte* base = nullptr;

  Mapping() {
    std::string path = CAIRN_BINARY_DIR "/disk-pager-XXXXXX";
    fd = Fd(mkstemp(path.data()));
    REQUIRE(fd);
    unlink(path.c_str());
    REQUIRE(ftruncate(fd.get(), kBytes) == 0);
    base = static_cast<std::byte*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
    REQUIRE(base != MAP_FAILED);
  }
  ~Mapping() { munmap(base, kBytes); }
  bool on_disk() const {
    struct statfs info {};
    return fstatfs(fd.get(), &info) == 0 && info.f_type != 0x01021994;
  }
  int64_t resident_pages(int64_t offset, int64_t bytes) const {
    std::vector<unsigned char> in(static_cast<size_t>(bytes / 4096));
    REQUIRE(mincore(base + offset, static_cast<size_t>(bytes), in.data()) == 0);
    int64_t out = 0;
    for (const unsigned char page : in) out += page & 1;
    return out;
  }
};

}  // namespace

TEST_SUITE("ckpt/snapshot/disk_pager") {
  TEST_CASE("pages that the disk pager releases are on disk and out of memory, and come back as they were") {
    for (const bool ring : {true, false}) {
      CAPTURE(ring);
      Mapping file;
      auto* words = reinterpret_cast<uint32_t*>(file.base);
      for (int64_t i = 0; i < kBytes / 4; ++i) words[i] = static_cast<uint32_t>(i * 2654435761u);
      DiskPager pager(file.fd.get(), file.base, 3, ring);
      if (!ring) CHECK_FALSE(pager.uses_ring());
      // Areas begin and end anywhere; more of them than may be on their way.
      std::vector<DeviceBytes> areas;
      for (int64_t at = 0; at < kBytes; at += kBytes / 8)
        areas.push_back({DevicePtr(file.base + at + 64), kBytes / 8 - 128});
      pager.release(areas, true);
      pager.settle();
      if (file.on_disk()) CHECK(file.resident_pages(0, kBytes) <= 8 * 16);  // read-ahead may bring some again
      pager.fetch(areas);
      int64_t wrong = 0;
      for (int64_t i = 0; i < kBytes / 4; ++i) wrong += words[i] != static_cast<uint32_t>(i * 2654435761u) ? 1 : 0;
      CHECK(wrong == 0);
      pager.release(areas, false);
      pager.settle();
      if (file.on_disk()) CHECK(file.resident_pages(0, kBytes) <= 8 * 16);
    }
  }

  TEST_CASE("a write-back that fails is told, and its bytes stay") {
    for (const bool ring : {true, false}) {
      CAPTURE(ring);
      Mapping file;
      int ends[2];
      REQUIRE(::pipe(ends) == 0);
      const Fd in(ends[0]), out(ends[1]);
      DiskPager pager(out.get(), file.base, 4, ring);  // nothing can be written back through a pipe
      std::memset(file.base, 7, kBytes);
      const DeviceBytes area{DevicePtr(file.base), kBytes};
      pager.release(std::span(&area, 1), false);
      pager.settle();
      CHECK(pager.status().ok());
      pager.release(std::span(&area, 1), true);
      pager.settle();
      REQUIRE_FALSE(pager.status().ok());
      CHECK(pager.status().error().message.find("optimizer.offload") != std::string::npos);
      CHECK(static_cast<int>(file.base[kBytes / 2]) == 7);
    }
  }

  TEST_CASE("pages that are written while their neighbours are released lose nothing") {
    Mapping file;
    DiskPager pager(file.fd.get(), file.base, 4);
    auto* bytes = reinterpret_cast<unsigned char*>(file.base);
    // Both sides of each boundary lie in one page; the left one is released while the right one is written.
    constexpr int64_t kStep = 100'000;
    int64_t at = 0;
    for (; at + kStep <= kBytes; at += kStep) {
      std::memset(bytes + at, static_cast<int>(at / kStep % 251), kStep);
      const DeviceBytes area{DevicePtr(file.base + at), kStep};
      pager.release(std::span(&area, 1), true);
    }
    pager.settle();
    int64_t wrong = 0;
    for (int64_t i = 0; i < at; ++i) wrong += bytes[i] != static_cast<unsigned char>(i / kStep % 251) ? 1 : 0;
    CHECK(wrong == 0);
  }
}
