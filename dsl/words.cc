#include "dsl/words.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <sstream>

namespace cairn::dsl {
namespace {

struct Row {
  const char* words;  // without joints, separated by spaces
  const char* here;   // separated by commas
  const char* says;
};

constexpr Row kRows[] = {
    // --- The length of a run and its batches
    {"epoch epochs numepochs numtrainepochs maxepochs nepochs", "stop, cairn plan",
     "T.epochs(n) of a single source; `cairn plan` prints how often each source of a blend is read."},
    {"steps iterations iters maxiters numiters trainiters maxsteps numsteps totalsteps trainsteps maxtrainsteps "
     "trainingsteps "
     "updates duration length",
     "stop", "T.steps(n), T.samples(n) or T.tokens(n)."},
    {"batchsize globalbatchsize trainbatchsize bs gbs totalbatchsize effectivebatchsize", "batch.samples",
     "Sequences of one step over all ranks."},
    {"microbatch microbatchsize mbs devicebatchsize perdevicebatchsize perdevicetrainbatchsize localbatchsize",
     "batch.micro", "Sequences of one micro-batch on one data-parallel rank."},
    {"accumulate accumulation gradaccum gradacc gradientaccumulation gradientaccumulationsteps gradaccumulation "
     "gradaccumulationsteps accumulategradbatches gradaccumsteps",
     "batch.samples, batch.micro",
     "Accumulation follows: batch.samples / (batch.micro * dp) micro-batches a step; `cairn plan` prints it."},
    {"batchrampup rampup rampupbatchsize batchwarmup batchschedule batchsizeschedule", "batch.ramp, batch.phases",
     "A batch that grows during the run."},
    {"seqlen seqlength sequencelength sequence maxseqlen maxseqlength maxlength blocksize contextlength contextwindow "
     "contextsize ctx maxpositionembeddings npositions nctx",
     "model.context, batch.tokens", "Tokens of one sample, and of a sequence where that is shorter."},
    {"curriculum curriculumlearning annealing anneal midtraining cooldowndata datamixture mixture mix", "stages, data",
     "T.stage changes fields from a position on, as weights of sources, batch and schedule."},
    // --- Learning rate and optimizer
    {"learningrate lr maxlr peaklr baselr", "optimizer.peak_lr, optimizer.lr",
     "The peak, and the schedule up to it and down again."},
    {"lrscheduler scheduler lrschedule lrschedulertype lrdecaystyle lrdecay decay decaysteps minlr lrmin finallr",
     "optimizer.lr, T.warmup, T.cosine, T.linear",
     "A schedule is a list of stages; each but warm-up says where it ends."},
    {"warmup warmupsteps warmupratio numwarmupsteps lrwarmup warmupiters linearwarmup", "T.warmup, optimizer.lr",
     "The first stage of a schedule."},
    {"wsd cooldown trapezoidal stabledecay onecycle", "T.hold, T.one_minus_sqrt, T.linear",
     "Stages of optimizer.lr: warm up, hold, go down."},
    {"adam adamw fusedadam adamwtorch", "T.adamw", "Its fields are those of optimizer."},
    {"sgd momentum lion muon sophia shampoo soap adagrad rmsprop adam8bit bitsandbytes bnb 8bitadam pagedadamw galore",
     "T.adamw, T.lamb, T.adafactor", "Cairn has these three optimizers only."},
    {"gradclip gradclipping gradientclip gradientclipping maxgradnorm clipgrad clipgradnorm gradientclipval gradnorm "
     "clipping",
     "optimizer.clip", "The largest global norm of the gradients."},
    {"wd decoupledweightdecay l2 l2regularization regularization nodecay", "optimizer.weight_decay, optimizer.groups",
     "On matrices only; groups say otherwise by tensor name."},
    {"adambeta1 adambeta2 adamepsilon epsilon adameps", "optimizer.betas, optimizer.eps",
     "Fields of T.adamw and T.lamb."},
    {"ema polyak swa weightaveraging exponentialmovingaverage averageweights modelsoup soup mergecheckpoints averaging "
     "average averages mean",
     "optimizer.ema, cairn ckpt average", "An average kept beside the weights, or one of several checkpoints."},
    {"gradient gradients grad grads backward backpropagation", "optimizer.clip, batch.micro, recompute",
     "They clip its norm, which metrics.jsonl has as grad_norm, add it up over micro-batches, and bound its memory."},
    {"freeze frozen freezing freezelayers requiresgrad lrmultiplier llrd layerwiselr parametergroups paramgroups "
     "layerlrdecay",
     "optimizer.groups, T.group", "A group names tensors by pattern; lr = 0 freezes them."},
    {"qkclip muonclip maxlogit", "optimizer.qk_clip", "A bound on attention scores."},
    // --- Precision and memory
    {"fp16 bf16 bfloat16 float16 half mixedprecision amp autocast dtype torchdtype fp32 float32 tf32", "precision",
     "fp32, bf16 or fp16, with fp32 masters."},
    {"fp8 float8 transformerengine mxfp8 nvfp4 fp4 quantization quantize quantized int8 int4 4bit 8bit loadin4bit "
     "loadin8bit "
     "gptq awq gguf qat",
     "precision, cairn export",
     "Cairn has no fp8 and no quantization; export a Hugging Face folder and quantize that."},
    {"gradscaler lossscaling dynamiclossscale initialscale scaler", "loss_scale", "Read with precision = \"fp16\"."},
    {"gradientcheckpointing activationcheckpointing activationcheckpoint checkpointactivations activationrecomputation "
     "gradcheckpointing recomputation recomputeactivations rematerialization remat usegradientcheckpointing",
     "recompute", "recompute = { mode = \"selective\" } or { mode = \"full\" }."},
    {"offload cpuoffload optimizeroffload zerooffload zeroinfinity nvmeoffload offloadoptimizer offloading",
     "optimizer.offload", "Optimizer state on a disk; weights and activations stay in memory."},
    {"oom outofmemory cudaoutofmemory memory vram gpumemory", "cairn plan, batch.micro, recompute, optimizer.zero",
     "`cairn plan` prints the bytes of each rank; these fields make them fewer."},
    // --- Layout
    {"fsdp fullyshardeddataparallel fullshard fullyshard hsdp sharding shardingstrategy zero zerostage zero1 zero2 "
     "zero3 "
     "deepspeed distributedoptimizer usedistributedoptimizer",
     "optimizer.zero, mesh.shard", "zero = 3 splits weights as FSDP does; mesh.shard bounds the group."},
    {"ddp dataparallel distributeddataparallel dataparallelism dpsize replicas", "mesh.dp",
     "The rest of the world; it need not be named."},
    {"tensorparallel tensorparallelism tensormodelparallelsize tpsize modelparallel modelparallelsize "
     "tensorparallelsize",
     "mesh.tp", "Tensor-parallel ranks."},
    {"pipelineparallel pipelineparallelism pipeline ppsize pipelinemodelparallelsize pipelineparallelsize "
     "pipelinestages "
     "1f1b gpipe dualpipe zerobubble interleaved",
     "mesh.pp, schedule", "Pipeline stages, and the order of their micro-batches."},
    {"contextparallel contextparallelism cpsize ringattention ulysses sequenceparallel sequenceparallelism longcontext",
     "mesh.cp, mesh.sequence_parallel", "Ranks that divide the tokens of each sequence."},
    {"expertparallel expertparallelism epsize expertmodelparallelsize", "mesh.ep",
     "Data-parallel ranks that divide the experts."},
    {"parallelism parallel parallelize worldsize ngpus numgpus gpus gpu devices nprocpernode numprocesses nproc ranks "
     "world "
     "numnodes nnodes nodes layout",
     "mesh, cairn train, cairn plan",
     "`cairn train --nproc N` starts the ranks of a host; mesh says how they divide the work."},
    {"torchrun accelerate mpirun srun launcher slurm sbatch kubernetes k8s ssh multinode distributed hostfile cluster "
     "masteraddr masterport rdzv",
     "cairn launch, cairn train", "A cluster file says where a run runs: `cairn help --cluster-file`."},
    {"autotune autotuner autoparallel search tune tuning bestlayout sweep hyperparametersearch grid hpo optuna",
     "cairn plan, cairn train",
     "`cairn plan --search` finds layouts; for other fields, loop in a shell over `cairn train --set`."},
    // --- Data
    {"dataset datasets datapath traindata trainingdata trainfile trainfiles corpus datadir inputdata dataloader "
     "traindataset",
     "data, T.megatron, T.token_files, T.instruct, cairn data tokenize",
     "`cairn data tokenize` makes token files of text; the recipe names them."},
    {"tokenize tokenizer tokenization preprocess preprocessing preparedata prepare vocabfile mergesfile bpe "
     "sentencepiece "
     "tiktoken",
     "cairn data tokenize, tokenizer", "Text becomes token files once, before training."},
    {"jsonl json parquet arrow csv txt text hfdataset webdataset streaming mds huggingfacedataset loaddataset",
     "cairn data tokenize", "It reads text and JSON lines; write other formats as JSON lines first."},
    {"split trainsplit validsplit testsplit valsize testsize traintestsplit", "T.megatron",
     "split = { 95, 5 } gives parts for training and validation."},
    {"heldout validation val valid valdata validationset validationsplit devset evaldataset validationdata testset "
     "holdout valloss validationloss validationfile valfile validfile",
     "eval, T.megatron, T.token_files",
     "The second part of T.megatron's split, or T.token_files' valid; eval says when it is scored."},
    {"evaluate evaluation evalinterval evalsteps evalfreq evaluationstrategy validationinterval valcheckinterval "
     "evaliters "
     "valinterval",
     "eval, cairn eval", "eval = { at = T.every { steps = 50 } } in a recipe; `cairn eval` scores a checkpoint."},
    {"blend blending datablend dataweights weights samplingweights proportions interleave mixing sources", "T.blend",
     "Sources with weights."},
    {"shuffle shuffling randomorder randomsampler dataorder samplerseed dataseed", "seed, T.blend",
     "Samples are always drawn in a random order that the seed fixes."},
    {"packing pack packsequences samplepacking concatenate varlen documentmask documentmasking crossdocument "
     "intradocument blockdiagonal eod eos eosid endoftext bos padding pad padtoken separator resetattentionmask",
     "objective.document_end, cairn data tokenize",
     "Samples are always packed; document_end separates the documents that `cairn data tokenize --eod` ends."},
    {"numworkers workers prefetch prefetchfactor pinmemory dataloaderworkers", "data",
     "Token files are mapped into memory; there is nothing to set."},
    {"deduplicate dedup filtering cleaning quality", "cairn data tokenize",
     "Cairn does not filter text; do it before."},
    // --- Tuning
    {"lora qlora peft adapter adapters dora prefixtuning prompttuning lowrank rank loraalpha",
     "cairn init, optimizer.groups",
     "Cairn has no adapters; `cairn init --from HF_DIR` tunes all weights, groups freeze some."},
    {"chat chattemplate instruct instructiontuning instruction instructions sft conversation conversations messages "
     "roles "
     "losmask lossmask lossmasking assistantonly completiononly maskprompt trainoninputs prompts",
     "cairn data chat, T.instruct",
     "`cairn data chat` writes conversations as a model's template has them; T.instruct trains on the answers in "
     "them."},
    {"dpo rlhf ppo grpo reward rewardmodel preference orpo kto rl reinforcementlearning distillation distill teacher "
     "knowledgedistillation",
     "cairn export", "Cairn trains on next tokens only; export to Hugging Face for other methods."},
    {"finetune finetuning pretrained pretrainedmodel frompretrained basemodel continuedpretraining continuepretraining "
     "transferlearning loadmodel modelnameorpath loadweights warmstart initfrom",
     "cairn init, init, T.hf", "`cairn init --from HF_DIR` writes the recipe; init names what a run begins with."},
    {"pretrain pretraining run fit start trainer", "cairn train", "It trains a recipe."},
    {"earlystopping earlystop patience loadbestmodelatend bestmodel savebest", "T.patience, T.best",
     "watch.early_stop ends a run; T.best keeps the best checkpoints by any metric."},
    // --- Model
    {"hiddensize dmodel nembd embeddim modeldim dim embeddingsize hidden", "model.width",
     "Channels of the residual stream."},
    {"numlayers nlayer nlayers depth numhiddenlayers blocks", "model.layers", "Decoder blocks."},
    {"numheads nhead nheads numattentionheads attentionheads", "model.heads", "Query heads."},
    {"gqa mqa groupedquery numkeyvalueheads kvheads numquerygroups nkvheads multiquery", "model.kv_heads",
     "Key and value heads."},
    {"intermediatesize ffnhiddensize dff mlpratio feedforward dffn", "model.ffn", "Hidden units of the MLP."},
    {"vocabsize nvocab vocabularysize vocabulary makevocabsizedivisibleby", "model.vocab",
     "Rows of the token embedding."},
    {"dropout attentiondropoutrate hiddendropout residdropout dropoutrate",
     "model.residual_dropout, model.attention_dropout, model.embedding_dropout", "Rates of three places."},
    {"mixtureofexperts experts numexperts router gating topk loadbalancing auxloss", "model.moe",
     "Experts instead of the MLP."},
    {"rotary ropescaling yarn ntk rotaryembedding rotaryembeddings ropebase positionembeddings positionalencoding "
     "alibi",
     "T.rotary, model.positions", "How a token knows its place."},
    {"flashattention flashattn sdpa xformers attnimplementation attentionbackend useflashattn", "cairn train",
     "The kernels never keep whole score matrices; `--attention cudnn` takes cuDNN's on CUDA."},
    {"slidingwindowattention localattention window", "model.sliding_window", "How far back a query sees."},
    {"weighttying tieembeddings tiewordembeddings sharedembeddings tied", "model.tied_embeddings",
     "The head is the embedding."},
    {"activationfunction hiddenact act gelu swiglu relu", "model.activation", "The MLP's."},
    {"multitokenprediction mtploss speculative", "model.mtp", "Modules that guess further tokens."},
    {"labelsmoothing zloss auxiliaryloss loss lossfunction crossentropy", "optimizer.z_loss, objective",
     "The loss is the cross-entropy of each next token; z-loss may be added."},
    {"fim fillinthemiddle infilling", "objective",
     "kind = \"infill\" is GLM's; Cairn has no other fill-in-the-middle."},
    {"arch architecture modeltype modelconfig configjson yaml", "model, T.llama, T.gpt, cairn init",
     "A recipe is a Lua file; `cairn init --from HF_DIR` writes one from a config.json."},
    {"compile torchcompile jit inductor triton cudagraphs cudagraph", "cairn train",
     "The kernels are compiled ahead; there is nothing to set."},
    {"deterministicalgorithms reproducible reproducibility determinism bitexact", "deterministic, seed",
     "A run repeats its bits in one layout, or with \"layout\" in any."},
    {"randomseed manualseed rng", "seed", "It draws weights and the order of samples."},
    // --- Checkpoints
    {"saveinterval savesteps checkpointinterval saveevery savefreq savestrategy checkpointing saving save",
     "checkpoint, T.every", "checkpoint = { save = { T.every { steps = 500 } } }."},
    {"savetotallimit keepcheckpoints maxcheckpoints keeplast retention rotate", "checkpoint, T.last",
     "Rules that keep checkpoints."},
    {"asynccheckpoint asyncsave asynccheckpointing", "checkpoint", "Saves always run beside training."},
    {"restart continue resumefrom resumefromcheckpoint loadcheckpoint restore load reload rollback",
     "cairn resume, cairn train", "The same `cairn train` again resumes; `--from-step N` goes back."},
    {"reshard resharding convertlayout changelayout", "cairn ckpt reshard, cairn resume",
     "A run resumes on any layout; reshard writes one beforehand."},
    {"merge consolidate zerotofp32 unshard converttohf savepretrained tohf hf huggingface transformers safetensors hub "
     "pushtohub uploadmodel publish",
     "cairn export, cairn import", "They convert checkpoints to Hugging Face folders and back; Cairn uploads nothing."},
    {"label labels labelling labeling goodcheckpoint badcheckpoint", "watch, cairn ckpt label, cairn ckpt ls",
     "Checkpoints are labelled good, suspect or bad. Labels of data are the next tokens; there is nothing to set."},
    {"verify validatecheckpoint checksum integrity fsck corruption", "cairn ckpt verify", "It reads every byte."},
    {"backup push pull upload s3 gcs remote mirror copy download sync",
     "checkpoint.copy_to, cairn ckpt push, cairn ckpt fetch", "Mirrors in a directory or an S3 store."},
    {"list ls checkpoints inspect cat dump", "cairn ckpt ls, cairn ckpt inspect, cairn ckpt cat",
     "Commands on checkpoints."},
    {"delete remove rm prune clean cleanup gc", "cairn ckpt prune", "It removes checkpoints that no rule keeps."},
    // --- What a run reports
    {"wandb weightsandbiases weightandbiases mlflow comet neptune aim clearml tracker tracking reportto logger",
     "log.trackers, cairn track, log.tensorboard",
     "T.wandb, T.mlflow, T.prometheus and T.otlp send each step of a run; `cairn track` those of one that has ended."},
    {"tensorboard tb logdir tfevents", "log.tensorboard", "On by default, in RUN/tensorboard."},
    {"logging loginterval loggingsteps logfreq logevery printevery verbose progress progressbar log", "log.at",
     "A log gets a line a minute; log.at says other steps."},
    {"metrics plot curve losscurve graph dashboard status monitor watch tail logs top eta history info", "cairn report",
     "It prints the curve, speed and state of a run; --follow prints news."},
    {"spike spikes lossspike lossspikes divergence diverge diverged instability nan inf skipbatch anomaly skipbatches",
     "watch, optimizer.clip, cairn resume",
     "watch finds spikes and labels checkpoints good or suspect; watch.on_outlier and on_divergence act, and "
     "`--from-step N` goes back."},
    {"hook hooks callback callbacks webhook notify notification notifications alert alerts slack email oncheckpoint "
     "onsave onevent",
     "hooks, cairn train", "T.on runs a command when something happens, at a start with --hooks."},
    {"profile profiler profiling trace nsys timeline torchprofiler perfetto", "cairn train, cairn report",
     "`cairn train --trace steps=5..8` draws some steps."},
    {"benchmark bench throughput mfu tflops flops speed performance tokenspersecond",
     "cairn report, cairn plan, cairn check-hosts", "A run's, one reckoned for a layout, or one measured on hosts."},
    // --- Failures
    {"elastic elasticity faulttolerance autoresume autorestart maxrestarts retries retry", "restart, cairn launch",
     "A run restarts its ranks by itself."},
    {"timeout nccltimeout watchdog hang deadlock stuck ddptimeout", "restart.deadline, cairn doctor",
     "The longest wait of a rank for another."},
    {"stop kill cancel terminate interrupt pause quit exit", "cairn train",
     "SIGTERM to the process saves and ends a run; the field `stop` is its length."},
    {"nccl rccl backend gloo mpi comm communication allreduce infiniband", "cairn train, cairn check-hosts",
     "`--comm` chooses among engines; check-hosts measures links."},
    {"spot preemption preemptible signal sigterm requeue walltime timelimit", "checkpoint, cairn launch",
     "A signal saves before the end; the same command again resumes."},
    // --- Using a model
    {"inference sample sampling chatbot complete completion predict serve server serving api vllm infer play prompt",
     "cairn generate, cairn export", "generate continues texts; export a Hugging Face folder for a server."},
    {"perplexity ppl score bitsperbyte mmlu lmeval harness evals benchmarktasks", "cairn eval, cairn export",
     "eval gives loss, perplexity and bits per byte; export for other benchmarks."},
    {"temperature topp nucleus maxnewtokens beam beamsearch repetitionpenalty", "cairn generate", "Flags of generate."},
    // --- Files and settings
    {"config configfile settings arguments args override overrides hydra omegaconf cli", "cairn explain, cairn check",
     "A recipe in Lua; `--set FIELD=VALUE` changes a field of it."},
    {"outputdir output outdir savedir expname experiment experimentname runname projectname jobname out",
     "name, cairn train", "`cairn train --run DIR` names the run folder; name is the recipe's."},
    {"new create scaffold template quickstart example examples tutorial setup", "cairn init",
     "It writes a first recipe and its data."},
    {"validate lint dryrun test verifyconfig checkconfig", "cairn check, cairn train",
     "`--dry-run` reports what a start would do."},
    {"rocm hip amd radeon instinct mps metal apple tpu xla xpu oneapi intel npu ascend gaudi", "device, cairn doctor",
     "Cairn computes on CPUs and, with CUDA, on NVIDIA's GPUs; on no others."},
    {"exitcode exitcodes exitstatus returncode returncodes errorcode errorcodes", "cairn train, cairn check",
     "The help of each command ends with its exit codes."},
    {"install build version cuda driver environment env diagnose debug", "cairn doctor",
     "It prints what the machine has."},
    {"compare difference", "cairn diff, cairn ckpt diff", "They compare recipes, runs and checkpoints."},
    {"estimate memoryestimate calculator params parameters parametercount", "cairn plan",
     "Bytes, parameters and step time of a layout."},
};

std::vector<std::string> parts(std::string_view text, char by) {
  std::vector<std::string> out;
  std::istringstream in{std::string(text)};
  for (std::string part; std::getline(in, part, by);) {
    if (const size_t begin = part.find_first_not_of(' '); begin != std::string::npos) out.push_back(part.substr(begin));
  }
  return out;
}

int64_t edit_distance(std::string_view a, std::string_view b) {
  // Optimal string alignment: insert, delete, replace, and swap of neighbours (the commonest slip) cost one each.
  std::vector<std::vector<int64_t>> cost(a.size() + 1, std::vector<int64_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = static_cast<int64_t>(i + j);
        continue;
      }
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

}  // namespace

std::string joined_word(std::string_view word) {
  std::string out;
  for (const char c : word) {
    if (c != '-' && c != '_' && c != '.' && c != ' ' && c != '/')
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return out;
}

std::string Meaning::text() const {
  std::string out;
  for (const std::string& name : here) out += (out.empty() ? "" : ", ") + name;
  return out + ": " + says;
}

std::optional<Meaning> meaning_of(std::string_view word) {
  const std::string wanted = joined_word(word.substr(0, 64));
  if (wanted.empty()) return std::nullopt;
  for (const Row& row : kRows) {
    for (const std::string& known : parts(row.words, ' ')) {
      if (known == wanted) return Meaning{parts(row.here, ','), row.says};
    }
  }
  return std::nullopt;
}

std::optional<Meaning> meaning_near(std::string_view word) {
  word = word.substr(std::min(word.find_first_not_of("-_. "), word.size()));
  for (size_t end = word.find_last_of("-_. "); end != std::string_view::npos && end > 0;
       end = word.find_last_of("-_. ", end - 1)) {
    if (std::optional<Meaning> meaning = meaning_of(word.substr(0, end))) return meaning;
  }
  return meaning_of(nearest(joined_word(word), known_words()));
}

std::string nearest(std::string_view name, const std::vector<std::string>& names) {
  name = name.substr(0, 64);
  std::string best;
  int64_t best_cost = std::max<int64_t>(1, static_cast<int64_t>(name.size()) / 3) + 1;
  for (const std::string& candidate : names) {
    const int64_t cost = edit_distance(name, candidate);
    if (cost < best_cost) best = candidate, best_cost = cost;
  }
  return best;
}

std::vector<std::string> known_words() {
  std::vector<std::string> out;
  for (const Row& row : kRows) {
    for (std::string& word : parts(row.words, ' ')) out.push_back(std::move(word));
  }
  return out;
}

}  // namespace cairn::dsl
