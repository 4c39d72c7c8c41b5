#pragma once
// A few file functions for the data tests.

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/temp_dir.h"

namespace cairn::data {

using testing::TempDir;

inline std::vector<std::string> names_in(const TempDir& dir) {
  std::vector<std::string> result;
  for (const auto& entry : std::filesystem::directory_iterator(dir.path))
    result.push_back(entry.path().filename().string());
  return result;
}

inline void write_file(const std::string& path, std::string_view bytes) {
  std::filesystem::remove(path);  // ext4 flushes a file that is cut and written anew; a new one it does not
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

inline std::string from_hex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::strtol(std::string(hex.substr(i, 2)).c_str(), nullptr, 16)));
  return bytes;
}

/// True if the error's message holds every one of the parts.
inline bool says(const std::string& message, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts)
    if (message.find(part) == std::string::npos) return false;
  return true;
}

}  // namespace cairn::data
