#pragma once
// The tensors in the pickle of a torch.save'd state dict, by the tree of its values (pickle_tree.h) under the narrowest
// policy: the few operations and names that a state dict needs. Every other one is refused by its name.
// Source: pytorch torch/_weights_only_unpickler.py (ours is narrower), torch/_utils.py.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

/// A tensor as a view of a storage. Sizes, strides and offset in elements; all inside the storage.
struct PickledTensor {
  std::string name;     // keys of nested dicts are joined with dots
  std::string storage;  // key: the entry data/KEY of the archive
  std::string dtype;    // as safetensors names it
  int64_t storage_elems = 0;
  int64_t offset = 0;
  Shape shape, strides;
};

/// kStateDict: tensors alone. kTensor: one tensor instead of a dict of them, whose name is then empty. kTraining: the
/// weights beside whatever else a training program has saved; other names and their objects are passed over as things
/// without any meaning, still without looking anything up.
enum class Pickle { kStateDict, kTensor, kTraining };

/// Errors: kUnsupported naming the operation or the global that is not allowed, kCorrupt for what no honest pickle has;
/// both with the byte. Bounds: 64 MiB of pickle, 8 M values, 1 M tensors, 4096 values on the stack.
Result<std::vector<PickledTensor>> unpickle_state_dict(std::string_view pickle, Pickle kind = Pickle::kStateDict);

}  // namespace cairn::convert
