#include "runtime/optim/sharded_optimizer.h"

#include <utility>

#include "runtime/core/check.h"
#include "runtime/optim/after/ema.h"
#include "runtime/optim/rules/adafactor.h"
#include "runtime/optim/rules/adamw.h"
#include "runtime/optim/rules/lamb.h"
#include "runtime/optim/rules/router_bias.h"
#include "runtime/optim/rules/world_sum.h"
#include "runtime/plan/communication.h"

namespace cairn::optim {

namespace {

constexpr int64_t kDouble = static_cast<int64_t>(sizeof(double));
constexpr int64_t kClipDoubles = static_cast<int64_t>(sizeof(kernels::Clip)) / kDouble;
static_assert(sizeof(kernels::Clip) % sizeof(double) == 0);
static_assert((kClipDoubles + kNormNumbers) * kDouble <= RankPlan::kStepNumbersBytes);

}  // namespace

ShardedOptimizer::ShardedOptimizer(Stream& stream, const Plan& plan, const RankPlan& rank,
                                   const comm::RankGroups& groups, Arrays arrays)
    : walk_(stream, plan, rank, std::move(arrays)),
      groups_(groups),
      squared_norm_(stream, 1 + ExactSum::kWords),
      max_scores_(stream, plan.recipe.optimizer.qk_clip > 0 ? plan.recipe.model.layers * plan.recipe.model.heads : 0) {
  for (const TensorSpec& tensor : plan.tensors) rates_.push_back(rates_of(plan.recipe.optimizer, tensor));
  int64_t tensor = -1;
  for (const StatePiece& piece : rank.pieces) {  // pieces of a tensor that follow one another are one run
    if (!piece.primary || plan.tensors[piece.tensor].balances) continue;
    const int64_t at = rank.grad_offset(piece), count = piece.count_elems();
    kernels::ElemRun* const last = gradient_runs_.empty() ? nullptr : &gradient_runs_.back();
    if (piece.tensor == tensor && at == last->begin + last->count) {
      last->count += count;
      continue;
    }
    tensor = piece.tensor;
    RT_CHECK(at % kAlignElems == 0, "a share begins at element {}", at);
    gradient_runs_.push_back({at, count});
  }
}

Status ShardedOptimizer::take_squared_norm(std::optional<int64_t> counted) {
  const kernels::StateExec& on = walk_.on();
  const Numbers of = numbers();
  on.add_squares_of_runs(walk_.arrays().grads, on.stream.give(std::span<const kernels::ElemRun>(gradient_runs_)),
                         std::ssize(gradient_runs_), of.words);
  counted_ = counted;
  if (counted && has_other_ranks(groups_)) {
    if (!walk_.rank().head()) on.fill_doubles(0, of.ruined, 1);  // else the loss has written it
    on.fill_doubles(static_cast<double>(*counted), of.counted, 1);
    RT_TRY(add_over_world(groups_, of.ruined, kNormNumbers, "gradient norm and tokens"));
  }
  on.doubles_to_host(of.ruined, squared_norm_.room());
  return {};
}

ShardedOptimizer::Numbers ShardedOptimizer::numbers() const {
  const DevicePtr<double> first = (walk_.arrays().work + walk_.rank().step_numbers_offset()).as<double>();
  const DevicePtr<double> ruined = first + kClipDoubles;
  return {first.as<kernels::Clip>(), ruined, ruined + 1, ruined + 1 + ExactSum::kWords};
}

void ShardedOptimizer::clear_max_scores() { walk_.on().clear_floats(max_scores(), max_scores_.size()); }

Status ShardedOptimizer::take_max_scores() {
  RT_TRY(max_over_world(groups_, max_scores(), max_scores_.size(), "largest attention scores"));
  walk_.on().floats_to_host(max_scores(), max_scores_.room());
  return {};
}

Status ShardedOptimizer::update_unseen(Update update, comm::Comm& world) {
  RT_CHECK(may_update_unseen() && counted_ && update.from == update.to,
           "an update from slot {} into {} before its norm is known", update.from, update.to);
  const kernels::StateExec& on = walk_.on();
  const Numbers of = numbers();
  given_ = update;
  const bool several = has_other_ranks(groups_);  // one rank's host knows the count of all
  if (!several) given_.gradients.gradient_scale /= static_cast<double>(*counted_);
  on.clip_by_norm(of.words, on.stream.give(std::span<const kernels::ClipNumbers>(&given_.gradients, 1)), of.ruined,
                  several ? DevicePtr<const double>(of.counted) : DevicePtr<const double>(), of.clip);
  update.clip = of.clip;
  return apply(update, world);
}

bool ShardedOptimizer::wrote(const kernels::ClipNumbers& gradients) const {
  const kernels::Clip clip = kernels::clip_of(norm_words().value(), gradients);  // as the device has it
  return squared_norm_.read().front() == 0 && clip.finite != 0;
}

ExactSum ShardedOptimizer::norm_words() const {
  return ExactSum::from(squared_norm_.read().subspan<1, ExactSum::kWords>());
}

ExactSum ShardedOptimizer::squared_norm_part() const {
  return counted_ && walk_.rank().rank != 0 ? ExactSum() : norm_words();
}

Status ShardedOptimizer::update(Update update, comm::Comm& world) {
  const kernels::StateExec& on = walk_.on();
  const DevicePtr<kernels::Clip> clip = numbers().clip;
  given_ = update;
  on.clip_by_norm(on.stream.give(std::span<const double>(given_.squared_norm)),
                  on.stream.give(std::span<const kernels::ClipNumbers>(&given_.gradients, 1)), nullptr, nullptr, clip);
  update.clip = clip;
  return apply(update, world);
}

Status ShardedOptimizer::apply(const Update& update, comm::Comm& world) {
  const OptimizerConfig& config = walk_.plan().recipe.optimizer;
  if (walk_.reads_peers() && update.from == update.to) {  // the others are about to write over it
    walk_.bring_peer_copies(update.from);
    RT_TRY(world.barrier("optimizer state of other ranks"));
  }
  router_bias(walk_, rates_, update);  // before the rule: overwrite_turns() says so
  switch (config.kind) {
    case OptimizerKind::kAdamW:
      adamw(walk_, rates_, update);
      break;
    case OptimizerKind::kLamb:
      RT_TRY(lamb(walk_, rates_, update, groups_));
      break;
    case OptimizerKind::kAdafactor:
      RT_TRY(adafactor(walk_, rates_, update, groups_));
      break;
  }
  walk_.leave_peers();
  if (config.qk_clip > 0) scale_heads(walk_, update.clip, update.to);
  if (config.ema > 0) average_weights(walk_, config.ema, update.from, update.to, update.clip);
  return {};
}

void ShardedOptimizer::keep(int64_t from, int64_t to) { walk_.keep(from, to); }

}  // namespace cairn::optim
