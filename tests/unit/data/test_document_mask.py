"""Attention within documents: packed sequences against each document alone, transformers, and every technique.

torch's kernel of variable length runs on GPUs only. Here a reference in its place shows how it is called.
"""

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen

from tests.support import packed_kernel
from tests.support.helpers import TinyRun, mentions, train_on_this_rank
from tests.support.models import SMALL, built, documents
from titanlite.batch import IGNORE
from titanlite.checks.preflight import preflight
from titanlite.loss import token_loss
from titanlite.models.decoder import Decoder
from titanlite.models.layers import Documents, rope_at
from titanlite.models.llama3 import Llama3Args
from titanlite.ops.attention import Boundaries, document_arguments
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels, set_kernels
from titanlite.parallelize.activation_checkpoint import apply_activation_checkpoint, recompute_policies
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.process_group import Ranks
from titanlite.schema import ActivationCheckpoint

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
has_packed_attention = Kernels.has_packed_attention
GROUPED = SMALL
ALL_HEADS = replace(SMALL, n_kv_heads=4)
ROWS = [[5, 1, 10], [16]]
"""Lengths of the documents of two sequences."""


def tokens_for(rows: list[list[int]], seed: int = 1) -> Tensor:
    return torch.randint(0, 101, (len(rows), sum(rows[0])), generator=torch.Generator().manual_seed(seed))


def labels_for(rows: list[list[int]]) -> Tensor:
    labels = tokens_for(rows, seed=2)
    labels[:, ::3] = IGNORE
    return labels


def loss_and_gradients(
    model: Decoder, tokens: Tensor, labels: Tensor, where: Documents | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of parameters, and of the blocks' input as "embeddings"."""
    seen: list[Tensor] = []

    def watch(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(output)

    handle = model.tok_embeddings.register_forward_hook(watch)
    loss = model(tokens, loss=partial(token_loss, labels_BL=labels), documents=where)
    handle.remove()
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(loss.total, [*model.parameters(), seen[0]])
    return loss.cross_entropy, dict(zip([*names, "embeddings"], gradients, strict=True))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1))


# What a mask is for


@pytest.mark.parametrize(
    ("args", "dtype", "lengths"),
    [
        pytest.param(GROUPED, torch.float32, [5, 1, 10], id="grouped queries"),
        pytest.param(ALL_HEADS, torch.float32, [5, 1, 10], id="all heads"),
        pytest.param(GROUPED, torch.bfloat16, [5, 1, 10], id="half precision"),
        pytest.param(replace(GROUPED, n_layers=1), torch.float32, [530, 70], id="a block of keys masked whole"),
    ],
)
def test_a_changed_token_changes_no_bit_of_another_document(
    args: Llama3Args, dtype: torch.dtype, lengths: list[int]
) -> None:
    model = built(replace(args, max_seq_len=1024)).to(dtype)
    tokens, labels, where = tokens_for([lengths]), labels_for([lengths]), documents([lengths])
    logits = model(tokens, documents=where)
    _, gradients = loss_and_gradients(model, tokens, labels, where)
    for document, first in enumerate(torch.tensor([0, *lengths]).cumsum(0)[:-1]):
        changed = tokens.clone()
        changed[0, first] += 1
        within = where.ids_BS[0] == document
        same = (model(changed, documents=where) == logits)[0].all(dim=-1)
        assert torch.equal(same, ~within)
        _, others = loss_and_gradients(model, changed, labels, where)
        same = (others["embeddings"] == gradients["embeddings"])[0].all(dim=-1)
        assert same[~within].all()
        assert not same[within].all()


def alone(model: Decoder, tokens: Tensor, labels: Tensor, rows: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [B * L, V] of documents run one by one, without a mask, and the sum of their gradients."""
    lengths = [length for row in rows for length in row]
    logits, gradients = [], {}
    for part, label in zip(tokens.flatten().split(lengths), labels.flatten().split(lengths), strict=True):
        logits.append(model(part[None])[0])
        for name, gradient in loss_and_gradients(model, part[None], label[None], None)[1].items():
            if name != "embeddings":
                gradients[name] = gradients.get(name, 0) + gradient
    return torch.cat(logits), gradients


def check_against_documents_alone(model: Decoder) -> None:
    tokens, labels, where = tokens_for(ROWS), labels_for(ROWS), documents(ROWS)
    logits, gradients = alone(model, tokens, labels, ROWS)
    assert logits.std() > 0.1
    assert close(model(tokens, documents=where).flatten(0, 1), logits)
    assert not close(model(tokens).flatten(0, 1), logits, 0.01)
    _, found = loss_and_gradients(model, tokens, labels, where)
    for name, gradient in gradients.items():
        assert close(found[name], gradient), name


@pytest.mark.parametrize("args", [GROUPED, ALL_HEADS, replace(SMALL, tied_head=True)], ids=["grouped", "all", "tied"])
def test_packed_sequences_are_their_documents_alone(args: Llama3Args) -> None:
    check_against_documents_alone(built(args))


# Without documents


def test_without_documents_attention_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    attend = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(Kernels, "attention_mask", None)
    model = built(GROUPED)
    model(tokens_for(ROWS))
    assert calls == [{"attn_mask": None, "is_causal": True, "enable_gqa": True, "scale": None}] * 2
    assert rope_at(model.rope_cos[0], 16, None).data_ptr() == model.rope_cos.data_ptr()
    assert document_arguments({"tokens": tokens_for(ROWS), "labels": labels_for(ROWS)}) == {}


# Techniques

MODES = {
    "full": ActivationCheckpoint(mode="full"),
    "op": ActivationCheckpoint(mode="selective"),
    "each second": ActivationCheckpoint(mode="selective", selective_ac_option=2),
}


@pytest.mark.usefixtures("single_process_group")
def test_half_precision_reaches_the_mask(tiny: TinyRun) -> None:
    """FSDP makes activations bfloat16; the mask must be of their type, and positions and boundaries integers."""
    for dtype in ("float32", "bfloat16"):
        options = ["--data.document_mask", f"--training.mixed_precision_param={dtype}", "--training.steps=3"]
        train_on_this_rank(tiny.config(*options, f"--job.name={dtype}"), 0, 1)
    assert tiny.losses("bfloat16") == pytest.approx(tiny.losses("float32"), rel=0.02)
    assert tiny.losses("bfloat16") != tiny.losses("float32")


# The kernel of variable length


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """torch's operators of variable length with a CPU implementation; counts calls."""
    if "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this torch has no kernel for packed documents with grouped queries")
    calls: Counter[str] = Counter()

    def forward(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *options: Any) -> tuple[Tensor, ...]:
        calls["forward"] += 1
        _, max_q, max_k, is_causal, scale, window, *rest = options  # what is at its default is left out
        grouped = rest.pop(0) if rest else False
        assert (max_q, max_k, is_causal, scale, window) == (16, 16, True, None, [-1, 0])
        assert grouped == (query.shape[1] != key.shape[1])
        assert starts.dtype == torch.int32
        assert all(x is None for x in rest)
        return packed_kernel.forward(query, key, value, starts, *options)

    def backward(*tensors: Any) -> tuple[Tensor, ...]:
        calls["backward"] += 1
        return packed_kernel.backward(*tensors)

    monkeypatch.setattr(Kernels, "has_packed_attention", lambda self, device, dtype, head_dim: head_dim == 16)
    with packed_kernel.on_cpu(forward, backward):
        yield calls


@pytest.mark.parametrize("args", [GROUPED, ALL_HEADS], ids=["grouped queries", "all heads"])
def test_the_packed_kernel_gets_the_documents_of_the_mask(args: Llama3Args, kernel_calls: Counter[str]) -> None:
    model = built(args)
    mask = model.kernels.attention_mask(documents(ROWS), model.tok_embeddings(tokens_for(ROWS)), 16)
    assert isinstance(mask, Boundaries)
    check_against_documents_alone(model)
    assert kernel_calls == {"forward": 4, "backward": 2}


def test_heads_are_repeated_where_the_packed_kernel_knows_no_groups(
    kernel_calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.11, whose function has no argument for them. The losses are those of kernels that share heads."""
    inputs = tokens_for(ROWS), labels_for(ROWS), documents(ROWS)
    loss, gradients = loss_and_gradients(built(GROUPED), *inputs)
    of_grouped = kernel_calls.copy()
    own = varlen.varlen_attn

    def without_groups(query: Tensor, key: Tensor, *options: Any, scale: Any = None, window_size: Any = None) -> Any:
        assert query.shape[1] == key.shape[1]
        return own(query, key, *options, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", without_groups)
    kernels = Kernels()
    pretend_gpu(monkeypatch, (9, 0))
    assert has_packed_attention(kernels, CUDA, BF16, 64)
    assert not kernels.packs_groups
    model = built(GROUPED)
    set_kernels(model, kernels)
    other_loss, others = loss_and_gradients(model, *inputs)
    assert kernel_calls - of_grouped == of_grouped
    assert torch.equal(other_loss, loss)
    assert all(close(others[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize(("mode", "forwards"), [("full", 4), ("op", 2), ("each second", 3)])
def test_checkpointing_by_operations_keeps_the_kernels_output(
    mode: str, forwards: int, kernel_calls: Counter[str]
) -> None:
    inputs = tokens_for(ROWS), labels_for(ROWS), documents(ROWS)
    loss, gradients = loss_and_gradients(built(GROUPED), *inputs)
    kernel_calls.clear()
    model = built(GROUPED)
    apply_activation_checkpoint(model, recompute_policies(MODES[mode], len(model.layers)))
    other_loss, others = loss_and_gradients(model, *inputs)
    assert kernel_calls == {"forward": forwards, "backward": 2}
    assert torch.equal(other_loss, loss)
    assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())


@pytest.mark.long
def test_another_number_of_documents_recompiles_nothing(kernel_calls: Counter[str]) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")  # needs no C++ compiler
    model = built(GROUPED)
    apply_activation_checkpoint(model, recompute_policies(MODES["op"], len(model.layers)))
    for block in model.layers:
        block.compile(fullgraph=True, backend=counter)
    for rows in (ROWS, [[4, 4, 4, 4], [1, 15]]):
        inputs = tokens_for(rows), labels_for(rows), documents(rows)
        loss, gradients = loss_and_gradients(built(GROUPED), *inputs)
        kernel_calls.clear()
        found_loss, found = loss_and_gradients(model, *inputs)
        assert kernel_calls == {"forward": 2, "backward": 2}
        assert float(found_loss) == pytest.approx(float(loss), rel=1e-6)
        assert all(close(found[name], gradient) for name, gradient in gradients.items())
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "expected"),
    [
        (CUDA, BF16, 64, (9, 0), True),
        (CUDA, torch.float32, 64, (9, 0), False),
        (CUDA, BF16, 64, (7, 5), False),
        (torch.device("cpu"), BF16, 64, (9, 0), False),
    ],
)
def test_where_the_packed_kernel_is_chosen(
    device: torch.device, dtype: torch.dtype, head_dim: int, capability: Any, expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pretend_gpu(monkeypatch, capability)
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        assert DEFAULT_KERNELS.has_packed_attention(device, dtype, head_dim) == expected


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


# Models without the argument


MASKLESS = """
from titanlite.models.llama3 import Llama3

class Maskless(Llama3):
    def forward(self, tokens, loss=None):
        return super().forward(tokens, loss)
"""


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_model_without_documents_trains_unmasked_and_is_refused_with_a_mask(tiny: TinyRun) -> None:
    (tiny.folder / "maskless.py").write_text(MASKLESS)
    model = f"--model.file={tiny.folder}/maskless.py"
    ranks, device = Ranks(0, 1, 0, 1), torch.device("cpu")
    with pytest.raises(ConfigError) as error:
        preflight(tiny.config(model, "--data.document_mask=true"), ranks, device)
    [problem] = error.value.problems
    assert problem.key == "data.document_mask"
    assert mentions(
        problem.message, "`documents`", "Maskless.forward", "docs/add_a_model.md", "data.document_mask = false"
    )
    train_on_this_rank(tiny.config("--training.steps=2"), 0, 1)
    train_on_this_rank(tiny.config(model, "--training.steps=2", "--job.name=maskless"), 0, 1)
    assert tiny.losses("maskless") == tiny.losses()
