#pragma once
// Small values that ranks of one start publish to each other as files below one directory. A value is written once and
// appears whole (temporary file, then link). Threads: safe.

#include <optional>
#include <string>

#include "runtime/core/result.h"

namespace cairn::comm {

class Rendezvous {
 public:
  /// Makes the directory when missing.
  static Result<Rendezvous> open(std::string directory);

  /// True when this call made it, false when the key has a value already.
  Result<bool> publish(const std::string& key, const std::string& value) const;
  std::optional<std::string> look(const std::string& key) const;

 private:
  explicit Rendezvous(std::string directory) : directory_(std::move(directory)) {}
  std::string path(const std::string& key) const;
  std::string directory_;
};

}  // namespace cairn::comm
