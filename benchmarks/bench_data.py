"""Data: how fast text becomes tokens, and tokens batches.

    python benchmarks/bench_data.py prepare [--runs 5] [--mib 48]     against the raw tokenizer and datasets.map
    python benchmarks/bench_data.py wait [--section.key=value ...]    share of the debug run's steps spent waiting

`prepare` makes JSON lines of the Python files of this environment and turns them into tokens with the shipped BPE:
plain tiktoken in one process (text already in memory: nothing read, parsed or written), `titanlite data prepare` with 1
and 2 workers, and `datasets.map` of the same tokenizer with 1 and 2 processes, its cache written as it does. Contenders
take turns, each in a process of its own, timed from after its imports; medians over the runs. --record FILE.jsonl
appends the measurements to a file.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from record import add_record_option, record

TOKENIZER = "python-2k"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "wait"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mib", type=int, default=48)
    add_record_option(parser)
    arguments, options = parser.parse_known_args()
    path: Path | None = arguments.record
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "prepare":
            bench_prepare(Path(folder), arguments.runs, arguments.mib, path)
        else:
            bench_wait(Path(folder), options, path)


# Text -> tokens


def bench_prepare(folder: Path, runs: int, mib: int, path: Path | None) -> None:
    corpus = write_corpus(folder / "corpus.jsonl", mib * 2**20)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    tokens: dict[str, int] = {}
    memory: dict[str, list[float]] = {name: [] for name in CONTENDERS}  # MiB, most of the largest process
    for _ in range(runs):
        for name in CONTENDERS:
            took, tokens[name], size = in_a_process(name, corpus, folder / "out")
            seconds[name].append(took)
            memory[name].append(size)
            print(f"  {name:<28} {took:6.2f} s", file=sys.stderr)
    differ = max(tokens.values()) - min(tokens.values())
    assert differ <= 1e-6 * max(tokens.values()), tokens  # titanlite cuts lines of more than 256 KiB
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        rate = next(iter(tokens.values())) / medians[name] / 1e6
        spread = f"({min(times):.2f} to {max(times):.2f})"
        print(f"{name:<28} {medians[name]:6.2f} s {spread}  {rate:.2f} M tokens/s, {memory[name][-1]:,.0f} MiB")
    raw, one, two = medians["raw tiktoken"], medians["prepare, 1 worker"], medians["prepare, 2 workers"]
    print(f"prepare, 1 worker / raw tokenizer: {raw / one:.3f}   2 workers / 1 worker: {one / two:.3f}")
    for processes, ours in ((1, one), (2, two)):
        theirs = medians[f"datasets.map, {processes} process(es)"]
        print(f"prepare / datasets.map, {processes} process(es): {theirs / ours:.3f}")
    note_prepare(path, seconds, memory, f"{mib} MiB of text")


def note_prepare(path: Path | None, seconds: dict[str, list[float]], memory: dict[str, list[float]], case: str) -> None:
    raw, one, two = (seconds[name] for name in ("raw tiktoken", "prepare, 1 worker", "prepare, 2 workers"))
    what = "text to tokens, data prepare"
    record(path, name=f"{what}, raw tokenizer / 1 worker, {case}", pairs=(raw, one), better="higher", aim=">= 0.9")
    record(path, name=f"{what}, 1 worker / 2 workers, {case}", pairs=(one, two), better="higher", aim="near 2")
    for processes, ours in ((1, one), (2, two)):
        theirs = seconds[f"datasets.map, {processes} process(es)"]
        name = f"{what}, datasets.map / it, {processes} process(es), {case}"
        record(path, name=name, pairs=(theirs, ours), better="higher", aim="> 1")
    for name, sizes in memory.items():
        better, aim = ("lower", "bounded") if name.startswith("prepare") else ("none", "")
        largest = f"memory of the largest process, {name}, {case}"
        record(path, name=largest, values=sizes, unit="MiB", better=better, aim=aim)


def write_corpus(path: Path, size: int) -> Path:
    """Python files of this environment, as JSON lines."""
    written = 0
    with open(path, "w") as file:
        for source in sorted(Path(os.__file__).parent.rglob("*.py")) + sorted(
            Path(np.__file__).parents[1].rglob("*.py")
        ):
            try:
                line = json.dumps({"text": source.read_bytes().decode()}) + "\n"
            except UnicodeDecodeError:
                continue
            if written + len(line) <= size and len(line) > 20:
                written += file.write(line)
    return path


def in_a_process(name: str, corpus: Path, out: Path) -> tuple[float, int, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_contend, args=(name, corpus, out, theirs))
    process.start()
    result = ours.recv()
    process.join()
    shutil.rmtree(out, ignore_errors=True)
    return result


def _contend(name: str, corpus: Path, out: Path, pipe: Connection) -> None:
    took, tokens = CONTENDERS[name](corpus, out)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    pipe.send((took, tokens, peak / 2**10))


def raw(corpus: Path, out: Path) -> tuple[float, int]:
    from titanlite.data.tokenizer import load_tokenizer

    encoding = load_tokenizer(TOKENIZER)._encoding  # type: ignore[attr-defined]
    texts = [json.loads(line)["text"] for line in corpus.open()]
    started = time.perf_counter()
    tokens = sum(len(encoding.encode_ordinary(text)) + 2 for text in texts)
    return time.perf_counter() - started, tokens


def ours(workers: int, corpus: Path, out: Path) -> tuple[float, int]:
    from titanlite.data import tokenizer  # noqa: F401
    from titanlite.data.tokens import TokenStore
    from titanlite.tools.cli import run

    started = time.perf_counter()
    arguments = f"data prepare {corpus} --out {out} --tokenizer {TOKENIZER} --workers {workers}"
    assert run(arguments.split()) == 0
    return time.perf_counter() - started, len(TokenStore(out))


def hugging_face(processes: int, corpus: Path, out: Path) -> tuple[float, int]:
    os.environ["HF_HOME"] = str(out)
    import datasets

    from titanlite.data.tokenizer import load_tokenizer

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_json(str(corpus), cache_dir=str(out / "cache"))
    assert isinstance(data, datasets.Dataset)
    encoding = load_tokenizer(TOKENIZER)._encoding  # type: ignore[attr-defined]

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = [encoding.encode_ordinary(text) for text in batch["text"]]
        return {"ids": [[encoding.n_vocab, *row, encoding.n_vocab] for row in ids]}

    started = time.perf_counter()
    mapped = data.map(
        tokenize,
        batched=True,
        remove_columns=data.column_names,
        num_proc=processes if processes > 1 else None,
        cache_file_name=str(out / "mapped.arrow"),
    )
    took = time.perf_counter() - started
    return took, sum(map(len, mapped["ids"]))


def prepare_1(corpus: Path, out: Path) -> tuple[float, int]:
    return ours(1, corpus, out)


def prepare_2(corpus: Path, out: Path) -> tuple[float, int]:
    return ours(2, corpus, out)


def map_1(corpus: Path, out: Path) -> tuple[float, int]:
    return hugging_face(1, corpus, out)


def map_2(corpus: Path, out: Path) -> tuple[float, int]:
    return hugging_face(2, corpus, out)


CONTENDERS = {
    "raw tiktoken": raw,
    "prepare, 1 worker": prepare_1,
    "prepare, 2 workers": prepare_2,
    "datasets.map, 1 process(es)": map_1,
    "datasets.map, 2 process(es)": map_2,
}


def bench_wait(folder: Path, options: list[str], path: Path | None) -> None:
    from titanlite.tools.cli import run

    config = Path(__file__).parents[1] / "train_configs" / "debug.toml"
    for workers in (0, 1):
        name = f"workers-{workers}"
        fixed = [f"--job.dump_folder={folder}", f"--job.name={name}", f"--data.num_workers={workers}"]
        steps = ["--training.steps=40", "--checkpoint.enable=false", "--validation.enable=false"]
        assert run(["train", f"--config={config}", *fixed, *steps, *options]) == 0
        records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        shares = [record["data_wait_seconds"] / record["step_seconds"] for record in records if record["step"] > 1]
        print(f"{workers} worker(s): {statistics.median(shares):.3%} of a step (to {max(shares):.3%}) waiting for data")
        record(
            path, name=" ".join([f"share of a debug step spent waiting for data, {workers} worker(s)", *options]),
            values=[100 * share for share in shares], unit="%", better="lower", aim="< 1 %",
        )  # fmt: skip


if __name__ == "__main__":
    main()
