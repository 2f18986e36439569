"""parallelism.fsdp_min_unit_params: small blocks that are gathered together."""

from typing import Any

import pytest
import torch

from tests.support.helpers import THREE_BLOCKS, TinyRun, run_in_turn
from tests.support.layouts import CountOperators, degrees, trained
from tests.support.plans import model_of, read, traced
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.parallelize.fsdp import fsdp_units
from titanlite.schema import Config

MIN = 20_000
"""More than one block of tiny runs has, and less than two have. There are three."""
TOGETHER = f"--parallelism.fsdp_min_unit_params={MIN}"


@pytest.mark.parametrize(
    ("min_params", "expected"),
    [(0, "0 1 2 3 4"), (100, "0 1 2 3 4"), (101, "01 23 4"), (10**9, "01234")],
)
def test_neighbouring_blocks_are_one_unit(min_params: int, expected: str) -> None:
    with torch.device("meta"):
        model = Llama3(Llama3Args(dim=32, n_layers=5, n_heads=2, n_kv_heads=1, hidden_dim=40, vocab_size=64))
        model.layers = torch.nn.ModuleList(torch.nn.Linear(10, 10, bias=False) for _ in range(5))
    units = fsdp_units(model, min_params=min_params)
    places = {block: str(place) for place, block in enumerate(model.layers)}
    blocks = ["".join(places[block] for block in unit) for unit in units if unit[0] in places]
    assert " ".join(blocks) == expected
    assert len(units) == len(blocks) + 2, "embedding and head stay units"


class Gathers(CountOperators):
    """All-gathers of floating-point values. Since PyTorch 2.15, Python objects are gathered by the same operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_counted = "allgather_base" in str(func) and args[0].is_floating_point()
        before = self.count
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.count = before + is_counted
        return result


def counted(rank: int, world_size: int, config: Config) -> int:
    """Train; return the number of all-gathers."""
    with Gathers("allgather_base") as gathers:
        trained(rank, world_size, config)
    return gathers.count


ALL_GATHERS = {
    # options: those of 2 steps and one further gather each, apart and together
    "--training.local_batch_size=2": (2 + 2 * 2 * 8, 2 + 2 * 2 * 6),
    "--parallelism.fsdp_reshard_after_forward=never": (2 + 2 * 5, 2 + 2 * 4),
    "--model.args.tied_head=true": (2 + 2 * 7, 2 + 2 * 5),
}


def test_neighbouring_blocks_are_gathered_together(tiny: TinyRun) -> None:
    """A step of three blocks has 8 all-gathers: embedding, blocks, head, blocks again. With two units of blocks, 6.
    That no bit changes: tests/matrix.py."""
    common = [THREE_BLOCKS, "--training.steps=2", "--checkpoint.enable=false", *degrees(1, 2)]
    configs = [
        tiny.config(*common, *words, options, f"--job.name={number}-{len(words)}", world_size=2)
        for number, options in enumerate(ALL_GATHERS)
        for words in ([], [TOGETHER])
    ]
    counts = [ranks[0] for ranks in run_in_turn(counted, 2, configs)]
    assert dict(zip(ALL_GATHERS, zip(counts[::2], counts[1::2], strict=True), strict=True)) == ALL_GATHERS


def test_the_plan_gathers_units() -> None:
    """Of three blocks, two are gathered together: in forward, and again in backward."""
    block = sum(parameter.numel() for parameter in model_of(read()).build().layers[0].parameters())
    options = (
        "--model.args.n_layers=3",
        "--parallelism.fsdp_reshard_after_forward=always",
        f"--parallelism.fsdp_min_unit_params={block + 1}",
    )
    sent = [one for one in traced(*options, world_size=2).sent if one.collective == "all_gather"]
    gathers = {name: [one.bytes for one in sent if one.unit == f"layers.{name}"] for name in range(3)}
    assert gathers == {0: 2 * [2 * 2 * block], 1: [], 2: 2 * [2 * block]}
