#pragma once
// All communicators of a rank, and the one place where NCCL is called: one call at a time, each within a deadline. A
// communicator is not blocking: a call that is in progress is asked about until it is not. Once one has failed all are
// aborted, and calls from then on give that error.
//
// Memory may be registered with each communicator, from when it is made until it is closed. A split shares none of its
// parent's. To give a registration back asks the other ranks of the host, so it comes before the communicator is
// finalized, and not at all before an abort, which takes registrations along.
//
// An abort may hang itself, as NCCL's may (its issues 549, 829, 1013): the thread that aborts is the watcher's, and who
// started the rank ends it.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/cuda/nccl_api.h"
#include "runtime/device/pointer.h"

namespace cairn::cuda {

/// Threads: any.
class Communicators {
 public:
  /// `api` outlives it.
  Communicators(const NcclApi& api, int64_t deadline_ms) : api_(api), deadline_(deadline_ms) {}
  /// Aborts what is there.
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  Result<NcclId> new_id();
  /// Each communicator that is made from now on has this memory registered.
  void register_all(DeviceBytes memory);
  struct Wish {
    std::string name;  // for messages
    int max_ctas = 0;  // blocks of the device that an operation may take; 0: what NCCL wants
  };
  /// Waits until all its ranks have come.
  Result<NcclHandle> make(const NcclId& id, int64_t size, int64_t rank, const Wish& wish);
  /// All ranks of `parent` split it in the same order: those of a color become one, ordered by key. A rank without a
  /// color (kNcclNoColor) gets null.
  Result<NcclHandle> split(NcclHandle parent, int64_t color, int64_t key, const Wish& wish);
  /// Whether one has as many ranks as it should, and this as which of them.
  Status expect(NcclHandle comm, int64_t size, int64_t rank, const Wish& wish);
  /// Gives one back that is at rest.
  void close(NcclHandle comm);

  /// `body` calls NCCL for `comm` alone.
  Status call(NcclHandle comm, const char* function, const std::function<int(const NcclApi&)>& body);

  /// The same of calls in a group for these communicators, each of which is asked about once, behind the group's end.
  Status call(std::span<const NcclHandle> comms, const char* function, const std::function<int(const NcclApi&)>& body);

  /// An error that NCCL has found beside any call.
  Status poll();
  /// The first call is the one that counts.
  void abort(const Error& why);
  std::optional<Error> aborted() const;

 private:
  Status checked(int result, NcclHandle comm, const char* function) const;
  Status register_with(NcclHandle comm);
  Status deregister(NcclHandle comm);
  /// Until `comm` takes the next call. `lock` is let go between two looks.
  Status until_ready(NcclHandle comm, const char* function, std::unique_lock<std::mutex>& lock);

  const NcclApi& api_;
  const std::chrono::milliseconds deadline_;
  mutable std::mutex mutex_;
  std::vector<NcclHandle> open_;
  DeviceBytes memory_;                               // that is registered
  std::map<NcclHandle, void*> handles_;              // by which it is, of those that are open
  std::vector<std::unique_ptr<NcclHandle>> splits_;  // where NCCL puts what was split off, however late
  std::optional<Error> aborted_;
};

}  // namespace cairn::cuda
