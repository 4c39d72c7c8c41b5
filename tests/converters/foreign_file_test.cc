// Files that others made and that cannot be read at all: a pointer of Git LFS in place of the file, whichever it is.

#include <doctest/doctest.h>

#include <sys/stat.h>
#include <algorithm>

#include "converters/rewrite.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/foreign_folder.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

const std::string kPointer =
    "version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, 'a') + "\nsize 123456789\n";

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Folders that have, together, a file of each kind that is read.
std::map<std::string, fs::path> folders(const fs::path& in) {
  std::map<std::string, fs::path> out;
  for (const char* name : {"hf-llama-gqa-sharded", "hf-gpt2-tied", "ranks-gpt2", "ranks-glm130b", "ranks-codegeex",
                           "ranks-codegeex-merged", "dist-gpt2", "dist-llama", "dist-hf"}) {
    fs::copy(golden(name), in / name, fs::copy_options::recursive);
    out[name] = in / name;
  }
  for (const char* kept : {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt",
                           "chat_template.jinja", "LICENSE"}) {
    spit(in / "hf-gpt2-tied" / kept, "{}");
  }
  const RawTensors weights = raw_tensors(golden("hf-llama-tied-bias"));
  write_folder(in / "bin", golden("hf-llama-tied-bias"), Format::kBin, weights);
  out["bin"] = in / "bin";
  const fs::path parts = out["bins"] = in / "bins";
  fs::create_directory(parts);
  fs::copy(golden("hf-llama-tied-bias") / "config.json", parts);
  std::string map;
  RawTensors one, two;
  for (const auto& [name, tensor] : weights) {
    const bool first = name < "model.layers.1";
    (first ? one : two)[name] = tensor;
    map += (map.empty() ? "\"" : ", \"") + name + "\": \"pytorch_model-0000" + (first ? "1" : "2") + "-of-00002.bin\"";
  }
  write_bin_file(parts / "pytorch_model-00001-of-00002.bin", one);
  write_bin_file(parts / "pytorch_model-00002-of-00002.bin", two);
  spit(parts / "pytorch_model.bin.index.json", "{\"weight_map\": {" + map + "}}");
  return out;
}

/// Of the fixtures' makers, or of other programs: nobody here reads them.
bool is_read(const fs::path& file) {
  const std::string name = file.filename().string();
  return name != "reference.safetensors" && name != "metadata.json" && name != "common.pt";
}

}  // namespace

TEST_SUITE("converters/foreign_file") {
  TEST_CASE("a pointer of Git LFS in place of any file that is read is called that, with the file's name") {
    TempDir temp;
    std::set<std::string> kinds;
    for (const auto& [name, dir] : folders(temp / "")) {
      CHECK(refusal_of(dir) == "");
      std::vector<fs::path> files;
      for (const auto& entry : fs::recursive_directory_iterator(dir)) {
        if (entry.is_regular_file() && is_read(entry.path())) files.push_back(entry.path());
      }
      for (const fs::path& file : files) {
        CAPTURE(file.string());
        const std::string whole = slurp(file);
        spit(file, kPointer);
        const auto opened = HfFolder::open(dir);
        REQUIRE_FALSE(opened.ok());
        CHECK(opened.error().code == ErrorCode::kInvalidInput);
        CHECK(has(opened.error().message, file.filename().string() + ": is a pointer of Git LFS"));
        CHECK(has(opened.error().message, "git lfs pull"));
        CHECK_FALSE(HfFolder::inspect(dir).ok());
        spit(file, whole);
        kinds.insert(file.filename().string());
      }
      CHECK(refusal_of(dir) == "");
    }
    for (const char* kind : {"config.json", "generation_config.json", "tokenizer.json", "tokenizer.model",
                             "model.safetensors", "model.safetensors.index.json", "model-00002-of-00003.safetensors",
                             "pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-00002-of-00002.bin",
                             ".metadata", "__3_0.distcp", "model_optim_rng.pt", "mp_rank_01_model_states.pt",
                             "codegeex_13b.pt", "latest_checkpointed_iteration.txt", "latest"}) {
      CAPTURE(kind);
      CHECK(kinds.contains(kind));
    }
  }

  TEST_CASE("a pointer of Git LFS in the folder that an export is to be like is called that") {
    TempDir temp;
    fs::copy(golden("hf-gpt2-tied"), temp / "like");
    spit(temp / "like" / "tokenizer.json", kPointer);
    ckpt::PosixBackend io;
    const auto imported = import_hf(io, golden("hf-gpt2-tied"), temp / "run", {}, encode);
    REQUIRE_OK(imported);
    ExportOptions options;
    options.like = temp / "like";
    const auto refused = export_hf(io, imported.value().dir, temp / "out", options, decode);
    REQUIRE_FALSE(refused.ok());
    CHECK(has(refused.error().message, "tokenizer.json: is a pointer of Git LFS"));
    CHECK_FALSE(fs::exists(temp / "out"));
  }

  TEST_CASE("a link out of a folder is not followed to what would be copied, and one within it is") {
    TempDir temp;
    spit(temp / "secret", "secret");
    for (const char* name : {"LICENSE", "tokenizer.json", "chat_template.jinja"}) {
      CAPTURE(name);
      const fs::path dir = temp / name;
      fs::copy(golden("hf-gpt2-tied"), dir);
      fs::create_symlink(temp / "secret", dir / name);
      const auto opened = HfFolder::open(dir);
      REQUIRE_FALSE(opened.ok());
      CHECK(opened.error().code == ErrorCode::kInvalidInput);
      CHECK(has(opened.error().message, (dir / name).string() + ": is a link out of the folder, to "));
      ckpt::PosixBackend io;
      CHECK_FALSE(import_hf(io, dir, temp / "run", {}, encode).ok());
      CHECK_FALSE(fs::exists(temp / "run" / "checkpoints"));
      fs::remove(dir / name);
      spit(dir / "original", "{}");
      fs::create_symlink("original", dir / name);
      CHECK(refusal_of(dir) == "");
    }
    ckpt::PosixBackend io;
    const auto imported = import_hf(io, golden("hf-gpt2-tied"), temp / "run", {}, encode);
    REQUIRE_OK(imported);
    fs::copy(golden("hf-gpt2-tied"), temp / "card");
    fs::create_symlink("../secret", temp / "card" / "README.md");
    const auto rewritten = rewrite_hf(temp / "card", temp / "out", {});
    REQUIRE_FALSE(rewritten.ok());
    CHECK(has(rewritten.error().message, "README.md: is a link out of the folder"));
    ExportOptions options;
    options.like = temp / "like";
    fs::copy(golden("hf-gpt2-tied"), options.like);
    fs::create_symlink("../secret", options.like / "NOTICE");
    const auto refused = export_hf(io, imported.value().dir, temp / "out", options, decode);
    REQUIRE_FALSE(refused.ok());
    CHECK(has(refused.error().message, "NOTICE: is a link out of the folder"));
    CHECK_FALSE(fs::exists(temp / "out"));
  }

  TEST_CASE("a snapshot of the Hub's cache leads to the blobs of its own repository only") {
    TempDir temp;
    const fs::path mine = temp / "hub" / "models--me--tiny", other = temp / "hub" / "models--me--other";
    const fs::path snapshot = mine / "snapshots" / std::string(40, 'a');
    for (const fs::path& folder : {mine / "blobs", other / "blobs", snapshot}) fs::create_directories(folder);
    int64_t blobs = 0;
    for (const auto& entry : fs::directory_iterator(golden("hf-gpt2-tied"))) {
      const std::string blob = fmt::format("{:040x}", ++blobs);
      fs::copy(entry.path(), mine / "blobs" / blob);
      fs::create_symlink(fs::path("../../blobs") / blob, snapshot / entry.path().filename());
    }
    spit(mine / "blobs" / "license", "x");
    fs::create_symlink("../../blobs/license", snapshot / "LICENSE");
    CHECK(refusal_of(snapshot) == "");
    fs::create_symlink(snapshot, temp / "by-link");
    CHECK(refusal_of(temp / "by-link") == "");
    spit(other / "blobs" / "license", "x");
    fs::remove(snapshot / "LICENSE");
    fs::create_symlink("../../../models--me--other/blobs/license", snapshot / "LICENSE");
    CHECK(has(refusal_of(snapshot), "LICENSE: is a link out of the folder"));
  }

  TEST_CASE("a pipe in place of a file of a folder is refused, not waited for") {
    for (const char* name : {"hf-llama-gqa-sharded", "ranks-gpt2", "dist-gpt2", "dist-hf"}) {
      TempDir temp;
      fs::copy(golden(name), temp / "x", fs::copy_options::recursive);
      std::vector<fs::path> files;
      for (const auto& entry : fs::recursive_directory_iterator(temp / "x")) {
        if (entry.is_regular_file() && is_read(entry.path())) files.push_back(entry.path());
      }
      for (const fs::path& file : files) {
        CAPTURE(file.string());
        // Where these are no files, the folder has none.
        if (is_passed_file(file.filename().string()) || file.filename() == "latest_checkpointed_iteration.txt")
          continue;
        fs::rename(file, file.string() + ".kept");
        REQUIRE(::mkfifo(file.c_str(), 0600) == 0);
        CHECK_FALSE(HfFolder::open(temp / "x").ok());
        fs::remove(file);
        fs::rename(file.string() + ".kept", file);
      }
    }
  }

  TEST_CASE("the converters open files that others made in one place") {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(CAIRN_SOURCE_DIR) / "converters")) {
      const std::string name = entry.path().filename().string();
      if (!entry.is_regular_file() || name == "foreign_file.cc") continue;
      std::istringstream lines(slurp(entry.path()));
      for (std::string line; std::getline(lines, line);) {
        CAPTURE(name);
        CAPTURE(line);
        const bool opens = has(line, "O_RDONLY") && !has(line, "O_DIRECTORY");
        CHECK_FALSE(opens);
        if (name != "hf_writer.cc") CHECK_FALSE(has(line, "ifstream"));  // of its own work folder
      }
    }
  }
}
