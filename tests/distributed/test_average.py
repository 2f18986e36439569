"""Averages of weights on several processes, with every technique that trains in its own way."""

import pytest

from tests.helpers import TinyRun, run_in_turn, train_on_this_rank
from tests.layouts import FLOAT8, LORA, degrees
from tests.unit.test_average import SAVED, checkpoint, own_ema, stored
from titanlite.schema import Config

SPARSE = ["--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, vocab_size=259}}"]
EVEN = ["--model.args={dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64, vocab_size=260}"]
TECHNIQUES = {
    "tensor": [*EVEN, *degrees(1, 1, tensor=2)],
    "experts": [*SPARSE, *degrees(1, 2, expert=2)],
    "context": degrees(1, 1, context=2),
    "in-backward": [*degrees(1, 2), "--optimizer.in_backward", "--training.max_norm=0"],
    "offload": [*degrees(2, 1), "--training.enable_cpu_offload"],
    "average-offload": [*degrees(1, 2), "--average.enable_cpu_offload"],
    "moments-on-disk": [*degrees(1, 2), "--offload.optimizer=disk"],
    "lora": [*LORA, *degrees(1, 2), "--lora.quantize_base=int8"],
    "float8": [*EVEN, *FLOAT8["float8 gathered"], *degrees(1, 2)],
    "bfloat16": [*degrees(1, 2), "--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"],
}


def train(rank: int, world_size: int, config: Config) -> None:
    train_on_this_rank(config, rank, world_size)


@pytest.mark.slow
def test_averages_with_each_technique_are_those_of_the_saved_weights(tiny: TinyRun) -> None:
    """And change no loss, though validation puts them in the place of the weights."""
    common = [*SAVED, "--training.steps=3", f"--validation.path={tiny.text}", "--validation.freq=1"]
    common += ["--validation.enable", "--validation.sequences=8"]
    runs = {
        f"{name}-{of}": [*options, *average]
        for name, options in TECHNIQUES.items()
        for of, average in (("average", ["--average.decay=0.75"]), ("plain", []))
        if of == "average" or name != "average-offload"
    }
    configs = [tiny.config(*common, *of, f"--job.name={name}", world_size=2) for name, of in runs.items()]
    run_in_turn(train, 2, configs)
    for name in TECHNIQUES:
        if name != "average-offload":
            assert tiny.losses(f"{name}-average") == tiny.losses(f"{name}-plain"), name
        steps = [dict(stored(checkpoint(tiny, f"{name}-average", step))) for step in (1, 2, 3)]
        averages = {it.removeprefix("average.ema."): of for it, of in steps[-1].items() if ".ema." in it}
        assert averages
        assert all("lora_" in it for it in averages) == (name == "lora")
        for parameter, average in averages.items():
            expected = own_ema([step[f"model.{parameter}"] for step in steps], 0.75)
            assert (average.double() - expected).abs().max() <= 1e-6 * expected.abs().max() + 1e-12, (name, parameter)
