#include "ckpt/copy/state_copier.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "ckpt/copy/host_link.h"
#include "ckpt/copy/summed_copy.h"
#include "runtime/core/random.h"
#include "runtime/core/word_sums.h"
#include "tests/support/copy_gate.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

std::vector<uint32_t> noise(int64_t words, uint64_t seed = 1) {
  std::vector<uint32_t> out(static_cast<size_t>(words));
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint32_t>(mix64(seed * 1000003 + i));
  return out;
}

std::span<std::byte> bytes_of(std::vector<uint32_t>& words) { return std::as_writable_bytes(std::span(words)); }

/// What a device would do: pieces come after a while, in order, and what is read is what is there when they come.
class SlowLink : public DeviceLink {
 public:
  explicit SlowLink(std::chrono::microseconds delay, int64_t depth = 4, int64_t fail_at = -1)
      : delay_(delay), depth_(depth), fail_at_(fail_at) {}
  Status use_host(std::span<std::byte>) override { return {}; }
  Status follow_work() override { return {}; }
  bool at_once() const override { return false; }
  int64_t depth() const override { return depth_; }
  Result<std::optional<uint64_t>> fetch(DeviceBytes device, std::byte* host) override {
    coming_.push_back({{address_of(device.first), static_cast<size_t>(device.size)}, host});
    most_ = std::max(most_, std::ssize(coming_));
    return std::optional<uint64_t>();
  }
  Status arrive() override {
    std::this_thread::sleep_for(delay_);
    if (arrived_++ == fail_at_) return Error{ErrorCode::kIo, "the device is gone"};
    std::memcpy(coming_.front().second, coming_.front().first.data(), coming_.front().first.size());
    coming_.erase(coming_.begin());
    return {};
  }
  Status store(std::span<const std::byte>, DevicePtr<std::byte>) override { return {}; }
  Status settle() override { return {}; }
  int64_t most() const { return most_; }

 private:
  std::chrono::microseconds delay_;
  int64_t depth_, fail_at_, arrived_ = 0, most_ = 0;
  std::vector<std::pair<std::span<const std::byte>, std::byte*>> coming_;
};

/// Two tensors of two arrays each, the second longer, and a short vector, in a slot of theirs.
struct State {
  std::vector<std::vector<uint32_t>> arrays = {noise(700'000, 1), noise(700'000, 2), noise(900'001, 3),
                                               noise(900'001, 4), noise(5, 5)};
  std::vector<std::byte> slot = std::vector<std::byte>(16 * kMiB);
  int64_t offset(size_t array) const {
    int64_t at = 0;
    for (size_t k = 0; k < array; ++k) at += (std::ssize(arrays[k]) * 4 + 63) / 64 * 64;
    return at;
  }
  std::vector<CopyPart> parts() {
    const auto array = [&](size_t k) {
      return CopyArray{DevicePtr(bytes_of(arrays[k]).data()), offset(k), std::ssize(arrays[k]) * 4,
                       static_cast<int64_t>(k)};
    };
    return parts_of(std::vector<std::vector<CopyArray>>{{array(4)}, {array(0), array(1)}, {array(2), array(3)}});
  }
  std::vector<uint64_t> sums() {
    std::vector<uint64_t> out;
    for (auto& array : arrays) out.push_back(word_sums(bytes_of(array).data(), std::ssize(array)));
    return out;
  }
};

/// Sets `done`.
template <typename Flag>
StateCopier::Done tells(Flag& done) {
  return [&done](std::span<const uint64_t>) {
    done = true;
    return Status();
  };
}

}  // namespace

TEST_SUITE("ckpt/copy") {
  TEST_CASE("a copy with sums is the bytes and their word_sums, of any length and alignment") {
    std::mt19937 random(7);
    for (int64_t words : {0, 1, 15, 16, 17, 1023, 1024, 4095, 4096, 4097, 8192, 12305, 100'000}) {
      for (const int64_t shift : {0, 4, 16, 64}) {
        std::vector<uint32_t> from = noise(words + 64, static_cast<uint64_t>(words));
        std::vector<std::byte> raw(static_cast<size_t>(words * 4 + 256), std::byte{0x55});
        std::byte* const to =
            reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(raw.data()) + 63) / 64 * 64) + shift;
        const auto source = bytes_of(from).subspan(random() % 16 * 4, static_cast<size_t>(words) * 4);
        CHECK(summed_copy(to, source) == word_sums_plain(source.data(), words));
        CHECK(std::memcmp(to, source.data(), source.size()) == 0);
        CHECK(to[words * 4] == std::byte{0x55});
      }
    }
  }

  TEST_CASE("parts go as an update does: block by block through the arrays of a tensor, tensor by tensor") {
    std::vector<std::byte> memory(1000);
    const auto parts = parts_of(std::vector<std::vector<CopyArray>>{{{DevicePtr(memory.data()), 0, 40, 7}},
                                                                    {{DevicePtr(memory.data() + 100), 64, 100, 1},
                                                                     {DevicePtr(memory.data() + 300), 192, 100, 2}}},
                                64);
    REQUIRE(parts.size() == 5);
    std::vector<std::vector<int64_t>> got;
    for (const CopyPart& p : parts)
      got.push_back({address_of(p.from) - memory.data(), p.offset, p.bytes, p.shard, p.word});
    CHECK(
        got ==
        std::vector<std::vector<int64_t>>{
            {0, 0, 40, 7, 0}, {100, 64, 64, 1, 0}, {300, 192, 64, 2, 0}, {164, 128, 36, 1, 16}, {364, 256, 36, 2, 16}});
  }

  TEST_CASE("a copy holds the state and its sums when it began, whatever is overwritten behind the gate") {
    for (const char* kind : {"host", "device"}) {
      CAPTURE(kind);
      State state;
      auto link = std::string_view(kind) == "host" ? make_host_link()
                                                   : std::make_unique<SlowLink>(std::chrono::microseconds(300));
      StateCopier copier(std::move(link), 0);
      copier.cover(state.parts(), 5);
      for (int round = 0; round < 50; ++round) {
        const auto before = state.arrays;
        const auto sums = state.sums();
        std::vector<uint64_t> told;
        REQUIRE(copier
                    .start(state.slot.data(),
                           [&](std::span<const uint64_t> got) {
                             told.assign(got.begin(), got.end());
                             return Status();
                           })
                    .ok());
        // An update: in place, in blocks that are not the copier's, sometimes at once and sometimes later.
        if (round % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
        for (const size_t k : {4, 0, 1, 2, 3}) {
          auto& array = state.arrays[k];
          for (size_t at = 0; at < array.size(); at += 300'000) {
            const size_t count = std::min<size_t>(300'000, array.size() - at);
            const std::span<std::byte> area = bytes_of(array).subspan(at * 4, count * 4);
            cairn::testing::wait_for(copier, area);
            for (size_t i = at; i < at + count; ++i) array[i] = array[i] * 3 + 1;
          }
        }
        REQUIRE(copier.finish().ok());
        CHECK(told == sums);
        for (size_t k = 0; k < before.size(); ++k) {
          CHECK(std::memcmp(state.slot.data() + state.offset(k), before[k].data(), before[k].size() * 4) == 0);
        }
      }
    }
  }

  TEST_CASE("an update waits for what it overwrites and for no more") {
    State state;
    StateCopier copier(std::make_unique<SlowLink>(std::chrono::milliseconds(20), 1), 0);
    copier.cover(state.parts(), 5);
    const auto parts = std::ssize(state.parts());
    std::atomic<bool> done = false;
    const auto begin = std::chrono::steady_clock::now();
    REQUIRE(copier.start(state.slot.data(), tells(done)).ok());
    const std::span<std::byte> first = bytes_of(state.arrays[4]), last = bytes_of(state.arrays[3]).last(4);
    cairn::testing::wait_for(copier, first);
    const auto waited = std::chrono::steady_clock::now() - begin;
    CHECK_FALSE(done);
    CHECK(waited >= std::chrono::milliseconds(20));
    CHECK(waited < parts * std::chrono::milliseconds(10));  // half of the whole
    cairn::testing::wait_for(copier, last);
    CHECK(std::chrono::steady_clock::now() - begin >= parts * std::chrono::milliseconds(20));
    CHECK(copier.waited_ns() >= parts * 20'000'000);
    REQUIRE(copier.finish().ok());
    CHECK(done);
    const int64_t before = copier.waited_ns();
    cairn::testing::wait_for(copier, first);  // nothing is under way
    CHECK(copier.waited_ns() == before);
  }

  TEST_CASE("the copier has as many pieces under way as the link wants") {
    State state;
    auto link = std::make_unique<SlowLink>(std::chrono::microseconds(100), 3);
    const SlowLink& seen = *link;
    StateCopier copier(std::move(link), 0);
    copier.cover(state.parts(), 5);
    REQUIRE(copier.start(state.slot.data(), [&](std::span<const uint64_t>) { return Status(); }).ok());
    REQUIRE(copier.finish().ok());
    CHECK(seen.most() == 3);
  }

  TEST_CASE("an update waits for what is copied, not for its sums, and neither does the device") {
    // A device that is faster than sums: what is ordered is there.
    struct FastLink final : SlowLink {
      FastLink() : SlowLink(std::chrono::microseconds(0), 8) {}
      Result<std::optional<uint64_t>> fetch(DeviceBytes, std::byte*) override { return std::optional<uint64_t>(); }
      Result<bool> has_arrived() override { return true; }
      Status arrive() override { return {}; }
    };
    constexpr int64_t kBytes = 256 * kMiB;
    std::vector<std::byte> slot(kBytes);
    StateCopier copier(std::make_unique<FastLink>(), 0);
    copier.cover(parts_of(std::vector<std::vector<CopyArray>>{{{DevicePtr(slot.data()), 0, kBytes, 0}}}), 1);
    std::atomic<bool> done = false;
    const auto begin = std::chrono::steady_clock::now();
    REQUIRE(copier.start(slot.data(), tells(done)).ok());
    const std::span<std::byte> last = std::span(slot).last(4);
    cairn::testing::wait_for(copier, last);
    const auto waited = std::chrono::steady_clock::now() - begin;
    REQUIRE(copier.finish().ok());
    CHECK(done);
    CHECK(waited * 2 < std::chrono::steady_clock::now() - begin);  // an eighth, if nobody else is at work
  }

  TEST_CASE("a copy that fails lets everybody go on, and every later call says why") {
    State state;
    StateCopier copier(std::make_unique<SlowLink>(std::chrono::microseconds(100), 2, 3), 0);
    copier.cover(state.parts(), 5);
    bool done = false;
    REQUIRE(copier.start(state.slot.data(), tells(done)).ok());
    for (auto& array : state.arrays) {
      const std::span<std::byte> all = bytes_of(array);
      cairn::testing::wait_for(copier, all);
    }
    for (int again = 0; again < 2; ++again) {
      REQUIRE_FALSE(copier.finish().ok());
      CHECK(copier.finish().error().message == "the device is gone");
      CHECK_FALSE(copier.status().ok());
      CHECK_FALSE(copier.start(state.slot.data(), [&](std::span<const uint64_t>) { return Status(); }).ok());
    }
    CHECK_FALSE(done);
    State other;
    StateCopier untold(make_host_link(), 0);
    untold.cover(other.parts(), 5);
    REQUIRE(untold
                .start(other.slot.data(),
                       [&](std::span<const uint64_t>) {
                         return Status(Error{ErrorCode::kInvalidInput, "no room for the header"});
                       })
                .ok());
    CHECK(untold.finish().error().message == "no room for the header");
  }

  TEST_CASE("a copier that goes gives up its copy") {
    State state;
    std::atomic<bool> done = false;
    const auto begin = std::chrono::steady_clock::now();
    {
      StateCopier copier(std::make_unique<SlowLink>(std::chrono::milliseconds(50), 1), 0);
      copier.cover(state.parts(), 5);
      REQUIRE(copier
                  .start(state.slot.data(),
                         [&](std::span<const uint64_t>) {
                           done = true;
                           return Status();
                         })
                  .ok());
    }
    CHECK_FALSE(done);
    CHECK(std::chrono::steady_clock::now() - begin < std::ssize(state.parts()) * std::chrono::milliseconds(50));
  }

  TEST_CASE("a rank that saves nothing has published at once") {
    StateCopier copier(make_host_link(), 0);
    copier.cover({}, 0);
    bool done = false;
    REQUIRE(copier
                .start(nullptr,
                       [&](std::span<const uint64_t> sums) {
                         done = sums.empty();
                         return Status();
                       })
                .ok());
    CHECK(done);
    CHECK(copier.finish().ok());
  }
}
