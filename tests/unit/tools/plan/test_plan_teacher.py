"""The teacher in a plan: its shards, its forward pass and its collectives, and a search that counts them."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import tomlkit

from tests.support.plans import SMALL, layout_of, read
from titanlite.models.base import unique_parameters
from titanlite.models.frozen import FrozenModel
from titanlite.schema import Config
from titanlite.tools import cli
from titanlite.tools.plan.estimate import Layout, Plan, plan, planned_targets, trace, with_options
from titanlite.tools.plan.hardware import find_hardware
from titanlite.tools.plan.search import Layouts

RANKS = 4
TEACHER: dict[str, Any] = {
    "dim": 96, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 200, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("teacher") / "teacher.toml"
    model = {"name": "llama3", "flavor": "debug", "args": TEACHER}
    file.write_text(tomlkit.dumps({"model": model, "data": {"tokenizer": "bytes"}}))
    return ["--teacher.path=nowhere", f"--teacher.config={file}", "--distill.ratio=0.5"]


def config_of(options: list[str], *more: str) -> Config:
    return read("--parallelism.data_parallel_shard_degree=4", *options, *more, world_size=RANKS)


@cache
def _planned(*options: str) -> Plan:
    return plan(config_of([*options]), layout_of(RANKS))


def planned(options: list[str], *more: str) -> Plan:
    return _planned(*options, *more)


def frozen_of(config: Config) -> FrozenModel:
    targets = planned_targets(config)
    assert targets
    frozen = targets.frozen
    assert frozen is not None
    return frozen


def sizes_of(config: Config) -> tuple[int, int]:
    """Return the parameters of the teacher: all, and those of its head."""
    parameters = dict(unique_parameters(frozen_of(config).build(config.training.seq_len)))
    head = sum(parameter.numel() for name, parameter in parameters.items() if name.startswith("head"))
    return sum(parameter.numel() for parameter in parameters.values()), head


def gathered(found: Plan) -> int:
    return found.traffic["all_gather", "shard"]


@pytest.mark.long
def test_shards_arithmetic_and_collectives_of_the_teacher(options: list[str]) -> None:
    config = config_of(options)
    without, found = planned([]), planned(options)
    parameters, head = sizes_of(config)
    assert found.most("teacher") == pytest.approx(2 * parameters / RANKS, rel=0.01), "bfloat16, padded"
    assert without.most("teacher") == 0
    assert {name: sizes["teacher"] for name, sizes in found.phases.items()} == dict.fromkeys(
        found.phases, found.most("teacher")
    )
    each = 2 * (parameters + head)
    assert gathered(found) - gathered(without) == pytest.approx(found.accumulation * each, rel=0.01)
    for category in ("parameters", "gradients", "optimizer"):
        assert found.most(category) == without.most(category)
    flops = frozen_of(config).flops_per_token(config.training.seq_len) * found.tokens
    assert found.model_flops - without.model_flops == pytest.approx(flops)
    assert found.flops - without.flops == pytest.approx(flops, rel=0.1)
    assert found.time.total > without.time.total


@pytest.mark.nightly
def test_host_memory(options: list[str]) -> None:
    found, offloaded = planned(options), planned(options, "--teacher.enable_cpu_offload=true")
    assert offloaded.host == found.most("teacher")
    assert offloaded.most("teacher") == 0
    assert found.peak - offloaded.peak == found.most("teacher")
    assert offloaded.time.total > found.time.total


@pytest.mark.nightly
def test_a_search_expects_what_the_plan_finds(options: list[str]) -> None:
    config = read(*options, world_size=RANKS)
    layout = Layout(RANKS, replace(find_hardware("H100"), link_bandwidth=1e8), RANKS)  # so slow that collectives count
    searching = Layouts(config, layout, share=4)
    work = "full", "", 1
    candidates = [*searching.expect(work, trace(searching.traced_config(work), layout))]
    for candidate in [candidate for candidate in candidates if candidate.expected.degrees.shard > 1]:
        found = plan(with_options(config, candidate.options), layout)
        assert candidate.expected.tokens_per_second == pytest.approx(found.tokens_per_second, rel=0.03), candidate.title
        assert candidate.expected.reserved == pytest.approx(found.reserved, rel=0.15), candidate.title


@pytest.mark.long
def test_the_command(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "debug", *SMALL, *options, "--world-size", "4", "--gpu", "H100", "--json"]
    assert cli.run([*words, "--teacher.enable_cpu_offload=true"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["by_category"]["teacher"] == 0
    assert memory["host"] == planned(options).most("teacher") > 0
    unknown = [word for word in words if "teacher.config" not in word]
    assert cli.run(unknown) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "nowhere" in line
