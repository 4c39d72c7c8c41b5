#include "runtime/text/bpe_trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <queue>

#include "runtime/json/json.h"
#include "runtime/text/byte_level.h"
#include "runtime/text/hf_json.h"
#include "runtime/text/pre_tokenizer.h"
#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

using nlohmann::ordered_json;

using Pair = std::pair<int32_t, int32_t>;

struct PairHash {
  size_t operator()(const Pair& pair) const {
    constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
    constexpr int kHalf = 32;
    uint64_t x =
        (static_cast<uint64_t>(static_cast<uint32_t>(pair.first)) << kHalf | static_cast<uint32_t>(pair.second)) * kOdd;
    return x ^ (x >> kHalf);
  }
};

struct Word {
  std::vector<int32_t> ids;
  int64_t count = 0;
};

/// A pair that may be merged next, in the words of `places`.
struct Candidate {
  Pair pair;
  int64_t count = 0;
  std::vector<uint32_t> places;  // ascending, once each
};

struct ComesLater {
  bool operator()(const Candidate& a, const Candidate& b) const {
    if (a.count != b.count) return a.count < b.count;
    return a.pair != b.pair ? a.pair > b.pair : a.places > b.places;
  }
};

const nlohmann::json& byte_level() {
  static const nlohmann::json spec = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  return spec;
}

class Trainer {
 public:
  explicit Trainer(const BpeTraining& training) : training_(training) {}

  Status begin(const WordCounts& words) {
    for (const std::string& special : training_.specials) {
      if (ids_.contains(special))
        return Error{ErrorCode::kInvalidInput, fmt::format("the special token \"{}\" is named twice", special)};
      id_of(special);
    }
    std::vector<std::string> alphabet;
    for (int byte = 0; byte < 256; ++byte)
      alphabet.push_back(bytes_to_alphabet(std::string(1, static_cast<char>(byte))));
    std::ranges::sort(alphabet);  // UTF-8 sorts as code points do
    for (const std::string& character : alphabet) id_of(character);
    if (std::ssize(out_.tokens) > training_.vocab)
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("a vocabulary of {} tokens has no room for {} special ones and 256 bytes; expected {} or more",
                      training_.vocab, training_.specials.size(), out_.tokens.size())};
    if (words.empty()) return Error{ErrorCode::kInvalidInput, "no text to train a tokenizer on"};
    std::vector<const WordCounts::value_type*> sorted;  // places in words_ depend on no hash
    for (const auto& word : words) sorted.push_back(&word);
    std::ranges::sort(sorted, {}, [](const auto* word) -> const std::string& { return word->first; });
    for (const auto* counted : sorted) {
      const std::string& text = counted->first;
      Word word{.count = counted->second};
      for (size_t at = 0; at < text.size(); at += utf8_length(text[at]))
        word.ids.push_back(ids_.at(text.substr(at, utf8_length(text[at]))));
      words_.push_back(std::move(word));
    }
    for (uint32_t place = 0; place < words_.size(); ++place) {
      const std::vector<int32_t>& ids = words_[place].ids;
      for (size_t k = 0; k + 1 < ids.size(); ++k) changed({ids[k], ids[k + 1]}, 1, place);
    }
    queue_new();
    return {};
  }

  Result<TrainedBpe> run() {
    while (std::ssize(out_.tokens) < training_.vocab && !queue_.empty()) {
      Candidate top = std::move(const_cast<Candidate&>(queue_.top()));  // popped at once
      queue_.pop();
      const int64_t count = counts_.at(top.pair);
      if (count != top.count) {  // merges since it was queued took some away
        top.count = count;
        queue_.push(std::move(top));
        continue;
      }
      if (count < 1 || count < training_.min_frequency) break;
      const auto [first, second] = top.pair;
      const std::string left = out_.tokens[static_cast<size_t>(first)],
                        right = out_.tokens[static_cast<size_t>(second)];
      const int32_t id = id_of(left + right);  // two pairs may spell one token
      out_.merges.emplace_back(left, right);
      for (const uint32_t place : top.places) merge(place, first, second, id);
      queue_new();
      constexpr size_t kOften = 64;
      if (training_.tokens && out_.merges.size() % kOften == 0 && !training_.tokens(std::ssize(out_.tokens)))
        return Error{ErrorCode::kStopped, "training of the tokenizer was stopped; nothing was written"};
    }
    return std::move(out_);
  }

 private:
  int32_t id_of(const std::string& token) {
    const auto [at, made] = ids_.try_emplace(token, static_cast<int32_t>(out_.tokens.size()));
    if (made) out_.tokens.push_back(token);
    return at->second;
  }

  /// The pair comes `times` more often in a word.
  void changed(Pair pair, int64_t times, uint32_t place) {
    counts_[pair] += times * words_[place].count;
    if (times < 0) return;
    std::vector<uint32_t>& places = new_places_[pair];
    if (places.empty() || places.back() != place) places.push_back(place);
  }

  /// The merged pair's own count stays, as upstream: only its neighbours' change.
  void merge(uint32_t place, int32_t first, int32_t second, int32_t id) {
    std::vector<int32_t>& ids = words_[place].ids;
    size_t kept = 0;
    for (size_t at = 0; at < ids.size(); ++at) {
      if (ids[at] != first || at + 1 >= ids.size() || ids[at + 1] != second) {
        ids[kept++] = ids[at];
        continue;
      }
      if (kept > 0) {
        changed({ids[kept - 1], first}, -1, place);
        changed({ids[kept - 1], id}, 1, place);
      }
      ids[kept++] = id;
      if (at + 2 < ids.size()) {
        changed({second, ids[at + 2]}, -1, place);
        changed({id, ids[at + 2]}, 1, place);
      }
      ++at;
    }
    ids.resize(kept);
  }

  void queue_new() {
    for (auto& [pair, places] : new_places_) {
      const int64_t count = counts_.at(pair);
      if (count > 0) queue_.push({.pair = pair, .count = count, .places = std::move(places)});
    }
    new_places_.clear();
  }

  const BpeTraining& training_;
  TrainedBpe out_;
  std::unordered_map<std::string, int32_t> ids_;
  std::vector<Word> words_;
  std::unordered_map<Pair, int64_t, PairHash> counts_;
  std::unordered_map<Pair, std::vector<uint32_t>, PairHash> new_places_;
  std::priority_queue<Candidate, std::vector<Candidate>, ComesLater> queue_;
};

}  // namespace

Result<WordCutter> WordCutter::make() {
  RT_TRY_SET(PreTokenizer cut, PreTokenizer::make(byte_level()));
  return WordCutter(std::make_shared<const PreTokenizer>(std::move(cut)));
}

Status WordCutter::count(std::string_view text, WordCounts* counts) const {
  RT_TRY_SET(const std::vector<Piece> pieces, cut_->apply({.text = std::string(text), .at_start = true}));
  for (const Piece& piece : pieces) ++(*counts)[piece.text];
  return {};
}

Result<TrainedBpe> train_bpe(const WordCounts& words, const BpeTraining& training) {
  Trainer trainer(training);
  RT_TRY(trainer.begin(words));
  return trainer.run();
}

std::string tokenizer_json(const TrainedBpe& trained, const std::vector<std::string>& specials) {
  ordered_json added = ordered_json::array(), vocab = ordered_json::object(), merges = ordered_json::array();
  auto& fields = vocab.get_ref<ordered_json::object_t&>();  // its operator[] looks at all keys
  for (size_t id = 0; id < specials.size(); ++id) {
    added.push_back(special_token_json(static_cast<int64_t>(id), specials[id]));
  }
  for (size_t id = 0; id < trained.tokens.size(); ++id) fields.emplace_back(trained.tokens[id], id);
  for (const auto& [left, right] : trained.merges) merges.push_back(left + " " + right);  // no token has a space
  const ordered_json before = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  ordered_json json =
      hf_tokenizer_json(std::move(added), nullptr, before, bpe_json(std::move(vocab), std::move(merges), false));
  json["pre_tokenizer"] = before;
  return json_text(json, 1) + "\n";
}

}  // namespace cairn::text
