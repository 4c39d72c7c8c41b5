#pragma once
// Weights in blocks of eight-bit numbers (E4M3) with a scale each, as DeepSeek-V3 was published: writing them. Reading:
// quantisation.h.
//
// X.weight F8_E4M3 [rows, columns] and X.weight_scale_inv F32 [ceil(rows / b0), ceil(columns / b1)]: blocks at the
// lower and right edges are cut. A number is its code times the scale of its block, in float32.
//
// A block's scale is its largest magnitude / 448, its codes are the nearest ones of number / scale. But where all
// numbers of a block are codes times some scale already, as in weights that were read from such blocks and not trained
// since, it is that scale, so that none of them changes (find_scale says which are tried). So a block comes back
//   - with the same numbers, if they are normal float32 numbers;
//   - byte for byte, if moreover its largest code is at least 240, as largest / 448 makes it, and among its codes are a
//     power of two and a multiple of 11 or 13, without which another scale may give the same numbers;
//   - with scale 1, if all its numbers are zero.
// Source: transformers 5.24 integrations/finegrained_fp8.py.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "converters/family.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {

inline constexpr std::string_view kScaleSuffix = "_scale_inv";  // after the weight's name

/// What config.json says of blocks.
struct BlockFp8 {
  int64_t rows = 128, columns = 128;  // of a block
  std::vector<std::string> kept;      // modules_to_not_convert

  /// As `config`, an object or null, has it for weights that are in such blocks; else the default.
  static BlockFp8 like(const nlohmann::json& config);
  /// quantization_config.
  nlohmann::ordered_json config() const;
  Shape scales_of(const Shape& weight) const;
  /// Whether it is one of the matrices that go into blocks: the projections of attention, MLPs and experts. All else
  /// stays: embeddings, head, norms, biases, routers.
  bool holds(const TensorSpec& logical, const Mapping& mapping) const;
};

/// Errors: kUnsupported for a family that is not published so.
Status check_block_fp8(const Family& family);

/// Quantises a band of whole blocks: `values` has `rows` rows, at most `block.rows`, of `columns` numbers; `codes` as
/// many bytes, or none when they are not wanted, `scales` a float for each block. Returns the index of a number that is
/// not finite, or -1.
int64_t quantise_band(const BlockFp8& block, int64_t rows, int64_t columns, std::span<const float> values,
                      std::span<std::byte> codes, std::span<float> scales);

/// Either of the two tensors that one matrix becomes, band after band. Memory: five bytes for each number of block.rows
/// rows.
class BlockTensors {
 public:
  /// Elements of the matrix, row-major, asked for in order.
  using Read = std::function<Status(int64_t first, std::span<float> out)>;
  /// `name`: of either, for messages.
  BlockTensors(std::string name, Shape weight, const BlockFp8& block, Read read);

  /// Codes or scales from the first-th on, ascending. Errors: those of Read; kUnsupported for a number that is not
  /// finite.
  Status codes(int64_t first, std::span<std::byte> out);
  Status scales(int64_t first, std::span<std::byte> out);

 private:
  Status load(int64_t band, bool codes);

  std::string name_;
  int64_t rows_, columns_, per_band_;  // scales of a band
  BlockFp8 block_;
  Read read_;
  int64_t held_ = -1;
  std::vector<float> values_, scales_;
  std::vector<std::byte> codes_;
};

}  // namespace cairn::convert
