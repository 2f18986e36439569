"""Inspect a folder of prepared tokens: statistics, samples as text, and a check of every file's checksum."""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from rich.console import Console

from titanlite.data.prepared import open_stores, prepared_tokens
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.data.tokens import INDEX, TokenStore
from titanlite.runtime.console import progress_bar
from titanlite.runtime.errors import RunError, UserError
from titanlite.schema import Data
from titanlite.tools.arguments import Index
from titanlite.tools.ingest.prepare import report_lines

HEAD, TAIL = 256, 128
"""Tokens shown of the beginning and end of a long document."""
BLOCK = 2**24
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(range(127, 160), "�")
"""Documents can hold what a terminal would obey."""


def inspect(
    folder: Path,
    *,
    sample: Index = 0,
    quick: bool = False,
    tokenizer: str | None = None,
    format: Literal["megatron", "nanogpt", "olmo", "datatrove"] | None = None,
) -> None:
    """Print statistics and samples of token shards, and verify their checksums.

    Args:
        folder (PATH): folder that `data prepare` wrote, or tokens of another program: a file, a folder or a glob
        sample: print N random documents, always the same ones; default: 0
        quick: do not verify checksums
        tokenizer (T): tokenizer that decodes samples; default: the one of the data
        format: program that wrote the tokens, as data.format

    Raises:
        UserError: the folder is not complete, or files are damaged; all of those are named.
        RunError: a file cannot be read.

    Example:
        tokens/corpus --sample 3
    """
    with open_named(folder, tokenizer, format) as store:
        wide = None if sys.stdout.isatty() else 1000  # in a pipe, lines are not wrapped
        console = Console(width=wide, soft_wrap=True, markup=False, emoji=False, highlight=False)
        starts = store.document_starts(0, len(store))
        console.print(str(store.folder))
        for name, value in _facts(store, starts).items():
            console.print(f"  {name:<17} {value}")
        for line in report_lines(store.index) if "inputs" in store.index else []:
            console.print(f"  {line.translate(CONTROLS)}")
        if sample > 0:
            _print_samples(console, store, starts, sample, tokenizer)
        if not quick and any(store.files()):
            console.print(f"\nchecksums: all {_check_files(store)} files are as they were written")


@contextmanager
def open_named(path: Path, tokenizer: str | None, form: Any) -> Iterator[TokenStore]:
    """Open prepared tokens of a local path.

    Args:
        tokenizer: of those of another program, which do not name it.
        form: `data.format`.

    Raises:
        UserError: they are not complete, or their tokenizer is not named.
    """
    places = prepared_tokens([str(path)], form)
    if all(os.path.isdir(place) for place in places):
        yield TokenStore(path.expanduser())
        return
    if tokenizer is None:
        raise UserError(f"{path} holds tokens of another program: name the tokenizer that wrote them with --tokenizer")
    with TemporaryDirectory() as cache:
        options = {"data": Data(format=form), "tokenizer": load_tokenizer(tokenizer), "cache_folder": Path(cache)}
        yield open_stores(places, **options)


# Statistics


def _facts(store: TokenStore, starts: np.ndarray) -> dict[str, str]:
    index, tokenizer = store.index, store.index["tokenizer"]
    facts = {
        "documents": f"{len(starts):,}",
        "tokens": f"{len(store):,}",
        "shards": f"{len(index['shards']):,}, {np.dtype(index['dtype']).name}",
    }
    if "text_bytes" in index and len(store):
        facts["text"] = f"{index['text_bytes']:,} bytes, {index['text_bytes'] / len(store):.3f} a token"
    if len(store):
        lengths = np.diff(starts, append=len(store))
        lengths = lengths[lengths > 0]
        half, most = np.quantile(lengths, [0.5, 0.9], method="inverted_cdf")
        facts["tokens a document"] = (
            f"mean {lengths.mean():,.1f}, median {half:,}, 90 % have at most {most:,}, the longest has "
            f"{lengths.max():,}"
        )
    name = f"{tokenizer['name']}, " if tokenizer.get("name") else ""
    facts["tokenizer"] = f"{name}vocabulary {tokenizer['vocab_size']:,}, fingerprint {tokenizer['fingerprint']}"
    adds = [words for kind, words in {"bos": "begin with bos", "eos": "end with eos"}.items() if index[kind]]
    facts["boundaries"] = f"documents {' and '.join(adds)}" if adds else "no tokens mark where documents begin or end"
    left_out = _count_not_learned(store)
    share = f"{left_out:,} tokens ({left_out / len(store):.2%}) do not count" if left_out else "all tokens count"
    facts["loss"] = share
    if "unigram_entropy" in index:
        facts["unigram entropy"] = f"{index['unigram_entropy']:.4f} nats a token"
    facts["fingerprint"] = store.fingerprint
    return facts


def _count_not_learned(store: TokenStore) -> int:
    begins = range(0, len(store) if store.has_mask else 0, BLOCK)
    return sum(int((~store.read_mask(at, min(BLOCK, len(store) - at))).sum()) for at in begins)


# Samples


def _print_samples(
    console: Console, store: TokenStore, starts: np.ndarray, sample: int, tokenizer_name: str | None
) -> None:
    tokenizer, why_not = _load_tokenizer(tokenizer_name, store.index["tokenizer"])
    if why_not:
        console.print(f"\nsamples are token ids: {why_not}")
    if store.has_mask:
        console.print("\n⟦what stands in such brackets⟧ does not count in the loss")
    total, ends = len(starts), np.append(starts[1:], len(store))
    for number in sorted(random.Random(0).sample(range(total), min(sample, total))):
        start, end = int(starts[number]), int(ends[number])
        console.print(
            f"\ndocument {number + 1:,} of {total:,}: {end - start:,} tokens from number {start:,} of the stream on"
        )
        if end - start <= HEAD + TAIL:
            stretches = [_show(store, start, end, tokenizer)]
        else:
            left_out = f"[... {end - start - HEAD - TAIL:,} tokens ...]"
            head, tail = _show(store, start, start + HEAD, tokenizer), _show(store, end - TAIL, end, tokenizer)
            stretches = [head, left_out, tail]
        for line in "\n".join(stretches).split("\n"):
            console.print(f"  | {line}")


def _load_tokenizer(name: str | None, made_by: dict[str, Any]) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer of the tokens, or the reason why it cannot be loaded."""
    name = name or made_by.get("name") or ("bytes" if made_by["fingerprint"] == "bytes" else None)
    if name is None:
        return None, "the index does not name their tokenizer: name it with --tokenizer"
    try:
        tokenizer = load_tokenizer(name)
    except (UserError, OSError) as error:
        return None, f"{error} (--tokenizer names another)"
    if tokenizer.fingerprint != made_by["fingerprint"]:
        return (
            None,
            f"{name} ({tokenizer.vocab_size:,} tokens) is not their tokenizer ({made_by['vocab_size']:,} tokens)",
        )
    return tokenizer, ""


def _show(store: TokenStore, start: int, end: int, tokenizer: Tokenizer | None) -> str:
    """Return tokens as text, with what does not count in the loss in brackets."""
    ids, learned = store.read(start, end - start).tolist(), store.read_mask(start, end - start).tolist()
    texts = []
    for counts, run in groupby(range(len(ids)), key=learned.__getitem__):
        text = _decode([ids[i] for i in run], tokenizer)
        texts.append(text if counts else f"⟦{text}⟧")
    return ("" if tokenizer else " ").join(texts).translate(CONTROLS)


def _decode(ids: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids))
    marks = {tokenizer.eos_id: "<eos>", tokenizer.bos_id: "<bos>"}
    if tokenizer.bos_id == tokenizer.eos_id:
        marks = {tokenizer.eos_id: "<bos/eos>"}
    texts = []
    for mark, run in groupby(ids, key=marks.get):
        part = list(run)
        texts.append(mark * len(part) if mark else tokenizer.decode(np.array(part)))
    return "".join(texts)


def _check_files(store: TokenStore) -> int:
    """Read every file; returns how many there are."""
    files = list(store.files())
    try:
        with progress_bar("checksums", sum(size for _, size, _ in files)) as advance:
            damaged = [*store.damaged(advance)]
    except OSError as error:
        raise RunError(f"{store.folder} cannot be read: {error}") from error
    if damaged:
        raise UserError(
            "\n".join(f"data.path: {path} is damaged: its SHA-256 is not what {INDEX} states" for path in damaged)
        )
    return len(files)
