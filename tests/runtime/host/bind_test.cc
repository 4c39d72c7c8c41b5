// A process that is bound: to cores, and to the memory of a node. In children, so that the tests stay free.
#include "runtime/host/bind.h"

#include <doctest/doctest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::host;

namespace {

/// What `body` says of a child process that is bound so.
bool holds(const std::vector<int64_t>& cpus, int64_t numa, const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    bind_process(cpus, numa);
    ::_exit(body() ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::vector<int64_t> own_cpus() {
  cpu_set_t mask;
  std::vector<int64_t> out;
  if (::sched_getaffinity(0, sizeof(mask), &mask) != 0) return out;
  for (int64_t k = 0; k < CPU_SETSIZE; ++k) {
    if (CPU_ISSET(static_cast<size_t>(k), &mask)) out.push_back(k);
  }
  return out;
}

std::string first_line(const char* file) {
  std::ifstream in(file);
  std::string out;
  std::getline(in, out);
  return out;
}

}  // namespace

TEST_SUITE("runtime/host/bind") {
  TEST_CASE("a process runs on the cores that it is bound to, and one that is not where it was") {
    const std::vector<int64_t> all = own_cpus();
    REQUIRE_FALSE(all.empty());
    CHECK(holds({all.back()}, -1, [&] { return own_cpus() == std::vector<int64_t>{all.back()}; }));
    CHECK(holds({}, -1, [&] { return own_cpus() == all; }));
  }

  TEST_CASE("cores and nodes that are not there bind nothing, and the process runs") {
    const std::vector<int64_t> all = own_cpus();
    CHECK(holds({60'000}, 900, [&] { return own_cpus() == all; }));
  }

  TEST_CASE("memory of a process comes from the node that it is bound to") {
    constexpr const char* kMaps = "/proc/self/numa_maps";
    if (!std::filesystem::exists(kMaps)) {
      MESSAGE("skipped: this kernel knows no nodes");
      return;
    }
    CHECK(holds({}, -1, [] { return first_line(kMaps).find(" default ") != std::string::npos; }));
    CHECK(holds({}, 0, [] { return first_line(kMaps).find(" prefer") != std::string::npos; }));
  }

  TEST_CASE("numbers are written as ranges and read again") {
    const std::vector<std::vector<int64_t>> all = {{}, {3}, {0, 1, 2, 5, 8, 9}, {0, 2, 4}, {64, 65, 66, 67}};
    for (const std::vector<int64_t>& numbers : all) {
      const Result<std::vector<int64_t>> read = numbers_in(ranges_text(numbers));
      REQUIRE_OK(read);
      CHECK(read.value() == numbers);
    }
    CHECK(ranges_text(std::vector<int64_t>{0, 1, 2, 5, 8, 9}) == "0-2,5,8-9");
    for (const char* const bad : {"a", "1,", ",1", "3-1", "1-", "2,1", "-1", "1 2", "99999999"}) {
      CAPTURE(bad);
      CHECK_FALSE(numbers_in(bad).ok());
    }
  }
}
