#pragma once
// Hosts that a run takes no more: RUN/cluster/excluded.json. The leader writes it; a person may remove an entry, or the
// file. An entry counts until its host has booted again. Threads: none of its own.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/agent/failure_class.h"
#include "runtime/core/result.h"

namespace cairn::tools {

struct Exclusion {
  std::string name, boot_id;  // of the host
  int64_t index = 0;
  std::string reason;
  agent::FailureClass failure_class = agent::FailureClass::kError;
  double time = 0;  // unix seconds
  int64_t epoch = 0;
  bool operator==(const Exclusion&) const = default;
};

/// None where the file is missing. Errors: kCorrupt: it is damaged or of a newer schema, and stays as it is; those of
/// reading it.
Result<std::vector<Exclusion>> read_excluded(const std::filesystem::path& run);
Status add_excluded(const std::filesystem::path& run, Exclusion one);
/// Why this host may not join; empty: it may.
std::string why_excluded(const std::vector<Exclusion>& all, const std::string& name, const std::string& boot_id);

}  // namespace cairn::tools
