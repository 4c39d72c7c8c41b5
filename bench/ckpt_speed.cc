// Saves and loads a checkpoint on command, for ckpt_speed.py, which interleaves it with other programs.
//   ckpt_speed DIR MEGABYTES FILES
// Each word on stdin is done once and answered with one line, the seconds it took:
//   save     hashing on the way, as for state that no snapshot hashed
//   persist  with the hashes that a snapshot has taken, as the agent does
//   load     every byte, checksums compared, into memory that is aligned and touched
//   copy     memcpy of the same bytes by one thread
// The state is float32 tensors of 64 MiB, made up; saved with every fsync and the commit.

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/store/uring_backend.h"
#include "runtime/core/random.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

constexpr int64_t kTensorBytes = int64_t{64} << 20;
constexpr int64_t kAlignment = 2 << 20;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, Free>;

struct State {
  Manifest skeleton;
  std::vector<WriterPart> plain, hashed;
  Memory bytes, target;
  int64_t size = 0;
};

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Memory allocate(int64_t size) {
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(kAlignment, static_cast<size_t>(size))));
  if (memory) std::memset(memory.get(), 1, static_cast<size_t>(size));  // first touch is no part of what is measured
  return memory;
}

State make_state(int64_t tensors, int64_t files) {
  State state;
  state.size = tensors * kTensorBytes;
  state.bytes = allocate(state.size);
  state.target = allocate(state.size);
  if (!state.bytes || !state.target) {
    fmt::print(stderr, "ckpt_speed: no memory for twice {} bytes\n", state.size);
    std::exit(74);
  }
  for (int64_t at = 0; at < state.size; at += 8) {
    const uint64_t word = mix64(static_cast<uint64_t>(at));
    std::memcpy(state.bytes.get() + at, &word, 8);
  }
  Manifest& m = state.skeleton;
  m.step = 1;
  m.run = {"bench", "bench", {}};
  m.recipe = "{}";
  m.recipe_hash = "none";
  m.mesh = {.dp = files, .world = files};
  const SaveOptions options;
  for (int64_t f = 0; f < files; ++f) state.plain.push_back({shard_file_name(f, files), {}});
  state.hashed = state.plain;
  for (int64_t t = 0; t < tensors; ++t) {
    const Shape shape = {kTensorBytes / 4096, 1024};
    m.tensors.push_back({fmt::format("t{}", t), "weight", DType::kF32, shape});
    ShardData data{.tensor = t,
                   .lo = {0, 0},
                   .hi = {shape[0], shape[1]},
                   .data = state.bytes.get() + t * kTensorBytes,
                   .bytes = kTensorBytes};
    state.plain[t % files].shards.push_back(data);
    for (int64_t at = 0; at < kTensorBytes; at += options.chunk_bytes) {
      data.hashes.push_back(hash_bytes(std::span(data.data + at, static_cast<size_t>(options.chunk_bytes))));
    }
    state.hashed[t % files].shards.push_back(std::move(data));
  }
  return state;
}

Status load(IoBackend& io, const std::filesystem::path& dir, const State& state) {
  RT_TRY_SET(CheckpointReader reader, CheckpointReader::open(io, dir / step_dir_name(state.skeleton.step)));
  std::vector<ReadRange> ranges;
  for (const ShardEntry& shard : reader.manifest().shards) {
    ranges.push_back({shard.file, shard.offset, shard.bytes, state.target.get() + shard.tensor * kTensorBytes});
  }
  return reader.read_ranges(ranges);
}

int64_t whole_number(const char* text) {
  int64_t value = 0;
  const std::string_view view = text;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  return error == std::errc() && end == view.data() + view.size() ? value : -1;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t megabytes = argc == 4 ? whole_number(argv[2]) : -1, files = argc == 4 ? whole_number(argv[3]) : -1;
  if (megabytes < 64 || megabytes % 64 != 0 || files < 1 || files > megabytes / 64) {
    fmt::print(stderr,
               "usage: ckpt_speed DIR MEGABYTES FILES\n  MEGABYTES: a multiple of 64; FILES: at most MEGABYTES / 64\n");
    return 2;
  }
  const std::filesystem::path dir = argv[1];
  const State state = make_state(megabytes / 64, files);
  const std::unique_ptr<IoBackend> io = make_best_backend();
  fmt::print("ready {} {} bytes\n", io->name(), state.size);
  std::fflush(stdout);
  for (std::string word; std::cin >> word;) {
    const double begin_s = now_s();
    Status status;
    if (word == "save" || word == "persist") {
      Result<SaveReport> saved = save_checkpoint(*io, dir, state.skeleton, word == "save" ? state.plain : state.hashed);
      if (!saved.ok()) status = std::move(saved).error();
    } else if (word == "load") {
      std::memset(state.target.get(), 0, 1);
      status = load(*io, dir, state);
      if (status.ok() && std::memcmp(state.target.get(), state.bytes.get(), 4096) != 0) {
        status = Error{ErrorCode::kInternal, "what was loaded is not what was saved"};
      }
    } else if (word == "copy") {
      std::memcpy(state.target.get(), state.bytes.get(), static_cast<size_t>(state.size));
    } else {
      status = Error{ErrorCode::kInvalidInput, fmt::format("{}: not a command", word)};
    }
    if (!status.ok()) {
      fmt::print(stderr, "ckpt_speed: {}\n", status.error().message);
      return status.error().exit_code();
    }
    fmt::print("{:.6f}\n", now_s() - begin_s);
    std::fflush(stdout);
  }
  return 0;
}
