#pragma once
// A CUDA device as a rank trains on it (runtime/device/machine.h): all of its memory in one arena, a stream with what
// kernels and products need, links that follow the stream.

#include <memory>
#include <vector>

#include "runtime/cuda/arena.h"
#include "runtime/cuda/attention_ways.h"
#include "runtime/cuda/blas.h"
#include "runtime/cuda/cuda_link.h"
#include "runtime/cuda/cudnn_attention.h"
#include "runtime/cuda/heap.h"
#include "runtime/cuda/stream.h"
#include "runtime/cuda/tuning/cuda_tuning.h"
#include "runtime/device/machine.h"
#include "runtime/device/sum_rooms.h"
#include "runtime/kernels/cuda/rank_sums.h"
#include "runtime/kernels/ops.h"
#include "runtime/kernels/state_ops.h"

namespace cairn::cuda {

/// The kernels for CUDA, which the program is not linked to: runtime/cuda/ops gives them.
struct KernelTables {
  const kernels::Ops<float>* of_f32 = nullptr;
  const kernels::Ops<bf16>* of_bf16 = nullptr;
  const kernels::Ops<f16>* of_f16 = nullptr;
  const kernels::StateOps* state = nullptr;
  int64_t (*scratch_bytes)(const WorkShapes& work) = nullptr;  // of a stream
  const kernels::cuda::RankSums* rank_sums = nullptr;
  SumRuns sum_runs = nullptr;  // kernels::cuda::sum_runs
  /// Attention by cuDNN, on this device; null where the module was built without.
  Result<AttentionLibrary> (*cudnn)(const Api& api, int index) = nullptr;
  bool (*has_warpgroups)() = nullptr;  // kernels::cuda::has_warpgroups
};

struct MachineOptions {
  int index = 0;                              // of the device
  int64_t deadline_ms = 0;                    // of each wait for the device; 0: none
  int64_t product_bytes = int64_t{32} << 20;  // for the algorithms of products
  SumRooms sums;                              // beside the rank's blocks, for who communicates among devices
  bool cudnn = false;                         // attention that cuDNN takes is by cuDNN
  bool warpgroups = false;                    // other attention may be by warpgroups, where the device has them
  bool tunes = false;                         // products are timed before the first step, or have choices of before
  bool times_attention = false;               // and so is attention, where `tunes`: cuDNN's too, where it can be had
  bool times_warpgroups = kTimesWarpgroups;   // and attention by warpgroups
  const NcclApi* nccl = nullptr;  // whose memory the arena is, for it to be registered; it outlives the machine
};

/// One for each device and process. Streams of CUDA devices have these kernels from now on.
class CudaMachine final : public Machine {
 public:
  /// The tables and what they point to outlive it. Errors: kUnavailable, saying what is missing.
  static Result<std::unique_ptr<CudaMachine>> open(const Api& api, const BlasApi& products, const KernelTables& kernels,
                                                   const MachineOptions& options);
  ~CudaMachine() override;

  Device device() const override { return context_->device(); }
  int64_t memory_bytes() const override { return context_->memory_bytes(); }
  Stream& stream() override { return *stream_; }
  int64_t bytes_for(std::span<const int64_t> blocks, const WorkShapes& work) const override;
  Status reserve(std::span<const int64_t> blocks, const WorkShapes& work) override;
  Status allow(const WorkShapes& work) override;
  Result<std::unique_ptr<DeviceLink>> make_link() override;
  DeviceTuning* tuning() override { return tuning_.get(); }

  /// Of the arena; 0 before reserve().
  int64_t reserved_bytes() const { return arena_ == nullptr ? 0 : arena_->bytes(); }
  /// All of the arena. After reserve().
  DeviceBytes memory() const { return arena_->all(); }
  /// Whether it is memory of the arena.
  bool holds(const void* at) const { return arena_ != nullptr && arena_->holds(at); }
  CudaStream& cuda_stream() { return *stream_; }
  /// MachineOptions::sums. After reserve().
  DeviceBytes room_for_sums() { return sums_.all(); }
  DeviceBytes room_for_sums_beside() { return sums_beside_.all(); }
  const kernels::cuda::RankSums& rank_sums() const { return *kernels_.rank_sums; }
  /// Kinds of products that have an algorithm.
  int64_t product_kinds() const { return blas_->kinds(); }
  /// Whether the calling thread's device has warpgroups.
  bool has_warpgroups() const { return kernels_.has_warpgroups != nullptr && kernels_.has_warpgroups(); }
  /// Of attention by cuDNN; null without.
  const AttentionPlans* attention() const { return attention_.get(); }
  /// Choices of attention's kernels; null where time does not decide.
  const AttentionWays* attention_ways() const { return ways_.get(); }

 private:
  CudaMachine(const KernelTables& kernels, const MachineOptions& options) : kernels_(kernels), options_(options) {}
  /// Blocks of the machine's own, in the order in which reserve() takes them: for kernels, products, given numbers,
  /// attention by cuDNN, checksums of snapshots, sums over ranks.
  std::vector<int64_t> own_blocks(const WorkShapes& work) const;
  Status take_own(const WorkShapes& work);
  /// Plans of attention by cuDNN, and a line in the log for what it does not take. Errors: it takes nothing.
  Status plan_attention(const WorkShapes& work);
  Status open_attention(const Api& api);
  /// From now on; null: without cuDNN.
  void time_attention(std::unique_ptr<AttentionPlans> plans, int64_t library);

  const KernelTables kernels_;
  const MachineOptions options_;
  std::shared_ptr<Context> context_;
  std::unique_ptr<Blas> blas_;
  std::unique_ptr<Arena> arena_;  // after reserve()
  std::unique_ptr<Heap> heap_;    // after allow()
  WorkShapes allowed_;
  std::unique_ptr<AttentionPlans> attention_;
  std::unique_ptr<AttentionWays> ways_;
  Buffer scratch_, product_room_, given_, attention_room_, checksums_, sums_, sums_beside_;
  std::unique_ptr<CudaStream> stream_;  // waits for its work before the memory goes
  std::unique_ptr<CudaTuning> tuning_;
};

}  // namespace cairn::cuda
