"""Context parallelism in one process: parts of sequences, masks, the mesh, and mistakes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.helpers import TinyRun
from tests.support.layouts import degrees
from titanlite import techniques
from titanlite.data.loader import MicroBatches
from titanlite.mesh import (
    axis_groups,
    build_mesh,
    context_rank,
    data_parallel_rank,
    loss_group,
    shard_degree_of,
    sharding_mesh,
)
from titanlite.models.base import build_on_meta
from titanlite.models.layers import Loss
from titanlite.models.llama3 import Llama3
from titanlite.ops.attention import Documents, SequencePart, additive_mask, attend, chunk_boundaries
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tracing import fake_process_group
from titanlite.schedule import BatchSizes
from titanlite.schema import Config, Parallelism
from titanlite.techniques.context.sequences import check_context, part_of, split_batch
from titanlite.tools.plan.estimate import model_of
from titanlite.tools.plan.trace import trace_step


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_token_is_on_one_rank_and_all_have_equal_work(ranks: int) -> None:
    parts = [SequencePart(rank, ranks).indices(24 * ranks, torch.device("cpu")) for rank in range(ranks)]
    assert torch.cat(parts).sort().values.tolist() == [*range(24 * ranks)]
    assert {int((part + 1).sum()) for part in parts} == {24 * (24 * ranks + 1) // 2}, "keys that the queries see"


def test_the_mesh() -> None:
    parallelism = Parallelism(data_parallel_replicate_degree=2, context_parallel_degree=2)
    found = []
    for rank in range(8):
        with fake_process_group(8, rank=rank):
            mesh = build_mesh(parallelism, world_size=8, device_type="cpu")
            shards = sharding_mesh(mesh)
            ranks = {axis: dist.get_process_group_ranks(group) for axis, group in axis_groups(mesh).items()}
            found.append((data_parallel_rank(mesh), context_rank(mesh), ranks, shards.get_local_rank(1)))
            assert mesh.mesh_dim_names == ("replicate", "shard", "context")
            assert shards.shape == (2, 4)
            assert shard_degree_of(mesh) == 4
            assert loss_group(mesh).size() == 8
    assert [case[0] for case in found] == [(rank, 4) for rank in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert [case[1] for case in found] == [(rank, 2) for rank in (0, 1) * 4]
    assert found[6][2] == {"replicate": [2, 6], "shard": [4, 5, 6, 7], "context": [6, 7]}
    assert [case[3] for case in found] == [0, 1, 2, 3] * 2


def documents_of(lengths: list[list[int]]) -> Documents:
    """Documents of these lengths, in each sequence."""
    ids = torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in lengths])
    positions = torch.tensor([[place for length in row for place in range(length)] for row in lengths])
    ends = torch.tensor([length for row in lengths for length in row]).cumsum(0)
    return Documents(positions, ids.int(), torch.cat([torch.zeros(1), ends]).int())


DOCUMENTS = documents_of([[3, 1, 12, 7, 1], [24], [11, 13]])


def packed(q: Tensor, k: Tensor, v: Tensor, query_offsets: Tensor, key_offsets: Tensor) -> Tensor:
    """Formulas of a kernel for packed documents: q [Tq, N, H], k and v [Tk, N, H]. Last queries see last keys."""
    out = torch.full_like(q, torch.nan)
    for (a, b), (c, d) in zip(*(pairs(offsets) for offsets in (query_offsets, key_offsets)), strict=True):
        scores = torch.einsum("qnh,knh->nqk", q[a:b], k[c:d]) * q.shape[-1] ** -0.5
        is_later = torch.ones(b - a, d - c, dtype=torch.bool).triu(1 + (d - c) - (b - a))
        out[a:b] = torch.einsum("nqk,knh->qnh", scores.masked_fill(is_later, -torch.inf).softmax(-1), v[c:d])
    return out


def pairs(offsets: Tensor) -> Iterator[tuple[int, int]]:
    return zip(offsets.tolist(), offsets[1:].tolist(), strict=False)


def test_boundaries_of_chunks_give_the_attention_of_whole_sequences() -> None:
    q, k, v = torch.randn(3, 3, 2, 24, 4, generator=torch.Generator().manual_seed(0)).unbind()
    whole = attend(q, k, v, additive_mask(DOCUMENTS.ids_BS, torch.float32))
    for rank in range(3):
        part = SequencePart(rank, 3)
        for chunk, (start, end) in zip(chunk_boundaries(DOCUMENTS, part), part.chunks(24), strict=True):
            assert chunk.end == end
            q_TNH = q[:, :, start:end].transpose(1, 2).flatten(0, 1)
            k_TNH, v_TNH = (x[:, :, :end].transpose(1, 2).flatten(0, 1) for x in (k, v))
            out = packed(q_TNH, k_TNH, v_TNH, chunk.queries, chunk.keys).unflatten(0, (3, end - start)).transpose(1, 2)
            torch.testing.assert_close(out, whole[:, :, start:end])


def test_a_batch_of_two_ranks() -> None:
    batch = {"tokens": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8) + 1}
    with fake_process_group(2, rank=1):
        mesh = build_mesh(Parallelism(context_parallel_degree=2), world_size=2, device_type="cpu")
        mine = split_batch(batch, part_of(mesh, 2))
    assert mine["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert mine["labels"].tolist() == [[3, 4, 5, 6], [11, 12, 13, 14]]
    assert mine["positions"].tolist() == [[2, 3, 4, 5]] * 2
    assert mine["documents"].tolist() == [[0] * 8] * 2
    assert mine["boundaries"].tolist() == [0, 8, 16]
    with fake_process_group(2, rank=1):
        mesh = build_mesh(Parallelism(), world_size=2, device_type="cpu")
        assert techniques.parts_of(Config(), mesh).batch(batch) is batch


def test_a_bad_part_of_a_sequence_names_its_samples() -> None:
    batches = MicroBatches(16, sizes=BatchSizes((), 4), micro_batch_size=1, rank=0, ranks=2)
    nothing = [False, False]
    assert batches.of_step(1, [nothing, nothing, [False, True], nothing]) == [19]
    assert batches.of_step(2, [nothing, [True, False], nothing, [False, True]]) == [20, 23]
    assert batches.of_step(1, [[False, True], nothing]) == [17]


class Plain(Llama3):
    def build_attention(self, layer: int) -> Any:
        return nn.Identity()


class Deaf(Llama3):
    def forward(self, tokens: Tensor, loss: Loss | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError


def test_models_whose_sequences_cannot_be_split() -> None:
    args = Llama3.flavors["debug"]
    check_context(build_on_meta(Llama3, args))
    with pytest.raises(UserError, match=r"Plain .*`key_source`"):
        check_context(build_on_meta(Plain, args))
    with pytest.raises(UserError, match=r"`documents`.* Deaf\.forward"):
        check_context(build_on_meta(Deaf, args))


@pytest.mark.long
def test_the_plan_counts_what_a_step_sends(tiny: TinyRun) -> None:
    config = tiny.config(*degrees(1, 2, 2), "--activation_checkpoint.mode=full", world_size=4)
    spec = model_of(config)
    traced = trace_step(config, spec.model_cls, spec.args, world_size=4, gpu=False)
    inside = [sent for sent in traced.sent if sent.is_inside]
    assert {sent.axis for sent in inside} == {"context"}
    assert [sent.collective for sent in inside].count("all_gather") == 2, "again where forward is recomputed"
    assert [sent.collective for sent in inside].count("reduce_scatter") == 1
    sizes = {sent.bytes for sent in inside}
    assert sizes == {4 * 2 * 32 * 14 * 4}, "keys and values of 4 sequences in float32"
