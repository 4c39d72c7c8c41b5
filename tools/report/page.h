#pragma once
// The page of `cairn report --html`: one file that needs no network. Its parts are page.html, page.css and page.js
// beside this file; the build puts their texts into the program.

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace cairn::tools {

/// `report`: {"written": unix seconds, "follow_seconds": 0 or when the page loads itself again, "runs": [report_json]}.
/// The page holds it as it is; no text of it can end the element that it stands in.
std::string report_page(const nlohmann::json& report);

}  // namespace cairn::tools
