"""No race between CUDA streams, in steps of each technique and on each axis; and the checker finds planted ones."""

import json

import pytest

from tests.null_gpu.conftest import HERE, RunPython

pytestmark = pytest.mark.null_gpu

SHORT = "--training.seq_len=256"
MOE = ("--model.name=qwen3_moe", SHORT)
SHARED = ("--model.name=deepseek_v3", "--parallelism.expert_parallel_degree=2")
REPLICAS = "--parallelism.data_parallel_replicate_degree=2"
ACCUMULATES = "--training.local_batch_size=1"
REPRODUCIBLE = "--debug.reproducible_layouts=true"
CONTEXT = ("--parallelism.context_parallel_degree=2", "--training.global_batch_size=4")
TENSOR = (
    "--parallelism.tensor_parallel_degree=2", "--training.global_batch_size=4",
    "--model.args={dim=256, n_heads=4, n_kv_heads=2, hidden_dim=512}",
)  # fmt: skip
LORA = ("--lora.rank=4", "--lora.alpha=8")
IN_BACKWARD = ("--optimizer.in_backward=true", "--training.max_norm=0")
OFFLOAD = (SHORT, "--training.enable_cpu_offload=true")
ON_HOST = ("--training.seq_len=2048", "--activation_checkpoint.mode=none", "--activation_checkpoint.offload=true")
BFLOAT16 = ("--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16")

CLEAN: dict[str, tuple[int, tuple[str, ...]]] = {
    "plain, and the head is awaited": (2, ()),
    "few tokens, and it is not": (2, (SHORT,)),
    "one rank": (1, ()),
    "one rank in float32": (1, (SHORT, "--training.mixed_precision_param=float32")),
    "documents": (2, (SHORT, "--data.document_mask=true")),
    "full recomputation": (2, ("--activation_checkpoint.mode=full",)),
    "selective recomputation": (2, ("--activation_checkpoint.mode=selective",)),
    "no recomputation": (2, (SHORT, "--activation_checkpoint.mode=none")),
    "replicas": (4, (REPLICAS,)),
    "replicas of whole models": (2, (REPLICAS,)),
    "accumulation": (2, (ACCUMULATES,)),
    "accumulation, reduced once": (2, (ACCUMULATES, "--parallelism.fsdp_reduce_gradients=last")),
    "accumulation on one rank": (1, (SHORT, ACCUMULATES)),
    "accumulation on replicas of whole models": (2, (SHORT, REPLICAS, ACCUMULATES, "--training.global_batch_size=4")),
    "accumulation on replicas": (4, (REPLICAS, ACCUMULATES, "--training.global_batch_size=8")),
    "reproducible layouts": (2, (ACCUMULATES, REPRODUCIBLE)),
    "reproducible layouts on replicas": (4, (REPLICAS, ACCUMULATES, REPRODUCIBLE, "--training.global_batch_size=8")),
    "reproducible layouts on one rank": (1, (SHORT, ACCUMULATES, REPRODUCIBLE)),
    "never resharded": (2, ("--parallelism.fsdp_reshard_after_forward=never",)),
    "always resharded": (2, ("--parallelism.fsdp_reshard_after_forward=always",)),
    "resharded to 2 of 4": (4, ("--parallelism.fsdp_reshard_after_forward=2",)),
    "prefetch": (2, ("--parallelism.fsdp_forward_prefetch=2", "--parallelism.fsdp_backward_prefetch=2")),
    "activations on the host": (2, ON_HOST),
    "activations on the host on one rank": (1, ON_HOST),
    "activations on the host, accumulation": (2, (*ON_HOST, ACCUMULATES)),
    "inputs of blocks on the host": (2, (*ON_HOST, "--activation_checkpoint.mode=full", "--training.seq_len=8192")),
    "CPU offload": (2, OFFLOAD),
    "CPU offload on one rank": (1, OFFLOAD),
    "CPU offload, accumulation": (2, (*OFFLOAD, ACCUMULATES)),
    "CPU offload, update in backward": (2, (*OFFLOAD, *IN_BACKWARD)),
    "update in backward": (2, IN_BACKWARD),
    "update in backward on replicas": (4, (REPLICAS, *IN_BACKWARD)),
    "bfloat16 weights": (2, BFLOAT16),
    "bfloat16 weights on replicas": (4, (REPLICAS, *BFLOAT16)),
    "bfloat16 reductions": (2, ("--training.mixed_precision_reduce=bfloat16",)),
    "Muon": (2, (SHORT, "--optimizer.name=Muon")),
    "tied head": (2, ("--model.args.tied_head=true",)),
    "z-loss": (2, ("--training.z_loss=1e-4",)),
    "LoRA": (2, LORA),
    "frozen embedding": (2, ('--freeze.parameters=["tok_embeddings.*"]',)),
    "context 2": (4, CONTEXT),
    "context 2, documents": (
        4,
        (
            SHORT,
            "--parallelism.context_parallel_degree=2",
            "--training.global_batch_size=4",
            "--data.document_mask=true",
        ),
    ),
    "context 2, heads for tokens": (4, (*CONTEXT, SHORT, "--parallelism.context_parallel_method=ulysses")),
    "tensor 2": (4, TENSOR),
    "tensor 2, documents": (4, (*TENSOR, SHORT, "--data.document_mask=true")),
    "experts": (2, MOE),
    "expert 2": (4, (*MOE, "--parallelism.expert_parallel_degree=2")),
    "expert 2, a shared expert": (4, SHARED),
    "expert 2 on replicas": (8, (*MOE, REPLICAS, "--parallelism.expert_parallel_degree=2")),
}
"""Number of ranks and options of steps without a race. Float8 is always compiled, and so cannot be seen."""


def steps(run_python: RunPython, *words: str) -> tuple[int, int, list[str]]:
    """Return the numbers of operators and streams, and the races."""
    lines = run_python("-W", "ignore", str(HERE / "race_step.py"), *words).stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("["))
    operators, streams = json.loads(lines[first])
    return operators, streams, lines[first + 1 :]


@pytest.mark.parametrize("name", CLEAN)
def test_no_race(name: str, run_python: RunPython) -> None:
    world, options = CLEAN[name]
    operators, streams, races = steps(run_python, f"--world={world}", *options)
    assert races == []
    assert operators > 500
    assert streams > 1, "compute, and the reduce-scatter"


FREED, SAME = "memory that was freed", "the same tensor"


@pytest.mark.parametrize(
    ("plant", "options", "kind", "operator"),
    [
        ("gradient_on_another_stream", (), f"read after write of {SAME}", "aten.sum"),
        ("freed_block", (), f"write after read of {FREED}", "aten.zeros"),
        ("share_without_its_condition", (ACCUMULATES,), f"write after read of {FREED}", "aten.add_"),
        ("share_without_its_condition", IN_BACKWARD, f"of {FREED}", "aten."),
        ("no_wait_at_the_end", (), f"of {SAME}", "reduce_scatter"),
        ("no_wait_before_a_reduction", (), "read after write", "reduce_scatter"),
        ("another_thread_without_a_wait", (), f"of {FREED}", "reduce_scatter"),
        ("tokens_that_nobody_waits_for", ("--world=4", *SHARED), f"read after write of {SAME}", "titanlite."),
        ("tokens_of_another_exchange", ("--world=4", *SHARED), f"read after write of {SAME}", "titanlite."),
        ("backward_raises_and_nothing_waits", (), f"write after write of {FREED}", "reduce_scatter"),
        ("gradients_on_their_way", OFFLOAD, f"read after write of {SAME}", "aten.linalg_vector_norm"),
        ("memory_that_is_still_copied", ON_HOST, f"write after read of {FREED}", "aten."),
        ("activations_on_their_way", ON_HOST, f"read after write of {SAME}", "aten."),
        ("update_of_what_is_gathered", OFFLOAD, f"write after read of {SAME}", "aten._fused_adamw_"),
    ],
)
def test_planted_races_are_found(
    plant: str, options: tuple[str, ...], kind: str, operator: str, run_python: RunPython
) -> None:
    _, _, races = steps(run_python, f"--plant={plant}", *options)
    assert any(kind in race and operator in race for race in races), races


@pytest.mark.parametrize("plant", ["recorded_block", "another_thread", "backward_raises"])
def test_what_would_be_a_race_is_none(plant: str, run_python: RunPython) -> None:
    """Memory that waits for another stream; another thread on the default stream; a step after backward raised."""
    assert steps(run_python, f"--plant={plant}")[2] == []
