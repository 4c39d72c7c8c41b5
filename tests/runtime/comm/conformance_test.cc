// What comm.h promises, over every engine. Expected values come from a fold written down here, bit for bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <thread>

#include "runtime/comm/traced_engine.h"
#include "runtime/core/exact_sum.h"
#include "runtime/core/random.h"
#include "tests/runtime/comm/fabric.h"

using namespace cairn;
using namespace cairn::comm;
using namespace cairn::comm::testing;

namespace {

using Bytes = std::vector<char>;

// Values whose sums depend on the order of addition: magnitudes differ, mantissas are full.
double value_at(uint64_t key, int64_t i) {
  constexpr double kScales[] = {1, 10, 100, 1000, 10000};
  return (uniform_at(key, static_cast<uint64_t>(i)) - 0.5) * kScales[(key + static_cast<uint64_t>(i)) % 5];
}

template <typename T>
void put(Bytes& out, int64_t i, T x) {
  std::memcpy(out.data() + i * static_cast<int64_t>(sizeof(T)), &x, sizeof(T));
}
template <typename T>
T get(const Bytes& in, int64_t i) {
  T x;
  std::memcpy(&x, in.data() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return x;
}

Bytes payload(DType dtype, int64_t rank, int64_t count) {
  Bytes out(static_cast<size_t>(count * dtype_size_bytes(dtype)));
  const uint64_t key = stream_key(7, fmt::format("rank {}", rank));
  for (int64_t i = 0; i < count; ++i) {
    const double v = value_at(key, i);
    if (dtype == DType::kF32) put(out, i, static_cast<float>(v));
    if (dtype == DType::kBf16) put(out, i, to_bf16(static_cast<float>(v)));
    if (dtype == DType::kF64) put(out, i, v);
    if (dtype == DType::kI64) put(out, i, static_cast<int64_t>(v * 1000));
  }
  return out;
}

/// The tree over [begin, end) by its definition, from the top: the largest power of two below on the left.
template <typename Acc>
Acc tree_sum(const std::vector<Acc>& values, size_t begin, size_t end) {
  if (end - begin == 1) return values[begin];
  size_t left = 1;
  while (2 * left < end - begin) left *= 2;
  return tree_sum(values, begin, begin + left) + tree_sum(values, begin + left, end);
}

template <typename T, typename Acc>
Bytes fold(const std::vector<Bytes>& inputs, ReduceOp op, Acc (*widen)(T), T (*narrow)(Acc)) {
  Bytes out(inputs[0].size());
  for (int64_t i = 0; i < static_cast<int64_t>(out.size() / sizeof(T)); ++i) {
    Acc acc = widen(get<T>(inputs[0], i));
    std::vector<Acc> all = {acc};
    for (size_t r = 1; r < inputs.size(); ++r) {
      const Acc x = widen(get<T>(inputs[r], i));
      acc = op == ReduceOp::kSum ? acc + x : std::max(acc, x);
      all.push_back(x);
    }
    if (op == ReduceOp::kTreeSum) acc = tree_sum(all, 0, all.size());
    put(out, i, narrow(acc));
  }
  return out;
}

Bytes expected_reduce(const std::vector<Bytes>& inputs, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kF32:
      return fold<float, float>(
          inputs, op, [](float x) { return x; }, [](float x) { return x; });
    case DType::kBf16:
      return fold<bf16, float>(
          inputs, op, [](bf16 x) { return to_f32(x); }, [](float x) { return to_bf16(x); });
    case DType::kF64:
      return fold<double, double>(
          inputs, op, [](double x) { return x; }, [](double x) { return x; });
    default:
      return fold<int64_t, int64_t>(
          inputs, op, [](int64_t x) { return x; }, [](int64_t x) { return x; });
  }
}

std::vector<Bytes> payloads(DType dtype, int64_t ranks, int64_t count) {
  std::vector<Bytes> out;
  for (int64_t r = 0; r < ranks; ++r) out.push_back(payload(dtype, r, count));
  return out;
}

constexpr DType kDTypes[] = {DType::kF32, DType::kBf16, DType::kF64, DType::kI64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kTreeSum};

// Small staging sends even small payloads through many chunks.
constexpr int64_t kTinyStaging = 3 * 1024;

void run_all(const WorldSpec& spec, const Body& body) {
  for (const Fabric& fabric : fabrics()) {
    if (spec.staging_bytes == kTinyStaging && !fabric.staged) continue;  // nothing that the other sizes do not cover
    const std::vector<std::string> results = fabric.run(spec, body);
    REQUIRE(results.size() == static_cast<size_t>(spec.size));
    for (size_t r = 0; r < results.size(); ++r) {
      CAPTURE(fabric.name);
      CAPTURE(spec.size);
      CAPTURE(r);
      CHECK(results[r] == "");
    }
  }
}

}  // namespace

TEST_SUITE("runtime/comm/conformance") {
  TEST_CASE("all_reduce gives every rank the ordered fold or the tree, for any count, dtype, operation and staging") {
    for (const int64_t n : {2, 3, 4, 8}) {
      for (const int64_t staging : {kTinyStaging, int64_t{768} << 10}) {
        run_all({.size = n, .staging_bytes = staging}, [&](Engine& engine) -> std::string {
          EXPECT_SET(auto comm, engine.group("tp", all_ranks(n)));
          for (const int64_t count : {0, 1, 7, 1000, 33001}) {
            for (const DType dtype : kDTypes) {
              for (const ReduceOp op : kOps) {
                if (count > 10000 && (dtype == DType::kF64 || op == ReduceOp::kMax)) continue;
                Bytes data = payload(dtype, engine.world_rank(), count);
                EXPECT_OK(comm->all_reduce(data.data(), count, dtype, op, "x"));
                EXPECT(data == expected_reduce(payloads(dtype, n, count), dtype, op));
              }
            }
          }
          return "";
        });
      }
    }
  }

  TEST_CASE("an engine says whether it adds in the order of ranks, and adds so") {
    constexpr int64_t kCount = 4000;
    std::vector<Bytes> ordered = payloads(DType::kF32, 4, kCount), turned = ordered;
    std::reverse(turned.begin(), turned.end());
    const Bytes want = expected_reduce(ordered, DType::kF32, ReduceOp::kSum);
    REQUIRE(want != expected_reduce(turned, DType::kF32, ReduceOp::kSum));
    run_all({.size = 4}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto comm, engine.group("dp", all_ranks(4)));
      Bytes data = payload(DType::kF32, engine.world_rank(), kCount);
      EXPECT_OK(comm->all_reduce(data.data(), kCount, DType::kF32, ReduceOp::kSum, "gradients"));
      EXPECT(engine.keeps_rank_order() == (data == want));
      EXPECT(make_traced_engine(engine)->keeps_rank_order() == engine.keeps_rank_order());
      return "";
    });
  }

  TEST_CASE("a large all_reduce, many chunks of full staging") {
    run_all({.size = 3, .staging_bytes = 96 << 10}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto comm, engine.group("dp", {2, 0, 1}));  // group order is not world order
      const int64_t count = 250'003;
      Bytes data = payload(DType::kF32, engine.world_rank(), count);
      EXPECT_OK(comm->all_reduce(data.data(), count, DType::kF32, ReduceOp::kSum, "gradients"));
      const std::vector<Bytes> ordered = {payload(DType::kF32, 2, count), payload(DType::kF32, 0, count),
                                          payload(DType::kF32, 1, count)};
      EXPECT(data == expected_reduce(ordered, DType::kF32, ReduceOp::kSum));
      return "";
    });
  }

  TEST_CASE("bf16 is added in float32 and rounded once") {
    run_all({.size = 4}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto comm, engine.group("tp", all_ranks(4)));
      // 256 + 1 is not a bf16: adding 1 three times in bf16 would stay at 256, in float32 it makes 259 -> 260.
      bf16 x = to_bf16(engine.world_rank() == 0 ? 256.0f : 1.0f);
      EXPECT_OK(comm->all_reduce(&x, 1, DType::kBf16, ReduceOp::kSum, "x"));
      EXPECT(to_f32(x) == 260.0f);
      return "";
    });
  }

  TEST_CASE("a maximum hands a NaN on, wherever it comes from") {
    for (int64_t from = 0; from < 3; ++from) {
      run_all({.size = 3}, [&](Engine& engine) -> std::string {
        EXPECT_SET(auto comm, engine.group("dp", all_ranks(3)));
        float x = engine.world_rank() == from ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
        EXPECT_OK(comm->all_reduce(&x, 1, DType::kF32, ReduceOp::kMax, "spike guard"));
        EXPECT(std::isnan(x));
        return "";
      });
    }
  }

  TEST_CASE("reduce_scatter gives each rank its chunk, in place and out of place") {
    for (const int64_t n : {2, 3, 8}) {
      for (const int64_t staging : {kTinyStaging, int64_t{768} << 10}) {
        run_all({.size = n, .staging_bytes = staging}, [&](Engine& engine) -> std::string {
          EXPECT_SET(auto comm, engine.group("dp", all_ranks(n)));
          for (const int64_t count : {0, 1, 5, 1001, 9000}) {
            for (const DType dtype : {DType::kF32, DType::kBf16}) {
              const int64_t part = count * dtype_size_bytes(dtype);
              const Bytes input = payload(dtype, engine.world_rank(), n * count);
              for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kTreeSum}) {
                const Bytes sum = expected_reduce(payloads(dtype, n, n * count), dtype, op);
                const Bytes want(sum.begin() + comm->rank() * part, sum.begin() + (comm->rank() + 1) * part);
                Bytes out(static_cast<size_t>(part));
                EXPECT_OK(comm->reduce_scatter(input.data(), out.data(), count, dtype, op, "out of place"));
                EXPECT(out == want);
                Bytes both = input;
                char* mine = both.data() + comm->rank() * part;
                EXPECT_OK(comm->reduce_scatter(both.data(), mine, count, dtype, op, "in place"));
                EXPECT(Bytes(mine, mine + part) == want);
              }
            }
          }
          return "";
        });
      }
    }
  }

  TEST_CASE("all_gather and broadcast move any bytes, in place and out of place, from every root") {
    for (const int64_t n : {2, 3, 8}) {
      for (const int64_t staging : {kTinyStaging, int64_t{768} << 10}) {
        run_all({.size = n, .staging_bytes = staging}, [&](Engine& engine) -> std::string {
          EXPECT_SET(auto comm, engine.group("dp", all_ranks(n)));
          for (const int64_t count : {0, 1, 13, 4099}) {
            Bytes want;
            for (int64_t r = 0; r < n; ++r) {
              const Bytes part = payload(DType::kBf16, r, count);
              want.insert(want.end(), part.begin(), part.end());
            }
            const Bytes mine = payload(DType::kBf16, engine.world_rank(), count);
            const int64_t bytes = 2 * count;
            Bytes out(static_cast<size_t>(n * bytes));
            EXPECT_OK(comm->all_gather(mine.data(), out.data(), bytes, "out of place"));
            EXPECT(out == want);
            Bytes both(static_cast<size_t>(n * bytes));
            char* chunk = both.data() + comm->rank() * bytes;
            std::copy(mine.begin(), mine.end(), chunk);
            EXPECT_OK(comm->all_gather(chunk, both.data(), bytes, "in place"));
            EXPECT(both == want);
            for (int64_t root = 0; root < n; ++root) {
              Bytes data = mine;
              EXPECT_OK(comm->broadcast(data.data(), bytes, root, "from each"));
              EXPECT(data == payload(DType::kBf16, root, count));
            }
          }
          return "";
        });
      }
    }
  }

  TEST_CASE("all_to_all moves what each member has for each, in any parts, with nothing for some and much for others") {
    // What rank a sends to rank b in round k: sizes are unlike each other, zero among them, and some pass the staging.
    const auto bytes_of = [](int64_t a, int64_t b, int64_t k) -> int64_t {
      constexpr int64_t kSizes[] = {0, 1, 8, 1000, 13, 40'000, 0, 517};
      return kSizes[(3 * a + 5 * b + k) % 8] * (k == 3 ? 0 : 1);
    };
    const auto message = [](int64_t a, int64_t b, int64_t k, int64_t bytes) {
      Bytes out(static_cast<size_t>(bytes));
      const uint64_t key = stream_key(9, fmt::format("{} to {} round {}", a, b, k));
      for (int64_t i = 0; i < bytes; ++i) out[i] = static_cast<char>(mix64(key + static_cast<uint64_t>(i)));
      return out;
    };
    for (const int64_t n : {2, 3, 8}) {
      for (const int64_t staging : {kTinyStaging, int64_t{768} << 10}) {
        run_all({.size = n, .staging_bytes = staging}, [&](Engine& engine) -> std::string {
          std::vector<int64_t> members = all_ranks(n);
          std::swap(members.front(), members.back());  // group order is not world order
          EXPECT_SET(auto comm, engine.group("ep", members));
          const int64_t me = comm->rank();
          Traffic counted;
          for (int64_t k = 0; k < 5; ++k) {
            std::vector<Bytes> sent, received;
            std::vector<OutPart> out;
            std::vector<InPart> in;
            int64_t all = 0;
            for (int64_t r = 0; r < n; ++r) {
              sent.push_back(message(me, r, k, bytes_of(me, r, k)));
              received.emplace_back(static_cast<size_t>(bytes_of(r, me, k)));
              all += std::ssize(sent.back());
            }
            for (int64_t r = 0; r < n; ++r) {  // the two sides cut their bytes in other places
              const int64_t a = std::ssize(sent[r]), b = std::ssize(received[r]), cut = a / 3, other = b / 2;
              out.push_back({r, sent[r].data(), cut});
              out.push_back({r, nullptr, 0});
              out.push_back({r, sent[r].data() + cut, a - cut});
              in.push_back({r, received[r].data(), other});
              in.push_back({r, received[r].data() + other, b - other});
            }
            EXPECT_OK(comm->all_to_all(out, in, "rows"));
            for (int64_t r = 0; r < n; ++r) EXPECT(received[r] == message(r, me, k, bytes_of(r, me, k)));
            counted.all_to_all.add(all);
            EXPECT(comm->traffic() == counted);
          }
          return "";
        });
      }
    }
  }

  TEST_CASE("all_to_all: a group of one copies, and what cannot be is refused") {
    run_all({.size = 2}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto alone, engine.group("ep", {engine.world_rank()}));
      const char from[] = "abcdef";
      char to[7] = {};
      const OutPart out[] = {{0, from, 2}, {0, from + 2, 5}};
      const InPart in[] = {{0, to, 6}, {0, to + 6, 1}};
      EXPECT_OK(alone->all_to_all(out, in, "alone"));
      EXPECT(std::string(to) == "abcdef");
      EXPECT(alone->traffic() == Traffic{});
      EXPECT(!alone->all_to_all(out, {in, 1}, "one byte less").ok());

      EXPECT_SET(auto comm, engine.group("ep", all_ranks(2)));
      const OutPart turned[] = {{1, from, 1}, {0, from, 1}};
      EXPECT(comm->all_to_all(turned, {}, "order").error().code == ErrorCode::kInvalidInput);
      const OutPart outside[] = {{2, from, 1}};
      EXPECT(comm->all_to_all(outside, {}, "peer").error().code == ErrorCode::kInvalidInput);
      const InPart negative[] = {{0, to, -1}};
      EXPECT(comm->all_to_all({}, negative, "size").error().code == ErrorCode::kInvalidInput);
      // Nothing above talked to the other rank: one that left now could close the link while the other still connects.
      EXPECT_OK(comm->barrier("both are connected"));
      return "";
    });
  }

  TEST_CASE("all_to_all: sizes that sender and receiver see differently end the world, on every rank") {
    run_all({.size = 3}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto comm, engine.group("ep", all_ranks(3)));
      char from[4] = {}, to[4] = {};
      std::vector<OutPart> out;
      std::vector<InPart> in;
      for (int64_t r = 0; r < 3; ++r) {
        out.push_back({r, from, 1});
        in.push_back({r, to + r, comm->rank() == 1 && r == 2 ? 0 : 1});
      }
      const Status done = comm->all_to_all(out, in, "rows");
      if (comm->rank() == 1) {
        EXPECT(done.error().code == ErrorCode::kInternal);
        EXPECT(done.error().message.find("rank 2 sends 1 bytes, this rank expects 0") != std::string::npos);
      } else {
        EXPECT(!comm->barrier("after").ok());
      }
      return "";
    });
  }

  TEST_CASE("collectives of changing kind and size in a row, with ranks out of step, stay whole") {
    for (const Fabric& fabric : fabrics()) {
      for (const int64_t n : {2, 4, 8}) {
        const int64_t rounds = 1000 / fabric.scale;
        const auto results = fabric.run({.size = n, .staging_bytes = 6 << 10}, [&](Engine& engine) -> std::string {
          EXPECT_SET(auto comm, engine.group("tp", all_ranks(n)));
          const uint64_t key = stream_key(3, fmt::format("skew {}", engine.world_rank()));
          for (int64_t i = 0; i < rounds; ++i) {
            if (uniform_at(key, static_cast<uint64_t>(i)) < 0.02)
              std::this_thread::sleep_for(std::chrono::microseconds(200));
            const int64_t count = 1 + i % 700;
            std::vector<int64_t> data(static_cast<size_t>(count));
            for (int64_t k = 0; k < count; ++k) data[static_cast<size_t>(k)] = (engine.world_rank() + 1) * (i + k);
            EXPECT_OK(comm->all_reduce(data.data(), count, DType::kI64, ReduceOp::kSum, "round"));
            for (int64_t k = 0; k < count; ++k) EXPECT(data[static_cast<size_t>(k)] == n * (n + 1) / 2 * (i + k));
            if (i % 3 == 0) {
              std::vector<int64_t> all(static_cast<size_t>(n));
              const int64_t mine = i * 100 + engine.world_rank();
              EXPECT_OK(comm->all_gather(&mine, all.data(), 8, "round"));
              for (int64_t r = 0; r < n; ++r) EXPECT(all[static_cast<size_t>(r)] == i * 100 + r);
            }
            if (i % 7 == 0) EXPECT_OK(comm->barrier("round"));
          }
          return "";
        });
        for (const std::string& result : results) {
          CAPTURE(fabric.name);
          CAPTURE(n);
          CHECK(result == "");
        }
      }
    }
  }

  TEST_CASE("messages arrive in order, both ways at once, larger than the ring, empty, and to oneself") {
    for (const int64_t n : {2, 3}) {
      run_all({.size = n, .channel_bytes = 4096}, [&](Engine& engine) -> std::string {
        EXPECT_SET(auto comm, engine.group("pp", all_ranks(n)));
        const int64_t next = (comm->rank() + 1) % n, previous = (comm->rank() + n - 1) % n;
        for (int64_t round = 0; round < 5; ++round) {
          std::vector<Bytes> to_next, to_previous;
          for (const int64_t count : {0, 1, 50, 30000, 3}) {
            to_next.push_back(payload(DType::kF32, comm->rank() * 10 + round, count));
            to_previous.push_back(payload(DType::kBf16, comm->rank() * 10 + round, count));
          }
          for (size_t i = 0; i < to_next.size(); ++i) {
            EXPECT_OK(comm->isend(to_next[i].data(), static_cast<int64_t>(to_next[i].size()), next, "forward"));
            if (n > 2) {
              EXPECT_OK(
                  comm->isend(to_previous[i].data(), static_cast<int64_t>(to_previous[i].size()), previous, "back"));
            }
          }
          for (const int64_t count : {0, 1, 50, 30000, 3}) {
            Bytes got(static_cast<size_t>(count * 4));
            EXPECT_OK(comm->recv(got.data(), count * 4, previous, "forward"));
            EXPECT(got == payload(DType::kF32, previous * 10 + round, count));
          }
          if (n > 2) {
            for (const int64_t count : {0, 1, 50, 30000, 3}) {
              Bytes got(static_cast<size_t>(count * 2));
              EXPECT_OK(comm->recv(got.data(), count * 2, next, "back"));
              EXPECT(got == payload(DType::kBf16, next * 10 + round, count));
            }
          }
          EXPECT_OK(comm->wait_sends("all"));
          const int64_t sent = 42 + round;
          int64_t kept = 0;
          EXPECT_OK(comm->isend(&sent, 8, comm->rank(), "self"));
          EXPECT_OK(comm->recv(&kept, 8, comm->rank(), "self"));
          EXPECT(kept == 42 + round);
          EXPECT_OK(comm->wait_sends("self"));
        }
        return "";
      });
    }
  }

  TEST_CASE("a ring of buffers: sends are waited for by destination, the newest may stay under way") {
    constexpr int64_t kRing = 3, kBytes = 9000, kMessages = 11;
    for (const Fabric& fabric : fabrics()) {
      const auto results = fabric.run({.size = 3, .channel_bytes = 1024}, [&](Engine& engine) -> std::string {
        EXPECT_SET(auto comm, engine.group("pp", all_ranks(3)));
        EXPECT_OK(comm->wait_sends_to((comm->rank() + 1) % 3, 0, "before the first"));
        if (comm->rank() == 0) {
          std::vector<Bytes> ring(kRing, Bytes(kBytes));
          const Bytes other = payload(DType::kF32, 99, kBytes / 4);
          // Nobody takes this one before the others have been sent: it must not be waited for.
          EXPECT_OK(comm->isend(other.data(), kBytes, 2, "taken last"));
          for (int64_t k = 0; k < kMessages; ++k) {
            EXPECT_OK(comm->wait_sends_to(1, kRing - 1, "room"));
            std::ranges::copy(payload(DType::kF32, k, kBytes / 4), ring[k % kRing].begin());
            EXPECT_OK(comm->isend(ring[k % kRing].data(), kBytes, 1, "activations"));
          }
          EXPECT_OK(comm->wait_sends_to(1, 0, "all to rank 1"));
          for (Bytes& buffer : ring) std::ranges::fill(buffer, 0);
          const int64_t go = 1;
          EXPECT_OK(comm->isend(&go, 8, 2, "now"));
          EXPECT_OK(comm->wait_sends("end"));
        } else if (comm->rank() == 1) {
          for (int64_t k = 0; k < kMessages; ++k) {
            Bytes got(kBytes);
            EXPECT_OK(comm->recv(got.data(), kBytes, 0, "activations"));
            EXPECT(got == payload(DType::kF32, k, kBytes / 4));
          }
          const int64_t done = 1;
          EXPECT_OK(comm->isend(&done, 8, 2, "done"));
          EXPECT_OK(comm->wait_sends("end"));
        } else {
          int64_t word = 0;
          EXPECT_OK(comm->recv(&word, 8, 1, "done"));
          Bytes got(kBytes);
          EXPECT_OK(comm->recv(got.data(), kBytes, 0, "taken last"));
          EXPECT(got == payload(DType::kF32, 99, kBytes / 4));
          EXPECT_OK(comm->recv(&word, 8, 0, "now"));
        }
        return "";
      });
      CAPTURE(fabric.name);
      CHECK(results == std::vector<std::string>(3, ""));
    }
  }

  TEST_CASE("a pending send moves on while its rank waits in a collective of another group") {
    run_all({.size = 2, .channel_bytes = 1024}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto pp, engine.group("pp", {0, 1}));
      EXPECT_SET(auto dp, engine.group("dp", {0, 1}));
      const Bytes big = payload(DType::kF32, 0, 20000);
      if (engine.world_rank() == 0) {
        EXPECT_OK(pp->isend(big.data(), static_cast<int64_t>(big.size()), 1, "activations"));
        EXPECT_OK(dp->barrier("after"));
        EXPECT_OK(pp->wait_sends("activations"));
      } else {
        Bytes got(big.size());
        EXPECT_OK(pp->recv(got.data(), static_cast<int64_t>(got.size()), 0, "activations"));
        EXPECT(got == big);
        EXPECT_OK(dp->barrier("after"));
      }
      return "";
    });
  }

  TEST_CASE("a mesh of 2 x 2 x 2 ranks: all groups at once, each with its own members and order") {
    run_all({.size = 8}, [&](Engine& engine) -> std::string {
      const int64_t rank = engine.world_rank();
      const int64_t tp = rank % 2, dp = rank / 2 % 2, pp = rank / 4;
      const int64_t line = rank - tp, column = rank - 2 * dp, stage = rank - 4 * pp;
      EXPECT_SET(auto tp_comm, engine.group("tp", {line, line + 1}));
      EXPECT_SET(auto dp_comm, engine.group("dp", {column, column + 2}));
      EXPECT_SET(auto pp_comm, engine.group("pp", {stage, stage + 4}));
      EXPECT_SET(auto world, engine.group("world", all_ranks(8)));
      EXPECT_SET(auto again, engine.group("world", all_ranks(8)));  // a second one with the same members
      EXPECT(tp_comm->name() == fmt::format("tp[{},{}]", line, line + 1));
      EXPECT((tp_comm->rank() == tp && dp_comm->rank() == dp && pp_comm->rank() == pp && world->rank() == rank));
      for (int64_t i = 0; i < 20; ++i) {
        int64_t x = rank + i, y = rank, z = rank, w = 1;
        const int64_t sent = rank * 1000 + i;
        EXPECT_OK(pp_comm->isend(&sent, 8, 1 - pp, "stage"));
        EXPECT_OK(tp_comm->all_reduce(&x, 1, DType::kI64, ReduceOp::kSum, "x"));
        EXPECT(x == line + line + 1 + 2 * i);
        EXPECT_OK(dp_comm->all_reduce(&y, 1, DType::kI64, ReduceOp::kSum, "y"));
        EXPECT(y == 2 * column + 2);
        EXPECT_OK(world->all_reduce(&z, 1, DType::kI64, ReduceOp::kMax, "z"));
        EXPECT(z == 7);
        EXPECT_OK(again->all_reduce(&w, 1, DType::kI64, ReduceOp::kSum, "w"));
        EXPECT(w == 8);
        int64_t got = 0;
        EXPECT_OK(pp_comm->recv(&got, 8, 1 - pp, "stage"));
        EXPECT(got == (stage + 4 * (1 - pp)) * 1000 + i);
        EXPECT_OK(pp_comm->wait_sends("stage"));
      }
      return "";
    });
  }

  TEST_CASE("two groups of a rank may be driven by two threads at once") {
    if (!kSettledOn.empty()) return;  // on a device one thread asks for everything (docs/cuda-communication.md)
    for (const Fabric& fabric : fabrics()) {
      const int64_t rounds = 400 / fabric.scale;
      const auto results = fabric.run({.size = 3, .channel_bytes = 2048}, [&](Engine& engine) -> std::string {
        EXPECT_SET(auto dp, engine.group("dp", all_ranks(3)));
        EXPECT_SET(auto pp, engine.group("pp", all_ranks(3)));
        const int64_t rank = engine.world_rank();
        auto reduce = [&]() -> std::string {
          for (int64_t i = 0; i < rounds; ++i) {
            int64_t x = rank + i;
            EXPECT_OK(dp->all_reduce(&x, 1, DType::kI64, ReduceOp::kSum, "gradients"));
            EXPECT(x == 3 + 3 * i);
          }
          return "";
        };
        auto pass_on = [&]() -> std::string {
          for (int64_t i = 0; i < rounds; ++i) {
            const std::vector<int64_t> sent(500, rank * 1000 + i);
            std::vector<int64_t> got(500);
            EXPECT_OK(pp->isend(sent.data(), 4000, (rank + 1) % 3, "activations"));
            EXPECT_OK(pp->recv(got.data(), 4000, (rank + 2) % 3, "activations"));
            EXPECT(got == std::vector<int64_t>(500, (rank + 2) % 3 * 1000 + i));
            EXPECT_OK(pp->wait_sends("activations"));
          }
          return "";
        };
        std::string reduced;
        std::thread background([&] { reduced = reduce(); });
        const std::string passed = pass_on();
        background.join();
        return reduced + passed;
      });
      CAPTURE(fabric.name);
      for (const std::string& result : results) CHECK(result == "");
    }
  }

  TEST_CASE("sums added to what is there are the same bits however the addends lie on the members") {
    // One after another on one rank, and round by round over three.
    constexpr int64_t kCount = 5000, kAddends = 6;
    const auto addend = [](int64_t k, int64_t i) { return static_cast<float>(uniform_at(k, i) - 0.5) * 1e3f; };
    std::vector<float> wanted(3 * kCount, 0.0f);
    for (int64_t k = 0; k < kAddends; ++k) {
      for (int64_t i = 0; i < 3 * kCount; ++i) wanted[i] += addend(k, i);
    }
    run_all({.size = 3}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto comm, engine.group("dp", all_ranks(3)));
      std::vector<float> sum(kCount, 0.0f), input(3 * kCount);
      for (int64_t round = 0; round < kAddends / 3; ++round) {
        for (int64_t i = 0; i < 3 * kCount; ++i) input[i] = addend(3 * round + comm->rank(), i);
        EXPECT_OK(comm->reduce_scatter_add(input.data(), sum.data(), kCount, DType::kF32, 1, "x"));
      }
      EXPECT(std::equal(sum.begin(), sum.end(), wanted.begin() + comm->rank() * kCount));
      EXPECT((comm->traffic().reduce_scatter == Comm::Volume{2 * 3 * kCount * 4, 2}));
      EXPECT_SET(auto alone, engine.group("one", {engine.world_rank()}));
      EXPECT_OK(alone->reduce_scatter_add(sum.data(), input.data(), kCount, DType::kF32, 1, "x"));
      EXPECT(alone->traffic() == Comm::Traffic{});
      return "";
    });
  }

  TEST_CASE("an addend in parts on neighbours is added as the tree of its parts") {
    constexpr int64_t kCount = 3000, kParts = 2, kAddends = 2;  // on four members
    const auto part = [](int64_t k, int64_t i) { return static_cast<float>(uniform_at(k, i) - 0.5) * 1e3f; };
    std::vector<float> wanted(4 * kCount, 0.5f), in_order = wanted;
    for (int64_t i = 0; i < 4 * kCount; ++i) {
      for (int64_t k = 0; k < kAddends; ++k) wanted[i] += part(kParts * k, i) + part(kParts * k + 1, i);
      for (int64_t r = 0; r < 4; ++r) in_order[i] += part(r, i);
    }
    CHECK(wanted != in_order);
    run_all({.size = 4}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto comm, engine.group("dp", all_ranks(4)));
      std::vector<float> sum(kCount, 0.5f), input(4 * kCount);
      for (int64_t i = 0; i < 4 * kCount; ++i) input[i] = part(comm->rank(), i);
      EXPECT_OK(comm->reduce_scatter_add(input.data(), sum.data(), kCount, DType::kF32, kParts, "x"));
      EXPECT(std::equal(sum.begin(), sum.end(), wanted.begin() + comm->rank() * kCount));
      EXPECT(!comm->reduce_scatter_add(input.data(), sum.data(), kCount, DType::kF32, 3, "x").ok());
      return "";
    });
  }

  TEST_CASE("a group of one copies and counts nothing") {
    run_all({.size = 2}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto comm, engine.group("tp", {engine.world_rank()}));
      EXPECT((comm->size() == 1 && comm->rank() == 0));
      std::vector<float> in = {1, 2, 3}, out(3);
      EXPECT_OK(comm->all_reduce(in.data(), 3, DType::kF32, ReduceOp::kSum, "x"));
      EXPECT((in == std::vector<float>{1, 2, 3}));
      EXPECT_OK(comm->reduce_scatter(in.data(), out.data(), 3, DType::kF32, ReduceOp::kSum, "x"));
      EXPECT(out == in);
      std::fill(out.begin(), out.end(), 0.0f);
      EXPECT_OK(comm->all_gather(in.data(), out.data(), 12, "x"));
      EXPECT(out == in);
      EXPECT_OK(comm->all_gather(in.data(), in.data(), 12, "in place"));
      EXPECT_OK(comm->broadcast(in.data(), 12, 0, "x"));
      EXPECT_OK(comm->barrier("x"));
      EXPECT(comm->traffic() == Comm::Traffic{});
      return "";
    });
  }

  TEST_CASE("traffic counts what this rank put in") {
    run_all({.size = 3}, [&](Engine& engine) -> std::string {
      EXPECT_SET(auto comm, engine.group("dp", all_ranks(3)));
      std::vector<float> data(30);
      EXPECT_OK(comm->all_reduce(data.data(), 30, DType::kF32, ReduceOp::kSum, "x"));
      EXPECT_OK(comm->all_reduce(data.data(), 10, DType::kBf16, ReduceOp::kSum, "x"));
      EXPECT_OK(
          comm->reduce_scatter(data.data(), data.data() + 10 * comm->rank(), 10, DType::kF32, ReduceOp::kSum, "x"));
      EXPECT_OK(comm->all_gather(data.data() + 10 * comm->rank(), data.data(), 40, "x"));
      EXPECT_OK(comm->broadcast(data.data(), 8, 1, "x"));
      EXPECT_OK(comm->barrier("x"));
      EXPECT_OK(comm->isend(data.data(), 12, (comm->rank() + 1) % 3, "x"));
      EXPECT_OK(comm->recv(data.data(), 12, (comm->rank() + 2) % 3, "x"));
      EXPECT_OK(comm->wait_sends("x"));
      const Comm::Traffic t = comm->traffic();
      EXPECT((t.all_reduce == Comm::Volume{30 * 4 + 10 * 2, 2}));
      EXPECT((t.reduce_scatter == Comm::Volume{3 * 10 * 4, 1}));
      EXPECT((t.all_gather == Comm::Volume{40, 1}));
      EXPECT((t.broadcast == Comm::Volume{comm->rank() == 1 ? 8 : 0, 1}));
      EXPECT((t.send == Comm::Volume{12, 1}));
      return "";
    });
  }

  TEST_CASE("arguments that cannot be are refused before anything moves") {
    run_all({.size = 2}, [&](Engine& engine) -> std::string {
      EXPECT(engine.group("tp", {}).error().code == ErrorCode::kInvalidInput);
      EXPECT(engine.group("tp", {0, 2}).error().code == ErrorCode::kInvalidInput);
      EXPECT(engine.group("tp", {0, 0, 1}).error().code == ErrorCode::kInvalidInput);
      EXPECT(engine.group("tp", {1 - engine.world_rank()}).error().code == ErrorCode::kInvalidInput);
      EXPECT_SET(auto comm, engine.group("tp", {0, 1}));
      float x = 1;
      EXPECT(comm->all_reduce(&x, 1, DType::kU8, ReduceOp::kSum, "x").error().message ==
             "tp[0,1].all_reduce(x): collectives reduce f32, bf16, f16, f64 and i64, got u8");
      EXPECT(comm->all_reduce(&x, -1, DType::kF32, ReduceOp::kSum, "x").error().code == ErrorCode::kInvalidInput);
      EXPECT(comm->broadcast(&x, 4, 2, "x").error().code == ErrorCode::kInvalidInput);
      EXPECT(comm->isend(&x, 4, -1, "x").error().code == ErrorCode::kInvalidInput);
      EXPECT_OK(comm->all_reduce(&x, 1, DType::kF32, ReduceOp::kSum, "the group still works"));
      EXPECT(x == 2);
      return "";
    });
  }

  TEST_CASE("an exact group gives the bits and the traffic of a flat one, over one host and over several") {
    struct World {
      int64_t ranks, hosts;
      std::vector<int64_t> members;
    };
    const std::vector<World> worlds = {{4, 1, all_ranks(4)}, {4, 2, all_ranks(4)},   {3, 2, all_ranks(3)},
                                       {6, 3, all_ranks(6)}, {5, 2, all_ranks(5)},   {4, 4, all_ranks(4)},
                                       {4, 2, {2, 3, 0, 1}}, {4, 2, {0, 2, 3, 1}},   {6, 3, {0, 1, 2, 3}},
                                       {4, 2, {3, 2, 1, 0}}, {6, 2, {1, 2, 4, 5, 3}}};
    for (const World& world : worlds) {
      const auto results = run_hosts({.size = world.ranks}, world.hosts, [&](Engine& engine) -> std::string {
        if (std::ranges::find(world.members, engine.world_rank()) == world.members.end()) return "";
        EXPECT_SET(auto exact, engine.exact_group("world", world.members));
        EXPECT_SET(auto flat, engine.group("flat", world.members));
        EXPECT((exact->rank() == flat->rank() && exact->size() == flat->size()));
        EXPECT(exact->name().substr(5) == flat->name().substr(4));
        const uint64_t rank = static_cast<uint64_t>(engine.world_rank());
        const auto same = [&](Bytes data, DType dtype, ReduceOp op) -> std::string {
          Bytes wanted = data;
          const int64_t count = std::ssize(data) / dtype_size_bytes(dtype);
          EXPECT_OK(exact->all_reduce(data.data(), count, dtype, op, "x"));
          EXPECT_OK(flat->all_reduce(wanted.data(), count, dtype, op, "x"));
          EXPECT(data == wanted);
          return "";
        };
        for (const int64_t count : {0, 1, 77, 9000}) {
          for (const DType dtype : kDTypes) {
            if (const auto wrong = same(payload(dtype, engine.world_rank(), count), dtype, ReduceOp::kMax);
                wrong != "") {
              return wrong;
            }
          }
          for (const ReduceOp op : kOps) {  // large: they wrap
            Bytes words(static_cast<size_t>(count) * 8);
            for (int64_t i = 0; i < count; ++i) put(words, i, mix64(rank << 32 | static_cast<uint64_t>(i)));
            if (const auto wrong = same(words, DType::kI64, op); wrong != "") return wrong;
          }
        }
        constexpr int64_t kTerms = 50;
        ExactSum sum;
        for (int64_t i = 0; i < kTerms; ++i) sum.add(value_at(rank, i));
        const auto digits = sum.words();
        Bytes words(sizeof(digits));
        std::memcpy(words.data(), digits.data(), sizeof(digits));
        if (const auto wrong = same(words, DType::kF64, ReduceOp::kSum); wrong != "") return wrong;
        Bytes odd(5 * sizeof(double));  // equal maxima of both signs; what is not finite
        put(odd, 0, rank % 2 == 0 ? 0.0 : -0.0);
        put(odd, 1, rank == 1 ? -std::numeric_limits<double>::infinity() : 3.0);
        put(odd, 2, rank == 2 ? std::numeric_limits<double>::infinity() : -0.0);
        put(odd, 3, rank == 0 ? std::numeric_limits<double>::quiet_NaN() : 1.0);
        put(odd, 4, rank % 2 == 0 ? -0.0 : 0.0);
        if (const auto wrong = same(odd, DType::kF64, ReduceOp::kSum); wrong != "") return wrong;
        if (const auto wrong = same(odd, DType::kF64, ReduceOp::kMax); wrong != "") return wrong;
        for (int64_t root = 0; root < exact->size(); ++root) {
          int64_t order = 100 * root + exact->rank();
          EXPECT_OK(exact->broadcast(&order, 8, root, "order"));
          EXPECT_OK(flat->broadcast(&order, 8, root, "order"));
          EXPECT(order == 101 * root);
        }
        EXPECT_OK(exact->barrier("end"));
        EXPECT_OK(flat->barrier("end"));
        EXPECT(exact->traffic() == flat->traffic());
        EXPECT(exact->broadcast(&sum, -1, 0, "x").error().code == ErrorCode::kInvalidInput);
        EXPECT(exact->broadcast(&sum, 1, exact->size(), "x").error().code == ErrorCode::kInvalidInput);
        EXPECT(exact->all_reduce(&sum, 1, DType::kU8, ReduceOp::kMax, "x").error().code == ErrorCode::kInvalidInput);
        return "";
      });
      for (const std::string& result : results) {
        CAPTURE(world.ranks);
        CAPTURE(world.hosts);
        CAPTURE(world.members.front());
        CHECK(result == "");
      }
    }
  }

  TEST_CASE("a barrier of an exact group lets nobody out before the last has come") {
    const auto results = run_hosts({.size = 6}, 3, [](Engine& engine) -> std::string {
      EXPECT_SET(auto exact, engine.exact_group("world", all_ranks(6)));
      EXPECT_SET(auto flat, engine.group("flat", all_ranks(6)));
      for (int64_t late = 0; late < 6; ++late) {
        double came_ms = now_ms();
        if (engine.world_rank() == late) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          came_ms = now_ms();
        }
        EXPECT_OK(exact->barrier("x"));
        double left_ms = -now_ms();
        EXPECT_OK(flat->all_reduce(&came_ms, 1, DType::kF64, ReduceOp::kMax, "last to come"));
        EXPECT_OK(flat->all_reduce(&left_ms, 1, DType::kF64, ReduceOp::kMax, "first to leave"));
        EXPECT(-left_ms >= came_ms);
      }
      return "";
    });
    CHECK(results == std::vector<std::string>(6, ""));
  }

  TEST_CASE("an exact group of R ranks on each of H hosts has H (H - 1) / 2 connections") {
    const auto connections = []() -> int64_t {  // established TCP sockets of this process
      std::set<std::string> own;
      for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code gone;
        const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
        if (target.starts_with("socket:[")) own.insert(target.substr(8, target.size() - 9));
      }
      std::ifstream table("/proc/self/net/tcp");
      std::string line;
      int64_t found = 0;
      while (std::getline(table, line)) {
        std::istringstream fields(line);
        std::string slot, local, remote, state, skip, inode;
        fields >> slot >> local >> remote >> state >> skip >> skip >> skip >> skip >> skip >> inode;
        if (state == "01" && own.contains(inode)) ++found;
      }
      return found;
    };
    enum Kind { kExact, kTraced, kOrdered };
    for (const Kind kind : {kExact, kTraced, kOrdered}) {
      const auto results = run_hosts({.size = 6}, 3, [&](Engine& engine) -> std::string {
        const std::unique_ptr<Engine> traced = make_traced_engine(engine);
        EXPECT_SET(auto comm, kind == kOrdered
                                  ? engine.group("world", all_ranks(6))
                                  : (kind == kTraced ? *traced : engine).exact_group("world", all_ranks(6)));
        EXPECT_OK(comm->barrier("made"));
        const std::string mine = fmt::format("{}", connections());
        EXPECT_OK(comm->barrier("counted"));
        return mine;
      });
      // Each has two ends. An ordered one has all others', and those of its lane of the chain.
      CHECK(results == (kind == kOrdered ? std::vector<std::string>(6, "7")
                                         : std::vector<std::string>{"2", "0", "2", "0", "2", "0"}));
    }
  }

  TEST_CASE("what depends on the order of additions is a mistake in an exact group, on one host and over several") {
    using Use = std::function<Status(Comm&)>;
    double values[2] = {0.5, 0x1p51};
    const std::vector<Use> mistakes = {
        [&](Comm& c) { return c.all_reduce(values, 1, DType::kF64, ReduceOp::kSum, "no integer"); },
        [&](Comm& c) { return c.all_reduce(values + 1, 1, DType::kF64, ReduceOp::kSum, "four times 2^51"); },
        [&](Comm& c) { return c.all_reduce(values, 1, DType::kF64, ReduceOp::kTreeSum, "tree"); },
        [&](Comm& c) { return c.all_reduce(values, 2, DType::kF32, ReduceOp::kSum, "gradients"); },
        [&](Comm& c) { return c.reduce_scatter(values, values, 1, DType::kI64, ReduceOp::kMax, "x"); },
        [&](Comm& c) { return c.reduce_scatter_add(values, values, 1, DType::kF32, 1, "x"); },
        [&](Comm& c) { return c.all_gather(values, values, 1, "x"); },
        [&](Comm& c) { return c.all_to_all({}, {}, "x"); },
        [&](Comm& c) { return c.isend(values, 1, 0, "x"); },
        [&](Comm& c) { return c.recv(values, 1, 0, "x"); },
        [&](Comm& c) { return c.wait_sends("x"); },
        [&](Comm& c) { return c.wait_sends_to(0, 0, "x"); },
    };
    for (const int64_t hosts : {1, 2}) {
      for (size_t i = 0; i < mistakes.size(); ++i) {
        const Shared<std::atomic<int64_t>> made;
        const auto results = run_hosts({.size = 4}, hosts, [&](Engine& engine) -> std::string {
          EXPECT_SET(auto comm, engine.exact_group("world", all_ranks(4)));
          meet(made, 4);
          ::signal(SIGABRT, SIG_DFL);
          if (::freopen("/dev/null", "w", stderr) == nullptr) return "stderr";
          ignore(mistakes[i](*comm), "does not come back");
          return "";
        });
        CAPTURE(hosts);
        CAPTURE(i);
        CHECK(results == std::vector<std::string>(4, "signal 6"));
      }
    }
  }
}
