// Unigram: the cut of a piece into tokens whose summed scores are largest (Viterbi over a trie of the vocabulary).
// A character that no token begins with costs ten below the worst score; what is unknown is joined and given its bytes'
// tokens, where the model has them, else the unknown token.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "runtime/text/json_fields.h"
#include "runtime/text/subword_model.h"
#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

using nlohmann::json;

constexpr double kUnknownPenalty = 10.0;

/// Bytes -> id; children of a node are found by hash.
class Trie {
 public:
  void add(std::string_view token, int32_t id) {
    uint32_t node = 0;
    for (const char c : token) {
      const auto [edge, fresh] = edges_.try_emplace(key(node, c), static_cast<uint32_t>(ids_.size()));
      if (fresh) ids_.push_back(-1);
      node = edge->second;
    }
    ids_[node] = id;
  }

  /// visit(length, id) for each token that `text` begins with, shortest first.
  template <typename Visit>
  void prefixes(std::string_view text, const Visit& visit) const {
    uint32_t node = 0;
    for (size_t k = 0; k < text.size(); ++k) {
      const auto edge = edges_.find(key(node, text[k]));
      if (edge == edges_.end()) return;
      node = edge->second;
      if (ids_[node] >= 0) visit(k + 1, ids_[node]);
    }
  }

 private:
  static uint64_t key(uint32_t node, char c) {
    return (static_cast<uint64_t>(node) << 8 | static_cast<unsigned char>(c)) * 0x9E3779B97F4A7C15u;
  }
  std::unordered_map<uint64_t, uint32_t> edges_;
  std::vector<int32_t> ids_ = {-1};
};

class Unigram final : public SubwordModel {
 public:
  Status read(const json& spec) {
    const auto vocab = spec.find("vocab");
    if (vocab == spec.end() || !vocab->is_array() || vocab->empty()) {
      return bad_field("vocab", "a list of [token, score]", json());
    }
    for (const json& entry : *vocab) {
      if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_number()) {
        return bad_field(fmt::format("vocab\"[{}]\"", scores_.size()), "[token, score]", entry);
      }
      const auto& token = entry[0].get_ref<const std::string&>();
      const auto id = static_cast<int32_t>(scores_.size());
      vocabulary_[token] = id;
      scores_.push_back(entry[1].get<double>());
      if (!token.empty()) trie_.add(token, id);
    }
    if (spec.contains("unk_id") && !spec["unk_id"].is_null()) {
      const std::optional<int32_t> unknown = token_id(spec["unk_id"]);
      if (!unknown || *unknown >= std::ssize(scores_))
        return bad_field("unk_id", "an id of the vocabulary", spec["unk_id"]);
      unknown_ = *unknown;
    }
    unknown_score_ = *std::min_element(scores_.begin(), scores_.end()) - kUnknownPenalty;
    RT_TRY_SET(const bool fallback, bool_field(spec, "byte_fallback", false));
    for (int b = 0; fallback && b < 256; ++b) {
      const auto found = vocabulary_.find(byte_token(static_cast<unsigned char>(b)));
      bytes_.push_back(found == vocabulary_.end() ? -1 : found->second);
    }
    return {};
  }

  void encode(std::string_view piece, std::vector<int32_t>* ids) const override {
    struct Node {
      double score = 0;
      int64_t begin = -1;  // of the best last token that ends here
      int32_t id = -1;
    };
    std::vector<Node> best(piece.size() + 1);
    for (size_t at = 0; at < piece.size();) {
      const size_t one = utf8_length(piece[at]);
      const double here = best[at].score;
      bool single = false;
      const auto offer = [&](size_t end, double score, int32_t id) {
        Node& node = best[end];
        if (node.begin < 0 || score > node.score) node = {score, static_cast<int64_t>(at), id};
      };
      trie_.prefixes(piece.substr(at), [&](size_t length, int32_t id) {
        offer(at + length, scores_[id] + here, id);
        single = single || length == one;
      });
      if (!single) offer(at + one, unknown_score_ + here, unknown_);
      at += one;
    }
    std::vector<std::pair<size_t, size_t>> tokens;  // last first
    bool joinable = false;
    for (size_t end = piece.size(); end > 0;) {
      const Node& node = best[end];
      const auto begin = static_cast<size_t>(node.begin);
      const bool unknown = node.id == unknown_;
      if (unknown && joinable) {
        tokens.back().first = begin;
      } else {
        tokens.emplace_back(begin, end);
      }
      joinable = unknown;
      end = begin;
    }
    for (auto token = tokens.rbegin(); token != tokens.rend(); ++token) {
      append(piece.substr(token->first, token->second - token->first), ids);
    }
  }

 private:
  void append(std::string_view token, std::vector<int32_t>* ids) const {
    if (const auto found = vocabulary_.find(token); found != vocabulary_.end()) return ids->push_back(found->second);
    const bool by_bytes = !bytes_.empty() && std::all_of(token.begin(), token.end(), [&](char c) {
      return bytes_[static_cast<unsigned char>(c)] >= 0;
    });
    if (by_bytes) {
      for (const char c : token) ids->push_back(bytes_[static_cast<unsigned char>(c)]);
    } else if (unknown_ >= 0) {
      ids->push_back(unknown_);
    }
  }

  Trie trie_;
  std::vector<double> scores_;
  std::vector<int32_t> bytes_;
  double unknown_score_ = 0;
  int32_t unknown_ = -1;
};

}  // namespace

Result<std::unique_ptr<SubwordModel>> make_unigram(const json& spec) {
  auto out = std::make_unique<Unigram>();
  RT_TRY(out->read(spec));
  return std::unique_ptr<SubwordModel>(std::move(out));
}

}  // namespace cairn::text
