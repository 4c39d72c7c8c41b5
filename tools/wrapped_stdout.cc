#include "tools/wrapped_stdout.h"

#include <unistd.h>

#include <string>
#include <string_view>
#include <utility>

#include "runtime/telemetry/terminal.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

/// The stream of a WrappedStdout; its cookie is the real one. Returns what it took, 0 where nothing is taken any more.
ssize_t write_wrapped(void* real, const char* bytes, size_t size) {
  auto* const out = static_cast<std::FILE*>(real);
  const std::string text =
      telemetry::wrap_text(std::string_view(bytes, size), telemetry::terminal_columns(::fileno(out), 80));
  std::fwrite(text.data(), 1, text.size(), out);
  return std::fflush(out) == 0 && std::ferror(out) == 0 ? static_cast<ssize_t>(size) : 0;
}

}  // namespace

WrappedStdout::WrappedStdout() {
  if (!is_terminal(STDOUT_FILENO)) return;
  std::FILE* const wrapped =
      ::fopencookie(stdout, "w", {.read = nullptr, .write = write_wrapped, .seek = nullptr, .close = nullptr});
  if (wrapped == nullptr) return;  // lines break where the terminal breaks them
  std::setvbuf(wrapped, nullptr, _IOLBF, 1 << 16);
  std::fflush(stdout);
  real_ = std::exchange(stdout, wrapped);
}

WrappedStdout::~WrappedStdout() {
  if (real_ != nullptr) std::fclose(std::exchange(stdout, real_));
}

}  // namespace cairn::tools
