#pragma once
// What the subcommands of `cairn ckpt` share.

#include <chrono>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "ckpt/format/manifest.h"
#include "runtime/telemetry/terminal.h"

namespace CLI {
class App;
}

namespace cairn::tools {

struct Session;

void add_ckpt_reshard(CLI::App& ckpt, Session& session);
void add_ckpt_copy(CLI::App& ckpt, Session& session);

/// "tp 2 x pp 1 x dp 2, zero 1, bf16"
std::string mesh_text(const ckpt::MeshInfo& mesh);
nlohmann::json mesh_json(const ckpt::MeshInfo& mesh);

/// Bytes done, on stderr: a live line on a terminal, a line every ten seconds elsewhere.
class ByteProgress {
 public:
  /// `verb`: "verified", "written".
  explicit ByteProgress(std::string verb);
  void show(int64_t done_bytes, int64_t total_bytes);

 private:
  using Clock = std::chrono::steady_clock;
  std::string verb_;
  telemetry::ProgressLine line_;
  Clock::time_point start_ = Clock::now(), shown_ = start_, kept_ = start_;
};

}  // namespace cairn::tools
