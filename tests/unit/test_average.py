"""Averages of weights in training, on one process: their values, resume, validation, export, and mistakes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import TinyRun, mentions, one_process, train_on_this_rank
from titanlite.config.load import load
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.tools import cli
from titanlite.tools.convert.source import open_source, read_tensor
from titanlite.train import Run

SAVED = ["--checkpoint.interval=1", "--checkpoint.keep_latest_k=0"]
VALIDATED = ["--validation.enable", "--validation.sequences=8", "--validation.freq=3"]
KINDS = {"ema": ["--average.decay=0.75"], "window": ["--average.window=2", "--average.freq=2"]}
BFLOAT16 = ["--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]


def trained(tiny: TinyRun, name: str, *options: str) -> Run:
    return train_on_this_rank(config_of(tiny, name, *options), 0, 1)


def config_of(tiny: TinyRun, name: str, *options: str) -> Any:
    return tiny.config(f"--job.name={name}", f"--validation.path={tiny.text}", *options)


def checkpoint(tiny: TinyRun, name: str, step: int) -> Path:
    return tiny.folder / "outputs" / name / "checkpoints" / f"step-{step:08d}"


def weights_at(path: Path, *, average: bool = False) -> dict[str, Tensor]:
    """Return the weights, or their average, as commands read them."""
    source = open_source(str(path), average=average)
    names = [name for name in source.metadata.state_dict_metadata if name.startswith("model.")]
    return {name: read_tensor(source, name.removeprefix("model.")) for name in names}


def own_ema(weights: Sequence[Tensor], decay: float) -> Tensor:
    """Return the exponential moving average, in float64. The first value is the average of itself."""
    average = weights[0].double()
    for n, weight in enumerate(weights[1:], start=1):
        kept = min(decay, n / (n + 1))
        average = kept * average + (1 - kept) * weight.double()
    return average


def validations(tiny: TinyRun, name: str) -> list[dict[str, Any]]:
    """Return the records of the validations of a run, without the time of day."""
    lines = (tiny.folder / "outputs" / name / "validation.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_averages_are_those_of_float64(dtype: str, tiny: TinyRun) -> None:
    options = [*SAVED, *(BFLOAT16 if dtype == "bfloat16" else [])]
    trained(tiny, "ema", *options, "--average.decay=0.75")
    trained(tiny, "slow", *options, "--average.decay=0.5", "--average.freq=2")
    trained(tiny, "window", *options, "--average.window=2", "--average.freq=2")
    steps = [weights_at(checkpoint(tiny, "ema", step)) for step in range(1, 7)]
    for name in steps[0]:
        values = [step[name] for step in steps]
        ema, slow = (weights_at(checkpoint(tiny, it, 6), average=True)[name] for it in ("ema", "slow"))
        assert ema.dtype == values[0].dtype
        tolerance: Any = {"rtol": 1e-6, "atol": 1e-7} if dtype == "float32" else {"rtol": 2**-8, "atol": 1e-7}
        torch.testing.assert_close(ema.double(), own_ema(values, 0.75), **tolerance)
        torch.testing.assert_close(slow.double(), own_ema(values[1::2], 0.5), **tolerance)
        window = {step: weights_at(checkpoint(tiny, "window", step), average=True)[name] for step in (3, 4, 6)}
        assert torch.equal(window[3], values[1]), "one snapshot yet"
        for step in (4, 6):
            mean = (values[step - 3].double() + values[step - 1].double()) / 2
            assert torch.equal(window[step], mean.to(values[0].dtype)), step


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_training_has_the_same_bits_and_validation_measures_the_average(tiny: TinyRun) -> None:
    """Though the average takes the place of the weights in each validation, also on resume."""
    trained(tiny, "plain", *VALIDATED)
    for kind, options in KINDS.items():
        run = trained(tiny, kind, *VALIDATED, *options)
        assert tiny.losses(kind) == tiny.losses("plain")
        records = validations(tiny, kind)
        assert [it["loss"] for it in records] == [it["loss"] for it in validations(tiny, "plain")]
        assert [it["step"] for it in records if "average" in it] == [3, 6]
        average = weights_at(checkpoint(tiny, kind, 6), average=True)
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                local_tensor(parameter).copy_(average[f"model.{name}"])
        assert run.validator.run(run.model) == records[-1]["average"]
        trained(tiny, f"{kind}-parts", *VALIDATED, *options, "--training.steps=3")
        trained(tiny, f"{kind}-parts", *VALIDATED, *options)
        assert validations(tiny, f"{kind}-parts") == records
        for whole, parts in zip(*(stored(checkpoint(tiny, it, 6)) for it in (kind, f"{kind}-parts")), strict=True):
            assert torch.equal(whole[1], parts[1]), whole[0]
    assert "average" not in validations(tiny, "plain")[0]


def stored(path: Path) -> list[tuple[str, Tensor]]:
    """Return every tensor of a checkpoint."""
    import torch.distributed.checkpoint as dcp

    entries: Any = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return sorted(tensors.items())


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_skipped_steps_do_not_count(tiny: TinyRun) -> None:
    taken, skipped = torch.tensor(0), torch.tensor(2)
    for kind, options in KINDS.items():
        run = trained(tiny, kind, *options)
        before = {name: tensor.clone() for name, tensor in run.average.tensors.items()}
        for parameter in run.model.parameters():
            parameter.detach().fill_(5.0)
        run.average.update(8, skipped)
        assert all(torch.equal(tensor, before[name]) for name, tensor in run.average.tensors.items())
        run.average.update(8, taken)
        assert run.average.tensors["updates"] == before["updates"] + 1


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_checkpoints_with_and_without_an_average_load(tiny: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    trained(tiny, "plain", "--training.steps=3")
    trained(tiny, "plain", *KINDS["ema"], "--training.steps=4")
    assert any(mentions(line, "average", "step 3") for line in caplog.messages)
    after = weights_at(checkpoint(tiny, "plain", 4))
    assert all(
        torch.equal(it, after[name]) for name, it in weights_at(checkpoint(tiny, "plain", 4), average=True).items()
    )
    caplog.clear()
    trained(tiny, "plain", *KINDS["ema"], "--training.steps=5")
    assert not any(mentions(line, "average", "anew") for line in caplog.messages)
    trained(tiny, "plain")
    trained(tiny, "whole")
    assert tiny.losses("plain") == tiny.losses("whole")


@pytest.mark.long
def test_averages_of_adapters_are_merged_and_exported(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    """Only what is trained has an average. Commands take it with --average."""
    with one_process():
        run = trained(tiny, "lora", "--lora.rank=2", *SAVED, *VALIDATED, *KINDS["ema"])
    names = [name for name in run.average.tensors if name != "updates"]
    assert len(names) == 14
    assert all(".lora_" in name for name in names)
    folder = str(tiny.folder / "outputs" / "lora")
    words = ["checkpoint", "export", folder, "--average", "--merge", "--out", str(tiny.folder / "hf")]
    assert cli.run(words) == 0
    record = validations(tiny, "lora")[-1]
    capfd.readouterr()
    for path, more in ((folder, ["--average"]), (str(tiny.folder / "hf"), [f"--seq-len={32}"])):
        data = [f"--data={tiny.text}", "--sequences=8", "--dtype=float32", f"--cache-folder={tiny.folder}/cache"]
        assert cli.run(["evaluate", path, *more, *data, "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["loss"] == pytest.approx(record["average"]["loss"], abs=2e-6), path
    assert record["average"]["loss"] != record["loss"]
    assert cli.run(["generate", folder, "--average", "--prompt", "one", "--max-new-tokens=1"]) == 0


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_mistakes_are_one_line_each(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    for options, key in (
        (["--average.decay=0.9", "--average.window=2"], "average.decay"),
        (["--average.freq=2"], "average"),
        (["--average.decay=1.0"], "average.decay"),
        (["--average.freq=0", "--average.window=2"], "average.freq"),
        (
            ["--average.decay=0.9", "--training.enable_cpu_offload", "--offload.parameters=disk"],
            "average",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            load(tiny.toml, options)
        assert [problem.key for problem in refused.value.problems] == [key]
    trained(tiny, "plain")
    trained(tiny, "late", "--average.window=2", "--average.freq=50")
    for name in ("plain", "late"):
        words = [
            "checkpoint",
            "export",
            str(tiny.folder / "outputs" / name),
            "--average",
            "--out",
            f"{tiny.folder}/out",
        ]
        capfd.readouterr()
        assert cli.run(words) == 2
        printed = capfd.readouterr().err
        assert len(printed.splitlines()) == 1
        assert mentions(printed, "--average")


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("kind", KINDS)
def test_an_average_on_disk_has_the_bits_of_one_in_memory(kind: str, tiny: TinyRun) -> None:
    on_disk = [*SAVED, *VALIDATED, *KINDS[kind], "--offload.average=disk"]
    trained(tiny, "memory", *SAVED, *VALIDATED, *KINDS[kind])
    trained(tiny, "disk", *on_disk, "--training.steps=4")
    run = trained(tiny, "disk", *on_disk)
    assert {tensor.device.type for tensor in run.average.tensors.values()} == {"cpu"}
    assert validations(tiny, "disk")[-1] == validations(tiny, "memory")[-1]
    for step in (4, 6):
        expected = weights_at(checkpoint(tiny, "memory", step), average=True)
        found = weights_at(checkpoint(tiny, "disk", step), average=True)
        assert all(torch.equal(found[name], values) for name, values in expected.items())
    with pytest.raises(ConfigError, match=r"offload\.average"):
        tiny.config("--offload.average=disk")
