#pragma once
// The pod of a host. Only for kubernetes.cc.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/config/cluster.h"
#include "tools/launch/job.h"

namespace cairn::tools {

inline constexpr const char* kFilesDir = "/etc/cairn";  // where a pod finds recipe and cluster file

struct PodFiles {
  std::string config_map;  // its name
  nlohmann::json items;    // of the volume: which key is which path
};

/// The spec of a pod. `words`: its command. `labels`: of all pods of the run. `shm_bytes`: of its /dev/shm.
nlohmann::json pod_spec(const ClusterConfig& cluster, const TrainJob& job, const std::vector<std::string>& words,
                        const PodFiles& files, const nlohmann::json& labels, int64_t shm_bytes);

std::string without_trailing_slash(std::string path);

}  // namespace cairn::tools
