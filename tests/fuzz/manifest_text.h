#pragma once
// Manifests whose checksums are made good again after a mutation, so that a fuzzer gets behind them.

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "ckpt/format/checksum.h"

namespace cairn::fuzz {

/// The header line for this body.
inline std::string with_header(std::string_view body) {
  return fmt::format(R"({{"format":"cairn-checkpoint","version":1,"body_bytes":{},"body_xxh3_64":"{}"}})", body.size(),
                     ckpt::hash_to_hex(ckpt::hash_bytes(body))) +
         "\n" + std::string(body);
}

/// Puts the table's hash where the body keeps it, if it has the place.
inline void mend_table_hash(std::string& body, std::string_view table) {
  constexpr std::string_view kKey = R"("xxh3_64":")";
  const size_t shards = body.find(R"("shards":{)");
  const size_t key = shards == std::string::npos ? shards : body.find(kKey, shards);
  if (key == std::string::npos || key + kKey.size() + 16 > body.size()) return;
  body.replace(key + kKey.size(), 16, ckpt::hash_to_hex(ckpt::hash_bytes(table)));
}

}  // namespace cairn::fuzz
