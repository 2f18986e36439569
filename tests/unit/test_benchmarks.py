"""Benchmarks have valid configs: most run too rarely to be tried in a test. The queue for a GPU, without one."""

import gzip
import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from titanlite.config.keys import toml_text
from titanlite.config.load import load
from titanlite.models.base import build_on_meta
from titanlite.models.registry import resolve_model
from titanlite.tools import cli
from titanlite.tools.plan.layouts import check_techniques

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


@pytest.mark.long
def test_the_cases_of_a_gpu_fit_their_models(benchmark: Import) -> None:
    for case in benchmark("gpu").cases():
        if not case.plain:
            check_techniques(load(ROOT / "train_configs" / f"{case.config}.toml", case.words, world_size=1), 1)


@pytest.mark.long
def test_the_plain_loop_of_124m_has_the_weights_of_the_model(benchmark: Import, tmp_path: Path) -> None:
    import torch

    gpu, plain = benchmark("gpu"), benchmark("plain_llama")
    known = {case.title: case for case in gpu.cases()}
    names = "plain loop, compiled", "plain loop, compiled, CUDA graphs"
    one, graphs = (
        json.loads(gpu.plain_words(known[f"124M, 12 x 1024: {name}"], str(tmp_path), 1)[-1]) for name in names
    )
    assert (one.pop("mode"), graphs.pop("mode")) == (None, "reduce-overhead")
    assert one == graphs
    assert one["compile"]
    with torch.device("meta"):
        loop = plain.PlainLlama(**one["model"], seq_len=one["seq_len"])
    config = load(gpu.ROOT / "train_configs/llama3_8b.toml", known["124M, 12 x 1024: compiled"].words, world_size=1)
    spec = resolve_model(config.model.name, config.model.flavor, config.model.args)
    model = build_on_meta(spec.model_cls, spec.args)
    sizes = [sum(parameter.numel() for parameter in found.parameters()) for found in (loop, model)]
    assert sizes == [123_587_328] * 2


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


def test_the_queue_begins_nothing_that_does_not_fit(queue: Queue) -> None:
    """Units that are compared begin together, others alone."""
    assert queue.call("--seconds", "15") == {*"abe"}
    assert queue.call("--seconds", "5") == set()
    assert "- c: not run" in (queue.folder / "nvidia-h200" / "queue.md").read_text().splitlines()
    assert queue.call("--seconds", "25") == {*"cd"}


def test_old_and_new_take_turns_with_the_options_that_they_have(
    benchmark: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, old = benchmark("gpu_queue"), tmp_path / "old"
    schema = json.loads((ROOT / "train_configs/schema.json").read_text())
    del schema["$defs"]["Data"]["properties"]["document_mask"], schema["properties"]["lora"]
    (old / "train_configs").mkdir(parents=True)
    (old / "train_configs/schema.json").write_text(json.dumps(schema))
    ran: list[tuple[Path, list[str], bool]] = []

    def measure(case: Any, *, tree: Path, words: list[str], profiles: bool, **_: Any) -> dict[str, Any]:
        ran.append((tree, words, profiles))
        return {"words": words}

    monkeypatch.setattr(module, "measure", measure)
    title, off = "1B, 4 x 4096: compiled, document mask", ["--lora.rank=16"]
    units = module.turns(2, [title], old, changes={"LoRA": off}).units
    sides = ["old 1", "new 1", "new without LoRA 1", "new without LoRA 2", "new 2", "old 2"]
    assert [unit.name for unit in units] == [f"{title} ({side})" for side in sides]
    found = [unit.run(60) for unit in units]
    assert [one["left_out"] for one in found] == [["--data.document_mask=true"], [], [], [], [], found[0]["left_out"]]
    assert [tree for tree, *_ in ran] == [old, *[ROOT] * 4, old]
    of_new = ran[1][1]
    assert ran[0][1] == [word for word in of_new if word != "--data.document_mask=true"] != of_new
    assert ran[2][1] == [*of_new, *off]
    assert [profiles for *_, profiles in ran] == [True] * 3 + [False] * 3
    assert ["words" in one for one in found] == [False, True, *[False] * 4], "each case is planned once"
    assert [unit.name[-7:] for unit in module.turns(2, [title]).units] == ["(new 1)"]
    words = ["--model.args.any=1", "--optimizer.args.fused=true", "--training.nothing", "--lora.rank=1"]
    assert module.known_words(words, old) == (words[:2], words[2:])


def test_the_page_of_the_queue_compares_the_sides(benchmark: Import) -> None:
    module = benchmark("gpu_queue")

    def run(speeds: list[float], gpu: str = "a") -> dict[str, Any]:
        return {"item": 2, "tokens_per_second": speeds, "memory_gib": 2.0, "gpu": gpu}

    found = {
        "1B: plain loop, compiled (new 1)": run([50.0]),
        "1B: compiled (old 1)": run([99.0, 100.0], "b"),
        "1B: compiled (new 1)": run([109.0]),
        "1B: compiled (new 2)": run([110.0, 111.0]),
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in module.speeds(found, [*found])[2:]]
    assert [(row[0], *row[5:]) for row in rows] == [
        ("1B: plain loop, compiled (new)", "", "", "0.455"),
        ("1B: compiled (old)", "", "1.990*", "0.905*"),
        ("1B: compiled (new)", "1.106*", "2.200", ""),
    ]
    assert rows[2][1:3] == ["110", "109 to 111"]


def test_kernels_of_a_profile_are_added_up(benchmark: Import, tmp_path: Path) -> None:
    events = [{"name": "ProfilerStep#40", "dur": 9000.0}, {"name": "aten::mm", "cat": "cpu_op", "dur": 5000.0}]
    events += [
        {"name": name, "cat": "kernel", "dur": size} for name, size in (("a", 500.0), ("b", 3000.0), ("a", 700.0))
    ]
    (tmp_path / "trace").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    kernels = [(3.0, 1, "b"), (1.2, 2, "a")]
    assert benchmark("gpu").kernels_of(tmp_path / "trace") == {"step_ms": 9.0, "kernels_ms": 4.2, "kernels": kernels}


@pytest.mark.long
def test_no_process_of_a_case_outlives_its_time(benchmark: Import, tmp_path: Path) -> None:
    command = ["sh", "-c", f"(sleep 1; touch {tmp_path}/late) & touch {tmp_path}/early; wait"]
    with pytest.raises(subprocess.TimeoutExpired):
        benchmark("gpu").execute(command, 0.5)
    time.sleep(1)
    assert [path.name for path in tmp_path.iterdir()] == ["early"]


def test_what_pytest_prints_of_a_test_is_read(benchmark: Import) -> None:
    skipped = "s   [100%]\nSKIPPED [1] tests/gpu/test_gpu.py:31: an older GPU: 8.0\n1 skipped in 0.01s\n"
    assertion = "F  [100%]\n>    assert [1] == [2]\nE    assert [1] == [2]\nE      Use -v to get more diff\n"
    of_run = "E    AssertionError: Traceback (most recent call last):\nE      ValueError: odd\nE    assert 1 == 0\n"
    printed = {".  [100%]\n1 passed in 2.10s": 0, skipped: 0, assertion: 1, of_run: 1, "no tests ran in 0.00s": 5}
    found = [
        benchmark("gpu_queue").outcome(subprocess.CompletedProcess([], *each, ""))
        for each in ((code, text) for text, code in printed.items())
    ]
    assert found == [
        {"passed": True},
        {"skipped": "an older GPU: 8.0"},
        {"failed": "assert [1] == [2]"},
        {"failed": "ValueError: odd"},
        {"failed": "exit code 5: no tests ran in 0.00s"},
    ]


@pytest.mark.long
def test_pytorchs_delta_rule_is_near_that_in_float64(benchmark: Import) -> None:
    import torch

    module = benchmark("bench_delta_rule")
    module.KEY_HEADS, module.VALUE_HEADS, module.DIM = 1, 2, 16
    found = [*module.compare(torch.device("cpu"), 128)]
    assert [(form["form"], form["documents"]) for form in found] == [("PyTorch, float32", 1), ("PyTorch, float32", 4)]
    assert all(1e-8 < error < 1e-5 for form in found for error in form["apart"].values())
