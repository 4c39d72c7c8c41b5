#include "runtime/kernels/ops.h"

#include "runtime/core/check.h"
#include "runtime/device/guard.h"

namespace cairn::kernels {
namespace {

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

template <typename T>
constexpr Ops<T> cpu_ops() {
  Ops<T> out;
#define RT_FILL(name) out.name = &OnCpu<std::remove_pointer_t<decltype(&kernels::name<T>)>, &kernels::name<T>>::run;
  RT_KERNELS_OF_T(RT_FILL)
#undef RT_FILL
#define RT_FILL(name) out.name = &OnCpu<std::remove_pointer_t<decltype(&kernels::name)>, &kernels::name>::run;
  RT_KERNELS(RT_FILL)
#undef RT_FILL
  out.attention_backward = &OnCpu<AttentionBackward<T>, &kernels::attention_backward<T, T>>::run;
  return out;
}

}  // namespace

template <typename T>
Exec<T> exec_on(Stream& stream) {
  static constexpr Ops<T> kCpu = cpu_ops<T>();
  RT_CHECK(stream.device().kind == DeviceKind::kCpu, "no kernels for {}", device_name(stream.device()));
  return Exec<T>(kCpu, stream);
}

template Exec<float> exec_on<float>(Stream&);
template Exec<bf16> exec_on<bf16>(Stream&);
template Exec<f16> exec_on<f16>(Stream&);

}  // namespace cairn::kernels
