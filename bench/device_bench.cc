// What snapshots of a CUDA device's memory cost training on it. An Adam state of a given size lies in the device's
// memory, and a bank for it in shared memory, as the agent's:
//   limit     cudaMemcpyAsync of the state, tensor by tensor, into memory of cudaHostAlloc
//   bank      the same into the bank, which is pinned by cudaHostRegister: one copy of the state
//   copy      by the copier, with checksums, nothing beside it
//   step      forward and backward, and an update of all tensors
//   saved     the same beside a copy that begins with it
//   update    an update alone
//   at worst  the same beside a copy that has just begun: no forward and backward for it to run beside
// There is no device code: work is copies within the device, from one of two gradients into all arrays for an update,
// and for forward and backward as many as take --work times as long as one copy of the state. So they contend with
// snapshots for the device's memory at its worst, and not for its multiprocessors. Arms take turns. What is published
// is compared with what the state was when its copy began, by its sums; the last one byte by byte with them.
//
//   device_bench [--gib=1,4,12] [--work=1.5] [--rounds=7] [--device=0] [--tiny]
//
// Ends with 77 where there is no device.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ckpt/copy/state_copier.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/snapshot.h"
#include "runtime/core/random.h"
#include "runtime/core/word_sums.h"
#include "runtime/cuda/cuda_link.h"
#include "runtime/cuda/linked/linked_api.h"
#include "runtime/cuda/stream.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

constexpr int kTensors = 24, kArrays = 3, kSkipped = 77;
enum Arm { kLimit, kBank, kCopy, kStep, kSaved, kUpdate, kAtWorst, kArms };

void good(cudaError_t error, const char* what) {
  RT_CHECK(error == cudaSuccess, "{}: {}", what, cudaGetErrorString(error));
}
void good(const Status& status) { RT_CHECK(status.ok(), "{}", status.error().message); }

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
double process_cpu_s() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
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

class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes) { good(cudaMalloc(&data_, static_cast<size_t>(bytes)), "cudaMalloc"); }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* at(int64_t offset = 0) const { return static_cast<std::byte*>(data_) + offset; }

 private:
  void* data_ = nullptr;
};

struct Setup {
  int device = 0, rounds = 7;
  double work = 1.5;  // forward and backward, in copies of the state
};

ArenaSpec spec_of(int64_t tensor_bytes) {
  ArenaSpec spec{.run_id = "device-bench", .recipe_hash = "none", .directory = "none", .slots = 2};
  spec.backing = ArenaBacking::kMemfd;
  SlotLayout layout;
  for (int k = 0; k < kArrays * kTensors; ++k) {
    layout.shards.push_back({k / kTensors, k % kTensors, {}, layout.bytes, tensor_bytes});
    layout.bytes += (tensor_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
  spec.ranks = {layout};
  return spec;
}

/// A device, its state, and all that is done with it.
class Training {
 public:
  Training(const Setup& setup, const Arena& arena, int64_t tensor_bytes)
      : arena_(arena),
        tensor_bytes_(tensor_bytes),
        state_(kArrays * kTensors * tensor_bytes),
        gradients_(2 * tensor_bytes),
        activations_(2 * activation_bytes()),
        writer_(arena, 0) {
    Result<std::shared_ptr<cuda::Context>> context = cuda::Context::open(cuda::linked_api(), setup.device);
    RT_CHECK(context.ok(), "{}", context.error().message);
    work_ = cuda::CudaStream::make(context.value());
    good(work_->settle());
    stream_ = work_->handle();
    good(cudaHostAlloc(&pinned_, static_cast<size_t>(tensor_bytes), cudaHostAllocDefault), "cudaHostAlloc");
    good(cudaMemset(activations_.at(), 0, static_cast<size_t>(2 * activation_bytes())), "cudaMemset");
    for (int k : {0, 1}) {
      std::vector<uint32_t> words(static_cast<size_t>(tensor_bytes / 4));
      for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(mix64(2 * i + static_cast<size_t>(k)));
      const auto bytes = std::as_bytes(std::span(words));
      sums_[k] = word_sums(bytes.data(), std::ssize(words));
      good(cudaMemcpy(gradients_.at(k * tensor_bytes), bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
           "cudaMemcpy");
    }
    Result<std::unique_ptr<DeviceLink>> link = make_cuda_link(cuda::linked_api(), setup.device, {.work = stream_});
    RT_CHECK(link.ok(), "{}", link.error().message);
    const double begin = now_s();
    for (int64_t slot = 0; slot < arena.slots(); ++slot) good(link.value()->use_host(arena.payload(0, slot)));
    pin_s_ = now_s() - begin;
    copier_ = std::make_unique<StateCopier>(std::move(link).value(), kCopyNice);
    std::vector<std::vector<CopyArray>> groups;
    for (int t = 0; t < kTensors; ++t) {
      std::vector<CopyArray>& group = groups.emplace_back();
      for (int array = 0; array < kArrays; ++array) {
        const int64_t shard = array * kTensors + t;
        group.push_back({DevicePtr(at(shard)), arena.shards(0)[shard].offset, tensor_bytes, shard});
      }
    }
    good(copier_->cover(groups, kArrays * kTensors));
    update(/*gated=*/false);
    drain();
  }
  ~Training() {
    copier_.reset();
    cudaFreeHost(pinned_);
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  double pin_s() const { return pin_s_; }
  const StateCopier& copier() const { return *copier_; }
  int64_t slot() const { return slot_; }

  void drain() { good(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  void copy_to_pinned() {
    for (int64_t shard = 0; shard < kArrays * kTensors; ++shard) to_host(pinned_, shard);
    drain();
  }
  void copy_to_bank() {
    slot_ ^= 1;
    writer_.begin(slot_, 1, ++step_);
    for (int64_t shard = 0; shard < kArrays * kTensors; ++shard)
      to_host(arena_.payload(0, slot_).data() + arena_.shards(0)[shard].offset, shard);
    drain();
  }

  /// Begins a copy; finish() says when it was complete.
  void start() {
    slot_ ^= 1;
    writer_.begin(slot_, 1, ++step_);
    good(copier_->start(arena_.payload(0, slot_).data(), [this, slot = slot_, step = step_,
                                                          expected = sums_[now_]](std::span<const uint64_t> sums) {
      const bool right = std::all_of(sums.begin(), sums.end(), [&](uint64_t sum) { return sum == expected; });
      RT_CHECK(right, "step {}: what was copied is not what the state was", step);
      complete_s_ = now_s();
      return writer_.publish(slot, 1, step, "", sums, 0);
    }));
  }
  double finish() {
    good(copier_->finish());
    return complete_s_;
  }

  void forward_and_backward(int64_t passes) {
    for (int64_t k = 0; k < passes; ++k)
      within_device(activations_.at(k % 2 * activation_bytes()), activations_.at((k + 1) % 2 * activation_bytes()),
                    activation_bytes());
  }
  void update(bool gated) {
    now_ ^= 1;
    for (int t = 0; t < kTensors; ++t) {
      std::vector<DeviceBytes> areas;
      for (int array = 0; array < kArrays; ++array)
        areas.push_back({DevicePtr(at(array * kTensors + t)), tensor_bytes_});
      if (gated) copier_->order_after_copy(*work_, areas);
      for (const DeviceBytes& area : areas)
        within_device(gradients_.at(now_ * tensor_bytes_), address_of(area.first), tensor_bytes_);
    }
  }

 private:
  std::byte* at(int64_t shard) const { return state_.at(shard * tensor_bytes_); }
  int64_t activation_bytes() const { return std::clamp<int64_t>(6 * tensor_bytes_, 1 << 20, int64_t{1} << 30); }
  void to_host(void* to, int64_t shard) {
    good(cudaMemcpyAsync(to, at(shard), static_cast<size_t>(tensor_bytes_), cudaMemcpyDeviceToHost, stream_),
         "cudaMemcpyAsync to the host");
  }
  void within_device(const std::byte* from, std::byte* to, int64_t bytes) {
    good(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream_),
         "cudaMemcpyAsync within the device");
  }

  const Arena& arena_;
  const int64_t tensor_bytes_;
  DeviceMemory state_, gradients_, activations_;
  SnapshotWriter writer_;
  std::unique_ptr<cuda::CudaStream> work_;
  cudaStream_t stream_ = nullptr;  // its handle
  void* pinned_ = nullptr;
  uint64_t sums_[2] = {};  // of a tensor after an update from either gradient
  int64_t now_ = 0, slot_ = 0, step_ = 0;
  double pin_s_ = 0, complete_s_ = 0;
  std::unique_ptr<StateCopier> copier_;
};

struct Spread {
  double median = 0, least = 0, most = 0;
};
Spread spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front(), values.back()};
}

void measure(double gib, const Setup& setup) {
  const auto wanted = static_cast<int64_t>(gib * (int64_t{1} << 30));
  const int64_t tensor_bytes = std::max<int64_t>(wanted / kArrays / kTensors / 4096 * 4096, 4096);
  const int64_t state = kArrays * kTensors * tensor_bytes;
  const double state_gb = static_cast<double>(state) * 1e-9;
  const std::string what = fmt::format("{:.2f} GiB", static_cast<double>(state) / (int64_t{1} << 30));
  size_t free_bytes = 0, all_bytes = 0;
  good(cudaMemGetInfo(&free_bytes, &all_bytes), "cudaMemGetInfo");
  const int64_t on_device = state + 14 * tensor_bytes + (int64_t{1} << 30), on_host = 2 * state + (int64_t{1} << 30);
  if (on_device > static_cast<int64_t>(free_bytes) || on_host > available_bytes()) {
    fmt::print("{}: left out, {} MiB of the device's memory are free and {} needed, {} MiB of the host's and {}\n",
               what, free_bytes >> 20, on_device >> 20, available_bytes() >> 20, on_host >> 20);
    return;
  }
  const Result<Arena> arena = Arena::create(spec_of(tensor_bytes));
  RT_CHECK(arena.ok(), "{}", arena.error().message);
  arena.value().populate(0);
  Training training(setup, arena.value(), tensor_bytes);

  const auto timed = [&](const auto& work) {
    training.drain();
    const double begin = now_s();
    work();
    training.drain();
    return now_s() - begin;
  };
  constexpr int kProbe = 8;
  const auto passes_s = [&] { return timed([&] { training.forward_and_backward(kProbe); }); };
  static_cast<void>(passes_s());
  const double pass_s = passes_s() / kProbe;
  static_cast<void>(timed([&] { training.copy_to_bank(); }));
  const double bank_s = timed([&] { training.copy_to_bank(); });
  const auto passes = std::max<int64_t>(1, static_cast<int64_t>(setup.work * bank_s / pass_s));

  std::vector<double> times[kArms], lost, worst, pauses, waits, complete, cpu, sum_rates;
  for (int round = -1; round < setup.rounds; ++round) {  // the first one warms up
    double seconds[kArms] = {}, pause = 0, waited = 0, complete_s = 0, cpu_s = 0;
    for (int k = 0; k < kArms; ++k) {
      const int arm = (k + round + 1) % kArms;
      const double cpu_begin = process_cpu_s();
      const int64_t waited_ns = training.copier().waited_ns();
      const bool saves = arm == kCopy || arm == kSaved || arm == kAtWorst;
      double begin = 0;
      const auto start = [&] {
        begin = now_s();
        training.start();
        if (arm != kCopy) pause = std::max(pause, now_s() - begin);
      };
      seconds[arm] = timed([&] {
        if (arm == kLimit) training.copy_to_pinned();
        if (arm == kBank) training.copy_to_bank();
        if (saves) start();
        if (arm == kCopy) training.finish();
        if (arm == kStep || arm == kSaved) training.forward_and_backward(passes);
        if (arm != kLimit && arm != kBank && arm != kCopy) training.update(saves);
      });
      if (saves) {
        const double done = training.finish();
        if (arm == kSaved) complete_s = done - begin;
      }
      if (arm == kSaved) waited = static_cast<double>(training.copier().waited_ns() - waited_ns) * 1e-9;
      if (arm == kCopy) cpu_s = process_cpu_s() - cpu_begin;
    }
    const double begin = now_s();
    const auto bank = arena.value().payload(0, training.slot());
    [[maybe_unused]] volatile const uint64_t sums = word_sums(bank.data(), std::ssize(bank) / 4);
    const double summed = now_s() - begin;
    if (round < 0) continue;
    for (int arm = 0; arm < kArms; ++arm) times[arm].push_back(seconds[arm] * 1e3);
    lost.push_back((seconds[kSaved] - seconds[kStep]) / seconds[kBank] * 100);
    worst.push_back((seconds[kAtWorst] - seconds[kUpdate]) / seconds[kBank] * 100);
    pauses.push_back(pause * 1e3);
    waits.push_back(waited * 1e3);
    complete.push_back(complete_s * 1e3);
    cpu.push_back(cpu_s / state_gb);
    sum_rates.push_back(static_cast<double>(bank.size()) * 1e-9 / summed);
  }
  training.start();
  training.finish();
  const Result<RankSnapshot> last = read_slot(arena.value(), 0, training.slot(), Check::kEveryByte);
  RT_CHECK(last.ok(), "{}", last.error().message);
  const auto print = [](const char* name, const std::vector<double>& values, const char* unit, int digits) {
    const Spread s = spread(values);
    fmt::print("  {:<52} {:.{}f} ({:.{}f} to {:.{}f}) {}\n", name, s.median, digits, s.least, digits, s.most, digits,
               unit);
  };
  const auto rate = [&](const char* name, Arm arm) {
    std::vector<double> rates;
    for (const double ms : times[arm]) rates.push_back(state_gb / ms * 1e3);
    print(name, rates, "GB/s", 2);
  };
  fmt::print("{} of state, {} tensors of 3 arrays{}\n", what, kTensors,
             arena.value().huge_pages() ? ", huge pages" : ", 4 KiB pages in shared memory");
  fmt::print("  {:<52} {:.2f} s/GB\n", "pinning the banks, once at a start", training.pin_s() / (2 * state_gb));
  rate("limit: cudaMemcpyAsync into cudaHostAlloc", kLimit);
  rate("cudaMemcpyAsync into a bank", kBank);
  rate("copier into a bank, with checksums", kCopy);
  print("checksums of a bank on one core", sum_rates, "GB/s", 2);
  print("cores' time of a copy", cpu, "s/GB", 3);
  print("one copy of the state", times[kBank], "ms", 2);
  print("step", times[kStep], "ms", 2);
  print("step beside a copy", times[kSaved], "ms", 2);
  print("update", times[kUpdate], "ms", 2);
  print("update beside a copy", times[kAtWorst], "ms", 2);
  print("longest start of a copy (bar 1 ms)", pauses, "ms", 3);
  print("update waited for its copy", waits, "ms", 2);
  print("complete after its begin", complete, "ms", 2);
  print("lost a save, of one copy of the state (bar 25 %)", lost, "%", 1);
  print("the same at worst, without forward and backward", worst, "%", 1);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<double> sizes{1, 4, 12};
  Setup setup;
  for (int k = 1; k < argc; ++k) {
    const std::string_view arg = argv[k];
    const auto value = [&] { return std::string(arg.substr(arg.find('=') + 1)); };
    if (arg == "--tiny") {
      sizes = {0.001};
      setup.rounds = 3;
    } else if (arg.starts_with("--gib=")) {
      sizes.clear();
      std::stringstream list(value());
      for (std::string one; std::getline(list, one, ',');) sizes.push_back(std::atof(one.c_str()));
    } else if (arg.starts_with("--work=")) {
      setup.work = std::atof(value().c_str());
    } else if (arg.starts_with("--rounds=")) {
      setup.rounds = std::max(1, std::atoi(value().c_str()));
    } else if (arg.starts_with("--device=")) {
      setup.device = std::atoi(value().c_str());
    } else {
      fmt::print(stderr, "usage: device_bench [--gib=A,B,...] [--work=X] [--rounds=N] [--device=N] [--tiny]\n");
      return 2;
    }
  }
  if (setup.device < 0 || setup.device >= cuda_devices(cuda::linked_api())) {
    fmt::print("skipped: this machine has no CUDA device {}\n", setup.device);
    return kSkipped;
  }
#ifndef NDEBUG
  fmt::print("warning: this build is not optimised; its numbers say nothing\n");
#endif
  good(cudaSetDevice(setup.device), "cudaSetDevice");
  cudaDeviceProp properties{};
  good(cudaGetDeviceProperties(&properties, setup.device), "cudaGetDeviceProperties");
  int driver = 0, runtime = 0;
  good(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  good(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  fmt::print("{}; driver for CUDA {}.{}, runtime {}.{}; {} cores; build {}\n", properties.name, driver / 1000,
             driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10, std::thread::hardware_concurrency(),
             CAIRN_BUILD_TYPE);
  for (const double gib : sizes) measure(gib, setup);
  return 0;
}
