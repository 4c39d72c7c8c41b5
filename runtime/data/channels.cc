#include "runtime/data/channels.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <cstring>

#include "runtime/core/new_file.h"
#include "runtime/data/file_io.h"
#include "runtime/json/json.h"

namespace cairn::data {
namespace {

constexpr std::string_view kMagic = "CAIRNCH1";
constexpr size_t kFooterBytes = 5 * 8;

template <typename Number>
void put(std::string& to, Number number) {
  to.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

template <typename Number>
Number get(std::string_view from, size_t at) {
  Number out;
  std::memcpy(&out, from.data() + at, sizeof(out));
  return out;
}

/// The names that lie in `bytes`; fewer than `count` where they do not fit it.
std::vector<std::string> names_in(std::string_view bytes, uint64_t count) {
  std::vector<std::string> out;
  while (out.size() < count && bytes.size() >= sizeof(uint16_t)) {
    const size_t length = get<uint16_t>(bytes, 0);
    bytes.remove_prefix(sizeof(uint16_t));
    if (length > bytes.size()) return out;
    out.emplace_back(bytes.substr(0, length));
    bytes.remove_prefix(length);
  }
  if (!bytes.empty()) out.clear();
  return out;
}

}  // namespace

std::string channel_path(const std::string& prefix) { return prefix + ".channel"; }

Result<std::optional<DocumentChannels>> DocumentChannels::open(const std::string& prefix, int64_t documents,
                                                               int64_t tokens) {
  const std::string path = channel_path(prefix);
  Result<OpenedFile> opened = open_readable(path);
  if (!opened.ok() && opened.error().code == ErrorCode::kInvalidInput) return std::optional<DocumentChannels>();
  if (!opened.ok()) return std::move(opened).error();
  const auto wrong = [&](size_t byte, const std::string& what) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: byte {}: {}; make the set again (cairn data chat --channel)", path, byte, what)};
  };
  std::string bytes(static_cast<size_t>(opened.value().size_bytes), '\0');
  RT_TRY(read_exact(opened.value().fd.get(), path, 0, bytes.data(), std::ssize(bytes)));
  if (bytes.size() < kMagic.size() + kFooterBytes) return wrong(bytes.size(), "the file ends before its table");
  if (!bytes.starts_with(kMagic)) return wrong(0, "is no table of channels");
  const size_t footer = bytes.size() - kFooterBytes;
  if (get<uint64_t>(bytes, footer + 32) != XXH3_64bits(bytes.data(), footer + 32))
    return wrong(footer + 32, "its checksum is of other bytes");
  const auto channels = get<uint64_t>(bytes, footer), name_bytes = get<uint64_t>(bytes, footer + 8),
             of_documents = get<uint64_t>(bytes, footer + 16), of_tokens = get<uint64_t>(bytes, footer + 24);
  const uint64_t left = footer - kMagic.size();
  if (name_bytes > left || of_documents > left / 2 || left - name_bytes != 2 * of_documents ||
      channels > static_cast<uint64_t>(kMostChannels))
    return wrong(
        footer, fmt::format("{} channels and {} documents do not fill {} bytes", channels, of_documents, bytes.size()));
  if (of_documents != static_cast<uint64_t>(documents) || of_tokens != static_cast<uint64_t>(tokens))
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: is of {} tokens in {} documents, and the pair beside it has {} in {}; make the set "
                             "again (cairn data chat), or remove the file",
                             path, of_tokens, of_documents, tokens, documents)};
  DocumentChannels out;
  out.of_document.resize(of_documents);
  if (of_documents > 0) std::memcpy(out.of_document.data(), bytes.data() + kMagic.size(), of_documents * 2);
  const size_t names_at = kMagic.size() + of_documents * 2;
  out.names = names_in(std::string_view(bytes).substr(names_at, name_bytes), channels);
  if (out.names.size() != channels) return wrong(names_at, "names that do not fill their table");
  for (size_t k = 0; k < out.of_document.size(); ++k) {
    if (out.of_document[k] >= channels)
      return wrong(kMagic.size() + 2 * k, fmt::format("channel {} of {}", out.of_document[k], channels));
  }
  return std::optional(std::move(out));
}

Status ChannelWriter::add_document(const std::string& channel) {
  const auto [known, is_new] = known_.emplace(channel, static_cast<uint16_t>(all_.names.size()));
  if (is_new && std::ssize(all_.names) == kMostChannels)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("\"{}\" is channel {}, and at most {} are told apart: name a field with fewer values",
                             printable_ascii(channel), kMostChannels + 1, kMostChannels)};
  if (is_new) all_.names.push_back(channel);
  all_.of_document.push_back(known->second);
  return {};
}

Status ChannelWriter::publish(const std::string& prefix, int64_t tokens) const {
  std::string bytes(kMagic), names;
  bytes.append(reinterpret_cast<const char*>(all_.of_document.data()), all_.of_document.size() * 2);
  for (const std::string& name : all_.names) {
    put(names, static_cast<uint16_t>(name.size()));
    names += name;
  }
  bytes += names;
  for (const uint64_t count : {uint64_t{all_.names.size()}, uint64_t{names.size()}, uint64_t{all_.of_document.size()},
                               static_cast<uint64_t>(tokens)})
    put(bytes, count);
  put(bytes, uint64_t{XXH3_64bits(bytes.data(), bytes.size())});
  return place_file(channel_path(prefix), bytes);
}

}  // namespace cairn::data
