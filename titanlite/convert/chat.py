"""Chats: the template of a tokenizer's folder turns messages into one text, in which special tokens mark the turns."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from titanlite.data.tokenizer import Tokenizer, find_tokenizer
from titanlite.runtime.errors import UserError

Message = dict[str, str]
"""A turn: `role` (system, user or assistant) and `content`."""


class Chat:
    """Chat template of a tokenizer: chat_template.jinja, or `chat_template` of tokenizer_config.json.

    Raises:
        UserError: there is none, or jinja2 is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        path = find_tokenizer(tokenizer.name)
        if path is None or path.suffix != ".json":
            raise UserError(f"--chat: the tokenizer {tokenizer.name} has no chat template: that needs a tokenizer.json")
        self.tokenizer = tokenizer
        self.config = read_json(path.with_name("tokenizer_config.json"))
        self.where, text = _template(path.parent, self.config)
        if find_spec("jinja2") is None:
            raise UserError("--chat needs jinja2: pip install jinja2")
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _today
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise UserError(f"--chat: {self.where} is not a template: {error}") from None

    def encode(self, messages: list[Message]) -> list[int]:
        """Return the token ids of a chat, up to where the assistant's answer begins.

        Raises:
            UserError: the template refuses these messages.
        """
        import jinja2

        names = {key: _text(self.config.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **names)
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(f"--chat: {self.where} fails: {error}") from None
        from titanlite.data.tokenizers.huggingface import HuggingFaceTokenizer

        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        return self.tokenizer.encode_marked(text)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; nothing if there is no such file, or if it is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _template(folder: Path, config: dict[str, Any]) -> tuple[Path, str]:
    """Return the file of the template, and its text."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file, file.read_text(encoding="utf-8", errors="replace")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((it.get("template") for it in found if isinstance(it, dict) and it.get("name") == "default"), None)
    if not isinstance(found, str):
        raise UserError(f"--chat: {folder} has no chat template (chat_template.jinja, or in tokenizer_config.json)")
    return folder / "tokenizer_config.json", found


def _text(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja2's own escapes for HTML


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _today(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)
