// pytorch_model.bin: what torch writes is read, and nothing else is.
#include "converters/torch_bin.h"

#include <doctest/doctest.h>

#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tests/converters/fixtures.h"
#include "tests/converters/torch_archive.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string refusal(const std::string& archive) {
  TempDir temp;
  spit(temp / "m.bin", archive);
  const auto opened = TorchBinFile::open(temp / "m.bin");
  if (opened.ok()) return "accepted";
  CHECK(has(opened.error().message, "m.bin: "));
  return opened.error().message;
}

std::string refused_pickle(const std::string& text) {
  const auto result = unpickle_state_dict(text);
  return result.ok() ? "accepted" : result.error().message;
}

std::string bytes_of(const WeightsFile& file, const SafeTensor& tensor) {
  std::string out(static_cast<size_t>(tensor.end - tensor.begin), '\0');
  REQUIRE(file.read(tensor, 0, tensor.end - tensor.begin, reinterpret_cast<std::byte*>(out.data())).ok());
  return out;
}

std::string floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

/// The tensors of a safetensors file as torch.save would have them; float32 only.
void write_bin(const SafetensorsFile& from, const fs::path& path, const std::function<bool(const std::string&)>& take) {
  std::vector<Entry> entries = {{"m/data.pkl", ""}};
  std::string items;
  for (const SafeTensor& tensor : from.tensors()) {
    if (!take(tensor.name)) continue;
    const std::string key = std::to_string(entries.size());
    entries.push_back({"m/data/" + key, bytes_of(from, tensor)});
    items += pickled(tensor.name) + pickled(View{.key = key,
                                                 .count = count_elems(tensor.shape),
                                                 .shape = tensor.shape,
                                                 .strides = dense_strides(tensor.shape)});
  }
  entries[0].data = pickle(items);
  spit(path, zip(entries));
}

}  // namespace

TEST_SUITE("converters/torch_bin") {
  TEST_CASE("a file that torch wrote has the tensors of its safetensors twin") {
    const auto bin = TorchBinFile::open(golden("torch-bin") / "mixed.bin");
    REQUIRE_OK(bin);
    const auto twin = SafetensorsFile::open(golden("torch-bin") / "mixed.safetensors");
    REQUIRE(twin.ok());
    CHECK(bin.value()->verify().ok());
    std::map<std::string, const SafeTensor*> expected;
    for (const SafeTensor& tensor : twin.value().tensors()) expected[tensor.name] = &tensor;
    CHECK(bin.value()->tensors().size() == expected.size());
    for (const SafeTensor& tensor : bin.value()->tensors()) {
      CAPTURE(tensor.name);
      REQUIRE(expected.contains(tensor.name));
      CHECK(tensor.dtype == expected[tensor.name]->dtype);
      CHECK(tensor.shape == expected[tensor.name]->shape);
      CHECK(bytes_of(*bin.value(), tensor) == bytes_of(twin.value(), *expected[tensor.name]));
    }
  }

  TEST_CASE("a model in .bin files, one or several, is the model in safetensors") {
    TempDir temp;
    const fs::path source = golden("hf-gpt2-tied");
    const auto weights = SafetensorsFile::open(source / "model.safetensors");
    REQUIRE(weights.ok());
    const Weights expected = weights_of(*HfFolder::open(source).value());

    fs::create_directory(temp / "one");
    fs::copy(source / "config.json", temp / "one");
    write_bin(weights.value(), temp / "one" / "pytorch_model.bin", [](const std::string&) { return true; });
    const auto one = HfFolder::open(temp / "one");
    REQUIRE_OK(one);
    CHECK(weights_of(*one.value()) == expected);

    fs::create_directory(temp / "two");
    fs::copy(source / "config.json", temp / "two");
    nlohmann::json map;
    for (const SafeTensor& tensor : weights.value().tensors())
      map[tensor.name] =
          has(tensor.name, ".h.1.") ? "pytorch_model_00002-of-00002.bin" : "pytorch_model_00001-of-00002.bin";
    spit(temp / "two" / "pytorch_model.bin.index.json", nlohmann::json{{"metadata", {}}, {"weight_map", map}}.dump());
    for (const std::string file : {"pytorch_model_00001-of-00002.bin", "pytorch_model_00002-of-00002.bin"})
      write_bin(weights.value(), temp / "two" / file, [&](const std::string& name) { return map[name] == file; });
    const auto two = HfFolder::open(temp / "two");
    REQUIRE_OK(two);
    CHECK(weights_of(*two.value()) == expected);
  }

  TEST_CASE("strided views are gathered, from anywhere in them") {
    std::vector<float> storage(24);
    std::iota(storage.begin(), storage.end(), 0.0f);
    const View view{.key = "0", .count = 24, .offset = 1, .shape = {3, 2, 2}, .strides = {2, 1, 8}};
    TempDir temp;
    spit(temp / "m.bin", archive(view, floats(storage)));
    const auto file = TorchBinFile::open(temp / "m.bin");
    REQUIRE_OK(file);
    const SafeTensor& tensor = file.value()->tensors()[0];
    const std::string all = bytes_of(*file.value(), tensor);
    CHECK(all == floats({1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14}));
    for (int64_t from = 0; from < 12; ++from) {
      for (int64_t to = from; to <= 12; ++to) {
        std::string part(static_cast<size_t>(4 * (to - from)), '\0');
        REQUIRE(file.value()->read(tensor, 4 * from, 4 * (to - from), reinterpret_cast<std::byte*>(part.data())).ok());
        CHECK(part == all.substr(4 * from, 4 * (to - from)));
      }
    }
  }

  TEST_CASE("a view that repeats its storage is refused where it is read: a small file is no huge model") {
    TempDir temp;
    const View view{.key = "0", .count = 1, .shape = {1 << 20, 1 << 20}, .strides = {0, 0}};
    spit(temp / "m.bin", archive(view, floats({1})));
    const auto file = TorchBinFile::open(temp / "m.bin");
    REQUIRE_OK(file);
    std::array<std::byte, 4> out{};
    const Status refused = file.value()->read(file.value()->tensors()[0], 0, 4, out.data());
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnsupported);
    CHECK(has(refused.error().message, "repeats the 1 of its storage"));
  }

  TEST_CASE("every operation and every name that a state dict does not need is refused by its name") {
    CHECK(has(refused_pickle("\x80\x02"
                             "cos\nsystem\n(X\x02\0\0\0lstR."),
              "global \"os system\" is not allowed"));
    CHECK(has(refused_pickle("\x80\x02"
                             "cbuiltins\neval\n."),
              "global \"builtins eval\" is not allowed"));
    CHECK(has(refused_pickle("\x80\x02"
                             "ctorch.serialization\nload\n."),
              "torch.serialization load"));
    CHECK(has(refused_pickle("\x80\x02"
                             "c__builtin__\n\x1b[31mexec\n."),
              "\"__builtin__ ?[31mexec\""));
    const std::map<std::string, std::string> operations = {{"i", "INST"},
                                                           {"o", "OBJ"},
                                                           {"\x93", "STACK_GLOBAL"},
                                                           {"\x81", "NEWOBJ"},
                                                           {"\x92", "NEWOBJ_EX"},
                                                           {"\x82", "EXT1"},
                                                           {"\x83", "EXT2"},
                                                           {"\x84", "EXT4"},
                                                           {"P", "PERSID"},
                                                           {"\x95", "FRAME"},
                                                           {"\x94", "MEMOIZE"},
                                                           {"2", "DUP"},
                                                           {"0", "POP"},
                                                           {"1", "POP_MARK"},
                                                           {"\x8f", "EMPTY_SET"},
                                                           {"\x8b", "LONG4"},
                                                           {"F", "FLOAT"},
                                                           {"I", "INT"},
                                                           {"S", "STRING"},
                                                           {"V", "UNICODE"},
                                                           {"g", "GET"},
                                                           {"p", "PUT"},
                                                           {"d", "DICT"},
                                                           {"l", "LIST"},
                                                           {"\x8c", "SHORT_BINUNICODE"},
                                                           {"B", "BINBYTES"},
                                                           {"\xff", "0xff"},
                                                           {"\x96", "BYTEARRAY8"}};
    for (const auto& [code, name] : operations) {
      CAPTURE(name);
      const auto result = unpickle_state_dict("\x80\x02" + code + "\n\n.");
      REQUIRE(!result.ok());
      CHECK(result.error().code == ErrorCode::kUnsupported);
      CHECK(has(result.error().message, "byte 2: operation " + name + " is not allowed"));
    }
    CHECK(has(refused_pickle(std::string("\x80\x04\x95", 3)), "PROTO 4"));
  }

  TEST_CASE("operations on what they are not for are refused") {
    const std::string w = pickled("w"), ordered = "ccollections\nOrderedDict\n";
    const View fine{.key = "0", .count = 4, .shape = {2, 2}, .strides = {2, 1}};
    REQUIRE(refused_pickle(pickle(w + pickled(fine))) == "accepted");
    CHECK(has(refused_pickle("\x80\x02" + pickled("x") + ")R."), "what is called is a string"));
    CHECK(has(refused_pickle("\x80\x02" + pickled(fine) + "}b."), "what BUILD sets the state of is an object"));
    CHECK(has(refused_pickle("\x80\x02]" + w + w + "s."), "what items are set of is a list"));
    CHECK(has(refused_pickle("\x80\x02}" + w + "a."), "what is appended to is a dict"));
    CHECK(has(refused_pickle("\x80\x02" + ordered + "(" + w + "tR."), "an OrderedDict made from something"));
    CHECK(has(refused_pickle("\x80\x02h\x07."), "memo 7 was never written"));
    CHECK(has(refused_pickle("\x80\x02Nr\xff\xff\xff\x7f."), "memo 2147483647"));
    CHECK(has(refused_pickle("\x80\x02."), "ends with 0 values"));
    CHECK(has(refused_pickle("\x80\x02R."), "empty stack"));
    CHECK(has(refused_pickle("\x80\x02(u."), "empty stack"));
    CHECK(has(refused_pickle(pickle(w + pickled(int64_t{3}))), "\"w\" is a whole number, expected a tensor"));
    CHECK(has(refused_pickle(pickle(w + pickled(fine) + w + pickled(fine))), "\"w\" is there twice"));
    CHECK(has(refused_pickle(pickle("")), "it holds no tensors"));
    const auto changed = [&](const std::function<void(View&)>& change) {
      View view = fine;
      change(view);
      return refused_pickle(pickle(w + pickled(view)));
    };
    CHECK(has(changed([](View& v) { v.offset = 1; }), "leaves storage 0 of 4 elements"));
    CHECK(has(changed([](View& v) { v.strides = {int64_t{1} << 62, 1}; }), "leaves storage"));
    CHECK(has(changed([](View& v) { v.shape = {int64_t{1} << 62, 8}, v.strides = {0, 0}; }), "leaves storage"));
    CHECK(has(changed([](View& v) { v.shape = {-1, 2}; }), "a tensor's size holds -1"));
    CHECK(has(changed([](View& v) { v.strides = {2}; }), "more or fewer strides"));
    CHECK(has(changed([](View& v) { v.key = "../0"; }), "is no key of a storage"));
    CHECK(has(changed([](View& v) { v.count = -4; }), "storage 0 of -4 elements"));
    CHECK(has(changed([](View& v) { v.storage_class = "UntypedStorage"; }), "torch UntypedStorage"));
    View other = fine;
    other.count = 8;
    CHECK(has(refused_pickle(pickle(w + pickled(fine) + pickled("v") + pickled(other))),
              "storage 0 is F32 of 8 elements here and F32 of 4 before"));
  }

  TEST_CASE("depth, cycles and doubling cost no more than their bytes") {
    std::string deep = "\x80\x02N";
    for (int k = 0; k < 1'000'000; ++k) deep += "\x85";
    CHECK(has(refused_pickle(deep + "."), "the result is a tuple"));
    std::string doubled = "\x80\x02Nq\x01";
    for (int k = 0; k < 200; ++k)
      doubled +=
          "h\x01h\x01\x86q\x01"
          "0";
    CHECK(has(refused_pickle(doubled), "operation POP"));
    CHECK(has(refused_pickle("\x80\x02}q\x01" + pickled("a") + "h\x01s."), "nested deeper"));
    std::string wide = "\x80\x02";
    for (int k = 0; k < 5000; ++k) wide += "N";
    CHECK(has(refused_pickle(wide), "its stack grows"));
    // A dict that holds itself twice, sixteen deep, is 2^16 entries; more depth is not allowed.
    CHECK(has(refused_pickle("\x80\x02}q\x01(" + pickled("a") + "h\x01" + pickled("b") + "h\x01u."), "nested deeper"));
  }

  TEST_CASE("archives that lie are refused") {
    const View view{.key = "0", .count = 4, .shape = {4}, .strides = {1}};
    const std::string pkl = pickle(pickled("w") + pickled(view)), data(16, 'x');
    const Entry p{"m/data.pkl", pkl}, d{"m/data/0", data};
    const auto with = [&](const std::function<void(std::vector<Entry>&)>& change) {
      std::vector<Entry> entries = {p, d};
      change(entries);
      return refusal(zip(entries));
    };
    REQUIRE(with([](auto&) {}) == "accepted");
    CHECK(has(with([](auto& e) { e[1].method = 8; }), "\"m/data/0\": is packed (method 8)"));
    CHECK(has(with([](auto& e) { e[1].flags = 1; }), "is encrypted"));
    CHECK(has(with([](auto& e) { e[1].size = 1 << 30; }), "is stored in 16 bytes but says to have 1073741824"));
    CHECK(has(with([](auto& e) { e[1].size = e[1].packed = 17; }), "has another size than the directory's"));
    CHECK(has(with([](auto& e) { e[1].size = e[1].packed = e[1].local_size = 1 << 30; }), "lie outside the file"));
    CHECK(has(with([](auto& e) { e[1].offset = 0; }), "is not the one that the directory describes"));
    CHECK(has(with([](auto& e) { e[1].local_name = "m/data/9"; }), "is called otherwise"));
    CHECK(has(with([&](auto& e) { e.push_back(d); }), "is there twice"));
    CHECK(has(with([](auto& e) { e[1].name = "m/../../etc/passwd"; }), "must stay inside the archive"));
    CHECK(has(with([](auto& e) { e[1].name = "/m/data/0"; }), "must stay inside the archive"));
    CHECK(has(with([](auto& e) { e[1].name = "n/data/0"; }), "is not in the top folder"));
    CHECK(has(with([](auto& e) { e[1].name = "m/data/7"; }), "its storage \"m/data/0\" is missing"));
    CHECK(has(with([](auto& e) { e[1].data.resize(12); }), "has 12 bytes, but 4 elements of F32 take 16"));
    CHECK(has(with([](auto& e) { e[0].name = "m/other.pkl"; }), "has no entry \"m/data.pkl\""));
    CHECK(has(with([](auto& e) { e[0].crc = 5; }), "CRC-32"));
    CHECK(has(with([](auto& e) { e.push_back({"m/constants.pkl", "x"}); }), "TorchScript"));
    CHECK(has(with([](auto& e) { e.push_back({"m/byteorder", "big"}); }), "only little-endian"));
    CHECK(has(with([](auto& e) { e.push_back({"m/version", "99"}); }), "known are 1 to 10"));
    // Two entries over each other: the second one's header lies inside the first one's data.
    const std::string inner = zip({{"m/data/0", data}});
    std::vector<Entry> overlapping = {p, {"m/data/1", inner.substr(0, 30 + 8 + 16)}, {"m/data/0", data}};
    overlapping[2].offset = static_cast<int64_t>(30 + p.name.size() + pkl.size() + 30 + 8);
    CHECK(has(refusal(zip(overlapping)), "overlap at byte"));
    // Storages are checked against their sums when all of them is read.
    TempDir temp;
    std::vector<Entry> damaged = {p, d};
    damaged[1].crc = 5;
    spit(temp / "m.bin", zip(damaged));
    CHECK(has(TorchBinFile::open(temp / "m.bin").value()->verify().error().message, "entry \"m/data/0\": CRC-32"));
  }

  TEST_CASE("older formats are refused with what to do") {
    const std::string how = "torch.save(torch.load(FILE, weights_only=True), FILE)";
    const std::string legacy = refusal("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.rest");
    CHECK(has(legacy, "before 1.6"));
    CHECK(has(legacy, how));
    std::string tar(600, '\0');
    tar.replace(257, 5, "ustar");
    CHECK(has(refusal(tar), "is a tar archive"));
    CHECK(has(refusal("\x80\x04\x95 a plain pickle"), "is a bare pickle"));
    CHECK(has(refusal(""), "is no file of torch.save"));
    CHECK(has(refusal("PK\x03\x04"), "no zip archive"));
  }

  TEST_CASE("a file cut off anywhere is refused") {
    const std::string whole = slurp(golden("torch-bin") / "mixed.bin");
    for (size_t length = 0; length < whole.size(); length += length < 200 || length + 700 > whole.size() ? 1 : 37) {
      CAPTURE(length);
      REQUIRE(refusal(whole.substr(0, length)) != "accepted");
    }
  }
}
