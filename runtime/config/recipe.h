#pragma once
// The resolved recipe as plain structs: what every rank, the plan, the checkpoints and the converters agree on.
// dsl/ fills it from Lua and turns it to and from canonical JSON; nothing here parses, checks or has behaviour.
// Defaults stand in dsl/schema.cc, once; the initial values here are only "nothing set".

#include <cstdint>
#include <string>
#include <vector>

namespace cairn {

enum class Positions { kNone, kLearned, kRotary };
enum class NormKind { kLayerNorm, kRmsNorm };
enum class Activation { kGeluTanh, kGeluErf, kRelu, kSwiGlu };
enum class Precision { kF32, kBf16 };
enum class PipelineKind { kGpipe, k1F1B, kInterleaved };
enum class MeshAxis { kTp, kDp, kPp };

/// A quantity of training in the unit the person wrote. Positions in samples survive a change of batch.
struct Span {
  enum class Unit { kSteps, kSamples, kTokens, kFraction } unit = Unit::kSteps;
  double value = 0;
};

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
  double rope_theta = 10000.0;  // rotary only; "half" layout (x_i with x_{i + head_dim/2})
  NormKind norm = NormKind::kLayerNorm;
  double norm_eps = 1e-5;
  Activation activation = Activation::kGeluTanh;
  bool bias = true;  // on every projection (q, k, v, o, MLP), GPT-2; none in Llama
  bool tied_embeddings = true;
  double init_std = 0.02;  // N(0, std); residual outputs (attn.o, mlp.down) get std / sqrt(2 layers)
};

/// One stream of tokens. Formats: Megatron pair (.bin/.idx) or a raw little-endian token file.
struct DataSource {
  enum class Kind { kMegatron, kTokenFile } kind = Kind::kMegatron;
  std::string name;           // for metrics; defaults to the file's stem
  std::string path;           // Megatron: the prefix; token file: the training file
  std::string valid_path;     // token file: its validation file, may be empty
  std::string dtype;          // token file: "uint16" or "uint32"
  double weight = 1.0;        // in a blend; normalised
  std::vector<double> split;  // Megatron: train, valid, test parts by documents; one document is cut by tokens instead
};

struct DataConfig {
  std::vector<DataSource> sources;
  uint64_t seed = 0;  // of the sample order; 0: the recipe's seed
};

struct TokenizerConfig {
  enum class Kind { kNone, kBytes, kSentencePiece, kHf } kind = Kind::kNone;
  std::string path;  // SentencePiece model or tokenizer.json
};

struct BatchConfig {
  int64_t samples = 0;  // global batch, sequences a step
  int64_t micro = 0;    // sequences a micro-batch on one data-parallel rank
};

struct LrStage {
  enum class Kind { kWarmup, kCosine, kLinear, kHold } kind = Kind::kHold;
  Span over;      // length; value 0: until the end of the run
  double to = 0;  // cosine, linear: the rate at the end of the stage
};

struct OptimizerConfig {
  double peak_lr = 0;
  std::vector<LrStage> lr;  // empty: constant
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0;  // matrices only; none on biases and norm weights
  double clip = 0;          // global gradient norm over the whole mesh; 0: off
  int zero = 0;             // 0, or 1: optimizer states split over dp
};

struct MeshConfig {
  int64_t tp = 1, pp = 1;
  int64_t dp = 0;                                                               // 0: what remains of the world
  std::vector<MeshAxis> order = {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp};  // fastest-varying first
  bool sequence_parallel = false;
  int64_t virtual_stages = 1;   // stages of a rank, with the interleaved schedule
  std::vector<int64_t> stages;  // layers of each pipeline stage, pp * virtual_stages; empty: balanced
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
};

struct CheckpointConfig {
  std::vector<Every> save;     // persisted to disk when any is due; the end of the run and a signal always save
  int64_t snapshot_steps = 1;  // restorable from shared memory every n steps; 0: only when saving
  std::vector<Keep> keep;      // complete checkpoints that stay; empty: all
  std::vector<CopyTo> copy_to;
  OnSaveFailure on_failure = OnSaveFailure::kContinue;
  Compress compress = Compress::kOff;
  SpaceCheck space = SpaceCheck::kRefuse;  // before the run starts, when the disk cannot hold what the rules keep
  bool direct_io = true;                   // O_DIRECT through io_uring; false or refused: POSIX, same bytes
  bool incremental = false;                // what did not change since the save before is a reference to it
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

struct LogConfig {
  int64_t every_steps = 1;
  bool tensorboard = true;
};

struct RestartConfig {
  int64_t max_restarts = 3;  // in a row without a new completed checkpoint or 100 steps
  double backoff_s = 0.0;    // before the 2nd restart in a row; doubles each time
  double deadline_s = 60;    // of every collective and p2p wait
};

struct Recipe {
  std::string name;
  uint64_t seed = 0;
  Span stop;
  ModelConfig model;
  TokenizerConfig tokenizer;
  DataConfig data;
  BatchConfig batch;
  OptimizerConfig optimizer;
  Precision precision = Precision::kF32;
  MeshConfig mesh;
  PipelineKind schedule = PipelineKind::k1F1B;
  CheckpointConfig checkpoint;
  InitConfig init;
  EvalConfig eval;
  LogConfig log;
  RestartConfig restart;
};

}  // namespace cairn
