"""One training step of llm.c's CPU program on random weights, for train_speed.py.

The program as it is fixes its shape, validates and writes samples: the copy that is built here has another batch and
length, runs two steps (the second one counts) and does neither. Weights are random in its checkpoint format (version 3),
tokens in its data format (version 1).
"""
import array
import pathlib
import random
import re
import subprocess
import sys

LAYERS, WIDTH, HEADS, VOCAB, PADDED, MAX_TOKENS = 12, 768, 12, 50257, 50304, 1024


def write_model(path: pathlib.Path) -> None:
    header = [20240326, 3, MAX_TOKENS, VOCAB, LAYERS, HEADS, WIDTH, PADDED] + [0] * 248
    layer = [WIDTH] * 2 + [3 * WIDTH * WIDTH, 3 * WIDTH, WIDTH * WIDTH, WIDTH] + [WIDTH] * 2 + [4 * WIDTH * WIDTH, 4 * WIDTH]
    count = PADDED * WIDTH + MAX_TOKENS * WIDTH + LAYERS * (sum(layer) + 4 * WIDTH * WIDTH + WIDTH) + 2 * WIDTH
    random.seed(1)
    some = array.array("f", (random.gauss(0, 0.02) for _ in range(100_003)))  # its length divides no dimension
    with open(path, "wb") as file:
        file.write(array.array("i", header).tobytes())
        for begin in range(0, count, len(some)):
            file.write(some[:min(len(some), count - begin)].tobytes())


def write_tokens(path: pathlib.Path, count: int) -> None:
    random.seed(2)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(array.array("i", [20240520, 1, count] + [0] * 253).tobytes())
        file.write(array.array("H", (random.randrange(VOCAB) for _ in range(count))).tobytes())


def llmc_seconds(folder: pathlib.Path, source: str, batch: int, seq: int, threads: int) -> float:
    """Errors: ends the program when the source is not what is known here, or does not build or run."""
    program = folder / "train_gpt2"
    if not program.exists():
        folder.mkdir(parents=True)
        text = (pathlib.Path(source) / "train_gpt2.c").read_text()
        for before, after in (("int B = 4;", f"int B = {batch};"), ("int T = 64;", f"int T = {seq};"),
                              ("step <= 40", "step <= 1"), ("step % 10 == 0", "false"),
                              ("step > 0 && step % 20 == 0", "false")):
            if text.count(before) != 1:
                sys.exit(f"{source}/train_gpt2.c has {text.count(before)} times '{before}', expected once: another version?")
            text = text.replace(before, after)
        (folder / "train_gpt2.c").write_text("#include <stdbool.h>\n" + text)
        subprocess.run(["gcc", "-Ofast", "-march=native", "-fopenmp", "-DOMP", "-I", source, "-o", str(program),
                        str(folder / "train_gpt2.c"), "-lm"], check=True)
        write_model(folder / "gpt2_124M.bin")
        for part in ("train", "val"):
            write_tokens(folder / f"dev/data/tinyshakespeare/tiny_shakespeare_{part}.bin", 8 * batch * seq + 1)
    done = subprocess.run([str(program)], cwd=folder, capture_output=True, text=True,
                          env={"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"})
    taken = re.findall(r"^step \d+: train loss \S+ \(took ([\d.]+) ms\)", done.stdout, re.M)
    if done.returncode != 0 or not taken:
        sys.exit(f"{program} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(taken[-1]) / 1000
