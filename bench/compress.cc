// What coding a checkpoint brings and costs, for compress.py, which makes the checkpoint and interleaves the arms.
//   compress kinds STEP_DIR ROUNDS MEGABYTES    one core, in memory: a line of JSON per round, kind and effort
//   compress disk STEP_DIR SCRATCH ROUNDS THREADS COPIES    saves and loads of that state, repeated COPIES times, raw
//                                               and coded in turn: a line of JSON each
// bf16 is what the masters give when they are rounded, as in an export of weights.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/codec/codec.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/store/uring_backend.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
constexpr int64_t kChunkBytes = int64_t{1} << 20;

[[noreturn]] void fail(const Error& error) {
  fmt::print(stderr, "{}\n", error.message);
  std::exit(1);
}

std::map<std::string, std::vector<std::byte>> by_kind(CheckpointReader& reader, int64_t most_bytes) {
  std::map<std::string, std::vector<std::byte>> out;
  const Manifest& m = reader.manifest();
  for (size_t s = 0; s < m.shards.size(); ++s) {
    const TensorEntry& tensor = m.tensors[static_cast<size_t>(m.shards[s].tensor)];
    std::vector<std::byte>& bytes = out[tensor.kind];
    if (tensor.dtype != DType::kF32 || static_cast<int64_t>(bytes.size()) >= most_bytes) continue;
    const size_t at = bytes.size();
    bytes.resize(at + static_cast<size_t>(m.shards[s].bytes));
    if (Status read = reader.read_shard(static_cast<int64_t>(s), std::span(bytes).subspan(at)); !read.ok())
      fail(read.error());
  }
  const std::vector<std::byte>& weights = out["weight"];
  std::vector<std::byte> rounded(weights.size() / 2);
  for (size_t i = 0; i < weights.size() / 4; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, weights.data() + 4 * i, 4);
    const auto half = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    std::memcpy(rounded.data() + 2 * i, &half, 2);
  }
  out["weight_bf16"] = std::move(rounded);
  return out;
}

void kinds(CheckpointReader& reader, int rounds, int64_t megabytes) {
  const auto state = by_kind(reader, megabytes << 20);
  const std::pair<const char*, Effort> efforts[] = {
      {"huffman", Effort::kHuffman}, {"level1", Effort::kLevel1}, {"level3", Effort::kLevel3}};
  for (int round = 0; round < rounds; ++round) {
    for (const auto& [kind, bytes] : state) {
      if (bytes.empty()) continue;
      const int64_t elem = kind == "weight_bf16" ? 2 : 4;
      for (const auto& [name, effort] : efforts) {
        ChunkEncoder encoder(effort);
        ChunkDecoder decoder;
        std::vector<CodedChunk> coded((bytes.size() + kChunkBytes - 1) / kChunkBytes);
        std::vector<std::byte> back(kChunkBytes);
        const auto chunk = [&](size_t i) {
          return std::span(bytes).subspan(i * kChunkBytes,
                                          std::min<size_t>(kChunkBytes, bytes.size() - i * kChunkBytes));
        };
        const auto size_of = [&](size_t i) { return static_cast<int64_t>(chunk(i).size()); };
        const auto encode = Clock::now();
        for (size_t i = 0; i < coded.size(); ++i) {
          if (Status s = encoder.encode(chunk(i), elem, size_of(i), coded[i]); !s.ok()) fail(s.error());
        }
        const double encode_s = since(encode);
        const auto decode = Clock::now();
        int64_t stored = 0;
        for (size_t i = 0; i < coded.size(); ++i) {
          const auto out = std::span(back).first(chunk(i).size());
          if (Status s = decoder.decode(coded[i].bytes, coded[i].filter_mask, elem, out); !s.ok()) fail(s.error());
          stored += static_cast<int64_t>(coded[i].bytes.size());
        }
        const double decode_s = since(decode);
        const double gb = static_cast<double>(bytes.size()) / 1e9;
        fmt::print(
            "{{\"round\":{},\"kind\":\"{}\",\"effort\":\"{}\",\"bytes\":{},\"ratio\":{:.4f},\"encode\":{:.4f},"
            "\"decode\":{:.4f}}}\n",
            round, kind, name, bytes.size(), static_cast<double>(bytes.size()) / static_cast<double>(stored),
            gb / encode_s, gb / decode_s);
      }
    }
  }
}

void disk(CheckpointReader& reader, const std::filesystem::path& scratch, int rounds, int64_t threads, int copies) {
  const Manifest& from = reader.manifest();
  std::vector<std::vector<std::byte>> payload(from.shards.size());
  for (size_t s = 0; s < payload.size(); ++s) {
    payload[s].resize(static_cast<size_t>(from.shards[s].bytes));
    if (Status read = reader.read_shard(static_cast<int64_t>(s), payload[s]); !read.ok()) fail(read.error());
  }
  Manifest skeleton = from;
  skeleton.tensors.clear();
  skeleton.files.clear();
  skeleton.shards.clear();
  std::vector<WriterPart> parts;
  for (int copy = 0; copy < copies; ++copy) {
    const auto first = static_cast<int64_t>(skeleton.tensors.size());
    for (TensorEntry tensor : from.tensors) {
      tensor.name = fmt::format("copy{}.{}", copy, tensor.name);
      skeleton.tensors.push_back(std::move(tensor));
    }
    WriterPart part{shard_file_name(copy, copies), {}};
    for (size_t s = 0; s < payload.size(); ++s) {
      const ShardEntry& shard = from.shards[s];
      part.shards.push_back(
          {first + shard.tensor, shard.box.lo, shard.box.hi, payload[s].data(), shard.bytes, {}, nullptr});
    }
    parts.push_back(std::move(part));
  }
  const std::unique_ptr<IoBackend> io = make_best_backend();
  for (int round = 0; round < rounds; ++round) {
    for (const bool coded : {round % 2 == 0, round % 2 != 0}) {
      SaveOptions options;
      options.codec = coded ? Codec::kShuffleZstd : Codec::kRaw;
      options.codec_threads = threads;
      const Result<SaveReport> saved = save_checkpoint(*io, scratch, skeleton, parts, options);
      if (!saved.ok()) fail(saved.error());
      const double gb = static_cast<double>(saved.value().payload_bytes) / 1e9;
      Result<CheckpointReader> back = CheckpointReader::open(*io, saved.value().dir, {.codec_threads = threads});
      if (!back.ok()) fail(back.error());
      const Manifest& m = back.value().manifest();
      std::vector<std::byte> memory(static_cast<size_t>(saved.value().payload_bytes));
      std::vector<ReadRange> ranges;
      std::byte* to = memory.data();
      for (const ShardEntry& shard : m.shards) {
        ranges.push_back({shard.file, shard.offset, shard.bytes, to});
        to += shard.bytes;
      }
      const auto load = Clock::now();
      if (Status read = back.value().read_ranges(ranges); !read.ok()) fail(read.error());
      const double load_s = since(load);
      for (size_t s = 0; s < m.shards.size(); ++s) {  // parts and shards keep their order
        if (std::memcmp(ranges[s].dst, payload[s % payload.size()].data(), payload[s % payload.size()].size()) != 0) {
          fmt::print(stderr, "{}: other bytes than were saved\n", describe_shard(m, m.shards[s]));
          std::exit(1);
        }
      }
      fmt::print("{{\"round\":{},\"coded\":{},\"payload\":{},\"file_bytes\":{},\"save\":{:.4f},\"load\":{:.4f}}}\n",
                 round, coded, saved.value().payload_bytes, saved.value().file_bytes, gb / saved.value().seconds,
                 gb / load_s);
      std::fflush(stdout);
      back = Error{ErrorCode::kStopped, "closed"};
      if (Status removed = remove_tree(*io, saved.value().dir); !removed.ok()) fail(removed.error());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc > 2 ? argv[1] : "";
  if (!(what == "kinds" && argc == 5) && !(what == "disk" && argc == 7)) {
    fmt::print(stderr,
               "usage: compress kinds STEP_DIR ROUNDS MEGABYTES | compress disk STEP_DIR SCRATCH ROUNDS "
               "THREADS COPIES\n");
    return 2;
  }
  const std::unique_ptr<IoBackend> io = make_best_backend();
  Result<CheckpointReader> reader = CheckpointReader::open(*io, argv[2]);
  if (!reader.ok()) fail(reader.error());
  if (what == "kinds") {
    kinds(reader.value(), std::atoi(argv[3]), std::atoll(argv[4]));
  } else {
    disk(reader.value(), argv[3], std::atoi(argv[4]), std::atoll(argv[5]), std::atoi(argv[6]));
  }
  return 0;
}
