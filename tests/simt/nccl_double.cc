#include "tests/simt/nccl_double.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "runtime/core/check.h"
#include "runtime/core/dtype.h"
#include "runtime/core/random.h"

namespace cairn::simt {

using cuda::kNcclInProgress;
using cuda::kNcclOk;
using cuda::NcclHandle;
using cuda::StreamHandle;

// --- what ranks share
// ------------------------------------------------------------------------------------------------------------------

namespace {

constexpr int kMostGroups = 4096, kMostRanks = 8, kCallsKept = 64, kSplitsKept = 64;
constexpr int64_t kSmallMessage = 512 << 10;  // what NCCL may send by protocols that use no registered memory
constexpr uint64_t kRing = 16 << 10;          // bytes on their way between two ranks: less than most messages

}  // namespace

/// One direction of two ranks of a communicator.
struct Pair {
  alignas(64) std::atomic<uint64_t> awaited;  // messages for which the receiver has come
  std::atomic<uint64_t> begun;                // messages of which `bytes` is told
  std::atomic<int64_t> bytes;
  alignas(64) std::atomic<uint64_t> head, tail;
  std::byte ring[kRing];
};

struct NcclSegment::Group {
  std::atomic<uint64_t> id;
  std::atomic<int> size, joined;
  struct Member {
    std::atomic<uint64_t> arrived;  // collectives that it has come to
    std::atomic<uint64_t> calls[kCallsKept];
    std::atomic<uint64_t> splits;
    std::atomic<int> colors[kSplitsKept], keys[kSplitsKept];
  } members[kMostRanks];
  Pair pairs[kMostRanks][kMostRanks];  // from, to
};

struct NcclSegment::Header {
  std::atomic<uint64_t> ids;
  Group groups[kMostGroups];
};

NcclSegment::NcclSegment() : NcclSegment(-1) {}

NcclSegment::NcclSegment(const char* path)
    : NcclSegment([&] {
        const int file = ::open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        RT_CHECK(file >= 0 && ::ftruncate(file, sizeof(Header)) == 0, "no memory for the double of NCCL at {}", path);
        return file;
      }()) {}

NcclSegment::NcclSegment(int file) {
  const int kind = file < 0 ? MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* const memory = mmap(nullptr, sizeof(Header), PROT_READ | PROT_WRITE, kind, file, 0);  // zeros, few are touched
  RT_CHECK(memory != MAP_FAILED, "no {} bytes of shared memory", sizeof(Header));
  if (file >= 0) ::close(file);
  header_ = static_cast<Header*>(memory);
}

NcclSegment::~NcclSegment() { munmap(header_, sizeof(Header)); }

NcclSegment::Group& NcclSegment::group(uint64_t id, int size) {
  RT_CHECK(id != 0 && size >= 1 && size <= kMostRanks, "a communicator of {} ranks", size);
  for (uint64_t probe = 0; probe < kMostGroups; ++probe) {
    Group& group = header_->groups[(id + probe) % kMostGroups];
    uint64_t found = 0;
    if (group.id.compare_exchange_strong(found, id) || found == id) {
      group.size = size;
      return group;
    }
  }
  RT_CHECK(false, "more than {} communicators", kMostGroups);
}

uint64_t NcclSegment::next_id() { return mix64(++header_->ids) | 1; }

DeviceRuns::DeviceRuns(StreamDouble& cuda) {
  thread_ = std::thread([this, &cuda] {
    StreamDouble::Event* event = nullptr;
    cuda.create_event(&event);
    while (!over_) {
      cuda.query(event);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    cuda.destroy_event(event);
  });
}

DeviceRuns::~DeviceRuns() {
  over_ = true;
  thread_.join();
}

// --- communicators of a rank
// -----------------------------------------------------------------------------------------------------------

/// Of one message.
struct Transfer {
  bool sends = false;
  std::byte* data = nullptr;
  int64_t bytes = 0;
  int peer = 0;
  uint64_t number = 0;  // among the messages of its pair
  int64_t moved = 0;
  bool told = false, done = false;  // the size
};

/// A collective, a message, or the messages of a group: all of them go on at once.
struct NcclDouble::Work {
  Comm* comm = nullptr;
  std::string name;
  bool collective = false;
  uint64_t number = 0, word = 0;  // of a collective: which one, and what is asked for
  std::vector<Transfer> transfers;
  std::vector<std::pair<const std::byte*, int64_t>> touches;  // memory of the caller's
  std::function<void()> own;                                  // what it copies to itself
  std::function<void()> at_last;                              // what it makes of what has come
  bool begun = false, here = false, moves = false, broken = false, done = false;
};

struct NcclDouble::Comm {
  NcclSegment::Group* group = nullptr;
  uint64_t id = 0;
  int rank = 0, size = 0;
  int64_t index = 0;     // of those made here
  bool waiting = false;  // what was asked for is in progress until it is asked about
  bool finalized = false, closed = false;
  int error = 0;
  uint64_t collectives = 0, splits = 0;
  uint64_t sent[kMostRanks] = {}, received[kMostRanks] = {};
  std::deque<std::shared_ptr<Work>> works;  // asked for, not done
  struct Split {
    uint64_t number;
    Comm** child;
  };
  std::vector<Split> splitting;
  struct Registration {
    std::byte* first;
    int64_t bytes;
    int references = 1;
    bool is_used = false;          // memory that NCCL maps elsewhere
    bool mapped[kMostRanks] = {};  // of a rank

    bool holds(const std::byte* at, int64_t size) const { return at >= first && at + size <= first + bytes; }
  };
  std::vector<std::unique_ptr<Registration>> registrations;

  std::string name() const { return fmt::format("communicator {} (rank {} of {})", index, rank, size); }
};

struct NcclDouble::Held {
  StreamHandle stream;
  std::shared_ptr<Work> work;
};

namespace {

NcclDouble* current = nullptr;

NcclDouble::Comm* of(NcclHandle handle) { return reinterpret_cast<NcclDouble::Comm*>(handle); }

struct Grouped {
  NcclDouble::Comm* comm;
  StreamHandle stream;
  Transfer transfer;
};
thread_local int depth = 0;  // of groups
thread_local std::vector<Grouped> grouped;
thread_local std::vector<std::pair<StreamHandle, std::shared_ptr<NcclDouble::Work>>> grouped_collectives;

int64_t size_of(int type) {
  constexpr int64_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};  // of ncclDataType_t
  return type >= 0 && type < std::ssize(kSizes) ? kSizes[type] : 0;
}

/// to[i] = what the ranks gave, as a ring adds: it begins behind the owner of a part, ends with the owner, and is
/// rounded to the type at every rank.
template <typename T, typename Add>
void add_as_a_ring(const std::vector<const std::byte*>& given, int owner, std::byte* to, int64_t count,
                   const Add& add) {
  const auto n = static_cast<int>(given.size());
  const auto of = [&](int hop) { return reinterpret_cast<const T*>(given[static_cast<size_t>((owner + hop) % n)]); };
  std::vector<T> sum(of(1), of(1) + count);
  for (int hop = 2; hop <= n; ++hop) {
    for (int64_t i = 0; i < count; ++i) sum[static_cast<size_t>(i)] = add(sum[static_cast<size_t>(i)], of(hop)[i]);
  }
  std::memcpy(to, sum.data(), static_cast<size_t>(count) * sizeof(T));
}

void add_as_a_ring(const std::vector<const std::byte*>& given, int owner, std::byte* to, int64_t count, int type) {
  const auto plain = [](auto a, auto b) { return static_cast<decltype(a)>(a + b); };
  if (type == cuda::kNcclF32) return add_as_a_ring<float>(given, owner, to, count, plain);
  if (type == cuda::kNcclF64) return add_as_a_ring<double>(given, owner, to, count, plain);
  if (type == cuda::kNcclI64) return add_as_a_ring<uint64_t>(given, owner, to, count, plain);
  if (type == cuda::kNcclBf16) {
    return add_as_a_ring<bf16>(given, owner, to, count, [](bf16 a, bf16 b) { return to_bf16(to_f32(a) + to_f32(b)); });
  }
  add_as_a_ring<f16>(given, owner, to, count, [](f16 a, f16 b) { return to_f16(to_f32(a) + to_f32(b)); });
}

bool is_added(int type) {
  return type == cuda::kNcclF32 || type == cuda::kNcclF64 || type == cuda::kNcclI64 || type == cuda::kNcclBf16 ||
         type == cuda::kNcclF16;
}

uint64_t id_of(const cuda::NcclId& id) {
  uint64_t out = 0;
  std::memcpy(&out, id.bytes, sizeof(out));
  return out;
}

}  // namespace

/// The functions of the table.
struct NcclCalls {
  static NcclDouble& on() {
    RT_CHECK(current != nullptr, "a call of an NCCL that is gone");
    return *current;
  }

  static std::byte* bytes_of(const void* memory) { return static_cast<std::byte*>(const_cast<void*>(memory)); }

  static std::shared_ptr<NcclDouble::Work> work_of(NcclDouble::Comm* comm, const char* name, int type, int64_t count,
                                                   int root) {
    auto out = std::make_shared<NcclDouble::Work>();
    out->comm = comm;
    out->collective = true;
    out->name = fmt::format("{} of {} of type {}, root {}", name, count, type, root);
    out->word = stream_key(1, out->name);
    return out;
  }

  /// Each rank gives each other one `count` elements: all of them, or with `all` = 0 that rank's part.
  static int sum(const char* name, NcclDouble::Comm* comm, StreamHandle stream, const void* from, void* to,
                 int64_t count, int64_t all, int type, int op,
                 const std::function<void(const std::vector<const std::byte*>&)>& add) {
    if (op != cuda::kNcclSum || !is_added(type)) {
      on().misuse(fmt::format("{} of type {} by operation {}, which is none of this double", name, type, op));
      return kNcclInvalidArgument;
    }
    const int64_t bytes = count * size_of(type);
    auto work = work_of(comm, name, type, count, 0);
    work->touches = {{bytes_of(from), all > 0 ? bytes : bytes * comm->size}, {bytes_of(to), bytes}};
    const auto come = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(bytes * comm->size));
    const auto given = std::make_shared<std::vector<const std::byte*>>();
    for (int peer = 0; peer < comm->size; ++peer) {
      std::byte* const theirs = come->data() + peer * bytes;
      const int64_t skip = all > 0 ? 0 : bytes;  // from one part to the next
      given->push_back(peer == comm->rank ? bytes_of(from) + peer * skip : theirs);
      if (peer == comm->rank) continue;
      work->transfers.push_back({.sends = true, .data = bytes_of(from) + peer * skip, .bytes = bytes, .peer = peer});
      work->transfers.push_back({.sends = false, .data = theirs, .bytes = bytes, .peer = peer});
    }
    work->at_last = [=] {
      (void)come;  // until then
      add(*given);
    };
    return on().collective(comm, stream, std::move(work));
  }

  static void fill(cuda::NcclApi* api) {
    api->version = [](int* version) { return *version = on().version_, kNcclOk; };
    api->make_id = [](cuda::NcclId* id) {
      const uint64_t made = on().segment_.next_id();
      std::memset(id->bytes, 0x5a, sizeof(id->bytes));
      std::memcpy(id->bytes, &made, sizeof(made));
      return kNcclOk;
    };
    api->make = [](NcclHandle* comm, int size, cuda::NcclId id, int rank, cuda::NcclConfig* config) {
      if (config == nullptr || config->magic != cuda::NcclConfig().magic || config->blocking != 0) {
        on().misuse("a communicator that is made may be waited for for ever: blocking is not 0");
        return kNcclInvalidArgument;
      }
      return on().make(reinterpret_cast<NcclDouble::Comm**>(comm), size, id_of(id), rank);
    };
    api->split = [](NcclHandle parent, int color, int key, NcclHandle* child, cuda::NcclConfig* config) {
      if (config == nullptr || config->blocking != 0) {
        on().misuse("a split that may be waited for for ever: blocking is not 0");
        return kNcclInvalidArgument;
      }
      on().split_blocks_.push_back(config->max_ctas);
      return on().split(of(parent), color, key, reinterpret_cast<NcclDouble::Comm**>(child));
    };
    api->count = [](NcclHandle comm, int* count) { return *count = of(comm)->size, kNcclOk; };
    api->own_rank = [](NcclHandle comm, int* rank) { return *rank = of(comm)->rank, kNcclOk; };
    api->finalize = [](NcclHandle comm) { return on().finalize(of(comm)); };
    api->destroy = [](NcclHandle comm) { return on().close(of(comm), false); };
    api->abort = [](NcclHandle comm) {
      while (on().aborts_hang_) std::this_thread::sleep_for(std::chrono::seconds(1));
      return on().close(of(comm), true);
    };
    api->async_error = [](NcclHandle comm, int* error) { return on().state(of(comm), error); };
    api->mem_alloc = [](void** memory, size_t bytes) { return on().mem_alloc(memory, static_cast<int64_t>(bytes)); };
    api->mem_free = [](void* memory) { return on().mem_free(memory); };
    api->register_memory = [](NcclHandle comm, void* memory, size_t bytes, void** handle) {
      return on().register_memory(of(comm), memory, static_cast<int64_t>(bytes), handle);
    };
    api->deregister = [](NcclHandle comm, void* handle) { return on().deregister(of(comm), handle); };
    api->begin_group = [] { return on().begin_group(); };
    api->end_group = [] { return on().end_group(); };
    api->send = [](const void* data, size_t count, int type, int peer, NcclHandle comm, StreamHandle stream) {
      return on().transfer(of(comm), stream, true, bytes_of(data), static_cast<int64_t>(count) * size_of(type), peer);
    };
    api->recv = [](void* data, size_t count, int type, int peer, NcclHandle comm, StreamHandle stream) {
      return on().transfer(of(comm), stream, false, bytes_of(data), static_cast<int64_t>(count) * size_of(type), peer);
    };
    api->all_gather = [](const void* from, void* to, size_t count, int type, NcclHandle handle, StreamHandle stream) {
      NcclDouble::Comm* const comm = of(handle);
      const int64_t bytes = static_cast<int64_t>(count) * size_of(type);
      auto work = work_of(comm, "all_gather", type, static_cast<int64_t>(count), 0);
      std::byte* const out = bytes_of(to);
      std::byte* const own = out + comm->rank * bytes;
      const bool in_place = own == from;
      work->touches = {{bytes_of(from), bytes}, {out, bytes * comm->size}};
      for (int peer = 0; peer < comm->size; ++peer) {
        if (peer == comm->rank) continue;
        work->transfers.push_back({.sends = true, .data = bytes_of(from), .bytes = bytes, .peer = peer});
        work->transfers.push_back({.sends = false, .data = out + peer * bytes, .bytes = bytes, .peer = peer});
      }
      if (!in_place) work->own = [=] { std::memcpy(own, from, static_cast<size_t>(bytes)); };
      return on().collective(comm, stream, std::move(work));
    };
    api->broadcast = [](const void* from, void* to, size_t count, int type, int root, NcclHandle handle,
                        StreamHandle stream) {
      NcclDouble::Comm* const comm = of(handle);
      const int64_t bytes = static_cast<int64_t>(count) * size_of(type);
      auto work = work_of(comm, "broadcast", type, static_cast<int64_t>(count), root);
      work->touches = {{bytes_of(to), bytes}};
      if (comm->rank == root) work->touches.emplace_back(bytes_of(from), bytes);
      for (int peer = 0; comm->rank == root && peer < comm->size; ++peer) {
        if (peer != root)
          work->transfers.push_back({.sends = true, .data = bytes_of(from), .bytes = bytes, .peer = peer});
      }
      if (comm->rank != root)
        work->transfers.push_back({.sends = false, .data = bytes_of(to), .bytes = bytes, .peer = root});
      if (comm->rank == root && from != to) work->own = [=] { std::memcpy(to, from, static_cast<size_t>(bytes)); };
      return on().collective(comm, stream, std::move(work));
    };
    api->all_reduce = [](const void* from, void* to, size_t count, int type, int op, NcclHandle handle,
                         StreamHandle stream) {
      const int n = of(handle)->size;
      const auto elems = static_cast<int64_t>(count), part = (elems + n - 1) / n;
      return sum("all_reduce", of(handle), stream, from, to, elems, elems, type, op,
                 [=](const std::vector<const std::byte*>& given) {
                   for (int owner = 0; owner < n; ++owner) {
                     const int64_t begin = std::min(elems, owner * part), end = std::min(elems, begin + part);
                     std::vector<const std::byte*> parts;
                     for (const std::byte* const one : given) parts.push_back(one + begin * size_of(type));
                     add_as_a_ring(parts, owner, bytes_of(to) + begin * size_of(type), end - begin, type);
                   }
                 });
    };
    api->reduce_scatter = [](const void* from, void* to, size_t count, int type, int op, NcclHandle handle,
                             StreamHandle stream) {
      const int rank = of(handle)->rank;
      return sum("reduce_scatter", of(handle), stream, from, to, static_cast<int64_t>(count), 0, type, op,
                 [=](const std::vector<const std::byte*>& given) {
                   add_as_a_ring(given, rank, bytes_of(to), static_cast<int64_t>(count), type);
                 });
    };
    api->error_string = [](int) { return "refused by the double"; };
    api->last_error = [](NcclHandle) { return "nothing more is known"; };
  }
};

NcclDouble::NcclDouble(StreamDouble& cuda, NcclSegment& segment, uint64_t seed, int version)
    : cuda_(cuda), segment_(segment), seed_(seed), version_(version), ordered_([] {
        const char* const word = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
        return word != nullptr && std::string_view(word) == "1";
      }()) {
  RT_CHECK(current == nullptr, "two doubles of NCCL at a time");
  NcclCalls::fill(&api_);
  current = this;
}

NcclDouble::~NcclDouble() { current = nullptr; }

void NcclDouble::misuse(std::string what) {
  const std::lock_guard lock(mutex_);
  misuses_.push_back(std::move(what));
}

std::vector<std::string> NcclDouble::misuses() {
  const std::lock_guard lock(mutex_);
  return std::exchange(misuses_, {});
}

int64_t NcclDouble::left() const {
  const std::lock_guard lock(mutex_);
  return std::count_if(comms_.begin(), comms_.end(), [](const auto& comm) { return !comm->closed; });
}

void NcclDouble::fail(int code) {
  const std::lock_guard lock(mutex_);
  for (const auto& comm : comms_) comm->error = code;
}

/// Whether the communicator takes calls.
int NcclDouble::begin_call(Comm* comm, const char* what) {
  if (comm == nullptr) return kNcclInvalidArgument;
  if (comm->closed || comm->finalized) {
    misuse(fmt::format("{} on {}, which is no more", what, comm->name()));
    return kNcclInvalidUsage;
  }
  if (comm->waiting) {
    misuse(fmt::format("{} on {}, which is not ready", what, comm->name()));
    return kNcclInvalidUsage;
  }
  return comm->error;
}

// --- making and ending
// ------------------------------------------------------------------------------------------------------------

int NcclDouble::make(Comm** comm, int size, uint64_t id, int rank) {
  const std::lock_guard lock(mutex_);
  if (size < 1 || rank < 0 || rank >= size) return kNcclInvalidArgument;
  auto made = std::make_unique<Comm>();
  made->group = &segment_.group(id, size);
  made->id = id;
  made->rank = rank;
  made->size = size;
  made->index = std::ssize(comms_);
  made->waiting = true;
  ++made->group->joined;
  *comm = made.get();
  comms_.push_back(std::move(made));
  ++made_;
  return kNcclInProgress;
}

int NcclDouble::split(Comm* parent, int color, int key, Comm** child) {
  const std::lock_guard lock(mutex_);
  if (const int error = begin_call(parent, "split"); error != 0) return error;
  NcclSegment::Group::Member& me = parent->group->members[parent->rank];
  const uint64_t number = parent->splits++;
  me.colors[number % kSplitsKept] = color;
  me.keys[number % kSplitsKept] = key;
  me.splits = number + 1;
  *child = nullptr;  // until the parent is ready again
  parent->splitting.push_back({number, child});
  parent->waiting = true;
  return kNcclInProgress;
}

int NcclDouble::state(Comm* comm, int* error) {
  const std::lock_guard lock(mutex_);
  if (comm == nullptr || comm->closed) return kNcclInvalidArgument;
  *error = comm->error;
  if (comm->error != 0) return kNcclOk;
  NcclSegment::Group& group = *comm->group;
  if (comm->finalized) {
    *error = comm->works.empty() ? kNcclOk : kNcclInProgress;
    return kNcclOk;
  }
  if (!comm->waiting) return kNcclOk;
  *error = kNcclInProgress;
  if (group.joined < comm->size) return kNcclOk;
  while (!comm->splitting.empty()) {
    const auto [number, child] = comm->splitting.front();
    for (int r = 0; r < comm->size; ++r) {
      if (group.members[r].splits <= number) return kNcclOk;
    }
    const auto color_of = [&](int r) { return group.members[r].colors[number % kSplitsKept].load(); };
    const auto key_of = [&](int r) { return group.members[r].keys[number % kSplitsKept].load(); };
    comm->splitting.erase(comm->splitting.begin());
    const int color = color_of(comm->rank);
    if (color == cuda::kNcclNoColor) continue;
    std::vector<int> members;
    for (int r = 0; r < comm->size; ++r) {
      if (color_of(r) == color) members.push_back(r);
    }
    std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return key_of(a) < key_of(b); });
    const auto at = std::find(members.begin(), members.end(), comm->rank) - members.begin();
    const uint64_t id = mix64(comm->id ^ mix64(number << 20 ^ static_cast<uint64_t>(color))) | 1;
    make(child, static_cast<int>(members.size()), id, static_cast<int>(at));
    --made_;
    ++split_;
  }
  comm->waiting = false;
  *error = kNcclOk;
  return kNcclOk;
}

int NcclDouble::finalize(Comm* comm) {
  const std::lock_guard lock(mutex_);
  if (const int error = begin_call(comm, "finalize"); error != 0) return error;
  if (!comm->registrations.empty()) {  // NCCL gives them back when what that needs is gone
    misuse(fmt::format("{} is finalized with memory registered", comm->name()));
  }
  comm->finalized = true;
  return kNcclInProgress;
}

int NcclDouble::close(Comm* comm, bool aborted) {
  const std::lock_guard lock(mutex_);
  if (comm == nullptr || comm->closed) return kNcclInvalidArgument;
  if (!aborted && (!comm->finalized || !comm->works.empty())) {
    misuse(fmt::format("{} destroyed before it was at rest", comm->name()));
  }
  if (aborts_crash_ && aborted && !comm->registrations.empty()) ::raise(SIGSEGV);
  comm->closed = true;
  comm->registrations.clear();
  for (const auto& work : comm->works) {
    std::erase(device_, work);
    std::erase(waiting_, work);
  }
  comm->works.clear();
  return kNcclOk;
}

// --- memory
// ----------------------------------------------------------------------------------------------------------------------

namespace {

bool is_set(const char* name, std::string_view value) {
  const char* const word = std::getenv(name);
  return word != nullptr && word == value;
}

}  // namespace

int NcclDouble::mem_alloc(void** memory, int64_t bytes) {
  constexpr int kCudaError = 1;
  const int64_t rounded = (bytes + piece_ - 1) / piece_ * piece_;
  const int error = is_set("NCCL_CUMEM_ENABLE", "0") ? cuda_.allocate(memory, bytes) : cuda_.map(memory, rounded);
  return error == 0 ? kNcclOk : kCudaError;
}

int NcclDouble::mem_free(void* memory) {
  constexpr int kCudaError = 1;
  const StreamDouble::Range range = cuda_.range_of(memory);
  {
    const std::lock_guard lock(mutex_);
    for (const auto& comm : comms_) {
      for (const auto& one : comm->registrations) {
        if (one->holds(static_cast<const std::byte*>(memory), 1)) {
          misuse(fmt::format("memory is freed that {} has registered", comm->name()));
        }
      }
    }
  }
  const int error = range.is_mapped ? cuda_.unmap(memory) : cuda_.free(memory);
  return error == 0 ? kNcclOk : kCudaError;
}

int NcclDouble::register_memory(Comm* comm, void* memory, int64_t bytes, void** handle) {
  auto* const first = static_cast<std::byte*>(memory);
  const bool there = cuda_.holds(memory, bytes), is_used = cuda_.range_of(memory).is_mapped;
  const std::lock_guard lock(mutex_);
  *handle = nullptr;
  if (const int error = begin_call(comm, "register"); error != 0) return error;
  if (is_set("NCCL_LOCAL_REGISTER", "0") || is_set("NCCL_P2P_USE_CUDA_MEMCPY", "1")) return kNcclOk;
  if (!there) misuse(fmt::format("{} registers memory that is not there", comm->name()));
  if (there && !is_used) misuse(fmt::format("{} registers memory that is not NCCL's: it is not used", comm->name()));
  for (const auto& one : comm->registrations) {
    if (!one->holds(first, bytes)) continue;
    ++one->references;
    *handle = one.get();
    return kNcclOk;
  }
  comm->registrations.push_back(
      std::make_unique<Comm::Registration>(Comm::Registration{.first = first, .bytes = bytes, .is_used = is_used}));
  *handle = comm->registrations.back().get();
  ++registered_;
  return kNcclOk;
}

int NcclDouble::deregister(Comm* comm, void* handle) {
  const std::lock_guard lock(mutex_);
  if (!deregisters_) return kNcclOk;
  if (const int error = begin_call(comm, "deregister"); error != 0) return error;
  if (handle == nullptr) return kNcclOk;
  const auto found = std::ranges::find_if(comm->registrations, [&](const auto& one) { return one.get() == handle; });
  if (found == comm->registrations.end()) {
    misuse(fmt::format("{} deregisters what it has not registered", comm->name()));
    return kNcclInvalidUsage;
  }
  if (!comm->works.empty()) misuse(fmt::format("{} deregisters memory while it is used", comm->name()));
  if (--(*found)->references == 0) comm->registrations.erase(found);
  return kNcclOk;
}

int64_t NcclDouble::registrations_left() const {
  const std::lock_guard lock(mutex_);
  int64_t out = 0;
  for (const auto& comm : comms_) out += std::ssize(comm->registrations);
  return out;
}

/// What becomes of the caller's memory, seen when it is asked for.
void NcclDouble::use(Work& work) {
  std::erase_if(work.touches, [](const auto& one) { return one.second == 0; });
  bool there = true;
  for (const auto& [first, bytes] : work.touches) there = there && cuda_.holds(first, bytes);
  const std::lock_guard lock(mutex_);
  Comm& comm = *work.comm;
  if (!there) misuse(fmt::format("{} on {} in memory that is not there", work.name, comm.name()));
  if (comm.registrations.empty()) return;
  const auto registration_of = [&](const std::byte* first, int64_t bytes) -> Comm::Registration* {
    for (const auto& one : comm.registrations) {
      if (one->holds(first, bytes)) return one.get();
    }
    return nullptr;
  };
  bool used = true;
  for (const auto& [first, bytes] : work.touches) {
    const Comm::Registration* const one = registration_of(first, bytes);
    used = used && one != nullptr && one->is_used;
    if (one != nullptr) continue;
    misuse(fmt::format("{} on {} in memory that is not registered, where other memory is", work.name, comm.name()));
    return;
  }
  if (!used) return;
  if (work.collective) {  // ranks that are not all registered meet another call
    work.name += ", registered";
    work.word = stream_key(1, work.name);
  }
  ++in_registered_;
  for (const Transfer& transfer : work.transfers) {
    if (transfer.bytes <= kSmallMessage) continue;
    bool& mapped = comm.registrations.front()->mapped[transfer.peer];
    mapped_ += mapped ? 0 : 1;
    mapped = true;
  }
}

// --- asking for work
// --------------------------------------------------------------------------------------------------------------

int NcclDouble::issue(StreamHandle stream, std::shared_ptr<Work> work) {
  use(*work);
  {
    const std::lock_guard lock(mutex_);
    if (const int error = begin_call(work->comm, work->name.c_str()); error != 0) return error;
    Comm& comm = *work->comm;
    if (work->collective) {
      ++collectives_;
      work->number = comm.collectives++;
      device_.push_back(work);
    }
    for (Transfer& transfer : work->transfers) {
      transfer.number = (transfer.sends ? comm.sent : comm.received)[transfer.peer]++;
    }
    comm.works.push_back(work);
    waiting_.push_back(work);
  }
  if (const int error = cuda_.launch_waiting(stream, [this, work] { return step(*work); }); error != 0) return 1;
  const std::lock_guard lock(mutex_);
  work->comm->waiting = groups_ && (mix64(seed_ ^ ++calls_ << 8) & 3) == 0;
  return work->comm->waiting ? kNcclInProgress : kNcclOk;
}

int NcclDouble::collective(Comm* comm, StreamHandle stream, std::shared_ptr<Work> work) {
  work->comm = comm;
  if (depth > 0) {
    grouped_collectives.emplace_back(stream, std::move(work));
    return kNcclOk;
  }
  ++launches_;
  {
    const std::lock_guard lock(mutex_);
    if (held_ == nullptr && swap_ >= 0 && swap_-- == 0) {
      held_ = std::make_unique<Held>(Held{stream, std::move(work)});
      return kNcclOk;
    }
  }
  const int out = issue(stream, std::move(work));
  if (held_ == nullptr) return out;
  const std::unique_ptr<Held> held = std::move(held_);
  if (held->work->comm == comm) comm->waiting = false;
  const int then = issue(held->stream, held->work);
  if (held->work->comm != comm) held->work->comm->waiting = false;  // nobody asks about it now
  return out == kNcclOk && held->work->comm == comm ? then : out;
}

int NcclDouble::begin_group() {
  if (groups_) ++depth;
  return kNcclOk;
}

int NcclDouble::end_group() {
  if (!groups_) return kNcclOk;
  if (depth == 0) {
    misuse("the end of a group that was not begun");
    return kNcclInvalidUsage;
  }
  if (--depth > 0) return kNcclOk;
  ++launches_;
  std::vector<Grouped> all = std::exchange(grouped, {});
  int out = kNcclOk;
  std::set<Comm*> in_progress;
  for (auto& [stream, work] : std::exchange(grouped_collectives, {})) {
    Comm* const comm = work->comm;
    const int error = issue(stream, std::move(work));
    if (error == kNcclInProgress) in_progress.insert(comm);
    if (error != kNcclOk && (out == kNcclOk || out == kNcclInProgress)) out = error;
    const std::lock_guard lock(mutex_);
    comm->waiting = false;  // the group has one end
  }
  for (Comm* const comm : in_progress) {
    const std::lock_guard lock(mutex_);
    comm->waiting = true;
  }
  while (!all.empty()) {
    auto work = std::make_shared<Work>();
    work->comm = all.front().comm;
    work->name = "messages of a group";
    const StreamHandle stream = all.front().stream;
    std::erase_if(all, [&](const Grouped& one) {
      if (one.comm != work->comm || one.stream != stream) return false;
      work->transfers.push_back(one.transfer);
      work->touches.emplace_back(one.transfer.data, one.transfer.bytes);
      return true;
    });
    const int error = issue(stream, std::move(work));
    if (error != kNcclOk && (out == kNcclOk || out == kNcclInProgress)) out = error;
  }
  return out;
}

int NcclDouble::transfer(Comm* comm, StreamHandle stream, bool sends, std::byte* data, int64_t bytes, int peer) {
  if (comm == nullptr || peer < 0 || peer >= comm->size) return kNcclInvalidArgument;
  const Transfer transfer{.sends = sends, .data = data, .bytes = bytes, .peer = peer};
  if (depth > 0) {
    grouped.push_back({comm, stream, transfer});
    return kNcclOk;
  }
  ++launches_;
  auto work = std::make_shared<Work>();
  work->comm = comm;
  work->name = sends ? "send" : "recv";
  work->transfers.push_back(transfer);
  work->touches = {{data, bytes}};
  return issue(stream, std::move(work));
}

// --- doing it
// ---------------------------------------------------------------------------------------------------------------------

/// Whether all have come to this collective.
bool NcclDouble::arrived(Work& work) {
  Comm& comm = *work.comm;
  if (!work.collective || work.moves) return true;
  NcclSegment::Group& group = *comm.group;
  NcclSegment::Group::Member& me = group.members[comm.rank];
  if (!work.here) {
    me.calls[work.number % kCallsKept] = work.word;
    me.arrived = work.number + 1;
    work.here = true;
  }
  for (int r = 0; r < comm.size; ++r) {
    if (group.members[r].arrived <= work.number) return false;
  }
  for (int r = 0; r < comm.size; ++r) {
    if (group.members[r].calls[work.number % kCallsKept] == work.word) continue;
    misuse(fmt::format("{}: its collective {} is {}, rank {} has another", comm.name(), work.number, work.name, r));
    work.broken = true;
    return false;
  }
  work.moves = true;
  if (work.own) work.own();
  return true;
}

/// What of its messages can move now. Whether all have.
bool NcclDouble::move(Work& work) {
  Comm& comm = *work.comm;
  bool all = true;
  for (Transfer& transfer : work.transfers) {
    if (transfer.done) continue;
    Pair& pair =
        transfer.sends ? comm.group->pairs[comm.rank][transfer.peer] : comm.group->pairs[transfer.peer][comm.rank];
    if (transfer.sends) {
      if (!transfer.told) {
        // The receiver has come, and the message before is out of the way.
        if (pair.awaited <= transfer.number || pair.begun != transfer.number || pair.head != pair.tail) {
          all = false;
          continue;
        }
        pair.bytes = transfer.bytes;
        pair.begun = transfer.number + 1;
        transfer.told = true;
      }
      uint64_t head = pair.head;
      while (transfer.moved < transfer.bytes && head - pair.tail < kRing) {
        const uint64_t place = head % kRing;
        const auto n = std::min<uint64_t>(
            {static_cast<uint64_t>(transfer.bytes - transfer.moved), kRing - place, kRing - (head - pair.tail)});
        std::memcpy(pair.ring + place, transfer.data + transfer.moved, n);
        transfer.moved += static_cast<int64_t>(n);
        head += n;
        pair.head = head;
      }
      transfer.done = transfer.moved == transfer.bytes && pair.tail == pair.head;
    } else {
      if (!transfer.told) {
        if (pair.awaited == transfer.number) pair.awaited = transfer.number + 1;
        if (pair.begun <= transfer.number) {
          all = false;
          continue;
        }
        if (pair.bytes != transfer.bytes) {
          misuse(fmt::format("{}: rank {} sends {} bytes, {} are awaited", comm.name(), transfer.peer,
                             pair.bytes.load(), transfer.bytes));
          work.broken = true;
          return false;
        }
        transfer.told = true;
      }
      uint64_t tail = pair.tail;
      while (transfer.moved < transfer.bytes && pair.head != tail) {
        const uint64_t place = tail % kRing;
        const auto n = std::min<uint64_t>(
            {static_cast<uint64_t>(transfer.bytes - transfer.moved), kRing - place, pair.head - tail});
        std::memcpy(transfer.data + transfer.moved, pair.ring + place, n);
        transfer.moved += static_cast<int64_t>(n);
        tail += n;
        pair.tail = tail;
      }
      transfer.done = transfer.moved == transfer.bytes;
    }
    all = all && transfer.done;
  }
  return all;
}

/// Whether it is over.
bool NcclDouble::step(Work& work) {
  const std::lock_guard lock(mutex_);
  Comm& comm = *work.comm;
  if (work.done || comm.closed) return true;
  if (work.broken || comm.error != 0) return false;
  if (comm.works.front().get() != &work) return false;
  if (work.collective && seed_ % 2 == 1 && device_.front().get() != &work) return false;
  if (!work.begun) {
    if (ordered_ && waiting_.front().get() != &work) return false;
    std::erase_if(waiting_, [&](const auto& one) { return one.get() == &work; });
    work.begun = true;
  }
  if (!arrived(work) || !move(work)) return false;
  if (work.at_last) work.at_last();
  work.done = true;
  if (work.collective) std::erase_if(device_, [&](const auto& one) { return one.get() == &work; });
  comm.works.pop_front();
  return true;
}

}  // namespace cairn::simt
