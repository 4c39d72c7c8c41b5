#include "tools/model_source.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/posix_backend.h"
#include "converters/hf_folder.h"
#include "converters/import.h"
#include "dsl/dsl.h"
#include "tools/run_folder.h"

namespace cairn::tools {

namespace fs = std::filesystem;

namespace {

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

Status fill(const convert::WeightSource& source, inference::Session& session) {
  // Runs come tensor by tensor, so one tensor at a time is in memory twice.
  std::vector<float> whole;
  int64_t held = -1;
  for (const trainer::StateTensor& run : session.weights()) {
    const Shape& shape = session.plan().tensors[run.tensor].shape;
    if (held != run.tensor) {
      whole.resize(count_elems(shape));
      RT_TRY(source.read(run.tensor, whole));
      held = run.tensor;
    }
    convert::copy_box_out(whole.data(), shape, run.box, reinterpret_cast<float*>(run.data));
  }
  session.weights_ready();
  return {};
}

/// The SentencePiece library wants a file: the kept bytes become one for as long as it is read.
Result<std::unique_ptr<data::Tokenizer>> tokenizer_of_bytes(const std::string& bytes) {
  std::error_code error;
  std::string path = (fs::temp_directory_path(error) / "cairn-tokenizer-XXXXXX").string();
  const int fd = ::mkstemp(path.data());
  if (fd < 0) return os_error(errno, path);
  ::close(fd);
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  out.close();
  auto made = out ? data::make_tokenizer({TokenizerConfig::Kind::kSentencePiece, path})
                  : Result<std::unique_ptr<data::Tokenizer>>(os_error(EIO, path));
  ::unlink(path.c_str());
  return made;
}

Result<std::unique_ptr<data::Tokenizer>> choose_tokenizer(const std::string& wish, const Recipe& recipe,
                                                          const convert::CheckpointWeights* checkpoint,
                                                          const fs::path& from) {
  if (wish == "bytes") return data::make_tokenizer({.kind = TokenizerConfig::Kind::kBytes});
  if (!wish.empty()) return data::make_tokenizer({TokenizerConfig::Kind::kSentencePiece, wish});
  if (checkpoint != nullptr) {
    for (const std::string& name : checkpoint->files()) {
      if (name != "tokenizer.model") continue;
      RT_TRY_SET(const std::string bytes, checkpoint->file(name));
      return tokenizer_of_bytes(bytes);
    }
  }
  if (recipe.tokenizer.kind == TokenizerConfig::Kind::kNone) {
    return invalid(fmt::format(
        "{}: has no tokenizer that is read here (bytes, or a SentencePiece model tokenizer.model); name one with "
        "--tokenizer bytes or --tokenizer FILE",
        from.string()));
  }
  return data::make_tokenizer(recipe.tokenizer);
}

}  // namespace

Result<LoadedModel> load_model(const fs::path& path, const std::string& tokenizer) {
  ckpt::PosixBackend io;
  LoadedModel out;
  std::unique_ptr<convert::WeightSource> source;
  const convert::CheckpointWeights* checkpoint = nullptr;
  std::error_code error;
  if (fs::exists(path / convert::kConfigFile, error)) {
    RT_TRY_SET(std::unique_ptr<convert::HfFolder> folder, convert::HfFolder::open(path));
    out.from = path;
    out.recipe = convert::recipe_for_import(folder->model(), {.tp = 1, .pp = 1, .dp = 1}, "hf", path);
    source = std::move(folder);
  } else {
    RT_TRY_SET(out.from, resolve_checkpoint(path));
    RT_TRY_SET(std::unique_ptr<convert::CheckpointWeights> weights,
               convert::CheckpointWeights::open(io, out.from, dsl::decode_recipe));
    out.recipe = weights->recipe();
    checkpoint = weights.get();
    source = std::move(weights);
  }
  RT_TRY_SET(out.tokenizer, choose_tokenizer(tokenizer, out.recipe, checkpoint, out.from));
  if (out.tokenizer->vocab() > out.recipe.model.vocab) {
    return invalid(fmt::format("{}: the tokenizer has {} ids, the model {} rows: they do not belong together",
                               out.from.string(), out.tokenizer->vocab(), out.recipe.model.vocab));
  }
  RT_TRY_SET(out.session, inference::Session::make(out.recipe));
  RT_TRY(fill(*source, *out.session));
  return out;
}

}  // namespace cairn::tools
