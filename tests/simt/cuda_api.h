#pragma once
// The double of the CUDA runtime as the table of functions that the program has (runtime/cuda/api.h), with faults of
// programs to plant: an edge between streams that is not made, work in another stream. One at a time.

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda/api.h"
#include "tests/simt/stream_double.h"

namespace cairn::simt {

class CudaApi {
 public:
  explicit CudaApi(StreamDouble& cuda, int devices = 1, int version = 13000);
  ~CudaApi();
  CudaApi(const CudaApi&) = delete;
  CudaApi& operator=(const CudaApi&) = delete;

  const cuda::Api& api() const { return api_; }
  StreamDouble& cuda() { return cuda_; }
  int devices() const { return devices_; }
  int version() const { return version_; }

  /// The wait of a stream for an event after so many more is not made, though the call succeeds; below 0: none.
  void drop_edge(int64_t after) { drop_edge_ = after; }
  /// Kernels, copies and fills: the one after so many more goes into another stream, so many further on.
  void swap_stream(int64_t after, int64_t by) {
    swap_ = after;
    swap_by_ = by;
  }
  /// Since the double was made: edges, pieces of work.
  /// Called when a copy between two devices is done: it may take its time.
  void between_devices(std::function<void(int from, int to)> meanwhile) { meanwhile_ = std::move(meanwhile); }
  /// The calling thread's current device.
  static int device();
  /// The driver has no wait for words of the host's.
  void without_words() { waits_for_words_ = false; }
  bool waits_for_words() const { return waits_for_words_; }
  /// The driver has that wait, and gives this CUresult for each; 0: none.
  void refuse_words(int error) { words_refused_ = error; }
  int words_refused() const { return words_refused_; }
  /// The devices' name.
  void use_card(std::string name) { card_ = std::move(name); }
  const std::string& card() const { return card_; }
  int64_t edges() const { return edges_; }
  int64_t works() const { return works_; }

  // For the functions of the table.
  const std::function<void(int, int)>& meanwhile() const { return meanwhile_; }
  bool makes_edge();
  cuda::StreamHandle stream_for(cuda::StreamHandle wanted);
  void add_stream(cuda::StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
  }
  void remove_stream(cuda::StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    std::erase(streams_, stream);
  }

 private:
  StreamDouble& cuda_;
  cuda::Api api_;
  int devices_, version_;
  std::vector<cuda::StreamHandle> streams_;
  bool waits_for_words_ = true;
  int words_refused_ = 0;
  std::string card_ = "Double";
  std::function<void(int, int)> meanwhile_;
  std::mutex mutex_;  // of what follows: ranks may be threads
  std::atomic<int64_t> edges_ = 0, works_ = 0;
  int64_t drop_edge_ = -1, swap_ = -1, swap_by_ = 0;
};

}  // namespace cairn::simt
