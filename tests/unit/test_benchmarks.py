"""Benchmarks that need a GPU have at least valid configs."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import TinyRun
from titanlite.config.load import load

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    yield gpu
    for name in ("gpu", "record"):
        sys.modules.pop(name, None)


def test_every_case_of_the_gpu_benchmark_is_a_config(gpu: object) -> None:
    cases = gpu.cases()  # pyright: ignore[reportAttributeAccessIssue]
    titles = [case.title for case in cases]
    assert len(set(titles)) == len(titles) >= 30
    for case in cases:
        config = load(ROOT / "train_configs" / "llama3_8b.toml", case.words, world_size=1)
        assert config.model.flavor == case.flavor
        assert config.training.batch_split(1) == (case.batch, 1)


@pytest.mark.long
def test_a_contender_prints_nothing_but_its_answers(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Standard output carries JSON. A warning, as of this warm-up longer than the run, must not go there."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import bench_step  # pyright: ignore[reportMissingImports]

    try:
        turn = bench_step.titanlite_turns(tiny.config("--lr_scheduler.warmup_steps=9"), 2)
        turn()
        turn()
        assert len(tiny.losses()) == 4
        assert capfd.readouterr().out == ""
    finally:
        dist.destroy_process_group()
        for name in ("bench_step", "plain_llama", "record"):
            sys.modules.pop(name, None)


@pytest.mark.nightly
def test_the_gpu_benchmark_trains(gpu: Any, tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model on the CPU, with float8 emulated: what is measured is a step as `train` makes it."""
    pytest.importorskip("torchao")
    for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 7)
    scaled: list[int] = []
    monkeypatch.setattr(gpu, "weight_scaler", lambda *_: lambda: scaled.append(len(scaled)))
    case = gpu.Case("debug", 32, 2, "tiny", [])
    more = [f"--data.path={tiny.text}", "--data.tokenizer=bytes", "--model.args.dim=48", "--model.args.vocab_size=259"]
    float8 = ["enable", "emulate", "skip_small=false"]
    more += [f"--quantize.linear.float8.{option}" for option in float8]
    found = gpu.measure([*case.words, *more], 3)
    assert len(found["seconds"]) == 3
    assert (found["tokens"], found["peak"]) == (64, 7)
    assert scaled == [*range(1 + gpu.WARM_UP + 3)]
