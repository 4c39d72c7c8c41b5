#include "converters/block_fp8.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "converters/elements.h"
#include "converters/weights_folder.h"
#include "runtime/core/check.h"
#include "runtime/core/glob.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

constexpr float kLeastScale = std::numeric_limits<float>::min();

/// One block of a band.
struct Block {
  const float* values;
  int64_t rows, columns, stride;

  std::span<const float> row(int64_t r) const { return {values + r * stride, static_cast<size_t>(columns)}; }
};

constexpr size_t kAtOnce = 64;  // numbers, in loops that have a length and no way out, which the compiler makes wide

float largest_of(const Block& block) {
  std::array<int32_t, kAtOnce> bits{}, most{};  // without the sign they are in the order of the numbers
  for (int64_t r = 0; r < block.rows; ++r) {
    for (std::span<const float> row = block.row(r); !row.empty();) {
      const size_t count = std::min(row.size(), kAtOnce);
      std::memcpy(bits.data(), row.data(), count * sizeof(float));
      for (size_t k = 0; k < kAtOnce; ++k) most[k] = std::max(most[k], bits[k] & 0x7fffffff);
      row = row.subspan(count);
    }
  }
  return std::bit_cast<float>(*std::ranges::max_element(most));
}

/// The codes of so many numbers, at most kAtOnce.
void codes_of(const float* values, size_t count, float scale, std::byte* codes) {
  std::array<float, kAtOnce> scaled{};
  std::memcpy(scaled.data(), values, count * sizeof(float));
  for (size_t k = 0; k < kAtOnce; ++k) scaled[k] /= scale;
  to_e4m3(std::span(scaled).first(count), codes);
}

/// Whether each number is a code times `scale`, to the bit. Of most blocks the first few are not.
bool holds_exactly(const Block& block, float scale) {
  std::array<float, kAtOnce> made{};
  std::array<std::byte, kAtOnce> codes{};
  for (int64_t r = 0; r < block.rows; ++r) {
    for (std::span<const float> row = block.row(r); !row.empty();) {
      const size_t count = std::min(row.size(), kAtOnce);
      codes_of(row.data(), count, scale, codes.data());
      to_floats("F8_E4M3", codes.data(), static_cast<int64_t>(count), made.data());
      for (size_t k = 0; k < kAtOnce; ++k) made[k] *= scale;
      if (std::memcmp(made.data(), row.data(), count * sizeof(float)) != 0) return false;
      row = row.subspan(count);
    }
  }
  return true;
}

/// largest / 448, or a scale of which all numbers are multiples by codes, where there is one. Of such a scale s the
/// largest number is float(top * s), and top has one of the eight mantissas of codes; as half of s goes with codes
/// twice as large, only the largest top of each mantissa is tried. The quotient of the rounded product is less than one
/// ulp from s, which therefore is float(largest / top) or a neighbour of it.
float find_scale(const Block& block, float largest) {
  if (largest == 0) return 1;
  for (const float top : {448.0f, 416.0f, 384.0f, 352.0f, 320.0f, 288.0f, 256.0f, 240.0f}) {
    const float nearest = largest / top;
    for (const float scale :
         {nearest, std::nextafter(nearest, 0.0f), std::nextafter(nearest, std::numeric_limits<float>::max())}) {
      if (scale >= kLeastScale && scale * top == largest && holds_exactly(block, scale)) return scale;
    }
  }
  float scale = std::max(largest / kMaxE4m3, kLeastScale);
  while (!std::isfinite(scale * kMaxE4m3)) scale = std::nextafter(scale, 0.0f);  // it must be read again
  return scale;
}

}  // namespace

BlockFp8 BlockFp8::like(const nlohmann::json& config) {
  BlockFp8 out;
  const auto pointer = nlohmann::json::json_pointer("/quantization_config");
  if (!config.is_object() || !config.contains(pointer)) return out;
  const nlohmann::json& quant = config[pointer];
  if (!quant.is_object() || json_field(quant, "quant_method") != "fp8") return out;
  const nlohmann::json sizes = json_field(quant, "weight_block_size");
  const auto size = [](const nlohmann::json& n) { return n.is_number_integer() && n >= 1 && n <= (1 << 16); };
  if (sizes.is_array() && sizes.size() == 2 && size(sizes[0]) && size(sizes[1])) {
    out.rows = sizes[0].get<int64_t>();
    out.columns = sizes[1].get<int64_t>();
  }
  for (const auto& module : json_field(quant, "modules_to_not_convert")) {
    if (module.is_string()) out.kept.push_back(module.get<std::string>());
  }
  return out;
}

nlohmann::ordered_json BlockFp8::config() const {
  nlohmann::ordered_json out = {{"activation_scheme", "dynamic"}, {"fmt", "e4m3"}};
  if (!kept.empty()) out["modules_to_not_convert"] = kept;
  out["quant_method"] = "fp8";
  out["weight_block_size"] = {rows, columns};
  return out;
}

Shape BlockFp8::scales_of(const Shape& weight) const {
  return {(row_count(weight) + rows - 1) / rows, (column_count(weight) + columns - 1) / columns};
}

bool BlockFp8::holds(const TensorSpec& logical, const Mapping& mapping) const {
  if (mapping.shape.size() != 2 || mapping.transpose || !mapping.stored.ends_with(".weight")) return false;
  // The part of the name that says the module; routers and gates of shared experts have other ones.
  static constexpr std::string_view kMatrices[] = {"layers.*.attn.*.weight", "layers.*.mlp.*.weight",
                                                   "layers.*.moe.experts.*.weight", "layers.*.moe.shared.*.weight"};
  if (std::ranges::none_of(kMatrices, [&](std::string_view pattern) { return matches(pattern, logical.name); }))
    return false;
  const std::string module = mapping.stored.substr(0, mapping.stored.rfind('.'));
  return std::ranges::none_of(kept, [&](const std::string& name) {
    return module == name || module.starts_with(name + ".") || module.ends_with("." + name);
  });
}

Status check_block_fp8(const Family& family) {
  if (family.block_fp8) return {};
  std::string known;
  for (const Family& other : families()) {
    if (other.block_fp8) known += fmt::format("{}{}", known.empty() ? "" : ", ", other.model_type);
  }
  return Error{ErrorCode::kUnsupported,
               fmt::format("--quantize fp8: models of type {} are not written in blocks of eight bits; known: {}",
                           family.model_type, known)};
}

int64_t quantise_band(const BlockFp8& shape, int64_t rows, int64_t columns, std::span<const float> values,
                      std::span<std::byte> codes, std::span<float> scales) {
  RT_CHECK(
      rows <= shape.rows && std::ssize(values) == rows * columns && (codes.empty() || codes.size() == values.size()),
      "{} values, {} codes of {} x {}", values.size(), codes.size(), rows, columns);
  if (any_not_finite(DType::kF32, std::as_bytes(values))) {
    return std::ranges::find_if(values, [](float x) { return !std::isfinite(x); }) - values.begin();
  }
  int64_t at = 0;
  for (int64_t first = 0; first < columns; first += shape.columns) {
    const Block block{values.data() + first, rows, std::min(shape.columns, columns - first), columns};
    const float scale = find_scale(block, largest_of(block));
    scales[static_cast<size_t>(at++)] = scale;
    for (int64_t r = 0; r < (codes.empty() ? 0 : rows); ++r) {
      std::byte* to = codes.data() + r * columns + first;
      for (std::span<const float> row = block.row(r); !row.empty();) {
        const size_t count = std::min(row.size(), kAtOnce);
        codes_of(row.data(), count, scale, to);
        row = row.subspan(count);
        to += count;
      }
    }
  }
  return -1;
}

BlockTensors::BlockTensors(std::string name, Shape weight, const BlockFp8& block, Read read)
    : name_(std::move(name)),
      rows_(row_count(weight)),
      columns_(column_count(weight)),
      per_band_((columns_ + block.columns - 1) / block.columns),
      block_(block),
      read_(std::move(read)) {
  if (name_.ends_with(kScaleSuffix)) name_.resize(name_.size() - kScaleSuffix.size());
}

Status BlockTensors::load(int64_t band, bool codes) {
  if (held_ == band && (!codes || !codes_.empty())) return {};
  held_ = -1;
  const int64_t first = band * block_.rows, rows = std::min(block_.rows, rows_ - first);
  values_.resize(static_cast<size_t>(rows * columns_));
  codes_.resize(codes ? values_.size() : 0);
  scales_.resize(static_cast<size_t>(per_band_));
  RT_TRY(read_(first * columns_, values_));
  const int64_t bad = quantise_band(block_, rows, columns_, values_, codes_, scales_);
  if (bad >= 0) {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{} [{}, {}]: found {}, expected a finite number: blocks of eight bits hold no other; "
                             "convert without --quantize",
                             name_, first + bad / columns_, bad % columns_, values_[static_cast<size_t>(bad)])};
  }
  held_ = band;
  return {};
}

Status BlockTensors::codes(int64_t first, std::span<std::byte> out) {
  const int64_t whole = block_.rows * columns_;  // codes of a band
  while (!out.empty()) {
    RT_TRY(load(first / whole, true));
    const int64_t skip = first % whole;
    const auto n = std::min<int64_t>(std::ssize(out), std::ssize(codes_) - skip);
    std::copy_n(codes_.begin() + skip, n, out.begin());
    out = out.subspan(static_cast<size_t>(n));
    first += n;
  }
  return {};
}

Status BlockTensors::scales(int64_t first, std::span<std::byte> out) {
  while (!out.empty()) {
    RT_TRY(load(first / per_band_, false));
    const int64_t skip = first % per_band_;
    const auto n = std::min<int64_t>(std::ssize(out) / int64_t{sizeof(float)}, per_band_ - skip);
    std::memcpy(out.data(), scales_.data() + skip, static_cast<size_t>(n) * sizeof(float));
    out = out.subspan(static_cast<size_t>(n) * sizeof(float));
    first += n;
  }
  return {};
}

}  // namespace cairn::convert
