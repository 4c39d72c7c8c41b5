#include "tools/run/hosts/replicas.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <utility>

#include "ckpt/plan/free_copies.h"
#include "ckpt/position.h"
#include "ckpt/run_memory.h"
#include "ckpt/slot_source.h"
#include "ckpt/snapshot/snapshot.h"
#include "runtime/cluster/token.h"
#include "runtime/json/json.h"
#include "tools/run/hosts/host_wire.h"

namespace cairn::tools {
namespace {

using cluster::Connection;
using cluster::Message;

constexpr int kLookMs = 20;                                    // so often at least the end of a wait is seen
constexpr auto kLookForMark = std::chrono::milliseconds(2);    // a step of the smallest model takes some
constexpr auto kMayEnd = std::chrono::milliseconds(100);       // what is under way when ranks stop
constexpr double kGoS = 300;                                   // the holder makes its memory for the first copy
constexpr double kAnswerS = 10, kSilentS = 10, kConnectS = 2;  // without any of it the peer counts as gone
constexpr int64_t kHeldSlots = 2;
constexpr double kGuestS = 3;         // from a connection to its proof
constexpr double kAgainS = 0.05;      // between tries to reach a holder
constexpr size_t kMostIncoming = 16;  // that have proved the token

using Stopped = std::function<bool()>;

Error stopped_error() { return {ErrorCode::kStopped, "the ranks were stopped meanwhile"}; }

/// On a thread of its own: a throw (no memory) is an error of what it does.
template <typename Attempt>
Status guarded(const Attempt& attempt) {
  try {
    return attempt();
  } catch (const std::exception& error) {
    return Error{ErrorCode::kInternal, fmt::format("copies: {}", error.what())};
  }
}

/// False: it was not ready within a moment.
bool wait_for(int fd, short events) {
  pollfd ready{fd, events, 0};
  return ::poll(&ready, 1, kLookMs) == 1;
}

Status send_message(Connection& to, const Message& message, const Stopped& stopped) {
  RT_TRY(to.send(message));
  for (const int64_t deadline_ns = cluster::steady_after(kAnswerS); to.has_unsent();) {
    if (stopped()) return stopped_error();
    if (cluster::steady_ns() > deadline_ns) return Error{ErrorCode::kTimeout, to.peer() + " takes nothing"};
    wait_for(to.fd(), POLLOUT);
    RT_TRY(to.flush());
  }
  return {};
}

Result<Message> receive(Connection& from, double patience_s, const Stopped& stopped) {
  for (const int64_t deadline_ns = patience_s > 0 ? cluster::steady_after(patience_s) : INT64_MAX;;) {
    RT_TRY_SET(std::optional<Message> message, from.next());
    if (message) return *std::move(message);
    if (stopped()) return stopped_error();
    if (cluster::steady_ns() > deadline_ns) return Error{ErrorCode::kTimeout, from.peer() + " does not answer"};
    if (!wait_for(from.fd(), POLLIN)) continue;
    if (Status filled = from.fill(); !filled.ok()) {  // its last word may have come with its end
      RT_TRY_SET(message, from.next());
      if (message) return *std::move(message);
      return std::move(filled).error();
    }
  }
}

/// All of it, of a bank. Nothing else is on its way in that direction.
template <typename Bytes, typename Move>
Status move_bytes(const Connection& peer, Bytes bytes, short events, const Stopped& stopped, const Move& move) {
  int64_t heard_ns = cluster::steady_ns();
  while (!bytes.empty()) {
    const ssize_t n = move(bytes.data(), std::min(bytes.size(), size_t{1} << 20));
    if (n > 0) {
      bytes = bytes.subspan(static_cast<size_t>(n));
      heard_ns = cluster::steady_ns();
      if (stopped()) return stopped_error();
      continue;
    }
    if (n == 0) return Error{ErrorCode::kPeerLost, peer.peer() + " closed the connection"};
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK)
      return Error{ErrorCode::kPeerLost, fmt::format("{}: {}", peer.peer(), std::strerror(errno))};
    if (stopped()) return stopped_error();
    if (cluster::steady_ns() - heard_ns > static_cast<int64_t>(kSilentS * 1e9))
      return Error{ErrorCode::kTimeout, fmt::format("{}: silent for {} s", peer.peer(), kSilentS)};
    wait_for(peer.fd(), events);
  }
  return {};
}

/// The answer has to be an Expected. Errors: what refuses it.
template <typename Expected>
Status expect(Connection& from, double patience_s, const Stopped& stopped) {
  RT_TRY_SET(const Message answer, receive(from, patience_s, stopped));
  if (std::holds_alternative<Expected>(answer.what)) return {};
  if (const auto* const refused = std::get_if<hosts::Refused>(&answer.what))
    return Error{ErrorCode::kUnavailable, fmt::format("refused by {}: {}", from.peer(), refused->why)};
  return Error{ErrorCode::kCorrupt, fmt::format("{}: `{}` where `{}` was expected", from.peer(),
                                                hosts::kind_of(answer.what), Expected::kKind)};
}

struct Sender {
  int64_t place = 0, epoch = 0;
  bool restores = false;  // the memory of a host's own ranks, and not a copy to keep
  std::string token;
};

/// An answer that proves no token: another try may meet the holder.
Error unproved(Error error) {
  if (error.code != ErrorCode::kStopped) error.code = ErrorCode::kPeerLost;
  return error;
}

/// One try. Errors: kPeerLost where nothing that came proves the token; kUnavailable: no connection, or the holder
/// refuses.
Result<Connection> try_to_reach(const PeerAddress& to, const Sender& from, const Stopped& stopped) {
  RT_TRY_SET(Connection out, Connection::connect(to.host, to.port, cluster::steady_after(kConnectS)));
  const auto strange = [&](std::string_view what) {
    return unproved({ErrorCode::kPeerLost, fmt::format("{}: {}", out.peer(), what)});
  };
  const Result<Message> challenge = receive(out, kAnswerS, stopped);
  if (!challenge.ok()) return unproved(challenge.error());
  const auto* const greets = std::get_if<hosts::KeepsCopies>(&challenge.value().what);
  if (greets == nullptr) return strange("no agent that keeps copies");
  const std::string nonce = cluster::random_hex();
  const hosts::Json hello = hosts::encode_hello(hosts::CopyHello{from.place, from.epoch, from.restores, nonce});
  const std::string proof = cluster::prove(from.token, "replica", greets->nonce, json_text(hello));
  RT_TRY(send_message(out, {hosts::OfferCopies{hello, proof}}, stopped));
  out.trust();
  const Result<Message> answer = receive(out, kAnswerS, stopped);
  if (!answer.ok()) return unproved(answer.error());
  if (const auto* const refused = std::get_if<hosts::Refused>(&answer.value().what)) {
    const bool meant =
        cluster::is_proof(refused->proof.value_or(""), from.token, "replica refused", nonce, refused->why);
    return Error{meant ? ErrorCode::kUnavailable : ErrorCode::kPeerLost,
                 fmt::format("refused by {}: {}", out.peer(), printable_ascii(refused->why))};
  }
  const auto* const takes = std::get_if<hosts::TakesCopies>(&answer.value().what);
  if (takes == nullptr || !cluster::is_proof(takes->proof, from.token, "replica taken", nonce, ""))
    return strange("does not know this run's token");
  return out;
}

Result<Connection> reach(const PeerAddress& to, const Sender& from, const Stopped& stopped) {
  if (to.port == 0) return Error{ErrorCode::kUnavailable, fmt::format("{} takes no copies", to.host)};
  for (const int64_t until_ns = cluster::steady_after(kConnectS);;) {
    Result<Connection> reached = try_to_reach(to, from, stopped);
    if (reached.ok() || reached.error().code != ErrorCode::kPeerLost) return reached;
    if (stopped() || cluster::steady_ns() >= until_ns) return reached;
    std::this_thread::sleep_for(std::chrono::duration<double>(kAgainS));
  }
}

Status send_bank(Connection& to, const ckpt::Arena& arena, int64_t slot, const ckpt::WholeSlot& as,
                 const Stopped& stopped, int64_t* bytes) {
  RT_TRY_SET(const ckpt::CommonSnapshot snapshot, ckpt::read_common(arena, slot, ckpt::Check::kHeaders));
  if (snapshot.incarnation != as.incarnation || snapshot.step != as.step)
    return Error{ErrorCode::kCorrupt, fmt::format("slot {} holds another step than {}", slot, as.step)};
  hosts::Bank head{.slot = to_wire(as), .ranks = {}};
  for (const ckpt::RankSnapshot& rank : snapshot.ranks) head.ranks.push_back({rank.position, rank.sums});
  RT_TRY(send_message(to, {std::move(head)}, stopped));
  RT_TRY(expect<hosts::SendBank>(to, kGoS, stopped));
  for (int64_t rank = arena.ranks().first; rank < arena.ranks().end; ++rank) {
    const std::span<const std::byte> payload = arena.payload(rank, slot);
    RT_TRY(move_bytes(to, payload, POLLOUT, stopped,
                      [&](const std::byte* data, size_t size) { return ::send(to.fd(), data, size, MSG_NOSIGNAL); }));
    if (bytes != nullptr) *bytes += std::ssize(payload);
  }
  return expect<hosts::WholeBank>(to, kGoS, stopped);
}

}  // namespace

std::optional<ckpt::WholeSlot> slot_of(const ckpt::RestoreChoice& choice) {
  if (choice.source != ckpt::arena::Source::kMemory) return std::nullopt;
  return ckpt::WholeSlot{choice.slot, choice.slot_incarnation, choice.step};
}

int64_t ward_of(int64_t place, int64_t hosts, std::span<const int64_t> free) {
  return free.empty() ? ward_of(place, hosts) : std::ranges::find(free, place) - free.begin();
}

Result<ckpt::ArenaSpec> ward_spec(const Plan& plan, const ckpt::RunText& run, int64_t place, int64_t hosts) {
  const std::vector<int64_t> free = ckpt::free_holders(plan, hosts);
  const int64_t ranks = plan.mesh.world() / hosts, ward = ward_of(place, hosts, free);
  RT_TRY_SET(ckpt::ArenaSpec out, ckpt::arena_spec(plan, run, ckpt::RankRange{ward * ranks, (ward + 1) * ranks}));
  if (free.empty()) out.slots = kHeldSlots;
  out.weight_bytes.clear();
  out.backing = ckpt::ArenaBacking::kMemfd;
  out.folder = ckpt::kSharedMemory;
  return out;
}

Replicas::~Replicas() {
  ends_ = true;
  changed_.notify_all();
  if (listening_.joinable()) listening_.join();
  if (sending_.joinable()) sending_.join();
}

// --- of the agent's loop -------------------------------------------------------------------------------------------

Status Replicas::attach(Segment segment) {
  const CheckpointConfig& config = segment.plan.recipe.checkpoint;
  const bool asked = config.replicate_steps > 0 && segment.hosts > 1;
  const std::vector<int64_t> holders = asked ? ckpt::free_holders(segment.plan, segment.hosts) : std::vector<int64_t>();
  const bool free = !holders.empty();
  const bool wants = asked && (free || segment.arena.slots() >= ckpt::banks_of(config, true));
  if (wants && !guests_) {
    RT_TRY_SET(cluster::Listener listener, cluster::Listener::open(options_.port_from, options_.port_to));
    port_ = listener.port();
    guests_.emplace(std::move(listener), kGuestS,
                    [](const std::string& nonce) { return Message{hosts::KeepsCopies{nonce}}; });
    listening_ = std::thread([this] { listen(); });
    sending_ = std::thread([this] { send(); });
  }
  {
    const std::lock_guard lock(of_ward_);
    ward_spec_.reset();
    holders_ = wants ? holders : std::vector<int64_t>();
    for (int64_t k = 0; wants && !free && k < segment.hosts; ++k) holders_.push_back(buddy_of(k, segment.hosts));
    if (wants) {
      RT_TRY_SET(ward_spec_, ward_spec(segment.plan, segment.run, segment.place, segment.hosts));
      ward_place_ = ward_of(segment.place, segment.hosts, holders);
      if (free) ward_spec_->slots = segment.arena.slots();
    }
    // What was held for a leader that is lost is there yet for this host, which leads now.
    const bool same = ward_ && wants && ward_->layout_hash() == ward_spec_->layout_hash &&
                      ward_->run_id() == ward_spec_->run_id && ward_->recipe_hash() == ward_spec_->recipe_hash &&
                      ward_->ranks() == *ward_spec_->here && ward_->slots() == ward_spec_->slots;
    if (!same) ward_.reset();
    if (free && !ward_) {
      Status made = make_ward();
      if (!made.ok() && segment.warn) {
        segment.warn(fmt::format("no copies are kept here of what place {} holds: {}", ward_place_,
                                 std::move(made).error().message));
      }
    }
  }
  const std::lock_guard lock(mutex_);
  wants_ = wants;
  free_ = wants && free;
  segment_.emplace(std::move(segment));
  return {};
}

/// With of_ward_ held.
Status Replicas::make_ward() {
  RT_TRY_SET(ward_, ckpt::Arena::create(*ward_spec_));
  ward_slots_.assign(static_cast<size_t>(ward_spec_->slots), -1);
  return {};
}

void Replicas::detach() {
  halt();
  const std::lock_guard own(of_own_);
  const std::lock_guard lock(mutex_);
  segment_.reset();
}

void Replicas::halt() {
  for (const auto end = std::chrono::steady_clock::now() + kMayEnd;
       busy_ > 0 && !cut_ && std::chrono::steady_clock::now() < end;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  cut_ = true;
  const std::lock_guard lock(mutex_);
  running_ = false;
  if (!segment_) return;
  for (std::atomic<int64_t>& mark : segment_->arena.control().replica) {
    if (mark.load(std::memory_order_acquire) > 0) mark.store(0, std::memory_order_release);  // copied by nobody now
  }
}

void Replicas::begin(int64_t epoch, PeerAddress buddy, const std::optional<ckpt::WholeSlot>& from) {
  forget_all_but(from);
  {
    const std::lock_guard lock(mutex_);
    epoch_ = epoch;
    buddy_ = std::move(buddy);
    sent_step_ = -1;
    if (segment_) {
      std::atomic<int64_t>* const marks = segment_->arena.control().replica;
      for (int64_t k = 0; k < segment_->arena.slots(); ++k)
        marks[k].store(wants_ && !free_ && from && from->slot == k ? -from->step : 0, std::memory_order_release);
    }
    running_ = wants_;
    cut_ = !wants_;
  }
  changed_.notify_all();
}

/// What is held of steps that the run has gone back behind is no copy of its line any more, and may not stay in the
/// place of the one that is, when the next one comes.
void Replicas::forget_all_but(const std::optional<ckpt::WholeSlot>& from) {
  const std::lock_guard lock(of_ward_);
  agreed_ = false;
  begun_from_ = from ? from->step : -1;
  if (!ward_) return;
  const std::vector<ckpt::SlotView> views = ward_->views();
  for (int64_t k = 0; k < std::ssize(views); ++k) {
    if (!from || views[k].incarnation != from->incarnation || views[k].step > from->step) ward_->invalidate_slot(k);
  }
}

void Replicas::agreed(int64_t step) {
  agreed_ = true;
  const std::lock_guard lock(mutex_);
  if (!segment_) return;
  for (std::atomic<int64_t>& mark : segment_->arena.control().replica) {
    int64_t seen = mark.load(std::memory_order_acquire);
    if (seen == step) mark.store(-step, std::memory_order_release);
    if (seen < 0 && seen != -step) mark.store(0, std::memory_order_release);
  }
}

void Replicas::dropped(int64_t step) {
  const std::lock_guard lock(mutex_);
  if (!segment_) return;
  for (std::atomic<int64_t>& mark : segment_->arena.control().replica) {
    int64_t seen = step;
    mark.compare_exchange_strong(seen, 0);
  }
}

Held Replicas::held() const {
  Held out;
  {
    const std::lock_guard lock(mutex_);
    if (wants_ && segment_) out.port = port_;
  }
  const std::lock_guard lock(of_ward_);
  if (!ward_) return out;
  out.place = ward_place_;
  const std::vector<ckpt::SlotView> views = ward_->views();
  for (int64_t k = 0; k < std::ssize(views); ++k) {
    if (views[k].whole) out.whole.push_back({bank_of(k), views[k].incarnation, views[k].step});
  }
  return out;
}

std::vector<int64_t> Replicas::holders() const {
  const bool free = are_free();
  const std::lock_guard lock(of_ward_);
  if (!ward_) return {};
  const bool made = free && std::ranges::any_of(ward_->views(), [this](const ckpt::SlotView& one) {
                      return one.whole && one.step > begun_from_;
                    });
  return made || agreed_ ? holders_ : std::vector<int64_t>();
}

bool Replicas::are_free() const {
  const std::lock_guard lock(mutex_);
  return free_;
}

Result<Fd> Replicas::descriptor() const {
  if (!are_free()) return Fd();
  const std::lock_guard ward(of_ward_);
  return ward_ ? ward_->descriptor() : Result<Fd>(Fd());
}

/// With of_ward_ held: that of the copied bank.
int64_t Replicas::bank_of(int64_t slot) const {
  const bool by_ranks = ward_slots_[static_cast<size_t>(slot)] < 0;
  return by_ranks ? slot : ward_slots_[static_cast<size_t>(slot)];
}

/// With of_ward_ held.
Result<int64_t> Replicas::ward_slot_of(const ckpt::WholeSlot& slot) const {
  const std::vector<ckpt::SlotView> views = ward_ ? ward_->views() : std::vector<ckpt::SlotView>();
  for (int64_t k = 0; k < std::ssize(views); ++k) {
    if (views[k].whole && ckpt::WholeSlot{bank_of(k), views[k].incarnation, views[k].step} == slot) return k;
  }
  return Error{ErrorCode::kUnavailable, fmt::format("step {} is not held here any more", slot.step)};
}

Result<ckpt::PartSet> Replicas::write_part(const ckpt::WholeSlot& slot, ckpt::IoBackend& io,
                                           const std::filesystem::path& work) const {
  const std::lock_guard ward(of_ward_);
  RT_TRY_SET(const int64_t held, ward_slot_of(slot));
  RT_TRY_SET(const ckpt::CommonSnapshot snapshot, ckpt::read_common(*ward_, held, ckpt::Check::kEveryByte));
  RT_TRY_SET(const trainer::TrainPosition position, ckpt::decode_position(snapshot.position));
  ckpt::SlotSource source(*ward_);
  RT_TRY_SET(ckpt::Manifest skeleton, source.take_skeleton());
  ckpt::put_position(position, skeleton);
  ckpt::WriteOptions options{.chunk_bytes = ward_->chunk_bytes(),
                             .checksum_bytes = source.checksum_bytes(),
                             .huge_pages = ward_->huge_pages()};
  {
    const std::lock_guard lock(mutex_);
    if (segment_ && segment_->plan.recipe.checkpoint.compress == Compress::kZstd)
      options.codec = ckpt::Codec::kShuffleZstd;
  }
  return ckpt::write_parts(io, work, skeleton, source.parts(held, snapshot.ranks), options);
}

void Replicas::give(const ckpt::WholeSlot& slot, PeerAddress to, std::function<void(const Status&)> done) {
  {
    const std::lock_guard lock(mutex_);
    gifts_.push_back({slot, std::move(to), std::move(done)});
  }
  changed_.notify_all();
}

// --- the sender's thread -------------------------------------------------------------------------------------------

void Replicas::send() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    if (!gifts_.empty()) {
      Gift gift = std::move(gifts_.front());
      gifts_.pop_front();
      lock.unlock();
      give_away(std::move(gift));
      lock.lock();
      continue;
    }
    const bool looks = running_ && !free_;  // for marks
    if (!running_) link_.reset();
    if (const std::optional<int64_t> slot = looks ? marked_slot() : std::nullopt) {
      const int64_t step = segment_->arena.control().replica[*slot].load(std::memory_order_acquire);
      sent_step_ = step;
      ++busy_;
      lock.unlock();
      send_marked(*slot, step);
      --busy_;
      lock.lock();
      continue;
    }
    if (looks) {
      changed_.wait_for(lock, kLookForMark);
    } else {
      changed_.wait_for(lock, std::chrono::milliseconds(100));
    }
  }
}

/// A bank that is to be copied, and is whole here. With the lock held.
std::optional<int64_t> Replicas::marked_slot() {
  const ckpt::Arena& arena = segment_->arena;
  for (int64_t k = 0; k < arena.slots(); ++k) {
    const int64_t step = arena.control().replica[k].load(std::memory_order_acquire);
    if (step <= 0 || step == sent_step_) continue;
    const ckpt::SlotView view = arena.views()[static_cast<size_t>(k)];
    if (view.whole && view.step == step) return k;
  }
  return std::nullopt;
}

void Replicas::send_marked(int64_t slot, int64_t step) {
  const std::lock_guard own(of_own_);
  PeerAddress buddy;
  Sender from;
  {
    const std::lock_guard lock(mutex_);
    if (!segment_) return;
    buddy = buddy_;
    from = {.place = segment_->place, .epoch = epoch_, .restores = false, .token = segment_->token};
  }
  const Stopped stopped = [this] { return cut_.load() || ends_.load(); };
  const Segment& segment = *segment_;  // detach() waits for of_own_
  int64_t bytes = 0;
  const auto attempt = [&]() -> Status {
    if (!link_) {
      RT_TRY_SET(link_, reach(buddy, from, stopped));
    }
    const ckpt::SlotView view = segment.arena.views()[static_cast<size_t>(slot)];
    return send_bank(*link_, segment.arena, slot, {slot, view.incarnation, step}, stopped, &bytes);
  };
  const Status sent = guarded(attempt);
  if (!sent.ok()) link_.reset();
  if (!sent.ok() && sent.error().code == ErrorCode::kStopped) return;
  segment.sent(step, bytes, sent.ok() ? std::string() : sent.error().message);
}

void Replicas::give_away(Gift gift) {
  const std::lock_guard ward(of_ward_);
  const Stopped stopped = [this] { return ends_.load(); };
  const auto attempt = [&]() -> Status {
    Sender from;
    {
      const std::lock_guard lock(mutex_);
      if (!segment_) return Error{ErrorCode::kUnavailable, "no segment is open here"};
      from = {.place = ward_place_, .epoch = epoch_, .restores = true, .token = segment_->token};
    }
    RT_TRY_SET(const int64_t held, ward_slot_of(gift.slot));
    RT_TRY_SET(Connection link, reach(gift.to, from, stopped));
    return send_bank(link, *ward_, held, gift.slot, stopped, nullptr);
  };
  gift.done(guarded(attempt));
}

// --- the listener's thread, and one for each connection ------------------------------------------------------------

void Replicas::listen() {
  while (!ends_) {
    for (auto at = incoming_.begin(); at != incoming_.end();) {
      const auto one = at++;
      if (!one->ended) continue;
      one->thread.join();
      incoming_.erase(one);
    }
    std::vector<pollfd> ready;
    guests_->watch(ready);
    ::poll(ready.data(), ready.size(), kLookMs);
    guests_->serve([this](cluster::Guest guest, const Message& message) { admit(std::move(guest), message); });
  }
  for (Incoming& one : incoming_) one.thread.join();
}

/// A sender that proves the token gets a thread; any other connection ends here.
void Replicas::admit(cluster::Guest guest, const Message& message) {
  std::string token;
  int64_t own_place = -1, ward = -1;
  {
    const std::lock_guard lock(mutex_);
    if (segment_) {
      token = segment_->token;
      own_place = segment_->place;
      ward = wants_ && !free_ ? ward_of(segment_->place, segment_->hosts) : -1;
    }
  }
  const auto* const offer = std::get_if<hosts::OfferCopies>(&message.what);
  const bool proved = own_place >= 0 && offer != nullptr &&
                      cluster::is_proof(offer->proof, token, "replica", guest.nonce, json_text(offer->hello));
  hosts::CopyHello hello;
  const auto refuse = [&](const std::string& why) {
    std::string proof = proved ? cluster::prove(token, "replica refused", hello.nonce, why) : "";
    ignore(guest.connection.send({hosts::Refused{.why = why, .proof = std::move(proof)}}), "it ends either way");
  };
  if (own_place < 0) return refuse("no segment is open there");
  if (!proved) return refuse("the proof of the run's token is wrong");
  Result<hosts::CopyHello> read = hosts::decode_copy_hello(offer->hello);
  if (!read.ok()) return refuse(read.error().message);
  hello = std::move(read).value();
  const Friend from{.restores = hello.restores, .epoch = hello.epoch};
  if (hello.place != (from.restores ? own_place : ward))
    return refuse(fmt::format("place {} is none whose memory is kept there", hello.place));
  if (!from.restores && from.epoch != epoch_)
    return refuse(fmt::format("epoch {}, it is {} there", from.epoch, epoch_.load()));
  if (incoming_.size() >= kMostIncoming) return refuse("too many copies are under way there");
  const Message welcome{hosts::TakesCopies{cluster::prove(token, "replica taken", hello.nonce, "")}};
  if (!guest.connection.send(welcome).ok()) return;
  guest.connection.trust();
  Incoming& incoming = incoming_.emplace_back(std::move(guest.connection));
  incoming.thread = std::thread([this, &incoming, from] {
    ignore(guarded([&] { return serve(incoming.connection, from); }), "the sender tells of it, or is gone");
    incoming.ended = true;
  });
}

Status Replicas::serve(Connection& connection, const Friend& from) {
  const Stopped over = [&] { return ends_.load() || (!from.restores && epoch_ != from.epoch); };
  for (;;) {
    RT_TRY_SET(const Message bank, receive(connection, 0, over));
    const auto* const head = std::get_if<hosts::Bank>(&bank.what);
    if (head == nullptr) return Error{ErrorCode::kCorrupt, connection.peer() + ": no bank"};
    ++busy_;
    const Status taken = take_bank(connection, *head, from.restores);
    --busy_;
    if (!taken.ok()) {
      ignore(send_message(connection, {hosts::Refused{taken.error().message}}, over),
             "the connection ends, which says the same");
      return taken;
    }
    RT_TRY(send_message(connection, {hosts::WholeBank{}}, over));
  }
}

Status Replicas::take_bank(Connection& connection, const hosts::Bank& head, bool restores) {
  const hosts::Slot& as = head.slot;
  const std::lock_guard held(restores ? of_own_ : of_ward_);
  const Stopped stopped = [&] { return ends_.load() || (!restores && cut_); };
  ckpt::Arena* arena = nullptr;
  int64_t slot = as.slot;
  if (restores) {
    const std::lock_guard lock(mutex_);
    if (!segment_ || running_) return Error{ErrorCode::kUnavailable, "ranks run there"};
    arena = &segment_->arena;
    if (slot >= arena->slots()) return Error{ErrorCode::kCorrupt, fmt::format("no slot {}", slot)};
  } else {
    if (cut_) return stopped_error();
    if (!ward_) {
      if (!ward_spec_) return Error{ErrorCode::kUnavailable, "no copies are kept there"};
      RT_TRY(make_ward());
    }
    arena = &*ward_;
    const std::vector<ckpt::SlotView> views = arena->views();
    const auto age = [&](int64_t k) { return std::tuple(views[k].whole, views[k].incarnation, views[k].step); };
    slot = age(0) <= age(1) ? 0 : 1;
    ward_slots_[slot] = as.slot;
  }
  if (std::ssize(head.ranks) != arena->ranks().size()) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("a bank of {} ranks, not {}", head.ranks.size(), arena->ranks().size())};
  }
  const auto take = [&]() -> Status {
    for (int64_t rank = arena->ranks().first; rank < arena->ranks().end; ++rank)
      ckpt::SnapshotWriter(*arena, rank).begin(slot, as.incarnation, as.step);
    RT_TRY(send_message(connection, {hosts::SendBank{}}, stopped));
    for (int64_t rank = arena->ranks().first; rank < arena->ranks().end; ++rank) {
      RT_TRY(move_bytes(connection, arena->payload(rank, slot), POLLIN, stopped,
                        [&](std::byte* data, size_t size) { return ::recv(connection.fd(), data, size, 0); }));
    }
    for (int64_t rank = arena->ranks().first; rank < arena->ranks().end; ++rank) {
      const hosts::BankRank& of = head.ranks[static_cast<size_t>(rank - arena->ranks().first)];
      if (of.sums.size() != arena->shards(rank).size()) return Error{ErrorCode::kCorrupt, "not a sum for each shard"};
      RT_TRY(ckpt::SnapshotWriter(*arena, rank).publish(slot, as.incarnation, as.step, of.position, of.sums, 0));
    }
    RT_TRY_SET(const ckpt::CommonSnapshot whole, ckpt::read_common(*arena, slot, ckpt::Check::kEveryByte));
    return {};
  };
  const Status taken = take();
  if (!taken.ok()) arena->invalidate_slot(slot);
  return taken;
}

}  // namespace cairn::tools
