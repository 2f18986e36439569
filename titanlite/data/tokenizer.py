"""Text <-> token ids: plain bytes, or a tiktoken rank file such as Llama 3's tokenizer.model."""

import base64
import binascii
import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from titanlite.errors import UserError

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = 256


class Tokenizer(Protocol):
    vocab_size: int
    bos_id: int
    eos_id: int
    fingerprint: str
    """Equal for tokenizers that give equal ids; stored with the tokens and checked when they are read."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, without the beginning and end of a document."""
        ...

    def decode(self, ids: np.ndarray) -> str: ...


class ByteTokenizer:
    """One token for each byte of UTF-8, and two for the beginning and end of a document."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class TiktokenTokenizer:
    """A file of `base64 rank` lines, split and with special tokens as Llama 3 has them: the two that begin and end a
    document come first after the ranks.

    Raises:
        UserError: the file is not of this form.
    """

    # tiktoken's splitter slows down, and can overflow its stack, on very long texts.
    max_chars = 400_000

    def __init__(self, path: Path) -> None:
        import tiktoken

        try:
            text = path.read_bytes()
            ranks = {
                base64.b64decode(token, validate=True): int(rank) for token, rank in map(bytes.split, text.splitlines())
            }
        except (OSError, ValueError, binascii.Error) as error:
            raise UserError(f"data.tokenizer: {path} is not a tiktoken rank file: {error}") from None
        if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
            raise UserError(f"data.tokenizer: {path} is not a tiktoken rank file: its ranks are not 0, 1, 2, ...")
        self.bos_id = len(ranks)
        self.eos_id = len(ranks) + 1
        self.vocab_size = len(ranks) + LLAMA3_SPECIAL_TOKENS
        self.fingerprint = f"tiktoken-llama3-{hashlib.sha256(text).hexdigest()[:16]}"
        special = {"<|begin_of_text|>": self.bos_id, "<|end_of_text|>": self.eos_id}
        special |= {f"<|special_{i}|>": len(ranks) + i for i in range(2, LLAMA3_SPECIAL_TOKENS)}
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str) -> np.ndarray:
        pieces = [text[i : i + self.max_chars] for i in range(0, len(text), self.max_chars)]
        ids = [np.array(self._encoding.encode_ordinary(piece), dtype=np.uint32) for piece in pieces]
        return np.concatenate(ids) if ids else np.empty(0, dtype=np.uint32)

    def decode(self, ids: np.ndarray) -> str:
        return self._encoding.decode(np.asarray(ids).tolist())


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of `[data] tokenizer`: the word bytes, or the path of a rank file."""
    return ByteTokenizer() if name == "bytes" else TiktokenTokenizer(Path(name).expanduser())
