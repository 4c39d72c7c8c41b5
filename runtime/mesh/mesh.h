#pragma once
// Rank mesh: (tp, cp, dp, pp) coordinates <-> world rank, and the rank groups of each axis. Arithmetic, no
// communication.
//
// Replicas. All ranks of dp and cp hold the same dense parameters: the dp x cp replicas, numbered dp * cp ranks + cp,
// divide what ZeRO divides. Experts are held by the ranks of one part of dp only: dp is cut into ep parts of dp / ep
// neighbours, whose replicas are numbered in a row too, and ranks with the same place in each part make an ep group,
// which holds all experts. Among the world ranks the members of an ep group are neighbours on the dp axis, since they
// exchange most; the number of a replica says which samples it takes.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/layout.h"
#include "runtime/config/mistake.h"
#include "runtime/core/result.h"

namespace cairn {

struct Coords {
  int64_t tp = 0, dp = 0, pp = 0, cp = 0;
  bool operator==(const Coords&) const = default;
};

/// Why `world` ranks (0: unknown) cannot have this mesh: sizes below 1, an order that lacks an axis, tp * cp * pp * dp
/// that is not `world`, ep that does not divide dp. Pure.
std::vector<Mistake> find_mistakes(const MeshConfig& config, int64_t world);

class Mesh {
 public:
  /// Errors: kInvalidInput, the first of find_mistakes().
  static Result<Mesh> make(const MeshConfig& config, int64_t world);

  int64_t world() const { return tp_ * cp_ * dp_ * pp_; }
  int64_t tp() const { return tp_; }
  int64_t dp() const { return dp_; }
  int64_t pp() const { return pp_; }
  int64_t cp() const { return cp_; }
  int64_t ep() const { return ep_; }
  int64_t replicas() const { return dp_ * cp_; }
  int64_t expert_replicas() const { return replicas() / ep_; }

  Coords coords(int64_t rank) const;
  int64_t rank(const Coords& coords) const;

  /// World ranks that share all coordinates of `rank` but the one on `axis`, ordered by that coordinate.
  std::vector<int64_t> group(MeshAxis axis, int64_t rank) const;

  /// Number of its replica, and which part of the experts it holds.
  int64_t replica(const Coords& at) const { return at.dp * cp_ + at.cp; }
  int64_t expert_part(const Coords& at) const { return at.dp / (dp_ / ep_); }
  /// The ranks that hold all experts together, in the order of their parts.
  std::vector<int64_t> expert_group(int64_t rank) const;

  /// The replicas cut into blocks of `size`, which must divide their number: the block that holds `rank`, and the ranks
  /// with its place in the other blocks. With experts those of its part alone: `size` must divide expert_replicas().
  std::vector<int64_t> shard_group(int64_t rank, int64_t size) const;
  std::vector<int64_t> replica_group(int64_t rank, int64_t size, bool experts = false) const;

  /// The first- and last-stage ranks with this rank's (tp, dp): where a table of embeddings that both read lives. One
  /// rank when pp == 1.
  std::vector<int64_t> embedding_group(int64_t rank) const;

  std::string describe() const;  // "8 = tp 2 x dp 2 x pp 2", "8 = tp 1 x cp 2 x dp 4 (ep 2) x pp 1"

 private:
  int64_t tp_ = 1, dp_ = 1, pp_ = 1, cp_ = 1, ep_ = 1;
  std::array<MeshAxis, 4> order_ = {MeshAxis::kTp, MeshAxis::kCp, MeshAxis::kDp, MeshAxis::kPp};
  int64_t extent(MeshAxis axis) const;
  std::vector<int64_t> all_replicas(int64_t rank) const;
};

std::string_view axis_name(MeshAxis axis);

/// Ranks that a mesh asks for; with dp = 0, as few as it can be.
int64_t wanted_world(const MeshConfig& mesh);

}  // namespace cairn
