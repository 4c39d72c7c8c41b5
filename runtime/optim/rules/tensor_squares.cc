#include "runtime/optim/rules/tensor_squares.h"

namespace cairn::optim {

Result<std::vector<TensorSquares>> add_over_world(std::span<const ExactSum> parts, comm::Comm& world) {
  std::vector<double> words;
  for (const ExactSum& part : parts) {
    const auto add = part.words();
    words.insert(words.end(), add.begin(), add.end());
  }
  RT_TRY(world.all_reduce(words.data(), std::ssize(words), DType::kF64, comm::ReduceOp::kSum, "norms of tensors"));
  const auto value = [&](size_t part) {
    return ExactSum::from(std::span<const double, ExactSum::kWords>(&words[part * ExactSum::kWords], ExactSum::kWords))
        .value();
  };
  std::vector<TensorSquares> out;
  for (size_t part = 0; part < parts.size(); part += 2) out.push_back({value(part), value(part + 1)});
  return out;
}

}  // namespace cairn::optim
