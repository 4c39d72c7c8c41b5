#include "runtime/trainer/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/config/skipped_positions.h"
#include "runtime/core/exact_sum.h"
#include "runtime/core/log.h"
#include "runtime/core/random.h"
#include "runtime/data/dataset.h"
#include "runtime/data/loss_weights.h"
#include "runtime/data/objective.h"
#include "runtime/data/repeats.h"
#include "runtime/data_parallel/data_parallel.h"
#include "runtime/json/json.h"
#include "runtime/kernels/scratch.h"
#include "runtime/nn/kernel_scratch.h"
#include "runtime/nn/mtp.h"
#include "runtime/nn/stage_model.h"
#include "runtime/optim/lr_schedule.h"
#include "runtime/optim/sharded_optimizer.h"
#include "runtime/pipeline/executor.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/boundary.h"
#include "runtime/plan/communication.h"
#include "runtime/telemetry/sample_watch.h"
#include "runtime/telemetry/trace.h"
#include "runtime/trainer/replicas.h"
#include "runtime/trainer/ruin.h"
#include "runtime/trainer/state.h"
#include "runtime/trainer/step_guard.h"
#include "runtime/trainer/work_shapes.h"

namespace cairn::trainer {
namespace {

using Clock = std::chrono::steady_clock;
using telemetry::Phase;
using telemetry::PhaseScope;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// The groups of one rank, created in the same order everywhere.
struct Groups : comm::RankGroups {
  std::vector<std::unique_ptr<comm::Comm>> owned;
  std::vector<std::pair<std::string, const comm::Comm*>> named;

  static Result<Groups> make(const Plan& plan, int64_t rank, comm::Engine& engine) {
    const Mesh& mesh = plan.mesh;
    Groups out;
    const auto keep = [&](comm::Comm*& made, std::string_view name,
                          Result<std::unique_ptr<comm::Comm>> group) -> Status {
      RT_TRY_SET(std::unique_ptr<comm::Comm> owned, std::move(group));
      made = owned.get();
      out.owned.push_back(std::move(owned));
      out.named.emplace_back(name, made);
      return {};
    };
    const auto group = [&](comm::Comm*& made, std::string_view name, const std::vector<int64_t>& ranks) {
      return keep(made, name, engine.group(name, ranks));
    };
    RT_TRY(group(out.tp, kTpGroup, mesh.group(MeshAxis::kTp, rank)));
    if (plan.kv_copies() > 1) RT_TRY(group(out.kv, kKvGroup, plan.kv_group(rank)));
    const int64_t shards = plan.shard_size();
    RT_TRY(group(out.shard, shards == mesh.replicas() ? kDpGroup : kShardGroup, mesh.shard_group(rank, shards)));
    RT_TRY(group(out.replica, shards == 1 ? kDpGroup : kReplicaGroup, mesh.replica_group(rank, shards)));
    if (mesh.cp() > 1) RT_TRY(group(out.cp, kContextGroup, mesh.group(MeshAxis::kCp, rank)));
    if (mesh.ep() > 1) {
      const int64_t divided = plan.shard_size(true);
      RT_TRY(group(out.expert_shard, kExpertShardGroup, mesh.shard_group(rank, divided)));
      RT_TRY(group(out.expert_replica, kExpertReplicaGroup, mesh.replica_group(rank, divided, true)));
      RT_TRY(group(out.ep, kExpertGroup, mesh.expert_group(rank)));
    }
    RT_TRY(group(out.activations, kForwardGroup, mesh.group(MeshAxis::kPp, rank)));
    RT_TRY(group(out.gradients, kBackwardGroup, mesh.group(MeshAxis::kPp, rank)));
    const std::vector<int64_t> ends = mesh.embedding_group(rank);
    if (std::find(ends.begin(), ends.end(), rank) == ends.end()) {
      RT_TRY(engine.no_group(kEmbeddingGroup));
    } else if (ends.size() > 1) {
      RT_TRY(group(out.embedding, kEmbeddingGroup, ends));
    }
    std::vector<int64_t> all(mesh.world());
    for (int64_t r = 0; r < mesh.world(); ++r) all[r] = r;
    RT_TRY(keep(out.world, kWorldGroup, engine.exact_group(kWorldGroup, all)));
    return out;
  }

  std::vector<GroupTraffic> traffic() const {
    std::vector<GroupTraffic> out;
    for (const auto& [name, comm] : named) {
      if (comm->size() > 1) out.push_back({name, comm->size(), comm->traffic()});
    }
    return out;
  }
};

/// Sums that the ranks add up over the world in one collective, exactly: no layout changes a bit of a loss or a norm.
struct WorldSums {
  std::vector<double> words;
  size_t at = 0;  // what take() returns next

  void put(const ExactSum& sum) {
    const auto add = sum.words();
    words.insert(words.end(), add.begin(), add.end());
  }
  void put(double integer) { words.push_back(integer); }
  double take() { return words[at++]; }
  std::array<double, ExactSum::kWords> take_words() {
    std::array<double, ExactSum::kWords> out;
    std::copy_n(&words[at], ExactSum::kWords, out.data());
    at += ExactSum::kWords;
    return out;
  }
  double take_sum() { return ExactSum::from(take_words()).value(); }
};

/// The loss of a sample, of which context-parallel ranks have parts: in whole units of 2^-20 nats, whose sum has the
/// same bits in any order. They serve to find the samples that are unlike others.
struct SampleSum {
  static constexpr double kUnits = 0x1p20;
  double units = 0;
  int64_t tokens = 0;
  void add(float token_loss, int32_t target) {
    if (target == kNoTarget) return;
    constexpr float kMost = 1e6f;
    const float loss = std::isfinite(token_loss) ? std::min(token_loss, kMost) : kMost;
    units += static_cast<double>(std::llrint(static_cast<double>(loss) * kUnits));
    ++tokens;
  }
};

/// Token losses of one source.
struct LossSum {
  ExactSum loss;
  int64_t tokens = 0;
  /// `of`: the row's data::MicroBatch::counts, or 0.
  void add(float token_loss, int32_t target, int32_t of = 0) {
    if (target == kNoTarget) return;
    loss.add(of > 0 ? static_cast<double>(token_loss) / of : static_cast<double>(token_loss));
    ++tokens;
  }
};

constexpr int64_t kHeldRows = 5;  // inputs, targets, positions, counts, channels

/// What runs while one stage of the batch (Plan::step_stages) lasts.
struct StageRun {
  Plan plan;
  RankPlan rank;
  uint64_t level;                             // level_key()
  std::vector<data::MicroBatch> loaded;       // all micro-batches of this rank's step
  TokenRuns tokens;                           // that this rank has of a sequence
  std::vector<std::vector<int32_t>> held;     // where those are not all, in order: kHeldRows of each micro-batch
  std::vector<std::vector<float>> weights;    // of this rank's rows, where a source weighs by sample
  std::vector<pipeline::MicroBatch> batches;  // views of them
  std::vector<uint64_t> dropout_keys;         // of each sequence of the step on this rank
  data_parallel::DataParallel data_parallel;
  std::vector<std::unique_ptr<nn::StageModel>> models;  // of the chunks
  std::unique_ptr<pipeline::Executor> executor;

  StageRun(Stream& stream, Plan of, int64_t world_rank, const comm::RankGroups& groups,
           const data_parallel::Memory& memory)
      : plan(std::move(of)),
        rank(plan.rank(world_rank)),
        level(level_key(plan)),
        data_parallel(stream, plan, rank, groups, memory) {
    loaded.resize(plan.micro_batches);
    batches.resize(plan.micro_batches);
    weights.resize(plan.micro_batches);
    tokens = TokenRuns::of_rank(plan.sequence_tokens, plan.mesh.cp(), rank.at.cp, plan.token_parts());
    if (!tokens.whole()) held.resize(kHeldRows * plan.micro_batches);
  }
};

/// What this rank's rows stand for, of all tokens of the sequences of a micro-batch.
const int32_t* keep_held(const TokenRuns& held, const std::vector<int32_t>& all, std::vector<int32_t>* out) {
  const int64_t sequences = std::ssize(all) / held.tokens;
  out->clear();
  for (int64_t row = 0; row < sequences * held.count; ++row) {
    const auto [sequence, position] = held.place(row, sequences);
    out->push_back(all[static_cast<size_t>(sequence * held.tokens + position)]);
  }
  return out->data();
}

class Run {
 public:
  Run(const Environment& env, RankPlan rank, Groups groups, TrainState state, data::Dataset dataset,
      data::Sampler sampler, std::optional<data::ValidationSet> validation)
      : env_(env),
        plan_(env.plan),
        rank_(std::move(rank)),
        groups_(std::move(groups)),
        state_(std::move(state)),
        dataset_(std::move(dataset)),
        sampler_(std::move(sampler)),
        by_sample_(data::sources_by_sample(env.plan.recipe.data)),
        documents_(by_sample_.size()),
        validation_(std::move(validation)),
        optimizer_(*stream_, plan_, rank_, groups_, state_.arrays()),
        recorder_(env.trace, env.rank,
                  fmt::format("rank {} (tp {}, dp {}, pp {}{})", env.rank, rank_.at.tp, rank_.at.dp, rank_.at.pp,
                              plan_.mesh.cp() > 1 ? fmt::format(", cp {}", rank_.at.cp) : "")) {}

  Result<Outcome> loop();
  /// Data-parallel collectives run beside this thread: an engine that is left must be given up.
  bool busy() const { return now_ != nullptr && now_->data_parallel.busy(); }

 private:
  Status start();
  /// Where the device has choices to make, they are made before the first step.
  Status make_choices();
  /// Makes `stage` of the batch the one that runs.
  Status enter(size_t stage);
  Status load_micro_batches(data::DataPart part, std::span<const data::SampleRef> samples);
  /// Adds up documents_ over the world, and weighs the rows of what is loaded by them.
  Status weigh_by_sample();
  /// data::MicroBatch::counts of this rank's rows; empty where no source weighs by sample.
  std::span<const int32_t> counts_of(int64_t micro_batch) const {
    if (by_sample_.empty()) return {};
    return now_->held.empty() ? now_->loaded[micro_batch].counts : now_->held[kHeldRows * micro_batch + 3];
  }
  /// data::MicroBatch::channels of this rank's rows; empty where no source has channels.
  std::span<const int32_t> channels_of(int64_t micro_batch) const {
    return now_->held.empty() ? now_->loaded[micro_batch].channels : now_->held[kHeldRows * micro_batch + 4];
  }
  /// The source of one of this rank's rows.
  size_t source_of(int64_t micro_batch, int64_t row) const {
    const Plan& plan = now_->plan;
    const int64_t pieces = plan.recipe.model.context / plan.sequence_tokens;  // sequences of a sample
    const int64_t sequence = now_->tokens.place(row, plan.recipe.batch.micro * pieces).sample;
    return static_cast<size_t>(now_->loaded[micro_batch].sources[sequence / pieces]);
  }
  /// Adds the losses of a micro-batch's rows to those of their sources.
  void add_losses(int64_t micro_batch, std::span<const float> token_losses, std::vector<LossSum>* of_source) const;
  bool weighs_by_sample(size_t source) const { return !by_sample_.empty() && by_sample_[source] != 0; }
  /// The sum of a source's losses over its tokens, from that of add_losses(), where by sample each document weighs 1.
  double over_tokens(size_t source, double sum, double tokens, double documents) const {
    return weighs_by_sample(source) ? sum / std::max(1.0, documents) * tokens : sum;
  }
  double documents_of(size_t source) const { return by_sample_.empty() ? 0 : documents_[source].documents; }
  /// The mean over tokens of all sources, whose losses forward passes have given, after a sum over the world.
  /// `documents` by source; `of_source` gets the mean of each. nullopt: no token counts.
  Result<std::optional<double>> mean_over_world(const std::vector<LossSum>& losses, std::span<const double> documents,
                                                std::string_view what,
                                                std::vector<std::pair<std::string, double>>* of_source);
  Status step(int64_t number);
  /// What forward and backward of a step give, summed over the world; the gradients lie where the update takes them.
  struct Pass {
    double loss = 0, norm = 0;
    int64_t masked = 0;                 // targets that repeats have cost
    optim::SquaredNorm squared_norm{};  // of which the norm is, as `gradients` says
    kernels::ClipNumbers gradients;
    std::optional<double> mtp_loss;  // the mean of the modules' losses
    std::vector<std::pair<std::string, double>> source_loss, channel_loss;
    std::vector<double> sample_loss;  // of each sample of the step; NaN where no token counts
    std::vector<double> words;        // of the exact sums: equal bits, equal result
    std::vector<double> own;          // this rank's part of them
    bool nothing_counts = false;      // no token of the batch is to be guessed: no loss, no gradient
    bool finite() const { return std::isfinite(loss) && std::isfinite(norm); }
  };
  /// `bank`: chosen here unless it is null, as the sums travel. Then the update is ordered here too, before the host
  /// waits, where that can be: updated_ says so.
  Result<Pass> pass(int64_t number, std::optional<int64_t>* bank);
  /// Tokens of this step that count, of those whose losses this rank counts.
  int64_t tokens_that_count() const;
  /// The update of `number` with what the pass's numbers are, before they are known. The slot that was chosen.
  Result<int64_t> update_unseen(int64_t number);
  Result<int64_t> choose_bank();
  Status begin_update(int64_t bank, int64_t number);
  /// The update of step `number` so far: its number for moments, its rate, slots.
  optim::Update update_of(int64_t number, int64_t bank) const;
  /// Loss or norm of `number` is not finite. Ok: it was not so when computed again, twice and with the same bits, which
  /// `found` is then.
  Status recompute(int64_t number, Pass* found);
  /// Position and metrics, once the step's work is ordered.
  void take_step(int64_t number, const Pass& found, double lr, double took_ms);
  /// Computes `number` again, on the same batch and weights, and once more where a rank has other numbers. `found`
  /// becomes the result that came twice, else the last of three.
  Result<telemetry::ComputedAgain> compute_again(int64_t number, Pass* found);
  /// Ranks whose own numbers differ between two passes; the same on every rank.
  Result<std::vector<int64_t>> differing(const Pass& a, const Pass& b);
  /// Compares the weights that the pass of `number` has read with those of other replicas. The metrics say what came.
  Status compare_replicas(int64_t number);
  /// Whether the update of `number` is left out, by watch.on_outlier or watch.skip_steps. The metrics say so.
  Result<bool> leaves_out(int64_t number, Pass* found);
  std::string without_targets() const;
  /// Whose doing it is: the error that ends the run.
  Error why_not_finite(int64_t number, const Pass& found);
  /// The mean loss of these samples with the present weights, forward alone.
  Result<double> forward_loss(std::span<const data::SampleRef> samples);
  void finish_trace(bool last);
  Result<std::optional<double>> evaluate();
  /// The micro-batches of the tasks' sequences from `first` on, as many as a step has room for.
  void load_texts(const data::TextRows& rows, int64_t first);
  /// Scores Environment::texts, if they are due and there is time for them.
  Status answer_tasks(int64_t number, bool last);
  Result<bool> has_time_for_tasks();
  /// Compares the ranks' texts: each host has files of its own.
  Status compare_texts();
  /// Counts the step's evaluation for watch.early_stop. Not nullopt: the run ends here.
  std::optional<telemetry::EarlyEnd> loses_patience(int64_t number);
  /// This rank's part of a loaded micro-batch becomes the one that runs.
  void take_loaded(int64_t micro_batch);
  Result<StepOrder> agree_on_order(bool last);
  /// The rank's next part of a step: told to who watches it, and its time counted.
  void phase(int64_t step, const char* what, Phase counted) {
    in_phase_.emplace(counted);
    env_.engine.at(step, what);
    if (env_.on_phase) env_.on_phase(step, what);
  }
  /// Adds the parts of all ranks; the same bits everywhere.
  Status add_over_world(std::vector<double>& values, std::string_view what) {
    return groups_.world->all_reduce(values.data(), static_cast<int64_t>(values.size()), DType::kF64,
                                     comm::ReduceOp::kSum, what);
  }
  /// By which gradients are too large.
  double loss_scale() const { return position_.loss_scale.scale > 0 ? position_.loss_scale.scale : 1.0; }
  /// Backward has weighed each loss as one of all tokens; with an objective that leaves some out they weigh more.
  kernels::ClipNumbers clip_numbers(double counted) const {
    return {.most = plan_.recipe.optimizer.clip,
            .gradient_scale = static_cast<double>(now_->plan.tokens_per_step) / counted,
            .loss_scale = loss_scale()};
  }
  /// The state is updated in place, where no other process reads it: at the start it may still lie in a snapshot. No
  /// guard may act on the step, and no mask may leave all of its tokens out.
  bool updates_unseen(int64_t number) const {
    return plan_.recipe.data.mask_repeats.period == 0 && state_.arrays().gate != nullptr && bank_ == 0 &&
           optimizer_.may_update_unseen() && !may_act(plan_.recipe.watch, number);
  }
  bool counts_losses() const { return rank_.head() && rank_.at.tp == 0; }
  bool decides() const { return groups_.world->rank() == env_.decides; }

  const Environment& env_;
  const Plan& plan_;
  const telemetry::WatchRules watch_rules_ = watch_rules(plan_);
  const std::unique_ptr<Stream> own_stream_ = env_.machine == nullptr ? make_cpu_stream() : nullptr;
  Stream* const stream_ = own_stream_ ? own_stream_.get() : &env_.machine->stream();  // forward, backward and update
  const std::unique_ptr<OpClock> clock_ = env_.on_op_times ? std::make_unique<OpClock>(*stream_) : nullptr;
  RankPlan rank_;
  Groups groups_;
  TrainState state_;
  data::Dataset dataset_;
  data::Sampler sampler_;
  std::vector<uint8_t> by_sample_;              // data::sources_by_sample()
  std::vector<data::DocumentCount> documents_;  // by source, of what is loaded, if some source weighs by sample
  int64_t masked_ = 0;                          // targets of what is loaded that repeats have cost, on their ranks
  std::vector<data::SampleRef> last_batch_;     // of the step before, in this process
  telemetry::SampleWatch sample_watch_{std::ssize(dataset_.sources)};
  std::optional<data::ValidationSet> validation_;
  optim::ShardedOptimizer optimizer_;
  std::unique_ptr<StageRun> now_;  // before what it runs on goes
  size_t stage_ = 0;
  std::vector<std::vector<StateTensor>> tensors_;  // by bank
  int64_t bank_ = 0;                               // holds the saved state of the last step
  double paused_ms_ = 0;                           // of this step: this rank stood still for checkpoints
  TrainPosition position_;
  telemetry::StepMetrics metrics_;
  telemetry::Recorder recorder_;
  std::optional<PhaseScope> in_phase_;
  telemetry::PaceMeter pace_;
  Clock::time_point computes_since_;  // the step's data; and until its gradients are complete
  int64_t waited_before_ns_ = 0;      // telemetry::waited_ns then
  double compute_ms_ = 0;
  Clock::time_point began_;           // the loop
  double tasks_ms_ = 0;               // that evaluations of tasks took since then
  std::optional<double> tasks_took_;  // the last one of them
  bool texts_compared_ = false;
  bool updated_ = false;  // the step's update was ordered before its numbers were known, and has written
  bool traced_ = false;   // on_trace was called
};

Status Run::enter(size_t stage) {
  if (now_ != nullptr && stage == stage_) return {};
  if (now_ != nullptr) RT_TRY(now_->data_parallel.settle());
  now_.reset();
  auto next = std::make_unique<StageRun>(*stream_, plan_.at(stage), env_.rank, groups_, state_.memory());
  const Plan& plan = next->plan;
  const ModelConfig& model = plan.recipe.model;
  if (model.embedding_dropout > 0 || model.attention_dropout > 0 || model.residual_dropout > 0) {
    next->dropout_keys.resize(plan.micro_batches * stage_dims(plan, next->rank).samples);
  }
  const int64_t bytes = stage_buffers_bytes(plan, next->rank);
  std::vector<nn::StageModel*> chunks;
  for (size_t chunk = 0; chunk < next->rank.chunks.size(); ++chunk) {
    RT_TRY_SET(auto made, nn::StageModel::make(*stream_, plan, next->rank, static_cast<int64_t>(chunk), groups_,
                                               state_.memory().used_weights(), state_.memory().used_grads(),
                                               state_.activations().first_bytes(bytes), &next->data_parallel));
    if (plan.recipe.optimizer.qk_clip > 0) made->note_max_scores(optimizer_.max_scores());
    chunks.push_back(made.get());
    next->models.push_back(std::move(made));
  }
  next->executor =
      std::make_unique<pipeline::Executor>(*stream_, plan.schedule(), boundary_tensor(plan), std::move(chunks),
                                           *groups_.activations, *groups_.gradients, *groups_.tp, state_.boundary());
  now_ = std::move(next);
  stage_ = stage;
  return {};
}

Status Run::start() {
  const Recipe& recipe = plan_.recipe;
  for (int64_t bank = 0; bank < std::ssize(state_.arrays().banks); ++bank) {
    tensors_.push_back(state_.tensors(plan_, rank_, bank));
  }

  RT_TRY_SET(std::optional<Restored> found, env_.hook.restore(tensors_[0]));
  if (found) {
    position_ = found->position;
    bank_ = found->bank;
    if (bank_ < 0 || bank_ >= std::ssize(state_.arrays().banks)) {
      return Error{ErrorCode::kInternal, fmt::format("restored from bank {}", bank_)};
    }
    if (!position_.sampler.empty()) {  // empty: imported weights, no data seen yet
      RT_TRY_SET(const data::SamplerState saved, data::sampler_state_from_json(position_.sampler));
      RT_TRY_SET(const data::Sampler::Spec spec, data::sampler_spec(dataset_, recipe));
      RT_TRY_SET(sampler_, data::Sampler::resume(spec, saved));
    } else {
      position_.seed = recipe.seed;
    }
  } else {
    position_ = TrainPosition{.seed = recipe.seed};
    state_.initialize(*stream_, plan_, rank_);
  }
  if (recipe.precision != Precision::kF16) {
    position_.loss_scale = {};
  } else if (position_.loss_scale.scale == 0) {
    position_.loss_scale = optim::initial_loss_scale(recipe.loss_scale);
  }
  position_.past = plan_.past;
  position_.sampler = data::to_json(sampler_.state());
  RT_TRY(data::check_state_fits(sampler_.state()));
  RT_TRY(enter(stage_of_step(plan_.step_stages, position_.step + 1)));
  if (found && found->weights_ready) return {};
  // Weights are made of masters that other ranks may still be filling.
  if (state_.arrays().peer_copies) RT_TRY(groups_.world->barrier("state of all ranks"));
  return now_->data_parallel.spread_weights(
      [this, bank = bank_](Stream& stream, const Bucket& bucket) { optimizer_.make_weights(stream, bank, bucket); },
      [] { return Status{}; });
}

Status Run::make_choices() {
  DeviceTuning* const tuning = env_.machine != nullptr ? env_.machine->tuning() : nullptr;
  const int64_t number = position_.step + 1;
  if (tuning == nullptr || number > plan_.end_step) return {};
  phase(number, "choice of products", Phase::kOther);
  const auto listed = [&]() -> Status {
    computes_since_ = Clock::now();
    waited_before_ns_ = telemetry::waited_ns;
    RT_TRY(load_micro_batches(data::DataPart::kTrain, sampler_.peek(now_->plan.recipe.batch.samples)));
    const Result<Pass> given = pass(number, nullptr);  // its gradients are left: the step computes them again
    return given.ok() ? Status() : Status(given.error());
  };
  return tune(*tuning, *groups_.world, env_.decides, env_.tuning, position_.step > 0, listed);
}

Status Run::load_micro_batches(data::DataPart part, std::span<const data::SampleRef> samples) {
  const Plan& plan = now_->plan;
  const Recipe& recipe = plan.recipe;
  const int64_t slice = recipe.batch.micro * plan.mesh.dp();
  const std::vector<data::SampleRef> filled = data::fill_rounds(samples, slice);
  const int64_t pieces = recipe.model.context / plan.sequence_tokens;  // sequences of a sample
  const bool drops = part == data::DataPart::kTrain && !now_->dropout_keys.empty();
  const bool tells = counts_losses() && rank_.at.cp == 0;  // others hold the same samples
  documents_.assign(by_sample_.size(), {});
  std::vector<data::DocumentCount> told_by_others = documents_;
  masked_ = 0;
  const uint64_t key = stream_key(recipe.seed, "dropout");
  uint64_t* at = now_->dropout_keys.data();
  for (int64_t k = 0; k < plan.micro_batches; ++k) {
    const auto mine = data::micro_batch_samples(filled, plan.mesh.dp(), rank_.at.dp, recipe.batch.micro, k);
    data::MicroBatch& loaded = now_->loaded[k];
    if (rank_.embedding() || rank_.head() || has_own_rows(recipe)) {
      RT_TRY(data::load_samples(dataset_, part, mine, recipe.model.context, &loaded));
      data::find_repeats(recipe.data.mask_repeats, &loaded);
      data::apply_objective(recipe.objective, recipe.seed, plan.sequence_tokens, mine, &loaded);
      const int64_t there = std::ssize(samples) - k * slice - rank_.at.dp * recipe.batch.micro;
      if (there < recipe.batch.micro) data::no_targets(&loaded, std::max<int64_t>(0, there));
      const int64_t masked = data::mask_repeats(&loaded);
      if (tells) masked_ += masked;
      if (!by_sample_.empty()) data::count_documents(by_sample_, &loaded, tells ? documents_ : told_by_others);
    }
    take_loaded(k);
    if (!drops) continue;
    uint64_t* const first = at;
    for (const data::SampleRef& sample : mine) {
      const uint64_t of_sample = mix64(key + static_cast<uint64_t>(sample.position));
      for (int64_t p = 0; p < pieces; ++p) *at++ = p == 0 ? of_sample : mix64(of_sample + static_cast<uint64_t>(p));
    }
    now_->batches[k].dropout_keys = {first, at};
  }
  return by_sample_.empty() ? Status() : weigh_by_sample();
}

void Run::take_loaded(int64_t k) {
  data::MicroBatch& loaded = now_->loaded[k];
  now_->batches[k] = {loaded.inputs.data(), loaded.targets.data(), {}, {loaded.positions, loaded.starts, loaded.ends}};
  if (now_->held.empty()) return;
  // Keys of all tokens are gathered, so where a document begins is asked of all.
  std::vector<int32_t>* const held = &now_->held[kHeldRows * k];
  const int64_t sequence = now_->plan.sequence_tokens;
  if (has_own_rows(now_->plan.recipe) && loaded.positions.empty()) {  // tables have all positions: rows say which is
    loaded.positions.resize(loaded.inputs.size());                    // theirs
    for (size_t t = 0; t < loaded.positions.size(); ++t) {
      loaded.positions[t] = static_cast<int32_t>(static_cast<int64_t>(t) % sequence);
    }
  }
  keep_held(now_->tokens, loaded.positions, &held[2]);
  keep_held(now_->tokens, loaded.counts, &held[3]);
  keep_held(now_->tokens, loaded.channels, &held[4]);
  now_->batches[k] = {keep_held(now_->tokens, loaded.inputs, &held[0]),
                      keep_held(now_->tokens, loaded.targets, &held[1]),
                      {},
                      {held[2], loaded.starts, {}}};
}

Status Run::weigh_by_sample() {
  std::vector<double> words;
  for (const data::DocumentCount& one : documents_) words.insert(words.end(), {one.documents, one.tokens});
  RT_TRY(add_over_world(words, "documents that count"));
  for (size_t s = 0; s < documents_.size(); ++s) documents_[s] = {words[2 * s], words[2 * s + 1]};
  for (int64_t k = 0; k < std::ssize(now_->batches); ++k) {
    std::vector<float>& weights = now_->weights[k];
    weights.clear();
    for (const int32_t count : counts_of(k)) {
      const auto row = std::ssize(weights);
      weights.push_back(count > 0 ? documents_[source_of(k, row)].weight(count) : 1.0f);
    }
    now_->batches[k].rows.weights = weights;
  }
  return {};
}

Result<Run::Pass> Run::pass(int64_t number, std::optional<int64_t>* chosen_bank) {
  const Plan& plan = now_->plan;
  const Recipe& recipe = plan.recipe;
  Pass out;
  phase(number, "forward and backward", Phase::kOther);
  const auto sources = static_cast<int64_t>(recipe.data.sources.size());
  std::vector<LossSum> losses(sources), of_channel(dataset_.channels.size());
  {
    const PhaseScope scope(Phase::kBackward);
    now_->data_parallel.begin_pass(true);
  }
  std::vector<SampleSum> samples(static_cast<size_t>(recipe.batch.samples));
  std::vector<TokenLoss> of_tokens;
  const bool keeps_tokens = env_.on_token_losses && number == env_.token_losses_of;
  const auto on_losses = [&](int64_t micro_batch, std::span<const float> token_losses) {
    if (!counts_losses()) return;
    add_losses(micro_batch, token_losses, &losses);
    const std::span<const int32_t> channels = channels_of(micro_batch);
    for (size_t row = 0; row < channels.size(); ++row) {
      if (channels[row] >= 0) of_channel[channels[row]].add(token_losses[row], now_->batches[micro_batch].targets[row]);
    }
    const int64_t pieces = recipe.model.context / plan.sequence_tokens;  // sequences of a sample
    const int64_t first = (micro_batch * plan.mesh.dp() + rank_.at.dp) * recipe.batch.micro;
    for (size_t row = 0; row < token_losses.size(); ++row) {
      const auto [sequence, position] = now_->tokens.place(static_cast<int64_t>(row), recipe.batch.micro * pieces);
      const int32_t target = now_->batches[micro_batch].targets[row];
      const auto sample = static_cast<size_t>(first + sequence / pieces);  // beyond the step's: it fills a round
      if (sample >= samples.size()) continue;
      samples[sample].add(token_losses[row], target);
      if (!keeps_tokens) continue;
      const int64_t token = sequence % pieces * plan.sequence_tokens + position;
      of_tokens.push_back({static_cast<int32_t>(sample), static_cast<int32_t>(token), target, token_losses[row]});
    }
  };
  std::vector<LossSum> further(recipe.model.mtp.depth);  // by module that predicts a further token
  const auto on_further = [&](int64_t micro_batch, std::span<const float> token_losses) {
    if (!counts_losses()) return;
    const int32_t* const targets = now_->batches[micro_batch].targets;
    const int64_t rows = std::ssize(token_losses) / std::ssize(further);
    for (int64_t i = 0; i < std::ssize(token_losses); ++i) {
      further[i / rows].add(token_losses[i], nn::target_ahead(targets, i % rows, plan.sequence_tokens, i / rows));
    }
  };
  const float weight = static_cast<float>(loss_scale()) / static_cast<float>(plan.tokens_per_step);
  if (recipe.optimizer.qk_clip > 0) optimizer_.clear_max_scores();  // what validation has left
  const bool unseen = chosen_bank != nullptr && updates_unseen(number);
  now_->executor->note_ruined_losses(unseen ? optimizer_.ruined() : nullptr);
  RT_TRY(now_->executor->train(now_->batches, weight));
  compute_ms_ = ms_since(computes_since_) - static_cast<double>(telemetry::waited_ns - waited_before_ns_) / 1e6;

  phase(number, "gradients", Phase::kReduce);
  RT_TRY(now_->data_parallel.finish());
  RT_TRY(optimizer_.take_squared_norm(unseen ? std::optional(tokens_that_count()) : std::nullopt));
  if (recipe.optimizer.qk_clip > 0) RT_TRY(optimizer_.take_max_scores());
  std::optional<int64_t> bank_before;
  std::shared_ptr<const Event> numbers_there;  // null: where all work is done
  if (unseen) {
    if (!clock_) numbers_there = stream_->mark();  // a clock reads its events when all is done
    RT_TRY_SET(bank_before, update_unseen(number));
  }
  // The step's one wait, for losses, norm and largest scores. The update continues meanwhile.
  RT_TRY(stream_->settle_at(numbers_there));
  now_->executor->tell_losses(on_losses, on_further);
  if (keeps_tokens && counts_losses()) env_.on_token_losses(of_tokens);
  WorldSums sums;
  for (const LossSum& source : losses) {
    sums.put(source.loss);
    sums.put(static_cast<double>(source.tokens));
  }
  for (const std::vector<LossSum>* parts : {&of_channel, &further}) {
    for (const LossSum& part : *parts) {
      sums.put(part.loss);
      sums.put(static_cast<double>(part.tokens));
    }
  }
  sums.put(optimizer_.squared_norm_part());
  const size_t words = sums.words.size();
  out.own = sums.words;
  for (const SampleSum& sample : samples) {
    sums.put(sample.units);
    sums.put(static_cast<double>(sample.tokens));
  }
  const bool masks = recipe.data.mask_repeats.period > 0;
  if (masks) sums.put(static_cast<double>(masked_));
  // The bank of the update travels with the sums: one rank chooses as late as it can, and no collective is added.
  sums.put(static_cast<double>(bank_before.value_or(0)));
  Status chosen;
  if (chosen_bank != nullptr && !bank_before && decides()) {
    Result<int64_t> bank = choose_bank();
    sums.words.back() = bank.ok() ? static_cast<double>(bank.value()) : -1.0;
    if (!bank.ok()) chosen = std::move(bank).error();
  }
  RT_TRY(add_over_world(sums.words, "losses, gradient norm and bank"));
  RT_TRY(std::move(chosen));
  out.words.assign(sums.words.begin(), sums.words.begin() + static_cast<std::ptrdiff_t>(words));
  double counted = 0;
  for (int64_t s = 0; s < sources; ++s) {
    const double of_source = sums.take_sum(), tokens = sums.take();
    const double sum = over_tokens(static_cast<size_t>(s), of_source, tokens, documents_of(static_cast<size_t>(s)));
    out.loss += sum;
    counted += tokens;
    if (tokens > 0) out.source_loss.emplace_back(recipe.data.sources[s].name, sum / tokens);
  }
  if (counted == 0) {
    if (unseen)  // of a recipe that masks nothing: the weights have been updated by no gradient
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("step {}: {}; batch.skip leaves these out", number, without_targets())};
    out.nothing_counts = true;
    out.loss = std::nan("");
    counted = 1;
  }
  for (const std::string& channel : dataset_.channels) {
    const double sum = sums.take_sum(), tokens = sums.take();
    if (tokens > 0) out.channel_loss.emplace_back(channel, sum / tokens);
  }
  for (size_t k = 0; k < further.size(); ++k) {
    const double sum = sums.take_sum(), tokens = sums.take();
    out.mtp_loss = out.mtp_loss.value_or(0) + sum / std::max(1.0, tokens) / static_cast<double>(further.size());
  }
  out.gradients = clip_numbers(counted);
  updated_ = bank_before && optimizer_.wrote(out.gradients);
  out.squared_norm = sums.take_words();
  out.norm = kernels::clip_of(ExactSum::from(out.squared_norm).value(), out.gradients).norm;
  out.loss /= counted;
  for (size_t k = 0; k < samples.size(); ++k) {
    const double units = sums.take(), tokens = sums.take();
    out.sample_loss.push_back(tokens > 0 ? units / SampleSum::kUnits / tokens : std::nan(""));
  }
  if (masks) out.masked = static_cast<int64_t>(sums.take());
  const auto bank = static_cast<int64_t>(sums.take());
  if (bank < 0) return Error{ErrorCode::kStopped, fmt::format("rank {} could not choose a bank", env_.decides)};
  if (bank >= std::ssize(state_.arrays().banks)) return Error{ErrorCode::kInternal, fmt::format("bank {}", bank)};
  if (chosen_bank != nullptr) *chosen_bank = bank;
  return out;
}

int64_t Run::tokens_that_count() const {
  if (!counts_losses()) return 0;
  int64_t count = 0;
  for (const pipeline::MicroBatch& batch : now_->batches) {
    count +=
        now_->models.back()->rows() - std::count(batch.targets, batch.targets + now_->models.back()->rows(), kNoTarget);
  }
  return count;
}

Result<int64_t> Run::choose_bank() {
  const PhaseScope scope(Phase::kCheckpoint);
  const Clock::time_point asked = Clock::now();
  Result<int64_t> bank = env_.hook.next_bank(bank_);
  paused_ms_ += ms_since(asked);
  return bank;
}

Status Run::begin_update(int64_t bank, int64_t number) {
  const PhaseScope scope(Phase::kCheckpoint);
  const Clock::time_point begun = Clock::now();
  RT_TRY(env_.hook.begin_update(bank, number));
  paused_ms_ += ms_since(begun);
  return {};
}

optim::Update Run::update_of(int64_t number, int64_t bank) const {
  return {.number = number - position_.loss_scale.skipped - position_.guards.skipped - plan_.past.moments_from,
          .lr = optim::learning_rate(plan_.recipe, number, plan_.steps, plan_.past),
          .from = bank_,
          .to = bank,
          .tokens = now_->plan.tokens_per_step};
}

Result<int64_t> Run::update_unseen(int64_t number) {
  int64_t bank = bank_;  // in place, as the rank that decides has it
  if (decides()) {
    RT_TRY_SET(bank, choose_bank());
  }
  if (bank != bank_) return Error{ErrorCode::kInternal, fmt::format("copied state in slots {} and {}", bank_, bank)};
  const PhaseScope scope(Phase::kOptimizer);
  RT_TRY(begin_update(bank, number));
  optim::Update update = update_of(number, bank);
  const CopyGate& gate = *state_.arrays().gate;
  const int64_t waited_ns = gate.waited_ns();
  update.gradients = clip_numbers(1);  // the tokens that count are on the device
  RT_TRY(optimizer_.update_unseen(update, *groups_.world));
  paused_ms_ += static_cast<double>(gate.waited_ns() - waited_ns) * 1e-6;
  return bank;
}

Status Run::step(int64_t number) {
  const Clock::time_point begin = Clock::now();
  RT_TRY(enter(stage_of_step(plan_.step_stages, number)));
  const Plan& plan = now_->plan;
  const Recipe& recipe = plan.recipe;

  phase(number, "data", Phase::kData);
  computes_since_ = Clock::now();
  waited_before_ns_ = telemetry::waited_ns;
  std::vector<data::SampleRef> batch = sampler_.peek(recipe.batch.samples);
  RT_TRY(load_micro_batches(data::DataPart::kTrain, batch));

  if (clock_) clock_->begin_step();
  paused_ms_ = 0;
  std::optional<int64_t> chosen;
  RT_TRY_SET(Pass found, pass(number, &chosen));
  const int64_t bank = *chosen;
  const bool scaled = position_.loss_scale.scale > 0;
  if (updated_ && !found.finite()) {
    return Error{
        ErrorCode::kInternal,
        fmt::format("step {}: the device has updated the weights, but loss {} or gradient norm {} is not finite",
                    number, found.loss, found.norm)};
  }
  const bool finite = std::isfinite(found.loss) && (std::isfinite(found.norm) || scaled);
  if (!finite && !found.nothing_counts) {  // no loss scale mends the loss itself
    RT_TRY(recompute(number, &found));
  }
  metrics_ = {};
  RT_TRY_SET(const bool left_out, leaves_out(number, &found));
  if (compares_replicas(recipe.watch, number)) RT_TRY(compare_replicas(number));
  last_batch_ = std::move(batch);  // what is not finite above was compared with the batch before
  const bool overflow = !std::isfinite(found.norm) && !found.nothing_counts;
  metrics_.source_loss = std::move(found.source_loss);
  metrics_.channel_loss = std::move(found.channel_loss);
  metrics_.mtp_loss = found.mtp_loss;
  if (recipe.data.mask_repeats.period > 0) metrics_.masked_tokens = found.masked;
  std::vector<telemetry::SampleLoss> samples;
  for (size_t k = 0; k < last_batch_.size(); ++k)
    samples.push_back({last_batch_[k].position, last_batch_[k].source, found.sample_loss[k]});
  metrics_.outliers = sample_watch_.add(samples);

  if (scaled) {
    metrics_.loss_scale = loss_scale();
    RT_TRY_SET(
        position_.loss_scale,
        optim::next_loss_scale(recipe.loss_scale, position_.loss_scale, overflow).with(fmt::format("step {}", number)));
  }

  phase(number, "optimizer", Phase::kOptimizer);
  optim::Update update = update_of(number, bank);
  const double lr = update.lr;
  if (!updated_) RT_TRY(begin_update(bank, number));
  const CopyGate* const gate = state_.arrays().gate;
  const int64_t waited_ns = gate != nullptr ? gate->waited_ns() : 0;
  const bool updates = !overflow && !left_out;
  if (!updates) {
    optimizer_.keep(bank_, bank);
    RT_TRY(env_.hook.weights_whole(number));
  } else if (updated_) {
    RT_TRY(now_->data_parallel.spread_weights(nullptr, [this, number] { return env_.hook.weights_whole(number); }));
  } else {
    update.squared_norm = found.squared_norm;
    update.gradients = found.gradients;
    RT_TRY(optimizer_.update(update, *groups_.world));
    RT_TRY(now_->data_parallel.spread_weights(nullptr, [this, number] { return env_.hook.weights_whole(number); }));
  }
  if (recipe.optimizer.qk_clip > 0 && updates) {
    const std::span<const float> scores = optimizer_.largest_scores();
    metrics_.max_attention_score = *std::ranges::max_element(scores);
    metrics_.clipped_heads = optim::clipped_heads(recipe.model, recipe.optimizer.qk_clip, scores);
  }
  // Other ranks may still be reading replicas' state in the snapshot that this one starts from.
  if (gate != nullptr && bank != bank_) RT_TRY(groups_.world->barrier("state left in the snapshot"));
  if (clock_) clock_->end_step();
  bank_ = bank;
  if (gate != nullptr) paused_ms_ += static_cast<double>(gate->waited_ns() - waited_ns) * 1e-6;

  take_step(number, found, lr, ms_since(begin));
  phase(number, "after the update", Phase::kOther);  // here step_ms ends: what follows is not the optimizer's
  return {};
}

void Run::take_step(int64_t number, const Pass& found, double lr, double took_ms) {
  const Plan& plan = now_->plan;
  position_.step = number;
  position_.samples += plan.recipe.batch.samples;
  position_.tokens += plan.tokens_per_step;
  position_.lr = lr;
  position_.loss = found.loss;
  sampler_.advance(plan.recipe.batch.samples);
  position_.sampler = data::to_json(sampler_.state());

  metrics_.step = number;
  metrics_.samples = position_.samples;
  metrics_.tokens = position_.tokens;
  metrics_.loss = found.loss;
  metrics_.grad_norm = found.norm;
  metrics_.lr = lr;
  metrics_.skipped = position_.loss_scale.skipped + position_.guards.skipped;
  metrics_.skipped_steps = position_.guards.skipped_steps;
  metrics_.step_ms = took_ms;
  metrics_.tokens_per_s = static_cast<double>(plan.tokens_per_step) / (took_ms / 1000);
}

Result<std::vector<int64_t>> Run::differing(const Pass& a, const Pass& b) {
  std::vector<double> differs(static_cast<size_t>(groups_.world->size()), 0.0);
  // Bits, not values: NaN is as good as any other here.
  const bool same = a.own.size() == b.own.size() && std::memcmp(a.own.data(), b.own.data(), a.own.size() * 8) == 0;
  differs[static_cast<size_t>(groups_.world->rank())] = same ? 0 : 1;
  RT_TRY(add_over_world(differs, "ranks whose numbers differ"));
  std::vector<int64_t> out;
  for (size_t rank = 0; rank < differs.size(); ++rank) {
    if (differs[rank] > 0) out.push_back(static_cast<int64_t>(rank));
  }
  return out;
}

Result<telemetry::ComputedAgain> Run::compute_again(int64_t number, Pass* found) {
  using Found = telemetry::ComputedAgain::Found;
  RT_TRY_SET(Pass second, pass(number, nullptr));
  RT_TRY_SET(std::vector<int64_t> ranks, differing(*found, second));
  if (ranks.empty()) return telemetry::ComputedAgain{};
  RT_TRY_SET(Pass third, pass(number, nullptr));
  RT_TRY_SET(const std::vector<int64_t> of_second, differing(second, third));
  RT_TRY_SET(const std::vector<int64_t> of_first, differing(*found, third));
  *found = std::move(third);  // the gradients that lie there are its own
  const bool twice = of_second.empty() || of_first.empty();
  return telemetry::ComputedAgain{.found = twice ? Found::kTransient : Found::kPersistent, .ranks = std::move(ranks)};
}

/// Says of the step under way that no token of its batch is to be guessed, and which samples it has.
std::string Run::without_targets() const {
  const std::vector<data::SampleRef> batch = sampler_.peek(now_->plan.recipe.batch.samples);
  return fmt::format("{} no token of its batch to be guessed, which is positions {} of the sample order",
                     now_->plan.recipe.data.mask_repeats.period > 0 ? "the objective and data.mask_repeats leave"
                                                                    : "the objective leaves",
                     to_text(PositionRange{batch.front().position, batch.back().position}));
}

Result<bool> Run::leaves_out(int64_t number, Pass* found) {
  StepGuard guard(plan_.recipe.watch, watch_rules_, now_->level, &position_.guards);
  if (found->nothing_counts) {
    metrics_.skip_why = without_targets();
    guard.note_without_targets(number);
    return true;
  }
  telemetry::StepVerdict verdict = guard.look(number, found->loss, found->norm);
  const bool audits = guard.audits(number);
  if (audits || guard.recomputes(number, verdict)) {
    RT_TRY_SET(metrics_.again, compute_again(number, found));
    const bool scaled = position_.loss_scale.scale > 0;
    if (!std::isfinite(found->loss) || (!std::isfinite(found->norm) && !scaled)) return why_not_finite(number, *found);
    metrics_.again->audit = audits;
    if (audits) {
      metrics_.again->since = position_.guards.audited;
      guard.note_audit(number, metrics_.again->found == telemetry::ComputedAgain::Found::kSame);
    } else {
      guard.note_recomputed(number);
    }
    verdict = guard.look(number, found->loss, found->norm);
  }
  const bool skips = std::isfinite(found->norm) && guard.skips(number, verdict);  // else fp16 has overflowed
  guard.note(number, verdict, skips);
  if (skips) metrics_.skip_why = guard.why(number, verdict);
  return skips;
}

Status Run::compare_replicas(int64_t number) {
  phase(number, "replicas compared", Phase::kOther);
  RT_TRY(now_->data_parallel.settle());
  RT_TRY_SET(const ReplicaHashes own, hash_replicas(*stream_, plan_, rank_, state_.arrays().weights));
  // Halves of hashes are exact in doubles, and each is of one rank.
  std::vector<double> halves(static_cast<size_t>(groups_.world->size()) * kHeldByCount * 2, 0.0);
  auto at = halves.begin() + groups_.world->rank() * static_cast<int64_t>(kHeldByCount) * 2;
  for (const uint64_t hash : own) {
    *at++ = static_cast<double>(hash >> 32);
    *at++ = static_cast<double>(static_cast<uint32_t>(hash));
  }
  RT_TRY(add_over_world(halves, "hashes of replicas' weights"));
  std::vector<ReplicaHashes> all(static_cast<size_t>(groups_.world->size()));
  at = halves.begin();
  for (ReplicaHashes& of_rank : all) {
    for (uint64_t& hash : of_rank) {
      const auto high = static_cast<uint64_t>(*at++);
      hash = high << 32 | static_cast<uint64_t>(*at++);
    }
  }
  ReplicaVote found = vote(plan_, all);
  metrics_.replicas = {std::move(found.ranks), found.tied, position_.guards.replicated};
  if (metrics_.replicas->ranks.empty()) position_.guards.replicated = number - 1;
  return {};
}

Status Run::recompute(int64_t number, Pass* found) {
  const bool scaled = position_.loss_scale.scale > 0;
  const auto passes = [scaled](const Pass& one) { return std::isfinite(one.loss) && (scaled || one.finite()); };
  RT_TRY_SET(Pass second, pass(number, nullptr));
  if (!passes(second)) return why_not_finite(number, second);
  RT_TRY_SET(Pass third, pass(number, nullptr));
  if (!passes(third) || second.words != third.words) return why_not_finite(number, third);
  spdlog::warn(
      "step {}: loss {} and gradient norm {} were not finite, and are {} and {} when computed again, twice: an "
      "error of the machine that has passed",
      number, found->loss, found->norm, third.loss, third.norm);
  *found = std::move(third);
  return {};
}

Error Run::why_not_finite(int64_t number, const Pass& found) {
  phase(number, "why it is not finite", Phase::kOther);
  // 1. Which samples, by a forward of the step's batch, which is loaded; and the weights that this rank saves.
  std::set<int64_t> positions;
  const auto forward = [&]() -> Status {
    const Plan& plan = now_->plan;
    const int64_t pieces = plan.recipe.model.context / plan.sequence_tokens;
    const std::vector<data::SampleRef> batch =
        data::fill_rounds(sampler_.peek(plan.recipe.batch.samples), plan.recipe.batch.micro * plan.mesh.dp());
    now_->data_parallel.begin_pass(false);
    return now_->executor->evaluate(now_->batches, [&](int64_t micro_batch, std::span<const float> losses) {
      if (!counts_losses()) return;
      const auto mine =
          data::micro_batch_samples(batch, plan.mesh.dp(), rank_.at.dp, plan.recipe.batch.micro, micro_batch);
      for (size_t row = 0; row < losses.size(); ++row) {
        if (std::isfinite(losses[row]) || now_->batches[micro_batch].targets[row] == kNoTarget) continue;
        const int64_t sequence = now_->tokens.place(static_cast<int64_t>(row), plan.recipe.batch.micro * pieces).sample;
        positions.insert(mine[static_cast<size_t>(sequence / pieces)].position);
      }
    });
  };
  if (Status done = forward(); !done.ok()) return std::move(done).error();
  RuinReport report{.step = number, .loss = found.loss, .norm = found.norm};
  std::vector<double> words(static_cast<size_t>(groups_.world->size()) * kNamedSamples + 1, 0.0);
  size_t slot = static_cast<size_t>(groups_.world->rank()) * kNamedSamples;
  const size_t end = slot + kNamedSamples;
  for (const int64_t position : positions) {
    if (slot < end) words[slot++] = static_cast<double>(position + 1);
  }
  const kernels::StateExec on = kernels::state_exec_on(*stream_);
  HostNumbers<int64_t> ruined(*stream_, 1);
  for (const StateTensor& item : tensors_[bank_]) {
    if (!item.primary || item.kind != StateKind::kWeight) continue;
    on.count_not_finite(item.data.as<const float>(), item.bytes / 4, ruined.room());
  }
  if (Status waited = stream_->settle(); !waited.ok()) return std::move(waited).error();
  words.back() = static_cast<double>(ruined.read()[0]);
  if (Status added = add_over_world(words, "samples and weights that are not finite"); !added.ok())
    return std::move(added).error();
  report.ruined_weights = static_cast<int64_t>(words.back());
  words.pop_back();
  positions.clear();
  for (const double word : words) {
    if (word > 0) positions.insert(static_cast<int64_t>(word) - 1);
  }
  for (const data::SampleRef& sample : sampler_.peek(now_->plan.recipe.batch.samples)) {
    if (!positions.contains(sample.position) || std::ssize(report.samples) == kNamedSamples) continue;
    const data::Dataset::Source& source = dataset_.sources[static_cast<size_t>(sample.source)];
    report.samples.push_back(
        fmt::format("position {}, source \"{}\", {}", sample.position, source.name, source.train->place(sample.start)));
  }
  // 2. Forward alone on the batch of the step before; at a start that is not known, and the one behind this does.
  const auto samples = static_cast<size_t>(now_->plan.recipe.batch.samples);
  report.own_batch = last_batch_.size() == samples;
  std::vector<data::SampleRef> other = last_batch_;
  if (!report.own_batch) {
    other = sampler_.peek(2 * static_cast<int64_t>(samples));
    other.erase(other.begin(), other.begin() + static_cast<std::ptrdiff_t>(samples));
  }
  const Result<double> loss = forward_loss(other);
  if (!loss.ok()) return loss.error();
  report.other_loss = loss.value();
  report.vocab = plan_.recipe.model.vocab;
  if (report.ruined() && position_.step > 0) env_.hook.condemn(position_.step);
  return Error{ErrorCode::kGuard, to_text(report)};
}

Result<double> Run::forward_loss(std::span<const data::SampleRef> samples) {
  RT_TRY(load_micro_batches(data::DataPart::kTrain, samples));
  std::vector<LossSum> losses(plan_.recipe.data.sources.size());
  now_->data_parallel.begin_pass(false);
  RT_TRY(now_->executor->evaluate(now_->batches, [&](int64_t micro_batch, std::span<const float> token_losses) {
    if (counts_losses()) add_losses(micro_batch, token_losses, &losses);
  }));
  std::vector<double> documents;
  for (size_t s = 0; s < losses.size(); ++s) documents.push_back(documents_of(s));
  RT_TRY_SET(const std::optional<double> loss, mean_over_world(losses, documents, "loss, forward alone", nullptr));
  return loss.value_or(0);  // without a token that counts nothing is wrong with it
}

void Run::add_losses(int64_t micro_batch, std::span<const float> token_losses, std::vector<LossSum>* of_source) const {
  const int32_t* const targets = now_->batches[micro_batch].targets;
  const std::span<const int32_t> counts = counts_of(micro_batch);
  for (int64_t row = 0; row < std::ssize(token_losses); ++row) {
    (*of_source)[source_of(micro_batch, row)].add(token_losses[row], targets[row], counts.empty() ? 0 : counts[row]);
  }
}

Result<std::optional<double>> Run::mean_over_world(const std::vector<LossSum>& losses,
                                                   std::span<const double> documents, std::string_view what,
                                                   std::vector<std::pair<std::string, double>>* of_source) {
  WorldSums sums;
  for (const LossSum& source : losses) {
    sums.put(source.loss);
    sums.put(static_cast<double>(source.tokens));
  }
  RT_TRY(add_over_world(sums.words, what));
  ExactSum loss;  // of exact sums, so that it has the bits of one sum over all tokens
  double tokens = 0;
  for (size_t s = 0; s < losses.size(); ++s) {
    const ExactSum sum = ExactSum::from(sums.take_words());
    const double counted = sums.take(), over = over_tokens(s, sum.value(), counted, documents[s]);
    if (weighs_by_sample(s)) {
      loss.add(over);
    } else {
      loss.add(sum);
    }
    tokens += counted;
    if (counted > 0 && of_source != nullptr) of_source->emplace_back(plan_.recipe.data.sources[s].name, over / counted);
  }
  return tokens > 0 ? std::optional(loss.value() / tokens) : std::nullopt;
}

Result<std::optional<double>> Run::evaluate() {
  RT_TRY(enter(plan_.step_stages.size() - 1));  // all of a run's validation losses are of the same batches
  std::vector<LossSum> losses(plan_.recipe.data.sources.size());
  std::vector<double> documents(losses.size(), 0.0);
  for (int64_t batch = 0; batch < validation_->batches(); ++batch) {
    RT_TRY(load_micro_batches(data::DataPart::kValid, validation_->batch(batch)));
    for (size_t s = 0; s < documents.size(); ++s) documents[s] += documents_of(s);
    now_->data_parallel.begin_pass(false);
    RT_TRY(now_->executor->evaluate(now_->batches, [&](int64_t micro_batch, std::span<const float> token_losses) {
      if (counts_losses()) add_losses(micro_batch, token_losses, &losses);
    }));
  }
  metrics_.valid_source_loss.clear();
  return mean_over_world(losses, documents, "validation loss", &metrics_.valid_source_loss);
}

void Run::load_texts(const data::TextRows& rows, int64_t first) {
  const Plan& plan = now_->plan;
  const int64_t micro = plan.recipe.batch.micro, pieces = plan.recipe.model.context / plan.sequence_tokens;
  for (int64_t k = 0; k < plan.micro_batches; ++k) {
    const int64_t sample = (k * plan.mesh.dp() + rank_.at.dp) * micro;
    rows.fill(first + sample * pieces, micro, pieces, &now_->loaded[k]);
    take_loaded(k);
  }
}

Result<bool> Run::has_time_for_tasks() {
  const double budget = plan_.recipe.eval.budget;
  if (budget <= 0) return true;
  uint8_t has = 1;  // the first of this process always, to know how long they take
  if (decides() && tasks_took_) has = tasks_ms_ + *tasks_took_ <= budget * (ms_since(began_) + *tasks_took_) ? 1 : 0;
  RT_TRY(groups_.world->broadcast(&has, sizeof(has), env_.decides, "time for tasks"));
  return has != 0;
}

Status Run::compare_texts() {
  if (texts_compared_) return {};
  uint64_t hash = 0;
  for (const data::ScoredText& text : env_.texts) {
    hash = mix64(hash + static_cast<uint64_t>(text.scored));
    for (const int32_t id : text.ids) hash = mix64(hash + static_cast<uint64_t>(id));
  }
  const auto mine = static_cast<int64_t>(hash >> 1);
  std::array<int64_t, 2> most = {mine, -mine};
  RT_TRY(groups_.world->all_reduce(most.data(), std::ssize(most), DType::kI64, comm::ReduceOp::kMax, "texts of tasks"));
  if (most[0] != -most[1]) {
    return Error{ErrorCode::kInvalidInput,
                 "eval.tasks: the hosts ask different texts: the files of the tasks, or the tokenizer's, are not the "
                 "same on all of them"};
  }
  texts_compared_ = true;
  return {};
}

Status Run::answer_tasks(int64_t number, bool last) {
  const EvalConfig& eval = plan_.recipe.eval;
  const int64_t every = eval.tasks_steps > 0 ? eval.tasks_steps : eval.every_steps;
  if (!env_.tasks_of || every == 0 || (number % every != 0 && !last)) return {};
  phase(number, "tasks", Phase::kValidation);
  RT_TRY(compare_texts());
  if (!last) {
    RT_TRY_SET(const bool has_time, has_time_for_tasks());
    metrics_.tasks_left_out = !has_time;
    if (!has_time) return {};
  }
  const Clock::time_point begin = Clock::now();
  RT_TRY(enter(plan_.step_stages.size() - 1));
  const Plan& plan = now_->plan;
  RT_TRY_SET(const data::TextRows rows,
             data::TextRows::make(env_.texts, plan.sequence_tokens, has_own_rows(plan.recipe)));
  data::TextSums sums(std::ssize(env_.texts));
  const int64_t room = plan.micro_batches * plan.mesh.dp() * plan.recipe.batch.micro *
                       (plan.recipe.model.context / plan.sequence_tokens);
  for (int64_t first = 0; first < rows.sequences(); first += room) {
    load_texts(rows, first);
    now_->data_parallel.begin_pass(false);
    RT_TRY(now_->executor->evaluate(now_->batches, [&](int64_t micro_batch, std::span<const float> token_losses) {
      if (!counts_losses()) return;
      const std::span<const int32_t> owners = channels_of(micro_batch);
      for (size_t row = 0; row < owners.size(); ++row) {
        if (owners[row] >= 0) sums.add(owners[row], token_losses[row]);
      }
    }));
  }
  RT_TRY(add_over_world(sums.units, "scores of tasks"));
  metrics_.tasks = env_.tasks_of(sums.scores());
  tasks_took_ = ms_since(begin);
  tasks_ms_ += *tasks_took_;
  metrics_.tasks_ms = tasks_took_;
  return {};
}

std::optional<telemetry::EarlyEnd> Run::loses_patience(int64_t number) {
  const PatienceConfig& patience = plan_.recipe.watch.early_stop;
  if (patience.metric.empty()) return std::nullopt;
  const std::optional<double> value = telemetry::value_of(metrics_, patience.metric);
  PatienceState& state = position_.patience;
  if (value) note_evaluation(patience, number, *value, &state);
  if (!value || !ended_early(patience, state)) return std::nullopt;
  return telemetry::EarlyEnd{state.metric, state.best, state.best_step, state.without};
}

Result<StepOrder> Run::agree_on_order(bool last) {
  phase(position_.step, "order", Phase::kCheckpoint);
  int64_t wire = 0;  // flags and slot, or -1
  Status refused;
  if (decides()) {
    const Clock::time_point asked = Clock::now();
    Result<StepOrder> decided = env_.hook.decide(position_, last);
    paused_ms_ += ms_since(asked);
    if (decided.ok()) {
      const StepOrder& o = decided.value();
      metrics_.snapshot_left_out = o.left_out;
      wire = (o.stop ? 1 : 0) | (o.snapshot ? 2 : 0) | (o.persist ? 4 : 0) | (o.replicate ? 8 : 0) | o.slot << 4;
    } else {
      wire = -1;
      refused = std::move(decided).error();
    }
  }
  RT_TRY(groups_.world->broadcast(&wire, sizeof(wire), env_.decides, "step order"));
  if (!refused.ok()) return std::move(refused).error();
  if (wire < 0)
    return Error{ErrorCode::kStopped, fmt::format("rank {} could not decide on the checkpoint", env_.decides)};
  return StepOrder{.stop = (wire & 1) != 0,
                   .snapshot = (wire & 2) != 0,
                   .persist = (wire & 4) != 0,
                   .replicate = (wire & 8) != 0,
                   .slot = wire >> 4};
}

void Run::finish_trace(bool last) {
  if (traced_ || !env_.on_trace || (position_.step < recorder_.window().last && !last)) return;
  in_phase_.reset();  // draws the open bar
  if (!recorder_.end_window()) return;
  traced_ = true;
  env_.on_trace(recorder_.to_json());
}

Result<Outcome> Run::loop() {
  recorder_.attach("training");
  RT_TRY(start());
  RT_TRY(make_choices());
  const EvalConfig& eval = plan_.recipe.eval;
  // Ranks start again at the step at which the run has ended: the agent may not have heard of it.
  bool stopped = position_.step < plan_.end_step && ended_early(plan_.recipe.watch.early_stop, position_.patience);
  if (const auto told = telemetry::step_metrics_from_json(json_or_nothing(position_.metrics));
      stopped && told.ok() && decides() && env_.on_step) {
    env_.on_step(told.value());
  }
  began_ = Clock::now();
  while (position_.step < plan_.end_step && !stopped) {
    const int64_t number = position_.step + 1;
    recorder_.begin_step(number);
    RT_TRY(step(number));
    const bool last = number == plan_.end_step;
    if (number == plan_.steps && env_.try_end) {
      phase(number, "last step once more", Phase::kValidation);
      RT_TRY_SET(metrics_.end_loss, forward_loss(last_batch_));
      if (!std::isfinite(*metrics_.end_loss)) {
        env_.hook.condemn(number);
        return Error{
            ErrorCode::kGuard,
            fmt::format("step {}, the run's last: after its update its own batch gives loss {}: that update has "
                        "ruined the weights, and step {} is not saved",
                        number, *metrics_.end_loss, number)};
      }
    }
    if (validation_ && (number % eval.every_steps == 0 || last)) {
      phase(number, "validation", Phase::kValidation);
      RT_TRY_SET(metrics_.valid_loss, evaluate());
      if (!metrics_.valid_loss && decides()) {
        spdlog::warn("step {}: no validation loss: the objective{} no token of the validation batches to be guessed",
                     number, plan_.recipe.data.mask_repeats.period > 0 ? " and data.mask_repeats leave" : " leaves");
      }
    }
    if (last && position_.guards.skipped >= number) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("step {}, the run's last: the update of each step was left out, of this one because {}: "
                               "nothing was trained",
                               number, metrics_.skip_why)};
    }
    RT_TRY(answer_tasks(number, last));
    metrics_.ended_early = loses_patience(number);
    const bool ends = last || metrics_.ended_early.has_value();
    telemetry::StepMetrics told = metrics_;
    told.step_ms = told.tokens_per_s = 0;  // differ from rank to rank
    told.tasks_ms.reset();
    position_.metrics = json_text(telemetry::to_json(told));
    RT_TRY_SET(const StepOrder order, agree_on_order(ends));
    if (order.snapshot) {
      phase(number, "snapshot", Phase::kCheckpoint);
      const Clock::time_point begin = Clock::now();
      if (state_.arrays().gate == nullptr) RT_TRY(stream_->settle());  // others read the bank, and it has checksums
      RT_TRY(env_.hook.snapshot(order, position_, bank_, tensors_[bank_], optimizer_.sums()));
      paused_ms_ += ms_since(begin);
    }
    metrics_.checkpoint_lost_ms = paused_ms_;
    stopped = order.stop || metrics_.ended_early.has_value();
    finish_trace(stopped || last);
    phase(number, "log", Phase::kLog);
    const telemetry::StepSplit split = recorder_.take_split();
    for (size_t i = 0; i < telemetry::kPhases; ++i) {
      metrics_.split_ms.emplace_back(telemetry::phase_name(static_cast<Phase>(i)), split[i]);
    }
    if (decides() && env_.on_step) env_.on_step(metrics_);
    if (const auto pace = pace_.add(number, compute_ms_); pace && env_.on_pace) env_.on_pace(*pace);
  }
  phase(position_.step, "finish", Phase::kOther);
  RT_TRY(now_->data_parallel.settle());
  if (clock_) {
    RT_TRY(stream_->settle());
    RT_TRY_SET(const OpTimes times, clock_->times());
    env_.on_op_times(times);
  }
  RT_TRY(env_.hook.finish());
  return Outcome{.position = position_,
                 .allocated_bytes = state_.allocated_bytes(),
                 .scratch_bytes = env_.machine == nullptr ? kernels::scratch_bytes() : 0,
                 .traffic = groups_.traffic()};
}

}  // namespace

Result<Outcome> run(const Environment& env) {
  const Recipe& recipe = env.plan.recipe;
  if (!env.engine.keeps_rank_order() && env.plan.layout_free()) {
    return Error{ErrorCode::kUnsupported,
                 "deterministic = \"layout\" adds up in the order of ranks, which these ranks' communication does not "
                 "keep; deterministic = \"run\" does without"};
  }
  const int64_t context = recipe.model.context;
  RankPlan rank = env.plan.rank(env.rank);
  if (env.machine == nullptr) kernels::reserve_scratch(nn::kernel_scratch(env.plan, env.rank));
  RT_TRY_SET(data::Dataset dataset, data::open_dataset(recipe.data, recipe.model.vocab, recipe.model.context));
  RT_TRY_SET(const data::Sampler::Spec spec, data::sampler_spec(dataset, recipe));
  RT_TRY_SET(data::Sampler sampler, data::Sampler::make(spec));
  std::optional<data::ValidationSet> validation;
  if (recipe.eval.every_steps > 0) {
    RT_TRY_SET(validation,
               data::ValidationSet::make(dataset, context, env.plan.step_stages.back().samples, recipe.eval.steps));
  }
  RT_TRY_SET(const StateMemory memory, env.hook.memory(kept_tensors(env.plan, rank, true),
                                                       kept_tensors(env.plan, rank, false), rank.weight_bytes));
  int64_t device_bytes = 0;
  if (env.machine != nullptr) {
    if (memory.gate == nullptr) {
      return Error{ErrorCode::kUnsupported,
                   fmt::format("state on {} is for snapshots that are copied: checkpoint.snapshot_by = \"copy\"",
                               device_name(env.machine->device()))};
    }
    const std::vector<int64_t> blocks = TrainState::blocks(env.plan, rank, memory);
    const WorkShapes work = work_shapes(env.plan, env.rank);
    device_bytes = env.machine->bytes_for(blocks, work);
    RT_TRY(env.machine->reserve(blocks, work).with(fmt::format("rank {}", env.rank)));
  }
  RT_TRY_SET(TrainState state,
             TrainState::allocate(env.plan, rank, memory, env.machine == nullptr ? Device{} : env.machine->device()));
  RT_TRY_SET(Groups groups, Groups::make(env.plan, env.rank, env.engine));
  Run training(env, std::move(rank), std::move(groups), std::move(state), std::move(dataset), std::move(sampler),
               std::move(validation));
  Result<Outcome> outcome = training.loop();
  env.hook.release();
  // Else this rank would wait for peers which wait for this rank, until the deadline. What a device was asked for may
  // wait for them too.
  if (!outcome.ok() && (training.busy() || env.machine != nullptr)) {
    env.engine.give_up(outcome.error().code, outcome.error().message);
  }
  // What an error has left under way still writes to this rank's memory.
  if (env.machine != nullptr) ignore(env.machine->stream().settle(), "its error is the outcome's, or came after it");
  if (outcome.ok()) outcome.value().device_bytes = device_bytes;
  return outcome;
}

comm::ShmWorldConfig world_config(const Plan& plan) {
  constexpr int64_t kLeast = 64 << 10, kMost = 1 << 30;  // above that a message goes in parts
  comm::ShmWorldConfig out{.world_size = plan.mesh.world(), .channel_bytes = kLeast};
  if (plan.mesh.pp() == 1) return out;
  for (size_t stage = 0; stage < plan.step_stages.size(); ++stage) {
    const Plan then = plan.at(stage);
    const ScheduleShape shape = then.schedule();
    const BoundaryBuffers buffers = boundary_buffers(shape);
    const BoundaryTensor tensor = boundary_tensor(then);
    int64_t longest = 0;
    for (int64_t s = 0; s + 1 < std::ssize(then.stages); ++s) {
      longest = std::max(longest, tensor.sent_bytes(passes_to_itself(shape, s)));
    }
    // Two at least: where one is enough for passes that take equally long, stages that do not may be one apart.
    const int64_t messages = std::max<int64_t>({2, buffers.activations, buffers.gradients});
    out.channel_bytes = std::max(out.channel_bytes, comm::shm_channel_room(messages, longest));
  }
  out.channel_bytes = std::min(out.channel_bytes, kMost);
  return out;
}

}  // namespace cairn::trainer
