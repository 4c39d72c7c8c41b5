"""No code of the host touches a device's memory: with the guard of runtime/device/guard.h its pages can be reached only
while a kernel, communication or the update runs, and whole training runs go through, with the bits of runs without it.
What a rank's other threads do beside its own code is not seen, so reductions run on the rank's own thread, in some."""

import os

from harness import RunTest, main

STEPS = 12
GUARD = "CAIRN_GUARD_DEVICE_MEMORY"
ON_ONE_THREAD = "optimizer.overlap=false"
EXPERTS = ('model.positions="rotary"', 'model.activation="swiglu"', "model.bias=false", "model.moe.experts=4",
           "model.moe.aux_loss=0.01", "model.moe.shared_experts=1")
LAYOUTS = {
    "one rank": (dict(tp=1, pp=1, dp=1, sp="false"), ()),
    "tp with sequence parallelism, ZeRO-3": (dict(tp=2, pp=1, dp=2, zero=3), (ON_ONE_THREAD,)),
    "tp without, ZeRO-0": (dict(tp=2, pp=1, dp=2, zero=0, sp="false"), (ON_ONE_THREAD,)),
    "pipeline, ZeRO-2": (dict(tp=1, pp=2, dp=2, zero=2, sp="false"), (ON_ONE_THREAD,)),
    "zb-v": (dict(tp=1, pp=2, dp=1, sp="false"), ('schedule="zb-v"', "mesh.virtual_stages=2", "model.layers=4")),
    "all axes, overlapped": (dict(tp=2, pp=2, dp=2, zero=1), ()),
    "cp": (dict(tp=1, pp=1, dp=1, sp="false"), ("mesh.cp=2", ON_ONE_THREAD)),
    "experts over ranks": (dict(tp=1, pp=1, dp=2, sp="false"), ("mesh.ep=2", ON_ONE_THREAD, *EXPERTS)),
    "full recompute": (dict(tp=2, pp=1, dp=1), ('recompute.mode="full"', ON_ONE_THREAD)),
}


class DeviceGuard(RunTest):
    def test_whole_runs_of_every_kind_of_layout(self):
        for name, (layout, sets) in LAYOUTS.items():
            with self.subTest(name):
                free, guarded = (f"{kind}-{name}".replace(" ", "-").replace(",", "") for kind in ("free", "guarded"))
                recipe = self.recipe(name="layout", steps=STEPS, **layout)
                options = [word for text in sets for word in ("--set", text)]
                self.train(recipe, free, *options)
                os.environ[GUARD] = "1"
                try:
                    self.train(recipe, guarded, *options)
                finally:
                    del os.environ[GUARD]
                self.assert_same_training(guarded, free, STEPS)


if __name__ == "__main__":
    main()
