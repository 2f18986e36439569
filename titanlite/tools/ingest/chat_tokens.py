"""Chats: the template of a tokenizer's folder turns messages into one text, in which special tokens mark the turns."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.data.tokenizer import Tokenizer, find_tokenizer
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_inside, read_small

if TYPE_CHECKING:
    from titanlite.tools.ingest.chat_template import ChatTemplate

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
        raise UserError(f"--chat: the tokenizer {tokenizer.name} has no chat template: that needs a tokenizer.json")
    return _template(folder, read_json(folder / CONFIG))


def open_template(text: str, tokenizer: Tokenizer, *, where: object) -> "ChatTemplate":
    """Return a template with the names of a tokenizer's special tokens.

    Args:
        where: place of the template, for errors.

    Raises:
        UserError: the text is not a template, or jinja2 is not installed.
    """
    if find_spec("jinja2") is None:
        raise UserError("--chat needs jinja2: pip install jinja2")
    from titanlite.tools.ingest.chat_template import ChatTemplate

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


def _template(folder: Path, config: dict[str, Any]) -> tuple[Path, str]:
    """Return the file of the template, and its text."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file, read_small(file_inside(folder, file.name)).decode(errors="replace")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((it.get("template") for it in found if isinstance(it, dict) and it.get("name") == "default"), None)
    if not isinstance(found, str):
        raise UserError(f"--chat: {folder} has no chat template (chat_template.jinja, or in tokenizer_config.json)")
    return folder / CONFIG, found


def _text(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token or "")
