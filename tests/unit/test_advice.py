"""Which options make a config smaller, and what is read from an out-of-memory error."""

import json
import subprocess
import traceback
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import TinyRun
from titanlite.config.schema import Config
from titanlite.loss import token_loss
from titanlite.models.registry import resolve_model
from titanlite.plan import forecast as forecasts
from titanlite.plan import out_of_memory
from titanlite.plan.estimate import Layout, Plan, plan
from titanlite.plan.forecast import Forecast, forecasting, warning_of
from titanlite.plan.out_of_memory import measure, phase_of
from titanlite.plan.search import with_options
from titanlite.plan.suggestions import Suggestion, _together, suggestions
from titanlite.runtime.hardware import find_hardware
from titanlite.runtime.process_group import Ranks
from titanlite.step import train_step

BATCH = {"training.local_batch_size": 4}
SELECTIVE = {"activation_checkpoint.mode": "selective"}
FULL = {"activation_checkpoint.mode": "full"}
ALWAYS = {"parallelism.fsdp_reshard_after_forward": "always"}
MOMENTS = {"optimizer.state_dtype": "bfloat16"}
OFFLOAD = {"training.enable_cpu_offload": True}


def layout_of(memory: float, world_size: int = 1) -> Layout:
    """Of GPUs with so many bytes."""
    return Layout(world_size, replace(find_hardware("H100"), memory=int(memory)), 8)


def planned(config: Config, layout: Layout) -> Plan:
    kind, args = model_of(config)
    return plan(config, kind, args, layout)


def model_of(config: Config) -> Any:
    kind, args = resolve_model("llama3", None, config.model.args)
    return kind, replace(args, max_seq_len=config.training.seq_len)


def advice(config: Config, layout: Layout) -> list[Suggestion]:
    kind, args = model_of(config)
    return suggestions(config, kind, args, layout)


@pytest.mark.nightly
def test_three_ways_that_fit_are_enough_and_the_cheapest_is_first(tiny: TinyRun) -> None:
    config, layout = tiny.config(), layout_of(2**30)
    ways = advice(config, layout)
    assert [way.options for way in ways] == [BATCH, SELECTIVE, FULL]
    assert all(way.fits for way in ways)
    assert [way.peak for way in ways] == [planned(with_options(config, way.options), layout).peak for way in ways]
    assert max(way.peak for way in ways) < planned(config, layout).peak
    assert ways[0].record() == {
        "options": "--training.local_batch_size=4",
        "peak": ways[0].peak,
        "fits": True,
        "cost": "same results, by more and smaller forward passes",
    }


@pytest.mark.slow
def test_what_fits_is_before_what_is_cheaper(tiny: TinyRun) -> None:
    """Of batch sizes the half does not do here, and a quarter does."""
    config = tiny.config("--model.args.n_layers=2")
    quarter, half, full = (
        planned(with_options(config, options), layout_of(2**30)).peak
        for options in ({"training.local_batch_size": 2}, BATCH, FULL)
    )
    assert quarter < full < half
    ways = advice(config, layout_of(full / 0.93 + 1))
    fitting = [way.options for way in ways if way.fits]
    assert fitting[:2] == [{"training.local_batch_size": 2}, FULL]
    assert [way.fits for way in ways] == sorted((way.fits for way in ways), reverse=True)
    assert SELECTIVE in [way.options for way in ways if not way.fits]


@pytest.mark.slow
def test_every_rung_that_takes_less_is_offered(tiny: TinyRun) -> None:
    """Where nothing fits, all that a config can take."""
    pytest.importorskip("torchao")
    options = ["--training.local_batch_size=1", "--training.global_batch_size=1", "--model.args.dim=240"]
    ways = advice(tiny.config(*options, "--activation_checkpoint.mode=full"), layout_of(1000))
    assert [way.options for way in ways if way.cost != "together"] == [
        MOMENTS,
        {"optimizer.in_backward": True, "training.max_norm": 0.0},
        {"optimizer.name": "torchao.optim.AdamW8bit"},
        {"offload.optimizer": "disk"},
        OFFLOAD,
    ]
    assert "--optimizer.in_backward=true --training.max_norm=0.0" in [way.words for way in ways]


@pytest.mark.slow
def test_what_a_config_cannot_take_is_not_offered(tiny: TinyRun) -> None:
    options = [
        "--optimizer.name=SGD",
        "--training.local_batch_size=1",
        "--activation_checkpoint.mode=full",
        "--parallelism.data_parallel_replicate_degree=2",
    ]
    config = tiny.config(*options, "--model.args.n_layers=2", world_size=4)
    ways = advice(config, layout_of(1000, world_size=4))
    assert not any(way.fits for way in ways)
    alone = {key for way in ways if way.cost != "together" for key in way.options}
    assert "parallelism.data_parallel_replicate_degree" in alone
    assert alone <= {
        "parallelism.data_parallel_replicate_degree",
        "parallelism.data_parallel_shard_degree",
        *ALWAYS,
        *OFFLOAD,
    }
    [fewer] = [way for way in ways if "parallelism.data_parallel_replicate_degree" in way.options]
    assert fewer.words == "--parallelism.data_parallel_replicate_degree=1 --parallelism.data_parallel_shard_degree=-1"
    assert [way.words for way in ways if "training.enable_cpu_offload" in way.options] == [
        "--training.enable_cpu_offload=true"
    ]


def test_the_warning_names_figures_and_what_fits() -> None:
    found: dict[str, Any] = {
        "peak": 96 * 2**30,
        "phase": "backward layers.31",
        "memory": int(79.1 * 2**30),
        "usable": int(73.6 * 2**30),
        "ways_out": [
            {"options": "--activation_checkpoint.mode=full", "peak": int(58.1 * 2**30), "fits": True, "cost": ""},
            {"options": "--a=1", "peak": 90 * 2**30, "fits": False, "cost": ""},
        ],
    }
    assert warning_of(found) == (
        "memory: this config is predicted to need 96.0 GiB at its peak (backward layers.31), the GPU has 79.1, of "
        "which 73.6 can be counted on: try --activation_checkpoint.mode=full (58.1 GiB)"
    )
    assert warning_of(found | {"ways_out": []}).endswith(": no option makes it fit; use more processes, and a higher "
                                                         "shard degree")  # fmt: skip


def failing_step(config: Config, break_at: str) -> tuple[list[FrameType], Any, Any]:
    """Where a step broke; its model and optimizer."""
    kind, args = model_of(config)
    model = kind(args)
    model.init_buffers()
    optimizer = torch.optim.AdamW(model.parameters())
    modules = {"layers.1": model.layers[1].feed_forward, "tok_embeddings": model.tok_embeddings}

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def failing_loss(*_: Any, **__: Any) -> Any:
        fail()

    if break_at in modules:
        modules[break_at].register_forward_hook(fail)
    elif break_at == "update":
        optimizer.register_step_pre_hook(fail)
    elif break_at == "backward":
        model.layers[2].register_full_backward_hook(fail)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    batch: Any = {"tokens": tokens, "labels": tokens}
    loss = failing_loss if break_at == "loss" else token_loss
    group = dist.group.WORLD
    assert group
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_step(model, [batch], optimizer=optimizer, group=group, max_norm=1.0, loss_function=loss)
    return [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)], model, optimizer


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize(
    ("break_at", "phase"),
    [
        ("layers.1", "forward layers.1"),
        ("tok_embeddings", "forward tok_embeddings"),
        ("loss", "loss"),
        ("backward", "backward"),
        ("update", "update (optimizer)"),
    ],
)
def test_the_functions_that_were_running_tell_the_phase(tiny: TinyRun, break_at: str, phase: str) -> None:
    frames, model, _ = failing_step(tiny.config(), break_at)
    assert phase_of(frames) == phase
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    measured = measure(frames, torch.device("cpu"))
    assert (measured["parameters"], measured["optimizer"]) == (size, 0)
    assert measured["gradients"] == (size if break_at == "update" else measured["gradients"])
    assert (measured["gradients"] == 0) == (break_at in ("layers.1", "tok_embeddings", "loss"))


def test_an_explanation_that_fails_leaves_the_error_as_it_was(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explain(error: Exception, forecast: Forecast) -> str:
        raise LookupError(forecast.folder.name)

    monkeypatch.setattr(out_of_memory, "explain", explain)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with (
        caplog.at_level("WARNING", "titanlite"),
        pytest.raises(torch.OutOfMemoryError) as caught,
        forecasting(tiny.config(), Ranks(0, 1, 0, 1), torch.device("cpu")),
    ):
        raise error
    assert caught.value is error
    assert "LookupError: tiny" in caplog.text


def test_on_a_gpu_what_is_not_known_by_cause_is_the_rest(monkeypatch: pytest.MonkeyPatch, tiny: TinyRun) -> None:
    device, gib = torch.device("cuda"), 2**30
    stats = {"allocated_bytes.all.current": 70 * gib, "allocated_bytes.all.peak": 75 * gib}
    stats |= {"reserved_bytes.all.current": 76 * gib}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gib, 79 * gib))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 75 * gib)
    assert out_of_memory._device_lines(device) == [
        "the GPU has 79.0 GiB. PyTorch has reserved 76.0, allocated 70.0, at most 75.0; outside of PyTorch (CUDA "
        "context, NCCL, other processes) are 2.0"
    ]
    run = SimpleNamespace(model=model_on_meta(tiny), optimizer=torch.optim.SGD([torch.zeros(1)]))
    here = SimpleNamespace(f_code=SimpleNamespace(co_filename=str(Path(out_of_memory.__file__))), f_locals={"run": run})
    frames: Any = [here]
    measured = measure(frames, device)
    assert measured == {"parameters": 0, "gradients": 0, "optimizer": 0, "rest": 75 * gib}
    planned = {"parameters": gib, "gradients": 0, "optimizer": 2 * gib, "activations": 60 * gib, "other": gib}
    rows = {line[:26].strip(): line[26:].split() for line in out_of_memory._rows(planned, measured)}
    assert rows["all but the first three"] == ["61.0", "75.0"]
    assert rows["activations"] == ["60.0", "-"]
    assert rows["total"] == ["64.0", "75.0"]


def model_on_meta(tiny: TinyRun) -> Any:
    kind, args = model_of(tiny.config())
    with torch.device("meta"):
        return kind(args)


def test_another_rank_waits_for_the_plan_of_rank_0(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """And makes its own where there is none of this config."""
    monkeypatch.setattr(forecasts, "PATIENCE", 0.3)
    forecast = Forecast(tiny.config(), Ranks(1, 2, 1, 2), torch.device("cuda"), memory=10**9)
    forecast.folder.mkdir(parents=True)
    forecast.start()
    assert forecast._child is None
    path = forecast.folder / "plan.json"
    found = {"of": forecast._of(), "fits": False, "ways_out": [{"options": "--a=1"}], "whole": True}
    path.write_text(json.dumps(found))
    assert forecast.advised() == found

    started = []

    def start(*, advise: bool) -> None:
        started.append(advise)
        path.write_text(json.dumps(found | {"fits": True}))
        forecast._child = subprocess.Popen(["true"], text=True)

    monkeypatch.setattr(forecast, "_start_child", start)
    path.write_text(json.dumps(found | {"of": "another config"}))
    assert forecast.advised() == found | {"fits": True}
    assert started == [True]


def test_the_fewest_that_fit_together_are_found() -> None:
    """Of ways that save 1, 2, 4, ... of 100: as many from the first on as it takes."""
    for room in (99, 98, 97, 90, 69, 50, 37, 36):
        tried: list[int] = []

        def attempt(options: dict[str, Any], cost: str, room: int = room, tried: list[int] = tried) -> Suggestion:
            peak = 100 - sum(2 ** int(key) for key in options)
            tried.append(len(options))
            return Suggestion(options, peak, peak <= room, cost)

        ways = [Suggestion({str(number): True}, 100 - 2**number, False, "") for number in range(6)]
        found = _together(ways, attempt, lambda options: True)
        fitting = [count for count in range(2, 7) if 100 - (2**count - 1) <= room]
        if not fitting:
            assert found is None
            assert tried == [6]
        else:
            assert found is not None
            assert (len(found.options), found.cost) == (fitting[0], "together")
            assert len(tried) <= 4


def test_what_does_not_go_with_cheaper_ways_is_left_out() -> None:
    ways = [Suggestion({name: True}, 0, False, "") for name in ("moments", "other moments", "batch")]
    found = _together(
        ways,
        lambda options, cost: Suggestion(options, 0, True, cost),
        lambda options: not {"moments", "other moments"} <= options.keys(),
    )
    assert found is not None
    assert found.options == {"moments": True, "batch": True}
