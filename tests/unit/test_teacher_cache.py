"""A cache of a teacher: its entries, its files after an interruption, runs that read it, and mistakes."""

import json
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers import TinyRun, mentions, one_process, train_on_this_rank
from tests.layouts import built
from tests.manifests import flip
from titanlite.checks.preflight import preflight
from titanlite.data.samples import Samples
from titanlite.ops.attention import document_arguments
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.runtime.process_group import Ranks
from titanlite.techniques.distill.entries import Entries, entry_type
from titanlite.techniques.distill.source import fingerprint
from titanlite.tools import cli
from titanlite.tools.convert.source import load_model, open_model, open_source
from titanlite.tools.convert.teacher_cache import write_cache
from titanlite.train import Run

VOCABULARY, SEQ_LEN, TOP_K = 259, 32, 20
MASK = "--data.document_mask=true"
STEPS = "--training.steps=3"


def train(tiny: TinyRun, *options: str) -> Run:
    with one_process():
        return train_on_this_rank(tiny.config(*options), 0, 1)


@contextmanager
def ending_its_group() -> Iterator[None]:
    """Destroy the process group of a command that fails, whose process would end."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def write(toml: Path, *options: str, top_k: int = TOP_K, block_sequences: int = 16) -> None:
    """Write a cache of float32 with small files, in this process."""
    block_bytes = block_sequences * (SEQ_LEN * entry_type(VOCABULARY, top_k, "float32").itemsize + 4)
    given: Any = {"top_k": top_k, "dtype": "float32", "batch_size": 3, "block_bytes": block_bytes}
    with ending_its_group():
        write_cache(str(toml), options, **given)


def command(*words: str) -> int:
    with ending_its_group():
        return cli.run(["distill", "cache", *words])


def files(folder: Path) -> dict[str, bytes]:
    return {str(it.relative_to(folder)): it.read_bytes() for it in folder.rglob("*") if it.is_file()}


@dataclass
class Cached:
    """A teacher, and a cache of it."""

    tiny: TinyRun
    options: list[str]
    """Options of a run that reads the cache."""
    live: list[str]
    """Options of a run with the teacher itself."""

    @property
    def folder(self) -> Path:
        return self.tiny.folder / "cache"

    @property
    def of_source(self) -> Path:
        [place] = [path for path in self.folder.iterdir() if path.is_dir()]
        return place

    def samples(self, *options: str, name: str = "read") -> Samples:
        """Samples of a run with the cache."""
        with one_process():
            run = built(0, 1, self.tiny.config(*self.options, *options, f"--job.name={name}"))
            run.batches.close()
            return run.samples


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Cached:
    tiny = TinyRun(tmp_path_factory.mktemp("cached"))
    data = [f"--data.path={tiny.text}/a.txt", MASK]
    train(tiny, *data, "--job.name=teacher", "--training.steps=2", "--checkpoint.interval=1")
    live = [*data, f"--teacher.path={tiny.folder}/outputs/teacher", "--distill.ratio=0.6", "--distill.temperature=2.0"]
    options = [*live, f"--teacher.cache={tiny.folder}/cache"]
    write(tiny.toml, *options)
    return Cached(tiny, options, live)


@pytest.mark.long
def test_rows_are_the_teachers_probabilities(cached: Cached) -> None:
    """Compare with the model as it was saved, at the temperature, within documents."""
    samples = cached.samples()
    model = load_model(open_source(f"{cached.tiny.folder}/outputs/teacher"))
    batch = samples.__getitems__([0, 1, 77])
    with torch.no_grad():
        expected = (model(batch["tokens"], **document_arguments(batch)) / 2.0).log_softmax(-1)
    ids, found, log_tail = (batch[f"teacher_{name}"] for name in ("ids", "log_probs", "log_tail"))
    assert (ids.shape, ids.dtype) == ((3, SEQ_LEN, TOP_K), torch.int32)
    torch.testing.assert_close(found, expected.topk(TOP_K, dim=-1).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(found, expected.gather(-1, ids.long()), rtol=0, atol=1e-5)
    torch.testing.assert_close(log_tail.exp(), 1 - found.exp().sum(-1), rtol=0, atol=1e-5)


@pytest.mark.long
def test_an_interrupted_cache_resumes_and_has_the_same_bits(cached: Cached, tmp_path: Path) -> None:
    whole = files(cached.folder)
    entries = sorted(name for name in whole if name.endswith(".topk"))
    assert len(entries) == 8
    moved = shutil.copytree(cached.folder, tmp_path / "cache")
    place = moved / cached.of_source.name
    for name in (entries[1], entries[4], entries[7]):
        (moved / name).unlink()
    (moved / entries[5]).write_bytes(b"shorter")
    (place / ".0000004.topk").write_bytes(b"what a killed process has left")
    options = [*cached.options, f"--teacher.cache={moved}"]
    with pytest.raises(UserError, match=r"/cache/.*\b4\b.*\b8\b.*distill cache`"):
        train(cached.tiny, *options, "--job.name=incomplete")
    kept = (moved / entries[0]).stat().st_mtime_ns
    write(cached.tiny.toml, *options)
    found = files(moved)
    assert found.pop(".lock")
    assert found == {name: data for name, data in whole.items() if name != ".lock"}
    assert (moved / entries[0]).stat().st_mtime_ns == kept, "what was whole is not made again"


@pytest.mark.slow
def test_a_full_disk_loses_nothing(
    cached: Cached, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of more than a limit fail to be written: that of the second source, after the first is done."""
    (tmp_path / "short.txt").write_text("one two three " * 20)
    sources = f"sources = [{{path='{tmp_path}/short.txt', name='a'}}, {{path='{cached.tiny.text}/b.txt', name='b'}}]"
    toml = tmp_path / "two.toml"
    toml.write_text(cached.tiny.toml.read_text().replace(f'path = "{cached.tiny.text}"', sources))
    options = [*cached.live[1:], f"--teacher.cache={tmp_path}/cache"]
    (tmp_path / "expected").mkdir()
    (tmp_path / "expected" / ".teacher.json.staging").write_text("what a process has left that was killed at once")
    write(toml, *options, f"--teacher.cache={tmp_path}/expected")  # and the tokens of both
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # compiled modules would be cut, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(UserError) as error:
            write(toml, *options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    [line] = str(error.value).splitlines()
    assert line.startswith(f"teacher.cache: {tmp_path}/cache/")
    assert mentions(line, "File too large", "`titanlite distill cache`")
    names = sorted(name.rpartition("/")[2] for name in files(tmp_path / "cache"))
    assert names == [".lock", "0000000.topk", "teacher.json"], "the first source is complete"
    write(toml, *options)
    expected = files(tmp_path / "expected")
    assert len(expected) > 8
    assert {**files(tmp_path / "cache"), ".lock": b""} == {**expected, ".lock": b""}
    capfd.readouterr()


@pytest.mark.long
def test_all_tokens_in_a_cache_are_the_teacher_itself(cached: Cached, tmp_path: Path) -> None:
    options = [*cached.live, f"--teacher.cache={tmp_path}/all"]
    write(cached.tiny.toml, *options, top_k=VOCABULARY)
    live = train(cached.tiny, *cached.live, STEPS, "--job.name=live")
    run = train(cached.tiny, *options, STEPS, "--job.name=all")
    assert live.targets.model is not None
    assert run.targets.model is None, "it is not in memory"
    pairs = list(zip(cached.tiny.records("live"), cached.tiny.records("all"), strict=True))
    for key in ("loss", "distill_loss", "added_loss", "grad_norm"):
        for step, (one, two) in enumerate(pairs):
            assert two[key] == pytest.approx(one[key], rel=1e-6 if step == 0 else 1e-5, abs=2e-7), key


@pytest.mark.long
def test_a_run_resumes_bit_for_bit_and_with_its_cache_only(cached: Cached) -> None:
    """The checkpoint knows the cache as it knows a teacher. Without teacher.path, any cache is read."""
    options = [it for it in cached.options if not it.startswith("--teacher.path")]
    run = train(cached.tiny, *options, STEPS, "--job.name=whole", "--checkpoint.interval=2")
    assert run.targets.model is None
    train(cached.tiny, *options, "--training.steps=2", "--job.name=parts")
    train(cached.tiny, *options, STEPS, "--job.name=parts", "--data.num_workers=0")
    for key in ("loss", "distill_loss", "grad_norm"):
        whole, parts = ([it[key] for it in cached.tiny.records(name)] for name in ("whole", "parts"))
        assert whole == parts
    manifest = cached.tiny.folder / "outputs/parts/checkpoints/step-00000003/manifest.json"
    assert len(json.loads(manifest.read_text())["settings"]["teacher"]) == 16
    with pytest.raises(UserError, match=r"\n *teacher .*[0-9a-f]{16}.*[0-9a-f]{16}\n"):
        train(cached.tiny, *cached.live, "--training.steps=4", "--job.name=parts")


# Mistakes


def check(cached: Cached, *options: str) -> str:
    """Problems that `titanlite check` reports."""
    with pytest.raises(ConfigError) as error:
        preflight(
            cached.tiny.config(*cached.options, *options),
            Ranks(0, 1, 0, 1),
            torch.device("cpu"),
            open_model=open_model,
        )
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("training.seq_len", "16", (32, 16)),
        ("distill.temperature", "1", (2.0, 1.0)),
        ("data.document_mask", "false", (True, False)),
        ("data.packing", "best_fit", ("'stream'", "'best_fit'")),
    ],
)
def test_a_cache_of_other_settings_is_refused(cached: Cached, key: str, value: str, words: tuple[object, ...]) -> None:
    [line] = check(cached, f"--{key}={value}").splitlines()
    assert line.startswith("teacher.cache: ")
    assert mentions(line, cached.folder, key, *words, "`titanlite distill cache`")


def test_a_cache_of_another_teacher_or_vocabulary_is_refused(cached: Cached) -> None:
    """The other teacher is the same one, a step earlier."""
    paths = [f"{cached.tiny.folder}/outputs/teacher/checkpoints/step-0000000{step}" for step in (2, 1)]
    one, two = (fingerprint(open_model(path, None, "teacher")) for path in paths)
    [line] = check(cached, f"--teacher.path={paths[1]}").splitlines()
    assert mentions(line, repr(one), repr(two))
    options = [it for it in cached.options if not it.startswith("--teacher.path")]
    unnamed = Cached(cached.tiny, options, [])
    [line] = check(unnamed, "--model.args.vocab_size=384").splitlines()
    assert mentions(line, "vocabulary", 259, 384)
    [line] = check(unnamed, "--data.tokenizer=python-2k", "--model.args.vocab_size=2048").splitlines()
    assert mentions(line, "vocabulary", 259, 2048, "data.tokenizer")
    [line] = check(unnamed, f"--teacher.cache={cached.tiny.text}").splitlines()
    assert mentions(line, f"teacher.cache: {cached.tiny.text}", "`titanlite distill cache`")


@pytest.mark.long
def test_rows_of_other_data_or_with_damage_are_refused(cached: Cached, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        cached.samples(f"--data.path={cached.tiny.text}/b.txt", name="without-cache")
    assert str(error.value).startswith(f"teacher.cache: {cached.folder} ")
    assert mentions(str(error.value), "b.txt", "`titanlite distill cache`")
    samples = cached.samples()
    source = samples.sources[0]
    assert isinstance(source.add, Entries)
    with pytest.raises(UserError, match=r"checksum .*\b5\b"):
        source.add(5, source.sequences.read(6))
    moved = shutil.copytree(cached.folder, tmp_path / "cache")
    file = moved / cached.of_source.name / "0000001.topk"
    flip(file, 100)
    damaged = cached.samples(f"--teacher.cache={moved}").sources[0]
    for name, values in damaged.read(17).added.items():
        np.testing.assert_array_equal(values, source.read(17).added[name])
    with pytest.raises(UserError, match=r"^teacher\.cache: \S+/0000001\.topk\b"):
        damaged.read(16)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"\d+ of \d+ files"):
        cached.samples(f"--teacher.cache={moved}", name="shorter")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--top-k", "260"], ["--top-k", 260, 259]),
        (["--top-k", "21", "--dtype", "float32"], ["--top-k", 20, 21]),
        (["--teacher.cache=TEXT"], ["TEXT"]),
        (["--teacher.path=nowhere"], ["teacher.path", "nowhere"]),
        (["--top-k", "0"], ["--top-k", "'0'"]),
    ],
)
def test_mistakes_of_the_command(
    cached: Cached, words: list[str], named: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("TEXT", str(cached.tiny.text)) for word in words]
    before = files(cached.folder).keys()
    assert command(str(cached.tiny.toml), *cached.options, *words) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert mentions(line, *(str(word).replace("TEXT", str(cached.tiny.text)) for word in named))
    assert files(cached.folder).keys() == before


@pytest.mark.parametrize("option", ["cache", "path"])
def test_the_command_needs_both_paths(tiny: TinyRun, option: str, capfd: pytest.CaptureFixture[str]) -> None:
    other = {"cache": "path", "path": "cache"}[option]
    assert command(str(tiny.toml), f"--teacher.{other}=x", "--distill.ratio=1") == 2
    [line] = capfd.readouterr().err.splitlines()
    assert f"teacher.{option}: is not set: name the " in line
