#include "runtime/cuda/cudnn/cudnn.h"

#include <fmt/format.h>

#include <utility>

#include "runtime/cuda/cudnn/attention_graph.h"

namespace cairn::cuda {
namespace {

/// cuDeviceGetAttribute of the driver; gives a CUresult. Numbers of CUdevice_attribute.
using DeviceAttribute = int (*)(int* value, int attribute, int device);
constexpr const char* kDeviceAttribute = "cuDeviceGetAttribute";
constexpr unsigned kDeviceAttributeVersion = 12000;  // of CUDA
constexpr int kMultiprocessors = 16, kCapabilityMajor = 75, kCapabilityMinor = 76;

Result<CudnnTarget> target_of(const Api& api, int index) {
  void* function = nullptr;
  int found = 0;
  RT_TRY(cuda::checked(api, api.driver_function(kDeviceAttribute, &function, kDeviceAttributeVersion, 0, &found),
                       kDeviceAttribute, ErrorCode::kUnavailable));
  if (function == nullptr) {
    return Error{ErrorCode::kUnsupported, fmt::format("the driver has no {}", kDeviceAttribute)};
  }
  const auto attribute = reinterpret_cast<DeviceAttribute>(function);
  int major = 0, minor = 0;
  CudnnTarget out;
  for (const auto& [number, value] :
       {std::pair(kCapabilityMajor, &major), {kCapabilityMinor, &minor}, {kMultiprocessors, &out.multiprocessors}}) {
    if (const int error = attribute(value, number, index); error != 0) {
      return Error{ErrorCode::kUnavailable,
                   fmt::format("{}: error {} for attribute {} of device {}", kDeviceAttribute, error, number, index)};
    }
  }
  out.sm_version = 10 * major + minor;
  return out;
}

class Plan final : public AttentionPlan {
 public:
  Plan(std::shared_ptr<CudnnHandle> handle, std::unique_ptr<AttentionGraph> graph)
      : handle_(std::move(handle)), graph_(std::move(graph)) {}
  int64_t workspace_bytes() const override { return graph_->workspace_bytes(); }
  Status run(CudaStream& on, const AttentionArrays& of, void* workspace) override {
    RT_TRY(handle_->follow(on.handle()));
    return graph_->run(*handle_, of, workspace);
  }

 private:
  std::shared_ptr<CudnnHandle> handle_;
  std::unique_ptr<AttentionGraph> graph_;
};

}  // namespace

Result<AttentionLibrary> open_cudnn(const Api& api, int index) {
  RT_TRY_SET(const LoadedCudnn library, load_cudnn(library_candidates(kCudnnFile)));
  RT_TRY_SET(CudnnTarget target, target_of(api, index));
  RT_TRY_SET(std::shared_ptr<CudnnHandle> handle, CudnnHandle::make(library));
  target.handle = handle->get();
  // Slopes of ALiBi are copied by the CUDA runtime that the loader knows by then: where it has none, such plans cannot
  // be run.
  const bool has_runtime = Library::open(library_candidates("libcudart.so.13"), "CUDA runtime library").ok();
  AttentionLibrary out{.build = {}, .version = library.version};
  out.build = [target, handle, has_runtime](const AttentionShape& of,
                                            AttentionPass pass) -> Result<std::unique_ptr<AttentionPlan>> {
    if (of.alibi && !has_runtime) {
      return Error{ErrorCode::kUnsupported, "slopes need libcudart.so.13 where cuDNN is looked for"};
    }
    RT_TRY_SET(std::unique_ptr<AttentionGraph> graph, AttentionGraph::build(target, of, pass));
    return std::unique_ptr<AttentionPlan>(std::make_unique<Plan>(handle, std::move(graph)));
  };
  return out;
}

}  // namespace cairn::cuda
