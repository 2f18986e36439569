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

from titanlite.data.tokenizer import TEMPLATES, Tokenizer, find_tokenizer
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_inside, read_small
from titanlite.tools.limited import Ended, LimitedProcess

WORKER = Path(__file__).with_name("chat_render.py")
IN_A_ROW = 3
"""Chats in a row with which a template may reach a limit. The next ones would, too."""
DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names of a tokenizer's templates: for all chats, and for those with tools if there is one."""
Templates = dict[str, str]
"""Texts of templates by these names."""


class ChatTemplate:
    """The templates of a tokenizer.

    Args:
        tokenizer: the templates may name its special tokens.
        where: place of the templates, for errors.

    Raises:
        UserError: a text is not a template, or transformers is not installed.
    """

    def __init__(self, texts: Templates, tokenizer: Tokenizer, *, where: object) -> None:
        if find_spec("transformers") is None:
            raise UserError(f"chats need transformers: {install_hint('transformers')}")
        self._texts, self._names, self._where = texts, _special_tokens(tokenizer), where
        self._process: LimitedProcess | None = None
        self._failed = 0
        self.has_marks = any(re.search(r"{%[-+]?\s*generation\b", text) for text in texts.values())
        """Presence of marks around answers."""
        self._ask(DEFAULT if DEFAULT in texts else FOR_TOOLS, conversations=[])  # compiles it

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> tuple[str, list[Sequence[int]]]:
        """Return the text of a chat, and the begin and end, in characters, of the parts that the template marks.

        Args:
            messages: without keys whose value is None.
            tools: JSON schemas of functions that the assistant may call.
            add_generation_prompt: end with the beginning of the assistant's next message.

        Raises:
            Refused: the template refuses these messages, or takes too much time or memory for them.
            UserError: it has taken too much for several chats in a row.
        """
        name = FOR_TOOLS if tools is not None and FOR_TOOLS in self._texts else DEFAULT
        if name not in self._texts:
            raise Refused(f"{self._where} has no chat template {name!r}, for chats without tools")
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        found = self._ask(name, conversations=[messages], **options)
        return found["texts"][0], found["spans"][0]

    def _ask(self, name: str, **request: Any) -> dict[str, Any]:
        """Return the answer of the process, which is started if there is none."""
        try:
            self._process = self._process or LimitedProcess(WORKER, "one chat")
            answer = self._process.ask({**request, **self._names, "chat_template": self._texts[name]})
            self._failed = 0
        except Ended as error:
            self._process = None
            self._failed += 1
            answer = {"error": error}
        except RecursionError:  # the request cannot be sent
            answer = {"error": "the chat is nested too deeply"}
        if "error" in answer:
            error_class = UserError if self._failed == IN_A_ROW else Refused
            raise error_class(f"chat template {self._where} ({name}) fails: {answer['error']}")
        return answer


class Refused(UserError):
    """One chat cannot be rendered; others may be."""


# Templates of tokenizers


CONFIG = "tokenizer_config.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a template may name."""


class Chat:
    """Chat template of a tokenizer, see `find_templates`.

    Raises:
        UserError: there is none, or transformers is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(find_templates(tokenizer), tokenizer, where=tokenizer.name)

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a chat, up to where the assistant's answer begins.

        Raises:
            UserError: the template refuses these messages.
        """
        text, _ = self._template.render(messages, add_generation_prompt=True)
        from titanlite.data.tokenizers.huggingface import HuggingFaceTokenizer

        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        return self.tokenizer.encode_marked(text).ids


def find_templates(tokenizer: Tokenizer) -> Templates:
    """Return a tokenizer's chat templates, as transformers finds them.

    They are the files chat_template.jinja and additional_chat_templates/NAME.jinja, or else `chat_template` of
    tokenizer_config.json: one text, or several by name.

    Raises:
        UserError: there is none.
    """
    folder = _folder(tokenizer)
    if folder is None:
        why = "only a tokenizer.json has one. For training, name a file (--chat-template, data.chat_template)"
        raise UserError(f"the tokenizer {tokenizer.name} has no chat template: {why}")
    found = read_json(folder / CONFIG).get("chat_template")
    if isinstance(found, list):
        found = {template.get("name"): template.get("template") for template in found if isinstance(template, dict)}
    more = file_inside(folder, TEMPLATES)
    files = {DEFAULT: folder / "chat_template.jinja"} | {file.stem: file for file in more.glob("*.jinja")}
    if files := {name: file_inside(file.parent, file.name) for name, file in files.items() if file.is_file()}:
        found = {name: read_small(file).decode(errors="replace") for name, file in files.items()}
    by_name = found if isinstance(found, dict) else {DEFAULT: found}
    texts = {name: text for name in (DEFAULT, FOR_TOOLS) if isinstance(text := by_name.get(name), str)}
    if not texts:
        raise UserError(f"{folder} has no chat template {DEFAULT!r} (chat_template.jinja, or in {CONFIG})")
    return texts


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the names of special tokens in templates, and the tokens."""
    if (folder := _folder(tokenizer)) is None:
        return {}
    if (named := getattr(tokenizer, "special_tokens", None)) is not None:
        return named
    config = read_json(folder / CONFIG)
    if "added_tokens_decoder" not in config:  # as transformers 5
        config |= read_json(folder / "special_tokens_map.json")
    tokens = {key: config[key] for key in SPECIAL if config.get(key) is not None}
    return {key: str(token.get("content", "") if isinstance(token, dict) else token) for key, token in tokens.items()}


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
