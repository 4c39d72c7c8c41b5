#include "converters/dual_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "ckpt/format/checksum.h"
#include "ckpt/persist/hdf5_file.h"
#include "runtime/core/file_calls.h"
#include "runtime/core/new_file.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

constexpr int64_t kChunkBytes = int64_t{4} << 20;  // bytes per checksum
constexpr int64_t kMaxHeaderBytes = 100'000'000;   // the safetensors library's own limit
constexpr int64_t kMinUserBlock = 4096;            // HDF5 allows 512; this keeps its alignment also in the file
constexpr std::string_view kLongestNumber = "1000000000000000000";  // where an offset is not known yet

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

struct Span {
  int64_t begin = 0, end = 0;  // file bytes
};

Status write_at(int fd, int64_t offset, const std::byte* data, int64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd, data, static_cast<size_t>(std::min<int64_t>(bytes, int64_t{1} << 30)), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, "write");
    data += n;
    offset += n;
    bytes -= n;
  }
  return {};
}

/// The text of the safetensors header. Spans are file bytes; `user_block` is where the data part begins.
std::string header_text(const std::vector<DualTensor>& tensors, const std::vector<Span>& spans,
                        const std::vector<Span>& structures, int64_t user_block,
                        const std::map<std::string, std::string>& metadata) {
  struct Entry {
    std::string name;
    nlohmann::ordered_json json;
    int64_t begin;
  };
  std::vector<Entry> entries;
  const auto add = [&](std::string name, std::string_view dtype, const Shape& shape, const Span& span) {
    nlohmann::ordered_json json;
    json["dtype"] = dtype;
    json["shape"] = shape;
    json["data_offsets"] = {span.begin - user_block, span.end - user_block};
    entries.push_back({std::move(name), std::move(json), span.begin});
  };
  for (size_t k = 0; k < tensors.size(); ++k)
    add(tensors[k].name, safetensors_dtype_name(tensors[k].dtype), tensors[k].shape, spans[k]);
  for (size_t k = 0; k < structures.size(); ++k)
    add(fmt::format("{}{}", kStructurePrefix, k), "U8", {structures[k].end - structures[k].begin}, structures[k]);
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.begin < b.begin; });
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  for (Entry& entry : entries) json[entry.name] = std::move(entry.json);
  return json_text(json);
}

/// Enough for the header whatever libhdf5 will do: each tensor has at most one structure before it, one is at the end.
Result<int64_t> user_block_for(const std::vector<DualTensor>& tensors,
                               const std::map<std::string, std::string>& metadata) {
  const std::vector<Span> none(tensors.size());
  const std::string least = header_text(tensors, none, {}, 0, metadata);
  const auto pair = static_cast<int64_t>(2 * kLongestNumber.size());
  const auto structure = static_cast<int64_t>(kStructurePrefix.size()) + 60 + 2 * pair;  // name, keys, shape, offsets
  const auto count = static_cast<int64_t>(tensors.size());
  const int64_t most = 8 + static_cast<int64_t>(least.size()) + count * pair + (count + 1) * structure;
  if (most > kMaxHeaderBytes) {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("a header of up to {} bytes is above safetensors' limit of {}", most, kMaxHeaderBytes)};
  }
  return std::max(kMinUserBlock, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(most))));
}

Status check(const std::vector<DualTensor>& tensors) {
  std::set<std::string_view> names, datasets;
  for (const DualTensor& tensor : tensors) {
    const std::string_view dataset = tensor.dataset.empty() ? tensor.name : tensor.dataset;
    if (tensor.name.empty() || tensor.name.starts_with(kStructurePrefix) || tensor.name == "__metadata__")
      return invalid(fmt::format("\"{}\" cannot be a tensor's name in this file", tensor.name));
    if (dataset == "." || dataset == ".." || dataset.find('/') != std::string_view::npos)
      return invalid(fmt::format("\"{}\" cannot be a dataset's name", dataset));
    if (std::any_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t extent) { return extent < 1; }))
      return invalid(fmt::format("{}: shape {} has no elements", tensor.name, to_string(tensor.shape)));
    if (!names.insert(tensor.name).second || !datasets.insert(dataset).second)
      return invalid(fmt::format("{} is there twice", tensor.name));
  }
  return {};
}

/// Takes a tensor's bytes as they come: to their place in the file, and into the hash of their chunk.
class TensorSink {
 public:
  TensorSink(int fd, Span span) : fd_(fd), span_(span), at_(span.begin) {}

  Status take(const std::byte* data, int64_t bytes) {
    if (bytes > span_.end - at_)
      return Error{ErrorCode::kInternal, fmt::format("more than {} bytes", span_.end - span_.begin)};
    RT_TRY(write_at(fd_, at_, data, bytes));
    while (bytes > 0) {
      const int64_t n = std::min(bytes, kChunkBytes - (at_ - span_.begin) % kChunkBytes);
      hash_.update(std::span(data, static_cast<size_t>(n)));
      data += n;
      at_ += n;
      bytes -= n;
      if ((at_ - span_.begin) % kChunkBytes == 0 || at_ == span_.end) {
        hashes_.push_back(hash_.digest());
        hash_ = ckpt::StreamingHash();
      }
    }
    return {};
  }
  bool full() const { return at_ == span_.end; }
  const std::vector<uint64_t>& hashes() const { return hashes_; }

 private:
  int fd_;
  Span span_;
  int64_t at_;
  ckpt::StreamingHash hash_;
  std::vector<uint64_t> hashes_;
};

Result<DualReport> write_body(int fd, const std::vector<DualTensor>& tensors,
                              const std::map<std::string, std::string>& metadata, int64_t step,
                              const std::function<Status(size_t, const ByteSink&)>& fill) {
  DualReport report;
  RT_TRY_SET(report.user_block_bytes, user_block_for(tensors, metadata));
  RT_TRY_SET(const std::unique_ptr<ckpt::Hdf5Writer> h5,
             ckpt::Hdf5Writer::create(step, static_cast<int64_t>(tensors.size()), report.user_block_bytes));
  std::vector<Span> spans;
  for (const DualTensor& tensor : tensors) {
    const ckpt::TensorEntry entry{tensor.dataset.empty() ? tensor.name : tensor.dataset, "weight", tensor.dtype,
                                  tensor.shape};
    RT_TRY_SET(const int64_t offset, h5->place(entry, Box::whole(tensor.shape)));
    const int64_t bytes = count_elems(tensor.shape) * dtype_size_bytes(tensor.dtype);
    spans.push_back({offset, offset + bytes});
    report.data_bytes += bytes;
  }
  for (size_t k = 0; k < tensors.size(); ++k) {
    TensorSink sink(fd, spans[k]);
    RT_TRY(fill(k, [&](const std::byte* data, int64_t bytes) { return sink.take(data, bytes); }).with(tensors[k].name));
    if (!sink.full()) return Error{ErrorCode::kInternal, tensors[k].name + ": fewer bytes than its shape has"};
    RT_TRY(h5->set_hashes(static_cast<int64_t>(k), kChunkBytes, sink.hashes()));
    report.shards.push_back({static_cast<int64_t>(k), 0, Box::whole(tensors[k].shape), spans[k].begin,
                             spans[k].end - spans[k].begin, kChunkBytes, sink.hashes()});
  }
  RT_TRY(h5->finish());
  const std::unique_ptr<ckpt::Hdf5Image> image = h5->take_image();
  report.file_bytes = image->eoa;

  // What lies between the tensors is HDF5's.
  std::vector<Span> by_place = spans, structures;
  std::sort(by_place.begin(), by_place.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  int64_t at = report.user_block_bytes;
  for (const Span& span : by_place) {
    RT_CHECK(span.begin >= at, "HDF5 put two datasets over each other at byte {}", span.begin);
    if (span.begin > at) structures.push_back({at, span.begin});
    at = span.end;
  }
  if (report.file_bytes > at) structures.push_back({at, report.file_bytes});
  report.structures = static_cast<int64_t>(structures.size());
  std::string head = header_text(tensors, spans, structures, report.user_block_bytes, metadata);
  RT_CHECK(8 + static_cast<int64_t>(head.size()) <= report.user_block_bytes, "a header of {} bytes, foreseen were {}",
           head.size(), report.user_block_bytes - 8);
  head.append(static_cast<size_t>(report.user_block_bytes) - 8 - head.size(), ' ');
  const uint64_t length = head.size();
  head.insert(0, 8, '\0');
  std::memcpy(head.data(), &length, 8);
  RT_TRY(write_at(fd, 0, reinterpret_cast<const std::byte*>(head.data()), static_cast<int64_t>(head.size())));
  ckpt::StreamingHash rest;
  rest.update(std::as_bytes(std::span(head)));
  std::vector<std::byte> buffer(64 << 10);
  for (const Span& span : structures) {
    for (int64_t begin = span.begin; begin < span.end; begin += static_cast<int64_t>(buffer.size())) {
      const auto n = static_cast<size_t>(std::min<int64_t>(span.end - begin, static_cast<int64_t>(buffer.size())));
      RT_TRY(image->get(begin, std::span(buffer).first(n)));
      RT_TRY(write_at(fd, begin, buffer.data(), static_cast<int64_t>(n)));
      rest.update(std::span(buffer).first(n));
    }
  }
  report.rest_hash = rest.digest();
  if (::ftruncate(fd, report.file_bytes) != 0) return os_error(errno, "truncate");
  if (sync_to_disk(fd) != 0) return os_error(errno, "fsync");
  return report;
}

}  // namespace

Result<DualReport> write_dual(const std::filesystem::path& path, const std::vector<DualTensor>& tensors,
                              const std::map<std::string, std::string>& metadata, int64_t step,
                              const std::function<Status(size_t index, const ByteSink&)>& fill) {
  RT_TRY(check(tensors).with(path.string()));
  RT_TRY_SET(NewFile file, NewFile::beside(path));
  Result<DualReport> report = write_body(file.fd(), tensors, metadata, step, fill);
  if (!report.ok()) return std::move(report).error().with(path.string());
  RT_TRY(file.publish_durably());
  return report;
}

}  // namespace cairn::convert
