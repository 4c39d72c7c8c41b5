#include "ckpt/persist/write_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "ckpt/persist/checksum_bytes.h"
#include "ckpt/persist/coded_file.h"
#include "ckpt/persist/layout.h"
#include "ckpt/persist/part_writer.h"
#include "ckpt/retention/spare_files.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

constexpr int64_t round_down(int64_t n) { return n / kIoAlign * kIoAlign; }
constexpr int64_t round_up(int64_t n) { return round_down(n + kIoAlign - 1); }

int64_t elem_bytes_of(const Manifest& manifest, const ShardData& data) {
  const auto tensor = static_cast<size_t>(data.tensor);
  if (tensor >= manifest.tensors.size()) return 1;  // told by the check of the manifest
  return dtype_size_bytes(manifest.tensors[tensor].dtype);
}

// Whether the set has the files and shards of these parts already, from the save before.
bool is_planned(const Manifest& skeleton, const PartSet& set, std::span<const WriterPart> parts,
                const WriteOptions& options, const ChecksumBytes& checksum_bytes) {
  if (options.codec != Codec::kRaw || set.files.size() != parts.size()) return false;
  size_t index = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    if (set.files[p].name != parts[p].file_name || set.files[p].step >= 0) return false;
    for (const ShardData& data : parts[p].shards) {
      if (index == set.shards.size()) return false;
      const ShardEntry& shard = set.shards[index++];
      if (shard.tensor != data.tensor || shard.file != static_cast<int64_t>(p) || shard.box.lo != data.lo ||
          shard.box.hi != data.hi || shard.bytes != data.bytes ||
          shard.chunk_bytes != checksum_bytes.of(data.lo, data.hi, elem_bytes_of(skeleton, data)) ||
          shard.codec != Codec::kRaw || !data.hashes.empty() || (data.data == nullptr && !data.fill))
        return false;
    }
  }
  return index == set.shards.size();
}

/// What spare files hold is given up where the disk has no room for the new file.
Result<std::unique_ptr<IoFile>> create_file(IoBackend& io, const fs::path& path, int64_t size_bytes,
                                            SpareFiles* spares) {
  Result<std::unique_ptr<IoFile>> file = io.create(path, size_bytes);
  const bool full = !file.ok() && file.error().code == ErrorCode::kNoSpace;
  if (full && spares != nullptr && spares->clear(io)) return io.create(path, size_bytes);
  return file;
}

// Buffers for payload on its way.
struct Budget {
  int64_t run_bytes = 0, runs = 0, fills = 0;
};

Budget budget_of(std::span<const WriterPart> parts, const WriteOptions& options) {
  bool filled = false;
  for (const WriterPart& part : parts)
    filled = filled || std::any_of(part.shards.begin(), part.shards.end(), [](const ShardData& s) { return s.fill; });
  int64_t run_budget = options.fill_bytes / 4;
  if (!filled) {
    run_budget = options.cache != nullptr ? options.cache->buffer_bytes(options.fill_bytes)
                                          : options.fill_bytes - options.fill_bytes / 16;
  }
  Budget out;
  out.run_bytes = std::clamp(round_down(run_budget / 4), 16 * kIoAlign, kRunBytes);
  out.runs = std::min(run_budget / out.run_bytes, kRuns);
  out.fills = std::min<int64_t>((options.fill_bytes - run_budget) / options.chunk_bytes, 64);
  return out;
}

/// That they are of this skeleton's tensors. Whether they are all that there is to be, the commit finds.
Status check_planned(const Manifest& skeleton, const PartSet& set) {
  Manifest planned = skeleton;
  planned.files = set.files;
  planned.shards = set.shards;
  Status valid = validate_parts(planned);
  return valid.ok() ? valid : invalid("state to save: " + valid.error().message);
}

/// A file that a dead save has left.
void take_part(const FinishedFile& there, std::span<ShardEntry> shards, FileEntry& file, WriteStats& stats) {
  for (size_t i = 0; i < shards.size(); ++i) {
    const ShardEntry& done = there.shards[i];
    shards[i].offset = done.offset;
    shards[i].chunk_bytes = done.chunk_bytes;
    shards[i].codec = done.codec;
    shards[i].hashes = done.hashes;
    shards[i].stored = done.stored;
    stats.taken_bytes += shards[i].bytes;
    stats.payload_bytes += shards[i].bytes;
  }
  file = there.file;
  stats.file_bytes += there.file.size_bytes;
  ++stats.taken_files;
}

}  // namespace

ChecksumBytes checksum_bytes_of(const Manifest& skeleton, std::span<const WriterPart> parts, int64_t chunk_bytes) {
  ChecksumBytes out(chunk_bytes);
  for (const WriterPart& part : parts) {
    for (const ShardData& data : part.shards) out.count(data.lo, data.hi, elem_bytes_of(skeleton, data));
  }
  return out;
}

Result<bool> plan_parts(const Manifest& skeleton, std::span<const WriterPart> parts, const WriteOptions& options,
                        PartSet& set) {
  const ChecksumBytes checksum_bytes =
      options.checksum_bytes ? *options.checksum_bytes : checksum_bytes_of(skeleton, parts, options.chunk_bytes);
  set.step = skeleton.step;
  set.stats = {};
  if (is_planned(skeleton, set, parts, options, checksum_bytes)) return true;
  set.files.clear();
  set.shards.clear();
  for (const WriterPart& part : parts) {
    FileEntry file{part.file_name};
    const auto file_index = static_cast<int64_t>(set.files.size());
    for (const ShardData& data : part.shards) {
      ShardEntry shard;
      shard.tensor = data.tensor;
      shard.file = file_index;
      shard.box = Box{data.lo, data.hi};
      shard.offset = file.size_bytes;
      shard.bytes = data.bytes;
      shard.chunk_bytes = checksum_bytes.of(data.lo, data.hi, elem_bytes_of(skeleton, data));
      if (data.bytes < 1 || data.bytes > kMaxTensorBytes || options.chunk_bytes < kMinChunkBytes)
        return invalid(fmt::format("{}: shard {} has {} bytes in chunks of {}", part.file_name, set.shards.size(),
                                   data.bytes, options.chunk_bytes));
      if (data.data == nullptr && !data.fill)
        return invalid(fmt::format("{}: shard {} has no bytes", part.file_name, set.shards.size()));
      const int64_t chunks = (data.bytes + shard.chunk_bytes - 1) / shard.chunk_bytes;
      if (!data.hashes.empty() && static_cast<int64_t>(data.hashes.size()) != chunks)
        return invalid(fmt::format("{}: shard {} comes with {} hashes, expected {}", part.file_name, set.shards.size(),
                                   data.hashes.size(), chunks));
      shard.hashes = data.hashes.empty() ? std::vector<uint64_t>(static_cast<size_t>(chunks)) : data.hashes;
      file.size_bytes += data.bytes;
      set.shards.push_back(std::move(shard));
    }
    set.files.push_back(std::move(file));
  }
  return false;
}

Result<PartSet> write_parts(IoBackend& io, const fs::path& work, const Manifest& skeleton,
                            std::span<const WriterPart> parts, const WriteOptions& options) {
  if (options.codec != Codec::kRaw) RT_TRY(check_all_sums(parts, skeleton));
  PartSet set;
  RT_TRY(plan_parts(skeleton, parts, options, set));
  RT_TRY(check_planned(skeleton, set));
  RT_TRY(write_planned(io, work, skeleton, parts, options, {}, set));
  return set;
}

Status write_planned(IoBackend& io, const fs::path& work, const Manifest& skeleton, std::span<const WriterPart> parts,
                     const WriteOptions& options, const WriteHooks& hooks, PartSet& set) {
  WriteStats& stats = set.stats;
  Pace pace(options);
  const Budget budget = budget_of(parts, options);
  BufferPool runs(budget.run_bytes, budget.runs, options.cache != nullptr ? &options.cache->buffers() : nullptr);
  BufferPool fills(options.chunk_bytes, budget.fills, nullptr);
  std::optional<WorkPool> coders;
  if (options.codec != Codec::kRaw) coders.emplace(options.codec_threads);
  std::deque<PartWriter> open;  // after the pools: it waits for its writes when it goes
  const auto for_each = [&](Status (PartWriter::*step)()) -> Status {
    for (PartWriter& writer : open) RT_TRY((writer.*step)());
    return {};
  };
  std::vector<std::pair<size_t, std::span<ShardEntry>>> open_parts;  // of `open`
  const auto commit_open = [&](bool last) -> Status {
    RT_TRY(for_each(&PartWriter::finish_writes));
    const auto sync = [&]() -> Status {
      const auto start = Clock::now();
      RT_TRY(for_each(&PartWriter::start_sync));
      RT_TRY(for_each(&PartWriter::wait));
      stats.sync_seconds += seconds_since(start);
      return {};
    };
    RT_TRY(sync());  // all but the superblocks is durable
    RT_TRY_SET(const std::span<std::byte> pages, runs.next());
    RT_CHECK(pages.size() >= open.size() * kIoAlign, "{} files open at once", open.size());
    for (size_t i = 0; i < open.size(); ++i) RT_TRY(open[i].start_superblock(pages.subspan(i * kIoAlign, kIoAlign)));
    RT_TRY(for_each(&PartWriter::wait));
    RT_TRY(for_each(&PartWriter::cut));
    RT_TRY(sync());
    RT_TRY(for_each(&PartWriter::close));
    for (PartWriter& writer : open) {
      fills.release(writer.file());
      if (options.cache != nullptr) writer.keep_layout(*options.cache);
    }
    open.clear();
    if (options.resume_key != 0 && !last) {
      for (const auto& [part, shards] : open_parts) {
        RT_TRY(write_note(io, work, options.resume_key,
                          {set.files[part], std::vector<ShardEntry>(shards.begin(), shards.end())}));
      }
      RT_TRY(io.sync_dir(work));
      if (hooks.noted) hooks.noted();
    }
    open_parts.clear();
    return {};
  };
  const auto open_file = [&](size_t p, std::span<ShardEntry> shards) -> Status {
    RT_CHECK(open.size() < kOpenFiles, "{} files open at once", open.size() + 1);
    if (coders) {
      RT_TRY_SET(std::unique_ptr<CodedFile> coded, CodedFile::create(skeleton, shards, options, *coders));
      RT_TRY_SET(std::unique_ptr<IoFile> file,
                 create_file(io, work / parts[p].file_name, coded->reserve_bytes(), options.spares));
      open.emplace_back(skeleton, parts[p], shards, nullptr, std::move(coded), std::move(file), false, runs);
      return {};
    }
    const auto layout_start = Clock::now();
    Result<std::unique_ptr<FileLayout>> layout = options.cache != nullptr
                                                     ? options.cache->take(skeleton, parts[p].file_name, shards)
                                                     : FileLayout::make(skeleton, shards);
    if (!layout.ok()) return std::move(layout).error();
    stats.layout_seconds += seconds_since(layout_start);
    // Whole pages, so that no write makes the file longer; the commit cuts it.
    const int64_t size = round_up(layout.value()->size_bytes());
    const fs::path path = work / parts[p].file_name;
    std::unique_ptr<IoFile> file;
    if (options.spares != nullptr) file = options.spares->reuse(io, path, size);
    const bool was_spare = file != nullptr;
    stats.reused_files += was_spare;
    if (!was_spare) {
      RT_TRY_SET(file, create_file(io, path, size, options.spares));
    }
    open.emplace_back(skeleton, parts[p], shards, std::move(layout).value(), nullptr, std::move(file), was_spare, runs);
    return {};
  };

  std::vector<std::span<ShardEntry>> shards_of;
  size_t first = 0, left = 0;  // left: parts that are not written yet
  for (size_t p = 0; p < parts.size(); ++p) {
    shards_of.push_back(std::span(set.shards).subspan(first, parts[p].shards.size()));
    first += parts[p].shards.size();
    if (const auto there = hooks.taken.find(p); there != hooks.taken.end()) {
      take_part(there->second, shards_of[p], set.files[p], stats);
    } else {
      ++left;
    }
  }
  std::vector<WriteStep> one_by_one;
  for (size_t p = 0; p < parts.size() && options.order.empty(); ++p)
    one_by_one.push_back({static_cast<int64_t>(p), std::ssize(parts[p].shards), 0});
  const std::vector<WriteStep>& order = options.order.empty() ? one_by_one : options.order;
  // Files that will be open together when the order goes on from this step.
  const auto files_from = [&](size_t step) {
    std::set<int64_t> begun;
    size_t files = 0;
    for (; step < order.size() && (files == 0 || !begun.empty()); ++step) {
      const WriteStep& next = order[step];
      if (hooks.taken.contains(static_cast<size_t>(next.part))) continue;
      if (begun.insert(next.part).second) ++files;
      if (next.shard == std::ssize(parts[static_cast<size_t>(next.part)].shards)) begun.erase(next.part);
    }
    return files;
  };
  std::vector<PartWriter*> writers(parts.size());  // of `open`
  int64_t open_bytes = 0, unfinished = 0;          // of `open`; those with payload to come
  for (size_t i = 0; i < order.size(); ++i) {
    const WriteStep& step = order[i];
    const auto p = static_cast<size_t>(step.part);
    if (hooks.taken.contains(p)) continue;
    if (writers[p] == nullptr) {
      RT_TRY(open_file(p, shards_of[p]));
      writers[p] = &open.back();
      ++unfinished;
    }
    RT_TRY(writers[p]->write_payload(step.shard, step.end, options, pace, fills, stats));
    if (!writers[p]->wrote_all()) continue;
    RT_TRY(writers[p]->write_structure(set.files[p], stats));
    open_parts.emplace_back(p, shards_of[p]);
    open_bytes += set.files[p].size_bytes;
    --left;
    if (--unfinished > 0 || left == 0) continue;
    const bool fits = open.size() + files_from(i + 1) <= kOpenFiles;
    if (fits && (options.commit_bytes <= 0 || open_bytes < options.commit_bytes)) continue;
    RT_TRY(commit_open(false));
    open_bytes = 0;
  }
  RT_CHECK(left == 0, "{} files are not written to their end", left);
  if (hooks.meanwhile) RT_TRY(hooks.meanwhile());
  RT_TRY(commit_open(true));
  if (options.resume_key != 0) RT_TRY(remove_notes(io, work));
  return {};
}

Status prepare_layouts(const Manifest& skeleton, std::span<const WriterPart> parts, const WriteOptions& options) {
  if (options.cache == nullptr || options.codec != Codec::kRaw) return {};
  PartSet set;
  RT_TRY(plan_parts(skeleton, parts, options, set));
  RT_TRY(check_planned(skeleton, set));
  size_t first = 0;
  for (const WriterPart& part : parts) {
    const std::span<ShardEntry> shards = std::span(set.shards).subspan(first, part.shards.size());
    first += shards.size();
    RT_TRY_SET(std::unique_ptr<FileLayout> layout, options.cache->take(skeleton, part.file_name, shards));
    options.cache->put_back(part.file_name, std::move(layout));
  }
  return {};
}

Status prepare_buffers(std::span<const WriterPart> parts, const WriteOptions& options) {
  if (options.cache == nullptr || options.huge_pages) return {};  // large shards are then written from where they lie
  const Budget budget = budget_of(parts, options);
  int64_t payload = 0;
  for (const WriterPart& part : parts) {
    for (const ShardData& data : part.shards) payload += data.bytes;
  }
  BufferStore& kept = options.cache->buffers();
  // Payload, the structure of each file, the superblocks: a small state needs fewer than there may be.
  const int64_t runs = std::min(budget.runs, payload / budget.run_bytes + std::ssize(parts) + 2);
  for (int64_t i = kept.memory_bytes() / budget.run_bytes; i < runs; ++i) {
    RT_TRY_SET(Buffer buffer, Buffer::allocate(budget.run_bytes));
    buffer.touch();
    kept.put_back(std::move(buffer));
  }
  return {};
}

}  // namespace cairn::ckpt
