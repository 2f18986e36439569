"""Initial values: their distributions, what they depend on, and what a rank needs for its shard."""

import hashlib
import math
import time
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.helpers import fake_mesh
from titanlite.models.base import Model, build_on_meta
from titanlite.models.initial import Constant, InitialValues, Normal, TruncatedNormal, Uniform
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3_moe import Qwen3Moe, Qwen3MoeArgs
from titanlite.ops.hash_random import random_bits, salt
from titanlite.parallelize.materialize import SLICE, allocate, draw_weights, set_dtype
from titanlite.runtime.private_torch.tensors import local_tensor

CPU = torch.device("cpu")
COUNT = 100_000


def drawn(values: InitialValues, name: str = "0/weight", count: int = COUNT, first: int = 0) -> Tensor:
    indices = torch.arange(first, first + count)
    return values.values(random_bits(salt(name), indices), indices)


def distance_to(cdf: Callable[[float], float], sample: Tensor) -> float:
    """Kolmogorov and Smirnov's distance of a sample to a distribution, times the root of the sample's size."""
    expected = torch.tensor([cdf(value) for value in sample.sort().values.tolist()], dtype=torch.float64)
    steps = torch.arange(len(sample) + 1) / len(sample)
    distance = torch.maximum((steps[1:] - expected).abs().max(), (expected - steps[:-1]).abs().max())
    return distance.item() * math.sqrt(len(sample))


@pytest.mark.long
def test_normal() -> None:
    sample = drawn(Normal(std=0.02, mean=0.1))
    assert distance_to(NormalDist(0.1, 0.02).cdf, sample) < 1.63, "exceeded by 1 % of true samples"
    assert 4 < ((sample - 0.1) / 0.02).abs().max() < 6, "tails"
    assert len(sample.unique()) == COUNT


@pytest.mark.long
def test_truncated_normal() -> None:
    for values in (
        TruncatedNormal(std=1.0, low=-3.0, high=3.0, mean=0.5),
        TruncatedNormal(std=1.0, low=1.0, high=4.0),
    ):
        sample, whole = drawn(values), NormalDist(values.mean, values.std)
        assert sample.min() >= values.low
        assert sample.max() <= values.high
        first, last = whole.cdf(values.low), whole.cdf(values.high)
        assert distance_to(lambda x, normal=whole, a=first, b=last: (normal.cdf(x) - a) / (b - a), sample) < 1.63
    everything = torch.tensor([0, 2**47, 2**47 - 1, 2**48 - 1])
    ends = TruncatedNormal(std=1.0, low=-50.0, high=50.0).values(everything, everything)
    assert ends.isfinite().all()
    assert ends[1:3].abs().max() < 1e-11
    assert TruncatedNormal(std=1.0, low=-2.0, high=2.0).values(everything, everything)[[0, 3]].tolist() == [
        pytest.approx(-2), pytest.approx(2)
    ]  # fmt: skip


def test_uniform_and_constant() -> None:
    sample = drawn(Uniform(low=-1.0, high=3.0))
    assert distance_to(lambda x: (x + 1) / 4, sample) < 1.63
    assert sample.min() > -1
    assert sample.max() < 3
    assert drawn(Constant(0.25)).unique().tolist() == [0.25]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (Normal, {"std": -0.1}),
        (TruncatedNormal, {"std": 0.0, "low": 0.0, "high": 1.0}),
        (TruncatedNormal, {"std": 1.0, "low": 90.0, "high": 91.0}),
        (Constant, {"value": math.inf}),
    ],
)
def test_impossible_distributions_are_refused(kind: Any, arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        kind(**arguments)


def test_values_are_pinned() -> None:
    """A change of these bits changes the initial weights of every config: then report it in CHANGELOG.md."""
    for values, expected in (
        (Normal(std=1.0), "fe71184caf752978"),
        (TruncatedNormal(std=0.02, low=-0.04, high=0.04), "1df5c4d77e8d2186"),
        (Uniform(low=-1.0, high=3.0), "ad0bf9609689a59f"),
    ):
        found = drawn(values, count=400_000).float().numpy().tobytes()
        assert hashlib.sha256(found).hexdigest()[:16] == expected


MOE = Qwen3MoeArgs(
    dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=10, vocab_size=31, max_seq_len=16, n_experts=6,
    n_active_experts=2,
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("dim", "dtype"), [(0, torch.bfloat16), (1, torch.float32)], ids=["rows", "columns"])
def test_a_shard_is_that_part_of_the_whole(dtype: torch.dtype, dim: int) -> None:
    """Rows that divide evenly among ranks and that do not, and columns that do."""

    def model() -> Model:
        found = build_on_meta(Qwen3Moe, MOE)
        set_dtype(found, dtype)
        return found

    whole = model()
    allocate(whole, CPU, CPU)
    draw_weights(whole, device=CPU, seed=3)
    for degrees in ((2, 2), (5,)):

        def dim_of(parameter: Tensor, shards: int = degrees[-1]) -> int:
            return dim if parameter.ndim > dim and parameter.shape[dim] % shards == 0 else 0

        for rank in range(math.prod(degrees)):
            with fake_mesh(rank, degrees) as mesh:
                sharded: Any = model()
                fully_shard(sharded, mesh=mesh, shard_placement_fn=lambda p: Shard(dim_of(p)))
                allocate(sharded, CPU, CPU)
                draw_weights(sharded, device=CPU, seed=3)
                expected = dict(whole.named_parameters())
                for name, parameter in sharded.named_parameters():
                    chunks = expected[name].chunk(degrees[-1], dim=dim_of(expected[name]))
                    position = rank % degrees[-1]
                    part = chunks[position] if position < len(chunks) else expected[name].flatten()[:0]
                    assert local_tensor(parameter).numel() == part.numel()
                    assert torch.equal(local_tensor(parameter).view(part.shape), part), name


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.long
def test_a_rank_draws_its_shard_and_no_more() -> None:
    """The embedding of 405B: 2.1 billion values, of which a rank of 512 holds 4.1 million."""

    class Embedding(Llama3):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.args = Llama3.flavors["405B"]  # pyright: ignore[reportAttributeAccessIssue]
            self.tok_embeddings = nn.Embedding(self.args.vocab_size, self.args.dim)

        def init_buffers(self) -> None: ...

    with fake_mesh(7, (512,)) as mesh:
        with torch.device("meta"):
            model = Embedding()
        fully_shard(model, mesh=mesh)
        allocate(model, CPU, CPU)
        start = time.process_time()
        with Largest() as largest:
            draw_weights(model, device=CPU, seed=0)
        seconds = time.process_time() - start
        part = local_tensor(model.tok_embeddings.weight)
        assert part.shape == (251, 16384)
    assert largest.elements <= max(SLICE * torch.get_num_threads(), 128256)
    assert seconds < 5
