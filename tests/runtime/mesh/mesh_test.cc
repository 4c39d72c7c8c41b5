#include "runtime/mesh/mesh.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

using namespace cairn;

TEST_SUITE("runtime/mesh/mesh") {
  TEST_CASE("coordinates and ranks are inverse for every order, and groups tile the world") {
    std::vector<MeshAxis> order = {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp};
    do {
      MeshConfig config{.tp = 2, .pp = 3, .dp = 0, .order = order};
      const Mesh mesh = Mesh::make(config, 24).value();
      CHECK(mesh.dp() == 4);
      for (const MeshAxis axis : order) {
        std::set<std::vector<int64_t>> groups;
        for (int64_t rank = 0; rank < 24; ++rank) {
          REQUIRE(mesh.rank(mesh.coords(rank)) == rank);
          groups.insert(mesh.group(axis, rank));
        }
        std::set<int64_t> members;
        for (const auto& group : groups) members.insert(group.begin(), group.end());
        CHECK(members.size() == 24);
        CHECK(groups.size() * groups.begin()->size() == 24);
      }
    } while (std::next_permutation(order.begin(), order.end()));
  }

  TEST_CASE("the default order puts tensor-parallel ranks side by side") {
    const Mesh mesh = Mesh::make(MeshConfig{.tp = 2, .pp = 2}, 8).value();
    CHECK(mesh.group(MeshAxis::kTp, 0) == std::vector<int64_t>{0, 1});
    CHECK(mesh.group(MeshAxis::kDp, 0) == std::vector<int64_t>{0, 2});
    CHECK(mesh.group(MeshAxis::kPp, 1) == std::vector<int64_t>{1, 5});
    CHECK(mesh.embedding_group(3) == std::vector<int64_t>{3, 7});
  }

  TEST_CASE("shard groups are neighbours in dp, replica groups have one rank of each") {
    // BloombergGPT's shape, smaller: 4 replicas of what 128 ranks hold.
    const Mesh bloomberg = Mesh::make(MeshConfig{}, 512).value();
    for (int64_t rank = 0; rank < 512; ++rank) {
      const std::vector<int64_t> shard = bloomberg.shard_group(rank, 128), replica = bloomberg.replica_group(rank, 128);
      REQUIRE(shard.size() == 128);
      REQUIRE(shard.front() == rank / 128 * 128);
      REQUIRE(shard.back() == shard.front() + 127);
      REQUIRE(replica == std::vector<int64_t>{rank % 128, rank % 128 + 128, rank % 128 + 256, rank % 128 + 384});
    }
    const Mesh mesh = Mesh::make(MeshConfig{.tp = 2, .pp = 2}, 16).value();  // dp 4, tp fastest
    CHECK(mesh.shard_group(1, 2) == std::vector<int64_t>{1, 3});
    CHECK(mesh.shard_group(13, 2) == std::vector<int64_t>{13, 15});
    CHECK(mesh.replica_group(13, 2) == std::vector<int64_t>{9, 13});
    CHECK(mesh.shard_group(5, 4) == mesh.group(MeshAxis::kDp, 5));
    CHECK(mesh.replica_group(5, 4) == std::vector<int64_t>{5});
    CHECK(mesh.shard_group(5, 1) == std::vector<int64_t>{5});
    CHECK(mesh.replica_group(5, 1) == mesh.group(MeshAxis::kDp, 5));
  }

  TEST_CASE("groups of experts: neighbours among the ranks, a part's replicas in a row, coordinates still inverse") {
    const Mesh mesh = Mesh::make(MeshConfig{.ep = 2}, 8).value();
    CHECK(mesh.expert_group(0) == std::vector<int64_t>{0, 1});
    CHECK(mesh.expert_group(5) == std::vector<int64_t>{4, 5});
    CHECK(mesh.expert_part(mesh.coords(4)) == 0);
    CHECK(mesh.expert_part(mesh.coords(5)) == 1);
    CHECK(mesh.group(MeshAxis::kDp, 3) == std::vector<int64_t>{0, 2, 4, 6, 1, 3, 5, 7});  // in the order of the batch
    CHECK(mesh.shard_group(3, 4) == std::vector<int64_t>{1, 3, 5, 7});
    CHECK(mesh.replica_group(3, 1, true) == std::vector<int64_t>{1, 3, 5, 7});
    CHECK(mesh.replica_group(3, 2, true) == std::vector<int64_t>{3, 7});
    CHECK(mesh.replica_group(3, 4, true) == std::vector<int64_t>{3});
    CHECK(mesh.replica_group(3, 4) == std::vector<int64_t>{2, 3});
    CHECK(mesh.describe() == "8 = tp 1 x dp 8 (ep 2) x pp 1");

    for (const int64_t ep : {1, 2, 3, 6}) {
      for (const int64_t cp : {1, 2}) {
        std::vector<MeshAxis> order = {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp};
        do {
          const int64_t world = 2 * cp * 6 * 2;
          const Mesh any = Mesh::make(MeshConfig{.tp = 2, .pp = 2, .order = order, .ep = ep, .cp = cp}, world).value();
          std::set<std::vector<int64_t>> groups;
          for (int64_t rank = 0; rank < world; ++rank) {
            const Coords at = any.coords(rank);
            REQUIRE(any.rank(at) == rank);
            const std::vector<int64_t> group = any.expert_group(rank);
            REQUIRE(static_cast<int64_t>(group.size()) == ep);
            REQUIRE(group[any.expert_part(at)] == rank);
            for (const int64_t member : group) {
              const Coords other = any.coords(member);
              REQUIRE((other.tp == at.tp && other.pp == at.pp && other.cp == at.cp));
            }
            groups.insert(group);
            for (const int64_t same : any.replica_group(rank, 1, true)) {
              REQUIRE(any.expert_part(any.coords(same)) == any.expert_part(at));
            }
            REQUIRE(static_cast<int64_t>(any.replica_group(rank, 1, true).size()) == any.expert_replicas());
          }
          CHECK(static_cast<int64_t>(groups.size()) * ep == world);
        } while (std::next_permutation(order.begin(), order.end()));
      }
    }
    const auto refused = Mesh::make(MeshConfig{.ep = 4}, 6);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message ==
          "mesh.ep = 4 does not divide dp = 6: data-parallel ranks divide the experts; accepted: ep 1, 2, 3, 6");
  }

  TEST_CASE("a world that the mesh cannot cut is refused with the nearest ones that it can") {
    const auto mesh = Mesh::make(MeshConfig{.tp = 2, .pp = 2}, 10);
    REQUIRE_FALSE(mesh.ok());
    CHECK(mesh.error().message ==
          "10 ranks cannot be cut into mesh tp 2 x pp 2 = 4 ranks a replica; accepted: a world of 8 or 12 ranks");
  }
}
