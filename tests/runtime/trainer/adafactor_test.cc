// Adafactor: the update of every layout against the published formulas on whole tensors, and whole training runs.
//
// Tolerance of an update: 2e-6 of the largest step, since a step is a product of three rounded floats.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "runtime/optim/sharded_optimizer.h"
#include "runtime/plan/activations.h"
#include "runtime/trainer/initial.h"
#include "runtime/trainer/state.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/runtime/trainer/plan_check.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

/// Shazeer & Stern 2018, algorithms 4 to 6 and 8, in double on a whole tensor, with decoupled weight decay; the first
/// moment is of the steps as T5X, fairseq and transformers have it.
struct Reference {
  int64_t rows = 0, cols = 0;  // rows 0: a vector
  std::vector<double> weight, row, col, avg;

  void update(const OptimizerConfig& o, double lr, double decay, int64_t t, const std::vector<double>& grad) {
    const double keep = 1 - std::pow(static_cast<double>(t), -o.decay_power);
    const size_t count = weight.size();
    std::vector<double> row_now(row.size(), 0.0), col_now(col.size(), 0.0), step(count);
    for (size_t i = 0; i < count; ++i) {
      const double square = grad[i] * grad[i] + 1e-30;
      if (rows > 0) row_now[i / cols] += square / static_cast<double>(cols);
      col_now[i % cols] += square / static_cast<double>(std::max<int64_t>(1, rows));
    }
    for (size_t i = 0; i < row.size(); ++i) row[i] = keep * row[i] + (1 - keep) * row_now[i];
    for (size_t i = 0; i < col.size(); ++i) col[i] = keep * col[i] + (1 - keep) * col_now[i];
    double mean = 0, step2 = 0, weight2 = 0;
    for (const double r : row) mean += r / static_cast<double>(rows);
    for (size_t i = 0; i < count; ++i) {
      const double v = rows > 0 ? row[i / cols] * col[i % cols] / mean : col[i];
      step[i] = grad[i] / std::sqrt(v);
      step2 += step[i] * step[i];
      weight2 += weight[i] * weight[i];
    }
    const double n = static_cast<double>(count);
    double rate = lr / (o.update_clip > 0 ? std::max(1.0, std::sqrt(step2 / n) / o.update_clip) : 1.0);
    if (o.scale_parameter) rate *= std::max(o.least_scale, std::sqrt(weight2 / n));
    for (size_t i = 0; i < count; ++i) {
      double moved = rate * step[i];
      if (o.beta1 > 0) moved = avg[i] = o.beta1 * avg[i] + (1 - o.beta1) * moved;
      weight[i] -= lr * decay * weight[i] + moved;
    }
  }
};

struct Layout {
  int64_t tp = 1, pp = 1, dp = 1;
  int zero = 0;
  int64_t shard = 0;
  bool sequence_parallel = false;
  int64_t ep = 1, cp = 1;
  PipelineKind schedule = PipelineKind::k1F1B;
  int64_t world() const { return tp * pp * dp * cp; }
  std::string text() const {
    return fmt::format("tp {} pp {} dp {} zero {} shard {} sp {} ep {} cp {} {}", tp, pp, dp, zero, shard,
                       sequence_parallel, ep, cp, schedule_name(schedule));
  }
};

Recipe with(Recipe recipe, const Layout& l) {
  recipe.mesh.tp = l.tp;
  recipe.mesh.pp = l.pp;
  recipe.mesh.dp = l.dp;
  recipe.mesh.ep = l.ep;
  recipe.mesh.cp = l.cp;
  recipe.mesh.shard = l.shard;
  recipe.mesh.sequence_parallel = l.sequence_parallel;
  recipe.mesh.virtual_stages = l.schedule == PipelineKind::kZbV ? 2 : 1;
  recipe.schedule = l.schedule;
  recipe.optimizer.zero = l.zero;
  recipe.optimizer.bucket = 4000;  // parts of tensors
  return recipe;
}

Recipe adafactor_recipe(bool llama, bool tied) {
  Recipe recipe = tiny_recipe(llama, tied);
  recipe.optimizer.kind = OptimizerKind::kAdafactor;
  recipe.optimizer.peak_lr = 6e-2;
  recipe.optimizer.beta1 = 0;
  return recipe;
}

const std::vector<Layout> kLayouts = {{},
                                      {.tp = 4},
                                      {.dp = 4, .zero = 1},
                                      {.dp = 4, .zero = 0},
                                      {.dp = 4, .zero = 3, .shard = 2},
                                      {.tp = 2, .pp = 2, .dp = 2, .zero = 1, .sequence_parallel = true},
                                      {.pp = 4, .dp = 2, .zero = 2},
                                      {.pp = 2, .dp = 2, .zero = 1, .schedule = PipelineKind::kZbV},
                                      {.tp = 2, .dp = 2, .zero = 3, .cp = 2}};

double gradient(const Plan& plan, int64_t tensor, int64_t flat, int64_t t) {  // rows, columns of unlike sizes
  const int64_t cols = plan.tensors[tensor].shape.back();
  const double size = std::exp(0.7 * static_cast<double>(flat % cols % 5) - 0.5 * static_cast<double>(flat / cols % 7));
  return 1e-3 * size *
         static_cast<double>(normal_at(stream_key(static_cast<uint64_t>(t), plan.tensors[tensor].name), flat));
}

/// Three updates on every rank, with the gradients above where the rank's shards are; the primary state afterwards.
GlobalState update_on_threads(const Recipe& recipe, int64_t world, float grad_scale) {
  const Plan plan = make_plan(recipe, world).value();
  comm::ThreadWorld threads_world(world, comm::Options{.deadline_ms = 60000});
  GlobalState out;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      omp_set_num_threads(1);
      const auto engine = threads_world.engine(r);
      const RankPlan rank = plan.rank(r);
      const std::unique_ptr<Stream> stream = make_cpu_stream();
      const Mesh& mesh = plan.mesh;
      trainer::TrainState state = trainer::TrainState::allocate(plan, rank, {}, Device{}).value();
      state.initialize(*stream, plan, rank);
      const auto group = [&](const char* name, const std::vector<int64_t>& ranks) {
        return engine->group(name, ranks).value();
      };
      std::vector<int64_t> everyone(world);
      for (int64_t k = 0; k < world; ++k) everyone[k] = k;
      const auto tp = group("tp", mesh.group(MeshAxis::kTp, r));
      const auto shard = group("shard", mesh.shard_group(r, plan.shard_size()));
      const auto replica = group("replica", mesh.replica_group(r, plan.shard_size()));
      const auto activations = group("activations", mesh.group(MeshAxis::kPp, r));
      std::unique_ptr<comm::Comm> expert_shard, expert_replica;
      if (mesh.ep() > 1) {
        expert_shard = group("es", mesh.shard_group(r, plan.shard_size(true)));
        expert_replica = group("er", mesh.replica_group(r, plan.shard_size(true), true));
      }
      const auto all = group("world", everyone);
      optim::ShardedOptimizer optimizer(*stream, plan, rank,
                                        {.tp = tp.get(),
                                         .activations = activations.get(),
                                         .shard = shard.get(),
                                         .replica = replica.get(),
                                         .expert_shard = expert_shard.get(),
                                         .expert_replica = expert_replica.get()},
                                        state.arrays());
      const auto fill = [&](int64_t flat_begin, int64_t grad_at, int64_t count, int64_t t) {
        const auto next = std::partition_point(rank.tensors.begin(), rank.tensors.end(),
                                               [&](const LocalTensor& l) { return l.offset <= flat_begin; });
        const LocalTensor& local = *std::prev(next);
        const Shape& shape = plan.tensors[local.tensor].shape;
        for (int64_t k = 0; k < count; ++k) {
          const int64_t at = flat_begin + k - local.offset, width = local.shape.back();
          std::vector<int64_t> index = {local.box.lo[0] + at};
          if (shape.size() > 1) index = {local.box.lo[0] + at / width, local.box.lo[1] + at % width};
          address_of(state.arrays().grads)[grad_at + k] =
              static_cast<float>(gradient(plan, local.tensor, flat_offset(shape, index), t));
        }
      };
      for (int64_t t = 1; t <= 3; ++t) {
        for (const StatePiece& p : rank.pieces) fill(p.flat_offset, rank.grad_offset(p), p.count_elems(), t);
        const Status updated =
            optimizer.update({.number = t, .lr = 0.03, .gradients = {.gradient_scale = grad_scale}}, *all);
        RT_CHECK(updated.ok(), "{}", updated.ok() ? "" : updated.error().message);
      }
      const std::lock_guard lock(mutex);
      for (const trainer::StateTensor& item : state.tensors(plan, rank, 0)) {
        const Shape shape = plan.state_kinds().shape_of(item.kind, plan.tensors[item.tensor]).value();
        std::vector<float>& whole = out[{item.kind, item.tensor}];
        whole.resize(count_elems(shape), NAN);
        const auto* data = address_of(item.data.as<const float>());
        std::vector<int64_t> index = item.box.lo;
        const int64_t width = item.box.extent(item.box.dims() - 1);
        for (int64_t done = 0; done < item.box.count_elems(); done += width, ++index[0]) {
          float* const at = whole.data() + flat_offset(shape, index);
          // What others save and this rank keeps is the same.
          for (int64_t k = 0; k < width; ++k) {
            RT_CHECK(std::isnan(at[k]) || at[k] == data[done + k], "{} of {} differs between ranks",
                     static_cast<int>(item.kind), plan.tensors[item.tensor].name);
            at[k] = data[done + k];
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return out;
}

bool same_bits(const GlobalState& a, const GlobalState& b) {
  return a.size() == b.size() && std::all_of(a.begin(), a.end(), [&](const auto& entry) {
           const auto other = b.find(entry.first);
           return other != b.end() && other->second.size() == entry.second.size() &&
                  std::memcmp(entry.second.data(), other->second.data(), entry.second.size() * 4) == 0;
         });
}

void check_against_reference(const Recipe& recipe, int64_t world) {
  constexpr float kScale = 0.75F;
  const Plan plan = make_plan(recipe, world).value();
  const GlobalState got = update_on_threads(recipe, world, kScale);
  for (size_t t = 0; t < plan.tensors.size(); ++t) {
    const TensorSpec& spec = plan.tensors[t];
    if (spec.balances) continue;
    const auto tensor = static_cast<int64_t>(t);
    CAPTURE(spec.name);
    Reference want;
    want.cols = spec.shape.back();
    want.rows = spec.shape.size() > 1 ? spec.shape[0] : 0;
    std::vector<float> initial(count_elems(spec.shape));
    trainer::initial_weights(plan, tensor, Box::whole(spec.shape), initial.data());
    want.weight.assign(initial.begin(), initial.end());
    want.row.assign(want.rows, 0.0);
    want.col.assign(want.cols, 0.0);
    want.avg.assign(initial.size(), 0.0);
    const double decay = spec.decay ? recipe.optimizer.weight_decay : 0;
    for (int64_t step = 1; step <= 3; ++step) {
      std::vector<double> grad(initial.size());
      for (size_t i = 0; i < grad.size(); ++i)
        grad[i] =
            kScale * static_cast<double>(static_cast<float>(gradient(plan, tensor, static_cast<int64_t>(i), step)));
      want.update(recipe.optimizer, 0.03, decay, step, grad);
    }
    double moved = 0, worst = 0;
    const std::vector<float>& weight = got.at({StateKind::kWeight, tensor});
    for (size_t i = 0; i < initial.size(); ++i) {
      moved = std::max(moved, std::abs(want.weight[i] - static_cast<double>(initial[i])));
      worst =
          std::max(worst, std::abs(want.weight[i] - static_cast<double>(weight[i])) - 2e-7 * std::abs(want.weight[i]));
    }
    CHECK(moved > 1e-6);
    CHECK(worst < 2e-6 * moved);
    const auto close = [&](StateKind kind, const std::vector<double>& wanted) {
      const std::vector<float>& values = got.at({kind, tensor});
      REQUIRE(values.size() == wanted.size());
      for (size_t i = 0; i < wanted.size(); ++i)
        REQUIRE(static_cast<double>(values[i]) == doctest::Approx(wanted[i]).epsilon(1e-6));
    };
    if (want.rows > 0) {
      close(StateKind::kExpAvgSqRow, want.row);
      close(StateKind::kExpAvgSqCol, want.col);
    } else {
      close(StateKind::kExpAvgSq, want.col);
    }
    CHECK(got.contains({StateKind::kExpAvg, tensor}) == (recipe.optimizer.beta1 > 0));
  }
}

}  // namespace

TEST_SUITE("runtime/trainer/adafactor") {
  TEST_CASE("the reference is torch.optim.Adafactor") {  // PyTorch 2.15, three steps of a matrix and a vector
    OptimizerConfig o;
    o.beta1 = 0;
    Reference matrix{3, 4, std::vector<double>(12), std::vector<double>(3, 0.0), std::vector<double>(4, 0.0), {}};
    Reference vector{0, 4, std::vector<double>(4), {}, std::vector<double>(4, 0.0), {}};
    for (int64_t i = 0; i < 12; ++i)
      matrix.weight[i] = 0.1 * static_cast<double>((5 * (i / 4) + 3 * (i % 4)) % 7) - 0.25;
    for (int64_t j = 0; j < 4; ++j) vector.weight[j] = 0.1 * static_cast<double>(3 * j % 7) - 0.25;
    for (int64_t t = 1; t <= 3; ++t) {
      std::vector<double> of_matrix(12), of_vector(4);
      for (int64_t i = 0; i < 12; ++i)
        of_matrix[i] = static_cast<double>(((3 * (i / 4) + 5 * (i % 4) + 2 * t) % 11 - 5) * (1 + i / 4)) * 0.02;
      for (int64_t j = 0; j < 4; ++j) of_vector[j] = static_cast<double>((5 * j + 2 * t) % 11 - 5) * 0.02;
      matrix.update(o, 0.05, 0.1, t, of_matrix);
      vector.update(o, 0.05, 0.1, t, of_vector);
    }
    const double of_matrix[12] = {-0.232692,  0.04676684,  0.37550259, -0.08037113, 0.22945012,  -0.13911949,
                                  0.14004502, -0.23090972, 0.03388201, 0.35240421,  -0.05962017, 0.26231277};
    const double of_vector[4] = {-0.23664851, 0.03870338, 0.36276448, -0.08867002};
    for (int64_t i = 0; i < 12; ++i) CHECK(std::abs(matrix.weight[i] - of_matrix[i]) < 1e-6);
    for (int64_t j = 0; j < 4; ++j) CHECK(std::abs(vector.weight[j] - of_vector[j]) < 1e-6);
  }

  TEST_CASE("three updates are the published formulas' on whole tensors, in every layout, padding or not") {
    for (const bool llama : {false, true}) {
      for (const Layout& layout : kLayouts) {
        CAPTURE(layout.text());
        Recipe recipe = with(adafactor_recipe(llama, !llama), layout);
        if (llama) recipe.model.kv_heads = 2;  // with tp 4 two ranks hold each
        check_against_reference(recipe, layout.world());
        recipe.optimizer.beta1 = 0.9;
        check_against_reference(recipe, layout.world());
      }
    }
    Recipe other = with(adafactor_recipe(false, false), {.tp = 2, .dp = 2, .zero = 1});
    other.optimizer.scale_parameter = false;
    other.optimizer.update_clip = 0.5;
    other.optimizer.decay_power = 0.5;
    check_against_reference(other, 4);
    other.optimizer.update_clip = 0;
    check_against_reference(other, 4);
    for (const Layout& layout : {Layout{.tp = 2, .dp = 4, .zero = 1, .sequence_parallel = true, .ep = 2},
                                 Layout{.dp = 4, .zero = 3, .ep = 4}, Layout{.dp = 4, .zero = 0, .ep = 2}}) {
      Recipe experts = with(adafactor_recipe(true, false), layout);
      experts.model.moe = {.experts = 4, .top_k = 2, .router = RouterKind::kSigmoid, .bias_rate = 0.001};
      CAPTURE(layout.text());
      check_against_reference(experts, layout.world());
    }
  }

  TEST_CASE("Adafactor learns, alike in every layout, as planned in memory and traffic, and resumes to the bit") {
    Recipe recipe = adafactor_recipe(false, true);
    recipe.optimizer.ema = 0.5;
    const auto serial = train_on_threads(recipe, 1).value();
    CHECK(serial.losses.back() < serial.losses.front() - 0.3);
    for (const Layout& layout : kLayouts) {
      CAPTURE(layout.text());
      const Recipe cut = with(recipe, layout);
      const auto got = train_on_threads(cut, layout.world());
      REQUIRE_OK(got);
      for (size_t k = 0; k < 20; ++k) CHECK(got.value().losses[k] == doctest::Approx(serial.losses[k]).epsilon(3e-5));
      const Plan plan = make_plan(cut, layout.world()).value();
      for (int64_t r = 0; r < layout.world(); ++r) {
        const RankPlan mine = plan.rank(r);
        CHECK(got.value().allocated_bytes[r] == mine.weight_bytes + mine.gathered_bytes + mine.grad_bytes +
                                                    mine.optimizer_bytes + largest_stage_buffers_bytes(plan, r) +
                                                    plan.boundary_buffers_bytes());
      }
      Recipe one = cut;
      one.stop.value = 1;
      check_step_traffic(one, layout.world());
      if (layout.world() > 4) continue;
      for (const int64_t banks : {0, 2, 3}) {  // in place, and from bank to bank; and the same bits in either
        const auto whole = train_on_threads(cut, layout.world(), nullptr, 0, {}, banks).value();
        const auto half = train_on_threads(cut, layout.world(), nullptr, 9, {}, banks).value();
        const auto rest = train_on_threads(cut, layout.world(), &half, 0, {}, banks).value();
        CHECK(same_bits(rest.state, whole.state));
        CHECK(same_bits(whole.state, got.value().state));
      }
    }
    const Plan plan = make_plan(recipe, 1).value();
    int64_t lines = 0;
    for (const TensorSpec& spec : plan.tensors)
      lines += spec.shape.size() > 1 ? spec.shape[0] + spec.shape[1] : spec.shape[0];
    CHECK(plan.checkpoint_bytes == (2 * plan.parameters + lines) * 4);
    // Stopped in one layout, taken up in another: to rounding.
    const auto half = train_on_threads(with(recipe, kLayouts[5]), 8, nullptr, 9).value();
    const auto rest = train_on_threads(with(recipe, kLayouts[4]), 4, &half).value();
    for (size_t k = 0; k < rest.losses.size(); ++k)
      CHECK(rest.losses[k] == doctest::Approx(serial.losses[9 + k]).epsilon(3e-5));
  }

  TEST_CASE(
      "a step that overflows leaves rows and columns as they are; experts, groups and QK clip are as with AdamW") {
    Recipe recipe = adafactor_recipe(false, true);
    recipe.precision = Precision::kF16;
    recipe.loss_scale = {.initial = 0x1p40, .window = 4, .hysteresis = 1, .min = 1};
    for (const int64_t banks : {0, 2}) {
      const auto skipped = train_on_threads(recipe, 1, nullptr, 3, {}, banks).value();
      CHECK(skipped.position.loss_scale.skipped == 3);
      for (const auto& [key, values] : skipped.state) {
        if (is_moment(key.first)) CHECK(std::all_of(values.begin(), values.end(), [](float x) { return x == 0; }));
      }
    }
    Recipe experts = adafactor_recipe(true, false);
    experts.model.moe = {.experts = 4, .top_k = 2, .router = RouterKind::kSigmoid, .bias_rate = 0.01};
    experts.optimizer.groups = {{.tensors = "layers.0.*", .lr = 0}};
    experts.optimizer.qk_clip = 50;
    experts.stop = {Span::Unit::kSteps, 6};
    const auto serial = train_on_threads(experts, 1).value();
    for (const Layout& layout : {Layout{.tp = 2, .dp = 2, .zero = 1, .sequence_parallel = true, .ep = 2},
                                 Layout{.dp = 4, .zero = 3, .ep = 2}, Layout{.pp = 2, .dp = 4, .zero = 2, .ep = 4}}) {
      CAPTURE(layout.text());
      const Recipe cut = with(experts, layout);
      const auto got = train_on_threads(cut, layout.world());
      REQUIRE_OK(got);
      for (size_t k = 0; k < 6; ++k) CHECK(got.value().losses[k] == doctest::Approx(serial.losses[k]).epsilon(3e-5));
      Recipe one = cut;
      one.stop.value = 1;
      one.optimizer.lr.clear();
      check_step_traffic(one, layout.world());
    }
    const Plan plan = make_plan(experts, 1).value();
    for (size_t t = 0; t < plan.tensors.size(); ++t) {
      if (!plan.tensors[t].name.starts_with("layers.0.") || plan.tensors[t].balances) continue;
      std::vector<float> initial(count_elems(plan.tensors[t].shape));
      const auto tensor = static_cast<int64_t>(t);
      trainer::initial_weights(plan, tensor, Box::whole(plan.tensors[t].shape), initial.data());
      CHECK(serial.state.at({StateKind::kWeight, tensor}) == initial);
    }
  }

  TEST_CASE("Adafactor refuses one order of sums for every layout, naming what is possible") {
    Recipe recipe = adafactor_recipe(false, true);
    recipe.deterministic = Deterministic::kLayout;
    const auto plan = make_plan(recipe, 1);
    REQUIRE(!plan.ok());
    CHECK(plan.error().message.find("deterministic = \"run\"") != std::string::npos);
  }
}
