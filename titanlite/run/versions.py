"""Comparison of all ranks at every start: versions and config must be equal.

One rank with another PyTorch, another commit or another option trains something else than the others, or hangs in a
collective that they do not make. So the ranks gather a hash first, and what it is of only if the hashes differ.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.runtime.console import flat
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


def facts_of(config: Mapping[str, Any], device: torch.device) -> dict[str, str]:
    """Return the versions that this rank starts with, each option by its dotted key, and hashes of code that options
    name."""
    options = flat(config)
    has_place = options.get("checkpoint.folder", "null") != "null" or options.get("checkpoint.enable") == "false"
    if has_place:  # else the run's folder holds the checkpoints, which are one for all hosts
        options.pop("job.dump_folder", None)
    code = {key: _code_in(options.get(key, "")) for key in ("model.file", "training.loss")}
    return {
        **versions_of(device),
        **{f"content of {key}": digest for key, digest in code.items() if digest},
        **{key: value for key, value in options.items() if not OWN_PATHS.fullmatch(key)},
    }


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


def compare(facts: Mapping[str, str]) -> list[str]:
    """Return a line for each difference between the facts of all ranks, which call this together."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return differences(gather((platform.node(), facts))) if len(set(gather(digest))) > 1 else []


def differences(ranks: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return a line for each value that rank 0 does not have.

    Args:
        ranks: host and facts of every rank, in order.
    """
    hosts, expected = [host for host, _ in ranks], ranks[0][1]
    lines = []
    for name in sorted({name for _, facts in ranks for name in facts}):
        holders: dict[str | None, list[int]] = {}
        sign = " = " if "." in name else " "
        for rank, (_, facts) in enumerate(ranks):
            holders.setdefault(facts.get(name), []).append(rank)
        for value in [value for value in holders if value != expected.get(name)]:
            has = f"{named_ranks(holders[value], hosts)} {'has' if len(holders[value]) == 1 else 'have'}"
            mine, first = (
                f"no {name}" if fact is None else f"{name}{sign}{fact}" for fact in (value, expected.get(name))
            )
            lines.append(f"{has} {mine}, rank 0 on {hosts[0]} has {first}: let all hosts start with the same")
    return lines


def _code_in(value: str) -> str:
    """Return a hash of the Python file that an option names; "" if it names a module or nothing."""
    path = Path(str(json.loads(value or "null")).partition(".py")[0] + ".py")
    return hashlib.sha256(read_small(path)).hexdigest()[:12] if ".py" in value and path.is_file() else ""
