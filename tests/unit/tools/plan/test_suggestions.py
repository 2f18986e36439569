"""Options that make a config smaller, and the text of an out-of-memory error."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.helpers import THREE_BLOCKS, TinyRun
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config
from titanlite.tools.plan import out_of_memory
from titanlite.tools.plan.estimate import OUTSIDE, USABLE_ON_CPU, Layout, Plan, plan
from titanlite.tools.plan.hardware import find_hardware
from titanlite.tools.plan.search import with_options
from titanlite.tools.plan.suggestions import Suggestion, suggest

BATCH = {"training.local_batch_size": 4}
SELECTIVE = {"activation_checkpoint.mode": "selective"}
FULL = {"activation_checkpoint.mode": "full"}
MOMENTS = {"optimizer.state_dtype": "bfloat16"}
OFFLOAD = {"training.enable_cpu_offload": True}


def layout_of(memory: float, world_size: int = 1) -> Layout:
    """Return GPUs of which PyTorch can reserve so many bytes."""
    return Layout(world_size, replace(find_hardware("H100"), memory=int(memory) + OUTSIDE), 8)


def cpu_of(memory: float) -> Layout:
    """Return a CPU with room for tensors of so many bytes. GPUs reserve more than that, in steps of 20 MiB."""
    return Layout(1, replace(find_hardware("H100"), memory=int(memory / USABLE_ON_CPU + 1), measured=True), 8)


def planned(config: Config, layout: Layout) -> Plan:
    return plan(config, layout)


def suggestions_for(config: Config, layout: Layout) -> list[Suggestion]:
    return suggest(config, layout, planned(config, layout))


@pytest.mark.nightly
def test_three_suggestions_that_fit_are_enough_and_the_cheapest_is_first(tiny: TinyRun) -> None:
    config, layout = tiny.config(THREE_BLOCKS), layout_of(2**30)
    found = suggestions_for(config, layout)
    assert [suggestion.options for suggestion in found] == [BATCH, SELECTIVE, FULL]
    assert all(suggestion.fits for suggestion in found)
    assert [suggestion.peak for suggestion in found] == [
        planned(with_options(config, suggestion.options), layout).peak for suggestion in found
    ]
    assert max(suggestion.peak for suggestion in found) < planned(config, layout).peak
    assert found[0].text == "--training.local_batch_size=4"


@pytest.mark.nightly
def test_what_fits_is_before_what_is_cheaper(tiny: TinyRun) -> None:
    """Half of the batch size does not fit here, and a quarter does."""
    config = tiny.config("--model.args.n_layers=2")
    quarter, half = (
        planned(with_options(config, options), cpu_of(2**30)).peak
        for options in ({"training.local_batch_size": 2}, BATCH)
    )
    assert quarter < half
    found = suggestions_for(config, cpu_of(quarter))
    assert next(suggestion.options for suggestion in found if suggestion.fits) == {"training.local_batch_size": 2}
    assert [suggestion.fits for suggestion in found] == sorted((suggestion.fits for suggestion in found), reverse=True)
    assert SELECTIVE in [suggestion.options for suggestion in found if not suggestion.fits]


@pytest.mark.nightly
def test_every_option_that_takes_less_memory_is_offered(tiny: TinyRun) -> None:
    """Everything that the config can take is offered if nothing fits."""
    pytest.importorskip("torchao")
    options = ["--training.local_batch_size=1", "--training.global_batch_size=1", "--model.args.dim=240", THREE_BLOCKS]
    found = suggestions_for(tiny.config(*options, "--activation_checkpoint.mode=full"), layout_of(1000))
    assert [suggestion.options for suggestion in found] == [
        MOMENTS,
        {"optimizer.in_backward": True, "training.max_norm": 0.0},
        {"optimizer.name": "torchao.optim.AdamW8bit"},
        {"offload.optimizer": "disk"},
        OFFLOAD,
    ]
    assert "--optimizer.in_backward=true --training.max_norm=0.0" in [suggestion.text for suggestion in found]


def test_the_command_after_an_error_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, ranks = tmp_path / "my runs" / "config.toml", Ranks(3, 16, 3, 8)
    line = f"titanlite plan '{config}' --world-size 16 --gpus-per-node 8 --gpu"
    assert out_of_memory.plan_command(config, ranks, torch.device("cpu")) == f"{line} cpu --suggest"
    for name, gpu in (("NVIDIA H100 80GB HBM3", "H100"), ("another GPU", "FILE.toml")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**30))
        assert out_of_memory.plan_command(config, ranks, torch.device("cuda")) == f"{line} {gpu} --suggest"
