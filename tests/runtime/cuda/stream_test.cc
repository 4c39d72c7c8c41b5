// Streams, events, memory and graphs of a CUDA device, on the double of its runtime: that each edge is made, that each
// refused call is told, how often the host waits and memory is asked for.
#include "runtime/cuda/stream.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "runtime/cuda/arena.h"
#include "runtime/device/host_numbers.h"
#include "runtime/kernels/cuda/maps.h"
#include "tests/runtime/cuda/cuda_machine.h"
#include "tests/simt/reports.h"

using namespace cairn;
using namespace cairn::cuda;
using cairn::testing::CudaMachine;

namespace {

constexpr int64_t kCount = 96;
constexpr int64_t kBytes = kCount * static_cast<int64_t>(sizeof(float));
constexpr int kSteps = 3;
constexpr int kSeeds = 16;
constexpr int kRefused = 719;  // cudaErrorLaunchFailure

kernels::cuda::Queue queue_of(CudaStream& stream) { return {stream.handle()}; }

/// x *= factor, on the stream.
void scale(CudaStream& on, Buffer& x, float factor) {
  if (!on.ready()) return;
  kernels::cuda::Queue queue = queue_of(on);
  kernels::cuda::scale_floats(queue, x.at<float>().address(), factor, kCount);
  on.keep(queue.error, "launch");
}
void add_to(CudaStream& on, Buffer& x, Buffer& y) {
  if (!on.ready()) return;
  kernels::cuda::Queue queue = queue_of(on);
  kernels::cuda::add_to(queue, x.at<float>().address(), y.at<float>().address(), kCount);
  on.keep(queue.error, "launch");
}

/// What a rank does, in small: gradients from what the host gives, reduced on a second stream, an update, and a third
/// stream that copies the state before the next update overwrites it.
class Training {
 public:
  static Result<std::unique_ptr<Training>> start(std::shared_ptr<Context> context) {
    std::unique_ptr<Training> out(new Training);
    RT_TRY_SET(out->arena_, Arena::reserve(context, 3 * 512));
    for (Buffer* const buffer : {&out->input_, &out->grad_, &out->state_}) {
      RT_TRY_SET(*buffer, Buffer::allocate(context->device(), kBytes));
    }
    out->compute_ = CudaStream::make(context);
    out->reduce_ = out->compute_->beside();
    out->snapshot_ = out->compute_->beside();
    out->numbers_.emplace(*out->compute_, kCount);
    out->saved_.emplace(*out->snapshot_, kSteps * kCount);
    out->given_ = out->compute_->host_memory(kSteps * kBytes);
    return out;
  }

  /// Work that went astray may still write to the host's memory.
  ~Training() {
    for (Stream* const stream : {static_cast<Stream*>(compute_.get()), reduce_.get(), snapshot_.get()}) {
      if (stream != nullptr) ignore(stream->settle(), "the end");
    }
  }

  Status step(int number) {
    auto& reduce = cuda_stream(*reduce_);
    auto& snapshot = cuda_stream(*snapshot_);
    const std::span<float> given(reinterpret_cast<float*>(given_.get()) + number * kCount, kCount);
    std::iota(given.begin(), given.end(), static_cast<float>(number));
    compute_->give(std::span<const float>(given), input_.at<float>());
    compute_->set(grad_.at<float>().address(), 0, kBytes);
    add_to(*compute_, grad_, input_);
    reduce.follow(compute_->mark());
    scale(reduce, grad_, 2);
    compute_->follow(reduce.mark());
    compute_->follow(copied_);  // what is copied is not overwritten
    add_to(*compute_, state_, grad_);
    snapshot.follow(compute_->mark());
    snapshot.copy(saved_->room(number * kCount, kCount).data(), state_.at<float>().address(), kBytes, kToHost);
    copied_ = number + 1 < kSteps ? snapshot.mark() : nullptr;
    compute_->copy(numbers_->room().data(), state_.at<float>().address(), kBytes, kToHost);
    return compute_->settle();
  }

  /// All steps; the last word of each as the host read it, then that of each snapshot.
  Result<std::vector<float>> train() {
    std::vector<float> out;
    for (int number = 0; number < kSteps; ++number) {
      RT_TRY(step(number));
      out.push_back(numbers_->read().back());
    }
    RT_TRY(snapshot_->settle());
    for (int number = 0; number < kSteps; ++number) {
      out.push_back(saved_->read()[static_cast<size_t>((number + 1) * kCount - 1)]);
    }
    return out;
  }

  static std::vector<float> expected() {
    std::vector<float> once;
    float state = 0;
    for (int number = 0; number < kSteps; ++number)
      once.push_back(state += 2 * static_cast<float>(number + kCount - 1));
    std::vector<float> out = once;
    out.insert(out.end(), once.begin(), once.end());
    return out;
  }

 private:
  Training() = default;
  std::unique_ptr<Arena> arena_;
  Buffer input_, grad_, state_;
  std::unique_ptr<CudaStream> compute_;
  std::unique_ptr<Stream> reduce_, snapshot_;
  std::optional<HostNumbers<float>> numbers_, saved_;
  std::shared_ptr<std::byte> given_;
  std::shared_ptr<const Event> copied_;
};

struct Outcome {
  std::vector<float> numbers;
  std::string error, misuses;
  int64_t edges = 0, works = 0;
};

/// `plant` may plant a fault when all is made.
template <typename Plant>
Outcome trained(uint64_t seed, const Plant& plant) {
  CudaMachine machine(seed);
  Outcome out;
  {
    auto training = Training::start(machine.open());
    REQUIRE_OK(training);
    plant(machine.runtime);
    const int64_t edges = machine.runtime.edges(), works = machine.runtime.works();
    const auto numbers = training.value()->train();
    if (numbers.ok()) {
      out.numbers = numbers.value();
    } else {
      out.error = numbers.error().message;
    }
    out.edges = machine.runtime.edges() - edges;
    out.works = machine.runtime.works() - works;
  }
  for (const std::string& what : machine.cuda.misuses()) out.misuses += what + "\n";
  CHECK(machine.cuda.left().empty());
  return out;
}

bool is_right(const Outcome& of) {
  return of.error.empty() && of.misuses.empty() && of.numbers == Training::expected();
}

}  // namespace

TEST_SUITE("runtime/cuda/stream") {
  TEST_CASE("steps over three streams are right under every seed") {
    for (int seed = 0; seed < 4 * kSeeds; ++seed) {
      CAPTURE(seed);
      CHECK(is_right(trained(static_cast<uint64_t>(seed), [](simt::CudaApi&) {})));
    }
    CHECK(simt::take_reports().empty());
  }

  TEST_CASE("each edge between streams that is dropped shows under some seed") {
    const int64_t edges = trained(1, [](simt::CudaApi&) {}).edges;
    CHECK(edges == 3 * kSteps + kSteps - 1);
    for (int64_t dropped = 0; dropped < edges; ++dropped) {
      CAPTURE(dropped);
      int wrong = 0;
      for (int seed = 0; seed < kSeeds; ++seed) {
        wrong += !is_right(trained(static_cast<uint64_t>(seed), [&](simt::CudaApi& api) { api.drop_edge(dropped); }));
      }
      CHECK(wrong > 0);
    }
  }

  TEST_CASE("each piece of work that goes into a wrong stream shows under some seed") {
    const int64_t works = trained(1, [](simt::CudaApi&) {}).works;
    CHECK(works == 7 * kSteps);
    for (int64_t moved = 0; moved < works; ++moved) {
      CAPTURE(moved);
      int wrong = 0;  // in one of the two others: in the second it may stand where its edges hold
      for (int seed = 0; seed < kSeeds; ++seed) {
        for (const int64_t by : {1, 2}) {
          wrong +=
              !is_right(trained(static_cast<uint64_t>(seed), [&](simt::CudaApi& api) { api.swap_stream(moved, by); }));
        }
      }
      CHECK(wrong > 0);
    }
  }

  TEST_CASE("a step waits for the device once, and allocates and pins nothing") {
    CudaMachine machine(5);
    auto started = Training::start(machine.open());
    REQUIRE_OK(started);
    for (int number : {0, 1}) REQUIRE(started.value()->step(number).ok());
    const std::vector<std::string> had = machine.cuda.left();  // events among them
    machine.cuda.take_counts();
    REQUIRE(started.value()->step(2).ok());
    const auto counts = machine.cuda.take_counts();
    CHECK(counts.waits == 1);
    CHECK(counts.allocations == 0);
    CHECK(machine.cuda.left() == had);
  }

  TEST_CASE("each call that is refused, once or from then on, is told, or changes nothing; and all is given back") {
    for (const bool from_then_on : {false, true}) {
      int64_t told = 0;
      bool refused = true;
      for (int64_t calls = 0; refused; ++calls) {
        CAPTURE(from_then_on);
        CAPTURE(calls);
        CudaMachine machine(3);
        machine.cuda.refuse_call(calls, kRefused, from_then_on);
        const auto life = [&]() -> Result<std::vector<float>> {
          RT_TRY_SET(std::shared_ptr<Context> context, Context::open(machine.runtime.api(), 0));
          RT_TRY_SET(const std::unique_ptr<Training> training, Training::start(context));
          return training->train();
        };
        const auto lived = life();
        refused = machine.cuda.refuse_no_more();
        if (lived.ok()) {
          CHECK(lived.value() == Training::expected());
        } else {
          ++told;
          CHECK(refused);
          CHECK(lived.error().message.find("cuda:0") != std::string::npos);
          CHECK(lived.error().message.find("cudaErrorOfDouble") != std::string::npos);
        }
        CHECK(machine.cuda.left().empty());
        CHECK(machine.cuda.misuses().empty());
        CHECK(machine.runtime.api().last_error() == 0);
        if (calls > 2000) FAIL("no end");
      }
      CHECK(told > 60);
    }
  }

  TEST_CASE("what follows work of a failed stream fails too") {
    CudaMachine machine(1);
    auto context = machine.open();
    auto first = CudaStream::make(context), second = CudaStream::make(context);
    machine.cuda.refuse_call(1, kRefused, false);  // behind cudaSetDevice: the record
    second->follow(first->mark());
    CHECK(machine.cuda.refuse_no_more());
    const Status of_first = first->settle(), of_second = second->settle();
    REQUIRE_FALSE(of_first.ok());
    REQUIRE_FALSE(of_second.ok());
    CHECK(of_second.error().message == "cuda:0: work that this follows has failed: " + of_first.error().message);
  }

  TEST_CASE("a wait for a word of the host is tried: the driver may refuse it, and any of its calls may fail") {
    CudaMachine machine(1);
    const auto context = machine.open();
    const auto tried = [&] {
      const auto on = CudaStream::make(context);
      const auto memory = on->host_memory(sizeof(std::atomic<uint32_t>));
      return on->can_follow(*new (memory.get()) std::atomic<uint32_t>(7));
    };
    CHECK_OK(tried());
    machine.runtime.refuse_words(801);
    const Status refused = tried();
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnsupported);
    CHECK(refused.error().message ==
          "cuda:0: the driver refuses cuStreamWaitValue32: refused by the double (CUresult 801)");
    machine.runtime.refuse_words(0);
    // The wait itself, on the device: the stream says so when it is settled.
    const auto on = CudaStream::make(context);
    const auto memory = on->host_memory(sizeof(std::atomic<uint32_t>));
    auto& word = *new (memory.get()) std::atomic<uint32_t>(7);
    int calls = 0;
    for (bool fired = true; fired; ++calls) {
      const auto own = CudaStream::make(context);
      machine.cuda.refuse_call(calls, kRefused, false);
      const Status failed = own->can_follow(word);
      fired = machine.cuda.refuse_no_more();
      CHECK(failed.ok() == !fired);
    }
    CHECK(calls > 4);  // device, address, wait, settling among them
  }

  TEST_CASE("captured work is replayed over all its streams, and nothing is done before") {
    for (int seed = 0; seed < kSeeds; ++seed) {
      CAPTURE(seed);
      CudaMachine machine(static_cast<uint64_t>(seed));
      auto context = machine.open();
      auto arena = Arena::reserve(context, 1024);
      REQUIRE_OK(arena);
      Buffer x = Buffer::allocate(context->device(), kBytes).value();
      auto compute = CudaStream::make(context);
      const auto beside = compute->beside();
      HostNumbers<float> numbers(*compute, kCount);
      const auto given = compute->host_memory(kBytes);
      std::span<float> ones(reinterpret_cast<float*>(given.get()), kCount);
      std::fill(ones.begin(), ones.end(), 1.0f);
      compute->give(std::span<const float>(ones), x.at<float>());
      compute->begin_capture();
      scale(*compute, x, 2);
      beside->follow(compute->mark());
      scale(cuda_stream(*beside), x, 3);
      compute->follow(beside->mark());
      scale(*compute, x, 5);
      auto graph = compute->end_capture();
      REQUIRE_OK(graph);
      float wanted = 1;
      for (int replay = 0; replay < 3; ++replay) {
        compute->copy(numbers.room().data(), x.at<float>().address(), kBytes, kToHost);
        REQUIRE(compute->settle().ok());
        CHECK(numbers.read()[7] == wanted);
        compute->launch(graph.value());
        wanted *= 30;
      }
    }
  }

  TEST_CASE("a capture that waits or takes a copy from the host's own memory is refused, and the stream says why") {
    for (const bool waits : {false, true}) {
      CAPTURE(waits);
      CudaMachine machine(1);
      auto context = machine.open();
      auto arena = Arena::reserve(context, 1024);
      REQUIRE_OK(arena);
      Buffer x = Buffer::allocate(context->device(), kBytes).value();
      auto stream = CudaStream::make(context);
      stream->begin_capture();
      const std::vector<float> own(kCount, 1.0f);
      if (waits) {
        CHECK_FALSE(stream->settle().ok());
      } else {
        stream->give(std::span<const float>(own), x.at<float>());
      }
      CHECK_FALSE(stream->end_capture().ok());
      CHECK_FALSE(stream->settle().ok());
    }
  }

  TEST_CASE("the device prefers streams beside a rank's own, which carry what other ranks wait for") {
    CudaMachine machine(1);
    static std::vector<int> priorities;
    static int (*create)(StreamHandle*, unsigned, int);
    priorities.clear();
    Api api = machine.runtime.api();
    create = api.create_stream;
    api.create_stream = [](StreamHandle* stream, unsigned flags, int priority) {
      priorities.push_back(priority);
      return create(stream, flags, priority);
    };
    auto context = Context::open(api, 0);
    REQUIRE_OK(context);
    const auto own = CudaStream::make(context.value());
    const auto beside = own->beside();
    CHECK(priorities == std::vector<int>{0, -1});
  }

  TEST_CASE("a deadline ends a wait for a device that does not come to an end") {
    CudaMachine machine(1);
    Api stuck = machine.runtime.api();
    stuck.query = [](EventHandle) { return kNotReady; };
    auto context = Context::open(stuck, 0);
    REQUIRE_OK(context);
    {
      auto stream = CudaStream::make(context.value(), {.deadline_ms = 5});
      const Status waited = stream->settle();
      REQUIRE_FALSE(waited.ok());
      CHECK(waited.error().code == ErrorCode::kTimeout);
      CHECK(waited.error().message == "cuda:0: its work is not done after 5 ms");
    }
    auto patient = CudaStream::make(machine.open(), {.deadline_ms = 60'000});
    CHECK(patient->settle().ok());
  }

  TEST_CASE("kernels have the memory that a stream was given for them, and no more") {
    CudaMachine machine(1);
    auto context = machine.open();
    auto arena = Arena::reserve(context, 1024);
    REQUIRE_OK(arena);
    Buffer memory = Buffer::allocate(context->device(), 512).value();
    auto stream = CudaStream::make(context);
    stream->use_scratch(memory.all());
    CHECK(stream->scratch(512, "a norm") == memory.at().address());
    CHECK(stream->ok());
    CHECK(stream->scratch(513, "a norm") == nullptr);
    const Status settled = stream->settle();
    REQUIRE_FALSE(settled.ok());
    CHECK(settled.error().message == "cuda:0: a norm needs 513 bytes for itself, the stream has 512");
  }
}

TEST_SUITE("runtime/cuda/arena") {
  TEST_CASE("buffers are blocks of one allocation of the plan's size, and zero, the second time too") {
    CudaMachine machine(2);
    auto context = machine.open();
    const std::vector<int64_t> blocks = {100, 256, 4096, 1};
    const int64_t bytes = Arena::bytes_for(blocks);
    CHECK(bytes == 256 + 256 + 4096 + 256);
    machine.cuda.take_counts();
    auto arena = Arena::reserve(context, bytes);
    REQUIRE_OK(arena);
    for (int round = 0; round < 2; ++round) {
      CAPTURE(round);
      std::vector<Buffer> buffers;
      for (const int64_t size : blocks) {
        auto made = Buffer::allocate(context->device(), size);
        REQUIRE_OK(made);
        CHECK(made.value().at().aligned_to(256));
        buffers.push_back(std::move(made).value());
      }
      CHECK(arena.value()->used() == bytes);
      CHECK(allocated_bytes(context->device()) == 100 + 256 + 4096 + 1);
      const auto more = Buffer::allocate(context->device(), 1);
      REQUIRE_FALSE(more.ok());
      CHECK(more.error().code == ErrorCode::kNoSpace);
      CHECK(more.error().message == "no room for 1 bytes on cuda:0: 4864 of 4864 reserved there are in use");
      auto stream = CudaStream::make(context);
      HostNumbers<uint8_t> seen(*stream, 4096);
      stream->copy(seen.room().data(), buffers[2].at().address(), 4096, kToHost);
      stream->set(buffers[2].at().address(), 0xee, 4096);
      REQUIRE(stream->settle().ok());
      CHECK(std::count(seen.read().begin(), seen.read().end(), 0) == 4096);
    }
    CHECK(machine.cuda.take_counts().allocations == 1);
  }

  TEST_CASE("without an arena there is no memory, and too large a one says what was asked for") {
    CudaMachine machine(1, 10'000);
    auto context = machine.open();
    CHECK(Buffer::allocate(context->device(), 64).error().code == ErrorCode::kUnsupported);
    const auto large = Arena::reserve(context, 20'000);
    REQUIRE_FALSE(large.ok());
    CHECK(large.error().code == ErrorCode::kNoSpace);
    CHECK(large.error().message.find("20224 bytes on cuda:0: cudaMalloc") == 0);
  }

  TEST_CASE("host code that reads a buffer of a device dies of it") {
    if (simt::build() == simt::Build::kAsan) return;  // whose heap that memory is
    CudaMachine machine(1);
    auto context = machine.open();
    auto arena = Arena::reserve(context, 4096);
    REQUIRE_OK(arena);
    Buffer buffer = Buffer::allocate(context->device(), 4096).value();
    for (const bool by_address : {false, true}) {
      const pid_t child = fork();
      if (child == 0) {
        std::signal(SIGSEGV, SIG_DFL);
        std::signal(SIGABRT, SIG_DFL);
        const std::byte* const at = by_address ? buffer.at().address() : buffer.data();
        _exit(*const_cast<volatile const std::byte*>(at) == std::byte{1} ? 2 : 3);
      }
      int status = 0;
      REQUIRE(waitpid(child, &status, 0) == child);
      CHECK(WIFSIGNALED(status));
      CHECK(WTERMSIG(status) == (by_address ? SIGSEGV : SIGABRT));
    }
  }
}

TEST_SUITE("runtime/cuda/context") {
  TEST_CASE("a device that cannot be used says why") {
    simt::StreamDouble cuda(1);
    const auto why = [&](int devices, int version, int index) {
      simt::CudaApi runtime(cuda, devices, version);
      const auto opened = Context::open(runtime.api(), index);
      REQUIRE_FALSE(opened.ok());
      CHECK(opened.error().code == ErrorCode::kUnavailable);
      return opened.error().message;
    };
    CHECK(why(1, 0, 0) == "cuda:0: no NVIDIA driver (libcuda.so.1) was found");
    CHECK(why(2, 13000, 2) == "cuda:2: this machine has 2 CUDA device(s)");
    CHECK(why(2, 13000, -1) == "cuda:-1: this machine has 2 CUDA device(s)");
    CHECK(why(0, 13000, 0).find("cuda:0: looking for devices: ") == 0);
    simt::CudaApi runtime(cuda, 1);
    Api old = runtime.api();
    old.driver_version = [](int* version) { return *version = 12040, 0; };
    const auto opened = Context::open(old, 0);
    REQUIRE_FALSE(opened.ok());
    CHECK(opened.error().message == "cuda:0: the driver is for CUDA 12.4, the runtime needs one for 13.0");

    Api taken = runtime.api();  // by a process that has it for itself
    taken.set_device = [](int) { return 46; };
    CHECK(Context::find(taken, 0).ok());
    CHECK_FALSE(Context::find(old, 0).ok());
    const auto refused = Context::open(taken, 0);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message.find("cuda:0: cudaSetDevice: ") == 0);
  }

  TEST_CASE("numbers given without room stay over a settle(), in a ring that tells when a step gives too many") {
    CudaMachine machine(5);
    const std::shared_ptr<cuda::Context> context = machine.open();
    auto arena = cuda::Arena::reserve(context, 1 << 16);
    REQUIRE_OK(arena);
    {
      Buffer room = Buffer::allocate(context->device(), cuda::CudaStream::given_room(64, 2)).value();
      const std::unique_ptr<cuda::CudaStream> stream = cuda::CudaStream::make(context);
      stream->use_given(room.all());
      HostNumbers<int32_t> back(*stream, 8);
      const auto read = [&](DevicePtr<const int32_t> there) {
        stream->copy(back.room().data(), there.address(), 8 * 4, cuda::kToHost);
        REQUIRE(stream->settle().ok());
        return std::vector<int32_t>(back.read().begin(), back.read().end());
      };
      std::vector<int32_t> numbers(8, 1);
      machine.cuda.take_counts();
      const DevicePtr<const int32_t> first = stream->give(std::span<const int32_t>(numbers));
      CHECK(machine.cuda.take_counts().waits == 0);
      numbers.assign(8, 2);  // the host's are of no use to the stream any more
      const DevicePtr<const int32_t> second = stream->give(std::span<const int32_t>(numbers));
      CHECK(read(first) == std::vector<int32_t>(8, 1));
      numbers.assign(8, 3);
      const DevicePtr<const int32_t> third = stream->give(std::span<const int32_t>(numbers));
      CHECK(read(first) == std::vector<int32_t>(8, 1));
      CHECK(read(second) == std::vector<int32_t>(8, 2));
      CHECK(read(third) == std::vector<int32_t>(8, 3));
      for (int k = 0; k < 5; ++k) stream->give(std::span<const int32_t>(numbers));
      const Status told = stream->settle();
      REQUIRE_FALSE(told.ok());
      CHECK(told.error().message.find("without room") != std::string::npos);
    }
    CHECK(machine.cuda.misuses().empty());
  }

  TEST_CASE("a ring that is full to its last byte comes round") {
    CudaMachine machine(5);
    const std::shared_ptr<cuda::Context> context = machine.open();
    auto arena = cuda::Arena::reserve(context, 1 << 16);
    REQUIRE_OK(arena);
    for (const int64_t places : {1, 2, 4}) {
      Buffer room = Buffer::allocate(context->device(), places * cuda::CudaStream::given_room(0, 1) / 2).value();
      const std::unique_ptr<cuda::CudaStream> stream = cuda::CudaStream::make(context);
      stream->use_given(room.all());
      HostNumbers<int32_t> back(*stream, 1);
      for (int32_t n = 0; n < 3 * places + 1; ++n) {
        const DevicePtr<const int32_t> there = stream->give(std::span<const int32_t>(&n, 1));
        REQUIRE(there.address() != nullptr);
        CHECK(reinterpret_cast<const std::byte*>(there.address() + 1) <=
              room.all().first.address() + room.size_bytes());
        stream->copy(back.room().data(), there.address(), 4, cuda::kToHost);
        REQUIRE(stream->settle().ok());
        CHECK(back.read()[0] == n);
      }
    }
    CHECK(machine.cuda.misuses().empty());
  }
}
