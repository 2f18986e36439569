"""The faults of a soak: which kinds there are, how each is made, and the list of them as a function of a seed."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from soak_hosts import Hosts
from soak_job import Job, Layout

from titanlite.checkpoint.manifest import MANIFEST, committed_steps, folder_name
from titanlite.storage.storage import LocalStorage

RANK_COUNTS = (1, 2, 4)
RANKS_CHANGE = "ranks"
"""Kind of the faults that change the rank count."""
AWAY = 4
"""Faults on another rank count than the first."""
SHORT_SECONDS = 2.0


@dataclass
class Scene:
    """What a fault may touch: the job, the folder of its checkpoints and that of its records."""

    job: Job
    checkpoints: Path
    records: Path
    random: random.Random
    hosts: Hosts | None

    @property
    def network(self) -> Hosts:
        assert self.hosts is not None
        return self.hosts

    def committed(self) -> list[int]:
        """Return the steps of the checkpoints that count."""
        return committed_steps(LocalStorage(str(self.checkpoints), "").list()) if self.checkpoints.exists() else []


Strike = Callable[[Scene], None]


class Kind(NamedTuple):
    """One kind of fault."""

    title: str
    strike: Strike
    repair: Strike | None = None
    """What an administrator does before the next start, or while the run continues."""
    codes: tuple[int, ...] = ()
    """Exit codes that run_train.sh may end with; empty: the run must continue by itself."""
    moment: str = "step"
    """Time at which the fault comes: in a step, a save or a validation, or with two checkpoints that count."""
    least_ranks: int = 1
    hosts: int = 1
    max_restarts: int = 0
    damages: bool = False
    """The newest checkpoint no longer counts, which only reading it shows."""
    most_lost: int | None = None
    """Steps that may be lost. None: all since the last commit."""


class Fault(NamedTuple):
    """One fault of the list."""

    number: int
    step: int
    kind: str
    ranks: int
    """Processes from the start after this fault on."""


def to_rank(sign: signal.Signals) -> Strike:
    """Return a fault that signals one rank."""
    return lambda scene: _kill(scene.random.choice(scene.job.ranks()), sign)


def to_launcher(sign: signal.Signals) -> Strike:
    """Return a fault that signals run_train.sh."""
    return lambda scene: _kill(scene.job.launchers()[0], sign)


def plant_nan(scene: Scene) -> None:
    rank = scene.random.randrange(scene.job.layout.ranks)
    (scene.job.hooks / f"nan-{rank}").touch()


def cut_link_shortly(scene: Scene) -> None:
    scene.network.cut()
    time.sleep(SHORT_SECONDS)
    scene.network.restore()


def flip_bits(scene: Scene) -> None:
    """Kill the job, and change a few bits of a data file of the newest checkpoint."""
    path = _victim(scene)
    data = bytearray(path.read_bytes())
    for _ in range(3):
        data[scene.random.randrange(len(data))] ^= 1 << scene.random.randrange(8)
    path.write_bytes(data)


def truncate_file(scene: Scene) -> None:
    """Kill the job, and cut off a part of a data file of the newest checkpoint."""
    path = _victim(scene)
    os.truncate(path, path.stat().st_size // 2)


def lose_manifest(scene: Scene) -> None:
    """Kill the job, and delete the manifest of the newest checkpoint."""
    (_victim(scene).parent / MANIFEST).unlink()


KINDS = {
    "kill-rank": Kind("SIGKILL of a rank", to_rank(signal.SIGKILL), codes=(1, -signal.SIGKILL)),
    "kill-rank-in-save": Kind(
        "SIGKILL of a rank in a save", to_rank(signal.SIGKILL), codes=(1, -signal.SIGKILL), moment="save"
    ),
    "kill-launcher": Kind(
        "SIGKILL of run_train.sh", to_launcher(signal.SIGKILL), codes=(-signal.SIGKILL,), least_ranks=2
    ),
    "kill-rank-restarts": Kind(
        "SIGKILL of a rank, with MAX_RESTARTS=1", to_rank(signal.SIGKILL), least_ranks=2, max_restarts=1
    ),
    "term-rank": Kind("SIGTERM to a rank", to_rank(signal.SIGTERM), codes=(75,), most_lost=1),
    "term-launcher": Kind("SIGTERM to run_train.sh", to_launcher(signal.SIGTERM), codes=(75,), most_lost=1),
    "term-in-save": Kind("SIGTERM in a save", to_launcher(signal.SIGTERM), codes=(75,), moment="save", most_lost=1),
    "usr1-in-validation": Kind(
        "SIGUSR1 in validation", to_launcher(signal.SIGUSR1), codes=(75,), moment="validation", most_lost=1
    ),
    RANKS_CHANGE: Kind("SIGTERM, then another rank count", to_launcher(signal.SIGTERM), codes=(75,), most_lost=1),
    "stop-rank": Kind("SIGSTOP of a rank", to_rank(signal.SIGSTOP), codes=(1,), least_ranks=2),
    "nan": Kind("NaN in a loss, once", plant_nan, codes=(3,), most_lost=1),
    "disk-checkpoints": Kind(
        "disk full under checkpoints",
        lambda scene: fill(scene.checkpoints),
        lambda scene: empty(scene.checkpoints),
        codes=(1,),
    ),
    "disk-records": Kind(
        "disk full under records", lambda scene: fill(scene.records), lambda scene: empty(scene.records)
    ),
    "flip": Kind(
        "SIGKILL of all, bits of the newest checkpoint flipped",
        flip_bits,
        codes=(1, -signal.SIGKILL),
        moment="checkpoint",
        damages=True,
    ),
    "truncate": Kind(
        "SIGKILL of all, newest checkpoint truncated",
        truncate_file,
        codes=(1, -signal.SIGKILL),
        moment="checkpoint",
        damages=True,
    ),
    "manifest": Kind(
        "SIGKILL of all, manifest of the newest lost", lose_manifest, codes=(1, -signal.SIGKILL), moment="checkpoint"
    ),
    "link": Kind(
        "link between two hosts cut",
        lambda scene: scene.network.cut(),
        lambda scene: scene.network.restore(),
        codes=(1,),
        least_ranks=2,
        hosts=2,
    ),
    "link-shortly": Kind("link cut for 2 s", cut_link_shortly, least_ranks=2, hosts=2),
    "host": Kind(
        "one of two hosts killed",
        lambda scene: scene.network.kill_one(),
        lambda scene: scene.network.rebuild(),
        codes=(1, -signal.SIGKILL),
        least_ranks=2,
        hosts=2,
    ),
}
"""Every kind of fault, by its name in the records."""


def schedule(
    seed: int, *, steps: int, every: int, kinds: Sequence[str], margin: int, first_ranks: int = 2
) -> list[Fault]:
    """Return the faults of a soak: one about every `every` steps, each kind as often as the others.

    Several kinds need two ranks. So another rank count lasts for AWAY faults, and then the first one returns.

    Args:
        kinds: keys of KINDS.
        margin: steps at the end without a fault.
        first_ranks: processes of the first start.
    """
    draw = random.Random(seed)
    waiting: list[str] = []
    faults: list[Fault] = []
    ranks, away = first_ranks, 0
    for number in range((steps - margin) // every):
        step = every * (number + 1) + draw.randrange(-every // 3, every // 3 + 1)
        if not any(KINDS[name].least_ranks <= ranks for name in waiting):
            waiting += draw.sample(list(kinds), len(kinds))
        if away == AWAY:
            name, ranks = RANKS_CHANGE, first_ranks
        else:
            name = next(name for name in waiting if KINDS[name].least_ranks <= ranks)
            waiting.remove(name)
            if name == RANKS_CHANGE:
                ranks = draw.choice([count for count in RANK_COUNTS if count != ranks])
        away = away + 1 if ranks != first_ranks else 0
        faults.append(Fault(number, step, name, ranks))
    return faults


def layout_for(ranks: int, coming: Sequence[Fault]) -> Layout:
    """Return the layout of a start that lasts until the first coming fault that ends it or takes its restart."""
    hosts = max_restarts = 0
    for fault in coming:
        kind = KINDS[fault.kind]
        hosts, max_restarts = max(hosts, kind.hosts), max(max_restarts, kind.max_restarts)
        if kind.codes or kind.max_restarts:
            break
    return Layout(ranks, max(hosts, 1), max_restarts)


def fill(folder: Path) -> None:
    """Fill the disk of a folder to the last byte."""
    with _ballast(folder).open("wb", buffering=0) as file, suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def empty(folder: Path) -> None:
    """Free what `fill` has taken."""
    _ballast(folder).unlink(missing_ok=True)


def has_room_to_fill(folder: Path) -> bool:
    """Return whether a disk is small, and its own: that of nobody else is filled."""
    return folder.is_mount() and shutil.disk_usage(folder).total < 1 << 28


def _ballast(folder: Path) -> Path:
    return folder / "ballast"


def _kill(pid: int, sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, sign)


def _victim(scene: Scene) -> Path:
    """Kill the job, and return a data file of its newest checkpoint."""
    scene.job.kill()
    newest = scene.checkpoints / folder_name(scene.committed()[-1])
    return scene.random.choice(sorted(newest.glob("*.distcp")))
