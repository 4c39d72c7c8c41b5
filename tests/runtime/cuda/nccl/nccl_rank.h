#pragma once
// A rank whose arrays lie on a device that is a double, and which communicates by the double of NCCL; and an engine
// over it for callers whose arrays are the host's: each goes to the device and comes back.

#include <fmt/format.h>

#include <bit>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/comm/shm_world.h"
#include "runtime/cuda/arena.h"
#include "runtime/cuda/nccl/nccl_engine.h"
#include "tests/runtime/comm/fabric.h"
#include "tests/simt/cuda_api.h"
#include "tests/simt/nccl_double.h"

namespace cairn::cuda::testing {

struct RankOptions {
  uint64_t seed = 0;
  int64_t room_bytes = 64 << 10;  // for what is summed: less than many operations take
  int64_t deadline_ms = 20000;
  bool device_runs = true;  // while the host is at something else
  bool ordered = false;     // NcclDouble::order_launches()
  int64_t ways = 1;
  std::function<NcclPeers(std::string_view axis)> peers;
  bool whole_axes = false;
  std::function<int(std::string_view axis)> max_ctas;
  std::string host_name;
  /// Whether a rank registers its memory, which is NCCL's then; empty: none does.
  std::function<bool(int64_t rank)> registers;
  bool of_cuda = false;  // what it registers is memory of cudaMalloc
};

/// In the process of the rank.
class NcclRank {
 public:
  static Result<std::unique_ptr<NcclRank>> make(std::unique_ptr<comm::Engine> host, simt::NcclSegment& segment,
                                                const RankOptions& options) {
    std::unique_ptr<NcclRank> out(new NcclRank(std::move(host), segment, options));
    RT_TRY_SET(out->context_, Context::open(out->runtime.api(), 0));
    const bool registers = options.registers && options.registers(out->host_->world_rank());
    const int64_t blocks[] = {options.room_bytes, options.room_bytes, registers ? kOfArrays : 0};
    RT_TRY_SET(out->arena_, Arena::reserve(out->context_, Arena::bytes_for(blocks),
                                           registers && !options.of_cuda ? &out->nccl.api() : nullptr));
    out->stream_ = CudaStream::make(out->context_, {.deadline_ms = 0});
    RT_TRY(out->stream_->settle());
    for (Buffer& room : out->rooms_) {
      RT_TRY_SET(room, Buffer::allocate(out->context_->device(), options.room_bytes));
    }
    std::function<DeviceBytes()> registered;
    if (registers) registered = [at = out.get()] { return at->arena_->all(); };
    out->arrays_in_arena_ = registers;
    RT_TRY_SET(
        out->engine_,
        make_nccl_engine(*out->host_, out->nccl.api(), kernels::cuda::rank_sums(), *out->stream_,
                         {.deadline_ms = options.deadline_ms,
                          .rooms =
                              [at = out.get()] {
                                return NcclRooms{at->rooms_[0].all(), at->rooms_[1].all()};
                              },
                          .registered = std::move(registered),
                          .max_ctas = options.max_ctas,
                          .ways = options.ways,
                          .on_device = [at = out.get()](const void* memory) { return at->cuda.holds(memory, 1); },
                          .peers = options.peers,
                          .whole_axes = options.whole_axes,
                          .host_name = options.host_name}));
    // A device goes on by itself while the host is at something else.
    if (options.device_runs) out->device_.emplace(out->cuda);
    return out;
  }
  ~NcclRank() { finish(); }

  CudaStream& stream() { return *stream_; }
  comm::Engine& engine() { return *engine_; }
  comm::Engine& host() { return *host_; }
  const std::shared_ptr<Context>& context() const { return context_; }

  /// Memory of the device that is used again: to free it would wait for all streams, and so for other ranks.
  std::byte* take(int64_t bytes) {
    const int64_t size = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
    std::vector<std::byte*>& free = free_[size];
    if (free.empty()) {
      if (arrays_in_arena_) return arena_->take(size).value();
      void* made = nullptr;
      RT_CHECK(cuda.allocate(&made, size) == 0, "no {} bytes on the double", size);
      return static_cast<std::byte*>(made);
    }
    std::byte* const out = free.back();
    free.pop_back();
    return out;
  }
  void give_back(std::byte* memory, int64_t bytes) {
    free_[static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)))].push_back(memory);
  }

  /// After all groups are gone: what was done wrong, and what is left.
  std::string finish() {
    if (stream_ == nullptr) return {};
    engine_.reset();
    ignore(stream_->settle(), "told where results were asked for");
    device_.reset();
    stream_.reset();
    for (const auto& [size, blocks] : free_) {
      for (std::byte* const block : blocks) {
        if (!arrays_in_arena_) cuda.free(block);
      }
    }
    for (Buffer& room : rooms_) room = Buffer();
    arena_.reset();
    context_.reset();
    std::string wrong;
    for (const auto& misuses : {cuda.misuses(), nccl.misuses(), cuda.left()}) {
      for (const std::string& what : misuses) wrong += what + "; ";
    }
    if (nccl.left() > 0) wrong += fmt::format("{} communicators are left", nccl.left());
    return wrong;
  }

  simt::StreamDouble cuda;
  simt::CudaApi runtime;
  simt::NcclDouble nccl;

 private:
  NcclRank(std::unique_ptr<comm::Engine> host, simt::NcclSegment& segment, const RankOptions& options)
      : cuda(options.seed, int64_t{1} << 28), runtime(cuda), nccl(cuda, segment, options.seed), host_(std::move(host)) {
    nccl.order_launches(options.ordered);
  }

  static constexpr int64_t kOfArrays = int64_t{8} << 20;
  const std::unique_ptr<comm::Engine> host_;
  bool arrays_in_arena_ = false;
  std::shared_ptr<Context> context_;
  std::unique_ptr<Arena> arena_;
  Buffer rooms_[2];
  std::map<int64_t, std::vector<std::byte*>> free_;  // by size
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<comm::Engine> engine_;
  std::optional<simt::DeviceRuns> device_;
};

/// Arrays of the host, taken to the device and back.
class CarriedComm final : public comm::Comm {
 public:
  CarriedComm(NcclRank& rank, std::unique_ptr<comm::Comm> inner) : rank_(rank), inner_(std::move(inner)) {}
  ~CarriedComm() override {
    ignore(rank_.stream().settle(), "the test has seen it");
    inner_.reset();
  }
  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  Traffic traffic() const override { return inner_->traffic(); }

  Status all_reduce(void* data, int64_t count, DType dtype, comm::ReduceOp op, std::string_view what) override {
    Array there(rank_, data, std::max<int64_t>(0, count * dtype_size_bytes(dtype)));
    RT_TRY(inner_->all_reduce(there.at(), count, dtype, op, what));
    return there.fetch(data);
  }
  Status reduce_scatter(const void* input, void* output, int64_t count_per_rank, DType dtype, comm::ReduceOp op,
                        std::string_view what) override {
    const int64_t part = std::max<int64_t>(0, count_per_rank * dtype_size_bytes(dtype));
    Array in(rank_, input, size() * part), out(rank_, output, part);
    const bool in_place = output == static_cast<const char*>(input) + rank() * part;
    std::byte* const to = in_place ? in.at() + rank() * part : out.at();
    RT_TRY(inner_->reduce_scatter(static_cast<const void*>(in.at()), to, count_per_rank, dtype, op, what));
    return (in_place ? in : out).fetch(output, in_place ? rank() * part : 0, part);
  }
  Status reduce_scatter_add(const void* input, void* output, int64_t count_per_rank, DType dtype, int64_t tree,
                            std::string_view what) override {
    const int64_t part = count_per_rank * dtype_size_bytes(dtype);
    Array in(rank_, input, size() * part), out(rank_, output, part);
    RT_TRY(inner_->reduce_scatter_add(static_cast<const void*>(in.at()), out.at(), count_per_rank, dtype, tree, what));
    return out.fetch(output);
  }
  Status all_gather(const void* input, void* output, int64_t bytes, std::string_view what) override {
    Array in(rank_, input, bytes), out(rank_, output, size() * bytes);
    const bool in_place = input == static_cast<const char*>(output) + rank() * bytes;
    RT_TRY(inner_->all_gather(in_place ? static_cast<const void*>(out.at() + rank() * bytes) : in.at(), out.at(), bytes,
                              what));
    return out.fetch(output);
  }
  Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) override {
    Array there(rank_, data, std::max<int64_t>(0, bytes));
    RT_TRY(inner_->broadcast(there.at(), bytes, root, what));
    return there.fetch(data);
  }
  Status all_to_all(std::span<const comm::OutPart> out, std::span<const comm::InPart> in,
                    std::string_view what) override {
    std::vector<std::unique_ptr<Array>> from, to;
    std::vector<comm::OutPart> give;
    std::vector<comm::InPart> take;
    for (const comm::OutPart& part : out) {
      from.push_back(std::make_unique<Array>(rank_, part.data, std::max<int64_t>(0, part.bytes)));
      give.push_back({part.peer, from.back()->at(), part.bytes});
    }
    for (const comm::InPart& part : in) {
      to.push_back(std::make_unique<Array>(rank_, part.data, std::max<int64_t>(0, part.bytes)));
      take.push_back({part.peer, to.back()->at(), part.bytes});
    }
    RT_TRY(inner_->all_to_all(give, take, what));
    for (size_t k = 0; k < in.size(); ++k) RT_TRY(to[k]->fetch(in[k].data));
    return rank_.stream().settle();
  }
  Status barrier(std::string_view what) override { return inner_->barrier(what); }
  Status isend(const void* data, int64_t bytes, int64_t dst, std::string_view what) override {
    auto there = std::make_unique<Array>(rank_, data, std::max<int64_t>(0, bytes));
    RT_TRY(inner_->isend(static_cast<const void*>(there->at()), bytes, dst, what));
    sent_.push_back(std::move(there));
    return {};
  }
  Status recv(void* data, int64_t bytes, int64_t src, std::string_view what) override {
    Array there(rank_, data, std::max<int64_t>(0, bytes));
    RT_TRY(inner_->recv(there.at(), bytes, src, what));
    return there.fetch(data);
  }
  Status wait_sends(std::string_view what) override {
    RT_TRY(inner_->wait_sends(what));
    RT_TRY(rank_.stream().settle());
    sent_.clear();
    return {};
  }
  Status wait_sends_to(int64_t dst, int64_t may_stay, std::string_view what) override {
    RT_TRY(inner_->wait_sends_to(dst, may_stay, what));
    return rank_.stream().settle();
  }

 private:
  class Array {
   public:
    Array(NcclRank& rank, const void* data, int64_t bytes) : rank_(rank), bytes_(bytes) {
      if (bytes == 0) return;
      at_ = rank_.take(bytes);
      rank_.stream().copy(at_, data, bytes, kToDevice);
    }
    ~Array() {
      if (at_ == nullptr) return;
      ignore(rank_.stream().settle(), "told where the array is fetched");
      rank_.give_back(at_, bytes_);
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    std::byte* at() const { return at_; }
    Status fetch(void* to) { return fetch(to, 0, bytes_); }
    Status fetch(void* to, int64_t from, int64_t bytes) {
      if (bytes > 0) rank_.stream().copy(to, at_ + from, bytes, kToHost);
      return rank_.stream().settle();
    }

   private:
    NcclRank& rank_;
    const int64_t bytes_;
    std::byte* at_ = nullptr;
  };

  NcclRank& rank_;
  std::unique_ptr<comm::Comm> inner_;
  std::vector<std::unique_ptr<Array>> sent_;
};

class CarriedEngine final : public comm::Engine {
 public:
  explicit CarriedEngine(std::unique_ptr<NcclRank> rank) : rank_(std::move(rank)) {}
  NcclRank& of() { return *rank_; }
  int64_t world_rank() const override { return rank_->engine().world_rank(); }
  int64_t world_size() const override { return rank_->engine().world_size(); }
  bool keeps_rank_order() const override { return rank_->engine().keeps_rank_order(); }
  Result<std::unique_ptr<comm::Comm>> group(std::string_view axis, const std::vector<int64_t>& ranks) override {
    RT_TRY_SET(std::unique_ptr<comm::Comm> made, rank_->engine().group(axis, ranks));
    if (made->size() == 1) return made;  // of the host
    return std::unique_ptr<comm::Comm>(std::make_unique<CarriedComm>(*rank_, std::move(made)));
  }
  Result<std::unique_ptr<comm::Comm>> exact_group(std::string_view axis, const std::vector<int64_t>& ranks) override {
    return rank_->engine().exact_group(axis, ranks);
  }
  Status no_group(std::string_view axis) override { return rank_->engine().no_group(axis); }
  void abort(std::string_view reason) override { rank_->engine().abort(reason); }
  void give_up(ErrorCode code, std::string_view reason) override { rank_->engine().give_up(code, reason); }
  void at(int64_t step, std::string_view phase) override { rank_->engine().at(step, phase); }

 private:
  const std::unique_ptr<NcclRank> rank_;
};

/// Ranks as processes, each with what is above. What a body returns is what went wrong, or "".
class Ranks {
 public:
  using RankBody = std::function<std::string(NcclRank&)>;

  Ranks(int64_t size, const RankOptions& options, const RankBody& body, int64_t host_deadline_ms = 20000)
      : world(comm::ShmWorld::create({.world_size = size, .channel_bytes = 4096, .staging_bytes = 16384}).value()),
        processes(
            size,
            [&](int64_t rank) -> Result<std::unique_ptr<comm::Engine>> {
              RT_TRY_SET(auto host, comm::attach_shm_engine(world.fd(), rank, {.deadline_ms = host_deadline_ms}));
              RankOptions mine = options;
              mine.seed += static_cast<uint64_t>(2 * rank);
              RT_TRY_SET(auto made, NcclRank::make(std::move(host), segment, mine));
              return std::unique_ptr<comm::Engine>(std::make_unique<CarriedEngine>(std::move(made)));
            },
            [&](comm::Engine& engine) { return body(static_cast<CarriedEngine&>(engine).of()); }) {}

  std::vector<std::string> join() {
    std::vector<std::string> out;
    for (int64_t r = 0; r < static_cast<int64_t>(world.ranks().size()); ++r) out.push_back(processes.join(r));
    return out;
  }

  simt::NcclSegment segment;
  comm::ShmWorld world;
  comm::testing::Processes processes;
};

}  // namespace cairn::cuda::testing
