"""The export at the end of a run: what it calls, and what becomes of one that fails."""

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

from tests.support.helpers import TinyRun, mentions
from tests.support.weights import SMALL
from tests.support.whole_runs import trained
from titanlite.checks.preflight import preflight
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.process_group import read_ranks
from titanlite.tools.checkpoints import last_export

OPTIONS = ("--checkpoint.last_save_in_hf", "--training.steps=2")
EXPORTS = (
    "import sys, pathlib; out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1]); "
    "out.mkdir(parents=True); (out / 'config.json').touch(); print(sys.argv)"
)
"""A program in place of the export: it leaves what counts as done."""
FAILS = "import sys; print('error: the disk is full', file=sys.stderr); sys.exit(1)"


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_the_last_checkpoint_is_exported_once(
    tiny: TinyRun, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny.folder / "outputs" / "tiny"
    command = (
        f"titanlite checkpoint export {run}/checkpoints/step-00000002 --out {run}/exports/hf-step-00000002 "
        "--dtype bfloat16 --drop 'a.*'"
    )
    options = [*OPTIONS, "--checkpoint.export_dtype=bfloat16", '--checkpoint.export_drop=["a.*"]']
    monkeypatch.setattr(last_export, "BEGIN", FAILS)
    trained(tiny.config(*options))
    log = run / "logs" / "export-step-00000002.log"
    [warning] = warnings()
    assert mentions(warning, "step 2", "the disk is full", log, command)
    monkeypatch.setattr(last_export, "BEGIN", EXPORTS)
    trained(tiny.config(*options))  # a finished run that is started again
    assert "'--dtype', 'bfloat16', '--drop', 'a.*'" in log.read_text()
    assert [path.name for path in (run / "exports").iterdir()] == ["hf-step-00000002"]
    monkeypatch.setattr(last_export, "BEGIN", FAILS)
    trained(tiny.config(*options))
    assert len(warnings()) == 1, "it is exported"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_an_export_ends_with_the_trainer(tmp_path: Path) -> None:
    """The process is killed when the one that started it is."""
    program = (
        "import os, subprocess, sys, time\n"
        "from titanlite.tools.checkpoints.last_export import BEGIN\n"
        "begin = BEGIN.format(os.getpid()).partition(chr(10))[0]\n"
        "work = 'import os, pathlib, time; pathlib.Path(\"child\").write_text(str(os.getpid())); time.sleep(100)'\n"
        "subprocess.run([sys.executable, '-c', begin + chr(10) + work])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    trainer = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    child = tmp_path / "child"
    while not (child.exists() and child.read_text()):
        assert trainer.poll() is None
        time.sleep(0.01)
    number = int(child.read_text())
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


def test_wrong_options(tiny: TinyRun) -> None:
    options = ["--model.name=qwen3_moe", "--model.flavor=debug", "--checkpoint.last_save_in_hf"]
    place = r"checkpoint\.last_save_in_hf: .*layers\.\*\.feed_forward\.bias_E\b"
    with pytest.raises(ConfigError, match=place + r'.*checkpoint\.export_drop = \["layers.*bias_E"\]'):
        preflight(tiny.config(*options), read_ranks({}), torch.device("cpu"))
    drop = '--checkpoint.export_drop=["layers.*.feed_forward.bias_E"]'
    assert preflight(tiny.config(*options, drop), read_ranks({}), torch.device("cpu"))
    needed = '--checkpoint.export_drop=["layers.*"]'
    with pytest.raises(ConfigError, match=r"checkpoint\.export_drop: .*layers\.\*\.attention_norm\.weight\b"):
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
