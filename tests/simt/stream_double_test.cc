// The double of the CUDA runtime: what it does late, in which orders, what it refuses and what it notices.
#include "tests/simt/stream_double.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <set>
#include <string>
#include <vector>

#include "runtime/kernels/cuda/maps.h"
#include "tests/simt/executor.h"
#include "tests/simt/reports.h"

using namespace cairn::simt;
using cairn::kernels::cuda::Queue;

namespace {

constexpr int kSeeds = 24;
constexpr int kRefused = 719;  // cudaErrorLaunchFailure

/// A step's work: `first` and `second` each write what the other reads, on two streams; `edge` orders them.
struct TwoStreams {
  explicit TwoStreams(uint64_t seed) : cuda(seed) {
    REQUIRE(cuda.create_stream(&first) == 0);
    REQUIRE(cuda.create_stream(&second) == 0);
    REQUIRE(cuda.create_event(&done) == 0);
    REQUIRE(cuda.allocate(reinterpret_cast<void**>(&x), 64 * 4) == 0);
    REQUIRE(cuda.allocate(reinterpret_cast<void**>(&y), 64 * 4) == 0);
    REQUIRE(cuda.pin(host.data(), 64 * 4) == 0);
    REQUIRE(cuda.copy(x, host.data(), 64 * 4, first) == 0);
    REQUIRE(cuda.synchronize() == 0);
    cuda.take_counts();
  }
  ~TwoStreams() {
    cuda.unpin(host.data());
    cuda.free(x);
    cuda.free(y);
  }
  StreamDouble cuda;
  StreamDouble::Stream first = nullptr, second = nullptr;
  StreamDouble::Event* done = nullptr;
  float *x = nullptr, *y = nullptr;
  std::vector<float> host = std::vector<float>(64, 3.0f);
};

float doubled_then_added(uint64_t seed, bool edge) {
  TwoStreams on(seed);
  Queue first{on.first}, second{on.second};
  cairn::kernels::cuda::scale_floats(first, on.x, 2.0f, 64);  // x = 6
  if (edge) {
    REQUIRE(on.cuda.record(on.done, on.first) == 0);
    REQUIRE(on.cuda.wait_event(on.second, on.done) == 0);
  }
  cairn::kernels::cuda::add<float>(second, on.x, on.x, on.y, 64);  // y = 12
  REQUIRE(on.cuda.copy(on.host.data(), on.y, 64 * 4, on.second) == 0);
  REQUIRE(on.cuda.synchronize(on.second) == 0);
  const float out = on.host[63];
  REQUIRE(on.cuda.synchronize() == 0);
  CHECK(on.cuda.misuses().empty());
  return out;
}

}  // namespace

TEST_SUITE("simt/stream_double") {
  TEST_CASE("an edge orders two streams under every seed; without it some seed shows that it is missing") {
    std::set<float> with, without;
    for (int seed = 0; seed < kSeeds; ++seed) {
      with.insert(doubled_then_added(seed, true));
      without.insert(doubled_then_added(seed, false));
      CHECK(doubled_then_added(seed, false) == doubled_then_added(seed, false));
    }
    CHECK(with == std::set<float>{12});
    CHECK(without == std::set<float>{6, 12});
    CHECK(take_reports().empty());
  }

  TEST_CASE("work is late: a pinned copy has not come, and its source is read late; what is not pinned waits") {
    StreamDouble cuda(1);
    StreamDouble::Stream stream;
    REQUIRE(cuda.create_stream(&stream) == 0);
    void* memory = nullptr;
    REQUIRE(cuda.allocate(&memory, 16) == 0);
    std::vector<int> host = {1, 2, 3, 4}, back(4, 0), plain(4, 0);
    REQUIRE(cuda.pin(host.data(), 16) == 0);
    REQUIRE(cuda.pin(back.data(), 16) == 0);
    REQUIRE(cuda.copy(memory, host.data(), 16, stream) == 0);
    host[2] = 9;  // too early: it is taken
    REQUIRE(cuda.copy(back.data(), memory, 16, stream) == 0);
    CHECK(back[0] != 1);
    CHECK(cuda.take_counts().waits == 0);
    REQUIRE(cuda.copy(plain.data(), memory, 16, stream) == 0);
    CHECK(plain == std::vector<int>{1, 2, 9, 4});
    CHECK(cuda.take_counts().waits == 1);
    REQUIRE(cuda.copy(memory, plain.data(), 16, stream) == 0);
    plain[0] = 7;  // read already
    REQUIRE(cuda.copy(back.data(), memory, 16, stream) == 0);
    cuda.unpin(back.data());
    CHECK(cuda.misuses() == std::vector<std::string>{"memory unpinned while a copy is on its way"});
    REQUIRE(cuda.synchronize(stream) == 0);
    CHECK(back == std::vector<int>{1, 2, 9, 4});
    cuda.free(memory);
    cuda.unpin(host.data());
  }

  TEST_CASE("host code that touches device memory dies of it") {
    if (build() == Build::kAsan) return;  // whose heap that memory is
    StreamDouble cuda(1);
    void* memory = nullptr;
    REQUIRE(cuda.allocate(&memory, 4096) == 0);
    for (const bool writes : {false, true}) {
      const pid_t child = fork();
      if (child == 0) {
        std::signal(SIGSEGV, SIG_DFL);
        volatile char* const at = static_cast<char*>(memory);
        if (writes) {
          at[100] = 1;
        } else {
          _exit(at[100] == 1 ? 2 : 3);
        }
        _exit(0);
      }
      int status = 0;
      REQUIRE(waitpid(child, &status, 0) == child);
      CHECK(WIFSIGNALED(status));
      CHECK(WTERMSIG(status) == SIGSEGV);
    }
    cuda.free(memory);
  }

  TEST_CASE("every call can be refused, once or from then on, and nothing stays behind") {
    const auto live = [](StreamDouble& cuda) {
      // All calls of a short life; the first error, or 0.
      StreamDouble::Stream stream = nullptr;
      StreamDouble::Event* event = nullptr;
      void* memory = nullptr;
      float host[64] = {};
      int error = 0;
      const auto ok = [&](int made) {
        if (error == 0) error = made;
        return error == 0;
      };
      const bool has_stream = ok(cuda.create_stream(&stream));
      const bool has_event = has_stream && ok(cuda.create_event(&event));
      const bool has_memory = has_event && ok(cuda.allocate(&memory, sizeof(host)));
      if (has_memory) {
        ok(cuda.set(memory, 0, sizeof(host), stream));
        Queue on{stream};
        cairn::kernels::cuda::scale_floats(on, static_cast<float*>(memory), 2.0f, 64);
        ok(on.error);
        ok(cuda.record(event, stream));
        ok(cuda.synchronize(event));
        ok(cuda.copy(host, memory, sizeof(host), stream));
        ok(cuda.synchronize(stream));
      }
      if (has_memory) ok(cuda.free(memory));
      if (has_event) ok(cuda.destroy_event(event));
      if (has_stream) ok(cuda.destroy_stream(stream));
      return error;
    };
    int64_t swept = 0;
    for (const bool from_then_on : {false, true}) {
      bool refused = true;
      for (int64_t calls = 0; refused; ++calls, ++swept) {
        CAPTURE(calls);
        StreamDouble cuda(7);
        cuda.refuse_call(calls, kRefused, from_then_on);
        const int error = live(cuda);
        refused = cuda.refuse_no_more();
        CHECK(error == (refused ? kRefused : 0));
        CHECK(cuda.left().empty());
      }
    }
    CHECK(swept == 2 * 13);  // twelve calls, and one life without a refusal
  }

  TEST_CASE("allocations and waits are counted, memory ends, and what is left is told") {
    StreamDouble cuda(1, 1000);
    void *first = nullptr, *second = nullptr;
    CHECK(cuda.allocate(&first, 600) == 0);
    CHECK(cuda.allocate(&second, 600) == kNoMemory);
    CHECK(cuda.allocate(&second, 0) == kInvalidValue);
    StreamDouble::Stream stream;
    REQUIRE(cuda.create_stream(&stream) == 0);
    CHECK(cuda.copy(static_cast<char*>(first) + 500, first, 200, stream) == kInvalidValue);  // past the end
    CHECK(cuda.synchronize() == 0);
    const auto counts = cuda.take_counts();
    CHECK(counts.allocations == 1);
    CHECK(counts.waits == 1);
    CHECK(cuda.left() == std::vector<std::string>{"1 allocations", "1 streams"});
    CHECK(cuda.set(first, 0, 10, nullptr) == kInvalidHandle);
    CHECK(cuda.misuses() == std::vector<std::string>{"work in the default stream"});
    cuda.free(first);
  }

  TEST_CASE("waiting for an event that was never recorded waits for nothing, and is noticed") {
    StreamDouble cuda(1);
    StreamDouble::Stream stream;
    StreamDouble::Event* event;
    REQUIRE(cuda.create_stream(&stream) == 0);
    REQUIRE(cuda.create_event(&event) == 0);
    CHECK(cuda.wait_event(stream, event) == 0);
    CHECK(cuda.misuses().size() == 1);
    CHECK(cuda.synchronize(event) == 0);
  }

  TEST_CASE("a captured graph replays its arguments and its edges, and does nothing before") {
    std::set<float> seen;
    for (int seed = 0; seed < kSeeds; ++seed) {
      TwoStreams on(seed);
      Queue first{on.first}, second{on.second};
      StreamDouble::Event* back = nullptr;
      REQUIRE(on.cuda.create_event(&back) == 0);
      float factor = 2.0f;
      REQUIRE(on.cuda.begin_capture(on.first) == 0);
      cairn::kernels::cuda::scale_floats(first, on.x, factor, 64);
      REQUIRE(on.cuda.record(on.done, on.first) == 0);
      REQUIRE(on.cuda.wait_event(on.second, on.done) == 0);
      cairn::kernels::cuda::add<float>(second, on.x, on.x, on.y, 64);
      REQUIRE(on.cuda.record(back, on.second) == 0);
      REQUIRE(on.cuda.wait_event(on.first, back) == 0);
      cairn::kernels::cuda::scale_floats(first, on.y, 10.0f, 64);
      StreamDouble::Graph* graph = nullptr;
      REQUIRE(on.cuda.end_capture(on.first, &graph) == 0);
      factor = 100;  // the recorded one counts
      REQUIRE(on.cuda.copy(on.host.data(), on.x, 64 * 4, on.first) == 0);
      REQUIRE(on.cuda.synchronize(on.first) == 0);
      CHECK(on.host[0] == 3);
      for (const float wanted : {120.0f, 240.0f}) {
        REQUIRE(on.cuda.launch(graph, on.first) == 0);
        REQUIRE(on.cuda.copy(on.host.data(), on.y, 64 * 4, on.first) == 0);
        REQUIRE(on.cuda.synchronize(on.first) == 0);
        CHECK(on.host[5] == wanted);
      }
      CHECK(on.cuda.destroy_graph(graph) == 0);
    }
  }

  TEST_CASE("a capture refuses allocation, waits, outside edges and branches that do not come back") {
    TwoStreams on(1);
    Queue second{on.second};
    StreamDouble::Graph* graph = nullptr;
    const auto spoilt = [&] { return on.cuda.end_capture(on.first, &graph) == kCaptureInvalid; };
    void* memory = nullptr;
    REQUIRE(on.cuda.begin_capture(on.first) == 0);
    CHECK(on.cuda.allocate(&memory, 16) == kNotInCapture);
    CHECK(spoilt());
    REQUIRE(on.cuda.begin_capture(on.first) == 0);
    CHECK(on.cuda.synchronize(on.second) == kNotInCapture);
    CHECK(spoilt());
    REQUIRE(on.cuda.record(on.done, on.second) == 0);
    REQUIRE(on.cuda.begin_capture(on.first) == 0);
    CHECK(on.cuda.wait_event(on.first, on.done) == kCaptureIsolation);
    CHECK(spoilt());
    float plain[4];
    REQUIRE(on.cuda.begin_capture(on.first) == 0);
    CHECK(on.cuda.copy(plain, on.x, 16, on.first) == kNotInCapture);
    CHECK(spoilt());
    REQUIRE(on.cuda.begin_capture(on.first) == 0);
    REQUIRE(on.cuda.record(on.done, on.first) == 0);
    REQUIRE(on.cuda.wait_event(on.second, on.done) == 0);
    cairn::kernels::cuda::add<float>(second, on.x, on.x, on.y, 64);
    CHECK(on.cuda.end_capture(on.first, &graph) == kCaptureUnjoined);
    REQUIRE(on.cuda.begin_capture(on.first) == 0);  // comes back, then does more
    REQUIRE(on.cuda.record(on.done, on.first) == 0);
    REQUIRE(on.cuda.wait_event(on.second, on.done) == 0);
    REQUIRE(on.cuda.record(on.done, on.second) == 0);
    REQUIRE(on.cuda.wait_event(on.first, on.done) == 0);
    cairn::kernels::cuda::add<float>(second, on.x, on.x, on.y, 64);
    CHECK(on.cuda.end_capture(on.first, &graph) == kCaptureUnjoined);
    CHECK(on.cuda.synchronize() == 0);
    CHECK(on.cuda.left().size() == 4);  // allocations, a pinned area, streams, events: no graph
  }

  TEST_CASE("a long queue is worked on, and an event is asked about without waiting") {
    TwoStreams on(3);
    Queue first{on.first};
    for (int i = 0; i < 200; ++i) cairn::kernels::cuda::scale_floats(first, on.x, 1.0f, 64);
    on.cuda.take_counts();
    REQUIRE(on.cuda.record(on.done, on.first) == 0);
    int asked = 1;
    while (on.cuda.query(on.done) == kNotReady) ++asked;
    CHECK(asked > 32);
    CHECK(asked < 80);  // most were done on the way
    CHECK(on.cuda.take_counts().waits == 0);
  }
}
