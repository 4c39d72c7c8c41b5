#pragma once
// Choices of a CUDA device (runtime/device/tuning.h): which of cuBLASLt's algorithms each kind of product has, and
// whose kernels each kind of attention.

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/cuda/attention_ways.h"
#include "runtime/cuda/blas.h"
#include "runtime/cuda/cuda_link.h"
#include "runtime/cuda/stream.h"
#include "runtime/cuda/tuning/choices.h"
#include "runtime/device/tuning.h"

namespace cairn::cuda {

class CudaTuning final : public DeviceTuning {
 public:
  /// All outlive it. The stream has memory for products, for kernels and for attention by the time of choose(). Without
  /// `sum_runs` bits are not compared. `runs`: ProductTiming.
  CudaTuning(Context& context, Blas& blas, CudaStream& stream, SumRuns sum_runs, int64_t runs = ProductTiming{}.runs);
  /// Attention is timed too. `library`: AttentionLibrary::version; 0: there is none.
  void time_attention(AttentionWays& ways, int64_t library);

  Result<bool> says_off(std::string_view text) const override;
  Status read(std::string_view text, bool uses) override;
  bool covers(std::string_view layout) const override;
  std::vector<TuningTopic> topics() const override;
  std::vector<std::string> unchosen() const override;
  Result<std::string> choose(const std::string& work) override;
  Status use(const std::string& choice) override;
  std::string text(std::string_view layout, bool off) const override;

 private:
  void keep(const ChosenProduct& choice, bool uses);
  Status keep(const ChosenAttention& choice, bool uses);
  /// "bf16 16 x 1024 tokens, 12 heads of 64: forward by cudnn (own 131.0 us, cudnn 92.1 us), backward by own"
  std::string chosen_attention() const;
  Result<uint64_t> sum(const void* first, int64_t bytes);

  Blas& blas_;
  CudaStream& stream_;
  const SumRuns sum_runs_;
  const int64_t runs_;
  TuningPlace place_, attention_place_;
  AttentionWays* attention_ = nullptr;
  std::map<std::pair<TuningPlace, ProductKind>, TimedProduct> products_;
  std::map<std::pair<TuningPlace, AttentionKind>, TimedAttention> attentions_;
  std::set<CoveredLayout> layouts_, attention_layouts_;
  std::vector<std::string> others_;
  std::set<TuningPlace> used_, used_attention_;  // places of choices given to use()
};

}  // namespace cairn::cuda
