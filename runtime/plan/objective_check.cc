#include "runtime/plan/objective_check.h"

#include <fmt/format.h>

namespace cairn {
namespace {

constexpr int64_t kLeastWindow = 8;  // rows in which a span, its marks and some text fit

class Check {
 public:
  Check(const ObjectiveConfig& objective, const ModelConfig& model, int64_t sequence_tokens)
      : o_(objective), m_(model), tokens_(sequence_tokens) {}

  std::vector<Mistake> run() {
    using Kind = ObjectiveConfig::Kind;
    if (o_.kind != Kind::kNextToken && m_.mask != Mask::kPrefix) {
      found("model.mask", "must be prefix for objective.kind = prefix and infill: tokens see what they are given",
            "prefix");
    }
    if (o_.kind != Kind::kNextToken && m_.sliding_window > 0) {
      found("model.sliding_window", "does not go with objective.kind = prefix and infill");
    }
    if (m_.mtp.depth > 0) further_tokens();
    if (o_.document_end >= 0) documents();
    if (o_.kind == Kind::kInfill) infill();
    if (o_.kind == Kind::kPrefix && tokens_ < 2)
      found("objective.kind", "= prefix needs sequences of 2 tokens or more");
    return std::move(found_);
  }

 private:
  void found(const std::string& field, const std::string& what, std::string accepted = "") {
    found_.push_back({.field = field, .message = field + " " + what, .accepted = std::move(accepted)});
  }

  void further_tokens() {
    if (o_.kind != ObjectiveConfig::Kind::kNextToken) {
      found("model.mtp.depth", "is for objective.kind = next_token: others have no token that comes next", "0");
    } else if (tokens_ <= m_.mtp.depth + 1) {
      found("model.mtp.depth", fmt::format("= {} looks further than a sequence of {} tokens", m_.mtp.depth, tokens_));
    }
  }

  void token(const std::string& field, int64_t id) {
    if (id < 0) {
      found(field, "is needed for objective.kind = infill: the id of that token");
    } else if (id >= m_.vocab) {
      found(field, fmt::format("= {} is not in [0, model.vocab = {})", id, m_.vocab));
    }
  }

  void documents() {
    if (o_.document_end >= m_.vocab) {
      found("objective.document_end", fmt::format("= {} is not in [0, model.vocab = {})", o_.document_end, m_.vocab));
    }
    if (o_.kind != ObjectiveConfig::Kind::kNextToken) {
      found("objective.document_end", "is for objective.kind = next_token");
    }
    if (m_.mask == Mask::kBidirectional && o_.reset_attention) {
      found("objective.reset_attention", "needs a causal mask, and model.mask is bidirectional");
    }
  }

  void infill() {
    token("objective.gmask_token", o_.gmask_token);
    token("objective.mask_token", o_.mask_token);
    token("objective.start_token", o_.start_token);
    token("objective.end_token", o_.end_token);
    if (m_.positions == Positions::kAlibi) {
      found("model.positions", "= alibi knows distances alone, and a gap of objective.kind = infill has one position",
            "rotary or learned");
    }
    if (tokens_ % o_.mask_windows != 0 || tokens_ / o_.mask_windows < kLeastWindow) {
      found("objective.mask_windows",
            fmt::format("= {} must cut sequences of {} tokens into equal windows of {} or more", o_.mask_windows,
                        tokens_, kLeastWindow));
    }
  }

  const ObjectiveConfig& o_;
  const ModelConfig& m_;
  int64_t tokens_;
  std::vector<Mistake> found_;
};

}  // namespace

std::vector<Mistake> find_mistakes(const ObjectiveConfig& objective, const ModelConfig& model,
                                   int64_t sequence_tokens) {
  return Check(objective, model, sequence_tokens).run();
}

}  // namespace cairn
