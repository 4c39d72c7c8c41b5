#include "converters/hf_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "converters/strict_json.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;
constexpr int64_t kMaxIndexBytes = int64_t{256} << 20;
constexpr int64_t kMaxConfigDepth = 32;
constexpr int64_t kBlockBytes = int64_t{4} << 20;  // of a stored tensor in memory at a time

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }
Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == name.npos && name.find('\\') == name.npos &&
         name.find('\0') == name.npos;
}

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

/// `count` stored elements -> floats.
void to_floats(DType dtype, const std::byte* in, int64_t count, float* out) {
  switch (dtype) {
    case DType::kF32:
      std::memcpy(out, in, count * 4);
      return;
    case DType::kF64:
      for (int64_t k = 0; k < count; ++k) {
        double x = 0;
        std::memcpy(&x, in + k * 8, 8);
        out[k] = static_cast<float>(x);
      }
      return;
    default:
      for (int64_t k = 0; k < count; ++k) {
        uint16_t x = 0;
        std::memcpy(&x, in + k * 2, 2);
        out[k] = dtype == DType::kF16 ? f16_to_f32(x) : to_f32(bf16{x});
      }
  }
}

bool is_weight_dtype(std::string_view name) {
  return name == "F32" || name == "F16" || name == "BF16" || name == "F64";
}

/// The shape on disk of the stored tensor that this logical one is a part of.

}  // namespace

const std::vector<std::string_view>& passed_files() {
  static const std::vector<std::string_view> kFiles = {"generation_config.json",
                                                       "tokenizer.json",
                                                       "tokenizer_config.json",
                                                       "special_tokens_map.json",
                                                       "added_tokens.json",
                                                       "vocab.json",
                                                       "merges.txt",
                                                       "tokenizer.model",
                                                       "chat_template.jinja",
                                                       "chat_template.json"};
  return kFiles;
}

Result<std::string> read_text_file(const fs::path& path, int64_t max_bytes) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) {
    Error error = os_error(errno, path.string());
    if (error.os_errno == ENOENT || error.os_errno == EACCES) error.code = ErrorCode::kInvalidInput;
    return error;
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return os_error(errno, path.string());
  if (!S_ISREG(info.st_mode)) return invalid(fmt::format("{}: is no regular file", path.string()));
  if (info.st_size > max_bytes) {
    return invalid(fmt::format("{}: has {} bytes, at most {} are expected", path.string(), info.st_size, max_bytes));
  }
  std::string out(static_cast<size_t>(info.st_size), '\0');
  for (size_t done = 0; done < out.size();) {
    const ssize_t n = ::read(fd.get(), out.data() + done, out.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, path.string());
    if (n == 0) return corrupt(fmt::format("{}: ends at byte {} of {}", path.string(), done, out.size()));
    done += static_cast<size_t>(n);
  }
  return out;
}

Result<std::map<std::string, std::string>> parse_index(std::string_view text, int64_t* total_size) {
  RT_TRY_SET(const nlohmann::json index, parse_json_strictly(text, "the index", kMaxConfigDepth));
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object()) {
    return corrupt("\"weight_map\" is missing or no object; expected {tensor name: file name}");
  }
  std::map<std::string, std::string> out;
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string() || !is_plain_name(file.get_ref<const std::string&>())) {
      return corrupt(fmt::format("\"weight_map\".\"{}\" = {}: must be the name of a file in this folder", name,
                                 file.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)));
    }
    out[name] = file.get<std::string>();
  }
  if (out.empty()) return corrupt("\"weight_map\" is empty");
  if (total_size != nullptr) {
    *total_size = 0;
    const auto metadata = index.find("metadata");
    if (metadata != index.end() && metadata->is_object() && metadata->contains("total_size") &&
        (*metadata)["total_size"].is_number_integer()) {
      *total_size = (*metadata)["total_size"].get<int64_t>();
    }
  }
  return out;
}

Result<std::unique_ptr<HfFolder>> HfFolder::open(const fs::path& dir, const HfOptions& options) {
  std::unique_ptr<HfFolder> out(new HfFolder());
  out->dir_ = dir;
  std::error_code error;
  if (!fs::is_directory(dir, error)) {
    return invalid(fmt::format("{}: is no folder; expected one with config.json and model.safetensors", dir.string()));
  }
  RT_TRY(out->read_config());
  RT_TRY(out->open_files());
  RT_TRY(out->match(options).with(dir.string()));
  for (const std::string_view name : passed_files()) {
    if (is_file(dir / name)) out->kept_files_.emplace_back(name);
  }
  out->kept_files_.emplace_back(kConfigFile);
  return out;
}

Status HfFolder::read_config() {
  const fs::path path = dir_ / kConfigFile;
  if (!is_file(path)) {
    return invalid(
        fmt::format("{}: has no config.json; is this the folder that save_pretrained wrote?", dir_.string()));
  }
  RT_TRY_SET(const std::string text, read_text_file(path, kMaxConfigBytes));
  Result<nlohmann::json> config = parse_json_strictly(text, "the config", kMaxConfigDepth);
  if (!config.ok()) return std::move(config).error().with(path.string());
  if (config.value().is_object() && config.value().contains("quantization_config") &&
      !config.value()["quantization_config"].is_null()) {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{}: quantization_config: quantised weights are not supported; use the folder they were "
                             "made from",
                             path.string())};
  }
  Result<ModelConfig> model = model_from_config(config.value());
  if (!model.ok()) return std::move(model).error().with(path.string());
  model_ = model.value();
  RT_TRY_SET(family_, find_family(config.value()["model_type"].get<std::string>()));
  return {};
}

Status HfFolder::open_files() {
  const auto open_one = [&](const std::string& name) -> Status {
    RT_TRY_SET(SafetensorsFile file, SafetensorsFile::open(dir_ / name));
    files_.push_back(std::make_unique<SafetensorsFile>(std::move(file)));
    return {};
  };
  std::set<std::string> used;
  if (is_file(dir_ / kSingleFile)) {
    if (is_file(dir_ / kIndexFile)) {
      warnings_.push_back(fmt::format("both {} and {} are there: the single file is read, as transformers does",
                                      kSingleFile, kIndexFile));
    }
    RT_TRY(open_one(std::string(kSingleFile)));
    used.emplace(kSingleFile);
  } else if (is_file(dir_ / kIndexFile)) {
    const fs::path path = dir_ / kIndexFile;
    RT_TRY_SET(const std::string text, read_text_file(path, kMaxIndexBytes));
    int64_t total_size = 0;
    auto parsed = parse_index(text, &total_size);
    if (!parsed.ok()) return std::move(parsed).error().with(path.string());
    const std::map<std::string, std::string> map = std::move(parsed).value();
    std::string problems;
    for (const auto& [tensor, file] : map) {
      if (!used.insert(file).second) continue;
      if (!is_file(dir_ / file)) problems += fmt::format("\n  {}: the file is missing", file);
    }
    if (!problems.empty())
      return invalid(fmt::format("{}: names files that are not there:{}", path.string(), problems));
    std::map<std::string, std::string> seen;  // tensor -> file that holds it
    int64_t data_bytes = 0;
    for (const std::string& name : used) {
      RT_TRY(open_one(name));
      for (const SafeTensor& tensor : files_.back()->header().tensors) {
        data_bytes += tensor.end - tensor.begin;
        const auto listed = map.find(tensor.name);
        if (!seen.emplace(tensor.name, name).second) {
          problems += fmt::format("\n  {}: is in {} and in {}", tensor.name, seen[tensor.name], name);
        } else if (listed == map.end()) {
          problems += fmt::format("\n  {}: is in {}, the index does not list it", tensor.name, name);
        } else if (listed->second != name) {
          problems += fmt::format("\n  {}: is in {}, the index says {}", tensor.name, name, listed->second);
        }
      }
    }
    for (const auto& [tensor, file] : map) {
      if (!seen.contains(tensor)) problems += fmt::format("\n  {}: is not in {}, which the index names", tensor, file);
    }
    if (!problems.empty()) {
      return corrupt(fmt::format("{}: does not fit its files:{}", path.string(), problems));
    }
    if (total_size != 0 && total_size != data_bytes) {
      warnings_.push_back(
          fmt::format("{}: total_size = {}, the tensors have {} bytes", kIndexFile, total_size, data_bytes));
    }
    kept_files_.emplace_back(kIndexFile);
  } else if (is_file(dir_ / "pytorch_model.bin") || is_file(dir_ / "pytorch_model.bin.index.json")) {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{}: the weights are in pytorch_model.bin, a pickle, which is not read here; convert them "
                             "to safetensors first: load the folder with transformers and call save_pretrained",
                             dir_.string())};
  } else {
    return invalid(fmt::format("{}: has neither {} nor {}", dir_.string(), kSingleFile, kIndexFile));
  }
  std::error_code error;
  std::vector<std::string> stray;
  for (fs::directory_iterator it(dir_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with("model") && name.ends_with(".safetensors") && !used.contains(name)) stray.push_back(name);
  }
  std::sort(stray.begin(), stray.end());
  for (const std::string& name : stray) warnings_.push_back(fmt::format("{}: nothing names this file, not read", name));
  return {};
}

Result<std::string> HfFolder::first_difference(const Stored& a, const Stored& b) const {
  if (a.tensor->dtype != b.tensor->dtype || a.tensor->shape != b.tensor->shape) {
    return fmt::format("{} {} and {} {}", a.tensor->dtype, to_string(a.tensor->shape), b.tensor->dtype,
                       to_string(b.tensor->shape));
  }
  const int64_t bytes = a.tensor->end - a.tensor->begin;
  std::vector<std::byte> left(std::min(bytes, kBlockBytes)), right(left.size());
  for (int64_t at = 0; at < bytes; at += kBlockBytes) {
    const int64_t count = std::min(kBlockBytes, bytes - at);
    RT_TRY(files_[a.file]->read(*a.tensor, at, count, left.data()));
    RT_TRY(files_[b.file]->read(*b.tensor, at, count, right.data()));
    const auto [where, other] = std::mismatch(left.begin(), left.begin() + count, right.begin());
    if (where != left.begin() + count) {
      const int64_t element = (at + (where - left.begin())) * 8 / safetensors_dtype_bits(a.tensor->dtype);
      return fmt::format("first at element {} of {}", element, cairn::count_elems(a.tensor->shape));
    }
  }
  return std::string();
}

Status HfFolder::settle_tie(const HfOptions& options, std::map<std::string, Stored>& found, std::string* problems) {
  const std::string head_key = head_name(family_);
  const auto head = found.find(head_key);
  const auto mappings = tensor_map(family_, model_);
  const auto embedding_mapping = std::find_if(mappings.begin(), mappings.end(),
                                              [](const Mapping& mapping) { return mapping.logical == "embed.tokens"; });
  const auto embedding = found.find(embedding_mapping->stored);
  if (!model_.tied_embeddings) {
    if (head == found.end() && embedding != found.end()) {
      *problems += fmt::format(
          "\n  (tie_word_embeddings is false, so {} must be stored; set it to true if the model shares its embedding)",
          head_key);
    }
    return {};
  }
  if (head == found.end()) return {};
  if (embedding == found.end()) {
    found[embedding_mapping->stored] = head->second;
    found.erase(head_key);
    return {};
  }
  RT_TRY_SET(const std::string difference, first_difference(embedding->second, head->second));
  if (difference.empty()) {
    found.erase(head);
  } else if (options.untie) {
    model_.tied_embeddings = false;
    warnings_.push_back(fmt::format("{} and {} differ though tie_word_embeddings is true: imported as two tensors",
                                    embedding_mapping->stored, head_key));
  } else {
    *problems += fmt::format(
        "\n  {} and {} differ ({}) though tie_word_embeddings is true; --untie imports both, as an untied model",
        embedding_mapping->stored, head_key, difference);
    found.erase(head);
  }
  return {};
}

Status HfFolder::match(const HfOptions& options) {
  // All names that the family can have, by what they are called with the prefix.
  std::set<std::string> known = {head_name(family_)};
  for (const Mapping& mapping : tensor_map(family_, model_)) known.insert(mapping.stored);
  std::string problems;
  std::map<std::string, Stored> found;
  std::map<std::string, std::string> called;  // canonical name -> name in the file
  for (size_t f = 0; f < files_.size(); ++f) {
    for (const SafeTensor& tensor : files_[f]->header().tensors) {
      std::string name = tensor.name;
      if (!known.contains(name)) {
        const std::string added = std::string(family_.prefix) + name;
        if (known.contains(added)) {
          name = added;
        } else if (name.starts_with(family_.prefix) && known.contains(name.substr(family_.prefix.size()))) {
          name = name.substr(family_.prefix.size());
        } else if (is_ignored_tensor(family_, name)) {
          continue;
        } else {
          problems += fmt::format("\n  {}: unexpected, {} {}", name, tensor.dtype, to_string(tensor.shape));
          continue;
        }
      }
      if (!called.emplace(name, tensor.name).second) {
        problems += fmt::format("\n  {}: there twice, as {} and as {}", name, called[name], tensor.name);
        continue;
      }
      found[name] = {static_cast<int64_t>(f), &tensor};
    }
  }
  RT_TRY(settle_tie(options, found, &problems));

  tensors_ = model_tensors(model_);
  mappings_ = tensor_map(family_, model_);
  RT_CHECK(tensors_.size() == mappings_.size(), "{} tensors, {} mappings", tensors_.size(), mappings_.size());
  stored_.resize(tensors_.size());
  std::set<std::string> told;
  int64_t widest = 0;
  bool mixed = false, any_f64 = false;
  for (size_t k = 0; k < tensors_.size(); ++k) {
    const Mapping& mapping = mappings_[k];
    const Shape expected = mapping.shape;
    const auto it = found.find(mapping.stored);
    const bool first_time = told.insert(mapping.stored).second;  // q, k and v may share one stored tensor
    if (it == found.end()) {
      if (first_time) problems += fmt::format("\n  {}: missing, expected {}", mapping.stored, to_string(expected));
      continue;
    }
    const SafeTensor& tensor = *it->second.tensor;
    if (first_time && !is_weight_dtype(tensor.dtype)) {
      problems += fmt::format("\n  {}: dtype {}, weights must be F32, BF16, F16 or F64", tensor.name, tensor.dtype);
    } else if (first_time && tensor.shape != expected) {
      problems +=
          fmt::format("\n  {}: shape {}, expected {}", tensor.name, to_string(tensor.shape), to_string(expected));
    }
    stored_[k] = it->second;
    if (!is_weight_dtype(tensor.dtype)) continue;
    const DType dtype = safetensors_dtype(tensor.dtype).value();
    any_f64 = any_f64 || dtype == DType::kF64;
    const int64_t bits = safetensors_dtype_bits(tensor.dtype) + (dtype == DType::kBf16 ? 1 : 0);
    mixed = mixed || (widest != 0 && dtype != dtype_);
    if (bits > widest) {
      widest = bits;
      dtype_ = dtype;
    }
  }
  if (!problems.empty()) {
    return invalid(
        fmt::format("its tensors are not those of the {} model in config.json:{}", family_.model_type, problems));
  }
  if (mixed) warnings_.push_back("the weights have several dtypes");
  if (any_f64) warnings_.push_back("F64 weights are rounded to float32");
  return {};
}

Status HfFolder::read_rows(int64_t tensor, int64_t first, int64_t end, std::span<float> out) const {
  const Mapping& mapping = mappings_[tensor];
  const Shape& shape = tensors_[tensor].shape;
  const int64_t columns = cairn::count_elems(shape) / shape[0];
  RT_CHECK(first >= 0 && first <= end && end <= shape[0] &&
               static_cast<int64_t>(out.size()) == (end - first) * columns,
           "{}: rows {}:{} into {} floats", mapping.logical, first, end, out.size());
  for (const RowRun& run : row_runs(mapping, shape)) {
    const int64_t begin = std::max(first, run.logical), stop = std::min(end, run.logical + run.count);
    if (begin >= stop) continue;
    const RowRun part{begin, run.stored + begin - run.logical, stop - begin};
    RT_TRY(read_run(tensor, part, columns, out.data() + (begin - first) * columns));
  }
  return {};
}

/// Rows that lie together in the stored tensor, or columns that do.
Status HfFolder::read_run(int64_t tensor, const RowRun& run, int64_t columns, float* out) const {
  const SafetensorsFile& file = *files_[stored_[tensor].file];
  const SafeTensor& stored = *stored_[tensor].tensor;
  const DType dtype = safetensors_dtype(stored.dtype).value();
  const int64_t elem = dtype_size_bytes(dtype);
  std::vector<std::byte> block;
  if (!mappings_[tensor].transpose) {
    const int64_t begin = run.stored * columns, count = run.count * columns;
    for (int64_t at = 0; at < count;) {
      const int64_t n = std::min(count - at, kBlockBytes / elem);
      block.resize(n * elem);
      RT_TRY(file.read(stored, (begin + at) * elem, n * elem, block.data()));
      to_floats(dtype, block.data(), n, out + at);
      at += n;
    }
    return {};
  }
  const int64_t width = stored.shape[1];
  const int64_t rows_a_block = std::max<int64_t>(1, kBlockBytes / (width * elem));
  std::vector<float> line(run.count);
  for (int64_t in = 0; in < columns; in += rows_a_block) {
    const int64_t n = std::min(rows_a_block, columns - in);
    block.resize(n * width * elem);
    RT_TRY(file.read(stored, in * width * elem, n * width * elem, block.data()));
    for (int64_t k = 0; k < n; ++k) {
      to_floats(dtype, block.data() + (k * width + run.stored) * elem, run.count, line.data());
      for (int64_t r = 0; r < run.count; ++r) out[r * columns + in + k] = line[r];
    }
  }
  return {};
}

}  // namespace cairn::convert
