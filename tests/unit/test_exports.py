"""Exports beside training: which checkpoints, what is kept for them, and what becomes of one that fails."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.helpers import TinyRun
from tests.weights import SMALL
from tests.whole_runs import trained
from titanlite.checkpoint import exports as exports_module
from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.exports import Exports
from titanlite.checks.preflight import preflight
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.process_group import read_ranks
from titanlite.schema import Checkpoint
from titanlite.storage.storage import LocalStorage

SLOW = (
    "import sys, pathlib, time; time.sleep(0.4); out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1]); "
    "out.mkdir(); (out / 'config.json').touch(); print(sys.argv)"
)
"""A program in place of the export: it takes a while, and leaves what counts as done."""
FAILS = "import sys; print('error: the disk is full', file=sys.stderr); sys.exit(1)"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the program of the processes: a whole export imports torch."""

    def replace(program: str) -> None:
        monkeypatch.setattr(exports_module, "BEGIN", program)

    return replace


def exports_of(folder: Path, **options: object) -> Exports:
    (folder / "logs").mkdir(exist_ok=True)
    return Exports(Checkpoint.model_validate(options), run=folder, is_first_rank=True)


@pytest.mark.long
def test_one_export_runs_at_a_time_and_each_once(tmp_path: Path, begin: Callable[[str], None]) -> None:
    begin(SLOW)
    exports = exports_of(tmp_path, export_every=500, last_save_in_hf=True, export_dtype="bfloat16", export_drop=["a.*"])
    for step in (500, 750, 1000, 1000):
        exports.saved(step)
    assert exports.unfinished() == {500, 1000}
    while 500 in exports.unfinished():
        assert not (tmp_path / "exports" / "hf-step-00001000").exists()
        exports.poll()
        time.sleep(0.01)
    exports.finish(last=1100)
    done = sorted(path.name for path in (tmp_path / "exports").iterdir())
    assert done == ["hf-step-00000500", "hf-step-00001000", "hf-step-00001100"]
    words = (tmp_path / "logs" / "export-step-00000500.log").read_text()
    assert f"'{tmp_path}/checkpoints/step-00000500', '--out', '{tmp_path}/exports/hf-step-00000500'" in words
    assert "'--dtype', 'bfloat16', '--drop', 'a.*'" in words
    begin(FAILS)
    exports.start(1100)
    assert exports.unfinished() == set(), "it is exported"


def test_a_failure_is_a_warning_with_the_command(
    tmp_path: Path, begin: Callable[[str], None], warnings: Callable[[], list[str]]
) -> None:
    begin(FAILS)
    exports = exports_of(tmp_path, export_every=500)
    exports.saved(500)
    exports.finish(last=600)
    [warning] = warnings()
    log = tmp_path / "logs" / "export-step-00000500.log"
    assert warning == (
        f"the export of step 500 failed: the disk is full (log: {log}). By hand: titanlite checkpoint export "
        f"{tmp_path}/checkpoints/step-00000500 --out {tmp_path}/exports/hf-step-00000500 --dtype float32"
    )


def test_a_stopped_run_does_not_wait(
    tmp_path: Path, begin: Callable[[str], None], warnings: Callable[[], list[str]]
) -> None:
    begin("import time; time.sleep(60)")
    exports = exports_of(tmp_path, export_every=1)
    exports.saved(1)
    exports.saved(2)
    started = time.monotonic()
    exports.finish(give_up=lambda: True)
    assert time.monotonic() - started < 10
    assert exports.unfinished() == set()
    assert "the export of step 1 was stopped. By hand: titanlite checkpoint export" in warnings()[0]


def test_other_ranks_export_nothing(tmp_path: Path) -> None:
    exports = Exports(Checkpoint(export_every=1, interval=1), run=tmp_path, is_first_rank=False)
    exports.saved(1)
    exports.finish(last=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_an_export_ends_with_the_trainer(tmp_path: Path) -> None:
    """The process is killed when the one that started it is."""
    program = (
        "import os, pathlib, sys, time\n"
        "from titanlite.checkpoint import exports\n"
        "from titanlite.schema import Checkpoint\n"
        "exports.BEGIN = exports.BEGIN.partition(chr(10))[0] + "
        "'\\nimport os, pathlib, time; pathlib.Path(\"child\").write_text(str(os.getpid())); time.sleep(100)'\n"
        "pathlib.Path('logs').mkdir()\n"
        "it = exports.Exports(Checkpoint(export_every=1), run=pathlib.Path('.'), is_first_rank=True)\n"
        "it.saved(1)\n"
        "time.sleep(100)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    trainer = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    child = tmp_path / "child"
    while not (child.exists() and child.read_text()):
        assert trainer.poll() is None
        time.sleep(0.01)
    number = int(child.read_text())
    assert os.getpriority(os.PRIO_PROCESS, number) == 10
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    deadline = time.monotonic() + 30
    while _lives(number):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lives(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_run_exports_while_it_trains_and_at_its_end(
    tiny: TinyRun, begin: Callable[[str], None], warnings: Callable[[], list[str]]
) -> None:
    begin(SLOW)
    options = ["--checkpoint.interval=1", "--checkpoint.export_every=2", "--checkpoint.last_save_in_hf"]
    options += ["--checkpoint.keep_latest_k=1"]
    trained(tiny.config(*options, "--training.steps=5"))
    run = tiny.folder / "outputs" / "tiny"
    done = sorted(path.name for path in (run / "exports").iterdir())
    assert done == ["hf-step-00000002", "hf-step-00000004", "hf-step-00000005"]
    kept = manifests.committed_steps(LocalStorage(str(run / "checkpoints"), "").list())
    assert kept[-1] == 5
    assert 1 not in kept
    assert {2, 4} & set(kept), "checkpoints stay for the exports that waited"
    assert warnings() == []
    (run / "exports" / "hf-step-00000005" / "config.json").unlink()
    (run / "exports" / "hf-step-00000005").rmdir()
    trained(tiny.config(*options, "--training.steps=5"))
    assert (run / "exports" / "hf-step-00000005").exists(), "a finished run that is started again completes its exports"


def test_wrong_options(tiny: TinyRun) -> None:
    with pytest.raises(
        ConfigError, match=r"checkpoint.export_every: must be a multiple of checkpoint.interval \(100\)"
    ):
        tiny.config("--checkpoint.export_every=150")
    options = ["--model.name=qwen3_moe", "--model.flavor=debug", "--checkpoint.last_save_in_hf"]
    place = (
        r"checkpoint.last_save_in_hf: Qwen3MoeForCausalLM has no place for layers.\*.feed_forward.bias_E: to export "
    )
    with pytest.raises(ConfigError, match=place + r'without, set checkpoint.export_drop = \["layers.*bias_E"\]'):
        preflight(tiny.config(*options), read_ranks({}), torch.device("cpu"))
    drop = '--checkpoint.export_drop=["layers.*.feed_forward.bias_E"]'
    assert preflight(tiny.config(*options, drop), read_ranks({}), torch.device("cpu"))
    needed = '--checkpoint.export_drop=["layers.*"]'
    with pytest.raises(
        ConfigError, match=r"checkpoint.export_drop: Qwen3MoeForCausalLM needs layers.\*.attention_norm.weight, "
    ):
        preflight(tiny.config(*options, needed), read_ranks({}), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.usefixtures("single_process_group")
def test_the_last_export_is_the_model(tiny: TinyRun) -> None:
    """The real command: what transformers loads has the weights at the end of the run."""
    options = [f"--model.args.{name}={value}" for name, value in SMALL.items()]
    weights = trained(tiny.config("--checkpoint.last_save_in_hf", *options))
    folder = tiny.folder / "outputs" / "tiny" / "exports" / "hf-step-00000006"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, weights["head.output.weight"])
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, weights["layers.1.feed_forward.w3.weight"])


def test_an_export_takes_the_code_of_the_run_not_of_the_checkpoint(tmp_path: Path) -> None:
    named = {"model_file": "/abs/own.py", "tokenizer": "/abs/tokenizer"}
    exports = Exports(Checkpoint(export_every=1), run=tmp_path, **named, is_first_rank=True)
    assert exports._command(5)[-4:] == ["--model-file", "/abs/own.py", "--tokenizer", "/abs/tokenizer"]
