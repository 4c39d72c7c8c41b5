#include "converters/hf_view.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>

#include "converters/hf_folder.h"

namespace cairn::convert {

namespace fs = std::filesystem;

HfView::HfView() {
  static std::atomic<int64_t> views{0};
  id_ = ++views;
}

Result<std::unique_ptr<HfView>> HfView::open(ckpt::IoBackend& io, const fs::path& checkpoint_dir,
                                             const std::string& name, const HfViewOptions& options,
                                             const RecipeDecoder& decode) {
  RT_TRY(check_export_dtype(options.of.dtype));
  std::unique_ptr<HfView> out(new HfView());
  out->dir_ = checkpoint_dir;
  out->unmade_ = std::max<int64_t>(1, options.readers);
  out->block_bytes_ = options.block_bytes;
  RT_TRY_SET(out->source_, CheckpointWeights::open(io, checkpoint_dir, decode, options.of.weights));
  RT_TRY_SET(out->plan_, plan_export(io, *out->source_, checkpoint_dir, name, options.of, decode));
  RT_TRY_SET(out->weights_, lay_out_files(out->plan_.output, options.of.max_shard_bytes));
  out->tensors_.resize(out->plan_.outputs.size());
  std::iota(out->tensors_.begin(), out->tensors_.end(), int64_t{0});
  std::map<std::string, std::string> texts = out->plan_.output.texts;
  if (std::string index = index_text(out->plan_.output, out->weights_); !index.empty())
    texts[std::string(kIndexFile)] = std::move(index);
  for (auto& [file, text] : texts) {
    const auto bytes = std::ssize(text);
    out->files_.push_back({.name = file, .bytes = bytes, .text = std::move(text)});
  }
  for (size_t k = 0; k < out->weights_.size(); ++k) {
    const HfFile& file = out->weights_[k];
    out->files_.push_back({.name = file.name, .bytes = file.file_bytes(), .weights = static_cast<int64_t>(k)});
  }
  std::ranges::sort(out->files_, {}, &ViewFile::name);
  return out;
}

const ViewFile* HfView::find(std::string_view name) const {
  const auto found = std::ranges::lower_bound(files_, name, {}, &ViewFile::name);
  return found == files_.end() || found->name != name ? nullptr : &*found;
}

Result<std::vector<std::byte>> HfView::block(int64_t weights, int64_t block) const {
  const HfFile& file = weights_[static_cast<size_t>(weights)];
  const int64_t first = block * block_bytes_, bytes = std::min(block_bytes_, file.file_bytes() - first);
  RT_CHECK(bytes > 0, "{} has no block {}", file.name, block);
  std::unique_ptr<TensorSource> source;
  bool make = false;
  {
    std::unique_lock lock(mutex_);
    freed_.wait(lock, [&] { return !idle_.empty() || unmade_ > 0; });
    if (idle_.empty()) {
      --unmade_;
      make = true;
    } else {
      source = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  std::vector<std::byte> out(static_cast<size_t>(bytes));
  const Status filled = [&]() -> Status {
    if (make) {
      RT_TRY_SET(source, plan_.open(dir_, *source_, tensors_, OutputReads::kAnywhere));
    }
    return fill_file(plan_.output, file, *source, first, out).with(file.name);
  }();
  {
    const std::lock_guard lock(mutex_);
    if (filled.ok()) {
      idle_.push_back(std::move(source));
    } else {
      ++unmade_;  // a source that failed is not used again
    }
  }
  freed_.notify_one();
  if (!filled.ok()) return filled.error();
  return out;
}

Result<BlockStore::Bytes> BlockStore::get(const std::shared_ptr<const HfView>& view, int64_t weights, int64_t block) {
  const Key key{view->id(), weights, block};
  {
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto found = entries_.find(key);
      if (found == entries_.end()) break;
      if (found->second.bytes) {
        used_.splice(used_.end(), used_, found->second.used);
        return found->second.bytes;
      }
      made_.wait(lock);
    }
    entries_[key] = {nullptr, used_.insert(used_.end(), key)};
  }
  Result<std::vector<std::byte>> made = view->block(weights, block);
  const std::lock_guard lock(mutex_);
  made_.notify_all();
  const auto entry = entries_.find(key);
  if (!made.ok()) {
    used_.erase(entry->second.used);
    entries_.erase(entry);
    return std::move(made).error();
  }
  const Bytes bytes = std::make_shared<const std::vector<std::byte>>(std::move(made).value());
  entry->second.bytes = bytes;
  bytes_ += std::ssize(*bytes);
  for (auto oldest = used_.begin(); bytes_ > most_bytes_ && oldest != used_.end();) {
    const auto there = entries_.find(*oldest);
    if (!there->second.bytes || *oldest == key) {  // under way
      ++oldest;
      continue;
    }
    bytes_ -= std::ssize(*there->second.bytes);
    entries_.erase(there);
    oldest = used_.erase(oldest);
  }
  return bytes;
}

bool BlockStore::has(int64_t view, int64_t weights, int64_t block) const {
  const std::lock_guard lock(mutex_);
  return entries_.contains({view, weights, block});
}

void BlockStore::forget(int64_t view) {
  const std::lock_guard lock(mutex_);
  for (auto one = entries_.lower_bound({view, 0, 0}); one != entries_.end() && one->first.view == view;) {
    if (!one->second.bytes) {  // its maker holds the view, and takes it out
      ++one;
      continue;
    }
    bytes_ -= std::ssize(*one->second.bytes);
    used_.erase(one->second.used);
    one = entries_.erase(one);
  }
}

}  // namespace cairn::convert
