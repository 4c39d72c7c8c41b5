#include "tests/simt/symbols.h"

#include <cxxabi.h>
#include <dwarf.h>
#include <elfutils/libdw.h>
#include <elfutils/libdwfl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <mutex>

namespace cairn::simt {
namespace {

Dwfl* session() {
  static Dwfl* const opened = [] {
    static const Dwfl_Callbacks callbacks{.find_elf = dwfl_linux_proc_find_elf,
                                          .find_debuginfo = dwfl_standard_find_debuginfo,
                                          .section_address = nullptr,
                                          .debuginfo_path = nullptr};
    Dwfl* const dwfl = dwfl_begin(&callbacks);
    if (dwfl != nullptr) {
      dwfl_linux_proc_report(dwfl, getpid());
      dwfl_report_end(dwfl, nullptr, nullptr);
    }
    return dwfl;
  }();
  return opened;
}
std::mutex one_at_a_time;

}  // namespace

std::string line_of(const void* pc) {
  const std::lock_guard lock(one_at_a_time);
  const auto address = reinterpret_cast<Dwarf_Addr>(pc);
  Dwfl_Line* const line = session() == nullptr ? nullptr : dwfl_getsrc(session(), address);
  int number = 0;
  const char* const innermost =
      line == nullptr ? nullptr : dwfl_lineinfo(line, nullptr, &number, nullptr, nullptr, nullptr);
  if (innermost == nullptr) return fmt::format("{}", pc);
  std::string file = innermost;
  const auto of_vocabulary = [&] { return file.ends_with("/simt.h") || file.ends_with("/matrix_units.h"); };
  Dwarf_Addr bias = 0;
  Dwarf_Die* const unit = dwfl_addrdie(session(), address, &bias);
  Dwarf_Die* scopes = nullptr;
  const int count = unit == nullptr ? 0 : dwarf_getscopes(unit, address - bias, &scopes);
  for (int i = 0; i < count && of_vocabulary(); ++i) {
    if (dwarf_tag(&scopes[i]) != DW_TAG_inlined_subroutine) continue;
    Dwarf_Attribute attribute;
    Dwarf_Word called_line = 0, called_file = 0;
    Dwarf_Files* files = nullptr;
    if (dwarf_formudata(dwarf_attr(&scopes[i], DW_AT_call_line, &attribute), &called_line) != 0 ||
        dwarf_formudata(dwarf_attr(&scopes[i], DW_AT_call_file, &attribute), &called_file) != 0 ||
        dwarf_getsrcfiles(unit, &files, nullptr) != 0) {
      break;
    }
    const char* const caller = dwarf_filesrc(files, called_file, nullptr, nullptr);
    if (caller == nullptr) break;
    file = caller;
    number = static_cast<int>(called_line);
  }
  std::free(scopes);
  return fmt::format("{}:{}", file.substr(file.rfind('/') + 1), number);
}

std::string name_of(const void* function) {
  const std::lock_guard lock(one_at_a_time);
  const auto address = reinterpret_cast<Dwarf_Addr>(function);
  Dwfl_Module* const module = session() == nullptr ? nullptr : dwfl_addrmodule(session(), address);
  const char* const symbol = module == nullptr ? nullptr : dwfl_module_addrname(module, address);
  if (symbol == nullptr) return fmt::format("{}", function);
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> plain(abi::__cxa_demangle(symbol, nullptr, nullptr, &status), std::free);
  std::string name = plain == nullptr ? symbol : plain.get();
  // "void a::b<c::d>(e)": the arguments, the result and namespaces say nothing here.
  int depth = 0;
  size_t end = name.size();
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0 && name.compare(i, 21, "(anonymous namespace)") != 0) {
      end = i;
      break;
    }
  }
  name.resize(end);
  if (name.starts_with("void ")) name.erase(0, 5);
  for (const char* const left_out : {"cairn::kernels::cuda::", "cairn::", "(anonymous namespace)::"}) {
    for (size_t at = name.find(left_out); at != std::string::npos; at = name.find(left_out)) {
      name.erase(at, std::char_traits<char>::length(left_out));
    }
  }
  return name;
}

}  // namespace cairn::simt
