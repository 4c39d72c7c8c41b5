#include "runtime/cuda/stream.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "runtime/core/check.h"
#include "runtime/core/log.h"
#include "runtime/cuda/timer.h"

namespace cairn::cuda {
namespace {

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(std::shared_ptr<Context> context) : context_(std::move(context)) {}
  ~CudaEvent() override {
    if (handle != nullptr) context_->give_back(handle);
  }
  EventHandle handle = nullptr;  // null: it could not be recorded, for what `failed` says
  Status failed;
  int64_t given_bytes = 0;  // of the host's that work before it may read, since the stream was settled
  const Context& context() const { return *context_; }

 private:
  const std::shared_ptr<Context> context_;
};

}  // namespace

Graph::~Graph() {
  if (handle_ == nullptr) return;
  if (context_->api().destroy_graph_exec(handle_) != 0) context_->api().last_error();
}

std::unique_ptr<CudaStream> CudaStream::make(std::shared_ptr<Context> context, const StreamOptions& options) {
  std::unique_ptr<CudaStream> out(new CudaStream(std::move(context), options));
  const Api& api = out->context_->api();
  out->keep(out->context_->select(), "cudaSetDevice");
  // Priorities out of a device's range are brought into it.
  if (out->ok()) {
    out->keep(api.create_stream(&out->handle_, kNonBlocking, options.urgent ? -1 : 0), "cudaStreamCreateWithPriority");
  }
  return out;
}

CudaStream::~CudaStream() {
  if (handle_ == nullptr) return;
  const Api& api = context_->api();
  bool refused = context_->select() != 0;
  refused |= api.synchronize_stream(handle_) != 0;
  refused |= api.destroy_stream(handle_) != 0;
  if (refused) api.last_error();
}

std::unique_ptr<Stream> CudaStream::beside() const {
  return make(context_, {.urgent = true, .deadline_ms = options_.deadline_ms});
}

bool CudaStream::ready() {
  if (failed_.ok()) keep(context_->select(), "cudaSetDevice");
  return failed_.ok();
}

void CudaStream::keep(int error, const char* what) {
  if (error == 0) return;
  Status status = context_->checked(error, what);
  if (failed_.ok()) failed_ = std::move(status).with(device_name(device()));
}

void CudaStream::keep(Error error) {
  if (failed_.ok()) failed_ = std::move(error).with(device_name(device()));
}

std::shared_ptr<const Event> CudaStream::mark() {
  auto out = std::make_shared<CudaEvent>(context_);
  EventHandle made = nullptr;
  if (ready()) keep(context_->take_event(&made), "cudaEventCreate");
  if (made != nullptr) {
    keep(context_->api().record(made, handle_), "cudaEventRecord");
    if (ok()) {
      out->handle = made;
    } else {
      context_->give_back(made);
    }
  }
  out->failed = failed_;
  out->given_bytes = given_bytes_;
  return out;
}

void CudaStream::follow(const std::shared_ptr<const Event>& event) {
  if (event == nullptr) return;
  const auto* const of = dynamic_cast<const CudaEvent*>(event.get());
  RT_CHECK(of != nullptr, "an event of another kind of device");
  if (!of->failed.ok()) keep(Error(of->failed.error()).with("work that this follows has failed"));
  if (ready()) keep(context_->api().wait_event(handle_, of->handle, 0), "cudaStreamWaitEvent");
}

std::unique_ptr<StreamTimer> CudaStream::make_timer() { return std::make_unique<CudaTimer>(*this, context_); }

Result<bool> is_reached(const Event& event) {
  const auto* const of = dynamic_cast<const CudaEvent*>(&event);
  RT_CHECK(of != nullptr, "an event of another kind of device");
  if (!of->failed.ok()) return Error(of->failed.error());
  const Context& context = of->context();
  RT_TRY(context.checked(context.select(), "cudaSetDevice"));
  const int state = context.api().query(of->handle);
  if (state == kNotReady) return false;
  RT_TRY(context.checked(state, "work on the device"));
  return true;
}

namespace {

/// Of a word in pinned memory.
int address_on_device(const Api& api, const std::atomic<uint32_t>& word, void** address) {
  static_assert(sizeof(word) == 4 && std::atomic<uint32_t>::is_always_lock_free);
  return api.device_address(address, const_cast<std::atomic<uint32_t>*>(&word), 0);
}

}  // namespace

Status CudaStream::can_follow(const std::atomic<uint32_t>& word) {
  void* address = nullptr;
  RT_TRY(context_->checked(context_->select(), "cudaSetDevice"));
  RT_TRY(context_->checked(address_on_device(context_->api(), word, &address), "cudaHostGetDevicePointer"));
  follow(word, word.load(std::memory_order_relaxed));
  const Status tried = settle();
  if (tried.ok()) return {};
  return Error{ErrorCode::kUnsupported, tried.error().message};
}

void CudaStream::follow(const std::atomic<uint32_t>& word, uint32_t value) {
  if (!ready()) return;
  void* address = nullptr;
  keep(address_on_device(context_->api(), word, &address), "cudaHostGetDevicePointer");
  const WaitForWord wait = context_->wait_for_word();
  if (wait == nullptr) keep({ErrorCode::kUnsupported, fmt::format("the driver has no {}", kWaitForWord)});
  if (!ok()) return;
  const int refused = wait(handle_, reinterpret_cast<unsigned long long>(address), value, kAtLeast);
  if (refused == 0) return;
  keep({ErrorCode::kInternal, fmt::format("the driver refuses {}: {}", kWaitForWord, context_->driver_error(refused))});
}

std::shared_ptr<std::byte> CudaStream::host_memory(int64_t bytes) const {
  constexpr size_t kPage = 4096;
  const size_t size = (std::max<size_t>(static_cast<size_t>(bytes), 1) + kPage - 1) / kPage * kPage;
  void* const pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  RT_CHECK(pages != MAP_FAILED, "no {} bytes for numbers of a device", size);
  int refused = context_->select();
  if (refused == 0) refused = context_->api().pin(pages, size, kPortable);
  if (const Status status = context_->checked(refused, "cudaHostRegister"); !status.ok()) {
    spdlog::warn("{} KiB for numbers of {} cannot be pinned, copies to them wait: {}", size >> 10,
                 device_name(device()), status.error().message);
  }
  return {static_cast<std::byte*>(pages), [context = context_, size, pinned = refused == 0](std::byte* memory) {
            if (pinned && context->api().unpin(memory) != 0) context->api().last_error();
            munmap(memory, size);
          }};
}

void CudaStream::copy(void* to, const void* from, int64_t bytes, int kind) {
  if (bytes == 0 || !ready()) return;
  keep(context_->api().copy(to, from, static_cast<size_t>(bytes), kind, handle_), "cudaMemcpyAsync");
}

void CudaStream::set(void* memory, int value, int64_t bytes) {
  if (bytes == 0 || !ready()) return;
  keep(context_->api().set(memory, value, static_cast<size_t>(bytes), handle_), "cudaMemsetAsync");
}

void* CudaStream::scratch(int64_t bytes, const char* who) {
  if (bytes <= scratch_.size) return scratch_.first.address();
  keep({ErrorCode::kInternal,
        fmt::format("{} needs {} bytes for itself, the stream has {}", who, bytes, scratch_.size)});
  return nullptr;
}

Status CudaStream::wait() {
  // Of a failed stream too: what it has ordered may still write to the host's memory.
  if (handle_ == nullptr) return failed_;
  given_bytes_ = 0;
  keep(context_->select(), "cudaSetDevice");
  if (options_.deadline_ms == 0) {
    keep(context_->api().synchronize_stream(handle_), "waiting for the device");
    return waited({});
  }
  EventHandle event = nullptr;
  Status done = context_->checked(context_->take_event(&event), "cudaEventCreate");
  if (done.ok()) done = context_->checked(context_->api().record(event, handle_), "cudaEventRecord");
  if (done.ok()) done = wait_until_deadline(event);
  if (event != nullptr) context_->give_back(event);
  return waited(std::move(done));
}

Status CudaStream::wait_at(const Event& place) {
  const auto* const of = dynamic_cast<const CudaEvent*>(&place);
  RT_CHECK(of != nullptr, "an event of another kind of device");
  if (handle_ == nullptr || of->handle == nullptr || !failed_.ok()) return wait();
  given_bytes_ -= of->given_bytes;
  keep(context_->select(), "cudaSetDevice");
  return waited(wait_until_deadline(of->handle));
}

Status CudaStream::waited(Status done) {
  for (const std::function<Status()>& other : others_) {  // first: it says what the device has waited for in vain
    if (Status found = other(); !found.ok()) keep(std::move(found).error());
  }
  if (!done.ok()) keep(std::move(done).error());
  return failed_;
}

Status CudaStream::wait_until_deadline(EventHandle event) {
  const Api& api = context_->api();
  if (options_.deadline_ms == 0) return context_->checked(api.synchronize_event(event), "waiting for the device");
  const auto begun = std::chrono::steady_clock::now();
  const auto end = begun + std::chrono::milliseconds(options_.deadline_ms);
  constexpr auto kSpin = std::chrono::microseconds(200), kNap = std::chrono::microseconds(50);
  while (true) {
    const int state = api.query(event);
    if (state != kNotReady) return context_->checked(state, "waiting for the device");
    const auto now = std::chrono::steady_clock::now();
    if (now >= end) {
      return Error{ErrorCode::kTimeout, fmt::format("its work is not done after {} ms", options_.deadline_ms)};
    }
    if (now - begun > kSpin) std::this_thread::sleep_for(kNap);
  }
}

DevicePtr<const void> CudaStream::give_bytes(std::span<const std::byte> host, DevicePtr<void> room) {
  if (host.empty()) return room;
  const int64_t bytes = std::ssize(host);
  if (room) {
    copy(room.address(), host.data(), bytes, kToDevice);
    return room;
  }
  const int64_t rounded = (bytes + kGivenAlign - 1) / kGivenAlign * kGivenAlign;
  const bool comes_round = given_at_ + rounded > given_.size;
  const int64_t gap = comes_round ? given_.size - given_at_ : 0;
  if (gap + rounded > given_.size - given_bytes_) {  // else what is overwritten came before the last settle()
    keep({ErrorCode::kInternal, fmt::format("{} bytes of the host for the device without room: {} of {} are taken",
                                            bytes, given_bytes_, given_.size)});
    return nullptr;
  }
  if (comes_round) given_at_ = 0;
  std::byte* const staged = given_host_.get() + given_at_;
  const DevicePtr<std::byte> there = given_.first + given_at_;
  std::memcpy(staged, host.data(), host.size());
  copy(there.address(), staged, bytes, kToDevice);
  given_at_ += rounded;
  given_bytes_ += gap + rounded;
  return there;
}

void CudaStream::use_given(DeviceBytes room) {
  given_ = room;
  given_host_ = host_memory(room.size);
  given_at_ = given_bytes_ = 0;
}

void CudaStream::begin_capture() {
  if (ready()) keep(context_->api().begin_capture(handle_, kThreadLocalCapture), "cudaStreamBeginCapture");
}

Result<Graph> CudaStream::end_capture() {
  const Api& api = context_->api();
  GraphHandle captured = nullptr;
  GraphExecHandle exec = nullptr;
  if (handle_ != nullptr) {  // a failed stream too leaves its capture
    keep(api.end_capture(handle_, &captured), "cudaStreamEndCapture");
    if (failed_.ok()) keep(api.instantiate(&exec, captured, 0), "cudaGraphInstantiate");
    if (captured != nullptr) keep(api.destroy_graph(captured), "cudaGraphDestroy");
  }
  Graph out(context_, exec);
  if (!failed_.ok()) return Error(failed_.error());
  return out;
}

void CudaStream::launch(const Graph& graph) {
  if (ready()) keep(context_->api().launch_graph(graph.handle(), handle_), "cudaGraphLaunch");
}

CudaStream& cuda_stream(Stream& stream) {
  // No dynamic_cast: the kernels' module has type information of its own.
  RT_CHECK(stream.device().kind == DeviceKind::kCuda, "a stream of {}", device_name(stream.device()));
  return static_cast<CudaStream&>(stream);
}

}  // namespace cairn::cuda
