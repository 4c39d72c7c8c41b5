#pragma once
// A disk in memory that can lose power, as strict as POSIX allows a disk to be: file contents are durable only after
// sync() of the file, names only after sync_dir() of their directory. For tests.

#include <map>

#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {

class MemoryBackend final : public IoBackend {
 public:
  explicit MemoryBackend(int64_t capacity_bytes = int64_t{1} << 40);
  ~MemoryBackend() override;

  std::string_view name() const override { return "memory"; }
  Result<std::unique_ptr<IoFile>> create(const std::filesystem::path& path, int64_t size_bytes) override;
  Result<std::unique_ptr<IoFile>> open(const std::filesystem::path& path) override;
  Result<std::unique_ptr<IoFile>> reopen(const std::filesystem::path& path, int64_t size_bytes) override;
  Status make_dir(const std::filesystem::path& path) override;
  Status rename(const std::filesystem::path& from, const std::filesystem::path& to) override;
  Status exchange(const std::filesystem::path& a, const std::filesystem::path& b) override;
  Status sync_dir(const std::filesystem::path& path) override;
  Status remove_file(const std::filesystem::path& path) override;
  Status remove_dir(const std::filesystem::path& path) override;
  Result<std::vector<DirEntry>> list(const std::filesystem::path& path) override;
  Result<FileStat> stat(const std::filesystem::path& path) override;
  Result<int64_t> free_bytes(const std::filesystem::path& path) override;

  /// What a power loss leaves. Seed 0 loses everything that was not synced, seed 1 keeps everything. Other seeds decide
  /// for each changed 4096-byte sector by itself (old, new, or torn: new up to a multiple of 512, then old), each file
  /// size and each change of a directory. Open files keep pointing at the lost state: drop them before.
  void power_cycle(uint64_t seed);

  /// A disk of its own with the same state, synced and not.
  std::unique_ptr<MemoryBackend> clone() const;

  /// The current bytes of a file, to look at and to damage.
  std::vector<std::byte>& bytes_of(const std::filesystem::path& path);

  struct Node;
  struct DirChange;

 private:
  using NodePtr = std::shared_ptr<Node>;
  Result<NodePtr> find(const std::filesystem::path& path) const;
  Result<NodePtr> find_dir(const std::filesystem::path& path, const std::filesystem::path& for_path) const;
  void change(const NodePtr& dir, DirChange change);
  int64_t used_bytes() const;

  NodePtr root_;
  int64_t capacity_bytes_;
  friend class MemoryFile;
};

}  // namespace cairn::ckpt
