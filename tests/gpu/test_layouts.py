"""Several processes share one GPU: the layouts of several GPUs with NCCL, streams and kernels as there, if slower.

NCCL refuses two ranks on one GPU of a host. So each process says that it is its own host, and NCCL sends by sockets.
"""

import os
import socket
import subprocess
import sys

import pytest

from tests.matrix import on_layout, size_of
from tests.support.helpers import TinyRun

pytestmark = pytest.mark.gpu

SETTINGS = ["--training.steps=20", "--training.seq_len=64", "--checkpoint.enable=false", "--optimizer.lr=3e-3"]
SIZES = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96, "vocab_size": 260}
OF_EXPERTS = SIZES | {"n_layers": 2, "head_dim": 16, "n_experts": 8, "n_active_experts": 2}
DENSE = [f"--model.args.{name}={value}" for name, value in SIZES.items()]
EXPERTS = ["--model.name=qwen3_moe", *(f"--model.args.{name}={value}" for name, value in OF_EXPERTS.items())]
DOCUMENTS = ["--data.document_mask"]
COMPILE = ["--compile.enable"]
HALF = ["--training.mixed_precision_param=bfloat16"]
FULL = ["--activation_checkpoint.mode=full"]

CELLS = {
    "dense": (DENSE, "r2,s2,r2 s2,c2,s2 c2,t2,s2 t2,p2,s2 p2"),
    "documents": ([*DENSE, *DOCUMENTS], "c2"),
    "documents, full AC": ([*DENSE, *DOCUMENTS, *FULL], "s2"),
    "compiled": ([*DENSE, *COMPILE], "s2,t2"),
    "updated in backward": ([*DENSE, "--optimizer.in_backward", "--training.max_norm=0"], "s2"),
    "offload": ([*DENSE, "--training.enable_cpu_offload"], "s2"),
    "experts": (EXPERTS, "s2 e2,s2 t2 e2"),
    "experts, compiled": ([*EXPERTS, *COMPILE], "s2 e2"),
}
"""Options, and layouts as in tests/matrix.py."""
SAME_BITS = {
    "float32": DENSE,
    "bfloat16, documents, full AC": [*DENSE, *HALF, *DOCUMENTS, *FULL],
    "bfloat16, compiled": [*DENSE, *HALF, *COMPILE],
    "bfloat16, compiled, documents": [*DENSE, *HALF, *COMPILE, *DOCUMENTS],
    "experts, bfloat16": [*EXPERTS, *HALF],
    "context": [*DENSE, "--debug.reproducible_context_degree=2"],
}


def train(tiny: TinyRun, name: str, layout: str, *options: str) -> None:
    """Train on one process for each rank of a layout."""
    processes = size_of(layout)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    command = [sys.executable, "-m", "titanlite", "train", "--config", str(tiny.toml), f"--job.name={name}", *SETTINGS]
    workers: list[subprocess.Popen[str]] = []
    for rank in range(processes):
        variables = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": 0}
        variables |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
        workers.append(
            subprocess.Popen(
                [*command, *options, *on_layout(layout)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {key: str(value) for key, value in variables.items()} | {"NCCL_MNNVL_ENABLE": "0"},
            )
        )
    outputs = [worker.communicate(timeout=600)[0] for worker in workers]
    assert not any(worker.returncode for worker in workers), "\n".join(output[-3000:] for output in outputs)
    assert "on cuda" in outputs[0]


def losses_and_norms(tiny: TinyRun, name: str) -> list[float]:
    return [value for record in tiny.records(name) for value in (record["loss"], record["grad_norm"])]


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in CELLS for layout in CELLS[name][1].split(",")])
def test_losses_and_norms_are_those_of_one_process(tiny: TinyRun, name: str, layout: str) -> None:
    options = CELLS[name][0]
    train(tiny, "one", "", *options)
    train(tiny, "many", layout, *options)
    one = losses_and_norms(tiny, "one")
    assert one[-2] < 0.9 * one[0]
    assert losses_and_norms(tiny, "many") == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("case", SAME_BITS)
def test_layouts_have_the_same_bits(tiny: TinyRun, case: str) -> None:
    options = ["--debug.reproducible_layouts", "--debug.hash_freq=5", "--training.local_batch_size=1"]
    found = []
    for layout in ["", "s2", "r2", "r2 s2", *(["c2"] if case == "context" else [])]:
        name = f"run-{layout.replace(' ', '-')}"
        train(tiny, name, layout, *options, *SAME_BITS[case])
        found.append([record["hash"] for record in tiny.records(name, file="hashes.jsonl")])
    assert len({*found[0]}) == 4
    assert found == [found[0]] * len(found)
