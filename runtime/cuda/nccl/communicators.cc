#include "runtime/cuda/nccl/communicators.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "runtime/core/log.h"

namespace cairn::cuda {

Communicators::~Communicators() { abort({ErrorCode::kStopped, "the rank leaves"}); }

namespace {

NcclConfig config_of(const Communicators::Wish& wish) {
  NcclConfig out;
  out.blocking = 0;
  if (wish.max_ctas > 0) out.max_ctas = wish.max_ctas;
  return out;
}

}  // namespace

Status Communicators::checked(int result, NcclHandle comm, const char* function) const {
  if (result == kNcclOk || result == kNcclInProgress) return {};
  const char* const more = api_.last_error(comm);
  return Error{ErrorCode::kInternal, fmt::format("{}: {}{}{}", function, api_.error_string(result),
                                                 more != nullptr && *more != '\0' ? ": " : "", more ? more : "")};
}

Status Communicators::until_ready(NcclHandle comm, const char* function, std::unique_lock<std::mutex>& lock) {
  const auto begun = std::chrono::steady_clock::now();
  constexpr auto kSpin = std::chrono::microseconds(100), kNap = std::chrono::microseconds(50);
  for (;;) {
    if (aborted_) return Error(*aborted_);
    int state = kNcclOk;
    RT_TRY(checked(api_.async_error(comm, &state), comm, "ncclCommGetAsyncError"));
    RT_TRY(checked(state, comm, function));
    if (state != kNcclInProgress) return {};
    const auto waited = std::chrono::steady_clock::now() - begun;
    if (waited > deadline_) {
      return Error{ErrorCode::kTimeout,
                   fmt::format("{}: the other ranks have not come within {} ms", function, deadline_.count())};
    }
    lock.unlock();
    if (waited > kSpin) std::this_thread::sleep_for(kNap);
    lock.lock();
  }
}

void Communicators::register_all(DeviceBytes memory) {
  const std::lock_guard lock(mutex_);
  memory_ = memory;
}

Status Communicators::register_with(NcclHandle comm) {
  if (memory_.size == 0) return {};
  void* handle = nullptr;
  RT_TRY(checked(api_.register_memory(comm, memory_.first.address(), static_cast<size_t>(memory_.size), &handle), comm,
                 "ncclCommRegister"));
  if (handle == nullptr) {
    return Error{ErrorCode::kUnsupported,
                 "ncclCommRegister: NCCL registers nothing: NCCL_LOCAL_REGISTER=0 or NCCL_P2P_USE_CUDA_MEMCPY=1 in the "
                 "environment or in nccl.conf; leave it out, or do without: --comm nccl"};
  }
  handles_.emplace(comm, handle);
  return {};
}

Status Communicators::deregister(NcclHandle comm) {
  const auto found = handles_.find(comm);
  if (found == handles_.end()) return {};
  void* const handle = found->second;
  handles_.erase(found);
  return checked(api_.deregister(comm, handle), comm, "ncclCommDeregister");
}

Result<NcclId> Communicators::new_id() {
  const std::lock_guard lock(mutex_);
  if (aborted_) return Error(*aborted_);
  NcclId out{};
  RT_TRY(checked(api_.make_id(&out), nullptr, "ncclGetUniqueId"));
  return out;
}

Result<NcclHandle> Communicators::make(const NcclId& id, int64_t size, int64_t rank, const Wish& wish) {
  std::unique_lock lock(mutex_);
  if (aborted_) return Error(*aborted_);
  NcclConfig wanted = config_of(wish);
  NcclHandle out = nullptr;
  const int result = api_.make(&out, static_cast<int>(size), id, static_cast<int>(rank), &wanted);
  if (out != nullptr) open_.push_back(out);
  RT_TRY(checked(result, out, "ncclCommInitRankConfig").with(wish.name));
  RT_TRY(until_ready(out, "ncclCommInitRankConfig", lock).with(wish.name));
  RT_TRY(register_with(out).with(wish.name));
  return out;
}

Result<NcclHandle> Communicators::split(NcclHandle parent, int64_t color, int64_t key, const Wish& wish) {
  std::unique_lock lock(mutex_);
  if (aborted_) return Error(*aborted_);
  NcclConfig wanted = config_of(wish);
  NcclHandle& out = *splits_.emplace_back(std::make_unique<NcclHandle>(nullptr));
  const int result = api_.split(parent, static_cast<int>(color), static_cast<int>(key), &out, &wanted);
  RT_TRY(checked(result, parent, "ncclCommSplit").with(wish.name));
  RT_TRY(until_ready(parent, "ncclCommSplit", lock).with(wish.name));  // only then is `out` there
  if (out == nullptr) return out;
  open_.push_back(out);
  RT_TRY(until_ready(out, "ncclCommSplit", lock).with(wish.name));
  RT_TRY(register_with(out).with(wish.name));
  return out;
}

Status Communicators::expect(NcclHandle comm, int64_t size, int64_t rank, const Wish& wish) {
  const std::lock_guard lock(mutex_);
  if (aborted_) return Error(*aborted_);
  int found = 0, own = 0;
  RT_TRY(checked(api_.count(comm, &found), comm, "ncclCommCount").with(wish.name));
  RT_TRY(checked(api_.own_rank(comm, &own), comm, "ncclCommUserRank").with(wish.name));
  if (found == size && own == rank) return {};
  return Error{
      ErrorCode::kInternal,
      fmt::format("{}: NCCL has split off a communicator of {} ranks, in which this is rank {}; {} and rank {} "
                  "are expected: ranks make their groups in different orders",
                  wish.name, found, own, size, rank)};
}

void Communicators::close(NcclHandle comm) {
  std::unique_lock lock(mutex_);
  const auto found = std::find(open_.begin(), open_.end(), comm);
  if (found == open_.end()) return;  // aborted
  Status done = deregister(comm);
  if (done.ok()) done = checked(api_.finalize(comm), comm, "ncclCommFinalize");
  if (done.ok()) done = until_ready(comm, "ncclCommFinalize", lock);
  if (std::erase(open_, comm) == 0) return;  // aborted meanwhile
  if (done.ok()) done = checked(api_.destroy(comm), comm, "ncclCommDestroy");
  if (done.ok()) return;
  spdlog::warn("a communicator of NCCL is aborted, for it does not come to rest: {}", done.error().message);
  api_.abort(comm);
}

Status Communicators::call(NcclHandle comm, const char* function, const std::function<int(const NcclApi&)>& body) {
  return call(std::span(&comm, 1), function, body);
}

Status Communicators::call(std::span<const NcclHandle> comms, const char* function,
                           const std::function<int(const NcclApi&)>& body) {
  std::unique_lock lock(mutex_);
  if (aborted_) return Error(*aborted_);
  RT_TRY(checked(body(api_), comms.front(), function));
  for (const NcclHandle comm : comms) RT_TRY(until_ready(comm, function, lock));
  return {};
}

Status Communicators::poll() {
  const std::lock_guard lock(mutex_);
  for (const NcclHandle comm : open_) {
    int state = kNcclOk;
    RT_TRY(checked(api_.async_error(comm, &state), comm, "ncclCommGetAsyncError"));
    RT_TRY(checked(state, comm, "NCCL"));
  }
  return {};
}

void Communicators::abort(const Error& why) {
  const std::lock_guard lock(mutex_);
  if (!aborted_) aborted_ = why;
  handles_.clear();
  while (!open_.empty()) {
    const NcclHandle comm = open_.back();
    open_.pop_back();
    if (const int result = api_.abort(comm); result != kNcclOk) {
      spdlog::warn("ncclCommAbort: {}", api_.error_string(result));
    }
  }
}

std::optional<Error> Communicators::aborted() const {
  const std::lock_guard lock(mutex_);
  return aborted_;
}

}  // namespace cairn::cuda
