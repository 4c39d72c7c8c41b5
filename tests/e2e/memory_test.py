"""How much shared memory there is decides how many banks of the state a run has; too little is told before it starts."""

import json
import os
import re
import shutil
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

    def test_memory_of_several_dead_runs_is_one_line_of_a_start_and_doctor_lists_it(self):
        resize_shared_memory(256 << 20)
        recipe = self.recipe(name="long", tp=1, pp=1, dp=1, sp="false", steps=100000, save=100000)
        for name in ("a", "b", "c"):
            dead = self.start(recipe, name)
            self.until_step(name, 2, dead)
            dead.kill_group()
        output = self.train(self.recipe(name="short", tp=1, pp=1, dp=1, sp="false", steps=8, save=8), "live").output()
        told = [line for line in output.splitlines() if "dead run" in line]
        self.assertEqual(len(told), 1, output)
        self.assertRegex(told[0], r"3 segments of dead runs hold [0-9.]+ [KMG]iB of memory, .* `cairn doctor` lists them")
        done = subprocess.run([self.program, "doctor", "--json"], capture_output=True, text=True)
        listed = [check["found"] for check in json.loads(done.stdout)["checks"] if check["what"] == "memory of a dead run"]
        self.assertEqual(len(listed), 3)
        for name in ("a", "b", "c"):
            self.assertEqual(sum(f"of {self.run_id(name)}, which no checkpoint has" in found for found in listed), 1)

    def test_memory_of_another_build_waits_for_that_build(self):
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
        self.assertIn("resume with the build that left it", again.output())
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
        self.assertIn("cannot be read, which is no reason to resume from an older one", job.output())
        path.write_bytes(whole)
        for step, time_ms in saved.items():
            self.assertEqual(self.manifest("back", step)["created_unix_ms"], time_ms)
        self.train(recipe, "back")
        self.assertEqual(self.events("back", "start")[-1]["step"], 200)

    def test_what_cannot_be_read_below_the_memory_does_not_matter(self):
        recipe = self.recipe(name="back", tp=1, pp=1, dp=1, sp="false", steps=200, save=2, keep=100)
        dead = self.start(recipe, "back")
        self.until(lambda: self.checkpoints("back"), "a checkpoint", dead)
        self.until_step("back", self.checkpoints("back")[0] + 3, dead)
        dead.kill_group()
        (name,) = self.memory_left(self.folder)
        os.rename(f"/dev/shm/{name}", "/dev/shm/elsewhere")
        saved = self.checkpoints("back")
        self.train(recipe, "back")
        os.rename("/dev/shm/elsewhere", f"/dev/shm/{name}")
        for step in self.checkpoints("back"):
            if step not in (*saved, 200):
                shutil.rmtree(self.checkpoint("back", step))
        path = self.checkpoint("back", 200) / "manifest.json"
        os.truncate(path, path.stat().st_size // 2)
        path = self.checkpoint("back", saved[0]) / "manifest.json"
        path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2', 1))
        self.train(recipe, "back")
        start = self.events("back", "start")[-1]
        self.assertIn("shared memory", start["from"])
        self.assertGreater(start["step"], saved[0])

    def test_memory_of_another_layout_is_not_written_over_what_newer_steps_refer_to(self):
        def recipe(dp):
            out = self.recipe(name="still", tp=1, pp=1, dp=dp, sp="false", steps=400, save=1000, keep=100)
            # A weight that is not zero does not feel a step of 1e-30.
            out.write_text(out.read_text().replace("to = 1e-3", "to = 1e-31").replace("weight_decay = 0.1", "weight_decay = 0.0")
                           .replace("peak_lr = 1e-2", "peak_lr = 1e-30"))
            return out

        dead = self.start(recipe(1), "run")
        self.until_step("run", 20, dead)
        dead.kill_group()
        (name,) = self.memory_left(self.folder)
        shutil.copy(f"/dev/shm/{name}", self.folder / "shm")
        shutil.copytree(self.folder / "run", self.folder / "before")
        two = recipe(2)
        # What the memory holds is seen when it is written down.
        found = re.search(r"wrote step (\d+) from the snapshot memory", self.train(two, "run", "--set", "stop=T.steps(50)").output())
        step = int(found[1])
        # The folder goes on at another host, by other saves.
        shutil.rmtree(self.folder / "run")
        os.rename(self.folder / "before", self.folder / "run")
        more = ["--set", "checkpoint.incremental=true", "--set", f"checkpoint.save={{T.every{{steps={step}}}}}"]
        self.train(two, "run", *more, "--set", f"stop=T.steps({3 * step})")
        self.assertIn(step, {f.get("step") for f in self.manifest("run", 3 * step)["files"]})
        shutil.copy(self.folder / "shm", f"/dev/shm/{name}")
        path = self.checkpoint("run", 3 * step) / "manifest.json"
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b'"version":1', b'"version":2', 1))  # so that it is not seen that it is newer
        job = self.train(two, "run", *more, "--set", f"stop=T.steps({3 * step + 1})", code=2)
        path.write_bytes(whole)
        self.assertIn("cannot be read, which is no reason to resume from an older one", job.output())
        self.assertEqual(self.memory_left(self.folder), [name])
        self.assertNotIn("remove what refers to it", job.output())
        self.cairn("ckpt", "verify", "run", "--all")

    def test_the_later_step_of_memory_and_an_offload_folder_counts(self):
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
