// cairn data losses: the loss of each token of a step that a run has made.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "ckpt/tensors/npy.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"
#include "runtime/text/tokenizer.h"
#include "runtime/trainer/trainer.h"
#include "tools/commands.h"
#include "tools/data_tools.h"
#include "tools/number_option.h"
#include "tools/run/folder/audit.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/sample_order.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using trainer::TokenLoss;

constexpr int64_t kContext = 24;  // tokens that are shown before one

struct LossesArgs {
  std::string run, out;
  int64_t step = 0, top = 50, threads = 0;
  std::vector<std::string> sets;
};

/// A step's tokens, [samples, tokens], as they go to files.
struct StepLosses {
  int64_t samples = 0, tokens = 0;
  std::vector<float> loss;        // NaN: not computed, or it does not count
  std::vector<int32_t> target;    // -1: it does not count
  std::vector<int64_t> document;  // -1: the files have none
  std::vector<TokenLoss> worst;   // the highest first
};

/// The files of the ranks that have the head. Errors: kCorrupt where they are not those of this step.
Status take_losses(const fs::path& folder, int64_t top, StepLosses& out) {
  const auto size = static_cast<size_t>(out.samples * out.tokens);
  out.loss.assign(size, std::numeric_limits<float>::quiet_NaN());
  out.target.assign(size, -1);
  out.document.assign(size, -1);
  std::vector<TokenLoss> all;
  std::error_code failed;
  for (const fs::directory_entry& file : fs::directory_iterator(folder, failed)) {
    RT_TRY_SET(const std::string bytes, read_text_file(file.path()));
    const size_t before = all.size();
    all.resize(before + bytes.size() / sizeof(TokenLoss));
    std::memcpy(all.data() + before, bytes.data(), (all.size() - before) * sizeof(TokenLoss));
  }
  if (failed) return os_error(failed.value(), folder.string());
  for (const TokenLoss& one : all) {
    if (one.sample < 0 || one.sample >= out.samples || one.token < 0 || one.token >= out.tokens) {
      return Error{ErrorCode::kCorrupt, fmt::format("{}: token {} of sample {}, and the step has {} of {} tokens",
                                                    folder.string(), one.token, one.sample, out.samples, out.tokens)};
    }
    const auto at = static_cast<size_t>(one.sample * out.tokens + one.token);
    out.target[at] = one.target;
    if (one.target >= 0) out.loss[at] = one.loss;
  }
  std::erase_if(all, [](const TokenLoss& one) { return one.target < 0; });
  if (all.empty()) return Error{ErrorCode::kCorrupt, folder.string() + ": no token of the step has a loss"};
  const auto kept = static_cast<std::ptrdiff_t>(std::min<int64_t>(top, std::ssize(all)));
  const auto higher = [](const TokenLoss& a, const TokenLoss& b) {
    return std::tuple(-a.loss, a.sample, a.token) < std::tuple(-b.loss, b.sample, b.token);
  };
  std::partial_sort(all.begin(), all.begin() + kept, all.end(), higher);
  out.worst.assign(all.begin(), all.begin() + kept);
  return {};
}

template <typename Number>
Status write_array(const fs::path& path, DType dtype, const StepLosses& of, const std::vector<Number>& numbers) {
  std::string text = ckpt::npy_header(dtype, {of.samples, of.tokens});
  text.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number));
  return write_text_file(path, text);
}

/// One of the worst tokens, with what stands before it.
Result<json> row_of(const TokenLoss& one, const OrderedStep& step, const StepLosses& losses,
                    const text::Tokenizer* tokenizer) {
  const data::SampleRef& sample = step.samples[static_cast<size_t>(one.sample)];
  const data::Dataset::Source& source = step.dataset.sources[static_cast<size_t>(sample.source)];
  json out = {{"loss", one.loss},      {"sample", one.sample}, {"position", sample.position},
              {"source", source.name}, {"token", one.token},   {"target", one.target}};
  const int64_t document = losses.document[static_cast<size_t>(one.sample * losses.tokens + one.token)];
  if (document >= 0) out["document"] = document;
  if (tokenizer == nullptr) return out;
  const int64_t first = std::max<int64_t>(0, one.token + 1 - kContext);
  std::vector<int32_t> before(static_cast<size_t>(one.token + 1 - first));
  RT_TRY(source.train->read(sample.start + first, std::ssize(before), before.data()));
  const std::vector<int32_t> target{one.target};
  RT_TRY_SET(out["before"], tokenizer->decode(before));
  RT_TRY_SET(out["text"], tokenizer->decode(target));
  return out;
}

Result<json> rows_of(const OrderedStep& step, StepLosses& losses, const fs::path& folder, int64_t top) {
  if (step.recipe.objective.kind == ObjectiveConfig::Kind::kInfill)
    return Error{ErrorCode::kUnsupported,
                 "objective.kind = \"infill\" moves tokens: what stands where is not the data's"};
  losses.samples = std::ssize(step.samples);
  losses.tokens = step.recipe.model.context;
  RT_TRY(take_losses(folder, top, losses));
  for (size_t k = 0; k < step.samples.size(); ++k) {
    const data::SampleRef& sample = step.samples[k];
    const auto& source = step.dataset.sources[static_cast<size_t>(sample.source)];
    RT_TRY_SET(const std::vector<data::DocumentPart> parts, source.train->documents(sample.start, losses.tokens));
    auto at = losses.document.begin() + static_cast<std::ptrdiff_t>(k) * losses.tokens;
    for (const data::DocumentPart& part : parts) at = std::fill_n(at, part.end - part.begin, part.document);
  }
  const Result<std::unique_ptr<text::Tokenizer>> tokenizer = text::make_tokenizer(step.recipe.tokenizer);
  json rows = json::array();
  for (const TokenLoss& one : losses.worst) {
    RT_TRY_SET(json row, row_of(one, step, losses, tokenizer.ok() ? tokenizer.value().get() : nullptr));
    rows.push_back(std::move(row));
  }
  return rows;
}

void tell(const json& row) {
  fmt::print("loss {:7.3f}  position {}  {}  {}token {}", row["loss"].get<double>(), row["position"].get<int64_t>(),
             printable(row["source"].get<std::string>()),
             row.contains("document") ? fmt::format("document {}, ", row["document"].get<int64_t>()) : "",
             row["token"].get<int64_t>());
  if (row.contains("text")) fmt::print("  {} -> {}", json_text(row["before"]), json_text(row["text"]));
  fmt::print("\n");
}

Result<int> losses_of(const LossesArgs& args, bool as_json) {
  const fs::path run = args.run, out = args.out;
  if (is_gone(run / "run.json")) return Error{ErrorCode::kInvalidInput, args.run + ": no run folder"};
  RT_TRY_SET(const SampleOrder order, SampleOrder::of_run(run));
  AuditOptions options{.first = args.step, .last = args.step, .sets = args.sets};
  RT_TRY_SET(AuditScratch scratch, AuditScratch::take(out / "again", run));
  options.train_more = {"--token-losses", std::to_string(args.step)};
  if (args.threads > 0)
    options.train_more.insert(options.train_more.end(), {"--threads", std::to_string(args.threads)});
  options.begins = [&](const AuditLeg& leg) {
    if (!as_json) fmt::print("steps {} to {} are trained again\n", leg.from + 1, leg.to);
    std::fflush(stdout);
  };
  options.told = [](const AuditedLeg&) {};
  RT_TRY_SET(const std::vector<AuditedLeg> legs, audit(run, scratch, options));
  for (const AuditedLeg& one : legs) {
    if (one.first) {
      fmt::print(stderr, "cairn data losses: warning: step {} is not repeated: {} {} in the run, {} here\n",
                 one.first->step, one.first->field, one.first->in_run, one.first->here);
      break;
    }
  }
  StepLosses losses;
  json rows;
  RT_TRY(order.visit(args.step, args.step, [&](const OrderedStep& step) -> Status {
    RT_TRY_SET(rows, rows_of(step, losses, scratch.path() / "token_losses", args.top));
    return {};
  }));
  RT_TRY(write_array(out / "losses.npy", DType::kF32, losses, losses.loss));
  RT_TRY(write_array(out / "targets.npy", DType::kI32, losses, losses.target));
  RT_TRY(write_array(out / "documents.npy", DType::kI64, losses, losses.document));
  RT_TRY(scratch.remove());
  if (as_json) {
    print_json({{"step", args.step},
                {"samples", losses.samples},
                {"tokens", losses.tokens},
                {"out", args.out},
                {"worst", std::move(rows)}});
    return 0;
  }
  for (const json& row : rows) tell(row);
  fmt::print("{}/losses.npy, targets.npy, documents.npy: {} of {} tokens\n", args.out,
             count_text(losses.samples, "sample"), losses.tokens);
  return 0;
}

}  // namespace

void add_data_losses(CLI::App& command, Session& session) {
  CLI::App* look = command.add_subcommand("losses", "the loss of each token of a step that a run has made");
  const auto args = std::make_shared<LossesArgs>();
  look->add_option("RUN", args->run, "the run folder; it may be training")->required();
  look->add_option("--step", args->step, "the step")->type_name("N")->required()->transform(whole_number(1));
  look->add_option("--out", args->out, "folder for losses.npy, targets.npy and documents.npy")
      ->type_name("DIR")
      ->required();
  look->add_option("--top", args->top, "how many of the worst tokens are listed (default: 50)")
      ->type_name("N")
      ->transform(whole_number(1));
  look->add_option("--set", args->sets, "FIELD=VALUE of the recipe, as for a layout that this machine has; repeatable")
      ->type_name("FIELD=VALUE")
      ->expected(1)
      ->take_all();
  look->add_option("--threads", args->threads, "compute threads a rank (default: cores / ranks, at least 1)")
      ->type_name("N")
      ->transform(whole_number(1, 1024));
  add_json_flag(*look, session);
  look->footer(
      "The steps from the newest checkpoint before N are trained again, as `cairn audit` does it.\n"
      "Exit codes: 0 done, 2 refused, 69 a training failed.\n"
      "Examples:\n"
      "  cairn data losses runs/mine --step 1204 --out step-1204");
  look->callback([args, &session] { session.action = [args, &session] { return losses_of(*args, session.json); }; });
}

}  // namespace cairn::tools
