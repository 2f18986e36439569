"""Chat templates of Hugging Face: messages -> one text, and which parts of it are answers, as transformers has them.

A template comes with a tokenizer of others. So a process of its own renders it, `chat_render`, with limits on its time
and its memory. One process renders all chats, and a new one takes its place after one that a template has ended.
"""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titanlite.data.tokenizer import Tokenizer, find_tokenizer
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_inside, read_small
from titanlite.tools.limited import MEMORY, SECONDS, Ended, LimitedProcess

WORKER = Path(__file__).with_name("chat_render.py")
IN_A_ROW = 3
"""Chats in a row with which a template may reach a limit. The next ones would, too."""
LONGEST = 2**25
"""Characters of the longest text of one chat."""
DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names of a tokenizer's templates: for all chats, and for those with tools if there is one."""
Templates = dict[str, str]
"""Texts of templates by these names."""
Span = tuple[int, int]
"""Begin and end of a part of a text, in characters."""
Rendered = tuple[str, list[Span]]
"""Text of a chat, and the answers in it."""


class ChatTemplate:
    """The templates of a tokenizer.

    Args:
        where: place of the templates, for errors.
        names: values of bos_token, eos_token and the like in the templates.
        seconds, memory, longest: limits of one chat, see the constants.

    Raises:
        UserError: a text is not a template, or transformers is not installed.
    """

    def __init__(
        self,
        texts: Templates,
        *,
        where: object,
        names: Mapping[str, str],
        seconds: float = SECONDS,
        memory: int = MEMORY,
        longest: int = LONGEST,
    ) -> None:
        if find_spec("transformers") is None:
            raise UserError(f"chats need transformers: {install_hint('transformers')}")
        self.where = where
        self._texts = texts
        self._limits = {"seconds": seconds, "memory": memory}
        self._same = {**names, "longest": longest}
        self._process: LimitedProcess | None = None
        self._failed = 0
        self.has_marks = any(re.search(r"{%[-+]?\s*generation\b", text) for text in texts.values())
        """Presence of marks around answers."""
        self._ask(DEFAULT if DEFAULT in texts else FOR_TOOLS, "is not a template", conversations=[])

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> Rendered:
        """Return the text of a chat, and the parts that the template marks.

        Args:
            messages: as for transformers' `apply_chat_template`.
            tools: JSON schemas of functions that the assistant may call.
            add_generation_prompt: end with the beginning of the assistant's next message.

        Raises:
            Refused: the template refuses these messages, or takes too much time or memory for them.
            UserError: it has taken too much for several chats in a row.
        """
        name = FOR_TOOLS if tools is not None and FOR_TOOLS in self._texts else DEFAULT
        if name not in self._texts:
            raise Refused(f"{self.where} has no template {DEFAULT!r} for chats without tools")
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        found = self._ask(name, "fails", conversations=[chat], **options)
        [text], [spans] = found["texts"], found["spans"]
        return text, [(begin, end) for begin, end in spans]

    def _ask(self, name: str, problem: str, **request: Any) -> dict[str, Any]:
        """Return the answer of the process, which is started if there is none.

        Args:
            name: of the template.
            problem: what is said of a template that raises an error.
        """
        try:
            if self._process is None:
                self._process = LimitedProcess(WORKER, "one chat", **self._limits)
            answer = self._process.ask({**request, **self._same, "chat_template": self._texts[name]})
            self._failed = 0
        except Ended as error:
            self._process = None
            self._failed += 1
            answer, problem = {"error": error}, "fails"
        except RecursionError:  # the request cannot be sent
            answer = {"error": "the chat is nested too deeply"}
        if "error" in answer:
            error_class = UserError if self._failed == IN_A_ROW else Refused
            place = self.where if name == DEFAULT else f"{self.where}: {name}"
            raise error_class(f"{place} {problem}: {answer['error']}")
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
    """Chat template of a tokenizer, see `find_templates`.

    Raises:
        UserError: there is none, or transformers is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        where, texts = find_templates(tokenizer)
        self._template = open_template(texts, tokenizer, where=where)

    def encode(self, messages: list[Message]) -> list[int]:
        """Return the token ids of a chat, up to where the assistant's answer begins.

        Raises:
            UserError: the template refuses these messages.
        """
        text, _ = self._template.render(messages, add_generation_prompt=True)
        from titanlite.data.tokenizers.huggingface import HuggingFaceTokenizer

        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        return self.tokenizer.encode_marked(text).ids


def find_templates(tokenizer: Tokenizer) -> tuple[Path, Templates]:
    """Return the place of a tokenizer's chat templates, and their texts, as transformers finds them.

    They are the files chat_template.jinja and additional_chat_templates/NAME.jinja, or else `chat_template` of
    tokenizer_config.json: one text, or several by name.

    Raises:
        UserError: there is none.
    """
    folder = _folder(tokenizer)
    if folder is None:
        raise UserError(f"the tokenizer {tokenizer.name} has no chat template: that needs a tokenizer.json")
    more = file_inside(folder, "additional_chat_templates")
    files = {name: file_inside(more, f"{name}.jinja") for name in sorted(it.stem for it in more.glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        files[DEFAULT] = files.get(DEFAULT) or file_inside(folder, file.name)
    where, found = folder / CONFIG, read_json(folder / CONFIG).get("chat_template")
    if files:
        where = file if [*files] == [DEFAULT] else folder
        found = {name: read_small(file).decode(errors="replace") for name, file in files.items()}
    elif isinstance(found, list):
        found = {it.get("name"): it.get("template") for it in found if isinstance(it, dict)}
    elif not isinstance(found, dict):
        found = {DEFAULT: found}
    texts = {name: text for name in (DEFAULT, FOR_TOOLS) if isinstance(text := found.get(name), str)}
    if not texts:
        others = ", ".join(str(name) for name, text in found.items() if text)
        raise UserError(
            f"{folder} has no chat template (chat_template.jinja, or in tokenizer_config.json)"
            + (f" for all chats, but for: {others}" if others else "")
        )
    return where, texts


def open_template(texts: Templates, tokenizer: Tokenizer, *, where: object) -> ChatTemplate:
    """Return templates with the names of a tokenizer's special tokens.

    Args:
        where: place of the templates, for errors.

    Raises:
        UserError: a text is not a template, or transformers is not installed.
    """
    folder = _folder(tokenizer)
    config = read_json(folder / CONFIG) if folder else {}
    if folder and "added_tokens_decoder" not in config:  # as transformers 5
        config |= read_json(folder / "special_tokens_map.json")
    names = {key: _text(config[key]) for key in SPECIAL if config.get(key) is not None}
    return ChatTemplate(texts, where=where, names=names)


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
    return str(token.get("content", "") if isinstance(token, dict) else token)
