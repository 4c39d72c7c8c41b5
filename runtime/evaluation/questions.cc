#include "runtime/evaluation/questions.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "runtime/core/check.h"
#include "runtime/evaluation/python_text.h"
#include "runtime/json/json.h"

namespace cairn::evaluation {
namespace {

using Json = nlohmann::ordered_json;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

Result<std::string> text_of(const Field& field, const char* what, const Item& item) {
  if (!field.said()) return std::string();
  Result<Json> value = field.value(item.fields);
  if (!value.ok()) return std::move(value).error().with(what);
  return python_text(value.value());
}

Result<std::vector<std::string>> choices_of(const Task& task, const Item& item) {
  RT_TRY_SET(Json value, task.choices.value(item.fields));
  if (value.is_string()) {
    RT_TRY_SET(value, python_literal(value.get_ref<const std::string&>()));
  }
  if (value.is_object()) {  // its values
    Json list = Json::array();
    for (const auto& [key, one] : value.items()) list.push_back(one);
    value = std::move(list);
  }
  RT_TRY_SET(std::vector<std::string> out, texts_of(value, "choices"));
  if (out.empty()) return invalid("has no choices");
  for (const std::string& choice : out) {
    if (choice.empty()) return invalid("a choice is empty");
  }
  return out;
}

/// The target as the harness has it: digits number a choice, a list in brackets is one.
Result<Json> target_of(const Task& task, const Item& item, bool choices) {
  RT_TRY_SET(Json value, task.target.value(item.fields));
  if (!value.is_string() || item.fields.contains(task.target.source())) return value;
  const auto& text = value.get_ref<const std::string&>();
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  if (choices && !text.empty() && text.size() < 10 && std::ranges::all_of(text, is_digit)) return Json(std::stoi(text));
  if (text.starts_with('[') && text.ends_with(']')) {
    if (Result<Json> list = python_literal(text); list.ok()) return std::move(list).value();
  }
  return value;
}

/// The text of the right answer, as an example shows it.
Result<std::string> shown_answer(const Task& task, const Item& item) {
  RT_TRY_SET(const Json target, target_of(task, item, task.choices.said()));
  if (task.choices.said()) {
    RT_TRY_SET(const std::vector<std::string> choices, choices_of(task, item));
    RT_TRY_SET(const std::vector<int64_t> right, right_choices(target, choices));
    return choices[right[0]];
  }
  if (!target.is_array()) return python_text(target);
  if (target.empty()) return invalid("the list of answers is empty");
  return python_text(target[0]);
}

Result<std::vector<const Item*>> examples_for(const Task& task, const Item& item) {
  std::vector<const Item*> pool;
  for (const Item& one : task.examples) {
    if (!task.examples_are_items || one.fields != item.fields) pool.push_back(&one);
  }
  if (std::ssize(pool) < task.shots) {
    return invalid(fmt::format("{} examples are wanted, and there are {}", task.shots, pool.size()));
  }
  if (task.seeded_examples) {
    std::vector<size_t> order(pool.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::sort(order, {}, [&](size_t k) { return draw_key(task.seed, "shots " + item.id, pool[k]->id, k); });
    std::vector<const Item*> drawn;
    for (int64_t k = 0; k < task.shots; ++k) drawn.push_back(pool[order[k]]);
    return drawn;
  }
  pool.resize(task.shots);
  return pool;
}

Result<std::string> context_of_item(const Task& task, const Item& item) {
  RT_TRY_SET(std::string out, text_of(task.description, "description", item));
  if (task.shots > 0) {
    RT_TRY_SET(const std::vector<const Item*> examples, examples_for(task, item));
    for (const Item* const one : examples) {
      const auto shown = [&]() -> Status {
        RT_TRY_SET(const std::string prompt, text_of(task.prompt, "doc_to_text", *one));
        RT_TRY_SET(const std::string right, shown_answer(task, *one));
        out += prompt + (right.empty() ? "" : task.target_delimiter + right + task.example_delimiter);
        return {};
      };
      RT_TRY(shown().with(fmt::format("example {}", one->id)));
    }
  }
  RT_TRY_SET(const std::string prompt, text_of(task.prompt, "doc_to_text", item));
  return out + prompt;
}

int64_t count_words(std::string_view text) {  // len(re.split(r"\s+", text)), as the harness counts
  int64_t out = 1;
  for (size_t k = 0; k < text.size(); ++k) {
    const auto space = [&](size_t at) { return stripped(text.substr(at, 1)).empty(); };
    if (space(k) && (k == 0 || !space(k - 1))) ++out;
  }
  return out;
}

class Maker {
 public:
  Maker(const Task& task, const TextIds& ids) : task_(task), ids_(ids) {}

  Result<Question> question(const Item& item) const {
    Question out{.id = item.id};
    RT_TRY_SET(const std::string context, context_of_item(task_, item));
    switch (task_.kind) {
      case Kind::kChoice:
        RT_TRY(choice(item, context, &out));
        break;
      case Kind::kGenerate:
        RT_TRY(generated(item, context, &out));
        break;
      case Kind::kProbe: {
        RT_TRY_SET(const std::string text, text_of(task_.target, "the text", item));
        RT_TRY(request(context, task_.target_delimiter + text, &out));
        break;
      }
      case Kind::kText:
        RT_TRY(whole_text(item, &out));
        break;
      case Kind::kContrast:
        for (const char* const side : {"better", "worse"}) {
          if (!item.fields.contains(side)) return invalid(fmt::format("has no \"{}\"", side));
          out.choices.push_back(python_text(item.fields[side]));
          RT_TRY(request(context, out.choices.back(), &out));
        }
        break;
      case Kind::kNext:
        RT_TRY(next(item, context, &out));
        break;
    }
    return out;
  }

 private:
  Status request(std::string_view context, std::string_view continuation, Question* out) const {
    RT_TRY_SET(Encoded pair, encode_pair(ids_, context, continuation));
    out->requests.push_back(std::move(pair));
    return {};
  }

  Status choice(const Item& item, const std::string& context, Question* out) const {
    RT_TRY_SET(out->choices, choices_of(task_, item));
    RT_TRY_SET(const Json target, target_of(task_, item, true));
    RT_TRY_SET(out->right, right_choices(target, out->choices));
    for (const std::string& one : out->choices) RT_TRY(request(context, task_.target_delimiter + one, out));
    return {};
  }

  Status generated(const Item& item, const std::string& context, Question* out) const {
    RT_TRY_SET(out->ids, encode_context(ids_, context));
    if (task_.choices.said()) {
      RT_TRY_SET(const std::string right, shown_answer(task_, item));
      out->answers = {right};
      return {};
    }
    RT_TRY_SET(const Json target, target_of(task_, item, false));
    RT_TRY_SET(out->answers, texts_of(target.is_array() ? target : Json::array({python_text(target)}), "answers"));
    return {};
  }

  Status whole_text(const Item& item, Question* out) const {
    if (ids_.begin < 0) return invalid("the tokenizer has no token that begins or ends a text");
    RT_TRY_SET(const std::string text, text_of(task_.target, "the text", item));
    RT_TRY(ids_.tokenizer->encode(text, &out->ids));
    if (out->ids.empty()) return invalid("the text is empty");
    out->bytes = std::ssize(text);
    out->words = count_words(text);
    return {};
  }

  Status next(const Item& item, const std::string& context, Question* out) const {
    if (!item.fields.contains("tokens")) return invalid("has no \"tokens\"");
    RT_TRY_SET(const std::vector<std::string> texts, texts_of(item.fields["tokens"], "tokens"));
    std::set<int32_t> first;
    for (const std::string& text : texts) {
      RT_TRY_SET(const Encoded pair, encode_pair(ids_, context, text));
      first.insert(pair.continuation[0]);
      if (!out->ids.empty() && out->ids != pair.context)
        return invalid("the texts of \"tokens\" cut the prompt differently");
      out->ids = pair.context;
    }
    if (first.empty()) return invalid("\"tokens\" is empty");
    out->next.assign(first.begin(), first.end());
    return {};
  }

  const Task& task_;
  const TextIds& ids_;
};

/// The first of the greatest.
size_t greatest(const std::vector<double>& values) {
  return static_cast<size_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

Json choice_result(const Question& question, std::span<const Score> scores) {
  std::vector<double> sums, by_character, by_byte;
  Json out = {{"id", question.id}, {"logprobs", Json::array()}, {"tokens", Json::array()}};
  for (size_t k = 0; k < scores.size(); ++k) {
    const std::string& choice = question.choices[k];
    sums.push_back(scores[k].logprob);
    by_character.push_back(scores[k].logprob / static_cast<double>(count_characters(choice)));
    by_byte.push_back(scores[k].logprob / static_cast<double>(choice.size()));
    out["logprobs"].push_back(scores[k].logprob);
    out["tokens"].push_back(scores[k].tokens);
    if (scores[k].greedy) out["greedy"].push_back(*scores[k].greedy);
  }
  const auto right = [&](const std::vector<double>& values) {
    return std::ranges::find(question.right, static_cast<int64_t>(greatest(values))) != question.right.end() ? 1 : 0;
  };
  out["acc"] = right(sums);
  out["acc_norm"] = right(by_character);
  out["acc_bytes"] = right(by_byte);
  return out;
}

Json contrast_result(const Question& question, std::span<const Score> scores) {
  const auto per = [&](const auto& count) { return scores[0].logprob / count(0) - scores[1].logprob / count(1); };
  const double margin = scores[0].logprob - scores[1].logprob;
  return {{"id", question.id},
          {"logprobs", {scores[0].logprob, scores[1].logprob}},
          {"margin", margin},
          {"margin_token", per([&](size_t k) { return static_cast<double>(scores[k].tokens); })},
          {"margin_byte", per([&](size_t k) { return static_cast<double>(question.choices[k].size()); })},
          {"win", margin > 0 ? 1 : 0}};
}

std::string comparable(const MatchRule& rule, std::string_view text) {
  std::string out(rule.strip ? stripped(text) : text);
  if (rule.ignore_case) out = lower(out);
  std::erase_if(out, [&](char c) {
    const bool digit = c >= '0' && c <= '9';
    const bool mark = c > 0x20 && c < 0x7F && !digit && !(c >= 'a' && c <= 'z') && !(c >= 'A' && c <= 'Z');
    return (rule.ignore_numbers && digit) || (rule.ignore_punctuation && mark);
  });
  return out;
}

/// The text before the first of each stop text, cut by one after the other.
std::string before_stops(std::string text, const std::vector<std::string>& stops) {
  for (const std::string& stop : stops) {
    if (!stop.empty()) text.resize(std::min(text.find(stop), text.size()));
  }
  return text;
}

/// The text of ids that a model made. A model may have more rows than its tokenizer has tokens: those spell nothing.
Result<std::string> made_text(const text::Tokenizer& tokenizer, std::span<const int32_t> made) {
  std::vector<int32_t> known;
  std::ranges::copy_if(made, std::back_inserter(known), [&](int32_t id) { return tokenizer.has(id); });
  return tokenizer.decode(known, text::Specials::kSkip);
}

Result<Json> generate_result(Scorer& scorer, const TextIds& ids, std::span<const int32_t> ends, const Task& task,
                             const Question& question) {
  Status decoded;
  const auto wants_more = [&](std::span<const int32_t> made) {
    const Result<std::string> text = made_text(*ids.tokenizer, made);
    if (!text.ok()) {
      decoded = text.error();
      return false;
    }
    return std::ranges::none_of(task.stop, [&](const std::string& stop) {
      return !stop.empty() && text.value().find(stop) != std::string::npos;
    });
  };
  RT_TRY_SET(const std::vector<int32_t> made, scorer.generate(question.ids, task.max_tokens, ends, wants_more));
  RT_TRY(std::move(decoded));
  RT_TRY_SET(std::string text, made_text(*ids.tokenizer, made));
  text = before_stops(std::move(text), task.stop);
  const std::string said = comparable(task.match, text);
  const bool right = std::ranges::any_of(question.answers,
                                         [&](const std::string& one) { return comparable(task.match, one) == said; });
  return Json{{"id", question.id}, {"text", text}, {"exact_match", right ? 1 : 0}};
}

struct Numbers {
  std::vector<const char*> means;  // of items, with standard errors
  std::vector<std::string_view> shown;
};

const Numbers& numbers_of(Kind kind) {
  static const Numbers choice{{"acc", "acc_norm", "acc_bytes"}, {"acc", "acc_norm", "acc_bytes"}};
  static const Numbers generate{{"exact_match"}, {"exact_match"}};
  static const Numbers probe{{"logprob", "prob", "first_prob", "first_rank", "greedy"},
                             {"logprob", "first_prob", "first_rank"}};
  static const Numbers text{{}, {"loss", "perplexity", "bits_per_byte"}};
  static const Numbers contrast{{"margin", "margin_token", "margin_byte", "win"}, {"margin", "win"}};
  static const Numbers next{{"mass"}, {"mass"}};
  switch (kind) {
    case Kind::kChoice:
      return choice;
    case Kind::kGenerate:
      return generate;
    case Kind::kProbe:
      return probe;
    case Kind::kText:
      return text;
    case Kind::kContrast:
      return contrast;
    case Kind::kNext:
      break;
  }
  return next;
}

Json text_sum(const std::vector<Json>& results) {
  double logprob = 0, tokens = 0, bytes = 0, words = 0;
  for (const Json& one : results) {
    logprob += one["logprob"].get<double>();
    tokens += one["tokens"].get<double>();
    bytes += one["bytes"].get<double>();
    words += one["words"].get<double>();
  }
  return {{"n", results.size()},
          {"loss", -logprob / tokens},
          {"perplexity", std::exp(-logprob / tokens)},
          {"bits_per_byte", -logprob / bytes / std::log(2.0)},
          {"byte_perplexity", std::exp(-logprob / bytes)},
          {"word_perplexity", std::exp(-logprob / words)},
          {"tokens", static_cast<int64_t>(tokens)}};
}

}  // namespace

Result<std::string> context_of(const Task& task, size_t number) { return context_of_item(task, task.items[number]); }

Result<std::vector<Question>> make_questions(const Task& task, const TextIds& ids) {
  std::vector<Question> out;
  const Maker maker(task, ids);
  for (const Item& item : task.items) {
    Result<Question> made = maker.question(item);
    if (!made.ok()) return std::move(made).error().with(fmt::format("{}: item {}", task.file, item.id));
    out.push_back(std::move(made).value());
  }
  return out;
}

std::string questions_hash(const Task& task, const std::vector<Question>& questions, std::string_view how) {
  Json all = {{"version", kEvaluatorVersion}, {"how", how}, {"kind", kind_name(task.kind)}};
  if (task.kind == Kind::kGenerate) {
    all["stop"] = task.stop;
    all["max_tokens"] = task.max_tokens;
    all["match"] = {task.match.ignore_case, task.match.ignore_punctuation, task.match.ignore_numbers, task.match.strip};
  }
  for (const Question& one : questions) {
    Json requests = Json::array();
    for (const Encoded& request : one.requests) requests.push_back({request.context, request.continuation});
    all["items"].push_back(
        {one.id, requests, one.choices, one.right, one.ids, one.next, one.answers, one.bytes, one.words});
  }
  return fmt::format("{:016x}", hash_of(json_text(all)));
}

Result<Json> answer(Scorer& scorer, const TextIds& ids, std::span<const int32_t> ends, const Task& task,
                    const Question& question) {
  if (task.kind == Kind::kGenerate) return generate_result(scorer, ids, ends, task, question);
  if (task.kind == Kind::kText) {
    RT_TRY_SET(const Rolling text, scorer.rolling(ids.begin, question.ids));
    const Score score{.logprob = text.logprob, .tokens = text.tokens};
    return result_of(task, question, std::span(&score, 1));
  }
  std::vector<Score> scores;
  if (task.kind == Kind::kNext) {
    RT_TRY_SET(const std::span<const double> logprobs, scorer.next_logprobs(question.ids));
    for (const int32_t token : question.next) scores.push_back({.logprob = logprobs[token], .tokens = 1});
  }
  for (const Encoded& request : question.requests) {
    RT_TRY_SET(const Score score, scorer.score(request));
    scores.push_back(score);
  }
  return result_of(task, question, scores);
}

Json result_of(const Task& task, const Question& question, std::span<const Score> scores) {
  RT_CHECK(!scores.empty() && task.kind != Kind::kGenerate, "{} scores of a {}", scores.size(), kind_name(task.kind));
  Json out = {{"id", question.id}};
  switch (task.kind) {
    case Kind::kChoice:
      return choice_result(question, scores);
    case Kind::kContrast:
      return contrast_result(question, scores);
    case Kind::kText:
      out["logprob"] = scores[0].logprob;
      out["tokens"] = scores[0].tokens;
      out["bytes"] = question.bytes;
      out["words"] = question.words;
      break;
    case Kind::kNext: {
      double mass = 0;
      for (const Score& one : scores) mass += std::exp(one.logprob);
      out["mass"] = mass;
      break;
    }
    case Kind::kProbe:
      out["logprob"] = scores[0].logprob;
      out["prob"] = std::exp(scores[0].logprob);
      out["first_prob"] = std::exp(scores[0].first_logprob);
      if (scores[0].first_rank) out["first_rank"] = *scores[0].first_rank;
      if (scores[0].greedy) out["greedy"] = *scores[0].greedy ? 1 : 0;
      out["tokens"] = scores[0].tokens;
      break;
    case Kind::kGenerate:
      break;
  }
  return out;
}

Json sum_of(Kind kind, const std::vector<Json>& results) {
  if (kind == Kind::kText) return text_sum(results);
  Json out = {{"n", results.size()}};
  const auto n = static_cast<double>(results.size());
  for (const char* const name : numbers_of(kind).means) {
    if (!results.empty() && !results[0].contains(name)) continue;  // not known of any
    double sum = 0, squares = 0;
    for (const Json& one : results) sum += one[name].get<double>();
    for (const Json& one : results) squares += std::pow(one[name].get<double>() - sum / n, 2);
    out[name] = sum / n;
    out[std::string(name) + "_stderr"] = n > 1 ? Json(std::sqrt(squares / (n - 1) / n)) : Json();
  }
  return out;
}

std::vector<std::string_view> shown_numbers(Kind kind) { return numbers_of(kind).shown; }

}  // namespace cairn::evaluation
