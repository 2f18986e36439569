"""States on disk may be larger than memory. That shards there train as in memory: tests/matrix.py."""

import signal
import subprocess
import sys

import pytest

from tests.support.helpers import TinyRun, train_on_this_rank
from tests.support.whole_runs import parameters_of

EVERYTHING = ["--offload.optimizer=disk", "--offload.parameters=disk", "--training.enable_cpu_offload"]
LIMITED = """
import json, re, resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from titanlite.config.load import load
from titanlite.train import build
from titanlite.runtime.process_group import pick_device, process_group, read_ranks
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.checks.preflight import preflight
from titanlite.train import finish, train
toml, room, *options = sys.argv[1:]
config, ranks = load(toml, options), read_ranks({})
device = pick_device(ranks)
with process_group(ranks, device):
    torch.ones(300, 300, requires_grad=True).mm(torch.ones(300, 300)).sum().backward()  # threads, and libraries
    taken = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (taken + int(room), taken + int(room)))
    run = build(config, preflight(config, ranks, device), ranks=ranks, device=device, prepare_text=prepare_text)
    train(run)
    finish(run)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.usefixtures("single_process_group")
def test_states_larger_than_memory(tiny: TinyRun) -> None:
    """RLIMIT_DATA limits private memory. Of a parameter, 16 bytes are states: moments 8, itself and its gradient 4
    each. With only the gradients in memory, what else a step takes has room in 15."""
    wide = ["dim=512", "hidden_dim=2048", "n_heads=4", "n_kv_heads=4", "n_layers=6"]
    options = ["--training.steps=2", "--training.global_batch_size=1", "--checkpoint.enable=false"]
    options += ["--parallelism.fsdp_reshard_after_forward=always", *(f"--model.args.{size}" for size in wide)]

    def train(name: str, room: int, *more: str) -> subprocess.CompletedProcess[str]:
        words = [str(tiny.toml), str(room), f"--job.name={name}", *options, *more]
        return subprocess.run([sys.executable, "-c", LIMITED, *words], capture_output=True, text=True, timeout=300)

    states = 16 * sum(tensor.numel() for tensor in parameters_of(tiny, options))
    assert states > 350 * 2**20
    train_on_this_rank(tiny.config("--job.name=free", *options), 0, 1)
    failed = train("memory", states * 15 // 16)
    crashed = failed.returncode == -signal.SIGSEGV  # some native code does not look whether it got memory
    assert crashed or (failed.returncode != 0 and "can't allocate memory" in failed.stderr)
    found = train("disk", states * 15 // 16, *EVERYTHING)
    assert found.returncode == 0, found.stderr
    assert tiny.losses("disk") == tiny.losses("free")
