"""Context parallelism: runs whose ranks split sequences equal runs of one process."""

import json
import shutil
from typing import Any

import pytest

from tests.helpers import TinyRun, run_in_turn, run_ranks, train_on_this_rank
from tests.layouts import CountOperators, built, degrees, one_step, optimizer_moments, trained, whole
from titanlite.config.schema import Config

MASK = ["--data.document_mask"]
MOE = [
    "--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, "
    "hidden_dim=24, vocab_size=259}}",
]
TECHNIQUES = {
    "mask, AC op": [*MASK, "--activation_checkpoint.mode=selective"],
    "MoE, mask": [*MASK, *MOE],
}
FURTHER = {
    "no mask, AC": ["--activation_checkpoint.mode=full", "--training.local_batch_size=2"],
    "in backward": [*MASK, "--optimizer.in_backward", "--training.max_norm=0"],
    "compile": [*MASK, "--compile.enable"],
    "compile, AC": [*MASK, "--compile.enable", "--activation_checkpoint.mode=full"],
    "offload": [*MASK, "--training.enable_cpu_offload"],
    "Muon": [
        *MASK,
        '--optimizer.groups=[{match = ["layers.*.w?.weight"], name = "Muon", args.ns_dtype = "float32"}, '
        '{match = ["tok*", "head*", "*norm*"]}]',
    ],
    "qwen3": [*MASK, "--model.name=qwen3", "--model.args.head_dim=14"],
}


@pytest.fixture
def short_documents(tiny: TinyRun) -> TinyRun:
    """Text of many short documents, of odd lengths, so that sequences hold several of them."""
    for name in ("a", "b", "c"):
        (tiny.text / f"{name}.txt").unlink()
    words = ["one", "two", "three", "four", "five"]
    lines = [" ".join(words[(i * k) % 5] for k in range(i % 9 + 1)) for i in range(600)]
    (tiny.text / "short.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    return tiny


def finished(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    run = train_on_this_rank(config, rank, world_size)
    return {name: whole(parameter).float().numpy() for name, parameter in run.model.named_parameters()}


def compared(
    tiny: TinyRun, techniques: dict[str, list[str]], layouts: list[tuple[int, int, int]], steps: int = 20
) -> None:
    """Train on one process and on each layout, and compare losses, gradient norms and validation losses."""
    common = [
        f"--training.steps={steps}",
        "--optimizer.lr=3e-3",
        "--validation.enable",
        f"--validation.freq={steps}",
        f"--validation.path={tiny.text}",
    ]

    def options(name: str, *layout: int) -> list[str]:
        job = f"--job.name={name} {'-'.join(map(str, layout))}".replace(",", "").replace(" ", "-")
        return [*common, *techniques[name], *degrees(*layout), job]

    run_in_turn(finished, 1, [tiny.config(*options(name, 1, 1, 1)) for name in techniques], timeout=300)
    for world_size in sorted({a * b * c for a, b, c in layouts}):
        of_size = [it for it in layouts if it[0] * it[1] * it[2] == world_size]
        configs = [tiny.config(*options(name, *it), world_size=world_size) for it in of_size for name in techniques]
        run_in_turn(finished, world_size, configs, timeout=300)
    for name in techniques:
        start = f"{name}-".replace(",", "").replace(" ", "-")
        reference = tiny.records(f"{start}1-1-1")
        assert len(reference) == steps
        for layout in layouts:
            found = tiny.records(f"{start}{'-'.join(map(str, layout))}")
            for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
                expected = [record[key] for record in reference]
                assert [record[key] for record in found] == pytest.approx(expected, rel=tolerance), (name, layout, key)
            assert [it["samples"] for it in found] == [it["samples"] for it in reference]
            ends = [
                json.loads((tiny.folder / "outputs" / f"{start}{it}" / "validation.jsonl").read_text())["loss"]
                for it in ("1-1-1", "-".join(map(str, layout)))
            ]
            assert ends[1] == pytest.approx(ends[0], rel=1e-5)


def test_two_ranks_that_split_sequences_train_as_one(short_documents: TinyRun) -> None:
    compared(short_documents, TECHNIQUES, [(1, 1, 2)], steps=6)


@pytest.mark.nightly
def test_further_techniques(short_documents: TinyRun) -> None:
    compared(short_documents, TECHNIQUES | FURTHER, [(1, 1, 2), (1, 2, 2)])


@pytest.mark.nightly
def test_four_ranks(short_documents: TinyRun) -> None:
    compared(short_documents, TECHNIQUES, [(1, 1, 4), (1, 2, 2), (2, 1, 2)])


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
    assert results == [[(3, 3)] * 2, [(6, 3)] * 2]


@pytest.mark.slow
def test_saved_by_ranks_that_split_sequences_loads_anywhere(short_documents: TinyRun) -> None:
    tiny = short_documents
    outputs = tiny.folder / "outputs"
    saved = tiny.config(*MASK, *degrees(1, 2, 2), "--training.steps=3", "--job.name=saved", world_size=4)
    run_ranks(trained, 4, saved)
    expected = run_ranks(optimizer_moments, 4, tiny.config(*MASK, *degrees(1, 2, 2), "--job.name=saved", world_size=4))
    whole_run = tiny.config(*MASK, *degrees(1, 1), "--training.steps=6", "--job.name=whole")
    run_ranks(trained, 1, whole_run)
    layouts = [(1, 1, 1), (1, 4, 1), (1, 1, 4)]
    for layout in layouts:
        world_size, name = layout[0] * layout[1] * layout[2], f"on-{'-'.join(map(str, layout))}"
        shutil.copytree(outputs / "saved", outputs / name)
        config = tiny.config(*MASK, *degrees(*layout), f"--job.name={name}", world_size=world_size)
        [moments] = run_in_turn(optimizer_moments, world_size, [config])
        for key, value in expected[0].items():
            assert (moments[0][key] == value).all(), (layout, key)
        run_ranks(trained, world_size, config)
        assert tiny.losses(name) == pytest.approx(tiny.losses("whole"), rel=1e-5), layout
        assert [it["samples"] for it in tiny.records(name)] == [it["samples"] for it in tiny.records("whole")]


@pytest.mark.nightly
def test_a_teacher_and_the_health_of_layers(short_documents: TinyRun) -> None:
    tiny = short_documents
    run_ranks(trained, 1, tiny.config(*MASK, "--training.steps=4", "--job.name=teacher"))
    teacher = f"--teacher.path={tiny.folder}/outputs/teacher"
    options = [*MASK, teacher, "--distill.ratio=0.5", "--metrics.layers.freq=3", "--model.args.n_layers=2"]
    run_ranks(trained, 1, tiny.config(*options, "--job.name=one"))
    run_ranks(trained, 4, tiny.config(*options, *degrees(1, 2, 2), "--job.name=four", world_size=4))
    assert tiny.losses("four") == pytest.approx(tiny.losses("one"), rel=1e-5)
    one, four = (
        [json.loads(line) for line in (tiny.folder / "outputs" / name / "layers.jsonl").read_text().splitlines()]
        for name in ("one", "four")
    )
    assert len(one) == len(four) == 2
    for mine, theirs in zip(four, one, strict=True):
        for key in ("parameters", "gradients", "activations"):
            for layer, kinds in theirs["layers"].items():
                expected = pytest.approx(kinds.get(key, {}), rel=1e-3, abs=1e-6)
                assert mine["layers"][layer].get(key, {}) == expected, (key, layer)


@pytest.mark.nightly
def test_the_health_of_layers_that_ranks_split(tiny: TinyRun) -> None:
    """Count outputs once that both ranks have."""
    sizes = [
        "--model.args.dim=48",
        "--model.args.n_heads=2",
        "--model.args.n_kv_heads=2",
        "--model.args.vocab_size=260",
    ]
    options = [*sizes, "--metrics.layers.freq=3", "--training.steps=3"]
    run_ranks(trained, 1, tiny.config(*options, "--job.name=one"))
    two = tiny.config(
        *options, *degrees(1, 1), "--parallelism.tensor_parallel_degree=2", "--job.name=two", world_size=2
    )
    run_ranks(trained, 2, two)
    one, split = (
        json.loads((tiny.folder / "outputs" / name / "layers.jsonl").read_text())["layers"] for name in ("one", "two")
    )
    assert len(one) == 5
    for layer, kinds in one.items():
        for kind, values in kinds.items():
            assert split[layer][kind] == pytest.approx(values, rel=1e-3, abs=1e-6), (layer, kind)
