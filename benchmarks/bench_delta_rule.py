"""The gated delta rule by flash-linear-attention's Triton kernels in bfloat16, and by PyTorch in float32, both beside
the same formulas in float64: largest differences of outputs and gradients, and time.

    python benchmarks/bench_delta_rule.py [--device cpu] [--tokens 4096]

Heads and their sizes are those of Qwen3-Next. Inputs are rounded to bfloat16 first, so what differs is the computation.
A line of JSON for each form, without documents and with four of them; the kernels need a GPU and the package fla-core.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from titanlite.ops.delta_rule import fused_gated_delta_rule, gated_delta_rule, has_fused_kernels
from titanlite.ops.kernels import repeat_heads

NAMES = ("q", "k", "v", "decay", "beta")
KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
Form = Callable[..., Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    for found in compare(torch.device(options.device), options.tokens):
        print(json.dumps(found), flush=True)


def compare(device: torch.device, tokens: int) -> Iterator[dict[str, Any]]:
    inputs, upstream = drawn(device, tokens)
    for documents in (1, 4):
        positions = (torch.arange(tokens, device=device) % (tokens // documents))[None] if documents > 1 else None
        boundaries = torch.arange(0, tokens + 1, tokens // documents, dtype=torch.int32, device=device)
        whole = partial(by_torch, positions_BL=positions)
        exact = results(whole, [tensor.double() for tensor in inputs], upstream.double())
        forms: dict[str, Form] = {"PyTorch, float32": whole}
        if has_fused_kernels(device, torch.bfloat16, DIM):
            kernels = partial(fused_gated_delta_rule, dtype=torch.bfloat16)
            forms["kernels, bfloat16"] = partial(kernels, boundaries=boundaries if documents > 1 else None)
        for name, form in forms.items():
            apart = {
                which: float((ours.double() - right).abs().max() / right.abs().max())
                for which, ours, right in zip(("out", *NAMES), results(form, inputs, upstream), exact, strict=True)
            }
            milliseconds = time_of(partial(results, form, inputs, upstream), device)
            yield {"form": name, "documents": documents, "apart": apart, "forward_and_backward_ms": milliseconds}


def drawn(device: torch.device, tokens: int) -> tuple[list[Tensor], Tensor]:
    """Inputs as a layer makes them, and the gradient of the outputs: numbers of bfloat16 as float32."""
    draw = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(1, KEY_HEADS, tokens, DIM, generator=draw), dim=-1) for _ in range(2))
    v, upstream = (torch.randn(1, VALUE_HEADS, tokens, DIM, generator=draw) for _ in range(2))
    decay, beta = (torch.rand(1, VALUE_HEADS, tokens, generator=draw) for _ in range(2))
    *inputs, upstream = (x.bfloat16().float().to(device) for x in (q, k, v, -0.1 * decay, beta, upstream))
    return inputs, upstream


def by_torch(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, positions_BL: Tensor | None) -> Tensor:
    q, k = (repeat_heads(x, v.shape[1]) for x in (q, k))
    return gated_delta_rule(q, k, v, *rest, positions_BL=positions_BL)[0]


def results(form: Form, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """The output, and the gradients of the inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = form(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out))]


def time_of(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Milliseconds, after one call that may compile and choose kernels."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    work()
    wait()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return round(1000 * (time.perf_counter() - began) / repeats, 3)


if __name__ == "__main__":
    main()
