#pragma once
// Runs one body on every rank of a small world, over each engine: threads, forked processes in shared memory, forked
// processes over loopback TCP. A body returns what went wrong, or "": assertions of the test framework do not cross a
// process boundary.

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/gloo_engine.h"
#include "runtime/comm/hybrid_engine.h"
#include "runtime/comm/shm_world.h"
#include "runtime/comm/thread_world.h"
#include "tests/support/temp_dir.h"

namespace cairn::comm::testing {

/// What forked processes share: zero at first.
template <typename T>
class Shared {
 public:
  Shared()
      : value_(static_cast<T*>(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
  }
  ~Shared() { ::munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T& operator*() const { return *value_; }

 private:
  T* value_;
};

/// After a barrier of the group under test, whose last members may still be in it when the first has left: until all
/// `n` are out.
inline void meet(const Shared<std::atomic<int64_t>>& out, int64_t n) {
  for (++*out; (*out).load() < n;) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

struct WorldSpec {
  int64_t size = 2;
  int64_t staging_bytes = 768 << 10;
  int64_t channel_bytes = 1 << 20;
  int64_t deadline_ms = 20000;
};

using Body = std::function<std::string(Engine&)>;

/// The engine under test around one of the host's memory, in the rank's process: for tests that look at that memory or
/// have ranks on several hosts.
using Around = std::function<Result<std::unique_ptr<Engine>>(std::unique_ptr<Engine> host)>;

#define EXPECT(...)                                                                \
  do {                                                                             \
    if (!(__VA_ARGS__)) return fmt::format("line {}: {}", __LINE__, #__VA_ARGS__); \
  } while (false)
#define EXPECT_OK(...)                                                                                   \
  do {                                                                                                   \
    const auto expect_status = (__VA_ARGS__);                                                            \
    if (!expect_status.ok()) return fmt::format("line {}: {}", __LINE__, expect_status.error().message); \
  } while (false)
#define EXPECT_SET(declaration, ...) EXPECT_SET_INNER(RT_CONCAT(expect_result_, __LINE__), declaration, __VA_ARGS__)
#define EXPECT_SET_INNER(name, declaration, ...)                                     \
  auto name = (__VA_ARGS__);                                                         \
  if (!name.ok()) return fmt::format("line {}: {}", __LINE__, name.error().message); \
  declaration = std::move(name).value()

inline ShmWorldConfig world_config(const WorldSpec& spec) {
  return {.world_size = spec.size, .channel_bytes = spec.channel_bytes, .staging_bytes = spec.staging_bytes};
}

inline std::vector<std::string> run_threads(const WorldSpec& spec, const Body& body) {
  ThreadWorld world(world_config(spec), {.deadline_ms = spec.deadline_ms});
  std::vector<std::string> results(static_cast<size_t>(spec.size));
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < spec.size; ++r) {
    threads.emplace_back([&, r] {
      const auto engine = world.engine(r);
      results[static_cast<size_t>(r)] = body(*engine);
    });
  }
  for (auto& t : threads) t.join();
  return results;
}

/// Forks a process for each rank; `make_engine` runs in it. The caller has no other threads.
class Processes {
 public:
  using MakeEngine = std::function<Result<std::unique_ptr<Engine>>(int64_t rank)>;

  Processes(int64_t size, const MakeEngine& make_engine, const Body& body) {
    for (int64_t r = 0; r < size; ++r) {
      int ends[2];
      if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
      const pid_t pid = ::fork();
      if (pid == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        ::close(ends[0]);
        const std::string text = [&]() -> std::string {
          auto engine = make_engine(r);
          if (!engine.ok()) return engine.error().message;
          return body(*engine.value());
        }();
        if (::write(ends[1], text.data(), text.size()) < 0) ::_exit(3);
        ::_exit(0);
      }
      ::close(ends[1]);
      pids_.push_back(pid);
      pipes_.push_back(ends[0]);
    }
  }
  ~Processes() {
    for (size_t r = 0; r < pids_.size(); ++r) {
      if (pids_[r] > 0) {
        ::kill(pids_[r], SIGKILL);
        ::waitpid(pids_[r], nullptr, 0);
      }
      ::close(pipes_[r]);
    }
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  pid_t pid(int64_t rank) const { return pids_[static_cast<size_t>(rank)]; }
  void send_signal(int64_t rank, int signal) const { ::kill(pid(rank), signal); }

  /// What the rank returned, or "signal N".
  std::string join(int64_t rank) {
    const auto r = static_cast<size_t>(rank);
    std::string text;
    char buffer[4096];
    for (;;) {
      const ssize_t n = ::read(pipes_[r], buffer, sizeof(buffer));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      text.append(buffer, static_cast<size_t>(n));
    }
    int status = 0;
    ::waitpid(pids_[r], &status, 0);
    pids_[r] = -1;
    if (WIFSIGNALED(status)) return fmt::format("signal {}", WTERMSIG(status));
    if (WEXITSTATUS(status) != 0) return fmt::format("exit status {}: {}", WEXITSTATUS(status), text);
    return text;
  }

 private:
  std::vector<pid_t> pids_;
  std::vector<int> pipes_;
};

inline std::vector<std::string> run_shm(const WorldSpec& spec, const Body& body) {
  const auto world = ShmWorld::create(world_config(spec));
  if (!world.ok()) return {world.error().message};
  Processes ranks(
      spec.size,
      [&](int64_t rank) { return attach_shm_engine(world.value().fd(), rank, {.deadline_ms = spec.deadline_ms}); },
      body);
  std::vector<std::string> results;
  for (int64_t r = 0; r < spec.size; ++r) results.push_back(ranks.join(r));
  return results;
}

using cairn::testing::TempDir;

inline GlooConfig loopback_config(const WorldSpec& spec, const TempDir& dir, int64_t rank) {
  return {.rank = rank,
          .world_size = spec.size,
          .interface_address = "127.0.0.1",
          .rendezvous = open_file_rendezvous(dir.path).value(),
          .options = {.deadline_ms = spec.deadline_ms}};
}

inline Result<std::unique_ptr<Engine>> make_loopback_engine(const WorldSpec& spec, const TempDir& dir, int64_t rank) {
  return make_gloo_engine(loopback_config(spec, dir, rank));
}

inline std::vector<std::string> run_gloo(const WorldSpec& spec, const Body& body) {
  const TempDir dir;
  Processes ranks(
      spec.size, [&](int64_t rank) { return make_loopback_engine(spec, dir, rank); }, body);
  std::vector<std::string> results;
  for (int64_t r = 0; r < spec.size; ++r) results.push_back(ranks.join(r));
  return results;
}

/// Ranks in equal blocks on some hosts, as far as the engine can tell: each has its own memory. `rendezvous(rank)` is
/// called in the rank's process.
class Hosts {
 public:
  using MakeRendezvous = std::function<std::shared_ptr<Rendezvous>(int64_t rank)>;

  Hosts(const WorldSpec& spec, int64_t hosts, const Body& body, const MakeRendezvous& rendezvous = {},
        const Around& outer = {}) {
    for (int64_t r = 0; r < spec.size; ++r) host_of_.push_back(r * hosts / spec.size);
    ShmWorldConfig config = world_config(spec);
    config.local_ranks = (spec.size + hosts - 1) / hosts;
    for (int64_t h = 0; h < hosts; ++h) memory_.push_back(ShmWorld::create(config).value());
    ranks.emplace(
        spec.size,
        [&](int64_t rank) -> Result<std::unique_ptr<Engine>> {
          GlooConfig gloo = loopback_config(spec, dir_, rank);
          if (rendezvous) gloo.rendezvous = rendezvous(rank);
          RT_TRY_SET(auto made,
                     make_hybrid_engine({.gloo = gloo, .host_of_rank = host_of_, .shm_fd = memory_of(rank).fd()}));
          if (outer) return outer(std::move(made));
          return made;
        },
        body);
  }

  int64_t host_of(int64_t rank) const { return host_of_[static_cast<size_t>(rank)]; }
  const ShmWorld& memory_of(int64_t rank) const { return memory_[static_cast<size_t>(host_of(rank))]; }
  /// What all ranks are in, each as its own host sees it.
  std::vector<RankView> views() const {
    std::vector<RankView> out;
    for (int64_t r = 0; r < std::ssize(host_of_); ++r) {
      out.push_back(memory_of(r).ranks()[static_cast<size_t>(r)]);
    }
    return out;
  }

 private:
  const TempDir dir_;
  std::vector<int64_t> host_of_;
  std::vector<ShmWorld> memory_;

 public:
  std::optional<Processes> ranks;
};

inline std::vector<std::string> run_hosts(const WorldSpec& spec, int64_t hosts, const Body& body,
                                          const Around& outer = {}) {
  Hosts world(spec, hosts, body, {}, outer);
  std::vector<std::string> results;
  for (int64_t r = 0; r < spec.size; ++r) results.push_back(world.ranks->join(r));
  return results;
}

inline std::vector<std::string> run_hybrid(const WorldSpec& spec, const Body& body) { return run_hosts(spec, 2, body); }

struct Fabric {
  std::string name;
  std::function<std::vector<std::string>(const WorldSpec&, const Body&)> run;
  int64_t scale = 1;   // divides repetition counts: how much slower an operation is
  bool staged = true;  // groups of all ranks go through staging memory
  bool compares =
      true;  // the members' calls: one that differs is told by both names, else when the deadline has passed
};

#ifdef CAIRN_OTHER_FABRICS
std::vector<Fabric> fabrics();                       // tests/runtime/cuda/nccl
Around around(const WorldSpec& spec);                // called before the ranks are there
constexpr double kNoticedMs = 200;                   // a device's operations are looked at now and then
constexpr std::string_view kSettledOn = "cuda:0: ";  // before an error, where a stream is settled
#else
constexpr double kNoticedMs = 0;
constexpr std::string_view kSettledOn;
inline Around around(const WorldSpec&) {
  return [](std::unique_ptr<Engine> host) -> Result<std::unique_ptr<Engine>> { return host; };
}
inline std::vector<Fabric> fabrics() {
  return {{"threads", run_threads, 1},
          {"shm", run_shm, 1},
          {"gloo", run_gloo, 20, false},
          {"hybrid", run_hybrid, 20, false}};
}
#endif

inline double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::vector<int64_t> all_ranks(int64_t n) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < n; ++r) ranks.push_back(r);
  return ranks;
}

}  // namespace cairn::comm::testing
