// Latency and bandwidth of the shared-memory communicator, ranks as processes.
//   comm_bench [--tiny] [RANKS ...]      default 2 and 8; --tiny: two ranks, a moment, says nothing about speed
// Prints for each operation and size the median and the spread over rounds of the mean time of one call, and the
// algorithm bandwidth: payload bytes / time.

#include <fmt/format.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <vector>

#include "runtime/comm/shm_world.h"
#include "runtime/core/clock.h"

using namespace cairn;
using namespace cairn::comm;

namespace {

struct Effort {
  int64_t rounds = 11;
  int64_t round_ns = 40'000'000;  // calls of a round are counted so that it takes about this long
};
Effort effort;  // set before the ranks are forked

void must(const Status& status) {
  if (status.ok()) return;
  fmt::print(stderr, "{}\n", status.error().message);
  std::_Exit(1);
}

void measure(Comm& comm, const char* name, int64_t bytes, const std::function<void()>& call) {
  const SystemClock clock;
  for (int64_t i = 0; i < 3; ++i) call();
  const int64_t start_ns = clock.now_ns();
  for (int64_t i = 0; i < 5; ++i) call();
  int64_t calls = std::clamp<int64_t>(5 * effort.round_ns / std::max<int64_t>(1, clock.now_ns() - start_ns), 2, 50'000);
  must(comm.broadcast(&calls, 8, 0, "calls of a round"));
  std::vector<double> us;
  for (int64_t round = 0; round < effort.rounds; ++round) {
    must(comm.barrier("round"));
    const int64_t round_ns = clock.now_ns();
    for (int64_t i = 0; i < calls; ++i) call();
    us.push_back(static_cast<double>(clock.now_ns() - round_ns) / 1e3 / static_cast<double>(calls));
  }
  std::ranges::sort(us);
  if (comm.rank() == 0) {
    fmt::print("{:>2} ranks  {:<14} {:>9} B  median {:>9.1f} us  ({:.1f} to {:.1f})  {:>7.0f} MB/s\n", comm.size(),
               name, bytes, us[us.size() / 2], us.front(), us.back(), static_cast<double>(bytes) / us[us.size() / 2]);
  }
}

void bench_rank(Engine& engine) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < engine.world_size(); ++r) ranks.push_back(r);
  auto made = engine.group("bench", ranks);
  if (!made.ok()) must(std::move(made).error());
  Comm& comm = *made.value();
  constexpr int64_t kLargest = 4 << 20;
  std::vector<char> data(static_cast<size_t>(kLargest)), other(static_cast<size_t>(kLargest));
  measure(comm, "barrier", 0, [&] { must(comm.barrier("x")); });
  for (const int64_t bytes : {int64_t{1} << 10, int64_t{64} << 10, kLargest}) {
    measure(comm, "all_reduce f32", bytes,
            [&] { must(comm.all_reduce(data.data(), bytes / 4, DType::kF32, ReduceOp::kSum, "x")); });
  }
  for (const int64_t bytes : {int64_t{64} << 10, kLargest}) {
    const int64_t part = bytes / comm.size() / 64 * 64;
    measure(comm, "reduce_scatter", part * comm.size(),
            [&] { must(comm.reduce_scatter(data.data(), other.data(), part / 4, DType::kF32, ReduceOp::kSum, "x")); });
    measure(comm, "all_gather", part * comm.size(),
            [&] { must(comm.all_gather(other.data(), data.data(), part, "x")); });
  }
  const int64_t pair = comm.rank() ^ 1;
  for (const int64_t bytes : {int64_t{1} << 10, int64_t{64} << 10, kLargest}) {
    if (pair >= comm.size()) break;
    // Each way at once: what neighbouring pipeline stages do.
    measure(comm, "p2p both ways", bytes, [&] {
      must(comm.isend(data.data(), bytes, pair, "x"));
      must(comm.recv(other.data(), bytes, pair, "x"));
      must(comm.wait_sends("x"));
    });
  }
}

int run(int64_t size) {
  const auto world = ShmWorld::create({.world_size = size});
  if (!world.ok()) {
    fmt::print(stderr, "{}\n", world.error().message);
    return 2;
  }
  for (int64_t r = 0; r < size; ++r) {
    if (::fork() != 0) continue;
    auto engine = attach_shm_engine(world.value().fd(), r, {});
    if (!engine.ok()) must(std::move(engine).error());
    bench_rank(*engine.value());
    std::fflush(stdout);
    ::_exit(0);
  }
  int failed = 0, status = 0;
  while (::wait(&status) > 0) failed += status != 0;
  return failed != 0;
}

}  // namespace

int main(int argc, char** argv) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  ::sched_getaffinity(0, sizeof(cpus), &cpus);
#ifdef __OPTIMIZE__
  fmt::print("optimised build, {} usable CPUs\n", CPU_COUNT(&cpus));
#else
  fmt::print("NOT OPTIMISED: these numbers mean nothing; {} usable CPUs\n", CPU_COUNT(&cpus));
#endif
  std::fflush(stdout);
  std::vector<int64_t> sizes;
  bool tiny = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    int64_t size = 0;
    const auto [end, error] = std::from_chars(arg.data(), arg.data() + arg.size(), size);
    if (arg == "--tiny") {
      tiny = true;
    } else if (error == std::errc() && end == arg.data() + arg.size() && size >= 2 && size <= 1024) {
      sizes.push_back(size);
    } else {
      fmt::print(stderr, "comm_bench: {}: expected --tiny or a number of ranks from 2 to 1024\n", arg);
      return 2;
    }
  }
  if (tiny) effort = {.rounds = 3, .round_ns = 1'000'000};
  if (sizes.empty()) sizes = tiny ? std::vector<int64_t>{2} : std::vector<int64_t>{2, 8};
  for (const int64_t size : sizes) {
    if (const int rc = run(size); rc != 0) return rc;
  }
  return 0;
}
