#include "converters/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "converters/foreign_file.h"
#include "runtime/core/new_file.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the library's own limit
constexpr int64_t kMaxNameBytes = 1024;
constexpr int64_t kAheadBytes = int64_t{1} << 20;
constexpr int64_t kMaxHeaderDepth = 8;  // a header nests three deep

struct DtypeRow {
  std::string_view name;
  int64_t bits;
};
// The library's order; its writer sorts by this, descending.
constexpr std::array<DtypeRow, 21> kDtypes = {
    {{"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6},     {"F6_E3M2", 6},     {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8},
     {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16},
     {"BF16", 16},   {"I32", 32},    {"U32", 32},        {"F32", 32},        {"C64", 64}, {"F64", 64}, {"I64", 64}}};

int64_t dtype_rank(std::string_view name) {
  for (size_t k = 0; k < kDtypes.size(); ++k) {
    if (kDtypes[k].name == name) return static_cast<int64_t>(k);
  }
  return name == "U64" ? static_cast<int64_t>(kDtypes.size()) : -1;
}

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }

std::optional<int64_t> non_negative(const nlohmann::json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto n = value.get<uint64_t>();
  if (n > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  return static_cast<int64_t>(n);
}

Result<SafeTensor> decode_entry(const std::string& name, const nlohmann::json& entry) {
  const auto refuse = [&](std::string what) { return corrupt(fmt::format("tensor \"{}\": {}", name, what)); };
  if (name.empty() || static_cast<int64_t>(name.size()) > kMaxNameBytes ||
      std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; })) {
    return corrupt(fmt::format("a tensor name of {} bytes is empty, longer than {} or holds control characters",
                               name.size(), kMaxNameBytes));
  }
  if (!entry.is_object()) return refuse("its entry is no object");
  for (const auto& [field, unused] : entry.items()) {
    if (field != "dtype" && field != "shape" && field != "data_offsets")
      return refuse(fmt::format("unknown field \"{}\"", field));
  }
  if (!entry.contains("dtype") || !entry["dtype"].is_string()) return refuse("\"dtype\" is missing or no string");
  if (!entry.contains("shape") || !entry["shape"].is_array()) return refuse("\"shape\" is missing or no array");
  if (!entry.contains("data_offsets") || !entry["data_offsets"].is_array() || entry["data_offsets"].size() != 2) {
    return refuse("\"data_offsets\" is missing or not two numbers");
  }
  SafeTensor out{.name = name, .dtype = entry["dtype"].get<std::string>()};
  const int64_t bits = safetensors_dtype_bits(out.dtype);
  if (bits == 0) return refuse(fmt::format("unknown dtype \"{}\"", out.dtype));
  int64_t total_bits = bits;
  for (const auto& dim : entry["shape"]) {
    const auto extent = non_negative(dim);
    if (!extent) return refuse("a dimension is not a non-negative whole number");
    out.shape.push_back(*extent);
    if (__builtin_mul_overflow(total_bits, *extent, &total_bits)) return refuse("its size overflows");
  }
  const auto begin = non_negative(entry["data_offsets"][0]), end = non_negative(entry["data_offsets"][1]);
  if (!begin || !end || *begin > *end) return refuse("\"data_offsets\" are not an ascending pair of whole numbers");
  if (total_bits % 8 != 0) return refuse("its size is no whole number of bytes");
  if (*end - *begin != total_bits / 8) {
    return refuse(fmt::format("data_offsets [{}, {}] hold {} bytes, but {} of shape {} takes {}", *begin, *end,
                              *end - *begin, out.dtype, to_string(out.shape), total_bits / 8));
  }
  out.begin = *begin;
  out.end = *end;
  return out;
}

}  // namespace

int64_t safetensors_dtype_bits(std::string_view name) {
  if (name == "U64") return 64;
  const int64_t rank = dtype_rank(name);
  return rank < 0 ? 0 : kDtypes[rank].bits;
}

Result<DType> safetensors_dtype(std::string_view name) {
  if (name == "F32") return DType::kF32;
  if (name == "F16") return DType::kF16;
  if (name == "BF16") return DType::kBf16;
  if (name == "F64") return DType::kF64;
  if (name == "I64") return DType::kI64;
  if (name == "I32") return DType::kI32;
  if (name == "I16") return DType::kI16;
  if (name == "I8") return DType::kI8;
  if (name == "U8" || name == "BOOL") return DType::kU8;
  return Error{ErrorCode::kUnsupported,
               fmt::format("dtype {} cannot be read here; weights must be F32, F16, BF16 or F64", name)};
}

std::string_view safetensors_dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kF16:
      return "F16";
    case DType::kBf16:
      return "BF16";
    case DType::kF64:
      return "F64";
    case DType::kU8:
      return "U8";
    case DType::kI8:
      return "I8";
    case DType::kU16:
      return "U16";
    case DType::kI16:
      return "I16";
    case DType::kU32:
      return "U32";
    case DType::kI32:
      return "I32";
    case DType::kI64:
      return "I64";
  }
  return "?";
}

Result<SafetensorsHeader> decode_safetensors_header(std::string_view head, int64_t file_bytes) {
  if (file_bytes < 8 || head.size() < 8) {
    return corrupt(fmt::format("byte 0: the file has {} bytes, a safetensors file at least 8", file_bytes));
  }
  uint64_t length = 0;
  std::memcpy(&length, head.data(), 8);
  if (length > kMaxHeaderBytes) {
    return corrupt(fmt::format("byte 0: header length {} is above the limit of {}; is this a safetensors file?", length,
                               kMaxHeaderBytes));
  }
  const auto header_bytes = static_cast<int64_t>(length);
  if (8 + header_bytes > file_bytes || 8 + header_bytes > static_cast<int64_t>(head.size())) {
    return corrupt(fmt::format("byte 0: header length {}, but only {} bytes follow", header_bytes, file_bytes - 8));
  }
  const std::string_view text = head.substr(8, header_bytes);
  RT_TRY_SET(const nlohmann::json json, parse_json_strictly(text, "the header", kMaxHeaderDepth, 8));
  if (!json.is_object()) return corrupt("byte 8: the header is no JSON object");

  SafetensorsHeader out;
  out.data_offset = 8 + header_bytes;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") {
      if (entry.is_null()) continue;
      if (!entry.is_object()) return corrupt("\"__metadata__\" is no object");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) return corrupt(fmt::format("\"__metadata__\".\"{}\" is no string", key));
        out.metadata[key] = value.get<std::string>();
      }
      continue;
    }
    RT_TRY_SET(SafeTensor tensor, decode_entry(name, entry));
    out.tensors.push_back(std::move(tensor));
  }
  std::sort(out.tensors.begin(), out.tensors.end(), [](const SafeTensor& a, const SafeTensor& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  int64_t at = 0;
  for (const SafeTensor& tensor : out.tensors) {
    if (tensor.begin != at) {
      return corrupt(fmt::format("tensor \"{}\" begins at data byte {}, expected {}: {}", tensor.name, tensor.begin, at,
                                 tensor.begin < at ? "it overlaps the one before" : "there is a hole before it"));
    }
    at = tensor.end;
  }
  if (out.data_offset + at != file_bytes) {
    return corrupt(fmt::format("the header describes {} bytes, the file has {}: it is {}", out.data_offset + at,
                               file_bytes,
                               out.data_offset + at > file_bytes ? "cut short" : "followed by something else"));
  }
  return out;
}

Result<std::string> encode_safetensors_header(std::vector<SafeTensor>& tensors,
                                              const std::map<std::string, std::string>& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const SafeTensor& a, const SafeTensor& b) {
    const int64_t ra = dtype_rank(a.dtype), rb = dtype_rank(b.dtype);
    return ra != rb ? ra > rb : a.name < b.name;
  });
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  int64_t at = 0;
  for (SafeTensor& tensor : tensors) {
    const int64_t bytes = count_elems(tensor.shape) * safetensors_dtype_bits(tensor.dtype) / 8;
    tensor.begin = at;
    tensor.end = at += bytes;
    nlohmann::ordered_json entry;
    entry["dtype"] = tensor.dtype;
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {tensor.begin, tensor.end};
    json[tensor.name] = std::move(entry);
  }
  std::string text = json_text(json);
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t length = text.size();
  if (length > kMaxHeaderBytes) {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("a header of {} bytes is above the format's limit of {}", length, kMaxHeaderBytes)};
  }
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + text;
}

Result<SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile out;
  out.path_ = path;
  RT_TRY_SET(ForeignFile file, open_foreign(path));
  out.fd_ = std::move(file.fd);
  const auto read_at = [&](int64_t offset, int64_t bytes, char* into) -> Status {
    while (bytes > 0) {
      const ssize_t n = ::pread(out.fd_.get(), into, static_cast<size_t>(bytes), offset);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return os_error(errno, path.string());
      if (n == 0) return corrupt(fmt::format("{}: ends at byte {}", path.string(), offset));
      into += n;
      offset += n;
      bytes -= n;
    }
    return {};
  };
  std::string head(static_cast<size_t>(std::min<int64_t>(8, file.bytes)), '\0');
  RT_TRY(read_at(0, static_cast<int64_t>(head.size()), head.data()));
  if (head.size() == 8) {
    uint64_t length = 0;
    std::memcpy(&length, head.data(), 8);
    if (length <= kMaxHeaderBytes && static_cast<int64_t>(length) <= file.bytes - 8) {
      head.resize(8 + length);
      RT_TRY(read_at(8, static_cast<int64_t>(length), head.data() + 8));
    }
  }
  Result<SafetensorsHeader> header = decode_safetensors_header(head, file.bytes);
  if (!header.ok()) return std::move(header).error().with(path.string());
  out.header_ = std::move(header).value();
  std::erase_if(out.header_.tensors, [](const SafeTensor& tensor) {
    return tensor.dtype == "U8" && tensor.name.starts_with(kStructurePrefix);
  });
  return out;
}

Status SafetensorsFile::read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const {
  RT_CHECK(offset >= 0 && bytes >= 0 && offset + bytes <= tensor.end - tensor.begin, "{} [{}, +{})", tensor.name,
           offset, bytes);
  int64_t at = header_.data_offset + tensor.begin + offset;
  // Who reads large pieces reads on: the disk works on the next one meanwhile.
  if (bytes >= kAheadBytes) ::posix_fadvise(fd_.get(), at + bytes, 2 * bytes, POSIX_FADV_WILLNEED);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd_.get(), out, static_cast<size_t>(std::min<int64_t>(bytes, int64_t{1} << 30)), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, fmt::format("{}: tensor {}", path_.string(), tensor.name));
    if (n == 0) return corrupt(fmt::format("{}: tensor {}: the file ends at byte {}", path_.string(), tensor.name, at));
    out += n;
    at += n;
    bytes -= n;
  }
  return {};
}

Status write_safetensors(const std::filesystem::path& path, std::vector<SafeTensor> tensors,
                         const std::map<std::string, std::string>& metadata,
                         const std::function<Status(const SafeTensor&, const ByteSink&)>& fill) {
  RT_TRY_SET(const std::string head, encode_safetensors_header(tensors, metadata));
  RT_TRY_SET(NewFile file, NewFile::beside(path));
  RT_TRY(file.write(head));
  for (const SafeTensor& tensor : tensors) {
    int64_t written = 0;
    RT_TRY(fill(tensor, [&](const std::byte* data, int64_t bytes) -> Status {
             written += bytes;
             return file.write({reinterpret_cast<const char*>(data), static_cast<size_t>(bytes)});
           }).with(path.string()));
    RT_CHECK(written == tensor.end - tensor.begin, "{}: {} bytes of {}", tensor.name, written,
             tensor.end - tensor.begin);
  }
  return file.publish_durably();
}

}  // namespace cairn::convert
