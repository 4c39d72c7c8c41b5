#pragma once
// Archives and pickles as torch.save writes them, made by hand so that each part can lie.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <zlib.h>

#include "runtime/core/shape.h"

namespace cairn::convert::testing {

inline std::string little(uint64_t value, int bytes) {
  std::string out;
  for (int k = 0; k < bytes; ++k, value >>= 8) out += static_cast<char>(value);
  return out;
}

struct Entry {
  std::string name, data;
  uint16_t method = 0, flags = 0;
  // Lies; -1: the truth.
  int64_t size = -1, packed = -1, offset = -1, local_size = -1, crc = -1;
  std::string local_name;  // empty: the same
};

inline std::string zip(const std::vector<Entry>& entries) {
  std::string out, directory;
  for (const Entry& e : entries) {
    const auto or_truth = [](int64_t lie, uint64_t truth) { return lie < 0 ? truth : static_cast<uint64_t>(lie); };
    const auto crc = static_cast<uint64_t>(
        ::crc32(0, reinterpret_cast<const unsigned char*>(e.data.data()), static_cast<uInt>(e.data.size())));
    const std::string& own = e.local_name.empty() ? e.name : e.local_name;
    const std::string stamp = little(0, 4) + little(or_truth(e.crc, crc), 4);
    directory += "PK\x01\x02" + little(0, 4) + little(e.flags, 2) + little(e.method, 2) + stamp +
                 little(or_truth(e.packed, e.data.size()), 4) + little(or_truth(e.size, e.data.size()), 4) +
                 little(e.name.size(), 2) + little(0, 12) + little(or_truth(e.offset, out.size()), 4) + e.name;
    out += "PK\x03\x04" + little(0, 2) + little(e.flags, 2) + little(e.method, 2) + stamp +
           little(or_truth(e.local_size, e.data.size()), 4) + little(or_truth(e.local_size, e.data.size()), 4) +
           little(own.size(), 2) + little(0, 2) + own + e.data;
  }
  const size_t at = out.size();
  return out + directory + "PK\x05\x06" + little(0, 4) + little(entries.size(), 2) + little(entries.size(), 2) +
         little(directory.size(), 4) + little(at, 4) + little(0, 2);
}

// --- pickles ---------------------------------------------------------------------------------------------------------

inline std::string pickled(std::string_view text) { return "X" + little(text.size(), 4) + std::string(text); }
inline std::string pickled(int64_t n) { return "\x8a\x08" + little(static_cast<uint64_t>(n), 8); }
inline std::string pickled(const Shape& shape) {
  std::string out = "(";
  for (const int64_t n : shape) out += pickled(n);
  return out + "t";
}

struct View {
  std::string key, storage_class = "FloatStorage";
  int64_t count = 0, offset = 0;
  Shape shape, strides;
};

inline std::string pickled(const View& v) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + pickled("storage") + "ctorch\n" + v.storage_class + "\n" +
         pickled(v.key) + pickled("cpu") + pickled(v.count) + "tQ" + pickled(v.offset) + pickled(v.shape) +
         pickled(v.strides) + "\x89" + "ccollections\nOrderedDict\n)RtR";
}

/// A whole pickle around the items of its dict: pickled key, pickled value, ...
inline std::string pickle(const std::string& items) { return "\x80\x02}(" + items + "u."; }

inline Shape dense_strides(const Shape& shape) {
  Shape out(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) out[d - 1] = out[d] * shape[d];
  return out;
}

/// An archive of one float32 tensor called "w" that is this view of a storage with these bytes.
inline std::string archive(const View& view, const std::string& storage) {
  return zip(
      {{"m/data.pkl", pickle(pickled("w") + pickled(view))}, {"m/data/" + view.key, storage}, {"m/version", "3\n"}});
}

}  // namespace cairn::convert::testing
