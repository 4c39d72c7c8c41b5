#include "runtime/data/merge.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "runtime/data/document_origins.h"
#include "runtime/data/loss_spans.h"
#include "runtime/data/megatron_writer.h"
#include "runtime/data/set_origin.h"
#include "runtime/data/token_file.h"
#include "tests/runtime/data/scratch.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::data;

namespace {

using Documents = std::vector<std::vector<int32_t>>;

/// With a span for each of `spans`' documents where there are some.
void write_set(const std::string& prefix, const Documents& documents, DType dtype = DType::kU16,
               const std::vector<std::vector<LossSpan>>& spans = {}) {
  auto writer = MegatronWriter::create(prefix, dtype, {true});
  REQUIRE_OK(writer);
  for (const std::vector<int32_t>& ids : documents) {
    REQUIRE_OK(writer.value().add(ids));
    REQUIRE_OK(writer.value().end_document());
  }
  REQUIRE_OK(writer.value().finish([&]() -> Status {
    if (spans.empty()) return {};
    RT_TRY_SET(LossWriter loss, LossWriter::create(prefix));
    for (const std::vector<LossSpan>& one : spans) RT_TRY(loss.add_document(one));
    return loss.publish(writer.value().tokens());
  }));
}

Documents documents_of(const std::string& prefix) {
  auto source = open_megatron(prefix);
  REQUIRE_OK(source);
  Documents out;
  for (int64_t k = 0; k < source.value()->sequence_count(); ++k) {
    const auto starts = source.value()->sequence_starts(k, 1).value();
    out.emplace_back(static_cast<size_t>(starts[1] - starts[0]));
    REQUIRE_OK(source.value()->read(starts[0], starts[1] - starts[0], out.back().data()));
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/data/merge") {
  TEST_CASE("merged sets hold every document and its spans in order, over the borders of blocks") {
    const TempDir dir;
    Documents all;
    std::vector<std::vector<LossSpan>> spans;
    std::vector<std::string> prefixes;
    int32_t next = 0;
    for (const int count : {5000, 1, 9000}) {  // a block has 4096 documents
      Documents part;
      std::vector<std::vector<LossSpan>> part_spans;
      for (int k = 0; k < count; ++k) {
        std::vector<int32_t> ids(static_cast<size_t>(1 + next % 7));
        for (int32_t& id : ids) id = next++ % 60000;
        part_spans.emplace_back();
        if (next % 3 != 0) part_spans.back().push_back({0, 1});
        if (ids.size() > 3) part_spans.back().push_back({2, 4});
        part.push_back(std::move(ids));
      }
      prefixes.push_back(dir / fmt::format("part-{}", prefixes.size()));
      write_set(prefixes.back(), part, DType::kU16, part_spans);
      all.insert(all.end(), part.begin(), part.end());
      spans.insert(spans.end(), part_spans.begin(), part_spans.end());
    }
    write_set(dir / "expected", all, DType::kU16, spans);
    const auto merged = merge_sets(prefixes, dir / "out", false);
    REQUIRE_OK(merged);
    CHECK(merged.value().documents == std::ssize(all));
    CHECK(merged.value().unknown == prefixes);
    for (const char* suffix : {".bin", ".idx", ".loss"}) {
      CAPTURE(suffix);
      CHECK((read_file((dir / "out").string() + suffix) == read_file((dir / "expected").string() + suffix)));
    }
    CHECK((documents_of(dir / "out") == all));
    CHECK_FALSE(std::filesystem::exists(origin_path(dir / "out")));  // nothing is known of the parts
  }

  TEST_CASE("a merged set knows the file and byte of each document where all of its parts do") {
    const TempDir dir;
    write_set(dir / "a", Documents(5000, {1, 2}));
    write_set(dir / "b", {{3}, {4}});
    const auto write_origins = [&](const char* name, const std::vector<OriginFile>& files,
                                   const std::vector<DocumentOrigin>& origins, int64_t tokens) {
      auto writer = OriginWriter::create(dir / name);
      REQUIRE_OK(writer);
      for (const DocumentOrigin& one : origins) REQUIRE(writer.value().add_document(one).ok());
      REQUIRE(writer.value().publish(files, tokens).ok());
    };
    const std::vector<std::string> prefixes = {dir / "a", dir / "b", dir / "a"};
    std::vector<DocumentOrigin> of_a, expected;
    for (uint64_t k = 0; k < 5000; ++k) of_a.push_back({static_cast<uint32_t>(k % 2), k * k});
    write_origins("a", {{"x", Packing::kNone}, {"y", Packing::kZstd}}, of_a, 10000);
    REQUIRE(merge_sets(prefixes, dir / "some", false).ok());
    CHECK_FALSE(std::filesystem::exists(document_origins_path(dir / "some")));
    write_origins("b", {{"z", Packing::kGzip}}, {{0, 7}, {0, 9}}, 2);
    REQUIRE(merge_sets(prefixes, dir / "all", false).ok());
    const auto merged = DocumentOrigins::open(dir / "all", 10002, 20002);
    REQUIRE_OK(merged);
    REQUIRE(merged.value().has_value());
    CHECK(merged.value()->files() == std::vector<OriginFile>{{"x", Packing::kNone},
                                                             {"y", Packing::kZstd},
                                                             {"z", Packing::kGzip},
                                                             {"x", Packing::kNone},
                                                             {"y", Packing::kZstd}});
    expected = of_a;
    expected.insert(expected.end(), {{2, 7}, {2, 9}});
    for (const DocumentOrigin& one : of_a) expected.push_back({one.file + 3, one.byte});
    CHECK(merged.value()->read(0, 10002).value() == expected);
    CHECK(merged.value()->read(5000, 2).value() == std::vector<DocumentOrigin>{{2, 7}, {2, 9}});
  }

  TEST_CASE("sets that cannot be one are refused before anything is written") {
    const TempDir dir;
    write_set(dir / "a", {{1, 2}, {3}});
    write_set(dir / "wide", {{1, 2}}, DType::kI32);
    write_set(dir / "chat", {{1, 2}}, DType::kU16, {{{0, 1}}});
    const auto says_of = [&](std::vector<std::string> names, const char* out = "out") {
      for (std::string& name : names) name = dir / name;
      const auto refused = merge_sets(names, dir / out, true);
      CHECK_FALSE(std::filesystem::exists(dir / "out.bin.tmp"));
      return refused.ok() ? std::string("merged") : refused.error().message;
    };
    CHECK(says(says_of({"a", "wide"}), {"one has tokens of uint16, the other of int32", "T.blend"}));
    CHECK(says(says_of({"a", "chat"}), {"chat.loss says which tokens count"}));
    CHECK(says(says_of({"chat", "a"}), {"chat.loss says which tokens count"}));
    CHECK(says(says_of({"a"}), {"1 set to merge"}));
    CHECK(says(says_of({"a", "missing"}), {"missing"}));
    CHECK(says(says_of({"a", "a"}, "a"), {"is one of the sets that are merged"}));
    const std::string before = read_file(dir / "a.bin");
    SetOrigin origin{.tokenizer = "one.json", .tokenizer_hash = "1", .documents = 2, .tokens = 3};
    REQUIRE_OK(write_origin(dir / "a", origin));
    write_set(dir / "b", {{5}});
    origin = {.tokenizer = "two.json", .tokenizer_hash = "2", .documents = 1, .tokens = 1};
    REQUIRE_OK(write_origin(dir / "b", origin));
    CHECK(says(says_of({"a", "b"}), {"of the tokenizer one.json, the other of two.json"}));
    origin.tokens = 9;  // written for another pair of this name: it counts for nothing
    REQUIRE_OK(write_origin(dir / "b", origin));
    CHECK(says_of({"a", "b"}) == "merged");
    CHECK(documents_of(dir / "out") == Documents{{1, 2}, {3}, {5}});
    write_file(origin_path(dir / "b"), "{}");
    CHECK(says(says_of({"a", "b"}), {"b.made.json: a field is missing"}));
    CHECK(read_file(dir / "a.bin") == before);
  }

  TEST_CASE("the origin of a set is read as it was written, and goes when the pair is replaced") {
    const TempDir dir;
    write_set(dir / "a", {{1, 2}, {3}});
    const SetOrigin origin{.tokenizer = "t/tokenizer.json",
                           .tokenizer_hash = "abc",
                           .chat = "chatml",
                           .inputs = {{"x.jsonl.gz", 12, Packing::kGzip}, {"y", 3, Packing::kNone}},
                           .documents = 2,
                           .tokens = 3};
    REQUIRE_OK(write_origin(dir / "a", origin));
    const auto read = read_origin(dir / "a", 2, 3);
    REQUIRE_OK(read);
    CHECK(read.value() == origin);
    CHECK(read_origin(dir / "a", 2, 4).value() == std::nullopt);
    CHECK(read_origin(dir / "none", 2, 4).value() == std::nullopt);
    write_set(dir / "a", {{1}});
    CHECK_FALSE(std::filesystem::exists(origin_path(dir / "a")));
  }
}
