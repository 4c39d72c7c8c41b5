#pragma once
// Samples of a recommender model: numbers, bags of table rows, and whether each was clicked.

#include <cstdint>
#include <vector>

namespace cairn::data {

/// The rows of one table that each sample reads; sample s has rows[offsets[s]..offsets[s + 1]).
struct Bags {
  std::vector<int64_t> offsets = {0};  // samples + 1
  std::vector<int32_t> rows;
};

struct ClickBatch {
  int64_t samples = 0;
  std::vector<float> labels;  // [samples], 0 to 1
  std::vector<float> dense;   // [samples, dense features]
  std::vector<Bags> tables;
};

}  // namespace cairn::data
