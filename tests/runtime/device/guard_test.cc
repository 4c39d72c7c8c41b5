#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/device/buffer.h"
#include "runtime/device/guard.h"
#include "runtime/device/host_numbers.h"
#include "runtime/device/stream.h"
#include "tests/support/ok.h"

using namespace cairn;

namespace {

/// How a process ends that does this with memory of a device: 0, or the signal that kills it.
int end_of(const std::function<void(volatile std::byte*)>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::signal(SIGSEGV, SIG_DFL);
    guard_device_memory();
    Buffer buffer = Buffer::allocate(Device{}, 10'000).value().for_device_alone();
    body(buffer.data());
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

}  // namespace

TEST_SUITE("runtime/device") {
  TEST_CASE("a device's memory can be touched while something runs on it, and at no other time") {
    CHECK(end_of([](volatile std::byte* at) { static_cast<void>(at[9'999]); }) == SIGSEGV);
    CHECK(end_of([](volatile std::byte* at) {
            {
              const DeviceAccess outer;
              { const DeviceAccess inner; }
              at[0] = std::byte{1};
            }
            at[0] = std::byte{2};
          }) == SIGSEGV);
    CHECK(end_of([](volatile std::byte* at) {
            const DeviceAccess inside;
            at[9'999] = std::byte{1};
          }) == 0);
  }

  TEST_CASE("a block that is given back is anybody's again") {
    CHECK(end_of([](volatile std::byte*) {
            { Buffer other = Buffer::allocate(Device{}, 20'000).value().for_device_alone(); }
            Buffer again = Buffer::allocate(Device{}, 20'000).value();
            again.data()[19'999] = std::byte{1};
          }) == 0);
  }

  TEST_CASE("memory of another owner is the device's as long as its guard lives, wherever that is moved") {
    const auto end = [](bool alive) {
      return end_of([alive](volatile std::byte*) {
        Buffer owned = Buffer::allocate(Device{}, 8192).value();
        GuardedPages kept;
        {
          GuardedPages made(std::span(owned.data(), 8192));
          if (alive) kept = std::move(made);
        }
        owned.data()[5000] = std::byte{1};
      });
    };
    CHECK(end(true) == SIGSEGV);
    CHECK(end(false) == 0);
  }

  TEST_CASE("without the guard memory is as any") {
    Buffer buffer = Buffer::allocate(Device{}, 100).value().for_device_alone();
    buffer.data()[99] = std::byte{1};
    CHECK(buffer.data()[99] == std::byte{1});
  }

  TEST_CASE("numbers for the host are read when the stream is settled behind their copy") {
    const std::unique_ptr<Stream> stream = make_cpu_stream();
    HostNumbers<float> numbers(*stream, 3);
    numbers.room(1, 2)[1] = 5;
    REQUIRE_OK(stream->settle());
    CHECK(numbers.read()[2] == 5);
    CHECK(end_of([](volatile std::byte*) {
            const std::unique_ptr<Stream> early = make_cpu_stream();
            HostNumbers<float> unsettled(*early, 1);
            unsettled.room()[0] = 1;
            static_cast<void>(unsettled.read());
          }) == SIGABRT);
  }

  TEST_CASE("the stream of a CPU reads numbers where the host has them") {
    const std::unique_ptr<Stream> stream = make_cpu_stream();
    const std::vector<int> ids = {1, 2, 3};
    CHECK(stream->give(std::span<const int>(ids)).address() == ids.data());
  }
}
