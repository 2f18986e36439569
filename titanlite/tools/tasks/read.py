"""Tasks from files: YAML in the form of EleutherAI's lm-evaluation-harness, and JSON lines with the questions.

A file gives the same requests here as in the harness (0.4.13, without examples before a question), or is refused. What
it writes in Jinja runs in a sandbox, in a process with limits on its time and memory; Python code that it names is
never run.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from pydantic import ValidationError

from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError, did_you_mean
from titanlite.runtime.files import read_small
from titanlite.schema import Config, Name, Section
from titanlite.tasks import Answer, Question, Task
from titanlite.tools.convert.prompts import opening_ids
from titanlite.tools.limited import Ended, LimitedProcess

SHIPPED = Path(__file__).parent
WORKER = SHIPPED / "questions.py"
METRICS = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes"),
    "loglikelihood": ("acc", "perplexity"),
}
"""Metrics by `output_type`. A file that names none gets all but acc_bytes."""
WITHOUT_EFFECT = {
    "task_alias", "tag", "group", "metadata", "training_split", "fewshot_split", "fewshot_config", "fewshot_delimiter",
    "should_decontaminate", "doc_to_decontamination_query",
}  # fmt: skip
"""Keys that change no score of questions without examples."""


class Metric(Section):
    metric: Name
    aggregation: str | None = None
    higher_is_better: bool | None = None


class DataFiles(Section):
    data_files: Name | list[Name] | dict[str, Name | list[Name]]


class TaskFile(Section):
    """The keys of a YAML file that are read. Any other key might change scores, and is refused."""

    task: Name | None = None
    dataset_path: Literal["json"]
    dataset_kwargs: DataFiles
    test_split: Name | None = None
    validation_split: Name | None = None
    output_type: Literal["multiple_choice", "loglikelihood"]
    description: str = ""
    doc_to_text: str
    doc_to_choice: str | list[Name] | dict[Any, Name] | None = None
    doc_to_target: str | int
    target_delimiter: str = " "
    metric_list: list[Metric] | None = None
    num_fewshot: Literal[0] | None = None
    repeats: Literal[1] | None = None


def open_tasks(config: Config, tokenizer: Tokenizer) -> list[Task]:
    """Read the tasks of `[validation]`. Arguments and errors: see `read_tasks`."""
    opening = opening_ids(tokenizer, config)
    return read_tasks(config.validation.tasks, tokenizer=tokenizer, opening=opening, seq_len=config.training.seq_len)


def read_tasks(names: Sequence[str], *, tokenizer: Tokenizer, opening: Sequence[int], seq_len: int) -> list[Task]:
    """Read tasks.

    Args:
        names: YAML files, or names of shipped tasks.
        opening: tokens that begin a text.
        seq_len: tokens of the longest sequence. The beginning of longer contexts is cut off.

    Raises:
        UserError: a package is missing, or a file is not there, is not of the form or asks for more than is read.
    """
    if missing := [package for package in ("yaml", "jinja2") if find_spec(package) is None]:
        raise UserError(f"tasks need {' and '.join(missing)}: {install_hint('tasks')}")
    files = [_Reader(_find(name)) for name in names]
    titles = [file.name for file in files]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        raise UserError(f"two tasks are called {twice}: give one another `task`")
    return [file.read(tokenizer, opening, seq_len) for file in files]


def _find(name: str) -> Path:
    if (shipped := SHIPPED / f"{name}.yaml").is_file() and Path(name).name == name:
        return shipped
    path = Path(name).expanduser()
    if not path.is_file():
        known = sorted(file.stem for file in SHIPPED.glob("*.yaml"))
        raise UserError(f"no file {name}{did_you_mean(name, known)} (shipped tasks: {', '.join(known)})")
    return path


class _Reader:
    """Reader of the files of one task.

    Raises:
        UserError: the YAML is not that of a task, or asks for more than is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = LimitedProcess(WORKER, "one question")
        self.task_file = self._read_task_file()
        self.name = self.task_file.task or path.stem
        self.is_choice = self.task_file.output_type == "multiple_choice"
        if self.is_choice and self.task_file.doc_to_choice is None:
            self._refuse("doc_to_choice is missing")
        self.metrics = [*self._metrics()]
        self.files = self._files()
        self._ask({"task": self.task_file.model_dump()}, self.path)

    def read(self, tokenizer: Tokenizer, opening: Sequence[int], seq_len: int) -> Task:
        """Return the task, with its questions as tokens.

        Raises:
            UserError: a question has no answer, or is not in the form of the task.
        """
        encoder = partial(encode, tokenizer=tokenizer, opening=opening, seq_len=seq_len)
        delimiter = self.task_file.target_delimiter if self.is_choice else ""
        questions = []
        for where, line in self._lines():
            found = self._ask({"line": line}, where)
            context, texts, right = found["context"], found["texts"], found["right"]
            try:
                questions.append(Question([encoder(context, delimiter + text) for text in texts], texts, right))
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
        if not questions:
            self._refuse(f"has no questions in {', '.join(map(str, self.files))}")
        return Task(self.name, self.metrics, self.is_choice, questions)

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(f"{self.path}: {what}")

    def _ask(self, request: dict[str, Any], where: object) -> dict[str, Any]:
        """Return the answer of the worker, which reads files that somebody else may have written.

        Raises:
            UserError: it refuses the file, or has reached one of its limits.
        """
        try:
            answer = self._process.ask(request)
        except Ended as error:
            answer = {"error": str(error)}
        if "error" in answer:
            raise UserError(f"{where}: {answer['error']}")
        return answer

    def _read_task_file(self) -> TaskFile:
        try:
            content = json.loads(self._ask({"yaml": read_small(self.path)}, self.path)["text"])
            if isinstance(content, dict):
                content = {key: value for key, value in content.items() if key not in WITHOUT_EFFECT}
            return TaskFile.model_validate(content)
        except ValidationError as error:
            first = min(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
            key = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                self._refuse(f"{key} is not read, and may change scores{did_you_mean(key, TaskFile.model_fields)}")
            self._refuse(f"{key}: {first['msg']}" + (f", got {first['input']!r:.80}" if key else ""))
        except OSError as error:
            self._refuse(str(error.strerror))
        except RecursionError:
            self._refuse("is nested too deeply")

    def _metrics(self) -> Iterator[str]:
        known = METRICS[self.task_file.output_type]
        for entry in self.task_file.metric_list or [Metric(metric=name) for name in known if name != "acc_bytes"]:
            if entry.metric not in known:
                self._refuse(f"metric {entry.metric} is not supported, only {', '.join(known)}")
            if entry.aggregation not in (None, own := "perplexity" if entry.metric == "perplexity" else "mean"):
                self._refuse(f"metric {entry.metric}: only aggregation = {own} is supported")
            yield entry.metric

    def _files(self) -> list[Path]:
        """Return the files with the questions. One that is not there from the current folder is beside the YAML."""
        split = self.task_file.test_split or self.task_file.validation_split
        given = self.task_file.dataset_kwargs.data_files
        files = given if isinstance(given, dict) else {"train": given}
        if split is None:
            self._refuse("test_split is missing: the split with the questions")
        if not (found := files.get(split)):
            self._refuse(f"dataset_kwargs.data_files has no files of the split {split}")
        names = [found] if isinstance(found, str) else found
        paths = [path if (path := Path(name)).is_file() else self.path.parent / name for name in names]
        if missing := [path for path in paths if not path.is_file()]:
            self._refuse(f"no file {missing[0]}")
        return paths

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        for path in self.files:
            for number, line in enumerate(read_small(path).splitlines(), 1):
                if line.strip():
                    yield f"{path}:{number}", line


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
