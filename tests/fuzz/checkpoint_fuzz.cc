// Input: edits of a whole small checkpoint: file (manifest body, shards.bin, one of two HDF5 files), place, value. The
// manifest's checksums are made good again, those of the HDF5 files are not. Whatever it says, opening, verifying and
// reading stay inside the files; a changed HDF5 file is found; what is whole loads as it was saved.
#include "ckpt/persist/read.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/fuzz/manifest_text.h"
#include "tests/fuzz/target.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

const std::filesystem::path kStep = "/ck/step-00000012";

struct Base {
  MemoryBackend disk;
  testing::TestState state = testing::make_state(12, 1);
  std::vector<std::string> names = {"manifest.json", "shards.bin", "shard-00000-of-00002.h5",
                                    "shard-00001-of-00002.h5"};
  Base() { RT_CHECK(testing::save(disk, "/ck", state).ok(), "the base does not save"); }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Base base;
  static const auto whole = [] {
    std::vector<std::vector<std::byte>> out;
    for (const std::string& name : base.names) out.push_back(base.disk.bytes_of(kStep / name));
    return out;
  }();
  for (size_t f = 0; f < whole.size(); ++f) base.disk.bytes_of(kStep / base.names[f]) = whole[f];

  std::string files[4];
  for (size_t f = 0; f < 4; ++f)
    files[f] = fuzz::text(reinterpret_cast<const uint8_t*>(whole[f].data()), whole[f].size());
  files[0] = files[0].substr(files[0].find('\n') + 1);  // the header is written anew
  const std::string body = files[0];
  fuzz::Feed feed(data, size);
  for (int edits = 0; edits < 16 && !feed.empty(); ++edits) {
    std::string& file = files[feed.number(1) % 4];
    const uint64_t bytes = feed.number(1) % 8 + 1, value = feed.number(8);
    const uint64_t at = feed.number(4) % file.size();
    for (uint64_t i = 0; i < bytes && at + i < file.size(); ++i) file[at + i] = static_cast<char>(value >> (8 * i));
  }
  fuzz::mend_table_hash(files[0], files[1]);
  const bool same_manifest = files[0] == body;
  const bool same_files = files[2] == fuzz::text(reinterpret_cast<const uint8_t*>(whole[2].data()), whole[2].size()) &&
                          files[3] == fuzz::text(reinterpret_cast<const uint8_t*>(whole[3].data()), whole[3].size());
  files[0] = fuzz::with_header(files[0]);
  for (size_t f = 0; f < 4; ++f) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(files[f].data());
    base.disk.bytes_of(kStep / base.names[f]).assign(bytes, bytes + files[f].size());
  }

  const Result<VerifyReport> report = verify_checkpoint(base.disk, kStep, {.max_damages = 20, .structure = same_files});
  if (same_manifest) RT_CHECK(report.ok() && report.value().whole() == same_files, "a changed file is not found");
  Result<CheckpointReader> reader = CheckpointReader::open(base.disk, kStep);
  if (!reader.ok()) return 0;
  const Manifest& m = reader.value().manifest();
  for (size_t s = 0; s < m.shards.size(); ++s) {
    if (m.shards[s].bytes > 1 << 20) continue;  // of a file of 40 KB: refused above
    std::vector<std::byte> bytes(static_cast<size_t>(m.shards[s].bytes));
    const Status read = reader.value().read_shard(static_cast<int64_t>(s), bytes);
    if (read.ok() && same_manifest) {
      const TensorEntry& tensor = m.tensors[static_cast<size_t>(m.shards[s].tensor)];
      RT_CHECK(bytes == testing::cut(base.state.tensors[static_cast<size_t>(m.shards[s].tensor)], tensor.shape,
                                     m.shards[s].box, dtype_size_bytes(tensor.dtype)),
               "{} loads wrong", describe_shard(m, m.shards[s]));
    }
  }
  return 0;
}
