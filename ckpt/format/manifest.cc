#include "ckpt/format/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>

#include "ckpt/format/checksum.h"
#include "ckpt/format/shard_table.h"
#include "runtime/json/json.h"

namespace cairn::ckpt {
namespace {

using nlohmann::json;

template <typename... Args>
Error corrupt(fmt::format_string<Args...> format, Args&&... args) {
  return Error{ErrorCode::kCorrupt, fmt::format(format, std::forward<Args>(args)...)};
}

std::string header_line(std::string_view body) {
  return fmt::format("{{\"format\":\"{}\",\"version\":{},\"body_bytes\":{},\"body_xxh3_64\":\"{}\"}}\n", kFormatName,
                     kFormatVersion, body.size(), hash_to_hex(hash_bytes(body)));
}

std::string snippet(std::string_view text, size_t at) {
  return printable_ascii(text.substr(std::min(at, text.size()), 24));
}

// --- struct -> JSON ---------------------------------------------------------------------------------------------

// A state may have a hundred thousand tensors: their list is written as text, without a tree of values. Names and kinds
// were validated: they need no escapes.
std::string tensor_list(const std::vector<TensorEntry>& tensors) {
  std::string out = "[";
  for (const TensorEntry& t : tensors) {
    if (out.size() > 1) out += ',';
    ((((((out += R"({"dtype":")") += dtype_name(t.dtype)) += R"(","kind":")") += t.kind) += R"(","name":")") +=
     t.name) += R"(","shape":[)";
    for (size_t d = 0; d < t.shape.size(); ++d) {
      if (d > 0) out += ',';
      out += fmt::format_int(t.shape[d]).c_str();
    }
    out += "]}";
  }
  return out + ']';
}

std::string body_text(const Manifest& m, json state, json extra, std::string_view table) {
  json files = json::array();
  for (const FileEntry& f : m.files) {
    json file = {{"name", f.name}, {"size_bytes", f.size_bytes}, {"rest_xxh3_64", hash_to_hex(f.rest_hash)}};
    if (f.step >= 0) file["step"] = f.step;
    files.push_back(std::move(file));
  }
  int64_t chunks = 0;
  for (const ShardEntry& s : m.shards) chunks += static_cast<int64_t>(s.hashes.size());
  const json before = {{"step", m.step},
                       {"samples", m.samples},
                       {"created_unix_ms", m.created_unix_ms},
                       {"run", {{"name", m.run.name}, {"id", m.run.id}, {"parents", m.run.parents}}},
                       {"recipe", m.recipe},
                       {"recipe_hash", m.recipe_hash},
                       {"mesh",
                        {{"tp", m.mesh.tp},
                         {"pp", m.mesh.pp},
                         {"dp", m.mesh.dp},
                         {"zero", m.mesh.zero},
                         {"world", m.mesh.world},
                         {"precision", m.mesh.precision},
                         {"virtual_stages", m.mesh.virtual_stages},
                         {"ep", m.mesh.ep},
                         {"cp", m.mesh.cp}}},
                       {"state", std::move(state)},
                       {"metrics", m.metrics},
                       {"origin", m.origin},
                       {"extra", std::move(extra)},
                       {"files", std::move(files)},
                       {"shards",
                        {{"count", m.shards.size()},
                         {"chunks", chunks},
                         {"payload_bytes", payload_bytes(m)},
                         {"size_bytes", table.size()},
                         {"xxh3_64", hash_to_hex(hash_bytes(table))}}}};
  const json behind = {{"tokens", m.tokens}, {"writer", {{"program", m.writer.program}, {"host", m.writer.host}}}};
  std::string out = json_text(before);  // keys in byte order: those before "tensors", "tensors", those behind
  out.back() = ',';
  out += R"("tensors":)" + tensor_list(m.tensors) + ',';
  return out + json_text(behind).substr(1);
}

// --- JSON -> struct ---------------------------------------------------------------------------------------------

const char* type_name(const json& j) {
  if (j.is_number_float()) return "a fraction";
  if (j.is_number_unsigned() && j.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return "a number above 2^63-1";
  return j.type_name();
}

// An object with a closed set of keys, read key by key; `where` is its JSON path. A version 1 reader refuses keys it
// does not know: whoever adds one raises the version.
class ObjectReader {
 public:
  ObjectReader(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool has(const char* key) const { return object_.is_object() && object_.contains(key); }
  Status expect_keys(size_t count) const {
    if (!object_.is_object()) return corrupt("{}: found {}, expected an object", where_, type_name(object_));
    if (object_.size() != count) return corrupt("{}: found {} keys, expected {}", where_, object_.size(), count);
    return {};
  }
  Result<const json*> get(const char* key) const {
    const auto it = object_.find(key);
    if (it == object_.end()) return corrupt("{}: key \"{}\" is missing", where_, key);
    return &*it;
  }
  Status read(const char* key, int64_t& out) const {
    RT_TRY_SET(const json* j, get(key));
    return read_int(*j, key, out);
  }
  Status read(const char* key, std::string& out) const {
    RT_TRY_SET(const json* j, get(key));
    if (!j->is_string()) return corrupt("{}.{}: found {}, expected a string", where_, key, type_name(*j));
    out = j->get_ref<const std::string&>();
    return {};
  }
  Status read(const char* key, std::vector<int64_t>& out, int64_t max_count) const {
    RT_TRY_SET(const json* j, array(key, max_count));
    for (const json& element : *j) {
      int64_t value = 0;
      RT_TRY(read_int(element, key, value));
      out.push_back(value);
    }
    return {};
  }
  Status read_hash(const char* key, uint64_t& out) const {
    RT_TRY_SET(const json* j, get(key));
    const auto hash = j->is_string() ? hash_from_hex(j->get_ref<const std::string&>()) : std::nullopt;
    if (!hash) return corrupt("{}.{}: found {}, expected 16 lower-case hex digits", where_, key, short_dump(*j));
    out = *hash;
    return {};
  }
  /// A JSON object as text.
  Status read_object(const char* key, std::string& out) const {
    RT_TRY_SET(const json* j, get(key));
    if (!j->is_object()) return corrupt("{}.{}: found {}, expected an object", where_, key, type_name(*j));
    out = json_text(*j);
    return {};
  }
  Result<const json*> array(const char* key, int64_t max_count) const {
    RT_TRY_SET(const json* j, get(key));
    if (!j->is_array()) return corrupt("{}.{}: found {}, expected an array", where_, key, type_name(*j));
    if (static_cast<int64_t>(j->size()) > max_count)
      return corrupt("{}.{}: found {} entries, expected at most {}", where_, key, j->size(), max_count);
    return j;
  }
  const std::string& where() const { return where_; }

 private:
  static std::string short_dump(const json& j) {
    return j.is_structured() ? j.type_name() : printable_ascii(json_text(j)).substr(0, 60);
  }
  Status read_int(const json& j, const char* key, int64_t& out) const {
    if (!j.is_number_integer() || (j.is_number_unsigned() && j.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)))
      return corrupt("{}.{}: found {}, expected a whole number below 2^63", where_, key, type_name(j));
    out = j.get<int64_t>();
    return {};
  }

  const json& object_;
  std::string where_;
};

Status read_tensor(const ObjectReader& r, TensorEntry& t) {
  RT_TRY(r.expect_keys(4));
  RT_TRY(r.read("name", t.name));
  RT_TRY(r.read("kind", t.kind));
  std::string dtype;
  RT_TRY(r.read("dtype", dtype));
  Result<DType> parsed = parse_dtype(dtype);
  if (!parsed.ok())
    return Error{ErrorCode::kUnsupported, fmt::format("{}.dtype: {}; if a newer build wrote it, read it with that",
                                                      r.where(), parsed.error().message)};
  t.dtype = parsed.value();
  return r.read("shape", t.shape, kMaxDims);
}

// A list of tensors up to its bracket. Its length, or nothing when it is not spelled as tensor_list() does.
std::optional<size_t> scan_tensors(std::string_view text, std::vector<TensorEntry>& out) {
  const std::string_view all = text;
  const auto skip = [&](std::string_view expected) {
    if (!text.starts_with(expected)) return false;
    text.remove_prefix(expected.size());
    return true;
  };
  const auto word = [&](std::string_view& value) {  // of characters that are written as they are
    size_t size = 0;
    while (size < text.size() && is_name_character(text[size])) ++size;
    value = text.substr(0, size);
    text.remove_prefix(size);
  };
  const auto number = [&](int64_t& value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const auto size = static_cast<size_t>(end - text.data());
    if (error != std::errc() || value < 0 || text[0] == '-' || (text[0] == '0' && size > 1)) return false;
    text.remove_prefix(size);
    return true;
  };
  do {
    TensorEntry& tensor = out.emplace_back();
    std::string_view dtype, kind, name;
    if (!skip(R"({"dtype":")")) return std::nullopt;
    word(dtype);
    const Result<DType> parsed = parse_dtype(dtype);
    if (!parsed.ok()) return std::nullopt;
    tensor.dtype = parsed.value();
    if (!skip(R"(","kind":")")) return std::nullopt;
    word(kind);
    if (!skip(R"(","name":")")) return std::nullopt;
    word(name);
    tensor.kind = kind;
    tensor.name = name;
    if (!skip(R"(","shape":[)")) return std::nullopt;
    std::array<int64_t, kMaxDims> dims;
    size_t count = 0;
    if (!text.starts_with(']')) {
      do {
        if (count == dims.size() || !number(dims[count++])) return std::nullopt;
      } while (skip(","));
    }
    tensor.shape.assign(dims.begin(), dims.begin() + count);
    if (!skip("]}") || static_cast<int64_t>(out.size()) > kMaxTensors) return std::nullopt;
  } while (skip(","));
  if (!text.starts_with(']')) return std::nullopt;
  return all.size() - text.size();
}

Status read_file_entry(const ObjectReader& r, FileEntry& f) {
  const bool elsewhere = r.has("step");
  RT_TRY(r.expect_keys(elsewhere ? 4 : 3));
  RT_TRY(r.read("name", f.name));
  RT_TRY(r.read("size_bytes", f.size_bytes));
  if (elsewhere) {
    RT_TRY(r.read("step", f.step));
    if (f.step < 0) return corrupt("{}.step: found {}, expected at least 0", r.where(), f.step);
  }
  return r.read_hash("rest_xxh3_64", f.rest_hash);
}

// What the body says of shards.bin.
struct TableInfo {
  int64_t count = 0, chunks = 0, payload_bytes = 0, size_bytes = 0;
  uint64_t hash = 0;
};

template <typename T, typename Read>
Status read_entries(const ObjectReader& body, const char* key, int64_t max_count, std::vector<T>& out, Read read) {
  RT_TRY_SET(const json* entries, body.array(key, max_count));
  out.resize(entries->size());
  for (size_t i = 0; i < out.size(); ++i) {
    const ObjectReader reader((*entries)[i], fmt::format("$.{}[{}]", key, i));
    RT_TRY(read(reader, out[i]));
  }
  return {};
}

Status read_body(const json& j, Manifest& m, TableInfo& table) {
  const ObjectReader body(j, "$");
  RT_TRY(body.expect_keys(16));
  RT_TRY(body.read("step", m.step));
  RT_TRY(body.read("samples", m.samples));
  RT_TRY(body.read("tokens", m.tokens));
  RT_TRY(body.read("created_unix_ms", m.created_unix_ms));
  RT_TRY(body.read("recipe", m.recipe));
  RT_TRY(body.read("recipe_hash", m.recipe_hash));

  RT_TRY_SET(const json* run_json, body.get("run"));
  const ObjectReader run(*run_json, "$.run");
  RT_TRY(run.expect_keys(3));
  RT_TRY(run.read("name", m.run.name));
  RT_TRY(run.read("id", m.run.id));
  RT_TRY_SET(const json* parents, run.array("parents", 1 << 20));
  for (const json& parent : *parents) {
    if (!parent.is_string()) return corrupt("$.run.parents: found {}, expected strings", type_name(parent));
    m.run.parents.push_back(parent.get<std::string>());
  }

  RT_TRY_SET(const json* mesh_json, body.get("mesh"));
  const ObjectReader mesh(*mesh_json, "$.mesh");
  RT_TRY(mesh.expect_keys(9));
  RT_TRY(mesh.read("tp", m.mesh.tp));
  RT_TRY(mesh.read("pp", m.mesh.pp));
  RT_TRY(mesh.read("dp", m.mesh.dp));
  RT_TRY(mesh.read("zero", m.mesh.zero));
  RT_TRY(mesh.read("world", m.mesh.world));
  RT_TRY(mesh.read("precision", m.mesh.precision));
  RT_TRY(mesh.read("virtual_stages", m.mesh.virtual_stages));
  RT_TRY(mesh.read("ep", m.mesh.ep));
  RT_TRY(mesh.read("cp", m.mesh.cp));

  RT_TRY(body.read_object("state", m.state));
  RT_TRY(body.read_object("extra", m.extra));
  RT_TRY(body.read("origin", m.origin));
  RT_TRY_SET(const json* metrics, body.get("metrics"));
  if (!metrics->is_object()) return corrupt("$.metrics: found {}, expected an object", type_name(*metrics));
  for (const auto& [name, value] : metrics->items()) {
    if (!value.is_number_float())
      return corrupt("$.metrics.{}: found {}, expected a number with a fraction or exponent", name, type_name(value));
    m.metrics[name] = value.get<double>();
  }
  RT_TRY_SET(const json* writer_json, body.get("writer"));
  const ObjectReader writer(*writer_json, "$.writer");
  RT_TRY(writer.expect_keys(2));
  RT_TRY(writer.read("program", m.writer.program));
  RT_TRY(writer.read("host", m.writer.host));

  RT_TRY(read_entries(body, "tensors", kMaxTensors, m.tensors, read_tensor));
  RT_TRY(read_entries(body, "files", kMaxFiles, m.files, read_file_entry));
  RT_TRY_SET(const json* shards_json, body.get("shards"));
  const ObjectReader shards(*shards_json, "$.shards");
  RT_TRY(shards.expect_keys(5));
  RT_TRY(shards.read("count", table.count));
  RT_TRY(shards.read("chunks", table.chunks));
  RT_TRY(shards.read("payload_bytes", table.payload_bytes));
  RT_TRY(shards.read("size_bytes", table.size_bytes));
  return shards.read_hash("xxh3_64", table.hash);
}

Status read_table(std::string_view bytes, const TableInfo& info, Manifest& m) {
  if (static_cast<int64_t>(bytes.size()) != info.size_bytes)
    return corrupt("shards.bin: byte {}: the file has {} bytes, the manifest says {}{}",
                   std::min(static_cast<int64_t>(bytes.size()), info.size_bytes), bytes.size(), info.size_bytes,
                   static_cast<int64_t>(bytes.size()) < info.size_bytes ? " (file cut short?)" : "");
  if (const uint64_t hash = hash_bytes(bytes); hash != info.hash)
    return corrupt("shards.bin: checksum {}, the manifest has {}", hash_to_hex(hash), hash_to_hex(info.hash));
  RT_TRY(decode_shard_table(bytes, m.shards));
  int64_t chunks = 0;
  for (const ShardEntry& shard : m.shards) chunks += static_cast<int64_t>(shard.hashes.size());
  if (info.count != static_cast<int64_t>(m.shards.size()))
    return corrupt("$.shards.count: found {}, shards.bin has {}", info.count, m.shards.size());
  if (info.chunks != chunks) return corrupt("$.shards.chunks: found {}, shards.bin has {}", info.chunks, chunks);
  return {};
}

// The header line, taken apart without a JSON parser: it is one fixed shape, so a flipped bit cannot hide in it.
// Returns where the body begins and how long it is.
struct HeaderInfo {
  size_t body_at = 0;
  size_t body_bytes = 0;
  size_t length_at = 0;  // where the header says body_bytes
};

Result<HeaderInfo> read_header(std::string_view bytes) {
  const std::string start = fmt::format("{{\"format\":\"{}\",\"version\":", kFormatName);
  if (!bytes.starts_with(start)) {
    const size_t at = static_cast<size_t>(
        std::mismatch(bytes.begin(), bytes.begin() + static_cast<int64_t>(std::min(bytes.size(), start.size())),
                      start.begin())
            .first -
        bytes.begin());
    return corrupt("byte {}: found \"{}\", expected \"{}\": this is no {} manifest", at, snippet(bytes, at),
                   std::string_view(start).substr(at), kFormatName);
  }
  size_t at = start.size();
  const auto number = [&](int64_t& out) {
    const size_t begin = at;
    for (out = 0; at < bytes.size() && at - begin < 15 && bytes[at] >= '0' && bytes[at] <= '9'; ++at)
      out = out * 10 + (bytes[at] - '0');
    return at > begin;
  };
  int64_t version = 0, body_bytes = 0;
  const size_t version_at = at;
  if (!number(version)) return corrupt("byte {}: found \"{}\", expected the format version", at, snippet(bytes, at));
  if (version != kFormatVersion) {
    return Error{version > kFormatVersion ? ErrorCode::kUnsupported : ErrorCode::kCorrupt,
                 fmt::format("byte {}: format version {}, this build reads 1 to {}; read it with a newer build",
                             version_at, version, kFormatVersion)};
  }
  const std::string_view length_key = ",\"body_bytes\":";
  if (!bytes.substr(at).starts_with(length_key))
    return corrupt("byte {}: found \"{}\", expected \"{}\"", at, snippet(bytes, at), length_key);
  at += length_key.size();
  const size_t length_at = at;
  if (!number(body_bytes)) return corrupt("byte {}: found \"{}\", expected the body's length", at, snippet(bytes, at));
  const std::string_view hash_key = ",\"body_xxh3_64\":\"";
  constexpr std::string_view kEnd = "\"}\n";
  const std::string_view rest = bytes.substr(at);
  const size_t header_tail = hash_key.size() + 16 + kEnd.size();
  if (rest.size() < header_tail || !rest.starts_with(hash_key) ||
      rest.substr(hash_key.size() + 16, kEnd.size()) != kEnd)
    return corrupt("byte {}: found \"{}\", expected \"{}<16 hex digits>{}\" and a line end", at, snippet(bytes, at),
                   hash_key, "\"}");
  const size_t body_at = at + header_tail;
  if (body_bytes > kMaxManifestBytes)
    return corrupt("byte {}: a body of {} bytes, at most {} are read", length_at, body_bytes, kMaxManifestBytes);
  return HeaderInfo{body_at, static_cast<size_t>(body_bytes), length_at};
}

Status check_body_hash(std::string_view bytes, const HeaderInfo& header) {
  constexpr size_t kTail = 16 + std::string_view("\"}\n").size();
  const std::string_view hex = bytes.substr(header.body_at - kTail, 16);
  const std::string computed = hash_to_hex(hash_bytes(bytes.substr(header.body_at)));
  if (hex == computed) return {};
  return corrupt("byte {}: the header says checksum \"{}\", the body has \"{}\"", header.body_at - kTail,
                 snippet(hex, 0), computed);
}

std::string printable_line(std::string_view line) {
  return std::string(line.substr(0, line.empty() ? 0 : line.size() - 1));
}

}  // namespace

std::string metric_key(std::string_view name) {
  std::string out;
  for (const char c : name) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (letter || c == '_' || c == '.' || c == '-') {
      out += c;
    } else {
      out += c == '/' ? "." : fmt::format("_{:02x}", static_cast<unsigned char>(c));
    }
  }
  return out;
}

Result<ManifestFiles> encode_manifest_files(const Manifest& manifest) {
  const auto invalid = [](Error error) {
    error.code = ErrorCode::kInvalidInput;
    return std::move(error).with("manifest to write");
  };
  const auto parse_object = [&](const char* key, const std::string& text) -> Result<json> {
    Result<json> parsed = parse_json(text);
    if (!parsed.ok()) return invalid(std::move(parsed).error().with(key));
    if (!parsed.value().is_object()) return invalid(corrupt("{}: expected a JSON object", key));
    return parsed;
  };
  if (Status valid = validate_manifest(manifest); !valid.ok()) return invalid(std::move(valid).error());
  RT_TRY_SET(json state, parse_object("$.state", manifest.state));
  RT_TRY_SET(json extra, parse_object("$.extra", manifest.extra));
  ManifestFiles out;
  out.table = encode_shard_table(manifest);
  if (static_cast<int64_t>(out.table.size()) > kMaxTableBytes)
    return invalid(corrupt("shards.bin: {} bytes, at most {}", out.table.size(), kMaxTableBytes));
  std::string body;
  try {
    body = body_text(manifest, std::move(state), std::move(extra), out.table);
  } catch (const json::exception& e) {  // a string that is no UTF-8
    return invalid(corrupt("{}", e.what()));
  }
  if (Status depth = check_json_depth(body); !depth.ok()) return invalid(std::move(depth).error());
  body += '\n';
  if (static_cast<int64_t>(body.size()) > kMaxManifestBytes)
    return invalid(corrupt("{} bytes, at most {}", body.size(), kMaxManifestBytes));
  out.json = header_line(body);
  out.json += body;
  return out;
}

Result<std::string> encode_manifest(const Manifest& manifest) {
  RT_TRY_SET(ManifestFiles files, encode_manifest_files(manifest));
  files.json += files.table;
  return std::move(files.json);
}

namespace {

Status decode_json(std::string_view body, size_t body_at, Manifest& manifest, TableInfo& info) {
  Result<json> parsed = parse_json(body);
  if (!parsed.ok()) return std::move(parsed).error().with(fmt::format("body at byte {}", body_at));
  const json& j = parsed.value();
  RT_TRY(read_body(j, manifest, info));
  // One value has one spelling: double keys, spaces and other number formats would let two readers disagree.
  const std::string canonical = json_text(j) + '\n';
  if (canonical == body) return {};
  const size_t at = static_cast<size_t>(
      std::mismatch(body.begin(), body.begin() + static_cast<int64_t>(std::min(body.size(), canonical.size())),
                    canonical.begin())
          .first -
      body.begin());
  return corrupt("byte {}: found \"{}\", canonical JSON has \"{}\"", body_at + at, snippet(body, at),
                 snippet(canonical, at));
}

// A long list of tensors is most of a body, and a tree of values most of the time that reading it takes. So the list is
// scanned as tensor_list() writes it and the rest is parsed. Whatever the scan does not know is parsed as a whole,
// which also finds the words for what is wrong.
Status decode_body(std::string_view body, size_t body_at, Manifest& manifest, TableInfo& info) {
  constexpr std::string_view kBegin = R"("tensors":[)";
  // The last one: behind the list come "tokens" and "writer", which has no such key; in a string the quotes are
  // escaped.
  const size_t begin = body.rfind(kBegin);
  if (begin != std::string_view::npos) {
    const size_t list = begin + kBegin.size();
    std::vector<TensorEntry> tensors;
    if (const std::optional<size_t> length = scan_tensors(body.substr(list), tensors)) {
      std::string rest(body.substr(0, list));
      rest += body.substr(list + *length);
      Manifest found;
      if (decode_json(rest, body_at, found, info).ok() && found.tensors.empty()) {
        manifest = std::move(found);
        manifest.tensors = std::move(tensors);
        return {};
      }
      info = {};
    }
  }
  return decode_json(body, body_at, manifest, info);
}

Result<Manifest> decode(std::string_view bytes, std::string_view table) {
  RT_TRY_SET(const HeaderInfo header, read_header(bytes));
  const std::string_view body = bytes.substr(header.body_at);
  if (body.size() != header.body_bytes) {
    return corrupt("byte {}: the body has {} bytes, the header says {}{}", header.length_at, body.size(),
                   header.body_bytes, body.size() < header.body_bytes ? " (file cut short?)" : "");
  }
  RT_TRY(check_body_hash(bytes, header));
  Manifest manifest;
  TableInfo info;
  RT_TRY(decode_body(body, header.body_at, manifest, info));
  if (header_line(body) != bytes.substr(0, header.body_at))  // zeros in front of a number
    return corrupt("byte 0: found \"{}\", expected \"{}\"", printable_line(bytes.substr(0, header.body_at)),
                   printable_line(header_line(body)));
  RT_TRY(read_table(table, info, manifest));
  RT_TRY(validate_manifest(manifest));
  if (const int64_t payload = payload_bytes(manifest); payload != info.payload_bytes)
    return corrupt("$.shards.payload_bytes: found {}, shards.bin has {}", info.payload_bytes, payload);
  return manifest;
}

}  // namespace

Result<Manifest> decode_manifest(std::string_view json, std::string_view table, std::string_view dir) {
  Result<Manifest> manifest = decode(json, table);
  if (manifest.ok() || dir.empty()) return manifest;
  Error error = std::move(manifest).error();
  const bool of_table = error.message.starts_with("shards.bin: ");
  error.message = fmt::format("{}/{}{}", dir, of_table ? "" : "manifest.json: ", error.message);
  return error;
}

std::vector<uint64_t> starts_of(const Manifest& manifest) {
  const json extra = json_or_nothing(manifest.extra);
  const json starts = json_field(extra, "starts");
  if (!starts.is_array()) return {};
  std::vector<uint64_t> out;
  for (const json& start : starts) {
    const auto id = start.is_string() ? hash_from_hex(start.get_ref<const std::string&>()) : std::nullopt;
    if (!id) return {};  // `extra` is anybody's
    out.push_back(*id);
  }
  return out;
}

namespace {

json extra_of(const Manifest& manifest) {
  json extra = json_or_nothing(manifest.extra);
  return extra.is_object() ? extra : json::object();
}

}  // namespace

void put_starts(std::span<const uint64_t> starts, Manifest& manifest) {
  json extra = extra_of(manifest);
  extra["starts"] = json::array();
  for (const uint64_t start : starts) extra["starts"].push_back(hash_to_hex(start));
  manifest.extra = json_text(extra);
}

std::string lineage_of(const Manifest& manifest) {
  const json extra = extra_of(manifest);
  const auto found = extra.find("lineage");
  return found != extra.end() && found->is_string() ? found->get<std::string>() : std::string();
}

void put_lineage(const std::string& hash, Manifest& manifest) {
  if (hash.empty()) return;
  json extra = extra_of(manifest);
  extra["lineage"] = hash;
  manifest.extra = json_text(extra);
}

Result<Manifest> decode_manifest(std::string_view bytes) {
  // An error in the header is told by the decoder.
  const Result<HeaderInfo> header = read_header(bytes);
  const size_t json_bytes =
      header.ok() ? std::min(bytes.size(), header.value().body_at + header.value().body_bytes) : bytes.size();
  return decode_manifest(bytes.substr(0, json_bytes), bytes.substr(json_bytes));
}

}  // namespace cairn::ckpt
