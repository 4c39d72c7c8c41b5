#pragma once
// A few file functions for the data tests.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/data/token_file.h"
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

/// Tokens in memory.
class MemoryTokens final : public TokenSource {
 public:
  explicit MemoryTokens(std::vector<int32_t> tokens) : tokens_(std::move(tokens)) {}
  const std::string& name() const override { return name_; }
  int64_t token_count() const override { return static_cast<int64_t>(tokens_.size()); }
  Status read(int64_t start, int64_t count, int32_t* out) const override {
    std::copy_n(tokens_.begin() + start, count, out);
    return {};
  }
  Result<IdRange> id_range(int64_t, int64_t, int64_t) const override { return IdRange{}; }
  uint64_t fingerprint() const override { return 1; }

 private:
  std::vector<int32_t> tokens_;
  std::string name_ = "memory";
};

/// True if the error's message holds every one of the parts.
inline bool says(const std::string& message, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts)
    if (message.find(part) == std::string::npos) return false;
  return true;
}

}  // namespace cairn::data
