#pragma once
// The rules of a cluster file: what its fields demand of each other, and what a mesh demands of the hosts it is laid
// over. As the rules of a recipe (recipe_rules.h): the reader adds file and line. Pure.

#include <optional>
#include <string>
#include <vector>

#include "runtime/config/cluster.h"
#include "runtime/config/mistake.h"
#include "runtime/mesh/mesh.h"

namespace cairn {

/// All mistakes of a file, each once.
std::vector<Mistake> find_mistakes(const ClusterConfig& cluster, const FieldNotes& notes = {});

/// A mesh of cluster.world() ranks, of which host k has ranks [k n, (k + 1) n): its groups of tp and of cp lie on one
/// host each, unless groups_cross_hosts.
std::vector<Mistake> find_mistakes(const ClusterConfig& cluster, const Mesh& mesh);

/// How ClusterConfig::store names an etcd: etcd://h0:2379,h1:2379, etcds:// with TLS.
struct EtcdAddress {
  std::vector<std::string> endpoints;  // HOST:PORT of each member
  bool tls = false;
};
/// nullopt: it names none.
std::optional<EtcdAddress> etcd_address(const std::string& store);

}  // namespace cairn
