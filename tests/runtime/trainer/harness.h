#pragma once
// Trains tiny models with ranks as threads and records what happened: losses, final state as whole logical tensors.

#include <omp.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/thread_world.h"
#include "runtime/core/random.h"
#include "runtime/core/word_sums.h"
#include "runtime/nn/kernel_scratch.h"
#include "runtime/trainer/trainer.h"
#include "tests/support/temp_dir.h"

namespace cairn::test {

/// A uint16 token file of `count` tokens below `vocab` with some structure to learn, made once per process and size.
inline std::string token_file(int64_t count, int64_t vocab, const std::string& tag = "a") {
  static const testing::TempDir dir("tokens");
  const auto path = dir / (tag + "-" + std::to_string(count) + "-" + std::to_string(vocab));
  if (!std::filesystem::exists(path)) {
    std::vector<uint16_t> tokens(count);
    const uint64_t key = stream_key(11, tag);
    for (int64_t i = 0; i < count; ++i) {
      const double u = uniform_at(key, i);
      tokens[i] = static_cast<uint16_t>(u < 0.7 && i > 0 ? (tokens[i - 1] * 5 + 3) % vocab
                                                         : mix64(key ^ static_cast<uint64_t>(i)) % vocab);
    }
    std::FILE* file = std::fopen(path.c_str(), "wb");
    std::fwrite(tokens.data(), 2, tokens.size(), file);
    std::fclose(file);
  }
  return path.string();
}

inline Recipe tiny_recipe(bool llama, bool tied) {
  Recipe r;
  r.name = "tiny";
  r.seed = 7;
  r.stop = {Span::Unit::kSteps, 20};
  r.model = {.layers = 4, .width = 32, .heads = 4, .kv_heads = 4, .head_dim = 8, .ffn = 64, .context = 16, .vocab = 65};
  if (llama) {
    r.model.heads = 8;
    r.model.head_dim = 4;
    r.model.positions = Positions::kRotary;
    r.model.norm = NormKind::kRmsNorm;
    r.model.activation = Activation::kSwiGlu;
    r.model.bias = false;
    r.model.ffn = 48;
  }
  r.model.tied_embeddings = tied;
  r.data.sources = {{.kind = DataSource::Kind::kTokenFile,
                     .name = "a",
                     .path = token_file(4000, 65, "a"),
                     .dtype = "uint16",
                     .weight = 0.7},
                    {.kind = DataSource::Kind::kTokenFile,
                     .name = "b",
                     .path = token_file(3000, 65, "b"),
                     .dtype = "uint16",
                     .weight = 0.3}};
  r.batch = {.samples = 16, .micro = 1};
  r.optimizer = {.peak_lr = 3e-3,
                 .lr = {{LrStage::Kind::kWarmup, {Span::Unit::kSteps, 5}, 0}, {LrStage::Kind::kCosine, {}, 3e-4}},
                 .weight_decay = 0.1,
                 .clip = 1.0};
  return r;
}

/// `recipe` of so many steps. Where its warm-up would not be over by then it ends with the run, at the rate it has come
/// to: each step has the rate that it would have in a longer run.
inline void stop_after(Recipe& recipe, int64_t steps) {
  recipe.stop = {Span::Unit::kSteps, static_cast<double>(steps)};
  std::vector<LrStage>& stages = recipe.optimizer.lr;
  if (stages.empty() || stages[0].over.value < recipe.stop.value) return;
  recipe.optimizer.peak_lr *= recipe.stop.value / stages[0].over.value;
  stages = {{LrStage::Kind::kWarmup, recipe.stop, 0}};
}

/// The state of a whole job, gathered from the primary pieces: (kind, tensor) -> row-major floats.
using GlobalState = std::map<std::pair<trainer::StateKind, int64_t>, std::vector<float>>;

/// Keeps the last snapshot of all ranks in memory; restores from it when asked to. With banks it is as a hook with
/// shared memory: several banks, written in turn, and weights, all of its own.
class MemoryHook : public trainer::CheckpointHook {
 public:
  struct Shared {
    std::mutex mutex;
    const Plan* plan = nullptr;
    GlobalState state;
    std::optional<trainer::TrainPosition> position;  // restore from here when set
    int64_t stop_after = 0;                          // 0: at the end
    int64_t banks = 0;
    Pager* pager = nullptr;
    CopyGate* gate = nullptr;        // then the trainer's one slot is updated in place, and has no checksums
    std::vector<int64_t> condemned;  // by each rank
  };
  explicit MemoryHook(Shared& shared) : shared_(shared) {}

  Result<trainer::StateMemory> memory(std::span<const trainer::StateTensor> saved,
                                      std::span<const trainer::StateTensor>, int64_t weight_bytes) override {
    trainer::StateMemory out;
    out.gate = shared_.gate;
    if (shared_.banks == 0 && shared_.gate == nullptr) return out;
    const auto place = [&](int64_t bytes) {  // what a dead process left there: not zero
      std::byte* const at = reinterpret_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
      std::memset(at, 0x5a, bytes);
      owned_.emplace_back(at);
      return at;
    };
    for (int64_t bank = 0; bank < shared_.banks; ++bank) {
      auto& tensors = out.banks.emplace_back();
      for (const trainer::StateTensor& tensor : saved) tensors.emplace_back(place(tensor.bytes));
    }
    weights_ = place(weight_bytes);
    std::memset(weights_, 0, weight_bytes);  // rows of padding are never written
    out.weights = DevicePtr(weights_);
    out.pager = shared_.pager;
    return out;
  }
  Result<std::optional<trainer::Restored>> restore(std::span<const trainer::StateTensor> state) override {
    if (!shared_.position) return std::optional<trainer::Restored>{};
    for (const trainer::StateTensor& piece : state) copy(piece, false);
    return std::optional<trainer::Restored>({.position = *shared_.position});
  }
  Result<int64_t> next_bank(int64_t current) override {
    return shared_.banks == 0 ? current : (current + 1) % shared_.banks;
  }
  Status begin_update(int64_t bank, int64_t step) override {
    written_ = bank;
    begun_ = step;
    return {};
  }
  Result<trainer::StepOrder> decide(const trainer::TrainPosition& position, bool last) override {
    const bool stop = last || position.step == shared_.stop_after;
    return trainer::StepOrder{.stop = stop, .snapshot = stop};
  }
  Status snapshot(const trainer::StepOrder&, const trainer::TrainPosition& position, int64_t bank,
                  std::span<const trainer::StateTensor> state, std::span<const uint64_t> sums) override {
    const std::lock_guard lock(shared_.mutex);
    RT_CHECK(bank == written_ && position.step == begun_, "bank {} of step {}", bank, position.step);
    size_t k = 0;
    for (const trainer::StateTensor& piece : state) {
      if (!piece.primary) continue;
      RT_CHECK(shared_.gate != nullptr || sums[k] == word_sums(address_of(piece.data), piece.bytes / 4),
               "the checksum of a tensor");
      ++k;
      copy(piece, true);
    }
    RT_CHECK(k == sums.size());
    saved_ = position;
    return {};
  }
  void condemn(int64_t step) override {
    const std::lock_guard lock(shared_.mutex);
    shared_.condemned.push_back(step);
  }
  Status finish() override { return {}; }
  std::optional<trainer::TrainPosition> saved() const { return saved_; }
  std::byte* weights() const { return weights_; }  // with banks

 private:
  void copy(const trainer::StateTensor& piece, bool save) {
    const Shape shape = shared_.plan->state_kinds().shape_of(piece.kind, shared_.plan->tensors[piece.tensor]).value();
    std::vector<float>& whole = shared_.state[{piece.kind, piece.tensor}];
    whole.resize(count_elems(shape));
    const int64_t width = piece.box.extent(piece.box.dims() - 1);
    std::vector<int64_t> index = piece.box.lo;
    float* const data = address_of(piece.data.as<float>());
    for (int64_t done = 0; done < piece.box.count_elems(); done += width, ++index[0]) {
      float* at = whole.data() + flat_offset(shape, index);
      save ? std::memcpy(at, data + done, width * 4) : std::memcpy(data + done, at, width * 4);
    }
  }
  struct Freer {
    void operator()(std::byte* p) const { std::free(p); }
  };
  Shared& shared_;
  std::vector<std::unique_ptr<std::byte, Freer>> owned_;
  std::byte* weights_ = nullptr;
  int64_t written_ = -1, begun_ = 0;
  std::optional<trainer::TrainPosition> saved_;
};

struct Trained {
  std::vector<double> losses, norms, valid, max_scores, mtp_losses;
  std::vector<std::vector<std::pair<std::string, double>>> source_losses;
  std::vector<std::vector<telemetry::OutlierSample>> outliers;
  std::vector<telemetry::StepMetrics> steps;
  GlobalState state;
  trainer::TrainPosition position;
  std::vector<int64_t> allocated_bytes;            // per rank
  std::vector<std::vector<GroupTraffic>> traffic;  // per rank
};

/// Trains on tp * pp * dp threads; `from` resumes. Any rank's error is returned.
/// `make_engine`, called on each rank's own thread, replaces the thread world's engine.
using MakeEngine = std::function<Result<std::unique_ptr<comm::Engine>>(int64_t rank)>;

/// What few tests ask for besides.
struct Extra {
  bool try_end = false;
  std::function<void(int64_t rank, int64_t step, const char* phase, std::byte* weights)> on_phase;
  std::vector<int64_t>* condemned = nullptr;  // what the ranks have condemned
  CopyGate* gate = nullptr;                   // MemoryHook::Shared
  bool keeps_norms = false;                   // Plan::keeps_norms
  std::vector<data::ScoredText> texts;        // Environment::texts
  int64_t texts_left_out_on_last = 0;         // of them, on the last rank
  std::function<std::vector<telemetry::TaskNumbers>(std::span<const data::TextScore>)> tasks_of;
};

inline Result<Trained> train_on_threads(const Recipe& recipe, int64_t world, const Trained* from = nullptr,
                                        int64_t stop_after = 0, const MakeEngine& make_engine = {}, int64_t banks = 0,
                                        Pager* pager = nullptr, const Extra& extra = {}) {
  RT_TRY_SET(Plan plan, make_plan(recipe, world));
  plan.keeps_norms = extra.keeps_norms;
  MemoryHook::Shared shared{
      .plan = &plan, .stop_after = stop_after, .banks = banks, .pager = pager, .gate = extra.gate};
  if (from != nullptr) {
    shared.state = from->state;
    shared.position = from->position;
  }
  comm::ThreadWorld threads_world(world, comm::Options{.deadline_ms = 60000});
  Trained out;
  std::vector<std::unique_ptr<comm::Engine>> engines;
  for (int64_t rank = 0; rank < world; ++rank) {
    engines.push_back(make_engine ? nullptr : threads_world.engine(rank));
  }
  std::vector<std::optional<Result<trainer::Outcome>>> outcomes(world);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      omp_set_num_threads(1);
      if (make_engine) {
        Result<std::unique_ptr<comm::Engine>> made = make_engine(rank);
        if (!made.ok()) {
          outcomes[rank].emplace(made.error());
          return;
        }
        engines[rank] = std::move(made).value();
      }
      MemoryHook hook(shared);
      trainer::Environment env{.plan = plan, .rank = rank, .engine = *engines[rank], .hook = hook};
      env.try_end = extra.try_end;
      env.texts = extra.texts;
      if (rank == world - 1) env.texts = env.texts.first(extra.texts.size() - extra.texts_left_out_on_last);
      env.tasks_of = extra.tasks_of;
      if (extra.on_phase) {
        env.on_phase = [&](int64_t step, const char* phase) { extra.on_phase(rank, step, phase, hook.weights()); };
      }
      if (rank == 0) {
        env.on_step = [&](const telemetry::StepMetrics& metrics) {
          out.losses.push_back(metrics.loss);
          out.norms.push_back(metrics.grad_norm);
          out.source_losses.push_back(metrics.source_loss);
          out.outliers.push_back(metrics.outliers);
          out.steps.push_back(metrics);
          if (metrics.mtp_loss) out.mtp_losses.push_back(*metrics.mtp_loss);
          if (metrics.max_attention_score) out.max_scores.push_back(*metrics.max_attention_score);
          if (metrics.valid_loss) out.valid.push_back(*metrics.valid_loss);
        };
      }
      outcomes[rank].emplace(trainer::run(env));
      if (!outcomes[rank]->ok()) engines[rank].reset();  // tells the others
      if (rank == 0 && hook.saved()) out.position = *hook.saved();
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (extra.condemned != nullptr) *extra.condemned = shared.condemned;
  for (auto& outcome : outcomes) {
    if (!outcome->ok()) return std::move(*outcome).error();
    out.allocated_bytes.push_back(outcome->value().allocated_bytes);
    CHECK(outcome->value().scratch_bytes == nn::kernel_scratch(plan, std::ssize(out.allocated_bytes) - 1).caller);
    out.traffic.push_back(std::move(outcome->value().traffic));
  }
  out.state = std::move(shared.state);
  return out;
}

}  // namespace cairn::test
