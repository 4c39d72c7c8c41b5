#pragma once
// How the weights of several checkpoints become one: means, task vectors, TIES, DARE, SLERP. Values are doubles; the
// caller rounds once. Rules are those of mergekit 0.1.4 (its names too); the papers: model soups arXiv:2203.05482, task
// arithmetic 2212.04089, TIES 2306.01708, DARE 2311.03099.
//
// A task vector is a source minus the base. Results are the same for any order of pieces and any layout: what a rule
// has to know of a whole tensor it learns in passes over it, and DARE draws by the element's index.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::ckpt {

enum class MergeMethod {
  kLinear,          // sum of weight * source, divided by the sum of weights
  kTaskArithmetic,  // base + lambda * sum of weight * task vector
  kTies,            // only each task vector's greatest elements, and of them those of the sign that weighs more
  kDareLinear,      // only drawn elements of task vectors, scaled up to the sum of magnitudes that all had
  kDareTies,        // drawn as kDareLinear, and of them those of the sign that weighs more
  kSlerp,           // of two sources: on the arc from the first to the second, each tensor as one vector
};

/// "linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "slerp"
std::string_view merge_method_name(MergeMethod method);
bool needs_base(MergeMethod method);     // task vectors are taken from one
bool reads_density(MergeMethod method);  // drops elements of task vectors
bool draws(MergeMethod method);          // which, by a seed
bool normalizes(MergeMethod method);     // by default

struct MergeRule {
  MergeMethod method = MergeMethod::kLinear;
  std::vector<double> weights;    // one for each source; SLERP reads none
  std::vector<double> densities;  // of TIES and DARE, for each source: the share of its task vector that is kept
  bool normalize = true;          // divide by the sum of weights, of TIES of those that take part in an element
  double lambda = 1;              // with a base: times the merged task vectors
  double t = 0.5;                 // SLERP: 0 is the first source, 1 the second
  uint64_t seed = 0;              // DARE
};

/// Errors: kInvalidInput: a number that is none or out of its range; too few sources, or not two for SLERP.
Status check_merge_rule(const MergeRule& rule, size_t sources);

/// Elements of one tensor, of all sources alike.
struct MergePiece {
  std::span<const double> base;  // empty without a base
  std::span<const std::vector<double>> sources;
  std::span<const int64_t> index;  // row-major in the whole tensor; read by DARE only
};

/// The rule for one tensor.
class TensorMerge {
 public:
  /// `rule` outlives it. `elems`: of the whole tensor.
  TensorMerge(const MergeRule& rule, std::string_view tensor, int64_t elems);

  /// Passes over the whole tensor before merge(): each shows every element once, in the same order in every layout.
  static int passes(MergeMethod method);
  void look(int pass, const MergePiece& piece);
  void end_pass(int pass);

  void merge(const MergePiece& piece, std::span<double> out) const;

 private:
  struct Source {
    bool all = true;     // each element of its task vector is kept
    uint32_t least = 0;  // TIES: of the magnitudes that are kept, as bits of a float
    uint64_t left = 0;   // TIES: of the elements to keep, those in the bin of the first pass
    std::vector<int64_t> bins;
    uint64_t key = 0;                     // DARE
    double sum = 0, kept = 0, scale = 1;  // DARE: of magnitudes
  };
  double kept_delta(size_t source, const MergePiece& piece, size_t element) const;
  void merge_linear(const MergePiece& piece, std::span<double> out) const;
  void merge_deltas(const MergePiece& piece, std::span<double> out) const;

  const MergeRule& rule_;
  int64_t elems_;
  std::vector<Source> sources_;
  double squares_[2] = {0, 0}, dot_ = 0;  // SLERP
  double factors_[2] = {0, 0};
};

}  // namespace cairn::ckpt
