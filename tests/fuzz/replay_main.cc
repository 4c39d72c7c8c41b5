// replay CORPUS_DIR [MUTATIONS]: the target over every file of its corpus and over so many mutations of them, the same
// ones each time. What fails is written to crash-input in the current folder.
#include <fcntl.h>
#include <unistd.h>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "runtime/core/random.h"
#include "tests/fuzz/target.h"

using cairn::mix64;

namespace {

std::vector<uint8_t> input;  // under way
const char* label = "";
char label_text[512];

void keep_input(int number) {
  const int fd = ::open("crash-input", O_CREAT | O_TRUNC | O_WRONLY, 0644);
  if (fd >= 0 && ::write(fd, input.data(), input.size()) >= 0) ::close(fd);
  if (::write(2, label, std::strlen(label)) < 0) ::_exit(1);
  std::signal(number, SIG_DFL);
  ::raise(number);
}

void run(const std::vector<uint8_t>& bytes) {
  input = bytes;
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

void mutate(std::vector<uint8_t>& bytes, const std::vector<uint8_t>& other, uint64_t seed) {
  uint64_t state = seed;
  const auto draw = [&](uint64_t below) { return below == 0 ? 0 : mix64(++state) % below; };
  for (uint64_t count = 1 + draw(6); count > 0; --count) {
    const uint64_t at = draw(bytes.size() + 1);
    const auto here = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    const auto room = static_cast<uint64_t>(bytes.end() - here);
    switch (draw(8)) {
      case 0:
      case 1:
        if (room > 0) *here ^= static_cast<uint8_t>(1 << draw(8));
        break;
      case 2:
        if (room > 0) *here = static_cast<uint8_t>(draw(256));
        break;
      case 3: {  // numbers that are wrong in interesting ways
        const uint64_t odd[] = {0,          1,    ~uint64_t{0}, uint64_t{1} << 63, uint64_t{1} << 31,
                                0xffffffff, 4096, draw(70000)};
        const uint64_t value = odd[draw(8)];
        for (uint64_t i = 0; i < std::min<uint64_t>(room, draw(2) ? 8 : 4); ++i)
          here[static_cast<std::ptrdiff_t>(i)] = static_cast<uint8_t>(value >> (8 * i));
        break;
      }
      case 4:
        bytes.erase(here, here + static_cast<std::ptrdiff_t>(draw(std::min<uint64_t>(room, 24) + 1)));
        break;
      case 5: {
        const std::vector<uint8_t> copy(here,
                                        here + static_cast<std::ptrdiff_t>(draw(std::min<uint64_t>(room, 24) + 1)));
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(draw(bytes.size() + 1)), copy.begin(), copy.end());
        break;
      }
      case 6:
        bytes.insert(here, static_cast<uint8_t>("\"{}[],:0919-.eE\\\n \x80\xff"[draw(20)]));
        break;
      default:
        if (!other.empty()) {
          const auto from = other.begin() + static_cast<std::ptrdiff_t>(draw(other.size()));
          const auto length = static_cast<std::ptrdiff_t>(draw(std::min<uint64_t>(64, other.end() - from) + 1));
          bytes.insert(here, from, from + length);
        }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CORPUS_DIR_OR_FILE [MUTATIONS]\n", argv[0]);
    return 2;
  }
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE}) std::signal(number, keep_input);
  label = label_text;
  std::vector<std::filesystem::path> paths;
  if (std::filesystem::is_directory(argv[1])) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[1])) paths.push_back(entry.path());
  } else {
    paths.push_back(argv[1]);
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::vector<uint8_t>> corpus;
  for (const auto& path : paths) {
    std::ifstream in(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    std::snprintf(label_text, sizeof(label_text), "failed on %s\n", path.c_str());
    run(corpus.back());
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "%s: no corpus\n", argv[1]);
    return 2;
  }
  const uint64_t mutations = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  for (uint64_t k = 0; k < mutations; ++k) {
    std::snprintf(label_text, sizeof(label_text), "failed on mutation %llu\n", static_cast<unsigned long long>(k));
    std::vector<uint8_t> bytes = corpus[mix64(k) % corpus.size()];
    mutate(bytes, corpus[mix64(k + 1) % corpus.size()], mix64(k) << 8);
    run(bytes);
  }
  std::printf("%zu inputs of the corpus and %llu mutations\n", corpus.size(),
              static_cast<unsigned long long>(mutations));
  return 0;
}
