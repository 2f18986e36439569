"""Worker that renders chats, as transformers does: messages -> text, and the begin and end of each answer in it.

`limited_program` runs it by its path, within limits, and nothing else imports it.
"""

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

LONGEST = 2**25
"""Characters of the longest text of one chat."""
SHOWN = 400
"""Characters of a template's error message that are kept."""


class Worker:
    """Renders the chats of each request. transformers keeps the compiled template."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            texts, spans = render_jinja_template(**request, return_assistant_tokens_mask=True)
            if any(len(text) > LONGEST for text in texts):
                raise ValueError(f"the text of one chat has more than {LONGEST:,} characters")
            return {"texts": texts, "spans": spans}
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything, and name what a terminal takes for a command
            words = f"{type(error).__name__}: {error}"[:SHOWN]
            return {"error": " ".join("".join(char if char.isprintable() else " " for char in words).split())}
