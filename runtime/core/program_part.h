#pragma once
// A shared library that is a part of the program and is loaded when it is needed. It lies beside the program, or,
// installed, in lib beside the program's folder.

#include <array>
#include <filesystem>
#include <string>

#include "runtime/core/result.h"

namespace cairn {

struct ProgramPart {
  const void* symbol = nullptr;  // null: the library is in none of its places
  std::string path;              // of the library that was loaded
};

/// The places of `file`, in the order in which they are looked at. Errors: kIo without /proc.
Result<std::array<std::filesystem::path, 2>> program_part_places(const std::string& file);

/// Loads `file` for good and finds `symbol` in it. Errors: kUnsupported, with the path, when the loader refuses it or
/// it lacks the symbol; kIo.
Result<ProgramPart> load_program_part(const std::string& file, const char* symbol);

}  // namespace cairn
