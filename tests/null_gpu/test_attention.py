"""The attention kernels that real models launch on a GPU, by option and dtype, with recomputation and the compiler."""

import json
from pathlib import Path

import pytest

from tests.null_gpu.conftest import RunPython
from tests.null_gpu.record import RECORDED
from tests.null_gpu.variants import COMPILE
from tests.support.helpers import mentions

pytestmark = pytest.mark.null_gpu

MEASURE = str(RECORDED.parent / "measure.py")
FLASH, EFFICIENT = ("flash_fwd_kernel", "flash_bwd_dq_dk_dv"), ("fmha_cutlassF", "fmha_cutlassB")
TRAIN = """
import sys, torch
torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's graphs are beyond the stand-in
from titanlite.tools import cli
sys.exit(cli.run(["train", *sys.argv[1:]]))
"""
FLOAT32 = ("--training.mixed_precision_param=float32",)


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        (("--training.attention_backend=flash",), FLASH),
        (("--training.attention_backend=efficient",), EFFICIENT),
        (("--training.attention_backend=flash", *COMPILE), FLASH),
        (("--training.attention_backend=efficient", *COMPILE), EFFICIENT),
        (FLOAT32, EFFICIENT),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, tuple) else "",
)
def test_attention_kernels(options: tuple[str, ...], kernels: tuple[str, str], run_python: RunPython) -> None:
    """Selective checkpointing keeps attention: forward launches it once a block, and backward not again.

    In float32, plain formulas would hold scores of 8 GiB a block, and not fit in 80 GB.
    """
    words = ("llama3_8b", "--world=8", "--training.global_batch_size=8", *options)
    found = json.loads(run_python(MEASURE, *words, "--json", timeout=1200).stdout.splitlines()[-1])
    launches = {
        name: sum(count for event, count in found["events"].items() if name in event and "triton" not in event)
        for name in (*FLASH, *EFFICIENT)
    }
    assert launches == {name: 32 if name in kernels else 0 for name in launches}
    assert found["allocated"] < 50
    assert found["retries"] == 0


MASK, HALF = "--data.document_mask=true", "--training.mixed_precision_param=bfloat16"
UNFIT = "--training.mixed_precision_param=float32"


@pytest.mark.parametrize("options", [(UNFIT,), (UNFIT, MASK)])
def test_a_backend_that_cannot_run_is_one_line_before_the_model_is_built(
    options: tuple[str, ...], run_python: RunPython, tmp_path: Path
) -> None:
    words = ("-m", "titanlite", "train", "--config", "debug", "--training.attention_backend=flash", *options)
    result = run_python(*words, succeeds=False)
    assert result.returncode == 2
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert mentions(line, "training.attention_backend", "flash", "torch.float32", "head dim 64")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((HALF,), "attention by flash (PyTorch's choice)"),
        ((HALF, MASK), "attention by flash (PyTorch's choice)"),
        ((UNFIT, MASK), "attention by efficient (PyTorch's choice)"),
        ((HALF, MASK, "--training.attention_backend=efficient"), "attention by efficient"),
    ],
)
def test_the_start_report_names_the_backend(
    options: tuple[str, ...], line: str, run_python: RunPython, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    steps = "--training.steps=1", "--lr_scheduler.warmup_steps=0"
    result = run_python("train.py", "--config", "debug", *steps, *options)
    assert any(output.endswith(f"kernels  {line}") for output in (result.stdout + result.stderr).splitlines())
