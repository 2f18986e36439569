"""Prepared tokens that lie at a URL: copied once a node, then read from disk. Training reads nothing over the network.

The index is read first. It states every file with its size and checksum, and the copy's name comes from it, so that
other tokens at the same URL become another copy. Files are checked while they are written. The copy is made beside its
place and renamed when it is whole; killed halfway, the next attempt continues with the files that are already there.
"""

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from titanlite.data.foreign import BESIDE, OLMO_MASK, OLMO_TOKENS, TOKEN_SUFFIXES
from titanlite.data.tokens import FORMAT, INDEX, ShardFile, stated_files
from titanlite.runtime.console import install_hint, progress_bar
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.files import lock_work, publish, write_atomically
from titanlite.storage.retry import PERMANENT, AccessDenied, RetriesExhausted, retry
from titanlite.storage.storage import ObjectStorage

logger = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE = 30.0
"""Seconds without anything new after which a file is given up."""
BLOCK_BYTES = 2**24
THREADS = 8
VERSIONS = ("ETag", "etag", "blob_id", "mtime", "LastModified", "Last-Modified", "created")
"""What stores call the version of a file. The first one that is there counts."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def localize(url: str, cache_folder: Path) -> Path:
    """Return the local folder of prepared tokens at a URL of any kind that fsspec knows; one process of a node copies
    them.

    Raises:
        UserError: there are no prepared tokens, they are damaged, or the package for this kind of URL is missing.
        RunError: the place does not answer, or the copy cannot be written.
    """
    from fsspec.implementations.local import LocalFileSystem

    place = open_place(url)
    if isinstance(place.fs, LocalFileSystem):
        return Path(place.root)
    try:
        index = retrying(partial(place.fs.cat_file, f"{place.root}/{INDEX}"), place.url_of(INDEX))
        files = _stated_files(index, place.url_of(INDEX))
    except UserError as error:
        found = _foreign_files(place) if isinstance(error.__cause__, FileNotFoundError) else None
        if not found:
            raise
        place, index, files = found
    name = re.sub(r"[^\w-]+", "_", place.root.rpartition("/")[2], flags=re.ASCII)
    folder = cache_folder / f"{name}-{hashlib.sha256(index).hexdigest()[:16]}"
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        lock = cache_folder / f"{folder.name}.lock"
        with lock_work(
            lock, on_wait=lambda holder: logger.info(f"waiting for {holder}, which copies tokens to {folder}")
        ):
            if not (folder / INDEX).is_file():
                _copy(place, index, files, folder)
    except OSError as error:  # errors of reading are RunErrors by now, so this one is of writing
        raise RunError(f"{folder} cannot be written: {error}") from error
    return folder


def _foreign_files(place: ObjectStorage) -> tuple[ObjectStorage, bytes, list[ShardFile]] | None:
    """Return the folder, a list and the files of tokens of another program at a URL, if there are any.

    They have no checksums. The list has their versions, so that other files become another copy.
    """
    place.fs.invalidate_cache()
    stem = re.sub(f"({'|'.join(map(re.escape, TOKEN_SUFFIXES))})$", "", place.url)
    for glob in (f"{place.url}/*", f"{stem}.*"):
        where = open_place(glob.rpartition("/")[0])
        names = {glob.rpartition("/")[2], glob.rpartition("/")[2].replace(OLMO_TOKENS, OLMO_MASK)}
        found: dict[str, list[Any]] = {}
        for name in names:
            states = retrying(partial(where.fs.glob, f"{where.root}/{name}", detail=True), glob)
            found |= {path.rpartition("/")[2]: [at["size"], version_of(at)] for path, at in states.items()}
        files = [ShardFile(name, at[0], "") for name, at in found.items() if name.endswith((*TOKEN_SUFFIXES, *BESIDE))]
        if files:
            return where, json.dumps(found, sort_keys=True).encode(), files
    return None


def version_of(state: dict[str, Any]) -> str:
    """Return the version of a file, of what its store says of it; "" if it says none."""
    return next((str(state[key]) for key in VERSIONS if state.get(key)), "")


# Reading


def open_place(url: str) -> ObjectStorage:
    """Return the object store of a URL; `root` is the path in it.

    Raises:
        UserError: fsspec does not know this kind of URL, or its package is missing.
    """
    try:
        return ObjectStorage(url, owner="")
    except ImportError as error:  # fsspec knows this kind of URL, but its package is missing
        extra = EXTRAS.get(url.partition("://")[0])
        hint = f" ({install_hint(extra)})" if extra else ""
        raise UserError(f"data.path: {url}: {error}{hint}") from None
    except ValueError as error:  # fsspec does not know this kind of URL
        raise UserError(f"data.path: {url}: {error}") from None


def retrying(act: Callable[[], T], where: str, stop: Event | None = None) -> T:
    """Return `act()`, repeated for PATIENCE seconds by the clock: one call reads little.

    Raises:
        UserError: the file is missing, or access is denied.
        RunError: the object store does not answer.
    """
    try:
        return retry(act, name=where, patience=PATIENCE, counts_calls=True, stop=stop)
    except FileNotFoundError as error:
        raise UserError(f"data.path: {where}: there is no such file") from error
    except (AccessDenied, *PERMANENT) as error:
        raise UserError(f"data.path: {error}") from error
    except RetriesExhausted as error:
        raise RunError(str(error)) from error


def _stated_files(index: bytes, where: str) -> list[ShardFile]:
    try:
        stated = json.loads(index)
        if stated["format"] != FORMAT:
            raise UserError(f"data.path: {where} has format {stated['format']}, this version reads {FORMAT}")
        return stated_files(stated, where)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"data.path: {where} is not the index of prepared tokens: {error!r}") from None


# Copying


def _copy(place: ObjectStorage, index: bytes, files: list[ShardFile], folder: Path) -> None:
    staging = folder.with_name(f".{folder.name}.partial-{platform.node()}")
    staging.mkdir(exist_ok=True)
    missing = [file for file in files if not (staging / file.name).is_file()]
    size, to_copy = (sum(file.size for file in some) for some in (files, missing))
    logger.info(f"copying {place.url} to {folder}: {len(files)} files, {size:,} bytes, {to_copy:,} yet to come")
    with progress_bar("copying", size, done=size - to_copy) as advance:
        copy = _Copy(place, staging, advance)
        pool = ThreadPoolExecutor(THREADS)
        try:
            for done in wait([pool.submit(copy.file, file) for file in missing], return_when=FIRST_EXCEPTION).done:
                done.result()
        finally:
            copy.stop.set()
            pool.shutdown(cancel_futures=True)
    write_atomically(staging / INDEX, index)
    publish(staging, folder, last=INDEX)


@dataclass(frozen=True)
class _Copy:
    """State that the threads of one copy share."""

    place: ObjectStorage
    staging: Path
    report: Callable[[int], None]
    """Called with the number of bytes that arrived; negative for bytes that are copied again."""
    stop: Event = field(default_factory=Event)

    def file(self, file: ShardFile) -> None:
        """Copy a file. It gets its name in the staging folder once it is complete and its checksum is right."""
        where, path, remote = self.place.url_of(file.name), self.staging / file.name, f"{self.place.root}/{file.name}"
        size = retrying(lambda: self.place.fs.info(remote)["size"], where, self.stop)
        if size not in (file.size, None):
            raise UserError(f"data.path: {where} is damaged: it has {size:,} bytes, {INDEX} states {file.size:,}")
        if self._fetch(file, path) or self._fetch(file, path) or self.stop.is_set():
            return
        raise UserError(f"data.path: {where} is damaged: it does not have the SHA-256 that {INDEX} states")

    def _fetch(self, file: ShardFile, path: Path) -> bool:
        where, remote, part = self.place.url_of(file.name), f"{self.place.root}/{file.name}", Path(f"{path}.part")
        digest, done = hashlib.sha256(), 0
        with open(part, "wb") as out:
            while done < file.size and not self.stop.is_set():
                end = min(done + BLOCK_BYTES, file.size)
                block = retrying(partial(self.place.fs.cat_file, remote, start=done, end=end), where, self.stop)
                digest.update(block)
                out.write(block)
                done += len(block)
                self.report(len(block))
                if done != end:
                    break
            out.flush()
            os.fsync(out.fileno())
        if right := done == file.size and file.sha256 in ("", digest.hexdigest()):  # those of others have no checksum
            os.rename(part, path)
        elif not self.stop.is_set():
            logger.warning(f"{where} arrived damaged")
            self.report(-done)
        return right
