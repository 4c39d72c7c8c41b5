#!/usr/bin/env python3
"""Training steps of a decoder in PyTorch on a GPU: what bench/gpu_all compares with.

  torch_train.py --family gpt|llama --layers 12 --width 768 --heads 12 --kv-heads 12 --ffn 3072 --context 1024
                 --vocab 50304 --samples 16 --tokens FILE --seconds 6

The shapes of cairn's T.gpt (tied head, learned positions, tanh GELU, biases) or T.llama (RMSNorm, rotary, SwiGLU, grouped
keys). Each step: forward, loss, backward, clip to norm 1, AdamW. As PyTorch is fastest: torch.compile, bf16 autocast over
float32 weights, flash attention, the fused AdamW, TF32 where floats are multiplied, a vocabulary of whole tiles.
Prints a JSON object: milliseconds a step of each of five windows, the first and the last loss, versions, memory, and the
kernel that scaled_dot_product_attention took, by PyTorch's own record of the ops of a step: flash, mem-efficient, cudnn or
math.
"""
import argparse
import array
import json
import math
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--family", choices=["gpt", "llama"], required=True)
for name in ("layers", "width", "heads", "kv-heads", "ffn", "context", "vocab", "samples"):
    parser.add_argument(f"--{name}", type=int, required=True)
parser.add_argument("--tokens", required=True, help="little-endian uint16 tokens")
parser.add_argument("--seconds", type=float, default=6)
parser.add_argument("--device", default="cuda")
parser.add_argument("--no-compile", action="store_true")
args = parser.parse_args()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

torch.manual_seed(1)
torch.set_float32_matmul_precision("high")
HEAD = args.width // args.heads


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotary_table():
    angles = torch.outer(torch.arange(args.context), 500000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        width, gpt = args.width, args.family == "gpt"
        norm = nn.LayerNorm if gpt else RmsNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv = nn.Linear(width, (args.heads + 2 * args.kv_heads) * HEAD, bias=gpt)
        self.out = nn.Linear(args.heads * HEAD, width, bias=gpt)
        self.up = nn.Linear(width, args.ffn if gpt else 2 * args.ffn, bias=gpt)
        self.down = nn.Linear(args.ffn, width, bias=gpt)

    def attend(self, x, rotary):
        batch, tokens, _ = x.shape
        q, k, v = (part.view(batch, tokens, -1, HEAD).transpose(1, 2) for part in self.qkv(x).split(
            [args.heads * HEAD, args.kv_heads * HEAD, args.kv_heads * HEAD], 2))
        if rotary is not None:
            cos, sin = rotary
            half = HEAD // 2
            q, k = (part * cos + torch.cat([-part[..., half:], part[..., :half]], -1) * sin for part in (q, k))
            q, k = q.type_as(v), k.type_as(v)
        if args.kv_heads == args.heads:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))

    def forward(self, x, rotary):
        x = x + self.attend(self.norm1(x), rotary)
        hidden = self.up(self.norm2(x))
        if args.family == "gpt":
            return x + self.down(F.gelu(hidden, approximate="tanh"))
        gate, up = hidden.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        gpt = args.family == "gpt"
        self.tokens = nn.Embedding(args.vocab, args.width)
        self.positions = nn.Embedding(args.context, args.width) if gpt else None
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width) if gpt else RmsNorm(args.width)
        self.head = None if gpt else nn.Linear(args.width, args.vocab, bias=False)
        if not gpt:
            for name, table in zip(("cos", "sin"), rotary_table()):
                self.register_buffer(name, table, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids)
        rotary = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        else:
            rotary = (self.cos, self.sin)
        for block in self.blocks:
            x = block(x, rotary)
        logits = F.linear(self.norm(x), self.tokens.weight if self.head is None else self.head.weight)
        return F.cross_entropy(logits.view(-1, args.vocab).float(), targets.reshape(-1))


on_gpu = args.device == "cuda"
with torch.device(args.device):
    model = Decoder()
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                              lr=6e-4, betas=(0.9, 0.95), fused=on_gpu)
tokens = array.array("H")
tokens.frombytes(open(args.tokens, "rb").read())
data = torch.tensor(tokens, dtype=torch.int64, device=args.device)
forward = model if args.no_compile else torch.compile(model)


def settle():
    if on_gpu:
        torch.cuda.synchronize()


def step(number):
    each = args.samples * args.context
    first = number * each % (len(data) - each - 1)
    ids = data[first:first + each].view(args.samples, args.context)
    targets = data[first + 1:first + each + 1].view(args.samples, args.context)
    with torch.autocast(args.device, dtype=torch.bfloat16):
        loss = forward(ids, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


# Ops of PyTorch's, in the order in which scaled_dot_product_attention prefers them.
ATTENTION = {"_scaled_dot_product_cudnn_attention": "cudnn", "_scaled_dot_product_flash_attention": "flash",
             "_scaled_dot_product_efficient_attention": "mem-efficient", "_scaled_dot_product_attention_math": "math",
             "_scaled_dot_product_fused_attention_overrideable": "overrideable"}


def attention_of(names):
    """Which kernels of attention are among the names of a step's ops."""
    found = {kernel for name in names for op, kernel in ATTENTION.items()
             if name.removeprefix("aten::").removesuffix("_backward").removesuffix("_for_cpu") == op}
    return ", ".join(sorted(found)) or "math, compiled with the rest"  # no op of its own is left then


begin = time.perf_counter()
first_loss = step(0).item()
compile_s = time.perf_counter() - begin
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:  # the host's calls, no kernels
    step(1)
    settle()
attention = attention_of({event.key for event in profiled.key_averages()})
begin = time.perf_counter()
step(2)
settle()
one = time.perf_counter() - begin
count = max(1, math.ceil(args.seconds / 5 / one))
number, windows = 3, []
for _ in range(5):
    begin = time.perf_counter()
    for _ in range(count):
        loss = step(number)
        number += 1
    settle()
    windows.append((time.perf_counter() - begin) / count * 1e3)
print(json.dumps({"step_ms": windows, "steps": number, "first_loss": first_loss, "last_loss": loss.item(),
                  "first_step_s": compile_s, "attention": attention, "torch": torch.__version__, "cuda": torch.version.cuda,
                  "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0,
                  "parameters": sum(p.numel() for p in model.parameters())}))
