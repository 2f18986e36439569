"""Worker that reads the files of a task: YAML and JSON lines -> questions. Needs yaml and jinja2.

`limited_program` runs it by its path, within limits, and nothing else imports it.
"""

import ast
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml
from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 2**25
"""Characters of the longest question with its answers."""


class Refused(ValueError):
    """Is raised with the reason why a question cannot be read."""


class Worker:
    """Parses the YAML of a task in the first request, gets it back validated in the second one, and makes a question of
    the line in each further one."""

    def __init__(self) -> None:
        self._task: dict[str, Any] = {}
        jinja = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        jinja.filters["regex_replace"] = _regex_replace
        self._template = cache(jinja.from_string)  # compiled once, not for each question

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            match request:
                case {"yaml": text}:
                    return {"text": json.dumps(yaml.safe_load(text), default=str)}
                case {"task": task}:
                    self._task = task
                    return {}
                case _:
                    context, texts, right = self._question(_document(request["line"]))
                    if (length := len(context) + sum(map(len, texts))) > LONGEST:
                        raise Refused(f"has {length:,} characters, and {LONGEST:,} are read at most")
                    return {"context": context, "texts": texts, "right": right}
        except MemoryError:
            raise
        except yaml.MarkedYAMLError as error:
            line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
            return {"error": f"{line}{error.problem or error.context}"}
        except Exception as error:  # a template may raise anything
            reason = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            return {"error": " ".join(reason.split())}

    def _value(self, key: str, document: Mapping[str, Any]) -> Any:
        """Return what a key gives for a document: a column, or a rendered template, whose digits are a number."""
        value = self._task[key]
        if not isinstance(value, str):
            return value
        if value in document:
            return document[value]
        text = self._template(value).render(**document)
        if key == "doc_to_choice":
            return ast.literal_eval(text)
        return int(text) if text.isdigit() and self._task["doc_to_choice"] is not None else text

    def _question(self, document: Mapping[str, Any]) -> tuple[str, list[str], int]:
        """Return the context, the answers, and the number of the right one.

        Raises:
            Refused: there is none.
        """
        context, target = self._value("doc_to_text", document), self._value("doc_to_target", document)
        if not isinstance(context, str):
            raise Refused(f"doc_to_text gives {context!r}, not a text")
        context = str(self._value("description", document)) + context
        if self._task["output_type"] != "multiple_choice":
            if not isinstance(target, str) or not target:
                raise Refused(f"has no answer: doc_to_target gives {target!r}")
            return context, [target], 0
        choices = self._value("doc_to_choice", document)
        texts = [*choices.values()] if isinstance(self._task["doc_to_choice"], dict) else choices
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise Refused(f"doc_to_choice gives {texts!r}, not a list of texts")
        right = texts.index(target) if isinstance(target, str) and target in texts else target
        if not isinstance(right, int) or not 0 <= right < len(texts):
            raise Refused(f"has no answer: doc_to_target gives {target!r}, and there are {len(texts)} choices")
        return context, texts, int(right)


def _document(line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise Refused("not an object of JSON")
    return document


def _regex_replace(text: str, pattern: str, repl: str, count: int = 0) -> str:
    return re.compile(pattern).sub(repl, text, count=count)
