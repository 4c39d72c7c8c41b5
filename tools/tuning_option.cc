#include "tools/tuning_option.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using trainer::TuningWish;

constexpr std::array kWords = {std::pair("kept", TuningWish::kKept), std::pair("on", TuningWish::kOn),
                               std::pair("off", TuningWish::kOff)};

}  // namespace

std::string tuning_word(TuningWish wish) {
  for (const auto& [word, of] : kWords) {
    if (of == wish) return word;
  }
  return kWords.front().first;
}

TuningWish tuning_wish(const std::string& word) {
  for (const auto& [known, of] : kWords) {
    if (word == known) return of;
  }
  return TuningWish::kKept;
}

void add_tuning_option(CLI::App& command, TuningArgs& args) {
  command
      .add_option_function<std::string>(
          "--tuning",
          [&args](const std::string& word) {
            args = {};
            if (word == "on" || word == "off") {
              args.wish = tuning_wish(word);
            } else {
              args.wish = TuningWish::kOn;
              args.given = fs::absolute(word).string();
            }
          },
          "algorithms of products on CUDA, and with --attention auto whose kernels attention has: on, timed at the "
          "start and "
          "kept in RUN/tuning.json; off, the library's first proposals; FILE, choices that runs share, for what "
          "RUN/tuning.json lacks (default: as the run had before, on in a new one)")
      ->type_name("on|off|FILE");
}

Status check_tuning(const TuningArgs& args, DeviceChoice device) {
  if (device != DeviceChoice::kCuda && args.wish == TuningWish::kOn) {
    return Error{ErrorCode::kInvalidInput,
                 "--tuning: ranks on the CPU have no algorithms to choose; leave it out, or train on CUDA: --device "
                 "cuda"};
  }
  if (args.given.empty()) return {};
  const Result<std::string> text = read_text_file(args.given);
  if (!text.ok()) return Error{ErrorCode::kInvalidInput, "--tuning: " + text.error().message};
  return {};
}

trainer::TuningFiles tuning_files(TuningWish wish, const fs::path& own, const fs::path& given, std::string layout) {
  trainer::TuningFiles out{.wish = wish, .layout = std::move(layout), .read = {}, .write = {}, .on_result = {}};
  out.read = [own, given]() -> Result<std::vector<std::pair<std::string, std::string>>> {
    std::vector<std::pair<std::string, std::string>> files;
    RT_TRY_SET(const fs::file_type there, type_of(own));
    if (there != fs::file_type::not_found) {
      RT_TRY_SET(std::string text, read_text_file(own));
      files.emplace_back(own.string(), std::move(text));
    }
    if (!given.empty()) {
      RT_TRY_SET(std::string text, read_text_file(given));
      files.emplace_back(given.string(), std::move(text));
    }
    return files;
  };
  out.write = [own](const std::string& text) -> Status {
    RT_TRY_SET(const fs::file_type there, type_of(own));
    if (there != fs::file_type::not_found) {
      RT_TRY_SET(const std::string before, read_text_file(own));
      if (before == text) return {};
    }
    return write_text_file(own, text);
  };
  return out;
}

}  // namespace cairn::tools
