// Byte-pair encoding: a piece begins as one symbol a character; the adjacent pair of lowest rank, leftmost among
// equals, is merged until none is left.
#include <fmt/format.h>

#include <algorithm>
#include <queue>

#include "runtime/text/json_fields.h"
#include "runtime/text/subword_model.h"
#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

using nlohmann::json;

struct Merge {
  int32_t rank = 0, id = 0;
};

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

struct PairHash {
  size_t operator()(uint64_t key) const {
    key *= 0x9E3779B97F4A7C15u;
    return static_cast<size_t>(key ^ key >> 32);
  }
};

struct Symbol {
  int32_t id = 0;
  int32_t previous = -1, next = -1;
  bool live = true;
};

struct Candidate {
  int32_t rank = 0, at = 0, id = 0;
  bool operator<(const Candidate& other) const {  // the queue's top is the largest
    return rank != other.rank ? rank > other.rank : at > other.at;
  }
};

class Bpe final : public SubwordModel {
 public:
  Status read(const json& spec) {
    const auto vocab = spec.find("vocab");
    if (vocab == spec.end() || !vocab->is_object()) return bad_field("vocab", "an object {token: id}", json());
    for (const auto& [token, id] : vocab->items()) {
      const std::optional<int32_t> fits = token_id(id);
      if (!fits) return bad_field("vocab\".\"" + token, "an id", id);
      vocabulary_.emplace(token, *fits);
    }
    RT_TRY(read_options(spec));
    return read_merges(spec);
  }

  void encode(std::string_view piece, std::vector<int32_t>* ids) const override {
    if (ignore_merges_) {
      const auto whole = vocabulary_.find(piece);
      if (whole != vocabulary_.end()) return ids->push_back(whole->second);
    }
    thread_local std::vector<Symbol> symbols;
    symbols.clear();
    to_symbols(piece, &symbols);
    merge_all(&symbols);
    for (const Symbol& symbol : symbols) {
      if (symbol.live) ids->push_back(symbol.id);
    }
  }

 private:
  Status read_options(const json& spec) {
    const auto optional_text = [&](const char* name, std::string* out) -> Status {
      if (!spec.contains(name) || spec[name].is_null()) return {};
      RT_TRY_SET(*out, string_field(spec, name));
      return {};
    };
    if (spec.contains("dropout") && !spec["dropout"].is_null() && spec["dropout"] != 0.0) {
      return Error{ErrorCode::kUnsupported, "dropout: ids would be random; set it to null"};
    }
    RT_TRY(optional_text("continuing_subword_prefix", &prefix_));
    RT_TRY(optional_text("end_of_word_suffix", &suffix_));
    RT_TRY_SET(fuse_unknown_, bool_field(spec, "fuse_unk", false));
    RT_TRY_SET(ignore_merges_, bool_field(spec, "ignore_merges", false));
    std::string unknown;
    RT_TRY(optional_text("unk_token", &unknown));
    if (const auto found = vocabulary_.find(unknown); !unknown.empty() && found != vocabulary_.end()) {
      unknown_ = found->second;
    } else if (!unknown.empty()) {
      return Error{ErrorCode::kInvalidInput, fmt::format("unk_token \"{}\" is not in the vocabulary", unknown)};
    }
    RT_TRY_SET(const bool fallback, bool_field(spec, "byte_fallback", false));
    if (!fallback) return {};
    for (int b = 0; b < 256; ++b) {
      const auto found = vocabulary_.find(byte_token(static_cast<unsigned char>(b)));
      bytes_.push_back(found == vocabulary_.end() ? -1 : found->second);
    }
    return {};
  }

  Status read_merges(const json& spec) {
    const auto merges = spec.find("merges");
    if (merges == spec.end() || !merges->is_array()) return bad_field("merges", "a list", json());
    merges_.reserve(merges->size());
    int32_t rank = 0;
    for (const json& entry : *merges) {
      std::string left, right;
      if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
        left = entry[0].get<std::string>();
        right = entry[1].get<std::string>();
      } else if (entry.is_string()) {
        const std::string& text = entry.get_ref<const std::string&>();
        const size_t space = text.find(' ');
        if (space == text.npos || text.find(' ', space + 1) != text.npos) {
          return bad_field(fmt::format("merges\"[{}]\"", rank), "two tokens and a space between", entry);
        }
        left = text.substr(0, space);
        right = text.substr(space + 1);
      } else {
        return bad_field(fmt::format("merges\"[{}]\"", rank), "two tokens", entry);
      }
      const bool has_prefix = !prefix_.empty() && right.starts_with(prefix_);
      const std::string merged = left + (has_prefix ? right.substr(prefix_.size()) : right);
      int32_t ids[3] = {};
      int k = 0;
      for (const std::string* token : {&std::as_const(left), &std::as_const(right), &merged}) {
        const auto found = vocabulary_.find(*token);
        if (found == vocabulary_.end()) {
          return Error{ErrorCode::kInvalidInput,
                       fmt::format("merges[{}] needs the token \"{}\", which the vocabulary lacks", rank, *token)};
        }
        ids[k++] = found->second;
      }
      merges_[pair_key(ids[0], ids[1])] = {rank, ids[2]};
      ++rank;
    }
    return {};
  }

  void to_symbols(std::string_view piece, std::vector<Symbol>* out) const {
    bool pending_unknown = false;  // one that the next unknown character may join
    const auto add = [&](int32_t id) { out->push_back({id}); };
    std::string decorated;
    for (size_t at = 0; at < piece.size();) {
      const size_t length = utf8_length(piece[at]);
      std::string_view character = piece.substr(at, length);
      const bool first = at == 0, last = at + length == piece.size();
      at += length;
      if ((!first && !prefix_.empty()) || (last && !suffix_.empty())) {
        decorated = (first ? std::string() : prefix_) + std::string(character) + (last ? suffix_ : std::string());
        character = decorated;
      }
      if (const auto found = vocabulary_.find(character); found != vocabulary_.end()) {
        if (std::exchange(pending_unknown, false)) add(unknown_);
        add(found->second);
        continue;
      }
      if (!bytes_.empty() && std::all_of(character.begin(), character.end(),
                                         [&](char c) { return bytes_[static_cast<unsigned char>(c)] >= 0; })) {
        for (const char c : character)
          add(bytes_[static_cast<unsigned char>(c)]);  // before a pending unknown: as upstream
        continue;
      }
      if (unknown_ < 0) continue;  // upstream drops what it cannot name
      if (pending_unknown && !fuse_unknown_) add(unknown_);
      pending_unknown = true;
    }
    if (pending_unknown) add(unknown_);
    for (size_t k = 0; k < out->size(); ++k) {
      (*out)[k].previous = static_cast<int32_t>(k) - 1;
      (*out)[k].next = k + 1 < out->size() ? static_cast<int32_t>(k) + 1 : -1;
    }
  }

  const Merge* find(int32_t left, int32_t right) const {
    const auto found = merges_.find(pair_key(left, right));
    return found == merges_.end() ? nullptr : &found->second;
  }

  void merge_all(std::vector<Symbol>* symbols_out) const {
    std::vector<Symbol>& symbols = *symbols_out;
    thread_local std::vector<Candidate> storage;
    storage.clear();
    for (size_t k = 0; k + 1 < symbols.size(); ++k) {
      const Merge* merge = find(symbols[k].id, symbols[k + 1].id);
      if (merge != nullptr) storage.push_back({merge->rank, static_cast<int32_t>(k), merge->id});
    }
    std::make_heap(storage.begin(), storage.end());
    const auto push = [&](int32_t at) {
      if (at < 0 || symbols[at].next < 0) return;
      const Merge* merge = find(symbols[at].id, symbols[symbols[at].next].id);
      if (merge == nullptr) return;
      storage.push_back({merge->rank, at, merge->id});
      std::push_heap(storage.begin(), storage.end());
    };
    while (!storage.empty()) {
      std::pop_heap(storage.begin(), storage.end());
      const Candidate top = storage.back();
      storage.pop_back();
      Symbol& left = symbols[top.at];
      if (!left.live || left.next < 0) continue;
      Symbol& right = symbols[left.next];
      const Merge* merge = find(left.id, right.id);
      if (merge == nullptr || merge->id != top.id) continue;  // the pair is not there any more
      left.id = top.id;
      left.next = right.next;
      right.live = false;
      if (left.next >= 0) symbols[left.next].previous = top.at;
      push(left.previous);
      push(top.at);
    }
  }

  std::unordered_map<uint64_t, Merge, PairHash> merges_;
  std::vector<int32_t> bytes_;  // id of each byte's token, or -1; empty without byte fallback
  std::string prefix_, suffix_;
  int32_t unknown_ = -1;
  bool fuse_unknown_ = false, ignore_merges_ = false;
};

}  // namespace

Result<std::unique_ptr<SubwordModel>> make_bpe(const json& spec) {
  auto out = std::make_unique<Bpe>();
  RT_TRY(out->read(spec));
  return std::unique_ptr<SubwordModel>(std::move(out));
}

}  // namespace cairn::text
