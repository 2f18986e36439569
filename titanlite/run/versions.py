"""Comparison of all ranks at every start: versions and config must be equal.

One rank with another PyTorch, another commit or another option trains something else than the others, or hangs in a
collective that they do not make. So the ranks gather a hash first, and what it is of only if the hashes differ.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.runtime.console import hide_secrets
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import read_small
from titanlite.runtime.ranks import gather, named_ranks
from titanlite.version import PACKAGE, __version__

PACKAGES = ("torchao", "triton")
"""Optional packages that compute, beside PyTorch."""

OWN_PATHS = re.compile(
    r"(data|validation)\.(path|cache_folder|tokenizer|sources\.\d+\.path|tasks)(\.\d+)?|model\.file|training\.loss|"
    r"checkpoint\.initial_load_path|offload\.path|metrics\.loggers(\.\d+)?"
)
"""Options that may differ from host to host: paths of what each host may keep in a place of its own.

The content behind them is compared instead: of code here, of tokens and tokenizer when the data is open.
"""


@dataclass(frozen=True)
class Facts:
    """Versions and config that one rank starts with."""

    host: str
    versions: dict[str, str]
    config: dict[str, str]
    """Value of each option, by its dotted key."""


def check_equal_start(config: Mapping[str, Any], device: torch.device) -> None:
    """Check that all ranks start with the same software and config.

    All ranks call this together, before anything that depends on the config.

    Args:
        config: tree of the resolved config.

    Raises:
        UserError: on every rank, with one line for each difference.
    """
    if dist.get_world_size() == 1:
        return
    if found := compare(facts_of(config, device)):
        raise UserError("\n".join(found))


def facts_of(config: Mapping[str, Any], device: torch.device) -> Facts:
    """Collect what this rank starts with."""
    options = flat(config)
    has_place = options.get("checkpoint.folder", "null") != "null" or options.get("checkpoint.enable") == "false"
    if has_place:  # else the run's folder holds the checkpoints, which are one for all hosts
        options.pop("job.dump_folder", None)
    code = {key: _code_in(options.get(key, "")) for key in ("model.file", "training.loss")}
    return Facts(
        host=platform.node(),
        versions=versions_of(device) | {f"{key} with content": digest for key, digest in code.items() if digest},
        config={key: value for key, value in options.items() if not OWN_PATHS.fullmatch(key)},
    )


def versions_of(device: torch.device) -> dict[str, str]:
    """Return the version of everything that computes or communicates."""
    found = {
        "titanlite": f"{__version__} (source {source_digest(PACKAGE)})",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        from torch.cuda import nccl

        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, nccl.version()))
    return found


def source_digest(folder: Path) -> str:
    """Return a hash of the Python files below a folder. It shows changes that are in no commit, and needs no git."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def flat(tree: Any, prefix: str = "") -> dict[str, str]:
    """Return the values of a nested config as JSON, by dotted key. Keys and passwords in URLs are hidden."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if items is None or not tree:
        return {prefix: hide_secrets(json.dumps(tree))}
    return {
        key: value
        for name, part in items
        for key, value in flat(part, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def compare(facts: Facts) -> list[str]:
    """Return a line for each difference between the facts of all ranks, which call this together."""
    mine = asdict(facts)
    del mine["host"]
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    digests = gather(digest)
    if len(set(digests)) == 1:
        return []
    return differences([Facts(**one) for one in gather(asdict(facts))])


def differences(ranks: Sequence[Facts]) -> list[str]:
    """Return a line for each value that rank 0 does not have.

    Args:
        ranks: facts of every rank, in order.
    """
    hosts = [facts.host for facts in ranks]
    find = partial(_lines, hosts=hosts)
    return [
        *find([facts.versions for facts in ranks], "install and check out the same on all hosts"),
        *find([facts.config for facts in ranks], "start all hosts with the same config and options", sign=" = "),
    ]


def _lines(values: Sequence[Mapping[str, str]], remedy: str, *, hosts: Sequence[str], sign: str = " ") -> list[str]:
    lines = []
    for name in sorted({name for of_rank in values for name in of_rank}):
        holders: dict[str | None, list[int]] = {}
        for rank, of_rank in enumerate(values):
            holders.setdefault(of_rank.get(name), []).append(rank)
        expected = values[0].get(name)
        for value, ranks in holders.items():
            if value != expected:
                verb = "has" if len(ranks) == 1 else "have"
                mine, other = (f"no {name}" if v is None else f"{name}{sign}{v}" for v in (value, expected))
                lines.append(f"{named_ranks(ranks, hosts)} {verb} {mine}, rank 0 on {hosts[0]} has {other}: {remedy}")
    return lines


def _code_in(value: str) -> str:
    """Return a hash of the Python file that an option names; "" if it names a module or nothing."""
    path = Path(str(json.loads(value or "null")).partition(".py")[0] + ".py")
    return hashlib.sha256(read_small(path)).hexdigest()[:12] if ".py" in value and path.is_file() else ""
