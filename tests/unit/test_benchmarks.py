"""Benchmarks have valid configs: most run too rarely to be tried in a test. The queue for a GPU, without one."""

import json
import subprocess
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
    gpu = benchmark("gpu")
    for case in gpu.cases():
        if not case.plain:
            _, _, _, _, config, *words = gpu.train_words(case, "outputs", case.words, 40)
            yield config, [*words, *gpu.profile_words(40)], 1


@pytest.mark.long
def test_the_configs_of_benchmarks_are_accepted(benchmark: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = [*configs(benchmark)]
    for name, words, processes in found:
        assert load(ROOT / "train_configs" / f"{name}.toml", words, world_size=processes), words
    assert len(found) > 90


# The queue

CARD = {"device": "NVIDIA H200", "hardware": "H200", "gpu": "a", "torch": "2", "matmul_tflops": 700.0}
CARD["copy_gigabytes_per_second"] = 4000.0


class Queue:
    """The queue with units of its own, which note that they run."""

    def __init__(self, benchmark: Import, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module, self.folder, self.ran = benchmark("gpu_queue"), folder, list[str]()
        self.results: dict[str, Any] = {"a": {"passed": True}, "b": {"failed": "broken"}, "c": {"skipped": "no fla"}}
        monkeypatch.setattr(self.module, "card_here", lambda: dict(CARD))
        monkeypatch.setattr(self.module, "collected", list)
        monkeypatch.setattr(self.module, "groups", self.groups)
        monkeypatch.setattr(self.module.signal, "signal", lambda *_: None)
        self.shape = [(["a", "b"], 2), (["c", "d"], 1), (["e"], 1)]

    def groups(self, *_: Any) -> Iterator[Any]:
        for names, side_by_side in self.shape:
            yield self.module.Group([self.module.Unit(2, name, 10, self.unit(name)) for name in names], side_by_side)

    def unit(self, name: str) -> Callable[[float], dict[str, Any]]:
        def run(seconds: float) -> dict[str, Any]:
            self.ran.append(name)
            found = self.results.get(name, {"passed": True})
            if isinstance(found, BaseException):
                raise found
            return dict(found)

        return run

    def call(self, *words: str) -> set[str]:
        """Return the units that ran in this call."""
        self.ran.clear()
        self.module.main(["--out", str(self.folder), "--only", "2", *words])
        return {*self.ran}

    def kept(self) -> dict[str, Any]:
        return json.loads((self.folder / "nvidia-h200" / "queue.json").read_text())["cases"]


@pytest.fixture
def queue(benchmark: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(benchmark, tmp_path, monkeypatch)


def test_the_queue_runs_each_unit_once(queue: Queue) -> None:
    queue.results["e"] = ValueError("odd")
    assert queue.call() == {*"abcde"}
    kept = queue.kept()
    assert (kept["b"]["failed"], kept["c"]["skipped"], kept["e"]["failed"]) == ("broken", "no fla", "ValueError: odd")
    assert (kept["a"]["passed"], kept["a"]["gpu"], kept["a"]["item"]) == (True, "a", 2)
    assert queue.call() == set()
    assert queue.kept() == kept
    queue.results = {}
    assert queue.call("--again") == {*"bce"}
    assert all(one["passed"] for one in queue.kept().values())
    page = (queue.folder / "nvidia-h200" / "queue.md").read_text()
    assert "5 tests passed" in page


def test_the_queue_continues_where_it_was_killed(queue: Queue) -> None:
    """What was cut off runs once more, and then no longer holds up the others."""
    for cut_off, ran in ((1, {*"abcd"}), (2, {"d"})):
        queue.results["d"] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            queue.call()
        assert {*queue.ran} == ran
        assert queue.kept()["d"] == {"item": 2, "cut_off": cut_off}
    assert queue.call() == {"e"}
    queue.results["d"] = subprocess.TimeoutExpired("d", 1)
    assert queue.call("--again") == {*"bcd"}
    assert queue.kept()["d"] == {"item": 2, "cut_off": 1}
