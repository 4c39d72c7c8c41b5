#include "converters/dual_file.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "ckpt/persist/hdf5_file.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/core/random.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::convert;
namespace fs = std::filesystem;

namespace {

std::vector<std::byte> contents_of(const DualTensor& tensor) {
  std::vector<std::byte> out(static_cast<size_t>(count_elems(tensor.shape) * dtype_size_bytes(tensor.dtype)));
  for (size_t k = 0; k < out.size(); ++k) out[k] = static_cast<std::byte>(mix64(stream_key(3, tensor.name) + k));
  return out;
}

}  // namespace

TEST_SUITE("converters/dual_file") {
  TEST_CASE("one file reads as safetensors and as HDF5, tensors of any size between HDF5's own bytes") {
    const cairn::testing::TempDir dir("dual");
    const fs::path path = dir.path / "model.safetensors";
    const std::vector<DualTensor> tensors = {{"a.weight", "", DType::kF32, {100, 333}},
                                             {"b", "other", DType::kBf16, {7}},
                                             {"scalar", "", DType::kF32, {}},
                                             {"large", "", DType::kU8, {(int64_t{9} << 20) + 5}},
                                             {"d", "", DType::kF16, {64, 2, 16}}};
    const Result<DualReport> report =
        write_dual(path, tensors, {{"format", "pt"}}, 12, [&](size_t k, const ByteSink& sink) -> Status {
          const std::vector<std::byte> bytes = contents_of(tensors[k]);
          const size_t cut = bytes.size() / 3;  // in pieces
          RT_TRY(sink(bytes.data(), static_cast<int64_t>(cut)));
          return sink(bytes.data() + cut, static_cast<int64_t>(bytes.size() - cut));
        });
    REQUIRE_OK(report);
    CHECK(static_cast<int64_t>(fs::file_size(path)) == report.value().file_bytes);
    CHECK(std::distance(fs::directory_iterator(dir.path), fs::directory_iterator()) == 1);  // nothing temporary stays

    const SafetensorsFile file = SafetensorsFile::open(path).value();  // refuses holes and overlaps
    REQUIRE(file.header().tensors.size() == tensors.size());
    CHECK(file.header().data_offset == report.value().user_block_bytes);
    CHECK(file.header().metadata.at("format") == "pt");
    ckpt::PosixBackend io;
    const std::unique_ptr<ckpt::IoFile> h5 = io.open(path).value();
    for (const DualTensor& tensor : tensors) {
      CAPTURE(tensor.name);
      const std::vector<std::byte> wanted = contents_of(tensor);
      const auto found = std::find_if(file.header().tensors.begin(), file.header().tensors.end(),
                                      [&](const SafeTensor& t) { return t.name == tensor.name; });
      REQUIRE(found != file.header().tensors.end());
      CHECK(found->shape == tensor.shape);
      std::vector<std::byte> bytes(wanted.size());
      REQUIRE(file.read(*found, 0, static_cast<int64_t>(bytes.size()), bytes.data()).ok());
      CHECK((bytes == wanted));
      const std::string dataset =
          ckpt::dataset_path({tensor.dataset.empty() ? tensor.name : tensor.dataset, "weight", tensor.dtype, {}},
                             Box::whole(tensor.shape));
      const auto place = ckpt::find_datasets(*h5, std::span(&dataset, 1));
      REQUIRE_OK(place);
      CHECK(place.value()[0].offset == file.header().data_offset + found->begin);
      CHECK(place.value()[0].bytes == static_cast<int64_t>(wanted.size()));
    }
  }

  TEST_CASE("many long names still fit the header that was foreseen") {
    const cairn::testing::TempDir dir("dual-many");
    std::vector<DualTensor> tensors;
    for (int k = 0; k < 700; ++k)
      tensors.push_back({std::string(120, 'n') + std::to_string(k), "", DType::kF32, {1 + k % 1100, 2}});
    const Result<DualReport> report =
        write_dual(dir.path / "m", tensors, {}, 0, [&](size_t k, const ByteSink& sink) -> Status {
          const std::vector<std::byte> bytes = contents_of(tensors[k]);
          return sink(bytes.data(), static_cast<int64_t>(bytes.size()));
        });
    REQUIRE_OK(report);
    CHECK(SafetensorsFile::open(dir.path / "m").value().header().tensors.size() == 700);
  }

  TEST_CASE("a dual file that cannot be written is refused, and nothing stays behind") {
    const cairn::testing::TempDir dir("dual-refused");
    const fs::path path = dir.path / "m";
    const auto refused = [&](const std::vector<DualTensor>& tensors, const std::string& words, int64_t bytes) {
      const Result<DualReport> report = write_dual(path, tensors, {}, 0, [&](size_t, const ByteSink& sink) -> Status {
        const std::vector<std::byte> some(static_cast<size_t>(bytes));
        return sink(some.data(), bytes);
      });
      REQUIRE_MESSAGE(!report.ok(), words);
      CHECK_MESSAGE(report.error().message.find(words) != std::string::npos, report.error().message);
      CHECK(fs::is_empty(dir.path));
    };
    refused({{"a", "", DType::kF32, {4}}, {"a", "b", DType::kF32, {4}}}, "a is there twice", 16);
    refused({{"a/b", "", DType::kF32, {4}}}, "cannot be a dataset's name", 16);
    refused({{"__hdf5__.0", "", DType::kF32, {4}}}, "cannot be a tensor's name", 16);
    refused({{"a", "", DType::kF32, {4, 0}}}, "has no elements", 0);
    refused({{"a", "", DType::kF32, {4}}}, "more than 16 bytes", 17);
    refused({{"a", "", DType::kF32, {4}}}, "fewer bytes than its shape has", 15);
  }
}
