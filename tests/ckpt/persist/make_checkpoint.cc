// make_checkpoint DIR [EXPECTED_DIR]: saves the tests' small state as step 12 below DIR, with plain system calls, and
// whole tensors as raw bytes to EXPECTED_DIR/<kind>.<name>.bin for readers to compare with. Makes the golden
// checkpoint:
//   build/release/make_checkpoint DIR && cp DIR/step-00000012/* tests/golden/checkpoint-v1/step-00000012/
// make_checkpoint --cold DIR [EXPECTED_DIR]: a coded checkpoint of step 12 and one of step 13 that refers to it:
//   build/release/make_checkpoint --cold tests/golden/checkpoint-v1-cold
#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <string_view>

#include "ckpt/store/posix_backend.h"
#include "tests/ckpt/persist/test_state.h"

int main(int argc, char** argv) {
  using namespace cairn::ckpt;
  const bool cold = argc > 1 && std::string_view(argv[1]) == "--cold";
  if (cold) {
    --argc;
    ++argv;
  }
  if (argc < 2) {
    fmt::print(stderr, "usage: make_checkpoint [--cold] DIR [EXPECTED_DIR]\n");
    return 2;
  }
  testing::TestState state = cold ? testing::cold_state(12) : testing::make_state(12, 1);
  SaveOptions options = testing::small_options();
  if (cold) {
    options.codec = Codec::kShuffleZstd;
    options.fill_bytes = 1;  // small chunks, several a shard
  }
  PosixBackend io;
  cairn::Result<SaveReport> saved = testing::save(io, argv[1], state, options);
  if (saved.ok() && cold) {
    const Manifest base = saved.value().manifest;
    options.base = &base;
    state = testing::cold_state(13);
    saved = testing::save(io, argv[1], state, options);
  }
  if (!saved.ok()) {
    fmt::print(stderr, "{}\n", saved.error().message);
    return 1;
  }
  if (argc > 2) {
    std::filesystem::create_directories(argv[2]);
    for (size_t t = 0; t < state.tensors.size(); ++t) {
      const TensorEntry& tensor = state.skeleton.tensors[t];
      std::ofstream out(fmt::format("{}/{}.{}.bin", argv[2], tensor.kind, tensor.name), std::ios::binary);
      out.write(reinterpret_cast<const char*>(state.tensors[t].data()),
                static_cast<std::streamsize>(state.tensors[t].size()));
      if (!out.flush()) return 1;
    }
  }
  fmt::print("{}\n", saved.value().dir.string());
  return 0;
}
