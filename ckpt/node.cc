#include "ckpt/node.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "ckpt/persist/save.h"
#include "ckpt/position.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/label_store.h"
#include "ckpt/retention/policy.h"
#include "ckpt/retention/space.h"
#include "ckpt/run_memory.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/stoppable_backend.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/verify/verify.h"
#include "runtime/trainer/step_guard.h"

namespace cairn::ckpt {
namespace {

std::unique_ptr<IoBackend> make_backend(const Plan& plan) {
  if (!plan.recipe.checkpoint.direct_io) return std::make_unique<PosixBackend>();
  return make_best_backend();
}

}  // namespace

Status look_for_space(const Plan& plan, IoBackend& io, const std::filesystem::path& checkpoints_dir,
                      std::vector<std::string>* notices) {
  const CheckpointConfig& config = plan.recipe.checkpoint;
  RT_TRY_SET(const Names names, list_names(io, checkpoints_dir));
  if (!names.steps.empty() && names.steps.back() >= plan.steps) return {};  // nothing left to save
  const KeptAtOnce kept = kept_at_once(config, plan.steps, names.steps, plan.recipe.watch.proof);
  RT_TRY_SET(const SpaceReport space,
             check_space(io, checkpoints_dir, {plan.checkpoint_bytes, kept, std::max<int64_t>(1, config.in_flight)}));
  if (space.missing_bytes == 0) return {};
  if (config.space == SpaceCheck::kRefuse) return Error{ErrorCode::kNoSpace, space.text};
  if (notices != nullptr) notices->push_back("warning: " + space.text);
  return {};
}

CheckpointNode::CheckpointNode(const Plan& plan, NodeOptions options, Arena arena)
    : plan_(plan),
      options_(std::move(options)),
      arena_(std::move(arena)),
      labels_(trainer::watch_rules(plan, options_.level_after), plan.steps, options_.trouble_after),
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
                               "--fresh to resume from there",
                               options.checkpoints_dir.string(), names.steps.back())};
    }
  }
  if (!options.follows) {
    RT_TRY(labels_for_start(*io, options.checkpoints_dir));
    RT_TRY(look_for_space(plan, *io, options.checkpoints_dir, notices));
  }
  RT_TRY_SET(Arena arena, open_run_memory(
                              plan, options.run, options.checkpoints_dir,
                              [&] { return make_stoppable(make_backend(plan), options.leave); }, notices,
                              options.before_save, options.stop, options.ranks, std::move(options.prepared)));
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
  const bool follows = node->options_.follows;
  if (const Status opened = follows ? Status() : node->open_labels(); !opened.ok() && notices != nullptr)
    notices->push_back("warning: " + opened.error().message);  // as on a full disk
  node->decider_ = std::make_unique<RestoreDecider>(
      plan, node->arena_, *node->io_,
      RestoreRequest{node->options_.checkpoints_dir, node->options_.init_from, node->options_.open_foreign,
                     node->options_.from_step, &node->buffers_,
                     [raw = node.get()] { return raw->persister_->check_folder(); }, node->options_.stop});
  SaveOptions save;
  if (plan.recipe.checkpoint.compress == Compress::kZstd) save.codec = Codec::kShuffleZstd;
  node->persister_ = std::make_unique<NodePersister>(
      node->arena_, [&plan] { return make_backend(plan); }, node->options_.checkpoints_dir,
      PersistOptions{.retention = follows || plan.recipe.checkpoint.keep.empty()
                                      ? std::nullopt
                                      : std::optional(retention_policy(plan.recipe.checkpoint.keep, plan.steps)),
                     .save = save,
                     .incremental = plan.recipe.checkpoint.incremental,
                     .in_flight = std::max<int64_t>(1, plan.recipe.checkpoint.in_flight),
                     .buffers = &node->buffers_,
                     .save_step = node->options_.save_step,
                     .is_due = node->options_.is_due,
                     .check_owner = node->options_.check_owner,
                     .before_save = node->options_.before_save,
                     .lineage = node->options_.run.lineage,
                     .labels = follows ? nullptr : &node->labels_,
                     .forensics = plan.recipe.watch.forensics && !node->options_.ranks
                                      ? node->options_.checkpoints_dir.parent_path() / "forensics"
                                      : std::filesystem::path(),
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
  RT_TRY(note(choice));
  return choice;
}

Result<RestoreChoice> CheckpointNode::look(const HostMemory& others) {
  persister_->ranks_gone();
  return decider_->look(&others);
}

Status CheckpointNode::begin(RestoreChoice& choice) {
  decider_->begin(choice);
  return note(choice);
}

Status CheckpointNode::note(const RestoreChoice& choice) {
  persister_->gone_on_from(choice.step);
  labels_.go_back(choice.step);
  labels_.note(choice.metrics);
  if (const std::optional<int64_t> named = std::exchange(options_.from_step, std::nullopt)) {
    labels_.leave_line(*named);
    RT_TRY_SET(abandoned_, abandon_steps(*io_, options_.checkpoints_dir,
                                         options_.checkpoints_dir.parent_path() / "abandoned", *named, this_writer()));
  }
  return {};
}

HostMemory CheckpointNode::memory() {
  persister_->ranks_gone();
  const bool distrusted = arena_.control().distrusted.load(std::memory_order_acquire) != 0;
  std::vector<int64_t> damaged;
  HostMemory out{.incarnation = arena_.control().incarnation.load(std::memory_order_acquire),
                 .whole = all_verified(arena_, distrusted ? Check::kEveryByte : Check::kHeaders, nullptr, &damaged)};
  for (const int64_t slot : damaged) arena_.invalidate_slot(slot);
  return out;
}

Status CheckpointNode::follow(RestoreChoice choice, std::span<const uint64_t> starts) {
  const int64_t step = choice.step;
  RT_TRY(decider_->follow(std::move(choice), starts));
  persister_->gone_on_from(step);
  return {};
}

bool CheckpointNode::promise(const WholeSlot& slot) {
  const std::vector<SlotView> views = arena_.views();
  if (slot.slot < 0 || slot.slot >= std::ssize(views)) return false;
  const SlotView& view = views[static_cast<size_t>(slot.slot)];
  if (!view.whole || view.step != slot.step || view.incarnation != slot.incarnation) return false;
  persister_->promise(slot.slot, slot.step);
  return true;
}

Status CheckpointNode::save(const WholeSlot& slot) {
  if (!promise(slot)) return Error{ErrorCode::kInternal, fmt::format("step {} is not whole here", slot.step)};
  return persister_->flush(options_.leave, true);
}

Result<std::optional<WholeSlot>> CheckpointNode::unsaved(const HostMemory& others) {
  PosixBackend io;  // that of the loop reads no more once somebody has asked to stop
  RT_TRY_SET(const int64_t ruined,
             drop_ruined(arena_, io, options_.checkpoints_dir, [this] { return persister_->check_folder(); }));
  if (ruined > 0) labels_.note_ruined();
  RT_TRY(persister_->flush(options_.leave, true));
  const std::optional<CommonSnapshot> newest =
      newest_verified(arena_, Check::kEveryByte, nullptr, nullptr, &others.whole);
  if (!newest || newest->step == 0) return std::optional<WholeSlot>();
  const Result<CheckpointInfo> on_disk = newest_complete(io, options_.checkpoints_dir);
  if (on_disk.ok() && on_disk.value().step >= newest->step) {
    const Result<VerifyReport> checked =
        verify_checkpoint(io, on_disk.value().dir, {.max_damages = 1, .structure = false});
    if (checked.ok() && checked.value().whole()) return std::optional<WholeSlot>();
  }
  return std::optional(WholeSlot{newest->slot, newest->incarnation, newest->step});
}

Status CheckpointNode::open_labels() {
  const Result<std::vector<telemetry::StepMetrics>> steps =
      telemetry::read_metrics(options_.checkpoints_dir.parent_path() / "metrics.jsonl");
  if (steps.ok()) labels_.seed(steps.value());
  RT_TRY_SET(const Names names, list_names(*io_, options_.checkpoints_dir));
  if (names.steps.empty()) return {};
  RT_TRY_SET(const Labels read, read_labels(*io_, options_.checkpoints_dir));
  if (!read.empty()) return labels_.settle(*io_, options_.checkpoints_dir);
  const Labels labels = labels_from_metrics(*io_, options_.checkpoints_dir,
                                            trainer::watch_rules(plan_, options_.level_after), plan_.steps);
  if (!labels.empty()) RT_TRY(write_labels(*io_, options_.checkpoints_dir, labels));
  return labels_.settle(*io_, options_.checkpoints_dir);
}

void CheckpointNode::note_step(const telemetry::StepMetrics& metrics) {
  labels_.note(metrics);
  if (labels_.may_prove(metrics.step)) persister_->settle_labels();
}

Result<trainer::TrainPosition> CheckpointNode::decided_position() const {
  const arena::Decision& decision = arena_.control().decision;
  if (decision.source != arena::Source::kMemory) return trainer::TrainPosition{};
  return decode_position({decision.position, static_cast<size_t>(decision.position_bytes)});
}

void CheckpointNode::request_stop() { arena_.control().stop.store(1, std::memory_order_release); }

void CheckpointNode::stop_at_step(int64_t step) {
  arena_.control().stop_at_save = 0;
  arena_.control().stop_at_step.store(step, std::memory_order_release);
}

void CheckpointNode::stop_at_save() {
  arena_.control().stop_at_step = 0;
  arena_.control().stop_at_save.store(1, std::memory_order_release);
}

void CheckpointNode::take_back_stop() {
  arena_.control().stop_at_step = 0;
  arena_.control().stop_at_save = 0;
}

void CheckpointNode::notify() { persister_->notify(); }

std::vector<PersistEvent> CheckpointNode::take_events() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

std::optional<PersistEvent> CheckpointNode::flush(const std::function<Status()>& save) {
  persister_->wait_told();  // ranks leave once a save is on disk, which is before retention has done its part
  std::vector<PersistEvent> before = take_events();
  const Status flushed = save ? save() : persister_->flush(options_.leave);
  if (!flushed.ok()) keep_memory_ = true;  // told by the event; the memory is the only copy
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
