"""Averages of weights in training, on one process: their values, resume, validation, export, and mistakes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.helpers import TinyRun, mentions, one_process, train_on_this_rank
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.schema import Average
from titanlite.techniques.average.weights import MovingAverage, WindowAverage
from titanlite.tools import cli
from titanlite.tools.convert.source import open_source, read_tensor
from titanlite.train import Run

SAVED = ["--checkpoint.interval=1", "--checkpoint.keep_latest_k=0"]
VALIDATED = ["--validation.enable", "--validation.sequences=8", "--validation.freq=3"]
DECAY = 0.6
"""Of three updates, the first two make a plain mean, and the decay limits the third one."""
KINDS = {
    "ema": [f"--average.decay={DECAY}", "--average.freq=2"],
    "window": ["--average.window=2", "--average.freq=2"],
}


def trained(tiny: TinyRun, name: str, *options: str) -> Run:
    config = tiny.config(f"--job.name={name}", f"--validation.path={tiny.text}", *options)
    return train_on_this_rank(config, 0, 1)


def checkpoint(tiny: TinyRun, name: str, step: int) -> Path:
    return tiny.folder / "outputs" / name / "checkpoints" / f"step-{step:08d}"


def weights_at(path: Path, *, average: bool = False) -> dict[str, Tensor]:
    """Return the weights, or their average, as commands read them."""
    source = open_source(str(path), average=average)
    names = [name for name in source.metadata.state_dict_metadata if name.startswith("model.")]
    return {name: read_tensor(source, name.removeprefix("model.")) for name in names}


def stored(path: Path) -> list[tuple[str, Tensor]]:
    """Return every tensor of a checkpoint."""
    import torch.distributed.checkpoint as dcp

    entries: Any = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return sorted(tensors.items())


def own_ema(weights: Sequence[Tensor], decay: float) -> Tensor:
    """Return the exponential moving average, in float64. The first value is the average of itself."""
    average = weights[0].double()
    for n, weight in enumerate(weights[1:], start=1):
        kept = min(decay, n / (n + 1))
        average = kept * average + (1 - kept) * weight.double()
    return average


def validations(tiny: TinyRun, name: str) -> list[dict[str, Any]]:
    """Return the records of the validations of a run, without the time of day."""
    records = tiny.records(name, file="validation.jsonl")
    return [{key: value for key, value in record.items() if key != "time"} for record in records]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyRun, dict[str, Any]]:
    """A folder with a plain run and one of each kind of average, and the validation of each average at the end."""
    tiny, found = TinyRun(tmp_path_factory.mktemp("averages")), {}
    with one_process():
        trained(tiny, "plain", *VALIDATED)
        for kind, options in KINDS.items():
            run = trained(tiny, kind, *SAVED, *VALIDATED, *options)
            average = weights_at(checkpoint(tiny, kind, 6), average=True)
            for name, parameter in run.model.named_parameters():
                local_tensor(parameter.detach()).copy_(average[f"model.{name}"])
            found[kind] = run.validator.run(run.model)
    return tiny, found


@pytest.mark.long
def test_averages_are_those_of_float64(runs: tuple[TinyRun, Any]) -> None:
    tiny, _ = runs
    steps = [weights_at(checkpoint(tiny, "ema", step)) for step in range(1, 7)]
    ema = weights_at(checkpoint(tiny, "ema", 6), average=True)
    windows = {step: weights_at(checkpoint(tiny, "window", step), average=True) for step in (3, 4, 6)}
    for name in steps[0]:
        values = [step[name] for step in steps]
        torch.testing.assert_close(ema[name].double(), own_ema(values[1::2], DECAY), rtol=1e-6, atol=1e-7)
        assert torch.equal(windows[3][name], values[1]), "one snapshot yet"
        for step in (4, 6):
            mean = (values[step - 3].double() + values[step - 1].double()) / 2
            assert torch.equal(windows[step][name], mean.float()), step


@pytest.mark.long
def test_training_has_the_same_bits_and_validation_measures_the_average(runs: tuple[TinyRun, Any]) -> None:
    """Though the average takes the place of the weights in each validation."""
    tiny, measured = runs
    plain = validations(tiny, "plain")
    assert "average" not in plain[0]
    for kind in KINDS:
        assert tiny.losses(kind) == tiny.losses("plain")
        records = validations(tiny, kind)
        assert [record["loss"] for record in records] == [record["loss"] for record in plain]
        assert [record["step"] for record in records if "average" in record] == [3, 6]
        assert records[-1]["average"] == measured[kind]


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("kind", KINDS)
def test_an_average_that_resumes_on_disk_has_the_bits_of_one_in_memory(kind: str, runs: tuple[TinyRun, Any]) -> None:
    tiny, _ = runs
    options, name = [*VALIDATED, *KINDS[kind]], f"{kind}-parts"
    trained(tiny, name, *options, "--training.steps=3")
    run = trained(tiny, name, *options, "--offload.average=disk")
    assert run.state.average
    assert {tensor.device.type for tensor in run.state.average.tensors.values()} == {"cpu"}
    assert (tiny.folder / "outputs" / name / "offload").is_dir()
    assert validations(tiny, name) == validations(tiny, kind)
    for whole, parts in zip(*(stored(checkpoint(tiny, run, 6)) for run in (kind, name)), strict=True):
        assert torch.equal(whole[1], parts[1]), whole[0]


def test_skipped_steps_do_not_count() -> None:
    taken, skipped = torch.tensor(0), torch.tensor(2)
    for kind, config in ((MovingAverage, Average(decay=0.75)), (WindowAverage, Average(window=2))):
        model = nn.Linear(2, 3)
        average = kind(config, model, None, lambda: None, on_host=False)
        average.update(1, taken)
        before = {name: tensor.clone() for name, tensor in average.tensors.items()}
        model.weight.detach().fill_(5.0)
        average.update(2, skipped)
        assert all(torch.equal(tensor, before[name]) for name, tensor in average.tensors.items())
        average.update(3, taken)
        assert average.tensors["updates"] == before["updates"] + 1


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_checkpoints_with_and_without_an_average_load(
    runs: tuple[TinyRun, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tiny, _ = runs
    caplog.set_level("INFO")
    trained(tiny, "later", "--training.steps=3")
    trained(tiny, "later", *KINDS["ema"], "--training.steps=4")
    assert any(mentions(line, "average", "step 3") for line in caplog.messages)
    after, average = (weights_at(checkpoint(tiny, "later", 4), average=is_average) for is_average in (False, True))
    assert all(torch.equal(weight, after[name]) for name, weight in average.items())
    trained(tiny, "later")
    assert tiny.losses("later") == tiny.losses("plain")


@pytest.mark.long
def test_averages_of_adapters_are_merged_and_exported(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    """Only what is trained has an average. Commands take it with --average."""
    with one_process():
        run = trained(tiny, "lora", "--lora.rank=2", *VALIDATED, *KINDS["ema"])
    assert run.state.average
    names = [name for name in run.state.average.tensors if name != "updates"]
    assert len(names) == 14
    assert all(".lora_" in name for name in names)
    folder, merged = str(tiny.folder / "outputs" / "lora"), str(tiny.folder / "hf")
    assert cli.run(["checkpoint", "export", folder, "--average", "--merge", "--out", merged]) == 0
    record = validations(tiny, "lora")[-1]
    capfd.readouterr()
    for path, more in ((folder, "--average"), (merged, "--seq-len=32")):
        data = [f"--data={tiny.text}", "--sequences=8", "--dtype=float32", f"--cache-folder={tiny.folder}/cache"]
        assert cli.run(["evaluate", path, more, *data, "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["loss"] == pytest.approx(record["average"]["loss"], abs=2e-6), path
    assert record["average"]["loss"] != record["loss"]
    assert cli.run(["generate", folder, "--average", "--prompt", "one", "--max-new-tokens=1"]) == 0


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_an_average_that_is_not_there_is_refused(
    runs: tuple[TinyRun, Any], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The run has none, or its first update has not come yet."""
    tiny, _ = runs
    first = ["--training.steps=1", "--lr_scheduler.warmup_steps=1"]
    trained(tiny, "early", *first, "--average.window=2", "--average.freq=50")
    for name in ("plain", "early"):
        capfd.readouterr()
        folder = str(tiny.folder / "outputs" / name)
        assert cli.run(["checkpoint", "export", folder, "--average", "--out", str(tmp_path / "out")]) == 2
        printed = capfd.readouterr().err
        assert len(printed.splitlines()) == 1
        assert mentions(printed, "--average")
