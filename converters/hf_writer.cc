#include "converters/hf_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/buffer.h"
#include "ckpt/persist/unfinished.h"
#include "ckpt/store/uring_backend.h"
#include "converters/elements.h"
#include "converters/hf_folder.h"
#include "converters/safetensors.h"
#include "runtime/core/file_calls.h"
#include "runtime/core/make_folder.h"
#include "runtime/core/unique_handle.h"
#include "runtime/json/json.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kBufferBytes = int64_t{4} << 20;  // of a file, hashed and written at a time
constexpr size_t kBuffers = 4;                      // of a file at most, on their way to the disk
constexpr const char* kMovingName = ".moving";      // in the work folder: names, in the order in which they move

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

std::string shard_name(int64_t index, int64_t count) {
  return fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

/// transformers' algorithm: a tensor above the limit is a shard of its own at once; else a shard that would pass the
/// limit is closed first.
Split split_by_size(const HfOutput& output, int64_t limit) {
  const std::vector<OutputTensor>& tensors = output.tensors;
  std::vector<int64_t> shard(tensors.size());
  int64_t count = 0, open_shard = -1, filled = 0;
  for (size_t k = 0; k < tensors.size(); ++k) {
    const int64_t bytes = count_elems(tensors[k].shape) * output.elem_bytes(tensors[k]);
    if (bytes > limit) {
      shard[k] = count++;
      continue;
    }
    if (open_shard < 0 || filled + bytes > limit) {
      open_shard = count++;
      filled = 0;
    }
    shard[k] = open_shard;
    filled += bytes;
  }
  Split out;
  for (size_t k = 0; k < tensors.size(); ++k)
    out[tensors[k].name] = count == 1 ? std::string(kSingleFile) : shard_name(shard[k], count);
  return out;
}

Result<std::vector<std::string>> names_in(const fs::path& dir) {
  std::vector<std::string> out;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error))
    out.push_back(it->path().filename().string());
  if (error) return os_error(error.value(), dir.string());
  std::sort(out.begin(), out.end());
  return out;
}

/// A file that a conversion writes. README.md is not one of them: it may be a person's.
bool is_output_file(const std::string& name) {
  if (name == kConfigFile || name == kIndexFile || name == kSingleFile) return true;
  if (name.starts_with("model-") && (name.ends_with(".safetensors") || name.ends_with(".h5"))) return true;
  if (name == "model.h5" || name == ckpt::kManifestName || name == ckpt::kTableName) return true;
  return is_passed_file(name);
}

/// The files on their way from `work` into the target, when that was begun and is not over.
std::vector<std::string> moving_files(const fs::path& work) {
  std::vector<std::string> out;
  std::ifstream list(work / kMovingName);
  for (std::string name; std::getline(list, name);) out.push_back(name);
  std::error_code unknown;  // the last one is there: the new model stands
  if (!out.empty() && !fs::exists(work / out.back(), unknown) && !unknown) out.clear();
  return out;
}

/// What was moved, when not all was, goes back to the rest: the last first, so that config.json is never without
/// weights.
Status take_back(ckpt::IoBackend& io, const fs::path& work, const fs::path& target) {
  std::error_code unknown;
  if (!fs::exists(work / kMovingName, unknown)) return {};
  std::vector<std::string> names = moving_files(work);
  std::ranges::reverse(names);
  for (const std::string& name : names) {
    if (fs::exists(work / name, unknown) || !fs::exists(target / name, unknown)) continue;
    RT_TRY(io.rename(target / name, work / name));
  }
  RT_TRY(io.sync_dir(work));
  RT_TRY(io.sync_dir(target));
  return io.remove_file(work / kMovingName);
}

/// Moves what `from` holds into `to`, which has files already, or cannot be replaced as a whole. The manifest of a
/// folder that is a checkpoint too leaves first and comes last, config.json after and before it: cut off at any
/// instant, no manifest is there without a config (check_hf_target would take that for a checkpoint and nothing else),
/// and neither is there without the weights. Which files are new, and that not all of them have come, is known from
/// kMovingName.
Status replace_files(ckpt::IoBackend& io, const fs::path& from, const fs::path& to) {
  RT_TRY_SET(std::vector<std::string> old_names, names_in(to));
  RT_TRY_SET(std::vector<std::string> new_names, names_in(from));
  std::erase_if(new_names, ckpt::is_note_name);
  const auto level = [](const std::string& name) { return name == ckpt::kManifestName ? 2 : name == kConfigFile; };
  std::ranges::stable_sort(old_names, std::greater(), level);
  std::ranges::stable_sort(new_names, std::less(), level);
  RT_TRY(ckpt::write_file(io, from / kMovingName, fmt::format("{}\n", fmt::join(new_names, "\n"))));
  RT_TRY(io.sync_dir(from));
  for (const std::string& name : old_names) {
    if (!is_output_file(name)) continue;
    RT_TRY(io.remove_file(to / name));
    if (level(name) > 0) RT_TRY(io.sync_dir(to));
  }
  for (const std::string& name : new_names) {
    if (level(name) > 0) RT_TRY(io.sync_dir(to));
    RT_TRY(io.rename(from / name, to / name));
  }
  RT_TRY(io.sync_dir(to));
  ignore(ckpt::remove_tree(io, from), "the model is there; the next conversion clears it");
  return {};
}

/// Removes all else from the work folder.
Status keep_only(const fs::path& work, const std::set<std::string>& keep) {
  RT_TRY_SET(const std::vector<std::string> names, names_in(work));
  std::error_code error;
  for (const std::string& name : names) {
    if (keep.contains(name)) continue;
    fs::remove_all(work / name, error);
    if (error) return os_error(error.value(), (work / name).string());
  }
  return {};
}

/// What a failed attempt leaves for the next one: the files that are done, which have notes. Returns how many they are.
Result<int64_t> keep_done(const fs::path& work) {
  RT_TRY_SET(const std::vector<std::string> names, names_in(work));
  std::set<std::string> keep;
  for (const std::string& name : names) {
    if (!std::ranges::binary_search(names, ckpt::note_name(name))) continue;
    keep.insert({name, ckpt::note_name(name)});
  }
  RT_TRY(keep_only(work, keep));
  return static_cast<int64_t>(keep.size()) / 2;
}

std::unique_ptr<ckpt::IoBackend> make_io(const HfWriteOptions& options) {
  if (options.make_io) return options.make_io();
  return ckpt::make_best_backend({.depth = 16, .in_flight_bytes = int64_t{16} << 20});
}

/// A file as a stream of aligned buffers, each hashed on its way.
class FileStream {
 public:
  explicit FileStream(ckpt::IoFile& file) : file_(file) {}
  FileStream(const FileStream&) = delete;
  ~FileStream() {
    if (!finished_) ignore(file_.finish(), "the buffers must outlive what is in flight");
  }

  /// Room for the next bytes, at least one: ask, fill, advance.
  Result<std::span<std::byte>> room() {
    if (used_ == kBufferBytes) RT_TRY(flush());
    Slot& slot = slots_[at_];
    if (!slot.buffer) {
      RT_TRY_SET(slot.buffer, ckpt::Buffer::allocate(kBufferBytes));
    }
    if (slot.busy) {
      slot.busy = false;
      RT_TRY(file_.wait(slot.ticket));
    }
    return slot.buffer.bytes().first(static_cast<size_t>(kBufferBytes)).subspan(static_cast<size_t>(used_));
  }
  void advance(size_t bytes) { used_ += static_cast<int64_t>(bytes); }

  Status finish() {
    if (used_ > 0) RT_TRY(flush());
    for (Slot& slot : slots_) {
      if (!slot.busy) continue;
      slot.busy = false;
      RT_TRY(file_.wait(slot.ticket));
    }
    RT_TRY(file_.finish());
    finished_ = true;
    return {};
  }
  std::vector<uint64_t> take_hashes() { return std::move(hashes_); }

 private:
  Status flush() {
    Slot& slot = slots_[at_];
    const std::span<std::byte> bytes = slot.buffer.bytes().first(static_cast<size_t>(used_));
    hashes_.push_back(ckpt::hash_bytes(bytes));
    RT_TRY_SET(slot.ticket, file_.submit_write(offset_, bytes.data(), used_));
    slot.busy = true;
    offset_ += used_;
    used_ = 0;
    at_ = (at_ + 1) % kBuffers;
    return {};
  }

  struct Slot {
    ckpt::Buffer buffer;
    ckpt::IoTicket ticket = 0;
    bool busy = false;
  };
  ckpt::IoFile& file_;
  std::array<Slot, kBuffers> slots_;
  size_t at_ = 0;
  int64_t used_ = 0, offset_ = 0;
  bool finished_ = false;
  std::vector<uint64_t> hashes_;
};

class FolderWriter {
 public:
  FolderWriter(const HfOutput& output, const OpenTensors& open, const HfWriteOptions& options, const fs::path& work)
      : output_(output), open_(open), options_(options), work_(work) {}

  Status weights(HfWriteReport& report) {
    RT_TRY_SET(const std::vector<HfFile> shards, lay_out_files(output_, options_.max_shard_bytes));
    std::string key = fmt::format("{}\n{}\n", output_.source, dtype_name(output_.dtype));
    for (const HfFile& shard : shards) {
      total_bytes_ += shard.data_bytes;
      key += shard.name + "\n" + shard.head;
    }
    key_ = std::max<uint64_t>(1, ckpt::hash_bytes(key));
    report.parameters = output_.parameters();
    report.tensors = static_cast<int64_t>(output_.tensors.size());
    report.data_bytes = total_bytes_;
    report.shards = static_cast<int64_t>(shards.size());
    RT_TRY(write_shards(shards, report));
    for (const int64_t tensor : not_finite_)
      report.not_finite.push_back(output_.tensors[static_cast<size_t>(tensor)].name);
    const std::string index = index_text(output_, shards);
    return index.empty() ? Status() : ckpt::write_file(*make_io(options_), work_ / kIndexFile, index);
  }

 private:
  Status write_shards(const std::vector<HfFile>& shards, HfWriteReport& report) {
    if (options_.write_file) {
      RT_TRY(keep_only(work_, {}));
      int64_t to_come = 0;
      for (const HfFile& shard : shards) to_come += shard.file_bytes();
      for (const HfFile& shard : shards) {
        RT_TRY(
            options_.write_file(work_ / shard.name, shard.tensors, shard.indices, [&] { return room_for(to_come); }));
        count(shard.data_bytes);
        to_come -= shard.file_bytes();
      }
      return {};
    }
    RT_TRY_SET(const std::set<std::string> finished, take_over(shards, report));
    std::vector<const HfFile*> open;
    int64_t to_come = 0;
    for (const HfFile& shard : shards) {
      if (finished.contains(shard.name)) {
        count(shard.data_bytes);
      } else {
        open.push_back(&shard);
        to_come += shard.file_bytes();
      }
    }
    RT_TRY(room_for(to_come));
    std::atomic<size_t> next{0};
    const auto work = [&] {
      const std::unique_ptr<ckpt::IoBackend> io = make_io(options_);
      for (size_t k = next++; k < open.size() && !failed_; k = next++) {
        Status done = write_shard(*io, *open[k]).with((work_ / open[k]->name).string());
        if (done.ok()) continue;
        const std::lock_guard lock(mutex_);
        if (!failed_) first_error_ = std::move(done);
        failed_ = true;
      }
    };
    std::vector<std::thread> helpers;
    const size_t threads = std::min(open.size(), static_cast<size_t>(std::max<int64_t>(1, options_.threads)));
    for (size_t k = 1; k < threads; ++k) helpers.emplace_back(work);
    if (threads > 0) work();
    for (std::thread& helper : helpers) helper.join();
    return std::move(first_error_);
  }

  /// That weights files of so many bytes, and the small ones, find room. Errors: kNoSpace.
  Status room_for(int64_t bytes) {
    for (const auto& [name, text] : output_.texts) bytes += static_cast<int64_t>(text.size());
    RT_TRY_SET(const int64_t free, make_io(options_)->free_bytes(work_));
    if (free >= bytes) return {};
    return Error{ErrorCode::kNoSpace,
                 fmt::format("{}: {} bytes free, what is still to be written needs {}: {} are missing",
                             work_.parent_path().string(), free, bytes, bytes - free)};
  }

  /// Names of the files that an earlier attempt finished, each byte of them checked. Everything else is removed.
  Result<std::set<std::string>> take_over(const std::vector<HfFile>& shards, HfWriteReport& report) {
    const std::unique_ptr<ckpt::IoBackend> io = make_io(options_);
    RT_TRY_SET(const auto notes, ckpt::read_notes(*io, work_, key_));
    std::set<std::string> out, keep;
    for (const HfFile& shard : shards) {
      const auto note = notes.find(shard.name);
      if (note == notes.end() || note->second.file.size_bytes != shard.file_bytes()) continue;
      if (!ckpt::check_finished(*io, work_, note->second).ok()) continue;
      out.insert(shard.name);
      keep.insert({shard.name, ckpt::note_name(shard.name)});
      ++report.taken_files;
      report.taken_bytes += shard.file_bytes();
    }
    RT_TRY(keep_only(work_, keep));
    return out;
  }

  Status write_shard(ckpt::IoBackend& io, const HfFile& shard) {
    RT_TRY_SET(const std::unique_ptr<TensorSource> source, open_(shard.indices));
    RT_TRY_SET(const std::unique_ptr<ckpt::IoFile> file, io.create(work_ / shard.name, shard.file_bytes()));
    FileStream stream(*file);
    for (std::string_view head = shard.head; !head.empty();) {
      RT_TRY_SET(const std::span<std::byte> room, stream.room());
      const size_t n = std::min(room.size(), head.size());
      std::memcpy(room.data(), head.data(), n);
      stream.advance(n);
      head.remove_prefix(n);
    }
    // Headers have a multiple of 8 bytes and no element has more: none is cut in two by the end of a buffer.
    for (size_t k = 0; k < shard.tensors.size(); ++k) {
      const OutputTensor& tensor = output_.tensors[static_cast<size_t>(shard.indices[k])];
      const int64_t elem = output_.elem_bytes(tensor);
      const int64_t bytes = shard.tensors[k].end - shard.tensors[k].begin;
      bool finite = true;
      for (int64_t at = 0; at < bytes;) {
        if (options_.cancel != nullptr && options_.cancel->load(std::memory_order_relaxed))
          return Error{ErrorCode::kStopped, "the conversion was stopped"};
        if (failed_) return Error{ErrorCode::kStopped, "another file failed"};
        RT_TRY_SET(const std::span<std::byte> room, stream.room());
        const auto n = std::min<size_t>(room.size(), static_cast<size_t>(bytes - at));
        RT_TRY(source->fill(shard.indices[k], at / elem, room.first(n)));
        const bool numbers = tensor.part == OutputPart::kNumbers;  // the parts of blocks are finite, or not made
        finite = finite && !(numbers && any_not_finite(tensor.own_dtype.value_or(output_.dtype), room.first(n)));
        stream.advance(n);
        at += static_cast<int64_t>(n);
        count(static_cast<int64_t>(n));
      }
      if (finite) continue;
      const std::lock_guard lock(mutex_);
      not_finite_.insert(shard.indices[k]);
    }
    RT_TRY(stream.finish());
    RT_TRY(file->sync());
    RT_TRY(file->close());
    ckpt::FinishedFile note{.file = {shard.name, shard.file_bytes(), ckpt::StreamingHash().digest()}};
    note.shards.push_back(
        {.offset = 0, .bytes = shard.file_bytes(), .chunk_bytes = kBufferBytes, .hashes = stream.take_hashes()});
    Status noted = ckpt::write_note(io, work_, key_, note);
    if (!noted.ok()) ignore(io.remove_file(work_ / ckpt::note_name(shard.name)), "torn, it notes nothing");
    return noted;
  }

  void count(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    done_bytes_ += bytes;
    if (options_.progress) options_.progress(done_bytes_, total_bytes_);
  }

  const HfOutput& output_;
  const OpenTensors& open_;
  const HfWriteOptions& options_;
  const fs::path& work_;
  uint64_t key_ = 0;
  std::mutex mutex_;
  int64_t done_bytes_ = 0, total_bytes_ = 0;
  std::set<int64_t> not_finite_;  // tensors
  std::atomic<bool> failed_{false};
  Status first_error_;
};

/// Where the links of the path lead.
fs::path plain_target(const fs::path& target) {
  std::error_code error;
  const fs::path named = (fs::absolute(target, error) / "").lexically_normal().parent_path();
  const fs::path real = fs::weakly_canonical(named, error);
  return error ? named : real;
}

std::string work_name(const fs::path& plain) { return fmt::format(".{}.converting", plain.filename().string()); }

/// The folder in which the work is done: beside the target, or in it where nothing gets in from there: it is a mount
/// point, or the folder around it is not ours to write to.
Result<fs::path> work_folder(ckpt::IoBackend& io, const fs::path& target) {
  const std::string name = work_name(target);
  const fs::path beside = target.parent_path() / name, inside = target / name;
  std::error_code error;
  if (!fs::is_directory(target, error)) return beside;
  const std::string probe = fmt::format("{}.{}", name, ::getpid());
  const fs::path from = target.parent_path() / probe, to = target / probe;
  if (const Status made = io.make_dir(from); !made.ok()) {
    const int why = made.error().os_errno;
    if (why == EACCES || why == EPERM || why == EROFS) return inside;
    return os_error(why, from.string());
  }
  const Status moved = io.rename(from, to);
  ignore(io.remove_dir(moved.ok() ? to : from), "it is empty");
  if (moved.ok()) return beside;
  const int why = moved.error().os_errno;
  return why == EXDEV ? Result<fs::path>(inside) : os_error(why, target.string());
}

/// But for what an earlier attempt has left of its work, and had moved out of it already.
bool is_empty_target(const fs::path& target, std::error_code& error) {
  const std::string work = work_name(target);
  const std::vector<std::string> moving = moving_files(target / work);
  const auto moved = [&](const std::string& name) {
    std::error_code unknown;
    return std::ranges::find(moving, name) != moving.end() && !fs::exists(target / work / name, unknown) && !unknown;
  };
  for (fs::directory_iterator it(target, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name != work && !moved(name)) return false;
  }
  return true;
}

/// The folder in which the work is done, locked.
Result<Fd> lock_work(const fs::path& work) {
  const bool is_new = ::mkdir(work.c_str(), 0777) == 0;
  if (!is_new && errno != EEXIST) return os_error(errno, work.string());
  Fd fd(::open(work.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd && (errno == ELOOP || errno == ENOTDIR))
    return invalid(
        fmt::format("{}: is a link or no folder, where the work is done in a folder: remove it", work.string()));
  if (!fd) return os_error(errno, work.string());
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (is_missing_call(errno) && is_new) return fd;  // another process would find it
    if (is_missing_call(errno)) {
      return invalid(
          fmt::format("{}: exists, and its file system has no locks (flock) to say whether another process writes this "
                      "folder; if none does, move it away (after a replacement that was cut off it holds the only copy "
                      "of the new model)",
                      work.string()));
    }
    if (errno != EWOULDBLOCK) return os_error(errno, work.string());
    return invalid(fmt::format("{}: another process is writing this folder", work.string()));
  }
  // Its owner may have given it the target's name just before we got the lock.
  struct stat locked {
  }, there{};
  if (::fstat(fd.get(), &locked) != 0 || ::stat(work.c_str(), &there) != 0 || locked.st_ino != there.st_ino)
    return invalid(fmt::format("{}: another process has just written this folder; try again", work.string()));
  return fd;
}

}  // namespace

std::string_view HfOutput::dtype_of(const OutputTensor& tensor) const {
  if (tensor.part == OutputPart::kCodes) return "F8_E4M3";
  return safetensors_dtype_name(tensor.part == OutputPart::kScales ? DType::kF32 : tensor.own_dtype.value_or(dtype));
}

int64_t HfOutput::elem_bytes(const OutputTensor& tensor) const { return safetensors_dtype_bits(dtype_of(tensor)) / 8; }

int64_t HfOutput::parameters() const {
  int64_t out = 0;
  for (const OutputTensor& tensor : tensors) {
    if (tensor.part != OutputPart::kScales) out += count_elems(tensor.shape);
  }
  return out;
}

Result<std::vector<HfFile>> lay_out_files(const HfOutput& output, int64_t max_shard_bytes) {
  const Split split = max_shard_bytes == 0 && output.split
                          ? *output.split
                          : split_by_size(output, max_shard_bytes > 0 ? max_shard_bytes : kDefaultShardBytes);
  std::map<std::string, HfFile> by_name;
  std::map<std::string_view, int64_t> index;
  for (size_t k = 0; k < output.tensors.size(); ++k) {
    const OutputTensor& tensor = output.tensors[k];
    index[tensor.name] = static_cast<int64_t>(k);
    by_name[split.at(tensor.name)].tensors.push_back(
        {.name = tensor.name, .dtype = std::string(output.dtype_of(tensor)), .shape = tensor.shape});
  }
  std::vector<HfFile> out;
  for (auto& [name, file] : by_name) {
    file.name = name;
    Result<std::string> head = encode_safetensors_header(file.tensors, {{"format", "pt"}});
    if (!head.ok()) return std::move(head).error().with(name);
    file.head = std::move(head).value();
    for (const SafeTensor& tensor : file.tensors) file.indices.push_back(index.at(tensor.name));
    if (!file.tensors.empty()) file.data_bytes = file.tensors.back().end;
    out.push_back(std::move(file));
  }
  return out;
}

std::string index_text(const HfOutput& output, const std::vector<HfFile>& files) {
  if (files.size() == 1 && files[0].name == kSingleFile) return {};
  nlohmann::json weight_map = nlohmann::json::object();  // sorted keys
  int64_t bytes = 0;
  for (const HfFile& file : files) {
    bytes += file.data_bytes;
    for (const SafeTensor& tensor : file.tensors) weight_map[tensor.name] = file.name;
  }
  const nlohmann::json index = {{"metadata", {{"total_parameters", output.parameters()}, {"total_size", bytes}}},
                                {"weight_map", std::move(weight_map)}};
  return json_text(index, 2) + "\n";
}

Status fill_file(const HfOutput& output, const HfFile& file, TensorSource& source, int64_t offset,
                 std::span<std::byte> out) {
  const auto head = static_cast<int64_t>(file.head.size());
  if (offset < head) {
    const size_t n = std::min(out.size(), static_cast<size_t>(head - offset));
    std::memcpy(out.data(), file.head.data() + offset, n);
    out = out.subspan(n);
    offset += static_cast<int64_t>(n);
  }
  auto tensor = std::ranges::upper_bound(file.tensors, offset - head, {}, &SafeTensor::end);  // one may be empty
  for (; !out.empty(); ++tensor) {
    RT_CHECK(tensor != file.tensors.end(), "{}: {} bytes behind its end", file.name, out.size());
    const int64_t index = file.indices[static_cast<size_t>(tensor - file.tensors.begin())];
    const int64_t elem = output.elem_bytes(output.tensors[static_cast<size_t>(index)]);
    const int64_t at = offset - head - tensor->begin;
    const size_t n = std::min(out.size(), static_cast<size_t>(tensor->end - tensor->begin - at));
    RT_TRY(source.fill(index, at / elem, out.first(n)));
    out = out.subspan(n);
    offset += static_cast<int64_t>(n);
  }
  return {};
}

std::optional<Split> split_of_index(const std::vector<OutputTensor>& tensors, const std::string& index) {
  auto map = parse_index(index);
  if (!map.ok() || map.value().size() != tensors.size()) return std::nullopt;
  for (const OutputTensor& tensor : tensors) {
    const auto file = map.value().find(tensor.name);
    if (file == map.value().end() || !file->second.starts_with("model") || !file->second.ends_with(".safetensors") ||
        file->second.find('/') != std::string::npos) {
      return std::nullopt;
    }
  }
  return std::move(map).value();
}

Status check_hf_target(const fs::path& target, bool overwrite) {
  std::error_code error;
  const bool exists = fs::exists(target, error);
  if (!exists && fs::is_symlink((target / "").lexically_normal().parent_path(), error))
    return invalid(target.string() + ": is a link to nothing; make the folder that it names, or name another one");
  if (exists && !fs::is_directory(target, error)) return invalid(target.string() + ": is there and is no folder");
  error.clear();
  const bool empty = !exists || is_empty_target(plain_target(target), error);
  if (error) return os_error(error.value(), target.string());
  if (empty) return {};
  if (fs::exists(target / ckpt::kManifestName, error) && !fs::exists(target / kConfigFile, error)) {
    return invalid(fmt::format("{}: is a checkpoint, which a Hugging Face folder does not replace; name another folder",
                               target.string()));
  }
  if (overwrite) return {};
  return invalid(fmt::format("{}: is not empty; name another folder, or give --overwrite to replace the model in it",
                             target.string()));
}

Status check_apart(const fs::path& source, const fs::path& target) {
  std::error_code error;
  const fs::path from = fs::weakly_canonical(fs::absolute(source), error),
                 to = fs::weakly_canonical(fs::absolute(target / ""), error);
  if (error) return os_error(error.value(), target.string());
  const auto begins_with = [](const fs::path& path, const fs::path& start) {
    return std::mismatch(path.begin(), path.end(), start.begin(), start.end()).second == start.end();
  };
  const fs::path plain = to.has_filename() ? to : to.parent_path();
  if (from == plain || (fs::equivalent(source, target, error) && !error))
    return invalid(fmt::format("{}: the source would be replaced; name another folder", source.string()));
  if (begins_with(plain, from))
    return invalid(fmt::format("{}: is inside the source, {}; name another folder", target.string(), source.string()));
  if (begins_with(from, plain))
    return invalid(fmt::format("{}: holds the source, {}; name another folder", target.string(), source.string()));
  return {};
}

Result<HfWriteReport> write_hf_folder(const fs::path& hf_dir, const HfOutput& output, const OpenTensors& open,
                                      const HfWriteOptions& options) {
  std::error_code error;
  RT_TRY(check_hf_target(hf_dir, options.overwrite));
  const fs::path target = plain_target(hf_dir);
  RT_TRY(make_folder_of(target));
  const std::unique_ptr<ckpt::IoBackend> io = make_io(options);
  RT_TRY_SET(const fs::path work, work_folder(*io, target));
  HfWriteReport report;
  RT_TRY_SET(const Fd lock, lock_work(work));
  // Of an old model that was being replaced there may be nothing left but the new one.
  const bool half_replaced = fs::exists(work / kMovingName, error) && !is_empty_target(target, error);
  RT_TRY(take_back(*io, work, target));
  bool replacing = false;
  const auto publish = [&]() -> Status {
    RT_TRY(FolderWriter(output, open, options, work).weights(report));
    for (const auto& [name, text] : output.texts) {
      if (name == kConfigFile || (name == kCardFile && fs::exists(target / name, error))) continue;
      RT_TRY(ckpt::write_file(*io, work / name, text));
      if (name != kCardFile) ++report.texts;
    }
    RT_TRY(ckpt::write_file(*io, work / kConfigFile, output.texts.at(std::string(kConfigFile))));
    const bool empty = !fs::exists(target, error) || fs::is_empty(target, error);  // of work, too
    if (empty) RT_TRY(ckpt::remove_notes(*io, work));
    RT_TRY(io->sync_dir(work));
    if (!empty) {
      replacing = !is_empty_target(target, error);
      return replace_files(*io, work, target);
    }
    // A folder takes the name of an empty one, or of none, in one step.
    RT_TRY(io->rename(work, target));
    return io->sync_dir(target.parent_path());
  };
  Status done = publish();
  if (!done.ok()) {
    if (replacing) {  // the old model may be gone in part, so the new one is not to be thrown away too
      return std::move(done)
          .with(fmt::format("{} is replaced in part, the new model is in {}; run the same command again to finish",
                            target.string(), work.string()))
          .error();
    }
    Error failed = std::move(done).error();
    // Nor is what a failing disk does not let us take back.
    if (failed.code == ErrorCode::kStopped || half_replaced || !take_back(*io, work, target).ok()) return failed;
    // With more room, or on a disk that is well again, the next attempt need not make again what is done.
    const bool goes_on = failed.code == ErrorCode::kNoSpace || failed.code == ErrorCode::kIo;
    const Result<int64_t> kept = goes_on ? keep_done(work) : int64_t{0};
    if (kept.ok() && kept.value() > 0) {
      failed.message += fmt::format("; {} finished file{} in {}, from which the same command resumes", kept.value(),
                                    kept.value() == 1 ? " stays" : "s stay", work.string());
    } else {
      ignore(ckpt::remove_tree(*io, work), "the next conversion clears it");
    }
    return failed;
  }
  report.dir = target;
  return report;
}

}  // namespace cairn::convert
