"""A Llama, and its training, as one writes them by hand in plain PyTorch: what titanlite is measured against. Nothing
of titanlite is imported. bench_step.py, bench_startup.py and gpu.py run it.

Shape suffixes: B batch, L sequence, D model dim, N heads, H head dim.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
        B, L, _ = x_BLD.shape
        q, k, v = (w(x_BLD).view(B, L, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos_LH, sin_LH), rotate(k, cos_LH, sin_LH)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(B, L, -1))


def rotate(x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
    x1, x2 = x_BNLH.chunk(2, dim=-1)
    return (x_BNLH * cos_LH + torch.cat((-x2, x1), dim=-1) * sin_LH).type_as(x_BNLH)


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, hidden_dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cos_LH, sin_LH)
        h_BLD = self.ffn_norm(x_BLD)
        return x_BLD + self.w2(F.silu(self.w1(h_BLD)) * self.w3(h_BLD))


class PlainLlama(nn.Module):
    def __init__(
        self,
        *,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        hidden_dim: int,
        vocab_size: int,
        seq_len: int,
        tied_head: bool = False,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, n_kv_heads, hidden_dim) for _ in range(n_layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        if tied_head:
            self.output.weight = self.tok_embeddings.weight
        head_dim = dim // n_heads
        inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(seq_len), inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Logits [B, L, V]."""
        x_BLD = self.tok_embeddings(tokens_BL)
        for block in self.layers:
            x_BLD = block(x_BLD, self.cos, self.sin)
        return self.output(self.norm(x_BLD))


# Training it, as PyTorch's documentation shows it


def main() -> None:
    """Train by the settings given as JSON. Print the seconds to the end of the first step, then `take_turns`."""
    started = float(os.environ.get("STARTED", time.time()))
    settings: dict[str, Any] = json.loads(sys.argv[1])
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    step = stepper(settings, rank, ranks)
    step()
    if rank == 0:
        print(json.dumps({"first": time.time() - started}), flush=True)

    def turn() -> None:
        for _ in range(settings["turn"]):
            step()

    take_turns(turn, settings["turns"], settings["turn"], rank, ranks)


def take_turns(turn: Callable[[], None], count: int, steps: int, rank: int, ranks: int) -> None:
    """Wait for a line before each turn of so many steps, so that contenders can alternate. Print the seconds of a step
    and the peak memory in MiB (on a GPU what PyTorch reserved there). Ends the process."""
    for _ in range(count):
        if rank == 0:
            sys.stdin.readline()
        if ranks > 1:
            dist.barrier()
        before = time.perf_counter()
        turn()
        on_gpu = torch.cuda.is_initialized()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - before) / steps
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        memory = torch.cuda.max_memory_reserved() / 2**20 if on_gpu else resident
        if rank == 0:
            print(json.dumps({"seconds": seconds, "mib": memory}), flush=True)
    if ranks > 1:
        dist.barrier()
    os._exit(0)


def stepper(settings: dict[str, Any], rank: int, ranks: int) -> Callable[[], None]:
    dtype, device = getattr(torch, settings["dtype"]), settings.get("device", "cpu")
    torch.manual_seed(0)
    with torch.device(device):
        model = PlainLlama(**settings["model"], seq_len=settings["seq_len"])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim == 2 else nn.init.ones_(parameter)
    if ranks > 1:
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        policy = MixedPrecisionPolicy() if dtype == torch.float32 else mixed
        for block in model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    if settings.get("compile"):
        model.compile(mode=settings.get("mode"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    flat = np.memmap(settings["tokens"], dtype=np.uint16, mode="r")
    random, length, count = np.random.default_rng(rank), settings["seq_len"], settings["batch"] // ranks
    steps = 0

    def step() -> None:
        nonlocal steps
        starts = random.integers(0, len(flat) - length - 1, count)
        stretch = torch.from_numpy(np.stack([flat[s : s + length + 1] for s in starts]).astype(np.int64)).to(device)
        with torch.autocast(device, dtype, enabled=ranks == 1 and dtype != torch.float32):
            logits = model(stretch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), stretch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 10 == 0:
            loss.item()

    return step


if __name__ == "__main__":
    main()
