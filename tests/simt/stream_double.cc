#include "tests/simt/stream_double.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

#include "runtime/core/check.h"
#include "runtime/core/random.h"
#include "tests/simt/device_memory.h"
#include "tests/simt/executor.h"

namespace cairn::simt {

namespace {

constexpr size_t kLong = 64;  // pieces of a queue, from which on adding one does another
constexpr int kSpoilt = 0xa5;
constexpr int64_t kMostGiven = 64 << 10;  // bytes of a copy that a recorder keeps
thread_local int64_t own_waits = 0;

}  // namespace

struct StreamDouble::Mark {
  bool done = false;
  int64_t reached_us = 0;
};

/// One of work, of work that waits for others, an event that is reached, an event that is waited for.
struct StreamDouble::Piece {
  std::function<void()> work;
  std::shared_ptr<Mark> reaches, awaits;
  const std::atomic<uint32_t>* word = nullptr;  // that the host is to raise
  uint32_t value = 0;
  std::function<bool()> tried;  // until it is over

  bool ready() const {
    if (word != nullptr) return static_cast<int32_t>(word->load(std::memory_order_acquire) - value) >= 0;
    return awaits == nullptr || awaits->done;
  }
};

struct StreamDouble::Lane {
  std::deque<Piece> pieces;
  int64_t number = 0;
  bool is_stream = true, destroyed = false;
};

struct StreamDouble::Event {
  std::shared_ptr<Mark> mark;   // null: never recorded
  Lane* captured_on = nullptr;  // recorded in the capture that goes on
  bool timed = false;
};

/// What a graph's stream does, and those that followed it. Marks are made anew for each launch.
struct StreamDouble::Graph {
  std::vector<std::pair<int64_t, Piece>> pieces;  // by branch
  int64_t branches = 0;
};

struct StreamDouble::Capture {
  Lane* origin = nullptr;
  bool invalid = false;
  std::map<Lane*, int64_t> branches;
  std::set<std::shared_ptr<Mark>> marks;   // recorded in this capture
  std::set<std::shared_ptr<Mark>> joined;  // that the origin's work follows
  struct Recorded {
    Lane* lane = nullptr;
    size_t work = 0, at = 0;  // pieces of work of the lane, and pieces of the graph, before it
  };
  std::map<std::shared_ptr<Mark>, Recorded> places;
  std::map<Lane*, size_t> sizes;  // pieces of work of each branch, which others must have followed
  Graph graph;

  void add(Lane& lane, Piece piece) {
    const auto [branch, fresh] = branches.try_emplace(&lane, static_cast<int64_t>(branches.size()));
    if (piece.work) ++sizes[&lane];
    graph.pieces.emplace_back(branch->second, std::move(piece));
  }
};

StreamDouble::StreamDouble(uint64_t seed, int64_t memory_bytes, Backing backing)
    : seed_(seed), random_(seed), memory_bytes_(memory_bytes), records_(backing == Backing::kNone) {
  take_launches([this](CUstream_st* stream, const Launch& of, std::function<void()> work) {
    return launch(stream, std::move(work), ordered_kernel(of));
  });
  open_to_host(false);
}

StreamDouble::~StreamDouble() {
  take_launches({});
  open_to_host(true);
  for (const auto& [memory, bytes] : memory_) release(const_cast<void*>(memory), bytes);
}

Ordered ordered_kernel(const Launch& of) {
  return {
      .kind = Ordered::Kind::kKernel,
      .kernel = of.kernel,
      .numbers = {of.blocks.x, of.blocks.y, of.blocks.z, of.threads.x, of.threads.y, of.threads.z, of.shared_bytes}};
}

void StreamDouble::tell(const Lane& lane, Ordered ordered) const {
  if (!hear_) return;
  ordered.stream = lane.number;
  hear_(ordered);
}

void StreamDouble::release(void* memory, int64_t bytes) const {
  if (!records_) return device_free(memory);
  munmap(memory, static_cast<size_t>(bytes));
}

// --- calls
// ------------------------------------------------------------------------------------------------------------

int StreamDouble::begin_call() {
  ++counts_.calls;
  if (refusal_.calls < 0) return 0;
  if (refusal_.calls > 0) {
    --refusal_.calls;
    return 0;
  }
  if (refusal_.done && !refusal_.from_then_on) return 0;
  refusal_.done = true;
  return refusal_.error;
}

template <typename Body>
int StreamDouble::call(const Body& body) {
  const std::lock_guard lock(mutex_);
  const int error = begin_call();
  return error != 0 ? error : body();
}

/// What a capture does not allow, and is spoilt by.
template <typename Body>
int StreamDouble::call_outside_capture(const Body& body) {
  return call([&] {
    if (capture_ == nullptr) return body();
    capture_->invalid = true;
    return kNotInCapture;
  });
}

template <typename Body>
int StreamDouble::give_back(const Body& body) {
  const std::lock_guard lock(mutex_);
  const int error = begin_call(), done = body();
  return done != 0 ? done : error;
}

/// Not in a capture either.
template <typename Body>
int StreamDouble::wait(const Body& body) {
  const std::lock_guard lock(mutex_);
  const int error = begin_call();
  if (capture_ != nullptr) {
    capture_->invalid = true;
    return error != 0 ? error : kNotInCapture;
  }
  const int done = body();
  return done != 0 ? done : error;
}

StreamDouble::Lane* StreamDouble::lane_of(Stream stream) {
  for (const auto& lane : lanes_) {
    if (reinterpret_cast<Stream>(lane.get()) == stream && lane->is_stream && !lane->destroyed) return lane.get();
  }
  if (stream == nullptr) misuse("work in the default stream");
  return nullptr;
}

void StreamDouble::count_wait() {
  ++counts_.waits;
  ++own_waits;
}

void StreamDouble::misuse(std::string what) { misuses_.push_back(std::move(what)); }

bool StreamDouble::is_pinned(const void* at, int64_t bytes) const {
  const auto* const first = static_cast<const std::byte*>(at);
  return std::any_of(pinned_.begin(), pinned_.end(), [&](const auto& area) {
    const auto* const begin = static_cast<const std::byte*>(area.first);
    return first >= begin && first + bytes <= begin + area.second;
  });
}
bool StreamDouble::is_allocated(const void* at, int64_t bytes) const {
  const auto* const first = static_cast<const std::byte*>(at);
  return std::any_of(memory_.begin(), memory_.end(), [&](const auto& area) {
    const auto* const begin = static_cast<const std::byte*>(area.first);
    return first >= begin && first + bytes <= begin + area.second;
  });
}
bool StreamDouble::touches_device(const void* at, int64_t bytes) const {
  const auto* const first = static_cast<const std::byte*>(at);
  return std::any_of(memory_.begin(), memory_.end(), [&](const auto& area) {
    const auto* const begin = static_cast<const std::byte*>(area.first);
    return first < begin + area.second && begin < first + bytes;
  });
}

/// While one is there, device memory is open: to pieces of work, and to what else the host does then.
struct StreamDouble::Door {
  explicit Door(int& doors) : doors_(doors) {
    if (doors_++ == 0) open_to_host(true);
  }
  ~Door() {
    if (--doors_ == 0) open_to_host(false);
  }
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

 private:
  int& doors_;
};

// --- doing the work
// ---------------------------------------------------------------------------------------------------

bool StreamDouble::run_one() {
  std::vector<Lane*> ready;
  for (const auto& lane : lanes_) {
    if (lane->pieces.empty()) continue;
    if (lane->pieces.front().ready()) ready.push_back(lane.get());
  }
  if (ready.empty()) return false;
  const auto place = [this](const Lane* of) { return mix64(seed_ << 32 ^ static_cast<uint64_t>(of->number)); };
  const auto choose = [&] {
    return seed_ % 2 == 0 ? ready.begin() + static_cast<std::ptrdiff_t>(random_() % ready.size())
                          : std::min_element(ready.begin(), ready.end(),
                                             [&](const Lane* a, const Lane* b) { return place(a) < place(b); });
  };
  auto chosen = choose();
  while ((*chosen)->pieces.front().tried) {
    const Door door(doors_);
    if ((*chosen)->pieces.front().tried()) break;
    ready.erase(chosen);
    if (ready.empty()) return false;
    chosen = choose();
  }
  Lane& lane = **chosen;
  const Piece piece = std::move(lane.pieces.front());
  lane.pieces.pop_front();
  if (piece.reaches != nullptr) {
    piece.reaches->done = true;
    piece.reaches->reached_us = now_us_;
  }
  if (piece.work) {
    ++now_us_;
    const Door door(doors_);
    RT_CHECK(!running_, "work on a device that waits for the device");
    running_ = true;
    struct Ran {
      bool& running;
      ~Ran() { running = false; }
    } const ran{running_};
    piece.work();
  }
  std::erase_if(lanes_, [](const auto& of) { return of->destroyed && of->pieces.empty(); });
  return true;
}

void StreamDouble::run_until(const std::function<bool()>& done) {
  while (!done()) {
    {
      const Door door(doors_);  // one for as many pieces as there are
      bool ran = false;
      while (!done() && run_one()) ran = true;
      if (ran) continue;
    }
    const bool for_others = std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
      return !lane->pieces.empty() && (lane->pieces.front().word != nullptr || lane->pieces.front().tried);
    });
    if (for_others && held_for_ == std::this_thread::get_id()) {
      held_for_ = {};
      ++waited_for_held_;
      continue;
    }
    if (for_others) {  // another thread of the host, or another process
      mutex_.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      mutex_.lock();
      continue;
    }
    std::string who;
    for (const auto& lane : lanes_) {
      if (!lane->pieces.empty()) who += fmt::format(" stream {} ({} pieces)", lane->number, lane->pieces.size());
    }
    throw Stop(fmt::format("streams wait for each other:{}", who));
  }
}

int StreamDouble::add(Lane& lane, std::function<void()> work) {
  if (records_) return 0;
  if (capture_ != nullptr && capture_->branches.count(&lane) > 0) {
    capture_->add(lane, {std::move(work), nullptr, nullptr});
    return 0;
  }
  lane.pieces.push_back({std::move(work), nullptr, nullptr});
  if (lane.pieces.size() > kLong) run_one();
  return 0;
}

// --- memory
// -----------------------------------------------------------------------------------------------------------

int StreamDouble::allocate(void** memory, int64_t bytes) {
  return call_outside_capture([&] {
    if (bytes <= 0) return kInvalidValue;
    if (allocated_bytes_ + bytes > memory_bytes_) return kNoMemory;
    ++counts_.allocations;
    if (records_) {  // addresses that no code may touch
      *memory =
          mmap(nullptr, static_cast<size_t>(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (*memory == MAP_FAILED) return kNoMemory;
    } else {
      open_to_host(true);
      *memory = device_alloc(bytes);
      open_to_host(false);
    }
    memory_[*memory] = bytes;
    allocated_bytes_ += bytes;
    return 0;
  });
}

int StreamDouble::map(void** memory, int64_t bytes) {
  const int error = allocate(memory, bytes);
  const std::lock_guard lock(mutex_);
  if (error == 0) mapped_.insert(*memory);
  return error;
}

int StreamDouble::unmap(void* memory) {
  return give_back([&] {
    if (mapped_.erase(memory) == 0) return kInvalidValue;
    if (std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return !lane->pieces.empty(); })) {
      misuse("memory unmapped while work is under way");
    }
    const auto found = memory_.find(memory);
    const int64_t bytes = found->second;
    allocated_bytes_ -= bytes;
    memory_.erase(found);
    release(memory, bytes);
    return 0;
  });
}

int StreamDouble::free(void* memory) {
  return give_back([&] {
    const auto found = memory_.find(memory);
    if (found == memory_.end() || mapped_.contains(memory)) return kInvalidValue;
    if (capture_ != nullptr) misuse("memory freed in a capture");
    run_until([&] {  // as the runtime does: all that is ordered comes first
      return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->pieces.empty(); });
    });
    const int64_t bytes = found->second;
    allocated_bytes_ -= bytes;
    memory_.erase(found);
    release(memory, bytes);
    return 0;
  });
}

int StreamDouble::pin(void* host, int64_t bytes) {
  return call_outside_capture([&] {
    if (bytes <= 0 || is_pinned(host, 1)) return kInvalidValue;
    ++counts_.pins;
    pinned_[host] = bytes;
    return 0;
  });
}

int StreamDouble::unpin(void* host) {
  return give_back([&] {
    const auto found = pinned_.find(host);
    if (found == pinned_.end()) return kInvalidValue;
    const auto* const begin = static_cast<const std::byte*>(host);
    for (const auto& [at, bytes] : coming_) {
      if (at >= begin && at < begin + found->second) misuse("memory unpinned while a copy is on its way");
    }
    pinned_.erase(found);
    return 0;
  });
}

// --- streams and events
// -----------------------------------------------------------------------------------------------

int StreamDouble::create_stream(Stream* stream) {
  return call_outside_capture([&] {
    auto made = std::make_unique<Lane>();
    made->number = ++streams_made_;
    *stream = reinterpret_cast<Stream>(made.get());
    lanes_.push_back(std::move(made));
    return 0;
  });
}

int StreamDouble::destroy_stream(Stream stream) {
  return give_back([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr) return kInvalidHandle;
    lane->destroyed = true;
    std::erase_if(lanes_, [](const auto& of) { return of->destroyed && of->pieces.empty(); });
    return 0;
  });
}

int StreamDouble::create_event(Event** event, bool timed) {
  return call([&] {
    *event = events_.emplace_back(std::make_unique<Event>()).get();
    (*event)->timed = timed;
    return 0;
  });
}

int StreamDouble::destroy_event(Event* event) {
  return give_back([&] {
    return std::erase_if(events_, [&](const auto& of) { return of.get() == event; }) == 1 ? 0 : kInvalidHandle;
  });
}

int StreamDouble::record(Event* event, Stream stream) {
  return call([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr || event == nullptr) return kInvalidHandle;
    event->mark = std::make_shared<Mark>();
    event->captured_on = nullptr;
    if (capture_ != nullptr && capture_->branches.count(lane) > 0) {
      event->captured_on = lane;
      capture_->marks.insert(event->mark);
      capture_->places[event->mark] = {lane, capture_->sizes[lane], capture_->graph.pieces.size()};
      capture_->add(*lane, {nullptr, event->mark, nullptr});
      return 0;
    }
    lane->pieces.push_back({nullptr, event->mark, nullptr});
    return 0;
  });
}

int StreamDouble::wait_event(Stream stream, Event* event) {
  return call([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr || event == nullptr) return kInvalidHandle;
    if (event->mark == nullptr) {
      misuse("an event is waited for that was never recorded: nothing is waited for");
      return 0;
    }
    const bool of_capture = capture_ != nullptr && capture_->marks.count(event->mark) > 0;
    if (of_capture) {
      capture_->add(*lane, {nullptr, nullptr, event->mark});  // which takes the stream into the capture
      if (lane == capture_->origin) capture_->joined.insert(event->mark);
      return 0;
    }
    if (capture_ != nullptr && capture_->branches.count(lane) > 0) {
      capture_->invalid = true;
      return kCaptureIsolation;
    }
    lane->pieces.push_back({nullptr, nullptr, event->mark});
    return 0;
  });
}

int StreamDouble::wait_word(Stream stream, const std::atomic<uint32_t>* word, uint32_t value) {
  return call_outside_capture([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr) return kInvalidHandle;
    if (!is_pinned(word, sizeof(*word))) return kInvalidValue;
    lane->pieces.push_back({.word = word, .value = value});
    return 0;
  });
}

int StreamDouble::copy(void* to, const void* from, int64_t bytes, Stream stream) {
  return call([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr) return kInvalidHandle;
    if (bytes < 0) return kInvalidValue;
    if (bytes == 0) return 0;
    ++counts_.copies;
    const bool to_device = is_allocated(to, bytes), from_device = is_allocated(from, bytes);
    if ((!to_device && touches_device(to, bytes)) || (!from_device && touches_device(from, bytes))) {
      return kInvalidValue;  // past the end of an allocation
    }
    if (!to_device && !from_device) return kInvalidValue;
    tell(*lane, {.kind = Ordered::Kind::kCopy, .numbers = {bytes, to_device ? 1 : 0, from_device ? 1 : 0}});
    if (records_) return to_device && from_device ? 0 : copy_recorded(*lane, to, from, bytes, to_device);
    const auto size = static_cast<size_t>(bytes);
    if (to_device && from_device) return add(*lane, [=] { std::memmove(to, from, size); });
    const void* const host = to_device ? from : to;
    const bool captured = capture_ != nullptr && capture_->branches.count(lane) > 0;
    if (is_pinned(host, bytes)) {
      // What is on its way already may be read by the stream first.
      const auto* const begin = static_cast<const std::byte*>(host);
      const bool in_use = std::any_of(coming_.begin(), coming_.end(), [&](const auto& other) {
        return other.first < begin + bytes && begin < other.first + other.second;
      });
      const bool waits_for_host = std::any_of(lane->pieces.begin(), lane->pieces.end(),
                                              [](const Piece& piece) { return piece.word != nullptr; });
      // Behind a word of the host's the copy may be one to memory that is in use until then.
      if (!to_device && !captured && !in_use && !waits_for_host) std::memset(to, kSpoilt, size);
      if (captured) return add(*lane, [=] { std::memcpy(to, from, size); });
      coming_.emplace(begin, bytes);
      const auto come = [=, this] {
        std::memcpy(to, from, size);
        const auto [first, end] = coming_.equal_range(begin);
        coming_.erase(std::find_if(first, end, [&](const auto& one) { return one.second == bytes; }));
      };
      if (to_device || !passes_) return add(*lane, come);
      lane->pieces.push_back({.tried = [=, passes = passes_] { return passes(to) && (come(), true); }});
      return 0;
    }
    if (captured) {
      capture_->invalid = true;
      return kNotInCapture;
    }
    if (to_device) {
      const auto* const begin = static_cast<const std::byte*>(from);
      return add(*lane, [to, staged = std::vector<std::byte>(begin, begin + bytes)] {
        std::memcpy(to, staged.data(), staged.size());
      });
    }
    count_wait();
    add(*lane, [=] { std::memcpy(to, from, size); });
    run_until([&] { return lane->pieces.empty(); });
    return 0;
  });
}

int StreamDouble::copy_recorded(Lane& lane, void* to, const void* from, int64_t bytes, bool to_device) {
  const auto size = static_cast<size_t>(bytes);
  if (to_device) {
    const auto* const begin = static_cast<const std::byte*>(from);
    if (bytes <= kMostGiven) given_[to].assign(begin, begin + bytes);
    return 0;
  }
  const auto* const first = static_cast<const std::byte*>(to);
  const bool is_left = std::any_of(left_alone_.begin(), left_alone_.end(), [&](const auto& area) {
    return first >= area.data() && first + bytes <= area.data() + area.size();
  });
  if (is_left) {
    ++copies_left_alone_;
    lane.pieces.push_back({.tried = [this] { return held_for_ == std::thread::id(); }});
  } else {
    std::memset(to, 0, size);
  }
  if (is_pinned(to, bytes)) return 0;
  count_wait();
  run_until([&] { return lane.pieces.empty(); });
  return 0;
}

void StreamDouble::hold_copies(std::thread::id thread) {
  const std::lock_guard lock(mutex_);
  held_for_ = thread;
}
bool StreamDouble::let_arrive() {
  const std::lock_guard lock(mutex_);
  return std::exchange(held_for_, {}) != std::thread::id();
}
int64_t StreamDouble::copies_left_alone() const {
  const std::lock_guard lock(mutex_);
  return copies_left_alone_;
}
int64_t StreamDouble::waited_for_held() const {
  const std::lock_guard lock(mutex_);
  return waited_for_held_;
}
std::span<const std::byte> StreamDouble::given(const void* at) const {
  const std::lock_guard lock(mutex_);
  const auto found = given_.find(at);
  return found == given_.end() ? std::span<const std::byte>() : found->second;
}

int StreamDouble::set(void* memory, int value, int64_t bytes, Stream stream) {
  return call([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr) return kInvalidHandle;
    if (!is_allocated(memory, bytes)) return kInvalidValue;
    tell(*lane, {.kind = Ordered::Kind::kFill, .numbers = {bytes}});
    return add(*lane, [=] { std::memset(memory, value, static_cast<size_t>(bytes)); });
  });
}

int StreamDouble::host_function(Stream stream, std::function<void()> work) {
  return call([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr) return kInvalidHandle;
    return add(*lane, [work = std::move(work)] {
      open_to_host(false);  // it is host code
      struct Again {
        ~Again() { open_to_host(true); }
      } const again;
      work();
    });
  });
}

int StreamDouble::launch(Stream stream, std::function<void()> work, const Ordered& as) {
  return call([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr) return kInvalidHandle;
    ++counts_.launches;
    tell(*lane, as);
    int error = add(*lane, std::move(work));
    for (int64_t more = more_ ? more_(as) : 0; more > 0 && error == 0; --more) error = add(*lane, [] {});
    return error;
  });
}

int StreamDouble::launch_waiting(Stream stream, std::function<bool()> work) {
  return call_outside_capture([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr) return kInvalidHandle;
    ++counts_.launches;
    lane->pieces.push_back({.tried = std::move(work)});
    return 0;
  });
}

// --- waiting
// ----------------------------------------------------------------------------------------------------------

int StreamDouble::query(Event* event) {
  return call_outside_capture([&] {
    if (event == nullptr) return kInvalidHandle;
    run_one();
    return event->mark == nullptr || event->mark->done ? 0 : kNotReady;
  });
}

int StreamDouble::elapsed(float* ms, Event* from, Event* to) {
  return call([&] {
    for (const Event* const event : {from, to}) {
      if (event == nullptr || !event->timed || event->mark == nullptr) return kInvalidHandle;
      if (!event->mark->done) return kNotReady;
    }
    *ms = static_cast<float>(to->mark->reached_us - from->mark->reached_us) * 1e-3f;
    return 0;
  });
}

int StreamDouble::synchronize(Event* event) {
  return wait([&] {
    if (event == nullptr) return kInvalidHandle;
    count_wait();
    if (event->captured_on != nullptr) return kNotInCapture;  // of a graph: no launch of it has this mark
    const std::shared_ptr<Mark> mark = event->mark;
    if (mark != nullptr) run_until([&] { return mark->done; });
    return 0;
  });
}

int StreamDouble::synchronize(Stream stream) {
  return wait([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr) return kInvalidHandle;
    count_wait();
    run_until([&] { return lane->pieces.empty(); });
    return 0;
  });
}

int StreamDouble::synchronize() {
  return wait([&] {
    count_wait();
    run_until([&] {
      return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->pieces.empty(); });
    });
    return 0;
  });
}

// --- graphs
// -----------------------------------------------------------------------------------------------------------

int StreamDouble::begin_capture(Stream stream) {
  return call_outside_capture([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr) return kInvalidHandle;
    capture_ = std::make_unique<Capture>();
    capture_->origin = lane;
    capture_->branches[lane] = 0;
    return 0;
  });
}

int StreamDouble::end_capture(Stream stream, Graph** graph) {
  return call([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr) return kInvalidHandle;
    if (capture_ == nullptr || capture_->origin != lane) return kInvalidValue;
    const std::unique_ptr<Capture> ended = std::move(capture_);
    if (ended->invalid) return kCaptureInvalid;
    // The origin follows the last work of a branch, itself or through others that it follows.
    std::set<Lane*> followed = {lane};
    std::vector<std::shared_ptr<Mark>> to_see(ended->joined.begin(), ended->joined.end());
    std::map<Lane*, size_t> seen;
    std::set<std::shared_ptr<Mark>> known;
    while (!to_see.empty()) {
      const std::shared_ptr<Mark> mark = to_see.back();
      to_see.pop_back();
      if (!known.insert(mark).second) continue;
      const auto& [of, work, at] = ended->places[mark];
      seen[of] = std::max(seen[of], work);
      followed.insert(of);
      for (size_t i = 0; i < at; ++i) {
        const auto& [branch, piece] = ended->graph.pieces[i];
        if (branch == ended->branches[of] && piece.awaits != nullptr) to_see.push_back(piece.awaits);
      }
    }
    for (const auto& [of, branch] : ended->branches) {
      if (of != lane && (followed.count(of) == 0 || seen[of] < ended->sizes[of])) return kCaptureUnjoined;
    }
    ended->graph.branches = std::ssize(ended->branches);
    *graph = graphs_.emplace_back(std::make_unique<Graph>(std::move(ended->graph))).get();
    return 0;
  });
}

int StreamDouble::launch(Graph* graph, Stream stream) {
  return call([&] {
    Lane* const lane = lane_of(stream);
    if (lane == nullptr || graph == nullptr) return kInvalidHandle;
    if (capture_ != nullptr) {
      capture_->invalid = true;
      return kNotInCapture;
    }
    ++counts_.graph_launches;
    std::map<std::shared_ptr<Mark>, std::shared_ptr<Mark>> marks;
    const auto fresh = [&](const std::shared_ptr<Mark>& of) {
      if (of == nullptr) return of;
      std::shared_ptr<Mark>& made = marks[of];
      if (made == nullptr) made = std::make_shared<Mark>();
      return made;
    };
    const auto begun = std::make_shared<Mark>();
    std::vector<std::unique_ptr<Lane>> branches;
    for (int64_t b = 0; b < graph->branches; ++b) {
      auto branch = std::make_unique<Lane>();
      branch->number = lane->number;
      branch->is_stream = false;
      branch->destroyed = true;  // once it is empty nobody needs it
      branch->pieces.push_back({nullptr, nullptr, begun});
      branches.push_back(std::move(branch));
    }
    for (const auto& [branch, piece] : graph->pieces) {
      branches[static_cast<size_t>(branch)]->pieces.push_back({piece.work, fresh(piece.reaches), fresh(piece.awaits)});
    }
    lane->pieces.push_back({nullptr, begun, nullptr});
    for (auto& branch : branches) {
      const auto ended = std::make_shared<Mark>();
      branch->pieces.push_back({nullptr, ended, nullptr});
      lane->pieces.push_back({nullptr, nullptr, ended});
      lanes_.push_back(std::move(branch));
    }
    return 0;
  });
}

int StreamDouble::destroy_graph(Graph* graph) {
  return give_back([&] {
    return std::erase_if(graphs_, [&](const auto& of) { return of.get() == graph; }) == 1 ? 0 : kInvalidHandle;
  });
}

StreamDouble::Range StreamDouble::range_of(const void* at) const {
  const std::lock_guard lock(mutex_);
  auto found = memory_.upper_bound(at);
  if (found == memory_.begin()) return {};
  --found;
  if (static_cast<const std::byte*>(at) >= static_cast<const std::byte*>(found->first) + found->second) return {};
  return {found->first, found->second, mapped_.contains(found->first)};
}

bool StreamDouble::holds(const void* at, int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  return is_allocated(at, bytes);
}
bool StreamDouble::captures() const {
  const std::lock_guard lock(mutex_);
  return capture_ != nullptr;
}
int StreamDouble::plain_call(const std::function<int()>& body) { return call(body); }

void StreamDouble::gate_copies(std::function<bool(const void* host)> passes) {
  const std::lock_guard lock(mutex_);
  passes_ = std::move(passes);
}

// --- for tests
// --------------------------------------------------------------------------------------------------------

void StreamDouble::refuse_call(int64_t calls, int error, bool from_then_on) {
  const std::lock_guard lock(mutex_);
  refusal_ = {calls, error, from_then_on, false};
}
bool StreamDouble::refuse_no_more() {
  const std::lock_guard lock(mutex_);
  refusal_.calls = -1;
  return refusal_.done;
}
StreamDouble::Counts StreamDouble::take_counts() {
  const std::lock_guard lock(mutex_);
  return std::exchange(counts_, {});
}
int64_t StreamDouble::own_waits_so_far() { return own_waits; }
int64_t StreamDouble::take_own_waits() { return std::exchange(own_waits, 0); }
std::vector<std::string> StreamDouble::misuses() {
  const std::lock_guard lock(mutex_);
  return std::exchange(misuses_, {});
}
std::vector<std::string> StreamDouble::left() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> out;
  const auto tell = [&](int64_t count, const char* what) {
    if (count > 0) out.push_back(fmt::format("{} {}", count, what));
  };
  tell(std::ssize(memory_), "allocations");
  tell(std::ssize(pinned_), "pinned areas");
  tell(std::count_if(lanes_.begin(), lanes_.end(), [](const auto& of) { return of->is_stream && !of->destroyed; }),
       "streams");
  tell(std::ssize(events_), "events");
  tell(std::ssize(graphs_), "graphs");
  return out;
}

}  // namespace cairn::simt
