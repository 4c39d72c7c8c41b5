"""What holds for every subcommand: exit codes, unknown words, versions, colour, completion, broken streams."""

import json
import os
import re
import subprocess
import sys

from program import ProgramTest, main

ESCAPE = "\x1b["


class CliTest(ProgramTest):
    def test_nothing_shows_what_there_is_and_is_misuse(self):
        done = self.cairn(code=2)
        self.assertEqual(done.stdout, "")
        for word in ("init", "check", "plan", "explain", "diff", "help", "completion"):
            self.assertRegex(done.stderr, rf"(?m)^  {word} ")

    def test_help_and_version_go_to_stdout(self):
        self.assertIn("Usage: cairn", self.cairn("--help").stdout)
        self.assertIn("Usage: cairn check", self.cairn("check", "--help").stdout)
        version = self.cairn("--version").stdout
        self.assertRegex(version, r"^cairn \d+\.\d+\.\d+(-g[0-9a-f]{12,}(-dirty)?)? \(build [0-9a-f]{40}\)\n$")
        notes = subprocess.run(["readelf", "-n", self.program], capture_output=True, text=True, check=True).stdout
        self.assertEqual(re.findall(r"Build ID: (\w+)", notes), re.findall(r"build (\w+)", version))

    def test_an_unknown_subcommand_names_the_nearest(self):
        done = self.cairn("chek", "x.lua", code=2)
        self.assertEqual(done.stdout, "")
        self.assertTrue(done.stderr.startswith("cairn: `chek` is no subcommand; did you mean `check`?\n"), done.stderr)
        self.assertNotIn("did you mean", self.cairn("zzzzzz", code=2).stderr)

    def test_an_unknown_option_names_the_nearest(self):
        done = self.cairn("plan", "x.lua", "--wrld", "4", code=2)
        self.assertEqual(done.stderr,
                         "cairn plan: --wrld: no such option; did you mean `--world`?\n  see: cairn plan --help\n")
        self.assertIn("--world", self.cairn("plan", "x.lua", "--wrld=4", code=2).stderr)

    def test_a_missing_argument_a_surplus_one_and_a_wrong_number_are_misuse(self):
        self.assertIn("RECIPE is required", self.cairn("check", code=2).stderr)
        self.assertIn("surplus", self.cairn("check", "a.lua", "surplus", code=2).stderr)
        for wrong in ("0", "-3", "many", "1.5", "99999999999999999999"):
            self.assertIn("--world", self.cairn("plan", "a.lua", "--world", wrong, code=2).stderr)

    def test_a_missing_file_is_named(self):
        done = self.cairn("check", "no/such.lua", code=2)
        self.assertIn("no/such.lua", done.stderr)

    def test_a_full_disk_under_stdout_is_an_error(self):
        with open("/dev/full", "w") as full:
            self.cairn("init")
            for words in (["--version"], ["completion", "bash"], ["help", "--markdown"],  # more than a buffer holds, too
                          ["check", "train.lua", "--recipe-only", "--json"]):
                done = subprocess.run([self.program, *words], stdout=full, stderr=subprocess.PIPE, text=True,
                                      cwd=self.folder.name)
                self.assertEqual(done.returncode, 74, done.stderr)
                self.assertRegex(done.stderr, r"^cairn[a-z ]*: cannot write to stdout: No space left on device\n$")

    def test_closed_standard_streams_do_no_harm(self):
        done = subprocess.run(["/bin/sh", "-c", f"'{self.program}' --version <&- 2>&-"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0)
        self.assertTrue(done.stdout.startswith("cairn "))

    def test_json_is_one_object_whatever_goes_wrong(self):
        self.cairn("init")
        for words, code, part in ((("ckpt", "ls", "x", "--bogus"), 2, "--bogus: no such option"),
                                  (("ckpt", "lss", "x"), 2, "`lss` is no subcommand; did you mean `ls`?"),
                                  (("ckpt", "inspect"), 2, "PATH is required"),
                                  (("train", "train.lua", "--time-limit", ""), 2, "--time-limit is given without a value"),
                                  (("train", "train.lua", "--run="), 2, "--run is given without a value"),
                                  (("plan", "train.lua", "--storage", "0x10"), 2, "--storage: 0x10: expected bytes"),
                                  (("plan", "train.lua", "--storage", "1GB/sx"), 2, "--storage: 1GB/sx: expected bytes"),
                                  (("ckpt", "average", "x", "--to", "y", "--memory", "0x10MiB"), 2, "'0x10MiB': expected a size"),
                                  (("data", "info", "x" * 300), 74, "File name too long"),
                                  (("plan", "train.lua", "--svg", "/dev/full"), 74, "/dev/full: No space left on device"),
                                  (("plan", "train.lua", "--svg", "train.lua/dir"), 2, "train.lua: Not a directory")):
            told = self.cairn_json(*words, code=code)
            self.assertEqual(list(told), ["error"], words)
            self.assertEqual(told["error"]["exit_code"], code)
            self.assertIn(part, told["error"]["message"])
        for command in ("check", "plan"):  # a name that is no UTF-8
            done = self.cairn(command, "\udcff.lua", "--json", code=2, errors="replace")
            self.assertFalse(json.loads(done.stdout)["ok"])
        self.assertEqual(self.cairn("ckpt", "ls", "--", "--json", code=2).stdout, "")  # that is a name

    def test_colour_only_on_a_terminal_that_wants_it(self):
        self.cairn("init")
        plan = ["plan", "train.lua"]
        unset = {"NO_COLOR": ""}
        self.assertIn(ESCAPE, self.on_terminal(*plan, env=unset))
        self.assertNotIn(ESCAPE, self.on_terminal(*plan, env={"NO_COLOR": "1"}))
        self.assertNotIn(ESCAPE, self.on_terminal(*plan, env={**unset, "TERM": "dumb"}))
        self.assertNotIn(ESCAPE, self.cairn(*plan, env={**unset, "TERM": "xterm"}).stdout)

    def test_completion_of_bash_works_in_bash(self):
        script = self.write("cairn.bash", self.cairn("completion", "bash").stdout)

        def complete(*words):
            code = f"source {script}; COMP_WORDS=({' '.join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}; " \
                   "_cairn; printf '%s\\n' \"${COMPREPLY[@]}\""
            done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True)
            return done.stdout.split()

        self.assertEqual(complete("cairn", "che"), ["check", "check-hosts"])
        self.assertEqual(complete("cairn", "plan", "x.lua", "--wo"), ["--world"])
        self.assertEqual(complete("cairn", "help", "optimizer.peak"), ["optimizer.peak_lr"])
        self.assertEqual(complete("cairn", "data", "tok"), ["tokenize"])
        self.assertIn("--documents", complete("cairn", "data", "tokenize", "--"))
        self.assertNotIn("--world", complete("cairn", "data", "tokenize", "--"))

    def test_every_shell_gets_every_subcommand_and_no_hidden_one(self):
        names = re.findall(r"(?m)^  (\w+) {2,}", self.cairn("--help").stdout.split("Subcommands:")[1])
        self.assertGreater(len(names), 6)
        for shell in ("bash", "zsh", "fish"):
            script = self.cairn("completion", shell).stdout
            for name in names:
                self.assertIn(name, script)
            self.assertNotRegex(script, r"['\s/]_rank")
        self.assertIn("fish", self.cairn("completion", "tcsh", code=2).stderr)


if __name__ == "__main__":
    main()
