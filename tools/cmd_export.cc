// cairn export: a checkpoint of any layout -> a Hugging Face folder.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "ckpt/store/posix_backend.h"
#include "converters/export.h"
#include "dsl/dsl.h"
#include "tools/commands.h"
#include "tools/model_source.h"
#include "tools/run_folder.h"

namespace cairn::tools {
namespace {

struct Options {
  std::string from, to, dtype, max_shard_size;
  bool overwrite = false, hdf5 = false;
};

Result<int> run(const Options& options, bool json) {
  convert::ExportOptions to{.overwrite = options.overwrite, .hdf5 = options.hdf5};
  if (!options.dtype.empty()) {
    RT_TRY_SET(to.dtype, parse_dtype(options.dtype).with("--dtype"));
  }
  if (!options.max_shard_size.empty()) {
    RT_TRY_SET(to.max_shard_bytes, convert::parse_size(options.max_shard_size).with("--max-shard-size"));
  }
  ckpt::PosixBackend io;
  RT_TRY_SET(const std::filesystem::path from, resolve_checkpoint(options.from));
  RT_TRY_SET(const convert::ExportReport report, convert::export_hf(io, from, options.to, to, dsl::decode_recipe));
  for (const std::string& warning : report.warnings) fmt::print(stderr, "cairn export: warning: {}\n", warning);
  if (json) {
    fmt::print("{}\n", nlohmann::json{{"checkpoint", from.string()},
                                      {"folder", report.dir.string()},
                                      {"model_type", report.model_type},
                                      {"dtype", dtype_name(report.dtype)},
                                      {"parameters", report.parameters},
                                      {"tensors", report.tensors},
                                      {"bytes", report.data_bytes},
                                      {"shards", report.shards},
                                      {"files_passed", report.files_passed},
                                      {"linked", report.linked},
                                      {"seconds", report.seconds},
                                      {"warnings", report.warnings}}
                           .dump(2));
    return 0;
  }
  fmt::print("{} -> {}: {}, {} parameters in {} tensors, {} {} in {} file{}; {} other files; {:.1f} s\n", from.string(),
             report.dir.string(), report.model_type, format_count(static_cast<double>(report.parameters)),
             report.tensors, format_bytes(report.data_bytes), dtype_name(report.dtype), report.shards,
             report.shards == 1 ? "" : "s", report.files_passed, report.seconds);
  return 0;
}

}  // namespace

void add_export(CLI::App& app, Session& session) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("export", "a checkpoint of any layout -> a Hugging Face folder");
  command->add_option("checkpoint", options->from, "a checkpoint, or a run folder: its newest complete one")
      ->required();
  command->add_option("hf_dir", options->to, "folder to make: config.json, safetensors, tokenizer files")->required();
  command->add_option("--dtype", options->dtype, "of the weights; default f32 (what was imported, if untrained)")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  command->add_option("--max-shard-size", options->max_shard_size, "of a file: 5GB, 200MB; default 5GB");
  command->add_flag("--overwrite", options->overwrite, "replace the model in a folder that is not empty");
  command->add_flag("--hdf5", options->hdf5, "each weights file is HDF5 too, with a second name: model.h5");
  add_json_flag(*command, session);
  command->final_callback(
      [options, &session] { session.action = [options, &session] { return run(*options, session.json); }; });
}

}  // namespace cairn::tools
