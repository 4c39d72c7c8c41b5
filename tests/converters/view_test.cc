// A view gives the bytes that an export writes, at any range, and checks what it reads.
#include "converters/hf_view.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <atomic>
#include <fstream>
#include <map>
#include <random>
#include <thread>

#include "ckpt/format/names.h"
#include "tests/converters/fixtures.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

constexpr int64_t kBlock = 1000;  // a multiple of 8 that no chunk ends with

std::map<std::string, std::string> contents(const fs::path& dir) {
  std::map<std::string, std::string> out;
  for (const auto& entry : fs::directory_iterator(dir)) out[entry.path().filename()] = slurp(entry.path());
  return out;
}

std::string bytes_of(const HfView& view, const ViewFile& file) {
  if (file.weights < 0) return file.text;
  std::string out;
  for (int64_t block = 0; block * kBlock < file.bytes; ++block) {
    const auto bytes = view.block(file.weights, block);
    REQUIRE_OK(bytes);
    out.append(reinterpret_cast<const char*>(bytes.value().data()), bytes.value().size());
  }
  return out;
}

std::shared_ptr<const HfView> view_of(ckpt::IoBackend& io, const fs::path& checkpoint, const ExportOptions& options) {
  auto view = HfView::open(io, checkpoint, "out", {.of = options, .block_bytes = kBlock}, decode);
  REQUIRE_OK(view);
  return std::move(view).value();
}

}  // namespace

TEST_SUITE("converters/hf_view") {
  TEST_CASE("a view of each family has the files of an export, byte for byte") {
    const TempDir temp;
    ckpt::PosixBackend io;
    for (const std::string& name : all_fixtures()) {
      CAPTURE(name);
      const auto imported = import_hf(io, golden(name), temp / name, {}, encode);
      REQUIRE_OK(imported);
      for (const ExportOptions& options :
           {ExportOptions{}, ExportOptions{.dtype = DType::kBf16, .max_shard_bytes = 20000}}) {
        REQUIRE_OK(export_hf(io, imported.value().dir, temp / "out", options, decode));
        const std::shared_ptr<const HfView> view = view_of(io, imported.value().dir, options);
        const auto expected = contents(temp / "out");
        CHECK(view->files().size() == expected.size());
        for (const auto& [file, text] : expected) {
          CAPTURE(file);
          REQUIRE(view->find(file) != nullptr);
          CHECK(view->find(file)->bytes == std::ssize(text));
          CHECK((bytes_of(*view, *view->find(file)) == text));
        }
        fs::remove_all(temp / "out");
      }
    }
  }

  TEST_CASE("a block that several threads ask for is made once, and the oldest is forgotten") {
    const TempDir temp;
    ckpt::PosixBackend io;
    const auto imported = import_hf(io, golden("hf-gpt2-tied"), temp / "in", {}, encode);
    REQUIRE_OK(imported);
    const std::shared_ptr<const HfView> view = view_of(io, imported.value().dir, {});
    const ViewFile& file = *view->find("model.safetensors");
    const std::string expected = bytes_of(*view, file);
    BlockStore store(10 * kBlock);
    std::atomic<int64_t> wrong{0};
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 8; ++seed) {
      threads.emplace_back([&, seed] {
        std::mt19937 draw(seed);
        for (int k = 0; k < 300; ++k) {
          const auto block = static_cast<int64_t>(draw() % static_cast<unsigned>((file.bytes + kBlock - 1) / kBlock));
          const auto bytes = store.get(view, file.weights, block);
          const std::string_view text =
              bytes.ok() ? std::string_view(reinterpret_cast<const char*>(bytes.value()->data()), bytes.value()->size())
                         : std::string_view();
          wrong += text != std::string_view(expected).substr(static_cast<size_t>(block * kBlock), kBlock);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    const auto kept = [&] {
      int64_t out = 0;
      for (int64_t block = 0; block * kBlock < file.bytes; ++block) out += store.has(view->id(), file.weights, block);
      return out;
    };
    CHECK(kept() >= 10);
    CHECK(kept() <= 11);  // with a short one
    store.forget(view->id());
    CHECK(kept() == 0);
  }

  TEST_CASE("a chunk that was damaged is an error that names it, and no bytes") {
    const TempDir temp;
    ckpt::PosixBackend io;
    const auto imported = import_hf(io, golden("hf-llama-tied-bias"), temp / "in", {}, encode);
    REQUIRE_OK(imported);
    const std::shared_ptr<const HfView> view = view_of(io, imported.value().dir, {});
    const fs::path shard = imported.value().dir / ckpt::shard_file_name(0, 1);
    {
      std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(static_cast<std::streamoff>(fs::file_size(shard) / 2));
      file.put('\x5a');
    }
    const ViewFile& file = *view->find("model.safetensors");
    int64_t bad = 0;
    for (int64_t block = 0; block * kBlock < file.bytes; ++block) {
      const auto bytes = view->block(file.weights, block);
      if (bytes.ok()) continue;
      ++bad;
      CHECK(bytes.error().code == ErrorCode::kCorrupt);
      CHECK(bytes.error().message.find("chunk") != std::string::npos);
    }
    CHECK(bad > 0);
  }
}
