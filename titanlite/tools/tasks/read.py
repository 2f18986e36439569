"""Tasks from files: JSON lines, each a question with its context, and its choices or its only answer.

    {"context": "1, 2, 3, 4,", "choices": ["5", "2"], "answer": 0}
    {"context": "import os\\nimport ", "answer": "sys"}

A choice follows its context after "delimiter", a space by default; an only answer follows at once. Such a file has the
scores that EleutherAI's lm-evaluation-harness (0.4.13, without examples before a question) gives the same requests;
`examples/harness_task.py` writes one for a task of it.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError, did_you_mean
from titanlite.runtime.files import read_small
from titanlite.schema import Config, Count, Name, Section
from titanlite.tasks import Answer, Question, Task
from titanlite.tools.convert.prompts import opening_ids

SHIPPED = Path(__file__).parent


class Choice(Section):
    """A line with several answers."""

    context: str
    choices: Annotated[list[Name], Field(min_length=1)]
    answer: Count
    """Number of the right one, from 0."""
    delimiter: str = " "


class Single(Section):
    """A line with one answer."""

    context: str
    answer: Name


LINES = {True: TypeAdapter(Choice), False: TypeAdapter(Single)}
"""Lines of a task, by whether they have choices."""
METRICS = {True: ["acc", "acc_norm"], False: ["acc", "perplexity"]}


def open_tasks(config: Config, tokenizer: Tokenizer) -> list[Task]:
    """Read the tasks of `[validation]`. Arguments and errors: see `read_tasks`."""
    opening = opening_ids(tokenizer, config)
    return read_tasks(config.validation.tasks, tokenizer=tokenizer, opening=opening, seq_len=config.training.seq_len)


def read_tasks(names: Sequence[str], *, tokenizer: Tokenizer, opening: Sequence[int], seq_len: int) -> list[Task]:
    """Read tasks.

    Args:
        names: files of JSON lines, or names of shipped tasks. A task has the name of its file.
        opening: tokens that begin a text.
        seq_len: tokens of the longest sequence. The beginning of longer contexts is cut off.

    Raises:
        UserError: a file is not there, or a line is no question or does not fit.
    """
    paths = [*map(_find, names)]
    titles = [path.stem for path in paths]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        raise UserError(f"two tasks are called {twice}: rename one of the files")
    encoder = partial(encode, tokenizer=tokenizer, opening=opening, seq_len=seq_len)
    return [_read(path, encoder) for path in paths]


def _find(name: str) -> Path:
    if (shipped := SHIPPED / f"{name}.jsonl").is_file() and Path(name).name == name:
        return shipped
    path = Path(name).expanduser()
    if not path.is_file():
        known = sorted(file.stem for file in SHIPPED.glob("*.jsonl"))
        raise UserError(f"no file {name}{did_you_mean(name, known)} (shipped tasks: {', '.join(known)})")
    if path.suffix in (".yaml", ".yml"):
        raise UserError(f"{name}: a task is a file of JSON lines: examples/harness_task.py writes it for this YAML")
    return path


def _read(path: Path, encoder: "partial[Answer]") -> Task:
    try:
        lines = [(number, line) for number, line in enumerate(read_small(path).splitlines(), 1) if line.strip()]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if not lines:
        raise UserError(f"{path} has no questions")
    is_choice = b'"choices"' in lines[0][1]
    questions = []
    for number, line in lines:
        try:
            question = LINES[is_choice].validate_json(line)
            if isinstance(question, Choice):
                if question.answer >= len(question.choices):
                    raise UserError(f"answer {question.answer} is none of the {len(question.choices)} choices, from 0")
                texts, right, delimiter = question.choices, question.answer, question.delimiter
            else:
                texts, right, delimiter = [question.answer], 0, ""
            answers = [encoder(question.context, delimiter + text) for text in texts]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise UserError(f"{path}:{number}: {key + ': ' if key else ''}{first['msg']}") from None
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from None
        questions.append(Question(answers, texts, right))
    return Task(path.stem, METRICS[is_choice], is_choice, questions)


def encode(context: str, answer: str, *, tokenizer: Tokenizer, opening: Sequence[int], seq_len: int) -> Answer:
    """Return the tokens of a context and an answer, as the harness makes them: the context is tokenized alone, and the
    answer has the tokens of both together that come after as many. Spaces at the end of the context belong to the
    answer. In place of an empty context stands the token that begins a document, or else the one that ends it.

    Raises:
        UserError: the answer has no tokens of its own, or does not fit into a sequence.
    """
    kept = context.rstrip()
    answer = context[len(kept) :] + answer
    if kept:
        before = [*opening, *tokenizer.encode(kept).tolist()]
        after = tokenizer.encode(kept + answer).tolist()[len(before) - len(opening) :]
    else:
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if first is None:
            raise UserError("the context is empty, and the tokenizer has no token that begins or ends a document")
        before, after = [first], tokenizer.encode(answer).tolist()
    if not after:
        raise UserError(f"the answer {answer!r} adds no token to the context")
    if len(after) > seq_len:
        raise UserError(f"an answer has {len(after):,} tokens, and a sequence {seq_len:,}")
    return Answer(np.array([*before, *after][-(seq_len + 1) :], dtype=np.int64), len(after))
