#include "runtime/data/input_files.h"

#include <fmt/format.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <utility>

namespace cairn::data {
namespace {

bool is_pattern(const std::string& input) {
  struct stat info = {};
  return input.find_first_of("*?[") != std::string::npos && ::stat(input.c_str(), &info) != 0;
}

Result<std::vector<std::string>> matching_files(const std::string& pattern) {
  if (pattern.find("**") != std::string::npos)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: ** is no pattern here; name each depth (a/*.jsonl a/*/*.jsonl)", pattern)};
  RT_TRY_SET(std::vector<std::string> paths, matching_paths(pattern));
  std::erase_if(paths, [](const std::string& path) {
    std::error_code none;
    return std::filesystem::is_directory(path, none);
  });
  if (paths.empty()) return Error{ErrorCode::kInvalidInput, pattern + ": matches only folders; name the files in them"};
  return paths;
}

}  // namespace

Result<std::vector<std::string>> matching_paths(const std::string& path) {
  if (!is_pattern(path)) return std::vector{path};
  glob_t found = {};
  const int rc = ::glob(path.c_str(), GLOB_ERR | GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> paths;
  for (size_t i = 0; rc == 0 && i < found.gl_pathc; ++i) paths.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  if (rc == GLOB_NOMATCH) return Error{ErrorCode::kInvalidInput, path + ": no file matches this pattern"};
  if (rc != 0) return Error{ErrorCode::kIo, path + ": a folder of this pattern cannot be read"};
  std::ranges::sort(paths);  // by bytes: glob's own order depends on the locale
  return paths;
}

Result<std::vector<std::string>> expand_patterns(const std::vector<std::string>& inputs) {
  std::vector<std::string> paths;
  std::map<std::pair<dev_t, ino_t>, std::pair<size_t, bool>> seen;  // the input that names it, and if by a pattern
  for (size_t k = 0; k < inputs.size(); ++k) {
    const bool pattern = is_pattern(inputs[k]);
    std::vector<std::string> named = {inputs[k]};
    if (pattern) {
      RT_TRY_SET(named, matching_files(inputs[k]));
    }
    for (std::string& path : named) {
      struct stat info = {};
      if (path != "-" && ::stat(path.c_str(), &info) == 0) {
        const auto [at, first] = seen.insert({{info.st_dev, info.st_ino}, {k, pattern}});
        if (!first && (pattern || at->second.second))
          return Error{ErrorCode::kInvalidInput, fmt::format("{} is named by {} and by {}: its text would come twice",
                                                             path, inputs[at->second.first], inputs[k])};
      }
      paths.push_back(std::move(path));
    }
  }
  return paths;
}

Status check_read_once(const std::vector<std::string>& paths) {
  std::set<std::pair<dev_t, ino_t>> seen;
  for (const std::string& path : paths) {
    struct stat info = {};
    const bool found = path == "-" ? ::fstat(STDIN_FILENO, &info) == 0 : ::stat(path.c_str(), &info) == 0;
    if (!found || (S_ISREG(info.st_mode) && path != "-")) continue;
    if (seen.insert({info.st_dev, info.st_ino}).second) continue;
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} is named twice, and can be read once: the second time it would be empty",
                             path == "-" ? "standard input" : path)};
  }
  return {};
}

}  // namespace cairn::data
