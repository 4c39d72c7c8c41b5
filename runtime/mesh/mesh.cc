#include "runtime/mesh/mesh.h"

#include <fmt/ranges.h>

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
    case MeshAxis::kCp:
      return "cp";
  }
  return "?";
}

int64_t wanted_world(const MeshConfig& mesh) { return mesh.tp * mesh.cp * mesh.pp * (mesh.dp > 0 ? mesh.dp : mesh.ep); }

namespace {

int64_t& place(Coords& at, MeshAxis axis) {
  return axis == MeshAxis::kTp ? at.tp : axis == MeshAxis::kDp ? at.dp : axis == MeshAxis::kPp ? at.pp : at.cp;
}

/// mesh.order with cp, which it need not name: then the tokens of a sequence lie next to tp.
std::vector<MeshAxis> whole_order(std::vector<MeshAxis> order) {
  if (order.size() != 3 || std::find(order.begin(), order.end(), MeshAxis::kCp) != order.end()) return order;
  const auto tp = std::find(order.begin(), order.end(), MeshAxis::kTp);
  order.insert(tp == order.end() ? tp : tp + 1, MeshAxis::kCp);
  return order;
}

}  // namespace

std::vector<Mistake> find_mistakes(const MeshConfig& config, int64_t world) {
  std::vector<Mistake> out;
  const std::string cp = config.cp > 1 ? fmt::format(" x cp {}", config.cp) : "";
  if (config.tp < 1 || config.pp < 1 || config.cp < 1 || config.ep < 1 || config.dp < 0 || world < 0) {
    const std::string field = config.tp < 1   ? "mesh.tp"
                              : config.pp < 1 ? "mesh.pp"
                              : config.cp < 1 ? "mesh.cp"
                              : config.ep < 1 ? "mesh.ep"
                                              : "mesh.dp";
    out.push_back({field, fmt::format("mesh tp {}{} x pp {} x dp {} of {} ranks: sizes must be >= 1", config.tp, cp,
                                      config.pp, config.dp, world)});
    return out;
  }
  const std::vector<MeshAxis> order = whole_order(config.order);
  if (const std::array all = {MeshAxis::kTp, MeshAxis::kCp, MeshAxis::kDp, MeshAxis::kPp};
      order.size() != all.size() || !std::is_permutation(order.begin(), order.end(), all.begin())) {
    out.push_back({"mesh.order", "mesh.order must name tp, dp and pp once each, and cp once or not",
                   "order { \"tp\", \"dp\", \"pp\" } or another order of them"});
  }
  const int64_t model_ranks = config.tp * config.cp * config.pp;
  int64_t dp = config.dp;
  if (world > 0 && config.dp != 0 && model_ranks * config.dp != world) {
    out.push_back({"mesh.dp",
                   fmt::format("mesh tp {}{} x pp {} x dp {} needs {} ranks, but {} were asked for", config.tp, cp,
                               config.pp, config.dp, model_ranks * config.dp, world),
                   world % model_ranks == 0 ? fmt::format("dp {}", world / model_ranks) : ""});
    return out;
  }
  if (world > 0 && world % model_ranks != 0) {
    const int64_t below = world / model_ranks * model_ranks;
    out.push_back(
        {config.pp != 1 && config.tp == 1 ? "mesh.pp" : "mesh.tp",
         fmt::format("{} ranks cannot be cut into mesh tp {}{} x pp {} = {} ranks a replica", world, config.tp, cp,
                     config.pp, model_ranks),
         fmt::format("a world of {}{} ranks", below > 0 ? fmt::format("{} or ", below) : "", below + model_ranks)});
    return out;
  }
  if (world > 0) dp = world / model_ranks;
  if (dp % config.ep != 0) {
    std::vector<int64_t> fitting;
    for (int64_t n = 1; n <= dp; ++n) {
      if (dp % n == 0) fitting.push_back(n);
    }
    out.push_back(
        {"mesh.ep",
         fmt::format("mesh.ep = {} does not divide dp = {}: data-parallel ranks divide the experts", config.ep, dp),
         fmt::format("ep {}", fmt::join(fitting, ", "))});
  }
  return out;
}

Result<Mesh> Mesh::make(const MeshConfig& config, int64_t world) {
  if (world < 1) {
    return Error{ErrorCode::kInvalidInput, fmt::format("a mesh of {} ranks: there must be 1 or more", world)};
  }
  if (const std::vector<Mistake> mistakes = find_mistakes(config, world); !mistakes.empty()) {
    return to_error(mistakes.front());
  }
  Mesh mesh;
  mesh.tp_ = config.tp;
  mesh.pp_ = config.pp;
  mesh.cp_ = config.cp;
  mesh.ep_ = config.ep;
  mesh.dp_ = world / (config.tp * config.cp * config.pp);
  const std::vector<MeshAxis> order = whole_order(config.order);
  std::copy(order.begin(), order.end(), mesh.order_.begin());
  return mesh;
}

int64_t Mesh::extent(MeshAxis axis) const {
  return axis == MeshAxis::kTp ? tp_ : axis == MeshAxis::kDp ? dp_ : axis == MeshAxis::kPp ? pp_ : cp_;
}

// On the dp axis replica e * dp/ep + i stands at i * ep + e: the ranks of an ep group next to each other.
Coords Mesh::coords(int64_t rank) const {
  Coords out;
  for (const MeshAxis axis : order_) {
    place(out, axis) = rank % extent(axis);
    rank /= extent(axis);
  }
  out.dp = out.dp % ep_ * (dp_ / ep_) + out.dp / ep_;
  return out;
}

int64_t Mesh::rank(const Coords& coords) const {
  Coords at = coords;
  at.dp = coords.dp % (dp_ / ep_) * ep_ + coords.dp / (dp_ / ep_);
  int64_t out = 0, stride = 1;
  for (const MeshAxis axis : order_) {
    out += stride * place(at, axis);
    stride *= extent(axis);
  }
  return out;
}

std::vector<int64_t> Mesh::group(MeshAxis axis, int64_t rank) const {
  std::vector<int64_t> out;
  Coords at = coords(rank);
  for (int64_t k = 0; k < extent(axis); ++k) {
    place(at, axis) = k;
    out.push_back(this->rank(at));
  }
  return out;
}

std::vector<int64_t> Mesh::expert_group(int64_t rank) const {
  std::vector<int64_t> out;
  Coords at = coords(rank);
  const int64_t part = dp_ / ep_, in_part = at.dp % part;
  for (int64_t e = 0; e < ep_; ++e) {
    at.dp = e * part + in_part;
    out.push_back(this->rank(at));
  }
  return out;
}

std::vector<int64_t> Mesh::all_replicas(int64_t rank) const {
  std::vector<int64_t> out;
  Coords at = coords(rank);
  for (at.dp = 0; at.dp < dp_; ++at.dp) {
    for (at.cp = 0; at.cp < cp_; ++at.cp) out.push_back(this->rank(at));
  }
  return out;
}

std::vector<int64_t> Mesh::shard_group(int64_t rank, int64_t size) const {
  const std::vector<int64_t> all = all_replicas(rank);
  const auto first = all.begin() + replica(coords(rank)) / size * size;
  return {first, first + size};
}

std::vector<int64_t> Mesh::replica_group(int64_t rank, int64_t size, bool experts) const {
  const std::vector<int64_t> all = all_replicas(rank);
  const int64_t mine = replica(coords(rank)), part = experts ? expert_replicas() : replicas();
  std::vector<int64_t> out;
  const int64_t first = mine / part * part;
  for (int64_t r = first + (mine - first) % size; r < first + part; r += size) out.push_back(all[r]);
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

std::string Mesh::describe() const {
  return fmt::format("{} = tp {}{} x dp {}{} x pp {}", world(), tp_, cp_ > 1 ? fmt::format(" x cp {}", cp_) : "", dp_,
                     ep_ > 1 ? fmt::format(" (ep {})", ep_) : "", pp_);
}

}  // namespace cairn
