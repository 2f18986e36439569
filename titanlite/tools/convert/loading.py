"""Parts that `generate` and `evaluate` share: the tokenizer of a source, and the default dtype."""

import sys

import torch

from titanlite.data.tokenizer import Tokenizer
from titanlite.models.registry import vocab_size_for
from titanlite.runtime.errors import UserError
from titanlite.tools.convert.source import Source


def note(line: str) -> None:
    """Print a line for people: on standard error, because standard output has results only."""
    print(line, file=sys.stderr, flush=True)


def tokenizer_of(source: Source) -> Tokenizer:
    """Return the tokenizer of a source, with a warning if its size is not the one that the model was made for.

    Raises:
        UserError: the tokenizer is not there, or has more tokens than the model.
    """
    if source.tokenizer is None:
        reason = f": {source.no_tokenizer}; or" if source.no_tokenizer else " is not on this machine:"
        raise UserError(f"{source.where}: its tokenizer{reason} name one with --tokenizer")
    name, tokens, entries = source.tokenizer.name, source.tokenizer.vocab_size, source.spec.args.vocab_size
    if tokens > entries:
        raise UserError(
            f"the tokenizer {name} has {tokens:,} tokens, and the model of {source.where} only {entries:,}: name that "
            "of the training with --tokenizer"
        )
    if vocab_size_for(tokens, entries) != entries:
        note(
            f"warning: the tokenizer {name} has {tokens:,} tokens, and the model {entries:,}: is it that of the "
            "training?"
        )
    return source.tokenizer


def default_dtype(device: torch.device) -> str:
    """Return the dtype in which a device computes well."""
    return "float32" if device.type == "cpu" else "bfloat16"
