"""`titanlite parity --where`: planted errors are named by module and direction."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.dumps import PLANTED, compared, dumped, options
from tests.support.helpers import TinyRun, mentions, one_process
from tests.support.layouts import built
from titanlite.runtime.errors import UserError
from titanlite.tools import cli
from titanlite.tools.report.compare import TOKENS, ValueDump, compare_dumps, read_dump, report


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """Dumps of steps 1 and 2 without an error, and a process group of one rank."""
    torch.set_num_threads(1)
    tiny = TinyRun(tmp_path_factory.mktemp("where"))
    with one_process():
        for step in (1, 2):
            dump(tiny, f"right-{step}", step=step)
        yield tiny


def dump(tiny: TinyRun, name: str, *more: str, step: int = 1) -> Path:
    dumped(0, 1, tiny.config(*options(*more, name=name)), tiny.folder / name, step=step)
    return tiny.folder / name


@pytest.mark.slow
def test_planted_errors_are_named(right: TinyRun) -> None:
    for number, (more, step, key) in enumerate(PLANTED.values()):
        dump(right, f"wrong-{number}", *more, step=step)
        first = compared(right, f"wrong-{number}", f"right-{step}").first
        assert first is not None, key
        assert first.key.startswith(key), first


@pytest.mark.long
def test_runs_that_trade_memory_are_equal_in_every_value(right: TinyRun) -> None:
    dump(right, "full", "--activation_checkpoint.mode=full")
    found = compared(right, "full", "right-1")
    assert found.first is None
    assert found.left_out == 0
    assert {difference.most for difference in found.differences} == {0.0}
    dump(right, "parts", "--training.local_batch_size=2", "--activation_checkpoint.mode=selective")
    found = compared(right, "parts", "right-1")
    assert found.first is None
    assert {
        difference.most
        for difference in found.differences
        if difference.direction == "forward" and difference.name != "loss"
    } == {0.0}
    assert list(report(found))[-1] == "equal"


def test_other_samples_are_named(right: TinyRun) -> None:
    config = right.config(*options("--debug.seed=1", name="seed"))
    dumped(0, 1, config, right.folder / "seed")
    first = compared(right, "seed", "right-1").first
    assert first is not None
    assert first.key == TOKENS


@pytest.mark.long
def test_the_table_marks_blocks(right: TinyRun) -> None:
    dump(right, "halved", *PLANTED["gradient of an input"][0])
    lines = [line.split() for line in report(compared(right, "halved", "right-1"))][:-3]
    assert [line[0] for line in lines[1:]] == [
        "tokens", "tok_embeddings", "layers.0", "layers.1", "layers.2", "head", "loss",
    ]  # fmt: skip
    marks = {line[0]: [cell.endswith("*") for cell in line[2::2]] for line in lines[1:]}
    assert [marks[f"layers.{block}"][1] for block in range(3)] == [True, True, False]
    assert not any(cells[0] for cells in marks.values())


@pytest.mark.long
def test_the_command_compares_dumps(right: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    a, b = (str(right.folder / name) for name in ("right-1", "wrong"))
    dump(right, "wrong", *PLANTED["dtype"][0])
    capfd.readouterr()
    assert cli.run(["parity", "--where", a, a]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "equal"
    assert cli.run(["parity", "--where", b, a]) == 1
    captured = capfd.readouterr()
    key = "forward output layers.1.feed_forward.w2"
    assert any(mentions(line, key, "bfloat16 in A", "float32 in B") for line in captured.out.splitlines())
    assert captured.err == f"error: not equal: first {key}\n"
    assert cli.run(["parity", "--where", b, a, "--tolerance=10"]) == 0

    record = torch.load(Path(a, "rank-0.pt"))
    for name in ("none", "half", "older", "damaged", "empty"):
        (right.folder / name).mkdir()
    torch.save(record | {"schema": 0}, right.folder / "older" / "rank-0.pt")
    torch.save(record | {"files": 2}, right.folder / "half" / "rank-0.pt")
    torch.save(record | {"values": {}}, right.folder / "empty" / "rank-0.pt")
    (right.folder / "damaged" / "rank-0.pt").write_bytes(Path(a, "rank-0.pt").read_bytes()[:-100])
    for folder in ("none", "half", "older", "damaged", "empty", "right-2"):  # the last is of another step
        assert cli.run(["parity", "--where", str(right.folder / folder), a]) == 2
        assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.long
def test_half_of_the_gradient_of_keys_is_named(right: TinyRun) -> None:
    """A k_norm that is an Identity computes nothing, so that it is not named."""
    halved = read_dump(right.folder / "right-1")
    halved.values["gradient output layers.1.attention.wk"] /= 2
    first = compare_dumps(halved, read_dump(right.folder / "right-1")).first
    assert first is not None
    assert first.key == "gradient output layers.1.attention.wk"


@pytest.mark.long
def test_weights_before_the_step_have_the_tolerance_of_updates(right: TinyRun) -> None:
    """Rounding in step 1 is no difference in step 2; another weight is."""
    name = "before parameter layers.1.attention.wq.weight"
    for factor, key in ((1 + 1e-6, None), (1.01, name)):
        rounded = read_dump(right.folder / "right-2")
        rounded.values[name] *= factor
        first = compare_dumps(rounded, read_dump(right.folder / "right-2")).first
        assert (first and first.key) == key


def test_mistakes_of_the_command_are_one_line(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    config = str(tiny.toml)
    for words, named in {
        ("--where", "1x1", "1x1"): ["--where"],
        (config, "--where", "two", "1x1"): ["--where", "'two'", "2x2"],
        (config, "--where", "0x1", "1x1"): ["--where", "'0x1'", "2x2"],
        (config, "--where", "3x1", "1x1"): ["3x1: training.global_batch_size"],
        (config, "--where", "training.stepss=1", "1x1"): ["training.stepss=1: training.stepss"],
        (config, "--where", "1x1", "1x1", "--step", "7"): ["--step 7", 6, "training.steps"],
        (config, "--where", "parallelism.tensor_parallel_degree=2", "1x1"): [
            "tensor_parallel_degree",
            "parts of layers",
        ],
        (config, "--dump", "x", "--step", "7"): ["--step 7", 6, "training.steps"],
        (config, "--where", "1x1", "1x1", "--dump", "x"): ["--where", "--dump"],
    }.items():
        assert cli.run(["parity", *words]) == 2
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith("error: "), line
        assert mentions(line, *named), line


def test_too_many_values_are_refused(right: TinyRun) -> None:
    run = built(0, 1, right.config(*options(name="large")))
    arguments = {"folder": right.folder, "step": 1, "dtype": "float32"}
    with pytest.raises(UserError, match=r"\b102,400 B\b.*model\.args\.n_layers"):
        ValueDump(run.model, run.setup.mesh, **arguments, most_bytes=100 * 1024)
    run.batches.close()
    run.metrics.close()


def test_dumps_of_other_models_are_refused(right: TinyRun) -> None:
    one = read_dump(right.folder / "right-1")
    one.values.clear()
    with pytest.raises(UserError):
        compare_dumps(read_dump(right.folder / "right-1"), one)
