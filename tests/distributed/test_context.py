"""Context parallelism: what ranks that split sequences send. That they train as one: tests/matrix.py."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import packed_kernel
from tests.support.helpers import TinyRun, run_in_turn, run_ranks
from tests.support.layouts import CountOperators, built, degrees, one_step
from titanlite.ops.attention import (
    PLAIN_SCORES,
    Boundaries,
    Documents,
    Scores,
    SequencePart,
    additive_mask,
    attend,
    chunk_boundaries,
)
from titanlite.ops.cpu import CpuKernels
from titanlite.schema import Config
from titanlite.techniques.context.sequences import ContextSplit, HeadSplit


def counts_of_a_step(rank: int, world_size: int, config: Config) -> tuple[int, int]:
    run = built(rank, world_size, config)
    found = []
    for text in ("_c10d_functional.all_gather_into_tensor", "_c10d_functional.reduce_scatter_tensor"):
        with CountOperators(text) as operators:
            one_step(run)
        found.append(operators.count)
    return found[0], found[1]


def test_collectives_of_a_step(tiny: TinyRun) -> None:
    """Keys and values of a layer are gathered in one collective, and again where forward is recomputed."""
    plain = tiny.config(*degrees(1, 1, 2), "--job.name=plain", world_size=2)
    recomputed = tiny.config(*degrees(1, 1, 2), "--activation_checkpoint.mode=full", "--job.name=full", world_size=2)
    results = run_in_turn(counts_of_a_step, 2, [plain, recomputed])
    assert results == [[(1, 1)] * 2, [(2, 1)] * 2]


class CountBytes(TorchDispatchMode):
    """Bytes that this rank sends to others in each kind of collective."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.sent = rank, dict[str, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "all_gather_into" in name:
            self.sent["all_gather"] = args[0].nbytes * (args[1] - 1)
        elif "all_to_all" in name:
            rows = sum(args[2]) - args[2][self.rank]
            self.sent["all_to_all"] = rows * args[0][0].nbytes
        return func(*args, **(kwargs or {}))


def attend_with_window(rank: int, ranks: int, windows: list[int], packed: bool) -> list[tuple[float, dict[str, int]]]:
    """Largest error of the outputs and gradients of this rank's tokens, and the bytes that it sends."""
    S, B, H = 32, 2, 8
    group = dist.group.WORLD
    assert group is not None
    part, kernels, found = SequencePart(rank, ranks), CpuKernels(), []
    own = part.indices(S, torch.device("cpu"))
    ids = torch.tensor([[0] * 7 + [1] * 20 + [2] * 5, [0] * 32]).int()
    documents = Documents(torch.zeros(B, S), ids, torch.tensor([0, 7, 27, 32, 64]).int())
    for window in windows:
        q, k, v, upstream = torch.randn(4, B, 2, S, H, generator=torch.Generator().manual_seed(0)).unbind()
        whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        expected = attend(whole[0], whole[1], whole[2], additive_mask(ids, q.dtype, window=window))
        expected.backward(upstream)
        parts = [tensor[:, :, own].clone().requires_grad_() for tensor in (q, k, v)]
        source = ContextSplit(part, group)
        mask = kernels.attention_mask(documents, q[:, 0], H, source, window=window)
        if packed:
            mask = chunk_boundaries(documents, part, window=window)
        with packed_kernel.on_cpu(), CountBytes(rank) as counted:
            out = source.attend(kernels, parts[0], parts[1], parts[2], mask, PLAIN_SCORES)
        with packed_kernel.on_cpu():
            out.backward(upstream[:, :, own])
        pairs = [(out, expected), *((mine.grad, its.grad) for mine, its in zip(parts, whole, strict=True))]
        errors = [float((mine - its[:, :, own]).abs().max()) for mine, its in pairs]  # pyright: ignore[reportOptionalOperand, reportOptionalSubscript]
        found.append((max(errors), counted.sent))
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_windows_need_keys_of_neighbouring_chunks_only(packed: bool) -> None:
    """Chunks of 4 tokens. From windows of 6 tokens on, whole sequences are gathered."""
    token, gathered = 2 * 2 * 2 * 8 * 4, {"all_gather": 3 * 8 * 2 * 2 * 2 * 8 * 4}  # keys and values of two sequences
    of_ranks = run_ranks(attend_with_window, 4, [1, 2, 5, 6], packed)
    for rank, found in enumerate(of_ranks):
        assert [error for error, _ in found] == pytest.approx([0] * 4, abs=3e-6)
        neighbours = 1 if rank in (0, 3) else 2
        near = [{"all_to_all": neighbours * (window - 1) * token} for window in (1, 2, 5)]
        assert [sent for _, sent in found] == [*near, gathered]


def attend_by_heads(rank: int, ranks: int, key_heads: list[int], packed: bool) -> list[tuple[float, int]]:
    """Largest error of the outputs and gradients of this rank's tokens, and the all-to-alls of a forward pass."""
    S, B, N, H = 32, 2, 4, 8
    group = dist.group.WORLD
    assert group is not None
    part, kernels, found = SequencePart(rank, ranks, exchanges_heads=True), CpuKernels(), []
    own = part.indices(S, torch.device("cpu"))
    ids = torch.tensor([[0] * 7 + [1] * 20 + [2] * 5, [0] * 32]).int()
    documents = Documents(torch.zeros(B, S), ids, torch.tensor([0, 7, 27, 32, 64]).int())
    for heads, window, has_sinks in product(key_heads, (None, 11), (False, not packed)):
        generator = torch.Generator().manual_seed(0)
        q, k, v, upstream = (torch.randn(B, count, S, H, generator=generator) for count in (N, heads, heads, N))
        scores = Scores(0.5, torch.randn(N, generator=generator).requires_grad_() if has_sinks else None)
        whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        mask = additive_mask(ids, q.dtype, window=window)
        expected = kernels.attend(whole[0], whole[1], whole[2], mask, scores=scores)
        expected.backward(upstream)
        its_sinks: Any = scores.sinks_N.grad if scores.sinks_N is not None else torch.zeros(1)
        mine_scores = scores._replace(sinks_N=scores.sinks_N.detach().requires_grad_()) if has_sinks else scores  # pyright: ignore[reportOptionalMemberAccess]
        parts = [tensor[:, :, own].clone().requires_grad_() for tensor in (q, k, v)]
        source = HeadSplit(part, group)
        own_mask = kernels.attention_mask(documents, q[:, 0], H, source, window=window)
        if packed:
            own_mask = Boundaries(documents.boundaries, window)
        with packed_kernel.on_cpu(), CountOperators("all_to_all_single") as operators:
            out = source.attend(kernels, parts[0], parts[1], parts[2], own_mask, mine_scores)
        with packed_kernel.on_cpu():
            out.backward(upstream[:, :, own])
        sinks = torch.zeros(1) if mine_scores.sinks_N is None else mine_scores.sinks_N.grad
        assert sinks is not None
        dist.all_reduce(sinks)
        pairs = [(out, expected), *((mine.grad, its.grad) for mine, its in zip(parts, whole, strict=True))]
        errors = [float((mine - its[:, :, own]).abs().max()) for mine, its in pairs]  # pyright: ignore[reportOptionalOperand, reportOptionalSubscript]
        found.append((max(*errors, float((sinks - its_sinks).abs().max())), operators.count))
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_heads_for_tokens(packed: bool) -> None:
    """Four query heads on four processes: key heads are as many, or repeated. A window of 11 tokens sees more than
    neighbouring chunks."""
    for found in run_ranks(attend_by_heads, 4, [4, 2, 1], packed):
        assert [error for error, _ in found] == pytest.approx([0] * 12, abs=5e-6)
        assert {count for _, count in found} == {2}
