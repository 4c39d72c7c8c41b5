#include "converters/foreign_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "converters/elements.h"
#include "converters/foreign_file.h"
#include "converters/safetensors.h"
#include "converters/torch_archive.h"

namespace cairn::convert {
namespace {

constexpr int64_t kBlockElems = int64_t{1} << 18;

/// Whether `word` is a NaN of a dtype of `bits` bits, `fraction` of them fraction.
bool is_nan(uint64_t word, int bits, int fraction) {
  const uint64_t exponent = ((uint64_t{1} << (bits - 1 - fraction)) - 1) << fraction;
  return (word & exponent) == exponent && (word & ((uint64_t{1} << fraction) - 1)) != 0;
}

struct Differences {
  int64_t count = 0, first = -1;
};

template <class Word>
void compare(const std::byte* a, const std::byte* b, int64_t count, int fraction, int64_t before, Differences* out) {
  constexpr int kBits = sizeof(Word) * 8;
  for (int64_t k = 0; k < count; ++k) {
    Word x, y;
    std::memcpy(&x, a + k * sizeof(Word), sizeof(Word));
    std::memcpy(&y, b + k * sizeof(Word), sizeof(Word));
    if (x == y || (is_nan(x, kBits, fraction) && is_nan(y, kBits, fraction))) continue;
    if (out->first < 0) out->first = before + k;
    ++out->count;
  }
}

}  // namespace

Status verify_archives(const ForeignState& state) {
  std::filesystem::path last;
  std::shared_ptr<const Fd> fd;  // of it
  for (const auto& [path, begin, bytes] : state.archives) {
    if (bytes >= 0 && last != path) {
      RT_TRY_SET(ForeignFile file, open_foreign(path));
      fd = std::make_shared<const Fd>(std::move(file.fd));
      last = path;
    }
    RT_TRY_SET(const TorchArchive archive,
               bytes < 0 ? TorchArchive::open(path) : TorchArchive::open_part(fd, path, begin, bytes));
    const Status whole = archive.verify();
    if (whole.ok() || whole.error().code != ErrorCode::kCorrupt) {
      RT_TRY(whole);
      continue;
    }
    return Error{ErrorCode::kCorrupt, whole.error().message + "\n  copy the file here again, or save again"};
  }
  return {};
}

Status check_masters(const ForeignState& state) {
  if (state.model_copy == nullptr) return {};
  std::vector<float> masters(kBlockElems);
  std::vector<std::byte> stored(kBlockElems * sizeof(float)), copy(kBlockElems * sizeof(float)),
      rounded(kBlockElems * sizeof(float));
  for (const SafeTensor& master : state.weights->tensors()) {
    const SafeTensor* const model = state.model_copy->find(master.name);
    if (model == nullptr) continue;  // buffers are not trained, aliases have no master
    const std::string place = fmt::format("{}: {}", state.about.folder.string(), master.name);
    RT_TRY_SET(const DType dtype, safetensors_dtype(model->dtype).with(place));
    if (model->shape != master.shape) {
      return Error{ErrorCode::kCorrupt, fmt::format("{}: the master is {}, the model's weight {}", place,
                                                    to_string(master.shape), to_string(model->shape))};
    }
    const int64_t elems = count_elems(master.shape), from = safetensors_dtype_bits(master.dtype) / 8,
                  to = safetensors_dtype_bits(model->dtype) / 8;
    Differences found;
    for (int64_t at = 0; at < elems; at += kBlockElems) {
      const int64_t count = std::min(kBlockElems, elems - at);
      RT_TRY(state.weights->read(master, at * from, count * from, stored.data()));
      RT_TRY(state.model_copy->read(*model, at * to, count * to, copy.data()));
      to_floats(master.dtype, stored.data(), count, masters.data());
      from_floats(dtype, std::span(masters).first(static_cast<size_t>(count)), rounded.data());
      switch (dtype) {
        case DType::kBf16:
          compare<uint16_t>(rounded.data(), copy.data(), count, 7, at, &found);
          break;
        case DType::kF16:
          compare<uint16_t>(rounded.data(), copy.data(), count, 10, at, &found);
          break;
        default:
          compare<uint32_t>(rounded.data(), copy.data(), count, 23, at, &found);
      }
    }
    if (found.count == 0) continue;
    return Error{
        ErrorCode::kCorrupt,
        fmt::format("{} does not round to the model's weight: {} of {} elements differ, the first is {}\n"
                    "  expected every float master to round to the {} weight of the same save: the optimizer's files "
                    "are of another step, of other ranks, or shifted by the program that wrote them\n"
                    "  copy the files of one save here; `cairn import --weights-only` takes the model's weights",
                    place, found.count, elems, found.first, model->dtype)};
  }
  return {};
}

}  // namespace cairn::convert
