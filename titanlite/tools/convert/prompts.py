"""Prompts: from the command line or from a file, as token ids with what begins and ends a document."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from titanlite.data.tokenizer import Tokenizer, find_tokenizer
from titanlite.runtime.errors import UserError
from titanlite.schema import Config
from titanlite.tools.convert.tokenizer_files import generation_beside
from titanlite.tools.ingest.chat_template import Chat


def read_prompts(prompt: str | None, file: str | None) -> Iterator[str]:
    """Yield the prompts: the given one, or those of a file, each as soon as its line is there.

    Args:
        file: one prompt a line. `-` is standard input.

    Raises:
        UserError: there is none, one is empty, or the file cannot be read.
    """
    if file is None:
        yield _checked(prompt or "", "--prompt")
        return
    found = False
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                text = line.decode().rstrip("\r\n")
                if text.strip():
                    found = True
                    yield _checked(text, f"--prompt-file: {file}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text: {error}"
        raise UserError(f"--prompt-file: {file}: {reason}") from None
    if not found:
        raise UserError(f"--prompt-file: {file} holds no prompt")


def _checked(text: str, where: str) -> str:
    if not text.strip():
        raise UserError(f"{where}: the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: the prompt is not valid UTF-8") from None
    return text


def prompt_encoder(tokenizer: Tokenizer, *, config: Config | None, chat: Chat | None) -> Callable[[str], list[int]]:
    """Return a function that turns a text into token ids to continue, as the model has met them in training.

    Args:
        config: of the run that trained the model; None for weights of another program.
        chat: template of the tokenizer, or None for plain text.
    """
    if chat is not None:
        return lambda text: chat.encode([{"role": "user", "content": text}])
    opening = opening_ids(tokenizer, config)
    return lambda text: [*opening, *tokenizer.encode(text).tolist()]


def opening_ids(tokenizer: Tokenizer, config: Config | None) -> list[int]:
    """Return the token ids that begin a document: as in training, or as the files of another program state."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    if config is not None:
        return bos if config.data.add_bos else []
    path = find_tokenizer(tokenizer.name)
    if path is None or path.suffix != ".json":
        return bos
    from titanlite.data.tokenizers.huggingface import HuggingFaceTokenizer

    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer.added_ids()[0]  # transformers 5 ignores add_bos_token next to a tokenizer.json, too


def stop_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the token ids that end a text: the tokenizer's, and those of the files beside it."""
    own = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    return own | generation_beside(tokenizer).end_ids()
