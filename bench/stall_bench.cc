// What a snapshot costs training. Ranks as processes, each with its share of an Adam state of a given size, update it
//   private    in place, in memory of their own: what training without checkpoints does
//   in place   in place in a bank of the arena, without marks
//   banks      from bank to bank of the arena, with checksums, marks and weights: every step is a snapshot
//   copied     in place in memory of their own, while a copy of it into a bank that has just begun goes on: the worst
//              case of a snapshot by copy, with no forward and backward for it to run beside
// and copy it once into a bank (memcpy), the price of a snapshot that is copied. Arms are interleaved; a round's time
// is that of the slowest rank. Pauses are begin and publish alone, the part in which a rank computes nothing; of a copy
// its start.
//
//   stall_bench [--gib=0.5,1,2,4,6] [--ranks=4] [--rounds=7] [--tiny]
//
// One thread a rank. Float weights are an array beside the masters in the arm "banks" alone, as in training; bf16
// weights in all.
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <numeric>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <omp.h>

#include "ckpt/copy/host_link.h"
#include "ckpt/copy/state_copier.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/snapshot.h"
#include "runtime/kernels/adamw.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

constexpr int kTensors = 24;  // of a rank
constexpr int kArms = 5;      // private, in place, banks, memcpy, copied
constexpr int kMaxRounds = 64, kMaxRanks = 64;

struct Shared {
  std::atomic<int> arrived{0}, turn{0};
  double seconds[kArms][kMaxRounds][kMaxRanks], cpu[kArms][kMaxRounds][kMaxRanks];
  double begin_s[kMaxRounds][kMaxRanks], publish_s[kMaxRounds][kMaxRanks], start_s[kMaxRounds][kMaxRanks];
};

/// Of this thread: what others do on the machine's cores is not in it, only what they do to its memory.
double cpu_s() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}
double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void meet(Shared& shared, int ranks) {
  const int turn = shared.turn.load();
  if (shared.arrived.fetch_add(1) + 1 == ranks) {
    shared.arrived = 0;
    shared.turn.fetch_add(1);
    return;
  }
  while (shared.turn.load() == turn) std::this_thread::yield();
}

std::byte* own_memory(int64_t bytes) {
  constexpr int64_t kHuge = int64_t{2} << 20;
  void* const raw = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  RT_CHECK(raw != MAP_FAILED, "no memory for {} bytes", bytes);
  auto* const at = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(raw) + kHuge - 1) / kHuge * kHuge);
  madvise(at, bytes, MADV_HUGEPAGE);
  std::memset(at, 0, bytes);
  return at;
}

int64_t available_bytes() {
  std::ifstream in("/proc/meminfo");
  std::string word;
  int64_t kib = 0;
  while (in >> word) {
    if (word == "MemAvailable:" && in >> kib) return kib << 10;
  }
  return 0;
}

struct Setup {
  int ranks = 4, rounds = 7;
  int64_t elems = 0;  // of one tensor
  bool bf16_weights = false, own_bank = true;
};

kernels::StateArrays arrays_at(float* master, float* exp_avg, float* exp_avg_sq) {
  return {DevicePtr(master), DevicePtr(exp_avg), DevicePtr(exp_avg_sq), nullptr};
}

void play_rank(const Setup& setup, const Arena& arena, int rank, Shared& shared) {
  omp_set_num_threads(1);
  const int64_t n = setup.elems, all = n * kTensors;
  auto* const grads = reinterpret_cast<float*>(own_memory(all * 4));
  for (int64_t i = 0; i < all; ++i) grads[i] = 1e-3f * static_cast<float>(i % 97 - 48);
  auto* const own = setup.own_bank ? reinterpret_cast<float*>(own_memory(all * 12)) : nullptr;
  auto* const own_low = setup.bf16_weights ? reinterpret_cast<bf16*>(own_memory(all * 2)) : nullptr;
  arena.populate(rank);
  SnapshotWriter writer(arena, rank);
  const auto bank = [&](int64_t slot, int tensor) {
    const auto at = [&](int kind) {
      return reinterpret_cast<float*>(arena.payload(rank, slot).data() +
                                      arena.shards(rank)[kind * kTensors + tensor].offset);
    };
    return arrays_at(at(0), at(1), at(2));
  };
  const auto own_state = [&](int tensor) {
    return arrays_at(own + tensor * n, own + all + tensor * n, own + 2 * all + tensor * n);
  };
  auto* const weights = arena.weights(rank).data();
  const kernels::Clip clip;
  const std::unique_ptr<Stream> work = make_cpu_stream();
  kernels::AdamwArgs args{
      .lr = 1e-4f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .clip = DevicePtr(&clip)};
  const std::string position(1500, 'x');
  StateCopier copier(make_host_link(), kCopyNice);
  if (own != nullptr) {
    std::vector<std::vector<CopyArray>> groups;
    for (int t = 0; t < kTensors; ++t) {
      std::vector<CopyArray>& group = groups.emplace_back();
      for (int kind = 0; kind < 3; ++kind) {
        const int64_t shard = kind * kTensors + t;
        group.push_back(
            {DevicePtr(own + kind * all + t * n).as<std::byte>(), arena.shards(rank)[shard].offset, n * 4, shard});
      }
    }
    RT_CHECK(copier.cover(groups, 3 * kTensors).ok());
  }
  std::vector<uint64_t> sums(3 * kTensors);
  const bool stream = all * 12 > (8 << 20);              // as optim::adamw
  for (int round = -1; round < setup.rounds; ++round) {  // the first one warms up
    for (int k = 0; k < kArms; ++k) {
      const int arm = (k + round + 1) % kArms;  // each follows each
      args.step = round + 2;
      const int64_t from = round & 1, to = from ^ 1;
      meet(shared, setup.ranks);
      const double begin = now_s(), cpu_begin = cpu_s();
      double begun = 0, published = 0, started = 0;
      if (arm == 4 && own == nullptr) continue;
      if (arm == 0 || arm == 1) {
        for (int t = 0; t < kTensors; ++t) {
          const kernels::StateArrays state = arm == 0 && own != nullptr ? own_state(t) : bank(from, t);
          kernels::adamw(args, grads + t * n, state, state, nullptr, own_low != nullptr ? own_low + t * n : nullptr, n);
        }
      } else if (arm == 2) {
        writer.begin(to, 1, round + 2);
        begun = now_s() - begin;
        args.stream = stream;
        for (int t = 0; t < kTensors; ++t) {
          uint64_t sum[3] = {};
          float* const full = setup.bf16_weights ? nullptr : reinterpret_cast<float*>(weights) + t * n;
          bf16* const low = setup.bf16_weights ? reinterpret_cast<bf16*>(weights) + t * n : nullptr;
          kernels::adamw(args, grads + t * n, bank(from, t), bank(to, t), full, low, n, {sum});
          for (int array = 0; array < 3; ++array) sums[array * kTensors + t] = sum[array];
        }
        args.stream = false;
        const double updated = now_s();
        writer.weights_whole(1, round + 2);
        RT_CHECK(writer.publish(to, 1, round + 2, position, sums, 0).ok());
        published = now_s() - updated;
      } else if (arm == 4) {
        writer.begin(to, 1, round + 2);
        RT_CHECK(copier
                     .start(arena.payload(rank, to).data(),
                            [&](std::span<const uint64_t> copied) {
                              return writer.publish(to, 1, round + 2, position, copied, 0);
                            })
                     .ok());
        started = now_s() - begin;
        for (int t = 0; t < kTensors; ++t) {
          const int64_t longest = copier.block_bytes() / 4;  // as StateWalk
          for (int64_t at = 0; at < n; at += longest) {
            const int64_t count = std::min(longest, n - at);
            const kernels::StateArrays whole = own_state(t);
            const kernels::StateArrays state{whole.master + at, whole.exp_avg + at, whole.exp_avg_sq + at, nullptr};
            std::vector<DeviceBytes> areas;
            for (const DevicePtr<float> array : {state.master, state.exp_avg, state.exp_avg_sq})
              areas.push_back({array.as<std::byte>(), count * 4});
            copier.order_after_copy(*work, areas);
            kernels::adamw(args, grads + t * n + at, state, state, nullptr,
                           own_low != nullptr ? own_low + t * n + at : nullptr, count);
          }
        }
        RT_CHECK(copier.finish().ok());
      } else {
        for (int t = 0; t < kTensors; ++t) {
          const kernels::StateArrays source = own != nullptr ? own_state(t) : bank(from, t), target = bank(to, t);
          std::memcpy(address_of(target.master), address_of(source.master), n * 4);
          std::memcpy(address_of(target.exp_avg), address_of(source.exp_avg), n * 4);
          std::memcpy(address_of(target.exp_avg_sq), address_of(source.exp_avg_sq), n * 4);
        }
      }
      const double seconds = now_s() - begin, cpu = cpu_s() - cpu_begin;
      if (round < 0) continue;
      shared.seconds[arm][round][rank] = seconds;
      shared.cpu[arm][round][rank] = cpu;
      if (arm == 4) shared.start_s[round][rank] = started;
      if (arm != 2) continue;
      shared.begin_s[round][rank] = begun;
      shared.publish_s[round][rank] = published;
    }
  }
}

struct Spread {
  double median = 0, least = 0, most = 0;
};
Spread spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front(), values.back()};
}

std::string load() {
  std::string word;
  std::ifstream("/proc/loadavg") >> word;
  return word;
}

void measure(double gib, Setup setup) {
  setup.elems = static_cast<int64_t>(gib * (int64_t{1} << 30)) / 12 / setup.ranks / kTensors / 1024 * 1024;
  setup.elems = std::max<int64_t>(setup.elems, 1024);
  const int64_t all = setup.elems * kTensors;
  const int64_t state = all * 12 * setup.ranks, weights = all * (setup.bf16_weights ? 2 : 4) * setup.ranks;
  const int64_t fixed = 2 * state + weights + all * 4 * setup.ranks + weights;
  const int64_t room = available_bytes() - (int64_t{1} << 30);
  const std::string what = fmt::format("{:.2f} GiB, {} weights", static_cast<double>(state) / (int64_t{1} << 30),
                                       setup.bf16_weights ? "bf16" : "float");
  if (fixed > room) {
    fmt::print("{}: left out, {} MiB are available and {} needed\n", what, room >> 20, fixed >> 20);
    return;
  }
  setup.own_bank = fixed + state <= room;

  ArenaSpec spec{.run_id = "stall-bench", .recipe_hash = "none", .directory = "none", .slots = 2};
  spec.backing = ArenaBacking::kMemfd;
  for (int rank = 0; rank < setup.ranks; ++rank) {
    SlotLayout layout;
    for (int k = 0; k < 3 * kTensors; ++k) {
      layout.shards.push_back({k / kTensors, k % kTensors, {}, layout.bytes, setup.elems * 4});
      layout.bytes += (setup.elems * 4 + kPageBytes - 1) / kPageBytes * kPageBytes;
    }
    spec.ranks.push_back(layout);
    spec.weight_bytes.push_back(all * (setup.bf16_weights ? 2 : 4));
  }
  const Result<Arena> arena = Arena::create(spec);
  RT_CHECK(arena.ok(), "{}", arena.error().message);
  void* const raw = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  RT_CHECK(raw != MAP_FAILED);
  Shared& shared = *new (raw) Shared;
  std::vector<pid_t> children;
  std::fflush(stdout);
  for (int rank = 0; rank < setup.ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      play_rank(setup, arena.value(), rank, shared);
      _exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    RT_CHECK(status == 0, "a rank ended with status {}", status);
  }

  std::vector<double> times[kArms], lost, lost_in_place, lost_cpu, pauses, lost_copied, starts;
  for (int round = 0; round < setup.rounds; ++round) {
    double slowest[kArms], busy[kArms];
    for (int arm = 0; arm < kArms; ++arm) {
      slowest[arm] = *std::max_element(shared.seconds[arm][round], shared.seconds[arm][round] + setup.ranks);
      times[arm].push_back(slowest[arm] * 1e3);
      busy[arm] = std::accumulate(shared.cpu[arm][round], shared.cpu[arm][round] + setup.ranks, 0.0);
    }
    lost.push_back((slowest[2] - slowest[0]) / slowest[3] * 100);
    lost_in_place.push_back((slowest[2] - slowest[1]) / slowest[3] * 100);
    lost_cpu.push_back((busy[2] - busy[0]) / busy[3] * 100);
    lost_copied.push_back((slowest[4] - slowest[0]) / slowest[3] * 100);
    double pause = 0, start = 0;
    for (int rank = 0; rank < setup.ranks; ++rank) {
      pause = std::max(pause, shared.begin_s[round][rank] + shared.publish_s[round][rank]);
    }
    for (int rank = 0; rank < setup.ranks; ++rank) start = std::max(start, shared.start_s[round][rank]);
    pauses.push_back(pause * 1e3);
    starts.push_back(start * 1e3);
    fmt::print(
        "  round {}: private {:.1f} ms, in place {:.1f} ms, banks {:.1f} ms, memcpy {:.1f} ms, copied {:.1f} ms, pause "
        "{:.3f} ms; load {}\n",
        round + 1, slowest[0] * 1e3, slowest[1] * 1e3, slowest[2] * 1e3, slowest[3] * 1e3, slowest[4] * 1e3,
        pause * 1e3, load());
  }
  munmap(raw, sizeof(Shared));
  const auto print = [](const char* name, const std::vector<double>& values, const char* unit, int digits) {
    const Spread s = spread(values);
    fmt::print("  {:<44} {:.{}f} ({:.{}f} to {:.{}f}) {}\n", name, s.median, digits, s.least, digits, s.most, digits,
               unit);
  };
  fmt::print("{}, {} ranks{}{}\n", what, setup.ranks,
             setup.own_bank ? "" : ", private memory left out (in place in a bank)",
             arena.value().huge_pages() ? ", huge pages" : ", 4 KiB pages in shared memory");
  print("update in private memory, in place", times[0], "ms", 1);
  print("update in a bank, in place", times[1], "ms", 1);
  print("update from bank to bank", times[2], "ms", 1);
  print("memcpy of the state", times[3], "ms", 1);
  print("longest pause of a rank (bar 1 ms)", pauses, "ms", 3);
  print("lost a snapshot, of a memcpy (bar 25 %)", lost, "%", 1);
  print("the same in time of the ranks' cores", lost_cpu, "%", 1);
  print("lost against in place in a bank", lost_in_place, "%", 1);
  if (!setup.own_bank) return;
  print("update in private memory beside its copy", times[4], "ms", 1);
  print("longest start of a copy (bar 1 ms)", starts, "ms", 3);
  print("lost a copied snapshot, of a memcpy, at worst", lost_copied, "%", 1);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<double> sizes{0.5, 1, 2, 4, 6};
  Setup setup;
  for (int k = 1; k < argc; ++k) {
    const std::string_view arg = argv[k];
    const auto value = [&] { return std::string(arg.substr(arg.find('=') + 1)); };
    if (arg == "--tiny") {
      sizes = {0.001};
      setup.ranks = 2;
      setup.rounds = 3;
    } else if (arg.starts_with("--gib=")) {
      sizes.clear();
      std::stringstream list(value());
      for (std::string one; std::getline(list, one, ',');) sizes.push_back(std::atof(one.c_str()));
    } else if (arg.starts_with("--ranks=")) {
      setup.ranks = std::clamp(std::atoi(value().c_str()), 1, kMaxRanks);
    } else if (arg.starts_with("--rounds=")) {
      setup.rounds = std::clamp(std::atoi(value().c_str()), 1, kMaxRounds);
    } else {
      fmt::print(stderr, "usage: stall_bench [--gib=A,B,...] [--ranks=N] [--rounds=N] [--tiny]\n");
      return 2;
    }
  }
#ifndef NDEBUG
  fmt::print("warning: this build is not optimised; its numbers say nothing\n");
#endif
  fmt::print("{} cores; build {}; load {}\n", std::thread::hardware_concurrency(), CAIRN_BUILD_TYPE, load());
  for (const double gib : sizes) {
    for (const bool low : {false, true}) {
      setup.bf16_weights = low;
      measure(gib, setup);
    }
  }
  return 0;
}
