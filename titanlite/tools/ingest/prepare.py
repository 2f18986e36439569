"""Text -> token shards: `titanlite data prepare`, and the cache that training makes of text that a config names.

One process reads, `encoding` tokenizes in as many as there are, and what is written depends on neither. After a kill
the same command resumes after the last shard that was finished.
"""

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from titanlite.data.prepared import prepared_tokens
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.data.tokens import FORMAT, INDEX, TokenStore
from titanlite.runtime.allocator import cores
from titanlite.runtime.console import progress_bar
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.files import is_taken, lock_work, quarantine_path
from titanlite.schema import Data
from titanlite.tools.arguments import Count, Inputs
from titanlite.tools.ingest.background import prepare_in_background
from titanlite.tools.ingest.chat import chat_options, chats_of
from titanlite.tools.ingest.encoding import FIRST, Encoder, Options, encode_chunks, options_for
from titanlite.tools.ingest.formats import File, open_dataset
from titanlite.tools.ingest.inputs import find_files, local_folder
from titanlite.tools.ingest.reading import read_chunks
from titanlite.tools.ingest.token_writer import TokenWriter

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of reading: another version makes other tokens of the same files."""
WORKER_BYTES = 2**24
"""Input that makes another process worth its start."""
MOST_CHECKED_BYTES = 2**28
"""Size up to which a start reads a whole cache to compare checksums: a fraction of a second."""
COUNTS = {name: name for name in ("documents", "tokens", "empty", "errors", "left_out", "token_bytes")}
COUNTS |= {"bytes": "text_bytes"}
"""Counts of each input in the index, and the names of their sums: documents, tokens, empty documents, errors, binary
files that are left out, bytes of text that the tokens stand for, and bytes of the text in UTF-8."""
MOST_INPUTS = 20
"""Inputs that the report lists; the index has all."""
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _Task:
    paths: list[str]
    tokenizer: Tokenizer
    options: Options
    files: list[File]
    folder: Path = Path()
    is_cache: bool = False
    """The folder is titanlite's own: a damaged one is made again."""
    on_error: Literal["stop", "skip"] = "stop"
    workers: int | None = None
    report: Report = logger.info

    @cached_property
    def key(self) -> str:
        """Hash of all that the tokens depend on. `on_error` is left out: it matters only after an error."""
        real = lru_cache(os.path.realpath)  # only folders are resolved, since there can be a million files
        files = [
            (path if "://" in path else os.path.join(real(os.path.dirname(path)), os.path.basename(path)), *about)
            for path, *about, _ in self.files
        ]
        about = [FORMAT, VERSION, self.tokenizer.fingerprint, self.options.key, files]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def prepare_text(paths: Sequence[str], *, data: Data, tokenizer: Tokenizer, cache_folder: Path) -> TokenStore:
    """Make tokens of text in the cache folder, unless they are there; whichever process comes first makes them.

    Args:
        paths: text files, folders, globs, datasets; see `ingest.inputs`.
        data: `text_field`, `chat_template`, `add_bos`, `add_eos` and `prepare`.

    Raises:
        UserError: there is nothing to read, or text that cannot be read.
        RunError: the cache cannot be written.
    """
    chat = chats_of(data, tokenizer)
    options = options_for(tokenizer, chat=chat, text_field=data.text_field, bos=data.add_bos, eos=data.add_eos)
    task = _Task(paths=[*paths], tokenizer=tokenizer, options=options, files=_find(paths))
    task = replace(task, folder=cache_folder / task.key, is_cache=True)
    if data.prepare == "background":
        if (task.folder / INDEX).is_file():
            _made(task)  # this makes a damaged folder again
        work = partial(
            _prepare_again, paths, data.model_copy(update={"prepare": "before"}), tokenizer.name, cache_folder
        )
        return prepare_in_background(work, task.folder, key=task.key, may_mask=chat is not None)
    return _made(task)


def _prepare_again(paths: Sequence[str], data: Data, tokenizer: str, cache_folder: Path) -> TokenStore:
    """Call `prepare_text` in another process."""
    return prepare_text(paths, data=data, tokenizer=load_tokenizer(tokenizer), cache_folder=cache_folder)


def prepare_folder(
    inputs: Inputs,
    *,
    out: str,
    tokenizer: str,
    workers: Count | None = None,
    text_field: str | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    no_bos: bool = False,
    no_eos: bool = False,
    chat: bool = False,
    chat_template: Path | None = None,
) -> None:
    """Turn text into token shards, which data.path can name.

    The same command resumes after an interruption.

    Args:
        out (DIR): folder to write token shards to
        tokenizer (T): bytes, the name of a tokenizer that titanlite ships, or a path, as data.tokenizer
        workers: processes; default: the cores
        text_field (F): field of JSON lines and tables to read; default: text, of chats messages
        on_error: what to do with unreadable documents
        no_bos: no beginning-of-document tokens
        no_eos: no end-of-document tokens
        chat: documents are chats: JSON lines with a field "messages" of {"role": ..., "content": ...}, and maybe
            "tools". The chat template of the tokenizer renders them, and answers count in the loss
        chat_template (FILE): template to use; default: that of the tokenizer

    Example:
        'corpus/*.jsonl' --out tokens/corpus --tokenizer llama3/tokenizer.model
    """
    if chat_template and not chat:
        raise UserError("--chat-template is for chats: add --chat")
    known = load_tokenizer(tokenizer)
    template = chat_template.expanduser() if chat_template else None
    options = options_for(
        known,
        chat=chat_options(known, template=template) if chat else None,
        text_field=text_field,
        bos=not no_bos,
        eos=not no_eos,
    )
    report = partial(print, flush=True)
    prepare(
        [*inputs],
        local_folder(out),
        tokenizer=known,
        options=options,
        on_error=on_error,
        workers=workers,
        report=report,
    )


def prepare(
    paths: list[str],
    folder: Path,
    *,
    tokenizer: Tokenizer,
    options: Options,
    on_error: Literal["stop", "skip"] = "stop",
    workers: int | None = None,
    report: Report = logger.info,
) -> TokenStore:
    """Write the tokens of all documents to a folder, which is there only when it is whole.

    Args:
        on_error: of a document that cannot be read: raise, or leave it out and count it.
        workers: processes that tokenize; default: one a core, or fewer for little text.
        report: called with each line of the report.

    Raises:
        UserError: there is nothing to read, or something that cannot be; or the folder holds something else.
        RunError: the disk is full, or a process died. What is finished stays, and the same call resumes from there.
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
        report=report,
    )
    if store := _existing(task):
        report(f"{folder} holds these tokens already: {store.index['documents']:,} documents, {len(store):,} tokens")
    return store or _made(task)


def _find(paths: Sequence[str]) -> list[File]:
    """Find files, with the sizes of datasets, which are loaded for it."""
    files = find_files(paths)
    for number, file in enumerate(files):
        if file.kind == "dataset":
            data = open_dataset(file.path)
            times = [os.stat(cached["filename"]).st_mtime_ns for cached in data.cache_files]
            files[number] = file._replace(size=data.data.nbytes, mtime_ns=max(times, default=0))
    return files


def _made(task: _Task) -> TokenStore:
    """Return the tokens of a task, and make them unless they are there."""
    try:
        task.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = task.folder.with_name(f".{task.folder.name}.lock")
        with lock_work(lock, on_wait=lambda holder: task.report(f"waiting for {holder}, which prepares {task.folder}")):
            if task.is_cache:
                _quarantine_damaged(task.folder)
            if (store := _existing(task)) is None:
                _write(task)
        return store or TokenStore(task.folder)
    except KeyboardInterrupt:
        task.report("stopped: finished shards are kept, and the same command resumes")
        raise
    except OSError as error:  # errors of reading are counted with the documents, so this one is of writing
        raise RunError(
            f"{task.folder} cannot be written: {error}; finished shards are kept, and the same command resumes"
        ) from error


def _quarantine_damaged(folder: Path) -> None:
    """Rename a cache that is not what it was when it was made, with a warning."""
    if not folder.exists():
        return
    try:
        store, damage = TokenStore(folder), None
        if sum(size for _, size, _ in store.files()) <= MOST_CHECKED_BYTES and (path := next(store.damaged(), None)):
            damage = f"{path} does not have the checksum that {INDEX} states"
    except (UserError, KeyError, TypeError, AttributeError) as error:
        damage = str(error).removeprefix("data.path: ")
    if damage:
        aside = quarantine_path(folder)
        folder.rename(aside)
        logger.warning(f"{damage}. The folder is now {aside.name}, and its tokens are made again")


def _existing(task: _Task) -> TokenStore | None:
    """Return the tokens in the folder, if they are those of the task."""
    folder = task.folder
    if not (folder / INDEX).is_file():
        if is_taken(folder):
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
    started, read = time.monotonic(), 0
    with writer, progress_bar("tokenizing", sum(file.size for file in task.files)) as advance:
        about = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "name": tokenizer.name}
        found = Counter(file.source for file in task.files)
        inputs = [{"path": path, "files": found[n]} | dict.fromkeys(COUNTS, 0) for n, path in enumerate(task.paths)]
        writer.notes = writer.notes or {"key": task.key, "tokenizer": about, "first_errors": [], "inputs": inputs}
        notes = writer.notes
        _stop_at_errors(task, notes["first_errors"])
        if before := writer.tokens:
            task.report(f"resuming after {before:,} tokens of an earlier attempt")
        chunks = read_chunks(
            task.files, text_field=options.text_field, chunk_bytes=options.chunk_bytes, position=writer.position
        )
        with closing(encode_chunks(chunks, encoder, workers=_workers(task))) as results:
            for chunk, encoded in results:
                _stop_at_errors(task, encoded.errors)
                for source, counts in encoded.counts.items():
                    for name, count in counts.items():
                        notes["inputs"][source][name] = notes["inputs"][source].get(name, 0) + count
                notes["first_errors"] = (notes["first_errors"] + encoded.errors)[:FIRST]
                if len(encoded.tokens):
                    writer.add(encoded.tokens, encoded.starts, encoded.mask, position=chunk.position)
                made = writer.tokens - before
                rate = made / (time.monotonic() - started)
                advance(chunk.done - read, f"tokenizing: {made:,} tokens, {rate:,.0f}/s")
                read = chunk.done
        notes |= {total: sum(entry.get(name, 0) for entry in notes["inputs"]) for name, total in COUNTS.items()}
        if writer.tokens == 0:
            raise UserError(f"{', '.join(task.paths[:3])}: nothing to make tokens of; {_left_out(notes)}")
    seconds = time.monotonic() - started
    task.report(
        f"text     {notes['documents']:,} documents, {writer.tokens:,} tokens of {notes['text_bytes']:,} bytes, "
        f"prepared in {seconds:.1f} s ({(writer.tokens - before) / seconds:,.0f} tokens/s) in {task.folder}"
    )
    for line in report_lines(notes):
        task.report(f"  {line}")


def report_lines(notes: dict[str, Any]) -> list[str]:
    """Return lines on the inputs in an index, and on what was left out."""
    inputs = notes["inputs"]
    lines = [
        f"{entry['path']}: {entry['files']:,} files, {entry['documents']:,} documents, {entry['tokens']:,} tokens, "
        f"{entry['bytes']:,} bytes"
        for entry in inputs[:MOST_INPUTS]
    ]
    if len(inputs) > MOST_INPUTS:
        lines.append(f"and {len(inputs) - MOST_INPUTS:,} more inputs, which the index lists")
    if words := _left_out(notes):
        lines.append(f"left out: {words}")
    return lines + [f"  {error}" for error in notes["first_errors"]]


def _left_out(notes: dict[str, Any]) -> str:
    what = {"empty": "empty documents", "left_out": "binary files", "errors": "that cannot be read"}
    return "; ".join(f"{notes[name]:,} {words}" for name, words in what.items() if notes[name])


def _workers(task: _Task) -> int:
    most = task.workers or cores()
    return min(most, 1 + sum(file.size for file in task.files) // WORKER_BYTES)
