"""Weights of a teacher, and the checks that need no process group: its model, its vocabulary, its fingerprint."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np

from titanlite.data.tokenizer import Tokenizer
from titanlite.models.frozen import FrozenModel, ModelWeights, OpenModel
from titanlite.models.registry import ModelSpec
from titanlite.models.trial import check_documents
from titanlite.runtime.errors import UserError
from titanlite.schema import Config
from titanlite.techniques.distill.teacher import Teacher
from titanlite.techniques.technique import Attempt

SHOWN = 3
"""Tokens that a message names."""


def check_and_open_teacher(
    config: Config, *, student: ModelSpec, tokenizer: Tokenizer | None, open_model: OpenModel | None, attempt: Attempt
) -> Teacher | None:
    """Return the teacher that `[teacher]` names; None if a problem was reported.

    Args:
        tokenizer: of the data. None if it is not known.
    """
    open_weights = partial(open_teacher, config, student=student, tokenizer=tokenizer, open_model=open_model)
    teacher = attempt("teacher.path", ["teacher", "distill", "training.seq_len"], open_weights)
    if teacher and config.data.document_mask:
        build = partial(teacher.frozen.build, config.training.seq_len)
        attempt("teacher.path", ["data.document_mask"], lambda: check_documents(build()))
    return teacher


def open_teacher(
    config: Config, *, student: ModelSpec, tokenizer: Tokenizer | None, open_model: OpenModel | None
) -> Teacher:
    """Open the weights that `[teacher]` names, and check that they fit the student.

    Args:
        tokenizer: of the data. None if it is not known.

    Raises:
        UserError: there are no such weights, the vocabularies differ, or sequences are too long for the teacher.
    """
    teacher, seq_len = config.teacher, config.training.seq_len
    if open_model is None:
        raise UserError("teacher.path: this command reads no teacher")
    weights = open_model(str(teacher.path), teacher.config, "teacher")
    if (most := weights.spec.args.max_seq_len) < seq_len:
        raise UserError(f"{weights.where} has {most} positions, and training.seq_len is {seq_len}: lower it")
    _check_vocabulary(weights, student, tokenizer)
    frozen = frozen_teacher(config, weights.spec, weights)
    return Teacher(frozen, config.distill, fingerprint=fingerprint(weights))


def planned_teacher(config: Config, *, read_spec: Callable[[str, str | None, str], ModelSpec]) -> Teacher:
    """Return the teacher for a plan, whose weights need not be there.

    Args:
        read_spec: (path, config, section) -> the model of weights.
    """
    teacher = config.teacher
    spec = read_spec(str(teacher.path), teacher.config, "teacher")
    return Teacher(frozen_teacher(config, spec, None), config.distill, fingerprint="")


def frozen_teacher(config: Config, spec: ModelSpec, weights: ModelWeights | None) -> FrozenModel:
    """Return the teacher as `[teacher]` asks for it.

    Args:
        weights: None in a plan.
    """
    teacher = config.teacher
    return FrozenModel(
        section="teacher",
        spec=spec,
        weights=weights,
        dtype=teacher.dtype or config.training.mixed_precision_param,
        is_on_host=teacher.enable_cpu_offload,
    )


def _check_vocabulary(source: ModelWeights, student: ModelSpec, tokenizer: Tokenizer | None) -> None:
    theirs, ours = source.spec.args.vocab_size, student.args.vocab_size
    changed = different_tokens(source.tokenizer, tokenizer) if source.tokenizer and tokenizer else []
    is_padded = source.tokenizer and tokenizer and tokenizer.vocab_size <= min(theirs, ours)
    problem = "" if theirs == ours or is_padded else f"it has {theirs:,} tokens, and the model {ours:,}"
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


def fingerprint(source: ModelWeights) -> str:
    """Return a hash of the teacher's weights and of its model's arguments."""
    args = {name: value for name, value in asdict(source.spec.args).items() if name != "max_seq_len"}
    text = f"{source.spec.model_cls.__name__} {sorted(args.items())} {source.identity}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
