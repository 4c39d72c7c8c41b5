#pragma once
// The resolved recipe as plain structs: what every rank, the plan, the checkpoints and the converters agree on.
// dsl/ fills it from Lua and turns it to and from canonical JSON; nothing here parses, checks or has behaviour.
// Defaults stand in dsl/schema.cc, once; the initial values here are only "nothing set".

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cairn {

enum class Positions { kNone, kLearned, kRotary, kAlibi };
enum class AlibiForm { kDistance, kRounded };
enum class NormKind { kLayerNorm, kRmsNorm };
enum class Activation {  // the second line has a gate projection: down(act(gate x) * up x)
  kGeluTanh,
  kGeluErf,
  kRelu,
  kGeluQuick,
  kRelu2,
  kSilu,
  kSwiGlu,
  kGeGlu,
  kGeGluTanh,
  kReGlu,
  kQuickGeGlu,
  kReGlu2,
  kSwiGluClamp  // down(gate sigmoid(swiglu_alpha gate) * (up + 1)), both within model.swiglu_limit (gpt-oss)
};
enum class BlockKind { kPreNorm, kPostNorm, kDeepNorm, kParallel, kParallelShared, kSandwich, kOutNorm };
enum class QkNorm { kNone, kHead, kWhole, kHeadLayerNorm, kL2, kSharedLayerNorm };
enum class Mask { kCausal, kBidirectional, kPrefix };
enum class TemperatureForm { kLlama4, kMinistral3 };
enum class RotaryPairs { kHalf, kInterleaved };
enum class RopeScaling { kNone, kLinear, kDynamic, kYarn, kLlama3, kLongRope };
enum class Precision { kF32, kBf16, kF16 };
enum class PipelineKind { kGpipe, k1F1B, kInterleaved, kZbH1, kZbV };
enum class RecomputeMode { kNone, kSelective, kFull };
enum class MeshAxis { kTp, kDp, kPp, kCp };
enum class RouterKind { kSoftmax, kSigmoid };
enum class AuxScope { kLayer, kModel };
enum class Deterministic { kRun, kLayout };
enum class Sums { kRanked, kNccl };
enum class OptimizerKind { kAdamW, kLamb, kAdafactor };
enum class LrFrom { kStart, kStage };  // where an LR schedule counts from: of the run, or of the stage that set it
enum class WeightInit { kScaled, kPlain, kSmallWang, kDeepNorm };

/// A quantity of training in the unit the person wrote. Positions in samples survive a change of batch.
struct Span {
  enum class Unit { kSteps, kSamples, kTokens, kFraction } unit = Unit::kSteps;
  double value = 0;
};

/// Which channels of a head turn and how fast; model.rope_theta is the base. Read only with rotary positions.
struct RopeConfig {
  int64_t dims = 0;                        // the first channels of a head that turn, the others pass; 0: all
  RotaryPairs pairs = RotaryPairs::kHalf;  // (x_i, x_{i + dims/2}), or (x_2i, x_{2i+1})
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1.0;                               // all scalings
  int64_t original_context = 0;                      // all but linear: trained on; 0: model.context
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1;              // yarn
  double attention_factor = 0;                       // yarn, longrope: of cos and sin; 0: from the factor (and mscales)
  double mscale = 0, mscale_all_dim = 0;             // yarn; 0: not given
  bool truncate = true;                              // yarn: ramp bounds are rounded to whole dimensions
  // longrope: what each pair's frequency is divided by, where a text stays within original_context and where it does
  // not
  std::vector<double> short_factor, long_factor;
  bool operator==(const RopeConfig&) const = default;
};

/// Experts instead of the MLP: softmax over all of them, the top_k largest are computed (Mixtral); or sigmoids, with a
/// bias that balances the choice (DeepSeek-V3).
struct MoeConfig {
  int64_t experts = 0;  // 0: a dense MLP
  int64_t top_k = 2;
  bool renormalise = true;  // the top_k weights are divided by their sum
  double aux_loss = 0;      // coefficient of the load-balancing loss
  RouterKind router = RouterKind::kSoftmax;
  double z_loss = 0;                         // coefficient of the squared log of the softmax's denominator
  int64_t shared_experts = 0;                // that every token goes through, as one MLP of so many times ffn units
  int64_t ffn = 0;                           // hidden units of an expert; 0: model.ffn
  std::vector<int64_t> dense_layers;         // layers, from 0, with an MLP of model.ffn units instead of experts
  int64_t shared_ffn = 0;                    // hidden units of that MLP by itself; 0: from shared_experts
  bool shared_gate = false;                  // its output is times a sigmoid of the token's own (Qwen2-MoE)
  bool router_bias = false;                  // the logits have trained biases (gpt-oss)
  bool scale_input = false;                  // a choice's weight is a factor of what the expert reads (Llama 4)
  int64_t groups = 1, groups_per_token = 1;  // the experts of a token are of the best groups_per_token of the groups
  double scale = 1.0;                        // of the routed experts' weights, after renormalising
  bool choice_bias = false;                  // the choice has biases, though nothing moves them
  double bias_rate = 0;                      // a step of the biases that balance the choice; 0: they stay
  AuxScope aux_scope = AuxScope::kLayer;
  bool operator==(const MoeConfig&) const = default;
};

/// Multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one latent vector a token, and the
/// channels of a key that turn are one vector for all heads. model.head_dim is nope_dim + rope_dim then.
struct MlaConfig {
  int64_t kv_rank = 0;    // channels of the latent vector of keys and values; 0: plain attention
  int64_t q_rank = 0;     // of that of queries; 0: these come from the stream
  int64_t nope_dim = 0;   // channels of a head of queries and keys that do not turn
  int64_t rope_dim = 0;   // and behind them those that do
  int64_t value_dim = 0;  // of a head of values
  bool operator==(const MlaConfig&) const = default;
};

/// Multi-token prediction (DeepSeek-V3): behind the model, `depth` modules that guess one token further each. Module k
/// joins the hidden rows of the one before with the embeddings of the tokens k ahead, and runs a layer of its own.
struct MtpConfig {
  int64_t depth = 0;  // modules; 0: none
  double loss = 0.3;  // weight of the mean of their losses beside the model's own
  bool operator==(const MtpConfig&) const = default;
};

/// Options that GPT-2 and Llama lack are off as they stand here, and then they are not in the canonical JSON either.
struct ModelConfig {
  int64_t layers = 0;
  int64_t width = 0;     // H, the residual stream
  int64_t heads = 0;     // query heads
  int64_t kv_heads = 0;  // key/value heads; == heads without grouped-query attention
  int64_t head_dim = 0;  // width / heads unless set
  int64_t ffn = 0;       // F, hidden units of the MLP
  int64_t context = 0;   // S, tokens a sample
  int64_t vocab = 0;     // V, logical; the padded size depends on tp and is never stored
  Positions positions = Positions::kLearned;
  AlibiForm alibi = AlibiForm::kDistance;  // rounded: what is added has 16 bits and the scale of the scores (Falcon)
  int64_t position_offset = 0;  // learned: the table has context + offset rows, a token reads row position + offset
  double rope_theta = 10000.0;  // rotary only
  RopeConfig rope;
  int64_t embed_dim = 0;         // E, of token embedding and head, with projections to and from width; 0: width
  bool embedding_norm = false;   // a norm between embedding and the first layer
  double embedding_scale = 1.0;  // factor of the token embedding, before all else
  BlockKind block = BlockKind::kPreNorm;
  double residual_scale = 1.0;  // deep_norm: the factor of the residual, which there is the norm's output
  double branch_scale = 1.0;    // factor of what attention and MLP add to the stream
  NormKind norm = NormKind::kLayerNorm;
  bool norm_weight = true;     // the norms of the stream have a weight, LayerNorm then a bias too
  bool norm_bias = true;       // LayerNorm's; read with norm_weight
  bool norm_plus_one = false;  // norm weights count from 1, those of q and k too: the factor is 1 + weight
  double norm_eps = 1e-5;
  bool final_norm = true;
  Activation activation = Activation::kGeluTanh;
  double swiglu_alpha = 1.702, swiglu_limit = 7;  // of swiglu_clamp alone
  bool bias = true;  // on every projection of the layers (q, k, v, o, MLP), GPT-2; none in Llama
  std::optional<bool> qkv_bias, out_bias, mlp_bias;  // of these projections, experts' too; unset: as `bias`
  bool head_bias = false;                            // on the head, tied or not
  double clip_qkv = 0;                               // q, k and v are clamped to +- this; 0: not
  QkNorm qk_norm = QkNorm::kNone;                    // of q and of k, before rotary
  Mask mask = Mask::kCausal;
  int64_t sliding_window = 0;          // a query sees itself and window - 1 keys before it; 0: all
  std::vector<int64_t> window_layers;  // layers that use the window, from 0; empty: all
  double window_rope_theta = 0;        // rotary base of the layers with the window, without scaling; 0: as others
  std::vector<int64_t> nope_layers;    // layers, from 0, in which q and k do not turn
  int64_t attention_chunk = 0;         // a query sees the keys before it in its chunk of so many tokens; 0: all
  std::vector<int64_t> chunk_layers;   // layers that use the chunks, from 0; empty: all
  double temperature_scale = 0;        // q at position p is times 1 + this ln(1 + floor(n / floor)); 0: not
  int64_t temperature_floor = 8192;    // llama4: n is p + 1, where q and k do not turn; ministral3: p, in all layers
  TemperatureForm temperature_form = TemperatureForm::kLlama4;
  bool attention_sinks = false;           // a trained score of each head in the softmax's denominator alone (gpt-oss)
  double attention_scale = 0;             // of the scores; 0: 1 / sqrt(head_dim)
  bool attention_scale_by_layer = false;  // and divided by layer + 1 (GPT-2's option)
  double score_cap = 0;                   // scores s become cap tanh(s / cap), before the mask; 0: not
  double logit_scale = 1.0;
  double logit_cap = 0;    // the same of logits, after logit_scale
  bool top_query = false;  // one more layer after final_norm whose queries come from a table of positions (CodeGeeX)
  MlaConfig mla;
  MoeConfig moe;
  MtpConfig mtp;
  bool tied_embeddings = true;
  double embedding_dropout = 0, attention_dropout = 0, residual_dropout = 0;  // rates; residual: each branch's output
  double init_std = 0.02;                                                     // of N(0, std)
  WeightInit init = WeightInit::kScaled;  // scaled: residual outputs (attn.o, mlp.down) get std / sqrt(2 layers)
};

/// One stream of tokens. Formats: Megatron pair (.bin/.idx), a raw little-endian token file, or a pair of instruction
/// data, whose documents are packed into samples (runtime/data/packed.h).
struct DataSource {
  enum class Kind { kMegatron, kTokenFile, kInstruct } kind = Kind::kMegatron;
  enum class Overlong { kRefuse, kDrop, kTruncate };
  enum class Weigh { kToken, kSample };
  std::string name;           // for metrics; defaults to the file's stem
  std::string path;           // Megatron: the prefix; token file: the training file
  std::string valid_path;     // token file: its validation file, may be empty
  std::string dtype;          // token file: "uint16" or "uint32"
  double weight = 1.0;        // in a blend; normalised
  int64_t tokens = 0;         // of the training part, its first ones; 0: all
  std::vector<double> split;  // Megatron: train, valid, test parts by documents; one document is cut by tokens instead
  Overlong overlong = Overlong::kRefuse;  // instruction data: a document longer than a sample
  Weigh weigh = Weigh::kToken;            // instruction data: sample: each document's loss counts as much as another's
};

/// Samples whose tokens repeat with a period of at most `period`, `count` times or more, have no targets.
struct MaskRepeats {
  int64_t period = 0, count = 0;  // 0: none is masked
};

struct DataConfig {
  std::vector<DataSource> sources;
  uint64_t seed = 0;  // of the sample order; 0: the recipe's seed
  MaskRepeats mask_repeats;
};

constexpr int32_t kNoTarget = -1;  // in the place of a token to be guessed: the loss of the row does not count

/// How a sample's tokens become inputs and targets, where each stands and what it sees (runtime/data/objective.h).
struct ObjectiveConfig {
  enum class Kind { kNextToken, kPrefix, kInfill } kind = Kind::kNextToken;
  int64_t document_end = -1;    // the token that ends a document; -1: documents are not told apart
  bool reset_attention = true;  // no token sees an earlier document
  bool reset_positions = true;  // each document begins at position 0
  bool document_loss = false;   // guessing how the next document begins counts
  int64_t mask_token = -1, gmask_token = -1, start_token = -1, end_token = -1;  // infill: [MASK], [gMASK], sop, eop
  double gmask_share = 0.7;  // infill: of the sequences, one gap at the end; the others have short gaps
  int64_t mask_windows = 1;  // infill: windows that a sequence with short gaps is cut into
  bool operator==(const ObjectiveConfig&) const = default;
};

struct TokenizerConfig {
  enum class Kind { kNone, kBytes, kSentencePiece, kHf } kind = Kind::kNone;
  std::string path;  // SentencePiece model or tokenizer.json
};

/// From a small batch to batch.samples in equal increments (runtime/plan/batch_schedule.h).
struct BatchRamp {
  int64_t from = 0;  // 0: no ramp
  int64_t by = 0;
  Span over;  // from the beginning of the run; the increments divide it evenly
};

/// From the first step at which so much has been trained on, other values; 0: as before.
struct BatchPhase {
  Span at;
  int64_t samples = 0, micro = 0;
  int64_t tokens = 0;
  double rope_theta = 0;
};

struct BatchConfig {
  int64_t samples = 0;  // global batch, sequences a step
  int64_t micro = 0;    // sequences a micro-batch on one data-parallel rank
  int64_t tokens = 0;   // of a sequence, a part of model.context into which samples are cut; 0: all
  BatchRamp ramp;
  std::vector<BatchPhase> phases;  // in the order of their beginnings
  bool uneven = false;             // samples need not divide: some replicas have none of the last round
  std::vector<std::string> skip;   // positions that no step takes, "A..B" (runtime/config/skipped_positions.h)
};

struct LrStage {
  enum class Kind { kWarmup, kCosine, kLinear, kHold, kInverseSqrt, kExponential, kOneMinusSqrt } kind = Kind::kHold;
  Span over;      // length; value 0, at most one: what the others leave of the run
  double to = 0;  // the rate at the end of the stage; inverse square root: the least rate; none with warm-up and hold
};

/// Tensors that are trained differently. Of several groups that name a tensor the last one counts.
struct ParameterGroup {
  std::string tensors;       // pattern of names (runtime/core/glob.h)
  double lr = 1;             // times the learning rate; 0 freezes
  double weight_decay = -1;  // below 0: as without the group
};

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kAdamW;
  double peak_lr = 0;
  std::vector<LrStage> lr;  // empty: constant
  LrFrom lr_from = LrFrom::kStart;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;  // Adafactor reads beta1 alone
  double decay_power = 0.8;                      // Adafactor: of step t, second moments keep 1 - t^-decay_power
  double update_clip = 1;       // Adafactor: largest root mean square of a tensor's step, before the rate; 0: off
  bool scale_parameter = true;  // Adafactor: the rate is times the root mean square of the tensor's weights
  double least_scale = 1e-3;    // Adafactor: and that is at least this
  double weight_decay = 0;      // matrices only; none on biases and norm weights
  std::vector<ParameterGroup> groups;
  double clip = 0;                  // global gradient norm over the whole mesh; 0: off
  double z_loss = 0;                // weight of the squared logarithm of the softmax's denominator, added to each loss
  double embedding_gradient = 1;    // part of the gradient that goes through the token embedding (GLM-130B: 0.1)
  double ema = 0;                   // decay of the average of weights that is kept beside them; 0: none
  double qk_clip = 0;               // attention scores above it scale a head's q and k down after the update; 0: off
  std::string offload;              // folder on a disk for the banks of optimizer state; empty: shared memory
  int zero = 0;                     // split over dp: 1 optimizer states, 2 gradients too, 3 weights too
  int64_t bucket = 0;               // elements reduced or gathered at once; 0: plan::default_bucket_elems
  bool overlap = true;              // reductions run beside backward, gathers of weights beside forward
  bool keep_after_forward = false;  // ZeRO-3: weights gathered for forward stay until the end of the step
};

/// precision = fp16 alone.
struct LossScaleConfig {
  double initial = 65536;
  int64_t window = 1000;   // steps without overflow before it doubles; 0: never
  int64_t hysteresis = 2;  // overflows before it halves
  double min = 1;          // an overflow at this scale stops the run
};

struct MeshConfig {
  int64_t tp = 1, pp = 1;
  int64_t dp = 0;                                                               // 0: what remains of the world
  std::vector<MeshAxis> order = {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp};  // fastest-varying first
  int64_t ep = 1;     // data-parallel ranks that divide the experts among them
  int64_t cp = 1;     // ranks that divide the tokens of each sequence
  int64_t shard = 0;  // replicas that ZeRO splits over, neighbours in dp; 0: all
  bool sequence_parallel = false;
  int64_t virtual_stages = 1;                    // stages of a rank, with the interleaved and zb-v schedules
  std::vector<int64_t> stages;                   // layers of each pipeline stage, pp * virtual_stages; empty: balanced
  double embedding_weight = 0, head_weight = 0;  // of the first and last stage, in layers, when they are balanced
  int64_t micro_batch_group = 0;                 // of the interleaved schedule; 0: pp
};

/// Activations that backward computes again instead of keeping them.
struct RecomputeConfig {
  RecomputeMode mode = RecomputeMode::kNone;  // selective: the attention core; full: whole layers
  int64_t layers = 0;                         // the first ones of each stage; 0: all
  bool distribute = false;                    // full: the inputs kept are split over tp
};

struct Every {
  int64_t steps = 0;   // 0: not by steps
  double seconds = 0;  // 0: not by time
};

/// One rule of retention. A checkpoint stays when any rule keeps it (ckpt/retention/policy.h says how each counts).
struct Keep {
  enum class Kind { kLast, kEvery, kAt, kBest, kWithin, kFractions } kind = Kind::kLast;
  enum class Metric { kLoss, kValidLoss } metric = Metric::kLoss;  // kBest
  int64_t count = 0;                                               // kLast, kBest, kFractions
  int64_t steps = 0;                                               // kEvery, by steps
  double seconds = 0;                                              // kEvery, by time; kWithin
  std::vector<int64_t> at;                                         // kAt: steps
  bool operator==(const Keep&) const = default;
};

enum class OnSaveFailure { kContinue, kStop };
enum class SpaceCheck { kRefuse, kWarn };
enum class SnapshotBy { kAuto, kBanks, kCopy };
enum class Compress { kOff, kZstd };

/// A second place that checkpoints are copied on to: a directory or an S3-compatible store.
struct CopyTo {
  std::string path;         // directory or s3://bucket/prefix; the run's folder name is added
  int64_t every_steps = 0;  // one checkpoint of each window of so many steps is copied; 0: all
  int64_t keep_last = 0;    // newest ones that stay there; 0: all
  int64_t keep_every = 0;   // and for ever the oldest of each window of so many steps; 0: none
  double max_mb_per_s = 0;  // 10^6 bytes a second; 0: as fast as it goes
  bool read_back = true;    // every byte is read back and compared
  std::string endpoint;     // S3: of a store that is not Amazon's
  std::string region;       // S3
  double timeout_s = 0;     // without any progress, before a try is given up
  double finish_s = 0;      // how long the end of the run waits for copies under way
  std::string ca_file;      // S3 over https: PEM file of the authorities that are believed; empty: the system's
};

struct CheckpointConfig {
  std::vector<Every> save;      // persisted to disk when any is due; the end of the run and a signal always save
  int64_t snapshot_steps = 1;   // restorable from shared memory every n steps; 0: only when saving
  int64_t replicate_steps = 0;  // of several hosts: copied to another one's memory every n steps; 0: never
  /// kCopy: the state is the process's own, updated in place and copied. kAuto: as the device needs it
  /// (runtime/plan/device_choice.h).
  SnapshotBy snapshot_by = SnapshotBy::kAuto;
  std::vector<Keep> keep;  // complete checkpoints that stay; empty: all
  std::vector<CopyTo> copy_to;
  OnSaveFailure on_failure = OnSaveFailure::kContinue;
  Compress compress = Compress::kOff;
  SpaceCheck space = SpaceCheck::kRefuse;  // before the run starts, when the disk cannot hold what the rules keep
  bool direct_io = true;                   // O_DIRECT through io_uring; false or refused: POSIX, same bytes
  bool incremental = false;                // what did not change since the save before is a reference to it
  int64_t in_flight = 1;                   // saves on their way to the disk at once, each from a bank of its own
};

/// The state that a run begins with when it has none of its own. Patterns are of tensor names: * any characters, ? one.
struct InitConfig {
  std::string path;                        // run folder or checkpoint; empty: initial weights from the seed
  bool weights_only = false;               // and begin at step 0 with moments of zero
  std::vector<std::string> only;           // of the model: taken, the others start anew; empty: all
  std::vector<std::string> except;         // of the model: start anew
  std::vector<std::string> allow_missing;  // of the model: start anew when the checkpoint lacks them
  std::vector<std::string> allow_extra;    // of the checkpoint: left there when the model lacks them
};

struct EvalConfig {
  int64_t every_steps = 0;  // 0: never
  int64_t steps = 0;        // validation batches
};

/// Where a run's metrics and events go besides its own folder.
struct Tracker {
  enum class Kind { kWandb, kMlflow, kPrometheus, kOtlp } kind = Kind::kWandb;
  std::string to;       // MLflow, OTLP: a URL; Prometheus: a file; W&B: a folder, empty: RUN/wandb
  std::string project;  // W&B's project, MLflow's experiment
  std::string entity;   // W&B: whose project
  std::vector<std::string> tags;
  double finish_s = 60;  // how long the end of the run waits for what is not sent yet
};

struct LogConfig {
  int64_t every_steps = 1;
  bool tensorboard = true;
  std::vector<Tracker> trackers;
};

/// A command that the agent runs when something happens.
struct Hook {
  std::vector<std::string> events;
  std::vector<std::string> run;  // argv; {step}, {dir}, {run} in it are put in
  double timeout_s = 600;
  int64_t at_most = 0;  // times within `within_s`; 0: any
  double within_s = 0;
};

struct RestartConfig {
  int64_t max_restarts = 3;  // in a row without a new completed checkpoint or 100 steps
  double backoff_s = 0.0;    // before the 2nd restart in a row; doubles each time
  double deadline_s = 60;    // of every collective and p2p wait
};

/// A guard's answer to a trouble.
enum class GuardAction { kRollBack, kStop, kSkip, kLowerLr, kRecompute };

/// How far a guard goes back, and how often (tools/run/folder/guard.h).
struct RollBackConfig {
  int64_t at_most = 4;      // times
  int64_t within = 20'000;  // steps
  int64_t lead = 8;         // steps before the trouble whose samples are skipped too; doubled with each try at a place
};

/// How many updates are left out.
struct SkipConfig {
  int64_t at_most = 3;     // times
  int64_t within = 1'000;  // steps
};

/// How a guard lowers the rate, and how often.
struct LowerLrConfig {
  double by = 0.5;
  int64_t over = 500;  // steps at the lowered rate
  int64_t back = 500;  // steps of the linear way back
  int64_t at_most = 2;
  int64_t within = 20'000;  // steps
};

/// How often a step is computed again.
struct ComputeAgainConfig {
  int64_t at_most = 3;
  int64_t within = 10'000;  // steps
};

/// The rate is times `by` for `over` steps after step `at`, then goes back to 1 over `back` steps.
struct LoweredRate {
  int64_t at = 0;
  double by = 1;
  int64_t over = 0, back = 0;
};

/// What is looked for in the numbers of the steps, to tell good checkpoints from others (ckpt/retention/labels.h).
struct WatchConfig {
  int64_t window = 128;    // clean steps that a new one is compared with
  int64_t proof = 32;      // clean steps behind a checkpoint that make it good
  bool forensics = false;  // a state with ruined weights is written to RUN/forensics, which no start takes
  /// The first that can be done is; none: a warning, and a stop where the loss is not finite.
  std::vector<GuardAction> on_outlier, on_divergence, on_drop, on_not_finite, on_sdc;
  RollBackConfig roll_back;
  SkipConfig skip;
  LowerLrConfig lower_lr;
  ComputeAgainConfig recompute;
  std::vector<int64_t> skip_steps;         // whose updates are left out
  std::vector<LoweredRate> lowered_rates;  // what guards have done, for a run that repeats it
  int64_t audit_steps = 0;                 // steps from one audit to the next, which computes gradients twice; 0: never
  int64_t replica_steps = 0;               // steps from one comparison of replicas' weights to the next; 0: none
};

/// From the first step at which `at` has been trained on, other values. Made and read by dsl/stages.h.
struct RecipeStage {
  Span at;              // above 0; a fraction is of the recipe's stop
  std::string changes;  // canonical JSON: an object from canonical key path ("optimizer.peak_lr") to the new value
};

/// kAuto: CUDA where the machine has an NVIDIA device.
enum class DeviceChoice { kAuto, kCpu, kCuda };

struct Recipe {
  std::string name;
  uint64_t seed = 0;
  Span stop;
  ModelConfig model;
  TokenizerConfig tokenizer;
  DataConfig data;
  ObjectiveConfig objective;
  BatchConfig batch;
  OptimizerConfig optimizer;
  DeviceChoice device = DeviceChoice::kAuto;
  Precision precision = Precision::kF32;
  LossScaleConfig loss_scale;
  Deterministic deterministic = Deterministic::kRun;  // what gives the same bits: one layout; any dp, tp, pp, ZeRO
  Sums sums = Sums::kRanked;                          // of ranks on CUDA: in their order, or as NCCL adds
  MeshConfig mesh;
  PipelineKind schedule = PipelineKind::k1F1B;
  RecomputeConfig recompute;
  CheckpointConfig checkpoint;
  InitConfig init;
  EvalConfig eval;
  LogConfig log;
  RestartConfig restart;
  WatchConfig watch;
  std::vector<Hook> hooks;
  std::vector<RecipeStage> stages;  // in the order of their beginnings
};

/// Whether rows of a sample stand and see otherwise than one after the other: prefixes, gaps, documents apart.
inline bool has_own_rows(const Recipe& recipe) {
  const ObjectiveConfig& objective = recipe.objective;
  if (objective.kind != ObjectiveConfig::Kind::kNextToken || objective.document_end >= 0) return true;
  for (const DataSource& source : recipe.data.sources) {
    if (source.kind == DataSource::Kind::kInstruct) return true;
  }
  return false;
}

}  // namespace cairn
