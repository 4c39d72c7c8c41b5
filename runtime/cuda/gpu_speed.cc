#include "runtime/cuda/gpu_speed.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "runtime/core/random.h"
#include "runtime/core/units.h"
#include "runtime/cuda/blas.h"
#include "runtime/cuda/gpu_health.h"

namespace cairn::cuda {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;
constexpr int64_t kHostBytes = int64_t{64} << 20;  // of pinned memory, for what goes to and fro
constexpr int kWindows = 3;
constexpr double kPairWindowS = 0.005;  // of a pair of GPUs: there are many
constexpr int64_t kMost = 200;          // pieces of a window
constexpr int kLargestFactor = 15;      // 15 * 15 * 4096 terms: below 2^24, up to which floats have all whole numbers

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

int64_t depth_of(const SpeedOptions& options) { return options.size / 2; }
int64_t factor_bytes(const SpeedOptions& options) {
  return options.size * depth_of(options) * dtype_size_bytes(options.dtype);
}
int64_t product_bytes(const SpeedOptions& options) { return options.size * options.size * int64_t{4}; }

/// The factor at a place of the tile, of the first matrix or of the second.
int factor(int64_t matrix, int64_t place, int64_t term) {
  const uint64_t bits =
      mix64((static_cast<uint64_t>(matrix) << 60) + (static_cast<uint64_t>(place) << 40) + static_cast<uint64_t>(term));
  return static_cast<int>(bits % (2 * kLargestFactor + 1)) - kLargestFactor;
}

void write_factor(int value, DType dtype, std::byte* to) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  if (dtype == DType::kF32) {
    std::memcpy(to, &bits, 4);
  } else {
    const auto upper = static_cast<uint16_t>(bits >> 16);  // exact: so small a number has 4 bits
    std::memcpy(to, &upper, 2);
  }
}

/// What the product has to be: rows of the tile, each as long as the product's.
class Expected {
 public:
  explicit Expected(int64_t size) : size_(size), rows_(static_cast<size_t>(kSpeedTile * size)) {
    const int64_t depth = size / 2;
    std::vector<int> a(static_cast<size_t>(kSpeedTile * depth)), b(a.size());
    for (int64_t place = 0; place < kSpeedTile; ++place) {
      for (int64_t term = 0; term < depth; ++term) {
        a[static_cast<size_t>(place * depth + term)] = factor(0, place, term);
        b[static_cast<size_t>(place * depth + term)] = factor(1, place, term);
      }
    }
    for (int64_t row = 0; row < kSpeedTile; ++row) {
      for (int64_t column = 0; column < kSpeedTile; ++column) {
        int sum = 0;
        for (int64_t term = 0; term < depth; ++term)
          sum += a[static_cast<size_t>(row * depth + term)] * b[static_cast<size_t>(column * depth + term)];
        for (int64_t at = column; at < size; at += kSpeedTile)
          rows_[static_cast<size_t>(row * size + at)] = static_cast<float>(sum);
      }
    }
  }

  /// Rows from `first` on. How many elements differ; `where` is the first one's row, column and bits.
  int64_t differences(const float* rows, int64_t first, int64_t count, std::string& where) const {
    int64_t out = 0;
    for (int64_t row = 0; row < count; ++row) {
      const float* const is = rows + row * size_;
      const float* const should = rows_.data() + (first + row) % kSpeedTile * size_;
      if (std::memcmp(is, should, static_cast<size_t>(size_) * 4) == 0) continue;
      for (int64_t column = 0; column < size_; ++column) {
        const auto bits = std::bit_cast<uint32_t>(is[column]), wanted = std::bit_cast<uint32_t>(should[column]);
        if (bits == wanted) continue;
        if (out++ == 0) where = fmt::format("[{}, {}] is {:08x}, not {:08x}", first + row, column, bits, wanted);
      }
    }
    return out;
  }

 private:
  const int64_t size_;
  std::vector<float> rows_;
};

/// A GPU with what is measured on it: both factors, one behind the other, the product, room for the algorithm.
class Measured {
 public:
  static Result<std::unique_ptr<Measured>> open(const Api& api, const BlasApi& products, const SpeedOptions& options,
                                                int index) {
    std::unique_ptr<Measured> out(new Measured(options));
    RT_TRY_SET(out->context_, Context::open(api, index));
    RT_TRY_SET(out->blas_, Blas::open(products, out->context_));
    void* memory = nullptr;
    RT_TRY(out->context_->checked(api.allocate(&memory, static_cast<size_t>(speed_bytes(options))), "cudaMalloc")
               .with(format_bytes(speed_bytes(options))));
    out->memory_ = static_cast<std::byte*>(memory);
    out->stream_ = CudaStream::make(out->context_, {.deadline_ms = options.deadline_ms});
    out->host_bytes_ = std::min(kHostBytes, product_bytes(options));
    out->host_ = out->stream_->host_memory(out->host_bytes_);
    return out;
  }
  ~Measured() {
    stream_.reset();  // waits for what uses the memory
    host_.reset();
    blas_.reset();
    if (memory_ == nullptr) return;
    bool refused = context_->select() != 0;
    refused |= context_->api().free(memory_) != 0;
    if (refused) context_->api().last_error();
  }
  Measured(const Measured&) = delete;
  Measured& operator=(const Measured&) = delete;

  CudaStream& stream() { return *stream_; }
  const Context& context() const { return *context_; }
  std::byte* factors() { return memory_; }
  std::byte* product() { return memory_ + 2 * factor_bytes(options_); }
  std::byte* host() { return host_.get(); }
  int64_t host_bytes() const { return host_bytes_; }

  Status give_factors() {
    const int64_t depth = depth_of(options_), width = dtype_size_bytes(options_.dtype);
    // Rows of the first matrix are places of the tile; columns of the second are.
    RT_TRY(give(
        factors(), options_.size, depth * width,
        [&](int64_t row, std::byte* to) {
          for (int64_t term = 0; term < depth; ++term)
            write_factor(factor(0, row % kSpeedTile, term), options_.dtype, to + term * width);
        },
        true));
    return give(
        factors() + factor_bytes(options_), depth, options_.size * width,
        [&](int64_t term, std::byte* to) {
          for (int64_t column = 0; column < kSpeedTile; ++column)
            write_factor(factor(1, column, term), options_.dtype, to + column * width);
          for (int64_t at = kSpeedTile; at < options_.size; at += kSpeedTile)
            std::memcpy(to + at * width, to, static_cast<size_t>(kSpeedTile * width));
        },
        false);
  }

  void multiply() {
    blas_->multiply(*stream_,
                    {.m = options_.size,
                     .n = options_.size,
                     .k = depth_of(options_),
                     .a = factors(),
                     .lda = depth_of(options_),
                     .b = factors() + factor_bytes(options_),
                     .ldb = options_.size,
                     .c = product(),
                     .ldc = options_.size,
                     .ab_dtype = options_.dtype,
                     .c_dtype = DType::kF32},
                    {DevicePtr<std::byte>(product() + product_bytes(options_)), kWorkspaceBytes});
  }

  /// Empty: the first `bytes` there are the product's. Else how many elements are not, and the first of them.
  Result<std::string> compare(const std::byte* at, int64_t bytes, const Expected& expected) {
    const int64_t row_bytes = options_.size * 4, rows = bytes / row_bytes, rows_once = host_bytes_ / row_bytes;
    int64_t different = 0;
    std::string first;
    for (int64_t row = 0; row < rows; row += rows_once) {
      const int64_t count = std::min(rows_once, rows - row);
      stream_->copy(host(), at + row * row_bytes, count * row_bytes, kToHost);
      RT_TRY(stream_->settle());
      std::string where;
      different += expected.differences(reinterpret_cast<const float*>(host()), row, count, where);
      if (first.empty()) first = where;
    }
    return different == 0 ? std::string() : fmt::format("{} of {} elements differ: {}", different, bytes / 4, first);
  }

  /// Work per second, of the best window.
  Result<double> best_rate(double window_s, double work, const std::function<void()>& piece) {
    piece();
    RT_TRY(stream_->settle());
    Clock::time_point begin = Clock::now();
    piece();
    RT_TRY(stream_->settle());
    const double one_s = std::max(seconds_since(begin), 1e-7);
    const int64_t pieces = std::clamp(static_cast<int64_t>(window_s / one_s), int64_t{1}, kMost);
    double best = work / one_s;
    for (int window = 0; window < kWindows; ++window) {
      begin = Clock::now();
      for (int64_t k = 0; k < pieces; ++k) piece();
      RT_TRY(stream_->settle());
      best = std::max(best, work * static_cast<double>(pieces) / seconds_since(begin));
    }
    return best;
  }

 private:
  explicit Measured(const SpeedOptions& options) : options_(options) {}

  /// Rows that `fill` makes go up, as many at a time as the host has room for. `tiles`: they repeat.
  Status give(std::byte* to, int64_t rows, int64_t row_bytes, const std::function<void(int64_t, std::byte*)>& fill,
              bool tiles) {
    const int64_t rows_once = host_bytes_ / row_bytes;
    for (int64_t row = 0; row < rows; row += rows_once) {
      const int64_t count = std::min(rows_once, rows - row);
      for (int64_t k = 0; k < count; ++k) {
        std::byte* const here = host() + k * row_bytes;
        if (tiles && k >= kSpeedTile) {
          std::memcpy(here, here - kSpeedTile * row_bytes, static_cast<size_t>(row_bytes));
        } else {
          fill(row + k, here);
        }
      }
      stream_->copy(to + row * row_bytes, host(), count * row_bytes, kToDevice);
      RT_TRY(stream_->settle());
    }
    return {};
  }

  const SpeedOptions& options_;
  std::shared_ptr<Context> context_;
  std::unique_ptr<Blas> blas_;
  std::byte* memory_ = nullptr;
  std::unique_ptr<CudaStream> stream_;
  int64_t host_bytes_ = 0;
  std::shared_ptr<std::byte> host_;
};

constexpr const char* kLate = "the time was over";

/// All that concerns one GPU.
Status measure_one(Measured& gpu, const SpeedOptions& options, const Expected& expected,
                   const std::function<bool()>& late, GpuSpeed& out) {
  CudaStream& stream = gpu.stream();
  const int64_t bytes = product_bytes(options);
  RT_TRY(gpu.give_factors());
  const auto check = [&](const char* which) -> Status {
    stream.set(gpu.product(), 0xff, bytes);  // what was right before is no answer
    gpu.multiply();
    RT_TRY_SET(const std::string differs, gpu.compare(gpu.product(), bytes, expected));
    if (out.wrong.empty() && !differs.empty()) out.wrong = fmt::format("{} matrix product: {}", which, differs);
    return {};
  };
  RT_TRY(check("the first"));
  const double flop = 2.0 * static_cast<double>(options.size * options.size * depth_of(options));
  RT_TRY_SET(out.product_tflops, gpu.best_rate(options.window_s, flop / 1e12, [&] { gpu.multiply(); }));
  RT_TRY(check("a later"));
  if (late()) {
    out.not_measured = kLate;
    return {};
  }
  const int64_t copied = std::min(2 * factor_bytes(options), bytes);
  const auto gb = [](int64_t count) { return static_cast<double>(count) / 1e9; };
  RT_TRY_SET(out.copy_gb_s, gpu.best_rate(options.window_s / 4, 2 * gb(copied),
                                          [&] { stream.copy(gpu.product(), gpu.factors(), copied, kOnDevice); }));
  RT_TRY_SET(out.to_device_gb_s, gpu.best_rate(options.window_s / 4, gb(gpu.host_bytes()), [&] {
    stream.copy(gpu.product(), gpu.host(), gpu.host_bytes(), kToDevice);
  }));
  RT_TRY_SET(out.to_host_gb_s, gpu.best_rate(options.window_s / 4, gb(gpu.host_bytes()), [&] {
    stream.copy(gpu.host(), gpu.product(), gpu.host_bytes(), kToHost);
  }));
  gpu.multiply();  // for the pairs
  return stream.settle();
}

/// The product goes from one GPU to where the other has its factors.
Status measure_pair(Measured& from, int from_index, Measured& to, int to_index, const SpeedOptions& options,
                    const Expected& expected, const std::string& to_pci, GpuSpeed& out) {
  const Api& api = from.context().api();
  const int64_t bytes = std::min({2 * factor_bytes(options), product_bytes(options), from.host_bytes()});
  to.stream().set(to.factors(), 0xff, bytes);
  RT_TRY(to.stream().settle());
  if (int can = 0; api.can_reach(&can, from_index, to_index) != 0 || can == 0 || from.context().select() != 0 ||
                   api.let_reach(to_index, 0) != 0) {
    api.last_error();  // then copies go through the host: the rate says it
  }
  RT_TRY_SET(const double rate, from.best_rate(kPairWindowS, static_cast<double>(bytes) / 1e9, [&] {
    if (from.stream().ready()) {
      from.stream().keep(api.copy_between(to.factors(), to_index, from.product(), from_index,
                                          static_cast<size_t>(bytes), from.stream().handle()),
                         "cudaMemcpyPeerAsync");
    }
  }));
  out.to_gpus_gb_s[to_pci] = rate;
  RT_TRY_SET(const std::string differs, to.compare(to.factors(), bytes, expected));
  if (out.wrong.empty() && !differs.empty()) out.wrong = fmt::format("a copy to the GPU at {}: {}", to_pci, differs);
  return {};
}

}  // namespace

int64_t speed_bytes(const SpeedOptions& options) {
  return 2 * factor_bytes(options) + product_bytes(options) + kWorkspaceBytes;
}

Result<std::vector<GpuSpeed>> measure_gpus(const Api& api, const BlasApi& products, const SpeedOptions& options) {
  if (options.size <= 0 || options.size > 8192 || options.size % kSpeedTile != 0 || options.dtype == DType::kF16) {
    return Error{ErrorCode::kInvalidInput, fmt::format("a product of size {} and type {} is not measured; expected a "
                                                       "multiple of {} up to 8192, of f32 or bf16",
                                                       options.size, dtype_name(options.dtype), kSpeedTile)};
  }
  const Clock::time_point begin = Clock::now();
  const auto late = [&] { return seconds_since(begin) > options.limit_s; };
  int count = 0;
  RT_TRY(checked(api, api.device_count(&count), "looking for devices", ErrorCode::kUnavailable));
  const Expected expected(options.size);
  std::vector<GpuSpeed> out(static_cast<size_t>(count));
  std::vector<std::unique_ptr<Measured>> gpus(static_cast<size_t>(count));
  for (int k = 0; k < count; ++k) {
    GpuSpeed& speed = out[static_cast<size_t>(k)];
    std::array<char, 32> text{};
    RT_TRY(checked(api, api.pci_address(text.data(), static_cast<int>(text.size()), k), "cudaDeviceGetPCIBusId",
                   ErrorCode::kUnavailable));
    speed.pci = pci_text(text.data());
    if (const auto why = options.left_out.find(speed.pci); why != options.left_out.end() || late()) {
      speed.not_measured = why != options.left_out.end() ? why->second : kLate;
      continue;
    }
    std::unique_ptr<Measured>& gpu = gpus[static_cast<size_t>(k)];
    Status measured;
    if (auto opened = Measured::open(api, products, options, k); opened.ok()) {
      gpu = std::move(opened).value();
      measured = measure_one(*gpu, options, expected, late, speed);
    } else {
      measured = std::move(opened).error();
    }
    if (!measured.ok()) speed.failed = measured.error().message;
    if (!speed.failed.empty() || !speed.wrong.empty() || !speed.not_measured.empty()) gpu.reset();
  }
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      Measured* const one = gpus[static_cast<size_t>(from)].get();
      Measured* const other = gpus[static_cast<size_t>(to)].get();
      GpuSpeed& speed = out[static_cast<size_t>(from)];
      if (from == to || one == nullptr || other == nullptr || !speed.failed.empty()) continue;
      if (late()) {
        speed.not_measured = std::string("copies to some GPUs, ") + kLate;
        continue;
      }
      // The other's factors are gone, its product is what it sends.
      const Status measured =
          measure_pair(*one, from, *other, to, options, expected, out[static_cast<size_t>(to)].pci, speed);
      if (!measured.ok())
        speed.failed =
            fmt::format("a copy to the GPU at {}: {}", out[static_cast<size_t>(to)].pci, measured.error().message);
    }
  }
  return out;
}

}  // namespace cairn::cuda
