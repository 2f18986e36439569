"""Benchmarks have valid configs: most run too rarely to be tried in a test."""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from titanlite.config.keys import toml_text
from titanlite.config.load import load
from titanlite.tools import cli

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
Import = Callable[[str], Any]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Import a benchmark as its script would be, and forget all of them afterwards."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield import_module
    for name in {*sys.modules} - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
            sys.modules.pop(name)


@pytest.mark.long
def test_the_config_of_the_soak_is_accepted(benchmark: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITANLITE_SOAK_HOOKS", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # the soak's own loss writes files
    soak = benchmark("soak")
    soak.write_text(tmp_path / "text")
    options = Namespace(steps=2000, interval=10, timeout=10)
    soak.write_config(benchmark("soak_runs").Soak(tmp_path, options, [], None))
    assert cli.run(["check", "--here", str(tmp_path / "soak.toml")]) == 0


def configs(benchmark: Import) -> Iterator[tuple[str, list[str], int]]:
    """Yield (config, overrides, processes) of what benchmarks train or plan."""
    for words in benchmark("bench_checkpoint").SIZES.values():
        yield "debug", words, 2
    distill = benchmark("bench_distill")
    yield "debug", [distill.TEACHER], 1
    offload = benchmark("bench_offload")
    for words in offload.VARIANTS.values():
        yield "debug", [f"--{word}" for word in (*words, *offload.SIZES, *offload.NOT_MEASURED)], 1
    memory = benchmark("bench_optimizer_memory")
    for words in memory.VARIANTS.values():
        yield "debug", [*memory.SIZES, *words], 1
    same = benchmark("bench_step").SAME
    yield "debug", same, 2
    rounding = benchmark("bench_rounding")
    for words, _ in rounding.VARIANTS.values():
        yield "debug", [f"--{word}" for word in (*rounding.OPTIONS, *words)], 1
    transfer = benchmark("transfer")
    for rule in transfer.RULES:
        options = transfer.options_of(rule, "Muon", 256, 4)
        yield "debug", [f"--{key}={toml_text(value)}" for key, value in options.items()], 1
    _, _, *words = benchmark("exit_storm").OPTIONS
    yield "debug", words, 4
    ladder = benchmark("memory_ladder")
    for words in ladder.RUNGS.values():
        yield "debug", [*ladder.SMALL, *words], ladder.PROCESSES
    accuracy = benchmark("plan_accuracy")
    for _, processes, words in accuracy.CPU_CASES:
        yield "debug", words, processes
    for words in accuracy.OPTIONS.values():
        yield "llama3_8b", [*words, "--data.tokenizer=bytes"], 8


@pytest.mark.long
def test_the_configs_of_benchmarks_are_accepted(benchmark: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = [*configs(benchmark)]
    for name, words, processes in found:
        assert load(ROOT / "train_configs" / f"{name}.toml", words, world_size=processes), words
    assert len(found) > 60
