#include "runtime/comm/segment_comm.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "runtime/comm/call.h"
#include "runtime/comm/group.h"
#include "runtime/comm/parts.h"
#include "runtime/comm/reduce.h"
#include "runtime/core/process.h"

namespace cairn::comm {
namespace {

// Below this many bytes, times the members beyond two, every member sums everything itself: reading more costs less
// than a second barrier. Two members always do: they would read as much either way.
constexpr int64_t kDirectBytes = 128 << 10;

class SegmentComm final : public Comm {
 public:
  SegmentComm(std::shared_ptr<RankContext> context, int64_t group, std::string name)
      : context_(std::move(context)),
        segment_(context_->segment()),
        group_(group),
        name_(std::move(name)),
        state_(*segment_.at<GroupState>(segment_.group(group).state_offset)),
        staging_(segment_.at<char>(segment_.group(group).staging_offset)),
        stage_bytes_(segment_.header().stage_bytes) {
    const GroupEntry& entry = segment_.group(group);
    const auto* ranks = segment_.at<int64_t>(entry.ranks_offset);
    world_ranks_.assign(ranks, ranks + entry.size);
    rank_ = std::ranges::find(world_ranks_, context_->rank()) - world_ranks_.begin();
    inputs_.resize(world_ranks_.size());
    sends_.resize(world_ranks_.size());
    receives_.resize(world_ranks_.size());
    out_bytes_.resize(world_ranks_.size());
    in_bytes_.resize(world_ranks_.size());
    in_begin_.resize(world_ranks_.size());
    in_cursors_.resize(world_ranks_.size());
  }

  ~SegmentComm() override {
    for (auto& queue : sends_) {
      if (queue) context_->forget(*queue);
    }
  }

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return static_cast<int64_t>(world_ranks_.size()); }
  const std::string& name() const override { return name_; }
  Traffic traffic() const override { return traffic_; }

  Status all_reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) override {
    const Site site{name_, "all_reduce", what};
    RT_TRY(check_elems(site, count, dtype));
    const int64_t elem = dtype_size_bytes(dtype);
    traffic_.all_reduce.add(count * elem);
    const Call call{.kind = CallKind::kAllReduce, .dtype = dtype, .op = op, .bytes = count * elem};
    Operation operation(*this, site);
    RT_TRY(operation.begin());
    const bool direct = call.bytes * (size() - 2) <= kDirectBytes;
    return direct ? all_reduce_direct(site, call, static_cast<char*>(data), count, elem)
                  : all_reduce_slices(site, call, static_cast<char*>(data), count, elem);
  }

  Status reduce_scatter(const void* input, void* output, int64_t count_per_rank, DType dtype, ReduceOp op,
                        std::string_view what) override {
    const Site site{name_, "reduce_scatter", what};
    RT_TRY(check_elems(site, count_per_rank, dtype));
    return scatter_sum(site, input, output, count_per_rank, dtype, op, 0);
  }

  Status reduce_scatter_add(const void* input, void* output, int64_t count_per_rank, DType dtype, int64_t tree,
                            std::string_view what) override {
    const Site site{name_, "reduce_scatter_add", what};
    RT_TRY(check_elems(site, count_per_rank, dtype));
    RT_TRY(check_tree(site, tree, size()));
    return scatter_sum(site, input, output, count_per_rank, dtype, ReduceOp::kSum, tree);
  }

  Status all_gather(const void* input, void* output, int64_t bytes_per_rank, std::string_view what) override {
    const Site site{name_, "all_gather", what};
    RT_TRY(check_bytes(site, bytes_per_rank));
    traffic_.all_gather.add(bytes_per_rank);
    const Call call{.kind = CallKind::kAllGather, .bytes = bytes_per_rank};
    const auto* in = static_cast<const char*>(input);
    auto* out = static_cast<char*>(output);
    Operation operation(*this, site);
    RT_TRY(operation.begin());
    for (int64_t at = 0; at == 0 || at < bytes_per_rank; at += stage_bytes_) {
      const int64_t n = std::min(stage_bytes_, bytes_per_rank - at);
      copy(stage(rank_, next_), in + at, n);
      const int64_t t = next_;
      RT_TRY(meet(site, call));
      for (int64_t i = 1; i < size(); ++i) {
        const int64_t r = (rank_ + i) % size();  // not all from the same member at once
        copy(out + r * bytes_per_rank + at, stage(r, t), n);
      }
    }
    if (char* own = out + rank_ * bytes_per_rank; own != in) copy(own, in, bytes_per_rank);
    return {};
  }

  Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) override {
    const Site site{name_, "broadcast", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "root", root, size()));
    traffic_.broadcast.add(root == rank_ ? bytes : 0);
    const Call call{.kind = CallKind::kBroadcast, .root = root, .bytes = bytes};
    auto* to = static_cast<char*>(data);
    Operation operation(*this, site);
    RT_TRY(operation.begin());
    for (int64_t at = 0; at == 0 || at < bytes; at += stage_bytes_) {
      const int64_t n = std::min(stage_bytes_, bytes - at);
      if (root == rank_) copy(stage(rank_, next_), to + at, n);
      const int64_t t = next_;
      RT_TRY(meet(site, call));
      if (root != rank_) copy(to + at, stage(root, t), n);
    }
    return {};
  }

  // A member's bytes for the others are one stream, destination after destination. Each round stages the next part of
  // it, the first one behind the list of how much goes to whom: so everybody knows where in each stream its own begins,
  // and how many rounds the longest stream takes.
  Status all_to_all(std::span<const OutPart> out, std::span<const InPart> in, std::string_view what) override {
    const Site site{name_, "all_to_all", what};
    const DeviceAccess inside;  // the parts lie there
    RT_TRY(check_parts(site, out, size()));
    RT_TRY(check_parts(site, in, size()));
    count_parts(out, out_bytes_);
    count_parts(in, in_bytes_);
    int64_t all = 0;
    for (const int64_t bytes : out_bytes_) all += bytes;
    traffic_.all_to_all.add(all);
    Operation operation(*this, site);
    RT_TRY(operation.begin());
    if (out_bytes_[rank_] != in_bytes_[rank_]) {
      return context_->fail(sizes_differ(site, world_ranks_[rank_], out_bytes_[rank_], in_bytes_[rank_]));
    }
    move_own(parts_of(out, rank_), parts_of(in, rank_));
    const int64_t head = (size() * 8 + kLine - 1) / kLine * kLine, room = stage_bytes_ - head;
    if (room < kLine) {
      return Error{ErrorCode::kUnsupported, fmt::format("{}: {} bytes of staging are too few for {} members",
                                                        site.text(), stage_bytes_, size())};
    }
    PartCursor<OutPart> before(out.first(parts_of(out, rank_).data() - out.data())), behind(from_peer(out, rank_ + 1));
    int64_t left_before = 0, left_behind = 0;
    for (int64_t r = 0; r < size(); ++r) {
      in_cursors_[r] = PartCursor<InPart>(parts_of(in, r));
      if (r != rank_) (r < rank_ ? left_before : left_behind) += out_bytes_[r];
    }
    int64_t rounds = 1;
    for (int64_t c = 0; c < rounds; ++c) {
      char* to = stage(rank_, next_);
      if (c == 0) copy(to, reinterpret_cast<const char*>(out_bytes_.data()), size() * 8);
      to += head;
      const int64_t first = std::min(room, left_before), second = std::min(room - first, left_behind);
      before.move(to, first);
      behind.move(to + first, second);
      left_before -= first, left_behind -= second;
      const int64_t t = next_;
      RT_TRY(meet(site, Call{.kind = CallKind::kAllToAll}));
      if (c == 0) RT_TRY(find_streams(site, t, room, &rounds));
      for (int64_t i = 1; i < size(); ++i) {
        const int64_t r = (rank_ + i) % size();
        const int64_t begin = std::max(c * room, in_begin_[r]);
        const int64_t end = std::min((c + 1) * room, in_begin_[r] + in_bytes_[r]);
        if (begin < end)
          in_cursors_[r].move(static_cast<const char*>(stage(r, t)) + head + begin - c * room, end - begin);
      }
    }
    return {};
  }

  Status barrier(std::string_view what) override {
    const Site site{name_, "barrier", what};
    Operation operation(*this, site);
    RT_TRY(operation.begin());
    return meet(site, Call{.kind = CallKind::kBarrier});
  }

  Status isend(const void* data, int64_t bytes, int64_t dst, std::string_view what) override {
    const Site site{name_, "isend", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "destination", dst, size()));
    traffic_.send.add(bytes);
    Operation operation(*this, site);
    RT_TRY(operation.begin());
    auto& queue = sends_[dst];
    if (!queue) {
      RT_TRY_SET(Channel * channel, segment_.find_or_make_channel(group_, rank_, dst));
      queue = std::make_unique<SendQueue>();
      queue->channel = channel;
      queue->destination = world_ranks_[dst];
    }
    SendQueue::Message message;
    message.data = static_cast<const char*>(data);
    message.bytes = bytes;
    const MessageHeader header = MessageHeader::make(bytes, queue->sequence++, what);
    static_assert(sizeof(header) == sizeof(message.header));
    std::memcpy(message.header, &header, sizeof(header));
    context_->push(*queue, message);
    return {};
  }

  Status recv(void* data, int64_t bytes, int64_t src, std::string_view what) override {
    const Site site{name_, "recv", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "source", src, size()));
    Operation operation(*this, site);
    RT_TRY(operation.begin());
    Inbox& inbox = receives_[src];
    if (!inbox.channel) {
      RT_TRY_SET(inbox.channel, segment_.find_or_make_channel(group_, src, rank_));
    }
    MessageHeader header;
    RT_TRY(drain(site, src, reinterpret_cast<char*>(&header), sizeof(header)));
    header.what[sizeof(header.what) - 1] = '\0';
    if (header.bytes != static_cast<uint64_t>(bytes) || header.sequence != inbox.sequence) {
      return context_->fail(
          {ErrorCode::kInternal,
           fmt::format("{}: rank {} sent {} bytes as message {} ('{}'), this rank expects {} bytes as "
                       "message {}",
                       site.text(), world_ranks_[src], header.bytes, header.sequence, header.what, bytes,
                       inbox.sequence)});
    }
    ++inbox.sequence;
    return drain(site, src, static_cast<char*>(data), bytes);
  }

  Status wait_sends(std::string_view what) override {
    const Site site{name_, "wait_sends", what};
    Operation operation(*this, site);
    RT_TRY(operation.begin());
    std::vector<SendQueue*> queues;
    for (auto& queue : sends_) {
      if (queue) queues.push_back(queue.get());
    }
    return context_->wait(
        site, [&] { return context_->idle(queues); },
        [&](std::vector<int64_t>& out) {
          for (SendQueue* queue : queues) {
            if (!context_->idle({queue})) out.push_back(queue->destination);
          }
        });
  }

  Status wait_sends_to(int64_t dst, int64_t may_stay, std::string_view what) override {
    const Site site{name_, "wait_sends_to", what};
    RT_TRY(check_peer(site, "destination", dst, size()));
    Operation operation(*this, site);
    RT_TRY(operation.begin());
    const SendQueue* queue = sends_[dst].get();
    if (queue == nullptr) return {};
    return context_->wait(
        site, [&] { return context_->under_way(*queue) <= may_stay; },
        [&](std::vector<int64_t>& out) { out.push_back(queue->destination); });
  }

 private:
  struct Inbox {
    Channel* channel = nullptr;
    uint64_t sequence = 0;
  };

  /// Publishes what this rank is in, refuses to begin in an aborted world, and moves pending sends.
  class Operation {
   public:
    Operation(SegmentComm& comm, const Site& site) : comm_(comm), site_(site) {
      comm_.segment_.publish_begin(comm_.context_->rank(), site.group, site.op, site.what);
    }
    ~Operation() { comm_.segment_.publish_end(comm_.context_->rank()); }
    Status begin() {
      if (comm_.segment_.aborted()) return comm_.context_->aborted_error(site_);
      comm_.context_->progress_if_any();
      return {};
    }

   private:
    SegmentComm& comm_;
    const Site& site_;
  };

  static std::span<const OutPart> from_peer(std::span<const OutPart> parts, int64_t peer) {
    return {std::ranges::lower_bound(parts, peer, {}, &OutPart::peer), parts.end()};
  }

  /// From the lists that lie in the stages of barrier `t`: where this rank's bytes begin in each stream, and the
  /// rounds.
  Status find_streams(const Site& site, int64_t t, int64_t room, int64_t* rounds) {
    for (int64_t s = 0; s < size(); ++s) {
      const auto* bytes_to = reinterpret_cast<const int64_t*>(stage(s, t));
      int64_t stream = 0;
      for (int64_t r = 0; r < size(); ++r) {
        if (r == rank_) in_begin_[s] = stream;
        if (r != s) stream += bytes_to[r];
      }
      *rounds = std::max(*rounds, (stream + room - 1) / room);
      if (s == rank_ || bytes_to[rank_] == in_bytes_[s]) continue;
      return context_->fail(sizes_differ(site, world_ranks_[s], bytes_to[rank_], in_bytes_[s]));
    }
    return {};
  }

  static void copy(char* to, const char* from, int64_t bytes) {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }

  char* stage(int64_t member, int64_t barrier) const {
    return staging_ + (member * kStages + barrier % kStages) * stage_bytes_;
  }

  /// Arrives at barrier `next_`, waits for all, and checks that all make the same call.
  Status meet(const Site& site, const Call& call) {
    const int64_t t = next_;
    const uint64_t word = call.word();
    MemberState* members = state_.members();
    MemberState& me = members[rank_];
    CallMark& mark = me.marks[t % kStages];
    mark.call.store(word, std::memory_order_relaxed);
    mark.bytes.store(static_cast<uint64_t>(call.bytes), std::memory_order_relaxed);
    const uint64_t complete = static_cast<uint64_t>(size()) * static_cast<uint64_t>(t + 1);
    if (state_.count.fetch_add(1) + 1 == complete) {
      for (const int64_t peer : world_ranks_) segment_.ring(peer);
    }
    me.arrived.store(static_cast<uint64_t>(t + 1), std::memory_order_relaxed);
    RT_TRY(context_->wait(
        site, [&] { return state_.count.load() >= complete; },
        [&](std::vector<int64_t>& out) {
          for (int64_t r = 0; r < size(); ++r) {
            if (members[r].arrived.load(std::memory_order_relaxed) <= static_cast<uint64_t>(t)) {
              out.push_back(world_ranks_[r]);
            }
          }
        }));
    ++next_;
    for (int64_t r = 0; r < size(); ++r) {
      const CallMark& theirs = members[r].marks[t % kStages];
      const uint64_t their_word = theirs.call.load(std::memory_order_relaxed);
      const uint64_t their_bytes = theirs.bytes.load(std::memory_order_relaxed);
      if (their_word == word && their_bytes == static_cast<uint64_t>(call.bytes)) continue;
      return context_->fail(
          {ErrorCode::kInternal,
           fmt::format("{}: rank {} calls {}, this rank (rank {}) calls {}", site.text(), world_ranks_[r],
                       describe_call(their_word, their_bytes), context_->rank(), describe_call(word, call.bytes))});
    }
    return {};
  }

  /// Sums chunk rank() of everybody's `input` into `output`; `added` (0 or 1): how often `output` is the first addend.
  Status scatter_sum(const Site& site, const void* input, void* output, int64_t count_per_rank, DType dtype,
                     ReduceOp op, int64_t added_tree) {
    const int64_t elem = dtype_size_bytes(dtype);
    const auto* in = static_cast<const char*>(input);
    auto* out = static_cast<char*>(output);
    const int64_t part = count_per_rank * elem;  // bytes of one rank's chunk
    traffic_.reduce_scatter.add(part * size());
    const Call call{.kind = CallKind::kReduceScatter, .dtype = dtype, .op = op, .bytes = part * size()};
    Operation operation(*this, site);
    RT_TRY(operation.begin());
    const int64_t step = stage_bytes_ / size() / kLine * kLine;
    for (int64_t at = 0; at == 0 || at < part; at += step) {
      const int64_t n = std::min(step, part - at);
      char* mine = stage(rank_, next_);
      for (int64_t r = 0; r < size(); ++r) {
        if (r != rank_) copy(mine + r * step, in + r * part + at, n);
      }
      const int64_t t = next_;
      RT_TRY(meet(site, call));
      for (int64_t r = 0; r < size(); ++r) inputs_[r] = stage(r, t) + rank_ * step;
      inputs_[rank_] = in + rank_ * part + at;
      if (added_tree > 0) {
        add_ordered(out + at, inputs_.data(), size(), added_tree, n / elem, dtype);
      } else {
        reduce_ordered(out + at, inputs_.data(), size(), n / elem, dtype, op);
      }
    }
    return {};
  }

  Status all_reduce_direct(const Site& site, const Call& call, char* data, int64_t count, int64_t elem) {
    const int64_t step = stage_bytes_ / elem;
    for (int64_t at = 0; at == 0 || at < count; at += step) {
      const int64_t n = std::min(step, count - at);
      const int64_t t = next_;
      char* part = data + at * elem;
      copy(stage(rank_, t), part, n * elem);
      RT_TRY(meet(site, call));
      for (int64_t r = 0; r < size(); ++r) inputs_[r] = stage(r, t);
      inputs_[rank_] = part;
      reduce_ordered(part, inputs_.data(), size(), n, call.dtype, call.op);
    }
    return {};
  }

  // Each member sums one slice of each chunk; see the head of segment_comm.h for the pipeline.
  Status all_reduce_slices(const Site& site, const Call& call, char* data, int64_t count, int64_t elem) {
    const int64_t step = stage_bytes_ / elem;
    const int64_t chunks = (count + step - 1) / step;
    auto chunk_elems = [&](int64_t c) { return std::min(step, count - c * step); };
    auto slice_at = [&](int64_t c, int64_t r) {  // cache lines of a chunk, dealt out evenly
      const int64_t line = kLine / elem;
      const int64_t n = chunk_elems(c);
      return std::min(n, (n + line - 1) / line * r / size() * line);
    };
    copy(stage(rank_, next_), data, chunk_elems(0) * elem);
    const int64_t first = next_;
    RT_TRY(meet(site, call));
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t t = first + c;
      const int64_t lo = slice_at(c, rank_), hi = slice_at(c, rank_ + 1);
      char* chunk = data + c * step * elem;
      for (int64_t r = 0; r < size(); ++r) inputs_[r] = stage(r, t) + lo * elem;
      reduce_ordered(stage(rank_, t) + lo * elem, inputs_.data(), size(), hi - lo, call.dtype, call.op);
      if (c + 1 < chunks) copy(stage(rank_, next_), chunk + step * elem, chunk_elems(c + 1) * elem);
      RT_TRY(meet(site, call));
      for (int64_t i = 0; i < size(); ++i) {
        const int64_t r = (rank_ + i) % size();
        const int64_t from = slice_at(c, r), to = slice_at(c, r + 1);
        copy(chunk + from * elem, stage(r, t) + from * elem, (to - from) * elem);
      }
    }
    return {};
  }

  /// Takes `bytes` from the ring of `src`, waiting for them.
  Status drain(const Site& site, int64_t src, char* to, int64_t bytes) {
    Channel& channel = *receives_[src].channel;
    const auto capacity = static_cast<uint64_t>(segment_.header().channel_bytes);
    uint64_t tail = channel.tail.load(std::memory_order_relaxed);
    while (bytes > 0) {
      if (channel.head.load() == tail) {
        channel.destination_waits.store(1);
        Status arrived = context_->wait(
            site, [&] { return channel.head.load() != tail; },
            [&](std::vector<int64_t>& out) { out.push_back(world_ranks_[src]); });
        channel.destination_waits.store(0);
        RT_TRY(std::move(arrived));
      }
      auto n = static_cast<int64_t>(std::min<uint64_t>(channel.head.load() - tail, static_cast<uint64_t>(bytes)));
      bytes -= n;
      while (n > 0) {
        const uint64_t at = tail % capacity;
        const auto m = static_cast<int64_t>(std::min<uint64_t>(capacity - at, static_cast<uint64_t>(n)));
        std::memcpy(to, channel.ring() + at, static_cast<size_t>(m));
        to += m, n -= m, tail += static_cast<uint64_t>(m);
      }
      channel.tail.store(tail);
      if (channel.source_waits.load()) segment_.ring(world_ranks_[src]);
    }
    return {};
  }

  const std::shared_ptr<RankContext> context_;
  Segment& segment_;
  const int64_t group_;
  const std::string name_;
  GroupState& state_;
  char* const staging_;
  const int64_t stage_bytes_;
  std::vector<int64_t> world_ranks_;
  int64_t rank_ = 0;
  int64_t next_ = 0;  // the next barrier of this group
  std::vector<const void*> inputs_;
  std::vector<std::unique_ptr<SendQueue>> sends_;
  std::vector<Inbox> receives_;
  std::vector<int64_t> out_bytes_, in_bytes_, in_begin_;  // of an all_to_all, by peer
  std::vector<PartCursor<InPart>> in_cursors_;
  Traffic traffic_;
};

}  // namespace

Status claim_rank(Segment& segment, int64_t rank) {
  if (rank < 0 || rank >= segment.world_size()) {
    return Error{ErrorCode::kInvalidInput, fmt::format("rank must be 0 to {}, got {}", segment.world_size() - 1, rank)};
  }
  RankSlot& slot = segment.slot(rank);
  int32_t nobody = 0;
  if (!slot.pid.compare_exchange_strong(nobody, ::getpid())) {
    return Error{ErrorCode::kInvalidInput, fmt::format("rank {} is taken by pid {}", rank, nobody)};
  }
  slot.start_time.store(process_start_time(::getpid()));
  slot.state.store(static_cast<uint32_t>(RankState::kAttached));
  return {};
}

SegmentEngine::SegmentEngine(std::shared_ptr<Segment> segment, int64_t rank, Options options)
    : context_(std::make_shared<RankContext>(std::move(segment), rank, options)) {}

SegmentEngine::~SegmentEngine() {
  Segment& segment = context_->segment();
  segment.slot(world_rank()).state.store(static_cast<uint32_t>(RankState::kClosed));
  for (int64_t r = 0; r < segment.world_size(); ++r) segment.ring(r);
}

Result<std::unique_ptr<Comm>> SegmentEngine::group(std::string_view axis, const std::vector<int64_t>& world_ranks) {
  RT_TRY(check_group(axis, world_ranks, world_size(), world_rank()));
  std::string name = group_name(axis, world_ranks);
  if (world_ranks.size() == 1) return make_single_comm(std::move(name));
  const int64_t instance = instances_[fmt::format("{}[{}]", axis, fmt::join(world_ranks, ","))]++;
  RT_TRY_SET(const int64_t index, context_->segment().find_or_make_group(axis, world_ranks, instance));
  return std::unique_ptr<Comm>(std::make_unique<SegmentComm>(context_, index, std::move(name)));
}

void SegmentEngine::abort(std::string_view reason) {
  give_up(ErrorCode::kStopped, fmt::format("rank {}: {}", world_rank(), reason));
}

void SegmentEngine::give_up(ErrorCode code, std::string_view reason) { context_->segment().abort(code, reason); }

std::optional<LinkedEngine::Seen> SegmentEngine::look_at(int64_t rank) {
  Segment& segment = context_->segment();
  if (rank < 0 || rank >= segment.world_size()) return std::nullopt;
  const RankSlot& slot = segment.slot(rank);
  const auto state = static_cast<RankState>(slot.state.load());
  if (state == RankState::kAbsent) return std::nullopt;  // or of another host
  const int32_t pid = slot.pid.load();
  Seen out;
  std::string what = "was last seen";
  if (state == RankState::kClosed) {
    out.lost = true;
    what = "has left; it was last seen";
  } else {
    const std::optional<ProcessStat> stat = process_stat(pid);
    out.lost = !stat || stat->ended() || static_cast<uint64_t>(stat->start) != slot.start_time.load();
    out.stopped = !out.lost && (stat->state == 'T' || stat->state == 't');
    if (out.lost) what = "died; it was last seen";
    if (out.stopped) what = "is stopped; it was last seen";
  }
  out.text = fmt::format("rank {} (pid {}) {} {}", rank, pid, what, segment.describe_operation(rank));
  return out;
}

std::optional<Error> SegmentEngine::dead() {
  if (!context_->segment().aborted()) return std::nullopt;
  return context_->segment().abort_error();
}

}  // namespace cairn::comm
