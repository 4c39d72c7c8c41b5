#pragma once
// A device as a rank trains on it, for measuring: the module of kernels and cuBLASLt, one stream, one room of memory
// from which each case takes its arrays. What fills them is drawn, never zeros, which some chips multiply faster.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/cuda/machine/machine.h"
#include "runtime/device/buffer.h"
#include "runtime/kernels/ops.h"
#include "runtime/kernels/state_ops.h"

namespace cairn::bench {

class BenchDevice {
 public:
  /// `room_bytes` for arrays; kernels have room for `work`. Errors: what is missing of the machine.
  static Result<std::unique_ptr<BenchDevice>> open(int64_t room_bytes, const WorkShapes& work);

  cuda::CudaStream& stream() { return machine_->cuda_stream(); }
  /// Whether attention is by cuDNN from here on. False where that cannot be, which no_cudnn() explains.
  bool use_cudnn(bool wanted);
  /// The same of warpgroups; false where the device has none.
  bool use_warpgroups(bool wanted);
  const std::string& no_cudnn() const { return no_cudnn_; }
  const kernels::Exec<bf16>& on() const { return *on_; }
  const kernels::StateExec& state() const { return *state_; }
  DeviceBytes room() { return room_.all(); }
  /// Numbers of a normal distribution as bf16. Two of them are a float of about the same distribution.
  DeviceBytes drawn() { return drawn_.all(); }

 private:
  BenchDevice() = default;
  Status open_machine(const WorkShapes& work, bool cudnn);

  std::unique_ptr<cuda::CudaMachine> machine_;
  cuda::AttentionPlans* cudnn_ = nullptr;
  std::string no_cudnn_;
  Buffer room_, drawn_;
  std::unique_ptr<kernels::Exec<bf16>> on_;
  std::unique_ptr<kernels::StateExec> state_;
};

/// `count` ids below `limit`, the same each time, as often as Zipf's law has words: of 50257 the first is every
/// sixteenth.
std::vector<int32_t> corpus_ids(int64_t count, int64_t limit);
/// How many of those differ.
int64_t distinct_ids(int64_t count, int64_t limit);

/// Arrays of one case, one behind the other in the room. What does not fit is null, and full() says so.
class Arrays {
 public:
  explicit Arrays(BenchDevice& device) : device_(device) {}

  /// T: bf16 or float.
  template <typename T>
  DevicePtr<T> drawn(int64_t count) {
    return filled(count * static_cast<int64_t>(sizeof(T))).template as<T>();
  }
  template <typename T>
  DevicePtr<T> zeros(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    const DevicePtr<std::byte> out = take(bytes);
    if (out) device_.stream().set(out.address(), 0, bytes);
    return out.as<T>();
  }
  template <typename T>
  DevicePtr<T> of(const std::vector<T>& host) {
    const DevicePtr<T> out = take(std::ssize(host) * static_cast<int64_t>(sizeof(T))).template as<T>();
    if (out) device_.stream().give(std::span<const T>(host), out);
    return out;
  }
  /// `count` numbers from 0 to `limit` - 1, the same each time.
  DevicePtr<int32_t> numbers(int64_t count, int64_t limit);
  /// corpus_ids().
  DevicePtr<int32_t> ids(int64_t count, int64_t limit) { return of(corpus_ids(count, limit)); }

  BenchDevice& device() { return device_; }
  int64_t used() const { return used_; }
  bool full() const { return full_; }

 private:
  DevicePtr<std::byte> take(int64_t bytes);
  DevicePtr<std::byte> filled(int64_t bytes);

  BenchDevice& device_;
  int64_t used_ = 0;
  bool full_ = false;
};

/// Orders a kernel's work once.
using Order = std::function<void()>;

struct Case {
  std::string name;   // in the tables of kernels
  std::string shape;  // for people: "16384 x 768"
  double bytes = 0;   // that must be read and written at least
  double flops = 0;   // of matrix products, that must be computed
  double calls = 0;   // in a step of one micro-batch
  std::function<Order(Arrays&)> make;
};

struct Pace {
  int rounds = 5;
  double round_s = 0.02;
  int64_t rotate_bytes = int64_t{256} << 20;  // arrays of so many bytes take turns, so that caches do not hold them
};

struct Timed {
  std::vector<double> us;  // of a call, one for each round
  double order_us = 0;     // the host's share of a call: where it is as long, the host is measured
  int64_t needed = 0;      // bytes that did not fit; `us` is empty then

  double median() const;
};

/// Errors: of the device.
Result<Timed> measure(BenchDevice& device, const Case& of, const Pace& pace);

}  // namespace cairn::bench
