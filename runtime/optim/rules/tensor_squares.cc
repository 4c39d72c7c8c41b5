#include "runtime/optim/rules/tensor_squares.h"

namespace cairn::optim {

using kernels::TensorNorms;

NormsOfTensors::NormsOfTensors(const StateWalk& walk)
    : stream_(walk.on().stream), words_(stream_, std::ssize(walk.plan().tensors) * TensorNorms::kWords) {
  walk.on().clear_numbers(words_.room());
}

TensorNorms NormsOfTensors::of(const StateBlock& block) {
  if (block.saved < 0) return {};
  return {words_.room(block.piece->tensor * TensorNorms::kWords, TensorNorms::kWords)};
}

Result<std::vector<TensorSquares>> NormsOfTensors::add_over_world(comm::Comm& world) {
  RT_TRY(stream_.settle());
  std::vector<double> words(words_.read().begin(), words_.read().end());
  RT_TRY(world.all_reduce(words.data(), std::ssize(words), DType::kF64, comm::ReduceOp::kSum, "norms of tensors"));
  std::vector<TensorSquares> out;
  for (auto at = words.begin(); at != words.end(); at += TensorNorms::kWords) {
    const TensorNorms norms{{at, at + TensorNorms::kWords}};
    out.push_back({norms.weight().value(), norms.step().value()});
  }
  return out;
}

}  // namespace cairn::optim
