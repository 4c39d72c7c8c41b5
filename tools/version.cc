#include "tools/version.h"

#include <elf.h>
#include <fmt/format.h>
#include <link.h>
#include <build_version.inc>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

#include "runtime/comm/gloo_module.h"
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

struct WantedId {
  const void* holds;  // an address in the program or library
  std::string id;
};

/// Called by dl_iterate_phdr, for each program and library.
int take_build_id(dl_phdr_info* object, size_t, void* out) {
  auto& wanted = *static_cast<WantedId*>(out);
  const std::span segments(object->dlpi_phdr, object->dlpi_phnum);
  const auto begin = [&](const ElfW(Phdr) & segment) {
    return reinterpret_cast<const unsigned char*>(object->dlpi_addr + segment.p_vaddr);
  };
  if (std::ranges::none_of(segments, [&](const ElfW(Phdr) & segment) {
        return segment.p_type == PT_LOAD && wanted.holds >= begin(segment) &&
               wanted.holds < begin(segment) + segment.p_memsz;
      })) {
    return 0;
  }
  for (const ElfW(Phdr) & segment : segments) {
    if (segment.p_type != PT_NOTE) continue;
    for (const unsigned char byte : build_id_in(begin(segment), segment.p_memsz)) {
      fmt::format_to(std::back_inserter(wanted.id), "{:02x}", byte);
    }
  }
  return 1;
}

std::string build_id_around(const void* address) {
  WantedId wanted{.holds = address, .id = {}};
  dl_iterate_phdr(take_build_id, &wanted);
  RT_CHECK(!wanted.id.empty(), "the program or module has no build id: CMakeLists.txt asks the linker for one");
  return wanted.id;
}

}  // namespace

std::string_view tree_version() { return CAIRN_TREE_VERSION; }

std::string program_version() {
  return fmt::format("{} (build {})", CAIRN_TREE_VERSION, build_id_around(CAIRN_TREE_VERSION));
}

Result<std::string> program_and_module_version() {
  RT_TRY_SET(const comm::GlooModule* const module, comm::gloo_module());
  if (std::string_view(module->tree_version) != CAIRN_TREE_VERSION) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("the Gloo module beside this program was built from another tree: the program is {}, the "
                             "module {}; they move together",
                             CAIRN_TREE_VERSION, module->tree_version)};
  }
  return fmt::format("{}, Gloo module {}", program_version(), build_id_around(module));
}

}  // namespace cairn::tools
