// cairn ckpt label RUN STEP good|suspect|bad --why TEXT: a person's word on a checkpoint, which no rule changes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/label_store.h"
#include "ckpt/store/posix_backend.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/number_option.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

struct LabelArgs {
  std::string path, label, why;
  int64_t step = 0;
};

Result<int> label(const LabelArgs& args) {
  RT_TRY_SET(const std::filesystem::path dir, checkpoints_dir_of(args.path));
  const std::optional<ckpt::Label> label = ckpt::parse_label(args.label);
  if (!label || *label == ckpt::Label::kNew)
    return Error{ErrorCode::kInvalidInput, fmt::format("label \"{}\": expected good, suspect or bad", args.label)};
  if (args.why.find_first_not_of(" \t\n") == std::string::npos)
    return Error{ErrorCode::kInvalidInput, "--why: say in a few words why; `cairn ckpt ls` and every start tell it"};
  RT_TRY_SET(const RunLock lock, lock_run_of(dir));
  ckpt::PosixBackend io;
  RT_TRY(ckpt::find_step(io, dir, args.step));
  RT_TRY(ckpt::put_label(io, dir, args.step, *label, args.why, "hand"));
  fmt::print("step {} is {}: {}\n", args.step, args.label, printable(args.why));
  return 0;
}

}  // namespace

void add_ckpt_label(CLI::App& ckpt, Session& session) {
  CLI::App* command = ckpt.add_subcommand("label", "say that a checkpoint is good, suspect or bad");
  const auto args = std::make_shared<LabelArgs>();
  command->add_option("PATH", args->path, "run folder or folder of steps")->required();
  command->add_option("STEP", args->step, "the step")
      ->required()
      ->type_name("N")
      ->transform(whole_number(0, int64_t{1} << 50));
  command->add_option("LABEL", args->label, "good, suspect or bad")->required();
  command->add_option("--why", args->why, "in a few words, for whoever reads it later")->required()->type_name("TEXT");
  command->footer(
      "No start takes a bad one, and the newest good one is never removed. What is said here holds until it is said\n"
      "otherwise; the run's own rules do not change it.\n"
      "Exit codes: 0 done, 2 refused, 69 the run is in training, 74 an I/O error.\nExamples:\n  cairn ckpt label "
      "runs/gpt2 1200 bad --why 'answers in one language only'\n"
      "  cairn ckpt label runs/gpt2 900 good --why 'evaluated by hand'");
  command->callback([args, &session] { session.action = [args] { return label(*args); }; });
}

}  // namespace cairn::tools
