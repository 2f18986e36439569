"""What the loss over a vocabulary costs: titanlite's chunked one, without and with a teacher (distilled), against plain
cross entropy on whole logits.

    python benchmarks/bench_loss.py [--runs 5] [--tokens 2048] [--dim 256] [--dtype float32] [--record FILE]

Memory: the most that forward and backward hold beside hidden states, weight and their gradients, each size in a process
of its own. Time: forward and backward at a vocabulary of 32,768, by turns in one process. Above 1, the chunked
loss is faster.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from record import add_record_option, record
from torch import Tensor
from torch.nn import functional as F

from titanlite.batch import IGNORE
from titanlite.loss import LossTerm, token_loss
from titanlite.ops.kernels import Kernels
from titanlite.runtime.allocator import keep_freed_memory
from titanlite.schema import Distill
from titanlite.techniques.distill.divergence import distilled_loss, head_divergence

VOCABULARIES = (32_768, 65_536, 131_072, 262_144)
TIMED = 32_768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_record_option(parser)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, vocabulary = options.measure
        print(json.dumps(peak(name, options.tokens, options.dim, int(vocabulary), options.dtype)))
        return
    print(f"{options.tokens} tokens, dim {options.dim}, {options.dtype}, torch {torch.__version__}")
    sizes_of: dict[str, list[float]] = {name: [] for name in LOSSES}
    for vocabulary in VOCABULARIES:
        found = {}
        for name in LOSSES:
            command = [sys.executable, __file__, *sys.argv[1:], "--measure", name, str(vocabulary)]
            found[name] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            sizes_of[name].append(found[name])
        sizes = ", ".join(f"{name} {size:,.0f} MiB" for name, size in found.items())
        print(f"  vocabulary {vocabulary:>7,}: {sizes}", flush=True)
    keep_freed_memory()
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    hidden, weight, labels = inputs(options.tokens, options.dim, TIMED, options.dtype)
    for _ in range(options.runs + 1):
        for name in LOSSES:
            seconds[name].append(step(name, hidden, weight, labels))
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    pairs = [plain / chunked for plain, chunked in zip(seconds["plain"][1:], seconds["chunked"][1:], strict=True)]
    for name, median in medians.items():
        print(f"  {name:<8} {1000 * median:,.0f} ms at a vocabulary of {TIMED:,}")
    ratio = medians["plain"] / medians["chunked"]
    print(f"  plain / chunked: {ratio:.3f} (pairs {min(pairs):.3f} to {max(pairs):.3f})")
    note(options, sizes_of, {name: times[1:] for name, times in seconds.items()})


def note(options: argparse.Namespace, sizes: dict[str, list[float]], seconds: dict[str, list[float]]) -> None:
    case = f"{options.tokens} tokens, dim {options.dim}, {options.dtype}"
    range_of = f"vocabulary {VOCABULARIES[0]:,} to {VOCABULARIES[-1]:,}, {case}"
    for name, values in sizes.items():
        better, aim = ("none", "") if name == "plain" else ("lower", "flat")
        what = f"memory of the {name} loss beside weight and gradients, {range_of}"
        record(options.record, name=what, values=values, unit="MiB", better=better, aim=aim)
    first, *larger = sizes["chunked"]
    what = f"memory of the chunked loss, larger vocabularies / smallest, {range_of}"
    record(options.record, name=what, values=[size / first for size in larger], better="lower", aim="near 1")
    least, most = min(sizes["chunked"]), max(sizes["chunked"])  # vocabularies are its repeats: it is to be flat
    for vocabulary, plain, chunked in zip(VOCABULARIES, sizes["plain"], sizes["chunked"], strict=True):
        what = f"plain / chunked loss, memory, vocabulary {vocabulary:,}, {case}"
        record(options.record, name=what, value=plain / chunked, low=plain / most, high=plain / least, better="higher")
    what = f"plain / chunked loss, time, vocabulary {TIMED:,}, {case}"
    record(options.record, name=what, pairs=(seconds["plain"], seconds["chunked"]), better="higher", aim=">= 0.98")


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return token_loss(hidden, weight, labels_BL=labels).total


class Teacher:
    """Teacher with the student's weight, so that no memory of its own is measured."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.hidden, self.weight = hidden.detach().roll(1, dims=1).flatten(0, 1), weight.detach()

    @contextmanager
    def divergence(self, distill: Distill, kernels: Kernels) -> Iterator[LossTerm]:
        yield head_divergence(self.hidden, self.weight, distill, kernels)


def distilled(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    distill = Distill(ratio=0.5)
    return distilled_loss(hidden, weight, labels_BL=labels, teacher=Teacher(hidden, weight), distill=distill).total


LOSSES = {"plain": plain, "chunked": chunked, "distilled": distilled}


def inputs(tokens: int, dim: int, vocabulary: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """With logits as at the beginning of training: of far larger ones softmax makes denormals, which are slow."""
    hidden, weight = torch.randn(1, tokens, dim), torch.randn(vocabulary, dim).mul_(0.02)
    hidden, weight = (tensor.to(getattr(torch, dtype)).requires_grad_() for tensor in (hidden, weight))
    return hidden, weight, torch.randint(0, vocabulary, (1, tokens))


def step(name: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    """Seconds of forward and backward."""
    hidden.grad = weight.grad = None
    started = time.perf_counter()
    (LOSSES[name](hidden, weight, labels) / labels.numel()).backward()
    return time.perf_counter() - started


def peak(name: str, tokens: int, dim: int, vocabulary: int, dtype: str) -> float:
    """MiB beside what is there before and the gradients."""
    arguments = inputs(tokens, dim, vocabulary, dtype)
    step(name, *inputs(8, dim, 64, dtype))  # what PyTorch loads on first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    step(name, *arguments)
    gradients = sum(tensor.nbytes for tensor in arguments[:2]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before - gradients


if __name__ == "__main__":
    main()
