#pragma once
// Choices of a CUDA device (runtime/device/tuning.h): which of cuBLASLt's algorithms each kind of product has.

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/cuda/blas.h"
#include "runtime/cuda/cuda_link.h"
#include "runtime/cuda/stream.h"
#include "runtime/cuda/tuning/choices.h"
#include "runtime/device/tuning.h"

namespace cairn::cuda {

class CudaTuning final : public DeviceTuning {
 public:
  /// All outlive it. The stream has memory for products and for kernels by the time of choose(). Without `sum_runs`
  /// bits are not compared. `runs`: ProductTiming.
  CudaTuning(Context& context, Blas& blas, CudaStream& stream, SumRuns sum_runs, int64_t runs = ProductTiming{}.runs);

  std::string where() const override { return cuda::text(place_); }
  Result<bool> says_off(std::string_view text) const override;
  Status read(std::string_view text, bool uses) override;
  bool covers(std::string_view layout) const override { return layouts_.contains({place_, std::string(layout)}); }
  int64_t choices() const override;
  std::string elsewhere() const override;
  std::vector<std::string> unchosen() const override;
  Result<std::string> choose(const std::string& work) override;
  Status use(const std::string& choice) override;
  std::string text(std::string_view layout, bool off) const override;

 private:
  void keep(const ChosenProduct& choice, bool uses);
  Result<uint64_t> sum(const void* first, int64_t bytes);

  Blas& blas_;
  CudaStream& stream_;
  const SumRuns sum_runs_;
  const int64_t runs_;
  TuningPlace place_;
  std::map<std::pair<TuningPlace, ProductKind>, TimedProduct> products_;
  std::set<CoveredLayout> layouts_;
  std::vector<std::string> others_;
  std::set<TuningPlace> used_;  // places of choices given to use()
};

}  // namespace cairn::cuda
