#pragma once
// Rank mesh: (tp, dp, pp) coordinates <-> world rank, and the rank groups of each axis. Arithmetic, no communication.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/core/result.h"

namespace cairn {

struct Coords {
  int64_t tp = 0, dp = 0, pp = 0;
  bool operator==(const Coords&) const = default;
};

class Mesh {
 public:
  /// Errors: kInvalidInput when tp * pp * dp is not `world`; the message names the sizes that would fit.
  static Result<Mesh> make(const MeshConfig& config, int64_t world);

  int64_t world() const { return tp_ * dp_ * pp_; }
  int64_t tp() const { return tp_; }
  int64_t dp() const { return dp_; }
  int64_t pp() const { return pp_; }

  Coords coords(int64_t rank) const;
  int64_t rank(const Coords& coords) const;

  /// World ranks that share all coordinates of `rank` but the one on `axis`, ordered by that coordinate.
  std::vector<int64_t> group(MeshAxis axis, int64_t rank) const;

  /// The dp group cut into blocks of `size` neighbours, which must divide dp: the block that holds `rank`, and the
  /// ranks with its place in the other blocks (as many as there are blocks).
  std::vector<int64_t> shard_group(int64_t rank, int64_t size) const;
  std::vector<int64_t> replica_group(int64_t rank, int64_t size) const;

  /// The first- and last-stage ranks with this rank's (tp, dp): where a tied embedding lives. One rank when pp == 1.
  std::vector<int64_t> embedding_group(int64_t rank) const;

  std::string describe() const;  // "8 = tp 2 x dp 2 x pp 2"

 private:
  int64_t tp_ = 1, dp_ = 1, pp_ = 1;
  std::array<MeshAxis, 3> order_ = {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp};
  int64_t extent(MeshAxis axis) const;
};

std::string_view axis_name(MeshAxis axis);

}  // namespace cairn
