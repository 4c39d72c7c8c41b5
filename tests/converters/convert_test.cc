// Folder to folder, and conversions that are cut off: in each direction they go on, fail cleanly, and never look whole
// when they are not.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "ckpt/store/fault_backend.h"
#include "converters/elements.h"
#include "converters/rewrite.h"
#include "tests/converters/fixtures.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Every file of a folder, hidden ones too, by its path in it.
std::map<std::string, std::string> contents(const fs::path& dir) {
  std::map<std::string, std::string> out;
  for (const auto& entry : fs::recursive_directory_iterator(dir)) {
    if (entry.is_regular_file()) out[fs::relative(entry.path(), dir)] = slurp(entry.path());
  }
  return out;
}

struct Stored {
  std::string dtype;
  Shape shape;
  std::string bytes;
};
using Tensors = std::map<std::string, Stored>;

Tensors load(const fs::path& path) {
  Tensors out;
  const auto file = SafetensorsFile::open(path);
  REQUIRE(file.ok());
  for (const SafeTensor& t : file.value().tensors()) {
    Stored tensor{t.dtype, t.shape, std::string(static_cast<size_t>(t.end - t.begin), '\0')};
    REQUIRE(file.value().read(t, 0, t.end - t.begin, reinterpret_cast<std::byte*>(tensor.bytes.data())).ok());
    out[t.name] = tensor;
  }
  return out;
}

void store(const fs::path& path, const Tensors& tensors) {
  std::vector<SafeTensor> list;
  for (const auto& [name, t] : tensors) list.push_back({.name = name, .dtype = t.dtype, .shape = t.shape});
  REQUIRE(write_safetensors(path, list, {{"format", "pt"}}, [&](const SafeTensor& t, const ByteSink& sink) {
            const std::string& bytes = tensors.at(t.name).bytes;
            return sink(reinterpret_cast<const std::byte*>(bytes.data()), static_cast<int64_t>(bytes.size()));
          }).ok());
}

Result<ExportReport> rewritten(const fs::path& from, const fs::path& to, const ExportOptions& options = {}) {
  return rewrite_hf(from, to, {.to = options});
}

/// A disk that fails from one call on; a backend of its own, as conversions want one a thread.
class FailingDisk final : public ckpt::PosixBackend {
 public:
  struct Plan {
    std::atomic<int64_t> left{0};  // calls until it fails
    int error = ENOSPC;
    std::atomic<bool> fired{false};
    fs::path volume;                // is a mount point: no name gets in from outside
    bool names = false;             // changes of names are such calls too
    std::atomic<bool> dead{false};  // nothing is done any more from then on, as of a process that was killed
    bool dies = false;
    int64_t free_bytes = -1;          // what is said to be free; -1: what is
    std::atomic<int64_t> created{0};  // files
  };
  explicit FailingDisk(Plan& plan) : plan_(plan) {}
  Result<int64_t> free_bytes(const fs::path& path) override {
    return plan_.free_bytes < 0 ? PosixBackend::free_bytes(path) : plan_.free_bytes;
  }
  Status make_dir(const fs::path& path) override { return name_fails() ? failed() : PosixBackend::make_dir(path); }
  Status remove_file(const fs::path& path) override {
    return plan_.dead || (plan_.dies && name_fails()) ? failed() : PosixBackend::remove_file(path);
  }
  Status remove_dir(const fs::path& path) override { return plan_.dead ? failed() : PosixBackend::remove_dir(path); }
  Status sync_dir(const fs::path& path) override { return plan_.dead ? failed() : PosixBackend::sync_dir(path); }
  Status rename(const fs::path& from, const fs::path& to) override {
    const auto inside = [&](const fs::path& path) { return path.string().starts_with(plan_.volume.string() + "/"); };
    if (!plan_.volume.empty() && inside(from) != inside(to)) return os_error(EXDEV, "rename " + from.string());
    return name_fails() ? failed() : PosixBackend::rename(from, to);
  }
  Result<std::unique_ptr<ckpt::IoFile>> create(const fs::path& path, int64_t size_bytes) override {
    ++plan_.created;
    if (fails()) return os_error(plan_.error, "create " + path.string());
    RT_TRY_SET(std::unique_ptr<ckpt::IoFile> file, PosixBackend::create(path, size_bytes));
    return std::unique_ptr<ckpt::IoFile>(std::make_unique<File>(std::move(file), *this));
  }

 private:
  bool fails() {
    if (plan_.dead) return true;
    if (plan_.left-- > 0) return false;
    plan_.fired = true;
    plan_.dead = plan_.dies;
    return true;
  }
  /// A name that is refused once is taken the next time, when it goes back.
  bool name_fails() { return plan_.names && !(plan_.fired && !plan_.dies) && fails(); }
  Status failed() const { return os_error(plan_.error, "name"); }
  class File final : public ckpt::IoFile {
   public:
    File(std::unique_ptr<ckpt::IoFile> inner, FailingDisk& disk) : inner_(std::move(inner)), disk_(disk) {}
    Result<ckpt::IoTicket> submit_write(int64_t offset, const std::byte* data, int64_t bytes) override {
      if (disk_.fails()) return os_error(disk_.plan_.error, "write");
      return inner_->submit_write(offset, data, bytes);
    }
    Result<ckpt::IoTicket> submit_read(int64_t offset, std::byte* data, int64_t bytes) override {
      return inner_->submit_read(offset, data, bytes);
    }
    Status wait(ckpt::IoTicket ticket) override { return inner_->wait(ticket); }
    Status finish() override { return disk_.fails() ? Status(os_error(disk_.plan_.error, "write")) : inner_->finish(); }
    Status truncate(int64_t size_bytes) override { return inner_->truncate(size_bytes); }
    Result<int64_t> size() override { return inner_->size(); }
    Status sync() override { return disk_.fails() ? Status(os_error(disk_.plan_.error, "sync")) : inner_->sync(); }
    Status close() override { return inner_->close(); }

   private:
    std::unique_ptr<ckpt::IoFile> inner_;
    FailingDisk& disk_;
  };
  Plan& plan_;
};

fs::path imported(const TempDir& temp, const std::string& fixture) {
  ckpt::PosixBackend io;
  ImportOptions options;
  options.mesh = {.tp = 1, .pp = 1, .dp = 1};
  auto report = import_hf(io, golden(fixture), temp / "run", options, encode);
  REQUIRE_OK(report);
  return report.value().dir;
}

}  // namespace

TEST_SUITE("converters/convert") {
  TEST_CASE("folder to folder keeps every tensor byte for byte, and the model") {
    for (const std::string& name : fixture_names()) {
      CAPTURE(name);
      TempDir temp;
      const auto report = rewritten(golden(name), temp / "out");
      REQUIRE_OK(report);
      for (const auto& [file, bytes] : contents(golden(name))) {
        if (file == "config.json" || file == "reference.safetensors" || file == "README.md") continue;
        CAPTURE(file);
        CHECK(slurp(temp / "out" / file) == bytes);
      }
      const auto again = HfFolder::open(temp / "out");
      REQUIRE_OK(again);
      CHECK(logit_difference(again.value()->model(), weights_of(*again.value()), reference_of(name)) <= kLogitGate);
      CHECK(has(slurp(temp / "out" / "README.md"), "converted from the folder `" + name + "`"));
    }
  }

  TEST_CASE("folder to folder changes dtype and split, and cleans") {
    TempDir temp;
    fs::copy(golden("hf-gpt2-tied"), temp / "in");
    Tensors tensors = load(temp / "in" / "model.safetensors"), messy;
    for (const auto& [name, tensor] : tensors) messy[name.substr(std::string("transformer.").size())] = tensor;
    messy["h.0.attn.bias"] = {"BOOL", {1, 1, 2, 2}, std::string(4, '\1')};
    messy["lm_head.weight"] = messy["wte.weight"];
    store(temp / "in" / "model.safetensors", messy);
    auto config = nlohmann::json::parse(slurp(temp / "in" / "config.json"));
    config["auto_map"] = {{"AutoModel", "evil.Model"}};
    config["summary_type"] = "cls_index";
    config.erase("torch_dtype");
    config["dtype"] = "float32";
    spit(temp / "in" / "config.json", config.dump());
    spit(temp / "in" / "evil.py", "raise SystemExit");
    spit(temp / "in" / "README.md", "the model's own card");
    const auto report = rewritten(temp / "in", temp / "out", {.dtype = DType::kBf16, .max_shard_bytes = 9000});
    REQUIRE_OK(report);
    CHECK(report.value().shards > 2);
    const auto written = nlohmann::json::parse(slurp(temp / "out" / "config.json"));
    CHECK(written["torch_dtype"] == "bfloat16");
    CHECK(!written.contains("dtype"));
    CHECK(!written.contains("auto_map"));
    CHECK(written["summary_type"] == "cls_index");
    CHECK(!fs::exists(temp / "out" / "evil.py"));
    CHECK(slurp(temp / "out" / "README.md") == "the model's own card");
    const auto index = nlohmann::json::parse(slurp(temp / "out" / "model.safetensors.index.json"));
    CHECK(index["weight_map"].size() == tensors.size());
    CHECK(index["metadata"]["total_size"] == report.value().data_bytes);
    for (const auto& [name, file] : index["weight_map"].items()) {
      CAPTURE(name);
      REQUIRE(tensors.contains(name));
      const Stored found = load(temp / "out" / file.get<std::string>()).at(name);
      CHECK(found.shape == tensors[name].shape);
      std::vector<float> before(static_cast<size_t>(count_elems(found.shape))), after(before.size());
      to_floats("F32", reinterpret_cast<const std::byte*>(tensors[name].bytes.data()), before.size(), before.data());
      to_floats("BF16", reinterpret_cast<const std::byte*>(found.bytes.data()), after.size(), after.data());
      for (size_t k = 0; k < before.size(); ++k) REQUIRE(after[k] == to_f32(to_bf16(before[k])));
    }
    CHECK(has(rewritten(temp / "in", temp / "in").error().message, "the source would be replaced"));
    CHECK(has(rewritten(temp / "in", temp / "out").error().message, "is not empty"));
  }

  TEST_CASE("a number that f16 cannot hold is told with its tensor, and nothing is left") {
    TempDir temp;
    fs::copy(golden("hf-gpt2-tied"), temp / "in");
    Tensors tensors = load(temp / "in" / "model.safetensors");
    const float large = 70000.0f;
    std::memcpy(tensors["transformer.h.1.ln_1.weight"].bytes.data() + 8, &large, 4);
    store(temp / "in" / "model.safetensors", tensors);
    const auto refused = rewritten(temp / "in", temp / "out", {.dtype = DType::kF16});
    REQUIRE(!refused.ok());
    CHECK(has(refused.error().message, "transformer.h.1.ln_1.weight holds 70000, f16 ends at 65504"));
    CHECK(contents(temp.path) == [&] {
      std::map<std::string, std::string> expected;
      for (const auto& [name, bytes] : contents(temp / "in")) expected["in/" + name] = bytes;
      return expected;
    }());
  }

  TEST_CASE("one NaN or infinity is found wherever it stands, and the largest number is none") {
    const float inf = std::numeric_limits<float>::infinity();
    for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
      CAPTURE(dtype_name(dtype));
      const float largest = dtype == DType::kF16 ? kMaxF16 : 3.0e38f;
      for (const size_t count : {1, 127, 128, 129, 300}) {
        std::vector<float> values(count, -largest);
        std::vector<std::byte> stored(count * static_cast<size_t>(dtype_size_bytes(dtype)));
        from_floats(dtype, values, stored.data());
        CHECK(!any_not_finite(dtype, stored));
        for (size_t k = 0; k < count; ++k) {
          for (const float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()}) {
            values[k] = bad;
            from_floats(dtype, values, stored.data());
            CHECK(any_not_finite(dtype, stored));
          }
          values[k] = largest;
        }
      }
    }
    CHECK(!any_not_finite(DType::kF32, {}));
  }

  TEST_CASE("tensors that hold a NaN or an infinity are told, whichever way their bytes go") {
    TempDir temp;
    ckpt::PosixBackend io;
    fs::copy(golden("hf-gpt2-tied"), temp / "in");
    REQUIRE_OK(rewritten(temp / "in", temp / "clean"));
    CHECK(rewritten(temp / "in", temp / "clean2").value().not_finite.empty());
    CHECK(rewritten(temp / "in", temp / "clean3", {.dtype = DType::kF16}).value().warnings.empty());
    Tensors tensors = load(temp / "in" / "model.safetensors");
    const std::vector<std::string> names = {"transformer.wte.weight", "transformer.h.1.ln_1.weight"};
    const float bad[] = {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()};
    for (size_t k = 0; k < names.size(); ++k) {
      std::string& bytes = tensors.at(names[k]).bytes;
      std::memcpy(bytes.data() + bytes.size() - 4, &bad[k], 4);
    }
    store(temp / "in" / "model.safetensors", tensors);
    const fs::path checkpoint = imported(temp, (temp / "in").string());
    int count = 0;
    const auto check = [&](const Result<ExportReport>& report) {
      REQUIRE_OK(report);
      CHECK(std::set(report.value().not_finite.begin(), report.value().not_finite.end()) ==
            std::set(names.begin(), names.end()));
      REQUIRE(report.value().warnings.size() == 1);
      CHECK(report.value().warnings[0] == "2 tensors hold NaN or infinity: " + names[0] + ", " + names[1]);
    };
    for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
      CAPTURE(dtype_name(dtype));
      check(rewritten(temp / "in", temp / fmt::format("out-{}", count++), {.dtype = dtype}));
      check(export_hf(io, checkpoint, temp / fmt::format("out-{}", count++), {.dtype = dtype}, decode));
    }
    const auto dual = export_hf(io, checkpoint, temp / "dual", {.hdf5 = true}, decode);
    REQUIRE_OK(dual);
    CHECK(dual.value().not_finite.size() == 2);
    // Float's largest is infinite in bf16.
    for (const std::string& name : names) tensors.at(name).bytes.replace(tensors.at(name).bytes.size() - 4, 4, 4, '\0');
    const float largest = std::numeric_limits<float>::max();
    std::memcpy(tensors.at(names[1]).bytes.data(), &largest, 4);
    store(temp / "in" / "model.safetensors", tensors);
    CHECK(rewritten(temp / "in", temp / "out-f32").value().not_finite.empty());
    CHECK(rewritten(temp / "in", temp / "out-bf16", {.dtype = DType::kBf16}).value().not_finite ==
          std::vector<std::string>{names[1]});
  }

  TEST_CASE("a card that is there is never overwritten, and an export's card tells where the weights come from") {
    TempDir temp;
    const fs::path checkpoint = imported(temp, "hf-gpt2-tied");
    ckpt::PosixBackend io;
    REQUIRE(export_hf(io, checkpoint, temp / "out", {}, decode).ok());
    const std::string card = slurp(temp / "out" / "README.md");
    CHECK(has(card, "library_name: transformers"));
    CHECK(has(card, "run `hf-gpt2-tied` (id `import-"));
    CHECK(has(card, "step 0"));
    spit(temp / "out" / "README.md", "mine");
    REQUIRE(export_hf(io, checkpoint, temp / "out", {.overwrite = true}, decode).ok());
    CHECK(slurp(temp / "out" / "README.md") == "mine");
  }

  TEST_CASE("a conversion that was stopped goes on from the files that were done, if each byte of them holds") {
    for (const bool damaged : {false, true}) {
      CAPTURE(damaged);
      TempDir temp;
      const fs::path source = golden("hf-llama-gqa-sharded"), work = temp / ".out.converting";
      ExportOptions options{.max_shard_bytes = 20000};
      REQUIRE(rewritten(source, temp / "whole", options).ok());
      std::atomic<bool> stop{false};
      options.cancel = &stop;
      options.progress = [&](int64_t done, int64_t total) { stop = stop || done > total * 3 / 4; };
      const auto stopped = rewritten(source, temp / "out", options);
      REQUIRE(!stopped.ok());
      CHECK(stopped.error().code == ErrorCode::kStopped);
      CHECK(!fs::exists(temp / "out"));
      REQUIRE(fs::exists(work));
      fs::path finished;
      for (const auto& entry : fs::directory_iterator(work)) {
        if (entry.path().extension() == ".done")
          finished = entry.path().string().substr(0, entry.path().string().size() - 5);
      }
      REQUIRE(!finished.empty());
      if (damaged) {
        for (const auto& entry : fs::directory_iterator(work)) {
          if (entry.path().extension() == ".done") continue;
          std::string bytes = slurp(entry.path());
          bytes[bytes.size() / 2] ^= 1;
          spit(entry.path(), bytes);
        }
      }
      stop = false;
      options.progress = {};
      const auto report = rewritten(source, temp / "out", options);
      REQUIRE_OK(report);
      CHECK((report.value().taken_files > 0) == !damaged);
      CHECK(!fs::exists(work));
      auto expected = contents(temp / "whole"), found = contents(temp / "out");
      expected.erase("README.md");  // has the folder's name
      found.erase("README.md");
      CHECK(found == expected);
    }
  }

  TEST_CASE("a conversion does not take over what a conversion of something else has left") {
    TempDir temp;
    std::atomic<bool> stop{false};
    ExportOptions options{.max_shard_bytes = 20000, .cancel = &stop};
    options.progress = [&](int64_t done, int64_t total) { stop = stop || done > total * 3 / 4; };
    REQUIRE(!rewritten(golden("hf-llama-gqa-sharded"), temp / "out", options).ok());
    const auto report =
        rewritten(golden("hf-llama-gqa-sharded"), temp / "out", {.dtype = DType::kBf16, .max_shard_bytes = 20000});
    REQUIRE_OK(report);
    CHECK(report.value().taken_files == 0);
    CHECK(HfFolder::open(temp / "out").value()->dtype() == DType::kBf16);
    for (const auto& [name, bytes] : contents(temp / "out")) CHECK(!has(name, ".done"));
  }

  TEST_CASE("a disk that is full, or fails, at any call leaves the target as it was, and what is done to go on with") {
    TempDir temp;
    const fs::path checkpoint = imported(temp, "hf-gpt2-tied"), work = temp / ".out.converting";
    ckpt::PosixBackend io;
    REQUIRE(export_hf(io, checkpoint, temp / "whole", {.max_shard_bytes = 40000}, decode).ok());
    auto whole = contents(temp / "whole");
    whole.erase("README.md");
    for (const int error : {ENOSPC, EIO}) {
      bool fired = true;
      int64_t tried = 0, most_kept = 0;
      for (int64_t call = 0; fired; ++call, ++tried) {
        CAPTURE(call);
        FailingDisk::Plan plan;
        plan.left = call;
        plan.error = error;
        ExportOptions options{.max_shard_bytes = 40000};
        options.make_io = [&] { return std::make_unique<FailingDisk>(plan); };
        const auto report = export_hf(io, checkpoint, temp / "out", options, decode);
        fired = plan.fired;
        REQUIRE(report.ok() == !fired);
        CHECK(fs::exists(temp / "out") == report.ok());
        if (!report.ok()) {
          CHECK(report.error().code == (error == ENOSPC ? ErrorCode::kNoSpace : ErrorCode::kIo));
          int64_t kept = 0;
          for (const auto& [name, bytes] : fs::exists(work) ? contents(work) : std::map<std::string, std::string>()) {
            if (has(name, ".done")) continue;
            CHECK(fs::exists(work / (name + ".done")));
            CHECK(bytes == whole.at(name));
            ++kept;
          }
          CHECK(fs::exists(work) == (kept > 0));
          CHECK(has(report.error().message, "finished file") == (kept > 0));
          most_kept = std::max(most_kept, kept);
          plan.left = INT64_MAX;
          const auto again = export_hf(io, checkpoint, temp / "out", options, decode);
          REQUIRE_OK(again);
          CHECK(again.value().taken_files == kept);
        }
        CHECK(!fs::exists(work));
        auto found = contents(temp / "out");
        found.erase("README.md");
        CHECK(found == whole);
        fs::remove_all(temp / "out");
      }
      CHECK(tried > 8);
      CHECK(most_kept > 1);
    }
  }

  TEST_CASE("a conversion finds room for all that is still to be written before its first byte") {
    TempDir temp;
    const fs::path checkpoint = imported(temp, "hf-gpt2-tied"), work = temp / ".out.converting";
    ckpt::PosixBackend io;
    for (const bool hdf5 : {false, true}) {
      CAPTURE(hdf5);
      FailingDisk::Plan plan;
      plan.left = INT64_MAX;
      ExportOptions options{.max_shard_bytes = 40000, .hdf5 = hdf5};
      options.make_io = [&] { return std::make_unique<FailingDisk>(plan); };
      int64_t needed = 0;
      const auto refused = [&](int64_t free_bytes, const std::string& missing) {
        plan.free_bytes = free_bytes;
        plan.created = 0;
        const auto report = export_hf(io, checkpoint, temp / "out", options, decode);
        REQUIRE(!report.ok());
        CHECK(report.error().code == ErrorCode::kNoSpace);
        const std::string& message = report.error().message;
        CAPTURE(message);
        CHECK(has(message, fmt::format("{}: {} bytes free, what is still to be written needs ", temp.path.string(),
                                       free_bytes)));
        CHECK(has(message, missing));
        CHECK(plan.created == 0);
        CHECK(!fs::exists(temp / "out"));
        needed = std::stoll(message.substr(message.find("needs ") + 6));
      };
      refused(0, " are missing");
      CHECK(!fs::exists(work));
      refused(needed - 1, ": 1 are missing");
      const int64_t all = needed;
      if (!hdf5) {  // files that are done need no room any more
        std::atomic<bool> stop{false};
        plan.free_bytes = all;
        options.cancel = &stop;
        options.progress = [&](int64_t done, int64_t total) { stop = stop || done > total * 3 / 4; };
        REQUIRE(!export_hf(io, checkpoint, temp / "out", options, decode).ok());
        options.cancel = nullptr;
        options.progress = {};
        refused(0, "from which the same command resumes");
        CHECK(needed < all);
        CHECK(fs::exists(work));
      }
      plan.free_bytes = needed;
      const auto report = export_hf(io, checkpoint, temp / "out", options, decode);
      REQUIRE_OK(report);
      CHECK((report.value().taken_files > 0) == !hdf5);
      int64_t written = 0;
      for (const auto& [name, bytes] : contents(temp / "out")) {
        if (has(name, ".safetensors") && !has(name, ".json")) written += static_cast<int64_t>(bytes.size());
      }
      if (!hdf5) CHECK(all >= written);
      fs::remove_all(temp / "out");
    }
    // A file that is there already, and gets a name more, needs none.
    const fs::path llama = [&] {
      auto report = import_hf(io, golden("hf-llama-tied-bias"), temp / "llama", {}, encode);
      REQUIRE_OK(report);
      return report.value().dir;
    }();
    REQUIRE_OK(export_hf(io, llama, temp / "dual", {.dtype = DType::kF32, .hdf5 = true}, decode));
    FailingDisk::Plan plan;
    plan.left = INT64_MAX;
    plan.free_bytes = 0;
    ExportOptions options{.dtype = DType::kF32, .hdf5 = true};
    options.make_io = [&] { return std::make_unique<FailingDisk>(plan); };
    const auto linked = export_hf(io, temp / "dual", temp / "linked", options, decode);
    REQUIRE_OK(linked);
    CHECK(linked.value().linked);
  }

  TEST_CASE("a conversion into a mounted folder, cut off at any call, leaves no half of a model and resumes") {
    TempDir temp;
    const fs::path checkpoint = imported(temp, "hf-gpt2-tied"), volume = temp / "volume";
    ckpt::PosixBackend io;
    REQUIRE(export_hf(io, checkpoint, temp / "whole", {.max_shard_bytes = 40000}, decode).ok());
    auto whole = contents(temp / "whole");
    whole.erase("README.md");
    for (const bool dies : {false, true}) {
      CAPTURE(dies);
      bool fired = true;
      int64_t taken = 0;
      for (int64_t call = 0; fired; ++call) {
        CAPTURE(call);
        fs::remove_all(volume);
        fs::create_directory(volume);
        FailingDisk::Plan plan{.left = call, .volume = volume, .names = true, .dies = dies};
        ExportOptions options{.max_shard_bytes = 40000};
        options.make_io = [&] { return std::make_unique<FailingDisk>(plan); };
        const auto report = export_hf(io, checkpoint, volume, options, decode);
        fired = plan.fired;
        const bool made = fs::exists(volume / "config.json");
        CHECK((made || !report.ok()));
        if (made) {  // all of it is there, whatever was said
          auto found = contents(volume);
          std::erase_if(found, [](const auto& file) { return has(file.first, ".volume.converting/"); });
          found.erase("README.md");
          CHECK(found == whole);
        } else if (!dies) {  // what is done stays for the next one, and nothing else
          for (const auto& [name, bytes] : contents(volume)) {
            CHECK(name.starts_with(".volume.converting/model-"));
            if (!has(name, ".done")) CHECK(bytes == whole.at(fs::path(name).filename()));
          }
        }
        if (made) continue;
        plan.left = INT64_MAX;
        plan.dead = plan.dies = plan.fired = false;
        const auto again = export_hf(io, checkpoint, volume, options, decode);
        REQUIRE_OK(again);
        taken = std::max(taken, again.value().taken_files);
        plan.fired = true;
        auto found = contents(volume);
        found.erase("README.md");
        CHECK(found == whole);
      }
      CHECK(taken > 1);  // also what had been moved
    }
  }

  TEST_CASE("a model that is replaced in a mounted folder is there, old or new, until the new one is safe") {
    TempDir temp;
    const fs::path checkpoint = imported(temp, "hf-gpt2-tied"), volume = temp / "volume";
    const fs::path work = volume / ".volume.converting";
    ckpt::PosixBackend io;
    REQUIRE(export_hf(io, checkpoint, temp / "whole", {.max_shard_bytes = 40000}, decode).ok());
    REQUIRE(export_hf(io, checkpoint, temp / "old", {.dtype = DType::kBf16}, decode).ok());
    auto whole = contents(temp / "whole"), old = contents(temp / "old");
    whole.erase("README.md");
    old.erase("README.md");
    const auto model_in = [&](const fs::path& dir) {
      auto found = contents(dir);
      std::erase_if(found, [](const auto& file) { return has(file.first, ".volume.converting/"); });
      found.erase("README.md");
      return found;
    };
    bool fired = true;
    int64_t halves = 0;
    for (int64_t call = 0; fired; ++call) {
      CAPTURE(call);
      fs::remove_all(volume);
      fs::copy(temp / "old", volume, fs::copy_options::recursive);
      FailingDisk::Plan plan{.left = call, .volume = volume, .names = true, .dies = true};
      ExportOptions options{.max_shard_bytes = 40000, .overwrite = true};
      options.make_io = [&] { return std::make_unique<FailingDisk>(plan); };
      const auto first = export_hf(io, checkpoint, volume, options, decode);
      fired = plan.fired;
      CHECK((first.ok() || fired));
      if (!fired) break;
      if (fs::exists(volume / "config.json")) CHECK((model_in(volume) == old || model_in(volume) == whole));
      // The next one finds the disk full.
      plan.left = 0;
      plan.dead = plan.dies = plan.fired = plan.names = false;
      const auto full = export_hf(io, checkpoint, volume, options, decode);
      REQUIRE(!full.ok());
      if (fs::exists(volume / "config.json")) {
        CHECK((model_in(volume) == old || model_in(volume) == whole));
      } else {
        ++halves;
        const auto kept = contents(work);
        for (const auto& [name, bytes] : whole) {
          if (has(name, ".safetensors") && !has(name, ".json")) CHECK(kept.at(name) == bytes);
        }
      }
      plan.left = INT64_MAX;
      REQUIRE_OK(export_hf(io, checkpoint, volume, options, decode));
      CHECK(model_in(volume) == whole);
      CHECK(!fs::exists(work));
    }
    CHECK(halves > 3);
  }

  TEST_CASE("two conversions into one folder do not meet") {
    TempDir temp;
    bool asked = false;
    ExportOptions options;
    options.progress = [&](int64_t, int64_t) {
      if (std::exchange(asked, true)) return;
      const auto second = rewritten(golden("hf-gpt2-erf-untied"), temp / "out");
      REQUIRE(!second.ok());
      CHECK(has(second.error().message, "another process is writing this folder"));
    };
    CHECK(rewritten(golden("hf-gpt2-tied"), temp / "out", options).ok());
    CHECK(asked);
  }

  TEST_CASE("an import in many files, by small windows, is the import in one; stopped, it goes on") {
    for (const std::string name : {"hf-gpt2-tied", "hf-llama-gqa-sharded"}) {
      CAPTURE(name);
      TempDir temp;
      ckpt::PosixBackend io;
      ImportOptions options;
      options.mesh = {.tp = 2, .pp = 1, .dp = 2};
      REQUIRE(import_hf(io, golden(name), temp / "one", options, encode).ok());
      options.file_bytes = 8000;
      options.memory_bytes = int64_t{32} << 20;
      std::atomic<bool> stop{false};
      options.cancel = &stop;
      options.progress = [&](int64_t done, int64_t total) { stop = stop || done > total / 2; };
      const auto stopped = import_hf(io, golden(name), temp / "many", options, encode);
      REQUIRE(!stopped.ok());
      CHECK(stopped.error().code == ErrorCode::kStopped);
      CHECK(!fs::exists(temp / "many" / "step-00000000"));
      stop = false;
      options.progress = {};
      const auto report = import_hf(io, golden(name), temp / "many", options, encode);
      REQUIRE_OK(report);
      const auto one = CheckpointWeights::open(io, temp / "one" / "step-00000000", decode);
      const auto many = CheckpointWeights::open(io, report.value().dir, decode);
      REQUIRE(one.ok());
      REQUIRE_OK(many);
      CHECK(weights_of(*one.value()) == weights_of(*many.value()));
      CHECK(many.value()->manifest().files.size() > one.value()->manifest().files.size());
      CHECK(one.value()->files() == many.value()->files());
      for (const auto& entry : fs::directory_iterator(temp / "many")) CHECK(entry.path().filename() == "step-00000000");
    }
  }

  TEST_CASE("problems name file, tensor, what was found and what was expected") {
    TempDir temp;
    fs::copy(golden("hf-gpt2-tied"), temp / "in");
    Tensors tensors = load(temp / "in" / "model.safetensors");
    std::swap(tensors["transformer.h.0.mlp.c_fc.weight"].shape[0], tensors["transformer.h.0.mlp.c_fc.weight"].shape[1]);
    tensors.erase("transformer.ln_f.bias");
    tensors["stray"] = {"F32", {1}, "1234"};
    store(temp / "in" / "model.safetensors", tensors);
    const auto folder = HfFolder::inspect(temp / "in");
    REQUIRE(folder.ok());
    std::vector<std::string> told;
    for (const TensorProblem& problem : folder.value()->problems()) told.push_back(problem.text());
    std::sort(told.begin(), told.end());
    CHECK(told == std::vector<std::string>{
                      "model.safetensors: stray: unexpected, F32 [1]",
                      "model.safetensors: transformer.h.0.mlp.c_fc.weight: shape [44, 36], expected [36, 44]",
                      "transformer.ln_f.bias: missing, expected [36]"});
    CHECK(!HfFolder::open(temp / "in").ok());
  }
}
