#include "ckpt/persister.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/layout.h"
#include "ckpt/persist/priority.h"
#include "ckpt/position.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/label_store.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/retention.h"
#include "ckpt/retention/spare_files.h"
#include "ckpt/run_labels.h"
#include "ckpt/slot_source.h"
#include "ckpt/snapshot/snapshot.h"
#include "ckpt/store/held_folder.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/verify/verify.h"
#include "runtime/core/clock.h"

namespace cairn::ckpt {
namespace {

constexpr std::chrono::milliseconds kLookEvery{20}, kAskEvery{50};
/// What stands in the way of a save is the disk's: a person who takes a right away, or mounts read-only, beside a run
/// refuses no recipe and no flag, and the same command goes on once that is mended.
Status storage_failure(Status saved) {
  if (saved.ok() || saved.error().os_errno == 0 || saved.error().code != ErrorCode::kInvalidInput) return saved;
  Error error = std::move(saved).error();
  error.code = ErrorCode::kIo;
  return error;
}

constexpr int64_t kMostThrown = 5;                        // writes in a row that ran out of memory, a second apart
constexpr int64_t kSmallArenaBytes = int64_t{256} << 20;  // with the weights; a save takes some 10 ms of CPU then

}  // namespace

struct NodePersister::Impl {
  /// One thread, and what it keeps from save to save.
  struct Writer {
    Writer(const Arena& arena, std::unique_ptr<IoBackend> backend, BufferStore* buffers)
        : io(std::move(backend)), source(arena), cache(buffers) {}
    std::unique_ptr<IoBackend> io;
    SlotSource source;
    SaveCache cache;
    int64_t thrown = 0;  // times in a row
    std::thread thread;
  };

  Arena& arena;
  std::filesystem::path dir;
  PersistOptions options;
  /// Of the dead agent whose memory this may be: until this one has decided where the run goes on, nobody knows whether
  /// what is on disk is of a line that was left, or newer than the memory.
  const uint64_t adopted = arena.control().incarnation.load(std::memory_order_acquire);
  bool decided() const { return arena.control().incarnation.load(std::memory_order_acquire) != adopted; }
  std::vector<std::unique_ptr<Writer>> writers;

  std::atomic<bool> given_up{false};
  std::mutex after_save;                         // one at a time: retention, reports
  CatalogCache catalog;                          // guarded by after_save
  SpareFiles spares;                             // of what retention removes
  std::shared_ptr<const Manifest> newest_saved;  // with options.incremental: what the next save may refer to
  std::mutex of_folder;                          // guards the next two
  std::optional<HeldFolder> folder;              // none: it was not there, or is on no disk
  int64_t known_step = -1;                       // saved last, or the highest that was there

  std::mutex mutex;  // guards newest_saved and what follows; never held while writing
  std::condition_variable changed;
  bool stopping = false, flushing = false, flushed = false, labels_due = false;
  bool promised_alone = false;    // of that flush
  int64_t notices = 0;            // counts up: each thread looks after each
  int64_t busy = 0;               // threads that look for work or do it
  std::set<int64_t> again;        // steps promised while a write of them was under way
  int64_t newest_committed = -1;  // of the line that the run is on
  int64_t last_step = -1;
  Status last_status;  // of last_step, the newest written since flush() began

  void hold_folder(IoBackend& io);
  Status is_the_folder(IoBackend& io);
  Status check_folder(IoBackend& io);
  /// The same as a question, for what writes by path.
  std::function<Status()> folder_check(Writer& writer) {
    return [this, &io = *writer.io] { return check_folder(io); };
  }
  void prepare(Writer& writer);
  SaveOptions save_options(Writer& writer);
  Status check_not_needed(IoBackend& io, int64_t step) const;
  Result<SaveReport> save_step(IoBackend& io, const std::filesystem::path& checkpoints_dir, Manifest skeleton,
                               std::span<const WriterPart> parts, const SaveOptions& save) const {
    if (options.save_step) return options.save_step(io, checkpoints_dir, std::move(skeleton), parts, save);
    if (!arena.has_world())
      return Error{ErrorCode::kUnsupported, "a step is not saved from the memory of some of its ranks"};
    return save_checkpoint(io, checkpoints_dir, std::move(skeleton), parts, save);
  }
  Result<SaveReport> persist(Writer& writer, const CommonSnapshot& snapshot);
  Status write(Writer& writer, int64_t slot, int64_t step);
  bool write_promised(Writer& writer);
  void write_newest(Writer& writer);
  void retain(Writer& writer, PersistEvent& event);
  void settle(Writer& writer);
  void keep_forensics(Writer& writer);
  bool is_ruined(int64_t step) const { return arena.control().ruined_step.load(std::memory_order_acquire) == step; }
  void failed(int64_t step, const Error& error);
  Status give_up_step(int64_t step, const std::exception& error);
  void loop(Writer& writer);
};

void NodePersister::Impl::hold_folder(IoBackend& io) {
  // Made here and never again: what is saved where a folder has been moved away, or a disk unmounted, nobody finds.
  ignore(make_dirs(io, dir), "the saves will tell");
  if (Result<HeldFolder> held = HeldFolder::open(dir); held.ok()) folder = std::move(held).value();
  if (const Result<Names> names = list_names(io, dir); names.ok() && !names.value().steps.empty())
    known_step = names.value().steps.back();
}

Status NodePersister::Impl::check_folder(IoBackend& io) {
  RT_TRY(is_the_folder(io));  // first: where it is away, nothing tells whose it is
  return options.check_owner ? options.check_owner() : Status();
}

Status NodePersister::Impl::is_the_folder(IoBackend& io) {
  const std::lock_guard lock(of_folder);
  if (!folder) {
    const Result<FileStat> there = io.stat(dir);
    if (there.ok() || !is_not_found(there.error())) return {};
    return Error{ErrorCode::kIo, fmt::format("{}: {}", dir.string(), kFolderGone), ENOENT};
  }
  Status same = folder->check();
  if (same.ok() || known_step < 0 || !io.stat(dir / step_dir_name(known_step) / kManifestName).ok()) return same;
  // Mounted anew, some file systems have other numbers; and checkpoints may be moved to a larger disk.
  if (Result<HeldFolder> held = HeldFolder::open(dir); held.ok()) folder = std::move(held).value();
  return {};
}

/// Ahead of the first save: libhdf5 takes 0.1 ms a dataset, seconds with many, and new memory its time too. An error
/// will be the save's to tell.
void NodePersister::Impl::prepare(Writer& writer) {
  const auto attempt = [&]() -> Status {
    RT_TRY_SET(Manifest skeleton, writer.source.take_skeleton());
    const SaveOptions save = save_options(writer);
    Status prepared = prepare_layouts(skeleton, writer.source.parts(0), save);
    if (prepared.ok()) prepared = prepare_buffers(writer.source.parts(0), save);
    writer.source.give_back(std::move(skeleton));
    return prepared;
  };
  ignore(attempt(), "the first save finds it too");
}

SaveOptions NodePersister::Impl::save_options(Writer& writer) {
  SaveOptions save = options.save;
  save.replace_referred = decided();
  save.check_folder = folder_check(writer);
  save.cancel = &given_up;
  save.cache = &writer.cache;
  save.spares = &spares;
  save.chunk_bytes = arena.chunk_bytes();
  save.checksum_bytes = writer.source.checksum_bytes();
  save.huge_pages = arena.huge_pages();
  return save;
}

/// That no step refers to the save of `step` that the memory's would replace. Save_checkpoint refuses it too, but does
/// not know what else a person can do.
Status NodePersister::Impl::check_not_needed(IoBackend& io, int64_t step) const {
  const std::filesystem::path there = dir / step_dir_name(step);
  if (const Result<FileStat> stat = io.stat(there); !stat.ok()) return {};
  RT_TRY_SET(const std::vector<int64_t> others, steps_that_need(io, dir, step));
  if (others.empty()) return {};
  return Error{
      ErrorCode::kInvalidInput,
      fmt::format("step {} was not saved: {} is another save of it, and step {} refers to its files. To go on "
                  "from what is on disk, remove {}, which gives up the step in memory; to resume from that one, "
                  "move these steps out of {} first, all of them",
                  step, there.string(), fmt::join(others, ", "), arena.name(), dir.string())};
}

/// Writes one whole slot. Returns what save_checkpoint reports.
Result<SaveReport> NodePersister::Impl::persist(Writer& writer, const CommonSnapshot& snapshot) {
  RT_TRY_SET(const trainer::TrainPosition position, decode_position(snapshot.position));
  RT_TRY_SET(Manifest manifest, writer.source.take_skeleton());
  put_position(position, manifest);
  put_starts(arena.starts(), manifest);
  put_lineage(options.lineage, manifest);
  RT_TRY(check_folder(*writer.io).with(fmt::format("step {} was not saved", position.step)));
  if (options.before_save) {
    std::vector<std::string> news = arena.news_until(position.step - 1);
    news.push_back(position.metrics);
    options.before_save(position.step, news);
    if (options.labels != nullptr) options.labels->note(news);
  }
  manifest.created_unix_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  SaveOptions save = save_options(writer);
  if (!save.replace_referred) RT_TRY(check_not_needed(*writer.io, position.step));
  std::shared_ptr<const Manifest> base;
  if (options.incremental) {
    const std::lock_guard lock(mutex);
    base = newest_saved;
  }
  save.base = base.get();
  RT_TRY_SET(SaveReport report,
             save_step(*writer.io, dir, std::move(manifest), writer.source.parts(snapshot.slot, snapshot.ranks), save));
  if (save.codec == Codec::kRaw) spares.limit(report.file_bytes * options.in_flight);  // coded files do not use them
  {
    const std::lock_guard lock(of_folder);
    known_step = position.step;
  }
  if (options.incremental) {
    const std::lock_guard lock(mutex);
    if (!newest_saved || newest_saved->step <= report.manifest.step)
      newest_saved = std::make_shared<const Manifest>(std::move(report.manifest));
  } else {
    writer.source.give_back(std::move(report.manifest));
  }
  return report;
}

void NodePersister::Impl::retain(Writer& writer, PersistEvent& event) {
  if (!options.retention && options.labels == nullptr) return;
  if (const Status meant = check_folder(*writer.io); !meant.ok()) {
    event.problems.push_back(meant.error().message);
    return;
  }
  // What is removed relies on the labels that are on disk: where new ones cannot be written, as on a full disk, the old
  // ones keep no less.
  if (options.labels != nullptr) {
    if (const Status settled = options.labels->settle(*writer.io, dir, &catalog, folder_check(writer)); !settled.ok())
      event.problems.push_back(settled.error().message);
  }
  if (!options.retention) return;
  // The newest one is kept by name: after going back in a run there may be higher steps of an older line. Not by
  // Control::persisted_step: ranks that start anew out of memory set that to 0 beside a save.
  RetentionPolicy policy = *options.retention;
  {
    const std::lock_guard lock(mutex);
    policy.keep_steps.push_back(newest_committed);
  }
  Result<RetentionReport> kept =
      apply_retention(*writer.io, dir, policy, options.save.writer.value_or(this_writer()), &catalog, &spares);
  if (!kept.ok()) {
    event.problems.push_back(kept.error().message);
    return;
  }
  event.removed = kept.value().removed;
  event.problems.insert(event.problems.end(), kept.value().problems.begin(), kept.value().problems.end());
}

void NodePersister::Impl::settle(Writer& writer) {
  const std::lock_guard one_at_a_time(after_save);
  if (options.labels != nullptr && check_folder(*writer.io).ok())
    ignore(options.labels->settle(*writer.io, dir, &catalog, folder_check(writer)),
           "the next save tries again, and removes nothing before");
}

/// The state that the ranks have found ruined, where a person may look at it and no start does.
void NodePersister::Impl::keep_forensics(Writer& writer) {
  if (options.forensics.empty()) return;
  const std::vector<SlotView> views = arena.views();
  for (int64_t slot = 0; slot < arena.slots(); ++slot) {
    if (!views[slot].whole || !is_ruined(views[slot].step)) continue;
    const auto attempt = [&]() -> Status {
      RT_TRY_SET(const CommonSnapshot snapshot, read_common(arena, slot, Check::kHeaders));
      RT_TRY_SET(const trainer::TrainPosition position, decode_position(snapshot.position));
      RT_TRY_SET(Manifest manifest, writer.source.take_skeleton());
      put_position(position, manifest);
      manifest.created_unix_ms = static_cast<int64_t>(SystemClock().unix_s() * 1000);
      std::span<const WriterPart> parts = writer.source.parts(slot, snapshot.ranks);
      std::vector<WriterPart> as_it_is(parts.begin(), parts.end());
      for (WriterPart& part : as_it_is) {
        for (ShardData& shard : part.shards) shard.finite = false;
      }
      SaveOptions save = options.save;
      save.chunk_bytes = arena.chunk_bytes();
      save.checksum_bytes = writer.source.checksum_bytes();
      RT_TRY_SET(const SaveReport report,
                 save_step(*writer.io, options.forensics, std::move(manifest), as_it_is, save));
      return put_label(*writer.io, options.forensics, position.step, Label::kBad,
                       "ruined weights, kept to be looked at", "guard");
    };
    if (const Status kept = attempt(); !kept.ok()) {
      const std::lock_guard one_at_a_time(after_save);
      if (options.on_event) options.on_event({.step = 0, .status = kept});
    }
  }
}

void NodePersister::Impl::failed(int64_t step, const Error& error) {
  arena::Control& control = arena.control();
  if (control.failed_step.load(std::memory_order_acquire) > step) return;  // ranks wait for the newest
  const size_t size = std::min(error.message.size(), static_cast<size_t>(arena::kMessageBytes - 1));
  std::memcpy(control.failure, error.message.data(), size);
  control.failure[size] = 0;
  control.failed_code.store(static_cast<int32_t>(error.code), std::memory_order_relaxed);
  control.failed_step.store(step, std::memory_order_release);
}

Status NodePersister::Impl::give_up_step(int64_t step, const std::exception& error) {
  const Status status = Error{ErrorCode::kInternal, fmt::format("saving step {}: {}", step, error.what())};
  failed(step, status.error());
  {
    const std::lock_guard lock(mutex);
    if (step >= last_step) {
      last_step = step;
      last_status = status;
    }
  }
  const std::lock_guard one_at_a_time(after_save);
  if (options.on_event) options.on_event({.step = step, .status = status});
  return status;
}

Status NodePersister::Impl::write(Writer& writer, int64_t slot, int64_t step) {
  PersistEvent event{.step = step};
  if (arena.control().reserved[slot].load(std::memory_order_acquire) == -step)
    event.asked = arena.control().asked[slot];
  const auto begin = std::chrono::steady_clock::now();
  const auto attempt = [&]() -> Status {
    RT_TRY_SET(const CommonSnapshot snapshot, read_common(arena, slot, Check::kHeaders));
    for (const RankSnapshot& rank : snapshot.ranks) {
      event.snapshot_ms = std::max(event.snapshot_ms, static_cast<double>(rank.pause_ns) * 1e-6);
    }
    RT_TRY_SET(SaveReport report, persist(writer, snapshot));
    event.dir = report.dir;
    event.bytes = report.payload_bytes;
    event.reused_files = report.reused_files;
    if (!report.leftover.empty()) event.problems.push_back("could not remove " + report.leftover);
    return {};
  };
  event.status = storage_failure(attempt());
  event.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const std::lock_guard one_at_a_time(after_save);
  if (event.status.ok()) {
    std::atomic<int64_t>& persisted = arena.control().persisted_step;
    if (persisted.load(std::memory_order_acquire) < step) persisted.store(step, std::memory_order_release);
    {
      const std::lock_guard lock(mutex);
      newest_committed = std::max(newest_committed, step);
    }
    retain(writer, event);
  } else {
    // Whatever has scribbled over it: the next life looks at every byte before it goes on from memory.
    if (event.status.error().code == ErrorCode::kCorrupt)
      arena.control().distrusted.store(1, std::memory_order_release);
    if (event.status.error().code == ErrorCode::kGuard)
      arena.control().ruined_step.store(step, std::memory_order_release);
    failed(step, event.status.error());
  }
  {
    const std::lock_guard lock(mutex);
    if (step >= last_step) {
      last_step = step;
      last_status = event.status;
    }
  }
  if (options.on_event) options.on_event(event);
  return std::move(event.status);
}

bool NodePersister::Impl::write_promised(Writer& writer) {
  arena::Control& control = arena.control();
  const std::vector<SlotView> views = arena.views();
  int64_t slot = -1, step = 0;
  for (int64_t k = 0; k < arena.slots(); ++k) {  // the older promise first
    const int64_t reserved = control.reserved[k].load(std::memory_order_acquire);
    if (reserved <= 0 || !views[k].whole || views[k].step != reserved) continue;
    if (options.is_due && !is_ruined(reserved) && !options.is_due(reserved)) continue;
    if (slot < 0 || reserved < step) {
      slot = k;
      step = reserved;
    }
  }
  if (slot < 0) return false;
  int64_t expected = step;
  if (is_ruined(step)) {  // the promise of a save that would be of no use
    control.reserved[slot].compare_exchange_strong(expected, 0);
    return true;
  }
  if (!control.reserved[slot].compare_exchange_strong(expected, -step)) return true;  // taken or taken back; look again
  // A slot that was whole before the exchange may have been ordered anew, taken back and promised again meanwhile.
  if (const std::vector<SlotView> now = arena.views(); !now[slot].whole || now[slot].step != step) {
    control.reserved[slot].store(step, std::memory_order_release);
    return false;
  }
  Status written;
  try {
    // A dead agent may have kept it: what others need is not written again beneath them. If it is the newest in memory,
    // flush() looks at it.
    const Status free = views[slot].incarnation <= adopted ? check_not_needed(*writer.io, step) : Status();
    if (free.ok() || free.error().code != ErrorCode::kInvalidInput) written = write(writer, slot, step);
    writer.thrown = 0;
  } catch (const std::exception& error) {
    // Memory may be there in a moment. Any other throw comes again: the save has failed, and the ranks learn it.
    const bool again_soon = dynamic_cast<const std::bad_alloc*>(&error) != nullptr && ++writer.thrown < kMostThrown;
    if (again_soon) {
      control.reserved[slot].store(step, std::memory_order_release);  // promised still
      throw;
    }
    writer.thrown = 0;
    written = give_up_step(step, error);
  }
  if (!given_up) control.asked[slot] = 0;
  // Rank 0's host may be done with this step before this one, and the next save be reserved here meanwhile: that stays.
  int64_t mine = -step;
  const std::lock_guard lock(mutex);
  const bool promised_again = again.erase(step) > 0 && !written.ok();
  control.reserved[slot].compare_exchange_strong(mine, given_up || promised_again ? step : 0);
  return !given_up;
}

void NodePersister::Impl::write_newest(Writer& writer) {
  for (;;) {
    keep_forensics(writer);
    const Result<int64_t> dropped = drop_ruined(arena, *writer.io, dir, folder_check(writer));
    if (!dropped.ok()) {  // it stays marked, and is not written
      const std::lock_guard one_at_a_time(after_save);
      if (options.on_event) options.on_event({.step = 0, .status = dropped.error()});
      return;
    }
    if (dropped.value() > 0) {
      if (options.labels != nullptr) options.labels->note_ruined();
      const std::lock_guard lock(mutex);
      newest_committed = std::min(newest_committed, dropped.value() - 1);
    }
    const std::optional<CommonSnapshot> newest = newest_verified(arena, Check::kEveryByte);
    if (!newest || newest->step == 0) return;
    // What a dead agent had written is looked at like anything else that lies there.
    if (decided() && arena.control().persisted_step.load(std::memory_order_acquire) == newest->step) return;
    const Result<CheckpointInfo> on_disk = newest_complete(*writer.io, dir);
    if (on_disk.ok() && on_disk.value().step >= newest->step) {
      // Its files have the right sizes; only its bytes are a reason to give up what memory holds.
      const Result<VerifyReport> checked =
          verify_checkpoint(*writer.io, on_disk.value().dir, {.max_damages = 1, .structure = false});
      if (checked.ok() && checked.value().whole()) return;
    }
    ignore(write(writer, newest->slot, newest->step), "whoever flushes is told of last_status");
    if (!is_ruined(newest->step)) return;
    const std::lock_guard lock(mutex);  // the one before it may do
    last_step = -1;
    last_status = {};
  }
}

void NodePersister::Impl::loop(Writer& writer) {
  if (options.low_priority) lower_thread_priority(arena.bytes() < kSmallArenaBytes ? kSmallSaveNice : kLeastNice);
  try {
    prepare(writer);
  } catch (const std::exception&) {  // out of memory: the save will tell
  }
  std::unique_lock lock(mutex);
  while (!stopping) {
    arena.control().beat.fetch_add(1, std::memory_order_relaxed);
    const int64_t seen = notices;
    ++busy;
    lock.unlock();
    bool more = false;
    try {
      more = write_promised(writer);
    } catch (const std::exception& error) {  // out of memory while planning the write: the promise stays
      if (options.on_event) {
        const std::lock_guard one_at_a_time(after_save);
        options.on_event({.step = 0, .status = Error{ErrorCode::kInternal, std::string("persister: ") + error.what()}});
      }
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    lock.lock();
    --busy;
    if (more) continue;
    if (std::exchange(labels_due, false)) {
      lock.unlock();
      settle(writer);
      lock.lock();
    }
    if (flushing && busy == 0) {  // else whoever is busy comes here when done
      flushing = false;
      last_step = -1;  // an older promise that failed was told; it counts where it is the newest, which is tried again
      last_status = {};
      lock.unlock();
      try {
        if (!given_up && !promised_alone) write_newest(writer);
        if (!given_up) settle(writer);
      } catch (const std::exception& error) {  // out of memory; whoever flushes keeps the arena then
        const std::lock_guard guard(mutex);
        last_status = Error{ErrorCode::kInternal, std::string("persister: ") + error.what()};
      }
      lock.lock();
      flushed = true;
      changed.notify_all();
      continue;
    }
    changed.wait_for(lock, kLookEvery, [&] { return stopping || notices != seen; });
  }
}

NodePersister::NodePersister(Arena& arena, const MakeIo& make_io, std::filesystem::path checkpoints_dir,
                             PersistOptions options)
    : impl_(new Impl{arena, std::move(checkpoints_dir), std::move(options)}) {
  ranks_gone();  // an adopted arena may hold promises that its ranks did not keep
  const int64_t threads = std::clamp<int64_t>(impl_->options.in_flight, 1, std::max<int64_t>(1, arena.slots() - 2));
  for (int64_t k = 0; k < threads; ++k)
    impl_->writers.push_back(std::make_unique<Impl::Writer>(arena, make_io(), impl_->options.buffers));
  impl_->hold_folder(*impl_->writers.front()->io);
  for (size_t k = 0; k < impl_->writers.size(); ++k) {
    try {
      impl_->writers[k]->thread =
          std::thread([impl = impl_.get(), mine = impl_->writers[k].get()] { impl->loop(*mine); });
    } catch (const std::system_error&) {  // a limit of threads: fewer saves at once
      if (k == 0) throw;
      impl_->writers.resize(k);
    }
  }
}

NodePersister::~NodePersister() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_all();
  for (const std::unique_ptr<Impl::Writer>& writer : impl_->writers) writer->thread.join();
  PosixBackend io;
  if (!impl_->given_up) impl_->spares.clear(io);
}

void NodePersister::notify() {
  {
    const std::lock_guard lock(impl_->mutex);
    ++impl_->notices;
  }
  impl_->changed.notify_all();
}

void NodePersister::settle_labels() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->labels_due = true;
  }
  notify();
}

void NodePersister::wait_told() { const std::lock_guard one_at_a_time(impl_->after_save); }

void NodePersister::gone_on_from(int64_t step) {
  const std::lock_guard lock(impl_->mutex);
  impl_->newest_committed = std::min(impl_->newest_committed, step);
  if (impl_->newest_saved && impl_->newest_saved->step > step) impl_->newest_saved.reset();
}

Status NodePersister::check_folder() {
  PosixBackend io;  // those of the threads are theirs
  return impl_->check_folder(io);
}

void NodePersister::give_up() { impl_->given_up = true; }

void NodePersister::ranks_gone() {
  // Without the threads: they may be in the middle of a long write, and a restart must not wait for the disk. What they
  // write is marked negative and whole, and is left alone.
  Arena& arena = impl_->arena;
  for (int64_t k = 0; k < arena.slots(); ++k) {
    int64_t reserved = arena.control().reserved[k].load(std::memory_order_acquire);
    if (reserved <= 0) continue;
    const std::vector<SlotView> views = arena.views();
    if (views[k].whole && views[k].step == reserved) continue;
    if (!arena.control().reserved[k].compare_exchange_strong(reserved, 0)) continue;
    // Asked for, and not kept: the next ranks are asked again.
    if (arena.control().asked[k].exchange(0) != 0) arena.control().saves_asked.fetch_add(1, std::memory_order_release);
  }
}

uint64_t NodePersister::ask_save() {
  return impl_->arena.control().saves_asked.fetch_add(1, std::memory_order_release) + 1;
}

std::optional<int64_t> NodePersister::promise_newest() {
  const Arena& arena = impl_->arena;
  arena::Control& control = arena.control();
  const std::vector<SlotView> views = arena.views();
  const std::optional<int64_t> newest = newest_whole(views);
  if (!newest || views[*newest].saving) return std::nullopt;
  const int64_t step = views[*newest].step;
  if (control.persisted_step.load(std::memory_order_acquire) >= step) return std::nullopt;
  int64_t reserved = 0;
  if (!control.reserved[*newest].compare_exchange_strong(reserved, step)) return std::nullopt;
  // The newest whole slot is not written, by the rules (slot_rule.h); whether it was still that, only a look behind the
  // exchange tells. Ranks that have just given up waiting for the disk may write it all the same; its sums refuse it.
  const std::vector<SlotView> now = arena.views();
  if (newest_whole(now) != newest || now[*newest].step != step) {
    reserved = step;
    control.reserved[*newest].compare_exchange_strong(reserved, 0);
    return std::nullopt;
  }
  notify();
  return step;
}

void NodePersister::promise(int64_t slot, int64_t step) {
  {
    const std::lock_guard lock(impl_->mutex);
    int64_t reserved = 0;
    impl_->arena.control().reserved[slot].compare_exchange_strong(reserved, step);
    if (reserved == -step) impl_->again.insert(step);
  }
  notify();
}

Status NodePersister::flush(const std::function<bool()>& leave, bool promised_alone) {
  ranks_gone();
  std::unique_lock lock(impl_->mutex);
  impl_->last_step = -1;
  impl_->last_status = {};
  impl_->flushed = false;
  impl_->flushing = true;
  impl_->promised_alone = promised_alone;
  ++impl_->notices;
  impl_->changed.notify_all();
  while (!impl_->changed.wait_for(lock, kAskEvery, [&] { return impl_->flushed; })) {
    if (leave && leave()) give_up();
  }
  if (impl_->given_up) return Error{ErrorCode::kStopped, "the save was given up"};
  return impl_->last_status;
}

}  // namespace cairn::ckpt
