// Measures this machine for `cairn plan --calibrate`: the peaks, and steps of the trainer itself (calibration.h says
// why four of them are enough).
#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <thread>
#include <vector>

#include "runtime/comm/thread_world.h"
#include "runtime/core/make_folder.h"
#include "runtime/core/new_file.h"
#include "runtime/core/random.h"
#include "runtime/device/buffer.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/model_tensors.h"
#include "runtime/trainer/trainer.h"
#include "tools/calibrate.h"
#include "tools/run/folder/folder.h"
#include "tools/square_matmul.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

constexpr double kMeasureMs = 250;  // of each peak, at least
constexpr int64_t kWarmUps = 3;     // steps that fault pages in: both banks of the optimizer, and caches of kernels
constexpr int64_t kMinSteps = 4, kMaxSteps = 40;  // that count
constexpr double kStepsMs = 1200;                 // they take so long, if they may
constexpr double kLongStepMs = 1500;              // a measured step is to take no longer, by an estimate
constexpr int64_t kMaxMemory = int64_t{6} << 30;  // of all ranks of a measured step
constexpr int64_t kBanks = 2;                     // an update reads one and writes the other
constexpr Device kCpu{DeviceKind::kCpu, 0};

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// Gives the trainer banks as a run under an agent has them, keeps nothing, and ends the run when enough is measured.
class TimingHook final : public trainer::CheckpointHook {
 public:
  explicit TimingHook(const std::function<bool()>& enough) : enough_(enough) {}
  Result<trainer::StateMemory> memory(std::span<const trainer::StateTensor> saved,
                                      std::span<const trainer::StateTensor>, int64_t) override {
    const auto line = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    int64_t total = 0;
    for (const trainer::StateTensor& tensor : saved) total += line(tensor.bytes);
    trainer::StateMemory out;
    for (int64_t bank = 0; bank < kBanks; ++bank) {
      RT_TRY_SET(Buffer buffer, Buffer::allocate(kCpu, total));
      DevicePtr<std::byte> at = buffer.at();
      std::vector<DevicePtr<std::byte>>& tensors = out.banks.emplace_back();
      for (const trainer::StateTensor& tensor : saved) {
        tensors.push_back(at);
        at += line(tensor.bytes);
      }
      banks_.push_back(std::move(buffer));
    }
    return out;
  }
  Result<std::optional<trainer::Restored>> restore(std::span<const trainer::StateTensor>) override {
    return std::optional<trainer::Restored>();
  }
  Result<int64_t> next_bank(int64_t current) override { return (current + 1) % kBanks; }
  Result<trainer::StepOrder> decide(const trainer::TrainPosition&, bool last) override {
    return trainer::StepOrder{.stop = last || enough_()};
  }
  Status snapshot(const trainer::StepOrder&, const trainer::TrainPosition&, int64_t,
                  std::span<const trainer::StateTensor>, std::span<const uint64_t>) override {
    return {};
  }
  Status finish() override { return {}; }

 private:
  const std::function<bool()>& enough_;  // on world rank 0
  std::vector<Buffer> banks_;
};

/// A file of random tokens, gone with the object.
class TokenFile {
 public:
  static Result<TokenFile> make(int64_t count, int64_t vocab) {
    RT_TRY_SET(NewFile file, NewFile::beside(fs::temp_directory_path() / "cairn-calibration.tokens", 0600));
    std::vector<uint32_t> block(1 << 16);
    for (int64_t at = 0; at < count; at += std::ssize(block)) {
      for (size_t i = 0; i < block.size(); ++i) {
        block[i] = static_cast<uint32_t>(mix64(static_cast<uint64_t>(at) + i) % static_cast<uint64_t>(vocab));
      }
      const auto n = static_cast<size_t>(std::min<int64_t>(std::ssize(block), count - at));
      RT_TRY(file.write({reinterpret_cast<const char*>(block.data()), n * sizeof(uint32_t)}));
    }
    return TokenFile(std::move(file));
  }
  std::string path() const { return file_.temporary(); }

 private:
  explicit TokenFile(NewFile file) : file_(std::move(file)) {}
  NewFile file_;
};

/// The plan's run with other numbers of layers and micro-batches, on random tokens.
Recipe measured_recipe(const Plan& plan, int64_t layers, int64_t micro_batches, const std::string& tokens) {
  Recipe out = plan.recipe;
  out.model.layers = layers;
  const bool some_windows = !out.model.window_layers.empty(), some_chunks = !out.model.chunk_layers.empty();
  for (std::vector<int64_t>* named :
       {&out.model.window_layers, &out.model.chunk_layers, &out.model.nope_layers, &out.model.moe.dense_layers}) {
    std::erase_if(*named, [&](int64_t layer) { return layer >= layers; });
  }
  if (out.model.moe.experts > 0 && expert_layers(out.model) == 0) out.model.moe.dense_layers.clear();
  if (some_windows && out.model.window_layers.empty()) {  // or all layers would have one
    out.model.sliding_window = 0;
    out.model.window_rope_theta = 0;
  }
  if (some_chunks && out.model.chunk_layers.empty()) out.model.attention_chunk = 0;
  if (out.model.temperature_form == TemperatureForm::kLlama4 && out.model.nope_layers.empty()) {
    out.model.temperature_scale = 0;
  }
  out.mesh.stages.clear();
  out.recompute.layers = std::min(out.recompute.layers, layers);
  out.batch = {.samples = micro_batches * out.batch.micro * plan.mesh.dp(),
               .micro = out.batch.micro,
               .tokens = out.batch.tokens};
  for (DataSource& source : out.data.sources) {
    source = {.kind = DataSource::Kind::kTokenFile,
              .name = source.name,
              .path = tokens,
              .dtype = "uint32",
              .weight = source.weight};
  }
  out.optimizer.groups.clear();  // they may name layers that are not there
  out.optimizer.lr.clear();
  out.init = {};
  out.eval = {};
  out.checkpoint.keep.clear();  // they may ask for the best of an evaluation
  out.watch.early_stop = {};
  out.stop = {Span::Unit::kSteps, static_cast<double>(kWarmUps + kMaxSteps)};
  return out;
}

StepParts parts_of(const std::vector<telemetry::StepMetrics>& steps) {
  StepParts out;
  std::vector<double> whole;
  for (const telemetry::StepMetrics& step : steps) whole.push_back(step.step_ms);
  const auto phase = [&](telemetry::Phase wanted) {
    std::vector<double> values;
    for (const telemetry::StepMetrics& step : steps) {
      for (const auto& [name, ms] : step.split_ms) {
        if (name == telemetry::phase_name(wanted)) values.push_back(ms);
      }
    }
    return values.empty() ? 0.0 : median(values);
  };
  out.forward = phase(telemetry::Phase::kForward);
  out.backward = phase(telemetry::Phase::kBackward);
  out.pipeline = phase(telemetry::Phase::kPipeline);
  out.reduce = phase(telemetry::Phase::kReduce);
  out.optimizer = phase(telemetry::Phase::kOptimizer);
  out.other = std::max(0.0, median(whole) - out.forward - out.backward - out.pipeline - out.reduce - out.optimizer);
  return out;
}

/// A step of this recipe with all ranks at work, `threads` OpenMP threads each.
Result<StepParts> time_steps(const Recipe& recipe, int64_t world, int64_t threads) {
  RT_TRY_SET(const Plan plan, make_plan(recipe, world));
  comm::ThreadWorld ranks(trainer::world_config(plan), {.deadline_ms = 600'000});
  std::vector<std::unique_ptr<comm::Engine>> engines;
  for (int64_t r = 0; r < world; ++r) engines.push_back(ranks.engine(r));
  std::vector<telemetry::StepMetrics> steps;
  double begun = 0;
  const std::function<bool()> enough = [&] {
    const auto counted = std::ssize(steps);
    return counted >= kMinSteps && now_ms() - begun > kStepsMs;
  };
  std::vector<Status> done(static_cast<size_t>(world));
  std::vector<std::thread> pool;
  for (int64_t r = 0; r < world; ++r) {
    pool.emplace_back([&, r] {
      omp_set_num_threads(static_cast<int>(threads));
      TimingHook hook(enough);
      trainer::Environment env{.plan = plan, .rank = r, .engine = *engines[r], .hook = hook};
      if (r == 0) {
        env.on_step = [&](const telemetry::StepMetrics& metrics) {
          if (metrics.step == kWarmUps) begun = now_ms();
          if (metrics.step > kWarmUps) steps.push_back(metrics);
        };
      }
      Result<trainer::Outcome> outcome = trainer::run(env);
      if (outcome.ok()) return;
      done[static_cast<size_t>(r)] = std::move(outcome).error();
      engines[static_cast<size_t>(r)].reset();  // tells the others
    });
  }
  for (std::thread& thread : pool) thread.join();
  for (Status& status : done) RT_TRY(std::move(status));
  return parts_of(steps);
}

int64_t bytes_of(const Plan& plan) {
  int64_t out = 0;
  for (int64_t r = 0; r < plan.mesh.world(); ++r) {
    const RankPlan rank = plan.rank(r);
    out += rank.weight_bytes + rank.gathered_bytes + rank.grad_bytes + rank.optimizer_bytes +
           (kBanks - 1) * rank.bank_bytes() + stage_buffers_bytes(plan, rank) + plan.boundary_buffers_bytes();
  }
  return out;
}

/// The larger value is `most`, the smaller about half of it, a multiple of `unit` and at least `least`.
void choose_two(int64_t most, int64_t least, int64_t unit, int64_t (&out)[2]) {
  out[1] = most;
  out[0] = std::min(most, std::max(least, (most / 2 + unit - 1) / unit * unit));
}

/// Depths and batches that are measured: the plan's own and half of them, or less where a step would take too long or
/// too much memory; two of each, unless the plan has no room for two.
Result<StepFit> choose_steps(const Plan& plan, int64_t threads, const std::string& tokens) {
  const Recipe& recipe = plan.recipe;
  const int64_t pp = plan.mesh.pp(), world = plan.mesh.world();
  const int64_t stages = pp * recipe.mesh.virtual_stages;
  const bool grouped = recipe.schedule == PipelineKind::kInterleaved;
  const int64_t group = !grouped ? 1 : recipe.mesh.micro_batch_group > 0 ? recipe.mesh.micro_batch_group : pp;
  const int64_t least = std::min(steady_micro_batches(plan.schedule()), plan.micro_batches);
  int64_t layers = recipe.model.layers, batches = plan.micro_batches;
  const auto trial = [&](int64_t l, int64_t m) { return make_plan(measured_recipe(plan, l, m, tokens), world); };
  const auto flops = [](const Plan& p) { return p.flops_per_token() * static_cast<double>(p.tokens_per_step); };
  RT_TRY_SET(const Plan smallest, trial(stages, least));
  if (bytes_of(smallest) > kMaxMemory) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} with {} layers takes {} bytes here: too large to calibrate on this machine; --search "
                             "and --machine reckon with data sheets",
                             recipe.name, stages, bytes_of(smallest))};
  }
  // How long larger ones take, from the smallest, whose bubble and update are a larger part of it.
  RT_TRY_SET(const StepParts first, time_steps(measured_recipe(plan, stages, least, tokens), world, threads));
  const double ms_per_flop = first.total() / flops(smallest);
  for (;;) {
    RT_TRY_SET(const Plan next, trial(layers, batches));
    const bool slow = ms_per_flop * flops(next) > kLongStepMs, large = bytes_of(next) > kMaxMemory;
    const int64_t fewer_batches = std::max(batches / 2 / group * group, 2 * least);
    const int64_t fewer_layers = std::max(layers / 2 / stages * stages, 2 * stages);
    if (slow && !large && fewer_batches < batches) {
      batches = fewer_batches;
    } else if ((slow || large) && fewer_layers < layers) {
      layers = fewer_layers;
    } else {
      break;
    }
  }
  StepFit out;
  choose_two(layers, stages, stages, out.layers);
  choose_two(batches, least, group, out.micro_batches);
  return out;
}

double peak_tflops(DType dtype) {
  const SquareMatmul product(1536, dtype, dtype);
  double best_ms = 1e30;
  const double begin = now_ms();
  for (int64_t round = 0; round < 3 || now_ms() - begin < 2 * kMeasureMs; ++round) {
    const double t0 = now_ms();
    product.run();
    best_ms = std::min(best_ms, now_ms() - t0);
  }
  return product.flops() / best_ms / 1e9;
}

double copy_gb_per_s(int64_t cores) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  std::vector<double> rates(static_cast<size_t>(cores));
  std::vector<std::thread> pool;
  for (double& rate : rates) {
    pool.emplace_back([&rate] {
      std::vector<char> from(kBytes, 1), to(kBytes);
      double best = 1e30;
      for (int round = 0; round < 6; ++round) {
        const double t0 = now_ms();
        std::copy(from.begin(), from.end(), to.begin());
        best = std::min(best, now_ms() - t0);
      }
      rate = 2.0 * kBytes / best / 1e6;
    });
  }
  for (std::thread& thread : pool) thread.join();
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return sum;
}

/// Ranks wait for their OpenMP threads asleep (tools/cmd_train.cc), which libgomp reads once, when a program starts: so
/// the program starts again with it. Returns where that fails, and then threads spin.
void wait_as_ranks_do() {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  std::ifstream in("/proc/self/cmdline", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::vector<char*> words;
  for (size_t at = 0; at < text.size(); at += std::strlen(text.c_str() + at) + 1) words.push_back(text.data() + at);
  words.push_back(nullptr);
  ::setenv("OMP_WAIT_POLICY", "passive", 1);
  ::setenv("OMP_PROC_BIND", "false", 1);
  ::execv("/proc/self/exe", words.data());
}

}  // namespace

Status calibrate(const Plan& plan, Calibration* calibration) {
  wait_as_ranks_do();
  const int64_t cores = cpu_cores(), world = plan.mesh.world();
  calibration->cpu = cpu_name();
  calibration->cores = cores;
  if (calibration->peak_f32_tflops == 0) {
    omp_set_num_threads(static_cast<int>(cores));
    calibration->peak_f32_tflops = peak_tflops(DType::kF32);
    calibration->peak_bf16_tflops = peak_tflops(DType::kBf16);
    calibration->copy_gb_per_s = copy_gb_per_s(cores);
  }
  RT_TRY_SET(const TokenFile tokens,
             TokenFile::make(std::max<int64_t>(1 << 20, 2 * plan.recipe.model.context + 2), plan.recipe.model.vocab));
  const int64_t threads = std::max<int64_t>(1, cores / world);
  RT_TRY_SET(StepFit fit, choose_steps(plan, threads, tokens.path()));
  for (size_t l = 0; l < 2; ++l) {
    for (size_t m = 0; m < 2; ++m) {
      const size_t same_l = fit.layers[0] == fit.layers[l] ? 0 : l;
      const size_t same_m = fit.micro_batches[0] == fit.micro_batches[m] ? 0 : m;
      if (same_l != l || same_m != m) {
        fit.at[l][m] = fit.at[same_l][same_m];
        continue;
      }
      RT_TRY_SET(fit.at[l][m], time_steps(measured_recipe(plan, fit.layers[l], fit.micro_batches[m], tokens.path()),
                                          world, std::max<int64_t>(1, cores / world)));
    }
  }
  calibration->shapes[shape_key(plan, cores)] = fit;
  return {};
}

Status save_calibration(const Calibration& calibration) {
  const fs::path path = calibration_path();
  RT_TRY(make_folder_of(path));
  return write_text_file(path, calibration_text(calibration));
}

}  // namespace cairn::tools
