#pragma once
// `.metadata` of torch.distributed.checkpoint: a pickle that says which tensors a checkpoint has, how each is cut into
// chunks, and where in the .distcp files a chunk lies. Read without running it: the interpreter knows the operations
// that such a pickle needs and keeps the classes' names as names; a name that is not on its list is refused and told.
// Source: pytorch torch/distributed/checkpoint/{metadata,filesystem,_nested_dict}.py; CPython Lib/pickletools.py.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

/// A box of a tensor, saved as an archive of its own (torch_bin.h) in bytes [begin, begin + bytes) of a file.
struct DistChunk {
  Shape offsets, sizes;
  std::string file;  // a name in the checkpoint's folder
  int64_t begin = 0, bytes = 0;
};

struct DistTensor {
  std::string name;
  std::string dtype;  // as safetensors names it
  Shape shape;
  std::vector<DistChunk> chunks;  // each element is in one of them
};

/// A value that is no tensor: an archive of its own too.
struct DistValue {
  std::string name;  // as it was saved
  std::string file;
  int64_t begin = 0, bytes = 0;
};

struct DistIndex {
  std::vector<DistTensor> model;   // as read_dist_metadata() has them
  std::vector<DistTensor> others;  // of the rest of the state, under the names that they were saved by
  std::vector<DistValue> values;
};

/// A dtype that no weight has: complex, or unsigned of more than 8 bits.
bool is_passed_dtype(std::string_view dtype);

/// All that a checkpoint has. Errors: those of read_dist_metadata().
Result<DistIndex> read_dist_index(std::string_view pickle);

/// The tensors, by name. Where the saved state was a dict of dicts with the key model, module or state_dict, at its top
/// or under `app`, it is the tensors under it alone, without that key. Errors: kUnsupported naming an operation, a
/// class or a dtype that is not known here, kCorrupt for what no such file has (chunks that overlap, leave their tensor
/// or do not fill it ...).
Result<std::vector<DistTensor>> read_dist_metadata(std::string_view pickle);

}  // namespace cairn::convert
