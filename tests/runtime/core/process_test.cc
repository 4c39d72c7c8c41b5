#include "runtime/core/process.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace cairn;

TEST_SUITE("runtime/core/process") {
  TEST_CASE("a process lives until it has ended, waited for or not, and no other with its number stands in for it") {
    const ProcessId me = this_process();
    CHECK(me.pid == ::getpid());
    CHECK(me.start > 0);
    CHECK(is_alive(me));
    CHECK_FALSE(is_alive({me.pid, me.start - 1}));

    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      ::prctl(PR_SET_NAME, "a) Z (b 1 2");  // what /proc tells of it is not to be taken for other fields
      ::raise(SIGSTOP);
      ::_exit(0);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, WUNTRACED) == child);
    const std::optional<ProcessStat> stopped = process_stat(child);
    REQUIRE(stopped.has_value());
    CHECK(stopped->state == 'T');
    CHECK(stopped->start >= me.start);
    const ProcessId id{child, stopped->start};
    CHECK(is_alive(id));

    REQUIRE(::kill(child, SIGKILL) == 0);
    siginfo_t ended{};
    REQUIRE(::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT) == 0);
    CHECK(process_stat(child)->ended());
    CHECK_FALSE(is_alive(id));
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK_FALSE(process_stat(child).has_value());
    CHECK_FALSE(is_alive(id));
  }
}
