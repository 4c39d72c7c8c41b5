#pragma once
// CUDA devices for a trainer in tests: the doubles of the runtime and of cuBLASLt, the kernels on the executor; and
// whole runs on them, with the deaths of tests/ckpt/hook/mortal_run.h.

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/cuda/machine/machine.h"
#include "runtime/cuda/ops/ops.h"
#include "runtime/cuda/staged/staged_engine.h"
#include "runtime/kernels/cuda/state.h"
#include "runtime/trainer/staging_rooms.h"
#include "tests/ckpt/hook/mortal_run.h"
#include "tests/runtime/cuda/cuda_machine.h"
#include "tests/simt/attention_double.h"
#include "tests/simt/blas_double.h"

namespace cairn::testing {

/// Ways in which a double differs from a plain one.
struct DoubleWays {
  bool cudnn = false;                            // attention is by a library, which is a double too
  bool times_ops = false;                        // Told::op_times
  const trainer::TuningFiles* tuning = nullptr;  // whose choices products have; null: the first proposals
  std::string card = "Double";                   // its name
  bool times_attention = false;                  // with `tuning`, cuDNN's too
  bool times_warpgroups = false;                 // and by warpgroups
  std::function<void(simt::AttentionDouble& attention)> plant_attention = {};
  bool fuses = true;                                           // layers ask for fused products (Ops::fuses_products)
  std::function<void(simt::BlasDouble& products)> plant = {};  // before anything is multiplied
};

/// Of one process, whose ranks are threads: each has a device of its own, with memory and streams of one double.
class TrainedDouble {
 public:
  explicit TrainedDouble(uint64_t seed, int64_t ranks = 1, const DoubleWays& ways = {})
      : cuda(seed, ranks << 26), runtime(cuda, static_cast<int>(ranks)), ways_(ways) {
    library_ = &attention;
    if (ways_.plant) ways_.plant(products);
    if (ways_.plant_attention) ways_.plant_attention(attention);
    runtime.use_card(ways_.card);
    of_f32_.fuses_products = of_bf16_.fuses_products = of_f16_.fuses_products = ways_.fuses;
  }
  ~TrainedDouble() {
    CHECK(cuda.misuses() == std::vector<std::string>());
    CHECK(cuda.left() == std::vector<std::string>());
    CHECK(products.misuses() == std::vector<std::string>());
    CHECK(products.left() == 0);
  }

  Result<std::unique_ptr<cuda::CudaMachine>> open(int64_t rank = 0, const SumRooms& sums = {},
                                                  const cuda::NcclApi* nccl = nullptr) {
    const cuda::KernelTables tables{
        .of_f32 = &of_f32_,
        .of_bf16 = &of_bf16_,
        .of_f16 = &of_f16_,
        .state = &cuda::state_ops(),
        .scratch_bytes = &cuda::scratch_bytes,
        .rank_sums = &kernels::cuda::rank_sums(),
        .sum_runs = &kernels::cuda::sum_runs,
        .cudnn = [](const cuda::Api&, int) -> Result<cuda::AttentionLibrary> { return library_->library(); }};
    return cuda::CudaMachine::open(runtime.api(), products.api(), tables,
                                   {.index = static_cast<int>(rank),
                                    .product_bytes = int64_t{1} << 16,
                                    .sums = sums,
                                    .cudnn = ways_.cudnn,
                                    .tunes = ways_.tuning != nullptr,
                                    .times_attention = ways_.times_attention,
                                    .times_warpgroups = ways_.times_warpgroups,
                                    .nccl = nccl});
  }

  simt::StreamDouble cuda;
  simt::CudaApi runtime;
  simt::BlasDouble products{cuda};
  simt::AttentionDouble attention{cuda};

 private:
  const DoubleWays ways_;
  kernels::Ops<float> of_f32_ = cuda::ops<float>();
  kernels::Ops<bf16> of_bf16_ = cuda::ops<bf16>();
  kernels::Ops<f16> of_f16_ = cuda::ops<f16>();
  static inline simt::AttentionDouble* library_ = nullptr;  // the doubles are one at a time
};

/// One life of a run on a double, and what it was asked, step by step: by rank 0's own thread, and by all of them (the
/// others may be a step's wait ahead).
struct Lived {
  Lived(uint64_t seed, int64_t ranks, const DoubleWays& ways)
      : device(seed, ranks, ways), engines(static_cast<size_t>(ranks)) {}
  TrainedDouble device;
  std::vector<simt::StreamDouble::Counts> steps;
  std::vector<int64_t> own_waits;
  std::vector<const cuda::StagedEngine*> engines;  // by rank; null where there is one rank
  std::vector<int64_t> pinned;                     // by them, after the first step
};

/// Where ranks train: on the devices of `life`, which outlives them, with communication staged between.
inline ckpt::testing::OnDevice on_doubles(const Plan& plan, std::unique_ptr<Lived>& life) {
  return {.machine = [&](int64_t rank) -> std::unique_ptr<Machine> {
            auto machine = life->device.open(rank);
            RT_CHECK(machine.ok(), "{}", machine.error().message);
            return std::move(machine).value();
          },
          .engine = [&](comm::Engine& of_host, Machine& machine) -> std::unique_ptr<comm::Engine> {
            auto& cuda = static_cast<cuda::CudaMachine&>(machine);
            const int64_t rank = of_host.world_rank();
            auto made = cuda::make_staged_engine(
                of_host, cuda.cuda_stream(), [&cuda](const void* at) { return cuda.holds(at); },
                trainer::staging_rooms(plan, rank));
            RT_CHECK(made.ok(), "{}", made.error().message);
            life->engines[static_cast<size_t>(rank)] = made.value().get();
            return std::move(made).value();
          }};
}

/// Trains on a double through these deaths, as ckpt::testing::train() does. `last`: keeps the last life.
inline ckpt::testing::Told train_on_double(const Plan& plan, uint64_t seed,
                                           std::span<const ckpt::testing::Death> deaths = {},
                                           std::vector<std::pair<int64_t, bool>>* from = nullptr,
                                           std::unique_ptr<Lived>* last = nullptr, const DoubleWays& ways = {}) {
  const int64_t world = plan.mesh.world();
  std::unique_ptr<Lived> own;
  std::unique_ptr<Lived>& life = last != nullptr ? *last : own;
  std::mutex mutex;
  int64_t opened = 0;
  ckpt::testing::OnDevice on_device = on_doubles(plan, life);
  on_device.times_ops = ways.times_ops;
  on_device.tuning = ways.tuning;
  on_device.machine = [&, open = on_device.machine](int64_t rank) {
    const std::lock_guard lock(mutex);
    if (opened++ % world == 0) {
      life.reset();  // the doubles are one at a time
      life = std::make_unique<Lived>(seed, world, ways);
    }
    return open(rank);
  };
  return ckpt::testing::train(plan, deaths, from, {}, on_device, [&](int64_t) {
    life->steps.push_back(life->device.cuda.take_counts());
    life->own_waits.push_back(simt::StreamDouble::take_own_waits());
    if (std::ssize(life->steps) > 1) return;  // later the others may have left
    for (const cuda::StagedEngine* const engine : life->engines) {
      life->pinned.push_back(engine == nullptr ? 0 : engine->pinned_bytes());
    }
  });
}

}  // namespace cairn::testing
