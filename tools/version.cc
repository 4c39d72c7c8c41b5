#include "tools/version.h"

#include <elf.h>
#include <fmt/format.h>
#include <link.h>
#include <build_version.inc>

#include <cstddef>
#include <iterator>
#include <span>
#include <string_view>

#include "runtime/core/check.h"

namespace cairn::tools {
namespace {

/// The build id among the notes of a segment; empty where it is not there.
std::span<const unsigned char> build_id_in(const unsigned char* at, size_t size_bytes) {
  const auto padded = [](size_t n) { return (n + 3) / 4 * 4; };
  const unsigned char* const end = at + size_bytes;
  while (at + sizeof(ElfW(Nhdr)) <= end) {
    const auto& note = *reinterpret_cast<const ElfW(Nhdr)*>(at);
    const auto* const name = reinterpret_cast<const char*>(at + sizeof note);
    const unsigned char* const content = at + sizeof note + padded(note.n_namesz);
    if (note.n_type == NT_GNU_BUILD_ID && std::string_view(name, note.n_namesz) == std::string_view("GNU", 4)) {
      return {content, note.n_descsz};
    }
    at = content + padded(note.n_descsz);
  }
  return {};
}

/// Called by dl_iterate_phdr, for the program itself first.
int take_build_id(dl_phdr_info* program, size_t, void* out) {
  for (const ElfW(Phdr) & segment : std::span(program->dlpi_phdr, program->dlpi_phnum)) {
    if (segment.p_type != PT_NOTE) continue;
    const auto* const notes = reinterpret_cast<const unsigned char*>(program->dlpi_addr + segment.p_vaddr);
    for (const unsigned char byte : build_id_in(notes, segment.p_memsz)) {
      fmt::format_to(std::back_inserter(*static_cast<std::string*>(out)), "{:02x}", byte);
    }
  }
  return 1;  // no library's
}

}  // namespace

std::string program_version() {
  std::string id;
  dl_iterate_phdr(take_build_id, &id);
  RT_CHECK(!id.empty(), "the program has no build id: CMakeLists.txt asks the linker for one");
  return fmt::format("{} (build {})", CAIRN_TREE_VERSION, id);
}

}  // namespace cairn::tools
