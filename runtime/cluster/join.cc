#include "runtime/cluster/join.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>

#include <algorithm>
#include <map>
#include <thread>
#include <utility>

#include "runtime/cluster/epoch_json.h"
#include "runtime/cluster/guests.h"
#include "runtime/cluster/node_list.h"
#include "runtime/cluster/token.h"
#include "runtime/json/json.h"

namespace cairn::cluster {
namespace {

using nlohmann::json;

constexpr int kLookMs = 100;  // at least so often somebody's stop is seen

bool asked(const std::function<bool()>& stopped) { return stopped && stopped(); }

/// The text that a proof of a refusal covers.
std::string refusal_text(const std::string& why, bool barred) {
  return json_text(json{{"why", why}, {"barred", barred}});  // as it travels
}

/// Only a word that proves the token can make a host leave: any other answer is tried again, as silence is.
Error unproved(const Connection& from, std::string_view what) {
  return {ErrorCode::kUnavailable, fmt::format("{}: {}", from.peer(), what)};
}

/// Waits for the next complete message of a peer that has not proved itself yet.
Result<Message> receive(Connection& from, int64_t deadline_ns, const std::function<bool()>& stopped) {
  for (;;) {
    Result<std::optional<Message>> message = from.next();
    if (!message.ok()) return Error{ErrorCode::kUnavailable, message.error().message};
    if (message.value()) return *std::move(message).value();
    if (asked(stopped)) return Error{ErrorCode::kStopped, "asked to stop"};
    if (steady_ns() >= deadline_ns) {
      return Error{ErrorCode::kTimeout, fmt::format("{}: no answer", from.peer())};
    }
    pollfd ready{from.fd(), static_cast<short>(POLLIN | (from.has_unsent() ? POLLOUT : 0)), 0};
    ::poll(&ready, 1, kLookMs);
    RT_TRY(from.flush());
    if (Status filled = from.fill(); !filled.ok()) {  // its last word may have come with its end
      const Result<std::optional<Message>> last = from.next();
      return last.ok() && last.value() ? Result<Message>(*last.value()) : Result<Message>(std::move(filled).error());
    }
  }
}

}  // namespace

class Door::Impl {
 public:
  Impl(Listener listener, DoorRules rules, Hello own, std::function<void(std::string)> say)
      : rules_(std::move(rules)),
        own_(std::move(own)),
        say_(std::move(say)),
        guests_(
            std::move(listener), kHandshakeS,
            [name = token_name(rules_.token)](const std::string& nonce) {
              return Message{hosts::Challenge{nonce, name}};
            },
            say_) {}

  int64_t port() const { return guests_.port(); }

  void serve(int wait_ms) {
    std::vector<pollfd> ready;
    guests_.watch(ready);
    for (auto& [index, member] : joined_) ready.push_back({member.connection.fd(), POLLIN, 0});
    ::poll(ready.data(), ready.size(), wait_ms);
    guests_.serve([this](Guest guest, const Message& message) { listen_to(std::move(guest), message); });
    // One that leaves again before it is taken comes back as a guest, or is missing.
    for (auto member = joined_.begin(); member != joined_.end();) {
      const auto at = member++;
      if (!at->second.connection.fill().ok()) joined_.erase(at);
    }
  }

  std::set<int64_t> joined() const {
    std::set<int64_t> out;
    for (const auto& [index, member] : joined_) out.insert(index);
    return out;
  }

  std::vector<Joined> take(const std::function<bool(int64_t index)>& which) {
    std::vector<Joined> out;
    for (auto member = joined_.begin(); member != joined_.end();) {
      const auto at = member++;
      if (!which(at->first)) continue;
      out.push_back(std::move(at->second));
      joined_.erase(at);
    }
    return out;
  }

  std::string missing_text(const std::vector<int64_t>& missing) const {
    std::vector<std::string> names;
    for (const int64_t k : missing) {
      names.push_back(rules_.names.empty() ? fmt::format("host {}", k)
                                           : fmt::format("{} (host {})", rules_.names[static_cast<size_t>(k)], k));
    }
    return fmt::format("{} of {} hosts have not joined: {}", names.size(), rules_.hosts, fmt::join(names, ", "));
  }

 private:
  /// It joins, is refused, or is left.
  void listen_to(Guest guest, const Message& message) {
    const auto* const asks = std::get_if<hosts::Join>(&message.what);
    if (asks == nullptr ||
        !is_proof(asks->proof, rules_.token, "join", guest.nonce, json_text(asks->hello) + asks->nonce)) {
      guests_.complain(fmt::format("{}: does not know this run's token", guest.connection.peer()));
      // Without a proof: a stranger could pass one on to a host.
      ignore(guest.connection.send({hosts::Refused{"the proof of the run's token is wrong"}}),
             "it is refused either way");
      return;
    }
    const auto refuse = [&](const std::string& why, bool barred = false) {
      std::string proof = prove(rules_.token, "refused", asks->nonce, refusal_text(why, barred));
      ignore(guest.connection.send({hosts::Refused{why, barred, std::move(proof)}}), "it is refused either way");
    };
    const Result<Hello> read = hosts::decode_hello(asks->hello);
    if (!read.ok()) {
      return refuse(
          fmt::format("a hello of another version: all hosts run the same program ({})", read.error().message));
    }
    const Hello* const brought = &read.value();
    // A new start of an agent whose old one is not known to be gone yet: it comes again.
    if (rules_.present && rules_.present(brought->index)) return;
    const std::string barred = rules_.barred ? rules_.barred(*brought) : std::string();
    if (const std::string why = barred.empty() ? mismatch(*brought) : barred; !why.empty()) {
      say_(fmt::format("{} ({}) is refused: {}", brought->name, guest.connection.peer(), why));
      return refuse(why, !barred.empty());
    }
    if (rules_.doubts) {
      for (const std::string& doubt : rules_.doubts(*brought))
        say_(fmt::format("warning: {}: {}", brought->name, doubt));
    }
    guest.connection.trust();
    joined_.emplace(brought->index, Joined{*brought, guest.address, asks->nonce, std::move(guest.connection)});
  }

  std::string mismatch(const Hello& brought) const {
    const auto both = [](std::string_view what, const auto& here, const auto& there) {
      return fmt::format("{} {} there, {} at the leader", what, there, here);
    };
    if (brought.build != own_.build) {
      return both("another program:", own_.build, brought.build) + "; install the same on all hosts";
    }
    if (brought.recipe_hash != own_.recipe_hash) {
      return both("another recipe: hash", own_.recipe_hash, brought.recipe_hash) +
             "; the same file and the same --set on all hosts";
    }
    if (brought.computes != own_.computes) {
      return both("ranks compute by other means:", own_.computes, brought.computes) +
             "; the same devices, --device, --comm and --attention on all hosts";
    }
    if (brought.ranks != own_.ranks) {
      return both("another number of ranks: --nproc", own_.ranks, brought.ranks) + "; the same on all hosts";
    }
    if (brought.gid_types != own_.gid_types) {
      const auto word = [](const std::string& types) { return types.empty() ? std::string("no RoCE") : types; };
      return both("another type of GIDs at NCCL_IB_GID_INDEX:", word(own_.gid_types), word(brought.gid_types)) +
             "; these hosts cannot reach each other: an index of the same type on all hosts, or leave it out";
    }
    if (brought.index >= rules_.hosts) {
      return fmt::format("host {} of {}; they count from 0", brought.index, rules_.hosts);
    }
    const auto other = joined_.find(brought.index);
    if (brought.index == own_.index || other != joined_.end()) {
      return fmt::format("two agents are host {}: {} and {}; --host-index differs on each, one agent a host",
                         brought.index, brought.index == own_.index ? own_.name : other->second.hello.name,
                         brought.name);
    }
    return "";
  }

  const DoorRules rules_;
  const Hello own_;
  const std::function<void(std::string)> say_;
  Guests guests_;
  std::map<int64_t, Joined> joined_;
};

Door::Door(Listener listener, DoorRules rules, Hello own, std::function<void(std::string)> say)
    : impl_(std::make_unique<Impl>(std::move(listener), std::move(rules), std::move(own), std::move(say))) {}
Door::~Door() = default;
Door::Door(Door&&) noexcept = default;
Door& Door::operator=(Door&&) noexcept = default;

int64_t Door::port() const { return impl_->port(); }
void Door::serve(int wait_ms) { impl_->serve(wait_ms); }
std::set<int64_t> Door::joined() const { return impl_->joined(); }
std::vector<Joined> Door::take(const std::function<bool(int64_t index)>& which) { return impl_->take(which); }

Status Door::wait(const Missing& missing, int64_t deadline_ns, const std::function<bool()>& stopped) {
  for (;;) {
    const std::vector<int64_t> away = missing(joined());
    if (away.empty()) return {};
    if (asked(stopped)) return Error{ErrorCode::kStopped, "asked to stop"};
    if (steady_ns() >= deadline_ns) return Error{ErrorCode::kTimeout, impl_->missing_text(away)};
    serve(kLookMs);
  }
}

Welcome::Welcome(const Epoch& epoch, std::string token)
    : number_(epoch.number), text_(json_text(encode_epoch(epoch))), token_(std::move(token)) {}

void Welcome::send(Joined& member) const {
  ignore(member.connection.send({hosts::Welcome{text_, prove(token_, "welcome", member.nonce, text_)}, number_}),
         "the connection tells of its end");
}

void welcome(std::vector<Joined>& members, const Epoch& epoch, const std::string& token) {
  const Welcome one(epoch, token);
  for (Joined& member : members) one.send(member);
}

Result<Place> join(const std::string& leader, int64_t port, const std::filesystem::path& directory, const Hello& own,
                   int64_t deadline_ns, const std::function<bool()>& stopped, int64_t try_until_ns,
                   const std::function<bool()>& lives, const std::function<int64_t()>& at_door) {
  bool dead = false, barred = false;
  const auto given_up = [&] { return asked(stopped) || (dead = lives && steady_ns() >= try_until_ns && !lives()); };
  std::optional<Error> last;
  for (;;) {
    if (asked(stopped)) return Error{ErrorCode::kStopped, "asked to stop"};
    if (steady_ns() >= deadline_ns || (last && steady_ns() >= try_until_ns)) {
      return Error{ErrorCode::kTimeout,
                   fmt::format("the leader {} cannot be joined{}", leader, last ? ": " + last->message : "")};
    }
    auto joined = [&]() -> Result<Place> {
      // A host without power answers nothing: the lease tells sooner than the deadline.
      const auto unreachable = [&] { return asked(stopped) || (dead = lives && !lives()); };
      RT_TRY_SET(Connection connection, Connection::connect(leader, port,
                                                            std::min({deadline_ns, steady_after(kHandshakeS),
                                                                      std::max(try_until_ns, steady_after(kReachS))}),
                                                            unreachable));
      RT_TRY_SET(const Message challenge,
                 receive(connection, std::min(deadline_ns, steady_after(kHandshakeS)), given_up));
      if (std::holds_alternative<hosts::KeepsCopies>(challenge.what)) {
        return Error{ErrorCode::kUnavailable,
                     fmt::format("{}: an agent that keeps others' copies there, and does not lead", connection.peer())};
      }
      const auto* const greets = std::get_if<hosts::Challenge>(&challenge.what);
      if (greets == nullptr || greets->nonce.empty()) return unproved(connection, "no agent of cairn that leads a run");
      const int64_t tokens_until_ns = std::min({steady_after(kTokenWaitS), deadline_ns, try_until_ns});
      std::optional<std::string> token;
      for (;;) {
        RT_TRY_SET(token, read_token(directory));
        if (token && token_name(*token) == greets->token_name) break;
        if (asked(stopped)) return Error{ErrorCode::kStopped, "asked to stop"};
        if (steady_ns() >= tokens_until_ns) {
          return Error{
              ErrorCode::kUnavailable,
              fmt::format("{} of {} is not the folder of {}, which leads: its token is not there{}; the run folder "
                          "must be on storage that all hosts share, or another run leads there",
                          directory.string(), own.name, leader, token ? ", another run's is" : "")};
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
      const std::string own_nonce = random_hex();
      const json hello = hosts::encode_hello(own);
      const std::string own_proof = prove(*token, "join", greets->nonce, json_text(hello) + own_nonce);
      RT_TRY(connection.send({hosts::Join{hello, own_nonce, own_proof}}));
      connection.trust();
      RT_TRY_SET(const Message answer, receive(connection, at_door ? at_door() : deadline_ns, given_up));
      if (const auto* const refused = std::get_if<hosts::Refused>(&answer.what)) {
        const bool bars = refused->barred.value_or(false);
        if (!is_proof(refused->proof.value_or(""), *token, "refused", own_nonce, refusal_text(refused->why, bars))) {
          return unproved(connection, fmt::format("it refuses, and does not prove this run's token: {}",
                                                  printable_ascii(refused->why)));
        }
        barred = bars;
        return Error{barred ? ErrorCode::kUnavailable : ErrorCode::kInvalidInput,
                     fmt::format("refused by {}: {}", leader, refused->why)};
      }
      const auto* const taken = std::get_if<hosts::Welcome>(&answer.what);
      if (taken == nullptr || !is_proof(taken->proof, *token, "welcome", own_nonce, taken->epoch))
        return unproved(connection, "its welcome does not prove this run's token");
      RT_TRY_SET(Epoch decided, decode_epoch(json_or_nothing(taken->epoch)));
      return Place{std::move(decided), std::move(connection)};
    }();
    if (joined.ok()) return joined;
    if (dead) return Error{ErrorCode::kTimeout, fmt::format("{} does not answer, and lives no more", leader)};
    const ErrorCode code = joined.error().code;
    if (barred) return joined;
    if (code != ErrorCode::kUnavailable && code != ErrorCode::kPeerLost && code != ErrorCode::kTimeout) return joined;
    last = joined.error();
    std::this_thread::sleep_for(std::chrono::duration<double>(kConnectAgainS));
  }
}

}  // namespace cairn::cluster
