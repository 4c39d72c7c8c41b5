#include "ckpt/store/stoppable_backend.h"

#include <fmt/format.h>

#include <utility>

namespace cairn::ckpt {
namespace {

namespace fs = std::filesystem;
using Stopped = std::function<bool()>;

Status check(const Stopped& stopped, const fs::path& path) {
  if (!stopped()) return {};
  return Error{ErrorCode::kStopped, fmt::format("{}: asked to stop", path.string())};
}

class StoppableFile final : public IoFile {
 public:
  StoppableFile(std::unique_ptr<IoFile> inner, const Stopped& stopped, fs::path path)
      : inner_(std::move(inner)), stopped_(stopped), path_(std::move(path)) {}

  Result<IoTicket> submit_write(int64_t offset, const std::byte* data, int64_t bytes) override {
    RT_TRY(check(stopped_, path_));
    return inner_->submit_write(offset, data, bytes);
  }
  Result<IoTicket> submit_read(int64_t offset, std::byte* data, int64_t bytes) override {
    RT_TRY(check(stopped_, path_));
    return inner_->submit_read(offset, data, bytes);
  }
  Status wait(IoTicket ticket) override { return inner_->wait(ticket); }
  Status finish() override { return inner_->finish(); }
  Status truncate(int64_t size_bytes) override { return inner_->truncate(size_bytes); }
  Result<int64_t> size() override { return inner_->size(); }
  Status sync() override { return inner_->sync(); }
  Result<IoTicket> submit_sync() override { return inner_->submit_sync(); }
  Status close() override { return inner_->close(); }

 private:
  std::unique_ptr<IoFile> inner_;
  const Stopped& stopped_;  // the backend's
  fs::path path_;
};

class StoppableBackend final : public IoBackend {
 public:
  StoppableBackend(std::unique_ptr<IoBackend> inner, Stopped stopped)
      : inner_(std::move(inner)), stopped_(std::move(stopped)) {}

  std::string_view name() const override { return inner_->name(); }
  Result<std::unique_ptr<IoFile>> create(const fs::path& path, int64_t size_bytes) override {
    RT_TRY(check(stopped_, path));
    return wrap(inner_->create(path, size_bytes), path);
  }
  Result<std::unique_ptr<IoFile>> open(const fs::path& path) override {
    RT_TRY(check(stopped_, path));
    return wrap(inner_->open(path), path);
  }
  Result<std::unique_ptr<IoFile>> reopen(const fs::path& path, int64_t size_bytes) override {
    RT_TRY(check(stopped_, path));
    return wrap(inner_->reopen(path, size_bytes), path);
  }
  Status make_dir(const fs::path& path) override { return inner_->make_dir(path); }
  Status rename(const fs::path& from, const fs::path& to) override { return inner_->rename(from, to); }
  Status exchange(const fs::path& a, const fs::path& b) override { return inner_->exchange(a, b); }
  Status sync_dir(const fs::path& path) override { return inner_->sync_dir(path); }
  Status remove_file(const fs::path& path) override { return inner_->remove_file(path); }
  Status remove_dir(const fs::path& path) override { return inner_->remove_dir(path); }
  Result<std::vector<DirEntry>> list(const fs::path& path) override { return inner_->list(path); }
  Result<FileStat> stat(const fs::path& path) override { return inner_->stat(path); }
  Result<int64_t> free_bytes(const fs::path& path) override { return inner_->free_bytes(path); }

 private:
  Result<std::unique_ptr<IoFile>> wrap(Result<std::unique_ptr<IoFile>> file, const fs::path& path) {
    if (!file.ok()) return file;
    return std::unique_ptr<IoFile>(std::make_unique<StoppableFile>(std::move(file).value(), stopped_, path));
  }

  std::unique_ptr<IoBackend> inner_;
  Stopped stopped_;
};

}  // namespace

std::unique_ptr<IoBackend> make_stoppable(std::unique_ptr<IoBackend> inner, Stopped stopped) {
  if (!stopped) return inner;
  return std::make_unique<StoppableBackend>(std::move(inner), std::move(stopped));
}

}  // namespace cairn::ckpt
