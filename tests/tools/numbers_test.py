"""Every option that is a number, by the table of docs/commands.md: what is no number, or none that 64 bits hold, is refused."""

import pathlib
import re

from program import ProgramTest, main

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "commands.md"
KINDS = {"N", "K", "INT", "UINT", "FLOAT", "SECONDS", "RATE", "CODE", "SIZE"}
NONE = ("nan", "-1", str(1 << 64), "0x10")  # within the limits of no option


def options():
    """(command, option) for each row of a number."""
    command = None
    for line in PAGE.read_text().splitlines():
        if line.startswith("## cairn "):
            command = line.removeprefix("## cairn ").split()
        row = re.match(r"\| `(--[a-z-]+) ([A-Z]+)`", line)
        if row and command and row[2] in KINDS:
            yield command, row[1]


class NumbersTest(ProgramTest):
    def test_what_is_no_number_is_refused(self):
        rows = list(options())
        self.assertGreater(len(rows), 40, "the page's form has changed")
        for command, option in rows:
            if command[0] == "resume":  # as `train`
                continue
            for text in NONE:
                with self.subTest(command=command, option=option, text=text):
                    said = self.cairn(*command, f"{option}={text}", code=2).stderr
                    self.assertRegex(said, rf"{option}: '.*': expected a (whole )?(number|size)")

    def test_positions_and_lists(self):
        for text in NONE:
            said = self.cairn("ckpt", "label", "run", text, "good", "--why", "x", code=2).stderr
            self.assertIn("expected a whole number from 0", said)

    def test_the_last_seed_is_a_seed_and_digits_are_decimal(self):
        for seed in ("0", str((1 << 64) - 1), "010"):
            self.assertNotIn("--seed", self.cairn("generate", "nothing", "--seed", seed, code=2).stderr)
        self.assertIn("from 1 to 4096", self.cairn("train", "x.lua", "--nproc", "4097", code=2).stderr)


if __name__ == "__main__":
    main()
