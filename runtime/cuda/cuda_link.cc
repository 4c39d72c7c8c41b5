#include "runtime/cuda/cuda_link.h"

#include <fmt/format.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "runtime/core/log.h"
#include "runtime/cuda/stream.h"

namespace cairn {
namespace {

// Copies that wait in a stream, beside at most 64 events. A stream takes some 1,024 pieces of work, and then keeps the
// host until one is done.
constexpr int64_t kDepth = 900;

class CudaLink final : public DeviceLink {
 public:
  CudaLink(std::shared_ptr<cuda::Context> context, const CudaLinkOptions& options)
      // Not urgent: priorities mean nothing to copies, and sums give way to training. Non-blocking: what training puts
      // into the default stream does not wait for copies.
      : context_(std::move(context)),
        options_(options),
        copies_(cuda::CudaStream::make(context_, {.deadline_ms = options.deadline_ms})) {}
  ~CudaLink() override {
    copies_.reset();  // waits for what is on its way
    for (void* const host : pinned_) {
      if (context_->api().unpin(host) != 0) context_->api().last_error();
    }
  }

  Status use_host(std::span<std::byte> host) override {
    RT_TRY(copies_->status());
    RT_TRY(context_->checked(context_->select(), "cudaSetDevice"));
    if (host.empty()) return {};
    // Memory of another process is pinned in this one's page table: the arena needs to know nothing of it.
    const Status pinned =
        context_->checked(context_->api().pin(host.data(), host.size(), cuda::kPortable), "cudaHostRegister");
    if (pinned.ok()) {
      pinned_.push_back(host.data());
    } else {  // the runtime copies through memory of its own then, and returns when a piece is there
      spdlog::warn("{} MiB of snapshot memory cannot be pinned, copies to it are slow: {}", host.size() >> 20,
                   pinned.error().message);
    }
    return {};
  }

  Status follow_work() override {
    const cuda::Api& api = context_->api();
    RT_TRY(context_->checked(context_->select(), "cudaSetDevice"));
    cuda::EventHandle event = nullptr;
    RT_TRY(context_->checked(context_->take_event(&event), "cudaEventCreate"));
    Status followed = context_->checked(api.record(event, options_.work), "cudaEventRecord");
    if (followed.ok()) followed = context_->checked(api.wait_event(copies_->handle(), event, 0), "cudaStreamWaitEvent");
    context_->give_back(event);
    return followed;
  }

  bool at_once() const override { return false; }
  int64_t depth() const override { return kDepth; }
  int64_t deadline_ms() const override { return options_.deadline_ms; }

  Result<std::optional<uint64_t>> fetch(DeviceBytes device, std::byte* host) override {
    copies_->copy(host, device.first.address(), device.size, cuda::kToHost);
    RT_TRY(copies_->status());
    return std::optional<uint64_t>();
  }

  Result<std::shared_ptr<const Event>> mark() override {
    std::shared_ptr<const Event> out = copies_->mark();
    RT_TRY(copies_->status());
    return out;
  }

  Result<bool> has_arrived(const Event& mark) override {
    Result<bool> reached = cuda::is_reached(mark);
    if (!reached.ok()) return std::move(reached).error().with("copying to the host");
    return reached;
  }

  Result<bool> sum_up(std::span<const DeviceBytes> arrays) override {
    if (options_.sum_runs == nullptr) return false;
    int64_t chunks = 0, bytes = 0;
    std::vector<WordRun> runs;
    for (const DeviceBytes& array : arrays) {
      runs.push_back({array.first.as<const float>().address(), array.size / 4, chunks});
      chunks += sum_chunks(array.size / 4);
      bytes += array.size;
    }
    const DeviceBytes room = options_.room();
    if (const int64_t needed = sum_room_bytes(std::ssize(runs), bytes); needed > room.size) {
      return Error{ErrorCode::kInternal,
                   fmt::format("sums of {} arrays of {} bytes need {} bytes of {}, {} are planned", runs.size(), bytes,
                               needed, device_name(context_->device()), room.size)};
    }
    const auto count = static_cast<int64_t>(runs.size()), table_bytes = count * static_cast<int64_t>(sizeof(WordRun));
    table_ = reinterpret_cast<WordRun*>(room.first.address());
    device_sums_ = reinterpret_cast<uint64_t*>(room.first.address() + table_bytes);
    runs_ = count;
    chunks_ = chunks;
    host_sums_ = copies_->host_memory(count * static_cast<int64_t>(sizeof(uint64_t)));
    copies_->copy(table_, runs.data(), table_bytes, cuda::kToDevice);
    RT_TRY(copies_->settle());
    return true;
  }

  Status take_sums() override {
    if (runs_ > 0 && copies_->ready()) {
      copies_->keep(options_.sum_runs(copies_->handle(), table_, runs_, chunks_, device_sums_ + runs_, device_sums_),
                    "sums of a snapshot");
      copies_->copy(host_sums_.get(), device_sums_, runs_ * static_cast<int64_t>(sizeof(uint64_t)), cuda::kToHost);
    }
    return copies_->status();
  }

  std::span<const uint64_t> sums() const override {
    return {reinterpret_cast<const uint64_t*>(host_sums_.get()), static_cast<size_t>(runs_)};
  }

  Status store(std::span<const std::byte> host, DevicePtr<std::byte> device) override {
    copies_->copy(device.address(), host.data(), std::ssize(host), cuda::kToDevice);
    return copies_->status();
  }

  Status settle() override { return copies_->settle(); }

 private:
  const std::shared_ptr<cuda::Context> context_;
  const CudaLinkOptions options_;
  // Of the device's sums: the table of arrays, the arrays' sums and behind them those of chunks; the host's, pinned.
  WordRun* table_ = nullptr;
  uint64_t* device_sums_ = nullptr;
  int64_t runs_ = 0, chunks_ = 0;
  std::shared_ptr<std::byte> host_sums_;
  std::vector<void*> pinned_;
  std::unique_ptr<cuda::CudaStream> copies_;
};

}  // namespace

int64_t sum_room_bytes(int64_t arrays, int64_t bytes) {
  const int64_t chunks = sum_chunks(bytes / 4) + arrays;  // each array may end in one that is not full
  return arrays * static_cast<int64_t>(sizeof(WordRun)) + (arrays + chunks) * static_cast<int64_t>(sizeof(uint64_t));
}

int cuda_devices(const cuda::Api& api) {
  int count = 0;
  return cuda::checked(api, api.device_count(&count), "looking for devices").ok() ? count : 0;
}

Result<std::unique_ptr<DeviceLink>> make_cuda_link(const cuda::Api& api, int device, const CudaLinkOptions& options) {
  RT_TRY_SET(std::shared_ptr<cuda::Context> context, cuda::Context::open(api, device));
  auto link = std::make_unique<CudaLink>(std::move(context), options);
  RT_TRY(link->settle());  // an error of its making
  return std::unique_ptr<DeviceLink>(std::move(link));
}

}  // namespace cairn
