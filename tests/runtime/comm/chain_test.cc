// Groups with several members on each of several hosts: the bits of a fold in rank order, and each byte once over a
// host's network.
#include <doctest/doctest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <filesystem>

#include "runtime/core/random.h"
#include "tests/runtime/comm/fabric.h"

using namespace cairn;
using namespace cairn::comm;
using namespace cairn::comm::testing;

namespace {

/// Values whose sums depend on the order of addition.
std::vector<float> payload(int64_t rank, int64_t count) {
  const uint64_t key = stream_key(11, fmt::format("rank {}", rank));
  std::vector<float> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const double scale = (rank + i) % 3 == 0 ? 1e4 : 1.0;
    out[static_cast<size_t>(i)] = static_cast<float>((uniform_at(key, static_cast<uint64_t>(i)) - 0.5) * scale);
  }
  return out;
}

/// before[i] + ..., of trees of so many neighbours, by the definition; `before` may be none.
std::vector<float> folded(const std::vector<float>* before, int64_t ranks, int64_t tree, int64_t count) {
  std::vector<float> out;
  if (before != nullptr) out = *before;
  for (int64_t r = 0; r < ranks; r += tree) {
    std::vector<std::vector<float>> level;
    for (int64_t k = 0; k < tree; ++k) level.push_back(payload(r + k, count));
    while (level.size() > 1) {
      std::vector<std::vector<float>> next;
      for (size_t k = 0; k + 1 < level.size(); k += 2) {
        next.push_back(level[k]);
        for (size_t i = 0; i < next.back().size(); ++i) next.back()[i] += level[k + 1][i];
      }
      level = std::move(next);
    }
    if (out.empty()) {
      out = level[0];
    } else {
      for (size_t i = 0; i < out.size(); ++i) out[i] += level[0][i];
    }
  }
  return out;
}

bool same(const float* a, const std::vector<float>& b, int64_t first, int64_t count) {
  return std::memcmp(a, b.data() + first, static_cast<size_t>(count) * 4) == 0;
}

/// Bytes that this process's TCP connections have sent, as the kernel counts them.
int64_t sent_bytes() {
  int64_t out = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    tcp_info info = {};
    socklen_t size = sizeof(info);
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_state == 1) {
      // Counts what was written: bytes that wait too, but none that the network sent again.
      out += static_cast<int64_t>(info.tcpi_bytes_sent - info.tcpi_bytes_retrans) + info.tcpi_notsent_bytes;
    }
  }
  return out;
}

struct Shape {
  int64_t hosts, members;
};
constexpr Shape kChained[] = {{2, 3}, {4, 2}, {2, 4}};

}  // namespace

TEST_SUITE("runtime/comm/chain") {
  TEST_CASE("sums over hosts with several members each are folded in rank order, bit for bit") {
    // A piece is 64 Ki floats: less than one, one and a bit, several whole ones.
    for (const Shape shape : {Shape{2, 2}, kChained[0], kChained[1], kChained[2]}) {  // the first: gathers alone
      for (const int64_t count : {3001, 65537, 5 * 65536}) {
        CAPTURE(shape.hosts);
        CAPTURE(shape.members);
        CAPTURE(count);
        const int64_t n = shape.hosts * shape.members;
        const auto results = run_hosts({.size = n}, shape.hosts, [&](Engine& engine) -> std::string {
          EXPECT_SET(auto comm, engine.group("dp", all_ranks(n)));
          const int64_t rank = engine.world_rank();
          for (int round = 0; round < 2; ++round) {  // the second one begins where the first has left its buffers
            std::vector<float> all = payload(rank, n * count);
            const std::vector<float> before(static_cast<size_t>(count), 0.25F * static_cast<float>(rank));
            std::vector<float> out = before;
            for (const int64_t tree : {int64_t{1}, shape.members}) {
              if (tree == 3) continue;
              out = before;
              EXPECT_OK(comm->reduce_scatter_add(all.data(), out.data(), count, DType::kF32, tree, "added"));
              std::vector<float> starts(static_cast<size_t>(n * count));
              std::copy_n(before.begin(), count, starts.begin() + rank * count);
              EXPECT(same(out.data(), folded(&starts, n, tree, n * count), rank * count, count));
            }
            const std::vector<float> sum = folded(nullptr, n, 1, n * count);
            EXPECT_OK(comm->reduce_scatter(all.data(), out.data(), count, DType::kF32, ReduceOp::kSum, "apart"));
            EXPECT(same(out.data(), sum, rank * count, count));
            EXPECT_OK(comm->reduce_scatter(all.data(), all.data() + rank * count, count, DType::kF32, ReduceOp::kSum,
                                           "in place"));
            EXPECT(same(all.data() + rank * count, sum, rank * count, count));
            EXPECT_OK(comm->all_gather(all.data() + rank * count, all.data(), count * 4, "in place"));
            EXPECT(same(all.data(), sum, 0, n * count));
            std::vector<float> again = payload(rank, n * count - 5);
            EXPECT_OK(comm->all_reduce(again.data(), n * count - 5, DType::kF32, ReduceOp::kSum, "whole"));
            EXPECT(same(again.data(), folded(nullptr, n, 1, n * count - 5), 0, n * count - 5));
          }
          return "";
        });
        for (const std::string& result : results) CHECK(result == "");
      }
    }
  }

  TEST_CASE("a host sends and receives what is summed or gathered once, however many members it has") {
    for (const Shape shape : kChained) {
      CAPTURE(shape.hosts);
      CAPTURE(shape.members);
      const int64_t n = shape.hosts * shape.members, count = int64_t{1} << 18, bytes = n * count * 4;
      const Shared<std::array<std::atomic<int64_t>, 3 * 8>> sent;
      const Shared<std::atomic<int64_t>> measured;
      const auto results = run_hosts({.size = n}, shape.hosts, [&](Engine& engine) -> std::string {
        EXPECT_SET(auto comm, engine.group("dp", all_ranks(n)));
        const int64_t rank = engine.world_rank();
        std::vector<float> all(static_cast<size_t>(n * count), 1.0F), out(static_cast<size_t>(count));
        const std::function<Status()> operations[] = {
            [&] { return comm->reduce_scatter(all.data(), out.data(), count, DType::kF32, ReduceOp::kSum, "x"); },
            [&] { return comm->all_gather(out.data(), all.data(), count * 4, "x"); },
            [&] { return comm->all_reduce(all.data(), n * count, DType::kF32, ReduceOp::kSum, "x"); }};
        for (size_t k = 0; k < 3; ++k) {
          const int64_t before = sent_bytes();
          EXPECT_OK(operations[k]());
          (*sent)[k * 8 + static_cast<size_t>(rank / shape.members)] += sent_bytes() - before;
        }
        meet(measured, n);
        return "";
      });
      REQUIRE(results == std::vector<std::string>(static_cast<size_t>(n), ""));
      for (int64_t host = 0; host < shape.hosts; ++host) {
        CAPTURE(host);
        const auto of = [&](size_t operation) {
          return static_cast<double>((*sent)[operation * 8 + static_cast<size_t>(host)]) / static_cast<double>(bytes);
        };
        const double others = 1 - 1 / static_cast<double>(shape.hosts);
        const bool last = host == shape.hosts - 1, first = host == 0;
        CHECK(of(0) == doctest::Approx(last ? others : 1.0).epsilon(0.01));
        CHECK(of(1) == doctest::Approx(others).epsilon(0.01));
        CHECK(of(2) == doctest::Approx(first || last ? 1.0 : 2.0).epsilon(0.01));
      }
    }
  }
}
