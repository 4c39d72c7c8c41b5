"""Runs the built program for the tests of this folder; the program's path is the first argument of each test."""

import fcntl
import json
import os
import pty
import resource
import struct
import subprocess
import sys
import tempfile
import termios
import unittest


os.environ.setdefault("CAIRN_NVIDIA_ROOT", "/nonexistent")  # a machine's devices are no subject of these


class ProgramTest(unittest.TestCase):
    program = None

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="cairn-tools-")
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def write(self, name, content):
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(content if isinstance(content, bytes) else content.encode())
        return path

    def cairn(self, *args, code=0, env=None, text_in=None, stdin=subprocess.DEVNULL, **kwargs):
        """Runs `cairn args` in the test's folder, with the bytes `text_in` in a pipe, and checks the exit code."""
        full_env = dict(os.environ)
        full_env.update(env or {})
        if text_in is not None:
            stdin, write = os.pipe()
            self.addCleanup(os.close, stdin)
            with open(write, "wb") as f:
                f.write(text_in)  # fewer bytes than a pipe holds
        done = subprocess.run([self.program, *map(str, args)], capture_output=True, text=True, timeout=60,
                              cwd=self.folder.name, env=full_env, stdin=stdin, **kwargs)
        self.assertEqual(done.returncode, code, f"cairn {args}\nstdout: {done.stdout}\nstderr: {done.stderr}")
        return done

    def cairn_json(self, *args, code=0):
        done = self.cairn(*args, "--json", code=code)
        return json.loads(done.stdout)

    def on_terminal(self, *args, env=None, columns=0):
        """Runs `cairn args` with a terminal of this many columns as its stdout, and returns what comes there."""
        leader, follower = pty.openpty()
        if columns:
            fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        process = subprocess.Popen([self.program, *map(str, args)], stdout=follower, stderr=subprocess.DEVNULL,
                                   cwd=self.folder.name, env={**os.environ, "TERM": "xterm", **(env or {})},
                                   stdin=subprocess.DEVNULL)
        os.close(follower)
        text = b""
        try:
            while chunk := os.read(leader, 65536):
                text += chunk
        except OSError:  # the terminal's last user left
            pass
        os.close(leader)
        self.assertEqual(process.wait(timeout=60), 0)
        return text.decode()

    def cpu_seconds(self, work):
        """What the work returns, and the seconds that its programs computed: wall time is what others leave of the machine."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = work()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return result, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def small_plan_s(self):
        """The unit for what must not take long: seconds that `cairn plan` computes for a model of two layers, here and now,
        as machines differ by more than any bar in seconds could allow."""
        recipe = self.write("unit.lua", """local T = require "cairn"
return T.recipe { name = "unit", stop = T.steps(2), data = T.megatron { prefix = "x" }, optimizer = T.adamw { peak_lr = 1e-3 },
  model = T.gpt { layers = 2, width = 64, heads = 2, context = 16, vocab = 64 }, batch = { samples = 4, micro = 1 },
  mesh = T.mesh { tp = 1, pp = 1 } }""")
        return min(self.cpu_seconds(lambda: self.cairn("plan", recipe, "--world", 1))[1] for _ in range(3))

    def big_folder(self, name, layers, width=512):
        """A Llama-shaped folder in bf16, one shard for each layer: {file: bytes written}."""
        folder = self.path(name)
        os.makedirs(folder)
        ffn, vocab = width * 4, 320
        config = {"model_type": "llama", "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers,
                  "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": width // 8, "vocab_size": vocab,
                  "max_position_embeddings": 64, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(config, f)
        groups = [{"model.embed_tokens.weight": [vocab, width], "model.norm.weight": [width]}]
        for k in range(layers):
            shapes = {"input_layernorm": [width], "post_attention_layernorm": [width], "mlp.gate_proj": [ffn, width],
                      "mlp.up_proj": [ffn, width], "mlp.down_proj": [width, ffn]}
            shapes.update({f"self_attn.{p}_proj": [width, width] for p in "qkvo"})
            groups.append({f"model.layers.{k}.{n}.weight": s for n, s in shapes.items()})
        weight_map = {}
        for k, group in enumerate(groups):
            file = f"model-{k + 1:05}-of-{len(groups):05}.safetensors"
            header, at = {"__metadata__": {"format": "pt"}}, 0
            for tensor, shape in sorted(group.items()):
                size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
                header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
                weight_map[tensor] = file
                at += size
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            block = bytes(((i * 7 + k) % 64) if i % 2 == 0 else 0x3C for i in range(4096))
            with open(os.path.join(folder, file), "wb") as f:
                f.write(struct.pack("<Q", len(text)) + text + block * (at // 4096) + block[: at % 4096])
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {}, "weight_map": weight_map}, f)
        return folder


def main():
    ProgramTest.program = os.path.abspath(sys.argv.pop(1))
    unittest.main()
