#include "runtime/cuda/cudnn/attention_graph.h"

// Functions are looked up in the libraries that are open, and none of NVIDIA's is linked.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cudnn_frontend.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/kernels/attention.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace cairn::cuda {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

/// Of a graph's tensors.
enum Id : int64_t { kQ = 1, kK, kV, kOut, kLogsumexp, kDout, kDq, kDk, kDv, kScale };

Status told(fe::error_t error, const char* what) {
  if (error.is_good()) return {};
  return Error{ErrorCode::kUnsupported, fmt::format("cuDNN, {}: {}", what, error.get_message())};
}
Status told(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return {};
  return Error{ErrorCode::kUnavailable, fmt::format("cuDNN, {}: {}", what, fe::detail::get_error_string(status))};
}

/// body(), whose exceptions become errors: the frontend throws where a library or a function of it is missing.
template <typename Body>
auto caught(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception& thrown) {
    return Error{ErrorCode::kUnsupported, fmt::format("cuDNN: {}", thrown.what())};
  }
}

/// Whether the frontend's slopes of ALiBi are Cairn's, to a last bit or so.
bool same_slopes(int64_t heads) {
  const std::vector<float> theirs = fe::detail::get_alibi_slope(heads);
  std::vector<float> ours(static_cast<size_t>(heads));
  kernels::alibi_slopes(heads, 0, heads, ours.data());
  return std::ranges::equal(theirs, ours, [](float a, float b) { return std::abs(a - b) <= 1e-6f * b; });
}

/// As [B, H, S, D], of rows that lie `stride` elements apart.
void describe(fe::graph::Tensor_attributes& tensor, const AttentionShape& of, int64_t heads, int64_t stride, Id id) {
  tensor.set_dim({of.samples, heads, of.tokens, of.head_dim});
  tensor.set_stride({of.tokens * stride, of.head_dim, stride, 1});
  tensor.set_uid(id);
}
/// As [B, H, S, 1].
void describe_sums(fe::graph::Tensor_attributes& tensor, const AttentionShape& of) {
  tensor.set_dim({of.samples, of.heads, of.tokens, 1});
  tensor.set_stride({of.heads * of.tokens, of.tokens, 1, 1});
  tensor.set_data_type(fe::DataType_t::FLOAT);
  tensor.set_uid(kLogsumexp);
}

/// The inputs of both passes.
struct Inputs {
  Tensor q, k, v, scale;
};

Tensor rows(fe::graph::Graph& graph, const AttentionShape& of, int64_t heads, int64_t stride, Id id) {
  fe::graph::Tensor_attributes tensor;
  describe(tensor, of, heads, stride, id);
  return graph.tensor(tensor);
}

Inputs inputs_of(fe::graph::Graph& graph, const AttentionShape& of) {
  fe::graph::Tensor_attributes scale;
  scale.set_dim({1, 1, 1, 1}).set_stride({1, 1, 1, 1}).set_data_type(fe::DataType_t::FLOAT);
  scale.set_is_pass_by_value(true).set_uid(kScale);
  return {.q = rows(graph, of, of.heads, of.q_stride, kQ),
          .k = rows(graph, of, of.kv_heads, of.kv_stride, kK),
          .v = rows(graph, of, of.kv_heads, of.kv_stride, kV),
          .scale = graph.tensor(scale)};
}

template <typename Options>
void take_masks(Options& options, const AttentionShape& of) {
  if (of.causal) options.set_causal_mask(true);
  if (of.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(of.window));
  if (of.alibi) options.set_alibi_mask(true);
}

void add_forward(fe::graph::Graph& graph, const AttentionShape& of) {
  const Inputs in = inputs_of(graph, of);
  fe::graph::SDPA_attributes options;
  options.set_name("attention").set_generate_stats(true).set_attn_scale(in.scale);
  take_masks(options, of);
  const auto [out, sums] = graph.sdpa(in.q, in.k, in.v, options);
  out->set_output(true);
  describe(*out, of, of.heads, of.out_stride, kOut);
  sums->set_output(true);
  describe_sums(*sums, of);
}

void add_backward(fe::graph::Graph& graph, const AttentionShape& of) {
  const Inputs in = inputs_of(graph, of);
  const Tensor out = rows(graph, of, of.heads, of.out_stride, kOut),
               dout = rows(graph, of, of.heads, of.out_stride, kDout);
  fe::graph::Tensor_attributes sums;
  describe_sums(sums, of);
  fe::graph::SDPA_backward_attributes options;
  options.set_name("attention_backward").set_deterministic_algorithm(true).set_attn_scale(in.scale);
  take_masks(options, of);
  const auto [dq, dk, dv] = graph.sdpa_backward(in.q, in.k, in.v, out, dout, graph.tensor(sums), options);
  for (const Tensor& gradient : {dq, dk, dv}) gradient->set_output(true);
  describe(*dq, of, of.heads, of.q_stride, kDq);
  describe(*dk, of, of.kv_heads, of.kv_stride, kDk);
  describe(*dv, of, of.kv_heads, of.kv_stride, kDv);
}

}  // namespace

void use_cudnn(const LoadedCudnn& library) { fe::cudnn_dlhandle = library.library.handle(); }

Result<std::shared_ptr<CudnnHandle>> CudnnHandle::make(const LoadedCudnn& library) {
  use_cudnn(library);
  std::shared_ptr<CudnnHandle> out(new CudnnHandle);
  const Status made = caught([&]() -> Status {
    cudnnHandle_t handle = nullptr;
    RT_TRY(told(fe::detail::create_handle(&handle), "cudnnCreate"));
    out->handle_ = handle;
    return {};
  });
  if (!made.ok()) return made.error();
  return out;
}

CudnnHandle::~CudnnHandle() {
  if (handle_ != nullptr) fe::detail::destroy_handle(static_cast<cudnnHandle_t>(handle_));
}

Status CudnnHandle::follow(StreamHandle stream) {
  if (follows_ && stream_ == stream) return {};
  RT_TRY(told(fe::detail::set_stream(static_cast<cudnnHandle_t>(handle_), stream), "cudnnSetStream"));
  stream_ = stream;
  follows_ = true;
  return {};
}

struct AttentionGraph::Graph {
  fe::graph::Graph graph;
  int64_t workspace_bytes = 0;
  std::string name;

  Status build(const CudnnTarget& target, const AttentionShape& of, AttentionPass pass);
};

Status AttentionGraph::Graph::build(const CudnnTarget& target, const AttentionShape& of, AttentionPass pass) {
  graph.set_sm_version(target.sm_version);
  graph.set_sm_count(target.multiprocessors);
  if (target.handle == nullptr) {
    auto device = std::make_shared<fe::DeviceProperties>();
    RT_TRY(told(device->deserialize({target.properties.begin(), target.properties.end()}), "a device's properties"));
    graph.set_device_properties(device);
  }
  graph.set_io_data_type(of.dtype == DType::kBf16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  if (of.alibi && !same_slopes(of.heads)) {
    return Error{ErrorCode::kUnsupported, fmt::format("its slopes for {} heads are other ones", of.heads)};
  }
  pass == AttentionPass::kForward ? add_forward(graph, of) : add_backward(graph, of);
  RT_TRY(told(graph.validate(), "checking a graph"));
  RT_TRY(told(graph.build_operation_graph(static_cast<cudnnHandle_t>(target.handle)), "building a graph"));
  RT_TRY(told(graph.create_execution_plans({fe::HeurMode_t::A}), "looking for a plan"));
  RT_TRY(told(graph.check_support(), "looking for a plan that runs here"));
  RT_TRY(told(graph.build_plans(), "building a plan"));
  RT_TRY(told(graph.get_workspace_size(workspace_bytes), "asking a plan for its workspace"));
  return told(graph.get_plan_name(name), "asking a plan for its name");
}

AttentionGraph::AttentionGraph() : graph_(std::make_unique<Graph>()) {}
AttentionGraph::~AttentionGraph() = default;

Result<std::unique_ptr<AttentionGraph>> AttentionGraph::build(const CudnnTarget& target, const AttentionShape& of,
                                                              AttentionPass pass) {
  std::unique_ptr<AttentionGraph> out(new AttentionGraph);
  const Status built = caught([&] { return out->graph_->build(target, of, pass); });
  if (!built.ok()) return built.error();
  return out;
}

int64_t AttentionGraph::workspace_bytes() const { return graph_->workspace_bytes; }
const std::string& AttentionGraph::name() const { return graph_->name; }

Status AttentionGraph::run(CudnnHandle& handle, const AttentionArrays& of, void* workspace) const {
  float scale = of.scale;
  const auto at = [](const void* array) { return const_cast<void*>(array); };
  std::unordered_map<int64_t, void*> arrays = {
      {kQ, at(of.q)}, {kK, at(of.k)}, {kV, at(of.v)}, {kOut, of.out}, {kLogsumexp, of.logsumexp}, {kScale, &scale}};
  if (of.dout != nullptr) {
    arrays.insert({{kDout, at(of.dout)}, {kDq, of.dq}, {kDk, of.dk}, {kDv, of.dv}});
  }
  return caught([&] {
    return told(graph_->graph.execute(static_cast<cudnnHandle_t>(handle.get()), arrays, workspace), "running a plan");
  });
}

}  // namespace cairn::cuda
