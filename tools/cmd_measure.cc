// cairn _measure: this host measured alone, and with others, for a check of hosts (tools/run/check/host_checker.h).
// Started by an agent, which kills it at the limit; tells what it has as soon as it has it, by events.
#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <omp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ckpt/format/checksum.h"
#include "runtime/agent/event_pipe.h"
#include "runtime/cluster/connection.h"
#include "runtime/cluster/guests.h"
#include "runtime/comm/gloo_engine.h"
#include "runtime/core/file_calls.h"
#include "runtime/core/random.h"
#include "runtime/cuda/blas_api.h"
#include "runtime/cuda/gpu_speed.h"
#include "runtime/cuda/machine/module.h"
#include "runtime/hosts/message.h"
#include "runtime/json/json.h"
#include "runtime/kernels/isa.h"
#include "tools/commands.h"
#include "tools/machine_check.h"
#include "tools/run/check/gpu_judge.h"
#include "tools/run/hosts/fleet.h"
#include "tools/square_matmul.h"
#include "tools/version.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Clock = std::chrono::steady_clock;
using cluster::steady_ns;

constexpr int64_t kWindows = 3;    // of each rate: the best counts, for others may have had the processors
constexpr double kMatmulS = 0.25;  // of a window: more than two periods of a CPU limit
constexpr double kCopyS = 0.1;
constexpr int64_t kCopyBytes = int64_t{64} << 20;
constexpr double kWriteS = 1;  // at most, for so much
constexpr int64_t kWriteBytes = int64_t{64} << 20, kWritePiece = int64_t{4} << 20;
constexpr double kReachS = 5;  // for a connection: a lost packet of it costs one second, a second one three
constexpr int64_t kReachTrips = 3;
constexpr int64_t kDeadlineMs = 8000;  // of the engine
constexpr double kGatherS = 1;         // at most, for so much
constexpr int64_t kGatherBytes = int64_t{64} << 20, kGatherFirst = int64_t{64} << 10, kGatherPiece = int64_t{8} << 20;
constexpr double kTripsS = 2.5;  // at most, for so many
constexpr int64_t kTrips = 200;
constexpr double kStallS = 0.15;  // TCP sends a lone packet again after 0.2 s

double seconds_since(int64_t begin_ns) { return static_cast<double>(steady_ns() - begin_ns) / 1e9; }

/// Work per second of the best window.
double best_rate(double window_s, const std::function<double()>& piece) {
  double best = 0;
  for (int64_t window = 0; window < kWindows; ++window) {
    const int64_t begin = steady_ns();
    double work = 0;
    while (seconds_since(begin) < window_s) work += piece();
    best = std::max(best, work / seconds_since(begin));
  }
  return best;
}

/// The same numbers on every host; what comes of them goes into the digest.
std::pair<double, std::string> measure_matmul(DType dtype) {
  constexpr int64_t kSize = 384;
  SquareMatmul product(kSize, dtype, DType::kF32);
  const auto fill = [&](std::vector<std::byte>& to, uint64_t seed) {
    for (int64_t k = 0; k < kSize * kSize; ++k) {
      const float value = static_cast<float>(mix64(seed + static_cast<uint64_t>(k)) >> 40) * 0x1p-24F - 0.5F;
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      if (dtype == DType::kF32) {
        std::memcpy(&to[static_cast<size_t>(4 * k)], &bits, 4);
      } else {
        const auto upper = static_cast<uint16_t>(bits >> 16);
        std::memcpy(&to[static_cast<size_t>(2 * k)], &upper, 2);
      }
    }
  };
  fill(product.a(), 1);
  fill(product.b(), uint64_t{1} << 32);
  product.run();
  uint64_t digest = ckpt::hash_bytes(product.product());
  const double rate = best_rate(kMatmulS, [&] {
    product.run();
    const uint64_t now = ckpt::hash_bytes(product.product());
    if (now != digest) digest = mix64(digest ^ now);  // not even equal to itself
    return product.flops() / 1e9;
  });
  return {rate, fmt::format("{:016x}", digest)};
}

double measure_copy() {
  std::vector<std::byte> from(static_cast<size_t>(kCopyBytes), std::byte{1}), to(from.size());
  return best_rate(kCopyS, [&] {
    std::memcpy(to.data(), from.data(), from.size());
    from[static_cast<size_t>(to.back() == std::byte{1} ? 1 : 2)] = std::byte{1};  // the copy is needed
    return static_cast<double>(kCopyBytes) / 1e9;
  });
}

Result<double> measure_write(const fs::path& folder) {
  const fs::path path = folder / fmt::format("check-{}-{}", own_host_name(), ::getpid());
  const auto failed = [&](const char* what) { return os_error(errno, what).with(path.string()); };
  const Fd file(::open(path.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600));
  if (file.get() < 0) return failed("open");
  ::unlink(path.c_str());
  const std::vector<std::byte> piece(static_cast<size_t>(kWritePiece), std::byte{7});
  const int64_t begin = steady_ns();
  int64_t written = 0;
  while (written < kWriteBytes && (written == 0 || seconds_since(begin) < kWriteS)) {
    for (int64_t at = 0; at < kWritePiece;) {
      const ssize_t n = ::write(file.get(), piece.data() + at, static_cast<size_t>(kWritePiece - at));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return failed("write");
      at += n;
    }
    if (sync_to_disk(file.get()) != 0) return failed("fsync");
    written += kWritePiece;
  }
  return static_cast<double>(written) / 1e6 / seconds_since(begin);
}

json measure_alone(const hosts::Measure& order) {
  const DType dtype = order.dtype == "bf16" ? DType::kBf16 : DType::kF32;
  json out{{"event", "alone"}};
  const auto [gflops, digest] = measure_matmul(dtype);
  out["matmul_gflops"] = gflops;
  out["digest"] = digest;
  out["copy_gb_s"] = measure_copy();
  const Result<double> write = measure_write(order.folder);
  if (write.ok()) {
    out["write_mb_s"] = write.value();
  } else {
    out["failed"] = write.error().message;
  }
  return out;
}

// --- GPUs -----------------------------------------------------------------------------------------------------------

/// Whom it may disturb: "process 4711 (cairn) computes on it".
std::string in_use_text(int64_t pid) {
  std::string name;
  std::getline(std::ifstream(fmt::format("/proc/{}/comm", pid)) >> std::ws, name);
  return fmt::format("process {}{} computes on it", pid, name.empty() ? "" : " (" + name + ")");
}

/// Those of NVML's that this process may use; what NVML does not show of them is lost.
void keep_visible(const host::VisibleGpus& visible, HostGpus& host) {
  std::vector<GpuFigures> out;
  for (const host::VisibleGpu& one : visible.gpus) {
    if (!one.gpu || one.gpu->pci.empty()) return;  // which they are is not known
    const std::string pci = cuda::pci_text(one.gpu->pci);
    const auto found = std::ranges::find_if(host.gpus, [&](const GpuFigures& gpu) { return gpu.health.pci == pci; });
    if (found != host.gpus.end()) {
      out.push_back(*found);
      continue;
    }
    // Of a lost one NVML may not say where it is.
    const auto lost = std::ranges::find_if(
        host.gpus, [](const GpuFigures& gpu) { return gpu.health.pci.empty() && !gpu.health.lost.empty(); });
    GpuFigures& gpu = out.emplace_back();
    gpu.health.index = lost == host.gpus.end() ? std::ssize(out) - 1 : lost->health.index;
    gpu.health.lost = lost == host.gpus.end() ? "it does not show this GPU" : lost->health.lost;
    gpu.health.name = one.gpu->model;
    gpu.health.uuid = one.gpu->uuid;
    gpu.health.pci = pci;
    if (lost != host.gpus.end()) host.gpus.erase(lost);
  }
  host.gpus = std::move(out);
}

/// Nothing where NVML does not say whether others compute there.
Result<HostGpus> measure_gpus_here(const hosts::Measure& order) {
  RT_TRY_SET(const host::VisibleGpus visible, own_gpus());
  if (visible.gpus.empty()) return HostGpus{};
  show_to_cuda(visible);
  Result<HostGpus> looked = look_at_gpus();
  if (!looked.ok()) {
    HostGpus out;
    for (int64_t k = 0; k < visible.size(); ++k) {
      GpuFigures& gpu = out.gpus.emplace_back();
      gpu.health.index = k;
      gpu.health.pci = cuda::pci_text(host::pci_of_rank(visible, k));
      gpu.not_measured = fmt::format("whether a run computes on it is not known: {}", looked.error().message);
    }
    return out;
  }
  HostGpus out = std::move(looked).value();
  keep_visible(visible, out);
  cuda::SpeedOptions options{.dtype = order.dtype == "bf16" ? DType::kBf16 : DType::kF32, .left_out = {}};
  if (order.gpu_size) {
    options.size = *order.gpu_size;
    options.window_s = 0.01;
  }
  for (const GpuFigures& gpu : out.gpus) {
    const cuda::GpuHealth& health = gpu.health;
    if (!health.processes.empty()) options.left_out[health.pci] = in_use_text(health.processes.front());
    if (health.mig) options.left_out[health.pci] = "it is cut into MIG devices";
    if (!health.lost.empty()) options.left_out[health.pci] = health.lost;
  }
  RT_TRY_SET(const cuda::LoadedModule module, cuda::load_module(tree_version()));
  RT_TRY_SET(const cuda::LoadedBlas products, cuda::load_blas(cuda::library_candidates("libcublasLt.so.13")));
  RT_TRY_SET(const std::vector<cuda::GpuSpeed> speeds, cuda::measure_gpus(module.module->api(), products.api, options));
  // What they say of themselves now that they have worked.
  Result<HostGpus> after = look_at_gpus();
  for (GpuFigures& gpu : out.gpus) {
    const auto same = [&](const GpuFigures& other) { return other.health.pci == gpu.health.pci; };
    const auto speed = std::ranges::find(speeds, gpu.health.pci, &cuda::GpuSpeed::pci);
    if (after.ok() && gpu.health.lost.empty()) {
      if (const auto now = std::ranges::find_if(after.value().gpus, same); now != after.value().gpus.end()) {
        const uint64_t slowed_by = gpu.health.slowed_by;
        gpu.health = now->health;
        gpu.health.slowed_by |= slowed_by;
        gpu.xids = now->xids;
      }
    }
    if (speed == speeds.end()) {
      if (gpu.health.lost.empty()) gpu.failed = "CUDA does not show it";
      continue;
    }
    gpu.product_tflops = speed->product_tflops;
    gpu.copy_gb_s = speed->copy_gb_s;
    gpu.to_device_gb_s = speed->to_device_gb_s;
    gpu.to_host_gb_s = speed->to_host_gb_s;
    gpu.to_gpus_gb_s = speed->to_gpus_gb_s;
    gpu.wrong = speed->wrong;
    gpu.failed = speed->failed;
    if (gpu.health.lost.empty()) gpu.not_measured = speed->not_measured;
  }
  return out;
}

json gpus_event(const hosts::Measure& order) {
  Result<HostGpus> gpus = measure_gpus_here(order);
  json out{{"event", "gpus"}};
  if (gpus.ok()) {
    out.update(to_json(gpus.value()));
  } else {
    out = {{"event", "error"}, {"message", "its GPUs: " + gpus.error().message}};
  }
  return out;
}

// --- whether each host reaches each ---------------------------------------------------------------------------------

void set_no_delay(int fd) {
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

/// False: not by then, or the other end is gone.
bool transfer(int fd, bool in, int64_t until_ns) {
  for (;;) {
    char byte = 1;
    const ssize_t n = in ? ::recv(fd, &byte, 1, MSG_DONTWAIT) : ::send(fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n == 1) return true;
    if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return false;
    pollfd ready{fd, static_cast<short>(in ? POLLIN : POLLOUT), 0};
    const int64_t left_ms = (until_ns - steady_ns() + 999'999) / 1'000'000;
    if (left_ms <= 0 || ::poll(&ready, 1, static_cast<int>(left_ms)) == 0) return false;
  }
}

/// The limit of files of this process, less those that it opens itself.
int64_t most_connections() {
  constexpr int64_t kOwn = 128, kLeast = 8, kMost = 65536;
  rlimit limit{};
  const bool bounded = ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(kMost);
  return bounded ? std::max(kLeast, static_cast<int64_t>(limit.rlim_cur) - kOwn) : kMost;
}

/// Answers each byte of any connection, until it ends. It asks for no proof, so its connections are bounded, and a
/// flood from one address costs only connections of that address.
class Echo {
 public:
  static Result<std::unique_ptr<Echo>> open(const std::string& address) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_PASSIVE;
    if (::getaddrinfo(address.c_str(), "0", &hints, &found) != 0)
      return Error{ErrorCode::kInvalidInput, fmt::format("{} is no address", address)};
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
    Fd fd(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd.get() < 0) return os_error(errno, "socket");
    if (::bind(fd.get(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(fd.get(), 1024) != 0)
      return os_error(errno, "listen").with(address);
    sockaddr_storage own{};
    socklen_t size = sizeof(own);
    ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size);
    const uint16_t port = ntohs(own.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&own)->sin_port
                                                         : reinterpret_cast<sockaddr_in6*>(&own)->sin6_port);
    return std::unique_ptr<Echo>(new Echo(std::move(fd), port));
  }
  ~Echo() {
    ends_ = true;
    thread_.join();
  }
  int64_t port() const { return port_; }

 private:
  Echo(Fd fd, int64_t port) : fd_(std::move(fd)), port_(port), thread_([this] { run(); }) {}
  void run() {
    while (!ends_) {
      std::vector<pollfd> ready{{fd_.get(), POLLIN, 0}};
      for (const cluster::Connection& one : all_) ready.push_back({one.fd(), POLLIN, 0});
      if (::poll(ready.data(), ready.size(), 20) <= 0) continue;
      for (size_t k = ready.size() - 1; k > 0; --k) {
        if (ready[k].revents != 0 && !answer(ready[k].fd)) all_.erase(all_.begin() + static_cast<int64_t>(k) - 1);
      }
      if (ready[0].revents != 0) accept();
    }
  }

  /// False: the connection has ended.
  static bool answer(int fd) {
    char byte = 0;
    const ssize_t n = ::recv(fd, &byte, 1, MSG_DONTWAIT);
    if (n != 1) return n < 0 && (errno == EAGAIN || errno == EINTR);
    ignore(::send(fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1 ? Status() : Status(os_error(errno, "send")),
           "the peer has closed, or takes nothing");
    return true;
  }

  void accept() {
    Fd one(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const bool no_file = one.get() < 0 && (errno == EMFILE || errno == ENFILE);
    if (!all_.empty() && (no_file || std::ssize(all_) >= most_)) {
      std::vector<std::string> addresses;
      for (const cluster::Connection& held : all_) addresses.push_back(held.peer_address());
      all_.erase(all_.begin() + static_cast<int64_t>(cluster::place_to_give(addresses)));
    }
    if (one.get() < 0) return;
    set_no_delay(one.get());
    all_.emplace_back(std::move(one));
  }

  const Fd fd_;
  const int64_t port_;
  const int64_t most_ = most_connections();
  std::vector<cluster::Connection> all_;  // the oldest first; of the thread
  std::atomic<bool> ends_ = false;
  std::thread thread_;
};

/// Empty: it is reached.
std::string reach(const std::string& address, int64_t port) {
  const int64_t until_ns = cluster::steady_after(kReachS);
  Result<cluster::Connection> to = cluster::Connection::connect(address, port, until_ns);
  if (!to.ok()) return to.error().message;
  set_no_delay(to.value().fd());
  for (int64_t trip = 0; trip < kReachTrips; ++trip) {
    if (!transfer(to.value().fd(), false, until_ns) || !transfer(to.value().fd(), true, until_ns))
      return fmt::format("{}: no answer in {:.0f} s", address, kReachS);
  }
  return "";
}

void measure_reach(const hosts::Measure& order, comm::Rendezvous& meet, agent::EventWriter& events) {
  const std::string& own = order.address;
  const auto key = [](int64_t host) { return fmt::format("reach-{}", host); };
  const auto until = Clock::now() + std::chrono::seconds(30);  // the agent ends this earlier
  Result<std::unique_ptr<Echo>> echo = Echo::open(own);
  if (!echo.ok()) return events.send_error(echo.error());
  const std::string at_port =
      fmt::format("{} {}", echo.value()->port(), own);  // as this host says: it may have several
  if (const Result<bool> made = meet.publish(key(order.self), at_port, until); !made.ok())
    return events.send_error(made.error());
  std::vector<std::thread> threads;
  std::atomic<int64_t> at = 0;
  const std::vector<int64_t>& others = *order.reach;
  for (int64_t k = 0; k < std::min<int64_t>(std::ssize(others), 64); ++k) {
    threads.emplace_back([&] {
      for (int64_t mine = at++; mine < std::ssize(others); mine = at++) {
        const int64_t host = others[static_cast<size_t>(mine)];
        const Result<std::optional<std::string>> found = meet.await(key(host), until);
        if (!found.ok() || !found.value()) continue;  // it has told nothing: that is told of it
        const std::string& where = *found.value();
        const std::string why = reach(where.substr(where.find(' ') + 1), std::atoll(where.c_str()));
        ignore(events.send({{"event", "reach"}, {"host", host}, {"failed", why}}), "the agent ends this");
      }
    });
  }
  for (std::thread& one : threads) one.join();
  ignore(events.send({{"event", "reached"}}), "the agent ends this");
  // For as long as others may try. The agent ends this.
  std::this_thread::sleep_for(std::chrono::seconds(30));
}

// --- pairs -----------------------------------------------------------------------------------------------------------

/// TCP segments that this host has sent again, of whatever connection. 0: the system does not tell.
int64_t segments_resent() {
  std::ifstream file("/proc/self/net/snmp");  // "Tcp: NAME NAME ...", then "Tcp: NUMBER NUMBER ..."
  std::vector<std::string> names;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("Tcp:")) continue;
    std::istringstream words(line);
    const std::vector<std::string> all(std::istream_iterator<std::string>(words), {});
    if (names.empty()) {
      names = all;
      continue;
    }
    const auto at = std::ranges::find(names, "RetransSegs") - names.begin();
    return at < std::ssize(all) ? std::atoll(all[static_cast<size_t>(at)].c_str()) : 0;
  }
  return 0;
}

Result<json> measure_pair(const hosts::Measure& order, std::shared_ptr<comm::Rendezvous> meet) {
  const int64_t self = order.self, partner = *order.partner;
  const int64_t rank = self < partner ? 0 : 1;
  RT_TRY_SET(const std::unique_ptr<comm::Engine> engine,
             comm::make_gloo_engine({.rank = rank,
                                     .world_size = 2,
                                     .interface_address = order.address,
                                     .rendezvous = std::move(meet),
                                     .options = {.deadline_ms = kDeadlineMs}}));
  RT_TRY_SET(const std::unique_ptr<comm::Comm> pair, engine->group("check", {0, 1}));
  RT_TRY(pair->barrier("both hosts are there"));
  std::vector<std::byte> all(static_cast<size_t>(2 * kGatherPiece));
  // Both have to agree when to end: rank 0 says how much comes next.
  int64_t begin = steady_ns(), gathered = 0, piece = kGatherFirst;
  double best_s = 0, gb_s = 0;
  for (;;) {
    int64_t next = gathered >= kGatherBytes || (gathered > 0 && seconds_since(begin) > kGatherS) ? 0 : piece;
    std::array<int64_t, 2> said{};
    RT_TRY(pair->all_gather(&next, said.data(), sizeof(next), "how much comes"));
    next = said[0];
    if (next <= 0 || next > kGatherPiece) break;
    const int64_t at = steady_ns();
    RT_TRY(pair->all_gather(all.data() + rank * next, all.data(), next, "all-gather"));
    best_s = seconds_since(at);
    gathered += next;
    gb_s = std::max(gb_s, static_cast<double>(next) / 1e9 / best_s);
    if (best_s < 0.05) piece = std::min(2 * next, kGatherPiece);
  }
  std::vector<double> trips;
  int64_t stalls = 0;
  const int64_t resent = segments_resent();
  begin = steady_ns();
  for (;;) {
    char go = std::ssize(trips) < kTrips && seconds_since(begin) < kTripsS ? 1 : 0;
    const int64_t at = steady_ns();
    if (rank == 0) {
      RT_TRY(pair->isend(&go, 1, 1, "there"));
      if (go != 0) RT_TRY(pair->recv(&go, 1, 1, "back"));
      RT_TRY(pair->wait_sends("there"));
    } else {
      RT_TRY(pair->recv(&go, 1, 0, "there"));
      if (go != 0) RT_TRY(pair->isend(&go, 1, 0, "back"));
      RT_TRY(pair->wait_sends("back"));
    }
    if (go == 0) break;
    trips.push_back(seconds_since(at));
    stalls += trips.back() > kStallS ? 1 : 0;
  }
  if (trips.empty()) trips.push_back(0);
  std::ranges::sort(trips);
  return json{
      {"event", "pair"},
      {"partner", partner},
      {"gb_s", gb_s},
      {"trip_us", 1e6 * trips[trips.size() / 10]},  // of the fast ones: processors that are busy delay the others
      {"trips", std::ssize(trips)},
      {"stalls", stalls},
      {"resent", segments_resent() - resent}};
}

Result<int> measure(const std::string& text, int meet_fd) {
  RT_TRY_SET(agent::EventWriter events, agent::EventWriter::from_environment());
  const Result<hosts::Message> read = hosts::decode(hosts::Measure::kKind, json_or_nothing(text));
  if (!read.ok()) return Error{ErrorCode::kInvalidInput, "--order: " + read.error().message};
  const auto& order = std::get<hosts::Measure>(read.value());
  kernels::use_gemm_isa(static_cast<kernels::GemmIsa>(order.kernel_level));
  const auto meet = comm::open_agent_rendezvous(Fd(meet_fd));
  if (order.partner) {  // first: somebody waits
    Result<json> pair = measure_pair(order, meet);
    RT_TRY(events.send(pair.ok()
                           ? std::move(pair).value()
                           : json{{"event", "pair"}, {"partner", *order.partner}, {"failed", pair.error().message}}));
  }
  if (order.alone.value_or(false)) RT_TRY(events.send(measure_alone(order)));
  if (order.gpus.value_or(false)) RT_TRY(events.send(gpus_event(order)));
  if (order.reach) measure_reach(order, *meet, events);
  return 0;
}

}  // namespace

void add_measure(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("_measure", "measures a host for a check of hosts; started by its agent")->group("");
  const auto order = std::make_shared<std::string>();
  const auto meet = std::make_shared<int>(-1);
  command->add_option("--order", *order)->required();
  command->add_option("--meet-fd", *meet)->required();
  command->callback(
      [order, meet, &session] { session.action = [order, meet]() -> Result<int> { return measure(*order, *meet); }; });
}

}  // namespace cairn::tools
