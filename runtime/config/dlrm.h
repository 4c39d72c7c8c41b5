#pragma once
// A recommender model (DLRM, Naumov et al. 2019) and how it is trained. Plain values.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn {

/// How the bottom MLP's output x and the pooled rows e_1..e_n become the top MLP's input.
enum class Interaction {
  kDot,    // [x, dot products of each pair of x, e_1..e_n]
  kCat,    // [x, e_1, ..., e_n]
  kCross,  // low-rank cross layers over that: x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l (DCN v2)
};
enum class ClickLoss { kBinaryCrossEntropy, kMeanSquare };

struct DlrmTable {
  std::string name;  // of the column; the tensor is "table.<name>"
  int64_t rows = 0;
  double hot = 1;  // rows that a sample reads on average: for costs only
};

struct DlrmConfig {
  int64_t dense = 13;  // numeric features of a sample
  int64_t dim = 16;    // columns of each table
  std::vector<DlrmTable> tables;
  std::vector<int64_t> bottom;  // widths of the layers' outputs, the last of them `dim`; ReLU after each
  std::vector<int64_t> top;     // the same, the last of them 1; ReLU after each but the last, then a sigmoid
  Interaction interaction = Interaction::kDot;
  bool self_interaction = false;  // kDot: each vector with itself too
  int64_t cross_layers = 3;       // kCross
  int64_t cross_rank = 512;
  ClickLoss loss = ClickLoss::kBinaryCrossEntropy;
};

/// kRowAdagrad keeps one sum of squares a row of a table, and one an element of all other tensors.
enum class DlrmRule { kSgd, kRowAdagrad };

struct DlrmOptimizer {
  DlrmRule rule = DlrmRule::kSgd;
  double lr = 0.1;
  double eps = 1e-10;       // kRowAdagrad: added to the root
  double lr_decay = 0;      // kRowAdagrad: step t has lr / (1 + (t - 1) lr_decay)
  int64_t warmup = 0;       // steps in which the rate rises from 0 in a line
  int64_t decay_start = 0;  // the first step of the decay; decay_steps 0: none
  int64_t decay_steps = 0;  // until the rate has fallen, quadratically, to its floor of 1e-7
};

/// The part of a table that a rank owns. The name in brackets is torchrec's.
enum class CutKind {
  kTable,    // all of it (table-wise)
  kColumns,  // some columns of each row (column-wise)
  kRows,     // some rows (row-wise; over the ranks of one host: table-row-wise)
  kCopies,   // every rank has a copy (data-parallel)
};

struct TableCut {
  CutKind kind = CutKind::kTable;
  std::vector<int64_t> ranks;  // owners of the parts in order, a rank may own several; kTable: one, kCopies: none
};

}  // namespace cairn
