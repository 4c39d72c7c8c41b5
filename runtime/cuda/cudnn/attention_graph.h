#pragma once
// A pass of attention as a graph of cuDNN's, made by cudnn-frontend, which one file alone includes: that takes most of
// a minute to compile. The backward pass is deterministic always.

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/core/result.h"
#include "runtime/cuda/cudnn_api.h"
#include "runtime/cuda/cudnn_attention.h"

namespace cairn::cuda {

/// The library is the process's from here on. CudnnHandle::make() does it too.
void use_cudnn(const LoadedCudnn& library);

/// cuDNN's handle for the calling thread's current device.
class CudnnHandle {
 public:
  /// Errors: kUnavailable.
  static Result<std::shared_ptr<CudnnHandle>> make(const LoadedCudnn& library);
  ~CudnnHandle();
  CudnnHandle(const CudnnHandle&) = delete;
  CudnnHandle& operator=(const CudnnHandle&) = delete;

  void* get() const { return handle_; }
  /// What is run from here on is ordered on this stream.
  Status follow(StreamHandle stream);

 private:
  CudnnHandle() = default;
  void* handle_ = nullptr;
  StreamHandle stream_ = nullptr;
  bool follows_ = false;
};

/// What plans are built for.
struct CudnnTarget {
  int sm_version = 0;       // 90: compute capability 9.0
  int multiprocessors = 0;  // of the device
  void* handle = nullptr;   // CudnnHandle::get() of that device; null: it is not there, and `properties` describes it
  std::string properties;   // in JSON, as cuDNN writes them; plans for it cannot be run
};

/// A graph whose plan is built.
class AttentionGraph {
 public:
  /// Errors: kUnsupported where cuDNN refuses it, in its words.
  static Result<std::unique_ptr<AttentionGraph>> build(const CudnnTarget& target, const AttentionShape& of,
                                                       AttentionPass pass);
  ~AttentionGraph();
  AttentionGraph(const AttentionGraph&) = delete;
  AttentionGraph& operator=(const AttentionGraph&) = delete;

  int64_t workspace_bytes() const;
  /// Of the kernel that was chosen.
  const std::string& name() const;
  /// On the stream that the handle follows.
  Status run(CudnnHandle& handle, const AttentionArrays& of, void* workspace) const;

 private:
  struct Graph;
  AttentionGraph();
  std::unique_ptr<Graph> graph_;
};

}  // namespace cairn::cuda
