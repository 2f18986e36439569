"""Pinned memory for checkpoints: registered once, by its exact size, and nothing is allocated in later steps."""

import json

import pytest

from tests.null_gpu.conftest import RunPython

pytestmark = pytest.mark.null_gpu

SAVES = """
import ctypes, json, os, tempfile, torch
from titanlite.checkpoint.staging import Staging
library = ctypes.CDLL(os.environ["LD_PRELOAD"])
device = torch.device("cuda")
state = {str(number): torch.zeros(1000 + number, 1000, device=device) for number in range(5)}
staging = Staging(device, pin=True)
found = []
for _ in range(2):
    library.null_gpu_start(None)
    staging.begin(state)
    staging.wait()
    staging.copy()
    with tempfile.NamedTemporaryFile("r") as file:
        library.null_gpu_stop(file.name.encode())
        events = [line.split("\\t") for line in file]
    found.append([[what, int(count)] for what, detail, count, *_ in events if detail == "pinned"])
are_pinned = all(buffer.is_pinned() for buffer in staging.copy().values())
print(json.dumps([found, are_pinned, staging.allocated_bytes]))
"""


def test_the_first_save_pins_one_buffer_and_later_ones_allocate_nothing(run_python: RunPython) -> None:
    """20 MB of tensors would be 40 in PyTorch's blocks of powers of two."""
    found, are_pinned, size = json.loads(run_python("-c", SAVES).stdout.splitlines()[-1])
    assert found == [[["register", 1]], []]
    assert are_pinned
    assert size == sum(-(-4000 * (1000 + number) // 64) * 64 for number in range(5))
