"""A decoder of transformers is compared with transformers' own forward, at a small size, before it is trained.

titanlite computes the attention, the masks, the head and the buffers of such a decoder itself. What else a class does
is known to its own forward alone, so that the logits of both are compared, and no list of options is kept.
"""

# ruff: noqa: SLF001 (the model of transformers that ours computes with)

import re
from collections.abc import Mapping
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig

from titanlite.models.base import build_on_meta, unique_parameters
from titanlite.models.registry import ModelSpec
from titanlite.models.transformers import Transformers, decoder_class, own_name
from titanlite.models.trial import ALLOWED, SMALL, apart, documents_of, fill
from titanlite.parallelize.materialize import allocate, set_dtype
from titanlite.runtime.errors import ConfigError, Problem

CPU = torch.device("cpu")
SCALES = (16, 32, 8, 4, 2, 1)
"""Divisors of the dims, in the order in which they are tried: some configs do not fit small dims."""
LEAST_WIDTH = 32
MOST_BLOCKS = 8
MOST_EXPERTS = 16
VOCABULARY = 128
WINDOW = 6
"""Tokens of a window or a chunk."""
LENGTHS = (5, 40)
"""Tokens of the sequences: within every window, and beyond."""
LIMIT = 20
"""Tokens from which on positions are computed otherwise, where that is less than the tokens of a trained sequence."""
# Names of numbers in configs: what each family calls its dims, windows and layers.
IS_DIM = re.compile(r"(size|dim|rank|width|inner)s?$|(^|_)(d_[a-z]+|n_embd)$")
IS_OF_HEAD = re.compile("head|rope")
IS_NONE = re.compile("kernel|conv|block|patch|image|batch|vocab|position")
IS_WINDOW = re.compile("window|chunk")
IS_LIMIT = re.compile("max_position_embeddings")
"""Beyond these, some rotary positions depend on the length of the longest sequence (`dynamic`, `longrope`)."""
IS_DEPTH = re.compile("^(num|n)_(hidden_)?layers?$")
IS_EXPERTS = re.compile("experts$")
IS_PERIOD = re.compile("first|interval|period|freq|pattern|every|step|offset")


class _OtherSize(ValueError):
    """A config fits no such size, or is too large at it."""


def check_forward(spec: ModelSpec, *, with_documents: bool, seq_len: int = 0) -> None:
    """Compare the logits of a decoder at a small size with those of transformers' own forward.

    Args:
        with_documents: compare the logits of documents in one sequence, too. They are those of each alone.
        seq_len: tokens of the sequences in training.

    Raises:
        ConfigError: they differ, or one of them cannot be computed.
    """
    name, reason = spec.model_cls.__name__, ""
    for is_deep, scale in product((False, True), SCALES):  # all blocks where few are no valid config
        try:
            ours = small_decoder(spec, scale, is_deep=is_deep, seq_len=seq_len)
            tokens = [_tokens(length, ours.args.vocab_size) for length in LENGTHS]
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                theirs = _own(ours)
                expected = [theirs(input_ids=sequence, use_cache=False).logits for sequence in tokens]
        except Exception as error:  # whatever the checks of a config and its layers raise
            if not (isinstance(error, _OtherSize) and reason):
                reason = _line(error)
            continue
        break
    else:
        raise ConfigError([Problem("model.path", f"{name} cannot be tried at a small size: {reason}")])
    for sequence, logits in zip(tokens, expected, strict=True):
        if problem := _difference(ours, sequence, logits):
            text = f"{name} does not compute what transformers does: at a small size, {problem}"
            raise ConfigError([Problem("model.path", text)])
    if with_documents:
        together, alone = torch.cat(tokens, 1), torch.cat(expected, 1)
        if problem := _difference(ours, together, alone, documents=documents_of(LENGTHS, len(together))):
            limits = _limits(cast(type[Transformers], spec.model_cls).config_of(spec.args).to_dict(), seq_len)
            further = f", or training.seq_len to {min(limits)}" if limits else ""
            text = f"{name} does not keep documents apart: at a small size, {problem}. Set it to false{further}"
            raise ConfigError([Problem("data.document_mask", text)])


def _difference(ours: Transformers, tokens: Tensor, expected: Tensor, **options: Any) -> str:
    """Return what is wrong with the logits of some tokens; nothing if they are right."""
    try:
        with torch.no_grad():
            difference = apart(ours(tokens, **options), expected)
    except Exception as error:  # whatever layers raise
        return _line(error)
    if difference < ALLOWED:
        return ""
    return f"logits of {tokens.shape[1]} tokens differ by {difference:.1e} of the largest"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


@torch.no_grad()
def small_decoder(spec: ModelSpec, scale: int, *, is_deep: bool = False, seq_len: int = 0) -> Transformers:
    """Return a decoder on the CPU that has few blocks of each kind, dims divided by scale, and random values.

    Args:
        is_deep: keep all blocks.
        seq_len: tokens of the sequences in training; what begins before their end begins in the trial, too.

    Raises:
        Exception: whatever transformers raises for a config that fits no such size.
    """
    config = cast(type[Transformers], spec.model_cls).config_of(spec.args)
    model_cls = decoder_class(_smaller(config, scale, is_deep=is_deep, seq_len=seq_len))
    model = build_on_meta(model_cls, next(iter(model_cls.flavors.values())))
    if (size := sum(parameter.numel() for _, parameter in unique_parameters(model))) > SMALL:
        raise _OtherSize(f"{size:,} parameters")
    set_dtype(model, torch.float32)
    allocate(model, CPU, CPU)
    return cast(Transformers, fill(model))


def _own(ours: Transformers) -> Any:
    """Return the model of transformers with the same weights, and the attention and the buffers of its own."""
    whole = ours._whole
    config = type(whole.config)(**whole.config.to_dict())  # or ours would have the other attention, too
    theirs = type(whole)._from_config(config, attn_implementation="eager").float().eval()
    values = dict(ours.named_parameters(remove_duplicate=False))
    for name, parameter in theirs.named_parameters():
        parameter.copy_(values[own_name(theirs, name)])
    return theirs


def _tokens(length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(length))


def _limits(settings: Mapping[str, Any], seq_len: int) -> list[int]:
    """Return the lengths in a config that sequences exceed and from which on positions are computed otherwise."""
    nested = [_limits(value, seq_len) for value in settings.values() if isinstance(value, Mapping)]
    own = [value for name, value in settings.items() if _is_exceeded(name, value, seq_len)]
    return [*own, *(limit for limits in nested for limit in limits)]


def _is_exceeded(name: str, value: Any, seq_len: int) -> bool:
    return type(value) in (int, float) and bool(IS_LIMIT.search(name)) and 0 < value < seq_len


def _smaller(config: PretrainedConfig, scale: int, *, is_deep: bool, seq_len: int) -> dict[str, Any]:
    settings, depth = config.to_dict(), config.num_hidden_layers
    if scale > 1 and config.hidden_size < LEAST_WIDTH * scale:
        raise _OtherSize(f"hidden_size of {config.hidden_size} is too small to be divided by {scale}")
    needed, active = [2], [MOST_EXPERTS // 2]
    for name, value in settings.items():
        if isinstance(value, list) and len(value) == depth:
            needed.append(1 + max(value.index(kind) for kind in value))
        elif type(value) is int and IS_PERIOD.search(name):
            needed.append(value + 1)
        elif type(value) is int and "per_tok" in name:
            active.append(value)
    blocks = depth if is_deep else min(max(needed), depth, MOST_BLOCKS)
    vocabulary = min(VOCABULARY, settings["vocab_size"])

    def smaller(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: smaller(key, item) for key, item in value.items()}
        if isinstance(value, list):
            return [smaller(name, item) for item in (value[:blocks] if len(value) == depth else value)]
        if _is_exceeded(name, value, seq_len):
            return type(value)(min(value, LIMIT))
        if type(value) is not int:
            return value
        if "vocab" in name or name.endswith("token_id"):
            return min(value, vocabulary if "vocab" in name else vocabulary - 1)
        if IS_WINDOW.search(name):
            return min(value, WINDOW)
        if IS_EXPERTS.search(name):
            return min(value, 2 * max(active))
        if IS_DEPTH.search(name):
            return min(value, blocks)
        if (IS_DIM.search(name) and not IS_NONE.search(name)) or name == "mrope_section":
            if scale > 1 and IS_OF_HEAD.search(name) and value % (2 * scale):
                raise _OtherSize(f"{name} of {value} cannot be divided by {scale}")  # halves of a head are rotated
            return max(value // scale, 1)
        return value

    return {name: smaller(name, value) for name, value in settings.items()}
