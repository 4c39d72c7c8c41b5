#pragma once
// The paths of the Hugging Face Hub that clients ask a server for, taken apart. Pure.

#include <string>
#include <string_view>

namespace cairn::tools {

enum class HubQuestion {
  kNothing,  // no path of the Hub
  kIndex,    // "/": for people
  kModel,    // /api/models/ID, /api/models/ID/revision/REV
  kTree,     // /api/models/ID/tree/REV, and /FOLDER behind it
  kRefs,     // /api/models/ID/refs
  kFile,     // /ID/resolve/REV/FILE
};

struct HubPath {
  HubQuestion question = HubQuestion::kNothing;
  std::string id;        // "runs/NAME"; two parts always
  std::string revision;  // "main" where the path has none
  std::string file;      // or folder; may hold "/" and anything else
};

/// `path`: decoded once.
HubPath parse_hub_path(std::string_view path);

}  // namespace cairn::tools
