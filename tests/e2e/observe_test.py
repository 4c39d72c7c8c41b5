"""What a run leaves for people and programs to read, after a life with kills in it."""

import ctypes
import pathlib
import struct
import subprocess

from harness import RunTest, main

STEPS = 60


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 & -(crc & 1))
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def xxh3_128(data):
    library = ctypes.CDLL("libxxhash.so.0")
    library.XXH3_128bits.restype = Hash128
    library.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    value = library.XXH3_128bits(data, len(data))
    return f"{value.high:016x}{value.low:016x}"


class Observe(RunTest):
    def test_metrics_logs_events_and_recipe(self):
        recipe = self.recipe(steps=STEPS, save=20)
        self.train(recipe, "run", "--kill", "3@7", "--kill", "0@30")
        lines = self.metrics_lines("run")
        self.assertEqual(lines[0], {"schema": 1, "run": self.run_id("run")})
        # The read rules: a resumed_at mark takes back what came after that step; every step is there once then.
        steps = {}
        for line in lines[1:]:
            if "resumed_at" in line:
                steps = {k: v for k, v in steps.items() if k <= line["resumed_at"]}
            else:
                self.assertNotIn(line["step"], steps)
                steps[line["step"]] = line
        self.assertEqual(sorted(steps), list(range(1, STEPS + 1)))
        for step, line in steps.items():
            self.assertEqual(line["samples"], 8 * step)
            self.assertEqual(line["tokens"], 8 * 32 * step)
            self.assertGreater(line["grad_norm"], 0)
            self.assertGreaterEqual(line["checkpoint_lost_ms"], 0)
        self.assertLess(steps[STEPS]["loss"], steps[1]["loss"] - 1.5)  # it learned

        for rank in range(8):
            log = (self.folder / "run" / "logs" / f"rank-{rank}.log").read_text()
            self.assertEqual(log.count(f"rank {rank} of 8 starts"), 3)
            self.assertIn(f"leaves after step {STEPS}", log)

        text = (self.folder / "run" / "recipe.resolved.json").read_bytes()
        for step in self.checkpoints("run"):
            manifest = self.manifest("run", step)
            self.assertEqual(manifest["recipe"].encode(), text)
            self.assertEqual(manifest["recipe_hash"], xxh3_128(text))
            self.assertEqual(manifest["run"]["id"], self.run_id("run"))
            self.assertEqual(manifest["step"], step)
            self.assertEqual(manifest["samples"], 8 * step)
        kinds = [e["event"] for e in self.events("run")]
        self.assertEqual(kinds.count("kill"), 2)
        self.assertEqual(kinds.count("recovered"), 2)
        self.assertEqual(kinds[-1], "end")
        self.assertEqual(self.events("run", "end")[-1]["exit_code"], 0)

        files = sorted((self.folder / "run" / "tensorboard").glob("events.out.tfevents.*"))
        self.assertEqual(len(files), 3)  # one a start
        records = sum(self.tensorboard_records(path) for path in files)
        self.assertGreaterEqual(records, STEPS)

    def tensorboard_records(self, path):
        data, at, count = path.read_bytes(), 0, 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            self.assertEqual(struct.unpack_from("<I", data, at + 8)[0], masked(data[at:at + 8]))
            payload = data[at + 12:at + 12 + length]
            self.assertEqual(len(payload), length)
            if count == 0:
                self.assertIn(b"brain.Event:2", payload)
            self.assertEqual(struct.unpack_from("<I", data, at + 12 + length)[0], masked(payload))
            at += 16 + length
            count += 1
        return count

    def test_every_checkpoint_verifies_also_by_a_reader_of_its_own(self):
        recipe = self.recipe(steps=30, save=10)
        self.train(recipe, "run", "--kill", "2@12")
        steps = self.checkpoints("run")
        self.assertTrue(steps)
        reader = pathlib.Path(__file__).resolve().parent.parent / "ckpt" / "reader.py"
        for step in steps:
            done = subprocess.run(["/usr/bin/python3", reader, self.checkpoint("run", step)], capture_output=True, text=True)
            self.assertIn(done.returncode, (0, 77), done.stdout + done.stderr)
        if "ckpt" in subprocess.run([self.program, "--help"], capture_output=True, text=True).stdout.split():
            for step in steps:
                done = subprocess.run([self.program, "ckpt", "verify", self.checkpoint("run", step)], capture_output=True,
                                      text=True)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    main()
