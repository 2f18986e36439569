"""parallelism.fsdp_min_unit_params: small blocks that are gathered together."""

import pytest
import torch

from tests.helpers import THREE_BLOCKS, TinyRun, run_in_turn
from tests.layouts import LORA, ON_FURTHER_AXES, CountOperators, degrees, job, trained
from tests.plans import model_of, read, traced
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


def counted(rank: int, world_size: int, config: Config) -> int:
    """Train; return the number of all-gathers."""
    with CountOperators("allgather_base") as gathers:
        trained(rank, world_size, config)
    return gathers.count


TECHNIQUES: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "plain": ((1, 2), []),
    "accumulation": ((1, 2), ["--training.local_batch_size=2"]),
    "full": ((1, 2), ["--activation_checkpoint.mode=full"]),
    "op": ((1, 2), ["--activation_checkpoint.mode=selective"]),
    **{name: ((1, 2), ON_FURTHER_AXES[name]) for name in ("never", "prefetch", "in backward", "disk", "tied head")},
    "LoRA": ((1, 2), LORA),
    "HSDP": ((2, 1), []),
    "context": ((1, 1, 2), []),
    "tensor": (
        (1, 1, 1, 2),
        [f"--model.args.{it}" for it in ("dim=48", "n_heads=4", "n_kv_heads=2", "vocab_size=260")],
    ),
}
FEW = {"accumulation"}
FEW_STEPS = [THREE_BLOCKS, "--training.steps=2", "--checkpoint.enable=false"]


@pytest.mark.parametrize("chosen", [FEW, pytest.param(TECHNIQUES.keys() - FEW, marks=pytest.mark.nightly)])
def test_losses_have_the_same_bits(tiny: TinyRun, chosen: set[str]) -> None:
    """A step of three blocks has 8 all-gathers: embedding, blocks, head, blocks again. With two units of blocks, 6."""
    names = {name: (job(name, 0), job(name, 1)) for name in TECHNIQUES if name in chosen}
    configs = [
        tiny.config(*FEW_STEPS, *words, *options, *degrees(*layout), f"--job.name={run}", world_size=2)
        for name, (layout, options) in TECHNIQUES.items()
        if name in chosen
        for run, words in zip(names[name], ([], [TOGETHER]), strict=True)
    ]
    counts = [ranks[0] for ranks in run_in_turn(counted, 2, configs)]
    found = dict(zip(names, zip(counts[::2], counts[1::2], strict=True), strict=True))
    for name, (without, together) in names.items():
        values = [[(it["loss"], it["grad_norm"]) for it in tiny.records(run)] for run in (without, together)]
        assert values[1] == values[0], name
        assert len(values[0]) == 2
    others = {  # each step has one more
        "accumulation": (2 + 2 * 2 * 8, 2 + 2 * 2 * 6), "never": (2 + 2 * 5, 2 + 2 * 4),
        "tied head": (2 + 2 * 7, 2 + 2 * 5), "HSDP": (2, 2), "tensor": (2, 2),
    }  # fmt: skip
    assert found == {name: others.get(name, (2 + 2 * 8, 2 + 2 * 6)) for name in names}


@pytest.mark.nightly
def test_compiled_blocks_have_the_same_bits(tiny: TinyRun) -> None:
    options = [*FEW_STEPS, "--compile.enable", "--activation_checkpoint.mode=full", *degrees(1, 2)]
    runs = {"apart": [], "together": [TOGETHER]}
    configs = [tiny.config(*options, *words, f"--job.name={name}", world_size=2) for name, words in runs.items()]
    run_in_turn(trained, 2, configs)
    assert tiny.losses("together") == tiny.losses("apart")


def test_the_plan_gathers_units() -> None:
    """Of three blocks, two are gathered together: in forward, and again in backward."""
    block = sum(parameter.numel() for parameter in model_of(read()).build().layers[0].parameters())
    options = (
        "--model.args.n_layers=3",
        "--parallelism.fsdp_reshard_after_forward=always",
        f"--parallelism.fsdp_min_unit_params={block + 1}",
    )
    sent = [it for it in traced(*options, world_size=2).sent if it.collective == "all_gather"]
    gathers = {name: [it.bytes for it in sent if it.unit == f"layers.{name}"] for name in range(3)}
    assert gathers == {0: 2 * [2 * 2 * block], 1: [], 2: 2 * [2 * block]}
