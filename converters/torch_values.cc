#include "converters/torch_values.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "converters/safetensors.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

using Id = PickleTree::Id;

constexpr int kMaxWrappers = 4, kMaxJsonDepth = 32;
constexpr int64_t kMaxJsonValues = 100'000;

constexpr std::pair<std::string_view, std::string_view> kStorages[] = {
    {"FloatStorage", "F32"}, {"HalfStorage", "F16"}, {"BFloat16Storage", "BF16"}, {"DoubleStorage", "F64"},
    {"LongStorage", "I64"},  {"IntStorage", "I32"},  {"ShortStorage", "I16"},     {"CharStorage", "I8"},
    {"ByteStorage", "U8"},   {"BoolStorage", "BOOL"}};

const PickleTree::Policy kValues{
    .of = "training state", .max_bytes = int64_t{64} << 20, .max_values = size_t{8} << 20, .persistent = true};

template <class T>
double number_of(const char* raw) {
  T out;
  std::memcpy(&out, raw, sizeof out);
  return static_cast<double>(out);
}

bool is_dense(const Shape& shape, const Shape& strides) {
  int64_t expected = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] != 1 && strides[d] != expected) return false;
    expected *= shape[d];  // shape() has bounded the product
  }
  return true;
}

}  // namespace

Result<std::unique_ptr<TorchValues>> TorchValues::read(const std::filesystem::path& path) {
  RT_TRY_SET(TorchArchive archive, TorchArchive::open(path));
  return of(std::move(archive));
}

Result<std::unique_ptr<TorchValues>> TorchValues::read_part(std::shared_ptr<const Fd> fd,
                                                            const std::filesystem::path& path, int64_t begin,
                                                            int64_t bytes) {
  RT_TRY_SET(TorchArchive archive, TorchArchive::open_part(std::move(fd), path, begin, bytes));
  return of(std::move(archive));
}

Result<std::unique_ptr<TorchValues>> TorchValues::of(TorchArchive archive) {
  std::unique_ptr<TorchValues> out(new TorchValues());
  out->archive_ = std::move(archive);
  const std::filesystem::path& path = out->archive_.path();
  Result<std::string> pickle = out->archive_.pickle();
  if (!pickle.ok()) return std::move(pickle).error().with(path.string());
  out->pickle_ = std::move(pickle).value();
  Result<PickleTree> tree = PickleTree::read(out->pickle_, kValues);
  if (!tree.ok()) {
    return std::move(tree).error().with(fmt::format("{}: {}", path.string(), out->archive_.pickle_name()));
  }
  out->tree_ = std::move(tree).value();
  return out;
}

Id TorchValues::get(Id of, std::string_view key) const {
  const Dict* const found = dict(of);
  return found == nullptr ? kNothing : tree_->find(*found, key);
}

Id TorchValues::get(Id of, int64_t key) const {
  Id out = kNothing;
  if (const Dict* const found = dict(of); found != nullptr) {
    for (const auto& [name, value] : *found) {
      if (integer(name) == key) out = value;  // the last one counts, as in Python
    }
  }
  return out;
}

const TorchValues::Dict* TorchValues::dict(Id id) const {
  return id != kNothing && tree_->kind(id) == Kind::kDict ? tree_->dict(id, "").value() : nullptr;
}

const std::vector<Id>* TorchValues::items(Id id) const {
  const bool sequence = id != kNothing && (tree_->kind(id) == Kind::kTuple || tree_->kind(id) == Kind::kList);
  return sequence ? tree_->items(id, "").value() : nullptr;
}

std::string TorchValues::text(Id id) const {
  return id != kNothing && tree_->kind(id) == Kind::kString ? std::string(tree_->string(id, "").value()) : "";
}

std::optional<int64_t> TorchValues::integer(Id id) const {
  if (id == kNothing || tree_->kind(id) != Kind::kInt) return std::nullopt;
  return tree_->integer(id, "").value();
}

const TorchValues::Dict* TorchValues::state(Id id) const {
  if (id == kNothing) return nullptr;
  return tree_->kind(id) == Kind::kObject ? dict(tree_->object(id, "").value()->state) : dict(id);
}

/// (storage, offset, sizes, strides, ...) of _rebuild_tensor_v2, which _rebuild_parameter and _rebuild_from_type_v2 may
/// wrap.
const std::vector<Id>* TorchValues::tensor_arguments(Id id) const {
  for (int depth = 0; depth < kMaxWrappers && id != kNothing; ++depth) {
    const std::vector<Id>* arguments = items(id);  // of _rebuild_from_type_v2: those of the function
    if (tree_->kind(id) == Kind::kObject) arguments = items(tree_->object(id, "").value()->arguments);
    if (arguments == nullptr || arguments->empty()) return nullptr;
    const Id first = arguments->front();
    if (tree_->kind(first) == Kind::kPersistent) return arguments->size() >= 4 ? arguments : nullptr;
    id = tree_->kind(first) == Kind::kName && arguments->size() >= 3 ? (*arguments)[2] : first;
  }
  return nullptr;
}

std::string TorchValues::dtype_of(Id id) const {
  const std::vector<Id>* const arguments = tensor_arguments(id);
  if (arguments == nullptr) return {};
  const std::vector<Id>* const storage = tree_->persistent(arguments->front(), "").value();
  if (tree_->kind((*storage)[1]) != Kind::kName) return {};
  const PickleTree::Name name = tree_->name((*storage)[1], "").value();
  for (const auto& [theirs, ours] : kStorages) {
    if (name.module == "torch" && name.name == theirs) return std::string(ours);
  }
  return {};
}

int64_t TorchValues::storage_elems(Id id) const {
  const std::vector<Id>* const arguments = tensor_arguments(id);
  if (arguments == nullptr) return -1;
  return integer((*tree_->persistent(arguments->front(), "").value())[4]).value_or(-1);
}

std::string TorchValues::storage_key(Id id) const {
  const std::vector<Id>* const arguments = tensor_arguments(id);
  if (arguments == nullptr) return {};
  const std::vector<Id>* const storage = tree_->persistent(arguments->front(), "").value();
  return fmt::format("{}+{}", text((*storage)[2]), integer((*arguments)[1]).value_or(-1));
}

Result<TorchTensor> TorchValues::tensor(Id id, std::string_view what) const {
  const std::string place = fmt::format("{}: {}", archive_.path().string(), what);
  const auto corrupt = [&](std::string message) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: {}", place, message)};
  };
  const std::vector<Id>* const arguments = tensor_arguments(id);
  if (arguments == nullptr) return corrupt("is missing or no tensor");
  TorchTensor out;
  out.dtype = dtype_of(id);
  if (out.dtype.empty()) return corrupt("its elements are of a dtype that is not known here");
  const std::vector<Id>* const storage = tree_->persistent(arguments->front(), place).value();
  RT_TRY_SET(const std::string_view key, tree_->string((*storage)[2], place));
  RT_TRY_SET(const int64_t stored, tree_->integer((*storage)[4], place));
  RT_TRY_SET(const int64_t first, tree_->integer((*arguments)[1], place));
  RT_TRY_SET(out.shape, tree_->shape((*arguments)[2], place));
  RT_TRY_SET(const Shape strides, tree_->shape((*arguments)[3], place));
  const ZipEntry* const entry = archive_.storage(key);
  if (entry == nullptr) return corrupt(fmt::format("its storage \"{}\" is missing", printable(key)));
  const int64_t elem = safetensors_dtype_bits(out.dtype) / 8;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(stored, elem, &bytes) || bytes != entry->bytes) {
    return corrupt(
        fmt::format("its storage has {} bytes, expected {} elements of {}", entry->bytes, stored, out.dtype));
  }
  if (strides.size() != out.shape.size()) return corrupt("it has another number of sizes than of strides");
  out.elems = 1;
  for (const int64_t extent : out.shape) {
    if (__builtin_mul_overflow(out.elems, extent, &out.elems)) return corrupt("its sizes are beyond 64 bits");
  }
  if (first < 0 || first > stored || out.elems > stored - first) {
    return corrupt(fmt::format("elements [{}, +{}) are not in its storage of {}", first, out.elems, stored));
  }
  if (out.elems > 0 && !is_dense(out.shape, strides)) {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{}: is a strided view of its storage; save it after contiguous()", place)};
  }
  out.offset = entry->offset + first * elem;
  return out;
}

std::optional<double> TorchValues::number(Id id) const {
  if (id == kNothing) return std::nullopt;
  if (tree_->kind(id) == Kind::kInt || tree_->kind(id) == Kind::kFloat) return tree_->number(id, "").value();
  const Result<TorchTensor> one = tensor(id, "a number");
  if (!one.ok() || one.value().elems != 1) return std::nullopt;
  const std::string& dtype = one.value().dtype;
  const size_t bytes = dtype == "F64" || dtype == "I64" ? 8 : dtype == "F32" || dtype == "I32" ? 4 : 0;
  char raw[8];
  if (bytes == 0 || !archive_.read_at(one.value().offset, std::span(raw, bytes)).ok()) return std::nullopt;
  const double out = dtype == "F64"   ? number_of<double>(raw)
                     : dtype == "I64" ? number_of<int64_t>(raw)
                     : dtype == "F32" ? number_of<float>(raw)
                                      : number_of<int32_t>(raw);
  return std::isfinite(out) ? std::optional(out) : std::nullopt;
}

nlohmann::json TorchValues::json(Id id, int64_t* left_out) const {
  int64_t values = 0;
  return json(id, 0, &values, left_out);
}

nlohmann::json TorchValues::json(Id id, int depth, int64_t* values, int64_t* left_out) const {
  const nlohmann::json none(nlohmann::json::value_t::discarded);
  if (id == kNothing || depth > kMaxJsonDepth || ++*values > kMaxJsonValues) {
    ++*left_out;
    return none;
  }
  switch (tree_->kind(id)) {
    case Kind::kNone:
      return nullptr;
    case Kind::kBool:
      return tree_->boolean(id, "").value();
    case Kind::kInt:
      return *integer(id);
    case Kind::kFloat: {
      const double found = tree_->number(id, "").value();
      return std::isfinite(found) ? nlohmann::json(found) : nlohmann::json(nullptr);
    }
    case Kind::kString:
      return printable(tree_->string(id, "").value());
    case Kind::kTuple:
    case Kind::kList: {
      nlohmann::json out = nlohmann::json::array();
      for (const Id item : *items(id)) {
        nlohmann::json value = json(item, depth + 1, values, left_out);
        if (!value.is_discarded()) out.push_back(std::move(value));
      }
      return out;
    }
    case Kind::kDict: {
      nlohmann::json out = nlohmann::json::object();
      for (const auto& [key, value] : *dict(id)) {
        const std::string name = integer(key) ? fmt::format("{}", *integer(key)) : printable(text(key));
        nlohmann::json found = json(value, depth + 1, values, left_out);
        if (!name.empty() && !found.is_discarded()) out[name] = std::move(found);
      }
      return out;
    }
    default:
      ++*left_out;
      return none;
  }
}

}  // namespace cairn::convert
