// Saves and loads a checkpoint on command, for ckpt_speed.py, which interleaves it with other programs.
//   ckpt_speed DIR MEGABYTES FILES [TENSORS [COLUMNS]]
// The state: float32 tensors of 64 MiB, of COLUMNS columns (1024), or TENSORS smaller ones of sizes a little apart from
// each other (a quarter of them no multiple of 4096 bytes); made up; in shared memory as the snapshot arena is, with
// huge pages where the system gives them (shmem_enabled at `advise`), from and to which large shards then go in place.
// Each word on stdin is done once and answered with one line of JSON: seconds, the CPU seconds of all threads, bytes of
// payload, peak memory beyond the state (what is kept between saves included).
//   first    save whose HDF5 structure is not known yet
//   save     hashing on the way, every fsync, the commit, under a new step number
//   persist  the same as the agent does it, which compares the sums that the update has left in the same pass
//   pair     two saves of different steps at once, by two threads; `newest` is what a reader finds afterwards
//   remove   the checkpoints before the newest
//   retire   the same as retention does it: the next save writes over their files
//   load     the newest: every byte, checksums compared, into memory that is aligned and touched
//   load_cold  the same, through buffers that are not kept from command to command
//   unverified  the same, checksums not compared
//   columns  the second quarter of the columns of each tensor, verified; `read` and `wanted` bytes
//   sparse   the same, checksums not compared
//   beside   saves and removals for 4 seconds by a thread of the priority that the agent's has
//   train    4 seconds of what a training does: products of small matrices, then passes over memory; `steps` done
//   copy     memcpy of the same bytes by one thread
//   quit

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "ckpt/format/names.h"
#include "ckpt/persist/layout.h"
#include "ckpt/persist/priority.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/plan/load_plan.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/tensors/planned_range.h"
#include "runtime/core/random.h"
#include "runtime/core/word_sums.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

constexpr int64_t kTensorBytes = int64_t{64} << 20;
constexpr double kSpellSeconds = 4;

struct Region {
  std::byte* data = nullptr;
  int64_t size = 0;
  bool huge_pages = false;
};

struct State {
  Manifest skeleton;
  std::vector<WriterPart> plain, summed;
  std::vector<int64_t> at;  // of each tensor in `bytes`
  Region bytes, target;
  int64_t payload = 0;
};

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double cpu_s() {
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

// A field of this file in bytes; -1 when it is not there.
int64_t bytes_in(const char* path, std::string_view field) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(field)) return std::strtoll(line.c_str() + field.size() + 1, nullptr, 10) * 1024;
  }
  return -1;
}

int64_t status_bytes(std::string_view field) { return bytes_in("/proc/self/status", field); }

Region allocate(int64_t size) {  // lives as long as the program
  const int fd = ::memfd_create("ckpt_speed", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, size) != 0) return {};
  void* memory = ::mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (memory == MAP_FAILED) return {};
  ::madvise(memory, static_cast<size_t>(size), MADV_HUGEPAGE);
  const auto huge_bytes = [] { return bytes_in("/proc/self/smaps_rollup", "ShmemPmdMapped:"); };
  const int64_t huge_before = huge_bytes();
  std::memset(memory, 1, static_cast<size_t>(size));  // first touch is no part of what is measured
  return {static_cast<std::byte*>(memory), size, huge_bytes() - huge_before >= size / 2};
}

State make_state(int64_t size, int64_t tensors, int64_t files, int64_t large_columns) {
  State state;
  Manifest& m = state.skeleton;
  m.run = {"bench", "bench", {}};
  m.recipe = "{}";
  m.recipe_hash = "none";
  m.mesh = {.dp = files, .world = files};
  int64_t end = 0;
  for (int64_t t = 0; t < tensors; ++t) {
    int64_t rows = size / tensors / 4 / large_columns, columns = large_columns;
    if (size / tensors < kTensorBytes) {
      columns = 256;  // rows of 1 KiB
      rows = std::max<int64_t>(1, size / tensors / 1024 + (t % 7 - 3) / 2 * 4 + (t % 4 == 0 ? 1 : 0));
    }
    m.tensors.push_back({fmt::format("layers.{}.weight", t), "weight", DType::kF32, {rows, columns}});
    state.at.push_back(end);
    end += (rows * columns * 4 + kIoAlign - 1) / kIoAlign * kIoAlign;
    state.payload += rows * columns * 4;
  }
  state.bytes = allocate(end);
  state.target = allocate(end);
  if (state.bytes.data == nullptr || state.target.data == nullptr) {
    fmt::print(stderr, "ckpt_speed: no memory for twice {} bytes\n", end);
    std::exit(74);
  }
  for (int64_t at = 0; at < end; at += 8) {
    const uint64_t word = mix64(static_cast<uint64_t>(at));
    std::memcpy(state.bytes.data + at, &word, 8);
  }
  for (int64_t f = 0; f < files; ++f) state.plain.push_back({shard_file_name(f, files), {}});
  state.summed = state.plain;
  for (int64_t t = 0; t < tensors; ++t) {
    const Shape& shape = m.tensors[t].shape;
    ShardData data{.tensor = t,
                   .lo = {0, 0},
                   .hi = {shape[0], shape[1]},
                   .data = state.bytes.data + state.at[t],
                   .bytes = shape[0] * shape[1] * 4};
    state.plain[t % files].shards.push_back(data);
    data.word_sums = word_sums(data.data, data.bytes / 4);
    state.summed[t % files].shards.push_back(std::move(data));
  }
  return state;
}

struct Answer {
  std::string more;  // further fields of the JSON object
  int64_t bytes = 0;
};

class Bench {
 public:
  Bench(std::filesystem::path dir, State state) : dir_(std::move(dir)), state_(std::move(state)) {
    state_.skeleton.step = 0;
  }

  int64_t kept_bytes() const { return cache_.memory_bytes(); }  // between saves
  std::string_view backend() const { return io_->name(); }
  const State& state() const { return state_; }

  Result<Answer> run(const std::string& word) {
    if (word == "first") return save(state_.plain, nullptr);
    if (word == "save") return save(state_.plain, &cache_);
    if (word == "persist") return save(state_.summed, &cache_);
    if (word == "pair") return pair();
    if (word == "remove") return remove();
    if (word == "retire") return retire();
    if (word == "load") return load(true, &cache_.buffers());
    if (word == "load_cold") return load(true, nullptr);
    if (word == "unverified") return load(false, &cache_.buffers());
    if (word == "columns") return columns(true);
    if (word == "sparse") return columns(false);
    if (word == "beside") return beside();
    if (word == "train") return train();
    if (word == "copy") {
      std::memcpy(state_.target.data, state_.bytes.data, static_cast<size_t>(state_.bytes.size));
      return Answer{"", state_.bytes.size};
    }
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: not a command", word)};
  }

 private:
  Result<Answer> save(const std::vector<WriterPart>& parts, SaveCache* cache) {
    ++state_.skeleton.step;
    SaveOptions options;
    options.cache = cache;
    options.huge_pages = state_.bytes.huge_pages;
    options.spares = &spares_;
    RT_TRY_SET(SaveReport report, save_checkpoint(*io_, dir_, std::move(state_.skeleton), parts, options));
    state_.skeleton = std::move(report.manifest);
    return Answer{fmt::format(R"(,"layout_s":{:.6f},"sync_s":{:.6f},"file_bytes":{},"reused":{})",
                              report.layout_seconds, report.sync_seconds, report.file_bytes, report.reused_files),
                  report.payload_bytes};
  }

  Result<Answer> pair() {
    const std::unique_ptr<IoBackend> other = make_best_backend();
    Manifest older = state_.skeleton, newer = state_.skeleton;
    older.step = state_.skeleton.step + 1;
    newer.step = state_.skeleton.step = older.step + 1;
    Status first;
    std::thread thread([&] {
      const Result<SaveReport> saved = save_checkpoint(*other, dir_, older, state_.plain);
      if (!saved.ok()) first = saved.error();
    });
    const Result<SaveReport> second = save_checkpoint(*io_, dir_, newer, state_.plain);
    thread.join();
    RT_TRY(std::move(first));
    if (!second.ok()) return Error(second.error());
    RT_TRY_SET(const CheckpointReader reader, CheckpointReader::open(*io_, second.value().dir));
    return Answer{fmt::format(R"(,"newest":{})", reader.manifest().step), 2 * second.value().payload_bytes};
  }

  Result<Answer> beside() {
    const double end_s = now_s() + kSpellSeconds;
    Result<Answer> out = Answer{};
    int64_t bytes = 0, saves = 0;
    std::thread([&] {
      lower_thread_priority(kLeastNice);
      while (out.ok() && now_s() < end_s) {
        out = save(state_.plain, &cache_);
        if (!out.ok()) break;
        bytes += out.value().bytes;
        ++saves;
        out = remove();
      }
    }).join();
    if (!out.ok()) return out;
    return Answer{fmt::format(R"(,"saves":{})", saves), bytes};
  }

  Result<Answer> train() {
    constexpr int64_t kSide = 192;
    std::vector<float> a(kSide * kSide, 1.5f), b(kSide * kSide, 0.5f), c(kSide * kSide, 0.0f);
    auto* memory = reinterpret_cast<float*>(state_.target.data);
    const int64_t count = std::min<int64_t>(state_.target.size, 64 << 20) / 4;
    const double end_s = now_s() + kSpellSeconds;
    int64_t steps = 0;
    for (; now_s() < end_s; ++steps) {
      for (int64_t repeat = 0; repeat < 4; ++repeat) {
        for (int64_t i = 0; i < kSide; ++i) {
          for (int64_t k = 0; k < kSide; ++k) {
            const float factor = a[i * kSide + k];
            for (int64_t j = 0; j < kSide; ++j) c[i * kSide + j] += factor * b[k * kSide + j];
          }
        }
      }
      const int64_t piece = count / 16, at = steps % 16 * piece;
      for (int64_t i = at; i < at + piece; ++i) memory[i] = memory[i] * 0.5f + c[i % (kSide * kSide)] * 1e-9f;
    }
    return Answer{fmt::format(R"(,"steps":{})", steps), 0};
  }

  Result<Answer> remove() {
    RT_TRY_SET(const std::vector<DirEntry> entries, io_->list(dir_));
    const std::string newest = step_dir_name(state_.skeleton.step);
    spares_.clear(*io_);
    for (const DirEntry& entry : entries) {
      if (entry.name != newest) RT_TRY(remove_tree(*io_, dir_ / entry.name));
    }
    return Answer{"", 0};
  }

  Result<Answer> retire() {
    spares_.limit(int64_t{1} << 40);
    RT_TRY_SET(const RetentionReport kept,
               apply_retention(*io_, dir_, {.keep_last = 1}, this_writer(), nullptr, &spares_));
    return Answer{"", static_cast<int64_t>(kept.removed.size())};
  }

  Result<Answer> load(bool verify, BufferStore* buffers) {
    std::memset(state_.target.data, 0, 1);
    RT_TRY_SET(CheckpointReader reader,
               CheckpointReader::open(*io_, dir_ / step_dir_name(state_.skeleton.step),
                                      {.verify = verify, .huge_pages = state_.target.huge_pages, .buffers = buffers}));
    std::vector<ReadRange> ranges;
    for (const ShardEntry& shard : reader.manifest().shards)
      ranges.push_back({shard.file, shard.offset, shard.bytes, state_.target.data + state_.at[shard.tensor]});
    RT_TRY(reader.read_ranges(ranges));
    if (std::memcmp(state_.target.data, state_.bytes.data, 4096) != 0)
      return Error{ErrorCode::kInternal, "what was loaded is not what was saved"};
    return Answer{fmt::format(R"(,"read":{},"wanted":{})", reader.stats().read_bytes, reader.stats().wanted_bytes),
                  state_.payload};
  }

  Result<Answer> columns(bool verify) {
    RT_TRY_SET(CheckpointReader reader,
               CheckpointReader::open(*io_, dir_ / step_dir_name(state_.skeleton.step), {.verify = verify}));
    std::vector<WantedBox> wanted;
    for (const TensorEntry& tensor : reader.manifest().tensors) {
      const int64_t columns = tensor.shape[1];
      wanted.push_back({tensor.kind, tensor.name, Box{{0, columns / 4}, {tensor.shape[0], columns / 2}}});
    }
    RT_TRY_SET(const std::vector<LoadRead> reads, LoadPlanner(reader.manifest()).plan_reads(wanted));
    std::vector<ReadRange> ranges;
    ranges.reserve(reads.size());
    for (const LoadRead& read : reads) ranges.push_back(range_of(read, state_.target.data + state_.at[read.wanted]));
    RT_TRY(reader.read_ranges(ranges));
    return Answer{fmt::format(R"(,"read":{},"wanted":{})", reader.stats().read_bytes, reader.stats().wanted_bytes),
                  reader.stats().wanted_bytes};
  }

  std::filesystem::path dir_;
  State state_;
  SaveCache cache_;
  SpareFiles spares_;
  std::unique_ptr<IoBackend> io_ = make_best_backend();
};

int64_t whole_number(const char* text) {
  int64_t value = 0;
  const std::string_view view = text;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  return error == std::errc() && end == view.data() + view.size() ? value : -1;
}

}  // namespace

int main(int argc, char** argv) {
  const bool counted = argc >= 4 && argc <= 6;
  const int64_t megabytes = counted ? whole_number(argv[2]) : -1, files = counted ? whole_number(argv[3]) : -1;
  const int64_t tensors = argc >= 5 ? whole_number(argv[4]) : megabytes / 64;
  const int64_t columns = argc == 6 ? whole_number(argv[5]) : 1024;
  if (megabytes < 64 || megabytes % 64 != 0 || files < 1 || tensors < files || tensors > megabytes * 64 ||
      columns < 4 || columns > kTensorBytes / 16 || kTensorBytes / 4 % columns != 0) {
    fmt::print(stderr,
               "usage: ckpt_speed DIR MEGABYTES FILES [TENSORS [COLUMNS]]\n"
               "  MEGABYTES: a multiple of 64; FILES: at most TENSORS; TENSORS: 16 KiB each or more; COLUMNS: a power "
               "of two\n");
    return 2;
  }
  Bench bench(argv[1], make_state(megabytes << 20, tensors, files, columns));
  fmt::print("{{\"backend\":\"{}\",\"bytes\":{},\"huge_pages\":{}}}\n", bench.backend(), bench.state().payload,
             bench.state().bytes.huge_pages);
  std::fflush(stdout);
  for (std::string word; std::cin >> word && word != "quit";) {
    const bool peak_known = static_cast<bool>(std::ofstream("/proc/self/clear_refs") << "5" << std::flush);
    const int64_t memory_before = status_bytes("VmRSS:") - bench.kept_bytes();
    const double begin_s = now_s(), begin_cpu_s = cpu_s();
    const Result<Answer> done = bench.run(word);
    const double seconds = now_s() - begin_s, cpu = cpu_s() - begin_cpu_s;
    if (!done.ok()) {
      fmt::print(stderr, "ckpt_speed: {}\n", done.error().message);
      return done.error().exit_code();
    }
    const int64_t extra = peak_known ? status_bytes("VmHWM:") - memory_before : -1;
    fmt::print("{{\"seconds\":{:.6f},\"cpu_s\":{:.6f},\"bytes\":{},\"extra_memory\":{}{}}}\n", seconds, cpu,
               done.value().bytes, extra, done.value().more);
    std::fflush(stdout);
  }
  return 0;
}
