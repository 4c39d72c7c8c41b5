"""Machines of several people: folders of a group."""

import os

from harness import RunTest, main


class GroupTest(RunTest):
    def test_modes_follow_the_umask(self):
        before = os.umask(0o002)
        self.addCleanup(os.umask, before)
        self.train(self.recipe(steps=6, tp=1, pp=1, dp=1, sp="false", save=3), "r")
        self.cairn("convert", self.folder / "r", "hf", "--to", "hf")
        self.cairn("ckpt", "push", self.folder / "r", "mirror")
        for top in ("r", "hf", "mirror"):
            paths = [self.folder / top, *(self.folder / top).rglob("*")]
            closed = [f"{path}: {path.stat().st_mode:o}" for path in paths
                      if path.stat().st_mode & 0o777 != (0o775 if path.is_dir() else 0o664)]
            self.assertEqual(closed, [])
        os.umask(0o077)
        self.train(self.recipe(steps=6, tp=1, pp=1, dp=1, sp="false", save=3), "own")
        self.assertEqual([path for path in (self.folder / "own").rglob("*") if path.stat().st_mode & 0o077], [])


if __name__ == "__main__":
    main()
