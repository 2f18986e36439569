"""Weights of a teacher, and the checks that need no process group: its model, its vocabulary, its fingerprint."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Protocol

import numpy as np
from torch.distributed.checkpoint.storage import StorageReader

from titanlite.data.tokenizer import Tokenizer
from titanlite.models.base import Model
from titanlite.models.decoder import DecoderArgs
from titanlite.models.registry import ModelSpec
from titanlite.runtime.errors import UserError
from titanlite.schema import Teacher as TeacherConfig

SHOWN = 3
"""Tokens that a message names."""


class TeacherSource(Protocol):
    """Weights of a teacher, and the model that they are of: `titanlite.tools.convert.source.Source`."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the weights; None if it is not known."""
        ...

    @property
    def where(self) -> str:
        """Path or URL of the weights, for errors."""
        ...

    @property
    def identity(self) -> str:
        """Text that differs for other weights."""
        ...

    @property
    def reader(self) -> StorageReader: ...


OpenTeacher = Callable[[str, str | None], TeacherSource]
"""(path, config): opens the weights of a teacher, as `titanlite.tools.convert.source.open_teacher` does. It raises
UserError if there are none, or if they do not describe their model."""


def teacher_model(spec: ModelSpec, *, seq_len: int) -> Model:
    """Return the teacher on the meta device, with its parameters frozen.

    Args:
        seq_len: of training, for which tables of positions are made.
    """
    if isinstance(spec.args, DecoderArgs):  # others may have parameters for each position
        spec = spec._replace(args=replace(spec.args, max_seq_len=seq_len))
    return spec.build().requires_grad_(False)


def forward_flops(spec: ModelSpec, seq_len: int, *, causal: bool = False) -> float:
    """Floating point operations of the teacher's forward pass for one token: a third of those of training it."""
    model = teacher_model(spec, seq_len=seq_len).requires_grad_(True)
    return model.flops_per_token(seq_len, causal=causal) / 3


def check_teacher(
    config: TeacherConfig,
    open_teacher: OpenTeacher | None,
    *,
    student: ModelSpec,
    tokenizer: Tokenizer | None,
    seq_len: int,
) -> TeacherSource | None:
    """Open the teacher that `[teacher]` names, if any, and check that it fits the student.

    Args:
        tokenizer: of the data. None if it is not known.

    Raises:
        UserError: there are no such weights, the vocabularies differ, or sequences are too long for the teacher.
    """
    if config.path is None:
        return None
    if open_teacher is None:
        raise UserError("teacher.path: this command reads no teacher")
    source = open_teacher(config.path, config.config)
    if source.spec.args.max_seq_len < seq_len:
        raise UserError(
            f"{source.where} has {source.spec.args.max_seq_len} positions, and training.seq_len is {seq_len}: lower it"
        )
    _check_vocabulary(source, student, tokenizer)
    return source


def _check_vocabulary(source: TeacherSource, student: ModelSpec, tokenizer: Tokenizer | None) -> None:
    theirs, ours = source.spec.args.vocab_size, student.args.vocab_size
    changed = different_tokens(source.tokenizer, tokenizer) if source.tokenizer and tokenizer else []
    problem = "" if theirs == ours else f"it has {theirs:,} tokens, and the model {ours:,}"
    if changed:
        problem += (", and " if problem else "") + f"its tokenizer is another: {'; '.join(changed)}"
    if not problem:
        return
    suggestion = (
        "take the tokenizer of the teacher for the data" if changed else f"set model.args.vocab_size = {theirs}"
    )
    raise UserError(f"{source.where} has another vocabulary: {problem}. Both must be the same: {suggestion}")


def different_tokens(theirs: Tokenizer, ours: Tokenizer) -> list[str]:
    """Return words for the first ids that stand for another text in another tokenizer, and for their number.

    Two files of one tokenizer, such as a rank file and a tokenizer.json, have no different tokens.
    """
    if theirs.fingerprint == ours.fingerprint:
        return []
    both = min(theirs.vocab_size, ours.vocab_size)
    texts = [(theirs.decode(np.array([i])), ours.decode(np.array([i]))) for i in range(both)]
    sizes = zip(theirs.token_bytes()[:both], ours.token_bytes()[:both], strict=True)
    changed = [i for i, (pair, (a, b)) in enumerate(zip(texts, sizes, strict=True)) if pair[0] != pair[1] or a != b]
    words = [f"{i} is {texts[i][0]!r:.40}, here {texts[i][1]!r:.40}" for i in changed[:SHOWN]]
    words += [f"{len(changed):,} of {both:,} differ"] if len(changed) > SHOWN else []
    if theirs.vocab_size != ours.vocab_size:
        words.append(f"{theirs.vocab_size:,} tokens, here {ours.vocab_size:,}")
    return words


def fingerprint(source: TeacherSource) -> str:
    """Return a hash of the teacher's weights and of its model's arguments."""
    args = {name: value for name, value in asdict(source.spec.args).items() if name != "max_seq_len"}
    text = f"{source.spec.model_cls.__name__} {sorted(args.items())} {source.identity}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
