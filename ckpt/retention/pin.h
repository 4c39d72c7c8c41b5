#pragma once
// A step that a process reads for long, as `cairn serve` does, is pinned: while an empty directory of kPinPrefix with
// the process's name lies beside it, and the process may live, no retention and no removal takes the step
// (references.h). A pin of a dead process counts for nothing, and clean_leftovers() removes it.

#include <cstdint>
#include <filesystem>
#include <memory>

#include "ckpt/format/names.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

class Pin {
 public:
  /// The caller then checks that the step still exists. `io` outlives the pin. Errors: the system's, as
  /// of a folder that cannot be written.
  static Result<std::unique_ptr<Pin>> make(IoBackend& io, const std::filesystem::path& checkpoints_dir, int64_t step,
                                           const WriterId& reader);
  ~Pin();
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

 private:
  Pin(IoBackend& io, std::filesystem::path path) : io_(io), path_(std::move(path)) {}
  IoBackend& io_;
  std::filesystem::path path_;
};

}  // namespace cairn::ckpt
