#include "runtime/kernels/ops.h"

#include <atomic>

#include "runtime/core/check.h"
#include "runtime/kernels/on_cpu.h"

namespace cairn::kernels {
namespace {

template <typename T>
constexpr Ops<T> cpu_ops() {
  Ops<T> out;
  RT_KERNELS_OF_T(RT_FILL_OF_T)
  RT_KERNELS(RT_FILL)
  out.attention_backward = &OnCpu<AttentionBackward<T>, &kernels::attention_backward<T, T>>::run;
  return out;
}

template <typename T>
std::atomic<const Ops<T>*> of_cuda = nullptr;

}  // namespace

template <typename T>
void serve_cuda_ops(const Ops<T>& ops) {
  of_cuda<T> = &ops;
}
template void serve_cuda_ops<float>(const Ops<float>&);
template void serve_cuda_ops<bf16>(const Ops<bf16>&);
template void serve_cuda_ops<f16>(const Ops<f16>&);

template <typename T>
Exec<T> exec_on(Stream& stream) {
  static constexpr Ops<T> kCpu = cpu_ops<T>();
  const Ops<T>* const ops = stream.device().kind == DeviceKind::kCpu ? &kCpu : of_cuda<T>.load();
  RT_CHECK(ops != nullptr, "no kernels for {}", device_name(stream.device()));
  return Exec<T>(*ops, stream);
}

template Exec<float> exec_on<float>(Stream&);
template Exec<bf16> exec_on<bf16>(Stream&);
template Exec<f16> exec_on<f16>(Stream&);

}  // namespace cairn::kernels
