"""Back over a spike: the run continues as if it had never read the sequences between, whatever happens on the way."""

import json
import shutil
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.helpers import TinyRun, built, mentions, run_in_turn
from tests.support.layouts import degrees, on_one, whole, with_loss
from tests.support.whole_runs import assert_equal
from titanlite.checkpoint.manifest import Manifest, folder_name
from titanlite.guard import REASONS, SkipReason
from titanlite.loss import TokenLoss
from titanlite.schema import Config
from titanlite.state import flat
from titanlite.storage.storage import LocalStorage
from titanlite.tools import cli
from titanlite.train import finish, train

BAD_SAMPLE, BAD_STEP, SAVED, STEPS = 50, 7, 4, 12
"""A sample of step 7 has a loss 1000 times as large. The checkpoints are of steps 4, 8 and 12."""
GUARD = ["--guard.spike_sigma=20", "--guard.on_spike=rollback", f"--training.steps={STEPS}"]
SAVES = f"--checkpoint.interval={SAVED}"

Result = tuple[tuple[int, str] | None, dict[str, torch.Tensor]]
"""Exit code and reason of a run that stopped, and its state at the end."""


class Killed(Exception):
    """Stands for the end of the process."""


def spiking(rank: int, world_size: int, config: Config, kill: tuple[str, int] = ("", 0)) -> Result:
    """Train; in a run named "many", all samples of the epoch from the bad one on are bad.

    Args:
        kill: method of the records, and the number of its call that ends the run.
    """
    with patch("titanlite.guard.SPIKE_WINDOW", 2 * SAVED):
        run = built(rank, world_size, config)
    samples = range(BAD_SAMPLE, 160 if "many" in str(config.job.name) else BAD_SAMPLE + 1)
    bad, right, calls = run.position.samples.__getitems__([*samples])["labels"], run.train_step.loss_function, [0]

    def loss_of(*args: Any, labels_BL: torch.Tensor, **options: Any) -> TokenLoss:
        found = right(*args, labels_BL=labels_BL, **options)
        length = labels_BL.shape[1]  # of a ramp
        is_bad = (labels_BL[:, None] == bad[:, :length]).all(dim=-1).any()
        return TokenLoss(found.total * 1000, found.cross_entropy * 1000) if is_bad else found

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == kill[1]:
            raise Killed
        return method(*args, **options)

    stopped = None
    if kill[0]:
        method = getattr(run.metrics, kill[0])
        setattr(run.metrics, kill[0], counted)
        with pytest.raises(Killed):
            train(with_loss(run, loss_of))
        run.batches.close()
        run.checkpoints.finish()
    else:
        stopped = train(with_loss(run, loss_of))
        finish(run, stopped)
    if run.folder.lock is not None:
        run.folder.lock.close()
    ending = stopped and (stopped.exit_code, str(stopped))
    return ending, {name: whole(tensor) for name, tensor in flat(run.checkpoints.state.tensors()).items()}


def killed_and_resumed(rank: int, world_size: int, given: tuple[Config, tuple[str, int]]) -> Result:
    spiking(rank, world_size, *given)
    torch.distributed.barrier()
    return spiking(rank, world_size, given[0])


def skipped(tiny: TinyRun, name: str) -> list[dict[str, Any]]:
    return tiny.records(name, file="skipped.jsonl")


def never_read(tiny: TinyRun, name: str, *options: str, world_size: int = 1) -> Config:
    """Return the config of a run that resumes from the checkpoint before the spike, whose manifest is changed by hand:
    the position in the data is that after the spike, and no rule looks for spikes."""
    other = f"{name}-never-read"
    [record] = skipped(tiny, name)
    checkpoint = record["rollback"]["checkpoint"]
    folder = f"checkpoints/{folder_name(checkpoint)}"
    places = [tiny.folder / "outputs" / run / folder for run in (name, other)]
    shutil.copytree(places[0], places[1])
    manifest, later = (
        Manifest.from_json((places[0].with_name(folder_name(step)) / "manifest.json").read_bytes())
        for step in (checkpoint, checkpoint + SAVED)
    )
    samples = record["rollback"]["samples"]
    moved = replace(manifest, samples=samples, guard={}, settings=later.settings, data=later.data)  # of a stage of data
    (places[1] / "manifest.json").write_bytes(moved.to_json())
    return tiny.config(*options, f"--training.steps={STEPS}", f"--job.name={other}", world_size=world_size)


RAMP = "[{until_tokens=512,global_batch_size=4}]"
LENGTHS = "[{until_tokens=1536,seq_len=16}]"
STAGES = "[{until_tokens=1700,weights={text=1.0}}]"
CASES = {
    "plain": [],
    "average": ["--average.decay=0.5"],
    "window": ["--average.window=3"],
    "batch-ramp": [f"--training.batch_ramp={RAMP}", "--training.local_batch_size=4"],
    "length-ramp": [f"--training.seq_len_ramp={LENGTHS}"],
    "stages": [f"--data.stages={STAGES}"],
    "rate-by-tokens": ["--lr_scheduler.warmup_tokens=2048"],
    "worker": ["--data.num_workers=1"],
    "dropout": ["--training.dropout=0.2"],
    "muon": ["--optimizer.name=Muon"],
    "bfloat16": ["--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16"],
    "disk": ["--offload.optimizer=disk"],
    "not-async": ["--checkpoint.async_mode=disabled"],
    "layers": ["--metrics.layers.freq=1", "--debug.hash_freq=1"],
    "rarely": ["--metrics.log_freq=100"],
}


RARELY = "window", "dropout", "muon", "bfloat16", "not-async"
"""Cases whose state is read back as that of any checkpoint."""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param({name: CASES[name] for name in CASES if name not in RARELY}, marks=pytest.mark.long, id="often"),
        pytest.param(CASES, marks=pytest.mark.nightly, id="all"),
    ],
)
def test_a_run_ends_as_if_it_had_never_read_the_sequences(tiny: TinyRun, cases: dict[str, list[str]]) -> None:
    configs = {name: tiny.config(*GUARD, SAVES, *options, f"--job.name={name}") for name, options in cases.items()}
    ends = run_in_turn(spiking, 1, [*configs.values()])
    expected = run_in_turn(spiking, 1, [never_read(tiny, name, *options) for name, options in cases.items()])
    for name, [(stopped, values)], [(_, wanted)] in zip(cases, ends, expected, strict=True):
        [record] = skipped(tiny, name)
        back = record["rollback"]
        assert (stopped, back["checkpoint"], back["rollbacks"]) == (None, 8 if name == "batch-ramp" else SAVED, 1), name
        assert record["reason"] == REASONS[SkipReason.ROLLBACK]
        assert BAD_SAMPLE in record["samples"]
        assert back["samples"] == record["samples"][-1] + 1
        assert_equal(values, wanted)
    assert [record["step"] for record in tiny.records("plain")] == [*range(1, STEPS + 1)]
    assert [record["samples"] for record in tiny.records("plain")][SAVED - 1 : SAVED + 1] == [32, 64]
    assert [record["step"] for record in tiny.records("layers", file="layers.jsonl")] == [*range(1, STEPS + 1)]
    saves = [record["step"] for record in tiny.records("plain", file="checkpoints.jsonl")]
    assert saves == [SAVED, 2 * SAVED, STEPS]


@pytest.mark.slow
def test_two_processes_decide_alike(tiny: TinyRun) -> None:
    layouts = {"sharded": degrees(1, 2), "replicas": degrees(2, 1)}
    alone = tiny.config(*GUARD, SAVES, "--job.name=alone")
    on_one(spiking, alone)
    configs = [
        tiny.config(*GUARD, SAVES, *layout, f"--job.name={name}", world_size=2) for name, layout in layouts.items()
    ]
    ends = run_in_turn(spiking, 2, configs)
    others = [never_read(tiny, name, *layout, world_size=2) for name, layout in layouts.items()]
    expected = run_in_turn(spiking, 2, others)
    for name, end, wanted in zip(layouts, ends, expected, strict=True):
        for (_, values), (_, right) in zip(end, wanted, strict=True):
            assert_equal(values, right)
        assert tiny.losses(name) == pytest.approx(tiny.losses("alone"), rel=1e-5)
        [one], [other] = skipped(tiny, name), skipped(tiny, "alone")
        assert (one["step"], one["samples"]) == (other["step"], other["samples"])
        assert {**one["rollback"], "saved_at": 0} == {**other["rollback"], "saved_at": 0}


KILLS = {
    "before-the-host-looks": ("end_step", BAD_STEP),
    "before-the-record": ("record_skipped", 3),
    "after-the-record": ("go_back", 1),
    "before-the-next-checkpoint": ("end_step", 10),
    "after-the-next-checkpoint": ("end_step", 13),
}
"""The host looks after steps 1, 4 and 8. The 9th step is the 5th of the run again."""


@pytest.mark.long
def test_a_run_that_is_killed_at_any_time_has_the_same_bits(tiny: TinyRun) -> None:
    local = ["--checkpoint.interval=100", f"--checkpoint.local_interval={SAVED}"]
    local += [f"--checkpoint.local_folder={tiny.folder}/copies"]
    for kind, options in {"shared": [SAVES], "local": local}.items():
        common = [*GUARD, *options, "--metrics.log_freq=4"]
        [[(_, wanted)]] = run_in_turn(spiking, 1, [tiny.config(*common, f"--job.name={kind}")])
        names = [f"{kind}-{name}" for name in KILLS]
        given = [
            (tiny.config(*common, f"--job.name={name}"), kill) for name, kill in zip(names, KILLS.values(), strict=True)
        ]
        for name, [(stopped, values)] in zip(names, run_in_turn(killed_and_resumed, 1, given), strict=True):
            assert stopped is None, name
            assert_equal(values, wanted)
            last = tiny.folder / "outputs" / name / "checkpoints" / folder_name(STEPS) / "manifest.json"
            manifest = Manifest.from_json(last.read_bytes())
            assert (manifest.samples, manifest.guard["rollbacks"]) == (120, 1), name
            assert [record["step"] for record in tiny.records(name)] == [1, 4, 8, 12], name


@pytest.mark.long
def test_after_so_many_rollbacks_the_run_ends_until_more_are_allowed(tiny: TinyRun) -> None:
    """All samples are bad from one on: each rollback returns to the same checkpoint, with a later position."""
    options = [[*GUARD, SAVES, "--job.name=many", f"--guard.max_rollbacks={most}"] for most in (2, 2, 4)]
    ends = run_in_turn(spiking, 1, [tiny.config(*words) for words in options])
    for [(stopped, _)], times in zip(ends, (2, 2, 4), strict=True):
        assert stopped is not None
        assert stopped[0] == 3
        assert mentions(stopped[1], "step 5", f"{times} times", "guard.max_rollbacks")
    backs = [record["rollback"] for record in skipped(tiny, "many")]
    assert [back and back["samples"] for back in backs] == [56, 64, None, None, 72, 80, None]
    assert [back["rollbacks"] for back in backs if back] == [1, 2, 3, 4]
    folders = (tiny.folder / "outputs" / "many" / "checkpoints").iterdir()
    assert [path.name for path in folders] == [folder_name(SAVED)], "the state before the last spike is not saved"


@pytest.mark.long
def test_without_a_checkpoint_the_step_is_skipped(tiny: TinyRun) -> None:
    names = "rollback", "skip"
    configs = [tiny.config(*GUARD, f"--guard.on_spike={name}", f"--job.name={name}") for name in names]
    [(stopped, values)], [(_, wanted)] = run_in_turn(spiking, 1, configs)
    assert stopped is None
    assert_equal(values, wanted)
    for name in names:
        [record] = skipped(tiny, name)
        assert (record["step"], record["rollback"]) == (BAD_STEP, None)


def with_odd_copies(rank: int, world_size: int, config: Config) -> Result:
    """Train where a local copy takes longer than some steps, or in a run named "impossible", where none can be made."""
    publish = LocalStorage.publish

    def publish_oddly(self: LocalStorage, folder: str, manifest: bytes) -> None:
        if "copies" in str(self.root):
            time.sleep(0.1)
            if config.job.name == "impossible":
                raise OSError("impossible")
        publish(self, folder, manifest)

    with patch.object(LocalStorage, "publish", publish_oddly):
        return spiking(rank, world_size, config)


@pytest.mark.long
def test_a_rollback_returns_to_the_same_copy_however_long_copies_take(tiny: TinyRun) -> None:
    """A due copy is not left out. Where none is whole, the step is skipped."""
    local = ["--checkpoint.local_interval=1", f"--checkpoint.local_folder={tiny.folder}/copies"]
    [[(_, quick)], [(_, skips)]] = run_in_turn(
        spiking,
        1,
        [
            tiny.config(*GUARD, *local, "--job.name=quick"),
            tiny.config(*GUARD, "--guard.on_spike=skip", "--job.name=skips"),
        ],
    )
    names = {"slow": (BAD_STEP - 1, quick), "impossible": (None, skips)}
    ends = run_in_turn(with_odd_copies, 1, [tiny.config(*GUARD, *local, f"--job.name={name}") for name in names])
    for (name, (target, wanted)), [(stopped, values)] in zip(names.items(), ends, strict=True):
        [record] = skipped(tiny, name)
        assert (stopped, record["step"], (record["rollback"] or {}).get("checkpoint")) == (None, BAD_STEP, target)
        assert_equal(values, wanted)
    assert [record["rollback"]["checkpoint"] for record in skipped(tiny, "quick")] == [BAD_STEP - 1]


@pytest.mark.long
def test_another_checkpoint_of_that_step_has_no_decision(tiny: TinyRun) -> None:
    """A record that is damaged, or about a checkpoint that was saved at another time, changes nothing."""
    kill = "end_step", 10
    names = "whole", "other"
    configs = [tiny.config(*GUARD, SAVES, f"--job.name={name}") for name in names]
    [[(_, wanted)]] = run_in_turn(spiking, 1, configs[:1])
    run_in_turn(killed, 1, [(configs[1], kill)])
    records = tiny.folder / "outputs" / "other" / "skipped.jsonl"
    record = json.loads(records.read_text())
    record["rollback"] |= {"saved_at": 1.0, "samples": 8}
    odd = ['{"step": 7, "rollback": {"checkpoint": 4}}', "no JSON", '{"rollback": 3}']
    records.write_text("\n".join([json.dumps(record), *odd]) + "\n")
    [[(_, values)]] = run_in_turn(spiking, 1, configs[1:])
    assert_equal(values, wanted)


def killed(rank: int, world_size: int, given: tuple[Config, tuple[str, int]]) -> None:
    spiking(rank, world_size, *given)


@pytest.mark.long
@pytest.mark.usefixtures("own_process_group")
def test_the_command_ends_with_3(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    """A loss that is 1000 times as large from the seventh batch on."""
    (tiny.folder / "odd.py").write_text(
        "from tests.support.layouts import smoothed_loss\n"
        "from titanlite.loss import TokenLoss\n"
        "calls = []\n"
        "def loss(hidden_BLD, weight_VD, *, labels_BL):\n"
        "    calls.append(1)\n"
        "    found = smoothed_loss(hidden_BLD, weight_VD, labels_BL=labels_BL)\n"
        "    factor = 1000 if len(calls) >= 7 else 1\n"
        "    return TokenLoss(found.total * factor, found.cross_entropy * factor)\n"
    )
    words = [*GUARD, SAVES, f"--training.loss={tiny.folder / 'odd.py'}:loss", "--guard.max_rollbacks=1"]
    with patch("titanlite.guard.SPIKE_WINDOW", 2 * SAVED):
        assert cli.run(["train", "--config", str(tiny.toml), *words]) == 3
    lines = "".join(capfd.readouterr()).splitlines()
    [error] = [line for line in lines if line.startswith("error: ")]
    assert mentions(error, "step 5", "guard.max_rollbacks")
    assert any("--guard.max_rollbacks=2" in line for line in lines)
    assert not any("--guard.nonfinite" in line for line in lines), "which would not help"
    starts = json.loads((tiny.folder / "outputs" / "tiny" / "run.json").read_text())["starts"]
    assert [start["end"]["code"] for start in starts] == [3]
