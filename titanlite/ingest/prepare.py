"""Text -> token shards: `titanlite data prepare`, and the cache that training makes of text that a config names.

One process reads, `encoding` tokenizes in as many as there are, and what is written depends on neither. After a kill
the same command goes on from the last shard that was finished.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from titanlite.config.schema import Data
from titanlite.data.custom import PREFIX
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokens import FORMAT, INDEX, TokenStore, TokenWriter
from titanlite.ingest.encoding import Encoder, Options, encode_chunks
from titanlite.ingest.inputs import STDLIB, File, find_files, prepared_tokens
from titanlite.ingest.outcome import left_out, new_notes, note, report
from titanlite.ingest.reading import open_dataset, read_chunks
from titanlite.runtime.console import progress_console
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.user_code import find_object

logger = logging.getLogger(__name__)

VERSION = 1
"""Of reading: another one means other tokens of the same files."""
WORKER_BYTES = 2**24
"""Input that makes another process worth its start."""
Paths = str | list[str] | None
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _Task:
    paths: list[str]
    tokenizer: Tokenizer
    options: Options
    files: list[File]
    folder: Path = Path()
    on_error: Literal["stop", "skip"] = "stop"
    workers: int | None = None
    say: Say = logger.info

    @cached_property
    def key(self) -> str:
        """Equal for equal tokens. What is done about errors is not in it: until there is one, it changes nothing."""
        real = lru_cache(os.path.realpath)  # of folders, since there can be a million files
        files = [
            (path if "://" in path else os.path.join(real(os.path.dirname(path)), os.path.basename(path)), *about)
            for path, *about, _ in self.files
        ]
        about = [FORMAT, VERSION, self.tokenizer.fingerprint, astuple(self.options), files]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def find_inputs(path: Paths) -> None:
    """Look for what `[data] path` names, without reading it.

    Raises:
        UserError: something is not there, or cannot be read.
    """
    paths = _as_list(path)
    if len(paths) == 1 and paths[0].startswith(PREFIX):
        find_object(paths[0].removeprefix(PREFIX))
    elif prepared_tokens(paths) is None:
        find_files(paths)


def open_tokens(path: Paths, *, data: Data, tokenizer: Tokenizer, cache_folder: Path) -> TokenStore:
    """The tokens of what a path names; text is prepared into the cache by whichever process comes first.

    Args:
        path: as data.path.
        data: where the text of documents is, and what stands before and after them.

    Raises:
        UserError: nothing to read, text that cannot be read, or tokens that were made in another way.
        RunError: the cache cannot be written.
    """
    paths = _as_list(path)
    if prepared := prepared_tokens(paths):
        folder = Path(prepared)
        if "://" in prepared:
            from titanlite.data.remote import localize

            folder = localize(prepared, cache_folder)
        store = TokenStore(folder)
        _check_prepared(store, data, tokenizer)
        return store
    options = Options(text_field=data.text_field, bos=data.add_bos, eos=data.add_eos)
    task = _Task(paths=paths, tokenizer=tokenizer, options=options, files=_find(paths))
    return _made(replace(task, folder=cache_folder / task.key))


def prepare(
    paths: list[str],
    folder: Path,
    *,
    tokenizer: Tokenizer,
    options: Options,
    on_error: Literal["stop", "skip"] = "stop",
    workers: int | None = None,
    say: Say = logger.info,
) -> TokenStore:
    """Write the tokens of all documents to a folder, which is there only when it is whole.

    Args:
        on_error: of a document that cannot be read: raise, or leave it out and count it.
        workers: processes that tokenize; default: one a core, or fewer for little text.
        say: gets what is to be told, a line at a time.

    Raises:
        UserError: there is nothing to read, or something that cannot be; or the folder holds something else.
        RunError: the disk is full, or a process died. What is finished stays, and the same call goes on from there.
    """
    if prepared_tokens(paths):
        raise UserError(f"{paths[0]} holds prepared tokens, not text")
    task = _Task(
        paths=paths,
        tokenizer=tokenizer,
        options=options,
        files=_find(paths),
        folder=folder,
        on_error=on_error,
        workers=workers,
        say=say,
    )
    if store := _existing(task):
        say(f"{folder} holds these tokens already: {store.index['documents']:,} documents, {len(store):,} tokens")
    return store or _made(task)


def _as_list(path: Paths) -> list[str]:
    if path == []:
        raise UserError("an empty list of paths names nothing to read")
    return [path] if isinstance(path, str) else path or [STDLIB]


def _find(paths: list[str]) -> list[File]:
    """With the size of datasets that have to be loaded to know it."""
    files = find_files(paths)
    for number, file in enumerate(files):
        if file.kind == "dataset" and not file.size:
            data = open_dataset(file.path)
            times = [os.stat(cached["filename"]).st_mtime_ns for cached in data.cache_files]
            files[number] = file._replace(size=data.data.nbytes, mtime_ns=max(times, default=0))
    return files


def _check_prepared(store: TokenStore, data: Data, tokenizer: Tokenizer) -> None:
    made_by = store.index["tokenizer"]["fingerprint"]
    if made_by != tokenizer.fingerprint:
        raise UserError(
            f"data.tokenizer: {store.folder} was made with {made_by}, the config names {tokenizer.fingerprint}"
        )
    for name, wanted in (("bos", data.add_bos), ("eos", data.add_eos)):
        if store.index[name] != wanted:
            had, wants = (str(value).lower() for value in (store.index[name], wanted))
            raise UserError(f"data.add_{name}: {store.folder} was made with {name} = {had}, the config says {wants}")


def _made(task: _Task) -> TokenStore:
    """The tokens of a task: made now, unless they are there."""
    try:
        task.folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(task):
            if (store := _existing(task)) is None:
                _write(task)
        return store or TokenStore(task.folder)
    except KeyboardInterrupt:
        task.say("stopped: finished shards are kept, and the same command goes on")
        raise
    except OSError as error:  # of writing: what reading raises is of the documents
        raise RunError(
            f"{task.folder} cannot be written: {error}; finished shards are kept, and the same command goes on"
        ) from error


@contextmanager
def _locked(task: _Task) -> Iterator[None]:
    """Hold a lock on the folder; it goes with the process, whatever ends it."""
    with open(task.folder.with_name(f".{task.folder.name}.lock"), "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            task.say(f"waiting for {file.read() or 'another process'}, which prepares {task.folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


def _existing(task: _Task) -> TokenStore | None:
    """What the folder holds, if it is what the task would make."""
    folder = task.folder
    if not (folder / INDEX).is_file():
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(f"{folder} is there already, and holds no prepared tokens: name another folder")
        return None
    store = TokenStore(folder)
    if store.index.get("key") != task.key:
        raise UserError(
            f"{folder} is there already, made of other text or in another way: name another folder, or delete it"
        )
    _stop_at_errors(task, store.index["first_errors"])
    return store


def _stop_at_errors(task: _Task, errors: list[str]) -> None:
    if errors and task.on_error == "stop":
        raise UserError(f"{errors[0]} (titanlite data prepare --on-error skip leaves out what cannot be read)")


# Writing


def _write(task: _Task) -> None:
    options, tokenizer = task.options, task.tokenizer
    encoder = Encoder(tokenizer, options)
    writer = TokenWriter(
        task.folder,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint,
        bos=options.bos,
        eos=options.eos,
        shard_tokens=options.shard_tokens,
        key=task.key,
    )
    started = time.monotonic()
    with writer, _progress(task) as show:
        about = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "name": tokenizer.name}
        notes = writer.notes or {"key": task.key, "tokenizer": about, **new_notes(task.paths, task.files)}
        writer.notes = notes
        _stop_at_errors(task, notes["first_errors"])
        if before := writer.tokens:
            task.say(f"going on from {before:,} tokens that an earlier attempt has left")
        chunks = read_chunks(
            task.files, text_field=options.text_field, chunk_bytes=options.chunk_bytes, position=writer.position
        )
        with closing(encode_chunks(chunks, encoder, workers=_workers(task))) as results:
            for chunk, encoded in results:
                _stop_at_errors(task, encoded.errors)
                note(notes, encoded)
                if len(encoded.tokens):
                    writer.add(encoded.tokens, encoded.starts, encoded.mask)
                writer.end_chunk(chunk.position)
                show(chunk.done, writer.tokens - before)
        if writer.tokens == 0:
            raise UserError(f"{', '.join(task.paths[:3])}: nothing to make tokens of; {left_out(notes)}")
    seconds = time.monotonic() - started
    documents = sum(entry["documents"] for entry in notes["inputs"])
    task.say(
        f"{task.folder}: {documents:,} documents, {writer.tokens:,} tokens of {notes['text_bytes']:,} bytes of text; "
        f"{seconds:.1f} s, {(writer.tokens - before) / seconds:,.0f} tokens/s"
    )
    for line in report(notes):
        task.say(f"  {line}")


def _workers(task: _Task) -> int:
    most = task.workers or len(os.sched_getaffinity(0))
    return min(most, 1 + sum(file.size for file in task.files) // WORKER_BYTES)


@contextmanager
def _progress(task: _Task) -> Iterator[Callable[[int, int], None]]:
    """A bar of the bytes of the input; gets the bytes done and the tokens made."""
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeRemainingColumn(),
    )
    started = time.monotonic()
    with Progress(*columns, console=progress_console(), transient=True) as progress:
        bar = progress.add_task("", total=sum(file.size for file in task.files), tokens="")

        def show(done: int, tokens: int) -> None:
            text = f"{tokens:,} tokens, {tokens / (time.monotonic() - started):,.0f}/s"
            progress.update(bar, completed=done, tokens=text)

        yield show
