#pragma once
// A model as llama.cpp's architectures have it: names, order and form of the tensors, and the keys that say its sizes.
//
// An architecture fixes what no key of it says: the activation, whether experts' weights are divided by their sum,
// which pairs of channels turn. A model that differs there is refused. Source: llama.cpp src/llama-arch.cpp,
// src/llama-model.cpp; gguf-py gguf/constants.py.

#include <cstdint>
#include <string>
#include <vector>

#include "converters/family.h"
#include "converters/family_tensors.h"
#include "converters/gguf_file.h"
#include "converters/weight_source.h"
#include "runtime/core/result.h"

namespace cairn::convert {

/// A tensor of the file, made of logical tensors' rows, one after the other.
struct GgufOutput {
  GgufTensor tensor;
  Output rows;                // none: `values` are its numbers
  int64_t pair_rows = 0;      // rows of a head: the k-th of its second half stands behind the k-th of its first
  bool plus_one = false;      // the file has weights that count from 0
  std::vector<float> values;  // that follow from the model's settings
};

struct GgufModel {
  std::vector<GgufOutput> outputs;
  std::vector<std::string> warnings;
};

/// The architecture that a family's models go out as. Errors: kUnsupported, naming the families that have one.
Result<std::string> gguf_architecture(const Family& family);

/// `type`: of matrices; norms, biases, routers and learned positions are F32, and rows that blocks of Q8_0 do not
/// divide F16. Puts the keys of the model. Errors: kUnsupported for what the architecture has no place for.
Result<GgufModel> gguf_model(const Family& family, const WeightSource& source, GgufType type, GgufKeys& keys);

}  // namespace cairn::convert
