#include "tests/simt/executor.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "runtime/core/check.h"
#include "tests/simt/blocks.h"
#include "tests/simt/device_memory.h"
#include "tests/simt/hooks.h"
#include "tests/simt/symbols.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom_old, size_t* size_old);
[[gnu::weak]] void __asan_unpoison_memory_region(void const volatile* at, size_t size);
}

namespace cairn::simt {

constinit thread_local const Here* here = nullptr;
constinit thread_local Fiber* running = nullptr;

namespace {

constexpr int kLanes = 32, kMostThreads = 1024;
constexpr int64_t kStack = 128 << 10, kPage = 4096;
constexpr int64_t kMostShared = kernels::cuda::kSharedOfCards;

// --- switching stacks
// -------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
/// What a function has to keep, by the System V ABI, and the stack.
struct Context {
  void* sp = nullptr;
};
extern "C" void cairn_simt_switch(void** save, void* load);
asm(R"(
.text
.type cairn_simt_switch, @function
cairn_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cairn_simt_switch, .-cairn_simt_switch
)");
void switch_to(Context& from, Context& to) { cairn_simt_switch(&from.sp, to.sp); }
void prepare(Context& context, char* stack, int number, void (*entry)()) {
  // The tops of stacks fall into different sets of the cache.
  auto top = (reinterpret_cast<uintptr_t>(stack + kStack - 64 - number % kLanes * 128)) & ~uintptr_t{15};
  auto* sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;  // where a call would have left its return address: the ABI aligns stacks before it
  *--sp = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  context.sp = sp;
}
#else
struct Context {
  ucontext_t of{};
};
void switch_to(Context& from, Context& to) { swapcontext(&from.of, &to.of); }
void prepare(Context& context, char* stack, int /*number*/, void (*entry)()) {
  getcontext(&context.of);
  context.of.uc_stack.ss_sp = stack;
  context.of.uc_stack.ss_size = kStack;
  context.of.uc_link = nullptr;
  makecontext(&context.of, entry, 0);
}
#endif

// --- a block
// ----------------------------------------------------------------------------------------------------------

enum class State { kReady, kAtBarrier, kAtExchange, kAtCondition, kDone };

/// Lanes that meet.
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  uint64_t generation = 0;
  bool of_whole_warp = false;  // the last one: of all lanes that had not ended
  Place place;
  std::array<uint64_t, kLanes * kMostExchanged> in{}, out{};
};

struct Warp {
  std::vector<std::unique_ptr<Meeting>> meetings;
  uint32_t live = 0;
};

struct Thread : Fiber {
  Context context;
  std::unique_ptr<char, void (*)(char*)> memory{nullptr, [](char* p) { munmap(p, kStack); }};
  Warp* warp = nullptr;
  State state = State::kDone;
  Place waits_at;
  const Meeting* meeting = nullptr;
  uint64_t generation = 0;  // of the meeting when it came
  const std::function<bool()>* condition = nullptr;
  std::deque<std::pair<int, AsyncCopy>> copies;  // with the number of their group
  int copy_groups = 0;                           // that were ended
};

constexpr int64_t kDynamicAlign = 256;  // as RT_DYNAMIC_SHARED has it on a device

struct Array {
  void* data = nullptr;
  int64_t bytes = 0;
};

struct Executor {
  Order order;
  Counts counts;

  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  std::map<const void*, Array> arrays;
  Array dynamic;
  Context scheduler;
  const void* scheduler_stack = nullptr;  // for AddressSanitizer
  size_t scheduler_stack_bytes = 0;

  const Launch* now = nullptr;
  const std::function<void()>* body = nullptr;
  int64_t block = 0;
  Dim3 block_at;
  std::string fault;

  ~Executor() {
    for (auto& [tag, array] : arrays) device_free(array.data);
    device_free(dynamic.data);
  }
};

Executor& executor() {
  thread_local Executor one;
  return one;
}

/// Kernels that may have more shared memory than every card gives.
struct SharedOf {
  std::mutex mutex;
  std::map<const void*, int64_t> most;
};
SharedOf& shared_of() {
  static SharedOf one;
  return one;
}
int64_t most_shared(const void* kernel) {
  const std::lock_guard lock(shared_of().mutex);
  const auto found = shared_of().most.find(kernel);
  return found == shared_of().most.end() ? kMostShared : found->second;
}

Taker& taker_of_all() {
  static Taker one;
  return one;
}

std::string text(Dim3 at) { return fmt::format("({},{},{})", at.x, at.y, at.z); }
std::string text(Place place) {
  const std::string path = place.file == nullptr ? "?" : place.file;
  return fmt::format("{}:{}", path.substr(path.rfind('/') + 1), place.line);
}

std::string whose(const Executor& e) {
  return fmt::format("{}, block {} of {}", name_of(e.now->kernel), text(e.block_at), text(e.now->blocks));
}

void to_scheduler(bool for_ever = false) {
  Executor& e = executor();
  auto* const me = static_cast<Thread*>(running);
  void* fake = nullptr;
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &fake, e.scheduler_stack, e.scheduler_stack_bytes);
  }
  switch_to(me->context, e.scheduler);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(fake, &e.scheduler_stack, &e.scheduler_stack_bytes);
  }
}

/// Ends the launch, from one of its threads.
[[noreturn]] void stop(std::string what) {
  Executor& e = executor();
  {
    const std::string gone_here = std::move(what);  // nothing unwinds this stack
    e.fault = fmt::format("{}, thread {}: {}", whose(e), running->number, gone_here);
  }
  to_scheduler(/*for_ever=*/true);
  std::abort();
}

void entry() {
  Executor& e = executor();
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(nullptr, &e.scheduler_stack, &e.scheduler_stack_bytes);
  }
  (*e.body)();
  auto* const me = static_cast<Thread*>(running);
  if (!me->copies.empty()) stop("ends with copies to shared memory that it has not waited for");
  if (const std::string left = left_by_thread(me->number); !left.empty()) stop(left);
  me->state = State::kDone;
  me->warp->live &= ~(1u << me->here.lane);
  to_scheduler(/*for_ever=*/true);
  std::abort();
}

void resume(Executor& e, Thread& thread) {
  ++e.counts.switches;
  running = &thread;
  here = &thread.here;
  void* fake = nullptr;
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&fake, thread.memory.get(), kStack);
  }
  switch_to(e.scheduler, thread.context);
  if (__sanitizer_finish_switch_fiber != nullptr) __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
  running = nullptr;
  here = nullptr;
  if (!e.fault.empty()) throw Stop(std::exchange(e.fault, {}));
}

/// "threads 0-31 wait at __syncthreads, a.cu:3; threads 32-63 have ended".
std::string who_waits_where(const Executor& e, int count) {
  const auto of = [](const Thread& t) {
    switch (t.state) {
      case State::kAtBarrier:
        return fmt::format("at __syncthreads, {}", text(t.waits_at));
      case State::kAtExchange:
        return fmt::format("for lanes {:08x}, of which {:08x} have come, {}", t.meeting->mask, t.meeting->arrived,
                           text(t.waits_at));
      case State::kAtCondition:
        return fmt::format("for a barrier in shared memory, {}", text(t.waits_at));
      case State::kDone:
        return std::string("ended");
      case State::kReady:
        break;
    }
    return std::string("ready");
  };
  std::string out;
  for (int first = 0; first < count;) {
    const std::string what = of(*e.threads[first]);
    int last = first;
    while (last + 1 < count && of(*e.threads[last + 1]) == what) ++last;
    out += fmt::format("{}threads {}-{} {}", out.empty() ? "" : "; ", first, last, what);
    first = last + 1;
  }
  return out;
}

/// All that have not ended are at a barrier.
void open_barrier(Executor& e, int count, int done) {
  const Thread* first = nullptr;
  for (int i = 0; i < count; ++i) {
    const Thread& t = *e.threads[i];
    if (t.state != State::kAtBarrier) continue;
    if (first == nullptr) first = &t;
    if (t.waits_at.line != first->waits_at.line || std::strcmp(t.waits_at.file, first->waits_at.file) != 0) {
      throw Stop(fmt::format("{}: threads at different __syncthreads: {}", whose(e), who_waits_where(e, count)));
    }
  }
  if (done > 0) {
    throw Stop(fmt::format("{}: {} of {} threads ended before a __syncthreads: {}", whose(e), done, count,
                           who_waits_where(e, count)));
  }
  for (int i = 0; i < count; ++i) {
    e.threads[i]->state = State::kReady;
    ++e.threads[i]->epoch;
  }
}

void run_block(Executor& e, int count, std::mt19937_64& random) {
  const Dim3 dim = e.now->threads;
  const int warps = (count + kLanes - 1) / kLanes;
  while (std::ssize(e.warps) < warps) e.warps.push_back(std::make_unique<Warp>());
  while (std::ssize(e.threads) < count) e.threads.push_back(std::make_unique<Thread>());
  for (int w = 0; w < warps; ++w) {
    e.warps[w]->meetings.clear();
    e.warps[w]->live = 0;
  }
  for (int i = 0; i < count; ++i) {
    Thread& t = *e.threads[i];
    if (t.memory == nullptr) {
      void* const made = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      RT_CHECK(made != MAP_FAILED && mprotect(made, kPage, PROT_NONE) == 0, "no memory for the stack of a thread");
      t.memory.reset(static_cast<char*>(made));
      t.stack = t.memory.get();
      t.stack_end = t.stack + kStack;
    } else if (__asan_unpoison_memory_region != nullptr) {  // a launch that was stopped leaves frames behind
      __asan_unpoison_memory_region(t.memory.get() + kPage, kStack - kPage);
    }
    t.number = i;
    t.warp = e.warps[i / kLanes].get();
    const auto at = static_cast<unsigned>(i);
    t.here = {.thread = {at % dim.x, at / dim.x % dim.y, at / (dim.x * dim.y)},
              .block = e.block_at,
              .block_dim = dim,
              .grid = e.now->blocks,
              .lane = i % kLanes};
    t.warp->live |= 1u << t.here.lane;
    t.state = State::kReady;
    t.epoch = t.warp_epoch = 0;
    t.meeting = nullptr;
    t.copies.clear();
    t.copy_groups = 0;
    prepare(t.context, t.memory.get(), i, &entry);
  }
  for (auto& [tag, array] : e.arrays) std::memset(array.data, 0xff, static_cast<size_t>(array.bytes));
  if (e.dynamic.data != nullptr) std::memset(e.dynamic.data, 0xff, static_cast<size_t>(e.dynamic.bytes));
  begin_block(count);

  std::vector<int> order(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) order[i] = i;
  if (e.order.kind == Order::Kind::kReverse) std::reverse(order.begin(), order.end());
  int done = 0, at_barrier = 0;
  const auto turn = [&](Thread& t) {
    if (t.state == State::kAtExchange && t.meeting->generation != t.generation) t.state = State::kReady;
    if (t.state == State::kAtCondition && (*t.condition)()) t.state = State::kReady;
    if (t.state != State::kReady) return false;
    resume(e, t);
    done += t.state == State::kDone ? 1 : 0;
    at_barrier += t.state == State::kAtBarrier ? 1 : 0;
    return true;
  };
  while (done < count) {
    bool moved = false;
    if (e.order.kind == Order::Kind::kShuffled) {
      std::shuffle(order.begin(), order.end(), random);
      for (const int i : order) moved |= turn(*e.threads[i]);
    } else {
      for (int first = 0; first < count; first += kLanes) {  // each warp runs until all of it waits for others
        for (bool again = true; again;) {
          again = false;
          for (int i = first; i < std::min(count, first + kLanes); ++i) again |= turn(*e.threads[order[i]]);
          moved |= again;
        }
      }
    }
    if (at_barrier > 0 && at_barrier + done == count) {
      open_barrier(e, count, done);
      at_barrier = 0;
      moved = true;
    }
    if (!moved) {
      throw Stop(fmt::format("{}: threads wait for each other: {}", whose(e), who_waits_where(e, count)));
    }
  }
  if (const std::string left = left_by_block(); !left.empty()) throw Stop(fmt::format("{}: {}", whose(e), left));
}

/// The watch is told of the end however it comes.
struct Watching {
  explicit Watching(const void* kernel) {
    if (watch_launch != nullptr) watch_launch(kernel);
  }
  ~Watching() {
    if (watch_launch_end != nullptr) watch_launch_end();
  }
};

void run(const Launch& launch, const std::function<void()>& body) {
  Executor& e = executor();
  RT_CHECK(running == nullptr, "a kernel that launches another one");
  e.now = &launch;
  const int64_t count = int64_t{launch.threads.x} * launch.threads.y * launch.threads.z;
  const int64_t blocks = int64_t{launch.blocks.x} * launch.blocks.y * launch.blocks.z;
  constexpr unsigned kMostY = 65535;
  if (count < 1 || count > kMostThreads || launch.threads.z > 64 || launch.shared_bytes > most_shared(launch.kernel) ||
      launch.blocks.x > 0x7fffffffu || launch.blocks.y > kMostY || launch.blocks.z > kMostY || blocks < 1) {
    throw Stop(
        fmt::format("{}: {} blocks of {} threads with {} bytes of shared memory: a device takes 1 to {} threads, "
                    "{} bytes, and {} blocks along y and z",
                    name_of(launch.kernel), text(launch.blocks), text(launch.threads), launch.shared_bytes,
                    kMostThreads, most_shared(launch.kernel), kMostY));
  }
  for (auto& [tag, array] : e.arrays) device_free(array.data);
  e.arrays.clear();
  device_free(std::exchange(e.dynamic, {}).data);
  if (launch.shared_bytes > 0) e.dynamic = {shared_alloc(launch.shared_bytes, kDynamicAlign), launch.shared_bytes};
  e.body = &body;
  const Watching watching(launch.kernel);
  std::vector<int64_t> order(static_cast<size_t>(blocks));
  for (int64_t i = 0; i < blocks; ++i) order[i] = i;
  std::mt19937_64 random(e.order.seed);
  if (e.order.kind == Order::Kind::kReverse) std::reverse(order.begin(), order.end());
  if (e.order.kind == Order::Kind::kShuffled) std::shuffle(order.begin(), order.end(), random);
  ++e.counts.launches;
  for (const int64_t b : order) {
    const auto at = static_cast<uint64_t>(b);
    const Dim3 grid = launch.blocks;
    e.block = b;
    e.block_at = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                  static_cast<unsigned>(at / (uint64_t{grid.x} * grid.y))};
    run_block(e, static_cast<int>(count), random);
    ++e.counts.blocks;
  }
}

}  // namespace

void set_order(const Order& order) { executor().order = order; }
void take_launches(Taker taker) { taker_of_all() = std::move(taker); }
Counts take_counts() { return std::exchange(executor().counts, {}); }
int64_t block_number() { return executor().block; }

void barrier(Place place) {
  auto* const me = static_cast<Thread*>(running);
  me->waits_at = place;
  me->state = State::kAtBarrier;
  to_scheduler();
}

const uint64_t* exchange(uint32_t mask, const uint64_t* values, int count, Place place) {
  auto& me = *static_cast<Thread*>(running);
  Warp& warp = *me.warp;
  const uint32_t lane = 1u << me.here.lane;
  if ((mask & lane) == 0) stop(fmt::format("{}: lane {} is not in its mask {:08x}", text(place), me.here.lane, mask));
  if ((mask & ~warp.live) != 0) {
    stop(fmt::format("{}: mask {:08x} names lanes that have ended, {:08x} have not", text(place), mask, warp.live));
  }
  Meeting* meeting = nullptr;
  for (const auto& known : warp.meetings) {
    if (known->mask == mask) meeting = known.get();
  }
  if (meeting == nullptr) {
    meeting = warp.meetings.emplace_back(std::make_unique<Meeting>()).get();
    meeting->mask = mask;
  }
  if (meeting->arrived == 0) meeting->place = place;
  if (meeting->place.line != place.line || std::strcmp(meeting->place.file, place.file) != 0) {
    stop(fmt::format("lanes of a warp at different exchanges: {} and {}", text(meeting->place), text(place)));
  }
  std::copy_n(values, count, meeting->in.begin() + me.here.lane * count);
  meeting->arrived |= lane;
  if (meeting->arrived == mask) {
    std::copy_n(meeting->in.begin(), kLanes * count, meeting->out.begin());
    meeting->arrived = 0;
    meeting->of_whole_warp = mask == warp.live;
    ++meeting->generation;
  } else {
    me.meeting = meeting;
    me.generation = meeting->generation;
    me.waits_at = place;
    me.state = State::kAtExchange;
    to_scheduler();
  }
  if (meeting->of_whole_warp) ++me.warp_epoch;
  return meeting->out.data();
}

void begin_copy(const AsyncCopy& copy) {
  auto& me = *static_cast<Thread*>(running);
  me.copies.emplace_back(me.copy_groups, copy);
}
void end_copy_group() { ++static_cast<Thread*>(running)->copy_groups; }
bool take_copy(int groups, AsyncCopy* out) {
  auto& me = *static_cast<Thread*>(running);
  if (me.copies.empty() || me.copies.front().first >= me.copy_groups - groups) return false;
  *out = me.copies.front().second;
  me.copies.pop_front();
  return true;
}

void wait_until(const std::function<bool()>& condition, Place place) {
  if (condition()) return;
  auto* const me = static_cast<Thread*>(running);
  me->condition = &condition;
  me->waits_at = place;
  me->state = State::kAtCondition;
  to_scheduler();
}
void stop_launch(std::string what) { stop(std::move(what)); }
char* dynamic_begin(int64_t* bytes) {
  *bytes = executor().dynamic.bytes;
  return static_cast<char*>(executor().dynamic.data);
}
std::string place_text(Place place) { return text(place); }

void allow_shared(const void* kernel, int64_t bytes) {
  const std::lock_guard lock(shared_of().mutex);
  shared_of().most[kernel] = bytes;
}

void* shared_array(const void* tag, int64_t bytes) {
  Executor& e = executor();
  auto [found, fresh] = e.arrays.try_emplace(tag);
  if (fresh) {
    int64_t all = e.dynamic.bytes + bytes;
    for (const auto& [other, array] : e.arrays) all += array.bytes;
    if (all > kMostShared) stop(fmt::format("has {} bytes of shared memory: every device gives {}", all, kMostShared));
    found->second = {shared_alloc(bytes, RT_SHARED_ALIGN), bytes};
  }
  return found->second.data;
}

void* dynamic_shared() {
  Executor& e = executor();
  if (e.dynamic.data == nullptr) stop("the launch gives no shared memory that the kernel asks for");
  return e.dynamic.data;
}

void check_aligned(const void* at, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(bytes) == 0 || running == nullptr) return;
  stop(fmt::format("an access of {} bytes at {}, which is no multiple of that", bytes, at));
}

int launch(const Launch& launch, CUstream_st* stream, std::function<void()> thread) {
  if (const Taker& taker = taker_of_all(); taker) {
    return taker(stream, launch, [launch, thread = std::move(thread)] { run(launch, thread); });
  }
  run(launch, thread);
  return 0;
}

}  // namespace cairn::simt
