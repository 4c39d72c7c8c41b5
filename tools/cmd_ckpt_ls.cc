// cairn ckpt ls PATH: steps, ages, sizes, loss, and whether each is complete.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "ckpt/format/names.h"
#include "ckpt/mirror/place.h"
#include "ckpt/persist/read.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/posix_backend.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Leftover {
  std::string name, host;  // host: of its writer, where it is another one
  bool alive = false;
  std::string text() const {
    if (!alive) return "its writer is gone; the run's next start removes it";
    if (name.starts_with(ckpt::kSparePrefix)) return "room for the next save; the run's end or next start removes it";
    if (host.empty()) return "its writer may be at work";
    return fmt::format("its writer may be at work on {}; if it is gone, prune --leftovers --other-hosts removes it",
                       host);
  }
};

Leftover leftover_of(const std::string& name) {
  const std::optional<ckpt::WorkDir> work = ckpt::parse_work_dir_name(name);
  if (!work) return {.name = name};
  return {name, ckpt::is_of_this_host(work->writer) ? "" : work->writer.host, ckpt::may_be_alive(work->writer)};
}

/// What the manifest of a complete checkpoint has to say in one line.
struct Told {
  std::map<std::string, double> metrics;
  int64_t samples = 0, tokens = 0;
  bool weights_only = false;
  std::string origin, host;
};

Told told_by(const ckpt::Manifest& manifest) {
  const bool moments = std::any_of(manifest.tensors.begin(), manifest.tensors.end(),
                                   [](const ckpt::TensorEntry& tensor) { return ckpt::is_moment_kind(tensor.kind); });
  return {manifest.metrics, manifest.samples, manifest.tokens, !moments, manifest.origin, manifest.writer.host};
}

Result<int> list(const std::string& path, bool as_json) {
  RT_TRY_SET(const fs::path dir, checkpoints_dir_of(path));
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_checkpoints(io, dir));
  std::vector<Leftover> leftovers;
  for (const std::string& name : catalog.leftovers) leftovers.push_back(leftover_of(name));
  std::optional<int64_t> newest;
  int64_t bytes = 0;
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    if (info.complete) newest = info.step;
    bytes += info.size_bytes;
  }
  std::map<int64_t, Told> told;
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    if (!info.complete) continue;
    if (const Result<ckpt::Manifest> manifest = ckpt::read_manifest(io, info.dir); manifest.ok())
      told[info.step] = told_by(manifest.value());
  }
  if (as_json) {
    json steps = json::array(), rest = json::array();
    for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
      steps.push_back({{"step", info.step},
                       {"dir", info.dir.string()},
                       {"complete", info.complete},
                       {"created_unix_ms", info.created_unix_ms},
                       {"size_bytes", info.size_bytes}});
      if (!info.complete) steps.back().update({{"problem", info.problem}, {"unread", info.unread}});
      if (const auto more = told.find(info.step); more != told.end()) {
        steps.back().update({{"metrics", more->second.metrics},
                             {"samples", more->second.samples},
                             {"tokens", more->second.tokens},
                             {"weights_only", more->second.weights_only},
                             {"origin", more->second.origin},
                             {"host", more->second.host}});
      }
    }
    for (const Leftover& leftover : leftovers) {
      rest.push_back(
          {{"name", leftover.name}, {"writer_alive", leftover.alive}, {"other_host", !leftover.host.empty()}});
    }
    print_json({{"dir", dir.string()},
                {"checkpoints", std::move(steps)},
                {"newest_complete", newest ? json(*newest) : json()},
                {"leftovers", std::move(rest)},
                {"unknown", catalog.unknown}});
    return 0;
  }
  const Palette color = palette_for(STDOUT_FILENO);
  if (catalog.checkpoints.empty()) {
    fmt::print("{}: no checkpoints\n", dir.string());
  } else {
    fmt::print("{}{:<16}{:>14}{:>12}{:>12}{}   {}\n", color.dim, "step", "age", "size", "loss", color.reset,
               dir.string());
  }
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    const std::string age = info.created_unix_ms == 0 ? "?" : age_text(info.created_unix_ms);
    const auto more = told.find(info.step);
    const bool has_loss = more != told.end() && more->second.metrics.contains("loss");
    fmt::print("{:<16}{:>14}{:>12}{:>12}   ", info.dir.filename().string(), age, format_bytes(info.size_bytes),
               has_loss ? fmt::format("{:.5g}", more->second.metrics.at("loss")) : "-");
    if (info.complete) {
      fmt::print("{}complete{}{}{}{}\n", color.green, color.reset, info.step == newest ? ", the newest" : "",
                 more != told.end() && more->second.weights_only ? ", weights alone" : "",
                 more != told.end() && !more->second.origin.empty() ? ", " + printable(more->second.origin) : "");
    } else {
      fmt::print("{}{}{}: {}\n", color.red, info.unread ? "not read" : "damaged", color.reset, printable(info.problem));
    }
  }
  if (catalog.checkpoints.size() > 1) fmt::print("{} in all\n", format_bytes(bytes));
  for (const Leftover& leftover : leftovers) {
    fmt::print("left over: {} ({})\n", printable(leftover.name), leftover.text());
  }
  for (const std::string& name : catalog.unknown) fmt::print("not ours:  {}\n", printable(name));
  return 0;
}

}  // namespace

void add_ckpt_ls(CLI::App& ckpt, Session& session) {
  CLI::App* command = ckpt.add_subcommand("ls", "steps, ages, sizes, loss, and whether each is complete");
  const auto place = std::make_shared<ckpt::PlaceOptions>();
  command->add_option("PATH", place->path, "run folder, folder of steps, or s3://bucket/prefix")->required();
  add_store_options(*command, *place);
  add_json_flag(*command, session);
  command->footer(
      "Complete: the manifest holds and all files are there with their sizes. What lies in them is checked by verify.\n"
      "Examples:\n  cairn ckpt ls runs/gpt2\n  cairn ckpt ls runs/gpt2 --json | jq '.checkpoints[].metrics.loss'");
  command->callback([place, &session] {
    session.action = [place, &session] {
      return ckpt::is_store_address(place->path) ? list_store(*place, session.json) : list(place->path, session.json);
    };
  });
}

}  // namespace cairn::tools
