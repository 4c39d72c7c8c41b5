#include "runtime/gloo/engine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gloo/context.h>
#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <stop_token>
#include <thread>
#include <vector>

#include "runtime/comm/call.h"
#include "runtime/comm/group.h"
#include "runtime/comm/linked_engine.h"
#include "runtime/comm/parts.h"
#include "runtime/comm/reduce.h"
#include "runtime/core/random.h"
#include "runtime/core/unique_handle.h"

namespace cairn::comm {
namespace {

using gloo::transport::UnboundBuffer;

// Up to here an all_reduce sends everything to everybody: one exchange instead of two.
constexpr int64_t kDirectBytes = 16 << 10;
// Of a reduction's exchange with one peer; bounds the memory for what the others send.
constexpr int64_t kPieceBytes = 4 << 20;

constexpr std::string_view kAbortKey = "abort";

// How often a rank looks whether the linked engine is dead.
constexpr std::chrono::milliseconds kLinkedTick(5);
// How long a rank that gives up tries to say why.
constexpr std::chrono::seconds kLastWords(1);

using Clock = std::chrono::steady_clock;

/// What the engine and its groups share.
class GlooState {
 public:
  GlooState(const GlooConfig& config, std::shared_ptr<gloo::transport::Device> device,
            const std::shared_ptr<LinkedEngine>& other)
      : config_(config), device_(std::move(device)), other_(other) {}

  const GlooConfig& config() const { return config_; }
  Rendezvous& rendezvous() const { return *config_.rendezvous; }
  const std::shared_ptr<gloo::transport::Device>& device() const { return device_; }
  std::chrono::milliseconds deadline() const { return std::chrono::milliseconds(config_.options.deadline_ms); }
  /// The linked engine; null without one.
  std::shared_ptr<LinkedEngine> other() const { return other_.lock(); }

  void add(const std::shared_ptr<gloo::Context>& context) {
    const std::lock_guard lock(mutex_);
    contexts_.push_back(context);
  }

  /// Gives up: the others find the reason, and their connections broken.
  Error fail(Error error) {
    give_up(error.code, fmt::format("rank {}: {}", config_.rank, error.message));
    return error;
  }
  void give_up(ErrorCode code, const std::string& reason) {
    if (dead(false)) return;
    // Who cannot publish still breaks its connections.
    ignore_result(rendezvous().publish(std::string(kAbortKey), fmt::format("{} {}", static_cast<int>(code), reason),
                                       Clock::now() + kLastWords));
    shut(Error{code, reason});
  }

  /// The reason why this engine is dead, or nothing. `look` also asks for what others left, as late as it may come.
  std::optional<Error> dead(bool look) {
    {
      const std::lock_guard lock(mutex_);
      if (reason_) return reason_;
    }
    if (!look) return std::nullopt;
    await_abort(Clock::now() + rendezvous().lag());
    return dead(false);
  }

  /// Dies of the reason that another rank leaves until then, or of a lost agent.
  void await_abort(Rendezvous::Time until) {
    const auto text = rendezvous().await(std::string(kAbortKey), until);
    if (!text.ok()) return give_up(text.error().code, fmt::format("rank {}: {}", config_.rank, text.error().message));
    if (!text.value()) return;
    const std::string& said = *text.value();
    const size_t space = said.find(' ');
    shut({static_cast<ErrorCode>(std::atoi(said.c_str())), said.substr(std::min(space, said.size() - 1) + 1)});
  }

  Error aborted_error(const Site& site, Error reason) const {
    if (reason.code != ErrorCode::kStopped) reason.code = ErrorCode::kPeerLost;
    return std::move(reason).with(site.text());
  }

  /// "rank 3 (host-b pid 77)", of a rank that this one has met.
  std::string describe(int64_t world_rank) {
    const std::lock_guard lock(mutex_);
    const auto found = met_.find(world_rank);
    return found == met_.end() ? fmt::format("rank {}", world_rank)
                               : fmt::format("rank {} ({})", world_rank, found->second);
  }
  void meet(int64_t world_rank, std::string who) {
    const std::lock_guard lock(mutex_);
    met_[world_rank] = std::move(who);
  }

  /// Writes down, while it lives, whom the calling thread waits for.
  class Awaits {
   public:
    Awaits(const GlooState& state, int64_t world_rank) : other_(state.other()) { now(world_rank); }
    ~Awaits() { now(-1); }
    Awaits(const Awaits&) = delete;
    Awaits& operator=(const Awaits&) = delete;
    void now(int64_t world_rank) {
      if (other_) other_->operation_awaits(world_rank);
    }

   private:
    const std::shared_ptr<LinkedEngine> other_;
  };

  /// Waits for a send or a receive of `buffer` to end. `peer` is the world rank at the other side.
  Status wait(const Site& site, UnboundBuffer& buffer, bool receive, int64_t peer) {
    {
      const std::lock_guard lock(mutex_);
      if (reason_) return aborted_error(site, *reason_);
      waiting_.insert(&buffer);
    }
    const Awaits awaits(*this, peer);
    std::string failure;
    try {
      if (!(receive ? buffer.waitRecv(deadline()) : buffer.waitSend(deadline()))) failure = "interrupted";
    } catch (const std::exception& e) {
      failure = e.what();
    }
    {
      const std::lock_guard lock(mutex_);
      waiting_.erase(&buffer);
    }
    if (failure.empty()) return {};
    return lost(site, peer, failure);
  }

  /// The error for a failed operation with `peer`.
  Error lost(const Site& site, int64_t peer, const std::string& failure) {
    if (const auto reason = dead(true)) return aborted_error(site, *reason);
    if (failure.find("Timed out") != std::string::npos) {
      return fail({ErrorCode::kTimeout, fmt::format("{}: {} did not answer within {} ms", site.text(), describe(peer),
                                                    config_.options.deadline_ms)});
    }
    return fail(
        {ErrorCode::kPeerLost, fmt::format("{}: {} is lost: {}", site.text(), describe(peer), without_place(failure))});
  }

 private:
  // Gloo puts "[file:line] " of its own sources in front.
  static std::string without_place(const std::string& text) {
    const size_t end = text.find("] ");
    return text.starts_with("[") && end != std::string::npos ? text.substr(end + 2) : text;
  }
  static void ignore_result(const Result<bool>&) {}

  void shut(const Error& reason) {
    std::vector<std::shared_ptr<gloo::Context>> contexts;
    {
      const std::lock_guard lock(mutex_);
      if (reason_) return;
      reason_ = reason;
      for (UnboundBuffer* buffer : waiting_) {
        buffer->abortWaitRecv();
        buffer->abortWaitSend();
      }
      for (const auto& context : contexts_) {
        if (auto alive = context.lock()) contexts.push_back(std::move(alive));
      }
    }
    rendezvous().close();
    if (const auto other = other_.lock()) other->give_up(reason.code, reason.message);
    for (const auto& context : contexts) {
      try {
        context->closeConnections();
      } catch (const std::exception&) {  // closed by the other side already
      }
    }
  }

  const GlooConfig config_;
  const std::shared_ptr<gloo::transport::Device> device_;
  const std::weak_ptr<LinkedEngine> other_;
  std::mutex mutex_;  // guards what follows
  std::optional<Error> reason_;
  std::map<int64_t, std::string> met_;
  std::set<UnboundBuffer*> waiting_;
  std::vector<std::weak_ptr<gloo::Context>> contexts_;
};

/// Writes down, while it lives, what the calling thread is in; refuses to begin when the engine is dead.
class Operation {
 public:
  Operation(GlooState& state, const Site& site) : state_(state), site_(site), other_(state.other()) {
    if (other_) other_->operation_begins(site);
  }
  ~Operation() {
    if (other_) other_->operation_ends();
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  Status begin() const {
    if (const auto reason = state_.dead(false)) return state_.aborted_error(site_, *reason);
    return {};
  }

 private:
  GlooState& state_;
  const Site& site_;
  const std::shared_ptr<LinkedEngine> other_;
};

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown host";
}

/// "host-b pid 77"
std::string who_this_is() { return fmt::format("{} pid {}", host_name(), ::getpid()); }

/// The connections of a member to all others.
class Mesh final : public gloo::Context {
 public:
  Mesh(int rank, int size, const std::shared_ptr<gloo::transport::Device>& device, std::chrono::milliseconds timeout)
      : gloo::Context(rank, size) {
    device_ = device;
    transportContext_ = device_->createContext(rank, size);
    transportContext_->setTimeout(timeout);
    for (int r = 0; r < size; ++r) {
      if (r == rank) continue;
      const std::vector<char> address = transportContext_->createPair(r)->address().bytes();
      addresses_.append(address.begin(), address.end());
    }
  }

  /// Where this member listens, for each other one in order.
  const std::string& addresses() const { return addresses_; }

  /// Blocks until it is connected or closed. Throws.
  void connect(int peer, std::string_view their_addresses) {
    const size_t bytes = addresses_.size() / (size - 1);
    if (their_addresses.size() != addresses_.size()) throw std::runtime_error("its addresses are of another build");
    const std::string_view address = their_addresses.substr((rank > peer ? rank - 1 : rank) * bytes, bytes);
    getPair(peer)->connect({address.begin(), address.end()});
  }

 private:
  std::string addresses_;
};

/// Makes the connections of one group, within the deadline.
class Connector {
 public:
  Connector(GlooState& state, const Site& site, const std::vector<int64_t>& world_ranks)
      : state_(state), site_(site), world_ranks_(world_ranks), until_(Clock::now() + state.deadline()) {}

  Status run(const std::string& prefix, const std::shared_ptr<Mesh>& mesh) {
    const auto fresh = state_.rendezvous().publish(fmt::format("{}{}", prefix, mesh->rank),
                                                   fmt::format("{}\n{}", who_this_is(), mesh->addresses()), until_);
    if (!fresh.ok()) return state_.fail(Error(fresh.error()).with(site_.text()));
    if (!fresh.value()) {
      return state_.fail({ErrorCode::kInvalidInput, fmt::format("{}: made before in this rendezvous", site_.text())});
    }
    state_.add(mesh);
    // Gloo bounds each of its waits by five times its timeout, and none of them by what they take together.
    std::optional<Error> late;
    std::jthread alarm([&](const std::stop_token& stop) {
      if (!sleep(stop) && !state_.dead(false)) late = state_.fail(too_late());
    });
    Status made = connect(prefix, *mesh);
    if (!out_of_time_) alarm.request_stop();
    alarm.join();
    if (late) return *late;
    if (const auto reason = state_.dead(false)) return state_.aborted_error(site_, *reason);
    return made.ok() ? Status() : state_.fail(std::move(made).error());
  }

 private:
  Status connect(const std::string& prefix, Mesh& mesh) {
    GlooState::Awaits awaits(state_, -1);
    for (int64_t r = 0; r < mesh.size; ++r) {
      if (r == mesh.rank) continue;
      const int64_t peer = world_ranks_[r];
      awaits.now(peer);
      awaited_.store(peer);
      RT_TRY_SET(const auto found, state_.rendezvous().await(fmt::format("{}{}", prefix, r), until_));
      if (!found) {
        out_of_time_ = !state_.dead(false);
        return too_late();
      }
      const std::string_view text = *found;
      const size_t end = text.find('\n');
      state_.meet(peer, std::string(text.substr(0, end)));
      try {
        mesh.connect(static_cast<int>(r), text.substr(end + 1));
      } catch (const std::exception& e) {
        if (const auto reason = state_.dead(true)) return *reason;
        return Error{ErrorCode::kPeerLost,
                     fmt::format("{}: cannot connect to {}: {}", site_.text(), state_.describe(peer), e.what())};
      }
      if (const auto reason = state_.dead(false)) return *reason;  // a closed pair looks like a connected one
    }
    return {};
  }

  /// True when stopped, false at the deadline.
  bool sleep(const std::stop_token& stop) const {
    std::mutex mutex;
    std::condition_variable_any woken;
    std::unique_lock lock(mutex);
    woken.wait_until(lock, stop, until_, [] { return false; });
    return stop.stop_requested();
  }

  Error too_late() {
    return {ErrorCode::kTimeout, fmt::format("{}: {} did not connect within {} ms", site_.text(),
                                             state_.describe(awaited_.load()), state_.deadline().count())};
  }

  GlooState& state_;
  const Site& site_;
  const std::vector<int64_t>& world_ranks_;
  const Rendezvous::Time until_;
  std::atomic<int64_t> awaited_ = 0;  // world rank
  bool out_of_time_ = false;          // so the alarm goes off now, or has
};

class GlooComm final : public Comm {
 public:
  GlooComm(std::shared_ptr<GlooState> state, std::shared_ptr<gloo::Context> context, std::string name,
           std::vector<int64_t> world_ranks)
      : state_(std::move(state)),
        context_(std::move(context)),
        name_(std::move(name)),
        world_ranks_(std::move(world_ranks)),
        sent_(world_ranks_.size()),
        received_(world_ranks_.size()) {}

  int64_t rank() const override { return context_->rank; }
  int64_t size() const override { return context_->size; }
  const std::string& name() const override { return name_; }
  Traffic traffic() const override { return traffic_; }

  Status all_reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) override {
    const Site site{name_, "all_reduce", what};
    RT_TRY(check_elems(site, count, dtype));
    const int64_t elem = dtype_size_bytes(dtype);
    const Call call{.kind = CallKind::kAllReduce, .dtype = dtype, .op = op, .bytes = count * elem};
    traffic_.all_reduce.add(call.bytes);
    const Operation operation(*state_, site);
    RT_TRY(operation.begin());
    auto* bytes = static_cast<char*>(data);
    if (call.bytes <= kDirectBytes) {
      scratch_.resize(static_cast<size_t>(size() * call.bytes));
      char* all = scratch_.data();
      RT_TRY(exchange(
          site, &call,
          [&](int64_t) {
            return Span{bytes, call.bytes};
          },
          [&](int64_t r) {
            return Span{all + r * call.bytes, call.bytes};
          }));
      reduce(all, call.bytes, bytes, bytes, call.bytes, dtype, op);
      return {};
    }
    // Member r sums slice r in pieces, then everybody gathers the slices.
    auto slice = [&](int64_t r) { return count * r / size() * elem; };
    const int64_t longest = (count / size() + 1) * elem;
    RT_TRY(reduce_slices(site, call, bytes, slice, longest, bytes + slice(rank())));
    return exchange(
        site, nullptr,
        [&](int64_t) {
          return Span{bytes + slice(rank()), slice(rank() + 1) - slice(rank())};
        },
        [&](int64_t r) {
          return Span{bytes + slice(r), slice(r + 1) - slice(r)};
        });
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
    const Call call{.kind = CallKind::kAllGather, .bytes = bytes_per_rank};
    traffic_.all_gather.add(bytes_per_rank);
    const Operation operation(*state_, site);
    RT_TRY(operation.begin());
    const auto* in = static_cast<const char*>(input);
    auto* out = static_cast<char*>(output);
    RT_TRY(exchange(
        site, &call,
        [&](int64_t) {
          return Span{in, bytes_per_rank};
        },
        [&](int64_t r) {
          return Span{out + r * bytes_per_rank, bytes_per_rank};
        }));
    if (char* own = out + rank() * bytes_per_rank; own != in && bytes_per_rank > 0) {
      std::memcpy(own, in, static_cast<size_t>(bytes_per_rank));
    }
    return {};
  }

  Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) override {
    const Site site{name_, "broadcast", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "root", root, size()));
    const Call call{.kind = CallKind::kBroadcast, .root = root, .bytes = bytes};
    traffic_.broadcast.add(root == rank() ? bytes : 0);
    const Operation operation(*state_, site);
    RT_TRY(operation.begin());
    const Span all{static_cast<char*>(data), bytes}, none{};
    return exchange(
        site, &call, [&](int64_t) { return root == rank() ? all : none; },
        [&](int64_t r) { return r == root ? all : none; });
  }

  Status all_to_all(std::span<const OutPart> out, std::span<const InPart> in, std::string_view what) override {
    const Site site{name_, "all_to_all", what};
    const DeviceAccess inside;  // the parts lie there
    RT_TRY(check_parts(site, out, size()));
    RT_TRY(check_parts(site, in, size()));
    const auto n = static_cast<size_t>(size());
    std::vector<int64_t> out_bytes(n), in_bytes(n), told(n);
    count_parts(out, out_bytes);
    count_parts(in, in_bytes);
    traffic_.all_to_all.add(std::accumulate(out_bytes.begin(), out_bytes.end(), int64_t{0}));
    const Operation operation(*state_, site);
    RT_TRY(operation.begin());
    const Call call{.kind = CallKind::kAllToAll};
    told[rank()] = out_bytes[rank()];
    RT_TRY(exchange(
        site, &call,
        [&](int64_t r) {
          return Span{reinterpret_cast<const char*>(&out_bytes[r]), sizeof(int64_t)};
        },
        [&](int64_t r) {
          return Span{reinterpret_cast<const char*>(&told[r]), sizeof(int64_t)};
        }));
    for (int64_t r = 0; r < size(); ++r) {
      if (told[r] != in_bytes[r]) return state_->fail(sizes_differ(site, world_ranks_[r], told[r], in_bytes[r]));
    }
    move_own(parts_of(out, rank()), parts_of(in, rank()));
    // Gloo moves one run of memory for each peer: what comes in lies behind what goes out.
    std::vector<int64_t> out_at(n), in_at(n);
    int64_t used = 0;
    for (int64_t r = 0; r < size(); ++r) out_at[r] = std::exchange(used, used + out_bytes[r]);
    for (int64_t r = 0; r < size(); ++r) in_at[r] = std::exchange(used, used + in_bytes[r]);
    scratch_.resize(static_cast<size_t>(used));
    for (int64_t r = 0; r < size(); ++r) {
      PartCursor<OutPart>(parts_of(out, r)).move(scratch_.data() + out_at[r], out_bytes[r]);
    }
    RT_TRY(exchange(
        site, nullptr,
        [&](int64_t r) {
          return Span{scratch_.data() + out_at[r], out_bytes[r]};
        },
        [&](int64_t r) {
          return Span{scratch_.data() + in_at[r], in_bytes[r]};
        }));
    for (int64_t r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      PartCursor<InPart>(parts_of(in, r)).move(static_cast<const char*>(scratch_.data()) + in_at[r], in_bytes[r]);
    }
    return {};
  }

  Status barrier(std::string_view what) override {
    const Site site{name_, "barrier", what};
    const Call call{.kind = CallKind::kBarrier};
    const Operation operation(*state_, site);
    RT_TRY(operation.begin());
    return exchange(
        site, &call, [](int64_t) { return Span{}; }, [](int64_t) { return Span{}; });
  }

  Status isend(const void* data, int64_t bytes, int64_t dst, std::string_view what) override {
    const Site site{name_, "isend", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "destination", dst, size()));
    traffic_.send.add(bytes);
    const Operation operation(*state_, site);
    RT_TRY(operation.begin());
    const auto* from = static_cast<const char*>(data);
    if (dst == rank()) {
      to_self_.emplace_back(from, from + bytes);
      return {};
    }
    const uint64_t sequence = sent_[dst]++;
    Sending& sending = sending_.emplace_back();
    sending.peer = dst;
    sending.header = std::make_unique<MessageHeader>(MessageHeader::make(bytes, sequence, what));
    RT_TRY(send(site, {reinterpret_cast<char*>(sending.header.get()), sizeof(MessageHeader)}, dst,
                message_slot(sequence, 0), &sending.header_buffer));
    if (bytes > 0) RT_TRY(send(site, {from, bytes}, dst, message_slot(sequence, 1), &sending.payload_buffer));
    return {};
  }

  Status recv(void* data, int64_t bytes, int64_t src, std::string_view what) override {
    const Site site{name_, "recv", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "source", src, size()));
    const Operation operation(*state_, site);
    RT_TRY(operation.begin());
    if (src == rank()) return recv_from_self(site, static_cast<char*>(data), bytes);
    const uint64_t sequence = received_[src]++;
    MessageHeader header = {};
    Buffer buffer;
    RT_TRY(post(site, {reinterpret_cast<char*>(&header), sizeof(header)}, src, message_slot(sequence, 0), &buffer));
    RT_TRY(state_->wait(site, *buffer, true, world_ranks_[src]));
    header.what[sizeof(header.what) - 1] = '\0';
    if (header.bytes != static_cast<uint64_t>(bytes) || header.sequence != sequence) {
      return state_->fail(
          {ErrorCode::kInternal,
           fmt::format("{}: rank {} sent {} bytes as message {} ('{}'), this rank expects {} bytes as message {}",
                       site.text(), world_ranks_[src], header.bytes, header.sequence, header.what, bytes, sequence)});
    }
    if (bytes == 0) return {};
    RT_TRY(post(site, {static_cast<char*>(data), bytes}, src, message_slot(sequence, 1), &buffer));
    return state_->wait(site, *buffer, true, world_ranks_[src]);
  }

  Status wait_sends(std::string_view what) override {
    const Site site{name_, "wait_sends", what};
    const Operation operation(*state_, site);
    RT_TRY(operation.begin());
    while (!sending_.empty()) {
      RT_TRY(wait_sent(site, sending_.front()));
      sending_.pop_front();
    }
    return {};
  }

  Status wait_sends_to(int64_t dst, int64_t may_stay, std::string_view what) override {
    const Site site{name_, "wait_sends_to", what};
    RT_TRY(check_peer(site, "destination", dst, size()));
    const Operation operation(*state_, site);
    RT_TRY(operation.begin());
    int64_t under_way = std::ranges::count(sending_, dst, &Sending::peer);
    for (auto sending = sending_.begin(); under_way > may_stay;) {
      if (sending->peer != dst) {
        ++sending;
        continue;
      }
      RT_TRY(wait_sent(site, *sending));
      sending = sending_.erase(sending);
      --under_way;
    }
    return {};
  }

 private:
  using Buffer = std::unique_ptr<UnboundBuffer>;
  struct Span {
    const char* data = nullptr;
    int64_t bytes = 0;
  };
  struct Sending {
    int64_t peer = 0;
    std::unique_ptr<MessageHeader> header;
    Buffer header_buffer, payload_buffer;
  };
  struct Announcement {
    uint64_t call, bytes;
  };

  Status wait_sent(const Site& site, Sending& sending) {
    RT_TRY(state_->wait(site, *sending.header_buffer, false, world_ranks_[sending.peer]));
    if (!sending.payload_buffer) return {};
    return state_->wait(site, *sending.payload_buffer, false, world_ranks_[sending.peer]);
  }

  // A slot pairs one send with one receive: never used twice between two ranks of a context.
  static uint64_t message_slot(uint64_t sequence, uint64_t part) { return uint64_t{1} << 63 | sequence << 1 | part; }

  Status send(const Site& site, Span span, int64_t peer, uint64_t slot, Buffer* buffer) {
    try {
      *buffer = context_->createUnboundBuffer(const_cast<char*>(span.data), static_cast<size_t>(span.bytes));
      (*buffer)->send(static_cast<int>(peer), slot);
      return {};
    } catch (const std::exception& e) {
      return state_->lost(site, world_ranks_[peer], e.what());
    }
  }
  Status post(const Site& site, Span span, int64_t peer, uint64_t slot, Buffer* buffer) {
    try {
      *buffer = context_->createUnboundBuffer(const_cast<char*>(span.data), static_cast<size_t>(span.bytes));
      (*buffer)->recv(static_cast<int>(peer), slot);
      return {};
    } catch (const std::exception& e) {
      return state_->lost(site, world_ranks_[peer], e.what());
    }
  }

  /// Sends `outgoing(r)` to each other member r and receives `incoming(r)` from it; an empty span moves nothing. With a
  /// `call`, members first make sure that they agree on it: only then do they trust each other's sizes.
  template <typename Outgoing, typename Incoming>
  Status exchange(const Site& site, const Call* call, const Outgoing& outgoing, const Incoming& incoming) {
    const auto n = static_cast<size_t>(size());
    const uint64_t slot = 2 * exchanges_++;
    std::vector<Announcement> theirs(n);
    Announcement mine = {};
    std::vector<Buffer> sends, announced(n), received(n);
    std::vector<int64_t> send_peers;
    auto for_peers = [&](auto&& f) -> Status {  // each starts with the member after it: no member is everyone's first
      for (int64_t i = 1; i < size(); ++i) RT_TRY(f((rank() + i) % size()));
      return {};
    };
    auto send_to = [&](Span span, int64_t r, uint64_t s) -> Status {
      send_peers.push_back(r);
      return send(site, span, r, s, &sends.emplace_back());
    };
    if (call) {
      mine = {call->word(), static_cast<uint64_t>(call->bytes)};
      RT_TRY(for_peers([&](int64_t r) {
        return post(site, {reinterpret_cast<char*>(&theirs[r]), sizeof(Announcement)}, r, slot, &announced[r]);
      }));
      RT_TRY(for_peers([&](int64_t r) -> Status {
        return send_to({reinterpret_cast<char*>(&mine), sizeof(mine)}, r, slot);
      }));
    }
    RT_TRY(for_peers([&](int64_t r) -> Status {
      const Span span = outgoing(r);
      return span.bytes > 0 ? send_to(span, r, slot + 1) : Status();
    }));
    if (call) {
      RT_TRY(for_peers([&](int64_t r) -> Status {
        RT_TRY(state_->wait(site, *announced[r], true, world_ranks_[r]));
        if (theirs[r].call == mine.call && theirs[r].bytes == mine.bytes) return {};
        return state_->fail(
            {ErrorCode::kInternal, fmt::format("{}: rank {} calls {}, this rank (rank {}) calls {}", site.text(),
                                               world_ranks_[r], describe_call(theirs[r].call, theirs[r].bytes),
                                               world_ranks_[rank()], describe_call(mine.call, mine.bytes))});
      }));
    }
    RT_TRY(for_peers([&](int64_t r) -> Status {
      const Span span = incoming(r);
      return span.bytes > 0 ? post(site, span, r, slot + 1, &received[r]) : Status();
    }));
    RT_TRY(for_peers([&](int64_t r) -> Status {
      return received[r] ? state_->wait(site, *received[r], true, world_ranks_[r]) : Status();
    }));
    for (size_t i = 0; i < sends.size(); ++i) {
      RT_TRY(state_->wait(site, *sends[i], false, world_ranks_[send_peers[i]]));
    }
    return {};
  }

  Status scatter_sum(const Site& site, const void* input, void* output, int64_t count_per_rank, DType dtype,
                     ReduceOp op, int64_t added_tree) {
    const int64_t part = count_per_rank * dtype_size_bytes(dtype);
    const Call call{.kind = CallKind::kReduceScatter, .dtype = dtype, .op = op, .bytes = part * size()};
    traffic_.reduce_scatter.add(call.bytes);
    const Operation operation(*state_, site);
    RT_TRY(operation.begin());
    auto slice = [&](int64_t r) { return r * part; };
    return reduce_slices(site, call, static_cast<const char*>(input), slice, part, static_cast<char*>(output),
                         added_tree);
  }

  /// Sums slice [slice(rank()), slice(rank() + 1)) of everybody's `input` into `output`, which may be the own slice.
  /// With `added_tree` it is added to `output`, as reduce_scatter_add() says.
  /// Slices differ by an element at most; `longest` bounds their bytes, so that all members take equally many pieces.
  template <typename Slice>
  Status reduce_slices(const Site& site, const Call& call, const char* input, const Slice& slice, int64_t longest,
                       char* output, int64_t added_tree = 0) {
    const int64_t piece = std::clamp<int64_t>(longest, 1, kPieceBytes);  // not 0: nothing takes one exchange, too
    scratch_.resize(static_cast<size_t>(size() * piece));
    auto part = [&](int64_t r, int64_t at) { return std::clamp<int64_t>(slice(r + 1) - slice(r) - at, 0, piece); };
    for (int64_t at = 0; at == 0 || at < longest; at += piece) {
      const int64_t own = part(rank(), at);
      RT_TRY(exchange(
          site, at == 0 ? &call : nullptr,
          [&](int64_t r) {
            return Span{input + slice(r) + at, part(r, at)};
          },
          [&](int64_t r) {
            return Span{scratch_.data() + r * piece, own};
          }));
      reduce(scratch_.data(), piece, input + slice(rank()) + at, output + at, own, call.dtype, call.op, added_tree);
    }
    return {};
  }

  /// Folds the members' contributions, which lie `stride` bytes apart in `all`; this rank's is `own`.
  void reduce(const char* all, int64_t stride, const char* own, char* out, int64_t bytes, DType dtype, ReduceOp op,
              int64_t added_tree = 0) {
    std::vector<const void*> inputs;
    for (int64_t r = 0; r < size(); ++r) inputs.push_back(r == rank() ? own : all + r * stride);
    const int64_t count = bytes / dtype_size_bytes(dtype);
    if (added_tree > 0) return add_ordered(out, inputs.data(), size(), added_tree, count, dtype);
    reduce_ordered(out, inputs.data(), size(), count, dtype, op);
  }

  Status recv_from_self(const Site& site, char* data, int64_t bytes) {
    if (to_self_.empty()) {
      return state_->fail(
          {ErrorCode::kInternal,
           fmt::format("{}: this rank waits for a message that it has not sent to itself", site.text())});
    }
    const std::vector<char> message = std::move(to_self_.front());
    to_self_.pop_front();
    if (static_cast<int64_t>(message.size()) != bytes) {
      return state_->fail({ErrorCode::kInternal, fmt::format("{}: the message has {} bytes, this rank expects {}",
                                                             site.text(), message.size(), bytes)});
    }
    std::copy(message.begin(), message.end(), data);
    return {};
  }

  const std::shared_ptr<GlooState> state_;
  const std::shared_ptr<gloo::Context> context_;
  const std::string name_;
  const std::vector<int64_t> world_ranks_;
  uint64_t exchanges_ = 0;
  std::vector<uint64_t> sent_, received_;  // messages, by peer
  std::deque<Sending> sending_;
  std::deque<std::vector<char>> to_self_;
  std::vector<char> scratch_;
  Traffic traffic_;
};

class GlooEngine final : public LinkedEngine {
 public:
  explicit GlooEngine(std::shared_ptr<GlooState> state)
      : state_(std::move(state)), abort_watcher_([this](const std::stop_token& stop) { watch_for_aborts(stop); }) {
    if (state_->other()) link_watcher_ = std::jthread([this](const std::stop_token& stop) { watch_other(stop); });
  }
  ~GlooEngine() override {
    abort_watcher_.request_stop();
    state_->rendezvous().close();
  }
  int64_t world_rank() const override { return state_->config().rank; }
  int64_t world_size() const override { return state_->config().world_size; }
  bool keeps_rank_order() const override { return true; }  // the reductions are written here

  Result<std::unique_ptr<Comm>> group(std::string_view axis, const std::vector<int64_t>& world_ranks) override {
    RT_TRY(check_group(axis, world_ranks, world_size(), world_rank()));
    std::string name = group_name(axis, world_ranks);
    if (world_ranks.size() == 1) return make_single_comm(std::move(name));
    const Site site{name, "group", "connect"};
    const Operation operation(*state_, site);
    RT_TRY(operation.begin());
    const std::string members = fmt::format("{}", fmt::join(world_ranks, ","));
    const int64_t instance = instances_[fmt::format("{}[{}]", axis, members)]++;
    // File names are short: the members are hashed.
    const std::string prefix =
        fmt::format("{}-{}-{:016x}-{}/", axis, world_ranks.size(), stream_key(0, members), instance);
    const auto self = std::ranges::find(world_ranks, world_rank()) - world_ranks.begin();
    std::shared_ptr<Mesh> mesh;
    try {
      mesh = std::make_shared<Mesh>(static_cast<int>(self), static_cast<int>(world_ranks.size()), state_->device(),
                                    state_->deadline());
    } catch (const std::exception& e) {
      return state_->fail({ErrorCode::kUnavailable, fmt::format("{}: cannot listen: {}", site.text(), e.what())});
    }
    RT_TRY(Connector(*state_, site, world_ranks).run(prefix, mesh));
    return std::unique_ptr<Comm>(std::make_unique<GlooComm>(state_, std::move(mesh), std::move(name), world_ranks));
  }

  void abort(std::string_view reason) override {
    give_up(ErrorCode::kStopped, fmt::format("rank {}: {}", world_rank(), reason));
  }
  void give_up(ErrorCode code, std::string_view reason) override { state_->give_up(code, std::string(reason)); }
  std::optional<Error> dead() override { return state_->dead(false); }

 private:
  // A rank that waits for a healthy peer sees no broken connection when a third one gives up.
  void watch_for_aborts(const std::stop_token& stop) {
    while (!stop.stop_requested() && !state_->dead(false)) state_->await_abort(Clock::now() + std::chrono::hours(1));
  }
  void watch_other(const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any woken;
    std::unique_lock lock(mutex);
    while (!woken.wait_for(lock, stop, kLinkedTick, [&] { return stop.stop_requested(); })) {
      if (stop.stop_requested() || state_->dead(false)) return;
      const auto other = state_->other();
      if (!other) return;
      if (const auto reason = other->dead()) return state_->give_up(reason->code, reason->message);
    }
  }

  const std::shared_ptr<GlooState> state_;
  std::map<std::string, int64_t> instances_;
  std::jthread abort_watcher_, link_watcher_;  // last: they use the state
};

/// The addresses of this host, for messages.
std::string own_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "unknown";
  std::vector<std::string> found;
  for (const ifaddrs* it = list; it; it = it->ifa_next) {
    if (!it->ifa_addr || (it->ifa_addr->sa_family != AF_INET && it->ifa_addr->sa_family != AF_INET6)) continue;
    const auto size =
        static_cast<socklen_t>(it->ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    char text[NI_MAXHOST];
    if (::getnameinfo(it->ifa_addr, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0)
      found.emplace_back(text);
  }
  ::freeifaddrs(list);
  return fmt::format("{}", fmt::join(found, ", "));
}

/// That sockets can be bound to `address`. Gloo would check it too, with a message of its own and a leak.
Status check_address(const std::string& address) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int rc = ::getaddrinfo(address.c_str(), nullptr, &hints, &found);
  if (rc != 0 || address.empty()) {
    return Error{ErrorCode::kInvalidInput, fmt::format("interface address '{}': {}; this host has {}", address,
                                                       rc ? ::gai_strerror(rc) : "is empty", own_addresses())};
  }
  bool bound = false;
  for (const addrinfo* it = found; it && !bound; it = it->ai_next) {
    const Fd fd(::socket(it->ai_family, it->ai_socktype | SOCK_CLOEXEC, it->ai_protocol));
    bound = fd && ::bind(fd.get(), it->ai_addr, it->ai_addrlen) == 0;
  }
  ::freeaddrinfo(found);
  if (bound) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("interface address '{}' is none of this host's, which has {}", address, own_addresses())};
}

}  // namespace

Result<std::unique_ptr<LinkedEngine>> make_engine(const GlooConfig& config,
                                                  const std::shared_ptr<LinkedEngine>& other) {
  if (config.world_size < 1 || config.rank < 0 || config.rank >= config.world_size) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("rank must be 0 to {}, got {}", config.world_size - 1, config.rank)};
  }
  if (!config.rendezvous) return Error{ErrorCode::kInvalidInput, "the ranks have no rendezvous"};
  RT_TRY(check_address(config.interface_address));
  const std::string key = fmt::format("rank-{}", config.rank);
  const Rendezvous::Time until = Clock::now() + std::chrono::milliseconds(config.options.deadline_ms);
  RT_TRY_SET(const bool fresh, config.rendezvous->publish(key, who_this_is(), until));
  if (!fresh) {
    RT_TRY_SET(const auto earlier, config.rendezvous->await(key, until));
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("rank {} has started before ({}); each start of a world needs a rendezvous of its own",
                             config.rank, earlier.value_or("unknown"))};
  }
  // Gloo writes to its sockets without MSG_NOSIGNAL: a lost peer would kill this process instead of being an error.
  struct sigaction on_pipe = {};
  if (::sigaction(SIGPIPE, nullptr, &on_pipe) == 0 && on_pipe.sa_handler == SIG_DFL) {
    on_pipe.sa_handler = SIG_IGN;
    ::sigaction(SIGPIPE, &on_pipe, nullptr);
  }
  std::shared_ptr<gloo::transport::Device> device;
  try {
    device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(config.interface_address.c_str()));
  } catch (const std::exception& e) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("interface address '{}' cannot be used: {}", config.interface_address, e.what())};
  }
  return std::unique_ptr<LinkedEngine>(
      std::make_unique<GlooEngine>(std::make_shared<GlooState>(config, std::move(device), other)));
}

}  // namespace cairn::comm
