"""The contract of techniques, and which of them a config asks for."""

import subprocess
import sys
from functools import reduce
from inspect import getmembers, isfunction
from types import SimpleNamespace
from typing import Any

import pytest

from titanlite.schema import Config
from titanlite.techniques import TECHNIQUES, asked_for, every_technique, parts_of, used
from titanlite.techniques.average import AverageOfWeights
from titanlite.techniques.technique import Technique, reads_of
from titanlite.tools.plan.estimate import with_options

CHECKS = ("conflicts", "layout_conflicts", "check_machine", "check_model", "choose_trained")


def names(techniques: list[Technique]) -> list[str]:
    return [type(technique).__module__.removeprefix("titanlite.techniques.") for technique in techniques]


def test_each_technique_keeps_the_contract() -> None:
    """Its hooks are those of the base class, and each check names options that exist: it is skipped if one is wrong."""
    hooks = {name for name, _ in getmembers(Technique, isfunction)}
    assert names(every_technique()) == [*TECHNIQUES]
    for technique in every_technique():
        own = {name for name in vars(type(technique)) if isfunction(vars(type(technique))[name])}
        assert own - hooks == set()
        assert not technique.is_used(Config())
        checks = {name: reads_of(getattr(technique, name)) for name in own & set(CHECKS)}
        assert all(checks.values()), f"{technique.option}: a check without `reads`"
        keys = {key for read in checks.values() for key in read} | {technique.option}
        for key in (*TECHNIQUES[names([technique])[0]], *keys):
            reduce(getattr, key.partition("=")[0].split("."), Config())


def test_a_plain_config_asks_for_no_technique() -> None:
    loaded = "sorted(name for name in sys.modules if '.techniques' in name)"
    code = f"import sys, titanlite; titanlite.load_config('debug'); print({loaded})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "['titanlite.techniques', 'titanlite.techniques.technique']"


@pytest.mark.parametrize(
    ("options", "asked", "is_used"),
    [
        ({}, [], []),
        ({"lora.rank": 4, "parallelism.tensor_parallel_degree": 2}, ["lora", "tensor"], ["lora", "tensor"]),
        ({"lora.alpha": 8.0, "offload.path": "/tmp"}, ["lora", "offload"], []),
        ({"training.mixed_precision_param": "float32", "profiling.profile_freq": 7}, ["profiling"], []),
        ({"training.enable_cpu_offload": True, "metrics.layers.freq": 5}, ["offload", "layer_health"],
         ["offload", "layer_health"]),
    ],
)  # fmt: skip
def test_what_a_config_asks_for(options: dict[str, object], asked: list[str], is_used: list[str]) -> None:
    config = with_options(Config(), options)
    assert names(asked_for(config)) == asked
    assert names(used(config)) == is_used


def test_a_second_technique_with_the_same_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has one step and one average: neither of two is dropped silently."""

    class SecondAverage(AverageOfWeights):
        option = "average.freq"

    mesh: Any = None
    config = with_options(Config(), {"average.decay": 0.9})
    assert parts_of(config, mesh).average is not None
    monkeypatch.setitem(sys.modules, "titanlite.techniques.second", SimpleNamespace(TECHNIQUE=SecondAverage()))
    monkeypatch.setitem(TECHNIQUES, "second", ("average",))
    with pytest.raises(AssertionError, match=r"average and average\.freq"):
        parts_of(config, mesh)
    two_steps = {"optimizer.in_backward": True, "training.mixed_precision_param": "float16"}
    with pytest.raises(AssertionError, match=r"optimizer\.in_backward and training\.mixed_precision_param"):
        parts_of(with_options(Config(), two_steps), mesh)
