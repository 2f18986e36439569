"""Chat templates of Hugging Face: messages -> one text, and which parts of it are answers.

A template comes with a tokenizer of others. So a process of its own renders it, `chat_render`, with limits on its time
and its memory. One process renders all chats, and a new one takes its place after one that a template has ended.
"""

import json
import multiprocessing
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from titanlite.data.tokenizer import Tokenizer, find_tokenizer
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_inside, read_small

PROGRAM = Path(__file__).with_name("chat_render.py")
OUT_OF_MEMORY = 3
"""Exit code of the program that has reached its limit of memory."""
SECONDS = 3.0
"""Processor time that a template may take for one chat."""
IN_A_ROW = 3
"""Chats in a row with which a template may reach a limit. The next ones would, too."""
WAIT = 120.0
"""Seconds after which a process that does not answer, and takes no processor time either, is ended."""
MEMORY = 2**29
"""Bytes that a template may take, on Linux."""
LONGEST = 2**25
"""Characters of the longest text of one chat."""
Span = tuple[int, int]
"""Begin and end of a part of a text, in characters."""
Rendered = tuple[str, list[Span]]
"""Text of a chat, and the answers in it."""


class ChatTemplate:
    """A template, in the environment that transformers gives it.

    Args:
        where: place of the template, for errors.
        names: values of bos_token, eos_token and the like in the template.
        seconds, memory, longest: limits of one chat, see the constants.

    Raises:
        UserError: the text is not a template.
    """

    def __init__(
        self,
        text: str,
        *,
        where: object,
        names: Mapping[str, str],
        seconds: float = SECONDS,
        memory: int = MEMORY,
        longest: int = LONGEST,
    ) -> None:
        self.where = where
        self._limits = seconds, memory, longest
        self._begin = {"template": text, "names": dict(names)}
        self._process: _Process | None = None
        self._failed = 0
        self.has_marks: bool = self._ask(None)["has_marks"]
        """Presence of marks around answers."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> Rendered:
        """Return the text of a chat, and the parts that the template marks.

        Args:
            tools: JSON schemas of functions that the assistant may call.
            add_generation_prompt: end with the beginning of the assistant's next message.

        Raises:
            Refused: the template refuses these messages, or takes too much time or memory for them.
            UserError: it has taken too much for several chats in a row.
        """
        same = {"documents": None, "add_generation_prompt": add_generation_prompt}
        found = self._ask({"messages": messages, "tools": tools, **same})
        return found["text"], [(begin, end) for begin, end in found["spans"]]

    def _ask(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """Return the answer of the process, which is started if there is none; None asks for nothing else."""
        answer: dict[str, Any] = {}
        try:
            if self._process is None:
                self._process = _Process(*self._limits)
                answer = self._process.ask(self._begin)
            if request is not None:
                answer = self._process.ask(request)
            self._failed = 0
        except _Ended as error:
            self._process = None
            self._failed += 1
            answer = {"error": f"fails: {error}"}
        if "error" in answer:
            error_class = UserError if self._failed == IN_A_ROW else Refused
            raise error_class(f"{self.where} {answer['error']}")
        return answer


class Refused(UserError):
    """One chat cannot be rendered; others may be."""


class _Ended(Exception):
    """The process has ended, with the reason."""


class _Process:
    """The program `chat_render`. It ends when nothing refers to this object any more."""

    def __init__(self, seconds: float, memory: int, longest: int) -> None:
        here, there = multiprocessing.Pipe()
        self._connection, self._limits = here, (seconds, memory)
        words = [sys.executable, "-P", PROGRAM, there.fileno(), seconds, memory, longest]
        self._process = subprocess.Popen(
            [*map(str, words)],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is for this process
        )
        there.close()
        self._end = weakref.finalize(self, _end, self._process, here)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and return the answer.

        Raises:
            _Ended: the process has reached one of its limits.
        """
        try:
            self._connection.send(request)
            if self._connection.poll(WAIT):
                return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._process.wait()
        code = self._process.poll()
        self._end()
        seconds, memory = self._limits
        if code is None:
            raise _Ended(f"the process that renders it has not answered for {WAIT:g} s")
        if code == OUT_OF_MEMORY:
            raise _Ended(f"it takes more than {memory / 2**20:,.0f} MiB for one chat")
        if code == -signal.SIGPROF:
            raise _Ended(f"it takes more than {seconds:g} s of processor time for one chat")
        raise _Ended(f"the process that renders it has ended (exit code {code})")


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


# Templates of tokenizers


CONFIG = "tokenizer_config.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a template may name."""
Message = dict[str, str]
"""A turn: `role` (system, user or assistant) and `content`."""


class Chat:
    """Chat template of a tokenizer: chat_template.jinja, or `chat_template` of tokenizer_config.json.

    Raises:
        UserError: there is none, or jinja2 is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        where, text = find_template(tokenizer)
        self._template = open_template(text, tokenizer, where=where)

    def encode(self, messages: list[Message]) -> list[int]:
        """Return the token ids of a chat, up to where the assistant's answer begins.

        Raises:
            UserError: the template refuses these messages.
        """
        text, _ = self._template.render(messages, add_generation_prompt=True)
        from titanlite.data.tokenizers.huggingface import HuggingFaceTokenizer

        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        return self.tokenizer.encode_marked(text).ids


def find_template(tokenizer: Tokenizer) -> tuple[Path, str]:
    """Return the file of a tokenizer's chat template, and its text.

    Raises:
        UserError: there is none.
    """
    folder = _folder(tokenizer)
    if folder is None:
        raise UserError(f"the tokenizer {tokenizer.name} has no chat template: that needs a tokenizer.json")
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file, read_small(file_inside(folder, file.name)).decode(errors="replace")
    found = read_json(folder / CONFIG).get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((it.get("template") for it in found if isinstance(it, dict) and it.get("name") == "default"), None)
    if not isinstance(found, str):
        raise UserError(f"{folder} has no chat template (chat_template.jinja, or in tokenizer_config.json)")
    return folder / CONFIG, found


def open_template(text: str, tokenizer: Tokenizer, *, where: object) -> ChatTemplate:
    """Return a template with the names of a tokenizer's special tokens.

    Args:
        where: place of the template, for errors.

    Raises:
        UserError: the text is not a template, or jinja2 is not installed.
    """
    if find_spec("jinja2") is None:
        raise UserError("chats need jinja2: pip install jinja2")
    folder = _folder(tokenizer)
    config = read_json(folder / CONFIG) if folder else {}
    names = {key: name for key in SPECIAL if (name := _text(config.get(key)))}
    return ChatTemplate(text, where=where, names=names)


def _folder(tokenizer: Tokenizer) -> Path | None:
    """Return the folder of a tokenizer.json; None for other tokenizers."""
    path = find_tokenizer(tokenizer.name)
    return None if path is None or path.suffix != ".json" else path.parent


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; nothing if there is no such file, or if it is none.

    Raises:
        UserError: it is a link that leads out of its folder.
    """
    path = file_inside(path.parent, path.name)
    try:
        content = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _text(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token or "")
