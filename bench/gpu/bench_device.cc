#include "bench/gpu/bench_device.h"

#include <build_version.inc>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <set>

#include "runtime/cuda/machine/module.h"

namespace cairn::bench {
namespace {

constexpr int64_t kAlign = 256;
constexpr int64_t kDrawnBytes = int64_t{32} << 20;
constexpr int64_t kMostSets = 64;

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

Status BenchDevice::open_machine(const WorkShapes& work, bool cudnn) {
  machine_.reset();
  RT_TRY_SET(machine_, cuda::open_machine(CAIRN_TREE_VERSION, {.cudnn = cudnn}));
  return machine_->allow(work);
}

bool BenchDevice::use_cudnn(bool wanted) {
  stream().use_attention(wanted ? cudnn_ : nullptr, stream().attention_workspace());
  return wanted && cudnn_ != nullptr;
}

bool BenchDevice::use_warpgroups(bool wanted) {
  stream().use_warpgroups(wanted);
  return wanted && machine_->has_warpgroups();
}

Result<std::unique_ptr<BenchDevice>> BenchDevice::open(int64_t room_bytes, const WorkShapes& work) {
  std::unique_ptr<BenchDevice> out(new BenchDevice);
  if (const Status with_cudnn = out->open_machine(work, true); with_cudnn.ok()) {
    out->cudnn_ = out->stream().attention();
  } else {
    out->no_cudnn_ = with_cudnn.error().message;
    RT_TRY(out->open_machine(work, false));
  }
  out->use_cudnn(false);
  const Device device = out->machine_->device();
  RT_TRY_SET(out->room_, Buffer::allocate(device, room_bytes));
  const int64_t drawn_bytes = std::min(room_bytes, kDrawnBytes);
  RT_TRY_SET(out->drawn_, Buffer::allocate(device, drawn_bytes));
  std::vector<bf16> host(static_cast<size_t>(drawn_bytes) / sizeof(bf16));
  std::mt19937 draw(1);
  std::normal_distribution<float> normal;
  for (bf16& x : host) x = to_bf16(normal(draw));
  out->stream().copy(out->drawn_.at().address(), host.data(), drawn_bytes, cuda::kToDevice);
  RT_TRY(out->stream().settle());
  out->on_ = std::make_unique<kernels::Exec<bf16>>(kernels::exec_on<bf16>(out->stream()));
  out->state_ = std::make_unique<kernels::StateExec>(kernels::state_exec_on(out->stream()));
  return out;
}

DevicePtr<std::byte> Arrays::take(int64_t bytes) {
  const int64_t begin = used_;
  used_ += (bytes + kAlign - 1) / kAlign * kAlign;
  if (used_ <= device_.room().size) return device_.room().first + begin;
  full_ = true;
  return nullptr;
}

DevicePtr<std::byte> Arrays::filled(int64_t bytes) {
  const DevicePtr<std::byte> out = take(bytes);
  if (!out) return out;
  const DeviceBytes from = device_.drawn();
  for (int64_t at = 0; at < bytes; at += from.size) {
    device_.stream().copy((out + at).address(), from.first.address(), std::min(from.size, bytes - at), cuda::kOnDevice);
  }
  return out;
}

std::vector<int32_t> corpus_ids(int64_t count, int64_t limit) {
  std::vector<int32_t> out(static_cast<size_t>(count));
  std::mt19937 draw(3);
  for (int32_t& one : out) {  // frequencies of 1 / rank
    const double rank = std::pow(static_cast<double>(limit), static_cast<double>(draw()) / 0x1p32);
    one = static_cast<int32_t>(std::min(static_cast<int64_t>(rank), limit) - 1);
  }
  return out;
}
int64_t distinct_ids(int64_t count, int64_t limit) {
  const std::vector<int32_t> ids = corpus_ids(count, limit);
  return std::ssize(std::set<int32_t>(ids.begin(), ids.end()));
}

DevicePtr<int32_t> Arrays::numbers(int64_t count, int64_t limit) {
  std::vector<int32_t> host(static_cast<size_t>(count));
  std::mt19937 draw(2);
  for (int32_t& one : host) one = static_cast<int32_t>(draw() % static_cast<uint64_t>(limit));
  return of(host);
}

double Timed::median() const {
  std::vector<double> sorted = us;
  std::sort(sorted.begin(), sorted.end());
  return sorted.empty() ? 0 : sorted[sorted.size() / 2];
}

Result<Timed> measure(BenchDevice& device, const Case& of, const Pace& pace) {
  Timed out;
  Arrays arrays(device);
  std::vector<Order> sets{of.make(arrays)};
  if (arrays.full()) {
    out.needed = arrays.used();
    return out;
  }
  const int64_t each = std::max<int64_t>(1, arrays.used());
  const int64_t fitting = std::min(kMostSets, device.room().size / each);
  while (std::ssize(sets) < fitting && arrays.used() < pace.rotate_bytes) {
    Order more = of.make(arrays);
    if (arrays.full()) break;
    sets.push_back(std::move(more));
  }
  cuda::CudaStream& stream = device.stream();
  size_t turn = 0;
  const auto timed = [&](int64_t calls) -> Result<double> {
    const double begin = now_s();
    for (int64_t k = 0; k < calls; ++k) sets[turn++ % sets.size()]();
    RT_TRY(stream.settle());
    return now_s() - begin;
  };
  RT_TRY_SET(double spent, timed(std::ssize(sets)));  // products choose their algorithms
  constexpr int64_t kBurst = 8;
  const double begin = now_s();
  for (int64_t k = 0; k < kBurst; ++k) sets[turn++ % sets.size()]();
  out.order_us = (now_s() - begin) * 1e6 / kBurst;
  RT_TRY(stream.settle());
  int64_t calls = 1;
  RT_TRY_SET(spent, timed(calls));
  while (spent < pace.round_s / 2) {
    calls *= spent < pace.round_s / 8 ? 4 : 2;
    RT_TRY_SET(spent, timed(calls));
  }
  for (int round = 0; round < pace.rounds; ++round) {
    RT_TRY_SET(spent, timed(calls));
    out.us.push_back(spent * 1e6 / static_cast<double>(calls));
  }
  return out;
}

}  // namespace cairn::bench
