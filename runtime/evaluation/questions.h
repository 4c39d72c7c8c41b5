#pragma once
// Items as token ids, ready to be scored, and what the scores say.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/evaluation/scorer.h"
#include "runtime/evaluation/task.h"

namespace cairn::evaluation {

/// The version of the rules by which items become ids and scores become results. Another one computes all anew.
inline constexpr int kEvaluatorVersion = 1;

struct Question {
  std::string id;
  std::vector<Encoded> requests;     // kChoice: of each choice; kProbe: one; kContrast: better, worse
  std::vector<std::string> choices;  // kChoice, kContrast: whose characters and bytes are counted
  std::vector<int64_t> right;        // kChoice
  std::vector<int32_t> ids;          // kGenerate, kNext: the context; kText: the text
  std::vector<int32_t> next;         // kNext: first tokens, ascending
  std::vector<std::string> answers;  // kGenerate
  int64_t bytes = 0, words = 0;      // kText
};

/// All items of a task, examples before them. Errors: kInvalidInput naming task and item: what a template lacks, an
/// answer that names no choice, too few examples, text that cannot be encoded.
Result<std::vector<Question>> make_questions(const Task& task, const TextIds& ids);

/// The context of one item as text. `number`: its place among task.items.
Result<std::string> context_of(const Task& task, size_t number);

/// XXH3-64, as 16 hexadecimal digits, of all ids and of what decides about them: two tasks with one hash have equal
/// results under equal weights. `how`: what else decides, as the precision.
std::string questions_hash(const Task& task, const std::vector<Question>& questions, std::string_view how);

/// Result of one item: "id", and by kind
///   choice    logprobs, tokens, greedy (a list each), acc, acc_norm (by characters), acc_bytes
///   generate  text, exact_match        probe  logprob, prob, first_prob, first_rank, greedy, tokens
///   text      logprob, tokens, bytes   contrast  logprobs, margin, margin_token, margin_byte, win     next  mass
/// `ends`: ids that end a generated text. Errors: those of Scorer.
Result<nlohmann::ordered_json> answer(Scorer& scorer, const TextIds& ids, std::span<const int32_t> ends,
                                      const Task& task, const Question& question);

/// The same from scores of the item's texts, which somebody else has computed: of kText one for all, of kNext one for
/// each token, else one for each request. Not for kGenerate.
nlohmann::ordered_json result_of(const Task& task, const Question& question, std::span<const Score> scores);

/// The results of all items in one object: "n", means of the numbers with their standard errors ("acc_stderr", the
/// harness': of n - 1); of texts loss, perplexity, bits_per_byte, word_perplexity over all tokens.
nlohmann::ordered_json sum_of(Kind kind, const std::vector<nlohmann::ordered_json>& results);

/// The names of sum_of()'s numbers that a table shows.
std::vector<std::string_view> shown_numbers(Kind kind);

}  // namespace cairn::evaluation
