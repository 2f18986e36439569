"""Chunks -> tokens, in this process or in several. Results come in the order of the
chunks, so that the number of processes changes nothing.
"""

import multiprocessing
import os
import threading
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np

from titanlite.data.tokenizer import Tokenizer, byte_sizes, text_bytes
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.signals import end_with_parent, shielding_children
from titanlite.tools.ingest.chat import FIELD, ChatDocument, ChatOptions, ChatReader
from titanlite.tools.ingest.documents import Bad, Document, Segment, read_documents
from titanlite.tools.ingest.formats import Part
from titanlite.tools.ingest.reading import CHUNK_BYTES, Chunk
from titanlite.tools.ingest.token_writer import SHARD_TOKENS

FIRST = 10
"""Number of errors that are named; all are counted."""
CHUNKS_AHEAD = 3
"""Chunks read ahead for each worker; this bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that tokens depend on, beside the files and the tokenizer."""

    text_field: str = "text"
    bos: bool = True
    eos: bool = True
    shard_tokens: int = SHARD_TOKENS
    chunk_bytes: int = CHUNK_BYTES
    chat: ChatOptions | None = None
    """Documents are chats."""

    @property
    def key(self) -> tuple[Any, ...]:
        """All values, for a hash, but for the place of a template."""
        *of_text, _ = astuple(self)
        return (*of_text, self.chat.templates, "transformers") if self.chat else (*of_text,)


def options_for(
    tokenizer: Tokenizer, *, chat: ChatOptions | None, text_field: str | None, bos: bool, eos: bool
) -> Options:
    """Return options of text, or of chats. A template writes the special tokens of a tokenizer.json itself."""
    by_template = chat is not None and hasattr(tokenizer, "encode_marked")
    bos, eos = bos and not by_template, eos and not by_template
    return Options(text_field=text_field or (FIELD if chat else "text"), bos=bos, eos=eos, chat=chat)


@dataclass(frozen=True)
class Encoded:
    """Tokens of a chunk, and its counts and errors."""

    tokens: np.ndarray
    starts: np.ndarray
    """Positions in `tokens` at which documents begin."""
    mask: np.ndarray | None
    """True for tokens that count in the loss; None for all."""
    counts: dict[int, Counter[str]]
    """Counts by source: documents, tokens, bytes (of text), token_bytes (of text by its tokens), empty (documents),
    errors, left_out (binary files)."""
    errors: list[str]
    """The first, with file and line."""


class Encoder:
    """Raises UserError if the tokenizer lacks a token that the options ask for."""

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.bos = _mark(tokenizer, tokenizer.bos_id, options.bos, "bos", "begins")
        self.eos = _mark(tokenizer, tokenizer.eos_id, options.eos, "eos", "ends")
        self._chats = ChatReader(options.chat, tokenizer) if options.chat else None
        self._sizes = byte_sizes(tokenizer)

    def encode(self, parts: Sequence[Part]) -> Encoded:
        out = _Output()
        for part in parts:
            count = out.counts.setdefault(part.source, Counter())
            if part.kind == "binary":
                count["left_out"] += 1
                continue
            for document in list(self._read(part)):  # reading all first is 5 % faster than in turns
                if isinstance(document, Bad):
                    count["errors"] += 1
                    out.errors.append(str(document))
                elif document.text_bytes == 0:
                    count["empty"] += 1
                else:
                    count["documents"] += part.begins
                    count["bytes"] += document.text_bytes
                    before = out.token_bytes
                    if isinstance(document, ChatDocument):
                        count["tokens"] += out.add_chat(document)
                        out.token_bytes += text_bytes(self._sizes, document.ids) + self._names(document.ids)
                    else:
                        count["tokens"] += self._add(out, document.segments, begins=part.begins, ends=part.ends)
                    count["token_bytes"] += out.token_bytes - before
        return out.finish(self.tokenizer.vocab_size)

    def _read(self, part: Part) -> Iterator[Document | ChatDocument | Bad]:
        field = self.options.text_field
        return self._chats.read(part, field) if self._chats else read_documents(part, field)

    def _names(self, ids: np.ndarray) -> int:
        """Return the bytes of the names of special tokens, which are part of the text of a chat."""
        special = Counter(ids[self._sizes[0][ids] == 0].tolist())
        return sum(len(self.tokenizer.decode(np.array([i])).encode()) * count for i, count in special.items())

    def _add(self, out: "_Output", segments: list[Segment], *, begins: bool, ends: bool) -> int:
        """Returns how many tokens there are more."""
        start = end = before = out.size
        if begins:
            out.starts.append(before)
            out.pieces.append(self.bos)
            end += len(self.bos)
        for text, counts in segments:
            ids = self.tokenizer.encode(text, begins=begins)
            out.token_bytes += text_bytes(self._sizes, ids, begins=begins)
            begins = False
            out.pieces.append(ids)
            end += len(ids)
            if not counts:
                out.masked.append((start, end))
            start = end
        if ends:
            out.pieces.append(self.eos)
            end += len(self.eos)
            if not segments[-1][1]:
                out.masked.append((start, end))
        out.size = end
        return end - before


class _Output:
    """Builder of an `Encoded`."""

    def __init__(self) -> None:
        self.size = self.token_bytes = 0
        self.pieces = [np.empty(0, dtype=np.uint32)]
        self.starts: list[int] = []
        self.masked: list[tuple[int, int]] = []
        self.counts: dict[int, Counter[str]] = {}
        self.errors: list[str] = []

    def add_chat(self, chat: ChatDocument) -> int:
        """Add a chat, whose template has written what begins and ends the document. Return the number of its tokens."""
        self.starts.append(self.size)
        self.pieces.append(chat.ids)
        edges = np.flatnonzero(np.diff(chat.mask, prepend=True, append=True))
        self.masked += [(self.size + int(a), self.size + int(b)) for a, b in edges.reshape(-1, 2)]
        self.size += len(chat.ids)
        return len(chat.ids)

    def finish(self, vocab_size: int) -> Encoded:
        tokens = np.concatenate(self.pieces, dtype=np.uint32, casting="unsafe")
        assert not len(tokens) or tokens.max() < vocab_size, "the tokenizer gives an id outside its vocabulary"
        mask = np.ones(len(tokens), dtype=np.bool_)
        for start, end in self.masked:
            mask[start:end] = False
        return Encoded(
            tokens=tokens.astype(np.uint16) if vocab_size <= 2**16 else tokens,
            starts=np.array(self.starts, dtype=np.int64),
            mask=mask if self.masked else None,
            counts=self.counts,
            errors=self.errors[:FIRST],
        )


def _mark(tokenizer: Tokenizer, token: int | None, wanted: bool, name: str, does: str) -> np.ndarray:
    if wanted and token is None:
        raise UserError(f"{tokenizer.name} has no token that {does} a document: data.add_{name} = false (--no-{name})")
    return np.array([token] if wanted else [], dtype=np.uint32)


# Several processes


def encode_chunks(
    chunks: Iterator[Chunk], encoder: Encoder, *, workers: int
) -> Generator[tuple[Chunk, Encoded], None, None]:
    """Yield each chunk, emptied of its parts, with its tokens.

    Each process has a pipe of its own, and a thread here that waits for it. The processes of a `ProcessPoolExecutor`
    share one pipe for results, and it waits for ever if one is killed while it writes there (5 of 40 kills).

    Raises:
        RunError: a process that tokenizes was killed.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, encoder.encode(chunk.parts)
        return
    started: list[SpawnProcess] = []
    thread = threading.local()

    def encode(parts: Sequence[Part]) -> Encoded:
        if not hasattr(thread, "pipe"):
            thread.pipe = _start(started, encoder)
        try:
            thread.pipe.send(parts)
            result = thread.pipe.recv()
        except (EOFError, OSError):
            raise RunError(
                "a process that tokenizes was killed, for want of memory most likely: with fewer workers it takes less"
            ) from None
        if isinstance(result, Exception):
            raise result
        return result

    waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
    threads = ThreadPoolExecutor(workers)
    try:
        for chunk in chunks:
            waiting.append((chunk._replace(parts=[]), threads.submit(encode, chunk.parts)))
            if len(waiting) == CHUNKS_AHEAD * workers:
                done, result = waiting.popleft()
                yield done, result.result()
        for done, result in waiting:
            yield done, result.result()
    finally:
        for process in started:
            process.kill()  # its remaining work is of no use
        threads.shutdown(cancel_futures=True)
        for process in started:
            process.join()


def _start(started: list[SpawnProcess], encoder: Encoder) -> Connection:
    """Start a process that tokenizes, and return the pipe to it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, encoder.tokenizer, encoder.options))
    with shielding_children():
        process.start()
    there.close()  # only the process holds this end, so the pipe ends with it
    started.append(process)
    return here


def _work(connection: Connection, tokenizer: Tokenizer, options: Options) -> None:
    """Encode what comes, until nobody sends any more. The tokenizer came by pickle, because to load one may import
    transformers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_parent()
    encoder: Encoder | None = None
    with suppress(EOFError, OSError):
        while True:
            parts = connection.recv()
            try:
                encoder = encoder or Encoder(tokenizer, options)
                result: Encoded | Exception = encoder.encode(parts)
            except Exception as error:
                error.add_note(traceback.format_exc())
                result = error
            connection.send(result)
