#include "runtime/optim/rules/tensor_squares.h"

namespace cairn::optim {

using kernels::TensorNorms;

NormsOfTensors::NormsOfTensors(const StateWalk& walk, bool by_batches)
    : stream_(walk.on().stream),
      words_(stream_, std::ssize(walk.plan().tensors) * TensorNorms::kWords),
      blocks_(stream_, by_batches ? walk.most_blocks() * TensorNorms::kWords : 0) {
  walk.on().clear_numbers(words_.room());
}

TensorNorms NormsOfTensors::of(const StateBlock& block) {
  if (block.saved < 0) return {};
  return {words_.room(block.piece->tensor * TensorNorms::kWords, TensorNorms::kWords)};
}

std::span<double> NormsOfTensors::of(std::span<const StateBlock> batch) {
  const int64_t first = std::ssize(tensors_);
  for (const StateBlock& block : batch) tensors_.push_back(block.saved >= 0 ? block.piece->tensor : -1);
  return blocks_.room(first * TensorNorms::kWords, std::ssize(batch) * TensorNorms::kWords);
}

Result<std::vector<TensorSquares>> NormsOfTensors::add_over_world(comm::Comm& world) {
  RT_TRY(stream_.settle());
  std::vector<double> words(words_.read().begin(), words_.read().end());
  for (size_t block = 0; block < tensors_.size(); ++block) {
    if (tensors_[block] < 0) continue;
    const std::span<const double> of = blocks_.read().subspan(block * TensorNorms::kWords, TensorNorms::kWords);
    double* const to = words.data() + tensors_[block] * TensorNorms::kWords;
    for (size_t k = 0; k < of.size(); ++k) to[k] += of[k];
  }
  RT_TRY(world.all_reduce(words.data(), std::ssize(words), DType::kF64, comm::ReduceOp::kSum, "norms of tensors"));
  std::vector<TensorSquares> out;
  for (auto at = words.begin(); at != words.end(); at += TensorNorms::kWords) {
    const TensorNorms norms{{at, at + TensorNorms::kWords}};
    out.push_back({norms.weight().value(), norms.step().value()});
  }
  return out;
}

}  // namespace cairn::optim
