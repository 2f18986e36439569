"""Kernels of CPUs: the library of float32 matmuls, matmuls in dtypes that the hardware lacks, RMSNorm in few passes,
and sums in float32 of gradients that PyTorch's CPU kernels add up in narrow dtypes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.ops.attention import AttentionMask, Scores
from titanlite.ops.cross_entropy import LabelSoftmax
from titanlite.ops.functions import rms_norm, source_of
from titanlite.ops.kernels import Kernels
from titanlite.ops.tiled_attention import attend_in_tiles, has_tiles
from titanlite.runtime.private_torch.tensors import has_hardware_bfloat16

CPU_INFO = Path("/proc/cpuinfo")


FASTER_BY_ONEDNN = {("AuthenticAMD", "26")}
"""Vendor and family of CPUs with AVX-512 on which oneDNN multiplies float32 matrices twice as fast as MKL: Zen 5. On
Zen 4 (family 25 with AVX-512) training is 4 % slower with it. On Zen 3 (family 25 with AVX2 only) and other CPUs
without AVX-512, PyTorch has no such choice. Others were not measured."""


def cpu_info() -> dict[str, str]:
    """Return what Linux says of this machine's first CPU; nothing on other systems."""
    lines = CPU_INFO.read_text().partition("\n\n")[0].splitlines() if CPU_INFO.exists() else []
    fields = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in fields}


def multiply_by_onednn() -> None:
    """Let oneDNN multiply float32 matrices of this process, on CPUs that are known to be faster so.

    PyTorch's switch for that library also permits products of bfloat16. oneDNN makes them with AMX only, so nothing is
    changed on CPUs with AMX, nor where a product turns out to be rounded, nor beside a GPU, whose matmuls the switch
    would round. Nor is anything changed where the user's code has chosen a precision.
    """
    about = cpu_info()
    flags = about.get("flags", "").split()
    is_faster = (about.get("vendor_id"), about.get("cpu family")) in FASTER_BY_ONEDNN
    is_open = torch.backends.mkldnn.matmul.fp32_precision == "none" and not torch.cuda.is_available()  # pyright: ignore[reportAttributeAccessIssue]
    if not is_faster or "avx512f" not in flags or "amx_tile" in flags or not is_open:
        return
    torch.set_float32_matmul_precision("medium")
    x = torch.full((64, 64), 1 + 2**-23)
    if not torch.equal(x @ torch.eye(64), x):
        torch.set_float32_matmul_precision("highest")


def describe_cpu() -> str:
    """Return the name and family of this machine's CPU, the vectors of PyTorch's kernels (AVX2, AVX512), and the
    library of its float32 matmuls."""
    about = cpu_info()
    family = f"family {about.get('cpu family', 'unknown')}"
    name = f"{about.get('model name', 'CPU')}, {family}, {torch.backends.cpu.get_cpu_capability()}"
    default = "MKL" if torch.backends.mkl.is_available() else "BLAS"
    return f"{name}; float32 matmuls by {'oneDNN' if multiplies_by_onednn() else default}"


def multiplies_by_onednn() -> bool:
    """Return whether oneDNN multiplies float32 matrices of this process."""
    return torch.backends.mkldnn.matmul.fp32_precision not in ("none", "ieee")  # pyright: ignore[reportAttributeAccessIssue]


class CpuKernels(Kernels):
    """Kernels of a CPU.

    Args:
        hardware_bfloat16: whether the CPU multiplies bfloat16 in hardware; default: of this machine. Others take 3 to
            50 times as long for bfloat16 as for float32.
        by_onednn: whether oneDNN multiplies float32 matrices; default: as in this process.
        chunk_bytes: as for `Kernels`.
    """

    def __init__(
        self,
        *,
        hardware_bfloat16: bool | None = None,
        by_onednn: bool | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        super().__init__(chunk_bytes=chunk_bytes)
        self.by_onednn = multiplies_by_onednn() if by_onednn is None else by_onednn
        self.hardware_bfloat16 = has_hardware_bfloat16() if hardware_bfloat16 is None else hardware_bfloat16

    def matmul_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See `Kernels.matmul_dtype`: float32 for dtypes that the hardware lacks."""
        is_slow = dtype == torch.float16 or (dtype == torch.bfloat16 and not self.hardware_bfloat16)
        return torch.float32 if is_slow else dtype

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.linears(x, [weight])[0]

    def linears(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        wide, source = self.matmul_dtype(x.dtype), None
        if not torch.compiler.is_compiling():
            source = source_of(x) if any(weight.requires_grad for weight in weights) else None
            # Several gradients of x are added up before they join those of other layers, whether x is kept or not.
            if source or wide != x.dtype or len(weights) > 1:
                return _Linears.apply(x, wide, source, *weights)
        return tuple(F.linear(x.to(wide), weight.to(wide)).type_as(x) for weight in weights)

    def embedding(self, tokens: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
        """See `Kernels.embedding`. The compiler adds up gradients in float32 by itself."""
        if weight.itemsize >= 4 or torch.compiler.is_compiling():
            return super().embedding(tokens, weight, padding_idx)
        return _Embedding.apply(tokens, weight, padding_idx)

    def layer_norm(
        self, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """See `F.layer_norm`. PyTorch adds up the gradients of weight and bias in their dtype."""
        if x.itemsize >= 4:
            return super().layer_norm(x, shape, weight, bias, eps)
        weight, bias = (None if parameter is None else parameter.float() for parameter in (weight, bias))
        return super().layer_norm(x.float(), shape, weight, bias, eps).type_as(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
        return super().rms_norm(x, weight, eps) if torch.compiler.is_compiling() else rms_norm(x, weight, eps)

    def label_softmax(self, *inputs: Tensor, dtype: torch.dtype | None, **options: Any) -> LabelSoftmax:
        """See `Kernels.label_softmax`. A CPU's operators would convert results to another dtype in a further copy."""
        softmax = super().label_softmax(*inputs, dtype=dtype and torch.float32, **options)
        gradient = softmax.d_logits_CV
        return softmax if gradient is None or dtype is None else softmax._replace(d_logits_CV=gradient.to(dtype))

    def own_attention(self, seq_len: int, dtype: torch.dtype) -> str | None:
        return "tiles" if has_tiles(seq_len, dtype, by_onednn=self.by_onednn) else None

    def attend_plainly(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, scores: Scores) -> Tensor:
        has_own = q.shape[2] == k.shape[2] and self.own_attention(q.shape[2], q.dtype)
        if has_own and not isinstance(mask, tuple):
            return attend_in_tiles(q, k, v, mask, scores.scale)
        return super().attend_plainly(q, k, v, mask, scores)


class _Embedding(torch.autograd.Function):
    """Lookup in a table of a narrow dtype, whose gradient is added up in float32 and rounded once.

    PyTorch's CPU kernel adds the gradients of a token's occurrences in the dtype of the table, one after the other: in
    bfloat16, 4,096 ones are 256.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(weight)
        ctx.padding = -1 if padding_idx is None else padding_idx % ctx.rows
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        tokens_T, wide_TD, rows = tokens.flatten().long(), gradients[0].flatten(0, -2).float(), ctx.rows
        if ctx.padding >= 0:
            wide_TD = wide_TD.masked_fill((tokens_T == ctx.padding).unsqueeze(1), 0)
        if rows <= len(tokens_T):
            return None, _sums_of_rows(wide_TD, tokens_T, rows).type_as(gradients[0]), None
        # A float32 table would be larger than the gradient of the tokens, of which each writes its number into its row:
        # that of any one occurrence is the number of them all.
        number_T = torch.arange(len(tokens_T), device=tokens.device)
        number_V = number_T.new_empty(rows).index_copy_(0, tokens_T, number_T)
        place_T = number_V.index_select(0, tokens_T)
        sum_TD = _sums_of_rows(wide_TD, place_T, len(tokens_T)).type_as(gradients[0]).index_select(0, place_T)
        return None, sum_TD.new_zeros(rows, sum_TD.shape[1]).index_copy_(0, tokens_T, sum_TD), None


def _sums_of_rows(x_TD: Tensor, place_T: Tensor, places: int) -> Tensor:
    """Return the sum of the rows of each place, added in their order."""
    return torch.ops.aten.embedding_dense_backward(x_TD, place_T, places, -1, False)


class _Linears(torch.autograd.Function):
    """x @ weight^T for each weight, with operands converted to a wider dtype. Backward keeps neither the converted
    operands, nor an x that its source makes again. It adds the gradients of x in the order in which autograd would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wide: torch.dtype, source: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        # Keep the source's saved tensors, not the source: pipelines compute gradients of weights last, when it is gone.
        kept = source.saved_tensors if source else [x] if any(ctx.needs_input_grad[3:]) else []
        ctx.save_for_backward(*weights, *kept)
        ctx.wide, ctx.input_again = wide, source.again if source else None
        x_wide = x.to(wide)
        return tuple(F.linear(x_wide, weight.to(wide)).type_as(x) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint recomputes them when they are asked for, and forgets them
        weights, kept = saved[: len(gradients)], saved[len(gradients) :]
        rows, d_x, d_weights = torch.empty(0), None, []
        x_needs, _, _, *weights_need = ctx.needs_input_grad
        if any(weights_need):
            rows = (ctx.input_again(*kept) if ctx.input_again else kept[0]).flatten(0, -2).to(ctx.wide)
        for gradient, weight, needs in reversed([*zip(gradients, weights, weights_need, strict=True)]):
            of_rows = gradient.flatten(0, -2).to(ctx.wide)
            if x_needs:
                added = (of_rows @ weight.to(ctx.wide)).type_as(gradient)
                d_x = added if d_x is None else d_x.add_(added)
            d_weights.append((of_rows.t() @ rows).type_as(weight) if needs else None)
        return None if d_x is None else d_x.view(*gradients[0].shape[:-1], -1), None, None, *reversed(d_weights)
