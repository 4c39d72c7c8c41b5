#include "runtime/cuda/nccl/nccl_engine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/comm/call_group.h"
#include "runtime/comm/early_receiver.h"
#include "runtime/comm/group.h"
#include "runtime/comm/ordered_on.h"
#include "runtime/comm/parts.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/side_sums.h"
#include "runtime/core/check.h"
#include "runtime/core/random.h"
#include "runtime/cuda/nccl/communicators.h"
#include "runtime/cuda/nccl/watcher.h"

namespace cairn::cuda {
namespace {

using comm::Comm;
using comm::InPart;
using comm::OutPart;
using comm::ReduceOp;
using comm::Site;
using kernels::cuda::RankFold;
using kernels::cuda::RankInputs;

constexpr int64_t kPack = 16;         // bytes that kernels access at once
constexpr int64_t kSmall = 64 << 10;  // an all_reduce of no more is gathered, and summed by each rank
const char* const kGroupCall = "ncclGroupEnd";

/// Of a call in a group: what is in progress is asked about behind its end.
bool goes_on(int result) { return result == kNcclOk || result == kNcclInProgress; }

std::byte* at(void* memory) { return static_cast<std::byte*>(memory); }
const std::byte* at(const void* memory) { return static_cast<const std::byte*>(memory); }

/// Of ncclDataType_t; the dtype is one that is reduced.
int nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return kNcclF32;
    case DType::kBf16:
      return kNcclBf16;
    case DType::kF16:
      return kNcclF16;
    case DType::kF64:
      return kNcclF64;
    default:
      return kNcclI64;
  }
}

/// What all groups of a rank have.
class World {
 public:
  World(comm::Engine& host, const NcclApi& api, const kernels::cuda::RankSums& sums, CudaStream& rank,
        const NcclOptions& options)
      : options_(options),
        host_(host),
        local_(options.local != nullptr ? options.local : dynamic_cast<comm::LinkedEngine*>(&host)),
        sums_(sums),
        rank_(rank),
        comms_(api, options.deadline_ms),
        watcher_(comms_, options.deadline_ms, hooks()) {}

  const NcclOptions& options() const { return options_; }
  comm::Engine& host() { return host_; }
  Communicators& comms() { return comms_; }
  Watcher& watcher() { return watcher_; }

  struct Here {
    CudaStream& on;
    DeviceBytes room;
  };
  Here here() {
    Stream* const ordering = comm::ordering_stream();
    if (ordering == nullptr || ordering == &rank_) {
      join_side();  // whose sums use the same room
      return {rank_, rooms_.own};
    }
    CudaStream& on = cuda_stream(*ordering);
    return {on, ordering == side_.get() ? rooms_.own : rooms_.beside};
  }
  /// Whether the thread orders on the rank's own stream.
  bool on_rank() const {
    const Stream* const ordering = comm::ordering_stream();
    return ordering == nullptr || ordering == &rank_;
  }
  /// The stream of sums beside the rank's, behind all that the rank's was asked for.
  Stream& side() {
    if (side_ == nullptr) side_ = rank_.beside();
    side_->follow(rank_.mark());
    side_busy_ = true;
    return *side_;
  }
  void join_side() {
    if (std::exchange(side_busy_, false)) rank_.follow(side_->mark());
  }
  /// The stream that adds up what comes in on this one.
  CudaStream& adder(CudaStream& on) {
    std::unique_ptr<Stream>& made = adders_[&on];
    if (made == nullptr) made = on.beside();
    return cuda_stream(*made);
  }
  /// Before the first operation.
  void take_rooms() {
    if (rooms_.own.size > 0) return;
    rooms_ = options_.rooms();
    if (options_.registered) comms_.register_all(options_.registered());
  }
  bool on_device(const void* memory) const { return options_.on_device(memory); }

  using Others = std::shared_ptr<const std::vector<int64_t>>;
  /// A call that a comm::CallGroup holds back.
  struct HeldCall {
    NcclHandle comm = nullptr;
    CudaStream* on = nullptr;
    std::string group, what;
    const char* function = nullptr;
    Others others;
    std::function<int(const NcclApi&)> body;
  };
  /// Until the group ends, or an operation comes that is none of it.
  Status hold(comm::CallGroup& group, HeldCall call) {
    RT_TRY(watcher_.failed());
    if (!held_.empty() && held_.back().on != call.on) RT_TRY(begin_held());
    held_.push_back(std::move(call));
    group.hold([this] { return begin_held(); });
    return {};
  }
  Status begin_held() {
    const std::vector<HeldCall> held = std::exchange(held_, {});
    if (held.empty()) return {};
    std::vector<NcclHandle> comms;
    std::vector<int64_t> others;
    for (const HeldCall& call : held) {
      if (std::ranges::find(comms, call.comm) == comms.end()) comms.push_back(call.comm);
      for (const int64_t rank : *call.others) {
        if (std::ranges::find(others, rank) == others.end()) others.push_back(rank);
      }
    }
    const HeldCall& first = held.front();
    return ordered(*first.on, {first.group, first.function, first.what},
                   std::make_shared<const std::vector<int64_t>>(std::move(others)), [&] {
                     return comms_.call(comms, kGroupCall, [&](const NcclApi& api) {
                       int result = api.begin_group();
                       for (const HeldCall& call : held) {
                         if (goes_on(result)) result = call.body(api);
                       }
                       const int ended = api.end_group();
                       return goes_on(result) ? ended : result;
                     });
                   });
  }

  /// body() orders an operation on `stream`, which is watched from then on.
  template <typename Body>
  Status ordered(CudaStream& stream, const Site& site, const Others& others, const Body& body) {
    RT_TRY(begin_held());
    RT_TRY(watcher_.failed());
    const Told told(local_, site);
    std::shared_ptr<const Event> begin = stream.mark();
    if (!stream.ready()) return stream.settle();  // which gives its error
    Status done = body();
    if (!done.ok()) {
      Error error = std::move(done).error();
      if (const auto why = comms_.aborted()) {
        error = Error(*why);
      } else {
        watcher_.fail(Error(error).with(site.text()), true);
      }
      return std::move(error).with(site.text());
    }
    watcher_.watch(stream, site.text(), others, std::move(begin), stream.mark());
    return {};
  }

  void fold(CudaStream& on, const RankInputs& from, void* out, int64_t count, DType dtype, ReduceOp op) const {
    const RankFold fold = op == ReduceOp::kSum   ? RankFold::kSum
                          : op == ReduceOp::kMax ? RankFold::kMax
                                                 : RankFold::kTreeSum;
    if (on.ready()) on.keep(sums_.fold(on.handle(), from, out, count, dtype, fold), "launch");
  }
  void add(CudaStream& on, const RankInputs& from, int64_t tree, void* out, int64_t count, DType dtype) const {
    if (on.ready()) on.keep(sums_.add(on.handle(), from, tree, out, count, dtype), "launch");
  }

 private:
  /// Whoever looks at this rank sees what it was asked for last.
  class Told {
   public:
    Told(comm::LinkedEngine* local, const Site& site) : local_(local) {
      if (local_ != nullptr) local_->operation_begins(site);
    }
    ~Told() {
      if (local_ != nullptr) local_->operation_ends();
    }
    Told(const Told&) = delete;
    Told& operator=(const Told&) = delete;

   private:
    comm::LinkedEngine* const local_;
  };

  WatcherHooks hooks() {
    WatcherHooks out;
    out.failed = options_.on_failure;
    out.give_up = [this](const Error& error) {
      host_.give_up(error.code, fmt::format("rank {}: {}", host_.world_rank(), error.message));
    };
    if (local_ == nullptr) return out;
    out.others_failed = [this]() -> std::optional<Error> {
      std::optional<Error> found = local_->dead();
      // A rank that gave up is a lost peer, whatever made it give up; being told to stop is not a failure.
      if (found && found->code != ErrorCode::kStopped) found->code = ErrorCode::kPeerLost;
      return found;
    };
    out.look_at = [this](int64_t rank) { return local_->look_at(rank); };
    return out;
  }

  const NcclOptions options_;
  NcclRooms rooms_;
  comm::Engine& host_;
  comm::LinkedEngine* const local_;
  const kernels::cuda::RankSums& sums_;
  CudaStream& rank_;
  std::map<const CudaStream*, std::unique_ptr<Stream>> adders_;
  std::vector<HeldCall> held_;  // of one stream
  std::unique_ptr<Stream> side_;
  bool side_busy_ = false;
  Communicators comms_;
  Watcher watcher_;
};

/// A sum piece by piece: a stream of its own adds up the piece in one half of the room while the next comes into the
/// other half.
class Pieces {
 public:
  /// `alone`: there is one piece, so nothing stands beside.
  Pieces(World& world, CudaStream& on, const DeviceBytes& half, bool alone)
      : on_(on), adder_(alone ? on : world.adder(on)), half_(half) {}

  /// Where the next one may come in.
  std::byte* next() {
    follow(turn_);
    return half_.first.address() + static_cast<int64_t>(turn_) * half_.size;
  }
  /// add(stream) adds up the one that has come in.
  template <typename Add>
  void add(const Add& add) {
    if (&adder_ == &on_) return add(on_);
    adder_.follow(on_.mark());
    add(adder_);
    added_[turn_] = adder_.mark();
    turn_ = 1 - turn_;
  }
  /// The stream continues behind the sum of the last piece, or of the one before it.
  void follow_last() { follow(1 - turn_); }
  void follow_one_before() { follow(turn_); }

 private:
  void follow(size_t half) { on_.follow(std::exchange(added_[half], nullptr)); }

  CudaStream &on_, &adder_;
  const DeviceBytes half_;
  size_t turn_ = 0;
  std::shared_ptr<const Event> added_[2];
};

/// Messages to a member, or from it, over a communicator of the two.
struct Way {
  NcclHandle comm = nullptr;
  std::unique_ptr<Stream> owned;
  CudaStream* stream = nullptr;
  bool sends = false;
  int peer = 0;                                        // its rank there
  std::shared_ptr<const std::vector<int64_t>> others;  // its world rank
};

/// Which messages take in turn.
struct Ways {
  std::vector<Way> ways;
  size_t next = 0;
};

class NcclComm final : public Comm, public comm::EarlyReceiver, public comm::SideSums {
 public:
  static Result<std::unique_ptr<Comm>> make(std::shared_ptr<World> world, std::unique_ptr<Comm> host,
                                            std::string_view axis, const std::vector<int64_t>& world_ranks,
                                            NcclHandle handle) {
    std::unique_ptr<NcclComm> out(new NcclComm(std::move(world), std::move(host), world_ranks, handle));
    RT_TRY(out->connect(axis));
    RT_TRY(out->use_once());
    return std::unique_ptr<Comm>(std::move(out));
  }
  ~NcclComm() override {
    world_->watcher().wait_for_rest();
    for (auto* all : {&out_, &in_}) {
      for (Ways& ways : *all) {
        for (Way& way : ways.ways) world_->comms().close(way.comm);
      }
    }
    world_->comms().close(handle_);
  }

  int64_t rank() const override { return host_->rank(); }
  int64_t size() const override { return host_->size(); }
  const std::string& name() const override { return host_->name(); }
  Traffic traffic() const override { return traffic_; }

  Status all_reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) override {
    const Site site{name(), "all_reduce", what};
    RT_TRY(check_elems(site, count, dtype));
    const int64_t elem = dtype_size_bytes(dtype), bytes = count * elem;
    traffic_.all_reduce.add(bytes);
    if (bytes > 0 && !world_->on_device(data)) return host_->all_reduce(data, count, dtype, op, what);
    if (bytes == 0) return world_->watcher().failed();
    const auto [on, room] = world_->here();
    return world_->ordered(on, site, others_, [&, &on = on, &room = room]() -> Status {
      if (by_nccl(op)) return nccl_sum(on, data, count, dtype);
      if (bytes <= kSmall && bytes * size() <= room.size) {
        RT_TRY(call("ncclAllGather", [&](const NcclApi& api) {
          return api.all_gather(data, room.first.address(), static_cast<size_t>(bytes), kNcclBytes, handle_,
                                on.handle());
        }));
        world_->fold(on, {.inputs = room.first.address(), .stride_bytes = bytes, .ranks = size()}, data, count, dtype,
                     op);
        return {};
      }
      const DeviceBytes half = half_of(room);
      RT_TRY_SET(const int64_t most, slice_elems(half, elem));
      const int64_t at_once = most * size();
      /// A part of the data, and of it each rank's slice.
      struct Part {
        std::byte* data;
        int64_t elems, slice, elem;
        int64_t begin(int64_t r) const { return std::min(elems, r * slice); }
        std::byte* first(int64_t r) const { return data + begin(r) * elem; }
        int64_t bytes(int64_t r) const { return (begin(r + 1) - begin(r)) * elem; }
      };
      const auto part_at = [&](int64_t from) {
        const int64_t elems = std::min(at_once, count - from);
        return Part{at(data) + from * elem, elems, whole_packs((elems + size() - 1) / size(), elem), elem};
      };
      const auto spread = [&](const Part& part) {
        return exchange(
            on, [&](int64_t) { return std::pair(part.first(rank()), part.bytes(rank())); },
            [&](int64_t r) { return std::pair(part.first(r), part.bytes(r)); });
      };
      Pieces pieces(*world_, on, half, count <= at_once);
      for (int64_t from = 0; from < count; from += at_once) {
        const Part part = part_at(from);
        std::byte* const theirs = pieces.next();
        const int64_t stride = part.slice * elem;
        RT_TRY(exchange(
            on, [&](int64_t r) { return std::pair(part.first(r), part.bytes(r)); },
            [&](int64_t r) { return std::pair(theirs + r * stride, part.bytes(rank())); }));
        pieces.add([&](CudaStream& by) {
          std::byte* const own = part.first(rank());
          world_->fold(by, inputs(theirs, stride, own), own, part.bytes(rank()) / elem, dtype, op);
        });
        if (from == 0) continue;
        pieces.follow_one_before();
        RT_TRY(spread(part_at(from - at_once)));
      }
      pieces.follow_last();
      return spread(part_at((count - 1) / at_once * at_once));
    });
  }

  Status reduce_scatter(const void* input, void* output, int64_t count_per_rank, DType dtype, ReduceOp op,
                        std::string_view what) override {
    const Site site{name(), "reduce_scatter", what};
    RT_TRY(check_elems(site, count_per_rank, dtype));
    const int64_t bytes = size() * count_per_rank * dtype_size_bytes(dtype);
    traffic_.reduce_scatter.add(bytes);
    if (bytes > 0 && !world_->on_device(input)) {
      return host_->reduce_scatter(input, output, count_per_rank, dtype, op, what);
    }
    if (bytes > 0 && by_nccl(op)) {
      CudaStream& on = world_->here().on;
      return world_->ordered(on, site, others_, [&] { return nccl_sum(on, input, output, count_per_rank, dtype); });
    }
    return scatter(site, input, output, count_per_rank, dtype,
                   [&](CudaStream& on, const RankInputs& from, void* out, int64_t count) {
                     world_->fold(on, from, out, count, dtype, op);
                   });
  }

  Status reduce_scatter_add(const void* input, void* output, int64_t count_per_rank, DType dtype, int64_t tree,
                            std::string_view what) override {
    const Site site{name(), "reduce_scatter_add", what};
    RT_TRY(check_elems(site, count_per_rank, dtype));
    RT_TRY(check_tree(site, tree, size()));
    const int64_t bytes = size() * count_per_rank * dtype_size_bytes(dtype);
    traffic_.reduce_scatter.add(bytes);
    if (bytes > 0 && !world_->on_device(input)) {
      return host_->reduce_scatter_add(input, output, count_per_rank, dtype, tree, what);
    }
    if (bytes > 0 && tree == 1 && by_nccl(ReduceOp::kSum)) {
      const auto [on, room] = world_->here();
      return world_->ordered(on, site, others_, [&, &on = on, &room = room]() -> Status {
        if (bytes / size() > room.size) {
          return Error{ErrorCode::kInternal,
                       fmt::format("{}: {} bytes for a sum of {}", name(), room.size, bytes / size())};
        }
        std::byte* const sum = room.first.address();
        RT_TRY(nccl_sum(on, input, sum, count_per_rank, dtype));
        world_->add(on, {.inputs = sum, .stride_bytes = bytes / size(), .ranks = 1}, 1, output, count_per_rank, dtype);
        return {};
      });
    }
    return scatter(site, input, output, count_per_rank, dtype,
                   [&](CudaStream& on, const RankInputs& from, void* out, int64_t count) {
                     world_->add(on, from, tree, out, count, dtype);
                   });
  }

  Status all_gather(const void* input, void* output, int64_t bytes_per_rank, std::string_view what) override {
    const Site site{name(), "all_gather", what};
    RT_TRY(check_bytes(site, bytes_per_rank));
    traffic_.all_gather.add(bytes_per_rank);
    if (bytes_per_rank > 0 && !world_->on_device(input)) return host_->all_gather(input, output, bytes_per_rank, what);
    if (bytes_per_rank == 0) return world_->watcher().failed();
    CudaStream& on = world_->here().on;
    const auto body = [=, handle = handle_, &on](const NcclApi& api) {
      return api.all_gather(input, output, static_cast<size_t>(bytes_per_rank), kNcclBytes, handle, on.handle());
    };
    if (comm::CallGroup* const together = comm::CallGroup::current(); together != nullptr) {
      return world_->hold(*together, {.comm = handle_,
                                      .on = &on,
                                      .group = name(),
                                      .what = std::string(what),
                                      .function = "all_gather",
                                      .others = others_,
                                      .body = body});
    }
    return world_->ordered(on, site, others_, [&] { return call("ncclAllGather", body); });
  }

  Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) override {
    const Site site{name(), "broadcast", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "root", root, size()));
    traffic_.broadcast.add(rank() == root ? bytes : 0);
    if (bytes > 0 && !world_->on_device(data)) return host_->broadcast(data, bytes, root, what);
    if (bytes == 0) return world_->watcher().failed();
    CudaStream& on = world_->here().on;
    return world_->ordered(on, site, others_, [&] {
      return call("ncclBroadcast", [&](const NcclApi& api) {
        return api.broadcast(data, data, static_cast<size_t>(bytes), kNcclBytes, static_cast<int>(root), handle_,
                             on.handle());
      });
    });
  }

  Status all_to_all(std::span<const OutPart> out, std::span<const InPart> in, std::string_view what) override {
    const Site site{name(), "all_to_all", what};
    RT_TRY(comm::check_parts(site, out, size()));
    RT_TRY(comm::check_parts(site, in, size()));
    int64_t all = 0;
    for (const OutPart& part : out) all += part.bytes;
    traffic_.all_to_all.add(all);
    const auto there = [&](const auto& parts) {
      return std::ranges::all_of(parts,
                                 [&](const auto& part) { return part.bytes == 0 || world_->on_device(part.data); });
    };
    if (!there(out) || !there(in)) return host_->all_to_all(out, in, what);
    RT_TRY_SET(const Cuts cuts, tell_cuts(site, out, in));
    CudaStream& on = world_->here().on;
    return world_->ordered(on, site, others_, [&]() -> Status {
      RT_TRY(call(kGroupCall, [&](const NcclApi& api) {
        int result = api.begin_group();
        for (int64_t r = 0; r < size() && goes_on(result); ++r) {
          if (r == rank()) continue;
          const auto peer = static_cast<int>(r);
          const auto send = [&](const std::byte* data, int64_t bytes) {
            if (goes_on(result)) {
              result = api.send(data, static_cast<size_t>(bytes), kNcclBytes, peer, handle_, on.handle());
            }
          };
          const auto receive = [&](std::byte* data, int64_t bytes) {
            if (goes_on(result)) {
              result = api.recv(data, static_cast<size_t>(bytes), kNcclBytes, peer, handle_, on.handle());
            }
          };
          walk(comm::parts_of(out, r), cuts.theirs_in[static_cast<size_t>(r)], send);
          walk(comm::parts_of(in, r), cuts.theirs_out[static_cast<size_t>(r)], receive);
        }
        const int ended = api.end_group();
        return goes_on(result) ? ended : result;
      }));
      // What it has for itself: pieces that are cut on both sides.
      std::vector<std::pair<std::byte*, int64_t>> to;
      const auto mine = static_cast<size_t>(rank());
      walk(comm::parts_of(in, rank()), cuts.theirs_out[mine],
           [&](std::byte* data, int64_t bytes) { to.emplace_back(data, bytes); });
      size_t next = 0;
      walk(comm::parts_of(out, rank()), cuts.theirs_in[mine],
           [&](const std::byte* data, int64_t bytes) { on.copy(to[next++].first, data, bytes, kOnDevice); });
      return {};
    });
  }

  Status barrier(std::string_view what) override { return host_->barrier(what); }

  Status isend(const void* data, int64_t bytes, int64_t dst, std::string_view what) override {
    const Site site{name(), "isend", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "destination", dst, size()));
    traffic_.send.add(bytes);
    if (bytes == 0 || !world_->on_device(data)) {
      from_host_ = true;
      return host_->isend(data, bytes, dst, what);
    }
    RT_TRY(world_->begin_held());
    CudaStream& on = world_->here().on;
    if (dst == rank()) {
      to_itself_.push_back({data, bytes, {&on, on.mark()}});
      return world_->watcher().failed();
    }
    RT_TRY_SET(Way* const way, way_of(out_, dst, site));
    way->stream->follow(on.mark());
    RT_TRY(world_->ordered(*way->stream, site, way->others, [&] {
      return message(*way, "ncclSend", [&](const NcclApi& api) {
        return api.send(data, static_cast<size_t>(bytes), kNcclBytes, way->peer, way->comm, way->stream->handle());
      });
    }));
    sent_[static_cast<size_t>(dst)].push_back({way->stream, way->stream->mark()});
    return {};
  }

  Status recv(void* data, int64_t bytes, int64_t src, std::string_view what) override {
    const Site site{name(), "recv", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "source", src, size()));
    if (bytes == 0 || !world_->on_device(data)) return host_->recv(data, bytes, src, what);
    RT_TRY(world_->begin_held());
    CudaStream& on = world_->here().on;
    if (src == rank()) {
      if (to_itself_.empty() || to_itself_.front().bytes != bytes) {
        return Error{ErrorCode::kInternal,
                     fmt::format("{}: {} bytes of itself, which it has not sent", site.text(), bytes)};
      }
      const Own own = std::move(to_itself_.front());
      to_itself_.pop_front();
      follow(on, own.behind);
      on.copy(data, own.data, bytes, kOnDevice);
      sent_[static_cast<size_t>(src)].push_back({&on, on.mark()});
      return world_->watcher().failed();
    }
    RT_TRY_SET(Way* const way, receive(on, site, data, bytes, src));
    on.follow(way->stream->mark());
    return {};
  }

  Status receive_early(DevicePtr<void> data, int64_t bytes, int64_t src, std::string_view what) override {
    const Site site{name(), "recv", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "source", src, size()));
    if (src == rank() || bytes == 0 || !world_->on_device(data.address())) {
      return Error{ErrorCode::kInternal, fmt::format("{}: {} bytes of member {} come ahead", site.text(), bytes, src)};
    }
    RT_TRY(world_->begin_held());
    RT_TRY_SET(Way* const way, receive(world_->here().on, site, data.address(), bytes, src));
    early_[static_cast<size_t>(src)].push_back({way->stream, way->stream->mark()});
    return {};
  }
  Status take_early(int64_t src, std::string_view what) override {
    const Site site{name(), "recv", what};
    RT_TRY(check_peer(site, "source", src, size()));
    std::deque<Place>& early = early_[static_cast<size_t>(src)];
    if (early.empty()) return Error{ErrorCode::kInternal, fmt::format("{}: nothing comes ahead", site.text())};
    follow(world_->here().on, early.front());
    early.pop_front();
    return world_->watcher().failed();
  }

  int64_t least_chunk_bytes() const override {
    return by_nccl(ReduceOp::kSum) || !world_->on_rank() ? 0 : world_->options().least_chunk_bytes;
  }
  Status sum_beside(DevicePtr<void> data, int64_t count, DType dtype, std::string_view what) override {
    RT_TRY(world_->begin_held());
    const comm::OrderedOn beside(world_->side());
    return all_reduce(data.address(), count, dtype, ReduceOp::kSum, what);
  }
  Status join_sums() override {
    world_->join_side();
    return world_->watcher().failed();
  }

  // The stream waits, not the host: what fills a buffer next comes behind the send that reads it.
  Status wait_sends(std::string_view what) override {
    for (int64_t dst = 0; dst < size(); ++dst) RT_TRY(follow_sends(dst, 0));
    return std::exchange(from_host_, false) ? host_->wait_sends(what) : world_->watcher().failed();
  }
  Status wait_sends_to(int64_t dst, int64_t may_stay, std::string_view what) override {
    const Site site{name(), "wait_sends_to", what};
    RT_TRY(check_peer(site, "destination", dst, size()));
    RT_TRY(follow_sends(dst, may_stay));
    return from_host_ ? host_->wait_sends_to(dst, may_stay, what) : world_->watcher().failed();
  }

 private:
  struct Place {
    const CudaStream* stream = nullptr;
    std::shared_ptr<const Event> event;
  };
  struct Own {  // to itself
    const void* data;
    int64_t bytes;
    Place behind;
  };
  /// Of an all_to_all, by peer: where it cuts what it takes from this rank, and what it sends to it.
  struct Cuts {
    std::vector<std::vector<int64_t>> theirs_in, theirs_out;
  };

  NcclComm(std::shared_ptr<World> world, std::unique_ptr<Comm> host, std::vector<int64_t> world_ranks,
           NcclHandle handle)
      : world_(std::move(world)),
        host_(std::move(host)),
        world_ranks_(std::move(world_ranks)),
        others_([this] {
          std::vector<int64_t> out = world_ranks_;
          out.erase(out.begin() + host_->rank());
          return std::make_shared<const std::vector<int64_t>>(std::move(out));
        }()),
        handle_(handle),
        sent_(static_cast<size_t>(size())),
        early_(static_cast<size_t>(size())) {}

  template <typename Body>
  Status call(const char* function, const Body& body) {
    return world_->comms().call(handle_, function, body);
  }
  template <typename Body>
  Status message(const Way& way, const char* function, const Body& body) {
    return world_->comms().call(way.comm, function, body);
  }

  /// A message of another member comes in behind what `on` was asked for; on the way that it gives.
  Result<Way*> receive(CudaStream& on, const Site& site, void* data, int64_t bytes, int64_t src) {
    RT_TRY_SET(Way* const way, way_of(in_, src, site));
    way->stream->follow(on.mark());
    RT_TRY(world_->ordered(*way->stream, site, way->others, [&] {
      return message(*way, "ncclRecv", [&](const NcclApi& api) {
        return api.recv(data, static_cast<size_t>(bytes), kNcclBytes, way->peer, way->comm, way->stream->handle());
      });
    }));
    return way;
  }

  bool by_nccl(ReduceOp op) const { return world_->options().nccl_sums && op == ReduceOp::kSum; }
  Status nccl_sum(CudaStream& on, void* data, int64_t count, DType dtype) {
    return call("ncclAllReduce", [&](const NcclApi& api) {
      return api.all_reduce(data, data, static_cast<size_t>(count), nccl_type(dtype), kNcclSum, handle_, on.handle());
    });
  }
  Status nccl_sum(CudaStream& on, const void* input, void* output, int64_t count_per_rank, DType dtype) {
    return call("ncclReduceScatter", [&](const NcclApi& api) {
      return api.reduce_scatter(input, output, static_cast<size_t>(count_per_rank), nccl_type(dtype), kNcclSum, handle_,
                                on.handle());
    });
  }

  /// A communicator for each direction of two members that may send to each other; all make theirs in one order.
  Status connect(std::string_view axis) {
    const NcclPeers peers = world_->options().peers ? world_->options().peers(axis) : NcclPeers::kAll;
    out_.resize(static_cast<size_t>(size()));
    in_.resize(static_cast<size_t>(size()));
    if (peers == NcclPeers::kNone) return {};
    // [from, to, way]: each member makes those of its own messages.
    const int64_t ways = world_->options().ways, row = size() * ways;
    std::vector<NcclId> ids(static_cast<size_t>(size() * row));
    NcclId* const mine = &ids[static_cast<size_t>(rank() * row)];
    for (int64_t k = 0; k < row; ++k) {
      if (k / ways == rank()) continue;
      RT_TRY_SET(mine[k], world_->comms().new_id());
    }
    RT_TRY(host_->all_gather(mine, ids.data(), row * static_cast<int64_t>(sizeof(NcclId)), "NCCL's ids"));
    for (int64_t a = 0; a < size(); ++a) {
      for (int64_t b = a + 1; b < size(); ++b) {
        const bool neighbours = b == a + 1 || (a == 0 && b + 1 == size());
        if (peers == NcclPeers::kNeighbours && !neighbours) continue;
        for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
          if (rank() != from && rank() != to) continue;
          for (int64_t k = 0; k < ways; ++k) {
            RT_TRY(connect(from, to, ids[static_cast<size_t>((from * size() + to) * ways + k)]));
          }
        }
      }
    }
    return {};
  }
  Status connect(int64_t from, int64_t to, const NcclId& id) {
    const bool sends = rank() == from;
    const int64_t other = sends ? to : from;
    Way& way = (sends ? out_ : in_)[static_cast<size_t>(other)].ways.emplace_back();
    RT_TRY_SET(way.comm, world_->comms().make(id, 2, sends ? 0 : 1,
                                              {.name = fmt::format("{} from {} to {}", name(), from, to),
                                               .max_ctas = world_->options().max_message_ctas}));
    way.sends = sends;
    way.peer = sends ? 1 : 0;
    way.others = std::make_shared<const std::vector<int64_t>>(1, world_ranks_[static_cast<size_t>(other)]);
    way.owned = world_->here().on.beside();
    way.stream = &cuda_stream(*way.owned);
    return {};
  }
  /// One operation of each kind in the room for sums, which nobody uses yet. Waits until all are done. Few bytes
  /// connect ranks; registered memory is mapped by what is too large for NCCL's protocols of small messages.
  Status use_once() {
    const auto [on, room] = world_->here();
    const Site site{name(), "first_use", "NCCL connects ranks"};
    std::byte* const at = room.first.address();
    const int64_t bytes = world_->options().registered ? std::max(kPack, room.size / size() / kPack * kPack) : kPack;
    RT_TRY(world_->ordered(on, site, others_, [&, &on = on]() -> Status {
      RT_TRY(call("ncclAllGather", [&](const NcclApi& api) {
        return api.all_gather(at + rank() * bytes, at, static_cast<size_t>(bytes), kNcclBytes, handle_, on.handle());
      }));
      RT_TRY(call("ncclBroadcast", [&](const NcclApi& api) {
        return api.broadcast(at, at, static_cast<size_t>(bytes), kNcclBytes, 0, handle_, on.handle());
      }));
      if (by_nccl(ReduceOp::kSum)) {
        RT_TRY(nccl_sum(on, at, bytes / 4, DType::kF32));
        RT_TRY(nccl_sum(on, at, at + rank() * bytes, bytes / 4, DType::kF32));
      }
      return exchange(
          on, [&](int64_t) { return std::pair(at + rank() * bytes, bytes); },
          [&](int64_t r) { return std::pair(at + r * bytes, bytes); });
    }));
    for (int64_t a = 0; a < size(); ++a) {  // in the order of connect()
      for (int64_t b = a + 1; b < size(); ++b) {
        for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
          if (rank() == from) RT_TRY(use_once(out_[static_cast<size_t>(to)], at, bytes, site));
          if (rank() == to) RT_TRY(use_once(in_[static_cast<size_t>(from)], at, bytes, site));
        }
      }
    }
    return on.settle();
  }
  Status use_once(Ways& ways, std::byte* at, int64_t bytes, const Site& site) {
    for (Way& way : ways.ways) RT_TRY(use_once(way, at, bytes, site));
    return {};
  }
  Status use_once(Way& way, std::byte* at, int64_t bytes, const Site& site) {
    CudaStream& on = world_->here().on;
    way.stream->follow(on.mark());
    RT_TRY(world_->ordered(*way.stream, site, way.others, [&] {
      return message(way, "first message", [&](const NcclApi& api) {
        const auto count = static_cast<size_t>(bytes);
        return way.sends ? api.send(at, count, kNcclBytes, way.peer, way.comm, way.stream->handle())
                         : api.recv(at, count, kNcclBytes, way.peer, way.comm, way.stream->handle());
      });
    }));
    on.follow(way.stream->mark());
    return {};
  }
  static Result<Way*> way_of(std::vector<Ways>& all, int64_t peer, const Site& site) {
    Ways& of = all[static_cast<size_t>(peer)];
    if (!of.ways.empty()) return &of.ways[of.next++ % of.ways.size()];
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{}: member {} is none that this rank has a communicator with", site.text(), peer)};
  }

  static void follow(CudaStream& on, const Place& place) {
    if (place.stream != &on) on.follow(place.event);
  }
  Status follow_sends(int64_t dst, int64_t may_stay) {
    auto& sent = sent_[static_cast<size_t>(dst)];
    if (dst == rank() && !to_itself_.empty() && std::ssize(to_itself_) > may_stay) {
      return Error{
          ErrorCode::kInternal,
          fmt::format("{}: {} messages to itself that it has not received are waited for", name(), to_itself_.size())};
    }
    std::vector<Place> last;  // of each stream
    for (; std::ssize(sent) + (dst == rank() ? std::ssize(to_itself_) : 0) > may_stay; sent.pop_front()) {
      std::erase_if(last, [&](const Place& place) { return place.stream == sent.front().stream; });
      last.push_back(sent.front());
    }
    for (const Place& place : last) follow(world_->here().on, place);
    return {};
  }

  static int64_t whole_packs(int64_t elems, int64_t elem) { return (elems * elem + kPack - 1) / kPack * kPack / elem; }

  /// Elements of each rank for which there is room.
  Result<int64_t> slice_elems(const DeviceBytes& room, int64_t elem) const {
    const int64_t slice = room.size / size() / kPack * kPack / elem;
    if (slice > 0) return slice;
    return Error{ErrorCode::kInternal, fmt::format("{}: {} bytes for what {} ranks send", name(), room.size, size())};
  }

  static DeviceBytes half_of(const DeviceBytes& room) { return {room.first, room.size / 2 / kPack * kPack}; }

  RankInputs inputs(const std::byte* theirs, int64_t stride_bytes, const std::byte* own) const {
    return {.inputs = theirs, .stride_bytes = stride_bytes, .ranks = size(), .own_rank = rank(), .own = own};
  }

  /// What this rank has for each other one, and what it takes of each: (where, bytes). All at once.
  template <typename Out, typename In>
  Status exchange(CudaStream& on, const Out& out, const In& in) {
    return call(kGroupCall, [&](const NcclApi& api) {
      int result = api.begin_group();
      for (int64_t r = 0; r < size() && goes_on(result); ++r) {
        if (r == rank()) continue;
        const auto [data, bytes] = out(r);
        const auto [room, expected] = in(r);
        const auto peer = static_cast<int>(r);
        if (bytes > 0) result = api.send(data, static_cast<size_t>(bytes), kNcclBytes, peer, handle_, on.handle());
        if (goes_on(result) && expected > 0) {
          result = api.recv(room, static_cast<size_t>(expected), kNcclBytes, peer, handle_, on.handle());
        }
      }
      const int ended = api.end_group();
      return goes_on(result) ? ended : result;
    });
  }

  template <typename Sum>
  Status scatter(const Site& site, const void* input, void* output, int64_t count_per_rank, DType dtype,
                 const Sum& sum) {
    if (count_per_rank == 0) return world_->watcher().failed();
    const auto [on, room] = world_->here();
    return world_->ordered(on, site, others_, [&, &on = on, &room = room]() -> Status {
      const int64_t elem = dtype_size_bytes(dtype), part = count_per_rank * elem;
      const DeviceBytes half = half_of(room);
      RT_TRY_SET(const int64_t most, slice_elems(half, elem));
      Pieces pieces(*world_, on, half, count_per_rank <= most);
      for (int64_t from = 0; from < count_per_rank; from += most) {
        const int64_t count = std::min(most, count_per_rank - from), bytes = count * elem;
        const int64_t stride = whole_packs(count, elem) * elem;
        const std::byte* const piece = at(input) + from * elem;
        std::byte* const theirs = pieces.next();
        RT_TRY(exchange(
            on, [&](int64_t r) { return std::pair(piece + r * part, bytes); },
            [&](int64_t r) { return std::pair(theirs + r * stride, bytes); }));
        pieces.add([&](CudaStream& by) {
          sum(by, inputs(theirs, stride, piece + rank() * part), at(output) + from * elem, count);
        });
      }
      pieces.follow_last();
      return {};
    });
  }

  /// Tells the others how this rank's bytes are cut, and compares the sums.
  Result<Cuts> tell_cuts(const Site& site, std::span<const OutPart> out, std::span<const InPart> in) {
    const auto n = static_cast<size_t>(size());
    std::vector<std::vector<int64_t>> mine(n);  // for each: parts that it gets, parts that it is to send, their sizes
    for (size_t r = 0; r < n; ++r) {
      const auto to = comm::parts_of(out, static_cast<int64_t>(r));
      const auto from = comm::parts_of(in, static_cast<int64_t>(r));
      mine[r] = {std::ssize(to), std::ssize(from)};
      for (const OutPart& part : to) mine[r].push_back(part.bytes);
      for (const InPart& part : from) mine[r].push_back(part.bytes);
    }
    std::vector<int64_t> sizes(n), told(n);
    for (size_t r = 0; r < n; ++r) sizes[r] = std::ssize(mine[r]);
    const auto swap = [&](const auto& of, auto& into) {
      std::vector<OutPart> give;
      std::vector<InPart> take;
      for (size_t r = 0; r < n; ++r) {
        give.push_back({static_cast<int64_t>(r), of[r].data(), std::ssize(of[r]) * 8});
        take.push_back({static_cast<int64_t>(r), into[r].data(), std::ssize(into[r]) * 8});
      }
      return host_->all_to_all(give, take, site.what);
    };
    std::vector<std::span<int64_t>> one_of, one_into;
    for (size_t r = 0; r < n; ++r) {
      one_of.emplace_back(&sizes[r], 1);
      one_into.emplace_back(&told[r], 1);
    }
    RT_TRY(swap(one_of, one_into));
    std::vector<std::vector<int64_t>> theirs(n);
    for (size_t r = 0; r < n; ++r) theirs[r].resize(static_cast<size_t>(told[r]));
    RT_TRY(swap(mine, theirs));
    Cuts cuts;
    for (size_t r = 0; r < n; ++r) {
      const auto sends = static_cast<size_t>(theirs[r][0]);
      cuts.theirs_out.emplace_back(theirs[r].begin() + 2, theirs[r].begin() + 2 + static_cast<std::ptrdiff_t>(sends));
      cuts.theirs_in.emplace_back(theirs[r].begin() + 2 + static_cast<std::ptrdiff_t>(sends), theirs[r].end());
      const auto sum = [](const std::vector<int64_t>& of) {
        int64_t bytes = 0;
        for (const int64_t size : of) bytes += size;
        return bytes;
      };
      int64_t expected = 0;
      for (const InPart& part : comm::parts_of(in, static_cast<int64_t>(r))) expected += part.bytes;
      if (sum(cuts.theirs_out[r]) == expected) continue;
      Error error = comm::sizes_differ(site, world_ranks_[r], sum(cuts.theirs_out[r]), expected);
      world_->watcher().fail(error, true);
      return error;
    }
    return cuts;
  }

  /// body(where, bytes) for each piece of these parts that neither they nor the other side's cut further.
  template <typename Part, typename Body>
  static void walk(std::span<const Part> parts, const std::vector<int64_t>& cuts, const Body& body) {
    size_t cut = 0;
    int64_t left = 0;  // of the other side's part
    for (const Part& part : parts) {
      for (int64_t done = 0; done < part.bytes;) {
        while (left == 0) left = cuts[cut++];
        const int64_t bytes = std::min(left, part.bytes - done);
        body(at(part.data) + done, bytes);
        done += bytes;
        left -= bytes;
      }
    }
  }

  const std::shared_ptr<World> world_;
  const std::unique_ptr<Comm> host_;
  const std::vector<int64_t> world_ranks_;
  const std::shared_ptr<const std::vector<int64_t>> others_;
  const NcclHandle handle_;
  std::vector<Ways> out_, in_;            // by member
  std::vector<std::deque<Place>> sent_;   // by member: behind each message, newest last
  std::vector<std::deque<Place>> early_;  // the same of those that come ahead
  std::deque<Own> to_itself_;
  bool from_host_ = false;  // messages, since the last wait for all
  Traffic traffic_;
};

class NcclEngine final : public comm::Engine {
 public:
  explicit NcclEngine(std::shared_ptr<World> world) : world_(std::move(world)) {}
  ~NcclEngine() override {
    world_->watcher().wait_for_rest();
    if (world_comm_ != nullptr) world_->comms().close(world_comm_);
  }

  /// The communicator of all ranks.
  Status open() {
    std::vector<int64_t> all(static_cast<size_t>(world_size()));
    for (int64_t r = 0; r < world_size(); ++r) all[static_cast<size_t>(r)] = r;
    if (world_size() == 1) return {};
    RT_TRY_SET(const std::unique_ptr<Comm> host, world_->host().group("nccl", all));
    RT_TRY_SET(world_comm_, of_id("nccl", *host));
    // Hosts by name: of every rank, for messages.
    constexpr size_t kName = 64;
    std::vector<char> names(static_cast<size_t>(world_size()) * kName);
    char* const mine = &names[static_cast<size_t>(world_rank()) * kName];
    if (const std::string& given = world_->options().host_name; !given.empty()) {
      given.copy(mine, kName - 1);
    } else {
      ::gethostname(mine, kName - 1);
    }
    RT_TRY(host->all_gather(mine, names.data(), kName, "hosts' names"));
    std::vector<std::string> host_of_rank;
    for (size_t at = 0; at < names.size(); at += kName) host_of_rank.emplace_back(&names[at]);
    world_->watcher().know(world_rank(), std::move(host_of_rank));
    return {};
  }

  int64_t world_rank() const override { return world_->host().world_rank(); }
  int64_t world_size() const override { return world_->host().world_size(); }
  bool keeps_rank_order() const override { return !world_->options().nccl_sums; }

  Result<std::unique_ptr<Comm>> group(std::string_view axis, const std::vector<int64_t>& world_ranks) override {
    RT_TRY_SET(std::unique_ptr<Comm> host, world_->host().group(axis, world_ranks));
    if (host->size() == 1) return host;  // one rank moves nothing
    Result<std::unique_ptr<Comm>> out = make(axis, world_ranks, std::move(host));
    if (!out.ok()) world_->watcher().fail(out.error(), true);  // the others wait for this rank
    return out;
  }
  Status no_group(std::string_view axis) override {
    if (world_comm_ == nullptr || !world_->options().whole_axes) return {};
    const Result<NcclHandle> out =
        world_->comms().split(world_comm_, kNcclNoColor, 0, {.name = fmt::format("no {}", axis)});
    if (out.ok()) return {};
    world_->watcher().fail(out.error(), true);
    return out.error();
  }
  /// For numbers of the host: as they are.
  Result<std::unique_ptr<Comm>> exact_group(std::string_view axis, const std::vector<int64_t>& world_ranks) override {
    return world_->host().exact_group(axis, world_ranks);
  }
  void abort(std::string_view reason) override {
    world_->host().abort(reason);
    world_->watcher().fail({ErrorCode::kStopped, fmt::format("rank {}: {}", world_rank(), reason)}, false);
  }
  void give_up(ErrorCode code, std::string_view reason) override {
    world_->host().give_up(code, reason);
    world_->watcher().fail({code, std::string(reason)}, false);
  }
  void at(int64_t step, std::string_view phase) override {
    world_->host().at(step, phase);
    world_->watcher().at(step, phase);
  }

 private:
  Result<std::unique_ptr<Comm>> make(std::string_view axis, const std::vector<int64_t>& world_ranks,
                                     std::unique_ptr<Comm> host) {
    world_->take_rooms();
    NcclHandle made = nullptr;
    if (world_->options().whole_axes || host->size() == world_size()) {  // every rank is here
      RT_TRY_SET(made,
                 world_->comms().split(world_comm_, color_of(axis, world_ranks), host->rank(), wish(axis, *host)));
      RT_TRY(world_->comms().expect(made, host->size(), host->rank(), wish(axis, *host)));
    } else {
      RT_TRY_SET(made, of_id(axis, *host));
    }
    return NcclComm::make(world_, std::move(host), axis, world_ranks, made);
  }
  Result<NcclHandle> of_id(std::string_view axis, Comm& host) {
    NcclId id{};
    if (host.rank() == 0) {
      RT_TRY_SET(id, world_->comms().new_id());
    }
    RT_TRY(host.broadcast(&id, sizeof(id), 0, "NCCL's id"));
    return world_->comms().make(id, host.size(), host.rank(), wish(axis, host));
  }

  /// One for each group of an axis, and others for other axes: ranks that split in different orders find it out.
  static int64_t color_of(std::string_view axis, const std::vector<int64_t>& world_ranks) {
    constexpr int kRankBits = 20;
    const auto word = static_cast<int64_t>(stream_key(1, axis) >> (64 - (31 - kRankBits)));
    return word << kRankBits | *std::ranges::min_element(world_ranks);
  }

  Communicators::Wish wish(std::string_view axis, const Comm& host) const {
    const auto& most = world_->options().max_ctas;
    return {.name = host.name(), .max_ctas = most ? most(axis) : 0};
  }

  const std::shared_ptr<World> world_;
  NcclHandle world_comm_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<comm::Engine>> make_nccl_engine(comm::Engine& host, const NcclApi& api,
                                                       const kernels::cuda::RankSums& sums, CudaStream& rank,
                                                       const NcclOptions& options) {
  if (!rank.ready()) return rank.settle().error();
  auto world = std::make_shared<World>(host, api, sums, rank, options);
  rank.settle_with([of = std::weak_ptr(world)]() -> Status {
    const auto there = of.lock();
    return there == nullptr ? Status() : there->watcher().failed();
  });
  auto out = std::make_unique<NcclEngine>(std::move(world));
  RT_TRY(out->open());
  return std::unique_ptr<comm::Engine>(std::move(out));
}

}  // namespace cairn::cuda
