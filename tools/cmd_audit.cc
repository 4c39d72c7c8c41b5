// cairn audit RUN: steps of a run are trained again from its own checkpoints, and compared bit for bit.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "ckpt/format/names.h"
#include "runtime/core/count_text.h"
#include "tools/commands.h"
#include "tools/number_option.h"
#include "tools/run/folder/audit.h"
#include "tools/run/folder/folder.h"
#include "tools/step_range.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct AuditArgs {
  std::string run, steps, scratch, device;
  std::vector<std::string> sets;
  int64_t threads = 0;
  bool keep = false;
};

std::string steps_text(const AuditLeg& leg) {
  return leg.to == leg.from + 1 ? fmt::format("step {}", leg.to) : fmt::format("steps {} to {}", leg.from + 1, leg.to);
}

std::string text_of(const AuditedLeg& one) {
  std::string out = one.first ? fmt::format("{} of {} differ, first step {}: {} {} in the run, {} here", one.differing,
                                            count_text(one.steps, "step"), one.first->step, one.first->field,
                                            one.first->in_run, one.first->here)
                              : fmt::format("{} equal", count_text(one.steps, "step"));
  if (one.tensors) {
    out += fmt::format("; {}: {}", ckpt::step_dir_name(one.leg.to),
                       *one.tensors == 0
                           ? fmt::format("{} equal", count_text(one.tensors_in_all, "tensor"))
                           : fmt::format("{} of {} differ", *one.tensors, count_text(one.tensors_in_all, "tensor")));
  }
  return out;
}

json json_of(const AuditedLeg& one) {
  json out = {{"from", one.leg.from},        {"to", one.leg.to},     {"segment", one.leg.segment.n},
              {"mesh", one.leg.layout.mesh}, {"equal", one.equal()}, {"steps", one.steps},
              {"differing", one.differing}};
  if (one.first)
    out["first"] = {{"step", one.first->step},
                    {"field", one.first->field},
                    {"in_run", one.first->in_run},
                    {"here", one.first->here}};
  if (one.tensors) out["checkpoint"] = {{"tensors", one.tensors_in_all}, {"differing", *one.tensors}};
  return out;
}

Result<int> run_audit(const AuditArgs& args, bool as_json) {
  const fs::path run = args.run;
  if (is_gone(run / "run.json")) return Error{ErrorCode::kInvalidInput, args.run + ": no run folder"};
  AuditOptions options{.sets = args.sets};
  RT_TRY_SET(const StepRange range, step_range("--steps", args.steps));
  options.first = range.first;
  options.last = range.last;
  if (args.threads > 0) options.train_more = {"--threads", std::to_string(args.threads)};
  if (!args.device.empty()) options.train_more.insert(options.train_more.end(), {"--device", args.device});
  const auto say = [&](const std::string& text) {
    if (as_json) return;
    fmt::print("{}\n", text);
    std::fflush(stdout);
  };
  options.begins = [&](const AuditLeg& leg) {
    say(fmt::format("{}, {}: training again from {}", steps_text(leg), leg.layout.mesh,
                    leg.from == 0 ? "the beginning" : ckpt::step_dir_name(leg.from)));
  };
  options.told = [&](const AuditedLeg& one) { say("  " + text_of(one)); };
  RT_TRY_SET(AuditScratch scratch,
             AuditScratch::take(args.scratch.empty() ? run / "audit" : fs::path(args.scratch), run));
  RT_TRY_SET(const std::vector<AuditedLeg> legs, audit(run, scratch, options));
  const auto bad = std::ranges::find_if(legs, [](const AuditedLeg& one) { return !one.equal(); });
  const bool equal = bad == legs.end();
  const bool complete = legs.back().leg.to == range.last;
  if (as_json) {
    json list = json::array();
    for (const AuditedLeg& one : legs) list.push_back(json_of(one));
    print_json({{"run", args.run}, {"equal", equal}, {"to", legs.back().leg.to}, {"legs", std::move(list)}});
  } else if (equal) {
    say(fmt::format("steps {} to {} are the run's, bit for bit", legs.front().leg.from + 1, range.last));
  } else {
    const int64_t step = bad->first ? bad->first->step : bad->leg.to;
    if (!complete)
      say(
          fmt::format("steps {} to {} were not looked at: no checkpoint of the run is left between them and the steps "
                      "that differ",
                      legs.back().leg.to + 1, range.last));
    say(
        fmt::format("step {} is not repeated. Run the audit again: other values than these point at this machine, the "
                    "same ones at the machine, the build or the kernels that the run had. Until then, for each "
                    "checkpoint from there on:\n  cairn ckpt label {} N suspect --why \"audit of step {}\"",
                    step, args.run, step));
  }
  if (!args.keep) {
    if (const Status removed = scratch.remove(); !removed.ok())
      fmt::print(stderr, "warning: {}\n", removed.error().message);
  }
  return equal ? 0 : 1;
}

}  // namespace

void add_audit(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("audit", "train steps of a run again and compare every number");
  const auto args = std::make_shared<AuditArgs>();
  command->add_option("RUN", args->run, "the run folder; it may be training")->required();
  command->add_option("--steps", args->steps, "the steps; it begins at the newest checkpoint before the first one")
      ->type_name("A..B")
      ->required();
  command
      ->add_option("--set", args->sets, "FIELD=VALUE of the recipe, as for a layout that this machine has; repeatable")
      ->type_name("FIELD=VALUE")
      ->expected(1)
      ->take_all();
  command->add_option("--device", args->device, "where ranks compute: cpu, cuda or auto (default: the recipe's)")
      ->type_name("NAME")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  command->add_option("--threads", args->threads, "compute threads a rank (default: cores / ranks, at least 1)")
      ->type_name("N")
      ->transform(whole_number(1, 1024));
  command->add_option("--scratch", args->scratch, "where the steps are trained again (default: RUN/audit)")
      ->type_name("DIR");
  command->add_flag("--keep", args->keep, "leave that folder, with its log and its last checkpoints");
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 equal, 1 a step or a tensor differs, 2 refused, 69 a training failed.\n"
      "Examples:\n"
      "  cairn audit runs/mine --steps 900..1000\n"
      "  cairn audit runs/mine --steps 900..1000 --set mesh.tp=1 --set mesh.dp=2");
  command->callback([args, &session] { session.action = [args, &session] { return run_audit(*args, session.json); }; });
}

}  // namespace cairn::tools
