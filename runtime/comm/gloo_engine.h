#pragma once
// Ranks as processes of several hosts, over TCP with Gloo. Gloo moves the bytes (unbound buffers); the collectives are
// written here, so that reductions add in group-rank order and give the same bits as the shared-memory engine.
//
// Each group is a full mesh of connections among its members, who find each other by the rendezvous. A lost connection
// is kPeerLost, a silent peer kTimeout at the deadline, also while a group connects. A rank that fails publishes its
// reason and closes its connections, so the others fail too and can say why. After a failure the engine is dead; a new
// start needs a new rendezvous.

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/comm/comm.h"
#include "runtime/comm/rendezvous.h"
#include "runtime/core/result.h"

namespace cairn::comm {

struct GlooConfig {
  int64_t rank = 0;
  int64_t world_size = 1;
  std::string interface_address;           // this host's, as the others reach it: "10.0.0.7", "127.0.0.1"
  std::shared_ptr<Rendezvous> rendezvous;  // of this start of the world alone; the engine closes it
  Options options;
};

/// Errors: kInvalidInput for a rank out of range, an address that is not this host's, a rank that has started in this
/// rendezvous before; those of Rendezvous::publish(). Does not wait for other ranks: group() does.
/// SIGPIPE, where it has no handler, is ignored in the whole process from here on: Gloo's sockets raise it.
Result<std::unique_ptr<Engine>> make_gloo_engine(const GlooConfig& config);

}  // namespace cairn::comm
