#pragma once
// Who leads a run, and with whom: a record for each epoch, made once. Whoever makes the record of epoch N + 1 leads it;
// the others find it taken, read it, and join or leave. Beside it the leader shows a sign of life (lease.h).
//
// Two stores keep that: a folder which all hosts share (folder_store.h) and etcd (etcd_store.h). One suite of tests
// runs against both (tests/runtime/cluster/store_suite.h).

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/http/client.h"

namespace cairn::cluster {

inline constexpr int64_t kMostEpoch = 99'999'999;  // eight digits of a file's name

struct Member {
  std::string name, address, boot_id;  // host name, address that others reach it by, /proc/sys/kernel/random/boot_id
  int64_t index = 0;                   // of the launcher's hosts, spares included
  bool operator==(const Member&) const = default;
};

/// Why the first epoch of a start begins: all have the places that they had, or those of their order.
inline constexpr const char* kStartsRun = "start";

struct Epoch {
  int64_t number = 1;
  int64_t leader = 0;           // of members: its place
  int64_t port = 0;             // on which the leader's agent listens
  std::string incarnation;      // of the leader's agent: another start of the same host is another leader
  std::vector<Member> members;  // those that train, by their place: rank = place * ranks_per_host + local rank
  int64_t ranks_per_host = 0;
  std::string recipe_hash, build, reason;
  bool operator==(const Epoch&) const = default;

  /// Whether the run goes on without what an agent that died left of these ranks (from `first`, of a world so large) on
  /// a machine of this boot id: since the run's start another machine has got their place, or there are more hosts or
  /// fewer. False in a start's first epoch, whose hosts may yet be asked for it.
  bool goes_on_without(int64_t first, int64_t world, std::string_view boot_id) const;
};

/// Threads: any, also several at once. Each call ends within some seconds, whatever the store does.
class EpochStore {
 public:
  virtual ~EpochStore() = default;

  /// nullopt: no epoch yet. Errors: kCorrupt: a record that cannot be read, with where it is; kTimeout: a store that
  /// does not answer.
  virtual Result<std::optional<Epoch>> newest() = 0;
  /// True: this call made the record; false: the epoch has one already, or a later one has. The record is durable when
  /// this returns. Errors: those of the store; the record may have been made yet.
  virtual Result<bool> claim(const Epoch& epoch) = 0;

  /// The leader's sign of life, which replaces the one before.
  virtual Status show(const std::string& sign) = 0;
  /// The last one that was shown; empty: none. Errors: the store does not answer, which says nothing of the leader.
  virtual Result<std::string> shown() = 0;
  /// So long shown() may be an old sign while newer ones are shown.
  virtual double stale_s() const = 0;
};

struct StoreOptions {
  std::vector<std::string> endpoints;  // of etcd, HOST:PORT of each member; empty: the folder
  std::optional<http::Tls> tls;        // of etcd; none: http
};

/// `directory`: RUN/cluster. It is made when missing, and so is its token, whose name tells runs apart in etcd. Asks
/// nothing of etcd yet. Errors: kInvalidInput: a certificate or key that cannot be read.
Result<std::shared_ptr<EpochStore>> open_store(const StoreOptions& options, const std::filesystem::path& directory);

}  // namespace cairn::cluster
