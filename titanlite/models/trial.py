"""Trials of a model of the user's own at a small size on the CPU: what it sees, and what it leaves without a value."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from titanlite.models.base import Model, unique_parameters
from titanlite.models.registry import ModelSpec
from titanlite.ops.attention import Documents
from titanlite.runtime.errors import UserError

SMALL = 1 << 25
"""Largest custom model (parameters) that preflight runs on the CPU."""
ALLOWED = 1e-3
"""Difference between logits that are equal, see `apart`. Different kernels differ by 1e-6."""
SMALL_VOCABULARY = 256
SMALL_LENGTH = 64
"""Tokens of a sequence that such a model is tried on."""


def check_documents(model: Model) -> None:
    """Check that a model can keep documents apart.

    Raises:
        UserError: it cannot.
    """
    if not takes_documents(model):
        raise UserError(
            f"true needs a model whose forward takes `documents`, and {type(model).__name__}.forward does not: add the "
            "argument and mask attention by it (docs/add_a_model.md), or set data.document_mask = false"
        )


def check_documents_apart(spec: ModelSpec) -> None:
    """Try a model on two documents in one sequence.

    A model whose small size is unknown, or fails, is not tried.

    Raises:
        UserError: other tokens in the first document change the logits of the second.
    """
    length, first = _lengths(spec)
    documents = documents_of([first, length - first])
    if _depend(spec, slice(first, None), on=torch.arange(length) < first, documents=documents):
        raise UserError(
            f"{spec.model_cls.__name__} does not keep documents apart: other tokens in the first document of a "
            "sequence change the logits of the second. Mask attention by `documents` (docs/add_a_model.md), or set "
            "data.document_mask = false"
        )


def check_causal(spec: ModelSpec) -> None:
    """Try whether the logits of a model depend on tokens after them, which it is trained to predict.

    A model whose small size is unknown, or fails, is not tried.

    Raises:
        UserError: they do.
    """
    length, first = _lengths(spec)
    if _depend(spec, slice(first), on=torch.arange(length) >= first):
        raise UserError(
            f"{spec.model_cls.__name__} sees the tokens that it is to predict: other tokens at the end of a sequence "
            "change the logits before them. Let attention see the tokens before only (docs/add_a_model.md)"
        )


def check_buffers(spec: ModelSpec) -> None:
    """Check that `init_buffers` gives each element of a buffer a value, whatever the memory held before.

    A model whose small size is unknown, or fails, is not tried.

    Raises:
        UserError: there is a buffer without a value.
    """
    if (model := small_model(spec)) is None:
        return
    values = []
    for content in (0, 1):
        for buffer in model.buffers():
            buffer.fill_(content)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model.init_buffers()
        values.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    before, after = values
    if left := [name for name in before if ((before[name] == 0) & (after[name] == 1)).any()]:
        name = spec.model_cls.__name__
        raise UserError(f"{name}.init_buffers leaves {', '.join(left)} without a value (docs/add_a_model.md)")


def unused_parameters(spec: ModelSpec, loss: Any) -> list[str]:
    """Return the names of parameters that have no gradient after a backward pass of a small model.

    Args:
        loss: function of the final hidden states, the weight of the head and `labels_BL`, such as `token_loss`.
    """
    if (model := small_model(spec)) is None:
        return []
    tokens = _tokens(spec)
    try:
        model.train()(tokens, loss=partial(loss, labels_BL=tokens)).total.backward()
    except (Exception, SystemExit):  # code of the user's own may raise anything; training itself shows what
        return []
    return [name for name, parameter in unique_parameters(model) if parameter.grad is None]


def _lengths(spec: ModelSpec) -> tuple[int, int]:
    """Return the tokens of a sequence, and of its first part: no multiple of a block of tokens."""
    length = min(SMALL_LENGTH, spec.args.max_seq_len)
    return length, length // 2 - 1


def _tokens(spec: ModelSpec) -> Tensor:
    return torch.arange(_lengths(spec)[0])[None] % min(SMALL_VOCABULARY, spec.args.vocab_size)


def _depend(spec: ModelSpec, logits: slice, *, on: Tensor, **arguments: Any) -> bool:
    """Return whether some logits of a sequence depend on tokens at other places. False if the model is not tried."""
    if (model := small_model(spec)) is None:
        return False
    tokens, vocabulary = _tokens(spec), min(SMALL_VOCABULARY, spec.args.vocab_size)
    other = torch.where(on, (tokens + vocabulary // 2) % vocabulary, tokens)
    try:
        passes = []
        for inputs in (tokens, other):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # a model may draw numbers
                passes.append(model(inputs, **arguments)[0, logits].float())
        found, changed = passes
    except (Exception, SystemExit):  # code of the user's own may raise anything; training itself shows what
        return False
    if not found.numel():  # of a sequence of two or three tokens
        return False
    return apart(changed, found) > ALLOWED


def small_model(spec: ModelSpec) -> Model | None:
    """Return a model with random values on the CPU, of few blocks and tokens; None if it cannot be made small."""
    for args in _smaller(spec):
        try:
            small = spec._replace(args=args).build()
            if sum(parameter.numel() for parameter in small.parameters()) > SMALL:
                continue
            small.to_empty(device="cpu")
            small.init_buffers()
        except (Exception, SystemExit):  # code of the user's own may raise anything
            continue
        return fill(small)
    return None


def _smaller(spec: ModelSpec) -> list[Any]:
    """Return arguments of the model with its own blocks and with fewer, then of its other flavors with fewer."""
    changes = {"vocab_size": min(SMALL_VOCABULARY, spec.args.vocab_size)}
    depth = getattr(spec.args, "n_layers", 0)
    found: list[Any] = []
    for args in (spec.args, *spec.model_cls.flavors.values()):
        for blocks in [count for count in (depth, 4, 2, 1) if count <= depth] if depth else [None]:
            try:
                found.append(replace(args, **changes, **({} if blocks is None else {"n_layers": blocks})))
            except Exception:  # an impossible combination
                continue
    return found


@torch.no_grad()
def fill(model: Model) -> Model:
    """Give a model random values: matrices that keep the size of activations, and other parameters around 1.

    No value is special, as the zeros are that some layers begin with, which hide what the layer depends on.
    """
    generator = torch.Generator().manual_seed(0)
    for _, parameter in unique_parameters(model):
        mean, std = (0, parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else (1, 0.1)
        parameter.normal_(mean, std, generator=generator)
    return model.eval()


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference between logits, relative to the largest of them."""
    return float((found - expected).abs().max() / expected.abs().max())


def documents_of(lengths: Sequence[int], batch: int = 1) -> Documents:
    """Return a batch of sequences of documents of these lengths."""
    positions_BL = torch.cat([torch.arange(length) for length in lengths]).expand(batch, -1)
    ids_BL = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().expand(batch, -1)
    return Documents(positions_BL, ids_BL, torch.tensor([0, *lengths] * batch).cumsum(0).unique().int())


def takes_documents(model: Model) -> bool:
    parameters = signature(model.forward).parameters.values()
    return any(parameter.name == "documents" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
