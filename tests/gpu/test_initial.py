"""Initial values on a CUDA device have the bits of those on the CPU. Skipped without one, as all of tests/gpu."""

import pytest
import torch

from titanlite.models.base import build_on_meta
from titanlite.models.initial import InitialValues, Normal, TruncatedNormal, Uniform
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.ops.hash_random import random_bits, salt
from titanlite.parallelize.materialize import SLICE, allocate, draw_weights, set_dtype

pytestmark = pytest.mark.gpu

COUNT = 4_000_000
ARGS = Llama3Args(dim=256, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=704, vocab_size=SLICE // 256 + 100)
"""A CPU draws the embedding in two slices."""


def drawn(values: InitialValues, device: str) -> torch.Tensor:
    """Return many values of a parameter, from an index on that needs more than 32 bits."""
    indices = torch.arange(2**33, 2**33 + COUNT, device=device)
    return values.values(random_bits(salt("7/weight"), indices), indices).cpu()


def model_on(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = build_on_meta(Llama3, ARGS)
    set_dtype(model, dtype)
    where = torch.device(device)
    allocate(model, where, where)
    draw_weights(model, device=where, seed=7)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "values",
    [
        Normal(std=0.02, mean=0.1),
        TruncatedNormal(std=0.02, low=-0.06, high=0.06),
        TruncatedNormal(std=1.0, low=1.0, high=4.0),
        Uniform(low=-0.3, high=0.7),
    ],
    ids=["normal", "truncated", "tail", "uniform"],
)
def test_values_have_the_bits_of_the_cpu(values: InitialValues) -> None:
    assert torch.equal(drawn(values, "cuda").view(torch.int64), drawn(values, "cpu").view(torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    there, here = model_on("cuda", dtype), model_on("cpu", dtype)
    assert there.keys() == here.keys()
    for name, weight in here.items():
        assert weight.dtype == dtype
        assert torch.equal(there[name], weight), name
