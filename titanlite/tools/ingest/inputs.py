"""Find the files that paths of `[data]` and `titanlite data prepare` name, in the order in which they are read.

Only names are looked at here, the first line of a `.json` file that is named itself, and the beginning of `index.json`.
"""

import glob
import importlib.util
import logging
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from titanlite.data.prepared import HUGGING_FACE, READER, STDLIB, is_token_folder
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import is_file_url, why_not_writable
from titanlite.tools.ingest.formats import FORMATS, READABLE, File, first_object, own_kind
from titanlite.tools.ingest.streams import PACKINGS, states_at

logger = logging.getLogger(__name__)

STDLIB_LEAVES_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
STDLIB_VALIDATION = 16
"""Each file whose number is a multiple of this is for validation."""
ABOUT_OTHERS = {"_SUCCESS", "_metadata", "_common_metadata", "dataset_info.json", "dataset_infos.json", "state.json"}
"""Files that Spark and Hugging Face datasets write beside those with text."""
OF_DATATROVE = ".ds", ".ds.index", ".ds.metadata", ".ds.loss"
KINDS = {suffix: kind for kind, file_format in FORMATS.items() for suffix in file_format.suffixes}


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


def find_files(paths: Sequence[str]) -> list[File]:
    """Return the files that the paths name, sorted within each path.

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


def _find(path: str, source: int) -> Iterator[File]:
    """Yield the files of a path. A file may come more than once; the last one counts."""
    if path.startswith(STDLIB):
        yield from (_file(name, source, named=False) for name in _standard_library(path))
        return
    if path.startswith(READER):
        name, _, read = path.removeprefix(READER).partition("?")
        if not read or read.startswith(HUGGING_FACE):
            raise UserError(f"{path} names no files: expected {READER}file.py:function?PATH")
        kind = own_kind(name)
        for file in _find(read, source):
            if file.kind == "dataset":
                raise UserError(f"{path}: {file.path} is a dataset, which its own package reads")
            yield file._replace(kind=kind, packing="")
        return
    if path.startswith(HUGGING_FACE) and not (path.startswith(HUGGING_FACE + "datasets/") and is_file_url(path)):
        yield File(path, source, "dataset", identity=path)
        return
    if is_file_url(path):
        yield from (_file(name, source, named=True, state=state) for name, state in states_at(path).items())
        return
    if "://" in path:
        raise UserError(f"{path} can be read only if it is a folder of prepared tokens, alone: name its files of text")
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
                    f"{folder} holds prepared tokens, and another path text: give each an entry of its own in "
                    "[[data.sources]]"
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
            for name in _leave_out(folder, names):
                path = os.path.join(folder, name)
                if not name.startswith(".") and (os.path.isfile(path) or os.path.islink(path)):
                    yield _file(path, source, named=False)
        visited.add(identity)


def _leave_out(folder: str, names: list[str]) -> list[str]:
    """Return the names of a folder's files without those that describe others.

    Raises:
        UserError: the files are those of a program that writes tokens or arrays, and no text.
    """
    begin = b""
    if "index.json" in names:
        with open(os.path.join(folder, "index.json"), "rb") as file:
            begin = file.read(2**12)
    if b'"chunks"' in begin and b'"chunk_bytes"' in begin:
        raise UserError(
            f"{folder} is a dataset of litdata, whose chunks are not text: write its texts as JSON lines, or its "
            'tokens as one .bin for data.format = "nanogpt" (docs/migrate.md)'
        )
    if any(name.endswith((".ds", ".ds.index")) for name in names):
        logger.warning("%s holds tokens of datatrove, not text, which are left out", folder)
    # A shard of MDS may be there packed and unpacked. Its index may be that of several folders.
    left_out = ABOUT_OTHERS | {f"{name}{packing}" for name in names if name.endswith(".mds") for packing in PACKINGS}
    if b'"shards"' in begin and b'"raw_data"' in begin:
        left_out |= {"index.json"}
    return [name for name in names if name not in left_out and not name.endswith(OF_DATATROVE)]


def _refuse(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename} cannot be read: {error.strerror}")


def _file(path: str, source: int, *, named: bool, state: tuple[int, int | str] | None = None) -> File:
    """Return a file of this machine, or one at a URL, whose state is known."""
    path = path if state else os.path.normpath(path)
    stem, suffix = os.path.splitext(os.path.basename(path).lower())
    if packing := PACKINGS.get(suffix, ""):
        suffix = os.path.splitext(stem)[1]
    kind = KINDS.get(suffix, "text")
    if kind == "text" and stem.endswith(".mds"):
        raise UserError(f"{path}: MDS compressed as {suffix} cannot be read, {' and '.join(PACKINGS)} can: unpack it")
    identity: Any = path
    try:
        if state is None:
            stats = os.stat(path)
            if named and not stat.S_ISREG(stats.st_mode):
                raise UserError(f"{path} is neither a file nor a folder")
            state, identity = (stats.st_size, stats.st_mtime_ns), _identity(stats)
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
    return File(path, source, kind, packing, named, *state, identity)


def _identity(stats: os.stat_result) -> tuple[int, int]:
    return stats.st_dev, stats.st_ino


def _check_packages(file: File) -> None:
    about = FORMATS.get(file.kind)
    package = "pyarrow" if file.packing == "zstd" else about.package if about else ""
    if package and importlib.util.find_spec(package) is None:
        install = (about and about.install) or install_hint("data")
        raise UserError(f"{file.path} cannot be read without the package {package}: {install}")
