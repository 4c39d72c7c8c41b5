#pragma once
// How the weights of a Hugging Face folder are quantised: what config.json's quantization_config says, and which stored
// tensors make one weight together. Reading them: weights_folder.h.
//
//   quant_method         stored for X                         one scale for
//   fp8                  X.weight, X.weight_scale_inv         a block of weight_block_size; null: the tensor
//   fbgemm_fp8           X.weight, X.weight_scale             a row
//   compressed-tensors   X.weight, X.weight_scale             the tensor, a row, or a block (group: block_structure)
//     (float-quantized)
//   mxfp4                X_blocks, X_scales                   32 numbers of a row
//
// A weight is its stored number times its scale, in float32. Blocks at the lower and right edges are cut. A scale is a
// float, or the exponent n of 2^(n-127) in a byte: F8_E8M0, and U8 where scale_fmt is "ue8m0". Scales of activations
// have no use here and are left out.
//
// mxfp4 is that of gpt_oss: X_blocks U8 [experts, out, in / 32, 16], each byte two numbers of four bits, the lower half
// first, and X_scales U8 [experts, out, in / 32]. What is read is X_blocks [experts, out, in]; the class's own X is
// that turned, [experts, in, out]. Source: transformers 5.24 integrations/finegrained_fp8.py, fbgemm_fp8.py, mxfp4.py;
// compressed-tensors' schemes; OCP Microscaling 1.0.

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "converters/weights_folder.h"
#include "runtime/core/result.h"

namespace cairn::convert {

/// Puts what belongs together into one tensor each, and leaves out the scales. Errors: kUnsupported, naming a
/// quantisation that is not above; kInvalidInput, one list of every weight without a usable scale and every scale
/// without its weight, with file, found and expected.
Status join_quantised(const nlohmann::json& config, std::vector<FolderTensor>& tensors);

}  // namespace cairn::convert
