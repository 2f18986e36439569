"""Kernels: how one kind of device computes what a step needs.

One object is chosen at the start (`pick_kernels` in ops/__init__.py) and handed to parallelize and to the
loss. `Kernels` runs PyTorch's operators as NVIDIA GPUs run them best, and is correct on every device. `ops/cpu.py`
replaces what CPUs compute badly. The planner derives its own, which trace a GPU's step on fake tensors.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.ops.attention import (
    PLAIN_SCORES,
    AttentionMask,
    Boundaries,
    Documents,
    Scores,
    SequencePart,
    additive_mask,
    attend,
    chunk_boundaries,
    chunk_masks,
    offsets_of,
    repeat_heads,
)
from titanlite.ops.cross_entropy import LabelSoftmax, SplitVocabulary, label_softmax, label_softmax_in_place
from titanlite.ops.functions import Activation, linears, loop_over_groups, rms_norm, weighted
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.compiler import mark_dynamic
from titanlite.runtime.private_torch.tensors import chosen_attention
from titanlite.schema import AttentionBackend

if TYPE_CHECKING:
    from titanlite.ops.divergence import ChunkDivergence

CHUNK_TOKENS, CHUNK_BYTES = 512, 2**28
"""Tokens of a chunk on a CPU, and size of its float32 logits: 512 tokens of a vocabulary of 131,072. A CPU multiplies
512 rows as fast as more."""
GPU_CHUNK_BYTES = {False: 2**30, True: 3 * 2**28}
"""Size of the float32 logits of a chunk on a GPU, by whether the loss is compiled."""
ATTENTION_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fa3": SDPBackend.FLASH_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FLASH_PACKAGES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
"""Packages whose kernels take the place of PyTorch's own flash attention, in a whole process."""
GPU_TILE = 128
"""Tokens in a tile of a GPU's matmul: chunks are multiples of it."""


class LossChunks(NamedTuple):
    """Numbers of tokens that the loss processes at once. The last of each kind can be smaller."""

    tokens: int
    """Tokens of a chunk: their logits exist at once."""
    group: int
    """Tokens of a group of chunks: the gradients of their logits exist at once. A multiple of `tokens`."""


def _even_part(tokens: int, limit: int, tile: int) -> int:
    """Return the size of the fewest equal parts of at most `limit` tokens, rounded up to a multiple of `tile`."""
    parts = -(-tokens // (max(1, limit // tile) * tile))
    return -(-tokens // (parts * tile)) * tile


class Kernels:
    """PyTorch's own operators. Shape suffixes: see `models/layers.py`; C the tokens of a chunk of the loss.

    Args:
        compiles: whether the loss compiles its elementwise work, on a GPU.
        chunk_bytes: size of the float32 logits that the loss holds at once. Default: `GPU_CHUNK_BYTES` on a GPU, else
            `CHUNK_BYTES`.
        attention: `training.attention_backend`.
    """

    def __init__(
        self, *, compiles: bool = False, chunk_bytes: int | None = None, attention: AttentionBackend = "auto"
    ) -> None:
        self.compiles = compiles
        self.attention = attention
        self.packs_groups = True
        """Whether attention of packed documents lets query heads share key heads: since torch 2.12."""
        self.chunk_bytes = chunk_bytes

    def is_gpu(self, device: torch.device) -> bool:
        """Return True if tensors of a device are computed on a GPU."""
        return device.type == "cuda"

    def matmul_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which operands of a dtype are multiplied. Sums are float32 either way."""
        return dtype

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight^T, in the dtype of x."""
        return F.linear(x, weight)

    def linears(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """x @ weight^T for each weight. On a GPU, backward launches fewer kernels. For uncompiled code only."""
        if self.is_gpu(x.device):
            return linears(x, weights)
        return tuple(self.linear(x, weight) for weight in weights)

    def grouped_mm(self, x_TD: Tensor, weights_EDF: Tensor, ends_E: Tensor) -> Tensor:
        """Matmul of each group of tokens with its own weight -> [T, F].

        Args:
            ends_E: int32. Group e holds the tokens from ends_E[e - 1] to ends_E[e]; the last end is T.
        """
        is_aligned = x_TD.shape[1] % 8 == 0 and weights_EDF.shape[2] % 8 == 0  # rows of 16 bytes
        if x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and is_aligned:
            return F.grouped_mm(x_TD, weights_EDF, offs=ends_E)
        return loop_over_groups(x_TD, weights_EDF, ends_E, self.matmul_dtype(x_TD.dtype))

    def weighted(self, activation: Activation, gate_SF: Tensor, up_SF: Tensor, weights_S: Tensor) -> Tensor:
        """Return activation(gate, up) times the weight of each token; compiled where the loss is.

        Blocks whose experts are on several processes run them outside of compiled code.
        """
        if not self.compiles or torch.compiler.is_compiling() or not self.is_gpu(gate_SF.device):
            return weighted(activation, gate_SF, up_SF, weights_S)
        for tensor in (gate_SF, up_SF, weights_S):
            mark_dynamic(tensor, dim=0)
        return self._compiled_weighted(activation, gate_SF, up_SF, weights_S)

    @cached_property
    def _compiled_weighted(self) -> Callable[..., Tensor]:
        return torch.compile(weighted, fullgraph=True)

    def read_counts(
        self, to_R: Tensor, from_R: Tensor, copies: Tensor, *, tokens: int, experts: int, active: int
    ) -> tuple[list[int], list[int], int]:
        """Return the numbers of tokens to and from each of R ranks, and that of all tokens of the experts of this rank,
        in which a token counts once for each. The host waits for the device.

        Args:
            copies: the last of the three, a tensor without dims.
            tokens, experts, active: tokens of this rank, and experts of all ranks and of a token, from which the plan
                estimates the numbers.
        """
        *both, last = torch.cat([to_R, from_R, copies.view(1)]).tolist()
        return both[: len(to_R)], both[len(to_R) :], last

    def embedding(self, tokens: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
        """Rows of the weight [V, D] -> [..., D]. That of padding_idx gets no gradient."""
        return F.embedding(tokens, weight, padding_idx)

    def layer_norm(
        self, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """See `F.layer_norm`."""
        return F.layer_norm(x, shape, weight, bias, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32; the dtype of x.

        PyTorch has a fused kernel where x and the weight have the same dtype.
        """
        return F.rms_norm(x, weight.shape, weight, eps) if x.dtype == weight.dtype else rms_norm(x, weight, eps)

    def attend(
        self,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        mask: AttentionMask | None,
        key_source: "KeySource | None" = None,
        scores: Scores = PLAIN_SCORES,
    ) -> Tensor:
        """Causal attention; see `ops/attention.py`.

        On GPUs, the kernels for float32 and for masks know no groups. PyTorch would take plain formulas, which hold
        scores [N, L, L]. So keys and values are repeated first. With sinks, those kernels do not help, and scores
        are held.

        Args:
            key_source: adds keys and values of other tokens. None: these tokens are all.
        """
        if key_source is not None:
            return key_source.attend(self, q_BNLH, k_BKLH, v_BKLH, mask, scores)
        grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
        if grouped and isinstance(mask, Boundaries | tuple) and not self.packs_groups:
            k_BKLH, v_BKLH = (repeat_heads(x, q_BNLH.shape[1]) for x in (k_BKLH, v_BKLH))
            grouped = False
        if scores.sinks_N is not None:
            if mask is None and self.has_packed_attention(q_BNLH.device, q_BNLH.dtype, q_BNLH.shape[-1]):
                mask = _whole_sequences(q_BNLH.shape[0], q_BNLH.shape[2], q_BNLH.device)
            if mask is None or isinstance(mask, Tensor):
                from titanlite.ops.sinks import attend_by_formula, attend_on_cpu  # most models have none

                has_kernel = q_BNLH.device.type == "cpu" and not self.is_gpu(q_BNLH.device)
                by = attend_on_cpu if has_kernel else attend_by_formula
                return by(q_BNLH, k_BKLH, v_BKLH, scores.sinks_N, mask, scores.scale)
            return attend(q_BNLH, k_BKLH, v_BKLH, mask, scores)
        is_masked = isinstance(mask, Tensor)
        if grouped and self.is_gpu(q_BNLH.device) and not self.has_grouped_attention(q_BNLH.dtype, masked=is_masked):
            k_BKLH, v_BKLH = (repeat_heads(x, q_BNLH.shape[1]) for x in (k_BKLH, v_BKLH))
        return self.attend_plainly(q_BNLH, k_BKLH, v_BKLH, mask, scores)

    def attend_plainly(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, scores: Scores) -> Tensor:
        """Compute attention without sinks to keys that are all here."""
        with self.one_attention(q.device):
            return attend(q, k, v, mask, scores)

    def gated_delta_rule(
        self,
        q_BNLK: Tensor,
        k_BNLK: Tensor,
        v_BXLV: Tensor,
        decay_BXL: Tensor,
        beta_BXL: Tensor,
        *,
        dtype: torch.dtype,
        documents: Documents | None = None,
    ) -> Tensor:
        """Gated delta rule of whole sequences -> [B, X, L, V]; see `ops/delta_rule.py`. Each key head has as many of
        the value heads X. The tensors are float32.

        Args:
            dtype: compute dtype of the layer.
            documents: with the positions of all tokens. None: each sequence is one.
        """
        from titanlite.ops.delta_rule import fused_gated_delta_rule, gated_delta_rule  # most models have none

        inputs = q_BNLK, k_BNLK, v_BXLV, decay_BXL, beta_BXL
        if self.has_fused_delta_rule(v_BXLV.device, dtype, k_BNLK.shape[-1]):
            return fused_gated_delta_rule(*inputs, dtype=dtype, boundaries=documents and documents.boundaries)
        q, k = (repeat_heads(x, v_BXLV.shape[1]) for x in inputs[:2])
        return gated_delta_rule(q, k, *inputs[2:], positions_BL=documents and documents.positions_BL)[0]

    def has_fused_delta_rule(self, device: torch.device, dtype: torch.dtype, key_dim: int) -> bool:
        """Return True if the kernels of flash-linear-attention compute it. The compiler cannot trace them."""
        from titanlite.ops.delta_rule import has_fused_kernels

        return not self.compiles and has_fused_kernels(device, dtype, key_dim)

    def one_attention(self, device: torch.device) -> AbstractContextManager[Any]:
        """Let PyTorch take the backend of `training.attention_backend` only, within the context.

        The context becomes part of the graph of compiled code. Settings of the process would not.
        """
        if self.attention == "auto" or device.type != "cuda":
            return nullcontext()
        return sdpa_kernel(ATTENTION_BACKENDS[self.attention])

    def has_grouped_attention(self, dtype: torch.dtype, *, masked: bool) -> bool:
        """Return True if the fused attention of a GPU lets query heads share key heads, for a dtype.

        Args:
            masked: whether it takes a tensor as mask.
        """
        return dtype in (torch.bfloat16, torch.float16) and self.attention != "efficient" and not masked

    def own_attention(self, seq_len: int, dtype: torch.dtype) -> str | None:
        """Return the name of what is used in the place of PyTorch's attention to whole sequences, if anything is."""
        return None

    def attention_name(
        self,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        masked: bool = False,
        has_sinks: bool = False,
        in_parts: bool = False,
    ) -> str:
        """Return the name of the backend of attention: flash, cudnn, efficient, math, or tiles on a CPU.

        Args:
            masked: whether attention stays within documents or windows.
            has_sinks: whether it has sinks.
            in_parts: whether queries are of a part of each sequence.

        Raises:
            UserError: the backend of `training.attention_backend` cannot.
        """
        if not (has_sinks or in_parts) and (own := self.own_attention(seq_len, dtype)):
            return own
        if (masked or has_sinks) and self.has_packed_attention(device, dtype, head_dim):
            return "flash"
        if has_sinks and self.attention != "auto":
            raise UserError(f"training.attention_backend: {self.attention} has no sinks for {dtype} here; use auto")
        if has_sinks:
            return "math" if self.is_gpu(device) else "flash"
        groups = not self.is_gpu(device) or self.has_grouped_attention(dtype, masked=masked)
        heads = n_heads // n_kv_heads if groups else 1
        q_BNLH = torch.empty(1, heads, seq_len, head_dim, dtype=dtype, device=device, requires_grad=True)
        k_BKLH = torch.empty(1, 1, seq_len, head_dim, dtype=dtype, device=device, requires_grad=True)
        mask_B1LL = torch.empty(1, 1, 1, seq_len, dtype=dtype, device=device).expand(1, 1, seq_len, seq_len)
        try:
            with self.one_attention(device):
                backend = SDPBackend(chosen_attention(q_BNLH, k_BKLH, k_BKLH, mask_B1LL if masked else None))
        except RuntimeError as error:
            within = " within documents or windows" if masked else ""
            raise UserError(
                f"training.attention_backend: {self.attention} is not available for {dtype}, head dim {head_dim}"
                f"{within}, on this GPU; use auto"
            ) from error
        name = backend.name.removesuffix("_ATTENTION").lower()
        return self.attention if self.attention in FLASH_PACKAGES and name == "flash" else name

    def attention_mask(
        self,
        documents: Documents | None,
        x_BLD: Tensor,
        head_dim: int,
        key_source: "KeySource | None" = None,
        *,
        window: int | None = None,
    ) -> AttentionMask:
        """Mask for the blocks of one forward pass, in the form that the device takes best.

        Args:
            documents: None: each sequence is one.
            window: tokens that a token sees, itself included. None: all before it.
        """
        B, L, _ = x_BLD.shape
        part = key_source.part if key_source is not None else None
        if part is not None and documents is not None:
            part = part.of_masks(documents.ids_BS.shape[1], window)
        if not self.has_packed_attention(x_BLD.device, x_BLD.dtype, head_dim):
            ids_BS = documents.ids_BS if documents else torch.zeros(1, L, dtype=torch.int32, device=x_BLD.device)
            mask_B1LS = additive_mask(ids_BS, x_BLD.dtype, part, window=window)
            return chunk_masks(mask_B1LS, part, window) if part else mask_B1LS
        if documents is None:
            return _whole_sequences(B, L, x_BLD.device, window)
        masks = chunk_boundaries(documents, part, window=window) if part else Boundaries(documents.boundaries, window)
        # The number of documents differs from batch to batch. Unmarked, the second batch would recompile every block.
        for offsets in offsets_of(masks):
            mark_dynamic(offsets, dim=0)
        return masks

    def has_packed_attention(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Return True if PyTorch's flash attention of variable length runs. It needs an NVIDIA GPU from Ampere on and
        half precision. Its arguments show what it can do."""
        if self.attention not in ("auto", "flash"):
            return False
        if not self.is_gpu(device) or dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
            return False
        # Fake tensors can be on a device that this machine does not have.
        if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
            return False
        if not torch.backends.cuda.is_flash_attention_available():
            return False
        from torch.nn.attention.varlen import varlen_attn

        arguments = inspect.signature(varlen_attn).parameters
        self.packs_groups = "enable_gqa" in arguments
        return "window_size" in arguments

    def logits_dtype(self, hidden_TD: Tensor) -> torch.dtype:
        """Return the dtype of the operands that make the logits. CPUs cannot sum bfloat16 operands into a float32
        result, and rounded logits would show in the loss."""
        return hidden_TD.dtype if self.is_gpu(hidden_TD.device) else torch.float32

    def loss_chunks(self, tokens: int, vocabulary: int, device: torch.device, *, groups: bool = False) -> LossChunks:
        """Return the number of tokens whose logits the loss holds at once.

        On a GPU the chunks of a batch have equal sizes, rounded up to the `GPU_TILE` tokens of a matmul's tile.

        Args:
            groups: whether gradients of logits, half as wide, are multiplied with hidden states. Several chunks are
                smaller then, and the gradients of two or four exist at once: the weight's gradient is read and
                written half as often, in as much memory.
        """
        if not self.is_gpu(device):
            chunk = max(1, min(CHUNK_TOKENS, (self.chunk_bytes or CHUNK_BYTES) // (4 * vocabulary)))
            return LossChunks(chunk, chunk)
        limit = (self.chunk_bytes or GPU_CHUNK_BYTES[self.compiles]) // (4 * vocabulary)
        chunk = _even_part(tokens, limit, GPU_TILE)
        if not groups or chunk >= tokens or 2 * limit < 4 * GPU_TILE:
            return LossChunks(chunk, chunk)
        group = _even_part(tokens, 2 * limit, 4 * GPU_TILE)
        return LossChunks(group // (2 if 2 * group <= 3 * limit else 4), group)

    def label_softmax(
        self,
        logits_CV: Tensor,
        labels_C: Tensor,
        valid_C: Tensor,
        *,
        z_loss: float,
        dtype: torch.dtype | None,
        vocabulary: SplitVocabulary | None = None,
        out: Tensor | None = None,
    ) -> LabelSoftmax:
        """Softmax of float32 logits and the gradient of the loss. The logits are lost.

        The arguments are those of `ops.cross_entropy.label_softmax_in_place`.
        """
        if vocabulary is None and self.compiles and self.is_gpu(logits_CV.device):
            return self._compiled_label_softmax(logits_CV, labels_C, valid_C, z_loss=z_loss, dtype=dtype, out=out)
        return label_softmax_in_place(
            logits_CV, labels_C, valid_C, z_loss=z_loss, dtype=dtype, vocabulary=vocabulary, out=out
        )

    @cached_property
    def _compiled_label_softmax(self) -> Callable[..., LabelSoftmax]:
        return torch.compile(label_softmax, fullgraph=True, dynamic=False)

    def divergence(self, device: torch.device) -> Callable[..., "ChunkDivergence"]:
        """Return `ops.divergence.divergence`, compiled where the loss is."""
        from titanlite.ops.divergence import divergence

        return self._compiled_divergence if self.compiles and self.is_gpu(device) else divergence

    @cached_property
    def _compiled_divergence(self) -> Callable[..., "ChunkDivergence"]:
        from titanlite.ops.divergence import divergence

        return torch.compile(divergence, fullgraph=True, dynamic=False)

    def float32_mm(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b in float32: from bfloat16 operands without a rounding in between, where the device can do that."""
        if a.dtype == torch.float32:
            return a @ b
        if self.has_float32_output(a.device):
            return torch.mm(a, b, out_dtype=torch.float32)
        return (a @ b).float()

    def matmul_into(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        """out = a @ b, summed in float32 and rounded once."""
        if a.dtype == out.dtype:
            torch.mm(a, b, out=out)
        elif out.dtype == torch.float32 and self.has_float32_output(a.device):
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            out.copy_(a @ b)

    def add_matmul(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """total += a @ b in place, for a float32 total. Without a kernel for that, it allocates up to CHUNK_BYTES."""
        if a.dtype == torch.float32:
            total.addmm_(a, b)
        elif self.has_float32_output(a.device):
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        else:
            rows = max(1, (self.chunk_bytes or CHUNK_BYTES) // (4 * b.shape[1]))
            for start in range(0, len(total), rows):
                total[start : start + rows] += self.float32_mm(a[start : start + rows], b)

    def has_float32_output(self, device: torch.device) -> bool:
        """Return True if a matmul of bfloat16 operands can return the float32 in which its sums are computed."""
        return self.is_gpu(device) and not torch.version.hip


class KeySource(Protocol):
    """Source of keys and values of tokens that this forward pass does not compute: other processes, or a cache."""

    @property
    def part(self) -> SequencePart | None:
        """Chunk of each sequence that this rank computes. None: sequences are not split, and the queries are the last L
        tokens."""
        ...

    def attend(
        self,
        kernels: Kernels,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        mask: AttentionMask | None,
        scores: Scores,
    ) -> Tensor:
        """Return the attention of L tokens to themselves and to those of the source, computed by `kernels.attend`."""
        ...


class SequenceSource(KeySource, Protocol):
    """Source for layers that need whole sequences, such as the delta rule: ranks exchange sequences for heads."""

    def by_heads(
        self,
        compute: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> Tensor:
        """Return what `compute` returns for all N heads and these L tokens: [B, heads, L, dims].

        Args:
            compute: (inputs, parameters) -> [B, heads, S, dims], called with whole sequences of some of the heads. The
                heads of its result can be a multiple.
            inputs: [B, N, L, ...] each.
            parameters: [N, ...] each.
        """
        ...


def set_key_source(model: nn.Module, source: KeySource | None) -> None:
    """Set the key source of every module that attends or makes masks: of those with an attribute `key_source`."""
    for module in model.modules():
        if hasattr(module, "key_source"):
            module.key_source = source  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def _whole_sequences(batch: int, seq_len: int, device: torch.device, window: int | None = None) -> Boundaries:
    """Return the boundaries of sequences that are one document each."""
    return Boundaries(torch.arange(0, batch * seq_len + 1, seq_len, dtype=torch.int32, device=device), window)


DEFAULT_KERNELS = Kernels()
"""Kernels of a model for which `set_kernels` was not called."""


def in_every_pass(module: object) -> bool:
    """Return False for a block that runs only where gradients are computed, and has `in_every_pass = False`.

    FSDP must not gather it ahead: in other passes nothing would use the gathered weights, and the next one would find
    them outdated.
    """
    return getattr(module, "in_every_pass", True)


def set_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Set the kernels of every module that has an attribute `kernels`."""
    for module in model.modules():
        if hasattr(module, "kernels"):
            module.kernels = kernels  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
