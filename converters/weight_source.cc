#include "converters/weight_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "ckpt/plan/save_plan.h"
#include "ckpt/tensors/planned_range.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

std::string_view kind_of(WeightsOf which) {
  switch (which) {
    case WeightsOf::kAverage:
      return ckpt::kEmaKind;
    case WeightsOf::kFirstMoment:
      return ckpt::kStateKinds[1];
    case WeightsOf::kSecondMoment:
      return ckpt::kStateKinds[2];
    default:
      return ckpt::kWeightKind;
  }
}

}  // namespace

void copy_box_out(const float* whole, const Shape& shape, const Box& box, float* dense) {
  if (box.empty()) return;
  const int64_t run = box.extent(box.dims() - 1);  // contiguous in both
  std::vector<int64_t> at = box.lo;
  while (true) {
    std::memcpy(dense, whole + flat_offset(shape, at), run * sizeof(float));
    dense += run;
    int64_t d = box.dims() - 2;
    for (; d >= 0; --d) {
      if (++at[d] < box.hi[d]) break;
      at[d] = box.lo[d];
    }
    if (d < 0) return;
  }
}

Result<std::unique_ptr<CheckpointWeights>> CheckpointWeights::open(ckpt::IoBackend& io,
                                                                   const std::filesystem::path& dir,
                                                                   const RecipeDecoder& decode, WeightsOf which) {
  RT_TRY_SET(ckpt::CheckpointReader reader, ckpt::CheckpointReader::open(io, dir));
  std::unique_ptr<CheckpointWeights> out(new CheckpointWeights());
  out->reader_ = std::make_unique<ckpt::CheckpointReader>(std::move(reader));
  out->kind_ = kind_of(which);
  const ckpt::Manifest& manifest = out->manifest();
  if (which == WeightsOf::kAverage && std::none_of(manifest.tensors.begin(), manifest.tensors.end(),
                                                   [](const auto& entry) { return entry.kind == ckpt::kEmaKind; })) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("{}: holds no average of its weights; a recipe with optimizer.ema keeps one", dir.string())};
  }
  Result<Recipe> recipe = decode(manifest.recipe);
  if (!recipe.ok()) return std::move(recipe).error().with(fmt::format("{}: its recipe", dir.string()));
  out->recipe_ = std::move(recipe).value();
  out->tensors_ = model_tensors(out->recipe_.model);

  std::map<std::string_view, int64_t> stored;
  for (size_t k = 0; k < manifest.tensors.size(); ++k) {
    if (manifest.tensors[k].kind == out->kind_) stored[manifest.tensors[k].name] = static_cast<int64_t>(k);
  }
  std::string problems;
  for (size_t k = 0; k < out->tensors_.size(); ++k) {
    const TensorSpec& spec = out->tensors_[k];
    const auto found = stored.find(spec.name);
    if (found == stored.end()) {
      problems += fmt::format("\n  {} {}: missing", spec.name, to_string(spec.shape));
      continue;
    }
    const ckpt::TensorEntry& entry = manifest.tensors[found->second];
    if (entry.shape != spec.shape || entry.dtype != DType::kF32) {
      problems += fmt::format("\n  {}: found {} {}, the recipe's model has f32 {}", spec.name, dtype_name(entry.dtype),
                              to_string(entry.shape), to_string(spec.shape));
    }
  }
  if (!problems.empty()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: its weights are not those of its recipe:{}", dir.string(), problems)};
  }
  out->planner_ = std::make_unique<ckpt::LoadPlanner>(manifest);
  return out;
}

Status CheckpointWeights::read_box(int64_t tensor, const Box& box, std::span<float> out) const {
  const TensorSpec& spec = tensors_[tensor];
  RT_CHECK(static_cast<int64_t>(out.size()) == box.count_elems(), "{}: {} floats", spec.name, out.size());
  const ckpt::WantedBox wanted{kind_, spec.name, box};
  RT_TRY_SET(const std::vector<ckpt::LoadRead> reads, planner_->plan_reads(std::span(&wanted, 1)));
  return run(reads, reinterpret_cast<std::byte*>(out.data()));
}

Status CheckpointWeights::run(std::span<const ckpt::LoadRead> reads, std::byte* into) const {
  std::vector<ckpt::ReadRange> ranges;
  ranges.reserve(reads.size());
  for (const ckpt::LoadRead& read : reads) ranges.push_back(ckpt::range_of(read, into));
  return reader_->read_ranges(ranges);
}

std::vector<std::string> CheckpointWeights::files() const {
  std::vector<std::string> out;
  for (const ckpt::TensorEntry& entry : manifest().tensors) {
    if (entry.kind == kFileKind && entry.dtype == DType::kU8 && entry.shape.size() == 1) out.push_back(entry.name);
  }
  return out;
}

Result<std::string> CheckpointWeights::file(std::string_view name) const {
  const int64_t index = planner_->find(kFileKind, name);
  if (index >= 0) {
    const ckpt::TensorEntry& entry = manifest().tensors[index];
    if (entry.dtype == DType::kU8 && entry.shape.size() == 1) {
      const ckpt::WantedBox wanted{kFileKind, name, Box::whole(entry.shape)};
      RT_TRY_SET(const std::vector<ckpt::LoadRead> reads, planner_->plan_reads(std::span(&wanted, 1)));
      std::string out(static_cast<size_t>(entry.shape[0]), '\0');
      RT_TRY(run(reads, reinterpret_cast<std::byte*>(out.data())));
      return out;
    }
  }
  return Error{ErrorCode::kInvalidInput, fmt::format("the checkpoint keeps no file {}", name)};
}

std::vector<std::string> CheckpointWeights::empty_files() const {
  const auto state = json_or_nothing(manifest().state);
  const auto pointer = nlohmann::json::json_pointer("/imported/empty_files");
  std::vector<std::string> out;
  if (!state.is_object() || !state.contains(pointer) || !state[pointer].is_array()) return out;
  for (const auto& name : state[pointer]) {
    if (name.is_string()) out.push_back(name.get<std::string>());
  }
  return out;
}

std::optional<DType> CheckpointWeights::imported_dtype() const {
  if (manifest().step != 0) return std::nullopt;
  const auto state = json_or_nothing(manifest().state);
  const auto pointer = nlohmann::json::json_pointer("/imported/dtype");
  if (!state.is_object() || !state.contains(pointer) || !state[pointer].is_string()) return std::nullopt;
  const Result<DType> dtype = parse_dtype(state[pointer].get<std::string>());
  return dtype.ok() ? std::optional<DType>(dtype.value()) : std::nullopt;
}

std::map<std::string, DType> CheckpointWeights::imported_dtypes() const {
  std::map<std::string, DType> out;
  if (manifest().step != 0) return out;
  const auto state = json_or_nothing(manifest().state);
  const auto pointer = nlohmann::json::json_pointer("/imported/dtypes");
  if (!state.is_object() || !state.contains(pointer) || !state[pointer].is_object()) return out;
  for (const auto& [name, value] : state[pointer].items()) {
    if (!value.is_string()) continue;
    if (const Result<DType> dtype = parse_dtype(value.get<std::string>()); dtype.ok()) out[name] = dtype.value();
  }
  return out;
}

}  // namespace cairn::convert
