#pragma once
// The files beside a tokenizer: tokenizer_config.json, special_tokens_map.json, added_tokens.json; read as
// transformers reads them. Where its lines 4 (4.57) and 5 (5.24) differ, the line that wrote tokenizer_config.json is
// followed. Source: transformers, tokenization_utils_base.py and tokenization_utils_fast.py of 4.57,
// tokenization_utils_tokenizers.py of 5.24.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/text/added_tokens.h"

namespace cairn::text {

struct BesideFiles {
  std::string config, special_tokens_map, added_tokens;  // contents; empty: the file is missing

  /// The member that holds a file's content; null for a name that is none of these files.
  std::string* find(std::string_view name);
};
inline constexpr const char* kBesideNames[] = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"};

struct Beside {
  bool configured = false;      // there is a tokenizer_config.json
  int line = 4;                 // of transformers, that wrote it
  std::string tokenizer_class;  // without "Fast"
  /// In the order in which they get ids: those in the vocabulary keep theirs, each other one gets the next free id,
  /// whatever the file says. `listed`: of added_tokens_decoder or added_tokens.json. `named`: bos, eos and the like,
  /// which are added only where neither the tokenizer nor `listed` has them.
  std::vector<AddedToken> listed, named;
  std::string bos, eos;  // empty: not named
  std::optional<bool> add_bos, add_eos, add_prefix_space, legacy;
  bool split_special = false;  // special tokens in a text are text

  /// Whether bos and eos go around a text where the class decides: nothing where the file of the tokenizer does.
  struct Around {
    bool bos = false, eos = false;
  };
  std::optional<Around> around_by_class() const;
};

/// Errors: kInvalidInput naming file and key, for tokens that are no tokens; naming file and byte, for a file that is
/// no JSON object, also where another file has the say.
Result<Beside> read_beside(const BesideFiles& files);

}  // namespace cairn::text
