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
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "dsl/dsl.h"
#include "runtime/config/skipped_positions.h"
#include "runtime/core/count_text.h"
#include "runtime/core/new_file.h"
#include "runtime/data/document_origins.h"
#include "runtime/data/set_origin.h"
#include "runtime/data/token_file.h"
#include "runtime/json/json.h"
#include "runtime/text/tokenizer.h"
#include "tools/commands.h"
#include "tools/data_tools.h"
#include "tools/number_option.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/lineage.h"
#include "tools/run/folder/sample_order.h"
#include "tools/step_range.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

struct SamplesArgs {
  RecipeArgs recipe;  // its path: of a recipe or a run
  std::string steps, documents_file, source, as_skip;
  std::vector<std::string> documents;
  std::optional<int64_t> position;
  std::optional<int64_t> text;  // bytes of each sample
  bool ids = false, suspects = false;
};

/// Documents by the name of their set, without .bin, and their number; and which of the names some sample had.
struct NamedDocuments {
  std::set<std::pair<std::string, int64_t>> documents;
  std::set<std::string> unseen;

  static std::string name_of(const std::string& file) {
    const std::string name = std::filesystem::path(file).lexically_normal();
    return name.ends_with(".bin") ? name.substr(0, name.size() - 4) : name;
  }
  bool holds(const std::vector<data::DocumentPart>& parts) {
    bool out = false;
    for (const data::DocumentPart& part : parts) {
      const std::string name = name_of(part.file);
      unseen.erase(name);
      out = out || documents.contains({name, part.document});
    }
    return out;
  }
};

Error mistake(const std::string& message) { return {ErrorCode::kInvalidInput, message}; }

Result<StepRange> steps_of(const std::string& text, int64_t last_step) {
  RT_TRY_SET(const StepRange range, step_range("--step", text));
  if (range.last > last_step)
    return mistake(fmt::format("step {} is asked for, and the last one is {}", range.last, last_step));
  return range;
}

Status add_document(const std::string& where, const std::string& text, NamedDocuments& documents) {
  const size_t colon = text.rfind(':');
  const auto number = colon == std::string::npos ? std::nullopt : number_of<int64_t>(text.substr(colon + 1));
  if (!number || *number < 0)
    return mistake(fmt::format("{} is \"{}\", expected FILE:D with D from 0", where, printable(text)));
  const std::string file = NamedDocuments::name_of(text.substr(0, colon));
  documents.documents.emplace(file, *number);
  documents.unseen.insert(file);
  return {};
}

/// The documents of --document and of the lines of --documents.
Result<NamedDocuments> documents_of(const SamplesArgs& args) {
  NamedDocuments out;
  for (const std::string& one : args.documents) RT_TRY(add_document("--document", one, out));
  if (args.documents_file.empty()) return out;
  RT_TRY_SET(const std::string text, read_text_file(args.documents_file));
  std::istringstream lines(text);
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (!line.empty()) RT_TRY(add_document(fmt::format("{}:{}", args.documents_file, number), line, out));
  }
  return out;
}

/// A file for --with, whose recipe leaves these positions out.
Status write_skip(const std::string& path, const SkippedPositions& skip) {
  std::string text = "-- Made by `cairn data samples --as-skip`: a file for --with.\nreturn { batch = { skip = {\n";
  for (const PositionRange& range : skip.ranges()) text += fmt::format("  \"{}\",\n", to_text(range));
  return write_output(path, text + "} } }\n");
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
  Teller(const SamplesArgs& args, NamedDocuments documents, bool as_json)
      : args_(args),
        documents_(std::move(documents)),
        by_documents_(!args.documents.empty() || !args.documents_file.empty()),
        as_json_(as_json) {}

  int64_t found() const { return std::ssize(positions_); }
  int64_t seen() const { return seen_; }  // samples, of which those were found
  /// Sets that were named, and of which no sample was: the name may be wrong.
  const std::set<std::string>& unseen() const { return documents_.unseen; }
  /// Positions of the samples that were found, as batch.skip has them.
  const std::vector<std::string>& positions() const { return positions_; }
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
      ++seen_;
      if (args_.position && *args_.position != sample.position) continue;
      if (args_.suspects && outlier_of(step, sample) == nullptr) continue;
      RT_TRY_SET(const std::vector<data::DocumentPart> parts,
                 source.train->documents(sample.start, step.recipe.model.context));
      if (by_documents_ && !documents_.holds(parts)) continue;
      positions_.push_back(std::to_string(sample.position));
      if (args_.as_skip.empty()) RT_TRY(tell(step, k, source, parts));
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
          one["origin"] = document_origin_json(from->file, from->byte);
        }
        documents.push_back(std::move(one));
      }
      json line = {{"step", step.step},
                   {"position", sample.position},
                   {"trained", step.trained},
                   {"source", source.name},
                   {"sample", sample.k},
                   {"epoch", step.epochs[k]},
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
    const std::string loss = outlier == nullptr
                                 ? ""
                                 : fmt::format("  loss {:.4g}, {:.1f} deviations {} its source's", outlier->loss,
                                               std::fabs(outlier->z), outlier->z > 0 ? "above" : "below");
    fmt::print("step {}  position {}  {}  sample {}, epoch {}{}{}\n", step.step, sample.position,
               printable(source.name), sample.k, step.epochs[k], loss, step.trained ? "" : "  (not trained on)");
    for (const data::DocumentPart& part : parts) {
      const std::string which = part.document < 0 ? "" : fmt::format(": document {}", part.document);
      RT_TRY_SET(const auto from, origins_.of(part));
      const std::string origin = !from ? "" : "; " + document_origin_text(document_origin_json(from->file, from->byte));
      fmt::print("  {}{}, tokens {} to {}{}\n", printable(part.file), which, part.begin, part.end - 1, origin);
    }
    if (args_.text) fmt::print("  {}\n", json_text(json(text)));
    if (args_.ids) fmt::print("  {}\n", fmt::join(ids, " "));
    return {};
  }

  const SamplesArgs& args_;
  NamedDocuments documents_;
  bool by_documents_;
  bool as_json_;
  OriginsOfPairs origins_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  TokenizerConfig tokenizer_is_;
  std::vector<std::string> positions_;
  int64_t seen_ = 0;
  json lines_ = json::array();
};

/// `recipe`: that of the order, where it is not a run's.
Result<SampleOrder> order_of(const SamplesArgs& args, bool as_json, int* refused, std::optional<Recipe>* recipe) {
  if (std::filesystem::is_directory(args.recipe.path)) {
    if (!args.recipe.sets.empty() || !args.recipe.params.empty() || !args.recipe.with_files.empty())
      return mistake("--set, --param and --with change a recipe; a run has done what it did");
    return SampleOrder::of_run(args.recipe.path);
  }
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(*refused, load_or_tell(args.recipe, 0, as_json, &loaded));
  if (*refused != 0) return SampleOrder();
  *recipe = loaded.recipe;
  return SampleOrder::of_recipe(loaded.recipe);
}

/// Positions that the run leaves out by now.
Result<std::vector<std::string>> skip_of_run(const std::filesystem::path& run) {
  RT_TRY_SET(const Lineage lineage, Lineage::read(run));
  const std::vector<LineageEntry> segments = lineage.segments();
  if (segments.empty()) return std::vector<std::string>();
  RT_TRY_SET(const Recipe recipe, recipe_of_segment(run, segments.back()));
  return recipe.batch.skip;
}

/// Writes what the recipe or the run leaves out already and what was found; a recipe without --step is looked through
/// again, since its order gets longer with each sample that is left out.
Result<int> write_skip_of(const SamplesArgs& args, Teller& teller, const StepRange& range,
                          const std::optional<Recipe>& recipe, bool as_json) {
  std::vector<std::string> skip;
  if (recipe) {
    skip = recipe->batch.skip;
    for (const RecipeStage& stage : recipe->stages) {
      if (!json_field(json_or_nothing(stage.changes), "batch.skip").empty())
        return mistake(
            "--as-skip: a stage of the recipe sets batch.skip, which would replace what is found: write the "
            "positions there");
    }
  } else {
    RT_TRY_SET(skip, skip_of_run(args.recipe.path));
  }
  skip.insert(skip.end(), teller.positions().begin(), teller.positions().end());
  for (int64_t before = 0, seen = 0; recipe && args.steps.empty() && teller.found() > before;) {
    if (teller.found() - before == teller.seen() - seen)
      return mistake("--as-skip: each sample of the run is among them, and nothing would be left to train on");
    before = teller.found();
    seen = teller.seen();
    Recipe longer = *recipe;
    longer.batch.skip = skip;
    RT_TRY_SET(const SampleOrder order, SampleOrder::of_recipe(longer));
    RT_TRY(order.visit(range.first, range.last, [&](const OrderedStep& step) { return teller.step(step); }));
    skip.insert(skip.end(), teller.positions().begin() + before, teller.positions().end());
  }
  RT_TRY_SET(const SkippedPositions all, SkippedPositions::parse(skip));
  RT_TRY(write_skip(args.as_skip, all));
  if (as_json) {
    print_json({{"out", args.as_skip}, {"samples", teller.found()}, {"ranges", all.ranges().size()}});
    return 0;
  }
  fmt::print("{}: {} in {}\n", args.as_skip, count_text(teller.found(), "sample"),
             count_text(std::ssize(all.ranges()), "range"));
  return 0;
}

Result<int> samples(const SamplesArgs& args, bool as_json) {
  if (args.steps.empty() && !args.position && args.documents.empty() && args.documents_file.empty() && !args.suspects)
    return mistake("one of --step, --position, --document, --documents and --suspects is needed");
  if (args.suspects && !std::filesystem::is_directory(args.recipe.path))
    return mistake(fmt::format("--suspects is of losses that a run has recorded, and {} is no run folder",
                               printable(args.recipe.path)));
  RT_TRY_SET(NamedDocuments documents, documents_of(args));
  int refused = 0;
  std::optional<Recipe> recipe;
  RT_TRY_SET(const SampleOrder order, order_of(args, as_json, &refused, &recipe));
  if (refused != 0) return refused;
  StepRange range{1, order.last_step()};
  if (!args.steps.empty()) {
    RT_TRY_SET(range, steps_of(args.steps, order.last_step()));
  }
  if (args.position) {
    RT_TRY_SET(const SampleOrder::Place place, order.place_of(*args.position));
    if (place.step == 0)
      return mistake(
          fmt::format("no step up to the last one, {}, takes position {}", order.last_step(), *args.position));
    if (place.skipped)
      return mistake(fmt::format("position {} is in batch.skip: step {} passes over it", *args.position, place.step));
    if (place.step < range.first || place.step > range.last)
      return mistake(fmt::format("position {} is of step {}, which --step leaves out", *args.position, place.step));
    range = {place.step, place.step};
  }
  Teller teller(args, std::move(documents), as_json);
  RT_TRY(order.visit(range.first, range.last, [&](const OrderedStep& step) { return teller.step(step); }));
  if (!teller.unseen().empty() && args.steps.empty()) {
    return mistake(fmt::format("no sample is of {}: the names are those of the recipe, as {}",
                               printable(*teller.unseen().begin()),
                               "data/web for T.megatron { prefix = \"data/web\" }"));
  }
  if (!args.as_skip.empty()) return write_skip_of(args, teller, range, recipe, as_json);
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
  look->add_option("--document", args->documents,
                   "samples that hold tokens of it: a file's name as it is printed here, "
                   "and the document's number; repeatable")
      ->type_name("FILE:D")
      ->expected(1)
      ->take_all();
  look->add_option("--documents", args->documents_file,
                   "the same, of each line of a file, as `cairn data scan --list` writes it")
      ->type_name("FILE");
  look->add_option("--as-skip", args->as_skip,
                   "print nothing, and write what is found as batch.skip into a file for --with; of a recipe without "
                   "--step also what the run takes in its place")
      ->type_name("FILE");
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
      "RECIPE may be a run folder: then the steps are those it made and the next one, each with the recipe and the "
      "data of "
      "its segment.\n"
      "Exit codes: 0 done, 1 no such sample, 2 refused: no such step, or data that are no longer those trained on, 65 "
      "a "
      "damaged lineage.\n"
      "Examples:\n"
      "  cairn data samples runs/mine --step 1204 --text\n"
      "  cairn data samples runs/mine --step 1200..1210 --suspects --text\n"
      "  cairn data samples runs/mine --document data/web:81 --json\n"
      "  cairn data samples train.lua --step 1..3\n"
      "  cairn data samples train.lua --documents dirty.txt --as-skip skip.lua");
  look->callback([args, &session] { session.action = [args, &session] { return samples(*args, session.json); }; });
}

}  // namespace cairn::tools
