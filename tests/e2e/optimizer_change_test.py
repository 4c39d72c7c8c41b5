"""Another optimizer under way: which state stays, what begins at zero, and from where updates count."""

import pathlib
import signal
import struct

import numpy

from change_run import ChangeTest, contents
from harness import main

# Wherever a run stands in these data it trains on the same: every window of 32 tokens is like every other.
PERIOD = [(7 * i * i + 3 * i) % 256 for i in range(32)]
FLAT = ["--set", "optimizer.lr-", "--set", "deterministic=run"]
FACTORED = [*FLAT, "--set", "optimizer=T.adafactor { peak_lr = 1.5e-3 }"]
CUT = ["--set", "mesh.tp=2", "--set", "optimizer.zero=1"]  # on four ranks
ACCEPT = ["--accept", "optimizer.kind"]


class OptimizerChange(ChangeTest):
    def setUp(self):
        super().setUp()
        tokens = PERIOD * 200
        path = self.folder / "tokens"
        pathlib.Path(f"{path}.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
        index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
        index += struct.pack("<i", len(tokens)) + struct.pack("<q", 0) + struct.pack("<2q", 0, 1)
        pathlib.Path(f"{path}.idx").write_bytes(index)

    def kinds(self, run, step):
        return {tensor["kind"] for tensor in self.manifest(run, step)["tensors"]}

    def assert_begun_anew(self, run, at, fresh, *words, nproc=1):
        """From step `at` on the run is what a run is that begins with its weights of that step and nothing else."""
        last = self.last_step(run)
        self.run_it(fresh, *words, "--set", f"stop=T.steps({last - at})", "--init-from", self.checkpoint(run, at),
                    "--init-weights-only", nproc=nproc)
        mine, other = self.metrics(run), self.metrics(fresh)
        for step in range(1, last - at + 1):
            for key in ("loss", "grad_norm", "lr"):
                self.assertEqual(mine[at + step][key], other[step][key], f"step {at + step} {key}")
        self.cairn("ckpt", "diff", self.checkpoint(run, last), self.checkpoint(fresh, last - at), "--tensors-only",
                   "--exit-code")

    def test_a_changed_optimizers_moments_begin_at_zero_and_its_updates_at_one(self):
        for name, before, after, nproc in (("to", FLAT, FACTORED, 1), ("from", FACTORED, FLAT, 1),
                                           ("cut", FLAT, [*FACTORED, *CUT], 4)):
            with self.subTest(name):
                self.half(name, *before)
                kept = contents(self.folder / name)
                for more in ([], ["--dry-run"]):
                    text = self.run_it(name, *after, *more, code=2, nproc=nproc)
                    self.assertIn("--accept optimizer.kind", text)
                    self.assertIn("they begin at zero", text)
                    self.assertNotIn("the optimizer state of", text)
                    self.assertEqual(contents(self.folder / name), kept)
                # Over a kill and another start: what the count begins with is kept.
                text = self.run_it(name, *after, *ACCEPT, "--set", "stop=T.samples(120)", "--kill", "0@13", nproc=nproc)
                self.assertIn("bias correction counts from here", text)
                told = [event for event in self.events(name, "recipe_changed") if event["field"] == "optimizer.kind"]
                self.assertEqual([(event["step"], event["accepted"]) for event in told], [(10, True)])
                self.run_it(name, *after, nproc=nproc)
                self.assertEqual(self.manifest(name, 20)["state"]["past"]["moments_from"], 10)
                self.assertEqual("exp_avg" in self.kinds(name, 20), name == "from")
                self.assert_begun_anew(name, 10, name + "-fresh", *after, nproc=nproc)

    def test_a_changed_optimizer_saves_first_what_only_memory_holds_and_survives_a_kill(self):
        slow = ["--set", "stop=T.steps(4000)", "--set", "checkpoint.save={ T.every { steps = 4000 } }"]
        job = self.start(self.file, "memory", "--nproc", 1, *FLAT, *slow)
        self.until_step("memory", 5, job)
        job.kill_group()
        self.assertEqual(self.checkpoints("memory"), [])
        kept, memory = contents(self.folder / "memory"), self.memory_left(self.folder)
        self.assertIn("--accept optimizer.kind", self.run_it("memory", *FACTORED, *slow, code=2))
        self.assertEqual((contents(self.folder / "memory"), self.memory_left(self.folder)), (kept, memory))
        for kill in range(3):  # between the read of the state and the first step, or near it
            more = ACCEPT if kill == 0 else []  # the start that was accepted is remembered
            job = self.start(self.file, "memory", "--nproc", 1, *FACTORED, *slow, *more)
            self.until(lambda: len(self.events("memory", "start")) > 1 + kill, "a start", job)
            job.kill_group()
        at, = self.checkpoints("memory")
        job = self.start(self.file, "memory", "--nproc", 1, *FACTORED, *slow)
        self.until_step("memory", at + 5, job)
        job.signal(signal.SIGTERM)
        self.finish(job)
        self.assertEqual(self.manifest("memory", self.last_step("memory"))["state"]["past"]["moments_from"], at)
        self.assert_begun_anew("memory", at, "memory-fresh", *FACTORED)

    def test_the_advice_of_the_message_warms_the_rate_up_again(self):
        self.half("warm", *FLAT)
        text = self.run_it("warm", *FACTORED, code=2)
        stage = text[text.index("T.stage {"):].splitlines()[0]
        self.run_it("warm", *FACTORED, *ACCEPT, "--set", f"stages={{ {stage.replace('steps(100)', 'steps(5)')} }}")
        rates = self.rates("warm")
        self.assertEqual(rates[11], 0)
        self.assertAlmostEqual(rates[13], 6e-4)
        self.assertAlmostEqual(rates[20], 1.5e-3)

    def test_a_stage_may_say_it_ahead_and_lineage_says_it_again(self):
        self.half("edit", *FLAT)
        self.run_it("edit", *FACTORED, *ACCEPT)
        replay = self.folder / "again.lua"
        replay.write_bytes(self.cairn("lineage", "edit", "--recipe").stdout)
        self.assertIn("stages", replay.read_text())
        self.train(replay, "again", "--nproc", 1)
        for step, row in self.metrics("edit").items():
            for key in ("loss", "grad_norm", "lr"):
                self.assertEqual(self.metrics("again")[step][key], row[key], f"step {step} {key}")
        self.cairn("ckpt", "diff", self.checkpoint("edit", 20), self.checkpoint("again", 20), "--tensors-only", "--exit-code")

    def test_adafactor_with_and_without_a_first_moment(self):
        self.half("first", *FACTORED)
        more = [*FACTORED, "--set", "optimizer.beta1=0.9"]
        self.assertIn("--accept optimizer.beta1", self.run_it("first", *more, code=2))
        self.run_it("first", *more, "--accept", "optimizer.beta1")
        self.assertIn("exp_avg", self.kinds("first", 20))
        self.assert_begun_anew("first", 10, "first-fresh", *more)

    def test_the_average_goes_on_without_the_moments_and_off_it_is_dropped(self):
        ema = ["--set", "optimizer.ema=0.75"]
        self.half("ema", *FLAT, *ema)
        self.copy_of("ema", "off")
        self.run_it("ema", *FACTORED, *ema, *ACCEPT, "--set", "stop=T.samples(88)")
        before, now = (self.array("ema", step, "ema/embed.tokens") for step in (10, 11))
        weight = self.array("ema", 11, "weight/embed.tokens")
        self.assertGreater(numpy.abs(before - self.array("ema", 10, "weight/embed.tokens")).max(), 1e-5)
        numpy.testing.assert_allclose(now, 0.75 * before + 0.25 * weight, rtol=0, atol=1e-6)

        kept = contents(self.folder / "off")
        text = self.run_it("off", *FLAT, code=2)
        self.assertIn("optimizer.ema 0.75 -> 0: the average is dropped", text)
        self.assertIn("--accept optimizer.ema", text)
        self.assertEqual(contents(self.folder / "off"), kept)
        self.run_it("off", *FLAT, "--accept", "optimizer.ema")
        self.assertEqual(self.kinds("off", 20), {"weight", "exp_avg", "exp_avg_sq"})
        self.run_it("never", *FLAT)
        for step in range(11, 21):
            self.assertEqual(self.metrics("off")[step]["loss"], self.metrics("never")[step]["loss"])


if __name__ == "__main__":
    main()
