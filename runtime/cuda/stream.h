#pragma once
// A stream of a CUDA device (runtime/device/stream.h), and graphs captured from it. Work is ordered on the runtime's
// stream and done later. The first call that the runtime refuses makes the stream a failed one: it orders nothing more,
// and settle() gives that error.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "runtime/cuda/context.h"
#include "runtime/device/stream.h"

namespace cairn::cuda {

class AttentionPlans;
class AttentionWays;
class Blas;

/// Work that was captured, to be launched as one. Its addresses and arguments are those of the capture.
class Graph {
 public:
  Graph(std::shared_ptr<Context> context, GraphExecHandle handle) : context_(std::move(context)), handle_(handle) {}
  Graph(Graph&& other) noexcept : context_(std::move(other.context_)), handle_(std::exchange(other.handle_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();

  GraphExecHandle handle() const { return handle_; }

 private:
  std::shared_ptr<Context> context_;
  GraphExecHandle handle_;
};

struct StreamOptions {
  bool urgent = false;      // before others of the device
  int64_t deadline_ms = 0;  // of settle(); 0: none
};

/// Threads: one at a time.
class CudaStream final : public Stream {
 public:
  static std::unique_ptr<CudaStream> make(std::shared_ptr<Context> context, const StreamOptions& options = {});
  /// Waits for the work that is ordered.
  ~CudaStream() override;

  Device device() const override { return context_->device(); }
  /// With the same deadline, without memory for kernels, and urgent: what goes to other ranks waits for a place on the
  /// device, and would wait for the tail of a large kernel; ranks that have begun wait for it meanwhile.
  std::unique_ptr<Stream> beside() const override;
  std::shared_ptr<const Event> mark() override;
  void follow(const std::shared_ptr<const Event>& event) override;
  std::unique_ptr<StreamTimer> make_timer() override;
  std::shared_ptr<std::byte> host_memory(int64_t bytes) const override;

  // --- for kernels and copies of the device
  StreamHandle handle() const { return handle_; }
  /// The device is the thread's current one, and the stream takes work.
  bool ready();
  /// Keeps the first error; 0 is none.
  void keep(int error, const char* what);
  void keep(Error error);
  /// No error so far, of what the runtime has told.
  bool ok() const { return failed_.ok(); }
  const Status& status() const { return failed_; }

  /// Between the host and the device or on it, as `kind` says (kToHost, ...).
  void copy(void* to, const void* from, int64_t bytes, int kind);
  void set(void* memory, int value, int64_t bytes);

  /// Device memory for what kernels of this stream need while they run; others take it after them.
  void use_scratch(DeviceBytes scratch) { scratch_ = scratch; }
  /// Its first bytes; null, and an error that names `who`, where it has not so many.
  void* scratch(int64_t bytes, const char* who);

  int64_t scratch_bytes() const { return scratch_.size; }

  /// Device memory for what give() is told without room: a ring, in which numbers stay until the ring comes round. As
  /// much of the host is pinned, from which numbers are copied, so give() waits for nothing.
  void use_given(DeviceBytes room);
  /// A ring for so many gives of so many bytes in all between two settle(): twice what they take, so that what does not
  /// fit in before the ring's end has room behind it.
  static int64_t given_room(int64_t bytes, int64_t gives) { return 2 * (bytes + gives * kGivenAlign); }

  /// What it is asked for from now on comes behind the host's store of `value` or more (counted round) to `word`, which
  /// lies in host_memory() and is an atomic of 4 bytes.
  void follow(const std::atomic<uint32_t>& word, uint32_t value);
  /// Whether the device waits for words of this memory (of host_memory()): orders a wait that is over at once, and
  /// settles it. Errors: those of the runtime; kUnsupported where the driver has no such wait or refuses it, as under
  /// some virtual GPUs. A refusal leaves a failed stream.
  Status can_follow(const std::atomic<uint32_t>& word);
  /// Asked when it is settled, behind its work: an error makes the stream a failed one. Until the stream goes.
  void settle_with(std::function<Status()> other) { others_.push_back(std::move(other)); }

  /// Who orders products, and memory for their algorithms, which no other stream may have.
  void use_blas(Blas& blas, DeviceBytes workspace) {
    blas_ = &blas;
    blas_workspace_ = workspace;
  }
  Blas* blas() const { return blas_; }
  DeviceBytes blas_workspace() const { return blas_workspace_; }

  /// Attention by a library, and memory for it alone. Without, and where it has no plan, Cairn's own kernels do it.
  void use_attention(AttentionPlans* plans, DeviceBytes workspace) {
    attention_ = plans;
    attention_workspace_ = workspace;
  }
  AttentionPlans* attention() const { return attention_; }
  DeviceBytes attention_workspace() const { return attention_workspace_; }

  /// Choices of attention's kernels, shape by shape, in place of use_attention() and use_warpgroups().
  void use_attention_ways(AttentionWays* ways) { attention_ways_ = ways; }
  AttentionWays* attention_ways() const { return attention_ways_; }

  /// Whether attention may be by warpgroups, where the device has them (kernels/cuda/attention.h). It may at first.
  void use_warpgroups(bool may) { warpgroups_ = may; }
  bool warpgroups() const { return warpgroups_; }

  /// What is ordered from here on is not done but kept, with what streams order that follow events of this one. All of
  /// them must have come back to it at the end. Nothing may wait, allocate or be a first use of a kernel in between.
  void begin_capture();
  Result<Graph> end_capture();
  void launch(const Graph& graph);

 private:
  CudaStream(std::shared_ptr<Context> context, const StreamOptions& options)
      : context_(std::move(context)), options_(options) {}
  Status wait() override;
  Status wait_at(const Event& place) override;
  /// Behind a wait, with how it ended.
  Status waited(Status done);
  Status wait_until_deadline(EventHandle event);
  DevicePtr<const void> give_bytes(std::span<const std::byte> host, DevicePtr<void> room) override;

  const std::shared_ptr<Context> context_;
  const StreamOptions options_;
  StreamHandle handle_ = nullptr;
  Status failed_;
  static constexpr int64_t kGivenAlign = 256;  // of numbers on the device
  DeviceBytes scratch_;
  DeviceBytes given_;
  std::shared_ptr<std::byte> given_host_;  // of the same size
  int64_t given_at_ = 0;                   // where the next ones go
  int64_t given_bytes_ = 0;                // taken since the last settle(), gaps included
  Blas* blas_ = nullptr;
  DeviceBytes blas_workspace_;
  AttentionPlans* attention_ = nullptr;
  DeviceBytes attention_workspace_;
  AttentionWays* attention_ways_ = nullptr;
  bool warpgroups_ = true;
  std::vector<std::function<Status()>> others_;  // settle_with()
};

/// Whether the device has come to an event. Threads: any. Errors: of the runtime, and what its stream had failed for.
Result<bool> is_reached(const Event& event);

/// The stream of a CUDA device that `stream` is.
CudaStream& cuda_stream(Stream& stream);

}  // namespace cairn::cuda
