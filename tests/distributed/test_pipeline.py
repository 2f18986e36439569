"""Pipeline parallelism: stages, checkpoints that load anywhere, and mistakes. Training as one: tests/matrix.py."""

from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.faults import FAULTS
from tests.support.helpers import TinyRun, built, mentions, one_process, run_in_turn, train_on_this_rank
from tests.support.layouts import degrees, whole
from tests.support.models import SMALL
from tests.support.models import built as built_model
from tests.unit.techniques.test_average import checkpoint, stored
from titanlite.runtime.errors import UserError
from titanlite.schema import Config, Parallelism
from titanlite.state import flat
from titanlite.techniques.pipeline.stages import blocks_of_stages, check_stages
from titanlite.tools.report.compare import TOKENS, Dump, compare_dumps, read_dump, record
from titanlite.train import finish, train

SIZES = "dim=32, n_layers=4, n_heads=4, n_kv_heads=2"
DENSE = [f"--model.args={{{SIZES}, hidden_dim=64, vocab_size=260}}"]
COMMON = ["--training.local_batch_size=1", "--training.steps=3", "--validation.enable", "--validation.freq=3"]
TWO = degrees(1, 1, pipeline=2)
FOUR = [*degrees(1, 2, pipeline=2), "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]


def train_here(rank: int, world_size: int, config: Config) -> None:
    train_on_this_rank(config, rank, world_size)


def configured(tiny: TinyRun, name: str, *words: str, world_size: int = 1) -> Config:
    validation = f"--validation.path={tiny.text}", "--validation.sequences=5"
    return tiny.config(*COMMON, *validation, *words, f"--job.name={name}", world_size=world_size)


def on_one(tiny: TinyRun, name: str, *words: str) -> None:
    with one_process():
        train_here(0, 1, configured(tiny, name, *words))


@pytest.mark.parametrize(
    ("blocks", "words", "sizes"),
    [
        (32, {"pipeline_parallel_degree": 4}, [8, 9, 8, 7]),
        (4, {"pipeline_parallel_degree": 4}, [1, 1, 1, 1]),
        (6, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}, [1, 2, 2, 1]),
        (
            6, {"pipeline_parallel_degree": 2, "pipeline_parallel_first_stage_less_layers": 0,
                "pipeline_parallel_last_stage_less_layers": 2}, [4, 2],
        ),
        (
            14, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "LoopedBFS",
                 "pipeline_parallel_layers_per_stage": 4}, [3, 4, 4, 3],
        ),
        (
            3, {"pipeline_parallel_degree": 2, "module_fqns_per_model_part":
                [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "head.norm", "head.output"]]}, [1, 2],
        ),
    ],
)  # fmt: skip
def test_blocks_are_cut_evenly(blocks: int, words: dict[str, Any], sizes: list[int]) -> None:
    """Embedding and head count as one block each."""
    stages = blocks_of_stages(blocks, Parallelism(**words))
    assert [*map(len, stages)] == sizes
    assert [block for stage in stages for block in stage] == [*range(blocks)]


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([["layers.0"], ["layers.2", "layers.1"]], "module_fqns_per_model_part"),
        ([["layers.0", "layers.1", "layers.2"], ["head"]], "module_fqns_per_model_part"),
        ([["layers.0"], ["layers.1"]], "module_fqns_per_model_part"),
        ([["layers.0"], ["layers.1"], ["layers.2"]], "^3 stages"),
    ],
)  # fmt: skip
def test_names_of_stages_are_those_of_all_blocks_in_order(parts: list[list[str]], named: str) -> None:
    words = Parallelism(pipeline_parallel_degree=2, module_fqns_per_model_part=parts)
    with pytest.raises(ValueError, match=named):
        blocks_of_stages(3, words)


def test_names_of_modules_that_are_not_there_are_refused() -> None:
    model = built_model(SMALL)
    for names, unknown in ((["hed"], "hed"), (["head"], None), (["norm", "output"], None), (["head.norm"], None)):
        parts = [
            ["tok_embeddings", "layers.0"],
            [*(f"layers.{block}" for block in range(1, len(model.layers))), *names],
        ]
        words = Parallelism(pipeline_parallel_degree=2, module_fqns_per_model_part=parts)
        if unknown is None:
            check_stages(model, words)
            continue
        with pytest.raises(UserError) as error:
            check_stages(model, words)
        assert mentions(str(error.value), "module_fqns_per_model_part", unknown, "head")


def values_of(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Return the values that a run begins with, and train."""
    run = built(rank, world_size, config)
    found = {name: whole(tensor) for name, tensor in flat(run.checkpoints.state.tensors()).items()}
    finish(run, train(run))
    return found


PLACES = {
    "p2": degrees(1, 1, pipeline=2), "t2": degrees(1, 1, tensor=2),
    "p4": degrees(1, 1, pipeline=4), "p2-s2": degrees(1, 2, pipeline=2),
    "s4": degrees(1, 4), "t2-s2": degrees(1, 2, tensor=2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("size", "chain"),
    [
        pytest.param(2, ["p2", "t2", "p2"], marks=pytest.mark.slow),
        pytest.param(4, ["p4", "p2-s2", "t2-s2", "p4", "s4", "p4"], marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_continues_on_other_degrees(tiny: TinyRun, size: int, chain: list[str]) -> None:
    """From stages to one process, shards and split layers, and back: the same bits, and the same losses. The last stage
    has the block that predicts the token after the next."""
    model = [*DENSE, "--training.multi_token_weight=0.3"]
    on_one(tiny, "whole", *model, "--training.steps=4")
    pairs = [*pairwise(chain)]

    def config(pair: tuple[str, str], place: str, steps: int, world_size: int = size) -> Config:
        words = [*model, *PLACES.get(place, []), "--checkpoint.interval=2", f"--training.steps={steps}"]
        return configured(tiny, "-".join(pair), *words, world_size=world_size)

    last = chain[0], "one"
    run_in_turn(train_here, size, [config(pair, pair[0], 2) for pair in [*pairs, last]])
    second = [config(pair, pair[1], 4) for pair in pairs]
    begun = run_in_turn(values_of, size, second)
    with one_process():
        begun.append([values_of(0, 1, config(last, "one", 4, 1))])
    for (a, b), of_ranks in zip([*pairs, last], begun, strict=True):
        saved = dict(stored(checkpoint(tiny, f"{a}-{b}", 2)))
        loaded = {name: tensor for of_rank in of_ranks for name, tensor in of_rank.items()}
        for name, value in loaded.items():
            if name in saved:
                assert (value == saved[name]).all(), (a, b, name)
        assert {name for name in saved if name.startswith("model.")} <= loaded.keys()
        assert tiny.losses(f"{a}-{b}") == pytest.approx(tiny.losses("whole"), rel=1e-6), (a, b)


def exchanged(rank: int, world_size: int, config: Config) -> None:
    from titanlite.techniques.pipeline import stages

    def backwards(*arguments: Any) -> list[range]:
        return found[::-1] if len(found := right(*arguments)) else found

    right = stages.blocks_of_stages
    with patch.object(stages, "blocks_of_stages", backwards):
        dump_here(rank, world_size, config)


def used_twice(rank: int, world_size: int, config: Config) -> None:
    with FAULTS["a stage reads a micro-batch twice"].planted():
        dump_here(rank, world_size, config)


def without_scale(rank: int, world_size: int, config: Config) -> None:
    from titanlite.step import Step

    with patch.object(Step, "loss_factor", lambda self, valid_tokens, **_: 1 / (2 * valid_tokens)):
        dump_here(rank, world_size, config)


def dump_here(rank: int, world_size: int, config: Config) -> None:
    """Write the values of the first step, as a side of `parity --where` does."""
    record(built(rank, world_size, config), folder=Path(config.job.dump_folder, str(config.job.name), "values"), step=1)


MISTAKES: dict[str, tuple[Any, str | None]] = {
    "none": (dump_here, None),
    "exchanged": (exchanged, "forward input layers.0"),
    "used-twice": (used_twice, TOKENS),
    "without-scale": (without_scale, "gradient output head.norm"),
}


def dump_with(rank: int, world_size: int, config: Config) -> None:
    MISTAKES[str(config.job.name)][0](rank, world_size, config)


@pytest.mark.nightly
def test_stages_of_shards_have_the_values_of_one_process(tiny: TinyRun) -> None:
    with one_process():
        dump_here(0, 1, configured(tiny, "one", *DENSE))
    run_in_turn(dump_here, 4, [configured(tiny, "four", *DENSE, *FOUR, world_size=4)])
    four, one = (read_dump(tiny.folder / "outputs" / name / "values") for name in ("four", "one"))
    assert compare_dumps(four, one).first is None


@pytest.mark.slow
def test_planted_mistakes_are_named(tiny: TinyRun) -> None:
    """All values of stages are those of one process but where there is a mistake, which its first tensor names."""

    def values_of(name: str) -> Dump:
        return read_dump(tiny.folder / "outputs" / name / "values")

    with one_process():
        dump_here(0, 1, configured(tiny, "one", *DENSE))
    run_in_turn(dump_with, 2, [configured(tiny, name, *DENSE, *TWO, world_size=2) for name in MISTAKES])
    for name, (_, first) in MISTAKES.items():
        compared = compare_dumps(values_of(name), values_of("one"))
        assert len([difference for difference in compared.differences if difference.direction == "gradient"]) > 30
        assert (compared.first and compared.first.key) == first, name
