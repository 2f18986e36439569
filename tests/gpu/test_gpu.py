"""Tests on a CUDA device. They are skipped without one: run `./run_tests.sh tests/gpu` on a machine with a GPU."""

import gzip
import inspect
import json
import os
import pickle
import shlex
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.support.helpers import TinyRun

pytestmark = pytest.mark.gpu

FLOAT8 = ["--quantize.linear.float8.enable", "--quantize.linear.float8.skip_small=false", "--compile.enable"]
OPTIONS = {
    "accumulation": ["--training.local_batch_size=1"],
    "bf16 reduction": ["--training.mixed_precision_reduce=bfloat16", "--training.local_batch_size=2"],
    "offload": ["--training.enable_cpu_offload", "--training.local_batch_size=4"],
    "checkpointing": ["--activation_checkpoint.mode=full"],
    "per operation": ["--activation_checkpoint.mode=selective"],
    "workers": ["--data.num_workers=2"],
    "compile": ["--compile.enable", "--activation_checkpoint.mode=selective"],
    "float8": FLOAT8,
}
SIZES = ["--model.args.dim=48", "--model.args.hidden_dim=64", "--training.mixed_precision_param=bfloat16"]


def train(tiny: TinyRun, name: str, *options: str) -> list[float]:
    command = [sys.executable, "-m", "titanlite", "train", "--config", str(tiny.toml), f"--job.name={name}", *SIZES]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    result = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert "on cuda" in result.stdout
    assert tiny.records(name)[-1]["memory_gib"] > 0
    return tiny.losses(name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_technique_trains_as_the_plain_run_does(tiny: TinyRun, options: list[str]) -> None:
    import torch

    if options is FLOAT8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    steps = ["--training.steps=20", "--optimizer.lr=3e-3"]
    plain = train(tiny, "plain", *steps)
    assert plain[0] == pytest.approx(5.557, abs=0.2)
    assert plain[-1] < 4
    assert train(tiny, "other", *steps, *options) == pytest.approx(plain, rel=0.05 if options is FLOAT8 else 0.02)


def test_a_run_resumes_on_the_gpu(tiny: TinyRun) -> None:
    whole = train(tiny, "whole", "--training.steps=6")
    train(tiny, "halves", "--training.steps=3")
    assert train(tiny, "halves", "--training.steps=6") == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_checkpoint_is_of_its_step_whatever_the_mode(tiny: TinyRun, mode: str) -> None:
    """The copy is made beside the next step: if that could overtake it, a resumed run would have other losses."""
    sizes = ["--model.args.dim=480", "--model.args.hidden_dim=1280", "--model.args.n_heads=6"]
    whole = train(tiny, "whole", "--training.steps=8", *sizes)
    options = [*sizes, f"--checkpoint.async_mode={mode}", "--checkpoint.interval=2"]
    train(tiny, mode, "--training.steps=6", *options)
    for newer in (4, 6):
        (tiny.folder / "outputs" / mode / "checkpoints" / f"step-0000000{newer}" / "manifest.json").unlink()
    assert train(tiny, mode, "--training.steps=8", *options) == pytest.approx(whole, rel=1e-3)
    saves = (tiny.folder / "outputs" / mode / "checkpoints.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in saves] == [2, 4, 6, 8]


def test_a_batch_that_is_too_large_is_explained_and_the_advice_is_good(tiny: TinyRun) -> None:
    """About 0.7 GiB of activations for each of 512 sequences."""
    command = [
        sys.executable,
        "-m",
        "titanlite",
        "train",
        "--config",
        str(tiny.toml),
        "--training.steps=1",
        "--lr_scheduler.warmup_steps=1",
    ]
    shape = {"dim": 1024, "hidden_dim": 4096, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8}
    command += [f"--model.args.{name}={value}" for name, value in shape.items()]
    command += ["--training.mixed_precision_param=bfloat16", "--training.seq_len=2048"]
    command += ["--training.global_batch_size=512", "--checkpoint.enable=false"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}

    def run(*options: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=600, check=False, env=environment
        )

    failed = run()
    assert failed.returncode == 1
    lines = [line.removeprefix("error: ") for line in failed.stderr.splitlines() if line.startswith("error: ")]
    assert lines[0].startswith("out of memory on rank 0, step 1")
    assert "CUDA out of memory. Tried to allocate" in lines[0]
    words = shlex.split(lines[1].partition(": ")[2])[1:]
    plan = [sys.executable, "-m", "titanlite", *words, "--json"]
    suggested = subprocess.run(plan, capture_output=True, text=True, check=True, env=environment)
    cheapest = json.loads(suggested.stdout)["suggestions"][0]["options"]
    cured = run(*(f"--{key}={value}" for key, value in cheapest.items()))
    assert cured.returncode == 0, cured.stderr
    assert tiny.losses() == [pytest.approx(5.6, abs=0.3)]


# Attention within documents. tests/unit compares the masked path with each document alone.

ROWS = [[200, 1, 311], [512]]


def documents_on_gpu() -> Any:
    from tests.support.models import documents
    from titanlite.models.layers import Documents

    positions, ids, boundaries = (tensor.cuda() for tensor in documents(ROWS))
    return Documents(positions, ids, boundaries)


def needs_packed_kernel(head_dim: int) -> None:
    import torch

    from titanlite.ops.kernels import DEFAULT_KERNELS

    if not DEFAULT_KERNELS.has_packed_attention(torch.device("cuda"), torch.bfloat16, head_dim):
        pytest.skip("this GPU, or this torch, has no attention of variable length")


def test_a_new_gpu_and_torch_have_the_packed_kernel() -> None:
    import torch

    from titanlite.ops.kernels import DEFAULT_KERNELS

    varlen = pytest.importorskip("torch.nn.attention.varlen")
    takes_groups = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
    if torch.cuda.get_device_capability() < (8, 0) or not takes_groups:
        pytest.skip("an older GPU or torch")
    assert DEFAULT_KERNELS.has_packed_attention(torch.device("cuda"), torch.bfloat16, 64)
    assert not DEFAULT_KERNELS.has_packed_attention(torch.device("cuda"), torch.float32, 64)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_the_packed_kernel_equals_the_mask(kv_heads: int, head_dim: int) -> None:
    """Compare outputs and gradients in bfloat16 with the masked path in float32."""
    import torch
    from torch.nn import functional as F

    from titanlite.ops.attention import Boundaries, attend
    from titanlite.ops.kernels import DEFAULT_KERNELS

    needs_packed_kernel(head_dim)
    where, generator = documents_on_gpu(), torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 512, heads, head_dim) for heads in (4, kv_heads, kv_heads, 4)]
    *inputs, grad = [torch.randn(shape, generator=generator, device="cuda").transpose(1, 2) for shape in shapes]
    x_BLD = torch.zeros(2, 512, 8, device="cuda")
    mask = DEFAULT_KERNELS.attention_mask(where, x_BLD, head_dim)
    assert isinstance(mask, torch.Tensor)
    q, k, v = (x.detach().bfloat16().float().requires_grad_() for x in inputs)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=kv_heads != 4)
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad)
    boundaries = DEFAULT_KERNELS.attention_mask(where, x_BLD.bfloat16(), head_dim)
    assert isinstance(boundaries, Boundaries)
    halves = q_half, k_half, v_half = [x.detach().bfloat16().requires_grad_() for x in inputs]
    found = attend(q_half, k_half, v_half, boundaries)
    assert found.shape == expected.shape
    found_grads = torch.autograd.grad(found, halves, grad.bfloat16())
    for a, b in zip((found, *found_grads), (expected, *expected_grads), strict=True):
        assert (a.float() - b).abs().max() < 0.02 * b.abs().max()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("within_documents", [True, False])
def test_sinks_equal_formulas(window: int | None, within_documents: bool) -> None:
    """Compare outputs and gradients of packed attention in bfloat16 with formulas in float32."""
    import torch

    from titanlite.ops.attention import Scores
    from titanlite.ops.kernels import DEFAULT_KERNELS

    needs_packed_kernel(64)
    where, generator = documents_on_gpu() if within_documents else None, torch.Generator("cuda").manual_seed(0)
    shapes = [(2, heads, 512, 64) for heads in (4, 2, 2)]
    drawn = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in [*shapes, (4,), shapes[0]]]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        *inputs, upstream = (tensor.to(dtype) for tensor in drawn)
        q, k, v, sinks = leaves = [tensor.requires_grad_() for tensor in inputs]
        mask = None
        if within_documents or window:
            x_BLD = torch.zeros(2, 512, 8, device="cuda", dtype=dtype)
            mask = DEFAULT_KERNELS.attention_mask(where, x_BLD, 64, window=window)
        out = DEFAULT_KERNELS.attend(q, k, v, mask, scores=Scores(0.3, sinks))
        results.append((out, *torch.autograd.grad(out, leaves, upstream)))
    for found, expected in zip(*results, strict=True):
        assert (found.float() - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_changed_token_changes_no_bit_of_another_document(dtype: str) -> None:
    """bfloat16 takes the packed kernel, float32 takes the mask."""
    import torch

    from tests.support.models import SMALL, built

    model = built(replace(SMALL, max_seq_len=512)).to("cuda", getattr(torch, dtype))
    tokens = torch.randint(0, 101, (2, 512), generator=torch.Generator().manual_seed(1)).cuda()
    where = documents_on_gpu()
    changed = tokens.clone()
    changed[0, 0] += 1
    same = (model(changed, documents=where) == model(tokens, documents=where)).all(dim=-1)
    other = torch.ones_like(same)
    other[0, :200] = False
    assert same[other].all()
    assert not same[0, :200].all()


def test_documents_train_by_every_technique(tiny: TinyRun) -> None:
    """float32 takes the mask and the others the packed kernel: the losses are those of one and the same model."""
    steps = ["--training.steps=20", "--optimizer.lr=3e-3", "--data.document_mask", "--training.seq_len=2048"]
    plain = train(tiny, "plain", *steps)
    techniques = {
        "mask": ["--training.mixed_precision_param=float32"],
        "selective": ["--activation_checkpoint.mode=selective"],
        "compile": ["--compile.enable", "--activation_checkpoint.mode=selective"],
    }
    for name, options in techniques.items():
        assert train(tiny, name, *steps, *options) == pytest.approx(plain, rel=0.02), name


@pytest.mark.parametrize("vocabulary", [999, 128_256])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("compiles", [False, True])
def test_the_loss_on_the_gpu_is_cross_entropy(compiles: bool, z_loss: float, vocabulary: int) -> None:
    """float32 logits from bfloat16 operands, in chunks of 128 tokens, some of which do not count."""
    import torch
    from torch.nn import functional as F

    from titanlite.batch import IGNORE
    from titanlite.loss import token_loss
    from titanlite.ops.kernels import Kernels

    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(2, 300, 64, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, 64, generator=generator, device="cuda").mul_(0.1).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (2, 300), generator=generator, device="cuda")
    labels[0, :9] = IGNORE
    logits = F.linear(hidden.float(), weight.float()).flatten(0, 1)
    nats = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    total = nats + z_loss * (logits.logsumexp(1).square() * (labels.flatten() != IGNORE)).sum()
    expected = torch.autograd.grad(total, [hidden, weight])
    kernels = Kernels(compiles=compiles, chunk_bytes=4 * vocabulary * 128)
    found = token_loss(hidden, weight, labels_BL=labels, z_loss=z_loss, kernels=kernels)
    assert found.cross_entropy.item() == pytest.approx(nats.item(), rel=1e-5)
    assert found.total.item() == pytest.approx(total.item(), rel=1e-5)
    for gradient, other in zip(torch.autograd.grad(found.total, [hidden, weight]), expected, strict=True):
        assert (gradient - other).norm() < 2**-7 * other.norm()


def steps_without_waiting(rank: int, world_size: int, config: Any) -> list[int]:
    """Return the skip reasons of steps that raise an error if the host waits for the GPU. The third loss is NaN."""
    from itertools import islice

    import torch

    from titanlite.checks.preflight import preflight
    from titanlite.runtime.private_torch.tensors import local_tensor
    from titanlite.runtime.process_group import Ranks
    from titanlite.tools.ingest.prepare import prepare_text
    from titanlite.train import build

    ranks, device = Ranks(0, 1, 0, 1), torch.device("cuda", 0)
    run = build(config, preflight(config, ranks, device), ranks=ranks, device=device, prepare_text=prepare_text)
    skip_reasons = []
    for number in range(4):
        batches = list(islice(run.batches, run.accumulation))
        if number == 2:
            with torch.no_grad():
                local_tensor(next(run.model.parameters())).mul_(torch.nan)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first step allocates
        result = run.train_step(batches, decide=run.guard.decide)
        torch.cuda.set_sync_debug_mode("default")
        skip_reasons.append(result.skip_reason)
    return [int(skip_reason) for skip_reason in skip_reasons]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_no_step_waits_for_the_gpu(tiny: TinyRun, state_dtype: str) -> None:
    from tests.support.helpers import run_ranks

    config = tiny.config(*SIZES, f"--optimizer.state_dtype={state_dtype}")
    [skip_reasons] = run_ranks(steps_without_waiting, 1, config, backend="cuda:nccl,cpu:gloo")
    assert skip_reasons == [0, 0, 1, 3]


def test_two_deterministic_runs_are_equal_bit_by_bit(tiny: TinyRun) -> None:
    options = ["--debug.deterministic", "--training.steps=20", "--data.document_mask"]
    assert train(tiny, "one", *options) == train(tiny, "two", *options)


# Experts, and optimizers


def test_torchs_grouped_matmul_is_ours() -> None:
    """Compare outputs and gradients in bfloat16 with single matmuls in float32; one group is empty."""
    import torch

    from titanlite.ops.kernels import DEFAULT_KERNELS

    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(256, 64, generator=draw, device="cuda").bfloat16()
    weights = torch.randn(4, 64, 128, generator=draw, device="cuda").bfloat16()
    ends = torch.tensor([100, 100, 180, 256], dtype=torch.int32, device="cuda")
    grad = torch.randn(256, 128, generator=draw, device="cuda").bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (x, weights)]
        out = DEFAULT_KERNELS.grouped_mm(inputs[0], inputs[1], ends)
        results.append([out, *torch.autograd.grad(out, inputs, grad.to(dtype))])
    for found, expected in zip(*results, strict=True):
        assert (found.float() - expected).abs().max() < 0.02 * expected.abs().max()
    assert not results[0][2][1].any(), "an expert without tokens learns nothing"


MODELS = {
    "qwen3": ["--model.name=qwen3", "--model.args.head_dim=16"],
    "experts": [
        "--model.name=qwen3_moe",
        "--model.args.head_dim=16",
        "--model.args.n_experts=4",
        "--model.args.n_active_experts=2",
    ],
    "experts, compiled": [
        "--model.name=qwen3_moe",
        "--model.args.head_dim=16",
        "--model.args.n_experts=4",
        "--model.args.n_active_experts=2",
        "--compile.enable",
        "--activation_checkpoint.mode=selective",
    ],
    "gpt-oss": [
        "--model.name=gpt_oss",
        "--model.args.head_dim=16",
        "--model.args.window=8",
        "--model.args.n_experts=4",
        "--model.args.n_active_experts=2",
    ],
    "qwen3-next": ["--model.name=qwen3_next", "--model.args.head_dim=16", "--model.args.full_every=2"],
    "gemma3": ["--model.name=gemma3", "--model.args.head_dim=16", "--model.args.window=8"],
    "Muon": ["--optimizer.name=Muon"],
}


@pytest.mark.parametrize("model", MODELS)
def test_other_models_and_optimizers_learn_on_the_gpu(tiny: TinyRun, model: str) -> None:
    losses = train(tiny, "other", *MODELS[model], "--training.steps=20")
    assert losses[0] == pytest.approx(5.557, abs=0.3)
    assert losses[-1] < 0.9 * losses[0]


def test_a_window_is_profiled_on_the_gpu(tiny: TinyRun) -> None:
    """The trace has kernels, and matmuls have device time. The memory snapshot has allocations."""
    options = ["--profiling.enable_profiling", "--profiling.enable_memory_snapshot", "--profiling.profile_freq=6"]
    assert train(tiny, "on", *options) == pytest.approx(train(tiny, "off"), rel=1e-3)
    folder = tiny.folder / "outputs/on/profile/step-00000006"
    events = json.loads(gzip.decompress((folder / "rank-0.json.gz").read_bytes()))["traceEvents"]
    assert {"ProfilerStep#6", "forward"} <= {event.get("name") for event in events}
    assert sum(event["dur"] for event in events if event.get("cat") == "kernel") > 0
    table = (folder / "rank-0.txt").read_text()
    assert "Self CUDA" in table
    assert "aten::mm " in table
    snapshot = pickle.loads((folder / "memory-rank-0.pickle").read_bytes())
    assert any(snapshot["device_traces"])
