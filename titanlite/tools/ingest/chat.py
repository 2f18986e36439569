"""Chats -> tokens: conversations as JSON lines of messages, rendered by a chat template. Answers count in the loss."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import Problem, UserError
from titanlite.runtime.files import read_small
from titanlite.tools.ingest.chat_template import DEFAULT, ChatTemplate, Refused, Templates, find_templates
from titanlite.tools.ingest.documents import Bad, Document, Segment, Wrong, read_values, utf8_length
from titanlite.tools.ingest.formats import TOOLS, Part

if TYPE_CHECKING:  # each process that tokenizes imports this file, and needs no config
    from titanlite.schema import Data

KEY = "data.chat_template"
FIELD = "messages"
"""Field of a JSON line with a chat, unless --text-field names another."""
SHARE_GPT = {"from": "role", "value": "content"}
ROLES = {"human": "user", "gpt": "assistant"}
"""Keys and roles of messages as ShareGPT has them."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options that the tokens of chats depend on."""

    templates: Templates
    where: str
    """Place of the templates, for errors."""


class ChatDocument(NamedTuple):
    """Tokens of one chat."""

    ids: np.ndarray
    mask: np.ndarray
    """True for tokens that count in the loss."""
    text_bytes: int


def chat_options(tokenizer: Tokenizer, *, template: Path | None) -> ChatOptions:
    """Return the options of chats.

    Args:
        template: file of a template. None: that of the tokenizer's folder.

    Raises:
        UserError: there is no template.
    """
    try:
        text = read_small(template).decode().replace("\r\n", "\n") if template else None
        texts = find_templates(tokenizer) if text is None else {DEFAULT: text}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{template or tokenizer.name} cannot be read: {error}") from None
    return ChatOptions(templates=texts, where=str(template or tokenizer.name))


def chats_of(data: "Data", tokenizer: Tokenizer) -> ChatOptions | None:
    """Return the options of chats of `[data]`; None if documents are text.

    Raises:
        UserError: there is no template.
    """
    if data.chat_template is None:
        return None
    template = None if data.chat_template == "tokenizer" else Path(data.chat_template).expanduser()
    return chat_options(tokenizer, template=template)


def template_problems(data: "Data", tokenizer: Tokenizer) -> list[Problem]:
    """Return what is wrong with the template of `[data]`, before any chat is read."""
    try:
        if chat := chats_of(data, tokenizer):
            ChatReader(chat, tokenizer)
    except UserError as error:
        return [Problem(KEY, str(error))]
    return []


class ChatReader:
    """Reads chats.

    Raises:
        UserError: the template is none, or does not mark answers.
    """

    def __init__(self, options: ChatOptions, tokenizer: Tokenizer) -> None:
        self._template = ChatTemplate(options.templates, tokenizer, where=options.where)
        if not self._template.has_marks:
            raise UserError(
                f"{options.where} does not mark answers: put {{% generation %}} and {{% endgeneration %}} around "
                "them in a copy, and name that"
            )
        self._tokenizer = tokenizer

    def read(self, part: Part, field: str) -> Iterator[ChatDocument | Document | Bad]:
        """Yield the chats of a part of a file, in order.

        A tokenizer.json has special tokens that a template names. For other tokenizers the text is plain, and yields
        documents of segments.

        Args:
            field: where the chat messages are, in lines and rows.
        """
        for place, value, line in read_values(part, field):
            try:
                yield value if isinstance(value, Bad) else self._read(_messages(value, field), _tools(line.get(TOOLS)))
            except Wrong as wrong:
                yield Bad(place, str(wrong))

    def _read(self, messages: list[dict[str, Any]], tools: Any) -> ChatDocument | Document:
        if not messages:
            return Document([], 0)
        try:
            text, spans = self._template.render(messages, tools=tools)
        except Refused as error:
            raise Wrong(str(error)) from None
        size = utf8_length(text)
        if not any(begin < end for begin, end in spans):
            raise Wrong("no token counts in the loss: there is no answer, or the template marks none")
        encode = getattr(self._tokenizer, "encode_marked", None)
        if encode is None:
            return Document([*_segments(text, spans)], size)
        encoding = encode(text)
        starts, ends = np.array(encoding.offsets).reshape(-1, 2).T
        mask = np.zeros(len(encoding.ids), dtype=np.bool_)
        for begin, end in spans:
            mask |= (starts < end) & (begin < ends)  # as in transformers 5, one shared character counts
        return ChatDocument(np.array(encoding.ids, dtype=np.uint32), mask, size)


def _messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Return the messages of a chat, with a role each."""
    value = _from_text(value, field)
    if not isinstance(value, list):
        raise Wrong(f"field {field!r} is no list of objects with role and content")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise Wrong(f"chat message {number} is not an object with role and content")
        names = SHARE_GPT if message.get("role") is None else {}
        message = {names.get(key, key): value for key, value in message.items() if value is not None}  # as transformers
        if not isinstance(role := message.get("role"), str):
            raise Wrong(f"chat message {number} has no role")
        messages.append({**message, "role": ROLES.get(role, role) if names else role})
    return messages


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a chat: a list of objects, or one object."""
    value = _from_text(value, TOOLS)
    tools = [value] if isinstance(value, dict) else value
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Wrong(f"field {TOOLS!r} is neither a list of objects nor one object, nor JSON text of that")
    return tools


def _from_text(value: Any, field: str) -> Any:
    """Return what a field holds, which many datasets write as JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise Wrong(f"field {field!r} is a text, and not JSON: {error}") from None


def _segments(text: str, spans: list[Sequence[int]]) -> Iterator[Segment]:
    """Yield the parts of a text, and whether each counts in the loss.

    Args:
        spans: begin and end, in characters, of the parts that count.
    """
    at = 0
    for begin, end in spans:
        begin, end = max(begin, at), max(end, at)  # a template may write an answer within another one
        for start, stop, counts in ((at, begin, False), (begin, end, True)):
            if start < stop:
                yield text[start:stop], counts
        at = end
    if at < len(text):
        yield text[at:], False
