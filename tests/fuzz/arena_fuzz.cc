// Input: edits of a small snapshot segment: a flag (mend the header's own hash), then place and 8 bytes. Attaching
// refuses it or everything it hands out lies inside the mapping.
#include <sys/mman.h>
#include <unistd.h>

#include <numeric>

#include "ckpt/format/checksum.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/snapshot.h"
#include "tests/fuzz/target.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

std::vector<std::byte> base_segment() {
  ArenaSpec spec{.run_id = "fuzz", .recipe_hash = "hash", .layout_hash = 77};
  for (const int64_t scale : {1, 2}) {
    SlotLayout layout;
    for (const int64_t bytes : {int64_t{200}, 5000 * scale, int64_t{64}}) {
      const int64_t offset = (layout.bytes + 4095) / 4096 * 4096;
      layout.shards.push_back({0, 0, {}, offset, bytes});
      layout.bytes = offset + bytes;
    }
    layout.bytes = (layout.bytes + 4095) / 4096 * 4096;
    spec.ranks.push_back(layout);
  }
  spec.directory = "what lies here";
  spec.chunk_bytes = 16 << 10;
  spec.backing = ArenaBacking::kMemfd;
  spec.huge_pages = false;
  const Result<Arena> arena = Arena::create(spec);
  RT_CHECK(arena.ok(), "{}", arena.error().message);
  std::vector<std::byte> out(static_cast<size_t>(arena.value().bytes()));
  RT_CHECK(::pread(arena.value().fd(), out.data(), out.size(), 0) == static_cast<ssize_t>(out.size()), "short read");
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<std::byte> base = base_segment();
  std::vector<std::byte> bytes = base;
  fuzz::Feed feed(data, size);
  const bool mend = feed.number(1) % 8 != 0;
  for (int edits = 0; edits < 16 && !feed.empty(); ++edits) {
    // Mostly in the first pages, which hold header and tables.
    const uint64_t where = feed.number(1), place = feed.number(2) * 4;
    const uint64_t at = (where % 4 == 0 ? place * 4 : place % 8192) % (bytes.size() - 8);
    const uint64_t value = feed.number(8);
    std::memcpy(bytes.data() + at, &value, 8);
  }
  auto* const header = reinterpret_cast<arena::StaticHeader*>(bytes.data());
  if (mend && header->static_bytes >= static_cast<int64_t>(sizeof(arena::StaticHeader)) &&
      header->static_bytes <= static_cast<int64_t>(bytes.size())) {
    std::vector<std::byte> part(bytes.begin(), bytes.begin() + header->static_bytes);
    std::memset(part.data(), 0, 8);
    std::memset(part.data() + offsetof(arena::StaticHeader, static_hash), 0, 8);
    header->static_hash = hash_bytes(part);
  }
  const Fd fd(::memfd_create("fuzz", MFD_CLOEXEC));
  RT_CHECK(::write(fd.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "short write");
  const Result<Arena> arena = Arena::attach_fd(fd.get());
  if (!arena.ok()) return 0;
  const Arena& a = arena.value();
  uint64_t sum = a.directory().size() + a.run_id().size() + a.recipe_hash().size();
  const auto touch = [&](std::span<std::byte> memory) {
    if (!memory.empty()) sum += static_cast<uint64_t>(memory.front()) + static_cast<uint64_t>(memory.back());
  };
  for (int64_t rank = 0; rank < a.world(); ++rank) {
    for (int64_t slot = 0; slot < a.slots(); ++slot) {
      const std::span<std::byte> payload = a.payload(rank, slot);
      touch(payload);
      touch(std::as_writable_bytes(a.position_area(rank, slot)));
      for (const arena::ShardExtent& extent : a.shards(rank))
        touch(payload.subspan(static_cast<size_t>(extent.offset), static_cast<size_t>(extent.bytes)));
      sum += static_cast<uint64_t>(a.mark(rank, slot).step);
    }
  }
  sum += a.views().size() + newest_verified(a, Check::kEveryByte).has_value();
  asm volatile("" : : "r"(sum));  // the bytes are read although nobody wants them
  return 0;
}
