#include "ckpt/node.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "ckpt/retention/catalog.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/uring_backend.h"

namespace cairn::ckpt {
namespace {

std::unique_ptr<IoBackend> make_backend(const Plan& plan) {
  if (!plan.recipe.checkpoint.direct_io) return std::make_unique<PosixBackend>();
  return make_best_backend();
}

}  // namespace

CheckpointNode::CheckpointNode(const Plan& plan, NodeOptions options, Arena arena)
    : plan_(plan), options_(std::move(options)), arena_(std::move(arena)), io_(make_backend(plan)) {}

Result<std::unique_ptr<CheckpointNode>> CheckpointNode::open(const Plan& plan, NodeOptions options,
                                                             std::vector<std::string>* notices) {
  const std::unique_ptr<IoBackend> io = make_backend(plan);
  if (!options.resume) {
    RT_TRY_SET(const Catalog catalog, list_checkpoints(*io, options.checkpoints_dir));
    if (!catalog.checkpoints.empty()) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{} already holds checkpoints up to step {}; choose another run folder, or leave out "
                               "--fresh to go on from there",
                               options.checkpoints_dir.string(), catalog.checkpoints.back().step)};
    }
  }
  RT_TRY_SET(Arena arena, open_run_memory(
                              plan, options.run, options.checkpoints_dir, [&] { return make_backend(plan); }, notices));
  std::unique_ptr<CheckpointNode> node(new CheckpointNode(plan, std::move(options), std::move(arena)));
  node->keep_memory_ = true;  // until the node is open: the memory may be a dead agent's only copy
  if (!node->options_.resume) {
    const std::vector<SlotView> views = node->arena_.views();
    if (const auto newest = newest_whole(views)) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("shared memory (/dev/shm{}) still holds step {} of this run; leave out --fresh to go on "
                               "from there, or choose another run folder",
                               node->arena_.name(), views[*newest].step)};
    }
  }
  RT_TRY_SET(const Catalog catalog, list_checkpoints(*io, node->options_.checkpoints_dir));
  for (const CheckpointInfo& info : catalog.checkpoints) {
    if (info.complete) node->newest_on_disk_ = info.step;
  }
  node->decider_ = std::make_unique<RestoreDecider>(
      plan, node->arena_, *node->io_,
      RestoreRequest{node->options_.checkpoints_dir, node->options_.init_from, /*from_first=*/false});
  node->persister_ = std::make_unique<NodePersister>(
      node->arena_, make_backend(plan), node->options_.checkpoints_dir,
      PersistOptions{.keep_last = plan.recipe.checkpoint.keep_last,
                     .on_event = [raw = node.get()](const PersistEvent& event) {
                       if (event.status.ok()) {
                         raw->newest_on_disk_ = std::max(raw->newest_on_disk_.load(), event.step);
                       }
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
  persister_.reset();
  if (!keep_memory_) ignore(arena_.remove(), "the next run reaps it");
}

Result<RestoreChoice> CheckpointNode::begin_incarnation() {
  persister_->ranks_gone();
  return decider_->next_incarnation();
}

void CheckpointNode::request_stop() { arena_.control().stop.store(1, std::memory_order_release); }

void CheckpointNode::notify() { persister_->notify({.persist = true}); }

std::vector<PersistEvent> CheckpointNode::take_events() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

std::optional<PersistEvent> CheckpointNode::flush() {
  std::vector<PersistEvent> before = take_events();
  if (!persister_->flush().ok()) keep_memory_ = true;  // told by the event; the memory is the only copy
  const std::lock_guard lock(mutex_);
  std::optional<PersistEvent> last;
  if (!events_.empty()) {
    last = std::move(events_.back());
    events_.pop_back();
  }
  events_.insert(events_.begin(), std::make_move_iterator(before.begin()), std::make_move_iterator(before.end()));
  return last;
}

}  // namespace cairn::ckpt
