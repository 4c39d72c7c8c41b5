#pragma once
// RT_CHECK is for our own mistakes, in every build type; bad input is answered with a Status.

#include <fmt/format.h>

#include <string>

namespace cairn {
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& message);
}

#define RT_CHECK(condition, ...)                                                            \
  do {                                                                                      \
    if (!(condition)) [[unlikely]]                                                          \
      ::cairn::check_failed(__FILE__, __LINE__, #condition, ::fmt::format("" __VA_ARGS__)); \
  } while (false)
