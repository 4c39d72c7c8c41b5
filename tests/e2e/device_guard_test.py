"""No code of the host touches a device's memory: with the guard of runtime/device/guard.h its pages can be reached only
while a kernel, communication or a link of snapshots runs, and whole training runs go through, with the bits of runs
without it. State is of that memory too: banks and weights in shared memory, what a rank keeps of others, work memory.
What a rank's other threads do beside its own code is not seen, so reductions run on the rank's own thread, in some."""

import contextlib
import os
import signal

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
ONE = dict(tp=1, pp=1, dp=2, zero=0, sp="false")  # ranks keep state of each other
LAMB = ("T.adamw {", "T.lamb {")
ADAFACTOR = ("T.adamw { peak_lr = 1e-2,", "T.adafactor { peak_lr = 3e-2, beta1 = 0.9,")
# By what is done to state: what is replaced in the recipe, settings.
UPDATES = {
    "adamw with an average": ((), ("optimizer.ema=0.9",)),
    "lamb": (LAMB, ()),
    "adafactor with an average": (ADAFACTOR, ("optimizer.ema=0.9",)),
    "qk clip": ((), ("optimizer.qk_clip=0.01",)),
    "biases that balance experts": ((), (*EXPERTS, "model.moe.bias_rate=0.01")),
    "fp16, whose first steps are skipped": ((), ("precision=fp16", "loss_scale.initial=16777216", "loss_scale.hysteresis=1")),
    "bf16": ((), ("precision=bf16",)),
    "copied snapshots": ((), ("checkpoint.snapshot_by=copy",)),
    "copied snapshots with adafactor": (ADAFACTOR, ("checkpoint.snapshot_by=copy",)),
    "on a disk": ((), ("model.width=256", "optimizer.offload={disk}")),
}


class DeviceGuard(RunTest):
    def options(self, sets):
        disk = self.folder / "state-disk"
        disk.mkdir(exist_ok=True)
        return [word for text in sets for word in ("--set", text.replace("{disk}", str(disk)))]

    @contextlib.contextmanager
    def guard(self):
        os.environ[GUARD] = "1"
        try:
            yield
        finally:
            del os.environ[GUARD]

    def both(self, name, recipe, sets):
        """Trains without the guard and with it, in one start, and compares."""
        free, guarded = (f"{kind}-{name}".replace(" ", "-").replace(",", "") for kind in ("free", "guarded"))
        self.train(recipe, free, *self.options(sets))
        with self.guard():
            self.train(recipe, guarded, *self.options(sets))
        self.assertEqual(len(self.events(guarded, "start")), 1)  # an agent starts ranks again that die
        self.assert_same_training(guarded, free, STEPS)

    def test_whole_runs_of_every_kind_of_update(self):
        for name, (replaced, sets) in UPDATES.items():
            with self.subTest(name):
                recipe = self.recipe(name="update", steps=STEPS, **ONE)
                if replaced:
                    text = recipe.read_text()
                    self.assertIn(replaced[0], text)
                    recipe.write_text(text.replace(*replaced))
                self.both(name, recipe, (ON_ONE_THREAD, *sets))

    def test_runs_that_resume_from_memory_and_from_disk(self):
        """A start fills what a rank keeps of others, from snapshots and from checkpoints; and ranks make weights anew."""
        for name, sets in (("banks", ()), ("copies", ("checkpoint.snapshot_by=copy",))):
            with self.subTest(name):
                recipe = self.recipe(name="update", steps=400, save=400, **ONE)
                options = self.options((ON_ONE_THREAD, *sets))
                free, killed, stopped = (f"{kind}-{name}" for kind in ("free", "killed", "stopped"))
                self.train(recipe, free, *options)
                with self.guard():
                    self.train(recipe, killed, *options, "--kill", "1@5")
                    job = self.start(recipe, stopped, *options)
                    self.until_step(stopped, 5, job)
                    job.signal(signal.SIGTERM)
                    self.finish(job)
                    self.train(recipe, stopped, *options)
                for run in (killed, stopped):
                    self.assertEqual(len(self.events(run, "start")), 2)
                    self.assert_same_training(run, free, 400)

    def test_whole_runs_of_every_kind_of_layout(self):
        for name, (layout, sets) in LAYOUTS.items():
            with self.subTest(name):
                self.both(name, self.recipe(name="layout", steps=STEPS, **layout), sets)


if __name__ == "__main__":
    main()
