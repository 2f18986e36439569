"""Several processes share one GPU: the layouts of several GPUs with NCCL, streams and kernels as there, if slower.

NCCL refuses two ranks on one GPU of a host. So each process says that it is its own host, and NCCL sends by sockets.
"""

import os
import socket
import subprocess
import sys

import pytest

from tests.helpers import TinyRun
from tests.layouts import degrees

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

CELLS: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "r2": ((2, 1), DENSE),
    "s2": ((1, 2), DENSE),
    "s2, documents, full AC": ((1, 2), [*DENSE, *DOCUMENTS, *FULL]),
    "s2, compiled": ((1, 2), [*DENSE, *COMPILE]),
    "s2, updated in backward": ((1, 2), [*DENSE, "--optimizer.in_backward", "--training.max_norm=0"]),
    "s2, offload": ((1, 2), [*DENSE, "--training.enable_cpu_offload"]),
    "r2 s2": ((2, 2), DENSE),
    "c2": ((1, 1, 2), DENSE),
    "c2, documents": ((1, 1, 2), [*DENSE, *DOCUMENTS]),
    "s2 c2": ((1, 2, 2), DENSE),
    "t2": ((1, 1, 1, 2), DENSE),
    "t2, compiled": ((1, 1, 1, 2), [*DENSE, *COMPILE]),
    "s2 t2": ((1, 2, 1, 2), DENSE),
    "p2": ((1, 1, 1, 1, 1, 2), [*DENSE, "--training.local_batch_size=2"]),
    "p2 s2": ((1, 2, 1, 1, 1, 2), [*DENSE, "--training.local_batch_size=1"]),
    "experts, s2 e2": ((1, 2, 1, 1, 2), EXPERTS),
    "experts, s2 e2, compiled": ((1, 2, 1, 1, 2), [*EXPERTS, *COMPILE]),
    "experts, s2 t2 e2": ((1, 2, 1, 2, 2), EXPERTS),
}
"""(replicate, shard, context, tensor, expert, pipeline), and options."""
SAME_BITS = {
    "float32": DENSE,
    "bfloat16, documents, full AC": [*DENSE, *HALF, *DOCUMENTS, *FULL],
    "bfloat16, compiled": [*DENSE, *HALF, *COMPILE],
    "bfloat16, compiled, documents": [*DENSE, *HALF, *COMPILE, *DOCUMENTS],
    "experts, bfloat16": [*EXPERTS, *HALF],
    "context": [*DENSE, "--debug.reproducible_context_degree=2"],
}


def train(tiny: TinyRun, name: str, axes: tuple[int, ...], *options: str) -> None:
    """Train on one process for each rank of a layout."""
    replicate, shard, context, tensor, _, pipeline = (*axes, *(1,) * (6 - len(axes)))
    processes = replicate * shard * context * tensor * pipeline
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
                [*command, *degrees(*axes), *options],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {key: str(value) for key, value in variables.items()} | {"NCCL_MNNVL_ENABLE": "0"},
            )
        )
    outputs = [worker.communicate(timeout=600)[0] for worker in workers]
    assert not any(worker.returncode for worker in workers), "\n".join(it[-3000:] for it in outputs)
    assert "on cuda" in outputs[0]


def losses_and_norms(tiny: TinyRun, name: str) -> list[float]:
    return [value for it in tiny.records(name) for value in (it["loss"], it["grad_norm"])]


@pytest.mark.parametrize("cell", CELLS)
def test_losses_and_norms_are_those_of_one_process(tiny: TinyRun, cell: str) -> None:
    axes, options = CELLS[cell]
    train(tiny, "one", (1, 1), *options)
    train(tiny, "many", axes, *options)
    one = losses_and_norms(tiny, "one")
    assert one[-2] < 0.9 * one[0]
    assert losses_and_norms(tiny, "many") == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("case", SAME_BITS)
def test_layouts_have_the_same_bits(tiny: TinyRun, case: str) -> None:
    layouts: dict[str, tuple[int, ...]] = {"one": (1, 1), "s2": (1, 2), "r2": (2, 1), "r2-s2": (2, 2)}
    if case == "context":
        layouts["c2"] = (1, 1, 2)
    options = ["--debug.reproducible_layouts", "--debug.hash_freq=5", "--training.local_batch_size=1"]
    found = []
    for name, axes in layouts.items():
        train(tiny, name, axes, *options, *SAME_BITS[case])
        found.append([it["hash"] for it in tiny.records(name, file="hashes.jsonl")])
    assert len({*found[0]}) == 4
    assert found == [found[0]] * len(layouts)
