#pragma once
// A tokenizer's files as the keys of GGUF.
//
//   tokenizer.json, byte-level BPE    tokenizer.ggml.model "gpt2", with merges and the name of the expression that cuts
//                                     texts (tokenizer.ggml.pre)
//   tokenizer.model of SentencePiece  "llama", with scores
//
// llama.cpp knows expressions by name, so a tokenizer.json with another one is refused. Source: llama.cpp
// src/llama-vocab.cpp; gguf-py gguf/constants.py.

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "converters/gguf_file.h"
#include "runtime/core/result.h"

namespace cairn::convert {

/// `files`: by name, of a Hugging Face folder. `config`: its config.json, for the ids of special tokens. `vocab`: rows
/// of the model; ids behind the tokenizer's are filled with unused tokens. Errors: kInvalidInput (no tokenizer, or
/// damaged), kUnsupported naming what GGUF has no place for.
Status put_gguf_vocab(const std::map<std::string, std::string>& files, const nlohmann::ordered_json& config,
                      int64_t vocab, GgufKeys& keys, std::vector<std::string>* warnings);

}  // namespace cairn::convert
