"""Kill the two ranks of a run that makes local copies, each on a machine of its own, and spoil what they leave.

The verdict does not ask the code under test: a resume must begin at the newest step of which this file finds every
byte, and the end must be that of a run without faults.
"""

import json
import shutil
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from tests.support.crash import CLOCK_JUMP, TIMEOUT, CrashRun, _resumed_at
from titanlite.checkpoint.manifest import committed_steps

KINDS = (
    "rank", "machine", "flip-one", "flip-both", "cut-one", "cut-both", "while-copying", "half-sent", "clock",
    "twice", "machine-and-flip", "at-once",
)  # fmt: skip
"""Kinds of faults: a rank or both at once are killed; a machine is replaced by an empty one; files of the newest copy
are changed or cut, in one machine or both; ranks are killed while copies are written or sent, or again while they
resume; the clock of the next start is wrong."""
INTERVAL, SHARED = 2, 11
OPTIONS = (
    f"--checkpoint.local_interval={INTERVAL}",
    f"--checkpoint.interval={SHARED}",
    "--checkpoint.local_folder=~/copies",
    "--checkpoint.keep_latest_k=1",
)


class LocalCrashRun(CrashRun):
    """A run in an empty folder, with a machine for each of its two ranks."""

    def __init__(self, folder: Path, *, seed: int, options: Sequence[str] = ()) -> None:
        super().__init__(folder, seed=seed, options=(*OPTIONS, *options))
        self.homes = [folder / f"machine-{rank}" for rank in range(2)]
        for home in self.homes:
            home.mkdir()
        self.clock = 0.0
        self.expected, self.done = 0, 0

    def environ(self, rank: int) -> dict[str, str]:
        return {"HOME": str(self.homes[rank]), CLOCK_JUMP: str(self.clock)}

    def fault(self, kind: str) -> str:
        """Start the run, kill it, spoil what is left. Returns what happened."""
        began_at, victim = self.expected, self.random.randrange(2)
        steps = self.random.randrange(1, 3 * INTERVAL)
        with self._started("tiny", 1_000_000) as (ranks, output):
            deadline = time.monotonic() + TIMEOUT
            while not self._is_due(kind, began_at + steps, output, str(ranks[0].pid)):
                lives = time.monotonic() < deadline and all(rank.is_alive() for rank in ranks)
                assert lives, f"{kind}: ended by itself, or makes no progress: {output.read_text()}"
                time.sleep(0.001)
            time.sleep(0.03 * self.random.random())
            ranks[victim].kill()
            if kind == "rank":
                time.sleep(self.random.random())  # the other may notice
            ranks[1 - victim].kill()
            for rank in ranks:
                rank.join()
        self._check_start(kind, output)
        self._spoil(kind, victim)
        self.clock = 7200.0 * self.random.choice([-1, 1]) if kind == "clock" else 0.0
        self.expected = max(self._whole())
        return f"{kind}: resumed at {began_at}, {self.done} done, {self.done - self.expected} to do again"

    def finish(self) -> int:
        """Let the run end, and compare it with one without faults."""
        self.newest = self.expected
        return super().finish()

    def _check(self, output: Path, *, may_be_silent: bool = False) -> None:
        """Check the last start."""
        assert _resumed_at(output) == self.expected, output.read_text()

    def _check_start(self, kind: str, output: Path) -> None:
        resumed_at, text = _resumed_at(output), output.read_text()
        if not (kind == "twice" and resumed_at is None):
            assert resumed_at == self.expected, f"{kind}: {self.expected} is whole: {text}"
        records = self.tiny.folder / "outputs" / "tiny" / "metrics.jsonl"
        lines = records.read_text().splitlines() if records.exists() else []
        self.done = json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else self.done

    def _is_due(self, kind: str, step: int, output: Path, pid: str) -> bool:
        if kind == "twice":  # a second fault within the recovery from the one before
            return f"process {pid} " in (self.tiny.folder / "outputs" / "tiny" / ".lock").read_text()
        if (resumed_at := _resumed_at(output)) is None or max(self._copies(), default=0) <= resumed_at:
            return False
        if kind in ("while-copying", "half-sent"):
            name = "__0_0" if kind == "half-sent" else ""
            return any(self.homes[1].glob(f"copies/*/.staging-*/{name}*"))
        return f"\nstep {step:>5} " in output.read_text() or max(self._copies(), default=0) > step

    def _spoil(self, kind: str, victim: int) -> None:
        if kind.startswith("machine"):
            shutil.rmtree(self.homes[victim] / "copies", ignore_errors=True)
        homes = self.homes if kind.endswith("both") else [self.homes[1 - victim]]
        folders = [folder for home in homes for folder in sorted(home.glob("copies/*/step-*"))[-1:]]
        rank = self.random.randrange(2)
        for path in (folder / f"__{rank}_0.distcp" for folder in folders):
            if path.exists() and "flip" in kind:
                data = bytearray(path.read_bytes())
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
                path.write_bytes(data)
            elif path.exists() and "cut" in kind:
                path.write_bytes(path.read_bytes()[:-1])

    def _copies(self) -> set[int]:
        """Return the steps of which each machine has committed a copy."""
        return {int(path.parent.name[5:]) for home in self.homes for path in home.glob("copies/*/step-*/manifest.json")}

    def _whole(self) -> list[int]:
        """Return the steps from which the run can resume: of checkpoints, and of copies with all their bytes."""
        found = [0, *committed_steps(self.storage.list())]
        for path in (path for home in self.homes for path in home.glob("copies/*/step-*/manifest.json")):
            manifest = json.loads(path.read_text())
            if all(self._has(path.parent, name, record) for name, record in manifest["files"].items()):
                found.append(manifest["step"])
        return found

    def _has(self, folder: Path, name: str, record: dict[str, str]) -> bool:
        places = [home / "copies" / folder.parent.name / folder.name / name for home in self.homes]
        return any(place.exists() and f"{zlib.crc32(place.read_bytes()):08x}" == record["crc32"] for place in places)
