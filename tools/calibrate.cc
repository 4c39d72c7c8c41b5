// Measures this machine for `cairn plan --calibrate`: the program's own layers, optimizer and collectives at the shapes
// of a plan, with as many ranks at work as will be, so that they share caches and memory as they will.
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "runtime/comm/thread_world.h"
#include "runtime/kernels/adamw.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/matmul.h"
#include "runtime/nn/stage_model.h"
#include "runtime/plan/activations.h"
#include "runtime/tensor/buffer.h"
#include "tools/calibration.h"

namespace cairn::tools {
namespace {

constexpr double kMeasureMs = 250;  // of each thing, at least
constexpr int64_t kWarmUps = 2;     // rounds that make primitives and fault pages in: both banks of the optimizer
constexpr int64_t kRounds = 5;      // at least
constexpr int64_t kMaxModelBytes = int64_t{3} << 30;  // weights and gradients of one measured copy
constexpr Device kCpu{DeviceKind::kCpu, 0};

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// Moves nothing and counts: a stage computes as in its group, alone.
class CountingComm final : public comm::Comm {
 public:
  explicit CountingComm(int64_t size) : size_(size) {}
  int64_t rank() const override { return 0; }
  int64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }
  Traffic traffic() const override { return traffic_; }
  Status all_reduce(void*, int64_t count, DType dtype, comm::ReduceOp, std::string_view) override {
    return add(traffic_.all_reduce, count * dtype_size_bytes(dtype));
  }
  Status reduce_scatter(const void*, void*, int64_t count, DType dtype, comm::ReduceOp, std::string_view) override {
    return add(traffic_.reduce_scatter, size_ * count * dtype_size_bytes(dtype));
  }
  Status reduce_scatter_add(const void*, void*, int64_t count, DType dtype, std::string_view) override {
    return add(traffic_.reduce_scatter, size_ * count * dtype_size_bytes(dtype));
  }
  Status all_gather(const void*, void*, int64_t bytes, std::string_view) override {
    return add(traffic_.all_gather, bytes);
  }
  Status broadcast(void*, int64_t bytes, int64_t, std::string_view) override { return add(traffic_.broadcast, bytes); }
  Status all_to_all(std::span<const comm::OutPart> out, std::span<const comm::InPart>, std::string_view) override {
    int64_t bytes = 0;
    for (const comm::OutPart& part : out) bytes += part.bytes;
    return add(traffic_.all_to_all, bytes);
  }
  Status barrier(std::string_view) override { return {}; }
  Status isend(const void*, int64_t, int64_t, std::string_view) override { return {}; }
  Status recv(void*, int64_t, int64_t, std::string_view) override { return {}; }
  Status wait_sends(std::string_view) override { return {}; }
  Status wait_sends_to(int64_t, int64_t, std::string_view) override { return {}; }

 private:
  Status add(Volume& to, int64_t bytes) {
    if (size_ > 1) to.add(bytes);
    return {};
  }
  const int64_t size_;
  const std::string name_ = "tp";
  Traffic traffic_;
};

/// What many have more than one, a part of it: tensor parallelism reduces and gathers, nothing else.
comm::Comm::Traffic scaled_difference(const comm::Comm::Traffic& many, const comm::Comm::Traffic& one, int64_t by) {
  const auto part = [&](const comm::Comm::Volume& m, const comm::Comm::Volume& o) {
    return comm::Comm::Volume{(m.bytes - o.bytes) / by, (m.calls - o.calls) / by};
  };
  return {.all_reduce = part(many.all_reduce, one.all_reduce),
          .reduce_scatter = part(many.reduce_scatter, one.reduce_scatter),
          .all_gather = part(many.all_gather, one.all_gather)};
}

/// Runs `body(worker)` on so many threads at once, each with `threads` OpenMP threads; the first error.
Status in_parallel(int64_t workers, int64_t threads, const std::function<Status(int64_t)>& body) {
  std::vector<Status> done(static_cast<size_t>(workers));
  std::vector<std::thread> pool;
  for (int64_t w = 0; w < workers; ++w) {
    pool.emplace_back([&, w] {
      omp_set_num_threads(static_cast<int>(threads));
      done[static_cast<size_t>(w)] = body(w);
    });
  }
  for (std::thread& thread : pool) thread.join();
  for (Status& status : done) RT_TRY(std::move(status));
  return {};
}

/// A whole model on one pipeline rank and one replica; tensor parallelism as in the plan.
Recipe lone_recipe(const Plan& plan, int64_t layers) {
  Recipe out = plan.recipe;
  out.model.layers = layers;
  out.mesh.pp = out.mesh.dp = out.mesh.ep = out.mesh.cp = 1;
  out.mesh.virtual_stages = 1;
  out.mesh.stages.clear();
  out.schedule = PipelineKind::k1F1B;
  out.batch.samples = out.batch.micro;
  out.optimizer.zero = 0;
  return out;
}

struct ModelTimes {
  double forward_ms = 0, backward_ms = 0;
  comm::Comm::Traffic traffic;
};

/// Forward and backward of a micro-batch, the median over the time and over the workers.
Result<ModelTimes> time_model(const Plan& plan, int64_t workers, int64_t threads) {
  std::vector<ModelTimes> times(static_cast<size_t>(workers));
  std::barrier<> start(workers);
  RT_TRY(in_parallel(workers, threads, [&](int64_t worker) -> Status {
    const auto measure = [&]() -> Status {
      const RankPlan rank = plan.rank(0);
      RT_TRY_SET(Buffer weights, Buffer::allocate(kCpu, rank.weight_bytes));
      RT_TRY_SET(Buffer grads, Buffer::allocate(kCpu, rank.grad_bytes));
      RT_TRY_SET(Buffer activations, Buffer::allocate(kCpu, stage_buffers_bytes(plan, rank)));
      if (plan.compute_dtype() == DType::kBf16) {
        std::vector<float> values(1024, 0.01f);
        for (int64_t at = 0; at < rank.flat_elems; at += 1024) {
          kernels::cast(values.data(), weights.as<bf16>().data() + at, std::min<int64_t>(1024, rank.flat_elems - at));
        }
      } else {
        std::fill_n(weights.as<float>().data(), rank.flat_elems, 0.01f);
      }
      CountingComm comm(plan.mesh.tp());
      RT_TRY_SET(const auto model,
                 nn::StageModel::make(plan, rank, 0, comm, weights.data(), grads.as<float>().data(),
                                      {activations.data(), static_cast<size_t>(activations.size_bytes())}));
      const int64_t rows = plan.recipe.batch.micro * plan.recipe.model.context;
      std::vector<int32_t> tokens(static_cast<size_t>(rows));
      for (int64_t i = 0; i < rows; ++i) tokens[i] = static_cast<int32_t>(i * 7919 % plan.recipe.model.vocab);
      std::vector<double> forward, backward;
      ModelTimes& out = times[static_cast<size_t>(worker)];
      double begun = 0;
      for (int64_t round = 0; round < kWarmUps + kRounds || (now_ms() - begun < 4 * kMeasureMs && round < 200);
           ++round) {
        if (round == kWarmUps) begun = now_ms();
        const comm::Comm::Traffic before = comm.traffic();
        const double t0 = now_ms();
        RT_TRY(model->forward(0, tokens.data(), tokens.data(), nullptr, nullptr));
        const double t1 = now_ms();
        RT_TRY(model->backward(0, tokens.data(), tokens.data(), nullptr, nullptr, 1e-4f));
        const double t2 = now_ms();
        if (round >= kWarmUps) forward.push_back(t1 - t0), backward.push_back(t2 - t1);
        out.traffic = scaled_difference(comm.traffic(), before, 1);
      }
      out.forward_ms = median(forward);
      out.backward_ms = median(backward);
      return {};
    };
    start.arrive_and_wait();
    return measure();
  }));
  std::vector<double> forward, backward;
  for (const ModelTimes& t : times) forward.push_back(t.forward_ms), backward.push_back(t.backward_ms);
  return ModelTimes{median(forward), median(backward), times.front().traffic};
}

/// Nanoseconds an element of the update, of zeroing, and of the squared norm.
Status time_elements(const Plan& plan, int64_t workers, int64_t threads, ShapeTimes* out) {
  const int64_t count = std::clamp<int64_t>(plan.rank(0).shard_elems, 1 << 12, int64_t{16} << 20);
  std::vector<std::array<double, 3>> times(static_cast<size_t>(workers));
  RT_TRY(in_parallel(workers, threads, [&](int64_t worker) -> Status {
    RT_TRY_SET(Buffer memory, Buffer::allocate(kCpu, count * 4 * 8));
    float* const at = memory.as<float>().data();
    const auto state = [&](int64_t k) {
      return kernels::AdamwState{at + k * count, at + (k + 1) * count, at + (k + 2) * count};
    };
    const bool low = plan.compute_dtype() == DType::kBf16;
    const kernels::AdamwArgs args{
        .lr = 1e-4f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .stream = count * 12 > (8 << 20)};
    const auto time = [&](const auto& body) {
      std::vector<double> ms;
      double begin = 0;
      for (int64_t round = 0; round < kWarmUps + kRounds || (now_ms() - begin < kMeasureMs && round < 2000); ++round) {
        if (round == kWarmUps) begin = now_ms();
        const double t0 = now_ms();
        body(round);
        if (round >= kWarmUps) ms.push_back(now_ms() - t0);
      }
      return median(ms) * 1e6 / static_cast<double>(count);
    };
    auto& mine = times[static_cast<size_t>(worker)];
    mine[0] = time([&](int64_t round) {
      kernels::AdamwSums sums;
      kernels::adamw(args, at, state(1 + round % 2 * 3), state(4 - round % 2 * 3), low ? nullptr : at + 7 * count,
                     low ? reinterpret_cast<bf16*>(at + 7 * count) : nullptr, count, &sums);
    });
    mine[1] = time([&](int64_t) { std::fill_n(at, count, 0.0f); });
    volatile double kept = 0;
    mine[2] = time([&](int64_t) {
      ExactSum sum;
      kernels::add_squares(at, count, sum);
      kept = sum.value();
    });
    return {};
  }));
  for (size_t k = 0; k < 3; ++k) {
    std::vector<double> values;
    for (const auto& t : times) values.push_back(t[k]);
    (k == 0 ? out->adamw_ns : k == 1 ? out->clear_ns : out->norm_ns) = median(values);
  }
  return {};
}

/// Latency and bandwidth of a collective from a small and a large payload, by all ranks at once.
Status time_comm(const Plan& plan, ShapeTimes* out) {
  const int64_t world = plan.mesh.world();
  std::vector<int64_t> sizes;
  for (const int64_t size : {plan.mesh.tp(), plan.mesh.dp(), std::min<int64_t>(2, plan.mesh.pp()), world}) {
    if (size > 1 && std::find(sizes.begin(), sizes.end(), size) == sizes.end()) sizes.push_back(size);
  }
  constexpr int64_t kSmall = 4 << 10, kLarge = 8 << 20;
  for (const int64_t size : sizes) {
    comm::ThreadWorld threads(size, {.deadline_ms = 600'000});
    std::vector<std::unique_ptr<comm::Engine>> engines;
    for (int64_t r = 0; r < size; ++r) engines.push_back(threads.engine(r));
    std::map<std::string, std::array<double, 2>> ms;  // written by rank 0
    RT_TRY(in_parallel(size, 1, [&](int64_t rank) -> Status {
      std::vector<int64_t> all(static_cast<size_t>(size));
      for (int64_t r = 0; r < size; ++r) all[r] = r;
      RT_TRY_SET(const auto group, engines[static_cast<size_t>(rank)]->group("calibration", all));
      std::vector<float> data(static_cast<size_t>(kLarge / 4 + 1024)), other(data.size());
      for (const int64_t bytes : {kSmall, kLarge}) {
        const int64_t part = bytes / 4 / size, rounds = bytes == kSmall ? 200 : 9;
        const auto time = [&](const char* name, const std::function<Status()>& body) -> Status {
          std::vector<double> taken;
          for (int64_t round = 0; round < rounds; ++round) {
            RT_TRY(group->barrier("calibration"));
            const double t0 = now_ms();
            RT_TRY(body());
            taken.push_back(now_ms() - t0);
          }
          if (rank == 0) ms[name][bytes == kLarge] = median(taken);
          return {};
        };
        RT_TRY(time("all_reduce", [&] {
          return group->all_reduce(data.data(), bytes / 4, DType::kF32, comm::ReduceOp::kSum, "calibration");
        }));
        RT_TRY(time("reduce_scatter", [&] {
          return group->reduce_scatter(data.data(), other.data(), part, DType::kF32, comm::ReduceOp::kSum,
                                       "calibration");
        }));
        RT_TRY(time("all_gather", [&] {  // of the whole, so that all three say the same with `bytes`
          return group->all_gather(other.data(), data.data(), part * 4, "calibration");
        }));
        if (size == 2) {
          RT_TRY(time("p2p", [&]() -> Status {  // there and back: twice a message
            if (rank == 0) {
              RT_TRY(group->isend(data.data(), bytes, 1, "calibration"));
              RT_TRY(group->recv(other.data(), bytes, 1, "calibration"));
            } else {
              RT_TRY(group->recv(other.data(), bytes, 0, "calibration"));
              RT_TRY(group->isend(data.data(), bytes, 0, "calibration"));
            }
            return group->wait_sends("calibration");
          }));
        }
      }
      return {};
    }));
    for (const auto& [name, pair] : ms) {
      const double half = name == "p2p" ? 0.5 : 1.0;
      const double small = pair[0] * half, large = std::max(pair[1] * half, small * 1.001);
      const double rate = static_cast<double>(kLarge - kSmall) / (large - small);
      out->comm[fmt::format("{} x {}", name, size)] = {std::max(0.0, small - kSmall / rate), rate};
    }
  }
  return {};
}

double peak_tflops(DType dtype) {
  constexpr int64_t kSize = 1536;
  const int64_t bytes = kSize * kSize * dtype_size_bytes(dtype);
  std::vector<std::byte> a(static_cast<size_t>(bytes)), b(a.size()), c(static_cast<size_t>(kSize * kSize * 4));
  const kernels::MatmulArgs args{.m = kSize,
                                 .n = kSize,
                                 .k = kSize,
                                 .a = a.data(),
                                 .lda = kSize,
                                 .b = b.data(),
                                 .ldb = kSize,
                                 .c = c.data(),
                                 .ldc = kSize,
                                 .ab_dtype = dtype,
                                 .c_dtype = dtype};
  double best_ms = 1e30;
  const double begin = now_ms();
  for (int64_t round = 0; round < 3 || now_ms() - begin < 2 * kMeasureMs; ++round) {
    const double t0 = now_ms();
    if (!kernels::matmul(args).ok()) return 0;
    best_ms = std::min(best_ms, now_ms() - t0);
  }
  return 2.0 * kSize * kSize * kSize / best_ms / 1e9;
}

double copy_gb_per_s(int64_t cores) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  std::vector<double> rates(static_cast<size_t>(cores));
  ignore(in_parallel(cores, 1,
                     [&](int64_t worker) -> Status {
                       std::vector<char> from(kBytes, 1), to(kBytes);
                       double best = 1e30;
                       for (int round = 0; round < 6; ++round) {
                         const double t0 = now_ms();
                         std::copy(from.begin(), from.end(), to.begin());
                         best = std::min(best, now_ms() - t0);
                       }
                       rates[static_cast<size_t>(worker)] = 2.0 * kBytes / best / 1e6;
                       return {};
                     }),
         "copies cannot fail");
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return sum;
}

}  // namespace

Status calibrate(const Plan& plan, Calibration* calibration) {
  const int64_t cores = cpu_cores(), world = plan.mesh.world();
  calibration->cpu = cpu_name();
  calibration->cores = cores;
  if (calibration->peak_f32_tflops == 0) {
    omp_set_num_threads(static_cast<int>(cores));
    calibration->peak_f32_tflops = peak_tflops(DType::kF32);
    calibration->peak_bf16_tflops = peak_tflops(DType::kBf16);
    calibration->copy_gb_per_s = copy_gb_per_s(cores);
  }
  const int64_t workers = std::min(world, cores), threads = std::max<int64_t>(1, cores / world);

  // As many layers as will stand on a rank, so that weights come from memory where they will; two at least, to tell
  // what a layer takes from what the ends take.
  const int64_t per_rank = (plan.recipe.model.layers + plan.mesh.pp() - 1) / plan.mesh.pp();
  int64_t layers = std::max<int64_t>(2, per_rank);
  const auto lone = [&](int64_t count) { return make_plan(lone_recipe(plan, count), plan.mesh.tp()); };
  RT_TRY_SET(Plan deep, lone(layers));
  const auto bytes = [&](const Plan& p) {
    const RankPlan rank = p.rank(0);
    return workers * (rank.weight_bytes + rank.grad_bytes + stage_buffers_bytes(p, rank));
  };
  while (bytes(deep) > kMaxModelBytes && layers > 2) {
    layers = std::max<int64_t>(2, layers / 2);
    RT_TRY_SET(deep, lone(layers));
  }
  if (bytes(deep) > kMaxModelBytes) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("two layers of {} take {} bytes here: too large to calibrate on this machine; --search "
                             "and --machine reckon with data sheets",
                             plan.recipe.name, bytes(deep))};
  }
  RT_TRY_SET(const Plan shallow, lone(1));
  RT_TRY_SET(const ModelTimes many, time_model(deep, workers, threads));
  RT_TRY_SET(const ModelTimes one, time_model(shallow, workers, threads));
  ShapeTimes shape;
  const auto by = static_cast<double>(layers - 1);
  shape.layer_forward_ms = std::max(0.0, (many.forward_ms - one.forward_ms) / by);
  shape.layer_backward_ms = std::max(0.0, (many.backward_ms - one.backward_ms) / by);
  shape.ends_forward_ms = std::max(0.0, one.forward_ms - shape.layer_forward_ms);
  shape.ends_backward_ms = std::max(0.0, one.backward_ms - shape.layer_backward_ms);
  shape.layer_traffic = scaled_difference(many.traffic, one.traffic, layers - 1);
  shape.ends_traffic = scaled_difference(one.traffic, shape.layer_traffic, 1);
  RT_TRY(time_elements(plan, workers, threads, &shape));
  RT_TRY(time_comm(plan, &shape));
  calibration->shapes[shape_key(plan, cores)] = shape;
  return {};
}

}  // namespace cairn::tools
