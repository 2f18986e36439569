"""Program that renders chat templates of others: it reads messages from a pipe, and writes the text. Needs jinja2.

`chat_template` starts it by its path, and nothing else imports it. A template is a program in a sandbox that keeps it
from files and from code, but not from endless loops and strings without end. So it gets limits on its processor time,
its memory and its text here, and ends alone.
"""

import json
import os
import resource
import signal
import sys
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around an answer, within a text that is being made. They are no characters of Unicode."""
OUT_OF_MEMORY = 3
"""Exit code of a process that has reached its limit of memory."""
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


def _limit_memory(more: int) -> None:
    """Limit the memory of this process to what it has, and more bytes."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class _Renderer:
    """Compiles the template of the first request, and renders the chats of the others.

    Args:
        seconds: processor time of one chat. SIGPROF ends this process where it takes more.
        most: characters of the longest text.
    """

    def __init__(self, *, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._template: Template | None = None
        self._names: dict[str, str] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        what = "is not a template" if self._template is None else "fails"
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        try:
            if self._template is not None:
                return rendered(self._template, {**request, **self._names}, most=self._most)
            self._names = request["names"]
            self._template, has_marks = compiled(request["template"])
            return {"has_marks": has_marks}
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            return {"error": f"{what}: {_in_words(error)}"}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def main(descriptor: int, *, seconds: float, memory: int, most: int) -> None:
    """Answer the requests of a pipe until it ends.

    Args:
        descriptor: of the pipe.
        memory: bytes, beside those of the program itself.
        seconds, most: see `_Renderer`.
    """
    connection = Connection(descriptor)
    renderer = _Renderer(seconds=seconds, most=most)
    _limit_memory(memory)
    while True:
        try:
            answer = renderer.answer(connection.recv())
            connection.send_bytes(json.dumps(answer).encode())
        except (EOFError, OSError):
            return
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main(int(sys.argv[1]), seconds=float(sys.argv[2]), memory=int(sys.argv[3]), most=int(sys.argv[4]))
