#pragma once
// Sizes of a call of an op, by which its time is kept (runtime/device/op_clock.h). A struct that ops take has an
// add_dims() beside it, which adds those that its time depends on.

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace cairn {

class OpDims {
 public:
  /// Further ones are dropped.
  static constexpr size_t kMostSizes = 8, kMostWords = 6;

  /// Sizes that differ from step to step make a new kind of op each time: leave them out.
  constexpr void add(int64_t size) {
    if (sizes_used_ < kMostSizes) sizes_[sizes_used_++] = size;
  }
  /// A word for more that the op does beside its name; it lives as long as the program.
  constexpr void say(std::string_view word) {
    if (words_used_ < kMostWords) words_[words_used_++] = word;
  }
  constexpr void say_if(bool does, std::string_view word) {
    if (does) say(word);
  }

  std::span<const int64_t> sizes() const { return {sizes_.data(), sizes_used_}; }
  std::span<const std::string_view> words() const { return {words_.data(), words_used_}; }

  friend auto operator<=>(const OpDims&, const OpDims&) = default;

 private:
  size_t sizes_used_ = 0, words_used_ = 0;
  std::array<int64_t, kMostSizes> sizes_{};
  std::array<std::string_view, kMostWords> words_{};
};

}  // namespace cairn
