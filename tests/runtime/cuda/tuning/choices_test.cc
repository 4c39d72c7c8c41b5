#include "runtime/cuda/tuning/choices.h"

#include <doctest/doctest.h>

#include <string>

#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::cuda;

namespace {

TuningChoices choices() {
  const TuningPlace card{.card = "NVIDIA H200 (132 multiprocessors)", .library = 130102};
  ProductKind kind{.m = 8192, .n = 3072, .k = 768, .lda = 768, .ldb = 768, .ldc = 3072, .trans_b = true};
  kind.epilogue = kEpilogueGeluAuxBias;
  kind.ab_dtype = kind.c_dtype = DType::kBf16;
  kind.align_a = kind.align_b = kind.align_c = kind.align_d = kind.align_vector = kind.align_pre = 16;
  kind.workspace_bytes = int64_t{32} << 20;
  ChosenProduct by_library{.place = card, .kind = kind, .timed = {}};
  by_library.timed = {
      .choice = {.algorithm = {{1, 2, 3, 0xfedcba9876543210u, 5, 6, 7, ~uint64_t{0}}}, .workspace_bytes = 4096},
      .proposed = 8,
      .repeated = 7,
      .us = 61.25,
      .first_us = 70.5};
  ChosenProduct apart = by_library;
  apart.kind.n = 768;
  apart.timed = {.choice = {.by_library = false}, .proposed = 0, .repeated = 0};
  const TuningPlace with_cudnn{.card = card.card, .library = 91900};
  const AttentionShape shape{.dtype = DType::kBf16,
                             .samples = 16,
                             .tokens = 1024,
                             .heads = 12,
                             .kv_heads = 12,
                             .head_dim = 64,
                             .q_stride = 2304,
                             .kv_stride = 2304,
                             .out_stride = 768};
  const ChosenAttention forward{
      .place = with_cudnn,
      .kind = {shape, AttentionPass::kForward},
      .timed = {.by = AttentionBy::kCudnn, .us = {{AttentionBy::kOwn, 131.5}, {AttentionBy::kCudnn, 92.25}}}};
  ChosenAttention backward = forward;
  backward.kind.pass = AttentionPass::kBackward;
  backward.place.library = 0;
  backward.timed = {};
  return {.off = false,
          .products = {by_library, apart},
          .attention = {forward, backward},
          .layouts = {{.place = card, .layout = "0123"}},
          .attention_layouts = {{.place = with_cudnn, .layout = "0123"}},
          .others = {R"({"by":"own","op":"rotary"})"}};
}

std::string with(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_SUITE("runtime/cuda/tuning/choices") {
  TEST_CASE("a file of choices is read as it was written, with entries of ops that come later") {
    const TuningChoices written = choices();
    const std::string text = encode_choices(written);
    const auto read = decode_choices(text);
    REQUIRE_OK(read);
    REQUIRE(read.value().products.size() == 2);
    for (size_t i = 0; i < 2; ++i) {
      const ChosenProduct &of = read.value().products[i], &was = written.products[i];
      CHECK(of.place == was.place);
      CHECK(of.kind == was.kind);
      CHECK(encode_choice(of) == encode_choice(was));
    }
    REQUIRE(read.value().attention.size() == 2);
    for (size_t i = 0; i < 2; ++i) {
      const ChosenAttention &of = read.value().attention[i], &was = written.attention[i];
      CHECK(of.place == was.place);
      CHECK(of.kind == was.kind);
      CHECK(of.timed.by == was.timed.by);
      CHECK(of.timed.us == was.timed.us);
    }
    CHECK(cuda::attention_text(written.attention[0].place) == "NVIDIA H200 (132 multiprocessors), cuDNN 9.19.0");
    CHECK(cuda::attention_text(written.attention[1].place) == "NVIDIA H200 (132 multiprocessors), no cuDNN");
    CHECK(read.value().layouts == written.layouts);
    CHECK(read.value().attention_layouts == written.attention_layouts);
    CHECK(read.value().others == written.others);
    CHECK(encode_choices(read.value()) == text);
    CHECK(text.find("\"algorithm\":\"0000000000000001") != std::string::npos);
    CHECK(cuda::text(written.products[0].place) == "NVIDIA H200 (132 multiprocessors), cuBLASLt 13.1.2");
  }

  TEST_CASE("a damaged file is refused with the byte, the entry and field, or the checksum") {
    const std::string good = encode_choices(choices());
    const auto why = [](const std::string& text) {
      const auto read = decode_choices(text);
      REQUIRE_FALSE(read.ok());
      return read.error().message;
    };
    CHECK(why(good.substr(0, good.size() / 2)).starts_with("byte "));
    CHECK(why(with(good, "\"trans_b\":true", "\"trans_b\":1")) ==
          "choices[0]: \"trans_b\" is missing or not true or false");
    CHECK(why(with(good, "\"algorithm\":\"0", "\"algorithm\":\"g")) ==
          "choices[0]: \"algorithm\" is missing or not 64 bytes in hex digits, or nothing");
    CHECK(why(with(good, "\"m\":8192", "\"m\":-1")) == "choices[0]: \"m\" is missing or not a whole number from 0");
    CHECK(why(with(good, "\"by\":\"cudnn\"", "\"by\":\"flash\"")) ==
          "choices[2]: \"by\" is missing or not \"own\", \"warpgroup\" or \"cudnn\"");
    CHECK(why(with(good, "\"pass\":\"backward\"", "\"pass\":\"both\"")) ==
          "choices[3]: \"pass\" is missing or not \"forward\" or \"backward\"");
    CHECK(why(with(good, "fedcba98", "fedcba99")).find("they are not what was written") != std::string::npos);
    CHECK(why("{}") == "\"cairn_tuning\" is missing or not a whole number from 0");
    const auto later = decode_choices(with(good, "\"cairn_tuning\": 1", "\"cairn_tuning\": 2"));
    REQUIRE_FALSE(later.ok());
    CHECK(later.error().code == ErrorCode::kUnsupported);
    // No byte of the file can be another one unnoticed.
    for (size_t at = 0; at < good.size(); ++at) {
      std::string flipped = good;
      flipped[at] = static_cast<char>(flipped[at] ^ 1);
      const auto read = decode_choices(flipped);
      if (!read.ok()) continue;
      CAPTURE(at);
      CHECK(encode_choices(read.value()) == good);  // white space
    }
  }
}
