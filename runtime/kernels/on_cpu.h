#pragma once
// Fills tables of kernels (runtime/kernels/table.h) for a CPU, which does the work before the call returns.

#include "runtime/device/guard.h"
#include "runtime/kernels/table.h"

namespace cairn::kernels {

/// A CPU's kernel as the tables want it.
template <typename Cpu, Cpu* kFunction>
struct OnCpu;
template <typename... A, void (*kFunction)(A...)>
struct OnCpu<void(A...), kFunction> {
  static void run(Stream&, typename Param<A>::Type... of) {
    const DeviceAccess inside;
    kFunction(Param<A>::on_cpu(of)...);
  }
};

#define RT_FILL(name) out.name = &OnCpu<std::remove_pointer_t<decltype(&kernels::name)>, &kernels::name>::run;
#define RT_FILL_OF_T(name) \
  out.name = &OnCpu<std::remove_pointer_t<decltype(&kernels::name<T>)>, &kernels::name<T>>::run;

}  // namespace cairn::kernels
