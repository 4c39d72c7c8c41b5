#include "converters/megatron_buckets.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace cairn::convert {
namespace {

constexpr int64_t kAlignElems = 64;  // param_and_grad_buffer.py pads each parameter's start so

enum class Cut { kNone, kRows, kGatedRows, kColumns };

/// How tensor-parallel ranks cut a parameter, by the end of its name.
Cut cut_of(std::string_view key, bool gated) {
  for (const std::string_view rows :
       {"word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_q_proj.weight",
        "linear_q_up_proj.weight", "linear_kv_up_proj.weight"}) {
    if (key.ends_with(rows)) return Cut::kRows;
  }
  if (key.ends_with("linear_fc1.weight") || key.ends_with("linear_fc1.bias"))
    return gated ? Cut::kGatedRows : Cut::kRows;
  if (key.ends_with("linear_proj.weight") || key.ends_with("linear_fc2.weight")) return Cut::kColumns;
  return Cut::kNone;
}

class Rank {
 public:
  Rank(const std::map<std::string, Shape>& shapes, const MegatronRanks& ranks, int64_t tp, int64_t pp, int64_t ep)
      : shapes_(shapes), ranks_(ranks), tp_(tp), pp_(pp), ep_(ep) {}

  Result<std::vector<RankParameter>> run(bool divided_experts) {
    divided_ = divided_experts;
    if (ranks_.pp > 1 && ranks_.layers % ranks_.pp != 0) {
      return Error{ErrorCode::kUnsupported,
                   fmt::format("{} layers in {} pipeline stages of other sizes", ranks_.layers, ranks_.pp)};
    }
    const bool first = pp_ == 0, last = pp_ == ranks_.pp - 1;
    if (first) RT_TRY(add_all({"embedding.word_embeddings.weight", "embedding.position_embeddings.weight"}));
    const int64_t each = ranks_.layers / ranks_.pp;
    for (int64_t layer = pp_ * each; layer < (pp_ + 1) * each; ++layer) RT_TRY(add_layer(layer));
    if (last) {
      RT_TRY(add_all({"decoder.final_layernorm.weight", "decoder.final_layernorm.bias",
                      "decoder.layers.final_layernorm.weight", "output_layer.weight"}));
    }
    return std::move(out_);
  }

 private:
  using Names = std::initializer_list<std::string_view>;

  Status add_all(Names names) {
    for (const std::string_view name : names) RT_TRY(add(name, -1, -1));
    return {};
  }
  Status add_of_layer(int64_t layer, Names names) {
    for (const std::string_view name : names) RT_TRY(add(name, layer, -1));
    return {};
  }

  Status add_layer(int64_t layer) {
    constexpr std::string_view kInputNorm[] = {"self_attention.linear_qkv.layer_norm_weight",
                                               "self_attention.linear_qkv.layer_norm_bias"};
    RT_TRY(add_of_layer(layer, {"input_layernorm.weight", "input_layernorm.bias"}));
    if (!ranks_.fused_norms) RT_TRY(add_of_layer(layer, {kInputNorm[0], kInputNorm[1]}));
    RT_TRY(add_of_layer(layer, {"self_attention.linear_proj.weight", "self_attention.linear_proj.bias"}));
    if (ranks_.fused_norms) RT_TRY(add_of_layer(layer, {kInputNorm[0], kInputNorm[1]}));
    RT_TRY(add_of_layer(layer, {"self_attention.linear_qkv.weight",
                                "self_attention.linear_qkv.bias",
                                "self_attention.linear_q_proj.weight",
                                "self_attention.linear_q_down_proj.weight",
                                "self_attention.linear_q_up_proj.layer_norm_weight",
                                "self_attention.linear_q_up_proj.weight",
                                "self_attention.linear_kv_down_proj.weight",
                                "self_attention.linear_kv_up_proj.layer_norm_weight",
                                "self_attention.linear_kv_up_proj.weight",
                                "self_attention.q_layernorm.weight",
                                "self_attention.q_layernorm.bias",
                                "self_attention.k_layernorm.weight",
                                "self_attention.k_layernorm.bias",
                                "self_attention.kv_layernorm.weight",
                                "pre_mlp_layernorm.weight",
                                "pre_mlp_layernorm.bias",
                                "mlp.linear_fc1.layer_norm_weight",
                                "mlp.linear_fc1.layer_norm_bias",
                                "mlp.linear_fc1.weight",
                                "mlp.linear_fc1.bias",
                                "mlp.linear_fc2.weight",
                                "mlp.linear_fc2.bias",
                                "mlp.router.weight"}));
    RT_TRY(add_experts(layer));
    return add_of_layer(layer, {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight",
                                "mlp.shared_experts.gate_weight"});
  }

  Status add_experts(int64_t layer) {
    constexpr std::string_view kBoth[] = {"mlp.experts.experts.linear_fc1.weight",
                                          "mlp.experts.experts.linear_fc2.weight"};
    if (ranks_.experts % std::max<int64_t>(1, ranks_.ep) != 0) {
      return Error{ErrorCode::kUnsupported, fmt::format("{} experts on {} ranks", ranks_.experts, ranks_.ep)};
    }
    const int64_t each = ranks_.experts / std::max<int64_t>(1, ranks_.ep), begin = ep_ * each;
    if (ranks_.grouped) {
      for (const std::string_view name : kBoth) {
        for (int64_t k = begin; k < begin + each; ++k) RT_TRY(add(name, layer, k));
      }
      return {};
    }
    for (int64_t k = begin; k < begin + each; ++k) {
      for (const std::string_view name : kBoth) RT_TRY(add(name, layer, k));
    }
    return {};
  }

  /// Nothing for a tensor that the model has not. `layer`, `expert`: -1 where the name is of neither.
  Status add(std::string_view name, int64_t layer, int64_t expert) {
    const bool of_divided = expert >= 0 && ranks_.ep > 1;
    if (of_divided != divided_) return {};
    std::string key(name);
    if (layer >= 0) key = fmt::format("decoder.layers.{}", name);
    auto found = shapes_.find(key);
    bool stacked = layer >= 0;
    if (layer >= 0 && found == shapes_.end()) {
      key = fmt::format("decoder.layers.{}.{}", layer, name);
      found = shapes_.find(key);
      stacked = false;
    }
    if (found == shapes_.end()) return {};
    ParameterBox whole{.key = key, .offsets = Shape(found->second.size(), 0), .sizes = found->second};
    size_t dim = 0;
    for (const auto& [applies, index] : {std::pair(stacked, layer), {expert >= 0, expert}}) {
      if (!applies) continue;
      if (dim >= whole.sizes.size() || index >= whole.sizes[dim]) {
        return Error{ErrorCode::kCorrupt,
                     fmt::format("{} is {}, and has no part {} of dim {}", key, to_string(found->second), index, dim)};
      }
      whole.offsets[dim] = index;
      whole.sizes[dim++] = 1;
    }
    return cut(whole, dim);
  }

  /// `dim`: the first of a layer's or an expert's own.
  Status cut(const ParameterBox& whole, size_t dim) {
    RankParameter made;
    const Cut how = ranks_.tp > 1 ? cut_of(whole.key, ranks_.gated) : Cut::kNone;
    made.copy = how == Cut::kNone && tp_ > 0;
    const size_t along = how == Cut::kColumns ? dim + 1 : dim;
    const int64_t parts = ranks_.tp * (how == Cut::kGatedRows ? 2 : 1);
    if (how != Cut::kNone && (along >= whole.sizes.size() || whole.sizes[along] % parts != 0)) {
      return Error{ErrorCode::kUnsupported, fmt::format("{} is {}, which {} tensor-parallel ranks cannot divide",
                                                        whole.key, to_string(whole.sizes), ranks_.tp)};
    }
    for (int64_t half = 0; half < (how == Cut::kGatedRows ? 2 : 1); ++half) {
      ParameterBox box = whole;
      if (how != Cut::kNone) {
        const int64_t each = whole.sizes[along] / parts;
        box.offsets[along] = (half * ranks_.tp + tp_) * each;
        box.sizes[along] = each;
      }
      made.elems += count_elems(box.sizes);
      made.boxes.push_back(std::move(box));
    }
    out_.push_back(std::move(made));
    return {};
  }

  const std::map<std::string, Shape>& shapes_;
  const MegatronRanks& ranks_;
  const int64_t tp_, pp_, ep_;
  bool divided_ = false;
  std::vector<RankParameter> out_;
};

}  // namespace

Result<std::vector<RankParameter>> rank_parameters(const std::map<std::string, Shape>& shapes,
                                                   const MegatronRanks& ranks, int64_t tp_rank, int64_t pp_rank,
                                                   int64_t ep_rank, bool divided_experts) {
  return Rank(shapes, ranks, tp_rank, pp_rank, ep_rank).run(divided_experts);
}

Result<std::vector<BucketPlace>> place_in_buckets(const std::vector<RankParameter>& parameters,
                                                  const std::vector<int64_t>& lengths) {
  std::vector<BucketPlace> out(parameters.size());
  int64_t at = 0;
  size_t bucket = 0;
  for (size_t k = parameters.size(); k-- > 0;) {
    at = (at + kAlignElems - 1) / kAlignElems * kAlignElems;
    if (bucket >= lengths.size() || parameters[k].elems > lengths[bucket] - at) {
      return Error{ErrorCode::kCorrupt,
                   fmt::format("{} does not end where a bucket does", parameters[k].boxes.front().key)};
    }
    out[k] = {static_cast<int64_t>(bucket), at};
    at += parameters[k].elems;
    if (at == lengths[bucket]) {
      ++bucket;
      at = 0;
    }
  }
  if (bucket != lengths.size() || at != 0) {
    return Error{ErrorCode::kCorrupt, fmt::format("the parameters fill {} of {} buckets", bucket, lengths.size())};
  }
  return out;
}

}  // namespace cairn::convert
