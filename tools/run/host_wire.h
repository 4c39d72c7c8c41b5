#pragma once
// What the agents of a run tell each other, as JSON. Of what comes, nothing is believed to be there or of its type.
//
//   leader -> host   give { slot, to }          the copy that it holds of a bank goes to another host (replicas.h);
//                                              answered with given {}, or given { error }
//                    replicated { incarnation, step }, unreplicated { incarnation, step }  all hosts have copied it, or
//                                              one has not
//                    begin { segment, place, leader }  what is trained from here on, and the places of the host and of
//                    who
//                                              leads; the host opens its memory
//                    rest {}                    the host has no place any more: a spare
//                    halt { ask, why }          no rank may run; answered with idle
//                    resume { choice, starts }  the host carries it out; answered with carried
//                    go { incarnation }         ranks start
//                    look {}                    answered with ranks
//                    stacks {}                  answered with stacks
//                    kill { rank }              to see the run recover
//                    end { code, keep, text, failure }  the run is over; keep: memory holds what no checkpoint has;
//                                              failure: failure_record() of what ended it, or null
//   host -> leader   replicated { incarnation, step, bytes }, unreplicated { incarnation, step, why }
//                    idle { ask, memory, held } no rank runs; or idle { ask, error }: it cannot go on
//                    carried {}                 or carried { error }
//                    failed { incarnation, failure }  its ranks are stopped
//                    error { incarnation, failure }   a rank has failed by itself; also while ranks are being stopped
//                    stopped { incarnation }          none of its ranks runs any more
//                    left { incarnation }       all its ranks have ended with 0
//                    event { incarnation, rank, event }
//                    ranks { incarnation, ranks }
//                    stacks { incarnation, stacks }   of its ranks
//                    stop { signal }, ask_save { by }
// both               put { incarnation, key, value }  of a rank: the leader passes it on to the other hosts
// and those of host_saves.h.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "ckpt/other_hosts.h"
#include "ckpt/restore.h"
#include "runtime/agent/supervisor.h"
#include "runtime/agent/wait_report.h"
#include "runtime/core/result.h"
#include "tools/run/replicas.h"

namespace cairn::tools {

/// {"code", "message"}
nlohmann::json error_to_json(const Error& error);
/// Of a message's body, whose "error" it is.
Error error_from_json(const nlohmann::json& body);

nlohmann::json memory_to_json(const ckpt::HostMemory& memory);
Result<ckpt::HostMemory> memory_from_json(const nlohmann::json& from);

nlohmann::json slot_to_json(const ckpt::WholeSlot& slot);
std::optional<ckpt::WholeSlot> slot_from_json(const nlohmann::json& from);

/// What the ranks of a host resume from.
struct HostOrder {
  ckpt::RestoreChoice choice;     // what is for people stays with the leader
  std::vector<uint64_t> starts;   // Arena::starts of the leader
  std::vector<int64_t> promised;  // steps that its memory promises to save
  int64_t kernel_level = 0;       // kernels::GemmIsa of all ranks
  int64_t epoch = 0;
  std::vector<PeerAddress> peers;  // by place: where its host takes copies
};
nlohmann::json order_to_json(const HostOrder& order);
Result<HostOrder> order_from_json(const nlohmann::json& from);

/// What a rank has published for those of other hosts: any bytes.
struct Published {
  uint64_t incarnation = 0;
  std::string key, value;
  bool operator==(const Published&) const = default;
};
nlohmann::json published_to_json(const Published& one);
std::optional<Published> published_from_json(const nlohmann::json& from);

nlohmann::json failure_to_json(const agent::Failure& failure);
agent::Failure failure_from_json(const nlohmann::json& from);

/// Where ranks are, and what they wait for.
nlohmann::json states_to_json(const std::vector<agent::RankState>& ranks);
/// Those that make sense.
std::vector<agent::RankState> states_from_json(const nlohmann::json& from);

/// What a host trains until the next one: the segment of a recipe, and the run it belongs to.
struct HostSegment {
  std::string recipe, past, init;         // decode_recipe(), decode_past(), init_from_json()
  int64_t end_step = 0;                   // of this segment
  int64_t hosts = 0;                      // that train
  std::string run_name, run_id, lineage;  // RunText
  std::string recipe_json, recipe_hash;   // RunText: what checkpoints keep
  std::string trace;                      // steps=A..B; empty: none
  bool time_kernels = false;
  bool operator==(const HostSegment&) const = default;
};
nlohmann::json segment_to_json(const HostSegment& segment);
Result<HostSegment> segment_from_json(const nlohmann::json& from);

}  // namespace cairn::tools
