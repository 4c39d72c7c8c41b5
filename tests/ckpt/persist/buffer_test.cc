#include "ckpt/persist/buffer.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <vector>

#include "ckpt/persist/layout.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/stream_copy.h"
#include "ckpt/store/memory_backend.h"
#include "tests/ckpt/persist/test_state.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// One shard of five whole chunks of 4 MiB and a ragged one, and a small one.
TestState large_state() {
  return make_state(12, 5, 1, {{"a", "weight", DType::kU8, {21 * kMiB + 77}, 1}, {"b", "weight", DType::kU8, {99}, 1}});
}

}  // namespace

TEST_SUITE("ckpt/persist/buffer") {
  TEST_CASE("a store keeps buffers by size up to its bound, and lets the oldest go") {
    BufferStore store(8 * kMiB);
    CHECK(!store.take_kept(4 * kMiB));
    Buffer first = store.take(4 * kMiB).value(), second = store.take(2 * kMiB).value();
    const std::byte* const at = first.bytes().data();
    store.put_back(std::move(first));
    store.put_back(std::move(second));
    CHECK(store.memory_bytes() == 6 * kMiB);
    CHECK(!store.take_kept(kMiB));
    std::optional<Buffer> again = store.take_kept(4 * kMiB);
    REQUIRE(again);
    CHECK(again->bytes().data() == at);
    CHECK(store.memory_bytes() == 2 * kMiB);
    store.put_back(std::move(*again));
    store.put_back(Buffer::allocate(4 * kMiB).value());  // 10 MiB: the one of 2 goes
    CHECK(store.memory_bytes() == 8 * kMiB);
    CHECK(!store.take_kept(2 * kMiB));
    store.put_back(Buffer::allocate(16 * kMiB).value());  // never fits
    CHECK(store.memory_bytes() == 8 * kMiB);
    store.put_back(Buffer());
    CHECK(store.memory_bytes() == 8 * kMiB);
    store.limit(7 * kMiB);
    CHECK(store.memory_bytes() == 4 * kMiB);
    store.put_back(Buffer::allocate(4 * kMiB).value());
    CHECK(store.memory_bytes() == 4 * kMiB);
  }

  TEST_CASE("a streamed copy is a copy, from and to any address, and writes nothing beside it") {
    std::vector<std::byte> from(1200), to(1200);
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(mix64(i) % 255);
    for (size_t source : {0, 1, 17, 63}) {
      for (size_t target = 0; target < 66; ++target) {
        for (size_t bytes : {0, 1, 63, 64, 65, 127, 128, 191, 1000}) {
          CAPTURE(source);
          CAPTURE(target);
          CAPTURE(bytes);
          std::fill(to.begin(), to.end(), std::byte{255});
          stream_copy(to.data() + target, std::span(from).subspan(source, bytes));
          std::vector<std::byte> expected(to.size(), std::byte{255});
          std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(source), bytes,
                      expected.begin() + static_cast<std::ptrdiff_t>(target));
          REQUIRE((to == expected));
        }
      }
    }
  }

  TEST_CASE("the layouts and buffers kept after a save of many small shards stay within their limit") {
    std::vector<TensorSpec> specs;
    for (int64_t t = 0; t < 800; ++t) specs.push_back({fmt::format("t{}", t), "weight", DType::kU8, {12'000}, 1});
    SaveOptions options;
    options.fill_bytes = 8 * kMiB;
    SaveCache cache;
    options.cache = &cache;
    MemoryBackend disk;
    REQUIRE(save(disk, "/ck", make_state(1, 1, 1, specs), options).ok());
    CHECK(cache.layout_bytes() > kMiB / 2);
    CHECK(cache.memory_bytes() <= options.fill_bytes);
    CHECK(cache.buffers().memory_bytes() >= options.fill_bytes / 4);
  }

  TEST_CASE("a warmer makes as many as it was asked for, and stops when nobody waits any more") {
    BufferWarmer warmer(2 * kMiB, 5);
    std::set<const std::byte*> seen;
    std::vector<Buffer> held;
    while (std::optional<Buffer> buffer = warmer.wait()) {
      CHECK(buffer->bytes().size() == 2 * kMiB);
      seen.insert(buffer->bytes().data());
      held.push_back(std::move(*buffer));
    }
    CHECK(seen.size() == 5);
    CHECK(warmer.finished());
    CHECK(!warmer.poll());
    BufferWarmer unused(2 * kMiB, 1000);
    CHECK(unused.wait());
    BufferWarmer none(2 * kMiB, 0);
    CHECK(!none.wait());
  }

  TEST_CASE("touching leaves the bytes as they are") {
    Buffer buffer = Buffer::allocate(3 * kMiB).value();
    for (size_t i = 0; i < buffer.bytes().size(); ++i) buffer.bytes()[i] = static_cast<std::byte>(i * 7 + i / 4096);
    const std::vector<std::byte> before(buffer.bytes().begin(), buffer.bytes().end());
    buffer.touch();
    CHECK(std::equal(before.begin(), before.end(), buffer.bytes().begin()));
  }

  TEST_CASE("saves and loads share one store, and the second of each makes no new memory") {
    const TestState state = large_state();
    MemoryBackend memory;
    BufferStore store(kBounceBytes);
    SaveCache cache(&store);
    SaveOptions options;
    options.cache = &cache;
    REQUIRE(prepare_buffers(state.parts, options).ok());
    const int64_t prepared = store.memory_bytes();
    CHECK(prepared >= 21 * kMiB);
    REQUIRE(save(memory, "/ck", state, options).ok());
    CHECK(store.memory_bytes() == prepared);
    for (int round = 0; round < 2; ++round) {
      CHECK(compare(memory, "/ck/step-00000012", state, {.buffers = &store}) == "");
      CHECK(compare(memory, "/ck/step-00000012", state, {.verify = false, .buffers = &store}) == "");
    }
    const int64_t loaded = store.memory_bytes();
    REQUIRE(save(memory, "/ck", state, options).ok());
    CHECK(compare(memory, "/ck/step-00000012", state, {.buffers = &store}) == "");
    CHECK(store.memory_bytes() == loaded);
    CHECK(loaded <= kBounceBytes);
  }

  TEST_CASE("a damaged chunk that is compared while it is copied is named; a reader without a store reads the rest") {
    const TestState state = large_state();
    MemoryBackend memory;
    REQUIRE(save(memory, "/ck", state, SaveOptions{}).ok());
    const std::string path = "/ck/step-00000012/" + state.parts[0].file_name;
    const Manifest m = read_manifest(memory, "/ck/step-00000012").value();
    const int64_t damaged = m.shards[0].offset + 2 * (4 * kMiB) + 12345;
    std::string bytes = read_file(memory, path, int64_t{1} << 30).value();
    bytes[static_cast<size_t>(damaged)] ^= 16;
    REQUIRE(memory.remove_file(path).ok());
    REQUIRE(write_file(memory, path, bytes).ok());
    CheckpointReader reader = CheckpointReader::open(memory, "/ck/step-00000012").value();
    std::vector<std::byte> target(static_cast<size_t>(m.shards[0].bytes));
    const Status read = reader.read_shard(0, target);
    REQUIRE(!read.ok());
    CHECK(read.error().code == ErrorCode::kCorrupt);
    CHECK(read.error().message.find("chunk 2 of 6") != std::string::npos);
    const ReadRange good{m.shards[0].file, m.shards[0].offset + 12 * kMiB, 9 * kMiB, target.data()};
    CHECK(reader.read_ranges(std::span(&good, 1)).ok());
    CHECK(std::equal(target.begin(), target.begin() + 9 * kMiB, state.tensors[0].begin() + 12 * kMiB));
  }
}
