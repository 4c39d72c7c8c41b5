#include "tools/recipe_tasks.h"

#include <fmt/format.h>

#include <memory>
#include <utility>

#include "runtime/text/tokenizer.h"
#include "tools/model_source.h"

namespace cairn::tools {

Result<std::optional<evaluation::RunTasks>> recipe_tasks(const Plan& plan) {
  const Recipe& recipe = plan.recipe;
  if (recipe.eval.tasks.empty()) return std::optional<evaluation::RunTasks>();
  RT_TRY_SET(const std::unique_ptr<text::Tokenizer> tokenizer, text::make_tokenizer(recipe.tokenizer));
  text::BesideFiles beside;
  if (recipe.tokenizer.kind != TokenizerConfig::Kind::kBytes) {
    RT_TRY_SET(beside, text::beside_files(recipe.tokenizer.path));
  }
  const bool sentencepiece = recipe.tokenizer.kind == TokenizerConfig::Kind::kSentencePiece;
  RT_TRY_SET(const int32_t begin, begin_token(*tokenizer, beside, sentencepiece));
  const int64_t tokens = plan.at(plan.step_stages.size() - 1).sequence_tokens;
  RT_TRY_SET(evaluation::RunTasks tasks,
             evaluation::RunTasks::read(recipe.eval.tasks, {tokenizer.get(), tokenizer->before(), begin}, tokens));
  for (const data::ScoredText& text : tasks.texts()) {
    for (const int32_t id : text.ids) {
      if (id < 0 || id >= recipe.model.vocab) {
        return Error{ErrorCode::kInvalidInput,
                     fmt::format("eval.tasks: the tokenizer gives id {}, and model.vocab = {}: they do not belong "
                                 "together",
                                 id, recipe.model.vocab)};
      }
    }
  }
  return std::optional(std::move(tasks));
}

}  // namespace cairn::tools
