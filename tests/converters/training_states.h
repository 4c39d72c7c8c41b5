#pragma once
// Training states of other programs in tests: opened, imported, compared with what a checkpoint holds, and mutated.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ckpt/persist/read.h"
#include "ckpt/position.h"
#include "converters/elements.h"
#include "converters/foreign_state.h"
#include "converters/import.h"
#include "converters/safetensors.h"
#include "runtime/json/json.h"
#include "tests/converters/deepspeed_state.h"
#include "tests/converters/fixtures.h"
#include "tests/support/ok.h"

namespace cairn::convert::testing {

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline constexpr std::array<const char*, 3> kKinds = {"fp32", "exp_avg", "exp_avg_sq"};
inline constexpr std::array<const char*, 3> kOurKinds = {"weight", "exp_avg", "exp_avg_sq"};

inline Result<TrainingState> looked(const fs::path& dir) {
  RT_TRY_SET(std::optional<TrainingState> state, look_at_training_state(dir));
  if (!state) return Error{ErrorCode::kInvalidInput, "no training state"};
  return std::move(*state);
}

inline Result<ImportReport> imported(const fs::path& from, const fs::path& to, ImportOptions options = {}) {
  RT_TRY_SET(const TrainingState state, looked(from));
  ckpt::PosixBackend io;
  return import_state(io, state, from, to, options, encode);
}

inline ckpt::Manifest manifest_in(const fs::path& checkpoint) {
  ckpt::PosixBackend io;
  auto manifest = ckpt::read_manifest(io, checkpoint);
  REQUIRE_OK(manifest);
  return std::move(manifest).value();
}

inline trainer::TrainPosition position_in(const fs::path& checkpoint) {
  const auto position = ckpt::position_of(manifest_in(checkpoint));
  REQUIRE_OK(position);
  return position.value();
}

/// Text that an import keeps of the other program.
inline nlohmann::json foreign_in(const fs::path& checkpoint) {
  return json_or_nothing(manifest_in(checkpoint).state)["imported"]["foreign"];
}

inline std::vector<float> elements(const FlatTensors& file, const SafeTensor& tensor) {
  std::vector<float> out(static_cast<size_t>(count_elems(tensor.shape)));
  std::vector<std::byte> stored(static_cast<size_t>(tensor.end));
  REQUIRE_OK(file.read(tensor, 0, tensor.end, stored.data()));
  to_floats(tensor.dtype, stored.data(), std::ssize(out), out.data());
  return out;
}

/// The checksum of all elements, tensors by name.
inline std::string crc_of(const FlatTensors& file) {
  std::map<std::string, const SafeTensor*> by_name;
  for (const SafeTensor& tensor : file.tensors()) by_name[tensor.name] = &tensor;
  uLong crc = 0;
  for (const auto& [name, tensor] : by_name) {
    const std::vector<float> all = elements(file, *tensor);
    crc = ::crc32(crc, reinterpret_cast<const unsigned char*>(all.data()), static_cast<uInt>(all.size() * 4));
  }
  return fmt::format("{:08x}", crc);
}

using State = std::map<std::string, std::vector<float>>;  // "kind name" of a checkpoint's training state

inline State state_in(const fs::path& checkpoint) {
  ckpt::PosixBackend io;
  auto reader = ckpt::CheckpointReader::open(io, checkpoint);
  REQUIRE_OK(reader);
  const ckpt::Manifest& manifest = reader.value().manifest();
  State out;
  for (const ckpt::TensorEntry& tensor : manifest.tensors) {
    if (tensor.kind != kFileKind) out[tensor.kind + " " + tensor.name].resize(count_elems(tensor.shape));
  }
  for (size_t s = 0; s < manifest.shards.size(); ++s) {
    const ckpt::ShardEntry& shard = manifest.shards[s];
    const ckpt::TensorEntry& tensor = manifest.tensors[static_cast<size_t>(shard.tensor)];
    if (tensor.kind == kFileKind) continue;
    std::vector<float> box(static_cast<size_t>(shard.bytes / 4));
    REQUIRE_OK(reader.value().read_shard(static_cast<int64_t>(s), std::as_writable_bytes(std::span(box))));
    std::vector<float>& whole = out[tensor.kind + " " + tensor.name];
    Shape at = shard.box.lo;
    for (const float value : box) {
      whole[static_cast<size_t>(flat_offset(tensor.shape, at))] = value;
      for (size_t d = at.size(); d-- > 0;) {
        if (++at[d] < shard.box.hi[d]) break;
        at[d] = shard.box.lo[d];
      }
    }
  }
  return out;
}

/// Tensors of these names and sizes with values of their own; moments are no images of the weights.
inline std::vector<Drawn> drawn_like(const FlatTensors& like, std::mt19937& random) {
  std::vector<Drawn> out;
  for (const SafeTensor& tensor : like.tensors()) {
    Drawn one{tensor.name, tensor.shape, {}};
    for (std::vector<float>& kind : one.kinds) {
      kind.resize(static_cast<size_t>(count_elems(tensor.shape)));
      for (float& value : kind) value = static_cast<float>(static_cast<int32_t>(random() % 65536) - 32768) / 1024;
    }
    out.push_back(std::move(one));
  }
  return out;
}

/// The state in a checkpoint of these tensors, from three imports of plain weights: import_hf knows nothing of kinds.
inline State imported_plainly(const std::vector<Drawn>& tensors, const fs::path& config, const fs::path& temp) {
  State expected;
  for (size_t kind = 0; kind < 3; ++kind) {
    fs::create_directories(temp / "plain");
    fs::copy_file(config, temp / "plain" / "config.json", fs::copy_options::overwrite_existing);
    std::vector<SafeTensor> names;
    std::map<std::string, const Drawn*> by_name;
    for (const Drawn& one : tensors) {
      names.push_back({.name = one.name, .dtype = "F32", .shape = one.shape});
      by_name[one.name] = &one;
    }
    REQUIRE_OK(write_safetensors(temp / "plain" / "model.safetensors", names, {{"format", "pt"}},
                                 [&](const SafeTensor& t, const ByteSink& sink) {
                                   const std::vector<float>& all = by_name.at(t.name)->kinds[kind];
                                   return sink(reinterpret_cast<const std::byte*>(all.data()),
                                               static_cast<int64_t>(all.size() * 4));
                                 }));
    ckpt::PosixBackend io;
    const auto plain = import_hf(io, temp / "plain", temp / fmt::format("plain-{}", kind), {}, encode);
    REQUIRE_OK(plain);
    for (auto& [name, values] : state_in(plain.value().dir)) {
      expected[std::string(kOurKinds[kind]) + name.substr(name.find(' '))] = std::move(values);
    }
  }
  return expected;
}

/// Imports a state of step 5 into three layouts of ours; each holds `expected`.
inline void check_three_layouts(const fs::path& from, const fs::path& temp, const State& expected) {
  const MeshConfig meshes[] = {{.dp = 1}, {.tp = 2, .dp = 1}, {.pp = 2, .dp = 2}};
  for (size_t m = 0; m < 3; ++m) {
    const auto report = imported(from, temp / fmt::format("to-{}", m), {.mesh = meshes[m]});
    REQUIRE_OK(report);
    CHECK(report.value().step == 5);
    const State found = state_in(report.value().dir);
    REQUIRE(found.size() == expected.size());
    for (const auto& [name, values] : expected) {
      CAPTURE(name);
      REQUIRE(found.at(name) == values);
    }
  }
}

inline std::string message_of(const fs::path& from, const fs::path& to) {
  const auto done = imported(from, to);
  REQUIRE_FALSE(done.ok());
  std::error_code none;
  CHECK((!fs::exists(to, none) || fs::is_empty(to)));  // nothing half-written stays
  return done.error().message;
}

/// A file of torch.save with up to three changes.
inline std::string mutated(const std::string& whole, std::mt19937& random) {
  std::string text = whole;
  // Most bytes are data: half of the mutations go to the pickle and to the directory at the end.
  const size_t pickle = whole.find("data.pkl");
  for (uint32_t count = 1 + random() % 3; count > 0; --count) {
    const size_t at = random() % 3 == 0 ? random() % text.size()
                      : random() % 2 == 0
                          ? std::min(text.size() - 1, pickle + 8 + random() % std::min<size_t>(9000, text.size()))
                          : text.size() - 1 - random() % std::min<size_t>(4000, text.size());
    switch (random() % 4) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
        break;
      case 2:
        text.resize(std::max<size_t>(1, at));
        break;
      default:
        text.insert(at, 1 + random() % 8, static_cast<char>(random()));
    }
  }
  return text;
}

/// Reads every tensor: what has been opened is read, or refused with words.
inline void read_all(const ForeignState& state) {
  for (const FlatTensors* kind : {state.weights.get(), state.exp_avg.get(), state.exp_avg_sq.get()}) {
    for (const SafeTensor& tensor : kind == nullptr ? std::vector<SafeTensor>() : kind->tensors()) {
      std::vector<std::byte> all(static_cast<size_t>(tensor.end));
      const Status read = kind->read(*kind->find(tensor.name), 0, tensor.end, all.data());
      CHECK((read.ok() || !read.error().message.empty()));
    }
  }
}

}  // namespace cairn::convert::testing
