#include "ckpt/format/names.h"

#include <doctest/doctest.h>

#include <span>
#include <vector>

#include "ckpt/format/checksum.h"

using namespace cairn::ckpt;

TEST_SUITE("ckpt/format/names") {
  TEST_CASE("one step has one name") {
    CHECK(step_dir_name(1200) == "step-00001200");
    CHECK(step_dir_name(123456789012) == "step-123456789012");
    for (const int64_t step : {int64_t{0}, int64_t{7}, int64_t{99999999}, int64_t{100000000}})
      CHECK(parse_step_dir_name(step_dir_name(step)) == step);
    for (const char* name : {"step-1200", "step-", "step--0000001", "step-0000001x", "step-000000012", "stepx00000012",
                             ".tmp-step-00000012", "step-99999999999999999999", ""})
      CHECK_MESSAGE(!parse_step_dir_name(name).has_value(), name);
  }

  TEST_CASE("a work directory names its writer") {
    const WriterId writer{"node 7.example", 4711, 99887766, 3};
    const std::string name = work_dir_name(kTmpPrefix, 12, writer);
    CHECK(name == ".tmp-step-00000012.node-7-example.4711.99887766.3");
    const auto work = parse_work_dir_name(kTmpPrefix, name);
    REQUIRE(work.has_value());
    CHECK(work->step == 12);
    CHECK(work->writer == WriterId{"node-7-example", 4711, 99887766, 3});
    CHECK_FALSE(parse_work_dir_name(kTrashPrefix, name).has_value());
    for (const char* bad : {".tmp-", ".tmp-step-00000012", ".tmp-step-00000012.h.1.2", ".tmp-step-00000012.h.1.2.x",
                            ".tmp-step-00000012.h.1.2.3.4", ".tmp-step-12.h.1.2.3", ".tmp-step-00000012..1.2.3"})
      CHECK_MESSAGE(!parse_work_dir_name(kTmpPrefix, bad).has_value(), bad);
  }

  TEST_CASE("checksums are XXH3_64 and their spelling is strict") {
    // Values of the xxHash 0.8 reference for the empty input and for "abc" (`xxhsum -H3`).
    CHECK(hash_to_hex(hash_bytes("")) == "2d06800538d394c2");
    CHECK(hash_to_hex(hash_bytes("abc")) == "78af5f94892f3950");
    CHECK(hash_from_hex("2d06800538d394c2") == 0x2d06800538d394c2ull);
    for (const char* bad : {"2D06800538d394c2", "2d06800538d394c", "2d06800538d394c20", "2d06800538d394cg", ""})
      CHECK_FALSE(hash_from_hex(bad).has_value());
    std::vector<std::byte> bytes(200001);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7);
    StreamingHash stream;
    stream.update(std::span(bytes).first(70000));
    stream.update(std::span(bytes).subspan(70000, 1));
    stream.update(std::span(bytes).subspan(70001));
    CHECK(stream.digest() == hash_bytes(bytes));
  }
}
