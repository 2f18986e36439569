"""Text -> token shards, once: `[data] path` names text, training reads the shards made from it."""

import fcntl
import glob
import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from titanlite.config.checks import STDLIB
from titanlite.config.schema import Data
from titanlite.console import progress_console
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokens import FORMAT, INDEX, TokenStore, TokenWriter
from titanlite.errors import UserError

logger = logging.getLogger(__name__)

NOT_PLAIN_TEXT = {".jsonl", ".json", ".parquet", ".gz", ".zst", ".xz", ".bz2", ".zip", ".arrow", ".bin"}
STDLIB_LEAVES_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def open_tokens(data: Data, *, tokenizer: Tokenizer, cache_folder: Path) -> TokenStore:
    """The tokens of `[data] path`; text is prepared into the cache by whichever process comes first.

    Raises:
        UserError: nothing to read, unreadable text, or tokens made by another tokenizer.
    """
    inputs = find_inputs(data)
    store = TokenStore(inputs) if isinstance(inputs, Path) else _prepare_once(inputs, tokenizer, cache_folder)
    made_by = store.index["tokenizer"]["fingerprint"]
    if made_by != tokenizer.fingerprint:
        raise UserError(
            f"data.tokenizer: {store.folder} was made with {made_by}, the config names {tokenizer.fingerprint}"
        )
    return store


def find_inputs(data: Data) -> Path | list[Path]:
    """What `[data] path` stands for: a folder of prepared tokens, or text files.

    Raises:
        UserError: there is nothing, or something that is not plain text.
    """
    paths = data.path or "stdlib://"
    paths = [paths] if isinstance(paths, str) else paths
    if len(paths) == 1 and (index := Path(paths[0]).expanduser() / INDEX).is_file():
        return index.parent
    return _text_files(paths)


def _text_files(paths: list[str]) -> list[Path]:
    """The text files that the paths name: each file, each folder's files, each glob's; sorted within a path."""
    files: list[Path] = []
    for path in paths:
        if path == STDLIB:
            root = Path(sysconfig.get_paths()["stdlib"])
            found = [f for f in root.rglob("*.py") if not STDLIB_LEAVES_OUT & set(f.relative_to(root).parts)]
        else:
            found = [f for name in glob.glob(os.path.expanduser(path)) for f in _files_under(Path(name))]
        if not found:
            raise UserError(f"data.path: no text file in {path}")
        files += sorted(found)
    if bad := next((f for f in files if f.suffix in NOT_PLAIN_TEXT), None):
        raise UserError(f"data.path: {bad} is not plain text, which is what can be read so far")
    return files


def _files_under(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in path.rglob("*"):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            yield file


def _prepare_once(files: list[Path], tokenizer: Tokenizer, cache_folder: Path) -> TokenStore:
    stats = [(str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    key = hashlib.sha256(json.dumps([FORMAT, tokenizer.fingerprint, stats]).encode()).hexdigest()[:16]
    folder = cache_folder / key
    cache_folder.mkdir(parents=True, exist_ok=True)
    with _locked(cache_folder / f"{key}.lock"):
        if not (folder / INDEX).is_file():
            logger.info("preparing %d files as tokens in %s", len(files), folder)
            prepare(files, folder, tokenizer=tokenizer)
    return TokenStore(folder)


def prepare(files: list[Path], folder: Path, *, tokenizer: Tokenizer) -> None:
    """Write each file as one document: beginning token, text, end token.

    Raises:
        UserError: a file is not UTF-8 text.
    """
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    writer = TokenWriter(folder, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.fingerprint)
    with Progress(*columns, console=progress_console(), transient=True) as progress, writer:
        for file in progress.track(files, description="tokenizing"):
            try:
                ids = tokenizer.encode(file.read_bytes().decode())
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"data.path: {file} cannot be read as UTF-8 text: {error}") from None
            if len(ids):
                writer.add(np.concatenate(([tokenizer.bos_id], ids, [tokenizer.eos_id])))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock; it goes with the process, whatever ends it."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
