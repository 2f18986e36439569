"""Data of other programs: a run on a corpus of Megatron-LM beside one on titanlite's own shards of the same tokens.

    python benchmarks/bench_foreign.py [--runs 5] [--tokens 1_000_000_000] [--record FILE.jsonl]

The files are sparse: every token is zero, and documents have 1,000 tokens. Contenders take turns, each in a process of
its own. The start is that of a process until it has the first batch, with Python's imports, and after them. Reading is
that of one loader: shuffled sequences of 4,096 with a document mask. Times are CPU times, since machines are shared.
"""

import argparse
import hashlib
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from record import add_record_option, record

SEQ_LEN = 4096
BATCHES = 500
DOCUMENT = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1_000_000_000)
    add_record_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"small": arguments.tokens // 10, "whole": arguments.tokens}
        for size, tokens in sizes.items():
            write_own(Path(folder, size, "own"), tokens)
            write_megatron(Path(folder, size, "megatron"), tokens)
        found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
        for _ in range(arguments.runs):
            for size in sizes:
                for name in ("own", "megatron"):
                    figures = in_a_process(Path(folder, size, name))
                    found.setdefault((size, name), []).append(figures)
                    print(f"  {size} {name:<9} start {figures[0]:.3f} s, {figures[1]:.3f} s after imports, "
                          f"{figures[2] / 1e6:.1f} M tokens/s, {figures[3]:,.1f} MiB", file=sys.stderr)  # fmt: skip
    units = (("start", "s", 0), ("start after imports", "s", 1), ("reading", "tokens/s", 2), ("peak memory", "MiB", 3))
    for what, unit, number in units:
        for size in sizes:
            own, theirs = ([figures[number] for figures in found[size, name]] for name in ("own", "megatron"))
            ratio = statistics.median(theirs) / statistics.median(own)
            print(f"{what}, {sizes[size]:,} tokens: own {statistics.median(own):,.3f} {unit}, Megatron-LM "
                  f"{statistics.median(theirs):,.3f} {unit}: {ratio:.3f}")  # fmt: skip
            aim = {"start": "<= 1.2", "reading": ">= 0.9"}.get(what, "")
            better = "higher" if what == "reading" else "lower"
            name = f"{what}, Megatron-LM's corpus / own shards, {sizes[size]:,} tokens"
            record(arguments.record, name=name, pairs=(theirs, own), better=better, aim=aim)


def write_own(folder: Path, tokens: int) -> None:
    folder.mkdir(parents=True)
    starts = np.arange(0, tokens, DOCUMENT).astype("<u8").tobytes()
    (folder / "00000.documents").write_bytes(starts)
    with open(folder / "00000.tokens", "wb") as file:
        file.truncate(2 * tokens)
    checksums = {"documents": hashlib.sha256(starts).hexdigest(), "tokens": "0" * 64}
    shard = {"name": "00000", "tokens": tokens, "documents": len(starts) // 8, "sha256": checksums}
    about = {"format": 2, "dtype": "<u2", "bos": False, "eos": False, "tokens": tokens, "shards": [shard]}
    about |= {"tokenizer": {"fingerprint": "bytes", "vocab_size": 258, "name": "bytes"}, "documents": len(starts) // 8}
    (folder / "index.json").write_text(json.dumps(about))


def write_megatron(prefix: Path, tokens: int) -> None:
    from titanlite.data.foreign import MEGATRON, MEGATRON_MAGIC

    starts = np.arange(0, tokens, DOCUMENT)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(MEGATRON.pack(MEGATRON_MAGIC, 1, 8, len(starts), len(starts) + 1))
        file.write(np.diff(starts, append=tokens).astype("<i4").tobytes())
        file.write((2 * starts).astype("<i8").tobytes())
        file.write(np.arange(len(starts) + 1).astype("<i8").tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * tokens)


def in_a_process(place: Path) -> tuple[float, ...]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_contend, args=(place, theirs))
    process.start()
    result = ours.recv()
    process.join()
    return result


def _contend(place: Path, pipe: Connection) -> None:
    from titanlite.data.samples import Samples
    from titanlite.data.sources import open_sources
    from titanlite.data.tokenizer import ByteTokenizer
    from titanlite.schema import Data

    tokenizer = ByteTokenizer()
    data = Data(path=str(place), add_bos=False, add_eos=False, document_mask=True)
    imported, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sources = open_sources(data, data, tokenizer=tokenizer, seq_len=SEQ_LEN, cache_folder=place.parent / "cache")
    samples = Samples(sources, seed=0)
    _ = samples.__getitems__([0])
    started = time.process_time()
    for number in range(BATCHES):
        samples.__getitems__([number])
    rate = BATCHES * SEQ_LEN / (time.process_time() - started)
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    pipe.send((started, started - imported, rate, memory))


if __name__ == "__main__":
    main()
