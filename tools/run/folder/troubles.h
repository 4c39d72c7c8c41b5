#pragma once
// What has gone wrong in a run, by its events.jsonl: failures by class and host, stragglers, hosts that it excluded.
// For `cairn report`.

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

namespace cairn::tools {

struct Troubles {
  struct Failures {
    std::string which, host;  // the class's name; empty of an older build's
    int64_t times = 0;
  };
  struct Straggler {
    std::string host, why;
    double ratio = 1, seconds = 0;  // the worst; in all
    int64_t times = 0;
  };
  struct Excluded {
    std::string host, reason;
  };
  std::vector<Failures> failures;     // the most frequent first
  std::vector<Straggler> stragglers;  // the longest first
  std::vector<Excluded> excluded;
};

/// What is no event that makes sense is passed over.
Troubles troubles_of(const std::filesystem::path& run);

/// Lines of a report with their headings: {"failures", "3: out of memory on h2 (2), a crash on h1"}, ...
std::vector<std::pair<std::string, std::string>> trouble_lines(const Troubles& troubles);
/// What to change about them.
std::vector<std::string> trouble_advice(const Troubles& troubles);
nlohmann::json to_json(const Troubles& troubles);

}  // namespace cairn::tools
