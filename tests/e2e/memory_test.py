"""How much shared memory there is decides how many banks of the state a run has; too little is told before it starts."""

import json
import os
import signal
import subprocess
import sys
import time

from harness import OWN_MEMORY, RunTest, main, resize_shared_memory


class Memory(RunTest):
    def test_two_banks_when_three_do_not_fit_and_a_sentence_when_two_do_not(self):
        # A bank of some 20 MB: what the ranks talk through, which lies in the same memory, is small beside it.
        recipe, wide = self.recipe(tp=1, pp=1, dp=2, sp="false", steps=8, save=2), ["--set", "model.width=256"]
        plan = json.loads(subprocess.run([self.program, "plan", recipe, "--world", "2", *wide, "--json"], check=True,
                                         capture_output=True, text=True).stdout)
        memory, bank = plan["shared_memory"], plan["checkpoint"]["bytes"]
        self.assertEqual(memory["banks"], 3)

        resize_shared_memory(256 << 20)
        self.assertNotIn("banks", self.train(recipe, "three", *wide).output())
        resize_shared_memory(memory["bytes"] - bank // 2)
        self.assertIn("only two banks of the training state fit into memory", self.train(recipe, "two", *wide).output())
        for run in ("three", "two"):
            self.assertEqual(self.checkpoints(run)[-1], 8)
        for step in range(1, 9):
            self.assertEqual(self.metrics("three")[step]["loss"], self.metrics("two")[step]["loss"])
        self.assertEqual(self.contents("three", 8)[1], self.contents("two", 8)[1])

        resize_shared_memory(memory["bytes"] - 3 * bank // 2)
        job = self.start(recipe, "none", *wide)
        self.assertNotEqual(job.wait(), 0)
        self.assertIn("/dev/shm", job.output())
        self.assertEqual(self.checkpoints("none"), [])

    def test_steps_that_a_dead_run_alone_has_give_way_to_a_run_that_could_not_start_and_to_nothing_less(self):
        recipe = self.recipe(name="long", tp=1, pp=1, dp=1, sp="false", steps=100000, save=100000)
        wide = ["--set", "model.width=256"]
        plan = json.loads(subprocess.run([self.program, "plan", recipe, "--world", "1", *wide, "--json"], check=True,
                                         capture_output=True, text=True).stdout)
        memory, bank = plan["shared_memory"]["bytes"], plan["checkpoint"]["bytes"]
        resize_shared_memory(512 << 20)
        dead = self.start(recipe, "dead", *wide)
        self.until_step("dead", 2, dead)
        dead.kill_group()
        (name,) = self.memory_left(self.folder)
        short = self.recipe(name="short", tp=1, pp=1, dp=1, sp="false", steps=8, save=2)

        resize_shared_memory(2 * memory - bank // 2)
        output = self.train(short, "two", *wide).output()
        self.assertIn("only two banks", output)
        self.assertIn(f"{name} of a dead run", output)
        self.assertEqual(self.memory_left(self.folder), [name])

        resize_shared_memory(memory + bank // 2)
        huge = self.start(short, "huge", "--set", "model.width=512")  # has no room even without it
        self.assertNotEqual(huge.wait(), 0)
        self.assertEqual(self.memory_left(self.folder), [name])

        output = self.train(short, "one", *wide).output()
        self.assertRegex(output, f"warning: removed /dev/shm/{name} of a dead run, {self.run_id('dead')}, with its step")
        self.assertEqual(self.memory_left(self.folder), [])

    def test_ranks_do_not_wait_for_a_disk_longer_than_for_each_other(self):
        recipe = self.recipe(name="slow", tp=1, pp=1, dp=2, sp="false", steps=100000, save=1)
        more = ["--set", 'restart.deadline="3s"', "--set", "model.width=256"]
        plan = json.loads(subprocess.run([self.program, "plan", recipe, "--world", "2", *more, "--json"], check=True,
                                         capture_output=True, text=True).stdout)
        resize_shared_memory(plan["shared_memory"]["bytes"] - plan["checkpoint"]["bytes"] // 2)
        job = self.start(recipe, "slow", *more)
        self.until_step("slow", 5, job)
        self.assertIn("only two banks", job.output())
        os.kill(job.pid, signal.SIGSTOP)  # the agent stands for the disk that it writes to
        time.sleep(6)
        os.kill(job.pid, signal.SIGCONT)
        step = self.last_step("slow")
        self.until(lambda: self.last_step("slow") > step + 5, "further steps", job)
        job.kill_group()
        self.assertEqual(self.events("slow", "failure"), [])
        log = (self.folder / "slow" / "logs" / "rank-0.log").read_text()
        self.assertIn("no bank was free for 1.5 s", log)

    def test_what_another_build_left_waits_for_that_build(self):
        recipe = self.recipe(name="left", tp=1, pp=1, dp=2, sp="false", steps=100000, save=100000)
        dead = self.start(recipe, "left")
        self.until_step("left", 5, dead)
        dead.kill_group()
        (name,) = self.memory_left(self.folder)
        with open(f"/dev/shm/{name}", "r+b") as file:
            file.seek(8)
            version = file.read(4)
            file.seek(8)
            file.write(bytes([version[0] + 1]) + version[1:])
        output = self.train(self.recipe(name="other", tp=1, pp=1, dp=1, sp="false", steps=8, save=4), "other").output()
        self.assertRegex(output, f"{name} of a dead run, cannot be read")
        again = self.start(recipe, "left")
        self.assertEqual(again.wait(), 2)
        self.assertIn("go on with the build that left it", again.output())
        with open(f"/dev/shm/{name}", "r+b") as file:
            file.seek(8)
            file.write(version)
        self.train(recipe, "left", "--set", f"stop=T.steps({self.last_step('left') + 3})")
        self.assertGreaterEqual(self.events("left", "start")[-1]["step"], 4)

    def test_older_memory_does_not_stand_in_for_a_newest_checkpoint_that_cannot_be_read(self):
        recipe = self.recipe(name="back", tp=1, pp=1, dp=1, sp="false", steps=200, save=100)
        dead = self.start(recipe, "back")
        self.until_step("back", 3, dead)
        dead.kill_group()
        (name,) = self.memory_left(self.folder)
        os.rename(f"/dev/shm/{name}", "/dev/shm/elsewhere")  # as if the folder went on at another host
        self.train(recipe, "back")
        os.rename("/dev/shm/elsewhere", f"/dev/shm/{name}")
        saved = {step: self.manifest("back", step)["created_unix_ms"] for step in self.checkpoints("back")}
        path = self.checkpoint("back", 200) / "manifest.json"
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b'"version":1', b'"version":2', 1))  # a newer build's
        job = self.train(recipe, "back", code=2)
        self.assertIn("cannot be read, which is no reason to go on from an older one", job.output())
        path.write_bytes(whole)
        for step, time_ms in saved.items():
            self.assertEqual(self.manifest("back", step)["created_unix_ms"], time_ms)
        self.train(recipe, "back")
        self.assertEqual(self.events("back", "start")[-1]["step"], 200)

    def test_of_memory_and_an_offload_folder_the_later_step_counts(self):
        recipe = self.recipe(name="both", tp=1, pp=1, dp=2, sp="false", steps=100000, save=100000)
        disk = self.folder / "disk"
        disk.mkdir()
        offload = ["--set", f"optimizer.offload={disk}"]
        for more, until in ((offload, 5), ([], 40)):
            job = self.start(recipe, "both", *more)
            self.until(lambda: self.last_step("both") >= until, f"step {until}", job)
            job.kill_group()
        job = self.start(recipe, "both", *offload)
        self.until(lambda: len(self.events("both", "start")) > 2, "the third start", job)
        job.kill_group()
        self.assertGreaterEqual(self.events("both", "start")[-1]["step"], 39)  # the last told may not be whole yet
        self.assertIn("which held step", job.output())


if __name__ == "__main__":
    if not OWN_MEMORY:
        print("skipped: this user may not have a /dev/shm of its own")
        sys.exit(77)
    main()
