#include "runtime/comm/hybrid_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "runtime/comm/chain_comm.h"
#include "runtime/comm/exact_comm.h"
#include "runtime/comm/group.h"
#include "runtime/comm/linked_engine.h"
#include "runtime/comm/shm_world.h"

namespace cairn::comm {
namespace {

/// The two engines of one rank; also held by its groups.
struct Pair {
  std::shared_ptr<LinkedEngine> local, remote;
};

/// A group of one engine, which dies with the other engine too.
class HybridComm final : public Comm {
 public:
  HybridComm(std::shared_ptr<LinkedEngine> mine, std::shared_ptr<LinkedEngine> other, std::unique_ptr<Comm> comm)
      : mine_(std::move(mine)), other_(std::move(other)), comm_(std::move(comm)) {}

  int64_t rank() const override { return comm_->rank(); }
  int64_t size() const override { return comm_->size(); }
  const std::string& name() const override { return comm_->name(); }
  Traffic traffic() const override { return comm_->traffic(); }

  Status all_reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) override {
    return run("all_reduce", what, [&] { return comm_->all_reduce(data, count, dtype, op, what); });
  }
  Status reduce_scatter(const void* input, void* output, int64_t count_per_rank, DType dtype, ReduceOp op,
                        std::string_view what) override {
    return run("reduce_scatter", what,
               [&] { return comm_->reduce_scatter(input, output, count_per_rank, dtype, op, what); });
  }
  Status reduce_scatter_add(const void* input, void* output, int64_t count_per_rank, DType dtype, int64_t tree,
                            std::string_view what) override {
    return run("reduce_scatter_add", what,
               [&] { return comm_->reduce_scatter_add(input, output, count_per_rank, dtype, tree, what); });
  }
  Status all_gather(const void* input, void* output, int64_t bytes_per_rank, std::string_view what) override {
    return run("all_gather", what, [&] { return comm_->all_gather(input, output, bytes_per_rank, what); });
  }
  Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) override {
    return run("broadcast", what, [&] { return comm_->broadcast(data, bytes, root, what); });
  }
  Status all_to_all(std::span<const OutPart> out, std::span<const InPart> in, std::string_view what) override {
    return run("all_to_all", what, [&] { return comm_->all_to_all(out, in, what); });
  }
  Status barrier(std::string_view what) override {
    return run("barrier", what, [&] { return comm_->barrier(what); });
  }
  Status isend(const void* data, int64_t bytes, int64_t dst, std::string_view what) override {
    return run("isend", what, [&] { return comm_->isend(data, bytes, dst, what); });
  }
  Status recv(void* data, int64_t bytes, int64_t src, std::string_view what) override {
    return run("recv", what, [&] { return comm_->recv(data, bytes, src, what); });
  }
  Status wait_sends(std::string_view what) override {
    return run("wait_sends", what, [&] { return comm_->wait_sends(what); });
  }
  Status wait_sends_to(int64_t dst, int64_t may_stay, std::string_view what) override {
    return run("wait_sends_to", what, [&] { return comm_->wait_sends_to(dst, may_stay, what); });
  }

 private:
  template <typename Call>
  Status run(std::string_view op, std::string_view what, const Call& call) {
    if (auto reason = other_->dead()) {
      mine_->give_up(reason->code, reason->message);
      if (reason->code != ErrorCode::kStopped) reason->code = ErrorCode::kPeerLost;
      return std::move(*reason).with(Site{comm_->name(), op, what}.text());
    }
    Status status = call();
    if (!status.ok()) {  // a refused argument leaves the engine alive
      if (const auto reason = mine_->dead()) other_->give_up(reason->code, reason->message);
    }
    return status;
  }

  const std::shared_ptr<LinkedEngine> mine_, other_;
  const std::unique_ptr<Comm> comm_;
};

class HybridEngine final : public LinkedEngine {
 public:
  HybridEngine(Pair pair, std::vector<int64_t> host_of_rank)
      : pair_(std::move(pair)), host_of_rank_(std::move(host_of_rank)) {}

  int64_t world_rank() const override { return pair_.remote->world_rank(); }
  int64_t world_size() const override { return pair_.remote->world_size(); }

  bool keeps_rank_order() const override { return pair_.local->keeps_rank_order() && pair_.remote->keeps_rank_order(); }

  Result<std::unique_ptr<Comm>> group(std::string_view axis, const std::vector<int64_t>& world_ranks) override {
    RT_TRY(check_group(axis, world_ranks, world_size(), world_rank()));
    if (world_ranks.size() == 1) return make_single_comm(group_name(axis, world_ranks));
    const int64_t host = host_of(world_rank());
    if (std::ranges::all_of(world_ranks, [&](int64_t rank) { return host_of(rank) == host; })) {
      return whole_group(axis, world_ranks, pair_.local, pair_.remote);
    }
    RT_TRY_SET(auto flat, whole_group(axis, world_ranks, pair_.remote, pair_.local));
    const int64_t members = members_of_each_host(world_ranks);
    if (members < 2) return flat;
    const int64_t self = std::ranges::find(world_ranks, world_rank()) - world_ranks.begin();
    std::vector<int64_t> here, lane;
    for (int64_t i = 0; i < std::ssize(world_ranks); ++i) {
      const int64_t rank = world_ranks[static_cast<size_t>(i)];
      if (i / members == self / members) here.push_back(rank);
      if (i % members == self % members) lane.push_back(rank);
    }
    ChainGroups parts{.flat = std::move(flat)};
    RT_TRY_SET(parts.host, whole_group(axis, here, pair_.local, pair_.remote));
    RT_TRY_SET(parts.lane, whole_group(axis, lane, pair_.remote, pair_.local));
    return make_chain_comm(std::move(parts));
  }

  Result<std::unique_ptr<Comm>> exact_group(std::string_view axis, const std::vector<int64_t>& world_ranks) override {
    RT_TRY(check_group(axis, world_ranks, world_size(), world_rank()));
    HostsGroups parts;
    std::vector<int64_t> here, firsts;
    for (size_t i = 0; i < world_ranks.size(); ++i) {
      const int64_t rank = world_ranks[i];
      const bool begins = i == 0 || host_of(rank) != host_of(world_ranks[i - 1]);
      if (begins) firsts.push_back(rank);
      parts.host_of.push_back(std::ssize(firsts) - 1);
      parts.rank_on_host.push_back(begins ? 0 : parts.rank_on_host.back() + 1);
      if (host_of(rank) == host_of(world_rank())) here.push_back(rank);
    }
    std::set<int64_t> hosts;
    for (const int64_t first : firsts) hosts.insert(host_of(first));
    const bool in_order = hosts.size() == firsts.size();
    if (!in_order || firsts.size() == 1 || firsts.size() == world_ranks.size()) {
      return Engine::exact_group(axis, world_ranks);
    }
    RT_TRY_SET(parts.host, group(axis, here));
    if (here.front() == world_rank()) {
      RT_TRY_SET(parts.between, group(axis, firsts));
    }
    const auto self = std::ranges::find(world_ranks, world_rank()) - world_ranks.begin();
    return make_hosts_comm(group_name(axis, world_ranks), self, std::move(parts));
  }

  void abort(std::string_view reason) override {
    pair_.remote->abort(reason);
    pair_.local->abort(reason);
  }
  void give_up(ErrorCode code, std::string_view reason) override {
    pair_.remote->give_up(code, reason);
    pair_.local->give_up(code, reason);
  }
  void at(int64_t step, std::string_view phase) override { pair_.local->at(step, phase); }
  std::optional<Error> dead() override {
    std::optional<Error> reason = pair_.local->dead();
    return reason ? reason : pair_.remote->dead();
  }
  void operation_begins(const Site& site) override { pair_.local->operation_begins(site); }
  void operation_ends() override { pair_.local->operation_ends(); }
  void operation_awaits(int64_t rank) override { pair_.local->operation_awaits(rank); }
  std::optional<Seen> look_at(int64_t world_rank) override { return pair_.local->look_at(world_rank); }

 private:
  int64_t host_of(int64_t rank) const { return host_of_rank_[static_cast<size_t>(rank)]; }

  /// If equally many on each host follow each other, how many; else 0.
  int64_t members_of_each_host(const std::vector<int64_t>& world_ranks) const {
    std::vector<int64_t> members;  // of each host, in order
    std::set<int64_t> hosts;
    for (size_t i = 0; i < world_ranks.size(); ++i) {
      if (i == 0 || host_of(world_ranks[i]) != host_of(world_ranks[i - 1])) {
        members.push_back(0);
        if (!hosts.insert(host_of(world_ranks[i])).second) return 0;
      }
      ++members.back();
    }
    return std::ranges::all_of(members, [&](int64_t n) { return n == members.front(); }) ? members.front() : 0;
  }

  /// A group of `mine`, which dies with `other` too.
  static Result<std::unique_ptr<Comm>> whole_group(std::string_view axis, const std::vector<int64_t>& world_ranks,
                                                   const std::shared_ptr<LinkedEngine>& mine,
                                                   const std::shared_ptr<LinkedEngine>& other) {
    auto made = mine->group(axis, world_ranks);
    if (!made.ok()) {
      if (const auto reason = mine->dead()) other->give_up(reason->code, reason->message);
      return std::move(made).error();
    }
    return std::unique_ptr<Comm>(std::make_unique<HybridComm>(mine, other, std::move(made).value()));
  }

  const Pair pair_;
  const std::vector<int64_t> host_of_rank_;
};

}  // namespace

Result<std::unique_ptr<Engine>> make_hybrid_engine(const HybridConfig& config) {
  const auto hosts = static_cast<int64_t>(config.host_of_rank.size());
  if (hosts != config.gloo.world_size) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("hosts are given for {} ranks, the world has {}", hosts, config.gloo.world_size)};
  }
  RT_TRY_SET(auto local, attach_linked_shm_engine(config.shm_fd, config.gloo.rank, config.gloo.options));
  if (local->world_size() != hosts) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("the shared memory of this host is for a world of {} ranks, this one has {}",
                             local->world_size(), hosts)};
  }
  Pair pair;
  pair.local = std::move(local);
  RT_TRY_SET(auto remote, make_linked_gloo_engine(config.gloo, pair.local));
  pair.remote = std::move(remote);
  return std::unique_ptr<Engine>(std::make_unique<HybridEngine>(std::move(pair), config.host_of_rank));
}

}  // namespace cairn::comm
