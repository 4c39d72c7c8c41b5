#pragma once
// How kernels become tables of functions. A kernel is declared once, for the CPU, in its header here, which says what
// it computes. A list of names (an X-macro) makes of it a member of a table, which each device's folder fills, and the
// same bound to a stream, by which callers call. In the tables its addresses are DevicePtr and the stream comes first.
// Tables: runtime/kernels/ops.h, runtime/kernels/state_ops.h. Who fills them for a CPU: runtime/kernels/on_cpu.h.

#include <span>
#include <type_traits>

#include "runtime/device/op_clock.h"
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

/// Has no sizes of its own: an array, which others size.
template <typename A>
inline constexpr bool kIsArray = false;
template <typename T>
inline constexpr bool kIsArray<DevicePtr<T>> = true;
template <typename T>
inline constexpr bool kIsArray<std::span<T>> = true;

template <typename A>
concept SaysItsSizes = requires(OpDims& to, const A& of) {
  add_dims(to, of);
};
/// A kernel may take it.
template <typename A>
concept CanBeTimed = std::is_arithmetic_v<A> || std::is_enum_v<A> || kIsArray<A> || SaysItsSizes<A>;

/// The sizes of one argument of a call.
template <typename A>
void add_argument(OpDims& to, const A& of) {
  static_assert(CanBeTimed<A>, "a struct that kernels take needs an add_dims(OpDims&, const Struct&) beside it");
  if constexpr (std::is_integral_v<A> && !std::is_same_v<A, bool>) {
    to.add(of);
  } else if constexpr (SaysItsSizes<A>) {
    add_dims(to, of);
  }
}

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
    Bound(Function function, Stream& stream, const char* name) : function_(function), stream_(&stream), name_(name) {}
    void operator()(typename Param<A>::Type... of) const {
      if (stream_->clock() != nullptr) return timed(of...);
      function_(*stream_, of...);
    }

   private:
    [[gnu::noinline]] void timed(typename Param<A>::Type... of) const {
      OpDims dims;
      (add_argument(dims, of), ...);
      stream_->clock()->begin(name_, dims);
      function_(*stream_, of...);
      stream_->clock()->end();
    }

    Function function_;
    Stream* stream_;
    const char* name_;
  };
};

// For lists of names. _OF_T: of templates over the element type T.
#define RT_KERNEL(name) kernels::Kernel<std::remove_pointer_t<decltype(&kernels::name)>>
#define RT_KERNEL_OF_T(name) kernels::Kernel<std::remove_pointer_t<decltype(&kernels::name<T>)>>
#define RT_FUNCTION(name) typename RT_KERNEL(name)::Function name = nullptr;
#define RT_FUNCTION_OF_T(name) typename RT_KERNEL_OF_T(name)::Function name = nullptr;
#define RT_BOUND(name) typename RT_KERNEL(name)::Bound name;
#define RT_BOUND_OF_T(name) typename RT_KERNEL_OF_T(name)::Bound name;
#define RT_BIND(name) , name(ops.name, on, #name)

}  // namespace cairn::kernels
