#pragma once
// Reads a GGUF file whole, as its description has it: for tests.

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/shape.h"

namespace cairn::convert::testing {

struct GgufContents {
  struct Tensor {
    Shape shape;  // slowest first
    uint32_t type = 0;
    std::string_view bytes;  // from its begin to the end of the file
  };
  std::map<std::string, nlohmann::json> keys;
  std::map<std::string, Tensor> tensors;
  bool whole = true;  // offsets ascend, are aligned and lie in the file
};

class GgufReader {
 public:
  explicit GgufReader(std::string_view file) : file_(file) {}

  GgufContents read() {
    GgufContents out;
    out.whole = file_.substr(0, 4) == "GGUF";
    at_ = 4;
    out.whole = out.whole && number<uint32_t>() == 3;
    const auto tensors = number<uint64_t>(), keys = number<uint64_t>();
    for (uint64_t k = 0; k < keys; ++k) {
      const std::string name = text();
      out.keys[name] = value(number<uint32_t>());
    }
    std::vector<std::pair<std::string, uint64_t>> offsets;
    for (uint64_t k = 0; k < tensors; ++k) {
      const std::string name = text();
      GgufContents::Tensor tensor;
      const auto dims = number<uint32_t>();
      for (uint32_t d = 0; d < dims; ++d)
        tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(number<uint64_t>()));
      tensor.type = number<uint32_t>();
      offsets.emplace_back(name, number<uint64_t>());
      out.whole = out.whole && !out.tensors.contains(name);
      out.tensors[name] = tensor;
    }
    const size_t data = (at_ + 31) / 32 * 32;
    for (size_t k = 0; k < offsets.size(); ++k) {
      const uint64_t offset = offsets[k].second;
      out.whole = out.whole && offset % 32 == 0 && data + offset < file_.size() &&
                  (k == 0 ? offset == 0 : offset > offsets[k - 1].second);
      if (out.whole) out.tensors[offsets[k].first].bytes = file_.substr(data + offset);
    }
    return out;
  }

 private:
  template <class T>
  T number() {
    T out{};
    if (at_ + sizeof(T) <= file_.size()) std::memcpy(&out, file_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return out;
  }
  std::string text() {
    const auto bytes = number<uint64_t>();
    const std::string out(file_.substr(std::min(at_, file_.size()), bytes));
    at_ += bytes;
    return out;
  }
  nlohmann::json value(uint32_t type) {
    switch (type) {
      case 4:
        return number<uint32_t>();
      case 5:
        return number<int32_t>();
      case 6:
        return number<float>();
      case 7:
        return number<uint8_t>() != 0;
      case 8:
        return text();
      case 9: {
        const auto of = number<uint32_t>();
        const auto count = number<uint64_t>();
        nlohmann::json out = nlohmann::json::array();
        for (uint64_t k = 0; k < count; ++k) out.push_back(value(of));
        return out;
      }
      default:
        return nullptr;
    }
  }

  std::string_view file_;
  size_t at_ = 0;
};

}  // namespace cairn::convert::testing
