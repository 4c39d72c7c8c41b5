#include "ckpt/node.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/policy.h"
#include "ckpt/retention/space.h"
#include "ckpt/run_memory.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/stoppable_backend.h"
#include "ckpt/store/uring_backend.h"

namespace cairn::ckpt {
namespace {

std::unique_ptr<IoBackend> make_backend(const Plan& plan) {
  if (!plan.recipe.checkpoint.direct_io) return std::make_unique<PosixBackend>();
  return make_best_backend();
}

/// Before anything is made or started.
Status look_for_space(const Plan& plan, IoBackend& io, const std::filesystem::path& checkpoints_dir,
                      std::vector<std::string>* notices) {
  const CheckpointConfig& config = plan.recipe.checkpoint;
  RT_TRY_SET(const Names names, list_names(io, checkpoints_dir));
  if (!names.steps.empty() && names.steps.back() >= plan.steps) return {};  // nothing left to save
  const KeptAtOnce kept = kept_at_once(config, plan.steps, names.steps);
  RT_TRY_SET(const SpaceReport space,
             check_space(io, checkpoints_dir, {plan.checkpoint_bytes, kept, config.in_flight}));
  if (space.missing_bytes == 0) return {};
  if (config.space == SpaceCheck::kRefuse) return Error{ErrorCode::kNoSpace, space.text};
  if (notices != nullptr) notices->push_back("warning: " + space.text);
  return {};
}

}  // namespace

CheckpointNode::CheckpointNode(const Plan& plan, NodeOptions options, Arena arena)
    : plan_(plan),
      options_(std::move(options)),
      arena_(std::move(arena)),
      io_(make_stoppable(make_backend(plan), options_.stop)),
      buffers_(kBounceBytes * std::max<int64_t>(1, plan.recipe.checkpoint.in_flight)) {}

Result<std::unique_ptr<CheckpointNode>> CheckpointNode::open(const Plan& plan, NodeOptions options,
                                                             std::vector<std::string>* notices) {
  const std::unique_ptr<IoBackend> io = make_backend(plan);
  if (!options.resume) {
    RT_TRY_SET(const Names names, list_names(*io, options.checkpoints_dir));
    if (!names.steps.empty()) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{} already holds checkpoints up to step {}; choose another run folder, or leave out "
                               "--fresh to go on from there",
                               options.checkpoints_dir.string(), names.steps.back())};
    }
  }
  RT_TRY(look_for_space(plan, *io, options.checkpoints_dir, notices));
  RT_TRY_SET(Arena arena, open_run_memory(
                              plan, options.run, options.checkpoints_dir,
                              [&] { return make_stoppable(make_backend(plan), options.leave); }, notices,
                              options.before_save, options.stop));
  std::unique_ptr<CheckpointNode> node(new CheckpointNode(plan, std::move(options), std::move(arena)));
  node->keep_memory_ = true;  // until the node is open: the memory may be a dead agent's only copy
  if (!node->options_.resume) {
    const std::vector<SlotView> views = node->arena_.views();
    if (const auto newest = newest_whole(views)) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("shared memory ({}) still holds step {} of this run; leave out --fresh to go on "
                               "from there, or choose another run folder",
                               node->arena_.name(), views[*newest].step)};
    }
  }
  node->decider_ = std::make_unique<RestoreDecider>(
      plan, node->arena_, *node->io_,
      RestoreRequest{node->options_.checkpoints_dir, node->options_.init_from, node->options_.open_foreign,
                     &node->buffers_, [raw = node.get()] { return raw->persister_->check_folder(); },
                     node->options_.stop});
  node->persister_ = std::make_unique<NodePersister>(
      node->arena_, [&plan] { return make_backend(plan); }, node->options_.checkpoints_dir,
      PersistOptions{
          .retention = plan.recipe.checkpoint.keep.empty()
                           ? std::nullopt
                           : std::optional(retention_policy(plan.recipe.checkpoint.keep, plan.steps)),
          .save = {.codec = plan.recipe.checkpoint.compress == Compress::kZstd ? Codec::kShuffleZstd : Codec::kRaw},
          .incremental = plan.recipe.checkpoint.incremental,
          .in_flight = plan.recipe.checkpoint.in_flight,
          .buffers = &node->buffers_,
          .check_owner = node->options_.check_owner,
          .before_save = node->options_.before_save,
          .on_event = [raw = node.get()](const PersistEvent& event) {
            {
              const std::lock_guard lock(raw->mutex_);
              raw->events_.push_back(event);
            }
            if (raw->options_.on_persisted) raw->options_.on_persisted();
          }});
  node->keep_memory_ = false;
  return node;
}

CheckpointNode::~CheckpointNode() {
  if (keep_memory_ && persister_) persister_->give_up();  // the next start writes it
  persister_.reset();
  if (!keep_memory_) ignore(arena_.remove(), "the next run reaps it");
}

Result<RestoreChoice> CheckpointNode::begin_incarnation() {
  persister_->ranks_gone();
  RT_TRY_SET(RestoreChoice choice, decider_->next_incarnation());
  persister_->gone_on_from(choice.step);
  return choice;
}

void CheckpointNode::request_stop() { arena_.control().stop.store(1, std::memory_order_release); }

void CheckpointNode::notify() { persister_->notify(); }

std::vector<PersistEvent> CheckpointNode::take_events() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

std::optional<PersistEvent> CheckpointNode::flush() {
  std::vector<PersistEvent> before = take_events();
  if (!persister_->flush(options_.leave).ok()) keep_memory_ = true;  // told by the event; the memory is the only copy
  const std::lock_guard lock(mutex_);
  std::optional<PersistEvent> last;
  const auto newest =
      std::max_element(events_.begin(), events_.end(), [](const PersistEvent& a, const PersistEvent& b) {
        return a.step <= b.step;  // of one step the later try
      });
  // One that a newer step on disk has overtaken is news like any other.
  if (newest != events_.end() && newest->step >= arena_.control().persisted_step.load(std::memory_order_acquire)) {
    last = std::move(*newest);
    events_.erase(newest);
  }
  events_.insert(events_.begin(), std::make_move_iterator(before.begin()), std::make_move_iterator(before.end()));
  return last;
}

}  // namespace cairn::ckpt
