// AddressSanitizer goes on after a report, and the test takes it. Its kernels are compiled with
// -fsanitize-recover=address.
#include <mutex>
#include <set>
#include <string>

#include "tests/simt/reports.h"

extern "C" {
void __asan_set_error_report_callback(void (*callback)(const char*));
const char* __asan_default_options() { return "halt_on_error=0:detect_leaks=0:log_path=/dev/null:print_legend=0"; }
}

namespace cairn::simt {
namespace {

std::mutex mutex;
std::set<std::string> seen;

/// "SUMMARY: AddressSanitizer: heap-buffer-overflow /path/a.cu:3 in f".
void note(const char* report) {
  const std::string text = report;
  constexpr const char* kHead = "SUMMARY: AddressSanitizer: ";
  const size_t head = text.find(kHead);
  if (head == std::string::npos) return;
  std::string line = text.substr(head + std::char_traits<char>::length(kHead));
  line.resize(line.find(" in ") == std::string::npos ? line.find('\n') : line.find(" in "));
  const size_t space = line.find(' '), slash = line.rfind('/');
  if (space != std::string::npos && slash != std::string::npos && slash > space) {
    line.erase(space + 1, slash - space);
  }
  const std::lock_guard lock(mutex);
  seen.insert(line);
}

[[maybe_unused]] const bool installed = [] {
  __asan_set_error_report_callback(&note);
  return true;
}();

}  // namespace

Build build() { return Build::kAsan; }
std::vector<std::string> take_reports() {
  const std::lock_guard lock(mutex);
  std::vector<std::string> out(seen.begin(), seen.end());
  seen.clear();
  return out;
}
std::vector<Traffic> take_traffic() { return {}; }

}  // namespace cairn::simt
