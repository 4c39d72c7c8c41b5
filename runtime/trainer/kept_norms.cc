#include "runtime/trainer/kept_norms.h"

#include "runtime/core/check.h"
#include "runtime/trainer/state.h"
#include "runtime/trainer/work_shapes.h"

namespace cairn::trainer {

bool norms_fit(const Plan& plan, int64_t rank, const Machine& machine, int64_t device_ranks) {
  RT_CHECK(device_ranks > 0, "{} ranks on a device", device_ranks);
  const int64_t device_bytes = machine.memory_bytes();
  if (device_bytes == 0) return false;
  Plan keeping = plan;
  keeping.keeps_norms = true;
  const std::vector<int64_t> blocks = TrainState::blocks(keeping, keeping.rank(rank), {});  // all of it its own
  return machine.bytes_for(blocks, work_shapes(keeping, rank)) + kDeviceReserveBytes <= device_bytes / device_ranks;
}

}  // namespace cairn::trainer
