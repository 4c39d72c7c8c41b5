#pragma once
// The secret of a run's agents: 32 random bytes in RUN/cluster/token, mode 0600, made by who comes first. A join proves
// knowledge of it by an HMAC over the other side's nonce; it is never sent. Who can read the run folder as its owner
// can join the run, nobody else.

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn::cluster {

/// 32 bytes from the kernel, as hexadecimal digits: a token, or the nonce of one exchange.
std::string random_hex();

/// The token in `directory`, made when there is none. Errors: kInvalidInput: another user's file, or one that others
/// may read or write, with the command that mends it.
Result<std::string> make_token(const std::filesystem::path& directory);
/// nullopt: there is none. Errors as above.
Result<std::optional<std::string>> read_token(const std::filesystem::path& directory);

/// A name of the token that gives nothing of it away: both sides see whether they have the same.
std::string token_name(std::string_view token);

/// HMAC-SHA256 of `purpose`, the other side's nonce and `text`, as hexadecimal digits.
std::string prove(std::string_view token, std::string_view purpose, std::string_view nonce, std::string_view text);
/// In constant time.
bool is_proof(std::string_view given, std::string_view token, std::string_view purpose, std::string_view nonce,
              std::string_view text);

}  // namespace cairn::cluster
