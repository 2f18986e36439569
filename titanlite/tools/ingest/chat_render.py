"""Worker that renders chats, as transformers does: messages -> text, and the begin and end of each answer in it.

`limited_program` runs it by its path, within limits, and nothing else imports it.
"""

from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

SHOWN = 400
"""Characters of a template's error message that are kept."""


class Worker:
    """Renders the chats of each request. transformers keeps the compiled template."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        longest = request.pop("longest")
        try:
            texts, spans = render_jinja_template(**request, return_assistant_tokens_mask=True)
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            return {"error": _in_words(error)}
        if any(len(text) > longest for text in texts):
            return {"error": f"the text of one chat has more than {longest:,} characters"}
        return {"texts": texts, "spans": spans}


def _in_words(error: Exception) -> str:
    """Return an exception on one line, without what a terminal would take for a command."""
    text = str(error) if isinstance(error, TemplateError | TypeError) else f"{type(error).__name__}: {error}"
    return " ".join("".join(char if char.isprintable() else " " for char in text[:SHOWN]).split())
