#include "runtime/kernels/state_ops.h"

#include <atomic>

#include "runtime/core/check.h"
#include "runtime/kernels/on_cpu.h"

namespace cairn::kernels {
namespace {

constexpr StateOps cpu_ops() {
  StateOps out;
  RT_STATE_KERNELS(RT_FILL)
  return out;
}

std::atomic<const StateOps*> of_cuda = nullptr;

}  // namespace

void serve_cuda_state_ops(const StateOps& ops) { of_cuda = &ops; }

StateExec state_exec_on(Stream& stream) {
  static constexpr StateOps kCpu = cpu_ops();
  const StateOps* const ops = stream.device().kind == DeviceKind::kCpu ? &kCpu : of_cuda.load();
  RT_CHECK(ops != nullptr, "no kernels for {}", device_name(stream.device()));
  return StateExec(*ops, stream);
}

}  // namespace cairn::kernels
