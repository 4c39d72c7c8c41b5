#include "runtime/core/program_part.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <system_error>

namespace cairn {

Result<std::array<std::filesystem::path, 2>> program_part_places(const std::string& file) {
  std::error_code failed;
  const auto folder = std::filesystem::read_symlink("/proc/self/exe", failed).parent_path();
  if (failed) return Error{ErrorCode::kIo, fmt::format("/proc/self/exe: {}", failed.message())};
  return std::array{folder / file, folder.parent_path() / "lib" / file};
}

Result<ProgramPart> load_program_part(const std::string& file, const char* symbol) {
  RT_TRY_SET(const auto places, program_part_places(file));
  for (const auto& path : places) {
    std::error_code none;
    if (!std::filesystem::exists(path, none)) continue;
    void* const opened = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    const void* const found = opened ? ::dlsym(opened, symbol) : nullptr;
    if (!found) return Error{ErrorCode::kUnsupported, fmt::format("{}: {}", path.string(), ::dlerror())};
    return ProgramPart{found, path.string()};
  }
  return ProgramPart{};
}

}  // namespace cairn
