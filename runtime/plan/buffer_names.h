#pragma once
// What the buffers of stage_buffers() are called (activations.h): the plan lays them out, runtime/nn asks for them.

#include <string>

namespace cairn::buffer {

inline constexpr char kAttnInput[] = "attn.input";
inline constexpr char kAttnQkv[] = "attn.qkv";
inline constexpr char kAttnQk[] = "attn.qk";
inline constexpr char kAttnLatent[] = "attn.latent";
inline constexpr char kAttnDlatent[] = "attn.dlatent";
inline constexpr char kAttnOut[] = "attn.out";
inline constexpr char kAttnLogsumexp[] = "attn.logsumexp";
inline constexpr char kAttnPost[] = "attn.post";
inline constexpr char kAttnNormed[] = "attn.normed";
inline constexpr char kAttnStats[] = "attn.stats";
inline constexpr char kAttnPostStats[] = "attn.post_stats";
inline constexpr char kAttnDout[] = "attn.dout";

inline constexpr char kMlpInput[] = "mlp.input";
inline constexpr char kMlpPre[] = "mlp.pre";
inline constexpr char kMlpPost[] = "mlp.post";
inline constexpr char kMlpNormed[] = "mlp.normed";
inline constexpr char kMlpStats[] = "mlp.stats";
inline constexpr char kMlpPostStats[] = "mlp.post_stats";
inline constexpr char kMlpDout[] = "mlp.dout";
inline constexpr char kMlpDpre[] = "mlp.dpre";

inline constexpr char kMoeProbabilities[] = "moe.probabilities";
inline constexpr char kMoeChosen[] = "moe.chosen";
inline constexpr char kMoeWeights[] = "moe.weights";
inline constexpr char kMoeLogSums[] = "moe.log_sums";
inline constexpr char kMoeCounts[] = "moe.counts";
inline constexpr char kMoeSharedPre[] = "moe.shared_pre";
inline constexpr char kMoeSharedGate[] = "moe.shared_gate";
inline constexpr char kMoePre[] = "moe.pre";
inline constexpr char kMoeRows[] = "moe.rows";
inline constexpr char kMoeDrows[] = "moe.drows";
inline constexpr char kMoeDhidden[] = "moe.dhidden";
inline constexpr char kMoeDlogits[] = "moe.dlogits";
inline constexpr char kMoeGroups[] = "moe.groups";
inline constexpr char kMoeRowsOf[] = "moe.rows_of";
inline constexpr char kMoeDweights[] = "moe.dweights";
inline constexpr char kMoeBalance[] = "moe.balance";
inline constexpr char kMoeChoices[] = "moe.choices";  // of all layers, by the first layer of a chunk
inline constexpr char kMoeBias[] = "moe.bias";
inline constexpr char kMoeBiasDots[] = "moe.bias_dots";
inline constexpr char kMoeSharedDhidden[] = "moe.shared_dhidden";
inline constexpr char kMoeSharedDpre[] = "moe.shared_dpre";
inline constexpr char kMoeSharedDgate[] = "moe.shared_dgate";
inline constexpr char kMoeSent[] = "moe.sent";
inline constexpr char kMoeSentNumbers[] = "moe.sent_numbers";
inline constexpr char kMoeRowWeights[] = "moe.row_weights";
inline constexpr char kMoeRowDots[] = "moe.row_dots";

inline constexpr char kEmbedRows[] = "embed.rows";
inline constexpr char kEmbedInput[] = "embed.input";

inline constexpr char kTopQueryNormInput[] = "top_query.norm_input";

// Of a module, behind its "mtp.K."; then its head has the names of the model's, and one array is for all modules.
inline constexpr char kMtpEmbedded[] = "embedded";
inline constexpr char kMtpJoined[] = "mtp.joined";
inline constexpr char kMtpDhidden[] = "mtp.dhidden";

inline constexpr char kHeadInput[] = "head.input";
inline constexpr char kHeadMax[] = "head.max";
inline constexpr char kHeadSums[] = "head.sums";
inline constexpr char kHeadLogits[] = "head.logits";
inline constexpr char kHeadLocalMax[] = "head.local_max";
inline constexpr char kHeadPartSums[] = "head.part_sums";
inline constexpr char kHeadScale[] = "head.scale";
inline constexpr char kHeadWeightSums[] = "head.weight_sums";

inline constexpr char kOutput[] = "output";

inline constexpr char kScratchRows[] = "scratch.rows";
inline constexpr char kScratchPartial[] = "scratch.partial";
inline constexpr char kScratchSums[] = "scratch.sums";
inline constexpr char kScratchRowSums[] = "scratch.row_sums";
inline constexpr char kScratchDresidual[] = "scratch.dresidual";
inline constexpr char kScratchDbranch[] = "scratch.dbranch";
inline constexpr char kScratchHidden[] = "scratch.hidden";
inline constexpr char kScratchDhidden[] = "scratch.dhidden";
inline constexpr char kScratchAttention[] = "scratch.attention";
inline constexpr char kScratchLatents[] = "scratch.latents";
inline constexpr char kScratchDlatents[] = "scratch.dlatents";
inline constexpr char kScratchRstd[] = "scratch.rstd";
inline constexpr char kScratchMean[] = "scratch.mean";
inline constexpr char kScratchDbias[] = "scratch.dbias";

inline constexpr char kCpExchanged[] = "cp.exchanged";
inline constexpr char kCpKv[] = "cp.kv";
inline constexpr char kCpDkv[] = "cp.dkv";

inline constexpr char kRotaryTable[] = "rotary.table";
inline constexpr char kWindowRotaryTable[] = "window_rotary.table";
inline constexpr char kTemperatureTable[] = "temperature.table";

inline constexpr char kAlibiSlopes[] = "alibi.slopes";
inline constexpr char kSinks[] = "attention.sinks";

/// The one copy that all layers use in turn, where their own are computed again.
inline std::string shared(const char* name) { return std::string("shared.") + name; }

}  // namespace cairn::buffer
