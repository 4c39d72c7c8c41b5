#include "tools/track/wandb_file.h"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/json/json.h"

namespace cairn::tools::wandb {
namespace {

constexpr int64_t kBlockBytes = 32768, kPieceHeaderBytes = 7;
constexpr const char* kVersion = "0.17.0";  // of the client whose records these are like

uint32_t crc32(uint32_t crc, std::string_view bytes) {
  static const std::array<uint32_t, 256> kTable = [] {
    std::array<uint32_t, 256> out{};
    for (uint32_t k = 0; k < 256; ++k) {
      uint32_t value = k;
      for (int bit = 0; bit < 8; ++bit) value = (value & 1) != 0 ? 0xEDB88320u ^ (value >> 1) : value >> 1;
      out[k] = value;
    }
    return out;
  }();
  crc = ~crc;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<uint8_t>(c)) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

void add_little_endian(std::string& out, uint64_t value, int bytes) {
  for (int k = 0; k < bytes; ++k) out += static_cast<char>(value >> (8 * k) & 0xFF);
}

/// A protobuf message in the making.
class Message {
 public:
  Message& integer(int field, int64_t value) {
    if (value == 0) return *this;
    varint(static_cast<uint64_t>(field) << 3);
    varint(static_cast<uint64_t>(value));
    return *this;
  }
  Message& bytes(int field, std::string_view value) {
    varint(static_cast<uint64_t>(field) << 3 | 2);
    varint(value.size());
    out_ += value;
    return *this;
  }
  Message& text(int field, std::string_view value) { return value.empty() ? *this : bytes(field, value); }
  Message& message(int field, const Message& value) { return bytes(field, value.out_); }
  const std::string& done() const { return out_; }

 private:
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) out_ += static_cast<char>(value | 0x80);
    out_ += static_cast<char>(value);
  }
  std::string out_;
};

// Fields of wandb_internal.proto.
constexpr int kNum = 1, kHistory = 2, kRun = 17, kExit = 18, kHeader = 21;  // Record
constexpr int kKey = 1, kValueJson = 16;                                    // HistoryItem, ConfigItem

std::string record(int64_t number, int kind, const Message& content) {
  return Message().integer(kNum, number).message(kind, content).done();
}

Message item(const std::string& key, const std::string& value_json) {
  return Message().text(kKey, key).text(kValueJson, value_json);
}

}  // namespace

std::string file_header() {
  std::string out = ":W&B";
  add_little_endian(out, 0xBEE1, 2);
  add_little_endian(out, 0, 1);
  return out;
}

std::string framed(std::string_view record, int64_t file_bytes) {
  std::string out;
  for (bool first = true; first || !record.empty(); first = false) {
    const int64_t left = kBlockBytes - (file_bytes + std::ssize(out)) % kBlockBytes;
    if (left < kPieceHeaderBytes) out.append(static_cast<size_t>(left), '\0');
    const int64_t room = (left < kPieceHeaderBytes ? kBlockBytes : left) - kPieceHeaderBytes;
    const std::string_view piece = record.substr(0, static_cast<size_t>(room));
    record.remove_prefix(piece.size());
    const char type = record.empty() ? (first ? 1 : 4) : (first ? 2 : 3);
    add_little_endian(out, crc32(crc32(0, std::string_view(&type, 1)), piece), 4);
    add_little_endian(out, piece.size(), 2);
    out += type;
    out += piece;
  }
  return out;
}

std::string header_record(int64_t number) {
  Message version;
  version.text(1, kVersion).text(2, kVersion);  // VersionInfo: producer, min_consumer
  return record(number, kHeader, Message().message(1, version));
}

std::string run_record(int64_t number, const Run& run) {
  Message config;
  for (const auto& [key, value] : run.config.items()) config.message(1, item(key, json_text(value)));
  const double whole = std::floor(run.started);
  Message started;
  started.integer(1, static_cast<int64_t>(whole)).integer(2, static_cast<int64_t>((run.started - whole) * 1e9));
  Message out;
  out.text(1, run.id).text(2, run.entity).text(3, run.project).message(4, config).text(8, run.name);
  for (const std::string& tag : run.tags) out.text(10, tag);
  out.message(17, started);
  return record(number, kRun, out);
}

std::string history_record(int64_t number, const TrackedStep& step) {
  Message out;
  for (const auto& [name, value] : step.values) out.message(1, item(name, json_text(nlohmann::json(value))));
  out.message(1, item("_timestamp", json_text(nlohmann::json(step.time))));
  out.message(1, item("_step", std::to_string(step.step)));
  out.message(2, Message().integer(1, step.step));
  return record(number, kHistory, out);
}

std::string exit_record(int64_t number, int64_t exit_code) {
  return record(number, kExit, Message().integer(1, exit_code));
}

}  // namespace cairn::tools::wandb
