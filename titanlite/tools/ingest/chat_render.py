"""Worker that renders chat templates of others: messages -> text. Needs jinja2.

`limited_program` runs it by its path, within limits, and nothing else imports it.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around an answer, within a text that is being made. They are no characters of Unicode."""
SHOWN = 400
"""Characters of a template's error message that are kept."""


class _Generation(Extension):
    """The block `{% generation %} ... {% endgeneration %}`: an answer of the assistant."""

    tags = {"generation"}  # noqa: RUF012
    found = False
    """Presence of such a block in the template."""

    def parse(self, parser: Parser) -> nodes.Node:
        self.found = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Macro) -> str:
        return f"{BEGIN}{caller()}{END}"


def compiled(text: str) -> tuple[Template, bool]:
    """Return a template in the environment that transformers gives it, and whether it marks answers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _today
    template = environment.from_string(text)
    [generation] = [it for it in environment.extensions.values() if isinstance(it, _Generation)]
    return template, generation.found


def _to_json(value: Any, indent: int | None = None, separators: Any = None, *, sort_keys: bool = False) -> str:
    """Return JSON without jinja2's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _today(form: str) -> str:
    return datetime.now().strftime(form)


def rendered(template: Template, variables: dict[str, Any], *, most: int) -> dict[str, Any]:
    """Return the text of a chat, and the begin and end of each answer in it.

    Args:
        most: characters of the longest text.
    """
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        if (length := length + len(piece)) > most:
            raise TemplateError(f"the text of one chat has more than {most:,} characters")
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for number, part in enumerate("".join(pieces).split(BEGIN)):
        answer, mark, rest = part.partition(END)
        if (mark != "") != (number > 0) or END in rest:
            raise TemplateError("a chat message has the character U+FDD0 or U+FDD1")
        if number:
            spans.append((length, length + len(answer)))
        parts.append(answer + rest)
        length += len(parts[-1])
    return {"text": "".join(parts), "spans": spans}


def _in_words(error: Exception) -> str:
    """Return an exception on one line, without what a terminal would take for a command."""
    text = str(error) if isinstance(error, TemplateError | TypeError) else f"{type(error).__name__}: {error}"
    return " ".join("".join(char if char.isprintable() else " " for char in text[:SHOWN]).split())


class Worker:
    """Compiles the template of the first request, and renders the chats of the others."""

    def __init__(self) -> None:
        self._template: Template | None = None
        self._names: dict[str, str] = {}
        self._longest = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        what = "is not a template" if self._template is None else "fails"
        try:
            if self._template is not None:
                return rendered(self._template, {**request, **self._names}, most=self._longest)
            self._names, self._longest = request["names"], request["longest"]
            self._template, has_marks = compiled(request["template"])
            return {"has_marks": has_marks}
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            return {"error": f"{what}: {_in_words(error)}"}
