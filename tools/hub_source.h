#pragma once
// Models that a person names as a Hugging Face Hub does: "org/name", "org/name@revision", "hf://org/name". They become
// folders of the Hub's cache on this machine (runtime/hub). A folder of that name here comes first.

#include <cstdint>
#include <filesystem>
#include <string>

#include "runtime/core/result.h"
#include "runtime/hub/name.h"

namespace cairn::tools {

enum class HubFetch { kAll, kSmallFiles };  // kSmallFiles: without weights

struct HubFolder {
  std::filesystem::path path;                    // the snapshot; as given where the text names no model of a Hub
  std::string name;                              // "org/name@commit"; empty: not of a Hub
  std::string model;                             // "name"
  int64_t missing_files = 0, missing_bytes = 0;  // of weights, with kSmallFiles
};

/// The folder that `text` stands for, fetched where it is not in the cache yet; says on stderr what is fetched, with
/// its progress. Without a request where HF_HUB_OFFLINE is set, or a commit is named and its files are here. Where no
/// Hub answers, the commit that the cache has last read for the revision is taken, with a warning.
/// Errors: those of hub::Hub and hub::fetch(); kInvalidInput: the model has no files that can be read here.
Result<HubFolder> hub_folder(const std::string& text, hub::Bare bare, HubFetch what = HubFetch::kAll);

/// The same for a path of another host's cache, .../models--org--name/snapshots/COMMIT: where there is no such folder
/// here, the commit is fetched. Any other path is returned as it is.
Result<std::filesystem::path> hub_folder_here(const std::filesystem::path& path);

}  // namespace cairn::tools
