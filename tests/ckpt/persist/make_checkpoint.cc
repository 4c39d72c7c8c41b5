// make_checkpoint DIR [EXPECTED_DIR]: saves the tests' small state as step 12 below DIR, with plain system calls, and
// whole tensors as raw bytes to EXPECTED_DIR/<kind>.<name>.bin for readers to compare with. Makes the golden
// checkpoint:
//   build/release/make_checkpoint DIR && cp DIR/step-00000012/*
//   tests/golden/checkpoint-v1/step-00000012/
#include <fmt/format.h>

#include <cstdio>
#include <fstream>

#include "ckpt/store/posix_backend.h"
#include "tests/ckpt/persist/test_state.h"

int main(int argc, char** argv) {
  using namespace cairn::ckpt;
  if (argc < 2) {
    fmt::print(stderr, "usage: make_checkpoint DIR [EXPECTED_DIR]\n");
    return 2;
  }
  const testing::TestState state = testing::make_state(12, 1);
  PosixBackend io;
  const cairn::Result<SaveReport> saved = testing::save(io, argv[1], state);
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
