"""Find the files that paths of `[data]` and `titanlite data prepare` name, in the order in which they are read.

Only names are looked at here, and the first line of a `.json` file that is named itself.
"""

import glob
import importlib.util
import json
import logging
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from titanlite.data.prepared import HUGGING_FACE, STDLIB, is_token_folder
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import why_not_writable
from titanlite.tools.ingest.streams import PACKINGS, Stream

logger = logging.getLogger(__name__)

STDLIB_LEAVES_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
STDLIB_VALIDATION = 16
"""Each file whose number is a multiple of this is for validation."""
KINDS = {".jsonl": "lines", ".ndjson": "lines", ".jsonlines": "lines", ".json": "json", ".parquet": "parquet"}
READABLE = "text and JSON lines (both also .gz and .zst) and .parquet can be read"


def local_folder(name: str) -> Path:
    """Return the folder that --out names.

    Raises:
        UserError: it is no folder of this machine, or cannot be written.
    """
    if "://" in name:
        raise UserError(f"{name}: tokens are written to a local folder; name one, and copy it afterwards")
    if problem := why_not_writable(name):
        raise UserError(f"--out: {problem}")
    return Path(os.path.abspath(os.path.expanduser(name)))


class File(NamedTuple):
    """File or dataset to read, with its size and time of change."""

    path: str
    source: int
    """Number of the path that it was found by."""
    kind: str
    """text, lines, json (lines or text, by its first line), parquet or dataset."""
    packing: str = ""
    named: bool = True
    """True if a path names the file itself, False if it was found in a folder."""
    size: int = 0
    mtime_ns: int = 0
    identity: Any = None
    """Device and inode, to find two names of one file."""


def find_files(paths: Sequence[str]) -> list[File]:
    """The files that the paths name, sorted within each path.

    Raises:
        UserError: a path names nothing, or what cannot be read, or a file that another names too.
    """
    files: list[File] = []
    first: dict[Any, File] = {}
    for source, path in enumerate(paths):
        found = {file.path: file for file in _find(path, source)}
        if not found:
            raise UserError(f"no file in {path}")
        links = 0
        for file in sorted(found.values(), key=lambda file: file.path.split(os.sep)):
            other = first.setdefault(file.identity, file)
            if other.source != source:
                raise UserError(f"{file.path} is named twice, by {paths[other.source]} and by {path}: name it once")
            if other is file:
                files.append(file)
            else:
                links += 1
        if links:
            logger.warning("%s: %d files are others under another name, and are read once", path, links)
    for file in {(file.kind, file.packing): file for file in files}.values():
        _check_packages(file)
    return files


def first_object(path: str, packing: str) -> dict[str, Any] | None:
    """The first line, if it is a JSON object and not longer than 1 MiB: the file is JSON lines then, or one line."""
    with Stream(path, packing) as stream:
        line = stream.read(2**20).partition(b"\n")[0]
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _find(path: str, source: int) -> Iterator[File]:
    """Yield the files of a path. A file may come more than once; the last one counts."""
    if path.startswith(STDLIB):
        yield from (_file(name, source, named=False) for name in _standard_library(path))
        return
    if path.startswith(HUGGING_FACE):
        yield File(path, source, "dataset", identity=path)
        return
    if "://" in path:
        raise UserError(f"{path} can be read only if it is a folder of prepared tokens, alone: copy text here first")
    path = os.path.expanduser(path)
    names = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)
    if not names:
        raise UserError(f"no file or folder {path}")
    for name in sorted(names, key=os.path.isdir):  # what is found in a folder too counts as found there
        yield from _walk(name, source) if os.path.isdir(name) else [_file(name, source, named=True)]


def _standard_library(path: str) -> list[str]:
    names: list[str] = []
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = set(folders) - STDLIB_LEAVES_OUT
        names += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    names.sort(key=lambda name: name.split(os.sep))
    match path.removeprefix(STDLIB):
        case "":
            return names
        case "train":
            return [name for number, name in enumerate(names, start=1) if number % STDLIB_VALIDATION]
        case "validation":
            return names[STDLIB_VALIDATION - 1 :: STDLIB_VALIDATION]
    raise UserError(f"{path} is none of {STDLIB}, {STDLIB}train and {STDLIB}validation")


def _walk(root: str, source: int) -> Iterator[File]:
    visited = set()  # links can lead round in circles
    for folder, folders, names in os.walk(root, onerror=_refuse, followlinks=True):
        identity = _identity(os.stat(folder))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        if identity in visited:
            folders.clear()
        elif is_token_folder(names):
            if folder == root:
                raise UserError(
                    f"{folder} holds prepared tokens, which no other path can be beside: give each folder of tokens, "
                    "and the text, an entry of its own in [[data.sources]]"
                )
            logger.warning("%s holds prepared tokens, not text, and is left out", folder)
            folders.clear()
        elif "dataset_dict.json" in names:
            splits = ", ".join(os.path.join(folder, name) for name in folders)
            raise UserError(f"{folder} holds several splits: name those that are meant ({splits})")
        elif {"dataset_info.json", "state.json"} <= set(names):
            yield File(folder, source, "dataset", identity=identity)
            folders.clear()
        else:
            for name in names:
                path = os.path.join(folder, name)
                if not name.startswith(".") and (os.path.isfile(path) or os.path.islink(path)):
                    yield _file(path, source, named=False)
        visited.add(identity)


def _refuse(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename} cannot be read: {error.strerror}")


def _file(path: str, source: int, *, named: bool) -> File:
    path = os.path.normpath(path)
    stem, suffix = os.path.splitext(os.path.basename(path).lower())
    if packing := PACKINGS.get(suffix, ""):
        suffix = os.path.splitext(stem)[1]
    kind = KINDS.get(suffix, "text")
    try:
        stats = os.stat(path)
        if named and not stat.S_ISREG(stats.st_mode):
            raise UserError(f"{path} is neither a file nor a folder")
        if named and kind == "json":
            kind = "lines"
            if first_object(path, packing) is None:
                raise UserError(
                    f"{path} cannot be read: it is JSON in one piece, not an object a line; {READABLE}. For a list "
                    f"of objects: jq -c '.[]' FILE.json > FILE.jsonl"
                )
    except OSError as error:  # a link that leads nowhere, an unreadable file: reported when it is read
        if named:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        return File(path, source, "text", packing, named, identity=path)
    return File(path, source, kind, packing, named, stats.st_size, stats.st_mtime_ns, _identity(stats))


def _identity(stats: os.stat_result) -> tuple[int, int]:
    return stats.st_dev, stats.st_ino


def _check_packages(file: File) -> None:
    package = {"parquet": "pyarrow", "dataset": "datasets"}.get(file.kind)
    if file.packing == "zstd":
        package = "pyarrow"
    if package and importlib.util.find_spec(package) is None:
        install = "pip install datasets" if package == "datasets" else install_hint("data")
        raise UserError(f"{file.path} cannot be read without the package {package}: {install}")
