"""Kill the two ranks of a training run at random times, and check that nothing committed is lost.

A loss of power is not tried: it can also lose what the system has not yet written to disk.
"""

import json
import multiprocessing
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.helpers import TinyRun, free_port
from titanlite.checkpoint import manifest as manifests
from titanlite.storage.storage import LocalStorage
from titanlite.tools import cli

WHEN = ("save", "any", "save", "start", "save", "any")
SIGNS = (".staging-", "__", ".metadata", "checksums.json", "manifest.json", ".deleted-")
"""Stages of a save: how the name of a folder begins, or that of a file in the staging folder."""
COMPARED = ("step", "loss", "grad_norm", "lr", "samples")
TIMEOUT = 600.0  # seconds
CLOCK_JUMP = "TITANLITE_TEST_CLOCK_JUMP"
"""Environment variable: seconds by which the clock of a rank is wrong."""
OPTIONS = "--model.args.dim=120 --model.args.hidden_dim=320 --checkpoint.interval=1 --checkpoint.keep_latest_k=3"


def train(rank: int, output: Path, port: int, command: list[str], environ: dict[str, str]) -> None:
    """Train like `python -m titanlite` under torchrun."""
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", **{key: str(numbers[key]) for key in numbers}}
    os.environ |= environ
    if jump := float(os.environ.get(CLOCK_JUMP, 0)):
        clock = time.time
        time.time = lambda: clock() + jump
    torch.set_num_threads(1)  # for OMP_NUM_THREADS it is too late
    sys.argv = command
    cli.main()


class CrashRun:
    """A run in an empty folder. Its ranks are forked ("forkserver"), or an interpreter of their own each ("spawn")."""

    train = staticmethod(train)
    """What a rank does."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        method: str = "forkserver",
        options: Sequence[str] = (),
    ) -> None:
        self.tiny = TinyRun(folder)
        self.command = ["titanlite", "train", f"--config={self.tiny.toml}", *OPTIONS.split(), *options]
        self.random = random.Random(seed)
        self.context: Any = multiprocessing.get_context(method)
        self.context.set_forkserver_preload(["tests.support.preload"])
        self.storage = LocalStorage(f"{folder}/outputs/tiny/checkpoints", "")
        self.starts = self.newest = 0  # newest: the last step that was committed when the last start ended

    def kill(self) -> str:
        """Start the run, kill it, check what is left. Returns what happened."""
        before, when = self.newest, WHEN[self.starts % len(WHEN)]
        when = self.random.choice(SIGNS) if when == "save" else when
        skip, first = self.random.randrange(3), self.random.randrange(2)
        delay = {"start": 0.5, "any": 1.0}.get(when, 0.03) * self.random.random() ** 2
        apart = self.random.choice([0, 0, 0.5]) * self.random.random()  # the other may notice
        with self._started("tiny", 1_000_000) as (ranks, output):  # steps: it cannot end before it is killed
            deadline = time.monotonic() + TIMEOUT
            while not self._is_time(when, skip, ranks[0].pid, output):
                lives = time.monotonic() < deadline and all(rank.is_alive() for rank in ranks)
                assert lives, f"ended by itself, or makes no progress: {output.read_text()}"
                time.sleep(0.001)
            time.sleep(delay)
            ranks[first].kill()
            time.sleep(apart)
            ranks[1 - first].kill()
        left = " ".join(sign for sign in SIGNS if self._shows(sign))
        self._check(output, may_be_silent=when == "start")
        shown = f"{when} + {1000 * delay:.1f} ms, rank {1 - first} {1000 * apart:.0f} ms later"
        return f"{shown}: step {before} -> {self.newest}, left {left or 'nothing'}"

    def finish(self) -> int:
        """Let the run end, and compare it with one that is never killed. Returns the number of its steps."""
        last, outputs, records, states = self.newest + 3, self.tiny.folder / "outputs", [], []
        owner = json.loads((outputs / "tiny" / "run.json").read_text())["id"]
        for what in ("staging", "deleted"):  # a kill may leave these; this step is not saved again
            (self.storage.root / f".{what}-{manifests.folder_name(0)}-{owner}").mkdir(parents=True)
        for name in ("whole", "tiny"):
            with self._started(name, last) as (ranks, output):
                for rank in ranks:
                    rank.join(TIMEOUT)
                assert all(rank.exitcode == 0 for rank in ranks), f"did not end well: {output.read_text()}"
            records.append([[record[key] for key in COMPARED] for record in self.tiny.records(name)])
            states.append(_state(outputs / name, last))
        self._check(output)
        kept, left = (sorted(os.listdir(outputs / name / "checkpoints")) for name in ("whole", "tiny"))
        assert left == kept, f"left: {left}, without kills: {kept}"
        steps = [step for step, *_ in records[1]]
        assert steps == [*range(1, last + 1)], f"not every step once: {steps}"
        differ = [f"{one}, without kills: {whole}" for whole, one in zip(*records, strict=True) if one != whole]
        differ += [name for name in {**states[0], **states[1]} if not torch.equal(*(state[name] for state in states))]
        assert not differ, "not the same bits:\n" + "\n".join(differ)
        return last

    def environ(self, rank: int) -> dict[str, str]:
        """Return further environment variables of a rank."""
        return {}

    @contextmanager
    def _started(self, name: str, steps: int) -> Iterator[tuple[list[Any], Path]]:
        """Start the ranks; yield them and the file of rank 0's output. No process is left when the context ends."""
        self.starts += 1
        outputs = [self.tiny.folder / f"start-{self.starts}-rank-{rank}.txt" for rank in range(2)]
        args = free_port(), [*self.command, f"--job.name={name}", f"--training.steps={steps}"]
        ranks = [
            self.context.Process(target=self.train, args=(rank, outputs[rank], *args, self.environ(rank)))
            for rank in range(2)
        ]
        outputs[0].touch()
        try:
            for rank in ranks:
                rank.start()
            yield ranks, outputs[0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()

    def _is_time(self, when: str, skip: int, pid: int, output: Path) -> bool:
        if when == "start":  # to sweep, to load, to open metrics.jsonl
            return f"process {pid} " in (self.tiny.folder / "outputs" / "tiny" / ".lock").read_text()
        saves = max(manifests.committed_steps(self.storage.list()), default=0) - self.newest
        if when == "any":
            return saves > skip
        # Before it prints where it resumes, what is staged can be of the start before. Some signs are hard to catch.
        return _resumed_at(output) is not None and saves >= skip and (self._shows(when) or saves > 10)

    def _check(self, output: Path, *, may_be_silent: bool = False) -> None:
        """Check that this start resumed from the newest checkpoint, and that all committed ones are complete."""
        resumed_at = _resumed_at(output)
        what = f"resumed at {resumed_at}, {self.newest} was the newest: {output.read_text()}"
        assert resumed_at == self.newest or (resumed_at is None and may_be_silent), what
        listing = self.storage.list()
        steps = manifests.committed_steps(listing)
        for folder in map(manifests.folder_name, steps):
            manifests.verify(self.storage, folder, listing[folder])
        assert max(steps, default=0) >= self.newest, f"{self.newest} was there, now there are {steps}"
        self.newest = max(steps, default=0)

    def _shows(self, sign: str) -> bool:
        folders = self.storage.list()
        staged = [name for folder in folders if folder.startswith(".staging-") for name in folders[folder]]
        return any(name.startswith(sign) for name in [*folders, *staged])


def _resumed_at(output: Path) -> int | None:
    """Return the step that a start resumes from, by its output; 0 if it begins; None if it is not printed yet."""
    match = re.search(r"^resuming after step (\d+)|^step +1 ", output.read_text(), re.M)
    return int(match[1] or 0) if match else None


def _state(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read by PyTorch alone."""
    dcp_to_torch_save(run / "checkpoints" / manifests.folder_name(step), run / "state.pt")
    parts = torch.load(run / "state.pt", weights_only=True)
    return {f"{part}.{name}": tensor for part in parts for name, tensor in parts[part].items()}
