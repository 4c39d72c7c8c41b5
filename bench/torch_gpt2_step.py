#!/usr/bin/env python3
"""One training step of GPT-2 in PyTorch on a CPU: the step that train_speed.py compares with.

  torch_gpt2_step.py --tokens FILE --dtype f32|bf16 --batch 4 --seq 512 --threads 2 --steps 3

Forward, loss, backward, clip to norm 1, AdamW (0.9, 0.95, decay 0.1 on matrices), the same shapes as cairn's T.gpt: tied
head, learned positions, tanh GELU, biases. bf16 is autocast over float32 weights. Attention is PyTorch's fused one
where it has one (2.0 and later). --compile: through torch.compile.
Prints a JSON object: seconds of each step after one warm-up step, the first loss, versions.
"""
import argparse
import array
import json
import os
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", required=True, help="little-endian uint16 tokens")
parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=512)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--threads", type=int, default=os.cpu_count())
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--vocab", type=int, default=50257)
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(args.threads)

import torch  # noqa: E402  (reads OMP_NUM_THREADS)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

torch.set_num_threads(args.threads)
torch.manual_seed(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        width = args.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, seq, width = x.shape
        q, k, v = (part.view(batch, seq, args.heads, width // args.heads).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).split(width, 2))
        if hasattr(F, "scaled_dot_product_attention"):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5)
            mixed = scores.masked_fill(hidden[:seq, :seq], float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(args.vocab, args.width), nn.Embedding(args.seq, args.width)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, args.vocab).float(), targets.reshape(-1))


hidden = torch.ones(args.seq, args.seq, dtype=torch.bool).triu(1)
model = Gpt()
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                              lr=6e-4, betas=(0.9, 0.95))
tokens = array.array("H")  # torch.uint16 is newer than the oldest PyTorch that this runs on
tokens.frombytes(open(args.tokens, "rb").read())
data = torch.tensor(tokens)
forward = torch.compile(model) if args.compile else model


def step(number):
    starts = [(number * args.batch + b) * args.seq % (len(data) - args.seq - 1) for b in range(args.batch)]
    ids = torch.stack([data[s:s + args.seq] for s in starts])
    targets = torch.stack([data[s + 1:s + args.seq + 1] for s in starts])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
        loss = forward(ids, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


first_loss = step(0)
seconds = []
for number in range(1, args.steps + 1):
    begin = time.perf_counter()
    step(number)
    seconds.append(time.perf_counter() - begin)
print(json.dumps({"seconds": seconds, "first_loss": first_loss, "torch": torch.__version__,
                  "parameters": sum(p.numel() for p in model.parameters())}))
