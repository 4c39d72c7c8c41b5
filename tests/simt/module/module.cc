// libcairn_cuda.so, libcublasLt.so.13, libcudnn.so.9, libnccl.so.2 and libnvidia-ml.so.1 as doubles, in one library
// that goes by these names: whole programs train on it where there is no device (tests/support/double_device.py). The
// doubles are those of this folder's tests; a program that misused one ends with 99 and says how. Whoever passes
// something must not take it for a device: it shows a symbol of that name.
//
// CAIRN_DOUBLE_ABORTS_HANG: whoever aborts a communicator of NCCL never comes back, where it is set.
// CAIRN_DOUBLE_ABORTS_CRASH: and where it has memory registered, dies of SIGSEGV.
// CAIRN_DOUBLE_SEED: of the order in which work is done (tests/simt/stream_double.h); 0 where it is not set.
// CAIRN_DOUBLE_DEVICES: how many there are; 2 where it is not set.
// CAIRN_DOUBLE_FAULTS: what is wrong with which device, as "ecc:1,slow_pair:0-1" (tests/simt/nvml_double.h).
// CAIRN_DOUBLE_HOST: the end of its devices' UUIDs, which hosts that are processes of one machine are told apart by.
// CAIRN_DOUBLE_CARD: the devices' name; "Double" where it is not set.
// CAIRN_DOUBLE_BLAS: cuBLASLt's version; 130100 where it is not set.
// CAIRN_DOUBLE_FASTEST: of three algorithms that cuBLASLt proposes for each product; it has one where it is not set.
// CAIRN_DOUBLE_ATTENTION: microseconds that a pass of attention takes beside its pieces of work, as
// "own,cudnn:own,cudnn": forward, backward.
// CAIRN_DOUBLE_WARPGROUPS: its devices have warpgroups, where it is set.
// CAIRN_DOUBLE_CUDNN: its version, as cudnnGetVersion() has it; 9.19.0 where it is not set.
// CAIRN_DOUBLE_NCCL: a file that the ranks of a run share (tests/simt/nccl_double.h); NCCL cannot be opened without.

#include <unistd.h>
#include <build_version.inc>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "runtime/core/check.h"
#include "runtime/cuda/cudnn_api.h"
#include "runtime/cuda/machine/module.h"
#include "runtime/cuda/ops/ops.h"
#include "runtime/kernels/cuda/attention.h"
#include "runtime/kernels/cuda/state.h"
#include "tests/simt/attention_double.h"
#include "tests/simt/blas_double.h"
#include "tests/simt/cuda_api.h"
#include "tests/simt/executor.h"
#include "tests/simt/nccl_double.h"
#include "tests/simt/nvml_double.h"

namespace cairn::simt {
namespace {

/// Of the process, from the first call on. Never destroyed: the program's own objects are gone when it ends, threads of
/// others need not be.
struct Doubles {
  static uint64_t number(const char* name, uint64_t otherwise) {
    const char* const words = std::getenv(name);
    return words == nullptr ? otherwise : std::strtoull(words, nullptr, 10);
  }
  static const char* faults() {
    const char* const words = std::getenv("CAIRN_DOUBLE_FAULTS");
    return words == nullptr ? "" : words;
  }
  static uint64_t seed() { return number("CAIRN_DOUBLE_SEED", 0); }
  StreamDouble cuda{seed(), int64_t{2} << 30};
  CudaApi runtime{cuda, static_cast<int>(number("CAIRN_DOUBLE_DEVICES", 2))};
  BlasDouble products{cuda};
  AttentionDouble attention{cuda};
  std::optional<NcclSegment> segment;
  std::optional<NcclDouble> nccl;
};

Doubles* made = nullptr;

/// What is planted as slow takes so much longer.
void dawdle() { std::this_thread::sleep_for(std::chrono::milliseconds(40)); }

Doubles& doubles() {
  static Doubles* const once = [] {
    made = new Doubles;
    if (const char* const card = std::getenv("CAIRN_DOUBLE_CARD")) made->runtime.use_card(card);
    made->products.use_version(Doubles::number("CAIRN_DOUBLE_BLAS", 130100));
    if (std::getenv("CAIRN_DOUBLE_FASTEST") != nullptr) {
      std::vector<BlasDouble::Proposal> proposals(3, {.work = 4});
      proposals[Doubles::number("CAIRN_DOUBLE_FASTEST", 0) % 3].work = 1;
      made->products.propose(proposals);
    }
    give_warpgroups(std::getenv("CAIRN_DOUBLE_WARPGROUPS") != nullptr);
    made->attention.use_version(static_cast<int64_t>(Doubles::number("CAIRN_DOUBLE_CUDNN", 91900)));
    if (const char* const times = std::getenv("CAIRN_DOUBLE_ATTENTION")) {
      AttentionTimes of;
      auto& [forward, backward] = of;
      const int found = std::sscanf(times, "%ld,%ld:%ld,%ld", &forward[0], &forward[2], &backward[0], &backward[2]);
      RT_CHECK(found == 4, "CAIRN_DOUBLE_ATTENTION is \"{}\"", times);
      made->attention.plant(of);
    }
    made->runtime.between_devices([](int from, int to) {
      if (is_planted(Doubles::faults(), "slow_pair", from, to)) dawdle();
    });
    return made;
  }();
  return *once;
}

const cuda::NvmlApi& nvml() {
  static NvmlDouble* const once = [] {
    auto devices = nvml_devices(static_cast<int>(Doubles::number("CAIRN_DOUBLE_DEVICES", 2)), Doubles::faults());
    const char* const host = std::getenv("CAIRN_DOUBLE_HOST");
    for (NvmlDeviceState& device : devices) device.uuid += host == nullptr ? "" : host;
    return new NvmlDouble(std::move(devices));
  }();
  return once->api();
}

bool has_nccl() { return std::getenv("CAIRN_DOUBLE_NCCL") != nullptr; }

const cuda::NcclApi& nccl() {
  static const cuda::NcclApi* const once = [] {
    RT_CHECK(has_nccl(), "CAIRN_DOUBLE_NCCL names no file");
    Doubles& all = doubles();
    all.segment.emplace(std::getenv("CAIRN_DOUBLE_NCCL"));
    all.nccl.emplace(all.cuda, *all.segment, Doubles::seed());
    if (std::getenv("CAIRN_DOUBLE_ABORTS_HANG") != nullptr) all.nccl->hang_aborts();
    if (std::getenv("CAIRN_DOUBLE_ABORTS_CRASH") != nullptr) all.nccl->crash_aborts();
    return &all.nccl->api();
  }();
  return *once;
}

/// A device goes on by itself while the host is at something else: others may wait for it.
void run_device_by_itself() {
  static std::once_flag begun;
  std::call_once(begun, [] {
    new DeviceRuns(doubles().cuda);  // as long as the process
  });
}

/// When the program ends by itself.
struct Complains {
  ~Complains() {
    if (made == nullptr) return;
    bool any = false;
    for (const auto& of : {made->cuda.misuses(), made->products.misuses(),
                           made->nccl ? made->nccl->misuses() : std::vector<std::string>()}) {
      for (const std::string& what : of) std::fprintf(stderr, "the double of CUDA: misuse: %s\n", what.c_str());
      any |= !of.empty();
    }
    if (any) _exit(99);
  }
} const complains;

}  // namespace
}  // namespace cairn::simt

#define RT_SHOWN [[gnu::visibility("default")]]

namespace cairn::cuda {
extern "C" {

RT_SHOWN extern const char cairn_cuda_is_a_double[];
const char cairn_cuda_is_a_double[] = "no device";

RT_SHOWN extern const Module cairn_cuda_module;
const Module cairn_cuda_module = {.tree_version = CAIRN_TREE_VERSION,
                                  .api = []() -> const Api& { return simt::doubles().runtime.api(); },
                                  .kernels = []() -> KernelTables {
                                    return {.of_f32 = &ops<float>(),
                                            .of_bf16 = &ops<bf16>(),
                                            .of_f16 = &ops<f16>(),
                                            .state = &state_ops(),
                                            .scratch_bytes = &scratch_bytes,
                                            .rank_sums = &kernels::cuda::rank_sums(),
                                            .sum_runs = &kernels::cuda::sum_runs,
                                            .cudnn = [](const Api&, int) -> Result<AttentionLibrary> {
                                              AttentionLibrary out = simt::doubles().attention.library();
                                              if (out.version < kCudnnLeast)
                                                return Error{ErrorCode::kUnsupported, "cuDNN is too old"};
                                              return out;
                                            },
                                            .has_warpgroups = &kernels::cuda::has_warpgroups};
                                  }};

static const BlasApi& blas() { return simt::doubles().products.api(); }

RT_SHOWN int cublasLtCreate(BlasHandle* handle) { return blas().create(handle); }
RT_SHOWN int cublasLtDestroy(BlasHandle handle) { return blas().destroy(handle); }
RT_SHOWN int cublasLtMatmulDescCreate(ProductHandle* product, int compute, int scale) {
  return blas().create_product(product, compute, scale);
}
RT_SHOWN int cublasLtMatmulDescDestroy(ProductHandle product) { return blas().destroy_product(product); }
RT_SHOWN int cublasLtMatmulDescSetAttribute(ProductHandle product, int attribute, const void* value, size_t bytes) {
  return blas().set_product(product, attribute, value, bytes);
}
RT_SHOWN int cublasLtMatrixLayoutCreate(LayoutHandle* layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  return blas().create_layout(layout, type, rows, cols, ld);
}
RT_SHOWN int cublasLtMatrixLayoutDestroy(LayoutHandle layout) { return blas().destroy_layout(layout); }
RT_SHOWN int cublasLtMatmulPreferenceCreate(WishHandle* wish) { return blas().create_wish(wish); }
RT_SHOWN int cublasLtMatmulPreferenceDestroy(WishHandle wish) { return blas().destroy_wish(wish); }
RT_SHOWN int cublasLtMatmulPreferenceSetAttribute(WishHandle wish, int attribute, const void* value, size_t bytes) {
  return blas().set_wish(wish, attribute, value, bytes);
}
RT_SHOWN int cublasLtMatmulAlgoGetHeuristic(BlasHandle handle, ProductHandle product, LayoutHandle a, LayoutHandle b,
                                            LayoutHandle c, LayoutHandle d, WishHandle wish, int wanted,
                                            BlasChoice* choices, int* found) {
  return blas().choose(handle, product, a, b, c, d, wish, wanted, choices, found);
}
RT_SHOWN int cublasLtMatmul(BlasHandle handle, ProductHandle product, const void* alpha, const void* a,
                            LayoutHandle a_layout, const void* b, LayoutHandle b_layout, const void* beta,
                            const void* c, LayoutHandle c_layout, void* d, LayoutHandle d_layout,
                            const BlasAlgorithm* algorithm, void* workspace, size_t workspace_bytes,
                            StreamHandle stream) {
  const int error = blas().multiply(handle, product, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
                                    algorithm, workspace, workspace_bytes, stream);
  const int device = simt::CudaApi::device();
  if (error == 0 && simt::is_planted(simt::Doubles::faults(), "wrong_product", device)) {
    return simt::doubles().cuda.launch(stream, [d] { static_cast<unsigned char*>(d)[0] ^= 1; });
  }
  if (error == 0 && simt::is_planted(simt::Doubles::faults(), "slow_product", device))
    return simt::doubles().cuda.launch(stream, &simt::dawdle);
  return error;
}
static const NcclApi& nccl() { return simt::nccl(); }

RT_SHOWN int ncclGetVersion(int* version) {
  return simt::has_nccl() ? nccl().version(version) : simt::kNcclInvalidUsage;
}
RT_SHOWN int ncclGetUniqueId(NcclId* id) { return nccl().make_id(id); }
RT_SHOWN int ncclCommInitRankConfig(NcclHandle* comm, int size, NcclId id, int rank, NcclConfig* config) {
  simt::run_device_by_itself();
  return nccl().make(comm, size, id, rank, config);
}
RT_SHOWN int ncclCommSplit(NcclHandle comm, int color, int key, NcclHandle* child, NcclConfig* config) {
  return nccl().split(comm, color, key, child, config);
}
RT_SHOWN int ncclCommCount(NcclHandle comm, int* count) { return nccl().count(comm, count); }
RT_SHOWN int ncclCommUserRank(NcclHandle comm, int* rank) { return nccl().own_rank(comm, rank); }
RT_SHOWN int ncclCommFinalize(NcclHandle comm) { return nccl().finalize(comm); }
RT_SHOWN int ncclCommDestroy(NcclHandle comm) { return nccl().destroy(comm); }
RT_SHOWN int ncclCommAbort(NcclHandle comm) { return nccl().abort(comm); }
RT_SHOWN int ncclCommGetAsyncError(NcclHandle comm, int* error) { return nccl().async_error(comm, error); }
RT_SHOWN int ncclMemAlloc(void** memory, size_t bytes) { return nccl().mem_alloc(memory, bytes); }
RT_SHOWN int ncclMemFree(void* memory) { return nccl().mem_free(memory); }
RT_SHOWN int ncclCommRegister(NcclHandle comm, void* memory, size_t bytes, void** handle) {
  return nccl().register_memory(comm, memory, bytes, handle);
}
RT_SHOWN int ncclCommDeregister(NcclHandle comm, void* handle) { return nccl().deregister(comm, handle); }
RT_SHOWN int ncclGroupStart() { return nccl().begin_group(); }
RT_SHOWN int ncclGroupEnd() { return nccl().end_group(); }
RT_SHOWN int ncclSend(const void* data, size_t count, int type, int peer, NcclHandle comm, StreamHandle stream) {
  return nccl().send(data, count, type, peer, comm, stream);
}
RT_SHOWN int ncclRecv(void* data, size_t count, int type, int peer, NcclHandle comm, StreamHandle stream) {
  return nccl().recv(data, count, type, peer, comm, stream);
}
RT_SHOWN int ncclAllGather(const void* from, void* to, size_t count, int type, NcclHandle comm, StreamHandle stream) {
  return nccl().all_gather(from, to, count, type, comm, stream);
}
RT_SHOWN int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, NcclHandle comm,
                           StreamHandle stream) {
  return nccl().broadcast(from, to, count, type, root, comm, stream);
}
RT_SHOWN int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, NcclHandle comm,
                           StreamHandle stream) {
  return nccl().all_reduce(from, to, count, type, op, comm, stream);
}
RT_SHOWN int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, NcclHandle comm,
                               StreamHandle stream) {
  return nccl().reduce_scatter(from, to, count, type, op, comm, stream);
}
RT_SHOWN const char* ncclGetErrorString(int) { return "refused by the double"; }
RT_SHOWN const char* ncclGetLastError(NcclHandle comm) { return nccl().last_error(comm); }

static const NvmlApi& nvml() { return simt::nvml(); }

RT_SHOWN int nvmlInit_v2() { return nvml().open(); }
RT_SHOWN int nvmlShutdown() { return nvml().close(); }
RT_SHOWN int nvmlDeviceGetCount_v2(unsigned* count) { return nvml().count(count); }
RT_SHOWN int nvmlDeviceGetHandleByIndex_v2(unsigned index, NvmlDevice* device) { return nvml().device(index, device); }
RT_SHOWN int nvmlDeviceGetName(NvmlDevice device, char* to, unsigned bytes) { return nvml().name(device, to, bytes); }
RT_SHOWN int nvmlDeviceGetUUID(NvmlDevice device, char* to, unsigned bytes) { return nvml().uuid(device, to, bytes); }
RT_SHOWN int nvmlDeviceGetPciInfo_v3(NvmlDevice device, NvmlPci* pci) { return nvml().pci(device, pci); }
RT_SHOWN int nvmlDeviceGetMigMode(NvmlDevice device, unsigned* now, unsigned* later) {
  return nvml().mig(device, now, later);
}
RT_SHOWN int nvmlDeviceGetTotalEccErrors(NvmlDevice device, int kind, int since, unsigned long long* errors) {
  return nvml().ecc_errors(device, kind, since, errors);
}
RT_SHOWN int nvmlDeviceGetRemappedRows(NvmlDevice device, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
                                       unsigned* failed) {
  return nvml().remapped_rows(device, corrected, uncorrected, pending, failed);
}
RT_SHOWN int nvmlDeviceGetRetiredPages(NvmlDevice device, int cause, unsigned* count, unsigned long long* addresses) {
  return nvml().retired_pages(device, cause, count, addresses);
}
RT_SHOWN int nvmlDeviceGetRetiredPagesPendingStatus(NvmlDevice device, int* waits) {
  return nvml().retirement_pending(device, waits);
}
RT_SHOWN int nvmlDeviceGetCurrentClocksEventReasons(NvmlDevice device, unsigned long long* why) {
  return nvml().slowed_by(device, why);
}
RT_SHOWN int nvmlDeviceGetNvLinkState(NvmlDevice device, unsigned link, int* active) {
  return nvml().link_state(device, link, active);
}
RT_SHOWN int nvmlDeviceGetComputeRunningProcesses_v3(NvmlDevice device, unsigned* count, NvmlProcess* to) {
  return nvml().processes(device, count, to);
}
RT_SHOWN const char* nvmlErrorString(int error) { return nvml().error_string(error); }

RT_SHOWN size_t cudnnGetVersion() { return simt::Doubles::number("CAIRN_DOUBLE_CUDNN", 91900); }

RT_SHOWN size_t cublasLtGetVersion() { return blas().version(); }
RT_SHOWN const char* cublasLtGetStatusName(int status) { return blas().status_name(status); }

}  // extern "C"
}  // namespace cairn::cuda
