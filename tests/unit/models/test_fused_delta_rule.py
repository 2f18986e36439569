"""Gated DeltaNets by the kernels of flash-linear-attention, and by a function of their signature that stands for them.

Without a GPU, Triton interprets the kernels: values are those of the kernels, and speed and bfloat16 are not. It has to
know before it is imported, so that the environment must have TRITON_INTERPRET=1.
"""

import os
import sys
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.families import built
from tests.support.helpers import TinyRun, train_on_this_rank
from tests.support.models import documents
from titanlite.models.base import Model
from titanlite.models.delta_net import GatedDeltaNet
from titanlite.ops.attention import Documents
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.delta_rule import fused_gated_delta_rule, gated_delta_rule, has_fused_kernels
from titanlite.ops.kernels import Kernels, repeat_heads, set_kernels

ROWS = [[3, 61, 1, 15], [80]]
TOKENS = torch.randint(0, 101, (2, 80), generator=torch.Generator().manual_seed(0))


class FusedKernels(CpuKernels):
    def has_fused_delta_rule(self, device: torch.device, dtype: torch.dtype, key_dim: int) -> bool:
        return True


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, None]:
    """[B, T, heads, dims] -> [B, T, value heads, dims]. With boundaries, B is 1."""
    inputs = [tensor.transpose(1, 2) for tensor in (q, k, v, g, beta)]
    inputs[:2] = (repeat_heads(tensor, v.shape[2]) for tensor in inputs[:2])
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or len(q) == 1
    parts = [[tensor[:, :, start:end].float() for tensor in inputs] for start, end in pairwise(ends)]
    return torch.cat([gated_delta_rule(*part)[0] for part in parts], dim=2).transpose(1, 2).to(q.dtype), None


class Number(int):
    """The interpreter runs loops over Python's numbers, where compiled kernels have tensors."""

    def to(self, dtype: Any) -> "Number":
        return self


@pytest.fixture(params=["stand-in", "flash-linear-attention"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernels can run."""
    if request.param == "stand-in":
        module: Any = ModuleType("fla.ops.gated_delta_rule")
        module.chunk_gated_delta_rule = stand_in
        for name in ("fla", "fla.ops", module.__name__):
            monkeypatch.setitem(sys.modules, name, module)
    elif find_spec("fla") is None or find_spec("triton") is None:
        pytest.skip("flash-linear-attention is not installed")
    elif torch.cuda.is_available():
        return torch.device("cuda")
    elif os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is no GPU, and the environment has no TRITON_INTERPRET=1")
    else:
        from fla.ops.common import chunk_delta_h  # pyright: ignore[reportMissingImports]
        from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]

        monkeypatch.setattr(chunk_delta_h, "range", lambda *ends: map(Number, range(*ends)), raising=False)
        monkeypatch.setattr(Autotuner, "do_bench", property(lambda _: lambda call, quantiles: [0.0] * len(quantiles)))
    return torch.device("cpu")


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest element."""
    return float((ours.float() - theirs.float()).detach().abs().max() / theirs.detach().abs().max())


@pytest.mark.long
@pytest.mark.parametrize("within_documents", [False, True])
def test_outputs_and_gradients_are_those_of_the_rule(device: torch.device, within_documents: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, 80, 16, generator=draw) for _ in range(2))
    v, upstream = (torch.randn(2, 4, 80, 24, generator=draw) for _ in range(2))
    decay, beta = (torch.rand(2, 4, 80, generator=draw) for _ in range(2))
    each = q, torch.nn.functional.normalize(k, dim=-1), v, -decay, beta
    inputs = [tensor.to(device).requires_grad_() for tensor in each]
    where = documents(ROWS) if within_documents else None
    dtypes = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32, torch.float16)
    for dtype in dtypes:
        found = fused_gated_delta_rule(*inputs, dtype=dtype, boundaries=where and where.boundaries.to(device))
        wide = [repeat_heads(tensor, 4) if tensor.shape[1] == 2 else tensor for tensor in inputs]
        expected, _ = gated_delta_rule(*wide, positions_BL=where and where.positions_BL.to(device))
        limit = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
        assert apart(found, expected) < limit
        ours, theirs = (torch.autograd.grad(output, inputs, upstream.to(output)) for output in (found, expected))
        assert max(map(apart, ours, theirs)) < limit


def logits_and_gradients(model: Model, kernels: Kernels, where: Documents | None) -> list[Tensor]:
    set_kernels(model, kernels)
    model.zero_grad()
    logits = model(TOKENS.to(next(model.parameters()).device), documents=where)
    logits.square().mean().backward()
    return [logits, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.long
def test_a_model_computes_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two value heads share a key head. A state that goes on in the next document shows."""
    if device.type == "cuda":
        pytest.skip("the kernels are not for float32 there")
    model = built("qwen3_next", max_seq_len=80)
    where = documents(ROWS)
    for documents_or_none in (None, where):
        ours, theirs = (
            logits_and_gradients(model, kernels, documents_or_none) for kernels in (FusedKernels(), CpuKernels())
        )
        assert max(map(apart, ours, theirs)) < 1e-3
    one = where._replace(boundaries=torch.tensor([0, 80, 160], dtype=torch.int32))
    logits = logits_and_gradients(model, FusedKernels(), one)[0]
    assert apart(logits, theirs[0]) > 1e-3


def test_the_kernels_are_chosen_where_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, in half precision, if they are installed, and neither compiled nor in deterministic runs."""
    gpu, half = torch.device("cuda"), torch.bfloat16
    layer = next(module for module in built("qwen3_next").modules() if isinstance(module, GatedDeltaNet))
    for installed in (False, True):
        monkeypatch.setattr("titanlite.ops.delta_rule.find_spec", lambda name, found=installed: found or None)
        assert has_fused_kernels(gpu, half, 128) is installed
        assert layer.kernel_name(gpu, half).endswith("flash-linear-attention" if installed else "PyTorch")
    for other in ((torch.device("cpu"), half, 128), (gpu, torch.float32, 128), (gpu, half, 264)):
        assert not has_fused_kernels(*other)
    assert not Kernels(compiles=True).has_fused_delta_rule(gpu, half, 128)
    torch.use_deterministic_algorithms(True)
    try:
        assert not has_fused_kernels(gpu, half, 128)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_the_first_lines_of_a_run_name_what_computes_it(tiny: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    sizes = "n_layers=2,full_every=2,n_experts=2,hidden_dim=16,shared_hidden_dim=16,vocab_size=260"
    words = ["--model.name=qwen3_next", "--model.flavor=debug", f"--model.args={{{sizes}}}", "--training.steps=1"]
    train_on_this_rank(tiny.config(*words, "--checkpoint.enable=false"), 0, 1)
    assert any(
        message.startswith("kernels") and message.endswith("; gated delta rule by PyTorch")
        for message in caplog.messages
    )
