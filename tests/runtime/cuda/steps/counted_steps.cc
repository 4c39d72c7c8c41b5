#include "tests/runtime/cuda/steps/counted_steps.h"

#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "ckpt/hook.h"
#include "runtime/core/check.h"
#include "runtime/cuda/machine/machine.h"
#include "runtime/cuda/ops/ops.h"
#include "runtime/trainer/trainer.h"
#include "tests/ckpt/hook/forwarding_hook.h"
#include "tests/runtime/cuda/steps/mute_engine.h"
#include "tests/runtime/cuda/steps/unbacked_arena.h"
#include "tests/simt/blas_double.h"
#include "tests/simt/cuda_api.h"
#include "tests/simt/symbols.h"

namespace cairn::testing {
namespace {

using simt::Ordered;

/// The hook of the run, which ends it in the step after the last one that is wanted.
class EndedHook final : public ckpt::testing::ForwardingHook {
 public:
  EndedHook(ckpt::SharedMemoryHook& hook, int64_t steps) : ForwardingHook(hook), left_(steps) {}
  Result<int64_t> next_bank(int64_t current) override {
    if (left_-- == 0) return Error{ErrorCode::kStopped, "all steps are counted"};
    return ForwardingHook::next_bank(current);
  }
  /// The last copy is of no use, and is left: the device's memory outlives the hook.
  void release() override {}

 private:
  int64_t left_;
};

/// Lets a recorder's held copies arrive once a thread sleeps, though the device has nothing to do: it waits for them in
/// a way that the double cannot see.
class StandStill {
 public:
  StandStill(simt::StreamDouble& cuda, pid_t thread) : cuda_(cuda), path_("/proc/self/task/" + std::to_string(thread)) {
    watch_ = std::thread([this] { watch(); });
  }
  ~StandStill() {
    ended_ = true;
    watch_.join();
  }
  StandStill(const StandStill&) = delete;
  StandStill& operator=(const StandStill&) = delete;
  int64_t found() const { return found_; }

 private:
  /// How often it has gone to sleep; empty: it is awake.
  std::string asleep() const {
    constexpr std::string_view kState = "State:";  // "S (sleeping)" then
    std::ifstream status(path_ + "/status");
    std::string line, out;
    bool sleeps = false;
    while (std::getline(status, line)) {
      if (line.starts_with(kState)) sleeps = line.find('S', kState.size()) != std::string::npos;
      if (line.starts_with("voluntary_ctxt_switches:")) out = line;
    }
    return sleeps ? out : "";
  }
  void watch() {
    constexpr auto kNap = std::chrono::milliseconds(5);
    constexpr int kLong = 20;
    std::string before;
    for (int same = 0; !ended_ && same < kLong; std::this_thread::sleep_for(kNap)) {
      cuda_.waited_for_held();  // a thread that is in a call of the double may be who is waited for
      std::string now = asleep();
      same = !now.empty() && now == before ? same + 1 : 0;
      before = std::move(now);
    }
    if (!ended_ && cuda_.let_arrive()) ++found_;
  }

  simt::StreamDouble& cuda_;
  const std::string path_;
  std::atomic<bool> ended_ = false;
  std::atomic<int64_t> found_ = 0;
  std::thread watch_;
};

/// Adds up what streams are asked for, by step.
class Counter {
 public:
  explicit Counter(Wanted wanted) : wanted_(wanted) {}

  void hear(const Ordered& ordered) {
    const std::lock_guard lock(mutex_);
    if (!counts_) return;
    if (wanted_ == Wanted::kOrdered) ordered_.push_back(ordered);
    if (ordered.kind == Ordered::Kind::kCopy) return;
    ++now_.launches;
    if (is_of_update(op_under_way())) {
      if (++now_.update == 1) now_.waits_before_update = simt::StreamDouble::own_waits_so_far();
    }
    ++kernels_[ordered.kind == Ordered::Kind::kKernel    ? ordered.kernel
               : ordered.kind == Ordered::Kind::kProduct ? &kProduct
                                                         : &kFill];
  }
  /// A step begins: all before it is the step before's.
  void begin_step(int64_t step, int64_t waits, int64_t collectives) {
    OpNotes ops = take_op_notes();
    const std::lock_guard lock(mutex_);
    if (step > 1) {
      now_.waits = waits;
      now_.collectives = collectives;
      now_.ops = std::move(ops);
      for (const auto& [name, of] : now_.ops.calls) now_.bytes += of.bytes;
      for (const auto& [kernel, launches] : kernels_) {
        now_.kernels[kernel == &kProduct ? "(product)"
                     : kernel == &kFill  ? "(fill)"
                                         : simt::name_of(kernel)] += launches;
      }
      steps_.push_back(std::exchange(now_, {}));
      kernels_.clear();
    }
    counts_ = true;
  }
  CountedSteps take() { return {.steps = std::move(steps_), .ordered = std::move(ordered_)}; }

 private:
  static constexpr char kProduct = 0, kFill = 0;
  const Wanted wanted_;
  std::mutex mutex_;
  bool counts_ = false;
  StepCount now_;
  std::map<const void*, int64_t> kernels_;
  std::vector<StepCount> steps_;
  std::vector<Ordered> ordered_;
};

/// The copier's thread may be late: a snapshot that is begun is under way from here on.
void await_copy(const simt::StreamDouble& cuda) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (cuda.copies_left_alone() == 0) {
    RT_CHECK(std::chrono::steady_clock::now() < end, "step 1 has begun no snapshot");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

template <typename T>
T value_of(Result<T> made) {
  RT_CHECK(made.ok(), "{}", made.error().message);
  return std::move(made).value();
}

}  // namespace

CountedSteps count_steps(const Plan& plan, int64_t steps, simt::Backing backing, Wanted wanted) {
  const int64_t world = plan.mesh.world();
  RT_CHECK(world == 1 || backing == simt::Backing::kNone, "{} ranks that compute", world);
  omp_set_num_threads(1);
  constexpr int64_t kMemory = int64_t{1} << 26, kAddresses = int64_t{1} << 44;
  const bool records = backing == simt::Backing::kNone, holds = records && plan.recipe.checkpoint.snapshot_steps > 0;
  CountedSteps out;
  Counter counter(wanted);
  {
    simt::StreamDouble cuda(2, records ? kAddresses : kMemory, backing);
    simt::CudaApi runtime(cuda);
    simt::BlasDouble products(cuda);
    UnbackedArena memory(plan);
    const cuda::KernelTables tables = counted({.of_f32 = &cuda::ops<float>(),
                                               .of_bf16 = &cuda::ops<bf16>(),
                                               .of_f16 = &cuda::ops<f16>(),
                                               .state = &cuda::state_ops(),
                                               .scratch_bytes = &cuda::scratch_bytes,
                                               .rank_sums = &kernels::cuda::rank_sums()});
    if (records) {
      record_ops({.given = [&](const void* at) { return cuda.given(at); }});
      for (int64_t slot = 0; slot < memory.arena().slots(); ++slot) {
        cuda.leave_alone(memory.arena().payload(0, slot));
      }
      if (holds) cuda.hold_copies(std::this_thread::get_id());
    }
    cuda.on_order([&](const Ordered& ordered) { counter.hear(ordered); });
    const auto machine = value_of(cuda::CudaMachine::open(
        runtime.api(), products.api(), tables, {.product_bytes = records ? int64_t{32} << 20 : int64_t{1} << 16}));
    const SystemClock clock;
    const auto hook = value_of(ckpt::SharedMemoryHook::make(
        plan, 0, memory.arena(), clock, {.make_link = [&] { return value_of(machine->make_link()); }}));
    EndedHook ended(*hook, steps);
    MuteEngine engine(0, world, [&](const void* at) { return machine->holds(at); });
    trainer::Environment env{.plan = plan, .rank = 0, .engine = engine, .hook = ended};
    env.machine = machine.get();
    const StandStill watch(cuda, static_cast<pid_t>(syscall(SYS_gettid)));
    int64_t stood = 0;
    env.on_phase = [&](int64_t step, const char* what) {
      if (std::string_view(what) != "data") return;
      if (step == 2 && holds) await_copy(cuda);
      if (step >= 3) cuda.let_arrive();
      const int64_t stood_now = watch.found() + cuda.waited_for_held();
      counter.begin_step(step, simt::StreamDouble::take_own_waits() + stood_now - stood, engine.take_calls());
      stood = stood_now;
    };
    const auto outcome = trainer::run(env);
    RT_CHECK(!outcome.ok() && outcome.error().code == ErrorCode::kStopped, "the run ended by itself: {}",
             outcome.ok() ? "all steps" : outcome.error().message);
    cuda.let_arrive();
    out = counter.take();
    for (const auto& of : {cuda.misuses(), products.misuses()}) {
      out.misuses.insert(out.misuses.end(), of.begin(), of.end());
    }
  }
  record_ops_no_more();
  return out;
}

}  // namespace cairn::testing
