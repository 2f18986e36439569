"""Tensor parallelism: runs whose ranks split layers equal runs of one process."""

import math
from typing import Any

import pytest

from tests import own_models
from tests.helpers import TinyRun, run_in_turn, train_on_this_rank
from tests.layouts import BFLOAT16, ON_FURTHER_AXES, assert_same_curve, built, compare_rounded, degrees, whole
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.schema import Config

SIZES = "dim=36, n_layers=2, n_heads=6, n_kv_heads=2, hidden_dim=70, vocab_size=262"
LLAMA = [f"--model.args={{{SIZES}}}"]
"""35 of 70 rows on each of two ranks: FSDP shards them unevenly."""
QWEN = ["--model.name=qwen3", f"--model.args={{{SIZES}, head_dim=14, tied_head=false}}", "--optimizer.lr=1e-3"]
MASK = ["--data.document_mask"]
BIASED = [f"--model.file={own_models.__file__}", *QWEN, "--model.name=Biased"]
TECHNIQUES = {"biases-mask-AC-z": [*BIASED, *MASK, "--activation_checkpoint.mode=selective", "--training.z_loss=1e-3"]}
FURTHER = {
    "plain": LLAMA,
    "AC": [*LLAMA, "--activation_checkpoint.mode=full", "--training.local_batch_size=2"],
    "compile": [*LLAMA, *MASK, "--compile.enable"],
    "qwen3-compile-AC": [*QWEN, *MASK, "--compile.enable", "--activation_checkpoint.mode=full"],
    "Muon": [*LLAMA, "--optimizer.name=Muon", '--optimizer.args={ns_dtype="float32"}'],
    "uneven": [*QWEN, "--model.args.dim=35"],
    "frozen": [*LLAMA, '--freeze.parameters=["tok_embeddings.*", "layers.0.attention.*"]'],
}
SHARED = {name.replace(",", "").replace(" ", "-"): [*LLAMA, *words] for name, words in ON_FURTHER_AXES.items()}
ONE, TWO = (1, 1), (1, 1, 1, 2)


def finished(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Whole parameters after training, and this rank's parts of those that are not split over layers' ranks."""
    run = train_on_this_rank(config, rank, world_size)
    parameters = dict(run.model.named_parameters())
    replicas = {name: local_tensor(p).detach().numpy() for name, p in parameters.items() if "norm" in name}
    return {"whole": {name: whole(p).float().numpy() for name, p in parameters.items()}, "replicas": replicas}


def in_order(rank: int, world_size: int, call: tuple[Any, Config]) -> Any:
    function, config = call
    return function(rank, world_size, config)


def values(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Whole parameters as they are drawn or loaded, before any step."""
    run = built(rank, world_size, config)
    return {name: whole(p).float().numpy() for name, p in run.model.named_parameters()}


def equal(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not (ours[name] == theirs[name]).all()]


def compared(tiny: TinyRun, techniques: dict[str, list[str]], layouts: list[tuple[int, ...]], steps: int = 20) -> None:
    """Train on each layout and on one process, and compare losses, gradient norms and validation losses.

    Replicas have the same bits on ranks that split layers, and one process loads the bits that they have saved.
    """
    common = [f"--training.steps={steps}", "--validation.enable", f"--validation.freq={steps}"]
    common += [f"--validation.path={tiny.text}"]
    results = {}
    for layout in [*layouts, ONE]:
        world_size = math.prod(layout)
        names = [f"{name}-{'-'.join(map(str, layout))}" for name in techniques]
        configs = [
            tiny.config(*common, *options, *degrees(*layout), f"--job.name={name}", world_size=world_size)
            for name, options in zip(names, techniques.values(), strict=True)
        ]
        results |= dict(zip(names, run_in_turn(finished, world_size, configs), strict=True))
    loads = [
        (values, tiny.config(*common, *options, *degrees(*ONE), f"--job.name={name}-{'-'.join(map(str, layouts[0]))}"))
        for name, options in techniques.items()
    ]
    for technique, [loaded] in zip(techniques, run_in_turn(in_order, 1, loads), strict=True):  # pyright: ignore[reportArgumentType]
        assert equal(results[f"{technique}-{'-'.join(map(str, layouts[0]))}"][0]["whole"], loaded) == []
    for technique in techniques:
        first = f"{technique}-1-1"
        for layout in layouts:
            name = f"{technique}-{'-'.join(map(str, layout))}"
            assert_same_curve(tiny, name, first, steps=steps)
            for parameter, value in results[first][0]["whole"].items():
                assert results[name][0]["whole"][parameter] == pytest.approx(value, abs=1e-3), (name, parameter)
            for rank, neighbour in zip(results[name][::2], results[name][1::2], strict=True):
                for parameter, part in rank["replicas"].items():
                    assert (part == neighbour["replicas"][parameter]).all(), (name, parameter)


@pytest.mark.slow
def test_two_ranks_that_split_layers_train_as_one(tiny: TinyRun) -> None:
    compared(tiny, TECHNIQUES, [TWO], steps=6)


@pytest.mark.nightly
def test_a_model_of_ones_own(tiny: TinyRun) -> None:
    own = [f"--model.file={own_models.__file__}", "--model.name=Own", *LLAMA]
    compared(tiny, {"own": own, "own-compile": [*own, "--compile.enable"]}, [TWO])


@pytest.mark.nightly
@pytest.mark.parametrize("techniques", [TECHNIQUES | FURTHER, SHARED], ids=["further", "shared"])
def test_four_ranks(tiny: TinyRun, techniques: dict[str, list[str]]) -> None:
    compared(tiny, techniques, [(1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2)])


@pytest.mark.nightly
def test_low_precision_is_that_of_fsdp(tiny: TinyRun) -> None:
    """Losses are as near to those of as many ranks that read other sequences as rounding allows."""
    rounded = {name: [*LLAMA, *words] for name, words in BFLOAT16.items()}
    compare_rounded(tiny, rounded, [(TWO, (1, 2)), ((1, 2, 1, 2), (1, 4))])
