#pragma once
// How kernels become tables of functions. A kernel is declared once, for the CPU, in its header here, which says what
// it computes. A list of names (an X-macro) makes of it a member of a table, which each device's folder fills, and the
// same bound to a stream, by which callers call. In the tables its addresses are DevicePtr and the stream comes first.
// Tables: runtime/kernels/ops.h, runtime/kernels/state_ops.h. Who fills them for a CPU: runtime/kernels/on_cpu.h.

#include <type_traits>

#include "runtime/device/stream.h"

namespace cairn::kernels {

/// How a parameter of a CPU's kernel stands in the tables.
template <typename A>
struct Param {
  using Type = A;
  static A on_cpu(A a) { return a; }
};
template <typename T>
struct Param<T*> {
  using Type = DevicePtr<T>;
  static T* on_cpu(DevicePtr<T> a) { return a.address(); }
};

/// A kernel in the tables, from the type of the CPU's.
template <typename Cpu>
struct Kernel;
template <typename... A>
struct Kernel<void(A...)> {
  using Function = void (*)(Stream&, typename Param<A>::Type...);
  /// One that does what `kStop` does, and nothing of the kernel.
  template <auto kStop>
  static void stopped(Stream& on, typename Param<A>::Type...) {
    kStop(on);
  }
  /// Bound to a stream.
  class Bound {
   public:
    Bound(Function function, Stream& stream) : function_(function), stream_(&stream) {}
    void operator()(typename Param<A>::Type... of) const { function_(*stream_, of...); }

   private:
    Function function_;
    Stream* stream_;
  };
};

// For lists of names. _OF_T: of templates over the element type T.
#define RT_KERNEL(name) kernels::Kernel<std::remove_pointer_t<decltype(&kernels::name)>>
#define RT_KERNEL_OF_T(name) kernels::Kernel<std::remove_pointer_t<decltype(&kernels::name<T>)>>
#define RT_FUNCTION(name) typename RT_KERNEL(name)::Function name = nullptr;
#define RT_FUNCTION_OF_T(name) typename RT_KERNEL_OF_T(name)::Function name = nullptr;
#define RT_BOUND(name) typename RT_KERNEL(name)::Bound name;
#define RT_BOUND_OF_T(name) typename RT_KERNEL_OF_T(name)::Bound name;
#define RT_BIND(name) , name(ops.name, on)

}  // namespace cairn::kernels
