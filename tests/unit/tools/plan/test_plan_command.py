"""`titanlite plan` as users meet it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.helpers import mentions
from tests.support.operators import Operators
from titanlite.config.load import load
from titanlite.ops.cpu import CpuKernels
from titanlite.tools.cli import run
from titanlite.tools.plan.estimate import OUTSIDE, Layout, with_options
from titanlite.tools.plan.hardware import find_hardware
from titanlite.tools.plan.output import toml_of
from titanlite.tools.plan.search import search

TOML = """\
# what stays
[model.args]
dim = 64
n_layers = 1
n_heads = 4
n_kv_heads = 2
hidden_dim = 160
vocab_size = 512
[training]
steps = 100
seq_len = 256  # tokens
global_batch_size = 12
[activation_checkpoint]
mode = "selective"
[lr_scheduler]
warmup_steps = 10
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(TOML)
    return path


def plan(toml: Path, *arguments: str) -> int:
    return run(["plan", "--config", str(toml), *arguments])


@pytest.mark.long
def test_table_and_json_agree(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--world-size", "12", "--gpu", "h100", "--parallelism.data_parallel_replicate_degree=2")
    assert plan(toml, *arguments) == 0
    table = capsys.readouterr().out
    assert plan(toml, *arguments, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    head = table.splitlines()[0]
    assert mentions(head, "small", f"{record['parameters']:,} parameters", "12 x H100", "replicate 2 x shard 6")
    memory = record["memory"]
    assert (
        sum(memory["by_category"].values())
        == memory["peak"]
        == max(sum(parts.values()) for parts in memory["by_phase"].values())
    )
    assert memory["by_phase"][memory["at"]] == memory["by_category"]
    assert memory["usable"] == record["hardware"]["memory"] - OUTSIDE
    assert memory["peak"] == memory["allocated"] < memory["reserved"] < memory["usable"]
    gib = {name: f"{memory[name] / 2**30:.1f}" for name in ("reserved", "usable", "allocated")}
    assert f"fits: reserved {gib['reserved']} GiB of {gib['usable']} " in table
    assert f"allocated {gib['allocated']} (" in table
    assert record["fits"] is True
    assert f"step     {record['time']['total']:.3f} s" in table
    assert f"MFU {record['mfu']:.1%}" in table
    assert record["mfu"] == pytest.approx(
        record["model_flops_of_all_ranks"] / (record["time"]["total"] * 12 * record["hardware"]["bf16_flops"])
    )
    assert record["tokens"] == 100 * 12 * 256
    traffic = {(sent["collective"], sent["axis"]): sent["bytes"] for sent in record["traffic"]}
    assert traffic["reduce_scatter", "shard"] == 6 * traffic["all_reduce", "replicate"] > 0
    assert record["gpu_hours"] == pytest.approx(12 * record["steps"] * record["time"]["total"] / 3600)
    assert mentions(table, "note", "4 of 8 GPUs")


@pytest.mark.long
def test_the_cpu_of_this_machine(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(toml, "--world-size", "2", "--gpu", "cpu", "--json", "--training.mixed_precision_param=float32") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["hardware"]["measured"] is True
    assert record["time"]["total"] == pytest.approx(
        record["time"]["compute"] + record["time"]["communication"] + record["time"]["update"], rel=0.2
    )
    assert record["memory"]["by_category"]["parameters"] * 2 == pytest.approx(4 * record["parameters"], rel=0.01)


def test_the_rates_of_a_cpu_are_those_of_linear_layers() -> None:
    """PyTorch's own bfloat16 matmul is up to 31 times slower where the hardware has none."""
    with Operators() as mode:
        find_hardware("cpu")
    found = {args[0].dtype for func, args in mode.calls if func.overloadpacket.__name__ in ("mm", "addmm")}
    assert found == {torch.float32, CpuKernels().matmul_dtype(torch.bfloat16)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world-size", "8", "--gpu", "H1000"], ["H100?"]),
        (["--world-size", "eight", "--gpu", "H100"], ["--world-size", "'eight'"]),
        (["--world-size", "8", "--gpu", "/no/such.toml"], ["/no/such.toml"]),
        (["--world-size", "8", "--gpu", "H100", "--suggest", "--search"], ["--suggest", "--search"]),
        (["--world-size", "8", "--gpu", "H100", "--parallelism.data_parallel_shard_degree=3"], ["8", "3"]),
        (["--world-size", "5", "--gpu", "H100"], ["12", "5"]),
        (["--world-size", "5", "--gpu", "H100", "--search"], ["--training.global_batch_size"]),
    ],
)
def test_mistakes(toml: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    assert plan(toml, *arguments) == 2
    error = capsys.readouterr().err
    assert mentions(error, *words)
    assert "Traceback" not in error


def test_a_plan_of_nothing_lists_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan"]) == 2
    error = capsys.readouterr().err
    assert mentions(error, "titanlite plan", "my.toml", "--world-size N", "--gpu NAME", "titanlite plan --help")


@pytest.mark.long
def test_code_that_reads_values_is_named(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = toml.parent / "asks_for_values.py"
    own.write_text(
        "from titanlite.loss import token_loss\n"
        "def loss(hidden, weight, *, labels_BL):\n"
        "    if hidden.sum().item() > 0:\n"
        "        print('positive')\n"
        "    return token_loss(hidden, weight, labels_BL=labels_BL)\n"
    )
    assert plan(toml, "--world-size", "1", "--gpu", "H100", f"--training.loss={own}:loss") == 2
    error = capsys.readouterr().err
    assert mentions(error, "asks_for_values.py:3", "aten._local_scalar_dense")
    assert plan(toml, "--world-size", "1", "--gpu", "H100") == 0, "nothing of the failure stays"


@pytest.mark.nightly
def test_search_on_small_devices(toml: Path) -> None:
    """Memory decides here. The expected memory of a candidate is that of its plan; the best one is written."""
    hardware = replace(find_hardware("H100"), memory=OUTSIDE + 90 * 2**20)
    config = load(toml, ["--training.global_batch_size=32", "--model.args.n_layers=2"])
    found = search(config, Layout(4, hardware, 2), count=3)
    assert found.tried == 3 * 4 * (1 + 2 * 2)  # recomputation x local batch x (shard degree 1, and 2 and 4 x reshard)
    assert len(found.best) == 3
    for candidate, planned in found.best:
        assert planned.reserved <= hardware.memory - OUTSIDE
        assert candidate.expected.reserved == pytest.approx(planned.reserved, rel=0.1)
        # Kernels so small are nothing but launches. Without shards, FSDP casts and copies each parameter by itself, so
        # a block has 40 kernels in forward where a trace of shards has 24.
        most = 0.05 if candidate.expected.degrees.sharded > 1 else 0.25
        assert candidate.expected.tokens_per_second == pytest.approx(planned.tokens_per_second, rel=most)
    speeds = [planned.tokens_per_second for _, planned in found.best]
    assert speeds == sorted(speeds, reverse=True)

    options = found.best[0][0].options
    pasted = toml.parent / "pasted.toml"
    pasted.write_text(f'base = "{toml}"\n{toml_of(options)}')
    written, wanted = load(pasted), with_options(config, options)
    assert written.parallelism == wanted.parallelism
    assert written.activation_checkpoint.mode == wanted.activation_checkpoint.mode
    assert written.training.local_batch_size == wanted.training.local_batch_size
