#include "runtime/host/bind.h"

#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

namespace cairn::host {
namespace {

constexpr int64_t kMost = 1 << 16;  // of numbers

/// The kernel's form of a set: a bit for each number.
std::vector<unsigned long> bits_of(std::span<const int64_t> numbers) {
  constexpr int64_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> out;
  for (const int64_t number : numbers) {
    if (number < 0 || number >= kMost) continue;
    out.resize(std::max(out.size(), static_cast<size_t>(number / kBits) + 1), 0);
    out[static_cast<size_t>(number / kBits)] |= 1UL << (number % kBits);
  }
  return out;
}

}  // namespace

void bind_process(std::span<const int64_t> cpus, int64_t numa) {
  constexpr long kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h
  if (const std::vector<unsigned long> set = bits_of(cpus); !set.empty())
    ::syscall(SYS_sched_setaffinity, 0, set.size() * sizeof(unsigned long), set.data());
  std::vector<unsigned long> nodes = bits_of({&numa, 1});
  if (nodes.empty()) return;
  nodes.push_back(0);  // the kernel reads one bit less than it is told of
  ::syscall(SYS_set_mempolicy, kPreferred, nodes.data(), 8 * nodes.size() * sizeof(unsigned long));
}

std::string ranges_text(std::span<const int64_t> numbers) {
  std::string out;
  for (size_t k = 0; k < numbers.size();) {
    size_t end = k;
    while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) ++end;
    if (!out.empty()) out += ",";
    out += end == k ? std::to_string(numbers[k]) : fmt::format("{}-{}", numbers[k], numbers[end]);
    k = end + 1;
  }
  return out;
}

Result<std::vector<int64_t>> numbers_in(std::string_view ranges) {
  std::vector<int64_t> out;
  const auto refuse = [&] {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("'{}': expected ascending numbers and ranges of them, such as 0-7,64-71", ranges)};
  };
  const char *at = ranges.data(), *const end = at + ranges.size();
  const auto number = [&](int64_t &to) {
    const auto [next, failed] = std::from_chars(at, end, to);
    at = next;
    return failed == std::errc() && to >= 0 && to < kMost && (out.empty() || to > out.back());
  };
  while (at != end) {
    int64_t first = 0, last = 0;
    if ((!out.empty() && *at++ != ',') || !number(first)) return refuse();
    out.push_back(first);
    if (at == end || *at != '-') continue;
    ++at;
    if (!number(last)) return refuse();
    while (out.back() < last) out.push_back(out.back() + 1);
  }
  return out;
}

}  // namespace cairn::host
