// cairn ckpt cat PATH TENSOR: a tensor, or a slice of it, as .npy.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "ckpt/persist/read.h"
#include "ckpt/plan/load_plan.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/tensors/npy.h"
#include "runtime/core/file_calls.h"
#include "runtime/core/make_folder.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct CatArgs {
  std::string path, tensor, kind = "weight", slice, out;
};

/// A file that appears whole or not at all, and durably (where a link leads to it, the link stays); or stdout; or what
/// is there and is no file, a pipe or a device: that is written to, never replaced. A signal ends it in good order
/// while a file is being made.
class Sink {
 public:
  static Result<std::unique_ptr<Sink>> open(const std::string& path) {
    auto sink = std::unique_ptr<Sink>(new Sink);
    if (path.empty() || path == "-") {
      sink->file_ = stdout;
      return sink;
    }
    std::error_code failed;
    sink->path_ = path;
    if (fs::is_symlink(fs::symlink_status(path, failed))) {
      const fs::path real = fs::canonical(path, failed);
      sink->in_place_ = static_cast<bool>(failed);  // it leads to nothing yet, or to no name (/dev/stdout)
      if (!failed) sink->path_ = real;
      if (failed && !fs::exists(fs::status(path, failed))) {  // a file is to be made where it leads to
        const auto is_link = [&] { return fs::is_symlink(fs::symlink_status(sink->path_, failed)); };
        for (int links = 0; links < 40 && is_link(); ++links) {  // as many as Linux follows
          const fs::path to = fs::read_symlink(sink->path_, failed);
          if (failed) break;
          sink->path_ = (fs::path(sink->path_).parent_path() / to).string();
        }
        sink->in_place_ = is_link();
      }
    }
    const fs::file_status there = fs::status(sink->path_, failed);
    sink->in_place_ |= fs::exists(there) && !fs::is_regular_file(there);
    // A name of this process: two of them may write the same file, and it is one's or the other's.
    const fs::path beside = fs::path(sink->path_).parent_path() / fmt::format(".cairn-cat.{}.part", ::getpid());
    sink->temporary_ = sink->in_place_ ? sink->path_ : beside.string();
    if (!sink->in_place_) {
      RT_TRY(make_folder_of(sink->path_));
      sink->stopped_ = &stop_on_signals();
      std::remove(sink->temporary_.c_str());  // a dead one's
    }
    sink->file_ = std::fopen(sink->temporary_.c_str(), sink->in_place_ ? "wb" : "wbx");
    if (sink->file_ == nullptr) return os_error(errno, sink->path_);
    sink->half_ = !sink->in_place_;
    return sink;
  }
  ~Sink() {
    if (path_.empty()) return;
    if (file_ != nullptr) std::fclose(file_);
    if (half_) std::remove(temporary_.c_str());
  }
  Status write(std::span<const std::byte> bytes) {
    RT_TRY(go_on());
    if (std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size())
      return os_error(errno != 0 ? errno : EIO, path_.empty() ? "stdout" : path_);
    return {};
  }
  Status finish() {
    if (path_.empty()) return std::fflush(stdout) == 0 ? Status() : Status(os_error(errno, "stdout"));
    if (!in_place_ && (std::fflush(file_) != 0 || sync_to_disk(::fileno(file_)) != 0)) return os_error(errno, path_);
    if (std::fclose(std::exchange(file_, nullptr)) != 0) return os_error(errno, path_);
    if (in_place_) return {};
    RT_TRY(go_on());
    if (std::rename(temporary_.c_str(), path_.c_str()) != 0) return os_error(errno, path_);
    half_ = false;
    const fs::path folder = fs::path(path_).parent_path();
    return ckpt::PosixBackend().sync_dir(folder.empty() ? fs::path(".") : folder);
  }

 private:
  Sink() = default;
  Status go_on() const {
    if (stopped_ == nullptr || !stopped_->load(std::memory_order_relaxed)) return {};
    return Error{ErrorCode::kStopped, fmt::format("{}: stopped by a signal; nothing was written", path_)};
  }
  std::string path_, temporary_;
  bool in_place_ = false, half_ = false;  // half_: there is a temporary file
  std::FILE* file_ = nullptr;
  const std::atomic<bool>* stopped_ = nullptr;
};

Result<int> cat_of(const fs::path& dir, const CatArgs& args, bool as_json) {
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  RT_TRY_SET(ckpt::CheckpointReader reader, ckpt::CheckpointReader::open(*io, dir));
  const ckpt::Manifest& manifest = reader.manifest();
  std::string kind = args.kind, name = args.tensor;
  if (const size_t slash = name.find('/'); slash != std::string::npos) {
    kind = name.substr(0, slash);
    name = name.substr(slash + 1);
  }
  const int64_t tensor = ckpt::LoadPlanner(manifest).find(kind, name);
  if (tensor < 0) {
    std::vector<std::string> names;
    std::set<std::string> kinds;
    for (const ckpt::TensorEntry& entry : manifest.tensors) {
      kinds.insert(entry.kind);
      if (entry.kind == kind) names.push_back(entry.name);
    }
    if (names.empty()) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}: has no tensors of kind {}; it has {}", dir.string(), kind, fmt::join(kinds, ", "))};
    }
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: has no {} {}{}; `cairn ckpt inspect --tensors` lists them",
                                                       dir.string(), kind, name, suggestion(name, names))};
  }
  const ckpt::TensorEntry& entry = manifest.tensors[static_cast<size_t>(tensor)];
  Result<ckpt::Slice> slice = ckpt::parse_slice(args.slice, entry.shape);
  if (!slice.ok()) return std::move(slice).error().with(fmt::format("{}/{}", kind, name));
  if (!args.out.empty() && args.out != "-") RT_TRY(check_outside_checkpoints(args.out));  // it may be one of its files
  RT_TRY_SET(const std::unique_ptr<Sink> sink, Sink::open(args.out));
  RT_TRY(ckpt::write_npy(reader, tensor, slice.value(), {.ahead = true},
                         [&](std::span<const std::byte> bytes) { return sink->write(bytes); }));
  RT_TRY(sink->finish());
  const DType written = ckpt::npy_dtype(entry.dtype);
  if (written != entry.dtype && !as_json) {
    fmt::print(stderr, "cairn ckpt cat: NumPy has no {}: written as {}, which holds it exactly\n",
               dtype_name(entry.dtype), dtype_name(written));
  }
  if (as_json) {
    print_json({{"dir", dir.string()},
                {"kind", kind},
                {"name", name},
                {"shape", slice.value().shape},
                {"dtype", dtype_name(entry.dtype)},
                {"written_as", dtype_name(written)},
                {"out", args.out}});
  }
  return 0;
}

Result<int> cat(const CatArgs& args, bool as_json) {
  const bool to_stdout = args.out.empty() || args.out == "-";
  if (to_stdout && as_json)
    return Error{ErrorCode::kInvalidInput, "--json describes a file: give --out FILE (stdout takes the tensor)"};
  if (to_stdout && is_terminal(STDOUT_FILENO))
    return Error{ErrorCode::kInvalidInput, "a tensor is no text for a terminal: give --out FILE, or redirect stdout"};
  RT_TRY_SET(const fs::path dir, resolve_checkpoint(args.path));
  return unless_removed({dir}, cat_of(dir, args, as_json));
}

}  // namespace

void add_ckpt_cat(CLI::App& ckpt, Session& session) {
  CLI::App* command = ckpt.add_subcommand("cat", "a tensor, or a slice of it, as NumPy's .npy");
  const auto args = std::make_shared<CatArgs>();
  command->add_option("PATH", args->path, "step folder, or run folder for its newest complete step")->required();
  command->add_option("TENSOR", args->tensor, "its name, or kind/name")->required();
  command->add_option("--kind", args->kind, "weight, exp_avg, exp_avg_sq, ...")->capture_default_str();
  command->add_option("--slice", args->slice, "as NumPy writes it: \"0:10, :, -1\"; only these bytes' chunks are read")
      ->type_name("SLICE");
  command->add_option("--out", args->out, "the file; default: stdout")->type_name("FILE");
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 done, 2 refused, 65 damaged, 69 the step was removed meanwhile, 74 an I/O error, 75 "
      "stopped.\nExamples:\n  cairn ckpt cat runs/gpt2 embed.tokens --out embed.npy\n"
      "  cairn ckpt cat runs/gpt2 exp_avg/layers.0.attn.q.weight --slice '0:8,:' > q.npy");
  command->callback([args, &session] { session.action = [args, &session] { return cat(*args, session.json); }; });
}

}  // namespace cairn::tools
