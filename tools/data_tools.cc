#include "tools/data_tools.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "runtime/core/count_text.h"
#include "runtime/telemetry/terminal.h"

namespace cairn::tools {

Result<data::TokenizeReport> tokenize_live(data::TokenizeArgs args) {
  const bool live = is_terminal(STDERR_FILENO);
  const auto begin = std::chrono::steady_clock::now();
  if (live) {
    args.progress = [begin](const data::TokenizeProgress& at) {
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      const auto done = static_cast<double>(at.bytes_done), left = static_cast<double>(at.bytes_total) - done;
      const bool known = at.bytes_total > 0;
      fmt::print(stderr, "\r{}{}, {} tokens, {}/s, eta {}\033[K", format_bytes(at.bytes_done),
                 known ? " of " + format_bytes(at.bytes_total) : "", format_count(static_cast<double>(at.tokens)),
                 format_bytes(static_cast<int64_t>(done / std::max(seconds, 1e-3))),
                 known && done > 0 ? telemetry::format_duration(left * seconds / done) : "?");
      return true;
    };
  }
  Result<data::TokenizeReport> done = data::tokenize_file(args);
  if (live) std::fputs("\r\033[K", stderr);
  return done;
}

}  // namespace cairn::tools
