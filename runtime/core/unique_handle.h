#pragma once
// UniqueHandle<Traits>: move-only ownership of a C handle, wrapped on the line that acquires it.
//   struct FdTraits { using Handle = int; static constexpr int kInvalid = -1; static void close(int fd); };

#include <utility>

namespace cairn {

template <typename Traits>
class UniqueHandle {
 public:
  using Handle = typename Traits::Handle;
  UniqueHandle() = default;
  explicit UniqueHandle(Handle handle) : handle_(handle) {}
  UniqueHandle(UniqueHandle&& other) noexcept : handle_(other.release()) {}
  UniqueHandle& operator=(UniqueHandle&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  UniqueHandle(const UniqueHandle&) = delete;
  UniqueHandle& operator=(const UniqueHandle&) = delete;
  ~UniqueHandle() { reset(); }

  Handle get() const { return handle_; }
  explicit operator bool() const { return handle_ != Traits::kInvalid; }
  Handle release() { return std::exchange(handle_, Traits::kInvalid); }
  void reset(Handle handle = Traits::kInvalid) {
    if (handle_ != Traits::kInvalid) Traits::close(handle_);
    handle_ = handle;
  }

 private:
  Handle handle_ = Traits::kInvalid;
};

struct FdTraits {
  using Handle = int;
  static constexpr int kInvalid = -1;
  static void close(int fd);
};
using Fd = UniqueHandle<FdTraits>;

}  // namespace cairn
