#include "ckpt/store/memory_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <unordered_map>

#include "runtime/core/random.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

/// One atomic change of a directory: each name is set to a node, or removed (null).
struct MemoryBackend::DirChange {
  std::vector<std::pair<std::string, NodePtr>> sets;
};

struct MemoryBackend::Node {
  bool is_dir = false;
  std::vector<std::byte> data, durable_data;        // a file
  std::map<std::string, NodePtr> entries, durable;  // a directory
  std::vector<DirChange> pending;                   // changes since the last sync_dir, in order
};

namespace {

Error failed(const char* operation, const fs::path& path, int error) {
  return os_error(error, fmt::format("{}: {}", path.string(), operation));
}

void apply_sets(std::map<std::string, std::shared_ptr<MemoryBackend::Node>>& entries,
                const std::vector<std::pair<std::string, std::shared_ptr<MemoryBackend::Node>>>& sets) {
  for (const auto& [name, node] : sets) {
    if (node) {
      entries[name] = node;
    } else {
      entries.erase(name);
    }
  }
}

class Rng {
 public:
  explicit Rng(uint64_t seed) : key_(mix64(seed)) {}
  uint64_t below(uint64_t n) { return mix64(key_ + counter_++ * 0x9E3779B97F4A7C15ull) % n; }

 private:
  uint64_t key_, counter_ = 0;
};

}  // namespace

class MemoryFile final : public IoFile {
 public:
  MemoryFile(MemoryBackend& disk, std::shared_ptr<MemoryBackend::Node> node, fs::path path, bool writable)
      : disk_(disk), node_(std::move(node)), path_(std::move(path)), writable_(writable) {}

  Result<IoTicket> submit_write(int64_t offset, const std::byte* data, int64_t bytes) override {
    if (!writable_) return failed("write", path_, EBADF);
    const int64_t size = static_cast<int64_t>(node_->data.size());
    if (offset + bytes > size) {
      if (disk_.used_bytes() + offset + bytes - size > disk_.capacity_bytes_) return failed("write", path_, ENOSPC);
      node_->data.resize(static_cast<size_t>(offset + bytes));
    }
    if (bytes > 0) std::memcpy(node_->data.data() + offset, data, static_cast<size_t>(bytes));
    return IoTicket{0};
  }
  Result<IoTicket> submit_read(int64_t offset, std::byte* data, int64_t bytes) override {
    const int64_t size = static_cast<int64_t>(node_->data.size());
    if (offset < 0 || offset > size || bytes > size - offset)
      return Error{ErrorCode::kCorrupt, fmt::format("{}: ends at byte {}, {} bytes expected at {} (file cut short?)",
                                                    path_.string(), size, bytes, offset)};
    if (bytes > 0) std::memcpy(data, node_->data.data() + offset, static_cast<size_t>(bytes));
    return IoTicket{0};
  }
  Status wait(IoTicket) override { return {}; }
  Status finish() override { return {}; }
  Status truncate(int64_t size_bytes) override {
    node_->data.resize(static_cast<size_t>(size_bytes));
    return {};
  }
  Result<int64_t> size() override { return static_cast<int64_t>(node_->data.size()); }
  Status sync() override {
    node_->durable_data = node_->data;
    return {};
  }
  Status close() override { return {}; }

 private:
  MemoryBackend& disk_;
  std::shared_ptr<MemoryBackend::Node> node_;
  fs::path path_;
  bool writable_;
};

MemoryBackend::MemoryBackend(int64_t capacity_bytes)
    : root_(std::make_shared<Node>()), capacity_bytes_(capacity_bytes) {
  root_->is_dir = true;
}
MemoryBackend::~MemoryBackend() = default;

Result<MemoryBackend::NodePtr> MemoryBackend::find(const fs::path& path) const {
  NodePtr node = root_;
  for (const fs::path& part : path.lexically_normal()) {
    if (part == "/" || part == "." || part.empty()) continue;
    if (!node->is_dir) return failed("find", path, ENOTDIR);
    const auto it = node->entries.find(part.string());
    if (it == node->entries.end()) return failed("find", path, ENOENT);
    node = it->second;
  }
  return node;
}

Result<MemoryBackend::NodePtr> MemoryBackend::find_dir(const fs::path& path, const fs::path& for_path) const {
  RT_TRY_SET(NodePtr node, find(path));
  if (!node->is_dir) return failed("find", for_path, ENOTDIR);
  return node;
}

void MemoryBackend::change(const NodePtr& dir, DirChange change) {
  apply_sets(dir->entries, change.sets);
  dir->pending.push_back(std::move(change));
}

int64_t MemoryBackend::used_bytes() const {
  int64_t used = 0;
  const std::function<void(const Node&)> add = [&](const Node& node) {
    used += static_cast<int64_t>(node.data.size());
    for (const auto& [name, child] : node.entries) add(*child);
  };
  add(*root_);
  return used;
}

Result<std::unique_ptr<IoFile>> MemoryBackend::create(const fs::path& path, int64_t size_bytes) {
  RT_TRY_SET(const NodePtr dir, find_dir(path.parent_path(), path));
  if (dir->entries.contains(path.filename().string())) return failed("create", path, EEXIST);
  if (used_bytes() + size_bytes > capacity_bytes_) return failed("reserve space", path, ENOSPC);
  auto node = std::make_shared<Node>();
  node->data.resize(static_cast<size_t>(size_bytes));
  change(dir, {{{path.filename().string(), node}}});
  return std::unique_ptr<IoFile>(std::make_unique<MemoryFile>(*this, std::move(node), path, true));
}

Result<std::unique_ptr<IoFile>> MemoryBackend::open(const fs::path& path) {
  RT_TRY_SET(NodePtr node, find(path));
  if (node->is_dir) return failed("open", path, EISDIR);
  return std::unique_ptr<IoFile>(std::make_unique<MemoryFile>(*this, std::move(node), path, false));
}

Result<std::unique_ptr<IoFile>> MemoryBackend::reopen(const fs::path& path, int64_t size_bytes) {
  RT_TRY_SET(NodePtr node, find(path));
  if (node->is_dir) return failed("open for writing", path, EISDIR);
  const auto size = static_cast<int64_t>(node->data.size());
  if (used_bytes() + size_bytes - size > capacity_bytes_) return failed("reserve space", path, ENOSPC);
  node->data.resize(static_cast<size_t>(size_bytes));
  return std::unique_ptr<IoFile>(std::make_unique<MemoryFile>(*this, std::move(node), path, true));
}

Status MemoryBackend::make_dir(const fs::path& path) {
  RT_TRY_SET(const NodePtr dir, find_dir(path.parent_path(), path));
  if (dir->entries.contains(path.filename().string())) return failed("make directory", path, EEXIST);
  auto node = std::make_shared<Node>();
  node->is_dir = true;
  change(dir, {{{path.filename().string(), std::move(node)}}});
  return {};
}

Status MemoryBackend::rename(const fs::path& from, const fs::path& to) {
  RT_TRY_SET(const NodePtr node, find(from));
  RT_TRY_SET(const NodePtr from_dir, find_dir(from.parent_path(), from));
  RT_TRY_SET(const NodePtr to_dir, find_dir(to.parent_path(), to));
  if (const auto it = to_dir->entries.find(to.filename().string()); it != to_dir->entries.end()) {
    if (it->second->is_dir != node->is_dir) return failed("rename onto", to, node->is_dir ? ENOTDIR : EISDIR);
    if (node->is_dir && !it->second->entries.empty()) return failed("rename onto", to, ENOTEMPTY);
  }
  if (from_dir == to_dir) {
    change(from_dir, {{{from.filename().string(), nullptr}, {to.filename().string(), node}}});
  } else {
    change(to_dir, {{{to.filename().string(), node}}});
    change(from_dir, {{{from.filename().string(), nullptr}}});
  }
  return {};
}

Status MemoryBackend::exchange(const fs::path& a, const fs::path& b) {
  RT_TRY_SET(const NodePtr node_a, find(a));
  RT_TRY_SET(const NodePtr node_b, find(b));
  if (a.parent_path() != b.parent_path()) return failed("exchange", a, EXDEV);
  RT_TRY_SET(const NodePtr dir, find_dir(a.parent_path(), a));
  change(dir, {{{a.filename().string(), node_b}, {b.filename().string(), node_a}}});
  return {};
}

Status MemoryBackend::sync_dir(const fs::path& path) {
  RT_TRY_SET(const NodePtr dir, find_dir(path, path));
  dir->durable = dir->entries;
  dir->pending.clear();
  return {};
}

Status MemoryBackend::remove_file(const fs::path& path) {
  RT_TRY_SET(const NodePtr node, find(path));
  if (node->is_dir) return failed("remove", path, EISDIR);
  RT_TRY_SET(const NodePtr dir, find_dir(path.parent_path(), path));
  change(dir, {{{path.filename().string(), nullptr}}});
  return {};
}

Status MemoryBackend::remove_dir(const fs::path& path) {
  RT_TRY_SET(const NodePtr node, find_dir(path, path));
  if (!node->entries.empty()) return failed("remove directory", path, ENOTEMPTY);
  RT_TRY_SET(const NodePtr dir, find_dir(path.parent_path(), path));
  change(dir, {{{path.filename().string(), nullptr}}});
  return {};
}

Result<std::vector<DirEntry>> MemoryBackend::list(const fs::path& path) {
  RT_TRY_SET(const NodePtr dir, find_dir(path, path));
  std::vector<DirEntry> entries;
  for (const auto& [name, node] : dir->entries) entries.push_back({name, node->is_dir});
  return entries;
}

Result<FileStat> MemoryBackend::stat(const fs::path& path) {
  RT_TRY_SET(const NodePtr node, find(path));
  const auto size_bytes = static_cast<int64_t>(node->data.size());
  return FileStat{size_bytes, node->is_dir, false, size_bytes};
}

Result<int64_t> MemoryBackend::free_bytes(const fs::path& path) {
  RT_TRY_SET(const NodePtr node, find(path));
  return capacity_bytes_ - used_bytes();
}

void MemoryBackend::power_cycle(uint64_t seed) {
  Rng rng(seed);
  const auto keep = [&] { return seed == 1 || (seed > 1 && rng.below(2) == 1); };

  const auto settle_file = [&](Node& file) {
    std::vector<std::byte> after = keep() ? file.data : file.durable_data;  // decides the size
    for (size_t at = 0; at < after.size(); at += kIoAlign) {
      const size_t n = std::min<size_t>(kIoAlign, after.size() - at);
      const auto sector = [&](const std::vector<std::byte>& from, size_t i) {
        return at + i < from.size() ? from[at + i] : std::byte{0};
      };
      bool same = true;
      for (size_t i = 0; i < n && same; ++i) same = sector(file.data, i) == sector(file.durable_data, i);
      if (same) {
        for (size_t i = 0; i < n; ++i) after[at + i] = sector(file.data, i);
        continue;
      }
      size_t new_bytes = seed == 1 ? n : 0;
      if (seed > 1) {
        const uint64_t fate = rng.below(3);
        if (fate == 1) new_bytes = n;
        if (fate == 2) new_bytes = std::min<size_t>(n, 512 * rng.below(kIoAlign / 512 + 1));
      }
      for (size_t i = 0; i < n; ++i) after[at + i] = sector(i < new_bytes ? file.data : file.durable_data, i);
    }
    file.data = file.durable_data = std::move(after);
  };

  std::set<const Node*> settled;
  const std::function<void(Node&)> settle = [&](Node& node) {
    if (!settled.insert(&node).second) return;
    if (!node.is_dir) return settle_file(node);
    // Even seeds keep a prefix of the changes, as a journal does; odd ones keep any of them.
    const size_t prefix = seed > 1 ? static_cast<size_t>(rng.below(node.pending.size() + 1)) : 0;
    for (size_t i = 0; i < node.pending.size(); ++i) {
      if (seed > 1 && seed % 2 == 0 ? i < prefix : keep()) apply_sets(node.durable, node.pending[i].sets);
    }
    node.pending.clear();
    node.entries = node.durable;
    for (const auto& [name, child] : node.entries) settle(*child);
  };
  settle(*root_);
}

std::unique_ptr<MemoryBackend> MemoryBackend::clone() const {
  std::unordered_map<const Node*, NodePtr> copies;
  const std::function<NodePtr(const NodePtr&)> copy = [&](const NodePtr& node) -> NodePtr {
    if (!node) return nullptr;
    if (const auto it = copies.find(node.get()); it != copies.end()) return it->second;
    auto made = std::make_shared<Node>();
    copies[node.get()] = made;
    made->is_dir = node->is_dir;
    made->data = node->data;
    made->durable_data = node->durable_data;
    for (const auto& [name, child] : node->entries) made->entries[name] = copy(child);
    for (const auto& [name, child] : node->durable) made->durable[name] = copy(child);
    for (const DirChange& change : node->pending) {
      made->pending.emplace_back();
      for (const auto& [name, child] : change.sets) made->pending.back().sets.emplace_back(name, copy(child));
    }
    return made;
  };
  auto disk = std::make_unique<MemoryBackend>(capacity_bytes_);
  disk->root_ = copy(root_);
  return disk;
}

std::vector<std::byte>& MemoryBackend::bytes_of(const fs::path& path) {
  Result<NodePtr> node = find(path);
  RT_CHECK(node.ok() && !node.value()->is_dir, "{} is no file of this disk", path.string());
  return node.value()->data;
}

}  // namespace cairn::ckpt
