#pragma once
// Result<T> and Status: the one error idiom. Failures arise in completion threads and C callbacks (HDF5, Lua) where a
// throw is fatal or undefined, and a commit protocol should show each of its exits.

#include <optional>
#include <string_view>
#include <utility>
#include <variant>

#include "runtime/core/check.h"
#include "runtime/core/error.h"

namespace cairn {

template <typename T>
class [[nodiscard]] Result {
 public:
  using value_type = T;
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: a value is a result
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: an error is a result

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  T& value() & {
    RT_CHECK(ok(), "value() of an error: {}", std::get<1>(state_).message);
    return std::get<0>(state_);
  }
  const T& value() const& {
    RT_CHECK(ok(), "value() of an error: {}", std::get<1>(state_).message);
    return std::get<0>(state_);
  }
  T value() && {  // by value: `for (x : f().value())` must not dangle
    RT_CHECK(ok(), "value() of an error: {}", std::get<1>(state_).message);
    return std::get<0>(std::move(state_));
  }
  const Error& error() const& { return std::get<1>(state_); }
  Error&& error() && { return std::get<1>(std::move(state_)); }

  /// The same result; an error gets `context` in front of its message.
  Result with(std::string_view context) && {
    if (ok()) return std::move(*this);
    return std::get<1>(std::move(state_)).with(context);
  }

 private:
  std::variant<T, Error> state_;
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)) {}  // NOLINT: an error is a status

  bool ok() const { return !error_.has_value(); }
  explicit operator bool() const { return ok(); }
  const Error& error() const& { return *error_; }
  Error&& error() && { return std::move(*error_); }

  Status with(std::string_view context) && {
    if (ok()) return std::move(*this);
    return std::move(*error_).with(context);
  }

 private:
  std::optional<Error> error_;
};

/// A dropped status that says why.
inline void ignore(const Status&, std::string_view /*why*/) {}

}  // namespace cairn

#define RT_CONCAT_INNER(a, b) a##b
#define RT_CONCAT(a, b) RT_CONCAT_INNER(a, b)

/// Returns the error of a Status or Result expression from the enclosing function.
#define RT_TRY(...)                                                   \
  do {                                                                \
    auto rt_try_status = (__VA_ARGS__);                               \
    if (!rt_try_status.ok()) return std::move(rt_try_status).error(); \
  } while (false)

/// `RT_TRY_SET(const auto x, expr)`: declares x from a Result, or returns its error.
#define RT_TRY_SET(declaration, ...) RT_TRY_SET_INNER(RT_CONCAT(rt_try_result_, __LINE__), declaration, __VA_ARGS__)
#define RT_TRY_SET_INNER(name, declaration, ...)  \
  auto name = (__VA_ARGS__);                      \
  if (!name.ok()) return std::move(name).error(); \
  declaration = std::move(name).value()
