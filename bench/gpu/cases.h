#pragma once
// What is measured: the kernels of a model's training step, with how often the step calls each, and all others.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bench/gpu/bench_device.h"
#include "runtime/kernels/attention.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/plan.h"

namespace cairn::bench {

/// A model, and the micro-batch that one GPU takes.
struct Model {
  std::string name;
  Plan plan;
  StageDims dims;
  WorkShapes work;
};

/// gpt2-124m, gpt2-1558m, llama3-8-layers (8 of Llama-3 8B's 32); tiny-gpt and tiny-llama for tests. Errors:
/// kInvalidInput, naming them.
Result<Model> model_of(std::string_view name);

/// Of q, k and v that lie side by side.
kernels::AttentionDims attention_dims(const StageDims& d);

/// Of a step of one micro-batch, as layers, head and update order them (runtime/nn, runtime/optim).
std::vector<Case> step_cases(const Model& model);
/// The other kernels, with rows and width of the model.
std::vector<Case> other_cases(const Model& model);
/// Kernels that are not measured: what they do is a launch or a copy to the host, or the host computes it.
const std::vector<std::string_view>& not_measured();

/// Copies within the device, whose bytes a second are the memory's; and a large product, for the matrix units.
Case memory_case(int64_t bytes);
Case product_case(int64_t side);

}  // namespace cairn::bench
