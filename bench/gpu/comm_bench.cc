// Bus bandwidth of each operation among the GPUs of this machine by NCCL's engine, as training has it: ranks as
// processes, each on a device of its own. Sums are Cairn's, in the order of ranks.
//   gpu_comm_bench --ranks=N [--tiny] [--registered]
// Prints a JSON object a line for each operation and size: {"operation", "ranks", "bytes", "us": [of a call, one a
// round], "bus_bytes"}. bytes: of the larger array. --registered: in memory that NCCL has registered. bus_bytes is what
// a link must carry at least, so that bus_bytes / time can be held against the link's: bytes, times 2 (n - 1) / n for
// an all_reduce, (n - 1) / n where each rank gives or gets a part, 1 for a broadcast and a message.

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <build_version.inc>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "runtime/comm/shm_world.h"
#include "runtime/cuda/machine/module.h"
#include "runtime/cuda/nccl/nccl_engine.h"
#include "runtime/device/buffer.h"

using namespace cairn;

namespace {

struct Effort {
  int64_t rounds = 7, calls = 20;
  std::vector<int64_t> bytes = {int64_t{1} << 20, int64_t{16} << 20, int64_t{256} << 20};
  bool registered = false;
};

void must(const Status& status) {
  if (status.ok()) return;
  fmt::print(stderr, "{}\n", status.error().message);
  std::_Exit(1);
}
template <typename T>
T must(Result<T> result) {
  if (!result.ok()) must(Status(result.error()));
  return std::move(result).value();
}

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class RankBench {
 public:
  RankBench(comm::Engine& host, const Effort& effort) : effort_(effort) {
    const int64_t largest = effort.bytes.back();
    constexpr int64_t kRoom = int64_t{32} << 20;
    const auto rank = static_cast<int>(host.world_rank());
    static const cuda::LoadedNccl nccl = must(cuda::load_nccl(cuda::library_candidates("libnccl.so.2")));
    machine_ = must(cuda::open_machine(CAIRN_TREE_VERSION, {.index = rank,
                                                            .deadline_ms = 60000,
                                                            .sums = {kRoom, kRoom},
                                                            .nccl = effort.registered ? &nccl.api : nullptr}));
    const std::vector<int64_t> blocks = {largest, largest};
    must(machine_->reserve(blocks, {}));
    from_ = must(Buffer::allocate(machine_->device(), largest));
    to_ = must(Buffer::allocate(machine_->device(), largest));
    for (Buffer* const buffer : {&from_, &to_}) machine_->cuda_stream().set(buffer->at().address(), rank + 1, largest);
    std::function<DeviceBytes()> registered;
    if (effort.registered) registered = [this] { return machine_->memory(); };
    engine_ = must(cuda::make_nccl_engine(
        host, nccl.api, machine_->rank_sums(), machine_->cuda_stream(),
        {.rooms =
             [this] {
               return cuda::NcclRooms{machine_->room_for_sums(), machine_->room_for_sums_beside()};
             },
         .registered = std::move(registered),
         .on_device = [this](const void* at) { return machine_->holds(at); },
         .peers = [](std::string_view) { return cuda::NcclPeers::kNeighbours; }}));
    std::vector<int64_t> all;
    for (int64_t r = 0; r < host.world_size(); ++r) all.push_back(r);
    comm_ = must(engine_->group("bench", all));
  }
  ~RankBench() { ignore(machine_->stream().settle(), "measured already"); }

  void measure_all() {
    const int64_t n = comm_->size(), next = (comm_->rank() + 1) % n, before = (comm_->rank() + n - 1) % n;
    const double part = static_cast<double>(n - 1) / static_cast<double>(n);
    for (const int64_t wanted : effort_.bytes) {
      const int64_t each = wanted / n / 256 * 256, bytes = each * n;
      std::byte *const from = from_.at().address(), *const to = to_.at().address();
      measure("all_reduce", bytes, 2 * part,
              [&] { must(comm_->all_reduce(to, bytes / 4, DType::kF32, comm::ReduceOp::kMax, "x")); });
      measure("reduce_scatter", bytes, part,
              [&] { must(comm_->reduce_scatter(from, to, each / 4, DType::kF32, comm::ReduceOp::kSum, "x")); });
      measure("all_gather", bytes, part, [&] { must(comm_->all_gather(from, to, each, "x")); });
      measure("broadcast", bytes, 1, [&] { must(comm_->broadcast(to, bytes, 0, "x")); });
      std::vector<comm::OutPart> out;
      std::vector<comm::InPart> in;
      for (int64_t r = 0; r < n; ++r) {
        out.push_back({r, from + r * each, each});
        in.push_back({r, to + r * each, each});
      }
      measure("all_to_all", bytes, part, [&] { must(comm_->all_to_all(out, in, "x")); });
      measure("message to the next", bytes, 1, [&] {
        must(comm_->isend(static_cast<const void*>(from), bytes, next, "x"));
        must(comm_->recv(to, bytes, before, "x"));
        must(comm_->wait_sends("x"));
      });
    }
  }

 private:
  void measure(const char* operation, int64_t bytes, double share, const std::function<void()>& call) {
    std::vector<double> us;
    for (int64_t round = -1; round < effort_.rounds; ++round) {  // the first is not counted
      must(comm_->barrier("round"));
      const double begin = now_us();
      for (int64_t k = 0; k < effort_.calls; ++k) call();
      must(machine_->stream().settle());
      if (round >= 0) us.push_back((now_us() - begin) / static_cast<double>(effort_.calls));
    }
    if (comm_->rank() != 0) return;
    const nlohmann::json line = {{"operation", operation},
                                 {"ranks", comm_->size()},
                                 {"bytes", bytes},
                                 {"us", us},
                                 {"bus_bytes", static_cast<double>(bytes) * share}};
    fmt::print("{}\n", line.dump());
    std::fflush(stdout);
  }

  const Effort effort_;
  std::unique_ptr<cuda::CudaMachine> machine_;
  Buffer from_, to_;
  std::unique_ptr<comm::Engine> engine_;
  std::unique_ptr<comm::Comm> comm_;
};

int usage() {
  fmt::print(stderr, "usage: gpu_comm_bench --ranks=N [--tiny] [--registered]\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  Effort effort;
  int64_t ranks = 0;
  for (int k = 1; k < argc; ++k) {
    const std::string_view word = argv[k];
    constexpr std::string_view kOfRanks = "--ranks=";
    if (word == "--tiny") {
      effort.rounds = effort.calls = 2;
      effort.bytes = {int64_t{16} << 10};
    } else if (word == "--registered") {
      effort.registered = true;
    } else if (word.starts_with(kOfRanks)) {
      const char* const end = word.data() + word.size();
      if (std::from_chars(word.data() + kOfRanks.size(), end, ranks).ptr != end) return usage();
    } else {
      return usage();
    }
  }
  if (ranks < 2 || ranks > 64) return usage();
  const comm::ShmWorld world = must(comm::ShmWorld::create({.world_size = ranks, .channel_bytes = 64 << 10}));
  std::vector<pid_t> pids;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    pids.push_back(::fork());
    if (pids.back() != 0) continue;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const auto host = must(comm::attach_shm_engine(world.fd(), rank, {}));
    RankBench(*host, effort).measure_all();
    return 0;
  }
  bool failed = false;
  for (const pid_t pid : pids) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    failed |= status != 0;
  }
  return failed ? 1 : 0;
}
