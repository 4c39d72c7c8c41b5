// cairn import: a Hugging Face folder -> a checkpoint of any layout.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "ckpt/store/posix_backend.h"
#include "converters/import.h"
#include "dsl/dsl.h"
#include "runtime/mesh/mesh.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

struct Options {
  std::string from, to, mesh = "tp=1", name;
  bool untie = false, overwrite = false;
};

/// "tp=2,pp=2,dp=1".
Result<MeshConfig> parse_mesh(const std::string& text) {
  MeshConfig out{.tp = 1, .pp = 1, .dp = 1};
  std::set<std::string_view> seen;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view part = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    const std::string_view key = part.substr(0, part.find('='));
    const std::string_view digits = part.substr(std::min(part.size(), key.size() + 1));
    int64_t* axis = key == "tp" ? &out.tp : key == "pp" ? &out.pp : key == "dp" ? &out.dp : nullptr;
    int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (axis == nullptr || error != std::errc() || end != digits.data() + digits.size() || value < 1 ||
        value > 1'000'000 || !seen.insert(key).second) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("--mesh {}: \"{}\" is not understood; expected tp=N, pp=N, dp=N, each once, such as "
                               "tp=2,pp=2",
                               text, part)};
    }
    *axis = value;
  }
  return out;
}

Result<int> run(const Options& options, bool json) {
  convert::ImportOptions import;
  RT_TRY_SET(import.mesh, parse_mesh(options.mesh));
  import.untie = options.untie;
  import.replace = options.overwrite;
  import.run_name = options.name;
  ckpt::PosixBackend io;
  const auto encode = [](const Recipe& recipe) {
    const std::string text = dsl::encode_recipe(recipe);
    return convert::RecipeText{text, dsl::recipe_hash(text)};
  };
  RT_TRY_SET(const convert::ImportReport report, convert::import_hf(io, options.from, options.to, import, encode));
  for (const std::string& warning : report.warnings) fmt::print(stderr, "cairn import: warning: {}\n", warning);
  if (json) {
    fmt::print("{}\n",
               nlohmann::json{{"checkpoint", report.dir.string()},
                              {"parameters", report.parameters},
                              {"tensors", report.tensors},
                              {"bytes", report.payload_bytes},
                              {"files_kept", report.files_kept},
                              {"dtype_of_source", dtype_name(report.dtype)},
                              {"mesh", {{"tp", import.mesh.tp}, {"pp", import.mesh.pp}, {"dp", import.mesh.dp}}},
                              {"seconds", report.seconds},
                              {"warnings", report.warnings}}
                   .dump(2));
    return 0;
  }
  fmt::print("{}: {} parameters in {} tensors, {} for {} rank{}; {} files kept; {:.1f} s\n", report.dir.string(),
             format_count(static_cast<double>(report.parameters)), report.tensors, format_bytes(report.payload_bytes),
             report.ranks, report.ranks == 1 ? "" : "s", report.files_kept, report.seconds);
  return 0;
}

}  // namespace

void add_import(CLI::App& app, Session& session) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("import", "a Hugging Face folder -> a checkpoint of any layout");
  command->add_option("hf_dir", options->from, "folder with config.json and safetensors (families gpt2, llama)")
      ->required();
  command->add_option("checkpoints", options->to, "folder for checkpoints; step-00000000 is written in it")->required();
  command->add_option("--mesh", options->mesh, "layout of the shards: tp=N,pp=N,dp=N (any layout loads into any other)")
      ->capture_default_str();
  command->add_option("--name", options->name, "name of the run; default: the folder's");
  command->add_flag("--untie", options->untie, "keep an embedding and a head that differ though the config ties them");
  command->add_flag("--overwrite", options->overwrite, "replace a step 0 that is there");
  add_json_flag(*command, session);
  command->final_callback(
      [options, &session] { session.action = [options, &session] { return run(*options, session.json); }; });
}

}  // namespace cairn::tools
