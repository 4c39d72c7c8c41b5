#include "ckpt/verify/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/hdf5_file.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/read_pipeline.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kWindowBytes = int64_t{64} << 20;
constexpr int64_t kPieceBytes = int64_t{4} << 20;

class Verifier {
 public:
  Verifier(IoBackend& io, const fs::path& dir, const Manifest& manifest, const VerifyOptions& options,
           VerifyReport& report)
      : io_(io), dir_(dir), manifest_(manifest), options_(options), report_(report) {
    for (const FileEntry& file : manifest.files) total_bytes_ += file.size_bytes;
  }

  /// The status is an error only when there is enough damage to stop.
  Status check_file(int64_t index) {
    const FileEntry& entry = manifest_.files[static_cast<size_t>(index)];
    Result<std::unique_ptr<IoFile>> file = io_.open(checkpoint_file_path(dir_, entry.step, entry.name));
    if (!file.ok()) return add({entry.name, -1, -1, 0, 0, file.error().message});
    const Result<int64_t> size = file.value()->size();
    if (!size.ok()) return add({entry.name, -1, -1, 0, 0, size.error().message});
    if (size.value() != entry.size_bytes) {
      RT_TRY(add({entry.name, -1, -1, std::min(size.value(), entry.size_bytes), 0,
                  fmt::format("{}: {} bytes, the manifest has {}", entry.name, size.value(), entry.size_bytes)}));
    }
    std::vector<int64_t> shards;
    for (size_t s = 0; s < manifest_.shards.size(); ++s) {
      if (manifest_.shards[s].file == index) shards.push_back(static_cast<int64_t>(s));
    }
    std::sort(shards.begin(), shards.end(), [&](int64_t a, int64_t b) {
      return manifest_.shards[static_cast<size_t>(a)].offset < manifest_.shards[static_cast<size_t>(b)].offset;
    });
    // What lies between the payload of a file of another step is in that step's shards as well: its own manifest covers
    // it, this one covers the payload that it names.
    const bool rest_holds = size.value() >= entry.size_bytes && entry.step < 0;
    RT_TRY(check_bytes(*file.value(), entry, size.value(), shards));
    ++report_.files;
    if (rest_holds && rest_good_ && options_.structure) return check_structure(*file.value(), entry, shards);
    return {};
  }

 private:
  Status add(Damage damage) {
    report_.damages.push_back(std::move(damage));
    if (static_cast<int64_t>(report_.damages.size()) < options_.max_damages) return {};
    return Error{ErrorCode::kCorrupt, "enough damage found"};
  }

  void count(int64_t bytes) {
    report_.bytes += bytes;
    if (options_.progress) options_.progress(report_.bytes, total_bytes_);
  }

  // Payload and rest in one pass in file order.
  Status check_bytes(IoFile& file, const FileEntry& entry, int64_t size, const std::vector<int64_t>& shards) {
    StreamingHash rest;
    rest_good_ = true;
    ReadPipeline pipeline(kWindowBytes);
    int64_t at = 0;
    const auto read_rest = [&](int64_t end) -> Status {
      if (entry.step >= 0) at = end;
      while (at < end) {
        const int64_t bytes = std::min(kPieceBytes, end - at), offset = at;
        RT_TRY(pipeline.submit(file, size, offset, bytes, nullptr,
                               [&, offset, bytes](Status read, std::span<const std::byte> data) -> Status {
                                 count(bytes);
                                 if (read.ok()) {
                                   rest.update(data);
                                   return {};
                                 }
                                 rest_good_ = false;
                                 return add({entry.name, -1, -1, offset, bytes, read.error().message});
                               }));
        at += bytes;
      }
      return {};
    };
    struct Segment {
      int64_t offset, bytes, shard, chunk;
    };
    std::vector<Segment> segments;
    for (const int64_t s : shards) {
      const ShardEntry& shard = manifest_.shards[static_cast<size_t>(s)];
      for (int64_t chunk = 0; chunk < static_cast<int64_t>(shard.hashes.size()); ++chunk) {
        const int64_t begin = chunk * shard.chunk_bytes;
        if (shard.stored.empty()) {
          segments.push_back({shard.offset + begin, std::min(shard.chunk_bytes, shard.bytes - begin), s, chunk});
        } else {
          const StoredChunk& stored = shard.stored[static_cast<size_t>(chunk)];
          segments.push_back({stored.offset, stored.bytes, s, chunk});
        }
      }
    }
    std::sort(segments.begin(), segments.end(), [](const Segment& a, const Segment& b) { return a.offset < b.offset; });
    for (const auto& [offset, bytes, s, chunk] : segments) {
      RT_TRY(read_rest(offset));
      at = offset;
      RT_TRY(pipeline.submit(file, size, offset, bytes, nullptr,
                             [&, s = s, chunk = chunk, offset = offset, bytes = bytes](
                                 Status read, std::span<const std::byte> data) -> Status {
                               return check_chunk(entry, s, chunk, offset, bytes, std::move(read), data);
                             }));
      at += bytes;
    }
    report_.shards += static_cast<int64_t>(shards.size());
    RT_TRY(read_rest(entry.size_bytes));
    RT_TRY(pipeline.drain());
    if (!rest_good_ || entry.step >= 0 || rest.digest() == entry.rest_hash) return {};
    rest_good_ = false;
    return add({entry.name, -1, -1, 0, 0,
                fmt::format("{}: HDF5 structure: checksum {}, the manifest has {}", entry.name,
                            hash_to_hex(rest.digest()), hash_to_hex(entry.rest_hash))});
  }

  Status check_chunk(const FileEntry& entry, int64_t s, int64_t chunk, int64_t offset, int64_t bytes, Status read,
                     std::span<const std::byte> data) {
    const ShardEntry& shard = manifest_.shards[static_cast<size_t>(s)];
    ++report_.chunks;
    count(bytes);
    const std::string place = describe_chunk(manifest_, shard, chunk);
    if (!read.ok())
      return add({entry.name, s, chunk, offset, bytes, fmt::format("{}: {}", place, read.error().message)});
    const uint64_t found = hash_bytes(data), expected = shard.hashes[static_cast<size_t>(chunk)];
    if (found == expected) return {};
    return add({entry.name, s, chunk, offset, bytes,
                fmt::format("{}: checksum {}, the manifest has {}", place, hash_to_hex(found), hash_to_hex(expected))});
  }

  Status check_structure(IoFile& file, const FileEntry& entry, const std::vector<int64_t>& shards) {
    std::vector<std::string> paths;
    for (const int64_t s : shards) {
      const ShardEntry& shard = manifest_.shards[static_cast<size_t>(s)];
      paths.push_back(dataset_path(manifest_.tensors[static_cast<size_t>(shard.tensor)], shard.box));
    }
    const Result<std::vector<Hdf5Dataset>> found = find_datasets(file, paths);
    if (!found.ok()) return add({entry.name, -1, -1, 0, 0, fmt::format("{}: {}", entry.name, found.error().message)});
    for (size_t i = 0; i < shards.size(); ++i) {
      const ShardEntry& shard = manifest_.shards[static_cast<size_t>(shards[i])];
      const Hdf5Dataset& dataset = found.value()[i];
      if (dataset.fits(shard)) continue;
      RT_TRY(add({entry.name, shards[i], -1, shard.offset, shard.bytes,
                  fmt::format("{}: HDF5 has dataset {} at {} with {} bytes, the manifest has {} at {} with {}",
                              entry.name, paths[i], dataset.offset, dataset.bytes, describe_shard(manifest_, shard),
                              shard.offset, shard.bytes)}));
    }
    return {};
  }

  IoBackend& io_;
  const fs::path& dir_;
  const Manifest& manifest_;
  const VerifyOptions& options_;
  VerifyReport& report_;
  int64_t total_bytes_ = 0;
  bool rest_good_ = true;
};

}  // namespace

Result<VerifyReport> verify_checkpoint(IoBackend& io, const fs::path& dir, const VerifyOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  RT_TRY_SET(const FileStat stat, io.stat(dir));
  if (!stat.is_dir) return Error{ErrorCode::kInvalidInput, fmt::format("{}: is no directory", dir.string())};
  VerifyReport report;
  const auto finish = [&] {
    report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(report);
  };
  const Result<Manifest> manifest = read_manifest(io, dir);
  if (!manifest.ok()) {
    const bool of_table = manifest.error().message.find((dir / kTableName).string()) != std::string::npos;
    report.damages.push_back(
        {std::string(of_table ? kTableName : kManifestName), -1, -1, 0, 0, manifest.error().message});
    return finish();
  }
  RT_TRY(check_codecs(manifest.value()).with(dir.string()));
  // A directory renamed by hand would be loaded as another step.
  if (const auto step = parse_step_dir_name(dir.filename().string()); step && *step != manifest.value().step)
    report.damages.push_back({std::string(kManifestName), -1, -1, 0, 0,
                              fmt::format("{}: the manifest is of step {}", dir.string(), manifest.value().step)});
  Verifier verifier(io, dir, manifest.value(), options, report);
  for (size_t f = 0; f < manifest.value().files.size(); ++f) {
    if (!verifier.check_file(static_cast<int64_t>(f)).ok()) break;
  }
  return finish();
}

}  // namespace cairn::ckpt
