"""Chat templates of Hugging Face: messages -> one text, and which parts of it are answers.

A template comes with a tokenizer of others. So a process of its own renders it, `chat_render`, with limits on its time
and its memory. One process renders many chats; after a chat that ends it, another one renders the rest.
"""

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.runtime.errors import UserError

PROGRAM = Path(__file__).with_name("chat_render.py")
OUT_OF_MEMORY = 3
"""Exit code of the program that has reached its limit of memory."""
SECONDS = 3.0
"""Processor time that a template may take for one chat."""
IN_A_ROW = 3
"""Chats in a row with which a template may reach a limit. The next ones would, too."""
WAIT = 120.0
"""Seconds that a process may take beside the processor time of its chats."""
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
        self._template = {"template": text, "names": dict(names)}
        self._failed = 0
        [answer], _ = self._run([])
        self.has_marks: bool = self._checked(answer)["has_marks"]
        """Presence of marks around answers."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> Rendered:
        """Return the text of a chat, and the parts that the template marks.

        Args:
            tools: JSON schemas of functions that the assistant may call.
            add_generation_prompt: end with the beginning of the assistant's next message.

        Raises:
            UserError: the template refuses these messages, or takes too much time or memory for them.
        """
        [found] = self.render_all([(messages, tools)], add_generation_prompt=add_generation_prompt)
        if isinstance(found, UserError):
            raise found
        return found

    def render_all(
        self, chats: Sequence[tuple[Sequence[Mapping[str, Any]], Any]], *, add_generation_prompt: bool = False
    ) -> list[Rendered | UserError]:
        """Return the texts of chats, (messages, tools) each, or the errors; see `render`.

        Raises:
            UserError: the template has reached a limit with several chats in a row.
        """
        same = {"documents": None, "add_generation_prompt": add_generation_prompt}
        requests = [{"messages": messages, "tools": tools, **same} for messages, tools in chats]
        return [self._rendered(answer) for answer in self._answers(requests)]

    def _answers(self, chats: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the answers to chats."""
        answers: list[dict[str, Any]] = []
        while len(answers) < len(chats):
            rest = chats[len(answers) :]
            (begun, *found), is_whole = self._run(rest)
            if "error" in begun:
                return [*answers, *[begun] * len(rest)]
            answers += found
            self._failed = 0 if is_whole else self._failed + 1 if len(found) == 1 else 1
            if self._failed == IN_A_ROW:
                self._checked(answers[-1])
        return answers

    def _rendered(self, answer: dict[str, Any]) -> Rendered | UserError:
        try:
            found = self._checked(answer)
        except UserError as error:
            return error
        return found["text"], [(begin, end) for begin, end in found["spans"]]

    def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "error" in answer:
            raise UserError(f"--chat: {self.where} {answer['error']}")
        return answer

    def _run(self, chats: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
        """Return the answers of one process, and whether it has answered all.

        The first is about the template, the others about the chats. If the process has ended early, the last one has
        the reason.
        """
        seconds, memory, _ = self._limits
        request = pickle.dumps({**self._template, "chats": chats})
        words = [sys.executable, "-P", PROGRAM, *self._limits]
        try:
            done = subprocess.run(
                [*map(str, words)],
                input=request,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for this process
                timeout=WAIT + seconds * (1 + len(chats)),
                check=False,
            )
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            output, code = error.stdout or b"", None
        answers = [json.loads(line) for line in output.split(b"\n")[:-1]]
        if code == 0:
            return answers, True
        if code is None:
            reason = f"the process that renders it has not ended after {WAIT:g} s"
        elif code == OUT_OF_MEMORY:
            reason = f"it takes more than {memory / 2**20:,.0f} MiB for one chat"
        elif code == -signal.SIGPROF:
            reason = f"it takes more than {seconds:g} s of processor time for one chat"
        else:
            reason = f"the process that renders it has ended (exit code {code})"
        return [*answers, {"error": f"fails: {reason}"}], False
