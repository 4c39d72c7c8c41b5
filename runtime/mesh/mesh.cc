#include "runtime/mesh/mesh.h"

#include <algorithm>

namespace cairn {

std::string_view axis_name(MeshAxis axis) {
  switch (axis) {
    case MeshAxis::kTp:
      return "tp";
    case MeshAxis::kDp:
      return "dp";
    case MeshAxis::kPp:
      return "pp";
  }
  return "?";
}

Result<Mesh> Mesh::make(const MeshConfig& config, int64_t world) {
  const int64_t model_ranks = config.tp * config.pp;
  if (config.tp < 1 || config.pp < 1 || config.dp < 0 || world < 1) {
    return Error{ErrorCode::kInvalidInput, fmt::format("mesh tp {} x pp {} x dp {} of {} ranks: sizes must be >= 1",
                                                       config.tp, config.pp, config.dp, world)};
  }
  if (world % model_ranks != 0 || (config.dp != 0 && model_ranks * config.dp != world)) {
    const int64_t below = world / model_ranks * model_ranks;
    return Error{ErrorCode::kInvalidInput,
                 config.dp != 0 ? fmt::format("mesh tp {} x pp {} x dp {} needs {} ranks, but {} were asked for",
                                              config.tp, config.pp, config.dp, model_ranks * config.dp, world)
                                : fmt::format("{} ranks cannot be cut into mesh tp {} x pp {} = {} ranks a replica; "
                                              "nearest worlds: {}{}",
                                              world, config.tp, config.pp, model_ranks,
                                              below > 0 ? fmt::format("{}, ", below) : "", below + model_ranks)};
  }
  Mesh mesh;
  mesh.tp_ = config.tp;
  mesh.pp_ = config.pp;
  mesh.dp_ = world / model_ranks;
  if (config.order.size() != 3 || !std::is_permutation(config.order.begin(), config.order.end(), mesh.order_.begin())) {
    return Error{ErrorCode::kInvalidInput, "mesh.order must name tp, dp and pp once each"};
  }
  std::copy(config.order.begin(), config.order.end(), mesh.order_.begin());
  return mesh;
}

int64_t Mesh::extent(MeshAxis axis) const { return axis == MeshAxis::kTp ? tp_ : axis == MeshAxis::kDp ? dp_ : pp_; }

Coords Mesh::coords(int64_t rank) const {
  Coords out;
  for (const MeshAxis axis : order_) {
    const int64_t at = rank % extent(axis);
    rank /= extent(axis);
    (axis == MeshAxis::kTp ? out.tp : axis == MeshAxis::kDp ? out.dp : out.pp) = at;
  }
  return out;
}

int64_t Mesh::rank(const Coords& coords) const {
  int64_t out = 0, stride = 1;
  for (const MeshAxis axis : order_) {
    out += stride * (axis == MeshAxis::kTp ? coords.tp : axis == MeshAxis::kDp ? coords.dp : coords.pp);
    stride *= extent(axis);
  }
  return out;
}

std::vector<int64_t> Mesh::group(MeshAxis axis, int64_t rank) const {
  std::vector<int64_t> out;
  Coords at = coords(rank);
  for (int64_t k = 0; k < extent(axis); ++k) {
    (axis == MeshAxis::kTp ? at.tp : axis == MeshAxis::kDp ? at.dp : at.pp) = k;
    out.push_back(this->rank(at));
  }
  return out;
}

std::vector<int64_t> Mesh::shard_group(int64_t rank, int64_t size) const {
  const std::vector<int64_t> all = group(MeshAxis::kDp, rank);
  const auto first = all.begin() + coords(rank).dp / size * size;
  return {first, first + size};
}

std::vector<int64_t> Mesh::replica_group(int64_t rank, int64_t size) const {
  const std::vector<int64_t> all = group(MeshAxis::kDp, rank);
  std::vector<int64_t> out;
  for (int64_t d = coords(rank).dp % size; d < dp_; d += size) out.push_back(all[d]);
  return out;
}

std::vector<int64_t> Mesh::embedding_group(int64_t rank) const {
  Coords at = coords(rank);
  at.pp = 0;
  std::vector<int64_t> out = {this->rank(at)};
  if (pp_ > 1) {
    at.pp = pp_ - 1;
    out.push_back(this->rank(at));
  }
  return out;
}

std::string Mesh::describe() const { return fmt::format("{} = tp {} x dp {} x pp {}", world(), tp_, dp_, pp_); }

}  // namespace cairn
