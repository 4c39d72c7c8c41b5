#pragma once
// Who leads a run, and with whom: a record for each epoch in RUN/cluster, epoch-00000007.json. The record of an epoch
// is made once, by link(2) of a complete temporary file, which is atomic at the server of a shared folder where flock
// is not. Whoever links epoch N + 1 leads it; the others find it taken, read it, and join or leave.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::cluster {

inline constexpr int64_t kMostEpoch = 99'999'999;  // eight digits of a file's name

struct Member {
  std::string name, address, boot_id;  // host name, address that others reach it by, /proc/sys/kernel/random/boot_id
  int64_t index = 0;                   // of the launcher's hosts, spares included
  bool operator==(const Member&) const = default;
};

struct Epoch {
  int64_t number = 1;
  int64_t leader = 0;           // of members: its place
  int64_t port = 0;             // on which the leader's agent listens
  std::string incarnation;      // of the leader's agent: another start of the same host is another leader
  std::vector<Member> members;  // those that train, by their place: rank = place * ranks_per_host + local rank
  int64_t ranks_per_host = 0;
  std::string recipe_hash, build, reason;
  bool operator==(const Epoch&) const = default;
};

class EpochStore {
 public:
  /// Makes `directory` when missing.
  static Result<EpochStore> open(std::filesystem::path directory);

  /// nullopt: no epoch yet. Errors: kCorrupt: a record that cannot be read, with its file.
  Result<std::optional<Epoch>> newest() const;
  /// True: this call made the record; false: the epoch has one already. The record is on disk when this returns.
  Result<bool> claim(const Epoch& epoch) const;

 private:
  explicit EpochStore(std::filesystem::path directory) : directory_(std::move(directory)) {}
  std::filesystem::path directory_;
};

}  // namespace cairn::cluster
