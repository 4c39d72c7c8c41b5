// The structure kept between saves against what libhdf5 writes itself, byte for byte.
#include "ckpt/persist/layout.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstring>

#include "ckpt/persist/hdf5_file.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

struct FileShards {
  Manifest manifest;
  std::vector<ShardEntry> shards;
};

// Each tensor cut along its first dim, with hashes that are a function of the seed.
FileShards file_of(const std::vector<TensorSpec>& specs, int64_t chunk_bytes, int64_t step, uint64_t seed) {
  FileShards out;
  out.manifest.step = step;
  uint64_t next = seed << 32;
  for (const TensorSpec& spec : specs) {
    const auto index = static_cast<int64_t>(out.manifest.tensors.size());
    out.manifest.tensors.push_back({spec.name, spec.kind, spec.dtype, spec.shape});
    for (int64_t c = 0; c < spec.cuts; ++c) {
      ShardEntry shard;
      shard.tensor = index;
      shard.box = Box::whole(spec.shape);
      if (!spec.shape.empty()) {
        shard.box.lo[0] = spec.shape[0] * c / spec.cuts;
        shard.box.hi[0] = spec.shape[0] * (c + 1) / spec.cuts;
      }
      shard.bytes = shard.box.count_elems() * dtype_size_bytes(spec.dtype);
      shard.chunk_bytes = chunk_bytes;
      shard.hashes.resize(static_cast<size_t>((shard.bytes + chunk_bytes - 1) / chunk_bytes));
      for (uint64_t& hash : shard.hashes) hash = mix64(next++);
      out.shards.push_back(std::move(shard));
    }
  }
  return out;
}

std::vector<std::byte> bytes_of(Hdf5Image& image) {
  std::vector<std::byte> out(static_cast<size_t>(image.eoa));
  REQUIRE(image.get(0, out).ok());
  return out;
}

std::vector<std::byte> by_libhdf5(const FileShards& file) {
  auto h5 = Hdf5Writer::create(file.manifest.step, static_cast<int64_t>(file.shards.size())).value();
  for (const ShardEntry& shard : file.shards)
    REQUIRE(h5->place(file.manifest.tensors[static_cast<size_t>(shard.tensor)], shard.box).ok());
  for (size_t i = 0; i < file.shards.size(); ++i)
    REQUIRE(h5->set_hashes(static_cast<int64_t>(i), file.shards[i].chunk_bytes, file.shards[i].hashes).ok());
  REQUIRE(h5->finish().ok());
  return bytes_of(*h5->take_image());
}

std::vector<TensorSpec> many_specs() {
  std::vector<TensorSpec> specs = small_specs();
  for (int i = 0; i < 300; ++i) {
    specs.push_back({fmt::format("layers.{}.weight", i),
                     i % 3 == 0 ? "exp_avg" : "weight",
                     DType::kF32,
                     {2 + i * 37 % 91, 64},
                     1 + i % 2});
  }
  specs.push_back({"large", "weight", DType::kF32, {900, 1024}, 2});
  return specs;
}

}  // namespace

TEST_SUITE("ckpt/persist/layout") {
  TEST_CASE("a patched structure is what libhdf5 writes, for one save after the other") {
    for (const auto& specs : {small_specs(), many_specs(), std::vector<TensorSpec>{}}) {
      for (const int64_t chunk_bytes : {int64_t{4096}, int64_t{1} << 20}) {
        CAPTURE(specs.size());
        CAPTURE(chunk_bytes);
        const FileShards first = file_of(specs, chunk_bytes, 7, 1);
        auto layout = FileLayout::make(first.manifest, first.shards).value();
        REQUIRE(layout->patchable());
        CHECK(layout->offsets().size() == first.shards.size());
        for (const auto& [step, seed] : {std::pair<int64_t, uint64_t>{7, 1}, {123456789012345, 2}, {0, 3}}) {
          const FileShards file = file_of(specs, chunk_bytes, step, seed);
          REQUIRE(layout->fill_in(file.manifest, file.shards).ok());
          CHECK((bytes_of(layout->image()) == by_libhdf5(file)));
        }
      }
    }
  }

  TEST_CASE("hash arrays too large for an object header are patched where HDF5 put them") {
    for (const int64_t rows : {int64_t{8190}, int64_t{8191}, int64_t{8192}, int64_t{10'000}, int64_t{70'001}}) {
      CAPTURE(rows);
      std::vector<TensorSpec> specs = small_specs();
      specs.push_back({"big", "weight", DType::kF32, {rows, 1024}, 1});
      specs.push_back({"other", "weight", DType::kF32, {12'000, 1024}, 1});
      const FileShards first = file_of(specs, 4096, 7, 1);
      auto layout = FileLayout::make(first.manifest, first.shards).value();
      CHECK(layout->patchable());
      for (const auto& [step, seed] : {std::pair<int64_t, uint64_t>{7, 1}, {123456789012345, 2}}) {
        const FileShards file = file_of(specs, 4096, step, seed);
        REQUIRE(layout->fill_in(file.manifest, file.shards).ok());
        const std::vector<std::byte> patched = bytes_of(layout->image()), written = by_libhdf5(file);
        REQUIRE(patched.size() == written.size());
        CHECK(std::memcmp(patched.data(), written.data(), patched.size()) == 0);
      }
    }
  }

  TEST_CASE("lookup3 is the one that libhdf5 stores: the superblock of an empty file") {
    const std::vector<std::byte> file = by_libhdf5(file_of({}, 4096, 7, 1));
    uint32_t stored = 0;
    std::memcpy(&stored, file.data() + 44, 4);
    CHECK(lookup3(std::span(file).first(44)) == stored);
    CHECK(lookup3({}) == 0xdeadbeef);  // known: no bytes, initial value 0
  }

  TEST_CASE("a cache gives what it has for the same shards only, and saves with it are byte for byte the same") {
    SaveCache cache;
    SaveOptions options = small_options();
    options.cache = &cache;
    REQUIRE(prepare_layouts(make_state(1, 1).skeleton, make_state(1, 1).parts, options).ok());
    CHECK(cache.hits() == 0);
    CHECK(cache.memory_bytes() > 0);
    std::vector<TensorSpec> other = small_specs();
    other[3].shape = {96, 52};
    std::vector<TensorSpec> recast = small_specs();
    recast[2].dtype = DType::kF16;
    std::vector<TensorSpec> recut = small_specs();
    recut[4].cuts = 3;
    int64_t hits = 0, step = 1;
    const auto same = [&](const TestState& state, bool cached, int64_t chunk_bytes = 4096) {
      options.chunk_bytes = chunk_bytes;
      SaveOptions plain = options;
      plain.cache = nullptr;
      MemoryBackend with, without;
      REQUIRE(save(with, "/ck", state, options).ok());
      REQUIRE(save(without, "/ck", state, plain).ok());
      const auto name = std::filesystem::path("/ck") / step_dir_name(state.skeleton.step);
      const std::vector<DirEntry> entries = without.list(name).value();
      CHECK(entries.size() == 4);  // two of shards, the table, the manifest
      for (const DirEntry& entry : entries)
        CHECK((with.bytes_of(name / entry.name) == without.bytes_of(name / entry.name)));
      CHECK(verify_checkpoint(with, name).value().whole());
      if (cached) hits += 2;  // two files
      CHECK(cache.hits() == hits);
    };
    same(make_state(step++, 1), true);
    same(make_state(step++, 2), true);
    same(make_state(step++, 3, 2, other), false);
    same(make_state(step++, 4, 2, other), true);
    same(make_state(step++, 5, 2, recast), false);
    same(make_state(step++, 6, 2, recut), false);
    same(make_state(step++, 7, 2, recut), true);
    same(make_state(step++, 8, 2, recut), false, 8192);
  }
}
