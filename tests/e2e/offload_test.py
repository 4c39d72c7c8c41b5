"""Optimizer state on a disk (optimizer.offload): the same run bit for bit, over deaths too, and nothing left behind."""

import os
import pathlib
import signal

from harness import RunTest, main


class Offload(RunTest):
    def recipe_on(self, folder, **changes):
        path = self.recipe(**changes)
        if folder:
            text = path.read_text()
            path.write_text(text.replace("weight_decay = 0.1,", f'weight_decay = 0.1, ema = 0.9, offload = "{folder}",'))
        else:
            path.write_text(path.read_text().replace("weight_decay = 0.1,", "weight_decay = 0.1, ema = 0.9,"))
        return path

    def same(self, run, other, steps):
        """As assert_same_training, but the recipe, which names the folder, and what depends on its length."""
        mine, wanted = self.metrics(run), self.metrics(other)
        for step in range(1, steps + 1):
            self.assertEqual((mine[step]["loss"], mine[step]["grad_norm"]), (wanted[step]["loss"], wanted[step]["grad_norm"]))
        self.assertEqual(self.contents(run, steps)[1], self.contents(other, steps)[1])

    def test_state_on_a_disk_gives_the_same_bits_as_in_memory(self):
        disk = self.folder / "nvme"
        disk.mkdir()
        for zero in (0, 1, 3):
            layout = dict(steps=12, save=4, zero=zero, tp=1, sp="false")
            wide = ["--set", "model.width=256"] if zero == 1 else []  # else no tensor is large enough to be paged
            self.train(self.recipe_on("", name=f"m{zero}", **layout), f"m{zero}", *wide)
            job = self.start(self.recipe_on(disk, name=f"d{zero}", **layout), f"d{zero}", *wide)
            if zero == 1:
                self.until(lambda: list(disk.glob("cairn-*")), "the state is on the disk", job)
                self.assertEqual(self.memory_left(self.folder), [])
            self.finish(job)
            self.same(f"d{zero}", f"m{zero}", 12)
            self.assertEqual(list(disk.iterdir()), [], "state is left on the disk")

    def test_a_killed_rank_and_a_killed_job_go_on_from_it(self):
        disk = self.folder / "nvme"
        disk.mkdir()
        layout = dict(steps=40, save=40, zero=1, tp=1, sp="false")
        self.train(self.recipe_on("", name="m", **layout), "m")
        job = self.start(self.recipe_on(disk, name="d", **layout), "d")
        self.until_step("d", 5, job)
        os.kill(job.children()[2], signal.SIGKILL)
        self.until_step("d", 15, job)
        job.kill_group()
        self.until(lambda: not any(pathlib.Path(f"/proc/{p}").exists() for p in job.children().values()), "all are gone")
        again = self.train(self.recipe_on(disk, name="d", **layout), "d").output()
        self.assertIn("took over the snapshot memory", again)
        self.assertIn("in shared memory", again)
        self.same("d", "m", 40)
        self.assertEqual(list(disk.iterdir()), [])

    def test_a_folder_that_is_not_there_is_told_before_anything_starts(self):
        job = self.start(self.recipe_on(self.folder / "nowhere", name="d", steps=6), "d")
        self.assertNotEqual(job.wait(), 0)
        self.assertIn("nowhere: no folder for snapshot memory", job.output())


if __name__ == "__main__":
    main()
