#pragma once

#include <cstdio>

namespace cairn::tools {

/// While it lives stdout breaks lines between words, where it is a terminal: for tables and sentences, not for what a
/// program reads.
class WrappedStdout {
 public:
  WrappedStdout();
  ~WrappedStdout();
  WrappedStdout(const WrappedStdout&) = delete;
  WrappedStdout& operator=(const WrappedStdout&) = delete;

 private:
  std::FILE* real_ = nullptr;  // null: stdout is no terminal
};

}  // namespace cairn::tools
