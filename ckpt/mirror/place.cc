#include "ckpt/mirror/place.h"

#include <algorithm>
#include <cctype>

namespace cairn::ckpt {

bool is_s3_path(std::string_view path) { return path.substr(0, 5) == "s3://"; }

bool is_store_address(std::string_view path) {
  return path.find("://") != std::string_view::npos || path.starts_with("s3:") || path.starts_with("S3:");
}

std::string place_join(const std::string& path, const std::string& part) {
  return !path.empty() && path.back() == '/' ? path + part : path + "/" + part;
}

bool valid_file_name(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name.front() != '.' &&
         std::all_of(name.begin(), name.end(),
                     [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '.' || c == '-'; });
}

Result<std::unique_ptr<Place>> open_place(const PlaceOptions& options) {
  if (options.path.empty()) return Error{ErrorCode::kInvalidInput, "a place needs a path or s3://bucket/prefix"};
  if (is_s3_path(options.path)) return open_s3_place(options);
  if (is_store_address(options.path)) {  // ./s3: is that folder
    return Error{ErrorCode::kInvalidInput, options.path + ": expected a directory or s3://bucket/prefix"};
  }
  return open_directory_place(options);
}

}  // namespace cairn::ckpt
