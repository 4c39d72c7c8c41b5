#include "converters/flat_tensors.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "converters/foreign_file.h"
#include "converters/safetensors.h"

namespace cairn::convert {
namespace {

int64_t changed_ns(const struct stat& info) {
  return static_cast<int64_t>(info.st_mtim.tv_sec) * 1'000'000'000 + info.st_mtim.tv_nsec;
}

}  // namespace

Result<int64_t> FilePool::add(const std::filesystem::path& path) {
  RT_TRY_SET(const ForeignFile file, open_foreign(path));
  struct stat info {};
  if (::fstat(file.fd.get(), &info) != 0) return os_error(errno, path.string());
  files_.push_back({path, file.bytes, changed_ns(info)});
  return std::ssize(files_) - 1;
}

Status FilePool::check(const Known& known, int fd) {
  struct stat info {};
  if ((fd >= 0 ? ::fstat(fd, &info) : ::stat(known.path.c_str(), &info)) != 0) {
    return os_error(errno, known.path.string());
  }
  if (info.st_size == known.bytes && changed_ns(info) == known.changed_ns) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: has changed while it was read: found {} bytes, expected the {} of the start\n"
                           "  wait until nothing writes to the folder, then start again",
                           known.path.string(), static_cast<int64_t>(info.st_size), known.bytes)};
}

Result<std::shared_ptr<const Fd>> FilePool::open(int64_t file) const {
  const Known& known = files_.at(static_cast<size_t>(file));
  const std::scoped_lock lock(mutex_);
  const auto found = std::ranges::find(open_, file, &std::pair<int64_t, std::shared_ptr<const Fd>>::first);
  if (found != open_.end()) {
    open_.splice(open_.begin(), open_, found);
    return open_.front().second;
  }
  RT_TRY_SET(ForeignFile opened, open_foreign(known.path));
  RT_TRY(check(known, opened.fd.get()));
  open_.emplace_front(file, std::make_shared<const Fd>(std::move(opened.fd)));
  if (open_.size() > kMostOpen) open_.pop_back();  // a read under way holds it
  return open_.front().second;
}

Status FilePool::read(int64_t file, int64_t offset, std::span<std::byte> out) const {
  RT_TRY_SET(const std::shared_ptr<const Fd> fd, open(file));
  const std::string path = files_[static_cast<size_t>(file)].path.string();
  while (!out.empty()) {
    const ssize_t n = ::pread(fd->get(), out.data(), out.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, path);
    if (n == 0) return Error{ErrorCode::kCorrupt, fmt::format("{}: ends at byte {}", path, offset)};
    out = out.subspan(static_cast<size_t>(n));
    offset += n;
  }
  return {};
}

Status FilePool::check_unchanged() const {
  for (const Known& known : files_) RT_TRY(check(known, -1));
  return {};
}

std::vector<std::filesystem::path> FilePool::paths() const {
  std::vector<std::filesystem::path> out;
  for (const Known& known : files_) out.push_back(known.path);
  return out;
}

FileBox rows_of(const FileBox& box, int64_t from, int64_t to, int64_t elem_bytes) {
  FileBox out = box;
  const int64_t lo = std::max(from, box.offsets[0]), hi = std::max(lo, std::min(to, box.offsets[0] + box.sizes[0]));
  const int64_t row = box.sizes[0] > 0 ? count_elems(box.sizes) / box.sizes[0] : 0;
  const int64_t begin = (lo - box.offsets[0]) * row, end = (hi - box.offsets[0]) * row;  // elements of the box
  const int64_t first = std::max(begin, box.first), last = std::max(first, std::min(end, box.first + box.elems()));
  out.offsets[0] = lo;
  out.sizes[0] = hi - lo;
  out.offset += (first - box.first) * elem_bytes;
  out.first = first - begin;
  out.count = last - first;
  return out;
}

BoxRun run_in_box(const Shape& offsets, const Shape& sizes, const Shape& shape, int64_t at) {
  BoxRun out{.from = 0, .count = 1};
  int64_t own = 1, run = 1;
  bool whole = true;  // the dims behind this one are the tensor's, and the run begins where they do
  const int64_t first = at;
  for (size_t d = shape.size(); d-- > 0;) {
    const int64_t inside = at % shape[d] - offsets[d];
    at /= shape[d];
    if (inside < 0 || inside >= sizes[d]) return {};
    out.from += inside * own;
    if (whole) out.count = (sizes[d] - inside) * run - first % run;
    whole = whole && sizes[d] == shape[d];
    own *= sizes[d];
    run *= shape[d];
  }
  return out;
}

int64_t FlatBuffer::left() const {
  int64_t out = -at_;
  for (size_t k = part_; k < parts_.size(); ++k) out += parts_[k].count;
  return out;
}

std::vector<FlatRun> FlatBuffer::take(int64_t count) {
  std::vector<FlatRun> out;
  while (count > 0 && part_ < parts_.size()) {
    const FlatRun& part = parts_[part_];
    const int64_t taken = std::min(count, part.count - at_);
    if (taken > 0) out.push_back({part.file, part.offset + at_ * elem_, taken});
    at_ += taken;
    count -= taken;
    if (at_ == part.count) {
      ++part_;
      at_ = 0;
    }
  }
  return out;
}

void FlatTensors::add(std::string name, std::string dtype, Shape shape, std::vector<FlatRun> runs) {
  Placed placed{.elem_bytes = safetensors_dtype_bits(dtype) / 8};
  int64_t elems = 0;
  for (const FlatRun& run : runs) {
    placed.begins.push_back(elems);
    elems += run.count;
  }
  RT_CHECK(elems == count_elems(shape), "{}: runs of {} elements for {}", name, elems, to_string(shape));
  placed.runs = std::move(runs);
  by_name_.emplace(name, tensors_.size());
  tensors_.push_back({std::move(name), std::move(dtype), std::move(shape), 0, elems * placed.elem_bytes});
  placed_.push_back(std::move(placed));
}

void FlatTensors::add_boxes(std::string name, std::string dtype, Shape shape, std::vector<FileBox> boxes,
                            int64_t paired) {
  int64_t elems = 0;
  for (const FileBox& box : boxes) elems += box.elems();
  RT_CHECK(elems == count_elems(shape), "{}: boxes of {} elements for {}", name, elems, to_string(shape));
  RT_CHECK(paired == 0 || (!shape.empty() && paired % 2 == 0 && shape[0] % paired == 0), "{}: heads of {}", name,
           paired);
  Placed placed{.elem_bytes = safetensors_dtype_bits(dtype) / 8, .boxes = std::move(boxes), .paired = paired};
  by_name_.emplace(name, tensors_.size());
  tensors_.push_back({std::move(name), std::move(dtype), std::move(shape), 0, elems * placed.elem_bytes});
  placed_.push_back(std::move(placed));
}

const SafeTensor* FlatTensors::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

size_t FlatTensors::index_of(const SafeTensor& tensor) const {
  const auto index = static_cast<size_t>(&tensor - tensors_.data());
  RT_CHECK(index < tensors_.size(), "{} is none of these tensors", tensor.name);
  return index;
}

const std::vector<FlatRun>& FlatTensors::runs(const SafeTensor& tensor) const { return placed_[index_of(tensor)].runs; }

Status FlatTensors::read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const {
  const Placed& placed = placed_[index_of(tensor)];
  const int64_t elem = placed.elem_bytes;
  RT_CHECK(offset >= 0 && bytes >= 0 && offset + bytes <= tensor.end && offset % elem == 0 && bytes % elem == 0,
           "{} [{}, +{})", tensor.name, offset, bytes);
  int64_t at = offset / elem, left = bytes / elem;
  if (!placed.boxes.empty()) return read_boxes(tensor, placed, at, left, out);
  auto run = static_cast<size_t>(std::ranges::upper_bound(placed.begins, at) - placed.begins.begin()) - 1;
  for (; left > 0; ++run) {
    const FlatRun& from = placed.runs[run];
    const int64_t inside = at - placed.begins[run], count = std::min(left, from.count - inside);
    if (count == 0) continue;  // a run of nothing
    const auto size = static_cast<size_t>(count * elem);
    if (from.file < 0) {
      std::memset(out, 0, size);
    } else {
      const Status done = files_->read(from.file, from.offset + inside * elem, {out, size});
      if (!done.ok()) return Status(done).with(fmt::format("tensor {}", tensor.name));
    }
    out += size;
    at += count;
    left -= count;
  }
  return {};
}

Status FlatTensors::read_boxes(const SafeTensor& tensor, const Placed& placed, int64_t at, int64_t left,
                               std::byte* out) const {
  const int64_t columns = placed.paired == 0 ? 0 : count_elems(tensor.shape) / tensor.shape[0];
  size_t k = 0;
  while (left > 0) {
    int64_t stored = at, most = left;
    if (placed.paired > 0) {  // channel c of a head's first half is its row 2 c, of the second 2 c + 1
      const int64_t row = at / columns, channel = row % placed.paired, half = placed.paired / 2;
      const int64_t from = row - channel + channel % half * 2 + channel / half;
      stored = from * columns + at % columns;
      most = std::min(left, columns - at % columns);
    }
    BoxRun run;
    for (size_t tried = 0; run.count == 0; ++tried, k += run.count == 0 ? 1 : 0) {  // most runs continue in the next
      RT_CHECK(tried < placed.boxes.size(), "{}: no box holds element {}", tensor.name, stored);
      k %= placed.boxes.size();
      const FileBox& box = placed.boxes[k];
      run = run_in_box(box.offsets, box.sizes, tensor.shape, stored);
      run.count = run.from < box.first ? 0 : std::min(run.count, box.first + box.elems() - run.from);
      run.from -= box.first;
      if (run.count < 0) run.count = 0;
    }
    const int64_t count = std::min(run.count, most);
    const auto size = static_cast<size_t>(count * placed.elem_bytes);
    const FileBox& box = placed.boxes[k];
    if (box.file < 0) {
      std::memset(out, 0, size);
    } else {
      const Status done = files_->read(box.file, box.offset + run.from * placed.elem_bytes, {out, size});
      if (!done.ok()) return Status(done).with(fmt::format("tensor {}", tensor.name));
    }
    out += size;
    at += count;
    left -= count;
  }
  return {};
}

}  // namespace cairn::convert
