"""cairn train --time-kernels: how long each op of a step takes, on the CPU."""

import json
import signal

from harness import RunTest, main


class KernelTimes(RunTest):
    def times(self, run, rank=0):
        return json.loads((self.folder / run / "kernel_times" / f"rank-{rank}.json").read_text())

    def test_each_rank_writes_its_times_and_rank_0s_table_is_printed(self):
        recipe = self.recipe(steps=9, tp=1, pp=1, dp=2, sp="false", save=4)
        job = self.train(recipe, "plain")
        self.assertFalse((self.folder / "plain/kernel_times").exists())
        self.assertNotIn("kernel times", job.output())
        job = self.train(recipe, "run", "--time-kernels")
        calls = set()
        for rank in (0, 1):
            times = self.times("run", rank)
            self.assertEqual((times["rank"], times["device"]), (rank, "cpu"))
            self.assertEqual((times["steps"], times["left_out"]), (7, 2))
            names = {op["op"] for op in times["ops"]}
            self.assertLessEqual({"matmul", "attention_forward", "attention_backward", "adamw_of_runs"}, names)
            self.assertEqual([op["ms"] for op in times["ops"]], sorted((op["ms"] for op in times["ops"]), reverse=True))
            for op in times["ops"]:
                self.assertGreater(op["ms"], 0)
                self.assertEqual(op["calls"] % 7, 0, op)
            self.assertGreater(times["gaps_ms"], 0)
            self.assertAlmostEqual(sum(op["ms"] for op in times["ops"]) + times["gaps_ms"], times["steps_ms"], places=3)
            self.assertTrue(all(len(op["sizes"]) == 3 for op in times["ops"] if op["op"] == "matmul"))
            calls.add(tuple(sorted((op["op"], *op["sizes"], *op["words"], op["calls"]) for op in times["ops"]
                                   if op["op"] == "attention_forward")))
        self.assertEqual(len(calls), 1)  # both ranks have the same layers
        # The clock adds up a part of the time that the trainer has measured.
        measured = sum(line["step_ms"] for step, line in self.metrics("run").items() if step > 2)
        self.assertLess(self.times("run")["steps_ms"], measured)
        output = job.output()
        self.assertIn("kernel times of rank 0 on cpu, of a step (mean of 7; the first 2 left out)\n", output)
        self.assertNotIn("kernel times of rank 1", output)
        self.assertRegex(output, r"\n  matmul +\d+x\d+x\d+[ a-z_]* +[\d.]+ +[\d.]+ +[\d.]+%\n")
        self.assertRegex(output, r"\n  gaps +[\d.]+ +[\d.]+%\n  step +[\d.]+ +100.0%\n")
        self.assertIn(f"kernel times of all ranks: {self.folder / 'run/kernel_times'}\n", output)
        self.assertEqual(len(self.events("run", "kernel_times")), 1)
        self.assert_same_training("run", "plain", 9)

    def test_a_run_that_is_stopped_has_times(self):
        recipe = self.recipe(steps=4000, tp=1, pp=1, dp=2, sp="false", save=1000)
        job = self.start(recipe, "run", "--time-kernels")
        self.until_step("run", 6, job)
        job.signal(signal.SIGTERM)
        self.finish(job)
        reached = self.last_step("run")
        self.assertLess(reached, 4000)
        self.assertEqual(self.times("run")["steps"], reached - 2)
        # The next start removes what ranks of before have written, and counts its own steps.
        stale = self.folder / "run/kernel_times/rank-5.json"
        stale.write_text("{}")
        job = self.start(recipe, "run", "--time-kernels")
        self.until_step("run", reached + 4, job)
        job.signal(signal.SIGTERM)
        self.finish(job)
        self.assertFalse(stale.exists())
        self.assertEqual(self.times("run")["steps"], self.last_step("run") - reached - 2)

    def test_json_names_the_file_and_a_run_of_two_steps_says_that_none_counts(self):
        recipe = self.recipe(steps=2, tp=1, pp=1, dp=1, sp="false")
        recipe.write_text(recipe.read_text().replace("T.steps(4)", "T.steps(1)"))  # a warm-up that ends
        done = self.cairn("train", recipe, "--run", "run", "--threads", "1", "--time-kernels", "--json")
        result = json.loads(done.stdout)
        self.assertEqual(result["kernel_times"], "run/kernel_times/rank-0.json")
        self.assertEqual(self.times("run")["steps"], 0)
        self.assertIn("none; the first 2 steps of a start do not count, and there were no more", done.stderr.decode())


if __name__ == "__main__":
    main()
