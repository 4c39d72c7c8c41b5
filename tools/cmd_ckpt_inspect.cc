// cairn ckpt inspect PATH: who wrote a checkpoint, where it stands, what is in it.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/tensors/diff.h"
#include "ckpt/tensors/numbers.h"
#include "ckpt/tensors/stats.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct InspectArgs {
  std::string path;
  std::vector<std::string> only;
  bool tensors = false, stats = false, recipe = false;
};

struct Sum {
  int64_t tensors = 0, elements = 0, shards = 0, bytes = 0;
};

/// Everything that inspect tells.
struct Seen {
  fs::path dir;
  const ckpt::Manifest& manifest;
  std::vector<Sum> tensors, files;
  std::map<std::string, Sum> kinds;
  int64_t file_bytes = 0;
  std::vector<int64_t> listed;                 // tensors asked for
  std::map<int64_t, ckpt::TensorStats> stats;  // by tensor
};

Seen look(const fs::path& dir, const ckpt::Manifest& manifest) {
  Seen seen{.dir = dir, .manifest = manifest};
  seen.tensors.resize(manifest.tensors.size());
  seen.files.resize(manifest.files.size());
  for (const ckpt::ShardEntry& shard : manifest.shards) {
    for (Sum* sum : {&seen.tensors[static_cast<size_t>(shard.tensor)], &seen.files[static_cast<size_t>(shard.file)]}) {
      ++sum->shards;
      sum->bytes += shard.bytes;
    }
  }
  for (size_t t = 0; t < manifest.tensors.size(); ++t) {
    Sum& sum = seen.kinds[manifest.tensors[t].kind];
    ++sum.tensors;
    sum.elements += count_elems(manifest.tensors[t].shape);
    sum.shards += seen.tensors[t].shards;
    sum.bytes += seen.tensors[t].bytes;
  }
  for (const ckpt::FileEntry& file : manifest.files) seen.file_bytes += file.size_bytes;
  return seen;
}

json stats_json(const ckpt::TensorStats& stats, DType dtype) {
  json out = {{"nans", stats.nans}, {"infs", stats.infs}, {"zeros", stats.zeros}};
  if (stats.finite() == 0) return out;
  const auto number = [&](long double x) {
    return ckpt::is_float(dtype) ? json(static_cast<double>(x)) : json(static_cast<int64_t>(x));
  };
  out.update({{"min", number(stats.min)}, {"max", number(stats.max)}, {"mean", stats.mean}, {"std", stats.std}});
  return out;
}

std::string stats_text(const ckpt::TensorStats& stats, DType dtype) {
  const auto number = [&](long double x) {
    return ckpt::is_float(dtype) ? fmt::format("{:.5g}", x) : fmt::format("{:.0f}", x);
  };
  std::string out = stats.finite() == 0 ? std::string("no finite element")
                                        : fmt::format("min {}  max {}  mean {:.5g}  std {:.5g}", number(stats.min),
                                                      number(stats.max), stats.mean, stats.std);
  if (stats.zeros > 0) out += fmt::format("  zeros {}", stats.zeros);
  if (stats.nans > 0) out += fmt::format("  NaN {}", stats.nans);
  if (stats.infs > 0) out += fmt::format("  inf {}", stats.infs);
  return out;
}

json to_json(const Seen& seen, const InspectArgs& args) {
  const ckpt::Manifest& manifest = seen.manifest;
  json out = {{"dir", seen.dir.string()},
              {"format", ckpt::kFormatName},
              {"version", ckpt::kFormatVersion},
              {"step", manifest.step},
              {"samples", manifest.samples},
              {"tokens", manifest.tokens},
              {"created_unix_ms", manifest.created_unix_ms},
              {"writer", {{"program", manifest.writer.program}, {"host", manifest.writer.host}}},
              {"run", {{"name", manifest.run.name}, {"id", manifest.run.id}, {"parents", manifest.run.parents}}},
              {"origin", manifest.origin},
              {"metrics", manifest.metrics},
              {"recipe_hash", manifest.recipe_hash},
              {"mesh", mesh_json(manifest.mesh)},
              {"state", json_or_nothing(manifest.state)},
              {"payload_bytes", ckpt::payload_bytes(manifest)},
              {"file_bytes", seen.file_bytes},
              {"kinds", json::object()},
              {"files", json::array()}};
  if (args.recipe) {
    json recipe = json_or_nothing(manifest.recipe);
    out["recipe"] = recipe.is_discarded() ? json(manifest.recipe) : std::move(recipe);
  }
  for (const auto& [kind, sum] : seen.kinds) {
    out["kinds"][kind] = {
        {"tensors", sum.tensors}, {"elements", sum.elements}, {"shards", sum.shards}, {"bytes", sum.bytes}};
  }
  for (size_t f = 0; f < seen.files.size(); ++f) {
    out["files"].push_back({{"name", manifest.files[f].name},
                            {"size_bytes", manifest.files[f].size_bytes},
                            {"shards", seen.files[f].shards},
                            {"payload_bytes", seen.files[f].bytes}});
    if (manifest.files[f].step >= 0) out["files"].back()["step"] = manifest.files[f].step;
  }
  if (!args.tensors) return out;
  out["tensors"] = json::array();
  for (const int64_t t : seen.listed) {
    const ckpt::TensorEntry& tensor = manifest.tensors[static_cast<size_t>(t)];
    out["tensors"].push_back({{"name", tensor.name},
                              {"kind", tensor.kind},
                              {"dtype", dtype_name(tensor.dtype)},
                              {"shape", tensor.shape},
                              {"shards", seen.tensors[static_cast<size_t>(t)].shards},
                              {"bytes", seen.tensors[static_cast<size_t>(t)].bytes}});
    if (const auto stats = seen.stats.find(t); stats != seen.stats.end())
      out["tensors"].back()["stats"] = stats_json(stats->second, tensor.dtype);
  }
  return out;
}

// --- the tree
// ---------------------------------------------------------------------------------------------------------

/// Names parted at their dots; a chain of nodes with one child each is one line.
struct Node {
  std::vector<std::pair<std::string, std::unique_ptr<Node>>> below;  // in the order of the manifest
  std::map<std::string, Node*> find;
  std::vector<int64_t> tensors;  // of this name, one a kind
  int64_t count = 0, bytes = 0;  // here and below
};

void put(Node& root, const std::string& name, int64_t tensor, int64_t bytes) {
  Node* node = &root;
  for (size_t at = 0; at <= name.size();) {
    const size_t dot = std::min(name.find('.', at), name.size());
    const std::string word = name.substr(at, dot - at);
    ++node->count;
    node->bytes += bytes;
    Node*& next = node->find[word];
    if (next == nullptr) {
      node->below.emplace_back(word, std::make_unique<Node>());
      next = node->below.back().second.get();
    }
    node = next;
    at = dot + 1;
  }
  ++node->count;
  node->bytes += bytes;
  node->tensors.push_back(tensor);
}

struct Line {
  std::string left, dtype, shape, bytes, kinds;
  std::vector<std::string> more;  // statistics
};

void lines_of(const Seen& seen, const Node& node, const std::string& name, int64_t depth, std::vector<Line>* out) {
  const Node* at = &node;
  std::string words = printable(name);
  while (at->tensors.empty() && at->below.size() == 1) {
    words += "." + printable(at->below[0].first);
    at = at->below[0].second.get();
  }
  const std::string indent(static_cast<size_t>(depth) * 2, ' ');
  if (!at->tensors.empty()) {
    const ckpt::TensorEntry& first = seen.manifest.tensors[static_cast<size_t>(at->tensors[0])];
    Line line{.left = indent + words,
              .dtype = std::string(dtype_name(first.dtype)),
              .shape = to_string(first.shape),
              .bytes = format_bytes(at->below.empty() ? at->bytes : 0)};
    int64_t bytes = 0;
    for (const int64_t t : at->tensors) {
      const ckpt::TensorEntry& tensor = seen.manifest.tensors[static_cast<size_t>(t)];
      bytes += seen.tensors[static_cast<size_t>(t)].bytes;
      line.kinds += (line.kinds.empty() ? "" : " ") + printable(tensor.kind);
      if (tensor.dtype != first.dtype) line.kinds += fmt::format(" ({})", dtype_name(tensor.dtype));
      if (tensor.shape != first.shape) line.kinds += fmt::format(" {}", to_string(tensor.shape));
      if (const auto stats = seen.stats.find(t); stats != seen.stats.end())
        line.more.push_back(
            fmt::format("{}  {:<10}  {}", indent, printable(tensor.kind), stats_text(stats->second, tensor.dtype)));
    }
    line.bytes = format_bytes(bytes);
    out->push_back(std::move(line));
  } else {
    out->push_back(
        {.left = indent + words, .bytes = format_bytes(at->bytes), .kinds = count_text(at->count, "tensor")});
  }
  for (const auto& [word, below] : at->below) lines_of(seen, *below, word, depth + 1, out);
}

void print_tree(const Seen& seen) {
  Node root;
  for (const int64_t t : seen.listed) {
    put(root, seen.manifest.tensors[static_cast<size_t>(t)].name, t, seen.tensors[static_cast<size_t>(t)].bytes);
  }
  std::vector<Line> lines;
  for (const auto& [word, below] : root.below) lines_of(seen, *below, word, 0, &lines);
  size_t left = 6, shape = 5;
  for (const Line& line : lines) {
    left = std::max(left, line.left.size());
    shape = std::max(shape, line.shape.size());
  }
  const Palette color = palette_for(STDOUT_FILENO);
  fmt::print("\n{}{:<{}}  {:<5}  {:<{}}  {:>10}  {}{}\n", color.dim, "tensor", left, "dtype", "shape", shape, "bytes",
             "kinds", color.reset);
  for (const Line& line : lines) {
    fmt::print("{:<{}}  {:<5}  {:<{}}  {:>10}  {}\n", line.left, left, line.dtype, line.shape, shape, line.bytes,
               line.kinds);
    for (const std::string& more : line.more) fmt::print("{}{}{}\n", color.dim, more, color.reset);
  }
}

void print_text(const Seen& seen, const InspectArgs& args) {
  const ckpt::Manifest& manifest = seen.manifest;
  const Palette color = palette_for(STDOUT_FILENO);
  const auto row = [&](const char* word, const std::string& text) {
    fmt::print("{}{:<12}{}{}\n", color.bold, word, color.reset, printable(text));
  };
  row("checkpoint", seen.dir.string());
  row("step", fmt::format("{}, after {} samples = {} tokens", manifest.step, manifest.samples, manifest.tokens));
  row("written",
      fmt::format("{}, {} ago, by {} on {}", time_text(manifest.created_unix_ms), age_text(manifest.created_unix_ms),
                  manifest.writer.program.empty() ? "?" : manifest.writer.program,
                  manifest.writer.host.empty() ? "?" : manifest.writer.host));
  row("run", fmt::format("{} (id {})", manifest.run.name.empty() ? "?" : manifest.run.name,
                         manifest.run.id.empty() ? "?" : manifest.run.id));
  if (!manifest.run.parents.empty()) row("continues", fmt::format("{}", fmt::join(manifest.run.parents, ", then ")));
  if (!manifest.origin.empty()) row("made as", manifest.origin);
  row("recipe", fmt::format("hash {}{}", manifest.recipe_hash.empty() ? "?" : manifest.recipe_hash,
                            args.recipe ? "" : "; --recipe prints it"));
  row("layout", fmt::format("{}: {}; it loads into any other", count_text(manifest.mesh.world, "rank"),
                            mesh_text(manifest.mesh)));
  row("size", fmt::format("{} of state in {} of {}", format_bytes(ckpt::payload_bytes(manifest)),
                          count_text(manifest.files.size(), "file"), format_bytes(seen.file_bytes)));
  for (const auto& [kind, sum] : seen.kinds) {
    row("", fmt::format("{:<12}{:>7} tensors {:>10} elements {:>8} shards {:>12}", kind, sum.tensors,
                        format_count(static_cast<double>(sum.elements)), sum.shards, format_bytes(sum.bytes)));
  }
  std::map<int64_t, int64_t> elsewhere;  // files of other steps
  for (const ckpt::FileEntry& file : manifest.files) {
    if (file.step >= 0) ++elsewhere[file.step];
  }
  for (const auto& [step, files] : elsewhere)
    row("needs", fmt::format("{} of {}", count_text(files, "file"), ckpt::step_dir_name(step)));
  for (const auto& [name, value] : manifest.metrics) row("metric", fmt::format("{} {:.6g}", name, value));
  row("state", manifest.state);
  if (args.recipe) {
    const json recipe = json_or_nothing(manifest.recipe);
    const std::string text = recipe.is_discarded() ? manifest.recipe : json_text(recipe, 2);
    fmt::print("\n{}\n", printable(text, true));
  }
  if (args.tensors) {
    print_tree(seen);
  } else {
    fmt::print("--tensors lists every tensor, --stats with its numbers\n");
  }
}

Result<int> inspect_of(const fs::path& dir, const InspectArgs& given, bool as_json) {
  InspectArgs args = given;
  args.tensors = args.tensors || args.stats || !args.only.empty();
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  std::optional<ckpt::CheckpointReader> reader;
  std::optional<ckpt::Manifest> alone;  // to be looked at also when a file is missing
  if (args.stats) {
    Result<ckpt::CheckpointReader> opened = ckpt::CheckpointReader::open(*io, dir);
    if (!opened.ok()) return std::move(opened).error();
    reader.emplace(std::move(opened).value());
  } else {
    RT_TRY_SET(ckpt::Manifest manifest, ckpt::read_manifest(*io, dir));
    alone.emplace(std::move(manifest));
  }
  Seen seen = look(dir, reader ? reader->manifest() : *alone);
  if (args.tensors) {
    for (size_t t = 0; t < seen.manifest.tensors.size(); ++t) {
      if (ckpt::matches(seen.manifest.tensors[t], args.only)) seen.listed.push_back(static_cast<int64_t>(t));
    }
    if (seen.listed.empty()) {
      return Error{ErrorCode::kInvalidInput, fmt::format("{}: no tensor matches {}; --tensors lists all", dir.string(),
                                                         fmt::join(args.only, ", "))};
    }
  }
  if (args.stats) {
    ByteProgress progress("read");
    RT_TRY_SET(const std::vector<ckpt::TensorStats> stats,
               ckpt::tensor_stats(*reader, seen.listed, {.ahead = true},
                                  [&](int64_t done, int64_t total) { progress.show(done, total); }));
    for (size_t i = 0; i < stats.size(); ++i) seen.stats[seen.listed[i]] = stats[i];
  }
  if (as_json) {
    print_json(to_json(seen, args));
  } else {
    print_text(seen, args);
  }
  return 0;
}

Result<int> inspect(const InspectArgs& args, bool as_json) {
  RT_TRY_SET(const fs::path dir, resolve_checkpoint(args.path));
  return unless_removed({dir}, inspect_of(dir, args, as_json));
}

}  // namespace

void add_ckpt_inspect(CLI::App& ckpt, Session& session) {
  CLI::App* command = ckpt.add_subcommand("inspect", "who wrote a checkpoint, where it stands, what is in it");
  const auto args = std::make_shared<InspectArgs>();
  command->add_option("PATH", args->path, "step folder, or run folder for its newest complete step")->required();
  command->add_flag("--tensors", args->tensors, "the tree of tensors: dtype, shape, bytes, kinds");
  command->add_flag("--stats", args->stats, "and of each: min, max, mean, std, NaNs, infinities, zeros; reads them");
  command->add_option("--only", args->only, "names or kind/name, * and ? as in a shell; repeatable")
      ->type_name("PATTERN")
      ->expected(1)
      ->take_all();
  command->add_flag("--recipe", args->recipe, "the recipe that it was trained with");
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 done, 2 refused, 65 damaged, 69 the step was removed meanwhile, 74 an I/O error.\nExamples:\n  "
      "cairn ckpt inspect runs/gpt2 --tensors\n"
      "  cairn ckpt inspect runs/gpt2 --stats --only 'weight/layers.0.*'\n"
      "  cairn ckpt inspect runs/gpt2/checkpoints/step-00001200 --json");
  command->callback([args, &session] { session.action = [args, &session] { return inspect(*args, session.json); }; });
}

}  // namespace cairn::tools
