#pragma once
// Folders and files of other programs, by the files that identify them: what each is called, and the way to a folder
// that is read here. One table, for every command that is given a model or a tokenizer.

#include <filesystem>
#include <optional>
#include <string>

#include "runtime/core/result.h"

namespace cairn::convert {

/// "DIR: is a cache of the hub ...; give DIR/snapshots/0123": for a folder or a file that cannot be read as a Hugging
/// Face folder or a checkpoint. Nothing: it is none that is known. Reads names, at most 4096 of a folder, and the first
/// bytes of a file.
std::optional<std::string> foreign_kind(const std::filesystem::path& path);
/// The same for what cannot be read as a tokenizer.
std::optional<std::string> foreign_tokenizer(const std::filesystem::path& path);

/// The error that foreign_kind() names, else this one.
Error named(const std::filesystem::path& path, Error other);

/// An adapter in a folder changes what its model computes, and is not read here. Errors: kUnsupported, naming it.
Status check_no_adapter(const std::filesystem::path& dir);

}  // namespace cairn::convert
