#pragma once
// How the agents of a run find each other. The leader listens; each member connects and proves that it knows the run's
// token; what they bring is compared; when all hosts are there the leader answers with the epoch.
//
//   leader -> member   challenge { nonce, token_name }
//   member -> leader   join { hello..., nonce, proof of the leader's nonce and of the hello }
//   leader -> member   welcome { epoch..., proof of the member's nonce and of the epoch },
//                      or refused { why, barred, proof of the member's nonce and of both }
//
// An answer without its proof makes no host leave: the member tries again, as after silence.
//
// A member whose run folder does not hold the leader's token asks again until its time is over: a shared folder may
// show a new file late, and another run may lead at that port until the own leader has told its port. Then it says that
// the folder is not shared, or that another run leads there. A connection that proves nothing, or is silent, costs the
// leader a place among its guests (guests.h) for kHandshakeS at most, and delays no host.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/cluster/connection.h"
#include "runtime/cluster/epoch_store.h"
#include "runtime/core/result.h"

namespace cairn::cluster {

inline constexpr double kHandshakeS = 10;  // from the connection to the join
inline constexpr double kReachS = 2;       // for a connection, at the least: one lost packet of it
inline constexpr double kTokenWaitS = 10;  // for the leader's token to appear in the run folder, of one connection
inline constexpr double kConnectAgainS = 0.05;

using hosts::Hello;

struct Joined {
  Hello hello;
  std::string address;  // as the leader sees it
  std::string nonce;    // of the member: the welcome answers it
  Connection connection;
};

/// Who may come in.
struct DoorRules {
  std::vector<std::string> names;  // of the hosts in order, for messages; empty where a launcher tells none
  int64_t hosts = 0;               // spares included
  std::string token;
  std::function<bool(int64_t index)> present;  // has come in before, and is not known to be gone; null: nobody has
  std::function<std::vector<std::string>(const Hello&)> doubts = {};  // told of one that joins all the same; null: none
  std::function<std::string(const Hello&)> barred;  // why it may not join at all; empty: it may. null: anybody may
};

/// The leader's side: where hosts come in. It is served while the leader waits for hosts, and now and then while it
/// leads. What does not fit is refused to the agent that brings it; `say` gets each such refusal once.
class Door {
 public:
  Door(Listener listener, DoorRules rules, Hello own, std::function<void(std::string)> say);
  ~Door();
  Door(Door&&) noexcept;
  Door& operator=(Door&&) noexcept;

  int64_t port() const;
  /// Waits so long for something to happen, and takes it.
  void serve(int wait_ms);
  /// Who has joined, and waits for the welcome. They may leave again, until they are taken.
  std::set<int64_t> joined() const;
  std::vector<Joined> take(const std::function<bool(int64_t index)>& which);

  /// Serves until nobody is missing. `missing`: of those who have not joined, whom the leader waits for. `stopped` is
  /// asked a few times a second; null: never. Errors: kTimeout naming the hosts that are missing; kStopped.
  using Missing = std::function<std::vector<int64_t>(const std::set<int64_t>& joined)>;
  Status wait(const Missing& missing, int64_t deadline_ns, const std::function<bool()>& stopped);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Sends each member the epoch, with the proof that only the leader can give. One that has left meanwhile is told of by
/// its connection.
void welcome(std::vector<Joined>& members, const Epoch& epoch, const std::string& token);

/// The same for one after the other: with a thousand members the epoch's text is long, and made once.
class Welcome {
 public:
  Welcome(const Epoch& epoch, std::string token);
  void send(Joined& member) const;

 private:
  int64_t number_;
  std::string text_, token_;
};

struct Place {
  Epoch epoch;
  Connection leader;
};

/// A member's side: tries while the leader does not answer yet, and begins no other try from `try_until_ns` on. From
/// then on a connected member waits while the leader lives (`lives`; null: it does), until the deadline; once it has
/// said that it joins, until the time that `at_door` gives: the leader may wait for its hosts longer than this one has
/// tried. `directory` is RUN/cluster. Errors: kInvalidInput in the leader's words; kTimeout: no leader, or one with
/// another token; kUnavailable: this host is barred; kStopped.
Result<Place> join(const std::string& leader, int64_t port, const std::filesystem::path& directory, const Hello& own,
                   int64_t deadline_ns, const std::function<bool()>& stopped, int64_t try_until_ns = INT64_MAX,
                   const std::function<bool()>& lives = {}, const std::function<int64_t()>& at_door = {});

}  // namespace cairn::cluster
