"""The attention kernels that real models launch on a GPU, by option and dtype, with recomputation and the compiler."""

import json

import pytest

from tests.null_gpu.conftest import RunPython
from tests.null_gpu.record import RECORDED
from tests.null_gpu.variants import COMPILE

pytestmark = pytest.mark.null_gpu

MEASURE = str(RECORDED.parent / "measure.py")
FLASH, EFFICIENT = ("flash_fwd_kernel", "flash_bwd_dq_dk_dv"), ("fmha_cutlassF", "fmha_cutlassB")
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
    ids=lambda it: " ".join(it) if isinstance(it, tuple) else "",
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
