#pragma once
// Parts of a tokenizer.json, in the order of keys in which the `tokenizers` package writes them.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace cairn::text {

/// An entry of "added_tokens" that is special.
nlohmann::ordered_json special_token_json(int64_t id, const std::string& content);

/// A "model" of type BPE. `vocab`: token to id; `merges`: pairs, or texts "left right"; the first one first.
nlohmann::ordered_json bpe_json(nlohmann::ordered_json vocab, nlohmann::ordered_json merges, bool byte_fallback);

/// The whole file, with neither pre_tokenizer nor post_processor.
nlohmann::ordered_json hf_tokenizer_json(nlohmann::ordered_json added, nlohmann::ordered_json normalizer,
                                         nlohmann::ordered_json decoder, nlohmann::ordered_json model);

}  // namespace cairn::text
