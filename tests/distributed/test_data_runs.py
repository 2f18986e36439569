"""Whole runs and their data: every start resumes the data, finite data ends for all ranks, mixtures are exact."""

import gc
import hashlib
import json
import multiprocessing
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import TinyRun, free_port, mentions, one_process, run_in_turn, run_ranks, train_on_this_rank
from tests.support.layouts import built, trained
from titanlite.batch import Batch
from titanlite.checkpoint import manifest as manifests
from titanlite.runtime.console import start_logging
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.schema import Config
from titanlite.storage.storage import LocalStorage
from titanlite.train import finish, train


def validation_records(tiny: TinyRun, name: str) -> list[dict[str, Any]]:
    lines = (tiny.folder / "outputs" / name / "validation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def text_of(path: Path, size: int) -> Path:
    words = random.Random(path.name)
    path.write_text("".join(words.choice("abcdefgh \n") for _ in range(size)))
    return path


def trained_and_logged(rank: int, world_size: int, config: Config) -> None:
    start_logging(rank)
    train_on_this_rank(config, rank, world_size)


@pytest.mark.slow
def test_finite_data_ends_for_all_ranks_and_validates_the_whole_set(tiny: TinyRun) -> None:
    """1,003 sequences of 8 tokens, and 37 to validate on, which no number of ranks here divides."""
    train_text = text_of(tiny.folder / "train.txt", 1003 * 8 + 1 - 2)
    other_text = text_of(tiny.folder / "other.txt", 37 * 8 + 1 - 2)
    options = [
        "--training.seq_len=8", "--training.epochs=1", "--training.global_batch_size=200", f"--data.path={train_text}",
        "--validation.enable", f"--validation.path={other_text}", "--validation.sequences=0", "--validation.freq=4",
        "--training.local_batch_size=25", "--metrics.log_freq=100",
    ]  # fmt: skip
    found = {}
    for ranks in (1, 4):
        config = tiny.config(f"--job.name=on-{ranks}", *options, world_size=ranks)
        run_ranks(trained_and_logged, ranks, config)
        assert [record["step"] for record in tiny.records(f"on-{ranks}")] == [1, 5], "1003 // 200"
        saved = LocalStorage(f"{tiny.folder}/outputs/on-{ranks}/checkpoints", "")
        assert manifests.committed_steps(saved.list()) == [5]
        assert manifests.read_manifest(saved, manifests.folder_name(5)).samples == 1000
        log = (tiny.folder / f"outputs/on-{ranks}/logs/rank-0.log").read_text()
        assert re.search(r" 3 sequences .* 200\b", log)
        found[ranks] = validation_records(tiny, f"on-{ranks}")
    for records in found.values():
        assert [record["step"] for record in records] == [4, 5]
        for record, reference in zip(records, found[1], strict=True):
            assert record["loss"] == pytest.approx(reference["loss"], rel=2e-6)
            source = record["sources"]["other.txt"]
            assert (source["sequences"], source["tokens"]) == (37, 37 * 8)
            assert source["bits_per_byte"] == pytest.approx(record["loss"] / 0.6931472 * 296 / 295, rel=1e-6), "one eos"


def consumed(config: Config, samples: int) -> list[int]:
    return train_on_this_rank(config, 0, 1).position.samples.consumed(samples)


def refusal(config: Config) -> str:
    gc.freeze()  # what was there before is not walked through
    try:
        train_on_this_rank(config, 0, 1)
    except UserError as error:
        message = str(error)
    else:
        raise AssertionError("was not refused")
    gc.collect()  # the lock of the run's folder goes with what the error held
    return message


MIXTURE = """
[[data.sources]]
path = "{0}/a.txt"
weight = 0.7
[[data.sources]]
path = "{0}/b.txt"
name = "second"
weight = 0.3
"""


@pytest.mark.usefixtures("single_process_group")
def test_shares_of_a_mixture_are_exact_and_a_changed_one_is_refused_or_continued(tiny: TinyRun) -> None:
    tiny.toml.write_text(tiny.toml.read_text().replace(f'path = "{tiny.text}"', "") + MIXTURE.format(tiny.text))
    train_on_this_rank(tiny.config("--training.steps=5"), 0, 1)
    last = tiny.records()[-1]
    assert last["samples"] == 40
    assert last["data_shares"] == {"a.txt": 28 / 40, "second": 12 / 40}
    changed = ["--training.steps=10", "--data.sources.0.weight=0.3", "--data.sources.1.weight=0.7"]
    message = refusal(tiny.config(*changed))
    assert re.search(r"data\.sources\.second\.weight .*0\.3.* 0\.7\n", message)
    assert mentions(message, "data.on_change", '"continue"', '"restart"')
    assert consumed(tiny.config(*changed, "--data.on_change=continue"), 80) == [28 + 12, 12 + 28]
    assert tiny.records()[-1]["data_shares"] == {"a.txt": 0.5, "second": 0.5}
    assert consumed(tiny.config(*changed, "--training.steps=12"), 80) == [40, 40], "the next start needs no word of it"


@pytest.mark.slow
def test_schedules_in_tokens_together_on_other_processes(tiny: TinyRun) -> None:
    """The first start ends in the middle of all four; the second, on two processes, reads and computes the rest."""
    config = tiny.toml.read_text().replace(f'path = "{tiny.text}"', "") + MIXTURE.format(tiny.text)
    tiny.toml.write_text(config)
    options = [
        "--training.local_batch_size=1",
        "--training.seq_len=16",
        "--training.batch_ramp=[{until_tokens=64, global_batch_size=2}, {until_tokens=190, global_batch_size=4}]",
        "--training.seq_len_ramp=[{until_tokens=96, seq_len=4}, {until_tokens=300, seq_len=8}]",
        "--data.stages=[{until_tokens=160, weights={'a.txt'=1.0, second=3.0}}, {until_tokens=400, weights={second=1}}]",
        "--lr_scheduler.warmup_tokens=128",
        "--lr_scheduler.decay_tokens=256",
    ]
    whole, tokens = "--job.name=whole", "--training.tokens=500"
    first = ["--training.steps=4", "--lr_scheduler.decay_tokens=0"]  # whose last steps would decay otherwise
    run_in_turn(trained, 1, [tiny.config(*options, tokens, whole), tiny.config(*options, *first)])
    run_in_turn(trained, 2, [tiny.config(*options, tokens, world_size=2)])
    expected, found = tiny.records("whole"), tiny.records()
    assert (
        [record["samples"] for record in expected]
        == [record["samples"] for record in found]
        == [2, 4, 8, 12, 20, 28, 36]
    )
    assert [record["loss"] for record in found] == pytest.approx([record["loss"] for record in expected], rel=1e-6)
    assert [record["data_shares"] for record in found] == [record["data_shares"] for record in expected]
    assert expected[-1]["data_shares"]["second"] == pytest.approx((7.5 + 15 + 0.3 * 11) / 36, abs=1 / 36)
    peak, ends = tiny.config().optimizer.lr, [16 * record["samples"] for record in expected]
    decayed = [1 - (end - (576 - 256)) / (256 + 128) for end in ends[-2:]]
    rates = [record["lr"] / peak for record in expected]
    assert [record["lr"] for record in found] == [record["lr"] for record in expected]
    assert rates == pytest.approx([32 / 128, 64 / 128, 1, 1, 1, *decayed])
    flops = [record["tflops_per_device"] / record["tokens_per_second"] for record in expected]
    assert flops[0] < flops[3] < flops[5], "attention to fewer tokens"
    without = [option for option in options if "batch_ramp" not in option]
    with one_process():
        refused = refusal(tiny.config(*without, "--training.tokens=600"))
    assert mentions(refused, "training.batch_ramp", "until_tokens", 64)


@pytest.mark.usefixtures("single_process_group")
def test_shorter_sequences_train_as_with_that_seq_len(tiny: TinyRun) -> None:
    options = ["--training.steps=4", "--data.shuffle=false", "--training.max_norm=0.5", "--data.document_mask"]
    short = ["--training.seq_len=8", "--training.global_batch_size=8", "--job.name=short"]
    ramp = "--training.seq_len_ramp=[{until_tokens=1000000, seq_len=8}]"
    train_on_this_rank(tiny.config(*options, *short), 0, 1)
    train_on_this_rank(tiny.config(*options, "--training.seq_len=16", "--training.global_batch_size=4", ramp), 0, 1)
    assert tiny.losses() == pytest.approx(tiny.losses("short"), rel=1e-6)


@pytest.mark.nightly
@pytest.mark.usefixtures("single_process_group")
def test_compiled_blocks_are_compiled_once_for_each_length(tiny: TinyRun) -> None:
    import torch
    from torch._dynamo.utils import counters

    ramp = "--training.seq_len_ramp=[{until_tokens=128, seq_len=4}, {until_tokens=256, seq_len=8}]"
    options = ["--training.seq_len=16", "--training.steps=6", ramp]
    train_on_this_rank(tiny.config(*options, "--job.name=eager"), 0, 1)
    torch.compiler.reset()
    counters.clear()
    train_on_this_rank(tiny.config(*options, "--compile.enable"), 0, 1)
    assert tiny.losses() == pytest.approx(tiny.losses("eager"), rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.usefixtures("single_process_group")
def test_a_later_stage_of_the_data_is_a_config_edit_and_a_past_one_is_not(tiny: TinyRun) -> None:
    tiny.toml.write_text(tiny.toml.read_text().replace(f'path = "{tiny.text}"', "") + MIXTURE.format(tiny.text))
    stages = "--data.stages=[{until_tokens=%d, weights={'a.txt'=1}}, {until_tokens=%d, weights={second=1}}]"
    seq_len = tiny.config().training.seq_len
    train_on_this_rank(tiny.config("--training.steps=2", stages % (8 * seq_len, 60 * seq_len)), 0, 1)  # 16 samples
    edited = ["--training.steps=4", "--data.sources.0.weight=0"]
    assert mentions(refusal(tiny.config(*edited, stages % (9 * seq_len, 24 * seq_len))), "data.on_change")
    assert consumed(tiny.config(*edited, stages % (8 * seq_len, 24 * seq_len)), 32) == [8, 24]
    whole = tiny.config(*edited, stages % (8 * seq_len, 24 * seq_len), "--job.name=whole")
    train_on_this_rank(whole, 0, 1)
    assert tiny.losses()[2:] == tiny.losses("whole")[2:], "as if the config had always been so"
    with pytest.raises(ConfigError, match=r"data\.sources"):
        tiny.config("--data.sources.0.weight=0", "--data.sources.1.weight=0")


# Killed and resumed


def consume(rank: int, world_size: int, config: Config, port: int, log: Path) -> None:
    """Train, and write a line for each step: its number, and a hash of each of this rank's sequences."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    run = built(rank, world_size, config)
    with open(log, "a") as file:
        batches = _recorded(run.batches, run.position.progress.step, run.accumulation, file)
        run.position = replace(run.position, batches=batches)
        train(run)
        finish(run)


def _recorded(batches: Iterator[Batch], step: int, accumulation: int, file: Any) -> Any:
    for number, batch in enumerate(batches):
        for tokens in batch["tokens"]:
            print(step + number // accumulation + 1, hashlib.sha256(tokens.numpy().tobytes()).hexdigest(), file=file)
        file.flush()
        yield batch


def hashes(log: list[Path]) -> dict[int, list[str]]:
    found = defaultdict(list)
    for path in log:
        for line in path.read_text().splitlines():
            step, digest = line.split()
            found[int(step)].append(digest)
    return {step: sorted(digests) for step, digests in found.items()}


@pytest.mark.nightly
def test_ten_kills_on_random_rank_counts_change_nothing_of_what_is_read(tiny: TinyRun) -> None:
    draw = random.Random(1)
    context = multiprocessing.get_context("forkserver")

    def start(name: str, ranks: int, steps: int, *options: str, until: int | None = None) -> dict[int, list[str]]:
        """Returns what was read in each step. With `until`, all ranks are killed once that step is being read."""
        config = tiny.config(f"--job.name={name}", f"--training.steps={steps}", *options, world_size=ranks)
        port = free_port()
        logs = [tiny.folder / f"{name}-{port}-{rank}" for rank in range(ranks)]
        processes = [context.Process(target=consume, args=(r, ranks, config, port, logs[r])) for r in range(ranks)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 120
        while until is not None and not (logs[0].exists() and max(hashes(logs[:1]), default=0) >= until):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        for process in processes:
            if until is not None:
                process.kill()
            process.join(120)
        assert until is not None or all(process.exitcode == 0 for process in processes)
        return hashes([log for log in logs if log.exists()])

    expected = start("whole", 1, 60)
    assert all(len(digests) == 8 for digests in expected.values())
    assert len({digest for digests in expected.values() for digest in digests}) > 300
    saves, seen, step = ["--checkpoint.interval=2"], set(), 0
    for _ in range(10):
        ranks = draw.choice([1, 2, 4])
        workers = draw.choice([0, 0, 2])
        micro = draw.choice([1, 2])
        options = [*saves, f"--data.num_workers={workers}", f"--training.local_batch_size={micro}"]
        step += draw.randrange(1, 6)
        for number, digests in start("killed", ranks, 60, *options, until=step).items():
            assert set(digests) <= set(expected[number]), f"step {number} on {ranks} ranks"
            if len(digests) == 8:
                assert digests == expected[number]
                seen.add(number)
    rest = start("killed", 2, 60, *saves)
    assert rest == {number: expected[number] for number in rest}
    assert min(rest) > 1
    assert seen | set(rest) >= set(range(min(rest), 61))
    assert [record["step"] for record in tiny.records("killed")] == [*range(1, 61)]
    assert tiny.losses("killed") == pytest.approx(tiny.losses("whole"), rel=1e-5)
