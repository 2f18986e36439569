"""Pipeline parallelism: every schedule and combination trains as one process does, and checkpoints load anywhere."""

from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.test_families import GEMMA, GPT_OSS, QWEN_NEXT
from tests.helpers import TinyRun, built, one_process, run_in_turn, train_on_this_rank
from tests.layouts import FLOAT8, LORA, degrees, trace_blocks, whole
from tests.unit.test_average import checkpoint, stored
from titanlite.schema import Config, Parallelism
from titanlite.techniques.pipeline import SPLIT_BACKWARD
from titanlite.techniques.pipeline.stages import blocks_of_stages
from titanlite.tools.report.value_dump import TOKENS, Dump, read_dump, record
from titanlite.tools.report.where import compare_dumps
from titanlite.train import finish, train

SIZES = "dim=32, n_layers=4, n_heads=4, n_kv_heads=2"
DENSE = [f"--model.args={{{SIZES}, hidden_dim=64, vocab_size=260}}"]
EXPERTS = [f"--model={{name='qwen3_moe', flavor='debug', args={{{SIZES}, vocab_size=260}}}}"]
COMMON = ["--training.local_batch_size=1", "--training.steps=3", "--validation.enable", "--validation.freq=3"]
SCHEDULE = "--parallelism.pipeline_parallel_schedule={}"
SCHEDULES = [
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
]  # fmt: skip
TWO = degrees(1, 1, pipeline=2)
LAYOUTS: dict[str, tuple[list[str], list[str]]] = {
    "p4": (degrees(1, 1, pipeline=4), DENSE),
    "p2-s2": (degrees(1, 2, pipeline=2), DENSE),
    "p2-s2-zero-bubble": ([*degrees(1, 2, pipeline=2), SCHEDULE.format("ZBVZeroBubble")], DENSE),
    "p2-s2-resharded": ([*degrees(1, 2, pipeline=2), "--parallelism.fsdp_reshard_after_forward=always"], DENSE),
    "p2-r2": (degrees(2, 1, pipeline=2), DENSE),
    "p2-c2": (degrees(1, 1, context=2, pipeline=2), DENSE),
    "p2-t2": (degrees(1, 1, tensor=2, pipeline=2), DENSE),
    "p2-t2-interleaved": ([*degrees(1, 1, tensor=2, pipeline=2), SCHEDULE.format("Interleaved1F1B")], DENSE),
    "p2-e2": (degrees(1, 2, expert=2, pipeline=2), EXPERTS),
    "p2-e2-zero-bubble": (  # recomputes some micro-batches twice
        [
            *degrees(1, 2, expert=2, pipeline=2),
            SCHEDULE.format("DualPipeV"),
            "--activation_checkpoint.mode=full",
        ],
        EXPERTS,
    ),
}
TECHNIQUES: dict[str, list[str]] = {
    "mask": [*DENSE, "--data.document_mask"],
    "bfloat16": [*DENSE, "--training.mixed_precision_param=bfloat16"],
    "recomputed": [*DENSE, "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"],
    "muon": [*DENSE, "--optimizer.name=Muon"],
    "average": [*DENSE, "--average.decay=0.75"],
    "lora": [*DENSE, *LORA],
    "freeze": [*DENSE, "--freeze.parameters=['tok_embeddings.*', 'layers.0.*']"],
    "frozen stage": [
        *DENSE,
        "--freeze.parameters=['tok_embeddings.*', 'layers.0.*']",
        SCHEDULE.format("Interleaved1F1B"),
    ],
    "offload": [*DENSE, "--training.enable_cpu_offload"],
    "float8": [*DENSE, *FLOAT8["float8 gathered"]],
    "z-loss": [*DENSE, "--training.z_loss=1e-3"],
    "lengths": [*DENSE, "--training.seq_len_ramp=[{until_tokens=512, seq_len=16}]"],
    "batches": [*DENSE, "--training.batch_ramp=[{until_tokens=256, global_batch_size=4}]"],
    "tasks": [*DENSE, "--validation.tasks=['number_choice']"],
    "experts": EXPERTS,
    "gemma3": [*GEMMA, "--model.args.tied_head=false"],
    "gpt-oss": GPT_OSS,
    "qwen3-next": [*QWEN_NEXT, "--data.document_mask"],
}


def train_here(rank: int, world_size: int, config: Config) -> None:
    train_on_this_rank(config, rank, world_size)


def train_compiled(rank: int, world_size: int, config: Config) -> None:
    with patch("titanlite.parallelize.compile_blocks", trace_blocks):
        train_here(rank, world_size, config)


def configured(tiny: TinyRun, name: str, *words: str, world_size: int = 1) -> Config:
    validation = f"--validation.path={tiny.text}", "--validation.sequences=5"
    return tiny.config(*COMMON, *validation, *words, f"--job.name={name}", world_size=world_size)


def on_one(tiny: TinyRun, name: str, *words: str) -> None:
    with one_process():
        train_here(0, 1, configured(tiny, name, *words))


def assert_equal(tiny: TinyRun, name: str, reference: str) -> None:
    ours, its = tiny.records(name), tiny.records(reference)
    assert len(ours) == len(its) > 0
    for key in ("loss", "grad_norm", "samples", *(it for it in ("busiest_expert",) if it in its[0])):
        assert [it[key] for it in ours] == pytest.approx([it[key] for it in its], rel=1e-6), (name, key)
    validations = [tiny.records(it, file="validation.jsonl") for it in (name, reference)]
    assert validations[0][-1]["loss"] == pytest.approx(validations[1][-1]["loss"], rel=1e-6), name
    assert validations[0][-1].get("tasks") == validations[1][-1].get("tasks")


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
    "parts",
    [
        [["layers.0"], ["layers.2", "layers.1"]], [["layers.0", "layers.1", "layers.2"], ["head"]],
        [["layers.0"], ["layers.1"]], [["layers.0"], ["layers.1"], ["layers.2"]],
    ],
)  # fmt: skip
def test_names_of_stages_are_those_of_all_blocks_in_order(parts: list[list[str]]) -> None:
    words = Parallelism(pipeline_parallel_degree=2, module_fqns_per_model_part=parts)
    with pytest.raises(ValueError, match=r"module_fqns_per_model_part|3 stages"):
        blocks_of_stages(3, words)


def test_every_schedule_trains_as_one_process(tiny: TinyRun) -> None:
    on_one(tiny, "one", *DENSE)
    words = [*DENSE, *TWO]
    run_in_turn(train_here, 2, [configured(tiny, it, *words, SCHEDULE.format(it), world_size=2) for it in SCHEDULES])
    for name in SCHEDULES:
        assert_equal(tiny, name, "one")


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_twenty_steps_of_every_schedule(tiny: TinyRun, schedule: str) -> None:
    """With twice as many blocks as the other tests, so that four ranks have several stages. A higher rate would amplify
    rounding."""
    deeper = "--model.args.n_layers=8", "--training.steps=20", "--optimizer.lr=1e-3", "--data.document_mask"
    deeper = *deeper, "--activation_checkpoint.mode=full"
    for name, model in (("dense", DENSE), ("experts", EXPERTS)):
        on_one(tiny, name, *model, *deeper)
    layouts = {name: LAYOUTS[name] for name in ("p4", "p2-s2", "p2-c2", "p2-t2", "p2-e2")}
    words = [*deeper, SCHEDULE.format(schedule)]
    configs = [configured(tiny, name, *m, *of, *words, world_size=4) for name, (of, m) in layouts.items()]
    run_in_turn(train_here, 4, configs)
    compiled = [] if schedule in SPLIT_BACKWARD else ["--compile.enable"]
    run_in_turn(train_compiled, 2, [configured(tiny, "p2", *DENSE, *TWO, *words, *compiled, world_size=2)])
    for name, (_, model) in [*layouts.items(), ("p2", (TWO, DENSE))]:
        assert_equal(tiny, name, "experts" if model is EXPERTS else "dense")


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(["p4", "p2-s2-zero-bubble", "p2-t2-interleaved", "p2-e2-zero-bubble"], marks=pytest.mark.slow),
        pytest.param([*LAYOUTS], marks=pytest.mark.nightly),
    ],
    ids=["some", "all"],
)
def test_stages_combine_with_every_other_axis(tiny: TinyRun, chosen: list[str]) -> None:
    """And the names, the values and the states of a checkpoint are those of one process."""
    layouts = {name: LAYOUTS[name] for name in chosen}
    saves = ["--checkpoint.interval=3", "--debug.hash_freq=3"]
    for name, model in (("dense", DENSE), ("experts", EXPERTS)):
        on_one(tiny, name, *model, *saves)
    configs = [configured(tiny, name, *m, *words, *saves, world_size=4) for name, (words, m) in layouts.items()]
    run_in_turn(train_here, 4, configs)
    for name, (_, model) in layouts.items():
        reference = "experts" if model is EXPERTS else "dense"
        assert_equal(tiny, name, reference)
        ours, its = (dict(stored(checkpoint(tiny, it, 3))) for it in (name, reference))
        assert ours.keys() == its.keys()
        [hashed], [expected] = (tiny.records(it, file="hashes.jsonl") for it in (name, reference))
        assert hashed["tensors"].keys() == expected["tensors"].keys()
        for key, value in its.items():
            assert (ours[key].double() - value.double()).abs().max() <= 2e-3 * value.abs().max() + 1e-9, (name, key)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(["mask", "muon", "average", "frozen stage", "float8", "experts"], marks=pytest.mark.slow),
        pytest.param([*TECHNIQUES], marks=pytest.mark.nightly),
    ],
    ids=["some", "all"],
)
def test_stages_combine_with_techniques(tiny: TinyRun, chosen: list[str]) -> None:
    techniques = {name: TECHNIQUES[name] for name in chosen}
    for name, words in techniques.items():
        on_one(tiny, f"{name}-one", *(it for it in words if "pipeline" not in it))
    configs = [configured(tiny, name, *words, *TWO, world_size=2) for name, words in techniques.items()]
    run_in_turn(train_here, 2, configs)
    for name in techniques:
        assert_equal(tiny, name, f"{name}-one")


@pytest.mark.slow
def test_compiled_blocks_train_as_others(tiny: TinyRun) -> None:
    on_one(tiny, "one", *DENSE)
    words = [*DENSE, *TWO, "--compile.enable"]
    run_in_turn(train_compiled, 2, [configured(tiny, "compiled", *words, world_size=2)])
    assert_equal(tiny, "compiled", "one")


def values_of(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Return the values that a run begins with, and train."""
    run = built(rank, world_size, config)
    found = {name: whole(it) for name, it in run.state().items()}
    finish(run, train(run))
    return found


@pytest.mark.slow
def test_a_checkpoint_continues_on_other_degrees(tiny: TinyRun) -> None:
    """From stages to one process, shards and split layers, and back: the same bits, and the same losses."""
    on_one(tiny, "whole", *DENSE, "--training.steps=4")
    places = {
        "p4": degrees(1, 1, pipeline=4), "p2-s2": degrees(1, 2, pipeline=2),
        "s4": degrees(1, 4), "t2": degrees(1, 2, tensor=2),
    }  # fmt: skip
    chain = ["p4", "p2-s2", "t2", "p4", "s4", "p4"]
    pairs = [*pairwise(chain)]

    def config(pair: tuple[str, str], place: str, steps: int, world_size: int = 4) -> Config:
        words = [*DENSE, *places.get(place, []), "--checkpoint.interval=2", f"--training.steps={steps}"]
        return configured(tiny, "-".join(pair), *words, world_size=world_size)

    last = "p4", "one"
    run_in_turn(train_here, 4, [config(pair, pair[0], 2) for pair in [*pairs, last]])
    second = [config(pair, pair[1], 4) for pair in pairs]
    begun = run_in_turn(values_of, 4, second)
    with one_process():
        begun.append([values_of(0, 1, config(last, "one", 4, 1))])
    for (a, b), of_ranks in zip([*pairs, last], begun, strict=True):
        saved = dict(stored(checkpoint(tiny, f"{a}-{b}", 2)))
        loaded = {name: it for of_rank in of_ranks for name, it in of_rank.items()}
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
    from titanlite.techniques.pipeline.passes import PipelinePasses

    right = PipelinePasses.forward

    def wrong(self: PipelinePasses, stage: Any, hidden: Any) -> Any:
        if self.begun[stage.number] == 1:
            self.batches = [self.batches[0], self.batches[0], *self.batches[2:]]
        return right(self, stage, hidden)

    with patch.object(PipelinePasses, "forward", wrong):
        dump_here(rank, world_size, config)


def without_scale(rank: int, world_size: int, config: Config) -> None:
    from titanlite.step import Gradients

    with patch.object(Gradients, "scale", lambda self, valid_tokens, **_: 1 / (2 * valid_tokens)):
        dump_here(rank, world_size, config)


def dump_here(rank: int, world_size: int, config: Config) -> None:
    """Write the values of the first step, as a side of `parity --where` does."""
    record(built(rank, world_size, config), folder=Path(config.job.dump_folder, str(config.job.name), "values"), step=1)


@pytest.mark.slow
def test_planted_mistakes_are_named(tiny: TinyRun) -> None:
    """All values of stages are those of one process but where there is a mistake, which its first tensor names."""

    def values_of(name: str) -> Dump:
        return read_dump(tiny.folder / "outputs" / name / "values")

    with one_process():
        dump_here(0, 1, configured(tiny, "one", *DENSE))
    mistakes = {
        dump_here: None,
        exchanged: "forward input layers.0",
        used_twice: TOKENS,
        without_scale: "gradient output head.norm",
    }
    for mistake, first in mistakes.items():
        run_in_turn(mistake, 2, [configured(tiny, mistake.__name__, *DENSE, *TWO, world_size=2)])
        compared = compare_dumps(values_of(mistake.__name__), values_of("one"))
        assert len([it for it in compared.differences if it.direction == "gradient"]) > 30
        assert (compared.first and compared.first.key) == first, mistake
    run_in_turn(dump_here, 4, [configured(tiny, "four", *DENSE, *LAYOUTS["p2-s2-zero-bubble"][0], world_size=4)])
    assert compare_dumps(values_of("four"), values_of("one")).first is None
