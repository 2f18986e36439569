"""Chat templates of Hugging Face: messages -> one text, and which parts of it are answers.

A template comes with a tokenizer of others. So a process of its own renders it, `chat_render`, with limits on its time
and its memory. One process renders all chats, and a new one takes its place after one that a template has ended.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titanlite.data.tokenizer import Tokenizer, find_tokenizer
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_inside, read_small
from titanlite.tools.limited import MEMORY, SECONDS, Ended, LimitedProcess

WORKER = Path(__file__).with_name("chat_render.py")
IN_A_ROW = 3
"""Chats in a row with which a template may reach a limit. The next ones would, too."""
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
        self._seconds, self._memory = seconds, memory
        self._begin = {"template": text, "names": dict(names), "longest": longest}
        self._process: LimitedProcess | None = None
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
                self._process = LimitedProcess(WORKER, "one chat", seconds=self._seconds, memory=self._memory)
                answer = self._process.ask(self._begin)
            if request is not None:
                answer = self._process.ask(request)
            self._failed = 0
        except Ended as error:
            self._process = None
            self._failed += 1
            answer = {"error": f"fails: {error}"}
        if "error" in answer:
            error_class = UserError if self._failed == IN_A_ROW else Refused
            raise error_class(f"{self.where} {answer['error']}")
        return answer


class Refused(UserError):
    """One chat cannot be rendered; others may be."""


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
