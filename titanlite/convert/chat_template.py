"""Chat templates of Hugging Face: messages -> one text, and which parts of it are answers. Needs jinja2."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titanlite.runtime.errors import UserError

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around an answer, within a text that is being made. They are no characters of Unicode."""
Span = tuple[int, int]
"""Begin and end of a part of a text, in characters."""


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


class ChatTemplate:
    """A template, in the environment that transformers gives it.

    Args:
        where: place of the template, for errors.
        names: values of bos_token, eos_token and the like in the template.

    Raises:
        UserError: the text is not a template.
    """

    def __init__(self, text: str, *, where: object, names: Mapping[str, str]) -> None:
        self.where, self._names = where, names
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _today
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise UserError(f"--chat: {where} is not a template: {error}") from None
        [generation] = [it for it in environment.extensions.values() if isinstance(it, _Generation)]
        self.has_marks = generation.found
        """Presence of marks around answers."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of a chat, and the parts that the template marks.

        Args:
            tools: JSON schemas of functions that the assistant may call.
            add_generation_prompt: end with the beginning of the assistant's next message.

        Raises:
            UserError: the template refuses these messages.
        """
        try:
            marked = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
                **self._names,
            )  # fmt: skip
        except (TemplateError, TypeError) as error:
            raise UserError(f"--chat: {self.where} fails: {error}") from None
        parts, spans, length = [], [], 0
        for number, part in enumerate(marked.split(BEGIN)):
            answer, mark, rest = part.partition(END)
            if (mark != "") != (number > 0) or END in rest:
                raise UserError(f"--chat: {self.where} fails: a chat message has the character U+FDD0 or U+FDD1")
            if number:
                spans.append((length, length + len(answer)))
            parts.append(answer + rest)
            length += len(parts[-1])
        return "".join(parts), spans


def _to_json(value: Any, indent: int | None = None, separators: Any = None, *, sort_keys: bool = False) -> str:
    """Return JSON without jinja2's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _today(form: str) -> str:
    return datetime.now().strftime(form)
