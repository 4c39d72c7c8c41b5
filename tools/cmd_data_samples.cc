// cairn data samples: which samples a step trains on, and which documents they are of.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "dsl/dsl.h"
#include "runtime/data/document_origins.h"
#include "runtime/data/set_origin.h"
#include "runtime/data/token_file.h"
#include "runtime/json/json.h"
#include "runtime/text/tokenizer.h"
#include "tools/commands.h"
#include "tools/data_tools.h"
#include "tools/number_option.h"
#include "tools/run/sample_order.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

struct SamplesArgs {
  RecipeArgs recipe;  // its path: of a recipe or a run
  std::string steps, document, source;
  std::optional<int64_t> position;
  std::optional<int64_t> text;  // bytes of each sample
  bool ids = false, suspects = false;
};

struct StepRange {
  int64_t first = 0, last = 0;
};

struct NamedDocument {
  std::string file;
  int64_t document = 0;
};

Error mistake(const std::string& message) { return {ErrorCode::kInvalidInput, message}; }

/// The steps that "A" or "A..B" names.
Result<StepRange> steps_of(const std::string& text, int64_t last_step) {
  const size_t dots = text.find("..");
  const auto first = number_of<int64_t>(text.substr(0, dots));
  const auto last = dots == std::string::npos ? first : number_of<int64_t>(text.substr(dots + 2));
  if (!first || !last || *first < 1 || *first > *last)
    return mistake(fmt::format("--step is \"{}\", expected a step or two, as 120 or 120..125", printable(text)));
  if (*last > last_step) return mistake(fmt::format("step {} is asked for, and the last one is {}", *last, last_step));
  return StepRange{*first, *last};
}

Result<NamedDocument> document_of(const std::string& text) {
  const size_t colon = text.rfind(':');
  const auto number = colon == std::string::npos ? std::nullopt : number_of<int64_t>(text.substr(colon + 1));
  if (!number || *number < 0)
    return mistake(fmt::format("--document is \"{}\", expected FILE:D with D from 0", printable(text)));
  return NamedDocument{text.substr(0, colon), *number};
}

bool holds(const std::vector<data::DocumentPart>& parts, const NamedDocument& wanted) {
  return std::ranges::any_of(parts, [&](const data::DocumentPart& part) {
    return part.document == wanted.document && (part.file == wanted.file || part.file == wanted.file + ".bin");
  });
}

/// Where the documents of pairs came from, for those that have a PREFIX.origin.
class OriginsOfPairs {
 public:
  struct Place {
    data::OriginFile file;
    uint64_t byte = 0;
  };
  /// None: nothing says it. Errors: kCorrupt for a damaged PREFIX.origin.
  Result<std::optional<Place>> of(const data::DocumentPart& part) {
    if (part.document < 0) return std::optional<Place>();
    auto known = pairs_.find(part.file);
    if (known == pairs_.end()) {
      RT_TRY_SET(std::optional<data::DocumentOrigins> opened, open(part.file));
      known = pairs_.emplace(part.file, std::move(opened)).first;
    }
    if (!known->second) return std::optional<Place>();
    RT_TRY_SET(const std::vector<data::DocumentOrigin> found, known->second->read(part.document, 1));
    return std::optional(Place{known->second->files()[found[0].file], found[0].byte});
  }

 private:
  static Result<std::optional<data::DocumentOrigins>> open(const std::string& file) {
    const std::string prefix = data::megatron_prefix(file);
    if (prefix.empty()) return std::optional<data::DocumentOrigins>();
    RT_TRY_SET(const std::unique_ptr<data::TokenSource> pair, data::open_megatron(prefix));
    return data::DocumentOrigins::open(prefix, pair->sequence_count(), pair->token_count());
  }

  std::map<std::string, std::optional<data::DocumentOrigins>> pairs_;  // by the name of their .bin
};

class Teller {
 public:
  Teller(const SamplesArgs& args, std::optional<NamedDocument> document, bool as_json)
      : args_(args), document_(std::move(document)), as_json_(as_json) {}

  int64_t found() const { return found_; }
  json take_lines() { return std::move(lines_); }

  Status step(const OrderedStep& step) {
    const bool known = std::ranges::any_of(step.dataset.sources, [&](const data::Dataset::Source& source) {
      return args_.source.empty() || source.name == args_.source;
    });
    if (!known) return mistake(fmt::format("step {} has no source \"{}\"", step.step, printable(args_.source)));
    for (size_t k = 0; k < step.samples.size(); ++k) {
      const data::SampleRef& sample = step.samples[k];
      const data::Dataset::Source& source = step.dataset.sources[static_cast<size_t>(sample.source)];
      if (!args_.source.empty() && source.name != args_.source) continue;
      if (args_.position && *args_.position != sample.position) continue;
      if (args_.suspects && outlier_of(step, sample) == nullptr) continue;
      RT_TRY_SET(const std::vector<data::DocumentPart> parts,
                 source.train->documents(sample.start, step.recipe.model.context));
      if (document_ && !holds(parts, *document_)) continue;
      ++found_;
      RT_TRY(tell(step, k, source, parts));
    }
    return {};
  }

 private:
  static const telemetry::OutlierSample* outlier_of(const OrderedStep& step, const data::SampleRef& sample) {
    const auto found = std::ranges::find(step.outliers, sample.position, &telemetry::OutlierSample::position);
    return found == step.outliers.end() ? nullptr : &*found;
  }

  Result<std::string> text_of(const OrderedStep& step, const std::vector<int32_t>& ids) {
    const TokenizerConfig& wanted = step.recipe.tokenizer;
    if (!tokenizer_ || wanted.kind != tokenizer_is_.kind || wanted.path != tokenizer_is_.path) {
      RT_TRY_SET(tokenizer_, text::make_tokenizer(wanted));
      tokenizer_is_ = wanted;
    }
    RT_TRY_SET(std::string text, tokenizer_->decode(ids));
    if (std::ssize(text) > *args_.text) text.resize(static_cast<size_t>(*args_.text));
    return text;
  }

  Status tell(const OrderedStep& step, size_t k, const data::Dataset::Source& source,
              const std::vector<data::DocumentPart>& parts) {
    const data::SampleRef& sample = step.samples[k];
    std::vector<int32_t> ids;
    if (args_.ids || args_.text) {
      ids.resize(static_cast<size_t>(step.recipe.model.context) + 1);
      RT_TRY(source.train->read(sample.start, std::ssize(ids), ids.data()));
    }
    std::string text;
    if (args_.text) {
      RT_TRY_SET(text, text_of(step, ids));
    }
    const telemetry::OutlierSample* const outlier = outlier_of(step, sample);
    if (as_json_) {
      json documents = json::array();
      for (const data::DocumentPart& part : parts) {
        json one = {{"file", part.file}, {"begin", part.begin}, {"end", part.end}};
        if (part.document >= 0) one["document"] = part.document;
        RT_TRY_SET(const auto from, origins_.of(part));
        if (from) {
          one["origin"] = {{"file", from->file.name},
                           {"byte", from->byte},
                           {"packed", data::packing_name(from->file.packing)}};
        }
        documents.push_back(std::move(one));
      }
      json line = {{"step", step.step},   {"position", sample.position}, {"trained", step.trained},
                   {"source", source.name}, {"sample", sample.k},          {"epoch", step.epochs[k]},
                   {"documents", std::move(documents)}};
      if (outlier != nullptr) {
        line["loss"] = outlier->loss;
        line["z"] = outlier->z;
      }
      if (args_.text) line["text"] = text;
      if (args_.ids) line["ids"] = ids;
      lines_.push_back(std::move(line));
      return {};
    }
    const std::string loss =
        outlier == nullptr ? ""
                           : fmt::format("  loss {:.4g}, {:.1f} deviations {} its source's", outlier->loss,
                                         std::fabs(outlier->z), outlier->z > 0 ? "above" : "below");
    fmt::print("step {}  position {}  {}  sample {}, epoch {}{}{}\n", step.step, sample.position,
               printable(source.name), sample.k, step.epochs[k], loss, step.trained ? "" : "  (not trained on)");
    for (const data::DocumentPart& part : parts) {
      const std::string which = part.document < 0 ? "" : fmt::format(": document {}", part.document);
      RT_TRY_SET(const auto from, origins_.of(part));
      const std::string origin =
          !from ? ""
                : fmt::format("; {} at byte {}{}", printable(from->file.name), from->byte,
                              from->file.packing == data::Packing::kNone ? "" : " of its unpacked text");
      fmt::print("  {}{}, tokens {} to {}{}\n", printable(part.file), which, part.begin, part.end - 1, origin);
    }
    if (args_.text) fmt::print("  {}\n", json_text(json(text)));
    if (args_.ids) fmt::print("  {}\n", fmt::join(ids, " "));
    return {};
  }

  const SamplesArgs& args_;
  std::optional<NamedDocument> document_;
  bool as_json_;
  OriginsOfPairs origins_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  TokenizerConfig tokenizer_is_;
  int64_t found_ = 0;
  json lines_ = json::array();
};

Result<SampleOrder> order_of(const SamplesArgs& args, bool as_json, int* refused) {
  if (std::filesystem::is_directory(args.recipe.path)) {
    if (!args.recipe.sets.empty() || !args.recipe.params.empty() || !args.recipe.with_files.empty())
      return mistake("--set, --param and --with change a recipe; a run has done what it did");
    return SampleOrder::of_run(args.recipe.path);
  }
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(*refused, load_or_tell(args.recipe, 0, as_json, &loaded));
  if (*refused != 0) return SampleOrder();
  return SampleOrder::of_recipe(loaded.recipe);
}

Result<int> samples(const SamplesArgs& args, bool as_json) {
  if (args.steps.empty() && !args.position && args.document.empty() && !args.suspects)
    return mistake("one of --step, --position, --document and --suspects is needed");
  if (args.suspects && !std::filesystem::is_directory(args.recipe.path))
    return mistake(fmt::format("--suspects is of losses that a run has recorded, and {} is no run folder",
                               printable(args.recipe.path)));
  std::optional<NamedDocument> document;
  if (!args.document.empty()) {
    RT_TRY_SET(document, document_of(args.document));
  }
  int refused = 0;
  RT_TRY_SET(const SampleOrder order, order_of(args, as_json, &refused));
  if (refused != 0) return refused;
  StepRange range{1, order.last_step()};
  if (!args.steps.empty()) {
    RT_TRY_SET(range, steps_of(args.steps, order.last_step()));
  }
  if (args.position) {
    RT_TRY_SET(const SampleOrder::Place place, order.place_of(*args.position));
    if (place.step == 0)
      return mistake(fmt::format("no step up to the last one, {}, takes position {}", order.last_step(), *args.position));
    if (place.skipped)
      return mistake(fmt::format("position {} is in batch.skip: step {} passes over it", *args.position, place.step));
    if (place.step < range.first || place.step > range.last)
      return mistake(fmt::format("position {} is of step {}, which --step leaves out", *args.position, place.step));
    range = {place.step, place.step};
  }
  Teller teller(args, std::move(document), as_json);
  RT_TRY(order.visit(range.first, range.last, [&](const OrderedStep& step) { return teller.step(step); }));
  if (as_json) print_json({{"samples", teller.take_lines()}});
  if (teller.found() > 0) return 0;
  fmt::print(stderr, "cairn data samples: steps {} to {} have no such sample\n", range.first, range.last);
  return 1;
}

}  // namespace

void add_data_samples(CLI::App& command, Session& session) {
  CLI::App* look = command.add_subcommand("samples", "which samples a step trains on, and of which documents");
  const auto args = std::make_shared<SamplesArgs>();
  add_recipe_options(*look, args->recipe);
  look->add_option("--step", args->steps, "a step, or the first and the last of several")->type_name("A[..B]");
  look->add_option("--position", args->position, "one sample: its place in the order of the run, from 0")
      ->type_name("P")
      ->transform(whole_number(0));
  look->add_option("--document", args->document, "samples that hold tokens of it: a file's name as it is printed here, "
                                                 "and the document's number")
      ->type_name("FILE:D");
  look->add_option("--source", args->source, "only samples of that source")->type_name("NAME");
  look->add_option("--text", args->text, "the first N bytes of each sample's text (N is 200 where none is given)")
      ->type_name("N")
      ->expected(0, 1)
      ->default_str("200")
      ->transform(whole_number(1));
  look->add_flag("--suspects", args->suspects,
                 "only samples whose loss was unlike that of their source's others, with that loss; of a run");
  look->add_flag("--ids", args->ids, "the token ids of each sample, and the one that its last token is to guess");
  add_json_flag(*look, session);
  look->footer(
      "RECIPE may be a run folder: then the steps are those it made and the next one, each with the recipe and the data of "
      "its segment.\n"
      "Exit codes: 0 done, 1 no such sample, 2 refused: no such step, or data that are no longer those trained on, 65 a "
      "damaged lineage.\n"
      "Examples:\n"
      "  cairn data samples runs/mine --step 1204 --text\n"
      "  cairn data samples runs/mine --step 1200..1210 --suspects --text\n"
      "  cairn data samples runs/mine --document data/web:81 --json\n"
      "  cairn data samples train.lua --step 1..3");
  look->callback([args, &session] { session.action = [args, &session] { return samples(*args, session.json); }; });
}

}  // namespace cairn::tools
