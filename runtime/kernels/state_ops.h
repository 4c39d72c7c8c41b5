#pragma once
// The kernels of a device over training state, which is float whatever the weights' type is: update rules, what follows
// them, copies. StateOps is the table, StateExec the table bound to a stream (runtime/kernels/table.h).

#include "runtime/kernels/adafactor.h"
#include "runtime/kernels/adamw.h"
#include "runtime/kernels/clip.h"
#include "runtime/kernels/ema.h"
#include "runtime/kernels/head_clip.h"
#include "runtime/kernels/lamb.h"
#include "runtime/kernels/rows.h"
#include "runtime/kernels/state_copies.h"
#include "runtime/kernels/table.h"
#include "runtime/kernels/tensor_norms.h"

namespace cairn::kernels {

// clang-format off
#define RT_STATE_KERNELS(X)                                                                                          \
  X(clip_by_norm) X(adamw_of_runs) X(lamb_moments_of_runs) X(lamb_step_of_runs) X(add_norms_of_runs)                 \
  X(fill_doubles) X(adafactor_squares_of_runs) X(adafactor_factors_of_tensors) X(adafactor_moments)                  \
  X(adafactor_norms_of_runs) X(adafactor_rates) X(adafactor_rates_of_runs) X(adafactor_step_of_runs)                 \
  X(balance_bias) X(ema_of_runs) X(head_factors) X(scale_heads_of_runs) X(floats_to_host)                            \
  X(copy_state) X(copy_summed) X(clear_floats) X(draw_weights) X(put_weights) X(put_first_weights)                   \
  X(add_squares_of_runs) X(doubles_to_host) X(count_not_finite)
// clang-format on

struct StateOps {
  RT_STATE_KERNELS(RT_FUNCTION)
};

struct StateExec {
  StateExec(const StateOps& ops, Stream& on) : stream(on) RT_STATE_KERNELS(RT_BIND) {}

  Stream& stream;
  RT_STATE_KERNELS(RT_BOUND)
};

/// The kernels of the stream's device.
StateExec state_exec_on(Stream& stream);

/// As serve_cuda_ops() of runtime/kernels/ops.h.
void serve_cuda_state_ops(const StateOps& ops);

}  // namespace cairn::kernels
