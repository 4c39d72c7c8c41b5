// cairn data train-tokenizer: texts to a byte-level BPE, as a tokenizer.json.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "runtime/core/cgroup.h"
#include "runtime/core/count_text.h"
#include "runtime/core/make_folder.h"
#include "runtime/core/new_file.h"
#include "runtime/data/input_files.h"
#include "runtime/data/tokenize.h"
#include "runtime/json/json.h"
#include "runtime/text/bpe_trainer.h"
#include "tools/data_tools.h"
#include "tools/number_option.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostWords = size_t{1} << 26;  // some 5 GB

struct TrainOptions : MakeSetOptions, DocumentOptions {
  int64_t vocab = 0, min_frequency = 2;
  std::string eod = "<|endoftext|>";
  std::vector<std::string> specials;
};

/// Counts words on any number of threads, each in a table of its own for the time.
class WordTables {
 public:
  explicit WordTables(const text::WordCutter& cutter) : cutter_(cutter) {}

  Status count(std::string_view text) {
    Table table = take();
    const size_t before = table->size();
    const Status counted = cutter_.count(text, table.get());
    const std::lock_guard lock(mutex_);
    words_ += table->size() - before;
    free_.push_back(std::move(table));
    if (!counted.ok() || words_ <= kMostWords) return counted;
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("there are more than {} distinct words, and all are held in memory: train on a sample of the "
                    "text",
                    kMostWords)};
  }

  text::WordCounts sum() {
    text::WordCounts all;
    for (Table& table : free_) {
      for (const auto& [word, count] : *table) all[word] += count;
      table.reset();
    }
    return all;
  }

 private:
  using Table = std::unique_ptr<text::WordCounts>;
  Table take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<text::WordCounts>();
    Table table = std::move(free_.back());
    free_.pop_back();
    return table;
  }

  const text::WordCutter& cutter_;
  std::mutex mutex_;
  std::vector<Table> free_;  // those that no thread counts in
  size_t words_ = 0;         // in all tables
};

Result<int> train(const TrainOptions& options, bool json) {
  const fs::path file = fs::path(options.out) / "tokenizer.json";
  if (!options.overwrite && fs::exists(file))
    return Error{ErrorCode::kInvalidInput, file.string() + " exists; remove it, or replace it with --overwrite"};
  data::TokenizeArgs args;
  RT_TRY_SET(args.inputs, data::expand_patterns(options.inputs));
  RT_TRY(set_documents(options, &args));
  args.threads = options.threads > 0 ? options.threads : usable_cpus();
  text::BpeTraining training{.vocab = options.vocab, .min_frequency = options.min_frequency, .specials = {options.eod}};
  training.specials.insert(training.specials.end(), options.specials.begin(), options.specials.end());
  const auto begin = std::chrono::steady_clock::now();
  RT_TRY_SET(const text::WordCutter cutter, text::WordCutter::make());
  WordTables tables(cutter);
  RT_TRY_SET(const data::TokenizeReport read,
             data::visit_texts(args, [&](std::string_view text, text::Part) { return tables.count(text); }));
  const text::WordCounts words = tables.sum();
  RT_TRY_SET(const text::TrainedBpe trained, text::train_bpe(words, training));
  RT_TRY(make_folder_of(file));
  const nlohmann::ordered_json beside = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"eos_token", options.eod}};
  RT_TRY(place_file(fs::path(options.out) / "tokenizer_config.json", json_text(beside, 2) + "\n"));
  RT_TRY(place_file(file, text::tokenizer_json(trained, training.specials)));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const std::ptrdiff_t made = std::ssize(trained.tokens);
  if (json) {
    print_json({{"file", file.string()},
                {"vocab", made},
                {"merges", trained.merges.size()},
                {"documents", read.documents},
                {"bytes", read.bytes},
                {"words", words.size()},
                {"seconds", seconds}});
  } else {
    fmt::print("{}: {}, {} of {} read, {}, in {:.1f} s\n", file.string(), count_text(made, "token"),
               format_bytes(read.bytes), count_text(read.documents, "document"),
               count_text(std::ssize(words), "distinct word"), seconds);
  }
  if (made < options.vocab) {
    fmt::print(stderr,
               "cairn data train-tokenizer: note: {} tokens of {}: no other pair comes {} times or more in this text\n",
               made, options.vocab, options.min_frequency);
  }
  return 0;
}

}  // namespace

void add_data_train(CLI::App& command, Session& session) {
  CLI::App* make = command.add_subcommand("train-tokenizer", "texts to a byte-level BPE, OUT/tokenizer.json");
  const auto t = std::make_shared<TrainOptions>();
  add_text_inputs(*make, t->inputs);
  make->add_option("--out", t->out, "folder")->required()->type_name("FOLDER");
  make->add_option("--vocab", t->vocab, "tokens, the special ones and 256 bytes among them")
      ->required()
      ->type_name("N")
      ->transform(whole_number(257));
  make->add_option("--min-frequency", t->min_frequency, "a pair that comes less often is not merged (default: 2)")
      ->type_name("N")
      ->transform(whole_number(1));
  make->add_option("--eod", t->eod, "the special token that ends a document (default: <|endoftext|>)")
      ->type_name("TEXT");
  make->add_option("--special", t->specials, "one more special token, as often as there are some")
      ->type_name("TEXT")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  add_document_options(*make, *t);
  add_make_set_flags(*make, *t, "tokenizer");
  add_json_flag(*make, session);
  make->footer(
      "The ids are those of the `tokenizers` package, trained on the same documents (ByteLevel, BpeTrainer). Memory "
      "is\n"
      "that of the distinct words; of much text a sample serves as well.\n"
      "Exit codes: 0 done, 2 refused: file and line are named, 65 a damaged input, 74 disk full or an I/O error.\n"
      "Examples:\n"
      "  cairn data train-tokenizer 'crawl/*.jsonl.zst' --vocab 32000 --out tokenizer\n"
      "  cairn data train-tokenizer a.txt b.txt --vocab 8000 --special '<|im_start|>' --special '<|im_end|>' --out "
      "tok");
  make->callback([t, &session] { session.action = [t, &session] { return train(*t, session.json); }; });
}

}  // namespace cairn::tools
