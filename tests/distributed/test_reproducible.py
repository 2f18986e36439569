"""`debug.reproducible_layouts`: the same bits on every layout, also after a kill on another one."""

import json
import math
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.helpers import TinyRun, built, mentions, run_in_turn, run_ranks, train_on_this_rank
from tests.support.layouts import degrees
from tests.unit.techniques.test_average import KINDS, checkpoint, stored
from titanlite.batch import Batch
from titanlite.models.base import build_on_meta
from titanlite.models.llama3 import Llama3
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.schema import Config
from titanlite.step import Step
from titanlite.techniques.reproducible import TECHNIQUE, sums
from titanlite.techniques.reproducible.parts import check_parts
from titanlite.techniques.reproducible.step import exact_sums
from titanlite.tools import cli

ON = ["--debug.reproducible_layouts", "--training.local_batch_size=1", "--training.global_batch_size=8"]
SETTINGS = [*ON, "--training.steps=4", "--checkpoint.interval=1", "--debug.hash_freq=1", "--optimizer.lr=3e-3"]
PAIRS = "--training.local_batch_size=2"
FULL = ["--activation_checkpoint.mode=full"]
PARTS = ["--debug.reproducible_context_degree=4"]


SPARSE = ["--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, vocab_size=259}}"]
PLAIN = {"tree_sum": sums.tree_sum, "accumulate": Step.accumulate}


def halves(parts: Tensor) -> Tensor:
    """Add the second half of the parts to the first one: a tree, but another one."""
    while len(parts) > 1:
        parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
    return parts[0]


def accumulate_changed(change: Any) -> Any:
    """Compute other gradients: those of batches whose first one was changed in place."""

    def accumulate(step: Any, batches: Any, on_phase: Any) -> Any:
        change(batches[0])
        return PLAIN["accumulate"](step, batches, on_phase)

    return accumulate


def change_a_token(batch: Batch) -> None:
    batch["tokens"][0, 5] ^= 1


def begin_a_document(batch: Batch) -> None:
    batch["documents"][:, 16:] += 1


def exchange_chunks(batch: Batch) -> None:
    batch["tokens"].copy_(batch["tokens"].roll(batch["tokens"].shape[1] // 2, dims=1))


CONTROLS = {
    "other-order": {"tree_sum": halves},
    "other-sequence": {"accumulate": accumulate_changed(change_a_token)},
    "other-mask": {"accumulate": accumulate_changed(begin_a_document)},
    "other-chunk": {"accumulate": accumulate_changed(exchange_chunks)},
}
"""What one rank of several does differently, by the name of the run. All of them add in the other order."""
CONTROL_OPTIONS = {name: ["--training.steps=1"] for name in CONTROLS}
"""One step has another hash already."""


def train(rank: int, world_size: int, config: Config) -> None:
    name = str(config.job.name)
    other = CONTROLS.get(name, {}) if rank == 1 or name == "other-order" else {}
    sums.tree_sum, Step.accumulate = (PLAIN | other).values()
    train_on_this_rank(config, rank, world_size)


def hashes(tiny: TinyRun, name: str, steps: int = 4) -> list[str]:
    """The hash after each step."""
    records = tiny.records(name, file="hashes.jsonl")
    assert [record["step"] for record in records] == [*range(1, steps + 1)]
    return [record["hash"] for record in records]


def assert_other_hashes(tiny: TinyRun, first: str, controls: Collection[str] = CONTROLS.keys()) -> None:
    """Each control has another hash after its only step."""
    found = [hashes(tiny, control, steps=1)[0] for control in controls]
    assert len({first, *found}) == 1 + len(controls)


@pytest.mark.usefixtures("single_process_group")
def test_threads_do_not_depend_on_the_number_of_processes(tiny: TinyRun, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.set_num_threads(1))
    torch.set_num_threads(2)
    built(0, 1, tiny.config(*SETTINGS)).batches.close()
    assert torch.get_num_threads() == 1


def run_on(
    tiny: TinyRun, layouts: Mapping[str, tuple[int, ...]], *options: str, own: Mapping[str, list[str]] = CONTROL_OPTIONS
) -> None:
    """Args:
    own: further options of some runs, by name.
    """
    sizes = {name: math.prod(layout[:3]) for name, layout in layouts.items()}
    for world_size in sorted({*sizes.values()}):
        configs = [
            tiny.config(
                *SETTINGS, *options, *degrees(*layout), f"--job.name={name}", *own.get(name, []), world_size=world_size
            )
            for name, layout in layouts.items()
            if sizes[name] == world_size
        ]
        run_in_turn(train, world_size, configs)


def test_two_ranks_and_a_resume_on_them_have_the_bits_of_one(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    """The average of weights is part of the state: a moving one on shards, and that of a window on replicas. So is the
    outer optimizer, of a run that two ranks leave to one within a round."""
    ema, window = KINDS.values()
    outer = ["--outer.every=3"]
    own = {"one": ema, "moved": ema, "sharded": ema, "one-window": window, "replicas": window}
    own |= {"one-outer": outer, "left": outer}
    first = own | {"moved": [*ema, "--training.steps=2"], "left": [*outer, "--training.steps=2"]}
    ones = ("one", "one-window", "one-outer", "moved")
    run_on(tiny, dict.fromkeys(ones, (1, 1)) | {"left": (1, 2)}, own=first)
    run_on(tiny, {"left": (1, 1), "moved": (1, 2), "sharded": (1, 2), "replicas": (2, 1)}, own=own)
    for name, others in (("one", ("moved", "sharded")), ("one-window", ("replicas",)), ("one-outer", ("left",))):
        one = hashes(tiny, name)
        assert len({*one}) == 4
        values = [(record["loss"], record["grad_norm"]) for record in tiny.records(name)]
        for other in others:
            assert hashes(tiny, other) == one, other
            assert [(record["loss"], record["grad_norm"]) for record in tiny.records(other)] == values, other
        for run in (name, others[-1]):
            assert cli.run(["checkpoint", "hash", str(tiny.folder / "outputs" / run)]) == 0
            assert capfd.readouterr().out.strip() == one[-1]
        tensors = stored(checkpoint(tiny, name, 4))
        assert any(name.startswith(("average.", "outer.momentum.")) and tensor.any() for name, tensor in tensors)


@pytest.mark.slow
def test_every_layout_and_a_resume_on_another_have_one_hash(tiny: TinyRun) -> None:
    """Micro-batches of two sequences: four in a step. One token, mask or order that differs on one rank has another
    hash."""
    options = [PAIRS, "--data.document_mask"]
    layouts = {"one": (1, 1), "on-1-4": (1, 4), "on-2-2": (2, 2)}
    run_on(tiny, layouts | dict.fromkeys(CONTROLS, (1, 4)), *options)
    one = hashes(tiny, "one")
    assert hashes(tiny, "on-1-4") == hashes(tiny, "on-2-2") == one
    assert_other_hashes(tiny, one[0])
    for layout, killed_after in [((1, 1), 1), ((1, 2), 2)]:  # killed on four ranks, resumed on one, then on two
        for lost in range(killed_after + 1, 5):
            shutil.rmtree(tiny.folder / "outputs" / "on-1-4" / "checkpoints" / f"step-{lost:08}")
        run_on(tiny, {"on-1-4": layout}, *options)
        assert hashes(tiny, "on-1-4") == one
    starts = json.loads((tiny.folder / "outputs" / "on-1-4" / "run.json").read_text())["starts"]
    assert [(start["processes"], start["step"]) for start in starts] == [(4, 0), (1, 1), (2, 2)]


def test_two_ranks_that_share_sequences_have_the_bits_of_one(tiny: TinyRun) -> None:
    tiny.with_short_documents()
    options = ["--debug.reproducible_context_degree=2", "--data.document_mask", "--training.steps=2"]
    run_on(tiny, {"one": (1, 1, 1), "two": (1, 1, 2)}, *options)
    one, two = (hashes(tiny, name, steps=2) for name in ("one", "two"))
    assert one == two
    values = [[(record["loss"], record["grad_norm"]) for record in tiny.records(name)] for name in ("one", "two")]
    assert values[0] == values[1]


@pytest.mark.slow
def test_ranks_that_share_sequences_and_a_resume_on_fewer_have_one_hash(tiny: TinyRun) -> None:
    """The nightly matrix trains further layouts."""
    tiny.with_short_documents()
    options = [*PARTS, "--data.document_mask", *FULL, "--training.global_batch_size=2", "--training.steps=3"]
    layouts = {"one": (1, 1, 1), "moved": (1, 1, 4), "shards": (1, 2, 2)}
    controls = "other-order", "other-chunk"
    run_on(tiny, layouts | dict.fromkeys(controls, (1, 1, 4)), *options)
    one = hashes(tiny, "one", 3)
    assert [hashes(tiny, name, 3) == one for name in layouts] == [True] * len(layouts)
    assert_other_hashes(tiny, one[0], controls)
    for lost in (2, 3):
        shutil.rmtree(tiny.folder / "outputs" / "moved" / "checkpoints" / f"step-{lost:08}")
    run_on(tiny, {"moved": (1, 1, 2)}, *options)
    assert hashes(tiny, "moved", 3) == one


def exact(rank: int, world_size: int, values: list[float]) -> tuple[float, float]:
    group = dist.group.WORLD
    assert group is not None
    part = torch.tensor(values)[rank::world_size]
    bad = torch.tensor([torch.nan if rank == 1 else 1.0])
    found = exact_sums([part, bad], group)
    return float(found[0]), float(found[1])


def test_sums_over_ranks_do_not_depend_on_who_has_what() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(1e3).tolist()
    values = torch.tensor(values).tolist()  # float32
    [one] = run_ranks(exact, 1, values)
    two = run_ranks(exact, 2, values)
    assert two[0][0] == two[1][0] == one[0]
    assert one[0] == pytest.approx(float(sum(map(Fraction, values))), abs=1e3 * 2**-33 * 1000)
    assert one[1] == 1
    assert two[0][1] == two[1][1] == float("inf"), "an element of rank 1 is not finite"


def test_the_fix_of_what_cannot_be_divided_is_computed(tiny: TinyRun) -> None:
    """That each is refused with its key: tests/unit/config/test_refusals.py."""
    for options, world_size, fix in [
        (["--training.global_batch_size=6"], 1, "4 or 8"),
        (["--training.local_batch_size=3"], 1, "2 or 4"),
        (["--training.local_batch_size=4"], 4, "2 processes"),
        (["--training.global_batch_size=24"], 3, "2 or 4"),
        (["--parallelism.context_parallel_degree=2"], 2, "to 2"),
        ([*PARTS, "--parallelism.context_parallel_degree=4", PAIRS], 32, "16 processes"),
        ([*PARTS, "--training.seq_len=12"], 1, "to 16"),
    ]:
        with pytest.raises(ConfigError) as error:
            tiny.config(*ON, *options, world_size=world_size)
        assert any(mentions(str(problem), fix) for problem in error.value.problems), (options, str(error.value))


class WithScale(Llama3):
    """A parameter of its own beside those of layers."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.layers[0].register_parameter("scale", nn.Parameter(torch.ones(())))


def test_gradients_without_parts_are_refused(tiny: TinyRun) -> None:
    args = Llama3.flavors["debug"]
    check_parts(build_on_meta(Llama3, args))
    with pytest.raises(UserError, match=r"layers\.0\.scale"):
        check_parts(build_on_meta(WithScale, args))
    with pytest.raises(UserError, match=r"tok_embeddings\.weight and head\.output\.weight"):
        check_parts(build_on_meta(Llama3, replace(args, tied_head=True)))  # pyright: ignore[reportCallIssue]
    settings = [TECHNIQUE.resume_settings(tiny.config(*ON, *further)) for further in ([], PARTS)]
    assert settings == [{}, {PARTS[0][2:-2]: 4}], "a run resumes with the degree that it began with"


@pytest.mark.nightly
def test_parity_compares_bits_and_names_the_first_tensor_that_differs(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["parity", "--config", str(tiny.toml), "--steps=2", "--processes=2", "--only=FSDP 1 x 2", *ON]
    assert cli.run(arguments) == 0
    cells = [cell.strip() for cell in capfd.readouterr().out.splitlines()[-2].split("|")[1:-1]]
    assert [cells[0], *cells[4:]] == ["FSDP 1 x 2", "0.0e+00", "0.0e+00", "equal to 1 process", "yes"]
    broken = tmp_path / "broken.py"  # rank 1 computes something else
    broken.write_text(
        "import os\nfrom titanlite.models.llama3 import Llama3\n\n\nclass Broken(Llama3):\n"
        "    def __init__(self, args):\n        super().__init__(args)\n"
        "        factor = 1.001 if os.environ.get('RANK') == '1' else 1.0\n"
        "        self.tok_embeddings.register_forward_hook(lambda module, args, output: output * factor)\n"
    )
    assert cli.run([*arguments, f"--model.file={broken}", "--model.name=Broken"]) == 1
    assert re.search("step 1: .*differs: ", capfd.readouterr().out)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [(1, 2, 1, 2), (1, 2, 1, 1, 2), (1, 2, 1, 1, 1, 2)])
def test_the_hash_of_a_run_is_that_of_its_checkpoint_on_further_axes(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], layout: tuple[int, ...]
) -> None:
    """Parameters are split along several dims there, or are those of a stage."""
    dense = "--model.args={dim=48, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=42, vocab_size=260}"
    ranks = 2 if len(layout) == 5 else 4
    options = [*(SPARSE if ranks == 2 else [dense]), "--training.local_batch_size=1", "--training.steps=4"]
    options += ["--debug.hash_freq=1", "--checkpoint.interval=4"]
    run_in_turn(train, ranks, [tiny.config(*options, *degrees(*layout), world_size=ranks)])
    assert cli.run(["checkpoint", "hash", str(tiny.folder / "outputs" / "tiny")]) == 0
    assert capfd.readouterr().out.strip() == hashes(tiny, "tiny")[-1]
