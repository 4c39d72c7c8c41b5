#include "ckpt/copy/state_copier.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
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

/// What a device does: what is fetched comes later, in order, once a test lets it, and is what is there then.
class GatedLink : public DeviceLink {
 public:
  struct Mark final : Event {
    explicit Mark(int64_t fetches) : fetches(fetches) {}
    const int64_t fetches;  // before it
  };
  explicit GatedLink(int64_t piece_bytes = kMiB, int64_t depth = 1000) : piece_bytes_(piece_bytes), depth_(depth) {}
  Status use_host(std::span<std::byte>) override { return {}; }
  Status follow_work() override { return {}; }
  bool at_once() const override { return false; }
  int64_t depth() const override { return depth_; }
  int64_t piece_bytes(int64_t) const override { return piece_bytes_; }
  int64_t deadline_ms() const override { return deadline_ms_; }
  Result<std::optional<uint64_t>> fetch(DeviceBytes device, std::byte* host) override {
    const std::lock_guard lock(mutex_);
    coming_.push_back({{address_of(device.first), static_cast<size_t>(device.size)}, host});
    ++fetched_;
    most_ = std::max(most_, std::ssize(coming_));
    return std::optional<uint64_t>();
  }
  Result<std::shared_ptr<const Event>> mark() override {
    const std::lock_guard lock(mutex_);
    return std::shared_ptr<const Event>(std::make_shared<Mark>(fetched_));
  }
  Result<bool> has_arrived(const Event& mark) override {
    const std::lock_guard lock(mutex_);
    const int64_t wanted = static_cast<const Mark&>(mark).fetches;
    for (; arrived_ < wanted && arrived_ < let_; ++arrived_) {
      if (arrived_ == fail_at_) return Error{ErrorCode::kIo, "the device is gone"};
      std::memcpy(coming_.front().second, coming_.front().first.data(), coming_.front().first.size());
      coming_.pop_front();
    }
    return arrived_ >= wanted;
  }
  Status store(std::span<const std::byte>, DevicePtr<std::byte>) override { return {}; }
  Status settle() override { return {}; }

  /// Lets the first `fetches` of all arrive.
  void let(int64_t fetches) {
    const std::lock_guard lock(mutex_);
    let_ = fetches;
  }
  void let_all() { let(std::numeric_limits<int64_t>::max()); }
  void fail_at(int64_t fetch) { fail_at_ = fetch; }
  void set_deadline_ms(int64_t ms) { deadline_ms_ = ms; }
  int64_t most() const { return most_; }

 private:
  const int64_t piece_bytes_, depth_;
  int64_t fail_at_ = -1, deadline_ms_ = 0;
  std::mutex mutex_;
  int64_t fetched_ = 0, arrived_ = 0, let_ = 0, most_ = 0;
  std::deque<std::pair<std::span<const std::byte>, std::byte*>> coming_;
};

/// A stream of a device, which does nothing but keep what it follows.
class FollowingStream final : public Stream {
 public:
  Device device() const override { return {DeviceKind::kCuda, 0}; }
  std::unique_ptr<Stream> beside() const override { return nullptr; }
  void follow(const std::shared_ptr<const Event>& event) override { followed.push_back(event); }
  std::vector<std::shared_ptr<const Event>> followed;

 private:
  Status wait() override { return {}; }
  DevicePtr<const void> give_bytes(std::span<const std::byte>, DevicePtr<void> room) override { return room; }
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
  std::vector<std::vector<CopyArray>> groups() {
    const auto array = [&](size_t k) {
      return CopyArray{DevicePtr(bytes_of(arrays[k]).data()), offset(k), std::ssize(arrays[k]) * 4,
                       static_cast<int64_t>(k)};
    };
    return {{array(4)}, {array(0), array(1)}, {array(2), array(3)}};
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

/// Keeps the sums of a copy that is whole.
StateCopier::Done kept_in(std::vector<uint64_t>& told) {
  return [&told](std::span<const uint64_t> got) {
    told.assign(got.begin(), got.end());
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
      std::unique_ptr<DeviceLink> link = make_host_link();
      if (std::string_view(kind) == "device") {
        auto gated = std::make_unique<GatedLink>();
        gated->let_all();
        link = std::move(gated);
      }
      StateCopier copier(std::move(link), 0);
      REQUIRE(copier.cover(state.groups(), 5).ok());
      for (int round = 0; round < 50; ++round) {
        const auto before = state.arrays;
        const auto sums = state.sums();
        std::vector<uint64_t> told;
        REQUIRE(copier.start(state.slot.data(), kept_in(told)).ok());
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

  TEST_CASE("work done at once waits for the piece that it overwrites and for no more") {
    State state;
    auto owned = std::make_unique<GatedLink>();
    GatedLink& link = *owned;
    StateCopier copier(std::move(owned), 0);
    REQUIRE(copier.cover(state.groups(), 5).ok());
    std::atomic<bool> done = false;
    REQUIRE(copier.start(state.slot.data(), tells(done)).ok());
    link.let(2);  // the vector, and the block behind it which fills a piece
    cairn::testing::wait_for(copier, bytes_of(state.arrays[4]));
    CHECK_FALSE(done);
    std::atomic<bool> overwritten = false;
    std::thread update([&] {
      cairn::testing::wait_for(copier, bytes_of(state.arrays[3]).last(4));
      overwritten = true;
    });
    link.let(parts_of(state.groups(), kMiB).size() - 1);
    cairn::testing::wait_for(copier, bytes_of(state.arrays[0]));
    CHECK_FALSE(overwritten);
    link.let_all();
    update.join();
    REQUIRE(copier.finish().ok());
    CHECK(done);
    const int64_t before = copier.waited_ns();
    CHECK(before > 0);
    cairn::testing::wait_for(copier, bytes_of(state.arrays[4]));  // nothing is under way
    CHECK(copier.waited_ns() == before);
  }

  TEST_CASE("a device's update is ordered behind the piece that it overwrites, while nothing has arrived") {
    State state;
    auto owned = std::make_unique<GatedLink>();
    GatedLink& link = *owned;
    StateCopier copier(std::move(owned), 0);
    REQUIRE(copier.cover(state.groups(), 5).ok());
    constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
    CHECK(copier.block_bytes() == kAll);
    for (int round = 0; round < 2; ++round) {
      CAPTURE(round);
      std::atomic<bool> done = false;
      FollowingStream stream;
      const auto order = [&](std::span<std::byte> area) {
        const DeviceBytes bytes{DevicePtr(area.data()), std::ssize(area)};
        copier.order_after_copy(stream, {&bytes, 1});
      };
      REQUIRE(copier.start(state.slot.data(), tells(done)).ok());
      CHECK(copier.block_bytes() == kMiB / 2);  // of two arrays at a time
      for (const size_t k : {4, 0, 1, 2, 3}) {
        for (int64_t at = 0; at < std::ssize(state.arrays[k]); at += 50'000) {
          order(bytes_of(state.arrays[k]).subspan(static_cast<size_t>(at) * 4, 4));
        }
      }
      CHECK_FALSE(done);
      // Each mark is followed once, in order, up to the last.
      std::vector<int64_t> fetches;
      for (const auto& event : stream.followed) fetches.push_back(static_cast<const GatedLink::Mark&>(*event).fetches);
      CHECK(std::ranges::is_sorted(fetches));
      CHECK(std::ranges::adjacent_find(fetches) == fetches.end());
      const int64_t parts = std::ssize(parts_of(state.groups(), kMiB));
      CHECK(fetches.front() <= round * parts + 2);
      CHECK(fetches.back() == (round + 1) * parts);
      CHECK(fetches.size() > 5);
      link.let((round + 1) * parts);
      REQUIRE(copier.finish().ok());
      CHECK(done);
      CHECK(copier.block_bytes() == kAll);
    }
  }

  TEST_CASE(
      "pieces are so large that a whole update is at most 64 blocks, and copies so small that others fit between") {
    struct Plain final : GatedLink {
      int64_t piece_bytes(int64_t bytes) const override { return DeviceLink::piece_bytes(bytes); }
    } const link;
    CHECK(link.piece_bytes(1) == 64 * kMiB);
    CHECK(link.piece_bytes(48 * 64 * kMiB) == 64 * kMiB);
    CHECK(link.piece_bytes(48 * 64 * kMiB + 1) == 64 * kMiB + 1);
    CHECK(fetch_bytes(1) == 8 * kMiB);
    CHECK(fetch_bytes(512 * 8 * kMiB) == 8 * kMiB);
    CHECK(fetch_bytes(512 * 8 * kMiB + 512 * 4) == 8 * kMiB + 4);
  }

  TEST_CASE("arrays that lie behind one another as in the slot are fetched together, and no others") {
    constexpr int64_t kTensors = 9, kKinds = 3, kBank = kMiB / 2;
    const auto bytes_of_tensor = [](int64_t tensor) { return tensor % 3 == 2 ? int64_t{100'000} : 40 + 4 * tensor; };
    const auto begin_of = [&](int64_t kind, int64_t tensor) {
      int64_t at = kind * kBank;
      for (int64_t t = 0; t < tensor; ++t) at = (at + bytes_of_tensor(t) + 63) / 64 * 64;
      return at;
    };
    for (const bool one_apart : {false, true}) {
      CAPTURE(one_apart);
      std::vector<uint32_t> bank = noise(kKinds * kBank / 4), apart = noise(kBank / 4, 2);
      std::vector<std::byte> slot(kKinds * kBank, std::byte{0x55});
      std::vector<std::vector<CopyArray>> groups;
      for (int64_t tensor = 0; tensor < kTensors; ++tensor) {
        std::vector<CopyArray>& group = groups.emplace_back();
        for (int64_t kind = 0; kind < kKinds; ++kind) {
          const int64_t at = begin_of(kind, tensor);
          const bool elsewhere = one_apart && tensor == 3 && kind == 1;  // 52 bytes, less than a page
          std::byte* const from = elsewhere ? bytes_of(apart).data() : bytes_of(bank).data() + at;
          group.push_back({DevicePtr(from), at, bytes_of_tensor(tensor), kind * kTensors + tensor});
        }
      }
      auto owned = std::make_unique<GatedLink>(64 * kMiB);
      GatedLink& link = *owned;
      link.let_all();
      StateCopier copier(std::move(owned), 0);
      REQUIRE(copier.cover(groups, kKinds * kTensors).ok());
      std::vector<uint64_t> told;
      REQUIRE(copier.start(slot.data(), kept_in(told)).ok());
      REQUIRE(copier.finish().ok());
      CHECK(link.most() == (one_apart ? kKinds + 2 : kKinds));
      for (const std::vector<CopyArray>& group : groups) {
        for (const CopyArray& array : group) {
          CHECK(std::memcmp(slot.data() + array.offset, address_of(array.from), static_cast<size_t>(array.bytes)) == 0);
          CHECK(told[static_cast<size_t>(array.shard)] == word_sums(address_of(array.from), array.bytes / 4));
        }
      }
    }
  }

  TEST_CASE("the copier has as many fetches on their way as the link takes") {
    State state;
    auto owned = std::make_unique<GatedLink>(kMiB, 3);
    GatedLink& link = *owned;
    link.let_all();
    StateCopier copier(std::move(owned), 0);
    REQUIRE(copier.cover(state.groups(), 5).ok());
    REQUIRE(copier.start(state.slot.data(), [&](std::span<const uint64_t>) { return Status(); }).ok());
    REQUIRE(copier.finish().ok());
    CHECK(link.most() == 3);
  }

  TEST_CASE("sums that the device takes are those of the shards, and the host takes none") {
    struct SummingLink final : GatedLink {
      Result<bool> sum_up(std::span<const DeviceBytes> arrays) override {
        of_arrays.resize(arrays.size());
        for (size_t k = 0; k < arrays.size(); ++k) of_arrays[k] = 100 + k;
        return true;
      }
      Status take_sums() override {
        taken += most() == 0 ? 1 : 0;  // before the fetches
        return {};
      }
      std::span<const uint64_t> sums() const override { return of_arrays; }
      std::vector<uint64_t> of_arrays;
      int taken = 0;
    };
    State state;
    auto owned = std::make_unique<SummingLink>();
    SummingLink& link = *owned;
    link.let_all();
    StateCopier copier(std::move(owned), 0);
    REQUIRE(copier.cover(state.groups(), 5).ok());
    std::vector<uint64_t> told;
    REQUIRE(copier.start(state.slot.data(), kept_in(told)).ok());
    REQUIRE(copier.finish().ok());
    CHECK(link.taken == 1);
    CHECK(told == std::vector<uint64_t>{101, 102, 103, 104, 100});  // the groups begin with shard 4
  }

  TEST_CASE("a copy that fails lets the update go, and every later call returns its error") {
    for (const bool late : {false, true}) {
      CAPTURE(late);
      State state;
      auto owned = std::make_unique<GatedLink>(kMiB, 2);
      if (late) {
        owned->set_deadline_ms(200);
        owned->let(3);
      } else {
        owned->fail_at(3);
        owned->let_all();
      }
      StateCopier copier(std::move(owned), 0);
      REQUIRE(copier.cover(state.groups(), 5).ok());
      bool done = false;
      REQUIRE(copier.start(state.slot.data(), tells(done)).ok());
      for (auto& array : state.arrays) cairn::testing::wait_for(copier, bytes_of(array));
      for (int again = 0; again < 2; ++again) {
        REQUIRE_FALSE(copier.finish().ok());
        const std::string message = copier.finish().error().message;
        CHECK_MESSAGE(message.find(late ? "has not arrived after 200 ms" : "the device is gone") != std::string::npos,
                      message);
        CHECK_FALSE(copier.status().ok());
        CHECK_FALSE(copier.start(state.slot.data(), [&](std::span<const uint64_t>) { return Status(); }).ok());
      }
      CHECK_FALSE(done);
    }
    // A link that takes no order any more: the update's own wait ends.
    struct StuckLink final : GatedLink {
      Result<std::optional<uint64_t>> fetch(DeviceBytes device, std::byte* host) override {
        stuck.wait(true);
        return GatedLink::fetch(device, host);
      }
      std::atomic<bool> stuck = true;
    };
    State held;
    auto owned = std::make_unique<StuckLink>();
    StuckLink& link = *owned;
    link.set_deadline_ms(20);
    StateCopier stuck(std::move(owned), 0);
    REQUIRE(stuck.cover(held.groups(), 5).ok());
    bool done = false;
    REQUIRE(stuck.start(held.slot.data(), tells(done)).ok());
    FollowingStream stream;
    const DeviceBytes area{DevicePtr(bytes_of(held.arrays[0]).data()), 4};
    stuck.order_after_copy(stream, {&area, 1});
    const std::string message = stuck.finish().error().message;
    CHECK_MESSAGE(message.find("the copier has come no further for 40 ms; piece ") != std::string::npos, message);
    link.stuck = false;
    link.stuck.notify_all();

    State other;
    StateCopier untold(make_host_link(), 0);
    REQUIRE(untold.cover(other.groups(), 5).ok());
    REQUIRE(untold
                .start(other.slot.data(),
                       [&](std::span<const uint64_t>) {
                         return Status(Error{ErrorCode::kInvalidInput, "no room for the header"});
                       })
                .ok());
    CHECK(untold.finish().error().message == "no room for the header");
  }

  TEST_CASE("a copier that goes gives up a copy that never arrives") {
    State state;
    std::atomic<bool> done = false;
    {
      StateCopier copier(std::make_unique<GatedLink>(kMiB, 4), 0);
      REQUIRE(copier.cover(state.groups(), 5).ok());
      REQUIRE(copier.start(state.slot.data(), tells(done)).ok());
    }
    CHECK_FALSE(done);
  }

  TEST_CASE("a rank that saves nothing has published at once") {
    StateCopier copier(make_host_link(), 0);
    REQUIRE(copier.cover({}, 0).ok());
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
