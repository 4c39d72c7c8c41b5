// The engines over which tests/runtime/comm/conformance_test.cc runs here: NCCL's, on doubles.
#include <utility>

#include "tests/runtime/comm/fabric.h"
#include "tests/runtime/cuda/nccl/nccl_rank.h"

namespace cairn::comm::testing {
namespace {

using cuda::testing::CarriedEngine;
using cuda::testing::NcclRank;

std::vector<std::string> run_nccl(const WorldSpec& spec, const Body& body, uint64_t seed, bool registers) {
  const auto world = ShmWorld::create(world_config(spec));
  if (!world.ok()) return {world.error().message};
  simt::NcclSegment segment;
  Processes ranks(
      spec.size,
      [&](int64_t rank) -> Result<std::unique_ptr<Engine>> {
        RT_TRY_SET(auto host, attach_shm_engine(world.value().fd(), rank, {.deadline_ms = spec.deadline_ms}));
        RT_TRY_SET(auto made, NcclRank::make(std::move(host), segment,
                                             {.seed = seed + static_cast<uint64_t>(2 * rank),
                                              .deadline_ms = spec.deadline_ms,
                                              .registers = [=](int64_t) { return registers; }}));
        return std::unique_ptr<Engine>(std::make_unique<CarriedEngine>(std::move(made)));
      },
      [&](Engine& engine) -> std::string {
        std::string told = body(engine);
        if (!told.empty()) return told;
        return static_cast<CarriedEngine&>(engine).of().finish();
      });
  std::vector<std::string> results;
  for (int64_t r = 0; r < spec.size; ++r) results.push_back(ranks.join(r));
  return results;
}

}  // namespace

std::vector<Fabric> fabrics() {
  return {{"nccl", [](const WorldSpec& spec, const Body& body) { return run_nccl(spec, body, 4, false); }, 40, false,
           false},
          {"nccl, collectives one by one, in registered memory",
           [](const WorldSpec& spec, const Body& body) { return run_nccl(spec, body, 5, true); }, 40, false, false}};
}

Around around(const WorldSpec& spec) {
  return [segment = std::make_shared<simt::NcclSegment>(),
          deadline_ms = spec.deadline_ms](std::unique_ptr<Engine> host) -> Result<std::unique_ptr<Engine>> {
    const auto rank = static_cast<uint64_t>(host->world_rank());
    RT_TRY_SET(auto made,
               NcclRank::make(std::move(host), *segment, {.seed = 4 + 2 * rank, .deadline_ms = deadline_ms}));
    return std::unique_ptr<Engine>(std::make_unique<CarriedEngine>(std::move(made)));
  };
}

}  // namespace cairn::comm::testing
