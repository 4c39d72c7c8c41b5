#pragma once
// PREFIX.made.json, beside a Megatron pair: what Cairn made it of. Nothing in training needs it; `data merge` refuses
// sets of different tokenizers by it, `data info` prints it. A pair that another program wrote has none.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/data/unpack.h"

namespace cairn::data {

struct SetOrigin {
  struct Input {
    std::string path;
    int64_t bytes = 0;  // of text
    Packing packing = Packing::kNone;
    bool operator==(const Input&) const = default;
  };
  std::string tokenizer;       // "bytes", or the path of its file
  std::string tokenizer_hash;  // that file's, as text::TokenizerHashes has it; empty: bytes
  std::string chat;            // the format of conversations; empty: texts
  std::vector<Input> inputs;
  int64_t documents = 0, tokens = 0;  // of the pair: another one by the same name was made otherwise
  bool operator==(const SetOrigin&) const = default;
};

std::string origin_path(const std::string& prefix);

/// "gzip", "zstd"; empty: not packed.
std::string_view packing_name(Packing packing);

/// Writes it, durably. Errors: as a file system fails.
Status write_origin(const std::string& prefix, const SetOrigin& origin);

/// Nothing: there is no such file, or it is of a pair with other counts. Errors: kCorrupt for a file that is damaged;
/// kIo.
Result<std::optional<SetOrigin>> read_origin(const std::string& prefix, int64_t documents, int64_t tokens);

}  // namespace cairn::data
